"""The ops of a body as lines: which ops a line has, in which order lines come, and which of them read a value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from ..ir.graph import Role, info, node_inputs
from ..ir.ops import is_collective
from ..liveness.regions import is_random as draws
from .idioms import region_call, rotate
from .roles import ACTIVATIONS, ATTENTIONS, DROPOUT, HEAVY, NORMS, SOFTMAX, Roles, is_bias_add, is_postfix

aten = torch.ops.aten

_INSIDE_ANY = {aten.slice.Tensor, aten.neg.default, aten.select.int, aten.to.dtype}
_RETURNED = 1 << 30  # the position after the last line
_QUERY_KEY_VALUE = ("q", "k", "v")
_KEPT = (*_QUERY_KEY_VALUE, "gate", "up", "logits", "labels", "angles")  # roles whose values are shown by a line


class Lines:
    """`ops` by line, in reading order. An op that only one other reads may be `folded`: written inside that one's line.

    order: the position of each op.
    """

    def __init__(self, ops: Sequence[fx.Node], results: Collection[fx.Node], roles: Roles) -> None:
        self.roles, self.results = roles, set(results)
        self.order = {node: i for i, node in enumerate(ops)}
        self.folded = {node for node in ops if self._folds(node)}
        self._keep_draws(ops)
        self.ops = self._in_reading_order(ops)
        self.order = {node: i for i, node in enumerate(self.ops)}

    # lines

    def line_of(self, node: fx.Node) -> int:
        """The position of the line a node is written in."""
        while node in self.folded:
            node = next(user for user in node.users if user in self.order)
        return self.order[node]

    def last_use(self, node: fx.Node) -> int:
        """The position of the last line that reads a node."""
        if node in self.results:
            return _RETURNED
        return max((self.line_of(user) for user in node.users if user in self.order), default=-1)

    def dies(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether the line of `node` is the last to read a value."""
        return self.last_use(operand) <= self.order[node]

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """The values that a line reads, parameters and buffers left out."""
        values: list[fx.Node] = []
        for operand in node_inputs(node):
            values += self.reads(operand) if operand in self.folded else [] if is_constant(operand) else [operand]
        return values

    def inside(self, node: fx.Node) -> list[fx.Node]:
        """The operands that are written inside the line of `node`."""
        return [operand for operand in node_inputs(node) if operand in self.folded]

    def head(self, node: fx.Node) -> fx.Node:
        """The op a line is about: the innermost of a chain of views and casts."""
        return _innermost(node, self.folded.__contains__)

    def size(self, node: fx.Node) -> int:
        """The number of ops in a line, views, casts and biases not counted."""
        return sum(map(self.size, self.inside(node))) + (not (is_postfix(node) or is_bias_add(node)))

    def cut(self, node: fx.Node, length: Callable[[fx.Node], int]) -> fx.Node | None:
        """Give an op of a line that is too long a line of its own, the longest; None where the line has one op.

        Of a chain of views it is the op under them, so that the views stay together.
        """
        viewed = node
        while is_postfix(viewed) and node_inputs(viewed)[0] in self.folded:
            viewed = node_inputs(viewed)[0]
        inner = viewed if viewed is not node else max(self.inside(node), key=length, default=None)
        self.folded -= {inner}
        return inner

    # which ops share a line

    def _keep_draws(self, ops: Sequence[fx.Node]) -> None:
        """No random op is drawn after one that follows it: masks must not depend on the layout."""
        random = [node for node in ops if is_random(node)]
        for node in random:
            if node in self.folded:
                line = self.line_of(node)
                if any(self.order[node] < self.line_of(other) < line for other in random if other is not node):
                    self.folded.discard(node)

    def _folds(self, node: fx.Node) -> bool:
        """Whether an op is written inside the line of its one reader."""
        reader = next(iter(node.users), node)
        operands = node_inputs(reader)
        if len(node.users) != 1 or node in self.results or reader not in self.order or operands.count(node) > 1:
            return False
        if is_collective(node.target) or region_call in (node.target, reader.target):
            return False
        if is_postfix(reader):
            return operands[0] is node
        if node.target is aten.linear.default and is_bias_add(reader):
            return operands[0] is node and info(node).placement == info(reader).placement
        if is_collective(reader.target):
            return False
        if node.target in _INSIDE_ANY:
            return node.target is not aten.to.dtype or reader.target not in HEAVY
        return reader.target is not rotate and self._reads_well(node, reader)

    def _reads_well(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether a person would write an op inside this reader."""
        head, dresses = _innermost(node, lambda op: op.op == "call_function"), self.roles.main(reader) is node
        same = self.roles.of(node) == self.roles.of(reader)
        if head.target in HEAVY:
            joins = self.roles.is_residual(reader) and info(node).placement == info(reader).placement
            plain = same and (dresses or reader.target in {*ACTIVATIONS, DROPOUT})
            sums = (reader.target, head.target) == (aten.add.Tensor, aten.embedding.default)
            return head.target not in ATTENTIONS and (joins or plain or sums)
        if head.target in NORMS:
            return same and reader.target in {*NORMS, DROPOUT} or dresses and reader.target is aten.mul.Tensor
        if head.target in SOFTMAX:
            return reader.target is DROPOUT
        return (same or self.roles.of(node) not in _KEPT) and reader.target not in HEAVY

    def _in_reading_order(self, ops: Sequence[fx.Node]) -> list[fx.Node]:
        """The ops line by line, with neighbouring lines that make query, key and value in that order."""
        lines: dict[int, list[fx.Node]] = {}  # position → the op of a line, after what is folded into it
        for node in ops:
            lines.setdefault(self.line_of(node), []).append(node)
        ordered: list[fx.Node] = []
        run: list[list[fx.Node]] = []
        for _, line in sorted(lines.items()):
            if self.roles.of(line[-1]) in _QUERY_KEY_VALUE and not any(map(is_random, line)):
                run.append(line)
                continue
            ordered += [n for each in (*self._by_role(run), line) for n in each]
            run = []
        return [*ordered, *(n for line in self._by_role(run) for n in line)]

    def _by_role(self, lines: list[list[fx.Node]]) -> list[list[fx.Node]]:
        """Lines by role, unless one reads another of a different role."""
        roles = {node: self.roles.of(line[-1]) for line in lines for node in line}
        if any(roles.get(operand, role) != role for node, role in roles.items() for operand in node_inputs(node)):
            return lines
        return sorted(lines, key=lambda line: _QUERY_KEY_VALUE.index(self.roles.of(line[-1])))


def is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers: dropout, also that of attention, or a region that has some."""
    return bool(node.kwargs["random"]) if node.target is region_call else draws(node)


def is_constant(node: fx.Node) -> bool:
    """Whether a node is a parameter or a buffer."""
    return info(node).role in (Role.PARAMETER, Role.BUFFER)


def _innermost(node: fx.Node, inside: Callable[[fx.Node], bool]) -> fx.Node:
    """The op under a chain of views, casts and biases, as far as it is `inside`."""
    while (is_postfix(node) or is_bias_add(node)) and inside(node_inputs(node)[0]):
        node = node_inputs(node)[0]
    return node
