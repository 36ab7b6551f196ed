"""nn.Module → Program: torch.export on the meta device, then our own node facts.

The trace is the training IR before decomposition, with batch and sequence as symbols (DESIGN §3).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import Dim

from ..errors import TraceError
from ..ir.build import derives_gradient
from ..ir.graph import MODEL, B, Block, Call, NodeInfo, Program, Role, S, TensorInfo, info, set_info, update_info

aten = torch.ops.aten
_MAX_SEQUENCE = 1 << 20


def trace(model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype) -> Program:
    """Trace `model(**inputs)`, whose result is or begins with the loss, into a program of one block.

    `inputs` are example keyword inputs, batch on dim 0; integer inputs of two dims (ids, labels) fix
    the sequence length. Values are never read: weights may be on meta. `dtype` is the compute dtype.
    Raises TraceError where the model branches on values or depends on ambient autocast.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise TraceError(
            "tracing under torch.autocast would lose its casts: call parallelize outside it and choose precision="
        )
    shadow = _meta_copy(model, dtype)
    example, dims = _example(inputs)
    exported = _export(shadow, example, dims)
    return _Importer(model, exported, example, dims, dtype).program()


def _meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with meta tensors: parameters in `dtype`, buffers in their own (RoPE tables stay fp32)."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        target = dtype if parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, device="meta", dtype=target), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        target = torch.float64 if dtype == torch.float64 and buffer.is_floating_point() else buffer.dtype
        memo[id(buffer)] = torch.empty(buffer.shape, device="meta", dtype=target)
    return copy.deepcopy(model, memo).train()


def _example(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[int, str]]]:
    """Meta inputs and, for each, which dims are batch ("b") and sequence ("s")."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise TraceError("no example inputs: pass inputs={'input_ids': …, 'labels': …} (labels included)")
    ids = [v for v in tensors.values() if v.dim() == 2 and not v.is_floating_point()]
    sequence = max((v.shape[1] for v in ids), default=0)
    batch = next(size for size in (4, 3, 5) if size != sequence)
    example: dict[str, Any] = dict(inputs)
    dims: dict[str, dict[int, str]] = {}
    for name, tensor in tensors.items():
        dims[name] = {0: "b"} if tensor.dim() else {}
        if tensor.dim() > 1 and tensor.shape[1] == sequence and sequence > 1:
            dims[name][1] = "s"
        shape = (batch, *tensor.shape[1:]) if tensor.dim() else ()
        example[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return example, dims


def _export(
    model: nn.Module, example: dict[str, Any], dims: dict[str, dict[int, str]]
) -> torch.export.ExportedProgram:
    """Export with named dynamic dims, narrowing the sequence range to what the model allows."""
    low, high = 2, _MAX_SEQUENCE
    for _ in range(3):
        symbols = {"b": Dim("b", min=1), "s": Dim("s", min=low, max=high)}
        shapes = {
            name: {d: symbols[kind] for d, kind in dims[name].items()} if name in dims else None
            for name in example
        }
        try:
            return torch.export.export(model, (), example, strict=False, dynamic_shapes=shapes)
        except torch._dynamo.exc.UserError as error:  # private path, public class: the only error export documents
            fix = re.search(r"s = Dim\('s'(?:, min=(\d+))?(?:, max=(\d+))?\)", str(error))
            if not fix:
                raise TraceError(_explain(error)) from error
            low, high = int(fix[1] or low), int(fix[2] or high)
        except Exception as error:  # noqa: BLE001 - whatever the user's forward raised, told with its place
            raise TraceError(_explain(error)) from error
    raise TraceError(f"no range of sequence lengths could be found for the model (last tried {low}…{high})")


def _explain(error: Exception) -> str:
    """One message with the user's own line, and the way out."""
    text = str(error).strip().split("\n\n")[0]
    frame = _user_frame(error)
    hint = ""
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        hint = "; a branch on tensor values cannot be traced: use torch.where or torch.cond there"
    elif "specializ" in str(error) or "Constraints violated" in str(error):
        hint = "; the model fixes its batch or sequence size there: derive it from the input's shape"
    return f"tracing failed{frame}: {type(error).__name__}: {text}{hint}"


def _user_frame(error: BaseException) -> str:
    """The innermost frame of the traceback that is neither torch's nor ours."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if "/torch/" not in name and "/autopar/" not in name and not name.startswith("<"):
            place = f" at {name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


class _Importer:
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
        if name := signature.inputs_to_parameters.get(node.name):
            original = self.aliases[name]
            role, ref, grad = Role.PARAMETER, original, self.model.get_parameter(original).requires_grad
            if original in self.placed:
                return self.placed[original]
        elif name := signature.inputs_to_buffers.get(node.name):
            role, ref, grad = Role.BUFFER, name, False
            self.buffers[name] = TensorInfo(self._shape(node.meta["val"].shape), self._dtype(node.meta["val"].dtype))
        elif name := signature.inputs_to_lifted_tensor_constants.get(node.name):
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
        if value is None or (isinstance(value, list | tuple) and not value):
            return  # an assertion
        args = fx.map_arg(node.args, lambda n: _Hole(self.mapping[n]))
        kwargs = fx.map_arg(
            {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")},
            lambda n: _Hole(self.mapping[n]),
        )
        args, kwargs = self._fill(args), self._fill(kwargs)
        new = self.graph.call_function(node.target, args, kwargs)
        self.mapping[node] = new
        # An op of several outputs (split) carries the facts of its first until `decompose` removes it.
        first = value if isinstance(value, torch.Tensor) else value[0]
        set_info(new, self._facts(node, first))
        update_info(new, requires_grad=first.is_floating_point() and derives_gradient(new))

    def _fill(self, argument: Any) -> Any:
        if isinstance(argument, _Hole):
            return argument.value
        if isinstance(argument, tuple):
            return tuple(self._fill(a) for a in argument)
        if isinstance(argument, list):
            return [self._fill(a) for a in argument]
        if isinstance(argument, dict):
            return {key: self._fill(value) for key, value in argument.items()}
        return self._dtype(argument) if isinstance(argument, torch.dtype) else argument

    def _output(self, node: fx.Node, signature: Any) -> None:
        mutated = set(signature.buffers_to_mutate)
        results = [n for n in node.args[0] if isinstance(n, fx.Node) and n.name not in mutated]
        if not results or tuple(results[0].meta["val"].shape) != ():
            shape = tuple(results[0].meta["val"].shape) if results else "nothing"
            raise TraceError(
                f"{type(self.model).__name__}.forward must return the loss first (a 0-dim tensor), but returns {shape}: "
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


class _Hole:
    """Carries a mapped argument through fx.map_arg, which only accepts its own argument types."""

    def __init__(self, value: Any) -> None:
        self.value = value


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
    own = [f for f in frames if "/torch/" not in f[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""
