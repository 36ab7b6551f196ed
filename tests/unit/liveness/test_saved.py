"""What an attention keeps of its mask, against what torch's kernel keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.graph import B, S
from autopar.liveness.saved import Saved
from autopar.search.layouts import replicated
from tests.passes.programs import read

BATCH, LENGTH = 3, 10
MASKS = {
    "truths": ("[s, s] bool", (LENGTH, LENGTH)),
    "truths of each sample": ("[b, 1, 1, s] bool", (BATCH, 1, 1, LENGTH)),
    "numbers": ("[b, 1, s, s]", (BATCH, 1, LENGTH, LENGTH)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_kernel_keeps_truths_as_numbers_and_numbers_as_they_are(name: str) -> None:
    kind, shape = MASKS[name]
    program = read(f"""
        block model:
          q: [b, 2, s, 4] = parameter q
          n: {kind} = input n
          m: {kind} = alias(n)
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, m)
          return a
    """)
    block = program.blocks["model"]
    saved = Saved(block, replicated(program).strategies["model"], 1)
    (node,) = (n for n in block.ops if n.name == "a")
    own = {B: BATCH, S: LENGTH}
    priced = sum(int(size.subs(own)) for size in saved.kept_by(node).values())

    q = torch.randn(BATCH, 2, LENGTH, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(shape, dtype=torch.bool if "bool" in kind else torch.float64)
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() != q.data_ptr() and x.dtype == torch.float64:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    log_sum_exp = BATCH * 2 * LENGTH
    # CPUs keep log-sum-exp of fp64 in fp64, GPUs have it in fp32.
    assert sum(found.values()) - 8 * log_sum_exp == priced - 4 * log_sum_exp
