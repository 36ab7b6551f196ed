"""Mixture of experts: each token through the few experts that its router chose."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def experts(
    x: Tensor, index: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """The weighted sum of the outputs of each token's experts: down(activation(gate(x)) · up(x)).

    x: [n, d] tokens; index, weights: [n, k] the experts of each and what they count; gate, up: [e, f, d] and
    down: [e, d, f], where each rank may have a slice of f: the result [n, d] is then a summand.
    """
    n, k = index.shape
    chosen, order = index.flatten().sort(stable=True)  # pairs (token, expert), those of an expert together
    counts = torch.bincount(chosen, minlength=len(gate))
    rows = x.index_select(0, order // k)
    if _grouped(rows, gate):
        ends = counts.cumsum(0).to(torch.int32)
        hidden = activation(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
        out = F.grouped_mm(hidden, down.mT, offs=ends)
    else:
        # unbind, not gate[e]: its backward writes the gradient of all experts once
        of_expert = zip(rows.split(counts.tolist()), gate.unbind(), up.unbind(), down.unbind(), strict=True)
        out = torch.cat([F.linear(activation(F.linear(r, g)) * F.linear(r, u), w) for r, g, u, w in of_expert])
    out = out * weights.flatten().index_select(0, order).unsqueeze(-1)
    by_token = torch.zeros_like(out).index_copy(0, order, out)
    return by_token.view(n, k, x.shape[1]).sum(1).to(x.dtype)


def _grouped(rows: Tensor, gate: Tensor) -> bool:
    """Whether CUDA's grouped kernel takes these: bf16, rows of whole 16 bytes."""
    aligned = gate.shape[1] % 8 == 0 and gate.shape[2] % 8 == 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")
