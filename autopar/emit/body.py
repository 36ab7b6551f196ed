"""The statements of some ops of a block: their expressions, the sizes that these need, and comments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from ..ir.counts import dims_of
from ..ir.graph import B, Block, S, info, node_inputs
from ..ir.ops import is_collective
from .code import Statement, Suite, function, returning
from .emission import Emission, sizes_in, untold_sizes
from .expressions import expression
from .idioms import call_of_region, region_call, rotate
from .lines import Lines, is_constant
from .parameters import access
from .placements import argument_shapes, comment_of, parallel
from .roles import Roles, is_bias_add
from .text import Text, size_from
from .value_names import Names, name_lines


class Body:
    """The statements of the ops of a block, or of some of them, after which `results` are returned.

    arguments: the names of values that come in; sizes that none of them tells are arguments too, and without any
    `device` is. breaks: ops after whose line a paragraph ends. fixed: names of some lines, whatever their ops are.
    roles: where they are not those of the program's block. `names` has the names of arguments and lines,
    `result_names` those that are returned.
    """

    def __init__(
        self,
        e: Emission,
        block: Block,
        arguments: Mapping[fx.Node, str],
        ops: Sequence[fx.Node] | None = None,
        results: Sequence[fx.Node] | None = None,
        *,
        breaks: Collection[fx.Node] = (),
        fixed: Mapping[fx.Node, str] | None = None,
        roles: Roles | None = None,
    ) -> None:
        self._e, self._tp, self._arguments = e, e.plan.mesh.tp, arguments
        ops, results = block.ops if ops is None else ops, block.results if results is None else results
        self._device = f"{next(iter(arguments.values()))}.device" if arguments else "device"
        self._lines = Lines(ops, results, roles or e.roles(block))
        self.names: Names = dict(arguments)
        self.statements = self._sizes(self._lines.ops)
        self._last: fx.Node | None = None
        for node in name_lines(self._lines, self.names, self._fits, lambda n: len(self._text(n).source), fixed):
            self.statements.append(self._statement(node, node in breaks))
            self._last = node
        self.result_names = [self.names[node] for node in results]

    def returned(self) -> list[Statement]:
        """The statements with a return; a result that is the last line's is returned by it, but of a collective."""
        at_once = self._last is not None and not is_collective(self._last.target)
        return returning(self.statements, self.result_names, at_once)

    def method(self, name: str, parameters: Iterable[str] | None = None) -> Suite:
        """A method with these statements; parameters: where it has more than the names of its arguments."""
        names = self._arguments.values() if parameters is None else parameters
        return function(name, ["self", *names], self.returned(), comment=argument_shapes(self._arguments, self._tp))

    # sizes

    def _sizes(self, ops: Sequence[fx.Node]) -> list[Statement]:
        """`b` and `s`, where shapes need them, from the first value that has both, unless they are arguments."""
        used = sizes_in(ops) - set(untold_sizes(ops, self.names))
        if not used:
            return []
        sources = [n for n in self.names if dims_of(info(n).shape)]
        source = next((n for n in sources if used <= set(dims_of(info(n).shape))), None)
        plain = source is not None and not info(source).placement.is_shard and info(source).shape[:2] == (B, S)
        if source is not None and plain and used == {B, S}:
            rest = ["_"] * (len(info(source).shape) - 2)
            return [Statement(f"{self.names[source]}.shape", ("b", "s", *rest))]
        wanted = sorted(used, key=str)
        texts, notes = zip(*(self._size(symbol, source, sources) for symbol in wanted), strict=True)
        note = next((n for n in notes if n), "")
        return [Statement(", ".join(texts), tuple(map(str, wanted)), comment=note)]

    def _size(self, symbol: Any, source: fx.Node | None, sources: Sequence[fx.Node]) -> tuple[str, str]:
        """`b` or `s` by the shape of a value, as source, and a note where the value has a part of it."""
        source = source or next(n for n in sources if symbol in dims_of(info(n).shape))
        facts, name = info(source), self.names[source]
        dim = dims_of(facts.shape)[symbol]
        sharded = facts.placement.is_shard and facts.placement.dim == dim
        size = facts.shape[dim] / self._tp if sharded else facts.shape[dim]
        note = f"{name} has {size / symbol} of {symbol}" if (size / symbol).is_number and size / symbol < 1 else ""
        return size_from(f"{name}.shape[{dim}]", size, symbol), note

    # lines

    def _fits(self, node: fx.Node, name: str) -> bool:
        return Statement(self._text(node).source, (name,)).fits

    def _statement(self, node: fx.Node, ends: bool) -> Statement:
        comment = comment_of(node, self._product(node), self._tp)
        minor = not is_collective(node.target) and "Partial" not in comment
        if island := self._island(node):
            comment, minor = f"in fp32: {island}" + (f"; {comment}" if not minor else ""), False
        targets = (self.names[node],)
        return Statement(self._text(node).source, targets, comment=comment, minor=minor, ends=ends)

    def _island(self, node: fx.Node) -> str:
        """The fp32 island that begins on the line of `node`."""
        return next(filter(None, (info(node).island, *map(self._island, self._lines.inside(node)))), "")

    def _product(self, node: fx.Node) -> fx.Node:
        """The product with a sharded parameter that a line computes, also inside another op; else what it is about."""
        head = self._lines.head(node)
        inside = [] if parallel(head) else map(self._product, self._lines.inside(head))
        return next((product for product in inside if parallel(product)), head)

    def _text(self, node: fx.Node) -> Text:
        operands = node_inputs(node)
        if is_bias_add(node) and operands[0] in self._lines.folded:
            return Text(f"F.linear({', '.join(map(self._source, (*node_inputs(operands[0]), operands[1])))})")
        if node.target is rotate:
            return Text(f"{node.kwargs['function']}({', '.join(map(self._source, operands))})")
        if node.target is region_call:
            return Text(call_of_region(node, [*map(self._source, operands)]))
        return expression(node, self._operand, self._device, "self.training")

    def _source(self, operand: fx.Node) -> str:
        return self._operand(operand).source

    def _operand(self, node: fx.Node) -> Text:
        if node in self._lines.folded:
            return self._text(node)
        return Text(access(self._e, node) if is_constant(node) else self.names[node])
