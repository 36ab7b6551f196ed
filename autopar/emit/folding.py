"""Which ops share a line: the ops written inside the line of their only reader."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from ..ir.graph import Role, info, node_inputs
from ..ir.ops import is_collective
from ..liveness.regions import is_random as draws
from .idioms import part, rotate
from .roles import ACTIVATIONS, ATTENTIONS, DROPOUT, HEAVY, NORMS, SOFTMAX, Roles, is_bias_add, is_postfix

aten = torch.ops.aten

_INSIDE_ANY = {aten.slice.Tensor, aten.neg.default, aten.select.int, aten.to.dtype}


class Folding:
    """The ops of `ops` that are written inside another line. A set that shrinks where a line would be too long."""

    def __init__(self, ops: Sequence[fx.Node], results: Collection[fx.Node], roles: Roles) -> None:
        self.roles, self.results, self.ops = roles, set(results), set(ops)
        self.order = {node: i for i, node in enumerate(ops)}
        self.random = [node for node in ops if is_random(node)]
        self.folded = {node for node in ops if self._folds(node)}
        for node in self.random:
            if node in self.folded and self._passes_another(node):
                self.folded.discard(node)

    def __contains__(self, node: object) -> bool:
        return node in self.folded

    def line_of(self, node: fx.Node) -> int:
        """The position of the line a node is written in."""
        while node in self.folded:
            node = next(user for user in node.users if user in self.ops)
        return self.order[node]

    def split(self, node: fx.Node) -> None:
        """Give a node a line of its own."""
        self.folded.discard(node)

    def _passes_another(self, node: fx.Node) -> bool:
        """Whether a random op would be drawn after one that follows it: masks must not depend on the layout."""
        line = self.line_of(node)
        return any(self.order[node] < self.line_of(other) < line for other in self.random if other is not node)

    def _folds(self, node: fx.Node) -> bool:
        if len(node.users) != 1 or node in self.results or is_collective(node.target) or node.target is part:
            return False
        (reader,) = node.users
        if reader.target is part:
            return False
        if reader not in self.ops or node_inputs(reader).count(node) > 1:
            return False
        first = node_inputs(reader)[0] is node
        if node.target is aten.linear.default and is_bias_add(reader):
            return first and info(node).placement == info(reader).placement
        if is_postfix(reader):
            return first
        if is_collective(reader.target):
            return False
        if node.target in _INSIDE_ANY:
            return node.target is not aten.to.dtype or reader.target not in HEAVY
        return self._fits(node, reader)

    def _fits(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether a person would write an op inside this reader."""
        head = self._head(node)
        own, read = self.roles.of(node), self.roles.of(reader)
        if reader.target is rotate:
            return False
        if head.target in HEAVY:
            joins = self.roles.is_residual(reader) and info(node).placement == info(reader).placement
            plain = own == read and (reader.target in ACTIVATIONS | {DROPOUT} or self.roles.main(reader) is node)
            sums = reader.target is aten.add.Tensor and head.target is aten.embedding.default
            return head.target not in ATTENTIONS and (joins or plain or sums)
        if head.target in NORMS:
            weighted = reader.target is aten.mul.Tensor and self.roles.main(reader) is node
            return weighted or own == read and reader.target in {*NORMS, DROPOUT}
        if head.target in SOFTMAX:
            return reader.target is DROPOUT
        if own in ("q", "k", "v", "gate", "up", "logits", "labels", "angles") and own != read:
            return False
        return reader.target not in HEAVY

    def _head(self, node: fx.Node) -> fx.Node:
        while (is_postfix(node) or is_bias_add(node)) and node_inputs(node)[0].op == "call_function":
            node = node_inputs(node)[0]
        return node


def in_reading_order(ops: Sequence[fx.Node], folding: Folding, roles: Roles) -> list[fx.Node]:
    """The ops line by line, with neighbouring lines that make query, key and value in that order."""
    lines: dict[int, list[fx.Node]] = {}  # position → the op of a line, after what is folded into it
    for node in ops:
        lines.setdefault(folding.line_of(node), []).append(node)
    ordered: list[fx.Node] = []
    run: list[list[fx.Node]] = []
    for _, line in sorted(lines.items()):
        if roles.of(line[-1]) in _QUERY_KEY_VALUE and not any(map(is_random, line)):
            run.append(line)
            continue
        ordered += [n for own in (*_sorted(run, roles), line) for n in own]
        run = []
    return [*ordered, *(n for line in _sorted(run, roles) for n in line)]


_QUERY_KEY_VALUE = ("q", "k", "v")


def _sorted(lines: list[list[fx.Node]], roles: Roles) -> list[list[fx.Node]]:
    """Lines by role, unless one reads another of a different role."""
    own = {node: roles.of(line[-1]) for line in lines for node in line}
    for line in lines:
        for node in line:
            if any(own.get(operand, own[node]) != own[node] for operand in node_inputs(node)):
                return lines
    return sorted(lines, key=lambda line: _QUERY_KEY_VALUE.index(roles.of(line[-1])))


def is_random(node: fx.Node) -> bool:
    """Dropout, also that of attention, or a region that has some."""
    return bool(node.kwargs["random"]) if node.target is part else draws(node)


def is_constant(node: fx.Node) -> bool:
    return info(node).role in (Role.PARAMETER, Role.BUFFER)
