"""An exported graph as a block: symbolic shapes, our own node facts, tied parameters under their own names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from ..errors import TraceError
from ..ir.build import derives_gradient
from ..ir.graph import (
    MODEL,
    B,
    Block,
    Call,
    NodeInfo,
    Program,
    Role,
    S,
    TensorInfo,
    arguments,
    info,
    set_info,
    update_info,
)
from .inplace import functional, mutates

_MAX_SEQUENCE = 1 << 20
# Frames of torch and of ours are not the user's source.
NOT_THE_USERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
# Where the trace ran and how it laid out constants: the emitter writes the block's own device.
_BAKED = ("device", "pin_memory", "layout")


class Importer:
    """Copies an exported graph into a block, with symbolic shapes and a NodeInfo on each node."""

    def __init__(
        self,
        model: nn.Module,
        exported: Any,
        example: dict[str, Any],
        dims: dict[str, dict[int, str]],
        dtype: torch.dtype,
    ) -> None:
        self.model, self.exported, self.example, self.dims = model, exported, example, dims
        self.dtype = dtype
        self.graph = fx.Graph()
        self.mapping: dict[fx.Node, Any] = {}
        self.symbols: dict[sympy.Symbol, sympy.Expr] = {}
        self.aliases = _aliases(model)
        self.buffers: dict[str, TensorInfo] = {}
        self.placed: dict[str, fx.Node] = {}  # parameter name → its placeholder

    def program(self) -> Program:
        signature = self.exported.graph_signature
        if changed := sorted(signature.buffers_to_mutate.values()):
            raise TraceError(
                f"forward changes the buffers {', '.join(changed[:3])}: micro-batches and recompute would change them "
                "several times a step. Keep such state outside forward (batch norm: use group or layer norm)"
            )
        self._learn_symbols()
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self.mapping[node] = self._placeholder(node, signature)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node, signature)
        self._separate_ties()
        self._drop_unused()
        parameters = self._parameters()
        inputs = {
            name: TensorInfo(self._shape(value.shape, self.dims[name]), value.dtype)
            for name, value in self.example.items()
            if isinstance(value, torch.Tensor)
        }
        return Program(
            name=type(self.model).__name__,
            blocks={MODEL: Block(MODEL, self.graph)},
            calls=(Call(MODEL, ""),),
            parameters=parameters,
            buffers=self.buffers,
            inputs=inputs,
            tied={a: o for a, o in self.aliases.items() if a != o},
            sequence_range=self._sequence_range(),
        )

    def _learn_symbols(self) -> None:
        for node in self.exported.graph.nodes:
            if node.op == "placeholder" and node.name in self.dims:
                for dim, kind in self.dims[node.name].items():
                    expr = node.meta["val"].shape[dim]
                    if isinstance(expr, torch.SymInt):
                        self.symbols[expr.node.expr] = B if kind == "b" else S

    def _sequence_range(self) -> tuple[int, int]:
        for symbol, bounds in self.exported.range_constraints.items():
            if self.symbols.get(symbol) == S:
                return int(bounds.lower), int(bounds.upper)
        return 1, _MAX_SEQUENCE

    def _expr(self, size: Any) -> sympy.Expr:
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
        return expr.subs(self.symbols)

    def _shape(self, shape: Any, dims: dict[int, str] | None = None) -> tuple[sympy.Expr, ...]:
        named = {"b": B, "s": S}
        return tuple(named[dims[i]] if dims and i in dims else self._expr(n) for i, n in enumerate(shape))

    def _facts(self, node: fx.Node, value: Any = None, **more: Any) -> NodeInfo:
        value = node.meta["val"] if value is None else value
        stack = node.meta.get("nn_module_stack") or {}
        paths = [str(path) for path, _ in stack.values()]
        module = re.sub(r"@\d+", "", paths[-1]) if paths else ""
        return NodeInfo(
            self._shape(value.shape), self._dtype(value.dtype), module=module, source=_source(node.stack_trace), **more
        )

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In fp64 programs the author's float32 is float64: parity to 1e-9 would end at the first upcast."""
        return torch.float64 if self.dtype == torch.float64 and dtype == torch.float32 else dtype

    def _placeholder(self, node: fx.Node, signature: Any) -> Any:
        constants = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        if name := signature.inputs_to_parameters.get(node.name):
            original = self.aliases[name]
            role, ref, grad = Role.PARAMETER, original, self.model.get_parameter(original).requires_grad
            if original in self.placed:
                return self.placed[original]
        elif name := constants.get(node.name):
            role, ref, grad = Role.BUFFER, name, False
            self.buffers[name] = TensorInfo(self._shape(node.meta["val"].shape), self._dtype(node.meta["val"].dtype))
        elif isinstance(node.meta.get("val"), torch.Tensor):
            role, ref, grad = Role.INPUT, node.name, False
        else:
            return node.meta.get("val")  # a plain Python argument, fixed by the trace
        new = self.graph.placeholder(node.name)
        set_info(new, self._facts(node, role=role, ref=ref, requires_grad=grad))
        if role is Role.PARAMETER:
            self.placed[ref] = new
        return new

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int):
            self.mapping[node] = self._expr(value)
            return
        if value is None or isinstance(value, torch.SymBool) or (isinstance(value, list | tuple) and not value):
            return  # an assertion
        target: Any = node.target
        if mutates(node):
            target = functional(node, _source(node.stack_trace))
        args = self._mapped(tuple(node.args))
        kwargs = {k: self._mapped(v) for k, v in node.kwargs.items() if k not in _BAKED}
        new = self.graph.call_function(target, args, kwargs)
        self.mapping[node] = new
        if mutates(node):
            self.mapping[arguments(node)[0]] = new  # later readers see what was written
        # An op of several outputs (split) carries the facts of its first until `decompose` removes it.
        first = value if isinstance(value, torch.Tensor) else value[0]
        set_info(new, self._facts(node, first))
        update_info(new, requires_grad=first.is_floating_point() and derives_gradient(new))

    def _mapped(self, argument: Any) -> Any:
        """An argument of the exported graph as ours: nodes, sizes and dtypes translated."""
        if isinstance(argument, fx.Node):
            return self.mapping[argument]
        if isinstance(argument, tuple):
            return tuple(self._mapped(a) for a in argument)
        if isinstance(argument, list):
            return [self._mapped(a) for a in argument]
        return self._dtype(argument) if isinstance(argument, torch.dtype) else argument

    def _output(self, node: fx.Node, signature: Any) -> None:
        mutated = set(signature.buffers_to_mutate)
        results = [n for n in arguments(node)[0] if isinstance(n, fx.Node) and n.name not in mutated]
        if not results or tuple(results[0].meta["val"].shape) != ():
            shape = tuple(results[0].meta["val"].shape) if results else "nothing"
            raise TraceError(
                f"{type(self.model).__name__}.forward must return the loss first (a 0-dim tensor), not {shape}: "
                "pass labels in inputs, or loss=a callable (outputs, batch) -> scalar"
            )
        self.graph.output((self.mapping[results[0]],))

    def _separate_ties(self) -> None:
        """Give each use of a tied parameter the alias of the module that uses it, so that names read right."""
        for alias, original in self.aliases.items():
            if alias == original or original not in self.placed:
                continue
            source = self.placed[original]
            users = [u for u in source.users if _module(u) == alias.rpartition(".")[0]]
            if not users:
                continue
            with self.graph.inserting_after(source):
                new = self.graph.placeholder(alias.replace(".", "_"))
            facts = info(source)
            set_info(new, NodeInfo(facts.shape, facts.dtype, facts.requires_grad, Role.PARAMETER, alias))
            for user in users:
                user.replace_input_with(source, new)

    def _drop_unused(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users:
                self.graph.erase_node(node)

    def _parameters(self) -> dict[str, TensorInfo]:
        """Every parameter of the model by each of its names, used by the loss or not."""
        found = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            shape = tuple(sympy.Integer(n) for n in parameter.shape)
            found[name] = TensorInfo(shape, parameter.dtype, parameter.requires_grad)
        return found


def _aliases(model: nn.Module) -> dict[str, str]:
    """Each parameter name → the first name of the same tensor (itself where not tied)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _module(node: fx.Node) -> str:
    facts: NodeInfo | None = node.meta.get("autopar")
    return facts.module if facts else ""


def _source(stack_trace: str | None) -> str:
    """The innermost user line of a recorded stack trace, as file:line."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace or "")
    own = [f for f in frames if not f[0].startswith(NOT_THE_USERS)] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
