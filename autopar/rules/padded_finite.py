"""Whether values and derivatives at pads are finite: only there 0 times anything is 0, in forward and backward.

Real tokens are taken to be finite where the model without pads is. Pads are not like them, for they are 0, so here
finiteness is proved, for operands of a usual size: an op with a pole needs an interval that keeps away from it, one
that grows without measure a bound, and −inf reaches only what hides scores with it (+inf is refused by Interval).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import torch
from torch import fx

from ..ir.graph import info, node_inputs, op_name
from .arguments import option
from .padded_bounds import arguments_of
from .padded_values import Interval, Padded, PadsMatter

aten = torch.ops.aten

_SMOOTH = {
    "add", "sub", "rsub", "mul", "neg", "positive", "where", "masked_fill", "to", "alias", "clone", "detach",
    "dropout", "lerp", "addcmul", "tanh", "sigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu",
    "leaky_relu", "hardswish", "hardsigmoid", "hardtanh", "log_sigmoid", "softplus", "sin", "cos", "atan", "asinh",
    "erf", "abs", "square", "sign", "sgn", "round", "floor", "ceil", "trunc", "clamp", "clamp_min", "clamp_max",
    "maximum", "minimum", "fmax", "fmin", "threshold", "heaviside",
}  # fmt: skip
_DIVISIONS = {"div": 2, "floor_divide": 2, "remainder": 2, "fmod": 2}  # like y ** -2, which is div's derivative
_ROOTS = {"log": 1, "log2": 1, "log10": 1, "sqrt": 0.5, "rsqrt": 1.5, "reciprocal": 2}  # likewise, of x > 0
_EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh"}
_HIDES = {"where", "masked_fill", "to", "alias", "clone", "detach", "add"}  # what a mask of −inf goes through
_SIZE = 1e6  # values may be as large, and their products with a derivative must still be finite


def check_poles(node: fx.Node, operands: Sequence[Padded]) -> None:
    """PadsMatter where an elementwise op, or its derivative, may have no finite value at a pad."""
    if info(node).dtype == torch.bool:
        return
    dims = [i for i in range(-len(info(node).shape), 0)
            if any(-i <= len(x.dims) and x.dims[i] is not None for x in operands)]  # fmt: skip
    at_pads = [[x.at(i) for x in operands] for i in dims] + [[x.whole for x in operands]] * (len(dims) > 1)
    if not all(_has_no_pole(node, arguments_of(node, found)) for found in at_pads):
        raise PadsMatter(
            "may have no finite value or derivative at pads, which then reaches the real tokens as nan: add an "
            "epsilon to what it divides by or takes the root of, or clamp it; what it exponentiates, from above"
        )


def _has_no_pole(node: fx.Node, found: Sequence[Interval]) -> bool:
    name = op_name(node)
    if name in _DIVISIONS:
        return _away(found[1], _DIVISIONS[name], info(node).dtype)
    if name in _ROOTS:
        return found[0].low > 0 and _away(found[0], _ROOTS[name], info(node).dtype)
    if name == "log1p":
        return found[0].low > -0.999
    if name in _EXPONENTIALS:
        ends = (found[0].low, found[0].high) if name in ("sinh", "cosh") else (found[0].high,)
        return all(abs(end) < _most(info(node).dtype) or end < 0 and len(ends) == 1 for end in ends)
    if name == "pow":
        if isinstance(node.args[1], fx.Node) and info(node).dtype.is_floating_point:
            return _tensor_power(found[0], found[1], info(node).dtype)
        return _power(found[0], found[1].constant, info(node).dtype)
    whole = not any(info(n).dtype.is_floating_point for n in (node, *node_inputs(node)))
    return name in _SMOOTH or whole


def _most(dtype: torch.dtype) -> float:
    """The logarithm of the largest derivative that is multiplied with values and stays finite."""
    return log(torch.finfo(dtype).max) - log(_SIZE) if dtype.is_floating_point else inf


def _away(x: Interval, power: float, dtype: torch.dtype) -> bool:
    """Whether |x| ** −power is far below the largest number, for x not 0."""
    least = max(x.low, -x.high)
    return least > 0 and -power * log(least) <= _most(dtype)


def _power(base: Interval, exponent: float | None, dtype: torch.dtype) -> bool:
    if exponent is None:
        return not dtype.is_floating_point
    largest = max(abs(base.low), abs(base.high))
    if exponent >= 0 and exponent.is_integer():
        return exponent <= 4 if largest == inf else largest <= 1 or exponent * log(largest) < _most(dtype)
    return base.low > 0 and _away(base, 1 - exponent, dtype) or exponent > 1 and base.low >= 0


def _tensor_power(base: Interval, exponent: Interval, dtype: torch.dtype) -> bool:
    """Whether its derivative by the exponent is finite too: that takes the logarithm of the base."""
    if base.low <= 0 or inf in (base.high, -exponent.low, exponent.high):
        return False
    steepest = max(abs(log(base.low)), abs(log(base.high)))
    return (1 + max(abs(exponent.low), abs(exponent.high))) * steepest < _most(dtype)


def check_epsilon(node: fx.Node) -> None:
    """PadsMatter of a norm that divides by 0 where all that it takes at a pad is the same."""
    given = option(node, "eps")
    epsilon = torch.finfo(info(node).dtype).eps if given is None else float(given)
    wide = torch.float64 if info(node).dtype == torch.float64 else torch.float32
    if epsilon <= 0 or not _away(Interval(epsilon, epsilon), 1.5, wide):
        raise PadsMatter(
            f"divides by the square root of a variance and eps={epsilon:g}, which may be 0 at pads: give it an eps "
            "of 1e-6, say"
        )


def check_infinite(node: fx.Node, operands: Sequence[Padded]) -> None:
    """PadsMatter where −inf is computed with, and does not only hide scores: 0 times it is nan."""
    infinite = [i for i, x in enumerate(operands) if not all(p.finite for p in (x.real, x.whole, *x.pads))]
    if not infinite or info(node).dtype == torch.bool or op_name(node) in _HIDES:
        return
    attends = node.target is aten.scaled_dot_product_attention.default and min(infinite) == 3
    mixes = node.target in (aten.softmax.int, aten.log_softmax.int)
    if not attends and not mixes:
        raise PadsMatter("computes with ±inf, of which 0 at pads may make nan: use it only to mask what softmax takes")


def as_real(node: fx.Node, operands: Sequence[Padded], dim: int, found: Interval) -> bool:
    """Whether at pads of a dim the result is −inf only where it is at real tokens too: what hides is the same for
    all tokens of the dim."""
    own = [(n, x) for n, x in zip(node_inputs(node), operands, strict=True)
           if not x.is_alike(dim)]  # fmt: skip
    chooses = any(info(n).dtype == torch.bool for n, _ in own)
    return found.constant is None and not chooses and all(x.at(dim).finite for _, x in own)
