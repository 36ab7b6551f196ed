"""share_masks: what attention adds is made once of a mask that several layers read."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from autopar.ir.graph import info, node_inputs
from autopar.passes.share_masks import ShareMasks
from tests.passes.programs import assert_becomes

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def test_layers_share_what_they_add() -> None:
    assert_becomes(
        ShareMasks(),
        """
        block model:
          q: [b, 2, s, 4] bf16 = parameter q
          n: [b, s] bool = input n
          m: [b, 1, 1, s] bool = reshape(n, [b, 1, 1, s])
          a: [b, 2, s, 4] bf16 = scaled_dot_product_attention(q, q, q, m, 0.0, False, scale=0.5)
          c: [b, 2, s, 4] bf16 = scaled_dot_product_attention(a, q, q, m, scale=0.5)
          return c
        """,
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          n: [b, s] = input n
          m: [b, 1, 1, s] = reshape(n, [b, 1, 1, s])
          zeros_default: [] = zeros([], dtype=torch.bfloat16)
          where_scalar_other: [b, 1, 1, s] = where(m, zeros_default, -inf)
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, where_scalar_other, 0.0, False, scale=0.5)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, q, q, where_scalar_other, scale=0.5)
          return c
        """,
    )


def test_what_is_broadcast_is_made_before() -> None:
    assert_becomes(
        ShareMasks(),
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          n: [s, s] bool = input n
          m: [b, 1, s, s] bool = expand(n, [b, 1, s, s])
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, m)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, q, q, m)
          return c
        """,
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          n: [s, s] = input n
          zeros_default: [] = zeros([], dtype=torch.float64)
          where_scalar_other: [s, s] = where(n, zeros_default, -inf)
          expand_default: [b, 1, s, s] = expand(where_scalar_other, [b, 1, s, s])
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, expand_default)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, q, q, expand_default)
          return c
        """,
    )


def test_one_reader_keeps_its_mask_and_so_do_those_of_numbers() -> None:
    before = """
        block model:
          q: [b, 2, s, 4] = parameter q
          n: [s, s] bool = input n
          m: [s, s] = input m
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, n)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, q, q, m)
          e: [b, 2, s, 4] = scaled_dot_product_attention(c, q, q, m)
          return e
        """
    assert_becomes(ShareMasks(), before, before.replace(" bool =", " ="))


def test_two_that_are_broadcast_from_one_share_it() -> None:
    assert_becomes(
        ShareMasks(),
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          n: [s, s] bool = input n
          m: [b, 1, s, s] bool = expand(n, [b, 1, s, s])
          o: [b, 2, s, s] bool = expand(n, [b, 2, s, s])
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, m)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, q, q, m)
          d: [b, 2, s, 4] = scaled_dot_product_attention(c, q, q, o)
          e: [b, 2, s, 4] = scaled_dot_product_attention(d, q, q, o)
          return e
        """,
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          n: [s, s] = input n
          zeros_default: [] = zeros([], dtype=torch.float64)
          where_scalar_other: [s, s] = where(n, zeros_default, -inf)
          expand_default: [b, 1, s, s] = expand(where_scalar_other, [b, 1, s, s])
          expand_default_1: [b, 2, s, s] = expand(where_scalar_other, [b, 2, s, s])
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, expand_default)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, q, q, expand_default)
          d: [b, 2, s, 4] = scaled_dot_product_attention(c, q, q, expand_default_1)
          e: [b, 2, s, 4] = scaled_dot_product_attention(d, q, q, expand_default_1)
          return e
        """,
    )


class Attends(nn.Module):
    """A layer that is given a mask, or makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = seen_of(ids) if mask is None else mask
        q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1), mask


class Model(nn.Module):
    """The mask is made before the layers, of the ids or of a parameter, or by the first layer."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.embedding = made, nn.Embedding(9, 8)
        self.layers = nn.ModuleList(Attends() for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mask = seen_of(input_ids) if self.made == "of ids" else None
        if self.made == "of a parameter":
            mask = (x.detach() > 0).any(-1)[:, None, None, :]
        for layer in self.layers:
            x, mask = layer(x, input_ids, mask)
        return F.mse_loss(x.mean(-1), labels.to(x.dtype))


def seen_of(ids: Tensor) -> Tensor:
    return (ids != 0)[:, None, None, :]


@pytest.mark.parametrize(("made", "shared"), [("of ids", True), ("of a parameter", False), ("by a layer", False)])
def test_only_what_each_stage_makes_for_itself(made: str, shared: bool) -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    program = prepare(Model(made), {"input_ids": ids, "labels": ids}, "fp64")
    read = {info(node).dtype for _, op in program.each_op() for node in node_inputs(op)[3:] if op.target is ATTENTION}
    assert read == {torch.float64 if shared else torch.bool}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_make_the_same_of_truth_values(dtype: torch.dtype) -> None:
    """To the bit, forward and backward, with a row that sees nothing."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 8, generator=g).to(dtype).requires_grad_() for _ in range(3))
    seen = torch.rand(2, 1, 16, 16, generator=g) > 0.4
    seen[0, 0, 3] = False
    added = torch.where(seen, torch.zeros((), dtype=dtype), -torch.inf)
    found = []
    for mask in (seen, added):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
    for truths, numbers in zip(*found, strict=True):
        assert torch.equal(truths.nan_to_num(7.0), numbers.nan_to_num(7.0))
