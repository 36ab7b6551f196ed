"""The head of a language model with its loss as one op: where a block has them, and the block with that op.

    logits = linear(x, w)                      |   rows = reshape(x, [b*s, d])
    rows = reshape(logits, [b*s, v])           |   loss = linear_cross_entropy(rows, w, target, chunks=8)
    loss = cross_entropy_loss(rows, target)    |

Between the two may stand what acts on each row alone: views and slices of the rows, a bias, casts to more
precision, a factor, a soft cap. Views and slices are moved before the head.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..placement import Strategy
from .custom import LINEAR_CROSS_ENTROPY
from .graph import Block, NodeInfo, arguments, info, node_inputs, set_info

aten = torch.ops.aten

_SUM = 2  # at::Reduction
_VIEWS = {aten.reshape.default, aten.slice.Tensor}
_SAME = {aten.alias.default, aten.clone.default, aten.contiguous.default}


@dataclass
class Head:
    """One loss with its head. `views`: what moves before the head, in order; logits are scale · (x wᵀ + bias)."""

    loss: fx.Node
    linear: fx.Node
    views: list[fx.Node] = field(default_factory=list)
    between: list[fx.Node] = field(default_factory=list)  # all ops from linear to loss, last first
    bias: fx.Node | None = None  # the op that adds it
    scale: float = 1.0
    softcap: float | None = None

    @property
    def columns(self) -> Any:
        """The size of the vocabulary."""
        return info(node_inputs(self.linear)[1]).shape[0]


def find_heads(block: Block) -> list[Head]:
    """The losses of a typed block that can be computed with their heads, the vocabulary in slices."""
    losses = [node for node in block.ops if node.target is aten.cross_entropy_loss.default]
    return [head for node in losses if (head := _head(node)) is not None]


def why_no_head(block: Block | None) -> str:
    """Why `find_heads` finds none in the last block of a program."""
    if block is None or not any(n.target is aten.cross_entropy_loss.default for n in block.ops):
        return "the model has no cross-entropy"
    return (
        "the loss is no plain sum of cross-entropies of logits that one matmul makes: weights, label smoothing, "
        "another reader of the logits, or a conversion between ranks stand between the two"
    )


def with_chunks(block: Block, chunks: Any) -> Block:
    """A copy of a typed block whose heads are one op with their losses; `chunks`: a number, or a symbol."""
    block = block.copy()
    for head in find_heads(block):
        _fuse(block, head, chunks)
    return block


# --------------------------------------------------------------------------------
# Finding


def _head(loss: fx.Node) -> Head | None:
    logits, target, *more = arguments(loss)
    given: list[Any] = [*more, *(None, 1, -100, 0.0)[len(more) :]]
    weight, reduction, _, smoothing = given
    probabilities = info(target).dtype.is_floating_point
    if loss.kwargs or weight is not None or reduction != _SUM or smoothing or probabilities:
        return None
    head = Head(loss, logits)
    reader = loss
    while head.linear.target is not aten.linear.default:
        node = head.linear
        if node.op != "call_function" or not _alone(node, reader) or not _passes(node, head):
            return None
        head.between.append(node)
        head.linear, reader = node_inputs(node)[0], node
    if not _alone(head.linear, reader) or len(node_inputs(head.linear)) != 2 or len(info(logits).shape) != 2:
        return None
    head.between.append(head.linear)
    head.views.reverse()
    return head


def _alone(node: fx.Node, reader: fx.Node) -> bool:
    """Whether nothing else reads a value, and it is read as it lies."""
    return len(node.users) == 1 and info(reader).strategies["tp"].inputs[0] == info(node).placement


def _passes(node: fx.Node, head: Head) -> bool:
    """Take one op between head and loss, from the last to the first; whether it acts on each row alone."""
    operand = info(node_inputs(node)[0]) if node_inputs(node) else info(node)
    if node.target in _SAME:
        return True
    if node.target is aten.to.dtype:
        return info(node).dtype.itemsize >= max(4, operand.dtype.itemsize)
    if node.target in _VIEWS:
        head.views.append(node)
        return _keeps_columns(node, operand)
    if head.bias is not None:
        return False  # a factor before the bias, or a second one
    if (factor := _factor(node)) is not None:
        head.scale *= factor
        return True
    if node.target is aten.tanh.default and head.softcap is None:
        head.softcap = head.scale  # scale · tanh(factor · y) = softcap · tanh(factor · scale · y / softcap)
        return True
    return _takes_bias(node, head)


def _keeps_columns(node: fx.Node, operand: NodeInfo) -> bool:
    last = len(operand.shape) - 1
    if node.target is aten.slice.Tensor:
        dim: int = arguments(node)[1] if len(node.args) > 1 else 0
        return dim % (last + 1) != last
    return bool(info(node).shape[-1] == operand.shape[-1])


def _factor(node: fx.Node) -> float | None:
    """The number that an op multiplies by."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or node.kwargs or len(node_inputs(node)) != 1:
        return None
    value, number = arguments(node)
    if not isinstance(value, fx.Node) or not isinstance(number, int | float) or number == 0:
        return None
    return float(number) if node.target is aten.mul.Tensor else 1 / number


def _takes_bias(node: fx.Node, head: Head) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node_inputs(node)) != 2:
        return False
    product, bias = node_inputs(node)
    one = len(info(bias).shape) == 1 and info(bias).shape == info(product).shape[-1:]
    if not one or product.target is not aten.linear.default or info(bias).dtype != info(product).dtype:
        return False
    head.bias = node
    return True


# --------------------------------------------------------------------------------
# Rewriting


def _fuse(block: Block, head: Head, chunks: Any) -> None:
    loss = head.loss
    x, weight = node_inputs(head.linear)
    biases = [] if head.bias is None else [head.bias]
    with block.graph.inserting_before(loss):
        rows = _rows(block, head, x)
        given = (rows, weight, node_inputs(loss)[1], *(node_inputs(bias)[1] for bias in biases))
        fused = block.graph.call_function(LINEAR_CROSS_ENTROPY, given, _options(head, chunks))
    fused_strategies: dict[str, Strategy] = {}
    for axis, strategy in info(loss).strategies.items():
        product, added = info(head.linear).strategies[axis], (info(bias).strategies[axis].inputs[1] for bias in biases)
        reads = product.inputs[0] if rows is x else info(rows).strategies[axis].output
        fused_strategies[axis] = Strategy((reads, product.inputs[1], strategy.inputs[1], *added), strategy.output)
    dtype = torch.promote_types(info(x).dtype, torch.float32)
    set_info(fused, replace(info(loss), dtype=dtype, strategies=fused_strategies))
    loss.replace_all_uses_with(fused)
    for node in (loss, *head.between):
        block.graph.erase_node(node)


def _options(head: Head, chunks: Any) -> dict[str, Any]:
    """The keywords of the op that are not at their defaults."""
    ignored = arguments(head.loss)[4] if len(head.loss.args) > 4 else -100
    scale = 1.0 if abs(head.scale - 1) < 1e-12 else head.scale  # 30 · (y / 30)
    given = {"scale": (scale, 1.0), "softcap": (head.softcap, None), "ignore_index": (ignored, -100)}
    return {"chunks": chunks} | {name: value for name, (value, default) in given.items() if value != default}


def _rows(block: Block, head: Head, x: fx.Node) -> fx.Node:
    """x, through the views that the logits went through."""
    facts, width = info(x), info(x).shape[-1]
    lies = {axis: strategy.inputs[0] for axis, strategy in info(head.linear).strategies.items()}
    for view in head.views:
        args = [x, *arguments(view)[1:]]
        if view.target is aten.reshape.default:
            args[1] = [*args[1][:-1], width]
        # A shard of the rows, or whole as before.
        after = {axis: info(view).strategies[axis].output if p.is_shard else p for axis, p in lies.items()}
        strategies = {axis: Strategy((lies[axis],), after[axis]) for axis in lies}
        x = block.graph.call_function(view.target, tuple(args))  # type: ignore[arg-type]
        shape, module, source = (*info(view).shape[:-1], width), info(view).module, info(view).source
        set_info(x, facts.made(shape=shape, module=module, source=source, strategies=strategies))
        lies = after
    return x
