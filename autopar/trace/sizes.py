"""For which sizes a trace holds: torch's assertions tried on many, and single sizes traced again.

Guards that torch defers become assertions in the trace. An assertion that excludes one length (torch asks whether a
slice takes the whole tensor) is no limit where the trace at that length is the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # torch has no public name for it

from ..errors import TraceError
from ..ir.graph import arguments, op_name
from .signature import keywords
from .source import excerpt, place

aten = torch.ops.aten
Dims = Mapping[str, Mapping[int, str]]
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 100, 128, 1000, 4096, 4099)  # on which assertions are tried


def check_sizes(exported: ExportedProgram, dims: Dims, at_length: Callable[[int], ExportedProgram]) -> None:
    """TraceError where the trace holds for some sizes only. at_length: the export for one sequence length."""
    names = symbol_names(exported, dims)
    asserted = {n.args[0] for n in exported.graph.nodes if n.target is aten._assert_scalar.default}
    for node in exported.graph.nodes:
        condition = node.meta.get("val")
        if node not in asserted or not isinstance(condition, torch.SymBool):
            continue
        expression = condition.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        if _same_at_the_excluded_length(exported, dims, expression, at_length):
            continue
        ranges = [exported.range_constraints[symbol] for symbol in symbols]
        for sizes in product(*([n for n in _SIZES if r.lower <= n <= r.upper] for r in ranges)):
            if expression.subs(dict(zip(symbols, sizes, strict=True))) != sympy.true:
                tried = ", ".join(f"{names.get(s, s)}={n}" for s, n in zip(symbols, sizes, strict=True))
                raise TraceError(
                    f"tracing failed: the model fixes its batch or sequence size: it was traced where "
                    f"{expression.subs(names)}, which is not so for {tried}: derive it from the input's shape"
                )


def check_known(node: fx.Node) -> None:
    """TraceError for a number read from a tensor, or a shape that depends on a tensor's values."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else [value]
    unknown = any(isinstance(n, torch.SymInt | torch.SymFloat) and free_unbacked_symbols(n) for n in sizes)
    if unknown or _selects_by_value(node):
        raise TraceError(
            f"{op_name(node)}{place(node)}: a shape or number that depends on a tensor's values cannot be traced: "
            f"keep the shape and mask (torch.where, x * mask), and numbers as 0-dim tensors, not .item(){excerpt(node)}"
        )


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


def symbol_names(exported: ExportedProgram, dims: Dims) -> dict[sympy.Expr, sympy.Symbol]:
    """torch's symbols → b and s."""
    inputs = keywords(exported)
    return {
        node.meta["val"].shape[dim].node.expr: sympy.Symbol(kind)
        for node in exported.graph.nodes
        for dim, kind in (dims.get(inputs.get(node.name, ""), {}) if node.op == "placeholder" else {}).items()
        if isinstance(node.meta["val"].shape[dim], torch.SymInt)
    }


def _same_at_the_excluded_length(
    exported: ExportedProgram, dims: Dims, condition: sympy.Expr, at_length: Callable[[int], ExportedProgram]
) -> bool:
    """Whether a condition is `s ≠ n`, and the model does at length n what it does at the others."""
    names = symbol_names(exported, dims)
    condition = condition.subs(names)
    if not isinstance(condition, sympy.Ne) or condition.free_symbols != {sympy.Symbol("s")}:
        return False
    numbers = [side for side in condition.args if isinstance(side, sympy.Integer)]
    if len(numbers) != 1 or sympy.Symbol("s") not in condition.args:
        return False
    length = int(numbers[0])
    alone = at_length(length)
    here = {symbol: (length if name.name == "s" else name) for symbol, name in names.items()}
    return _lines(exported.graph, here) == _lines(alone.graph, symbol_names(alone, dims))


def _lines(graph: fx.Graph, sizes: Mapping[sympy.Expr, Any]) -> list[Any]:
    """The ops with their arguments at these sizes, but for slices that take everything."""
    held: dict[fx.Node, Any] = {}
    lines: list[Any] = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            held[node] = f"%{node.name}"
        elif isinstance(value, torch.SymInt | torch.SymFloat | int | float):
            held[node] = _size(value, sizes)
        elif node.op == "output":
            lines.append(_shown(node.args, held))
        elif node.op == "call_function" and isinstance(value, torch.Tensor | list | tuple):
            if _takes_everything(node, sizes):
                held[node] = held[arguments(node)[0]]
                continue
            held[node] = f"%{len(lines)}"
            lines.append((str(node.target), _shown(node.args, held), _shown(sorted(node.kwargs.items()), held)))
    return lines


def _shown(argument: Any, held: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return held[argument]
    return tuple(_shown(a, held) for a in argument) if isinstance(argument, list | tuple) else str(argument)


def _size(value: Any, sizes: Mapping[sympy.Expr, Any]) -> str:
    return str(value.node.expr.subs(sizes) if hasattr(value, "node") else value)


def _takes_everything(node: fx.Node, sizes: Mapping[sympy.Expr, Any]) -> bool:
    if node.target is not aten.slice.Tensor:
        return False
    taken, whole = ([_size(n, sizes) for n in x.meta["val"].shape] for x in (node, arguments(node)[0]))
    return taken == whole
