"""Complex numbers and Fourier transforms."""

from __future__ import annotations

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .arguments import dims_of, option
from .factor import Dims, Rule, RuleMaker

aten = torch.ops.aten

_FIRST = (frozenset({0}),)


def _transform(node: fx.Node) -> Rule:
    """The dims that are transformed are whole, and their sizes may change."""
    rank = len(info(node).shape)
    over = dims_of(option(node, "dim"), rank)
    dims: Dims = tuple(None if i in over else f"d{i}" for i in range(rank))
    return Rule((dims,), dims, linear=_FIRST)


def _pairs(node: fx.Node) -> Rule:
    """Pairs in the last dim, as one complex number or back."""
    (x,) = node_inputs(node)
    rank = min(len(info(x).shape), len(info(node).shape))
    dims: Dims = tuple(f"d{i}" for i in range(rank))
    pairs: Dims = (*dims, None)
    given, result = (pairs, dims) if node.target is aten.view_as_complex.default else (dims, pairs)
    return Rule((given,), result, linear=_FIRST, kind="view")


def _part(node: fx.Node) -> Rule:
    """The real or the imaginary part."""
    dims: Dims = tuple(f"d{i}" for i in range(len(info(node).shape)))
    return Rule((dims,), dims, linear=_FIRST, kind="view")


RULES: dict[object, RuleMaker] = {
    **{
        getattr(aten, f"fft_{name}").default: _transform
        for name in (
            "fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn",
            "rfftn", "irfftn", "fftshift", "ifftshift",
        )
    },
    aten.view_as_complex.default: _pairs,
    aten.view_as_real.default: _pairs,
    aten.real.default: _part,
    aten.imag.default: _part,
}  # fmt: skip
