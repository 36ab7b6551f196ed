"""For which sizes a trace holds: torch's assertions tried on many, and single sizes traced again.

Guards that torch defers become assertions in the trace. An assertion that excludes one length (torch asks whether a
slice takes the whole tensor) is no limit where the trace at that length is the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product, zip_longest
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # torch has no public name for it

from ..errors import TraceError
from ..ir.graph import B, S, arguments, op_name
from ..ir.identifiers import is_plain
from ..ir.lengths import FixedLength
from .checks import may_be_caught
from .input_sizes import InputSizes, other_lengths
from .refusals import SIZES, refuse_size
from .signature import keywords
from .source import excerpt, place

aten = torch.ops.aten
_BATCH, _LENGTH = 64, 4096  # at which a trace is run once more


class SizesError(TraceError):
    """The trace does not hold for all sizes of the inputs. `export`: fails, and shows why, where `said` does not."""

    def __init__(self, said: str, sizes: InputSizes, export: Callable[[], Any] | None = None) -> None:
        super().__init__(said)
        self._sizes, self._export = sizes, export

    def told(self, model: nn.Module) -> TraceError:
        """The refusal with the user's line."""
        return refuse_size(model, self._sizes.dims, self._export) if self._export else self


_Export = Callable[[nn.Module, InputSizes], ExportedProgram]


def check_sizes(model: nn.Module, exported: ExportedProgram, sizes: InputSizes, export: _Export) -> None:
    """SizesError where an assertion excludes sizes. export: of the model at one batch or length.

    torch takes no batch to be 1: micro-batches of one sample are parts of a batch, and computed as in it.
    """
    names = symbol_names(exported, sizes)
    asserted = {n.args[0] for n in exported.graph.nodes if n.target is aten._assert_scalar.default}
    for node in exported.graph.nodes:
        condition = node.meta.get("val")
        if node not in asserted or not isinstance(condition, torch.SymBool):
            continue
        expression = condition.node.expr
        excluded = _only_excluded(expression, names)
        if excluded and difference(model, exported, sizes, excluded, export) is None:
            continue
        symbols = sorted(expression.free_symbols, key=str)
        ranges = [exported.range_constraints[symbol] for symbol in symbols]
        for tried in product(*([n for n in SIZES if r.lower <= n <= r.upper] for r in ranges)):
            values = dict(zip(symbols, tried, strict=True))
            if expression.subs(values) != sympy.true:
                at = dict(_ours(names[symbol], n) for symbol, n in values.items())
                where = difference(model, exported, sizes, at, export) or ""
                raise SizesError(
                    f"tracing failed{where}: the model fixes its batch or sequence size there: it was traced where "
                    f"{expression.subs(names)}, which is not so for {', '.join(f'{k}={n}' for k, n in at.items())}: "
                    "derive it from the input's shape",
                    sizes,
                )


def _ours(expression: sympy.Expr, size: int) -> tuple[sympy.Symbol, int]:
    """(s, 8) for s/4 and 2."""
    (name,) = expression.free_symbols
    return name, int(size / expression.coeff(name))


def holds(exported: ExportedProgram, sizes: InputSizes) -> bool:
    """Whether a trace runs at a larger batch and another length: torch drops guards on products of two sizes."""
    other = sizes.at({name: _other_size(exported, sizes, name) for name in sizes.values})
    names = (*exported.state_dict, *exported.constants)
    if not all(map(_is_written, ".".join(names).split("."))):
        return True  # not tried: the module is source that torch writes and runs, and it would run these names
    module = exported.module()
    return _runs(module, other) or not _runs(module, sizes)  # what does not run on meta at all tells nothing


def check_known(node: fx.Node) -> None:
    """TraceError for a number read from a tensor, or a shape that depends on a tensor's values."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    unknown = any(isinstance(n, torch.SymInt | torch.SymFloat) and free_unbacked_symbols(n) for n in sizes)
    # torch may have concluded from a check which number it must be.
    if unknown or _selects_by_value(node) or node.target is aten.item.default and not _is_check(node):
        raise TraceError(
            f"{op_name(node)}{place(node)}: a shape or number that depends on a tensor's values cannot be traced: "
            f"keep the shape and mask (torch.where, x * mask), and numbers as 0-dim tensors, not .item(){excerpt(node)}"
        )


def _is_check(node: fx.Node) -> bool:
    """Whether torch._check_tensor_all reads the number, to raise and for nothing else."""
    tensor = arguments(node)[0]
    own = isinstance(tensor, fx.Node) and tensor.target is aten._is_all_true.default
    return own and not may_be_caught(node.stack_trace)


def _selects_by_value(node: fx.Node) -> bool:
    """Whether an op returns as many elements as values say, even where torch has concluded how many that must be."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target is aten.one_hot.default:
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes", -1)
        return given == -1  # type: ignore[return-value]
    if node.target is not aten.index.Tensor:
        return True
    indices = [i for i in arguments(node)[1] if isinstance(i, fx.Node)]
    return any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)


def symbol_names(exported: ExportedProgram, sizes: InputSizes) -> dict[sympy.Symbol, sympy.Expr]:
    """torch's symbols as b and as s, or the part of s that all sizes are multiples of: s/4."""
    inputs, names = keywords(exported), dict[sympy.Symbol, sympy.Expr]()
    for node in exported.graph.nodes if sizes.dims else ():
        for dim, size in (sizes.dims.get(inputs.get(node.name, ""), {}) if node.op == "placeholder" else {}).items():
            traced = node.meta["val"].shape[dim]
            if isinstance(traced, torch.SymInt):
                (symbol,) = traced.node.expr.free_symbols
                names[symbol] = size / traced.node.expr.coeff(symbol)
    return names


def one_length(model: nn.Module, sizes: InputSizes) -> FixedLength | None:
    """The length of the example, where forward runs at no other, with the place where it fails."""
    length = sizes.values[S]
    failures = [sizes.at({S: n}).failure(model) for n in other_lengths(length)] if sizes.has_sequence else []
    return FixedLength(length, (failures[0] or "").rstrip()) if failures and None not in failures else None


def _other_size(exported: ExportedProgram, sizes: InputSizes, name: sympy.Symbol) -> int:
    """A size of b or s for which the trace is to hold, other than the traced one."""
    for symbol, expression in symbol_names(exported, sizes).items():
        if name in expression.free_symbols:
            part, bounds = expression.coeff(name), exported.range_constraints[symbol]
            wanted = int((_BATCH if name == B else _LENGTH) * part)
            return int(min(max(wanted, bounds.lower), bounds.upper) / part)
    return sizes.values[name]


def _is_written(name: str) -> bool:
    """Whether torch's source of a module reads a name as that name: an attribute, or a string that it does not end."""
    return is_plain(name) or not name.isidentifier() and name.isprintable() and not {'"', "\\"} & {*name}


def _runs(module: nn.Module, sizes: InputSizes) -> bool:
    try:
        module(**sizes.example())
    except Exception:  # noqa: BLE001 - a guard's AssertionError, or what an op says of its operands' sizes
        return False
    return True


def _only_excluded(condition: sympy.Expr, names: Mapping[sympy.Symbol, sympy.Expr]) -> dict[sympy.Symbol, int]:
    """The one size that a condition `s ≠ n` excludes; empty for other conditions."""
    condition = condition.subs(names)
    if not isinstance(condition, sympy.Ne) or len(condition.free_symbols) != 1:
        return {}
    (name,) = condition.free_symbols
    difference = sympy.expand(condition.lhs - condition.rhs)
    times = difference.coeff(name)
    rest = difference - times * name
    excluded = -rest / times if times and rest.is_number else sympy.nan
    return {name: int(excluded)} if excluded.is_Integer else {}


def difference(
    model: nn.Module, exported: ExportedProgram, sizes: InputSizes, at: Mapping[sympy.Symbol, int], export: _Export
) -> str | None:
    """Where the model does at some sizes something else than at the others; None where it does the same."""
    fixed = sizes.fixed_at(at)
    try:
        only = export(model, fixed)
    except TraceError:
        return fixed.failure(model) or ""
    here = {symbol: expression.subs(at) for symbol, expression in symbol_names(exported, sizes).items()}
    lines, others = _lines(exported.graph, here), _lines(only.graph, symbol_names(only, fixed))
    for line, other in zip_longest(lines, others):
        if line is None or other is None or line[0] != other[0]:
            _, node = (line if len(lines) > len(others) else other) or line or other  # what the longer one does more
            return f"{place(node)}{excerpt(node)}\n"
    return None


def _lines(graph: fx.Graph, sizes: Mapping[sympy.Expr, Any]) -> list[tuple[Any, fx.Node]]:
    """The ops with their arguments at these sizes, but for those that give their operand."""
    held: dict[fx.Node, Any] = {}
    lines: list[tuple[Any, fx.Node]] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            held[node] = f"%{node.name}"
        elif isinstance(value, torch.SymInt | torch.SymFloat | int | float):
            held[node] = _size(value, sizes)
        elif node.op == "output":
            lines.append((_shown(node.args, held), node))
        elif node.op == "call_function" and isinstance(value, torch.Tensor | list | tuple):
            if _gives_operand(node, sizes):
                held[node] = held[arguments(node)[0]]
                continue
            held[node] = f"%{len(lines)}"
            line = (str(node.target), _shown(node.args, held), _shown(sorted(node.kwargs.items()), held))
            lines.append((line, node))
    return lines


def _shown(argument: Any, held: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return held[argument]
    return tuple(_shown(a, held) for a in argument) if isinstance(argument, list | tuple) else str(argument)


def _size(value: Any, sizes: Mapping[sympy.Expr, Any]) -> str:
    return str(value.node.expr.subs(sizes) if hasattr(value, "node") else value)


def _gives_operand(node: fx.Node, sizes: Mapping[sympy.Expr, Any]) -> bool:
    """Whether an op is an alias, or a slice that takes everything."""
    if node.target is not aten.slice.Tensor:
        return node.target is aten.alias.default
    taken, whole = ([_size(n, sizes) for n in x.meta["val"].shape] for x in (node, arguments(node)[0]))
    return taken == whole
