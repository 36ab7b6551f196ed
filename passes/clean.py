"""Remove what tracing added and the math does not need; recognise RMS norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, arguments, info
from autopar.plan.plan import Plan
from autopar.rules.verify import Level

aten = torch.ops.aten

_CASTS = {
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten._to_copy.default,
}  # fmt: skip
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default,
    aten.squeeze.default, aten.squeeze.dims,  # which would drop the batch too where a micro-batch is one sample
}  # fmt: skip
_EXPANSIONS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
_REPEATS = {aten.repeat.default, aten.tile.default}
_PERMUTATIONS = {
    aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist, aten.swapaxes.default,
    aten.swapdims.default,
}  # fmt: skip
_NEW = {
    aten.new_zeros.default: aten.zeros.default, aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default, aten.new_empty.default: aten.empty.memory_format,
}  # fmt: skip
_IDENTITIES = {aten.contiguous.default, aten.alias.default, aten.lift_fresh_copy.default, aten.clone.default}
_IDENTITIES_OF_A_TYPE = {  # where shape and dtype stay
    aten.to.dtype, aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.squeeze.dim,
}  # fmt: skip
_NEUTRAL: dict[Any, float] = {aten.mul.Tensor: 1.0, aten.add.Tensor: 0.0, aten.div.Tensor: 1.0}


@dataclass(frozen=True)
class Clean:
    """Drop casts, copies, slices and dropouts that do nothing; make shape arguments canonical.

    Requires: a traced program of one block. Ensures: every cast is `to.dtype(x, dtype)` and changes the
    dtype; every view is `reshape(x, shape)` with `b` and `s` in its shape; weightless RMS norms are
    `rms_norm`; constants are made from sizes alone; no device, no dead code.

        to = to.dtype(h, float32)          |   (bf16)
        m = mean(pow(to, 2), [-1], True)   |   r = rms_norm(h, [64], None, 1e-06)
        r = to.dtype(mul(to, rsqrt(add(m, 1e-06))), bfloat16)
    """

    name: ClassVar[str] = "clean"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in list(graph.nodes):
            if node.op == "call_function":
                _canonical(node)
        for node in list(graph.nodes):
            if node.op == "call_function" and (same := _same_value(node)) is not None:
                replace_node(node, same)
        for node in list(graph.nodes):
            if node.op == "call_function":
                _recognise_rms_norm(node)
        eliminate_dead(graph)
        return program


def _canonical(node: fx.Node) -> None:
    facts = info(node)
    if node.target in _CASTS:
        node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], facts.dtype), {}
    elif node.target in _RESHAPES:
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], list(facts.shape)), {}
    elif node.target in _EXPANSIONS:
        node.target, node.args, node.kwargs = aten.expand.default, (node.args[0], list(facts.shape)), {}
    elif node.target in _NEW:  # of the operand they take the dtype alone: its batch is nothing to them
        fill = arguments(node)[2:] if node.target is aten.new_full.default else ()
        node.target, node.args, node.kwargs = _NEW[node.target], (list(facts.shape), *fill), {"dtype": facts.dtype}
    elif node.target is aten.narrow.default:
        source, dim, start, length = arguments(node)
        node.target, node.args = aten.slice.Tensor, (source, dim, start, start + length)
    elif node.target in _PERMUTATIONS:
        order = _order(node)
        node.target, node.args, node.kwargs = aten.permute.default, (node.args[0], order), {}
    elif node.target in _REPEATS:
        _expand_repeats(node)


def _expand_repeats(node: fx.Node) -> None:
    """repeat(x [h, t], [b, 1]) → reshape(expand(reshape(x, [1, h, t]), [b, h, t]), [b·h, t]): it belongs to samples."""
    facts, source, one = info(node), arguments(node)[0], sympy.Integer(1)
    own = (*(one,) * (len(facts.shape) - len(info(source).shape)), *info(source).shape)
    single: list[sympy.Expr] = []
    grown: list[sympy.Expr] = []
    for size, whole in zip(own, facts.shape, strict=True):
        times = sympy.cancel(whole / size)
        apart = 1 not in (times, size)
        single += [one, size] if apart else [size]
        grown += [times, size] if apart else [whole]
    with node.graph.inserting_before(node):
        source = call(node.graph, aten.reshape.default, (source, single), facts, tuple(single))
        source = call(node.graph, aten.expand.default, (source, grown), facts, tuple(grown))
    node.target, node.args, node.kwargs = aten.reshape.default, (source, list(facts.shape)), {}


def _order(node: fx.Node) -> list[int]:
    """Which dim of the operand each dim of the result is, found on a tensor whose strides tell them apart."""
    target: Any = node.target
    probe = torch.empty((2,) * len(info(node).shape), device="meta")
    moved = target(probe, *node.args[1:], **node.kwargs)
    return [probe.stride().index(stride) for stride in moved.stride()]


def _same_value(node: fx.Node) -> fx.Node | None:
    """The operand that `node` equals, if it does nothing."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source: fx.Node = node.args[0]
    same_type = info(source).shape == info(node).shape and info(source).dtype == info(node).dtype
    target, rest = node.target, node.args[1:]
    if same_type and target in _NEUTRAL:
        does_nothing = not isinstance(rest[0], fx.Node) and rest[0] == _NEUTRAL[target]
    elif target is aten.detach.default:
        does_nothing = not info(source).requires_grad
    elif target is aten.dropout.default:
        does_nothing = rest[0] == 0.0 or rest[1] is False
    else:
        does_nothing = target in _IDENTITIES or same_type and target in _IDENTITIES_OF_A_TYPE
    return source if does_nothing else None


def _recognise_rms_norm(node: fx.Node) -> None:
    """Replace x·rsqrt(mean(x²) + eps), with the author's upcast and cast back, by rms_norm(x, [d], None, eps)."""
    match = _rms_operands(node)
    if match is None:
        return
    source, eps = match
    last = node
    if source.target is aten.to.dtype and isinstance(source.args[0], fx.Node):
        original = source.args[0]
        readers = list(node.users)
        cast_back = len(readers) == 1 and readers[0].target is aten.to.dtype
        if not cast_back or info(readers[0]).dtype != info(original).dtype:
            return
        source, last = original, readers[0]
    with node.graph.inserting_after(last):
        facts = info(last)
        norm = call(node.graph, aten.rms_norm.default, (source, [facts.shape[-1]], None, eps), facts)
    replace_node(last, norm)


def _rms_operands(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, eps) if node is mul(x, rsqrt(add(mean(pow(x, 2), [-1], True), eps)))."""
    if node.target is not aten.mul.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    source, scale = node.args
    assert isinstance(source, fx.Node) and isinstance(scale, fx.Node)
    if scale.target is not aten.rsqrt.default:
        source, scale = scale, source
    (shifted,) = _arguments(scale, aten.rsqrt.default, 1)
    mean, eps = _arguments(shifted, aten.add.Tensor, 2)
    base = _squared(mean)
    if base is None or not isinstance(eps, float | int) or info(base).dtype != info(node).dtype:
        return None
    # T5 upcasts for the mean alone: the product with an fp32 root is fp32 as well.
    upcast = base.target is aten.to.dtype and base.args[0] is source
    return (base, float(eps)) if base is source or upcast else None


def _squared(mean: Any) -> fx.Node | None:
    """x if `mean` is mean(pow(x, 2), [-1], True)."""
    square, dims, keepdim = _arguments(mean, aten.mean.dim, 3)  # a fourth would be a dtype of its own
    base, power = _arguments(square, aten.pow.Tensor_Scalar, 2)
    if not isinstance(base, fx.Node) or power != 2 or keepdim is not True or not dims:
        return None
    return base if list(dims) in ([-1], [len(info(base).shape) - 1]) else None


def _arguments(value: Any, target: Any, count: int) -> tuple[Any, ...]:
    """The arguments of a value that is this op of `count` of them, and has no keywords; else as many Nones."""
    matches = isinstance(value, fx.Node) and value.target is target and not value.kwargs and len(value.args) == count
    return value.args if matches else (None,) * count
