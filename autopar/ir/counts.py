"""The counts of a program: numbers of the whole global batch that need nothing but the model's inputs.

Each is a buffer of the model, `_count`, `_count_2`, …, filled before a step's first forward: the block "count"
computes this rank's share from its inputs, and the runtime sums the shares.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import sympy
import torch
from torch import fx

from .build import call
from .graph import COUNT, B, Block, NodeInfo, Role, S, Shape, info, node_inputs, set_info

aten = torch.ops.aten


class Counts:
    """Makes counts of a graph: each a placeholder in it, and a result of the block "count"."""

    def __init__(self, graph: fx.Graph) -> None:
        self._of = graph
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._made: dict[Hashable, fx.Node] = {}
        self._results: list[fx.Node] = []

    def of(self, value: fx.Node) -> fx.Node:
        """The sum over micro-batches and ranks of a value that depends on inputs only."""
        if value not in self._made:
            self._made[value] = self._placeholder(self._copy(value), info(value))
        return self._made[value]

    def of_size(self, size: sympy.Expr) -> fx.Node | None:
        """A multiple of the batch size, for the whole batch.

        None where no input tells the sizes it needs, and where parts of a batch do not add up to it: b², b - 1.
        """
        if B in size.free_symbols and B in sympy.cancel(size / B).free_symbols:
            return None
        inputs = [n for n in self._of.nodes if n.op == "placeholder" and info(n).role is Role.INPUT]
        source = next((n for n in inputs if size.free_symbols <= {*dims_of(info(n).shape)}), None)
        if source is None:
            return None
        if size not in self._made:
            facts = NodeInfo((), torch.int64, source=info(source).source)
            share = call(self._graph, aten.new_full.default, (self._copy(source), [], size), facts, dtype=torch.int64)
            self._made[size] = self._placeholder(share, facts)
        return self._made[size]

    def block(self) -> Block | None:
        """The block "count"; none without counts."""
        if not self._results:
            return None
        self._graph.output(tuple(self._results))
        return Block(COUNT, self._graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            for operand in node.all_input_nodes:
                self._copy(operand)
            self._copies[node] = self._graph.node_copy(node, lambda n: self._copies[n])
        return self._copies[node]

    def _placeholder(self, share: fx.Node, facts: NodeInfo) -> fx.Node:
        name = f"_count_{len(self._results) + 1}" if self._results else "_count"
        self._results.append(share)
        first = next(node for node in self._of.nodes if node.op != "placeholder")  # a pass may have replaced others
        with self._of.inserting_before(first):
            count = self._of.placeholder(name)
        return set_info(count, NodeInfo(facts.shape, facts.dtype, role=Role.BUFFER, ref=name))


def of_inputs_only(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a value is the same function of the model's inputs on every rank: no parameter, buffer or randomness."""
    if node not in known:
        facts = info(node)
        if node.op == "placeholder":
            known[node] = facts.role is Role.INPUT
        else:
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            known[node] = not random and all([of_inputs_only(n, known) for n in node_inputs(node)])
    return known[node]


def dims_of(shape: Shape) -> dict[Any, int]:
    """The dim that tells `b` and that which tells `s`, alone in a size a·s + c: without a constant, if there is one."""
    found = [
        (size.subs(symbol, 0) == 0, -size.coeff(symbol), symbol, i)
        for i, size in enumerate(map(sympy.expand, shape))
        for symbol in (B, S)
        if size.free_symbols == {symbol} and size.is_polynomial(symbol) and sympy.degree(size, symbol) == 1
    ]
    return {symbol: i for *_, symbol, i in sorted(found, key=lambda item: item[:2])}
