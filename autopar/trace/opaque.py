"""Submodules that cannot be traced are kept whole: each is one op, and its Python runs as it is.

Where export fails inside a submodule, the submodules of the same place in all layers are replaced by the op
`autopar::opaque` and the model is traced again. What torch would trace wrongly without a word is such a failure too:
sizes that depend on values. A custom autograd.Function, whose backward export does not record, is kept whole itself,
wherever it is called; the submodule around it only where it cannot be tried out alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..errors import TraceError
from ..ir.build import replace_node
from ..ir.custom import OPAQUE, OpaqueCall, Results, opaque_results
from ..ir.graph import MODEL, Program, arguments, info, node_inputs
from ..runtime.internals import tree_flatten
from ..runtime.opaque import Applied, OpaqueModule
from .checks import Checks
from .copies import copied
from .guards import custom_functions, quiet, refuse_recurrent
from .input_sizes import InputSizes
from .lists import layer_path
from .moe import written_experts
from .refusals import InsideError
from .repeats import structure
from .source import excerpt, module_path, place
from .trial import RefusedError, Returned, Taken, Trial

_BACKWARD = "a custom torch.autograd.Function, whose backward a trace does not have"
_MOST = 20  # kinds of submodule that one model may need


class _UnknownError(TraceError):
    """A module that is kept whole is called in a way that has not been tried out: to be caught, not shown."""

    def __init__(self, path: str, module: nn.Module, key: Any) -> None:
        super().__init__(path)
        self.path, self.module, self.key = path, module, key


@dataclass
class _Call:
    """A module as it is called: what is the same wherever it has this name."""

    name: str
    key: Any
    trial: Trial
    returned: list[Returned]


@dataclass
class Opaque:
    """The submodules of `shadow` (the model on meta, to be traced) that are kept whole."""

    model: nn.Module
    shadow: nn.Module
    dtype: torch.dtype
    patterns: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)  # of a pattern: why it is kept whole
    calls: list[_Call] = field(default_factory=list)
    results: dict[str, Results] = field(default_factory=dict)
    checks: Checks = field(default_factory=Checks)

    def export(self, run: Callable[[], tuple[ExportedProgram, InputSizes]]) -> tuple[ExportedProgram, InputSizes]:
        """What `run` exports, once every submodule that it fails in is kept whole."""
        refuse_recurrent(self.shadow)
        try:
            return self._export(run)
        finally:
            self.checks.restore()

    def _export(self, run: Callable[[], tuple[ExportedProgram, InputSizes]]) -> tuple[ExportedProgram, InputSizes]:
        why: TraceError | None = None  # the first submodule cannot be traced
        for _ in range(_MOST):
            try:
                with custom_functions(self._apply), opaque_results(self.results), quiet():
                    exported, sizes = run()
                _check_sizes(exported)
                return exported, sizes
            except _UnknownError as call:
                try:
                    self._try_out(call)
                except TraceError as error:
                    raise TraceError(f"{error}. {why}" if why else str(error)) from error
            except TraceError as error:
                if self.checks.leave_out(error):
                    continue
                why = why or error
                path = self._failed_in(error)
                if path is None or not self._enclose(path):
                    raise
                self.reasons[_pattern(path)] = str(error)
        raise TraceError(f"more than {_MOST} kinds of submodule of {type(self.model).__name__} cannot be traced")

    # which submodules

    def _failed_in(self, error: BaseException) -> str | None:
        """The path of the innermost submodule that an error rose in; the one around it where that is kept already."""
        path = error.path if isinstance(error, InsideError) else self._innermost(error)
        while path and _pattern(path) in self.patterns:
            path = path.rpartition(".")[0]
        return path if path and self._may_be_kept(path) else None

    def _innermost(self, error: BaseException) -> str:
        # Where modules are shared, export runs proxies of all of them, which have the attributes of the originals.
        names = {id(vars(module)): name for name, module in self.shadow.named_modules()}
        path, traceback = "", (error.__cause__ or error).__traceback__
        while traceback is not None:
            owner = traceback.tb_frame.f_locals.get("self")
            path = names.get(id(getattr(owner, "__dict__", None)), path)
            traceback = traceback.tb_next
        return path

    def _may_be_kept(self, path: str) -> bool:
        """A layer, or what has no layers in it; and no recurrent module, which reads weights by a list of its own."""
        inside = list(self.shadow.get_submodule(path).modules())
        if any(isinstance(m, nn.RNNBase) for m in inside):
            return False
        return layer_path(path) is not None or not any(isinstance(m, nn.ModuleList) and _repeats(m) for m in inside)

    def _enclose(self, path: str) -> bool:
        """Let the modules of one place in all layers stand for themselves; whether there was one more."""
        pattern, kind = _pattern(path), type(self.shadow.get_submodule(path))
        found = [(n, m) for n, m in self.shadow.named_modules() if _pattern(n) == pattern and type(m) is kind]
        for name, module in found:
            module.forward = self._stand_in(name, module)
        self.patterns.add(pattern)
        return bool(found)

    # in their place

    def _stand_in(self, path: str, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            original = dict(self.model.named_modules(remove_duplicate=False))[path]  # attributes are proxies in export
            return self._replaced(path, original, [*module.parameters(), *module.buffers()], args, kwargs)

        return forward

    def _apply(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for a call of a custom autograd.Function."""
        return self._replaced(function.__name__, Applied(function), [], args, kwargs)

    def _replaced(
        self, path: str, module: nn.Module, own: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = self._call(path, module, leaves, form)
        results = OPAQUE([*tensors, *own], call.name, len(tensors), False, 0)
        cut = [x.is_floating_point() and not r.requires_grad for x, r in zip(results, call.returned, strict=True)]
        return call.trial.like_result([x.detach() if c else x for x, c in zip(results, cut, strict=True)])

    def _call(self, path: str, module: nn.Module, leaves: Sequence[Any], form: Any) -> _Call:
        """What is known of a call; _UnknownError where no equal one has been tried out."""
        given = [_taken(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if any(isinstance(leaf, torch.SymInt) for leaf in leaves):
            raise TraceError(f"{path} cannot be traced, and is called with a size: pass it tensors only")
        key = (structure(module), tuple(given), form)
        for call in self.calls:
            if _equal(call.key, key):
                return call
        raise _UnknownError(path, module, key)

    def _try_out(self, call: _UnknownError) -> None:
        """Learn what a call returns. Where that cannot be said, the module around it is kept whole instead."""
        _, given, form = call.key
        trial = Trial(call.path, call.module, given, form, self.dtype)
        try:
            returned = trial.returned()
        except RefusedError:
            raise
        except TraceError as error:
            around = call if isinstance(call.module, Applied) else InsideError(str(error), call.path)
            path = self._failed_in(around)
            if path is None or not self._enclose(path):
                raise
            return
        name = self._name(call)
        self.results[name] = lambda tensors: [r.like(tensors) for r in returned]
        self.calls.append(_Call(name, call.key, trial, returned))

    def _name(self, call: _UnknownError) -> str:
        layer, path = layer_path(call.path), call.path
        inside = path.removeprefix(f"{layer}.") if layer != path else type(call.module).__name__
        taken = {call.name for call in self.calls}
        return next(n for n in [inside, *(f"{inside}_{i}" for i in range(2, 1000))] if n not in taken)

    # afterwards

    def complete(self, program: Program) -> Program:
        """The program with what runs show of each module written into its op."""
        calls = {call.name: call for call in self.calls}
        found: dict[str, tuple[bool, int]] = {}
        nodes = [node for node in program.blocks[MODEL].ops if node.target is OPAQUE]
        read = {
            arguments(n)[1]: {arguments(u)[1] for m in nodes if _same(m, n) for u in m.users if u.users} for n in nodes
        }
        for node in nodes:
            tensors, name, given, _, _ = arguments(node)
            if name not in found:
                shapes = [info(n).shape for n in node_inputs(node)[:given]]
                trial = calls[name].trial.in_float32()
                found[name] = trial.treats_samples_alone(shapes, read[name]), trial.flops_a_row(shapes)
            node.args = (tensors, name, given, *found[name])
            if len(calls[name].returned) == 1:  # the runtime gives a single result as it is
                for reader in list(node.users):
                    replace_node(reader, node)
        opaque = {name: calls[name].trial.as_called() for name in found}
        reasons = {name: self.reasons.get(_pattern(call.path), _BACKWARD) for name, call in opaque.items()}
        kept = {name: replace(call, reason=reasons[name]) for name, call in opaque.items()}
        return replace(program, opaque=kept, checks=tuple(self.checks.places))


def opaque_modules(program: Program, model: nn.Module) -> dict[str, OpaqueModule]:
    """The program's opaque modules as the runtime takes them: without values."""
    if not program.opaque:
        return {}
    in_double = any(info(node).dtype == torch.float64 for _, node in program.each_op())
    with written_experts(model) if in_double else nullcontext():
        return {name: OpaqueModule(_without_values(model, call), call.inputs) for name, call in program.opaque.items()}


def _without_values(model: nn.Module, call: OpaqueCall) -> nn.Module:
    """A copy of the module that is called. Its attributes are its own, its config too."""
    if call.function is not None:
        return Applied(call.function)
    module = model.get_submodule(call.path)
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copied(module, memo)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except RuntimeError:  # tensors as plain attributes
        return False


def _taken(tensor: Tensor) -> Taken:
    return Taken(tuple(map(_size, tensor.shape)), tensor.dtype)


def _size(size: Any) -> sympy.Expr:
    """A size with one symbol for each size of the examples: torch's own differ for each input until the trace ends."""
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(size)
    expr, hint = size.node.expr, size.node.shape_env.guarding_hint_or_throw
    return expr.subs({s: sympy.Symbol(f"n{hint(s)}", integer=True, positive=True) for s in expr.free_symbols})


def _pattern(path: str) -> str:
    """The place of a module in its layer: "layers.3.mlp" → "layers.*.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _same(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes call the same module."""
    return bool(arguments(one)[1] == arguments(other)[1])


def _repeats(modules: nn.ModuleList) -> bool:
    """Whether two items of a list are alike, as layers are."""
    shapes = [[(name, p.shape) for name, p in module.named_parameters()] for module in modules]
    return any(one == other for i, one in enumerate(shapes) for other in shapes[:i])


def _check_sizes(exported: Any) -> None:
    """InsideError where the first size that depends on values is made."""
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and free_unbacked_symbols(value):
            raise InsideError(
                f"The sizes of {node.name}{place(node)} depend on values: keep the shape and mask "
                f"(torch.where, x * mask){excerpt(node)}",
                module_path(node),
            )
