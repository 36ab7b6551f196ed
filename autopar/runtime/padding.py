"""Pads after the tokens of each sample, where the planned length is longer than the samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def padded(batch: Mapping[str, Tensor], padding: Iterable[tuple[str, int, int]], sequence: int) -> dict[str, Tensor]:
    """The batch with each dim of `padding`, (input, dim, value), as long as the planned sequence.

    Pads come last and targets there are ignored: autopar has run this model on drawn samples with and without pads,
    and found the same loss and gradients up to rounding. Where dropout draws, its masks are others for each length, of
    the same distribution.
    """
    made = dict(batch)
    for name, dim, value in padding:
        x = made[name]
        sizes = list(x.shape)
        sizes[dim] = sequence - sizes[dim]
        made[name] = torch.cat([x, x.new_full(sizes, value)], dim)
    return made
