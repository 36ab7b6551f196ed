"""Blocks of attention against its definition, and what is assumed of torch's private ops."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from autopar.runtime import flash
from autopar.runtime.flash import block_backward, block_forward, kernel
from autopar.runtime.tiles import Shape

SCALE = 0.3


def test_the_kernel_for_each_device_and_dtype() -> None:
    half, full = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
    assert {kernel("cpu", dtype, 512) for dtype in (*half, *full)} == {"cpu"}
    assert {kernel("cuda", dtype, 256) for dtype in half} == {"cuda"}
    assert {kernel("cuda", dtype, 257) for dtype in half} == {"math"}
    assert {kernel("cuda", dtype, 64) for dtype in full} == {"math"}


def noise(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def scores(q: Tensor, k: Tensor, shape: Shape) -> Tensor:
    every = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = {"full": every, "lower": every.tril(), "upper": every.triu()}[shape]
    grouped = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * SCALE
    return grouped.masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("shape", get_args(Shape))
@pytest.mark.parametrize("widths", [(16, 16), (5, 5), (12, 8), (3, 9)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("used", ["cpu", "math"])
def test_a_block_and_its_part_of_the_gradients(
    monkeypatch: pytest.MonkeyPatch, used: str, heads: tuple[int, int], widths: tuple[int, int], shape: Shape
) -> None:
    """The softmax is over the block and other keys, as it is in a ring."""
    monkeypatch.setattr(flash, "kernel", lambda *_: used)
    (h, g), (e, f), rows = heads, widths, 20
    keys = 33 if shape == "full" else rows
    q, k, v = noise(2, h, rows, e), noise(2, g, keys, e), noise(2, g, keys, f)
    other_k, other_v, grad = noise(2, g, 7, e), noise(2, g, 7, f), noise(2, h, f, rows).mT  # rows with gaps
    leaves = [x.requires_grad_() for x in (q, k, v)]
    own = scores(q, k, shape)
    whole = torch.cat([own, scores(q.detach(), other_k, "full")], -1)  # whose gradient of q is not this block's
    out = whole.softmax(-1) @ torch.cat([v, other_v], 2).repeat_interleave(h // g, 1)
    expected = torch.autograd.grad(out, leaves, grad)
    with torch.no_grad():
        block_out, block_lse = block_forward(shape, SCALE, q, k, v)
        torch.testing.assert_close(block_lse, own.logsumexp(-1))
        torch.testing.assert_close(block_out, own.softmax(-1) @ v.repeat_interleave(h // g, 1))
        actual = block_backward(shape, SCALE, grad, q, out, whole.logsumexp(-1), k, v)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_log_sum_exp_is_in_fp32(dtype: torch.dtype) -> None:
    q, k = noise(1, 2, 8, 4, dtype=dtype), noise(1, 1, 8, 4, dtype=dtype)
    for shape in get_args(Shape):
        out, lse = block_forward(shape, SCALE, q, k, k)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(lse, scores(q.float(), k.float(), shape).logsumexp(-1), rtol=1e-3, atol=1e-3)


def test_the_ops_of_cuda_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their signatures and shapes, on the meta device: grouped heads, widths that are no multiple of 8."""
    monkeypatch.setattr(flash, "kernel", lambda *_: "cuda")
    used = list[tuple[str, list[int]]]()

    class Ops:
        def __getattr__(self, name: str) -> Any:
            def op(*args: Any, **kwargs: Any) -> Any:
                used.append((name, [x.shape[-1] for x in args if isinstance(x, Tensor) and x.dim() == 4]))
                return getattr(torch.ops.aten, name)(*args, **kwargs)

            return op

    monkeypatch.setattr(flash, "_aten", Ops())
    shapes = (2, 8, 6, 20), (2, 2, 6, 20), (2, 2, 6, 12)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    for shape in get_args(Shape):
        out, lse = block_forward(shape, SCALE, q, k, v)
        assert (out.shape, lse.shape, lse.dtype) == ((2, 8, 6, 12), (2, 8, 6), torch.float32)
        assert [x.shape for x in block_backward(shape, SCALE, out, q, out, lse, k, v)] == [q.shape, k.shape, v.shape]
    forward, backward = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
    assert used == [(forward, [24] * 3), (backward, [24] * 5)] * 3
