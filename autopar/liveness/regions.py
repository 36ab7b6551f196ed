"""The regions of a layer that can be recomputed by themselves, found from its graph (`plan/recompute.py` names them).

A region ends with a projection and its bias, whose result nothing keeps: `checkpoint` stops early, so that this
product and the reduction after it are not run again. What it reads is kept, so it starts where that is least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ..ir.custom import EXPERTS
from ..ir.graph import B, Role, S, arguments, info, node_inputs
from ..placement import conversion
from ..rules import rule_of
from .saved import Saved

aten = torch.ops.aten

_ACTIVATIONS = {
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    aten.hardswish.default, aten.softplus.default, aten.leaky_relu.default, aten.elu.default, aten.mish.default,
}  # fmt: skip
_AT = {B: 1, S: 4096}  # where bytes are compared

Ops = tuple[fx.Node, ...]


@dataclass(frozen=True)
class Region:
    """Ops of a block in their order, which only the last one's result leaves."""

    name: str
    ops: Ops

    @property
    def result(self) -> fx.Node:
        return self.ops[-1]


def find_regions(saved: Saved) -> list[Region]:
    """Every region of a block, in order; those of one name do not overlap.

    A region that would change the order in which dropout masks are drawn is left out.
    """
    finder = _Finder(saved)
    found = [Region(name, finder.in_order(ops)) for name, ops in finder.regions()]
    place = {node: i for i, node in enumerate(saved.block.ops)}
    kept = [r for r in found if is_one(r.ops) and draws_alike(saved.block.ops, r.ops)]
    return sorted(kept, key=lambda region: place[region.result])


def gathered_order(ops: Collection[fx.Node], region: Collection[fx.Node]) -> list[fx.Node]:
    """All ops with those of a region next to each other, each after what it reads."""
    members = set(region)
    reached = set(region)  # and all that read it, directly or not
    for node in ops:
        if not reached.isdisjoint(node_inputs(node)):
            reached.add(node)
    order = list(ops)
    inside = [node for node in order if node in members]
    before = [node for node in order[: order.index(inside[-1])] if node not in reached]
    moved = {*before, *inside}
    return [*before, *inside, *(node for node in order if node not in moved)]


def is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers, judged by its arguments: attention with dropout_p=0 does not."""
    if rule_of(node).kind == "attention":
        given = arguments(node)[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0)
        return bool(given != 0)
    return node.target is aten.dropout.default


def is_one(region: Ops) -> bool:
    """Whether only the last op's result is read elsewhere, and backward passes through it."""
    own = set(region)
    return info(region[-1]).requires_grad and all(user in own for node in region[:-1] for user in node.users)


def draws_alike(ops: Collection[fx.Node], region: Ops) -> bool:
    """Whether dropout masks are drawn in the same order when the region's ops are next to each other."""
    return list(filter(is_random, ops)) == list(filter(is_random, gathered_order(ops, region)))


class _Finder:
    """The growing of regions from what an attention or an MLP has in its middle."""

    def __init__(self, saved: Saved) -> None:
        self.saved, self.ops = saved, saved.block.ops

    def regions(self) -> Iterator[tuple[str, set[fx.Node]]]:
        """(name, ops) of each region: attentions, then activations, then experts, the part before the whole."""
        taken: set[fx.Node] = set()
        for node in reversed(self.ops):
            if node in taken or not self._is_attention(node):
                continue
            core = self._to_projection(self._least(self._before({node}, whole=False), node))
            whole = self._before(core, whole=True)
            taken |= self._before({node}, whole=False) | whole
            yield "attention core", core
            if whole != core:
                yield "attention", whole
        for node in reversed(self.ops):
            if node in taken or not info(node).requires_grad:
                continue
            if node.target is EXPERTS:
                whole = self._before({node}, whole=True)
                taken |= whole
                yield "mlp", whole
            elif node.target in _ACTIVATIONS:
                part = self._to_projection(self._before({node}, whole=False))
                if any(map(self._is_projection, part)):
                    whole = self._before(part, whole=True)
                    taken |= whole
                    yield "activation", part
                    if whole != part:
                        yield "mlp", whole

    def in_order(self, ops: set[fx.Node]) -> Ops:
        return tuple(node for node in self.ops if node in ops)

    def _is_attention(self, node: fx.Node) -> bool:
        """Fused attention, or a product of two activations."""
        product = rule_of(node).kind == "matmul" and not self._is_projection(node)
        return info(node).requires_grad and (rule_of(node).kind == "attention" or product)

    def _is_projection(self, node: fx.Node) -> bool:
        """A product with a parameter."""
        return rule_of(node).kind == "matmul" and any(_is_parameter(n) for n in node_inputs(node))

    def _is_border(self, node: fx.Node) -> bool:
        """A projection, with its bias, or what is as much work."""
        operands = node_inputs(node)
        bias = node.target is aten.add.Tensor and any(map(_is_parameter, operands))
        heavy = self._is_projection(node) or rule_of(node).kind in ("experts", "opaque")
        lookup = node.target is aten.embedding.default
        return heavy or lookup or bias and any(n.op == "call_function" and self._is_border(n) for n in operands)

    def _before(self, ops: set[fx.Node], whole: bool) -> set[fx.Node]:
        """With all that feeds only these ops; `whole`: also projections, norms and what is gathered for them."""
        found = set(ops)
        for node in reversed(self.ops):
            if node in found or not node.users or not all(user in found for user in node.users):
                continue
            if whole or not (self._is_border(node) or any(self._talks(node, user) for user in node.users)):
                found.add(node)
        return found

    def _to_projection(self, ops: set[fx.Node]) -> set[fx.Node]:
        """With what follows up to a projection, which is the last of it; no collective comes between."""
        found = set(ops)
        while True:
            last = max(found, key=self.ops.index)
            users = list(last.users)
            if len(users) != 1 or users[0].op == "output" or self._talks(last, users[0]):
                return found
            user = users[0]
            if self._is_projection(user):
                return found | {user} | self._bias_of(user)
            beside = self._before(found | {user}, whole=False) - self._before(found, whole=False)
            grown = found | beside
            if self._is_border(user) or not self._takes(user, grown):
                return found
            found = grown

    def _bias_of(self, product: fx.Node) -> set[fx.Node]:
        """The addition of a projection's bias, unless it comes after a reduction: both are one call, rounded once."""
        users = list(product.users)
        alone = len(users) == 1 and users[0].op == "call_function" and not self._talks(product, users[0])
        return {users[0]} if alone and users[0].target is aten.add.Tensor and self._is_border(users[0]) else set()

    def _takes(self, node: fx.Node, found: set[fx.Node]) -> bool:
        """Whether the other operands of an op are the region's, constants, or projections for it alone."""
        for operand in node_inputs(node):
            root = _origin(operand)
            alone = len(operand.users) == 1 and root.op == "call_function" and self._is_border(root)
            constant = info(operand).role in (Role.PARAMETER, Role.BUFFER) or not info(operand).requires_grad
            if operand not in found and not alone and not constant:
                return False
        return True

    def _talks(self, value: fx.Node, reader: fx.Node) -> bool:
        """Whether the value is communicated before this reader has it."""
        given = self.saved.of[value.name].output
        wanted = [p for v, p in self.saved.reads(reader) if v is value]
        found = [conversion(given, placement) for placement in wanted]
        return any(c is not None and (c.forward or c.backward) for c in found)

    def _least(self, ops: set[fx.Node], seed: fx.Node) -> set[fx.Node]:
        """An attention with what feeds only it, or without what makes q, k and v of projections: what keeps least."""
        products = [n for n in ops if self._is_attention(n)]
        core = {n for n in ops if any(n is p or _follows(n, p) for p in products)} | {seed}
        core |= {n for n in ops if not info(n).requires_grad}
        core = {n for n in core if n is seed or all(user in core for user in n.users)}
        return self._without_views(ops if self._kept_bytes(ops) < self._kept_bytes(core) else core)

    def _without_views(self, ops: set[fx.Node]) -> set[fx.Node]:
        """Without the views it starts with: a view of what is kept costs nothing."""
        found = set(ops)
        for node in self.ops:
            if node in found and rule_of(node).kind == "view" and not any(n in found for n in node_inputs(node)):
                found.discard(node)
        return found

    def _kept_bytes(self, ops: set[fx.Node]) -> float:
        return float(sympy.sympify(self.saved.total_bytes([ops]), strict=True).subs(_AT))


def _follows(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node reads another one, directly or not."""
    waiting = list(node_inputs(node))
    seen: set[fx.Node] = set()
    while waiting:
        value = waiting.pop()
        if value is other:
            return True
        if value not in seen:
            seen.add(value)
            waiting += node_inputs(value)
    return False


def _is_parameter(node: fx.Node) -> bool:
    return info(_origin(node)).role is Role.PARAMETER


def _origin(node: fx.Node) -> fx.Node:
    """What a value is a view or a cast of."""
    while node.op == "call_function" and len(node_inputs(node)) == 1:
        if rule_of(node).kind != "view" and node.target is not aten.to.dtype:
            break
        node = node_inputs(node)[0]
    return node
