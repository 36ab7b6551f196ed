"""An exported graph as a block: symbolic shapes, our own node facts, tied parameters under their own names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ..errors import TraceError
from ..ir.build import DOUBLED, derives_gradient, is_continuous
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
    op_name,
    set_info,
    update_info,
)
from ..ir.identifiers import identifier
from .float_sizes import float_of_sizes
from .inline import inline_regions
from .inplace import Memory, mutates, written
from .input_sizes import LONGEST, InputSizes
from .loss_shapes import correct_shape
from .signature import keywords, loss_of
from .sizes import check_known, symbol_names
from .source import excerpt, module_path, place, source_line

# Where the trace ran and how it laid out constants: the emitter writes the block's own device.
_BAKED = ("device", "pin_memory", "layout")
_STATISTICS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}


class Importer:
    """Copies an exported graph into a block, with symbolic shapes and a NodeInfo on each node."""

    def __init__(
        self,
        model: nn.Module,
        exported: ExportedProgram,
        sizes: InputSizes,
        batch_norm: str = "refuse",
    ) -> None:
        self.model, self.exported, self.sizes = model, exported, sizes
        self.dtype, self.batch_norm = sizes.dtype, batch_norm
        self.graph = fx.Graph()
        self.memory = Memory(self.graph, self._build)
        self.symbols = symbol_names(exported, sizes)
        self.aliases = _aliases(model)
        self.buffers: dict[str, TensorInfo] = {}
        self.placed: dict[str, fx.Node] = {}  # parameter name → its placeholder
        self.counters: set[fx.Node] = set()  # of batches, counted up
        self.mutated: dict[str, None] = {}  # buffers that forward updates

    def program(self) -> Program:
        signature = self.exported.graph_signature
        inline_regions(self.exported.graph_module)
        self.keywords = keywords(self.exported)
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self.memory.define(node, self._placeholder(node, signature))
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
        self._separate_ties()
        self._drop_unused()
        parameters = self._parameters()
        inputs = {
            name: TensorInfo(self._shape(value.shape, self.sizes.dims[name]), value.dtype)
            for name, value in self.sizes.example().items()
            if isinstance(value, torch.Tensor)
        }
        return Program(
            name=identifier(type(self.model).__name__, "Model"),
            blocks={MODEL: Block(MODEL, self.graph)},
            calls=(Call(MODEL, ""),),
            parameters=parameters,
            buffers=self.buffers,
            inputs=inputs,
            tied={a: o for a, o in self.aliases.items() if a != o},
            sequence_range=self._sequence_range(),
            sequence_multiple=self._sequence_multiple(),
            mutated=tuple(self.mutated),
            persistent=self._persistent(),
        )

    def _sequence_multiple(self) -> int:
        """What the length must be a multiple of."""
        return math.lcm(*(int(1 / part.coeff(S)) for part in self.symbols.values() if S in part.free_symbols))

    def _sequence_range(self) -> tuple[int, int]:
        for symbol, bounds in self.exported.range_constraints.items():
            if S in (part := self.symbols.get(symbol, B)).free_symbols:
                times = int(1 / part.coeff(S))
                return max(2, int(bounds.lower) * times), int(min(bounds.upper * times, LONGEST))
        return 1, LONGEST

    def _expr(self, size: Any) -> sympy.Expr:
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
        return expr.subs(self.symbols)

    def _shape(self, shape: Any, dims: Mapping[int, sympy.Expr] | None = None) -> tuple[sympy.Expr, ...]:
        return tuple(dims[i] if dims and i in dims else self._expr(n) for i, n in enumerate(shape))

    def _facts(self, node: fx.Node, value: Any = None, **more: Any) -> NodeInfo:
        value = node.meta["val"] if value is None else value
        return NodeInfo(
            self._shape(value.shape), self._dtype(value.dtype), module=module_path(node),
            source=source_line(node.stack_trace), **more,
        )  # fmt: skip

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In fp64 programs the author's float32 is float64: parity to 1e-9 would end at the first upcast."""
        return DOUBLED.get(dtype, dtype) if self.dtype == torch.float64 else dtype

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
            role, ref, grad = Role.INPUT, self.keywords[node.name], False
        else:
            return node.meta.get("val")  # a plain Python argument, fixed by the trace
        new = self.graph.placeholder(node.name)
        set_info(new, self._facts(node, role=role, ref=ref, requires_grad=grad))
        if role is Role.PARAMETER:
            self.placed[ref] = new
        return new

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        check_known(node)
        if isinstance(value, torch.SymInt | torch.SymFloat | int | float):
            whole = isinstance(value, torch.SymInt | int)
            self.memory.define(node, self._expr(value) if whole else float_of_sizes(node, self.symbols))
            return
        if value is None and mutates(node):
            raise TraceError(f"{op_name(node)}{place(node)} returns no tensor: write it out of place{excerpt(node)}")
        if value is None or isinstance(value, torch.SymBool) or (isinstance(value, list | tuple) and not value):
            return  # an assertion on sizes, which `check_sizes` looks at, or no op
        if not mutates(node):
            self.memory.define(node, self._build(node))
        elif not self._is_statistic(node):
            self._write(node)

    def _build(self, node: fx.Node) -> fx.Node:
        """An exported op as one of ours."""
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):  # no public name; torch.cond is one
            raise TraceError(
                f"{target.__name__}{place(node)} has branches of its own: use torch.where there{excerpt(node)}"
            )
        if target in _STATISTICS:
            self._running_statistics(node)
        new = self.graph.call_function(target, *self._operands(node))
        value = node.meta["val"]
        # An op of several outputs (split) carries the facts of its first until `decompose` removes it.
        several = [] if isinstance(value, torch.Tensor) else [v for v in value if is_continuous(v.dtype)]
        first = value if isinstance(value, torch.Tensor) else (*several, *value)[0]
        set_info(new, self._facts(node, first))
        update_info(new, requires_grad=is_continuous(first.dtype) and derives_gradient(new))
        correct_shape(new)
        return new

    def _operands(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = {k: self._mapped(v) for k, v in node.kwargs.items() if k not in _BAKED}
        return self._mapped(tuple(node.args)), kwargs

    def _is_statistic(self, node: fx.Node) -> bool:
        """Whether the in-place op counts the batches of a batch norm; recorded then."""
        counter = arguments(node)[0]
        if isinstance(counter, fx.Node) and counter in self.counters:
            raise TraceError(f"a batch norm is used twice in one forward{place(node)}: give each use a norm of its own")
        counted = isinstance(counter, fx.Node) and counter.op == "placeholder" and op_name(node) == "add_"
        facts = info(self.memory.read(counter)) if counted else None
        if facts is None or facts.role is not Role.BUFFER or not facts.ref.endswith("num_batches_tracked"):
            return False
        self._update(node, facts.ref)
        self.counters.add(node)
        return True

    def _running_statistics(self, node: fx.Node) -> None:
        """Record the running mean and variance that a norm of batches updates."""
        mean, variance, training = arguments(node)[3:6]
        if training:
            for statistic in (mean, variance):
                if isinstance(statistic, fx.Node):
                    self._update_once(node, info(self.memory.read(statistic)).ref)

    def _update_once(self, node: fx.Node, buffer: str) -> None:
        """The emitted batch norm updates statistics after the step, by those of its one use in it."""
        if node.target is not torch.ops.aten.batch_norm.default:
            raise TraceError(
                f"an instance norm with running statistics{place(node)} is not supported: use "
                "track_running_stats=False there, or a group norm"
            )
        if buffer in self.mutated:
            raise TraceError(f"{buffer} is updated twice in one forward{place(node)}: give each use a norm of its own")
        self._update(node, buffer)

    def _update(self, node: fx.Node, buffer: str) -> None:
        if self.batch_norm != "synchronise":
            raise TraceError(
                f"forward changes the buffer {buffer}{place(node)}: micro-batches and recompute would change it "
                "several times a step, and each GPU sees other samples. Use group or layer norm, or parallelize(…, "
                f"batch_norm='synchronise'): statistics of the micro-batch on all GPUs{excerpt(node)}"
            )
        self.mutated[buffer] = None

    def _write(self, node: fx.Node) -> None:
        """An in-place op as the new value of what it writes to."""
        self.memory.check(node)
        before = set(self.graph.nodes)
        self.memory.write(node, written(self.graph, node, *self._operands(node), self._dtype))
        facts = self._facts(node)
        for new in set(self.graph.nodes) - before:
            update_info(new, module=facts.module, source=facts.source)

    def _mapped(self, argument: Any) -> Any:
        """An argument of the exported graph as ours: nodes, sizes and dtypes translated."""
        if isinstance(argument, fx.Node):
            return self.memory.read(argument)
        if isinstance(argument, tuple):
            return tuple(self._mapped(a) for a in argument)
        if isinstance(argument, list):
            return [self._mapped(a) for a in argument]
        return self._dtype(argument) if isinstance(argument, torch.dtype) else argument

    def _output(self, node: fx.Node) -> None:
        loss = loss_of(self.exported, list(arguments(node)[0]), self.model)
        self.graph.output((self.memory.read(loss),))

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

    def _persistent(self) -> dict[str, TensorInfo]:
        """The buffers of the model's state_dict, read by the loss or not."""
        saved = self.model.state_dict(keep_vars=True)
        buffers = {name: tensor for name, tensor in self.model.named_buffers(remove_duplicate=False) if name in saved}
        return {
            name: TensorInfo(self._shape(tensor.shape), self._dtype(tensor.dtype)) for name, tensor in buffers.items()
        }

    def _parameters(self) -> dict[str, TensorInfo]:
        """Every parameter of the model by each of its names, used by the loss or not."""
        found = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            found[name] = TensorInfo(self._shape(parameter.shape), parameter.dtype, parameter.requires_grad)
        return found


def _aliases(model: nn.Module) -> dict[str, str]:
    """Each parameter name → the first name of the same tensor (itself where not tied)."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _module(node: fx.Node) -> str:
    facts: NodeInfo | None = node.meta.get("autopar")
    return facts.module if facts else ""
