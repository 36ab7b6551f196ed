"""What a block keeps for backward on one tp rank, by each rule's `saves`: what its GPU kernel keeps.

With some of its ops recomputed, what these keep is made again, and what they read is kept instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ..ir.custom import EXPERTS, LINEAR_CROSS_ENTROPY
from ..ir.graph import Block, NodeInfo, Role, Shape, info, node_inputs
from ..placement import REPLICATE, Kind, Placement, Strategy
from ..rules import rule_of
from ..rules.attention import kept_masks
from ..rules.losses import is_raised_loss

aten = torch.ops.aten
_ZERO = sympy.Integer(0)

# A tensor as it is stored: the node that made its storage and its placement; or what a kernel keeps of its own (None).
Stored = tuple[fx.Node, Placement | None]


@dataclass(frozen=True)
class Saved:
    """A block with its strategies on an axis of `tp` ranks. apart: nodes whose storage a stage counts
    by itself, once, and not each block that keeps it."""

    block: Block
    of: Mapping[str, Strategy]
    tp: int
    once_per_stage: frozenset[str] = frozenset()

    def reads(self, node: fx.Node) -> list[tuple[fx.Node, Placement]]:
        """Each operand with the placement it is read in."""
        return list(zip(node_inputs(node), self.of[node.name].inputs, strict=True))

    def total_bytes(self, recomputed: Sequence[Collection[fx.Node]] = ()) -> sympy.Expr:
        """Activations kept from forward to backward when each of these sets of ops is recomputed as one."""
        again = set().union(*recomputed)
        kept = self.kept(node for node in self.block.ops if node not in again)
        for ops in recomputed:
            kept |= self.arguments(ops)
        return sympy.Add(*kept.values())

    def live_bytes(self, ops: Collection[fx.Node]) -> sympy.Expr:
        """What these ops keep, which backward holds at once when they are recomputed."""
        return sympy.Add(*self.kept(ops).values())

    def kept(self, ops: Iterable[fx.Node]) -> dict[Stored, sympy.Expr]:
        """Each tensor that these ops keep, once, with its bytes."""
        found: dict[Stored, sympy.Expr] = {}
        for node in ops:
            found |= self.kept_by(node)
        return found

    def kept_by(self, node: fx.Node) -> dict[Stored, sympy.Expr]:
        """What one op keeps: operands and result by its rule, and what its kernel has beside them."""
        if not info(node).requires_grad:
            return {}
        found: dict[Stored, sympy.Expr] = {}
        extra = self._kernels_own(node)
        if extra != 0:
            found[node, None] = extra
        for value, placement in self._saves(node):
            found |= self._stored(value, placement, node)
        return found

    def _saves(self, node: fx.Node) -> Iterator[tuple[fx.Node, Placement]]:
        """The operands and the result that an op keeps by its rule, as it reads and gives them."""
        for position in rule_of(node).saves:
            if position < 0:
                yield node, self.of[node.name].output
            elif needed(node, position):
                yield self.reads(node)[position]

    def keeps_storage(self, value: fx.Node) -> bool:
        """Whether an op keeps a value where it lies, be it through a view."""
        saved = (item for node in self.block.ops if info(node).requires_grad for item in self._saves(node))
        return any(storage(v) is storage(value) and self._lies(v, placement) for v, placement in saved)

    def _lies(self, value: fx.Node, placement: Placement) -> bool:
        """Whether a value read in a placement is in its own storage, not converted to another."""
        return _stored_as(placement) == _stored_as(self.of[value.name].output)

    def arguments(self, ops: Collection[fx.Node]) -> dict[Stored, sympy.Expr]:
        """What some ops read of others, as they read it: it is kept where they are recomputed."""
        found: dict[Stored, sympy.Expr] = {}
        for node in ops:
            for value, placement in self.reads(node):
                if value not in ops:
                    found |= self._stored(value, placement, node)
        return found

    def values(self, nodes: Iterable[fx.Node]) -> sympy.Expr:
        """Bytes of some values as they are, but of those apart."""
        own = (n for n in nodes if n.name not in self.once_per_stage)
        return sympy.Add(*(local_bytes(info(n), self.of[n.name].output, self.tp) for n in own))

    def keeps(self, node: fx.Node) -> bool:
        """Whether an op keeps anything, be it a weight or what another one keeps too."""
        saves = any(p < 0 or needed(node, p) for p in rule_of(node).saves)
        return info(node).requires_grad and (saves or self._kernels_own(node) != 0)

    def keeps_result(self, node: fx.Node) -> bool:
        """Whether an op keeps something that is there only after it has run."""
        return -1 in rule_of(node).saves or any(place is None for _, place in self.kept_by(node))

    def _stored(self, value: fx.Node, placement: Placement, reader: fx.Node) -> dict[Stored, sympy.Expr]:
        root = storage(value)
        converted = placement != self.of[value.name].output
        is_there = info(root).role in (Role.PARAMETER, Role.BUFFER, Role.INPUT) or not (
            info(root).requires_grad or info(root).role is Role.OP
        )
        if is_there and not converted or root.name in self.once_per_stage and self._lies(value, placement):
            return {}
        size = local_bytes(info(value), placement, self.tp)
        if is_raised_loss(reader) and info(value).dtype.is_floating_point:
            size = size * max(1, 4 // info(value).dtype.itemsize)  # half precision is cast to fp32
        return {(value if converted else root, _stored_as(placement)): size}

    def _kernels_own(self, node: fx.Node) -> sympy.Expr:
        """fp32 statistics, log-sum-exp, masks of dropout and attention; what is kept of each pair of token, expert."""
        strategy = self.of[node.name]
        own = _statistics(node) / (self.tp if strategy.output.is_shard else 1)
        if rule_of(node).kind == "attention":
            masks = [self.reads(node)[place] for place in kept_masks(node, made=True)]
            own += sum(local_bytes(info(m), p, self.tp) * info(node).dtype.itemsize for m, p in masks)
        if node.target is EXPERTS:
            own += _inside_experts(node, self.tp if strategy.inputs[3].is_shard else 1)
        return own


def needed(node: fx.Node, position: int) -> bool:
    """A factor, or what is divided, is kept only if the other operand has a gradient: not where that is a number."""
    if node.target is not aten.mul.Tensor and (node.target is not aten.div.Tensor or position > 0):
        return True
    others = [o for i, o in enumerate(node_inputs(node)) if i != position]
    return any(info(o).requires_grad for o in others)


def storage(node: fx.Node) -> fx.Node:
    """The node whose storage this one shares, through views.

    A reshape of a transpose copies, but that of an attention's result: kernels give it in the layout [b, s, h, d].
    """
    while node.op == "call_function" and rule_of(node).kind == "view" and node_inputs(node):
        source = node_inputs(node)[0]
        turned = source.target in (aten.transpose.int, aten.permute.default)
        made_so = turned and rule_of(node_inputs(source)[0]).kind == "attention"
        if node.target is aten.reshape.default and turned and not made_so:
            return node
        node = source
    return node


def tensor_bytes(facts: NodeInfo) -> sympy.Expr:
    """Bytes of the whole tensor."""
    return numel(facts.shape) * facts.dtype.itemsize


def local_bytes(facts: NodeInfo, placement: Placement, tp: int) -> sympy.Expr:
    """Bytes of one rank's part."""
    return tensor_bytes(facts) / (tp if placement.is_shard else 1)


def numel(shape: Shape) -> sympy.Expr:
    """Elements of a tensor."""
    return sympy.Mul(*shape) if shape else sympy.Integer(1)


def _stored_as(placement: Placement) -> Placement:
    """Both whole placements are the same storage."""
    return REPLICATE if placement.kind is Kind.GRAD_PARTIAL else placement


def _statistics(node: fx.Node) -> sympy.Expr:
    """What a GPU kernel keeps beside tensors of the graph: fp32 statistics, log-sum-exp, dropout masks."""
    shape = info(node).shape
    if node.target is aten.layer_norm.default:
        return 2 * 4 * numel(shape[:-1])
    if node.target is aten.rms_norm.default:
        return 4 * numel(shape[:-1])
    if rule_of(node).kind == "attention":
        return 4 * numel(shape[:-1])
    if node.target is aten.dropout.default:
        return numel(shape)
    if node.target is LINEAR_CROSS_ENTROPY:  # log-sum-exp, and whether a row counts
        return (info(node).dtype.itemsize + 1) * info(node_inputs(node)[0]).shape[0]
    return _ZERO


def _inside_experts(node: fx.Node, tp: int) -> sympy.Expr:
    """What autograd keeps of each (token, expert) pair: row and result of d, and four values of the width f."""
    x, index, _, gate, *_ = (info(n) for n in node_inputs(node))
    return numel(index.shape) * (2 * x.shape[1] + 4 * gate.shape[1] / tp) * x.dtype.itemsize
