"""The roles of a block's values: query and key, gate and up, the residual stream, a branch of it.

A role starts where it shows (the second operand of attention is a key) and goes back through ops that keep what
a value is (views, casts, collectives, a bias, a rotation) to the op that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ir.custom import LINEAR_CROSS_ENTROPY
from ..ir.graph import Block, Role, info, node_inputs
from ..ir.ops import gathered_attention, is_collective, ring_attention
from ..rules import rule_of
from .idioms import region_call, rotate

aten: Any = torch.ops.aten

ATTENTIONS = {aten.scaled_dot_product_attention.default, ring_attention, gathered_attention}
_PRODUCTS = {aten.matmul.default, aten.bmm.default}
PROJECTIONS = {aten.linear.default, aten.mm.default, aten.addmm.default, *_PRODUCTS}
_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.convolution.default}
HEAVY = PROJECTIONS | ATTENTIONS | _CONVOLUTIONS | {aten.embedding.default}
NORMS = {aten.layer_norm.default, aten.rms_norm.default, aten.group_norm.default, aten.batch_norm.default}
ACTIVATIONS = {
    aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default,
    aten.hardswish.default, aten.softplus.default, aten.leaky_relu.default, aten.elu.default, aten.mish.default,
}  # fmt: skip
DROPOUT = aten.dropout.default
SOFTMAX = {aten.softmax.int, aten._softmax.default}
_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar}
_MASKING = {aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.tanh.default, aten.add.Tensor, aten.mul.Tensor}
_LOSSES = {
    aten.cross_entropy_loss.default: ("logits", "labels"),
    aten.mse_loss.default: ("prediction", "target"),
    LINEAR_CROSS_ENTROPY: ("", "", "labels"),
}
ATTENTION, MLP = re.compile(r"attn|attention", re.I), re.compile(r"mlp|ffn|feed_?forward|dense_?relu_?dense", re.I)


@dataclass
class Roles:
    """The roles of a block's nodes. `results`: what each result is to be called.

    `stream`: the residual stream: hidden states that came into the block and sums of a branch and them.
    """

    block: Block
    results: Mapping[fx.Node, str]
    names: dict[fx.Node, str] = field(default_factory=dict)
    stream: set[fx.Node] = field(default_factory=set)
    weights: set[fx.Node] = field(default_factory=set)  # what a softmax gave, through dropout and casts

    def __post_init__(self) -> None:
        self._find_stream()
        for node in self.block.ops:
            if node.target in SOFTMAX or self.main(node) in self.weights:
                self.weights.add(node)
        for node in reversed(self.block.ops):
            wanted = {self._as_read(node, user) for user in node.users}
            if len(wanted) == 1 and (name := wanted.pop()):
                self.names[node] = name

    def of(self, node: fx.Node) -> str:
        """The role of a node, or ""."""
        return self.names.get(node, "")

    def main(self, node: fx.Node) -> fx.Node | None:
        """The operand that an op only dresses: views, casts, collectives, a bias, a scale, dropout, a norm."""
        operands = node_inputs(node)
        if not operands:
            return None
        keeps = node.target in {rotate, DROPOUT, aten.alias.default, aten.clone.default} | NORMS
        if keeps or is_collective(node.target) or is_postfix(node):
            return operands[0]
        if node.target is aten.cat.default and operands[0].target is rotate:
            return operands[0]
        if node.target in _ARITHMETIC:
            data = [n for n in operands if info(n).role not in (Role.PARAMETER, Role.BUFFER)]
            return data[0] if len(data) == 1 else None
        return None

    def is_residual(self, node: fx.Node) -> bool:
        """A sum of the stream and a branch of it."""
        return node.target is aten.add.Tensor and any(n in self.stream for n in node_inputs(node))

    def _find_stream(self) -> None:
        for node in self.block.placeholders(Role.VALUE):
            if info(node).requires_grad and any(not _projects(user) for user in node.users):
                self.stream.add(node)
        for node in self.block.ops:
            if self._goes_on(node):
                self.stream.add(node)

    def _goes_on(self, node: fx.Node) -> bool:
        """Whether an op's value is the stream: a sum of it and a branch, or what alone reads it and only dresses it."""
        operands = node_inputs(node)
        before = [n for n in operands if n in self.stream and info(n).shape == info(node).shape]
        if node.target is aten.add.Tensor:
            return len(operands) == 2 and bool(before)
        dresses = is_collective(node.target) or node.target in {*NORMS, DROPOUT}
        return dresses and len(before) == 1 and len(before[0].users) == 1

    def _as_read(self, node: fx.Node, user: fx.Node) -> str:
        """The role that `node` has for its reader `user`, or ""."""
        if user.op == "output":
            return self.results.get(node, "")
        operands = node_inputs(user)
        if operands.count(node) > 1:
            return self.of(user) if user.target is aten.cat.default else ""
        place = operands.index(node)
        role = self._in_attention(user, place) or self._in_loss(user, place) or self._gated(node, user)
        if role:
            return role
        if self.is_residual(user) and node not in self.stream:
            return self._branch(node)
        return self.of(user) if self._keeps(node, user, place) else ""

    def _keeps(self, node: fx.Node, user: fx.Node, place: int) -> bool:
        """Whether `node` is already what `user` makes of it."""
        if self.of(user) == "angles" and user.target in _ARITHMETIC:
            return False
        masked = self.of(user) == "scores" and place == 0 and user.target in _MASKING
        return masked or self.main(user) is node

    def _in_attention(self, user: fx.Node, place: int) -> str:
        operands = node_inputs(user)
        if user.target in ATTENTIONS:
            return ("q", "k", "v", "mask")[place]
        if user.target in SOFTMAX:
            return "scores"
        if user.target in (aten.cos.default, aten.sin.default):
            return "angles"
        if user.target is aten.embedding.default and not is_positions(operands[1]):
            return "indices" if place == 1 else ""
        if user.target in _PRODUCTS and all(info(n).role is Role.OP for n in operands):
            if self.of(user) == "scores":
                return ("q", "k")[place]
            if operands[0] in self.weights:
                return ("probs", "v")[place]
        return ""

    def _in_loss(self, user: fx.Node, place: int) -> str:
        names = _LOSSES.get(user.target, ())
        return names[place] if place < len(names) else ""

    def _gated(self, node: fx.Node, user: fx.Node) -> str:
        """act(gate) * up."""
        if user.target in ACTIVATIONS and len(user.users) == 1:
            (product,) = user.users
            return "gate" if self._is_gate(product, user) else ""
        other = next((n for n in node_inputs(user) if n is not node), None)
        return "up" if other is not None and other.target in ACTIVATIONS and self._is_gate(user, other) else ""

    def _is_gate(self, product: fx.Node, act: fx.Node) -> bool:
        operands = node_inputs(product)
        if product.target is not aten.mul.Tensor or len(operands) != 2:
            return False
        up = operands[1 - operands.index(act)]
        return all(self.maker(n).target in PROJECTIONS for n in (up, node_inputs(act)[0]))

    def maker(self, node: fx.Node) -> fx.Node:
        """The op that made what a chain of dressings shows."""
        while node.op == "call_function" and (operand := self.main(node)) is not None:
            node = operand
        return node

    def _branch(self, node: fx.Node) -> str:
        """A branch is named for the submodule that ends it: attn, mlp, or its own name."""
        maker = self.maker(node)
        return branch_name(info(maker).module) if maker.target in HEAVY else ""


def branch_name(module: str) -> str:
    """ "self_attn.o_proj" → "attn", "mlp.c_proj" → "mlp", "output.dense" → "output", "1" → ""."""
    if ATTENTION.search(module):
        return "attn"
    if MLP.search(module):
        return "mlp"
    parts = [part for part in module.split(".") if not part.isdigit()]
    return "mlp" if not parts else parts[0]


def is_postfix(node: fx.Node) -> bool:
    """Written after its operand: x.transpose(1, 2), x.to(dtype), x[..., 8:]."""
    if (
        node.op != "call_function"
        or node.target in (rotate, region_call)
        or is_collective(node.target)
        or not node_inputs(node)
    ):
        return False
    cast = node.target is aten.to.dtype
    return cast or rule_of(node).kind == "view" and len(node_inputs(node)) == 1


def is_positions(node: fx.Node) -> bool:
    """A range of numbers, whatever its shape."""
    while is_postfix(node):
        node = node_inputs(node)[0]
    return node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step)


def is_bias_add(node: fx.Node) -> bool:
    """linear(x, w) + bias, a parameter of the width of its result."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node_inputs(node)) != 2:
        return False
    product, bias = node_inputs(node)
    if product.target is not aten.linear.default or info(bias).role is not Role.PARAMETER:
        return False
    return len(node_inputs(product)) == 2 and info(bias).shape == info(product).shape[-1:]


def _projects(user: fx.Node) -> bool:
    """Whether a reader takes a value as an encoder's output is taken: to project it."""
    return user.target in PROJECTIONS or is_collective(user.target) and all(map(_projects, user.users))
