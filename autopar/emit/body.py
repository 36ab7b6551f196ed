"""The lines of some ops of a block: what each value is called, and which comments it carries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..ir.graph import B, S, info, node_inputs
from ..ir.ops import is_collective
from ..ir.sizes import dims_of
from .comments import comment_of, parallel
from .expressions import expression
from .folding import Folding, in_reading_order, is_constant
from .idioms import part, rotate
from .lines import WIDTH, Line, rendered
from .local_names import line_name
from .names import value_name
from .roles import Roles, is_bias_add, is_postfix
from .text import Text, quoted, size_from

aten = torch.ops.aten

_MOST_OPS = 6  # in one line, views and casts not counted
_RETURNED = 1 << 30  # the position after the last line


@dataclass
class Body:
    """Lines of Python for the ops `ops`, after which `results` are returned.

    parameter: the expression of a parameter or buffer placeholder. arguments: what each value that comes in is called;
    sizes that none of them tells are arguments, and without any `device` is. breaks: ops after whose line comes a blank
    one.
    called: what the values of some lines are called, whatever makes them.
    After `write`, `result_names` are the names returned and `imports` what the lines use of the runtime.
    """

    ops: Sequence[fx.Node]
    results: Sequence[fx.Node]
    roles: Roles
    parameter: Callable[[fx.Node], str]
    arguments: Mapping[fx.Node, str]
    tp: int
    breaks: Collection[fx.Node] = ()
    called: Mapping[fx.Node, str] = field(default_factory=dict)
    written: list[Line] = field(default_factory=list)
    result_names: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    names: dict[fx.Node, str] = field(default_factory=dict)

    def write(self) -> Body:
        self.names = dict(self.arguments)
        self.folded = Folding(self.ops, self.results, self.roles)
        self.ops = in_reading_order(self.ops, self.folded, self.roles)
        self.order = self.folded.order = {node: i for i, node in enumerate(self.ops)}
        self._sizes()
        for node in self.ops:
            if node not in self.folded:
                self._statement(node)
        self.result_names = [self.names[node] for node in self.results]
        return self

    @property
    def lines(self) -> list[str]:
        return rendered(self.written)

    def returned(self) -> list[str]:
        """The lines with a return; a result that is the last line's is returned by it."""
        name = ", ".join(self.result_names)
        if len(self.results) == 1 and self.results[0] is self._last():
            *before, last = self.written
            text = f"return {last.text.removeprefix(f'{name} = ')}"
            return rendered([*before, replace(last, text=text, name="")])
        return rendered([*self.written, Line(f"return {name}")])

    def _last(self) -> fx.Node | None:
        """The op of the last line, unless it is a collective, which keeps a line to itself."""
        written = [node for node in self.ops if node not in self.folded]
        return written[-1] if written and not is_collective(written[-1].target) else None

    def last_use(self, node: fx.Node) -> int:
        """The position of the last line that reads a node, through the ops folded into that line."""
        if node in self.results:
            return _RETURNED
        return max((self.folded.line_of(user) for user in node.users if user in self.order), default=-1)

    def _sizes(self) -> None:
        """`b` and `s`, where shapes need them, from the first value that has both, unless they are arguments."""
        used = sizes_in(self.ops) - set(untold_sizes(self.ops, self.arguments))
        if not used:
            return
        sources = [n for n in self.names if dims_of(info(n).shape)]
        source = next((n for n in sources if used <= set(dims_of(info(n).shape))), None)
        plain = source is not None and not info(source).placement.is_shard and info(source).shape[:2] == (B, S)
        if source is not None and plain and used == {B, S}:
            rest = ", _" * (len(info(source).shape) - 2)
            self.written.append(Line(f"b, s{rest} = {self.names[source]}.shape"))
            return
        wanted = sorted(used, key=str)
        texts, notes = zip(*(self._size(symbol, source, sources) for symbol in wanted), strict=True)
        note = next((n for n in notes if n), "")
        self.written.append(Line(f"{', '.join(map(str, wanted))} = {', '.join(texts)}", comment=note))

    def _size(self, symbol: Any, source: fx.Node | None, sources: Sequence[fx.Node]) -> tuple[str, str]:
        source = source or next(n for n in sources if symbol in dims_of(info(n).shape))
        facts, name = info(source), self.names[source]
        dim = dims_of(facts.shape)[symbol]
        sharded = facts.placement.is_shard and facts.placement.dim == dim
        size = facts.shape[dim] / self.tp if sharded else facts.shape[dim]
        note = f"{name} has {size / symbol} of {symbol}" if (size / symbol).is_number and size / symbol < 1 else ""
        return size_from(f"{name}.shape[{dim}]", size, symbol), note

    # statements

    def _statement(self, node: fx.Node) -> None:
        text = self._text(node)
        name = self.called.get(node) or line_name(self, node)
        line = f"{name} = {text.source}"
        if (len(line) > WIDTH or self._count(node) > _MOST_OPS) and (inner := self._longest_folded(node)):
            self.folded.split(inner)
            self._statement(inner)
            self._statement(node)
            return
        self.names[node] = name
        self.imports |= text.imports
        comment = comment_of(node, self._product(node), self.tp)
        minor = not is_collective(node.target) and "Partial" not in comment
        if island := self._island(node):
            comment, minor = f"in fp32: {island}" + (f"; {comment}" if not minor else ""), False
        self.written.append(Line(line, name, comment, minor, ends=node in self.breaks))

    def _island(self, node: fx.Node) -> str:
        """The fp32 island that begins on the line of `node`."""
        inside = [self._island(n) for n in node_inputs(node) if n in self.folded]
        return next(filter(None, (info(node).island, *inside)), "")

    def _count(self, node: fx.Node) -> int:
        inside = sum(self._count(n) for n in node_inputs(node) if n in self.folded)
        return inside + (not (is_postfix(node) or is_bias_add(node)))

    def _longest_folded(self, node: fx.Node) -> fx.Node | None:
        """What to give a line of its own: the op under a chain of views, so that the views stay together."""
        viewed = node
        while is_postfix(viewed) and node_inputs(viewed)[0] in self.folded:
            viewed = node_inputs(viewed)[0]
        if viewed is not node:
            return viewed
        inside = [n for n in node_inputs(node) if n in self.folded]
        return max(inside, key=lambda n: len(self._text(n).source), default=None)

    def _text(self, node: fx.Node) -> Text:
        imports: set[str] = set()

        def render(operand: Any) -> Text:
            text = self._operand(operand)
            imports.update(text.imports)
            return text

        if is_bias_add(node) and node_inputs(node)[0] in self.folded:
            product, bias = node_inputs(node)
            given = [render(operand).source for operand in (*node_inputs(product), bias)]
            text = Text(f"F.linear({', '.join(given)})")
        elif node.target is rotate:
            given = [render(operand).source for operand in node_inputs(node)]
            text = Text(f"{node.kwargs['function']}({', '.join(given)})")
        elif node.target is part:
            text = Text(_again(node, [render(operand).source for operand in node_inputs(node)]))
        else:
            text = expression(node, render, self._device(), "self.training")
        return Text(text.source, text.precedence, text.imports | imports)

    def _operand(self, node: fx.Node) -> Text:
        if node in self.folded:
            return self._text(node)
        return Text(self.parameter(node) if is_constant(node) else self.names[node])

    def _device(self) -> str:
        return f"{next(iter(self.arguments.values()))}.device" if self.arguments else "device"

    # what names are made from

    def head(self, node: fx.Node) -> fx.Node:
        """The op a line is about: the innermost of a chain of views and casts."""
        while (is_postfix(node) or is_bias_add(node)) and node_inputs(node)[0] in self.folded:
            node = node_inputs(node)[0]
        return node

    def _product(self, node: fx.Node) -> fx.Node:
        """The product with a sharded parameter that a line computes, also inside another op; else what it is about."""
        head = self.head(node)
        inside = [] if parallel(head) else [self._product(n) for n in node_inputs(head) if n in self.folded]
        return next((product for product in inside if parallel(product)), head)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The named values that a line reads, through folded ops."""
        found: list[fx.Node] = []
        for operand in node_inputs(node):
            found += self.reads(operand) if operand in self.folded else [operand] if operand in self.names else []
        return found

    def dies(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether the line of `node` is the last to read a value."""
        return self.last_use(operand) <= self.order[node]

    def free(self, base: str, node: fx.Node) -> str:
        """The base, or with a number where another live value has it."""
        return value_name(base, {name for other, name in self.names.items() if self.last_use(other) > self.order[node]})


def _again(node: fx.Node, values: Sequence[str]) -> str:
    """The call of a region: where some of the class's layers keep its values, the layer knows whether it does."""
    called = ", ".join([f"self.{node.kwargs['method']}", *values])
    if node.kwargs["always"]:
        return f"checkpoint({called}, use_reentrant=False)"
    return f"self._again({quoted(str(node.kwargs['name']))}, {called})"


def sizes_in(ops: Sequence[fx.Node]) -> set[Any]:
    """Which of `b` and `s` are arguments of the ops."""
    given = [argument for node in ops for argument in (*node.args, *node.kwargs.values())]
    return _symbols(given) & {B, S}


def untold_sizes(ops: Sequence[fx.Node], arguments: Collection[fx.Node]) -> list[Any]:
    """Which of `b` and `s` the ops need and no argument tells: they are arguments themselves."""
    told = {symbol for node in arguments for symbol in dims_of(info(node).shape)}
    return [size for size in (B, S) if size in sizes_in(ops) - told]


def _symbols(argument: Any) -> set[Any]:
    if isinstance(argument, list | tuple):
        return set().union(*(_symbols(a) for a in argument)) if argument else set()
    return set(getattr(argument, "free_symbols", ()))
