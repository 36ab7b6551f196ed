"""Whether values and derivatives at pads are finite: only there 0 times anything is 0, in forward and backward.

Real tokens are taken to be finite where the model without pads is. Pads are not like them, for they are 0, so here
finiteness is proved: an op with a pole needs an interval without it, and ±inf reaches only what hides scores with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .padded_values import Interval, Padded, PadsMatter, arguments_of

aten = torch.ops.aten

_SMOOTH = {
    "add", "sub", "rsub", "mul", "neg", "positive", "where", "masked_fill", "to", "alias", "clone", "detach",
    "dropout", "lerp", "addcmul", "exp", "exp2", "expm1", "tanh", "sigmoid", "relu", "relu6", "gelu", "silu", "mish",
    "elu", "selu", "celu", "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "log_sigmoid", "softplus", "sin",
    "cos", "atan", "sinh", "cosh", "asinh", "erf", "abs", "square", "sign", "sgn", "round", "floor", "ceil", "trunc",
    "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin", "threshold", "heaviside", "logaddexp",
}  # fmt: skip
_DIVISIONS = {"div", "floor_divide", "remainder", "fmod"}
_OF_POSITIVE = {"log": 0, "log2": 0, "log10": 0, "log1p": -1, "sqrt": 0, "rsqrt": 0, "reciprocal": 0}
_HIDES = {"where", "masked_fill", "to", "alias", "clone", "detach", "add"}  # what a mask of −inf goes through


def check_poles(node: fx.Node, operands: Sequence[Padded]) -> None:
    """PadsMatter where an elementwise op, or its derivative, may have no finite value at a pad."""
    if info(node).dtype == torch.bool:
        return
    for i in range(-len(info(node).shape), 0):
        if any(-i <= len(x.dims) and x.dims[i] is not None for x in operands):
            found = arguments_of(node, [x.at(i) for x in operands])
            if not _has_no_pole(node, found):
                raise PadsMatter(
                    "may have no finite value or derivative at pads, which then reaches the real tokens as nan: add an "
                    "epsilon to what it divides by or takes the root of, or clamp it"
                )


def _has_no_pole(node: fx.Node, found: Sequence[Interval]) -> bool:
    name = _name(node)
    if name in _DIVISIONS:
        return found[1].low > 0 or found[1].high < 0
    if name in _OF_POSITIVE:
        return found[0].low > _OF_POSITIVE[name]
    if name == "pow":
        base, exponent = found[:2]
        return base.low > 0 or exponent.constant in (0, 1) or exponent.low == exponent.high >= 2
    whole = not any(info(n).dtype.is_floating_point for n in (node, *node_inputs(node)))
    return name in _SMOOTH or whole


def check_infinite(node: fx.Node, operands: Sequence[Padded]) -> None:
    """PadsMatter where ±inf is computed with, and does not only hide scores: 0 times it is nan."""
    infinite = [i for i, x in enumerate(operands) if not all(p.finite for p in (x.real, *x.pads))]
    if not infinite or info(node).dtype == torch.bool or _name(node) in _HIDES:
        return
    attends = node.target is aten.scaled_dot_product_attention.default and min(infinite) == 3
    mixes = node.target in (aten.softmax.int, aten.log_softmax.int)
    if not attends and not mixes:
        raise PadsMatter("computes with ±inf, of which 0 at pads may make nan: use it only to mask what softmax takes")


def as_real(node: fx.Node, operands: Sequence[Padded], dim: int, found: Interval) -> bool:
    """Whether at pads of a dim the result is −inf only where it is at real tokens too: what hides is the same for
    all tokens of the dim."""
    own = [(n, x) for n, x in zip(node_inputs(node), operands, strict=True)
           if -dim <= len(x.dims) and x.dims[dim] is not None]  # fmt: skip
    chooses = any(info(n).dtype == torch.bool for n, _ in own)
    return found.constant is None and not chooses and all(x.at(dim).finite for _, x in own)


def _name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]
