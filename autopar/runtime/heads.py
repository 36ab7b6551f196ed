"""Grouped attention with fewer K/V heads than ranks."""

from torch import Tensor

from .mesh import current


def head_of(x: Tensor, axis: str) -> Tensor:
    """Of the K/V heads [batch, heads, tokens, width], whole on every rank, the one that this rank's query heads read.

    Its gradient is this rank's summand of the whole gradient (Replicate, grad Partial).
    """
    size, rank = current().size(axis), current().rank(axis)
    return x.narrow(1, rank * x.shape[1] // size, 1)
