"""Calls of the ops of vision, indexing, factories, reductions, and of ops that share a rule by category."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.results import RESULTS
from tests.numerics.rule_cases import Case, Operand, b, c, f, ids, p

aten = torch.ops.aten


def _cases(*calls: Any) -> list[Case]:
    return [call if isinstance(call, Case) else Case(call) for call in calls]


def z(*shape: int) -> Operand:
    return Operand(shape, "complex")


def _along(*more: Any) -> list[Case]:
    """An op with a dim argument."""
    return _cases((f(12, 4, 6), -1, *more), (f(4, 12), 0, *more), (f(5, 6), 1, *more))


def _results(target: Any) -> list[Case]:
    name = target._schema.name.removeprefix("aten::")
    if name in ("topk", "kthvalue"):
        return _cases((f(12, 4, 6), 2), (f(4, 12), 3, 0))
    if name in ("var_mean", "std_mean"):
        return _cases((f(12, 4, 6), [-1]), (f(4, 12), [0]))
    if target is aten.sort.stable:
        return _cases(Case((f(12, 4, 6),), {"stable": True, "dim": 1}), Case((f(4, 12),), {"stable": True, "dim": 0}))
    if name == "aminmax":
        return _cases(Case((f(12, 4),), {"dim": 0}), Case((f(12, 4),), {"dim": 1}))
    return _cases((f(12, 4, 6), -1), (f(4, 12), 0))


_CONV2D = _cases(
    (f(12, 6, 5, 5), f(12, 6, 3, 3)),
    (f(4, 6, 5, 5), f(12, 6, 3, 3), f(12), [2, 2], [1, 1]),
    (f(4, 12, 5, 5), f(12, 1, 3, 3), f(12), [1, 1], [1, 1], [1, 1], 12),
    (f(4, 12, 5, 5), f(24, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 6),
    (f(2, 4, 5, 5), f(4, 1, 2, 2), f(4), [1, 1], [0, 0], [1, 1], 4),
    (f(6, 12, 3, 3), f(12, 4, 1, 1), None, [1, 1], [0, 0], [1, 1], 3),
    (f(6, 5, 5), f(12, 6, 3, 3)),
)
_CONV1D = _cases(
    (f(12, 6, 5), f(12, 6, 3), f(12), [1], [1]),
    (f(4, 12, 5), f(12, 1, 3), None, [1], [0], [1], 12),
    (f(4, 6, 5), f(7, 6, 3)),
)
_IMAGES = (f(12, 4, 6, 6),), (f(4, 12, 4, 4),)


def _images(*more: Any) -> list[Case]:
    return _cases(*((*call, *more) for call in _IMAGES), (f(12, 4, 4), *more))


CASES: dict[object, list[Case]] = {
    # products
    aten.einsum.default: _cases(
        ("bhse,bhte->bhst", [f(2, 12, 4, 6), f(2, 12, 5, 6)]),
        ("...i,oi->...o", [f(12, 4, 6), f(12, 6)]),
        ("ij,jk", [f(4, 6), f(6, 12)]),
        ("bi,bj,bk->bij", [f(12, 4), f(12, 6), f(12, 2)]),
        ("bse,e->bs", [f(12, 4, 6), f(6)]),
        ("bij,bjk->bik", [f(1, 4, 6), f(12, 6, 4)]),
        ("ii->i", [f(6, 6)]),
    ),
    aten.mv.default: _cases((f(12, 6), f(6))),
    aten.dot.default: _cases((f(12), f(12))),
    # vision
    aten.conv2d.default: _CONV2D,
    aten.conv2d.padding: _cases((f(4, 6, 5, 5), f(12, 6, 3, 3), f(12), [1, 1], "same")),
    aten.conv1d.default: _CONV1D,
    aten.conv1d.padding: _cases((f(4, 6, 5), f(12, 6, 3), None, [1], "same")),
    aten.conv3d.default: _cases((f(2, 6, 3, 3, 3), f(12, 6, 2, 2, 2), f(12))),
    aten.conv_transpose2d.input: _cases(
        (f(4, 6, 5, 5), f(6, 12, 2, 2), f(12), [2, 2]),
        (f(2, 12, 3, 3), f(12, 2, 2, 2), f(24), [1, 1], [0, 0], [0, 0], 12),
    ),
    aten.conv_transpose1d.default: _cases((f(4, 6, 5), f(6, 12, 2))),
    aten.group_norm.default: _cases(
        (f(4, 12, 5), 6, f(12), f(12)), (f(12, 6, 2, 2), 3), (f(2, 12, 3), 4, f(12), f(12)),
    ),
    aten.batch_norm.default: _cases(
        (f(4, 12, 5), f(12), f(12), None, None, True, 0.1, 1e-5, False),
        (f(12, 4), f(4), f(4), c(4), Operand((4,), "scale"), False, 0.1, 1e-5, False),
    ),
    aten.instance_norm.default: _cases((f(4, 12, 5), f(12), f(12), None, None, True, 0.1, 1e-5, False)),
    aten.avg_pool2d.default: _images([2, 2]),
    aten.max_pool2d.default: _images([2, 2], [2, 2]),
    aten.adaptive_avg_pool2d.default: _images([2, 2]),
    aten.avg_pool1d.default: _cases((f(4, 12, 6), [2])),
    aten.max_pool1d.default: _cases((f(4, 12, 6), [2])),
    aten.adaptive_avg_pool1d.default: _cases((f(4, 12, 6), [2])),
    aten.upsample_nearest2d.vec: _cases((f(4, 12, 3, 3), None, [2.0, 2.0]), (f(12, 2, 3, 3), [6, 6], None)),
    aten.upsample_bilinear2d.vec: _cases((f(4, 12, 3, 3), [6, 6], False, None)),
    aten.upsample_bicubic2d.vec: _cases((f(4, 12, 3, 3), None, True, [2.0, 2.0])),
    aten.upsample_nearest1d.vec: _cases((f(4, 12, 3), [6], None)),
    aten.upsample_linear1d.vec: _cases((f(4, 12, 3), [6], False, None)),
    aten.replication_pad2d.default: _images([1, 1, 1, 1]),
    aten.reflection_pad2d.default: _images([1, 1, 1, 1]),
    aten.reflection_pad1d.default: _cases((f(4, 12, 6), [1, 2])),
    aten.pixel_shuffle.default: _cases((f(12, 8, 3, 3), 2)),
    aten.channel_shuffle.default: _cases((f(12, 8, 3, 3), 2)),
    # places
    aten.gather.default: _cases(
        (f(12, 4, 6), 2, ids(6, 12, 4, 3)), (f(4, 12), 0, ids(4, 4, 12)), (f(12, 6), 1, ids(6, 5, 2)),
    ),
    aten.scatter.src: _cases((f(12, 6), 1, ids(1, 12, 1), f(12, 1)), (c(4, 6), 0, ids(1, 1, 6), f(1, 6))),
    aten.scatter.value: _cases((f(12, 6), 1, ids(6, 12, 2), 3.0)),
    aten.scatter_add.default: _cases((f(12, 6), 1, ids(6, 12, 8), f(12, 8)), (f(4, 6), 0, ids(4, 3, 6), f(3, 6))),
    aten.index_select.default: _cases((f(12, 4), 0, ids(12, 6)), (f(12, 4, 6), 1, ids(4, 4))),
    aten.index.Tensor: _cases(
        (f(12, 4, 6), [ids(12, 8)]), (f(12, 4, 6), [None, ids(4, 6)]), (f(12, 4, 6), [ids(12, 5, 1), ids(4, 6)]),
        (f(12, 4, 6), [ids(12, 4), None, ids(6, 4)]), (f(4, 12, 6, 2), [None, ids(12, 3), ids(6, 1)]),
        (f(6, 4), [b(6, 4)]),
    ),
    aten.one_hot.default: _cases((ids(6, 12, 4), 6)),
    aten.diff.default: _cases(
        (f(12, 4),), (f(12, 4), 1, 0), (f(12, 4), 1, -1, f(12, 1)), (f(12, 4), 1, -1, f(12, 1), f(12, 1)),
    ),
    # along dims
    aten.cumsum.default: _along(),
    aten.cumprod.default: _along(),
    aten.logcumsumexp.default: _along(),
    aten.argsort.default: _cases((f(12, 4, 6), -1), (f(4, 12), 0)),
    aten.argsort.stable: _cases(Case((f(12, 4),), {"stable": True, "dim": 0})),
    aten.tril.default: _cases((f(12, 4, 6),), (f(4, 6), 1)),
    aten.triu.default: _cases((f(12, 4, 6), 1),),
    **{op: _results(target) for target, ops in RESULTS.items() for op in ops},
    # views
    aten.squeeze.default: _cases((f(4, 1, 6),), (f(1, 12),)),
    aten.squeeze.dims: _cases((f(1, 4, 1, 6), [0, 2])),
    aten.stack.default: _cases(([f(12, 4), f(12, 4)], 1), ([f(4, 12), c(4, 12)],), ([f(12), f(12), f(12)], -1)),
    aten.repeat_interleave.self_int: _cases((f(12, 4), 3, 0), (f(4, 12, 5), 2, 1), (f(12, 5), 2, 1), (f(4, 6), 2)),
    aten.flip.default: _cases((f(12, 4), [1]), (f(12, 4, 6), [0, -1])),
    aten.roll.default: _cases((f(12, 4), [1], [1]), (f(12, 4), [2])),
    aten.slice_scatter.default: _cases((f(12, 6), f(12, 2), 1, 1, 3), (f(12, 6), f(4, 6), 0, 0, 4)),
    aten.select_scatter.default: _cases((f(12, 6), f(12), 1, 2), (f(12, 6, 2), f(6, 2), 0, -1)),
    aten.unfold.default: _cases((f(12, 6), 1, 2, 2)),
    # factories
    **{
        op: _cases((f(12, 5),), (c(4, 6),))
        for op in (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default)
    },
    aten.full_like.default: _cases((f(12, 5), 2.0), (c(4, 6), 1)),
    aten.new_empty.default: _cases((c(3), [12, 5])),
    aten.arange.start_step: _cases((2, 12, 2)),
    aten.linspace.default: _cases((0.0, 1.0, 12)),
    aten.eye.default: _cases((12,)),
    aten.eye.m: _cases((12, 4)),
    aten.scalar_tensor.default: _cases((2.0,)),
    aten.tril_indices.default: _cases((4, 4)),
    aten.triu_indices.default: _cases((4, 4)),
    # elementwise
    aten.prelu.default: _cases((f(4, 12), f(12)), (f(4, 12, 5), f(12)), (f(4, 12), f(1))),
    aten.hardswish.default: _cases((f(4, 6),), (f(12, 5),)),
    aten.log_sigmoid.default: _cases((f(4, 6),), (f(12, 5),)),
    aten.rsub.Tensor: _cases((f(4, 6), f(4, 6)), (f(12, 5), f(5))),
    aten.where.ScalarSelf: _cases((b(4, 6), 1.0, f(4, 6)), (b(12, 1), 0.0, f(12, 5))),
    aten.where.Scalar: _cases((b(4, 6), 1.0, 0.0)),
    aten.masked_fill.Tensor: _cases((f(4, 6), b(4, 6), c()), (f(12, 5), b(12, 1), f())),
    aten.floor_divide.default: _cases((ids(9, 4, 6), Operand((4, 6), "count"))),
    aten.floor_divide.Scalar: _cases((ids(9, 4, 6), 2)),
    aten.__and__.Scalar: _cases((ids(9, 4, 6), 3)),
    aten.__or__.Scalar: _cases((ids(9, 4, 6), 3)),
    aten.isin.Tensor_Scalar: _cases((ids(9, 4, 6), 3)),
}  # fmt: skip

# Ops whose rule follows from torch's tags: no entry of theirs, so that none is ever missing.
_TWO = (f(4, 6), f(4, 6)), (f(12, 5), f(5))
TAGGED: dict[object, list[Case]] = {
    **{
        getattr(aten, name).default: _cases((f(4, 6),), (p(12, 5),))
        for name in (
            "erf", "floor", "sign", "square", "mish", "selu", "leaky_relu", "elu", "celu", "relu6", "softplus",
            "hardsigmoid", "hardtanh", "isnan", "isfinite", "expm1", "nan_to_num", "round", "trunc", "ceil",
            "silu", "gelu", "cos", "sin", "tan", "atan", "sinc", "frac", "positive", "exp2", "softshrink",
        )
    },
    **{op: _cases((p(4, 6),), (p(12, 5),)) for op in (aten.log1p.default, aten.log2.default, aten.log10.default)},
    aten.pow.Tensor_Tensor: _cases((p(4, 6), f(4, 6)), (p(12, 5), f(5))),
    aten.pow.Scalar: _cases((2.0, f(4, 6))),
    aten.atan2.default: _cases(*_TWO),
    aten.fmod.Scalar: _cases((f(4, 6), 2.0)),
    aten.remainder.Scalar: _cases((ids(9, 4, 6), 2)),
    aten.clamp_min.default: _cases((f(4, 6), 0.0)),
    aten.clamp_max.default: _cases((f(4, 6), 0.0)),
    aten.clamp.Tensor: _cases((f(4, 6), c(6), None)),
    aten.lerp.Scalar: _cases((f(4, 6), f(4, 6), 0.3)),
    aten.lerp.Tensor: _cases((f(4, 6), f(4, 6), f(6))),
    aten.addcmul.default: _cases((f(4, 6), f(4, 6), f(6))),
    aten.div.Tensor_mode: _cases(Case((f(4, 6), p(4, 6)), {"rounding_mode": "floor"})),
    aten.logaddexp.default: _cases(*_TWO),
    aten.logical_xor.default: _cases((b(4, 6), b(6))),
    aten.bitwise_xor.Tensor: _cases((ids(9, 4, 6), ids(9, 6))),
    aten.bitwise_and.Scalar: _cases((ids(9, 4, 6), 3)),
    aten.threshold.default: _cases((f(4, 6), 0.0, 0.5)),
    aten.max.other: _cases(*_TWO),
    # reductions
    **{
        op: _cases((f(12, 4, 6), [-1]), (f(12, 4, 6), [0, 2], True), (f(12, 5), [1]))
        for op in (aten.amin.default, aten.logsumexp.default)
    },
    **{op: _cases((f(12, 4, 6), -1), (f(12, 5), 0, True)) for op in (aten.argmax.default, aten.argmin.default)},
    **{op: _cases((b(12, 4, 6), -1), (b(12, 5), 0, True)) for op in (aten.all.dim, aten.any.dim)},
    **{op: _cases((b(12, 4),)) for op in (aten.all.default, aten.any.default)},
    **{op: _cases((f(12, 4),)) for op in (aten.max.default, aten.min.default, aten.prod.default, aten.var.default)},
    **{op: _cases((f(12, 4, 6), [-1]), (f(4, 12), [0], True, True)) for op in (aten.std.dim, aten.var.dim)},
    **{
        op: _cases(Case((f(12, 4, 6), [-1]), {"correction": 0}), Case((f(4, 12), [0]), {"keepdim": True}))
        for op in (aten.std.correction, aten.var.correction)
    },
    aten.prod.dim_int: _along(),
    **{
        getattr(aten, f"fft_{name}").default: _cases((f(12, 4, 6), None, 1), (f(4, 12),))
        for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    },
    **{
        getattr(aten, f"fft_{name}").default: _cases((f(12, 4, 6),), (f(4, 12, 6), None, [0, 2]))
        for name in ("fft2", "ifft2", "rfft2", "irfft2")
    },
    **{
        getattr(aten, f"fft_{name}").default: _cases((f(12, 4, 6), None, [1]), (f(4, 12, 6), None, [0, 2]))
        for name in ("fftn", "ifftn", "rfftn", "irfftn")
    },
    **{op: _cases((f(12, 4, 6), [1])) for op in (aten.fft_fftshift.default, aten.fft_ifftshift.default)},
    aten.view_as_complex.default: _cases((f(12, 4, 2),)),
    **{op: _cases((z(12, 4),)) for op in (aten.view_as_real.default, aten.real.default, aten.imag.default)},
    aten.norm.ScalarOpt_dim: _cases((f(12, 4, 6), 2, [-1], True), (f(12, 5), 1, [0])),
    aten.linalg_vector_norm.default: _cases((f(12, 4, 6), 2, [-1], True), (f(12, 5),)),
    aten.count_nonzero.dim_IntList: _cases((b(12, 4), [1])),
}  # fmt: skip

# Their values depend on the position, or on all of a value, or on nothing that a rank may hold a part of.
WHOLE_ONLY: set[object] = {
    aten.arange.start_step, aten.linspace.default, aten.eye.default, aten.eye.m, aten.scalar_tensor.default,
    aten.tril_indices.default, aten.triu_indices.default,
    aten.all.default, aten.any.default, aten.max.default, aten.min.default, aten.prod.default, aten.var.default,
}  # fmt: skip
