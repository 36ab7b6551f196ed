"""Pads after the tokens of each sample, where the planned length is longer than the samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .settings import Settings


def padded(batch: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The batch with each dim of SETTINGS.padding as long as the planned sequence.

    Pads come last and targets there are ignored: autopar has typed this model op by op, and found none in which pads
    reach the loss, or in which their values or derivatives might not be finite. So loss and gradients are those of the
    samples up to rounding, but where dropout draws: its masks are others, of the same distribution, for each length.
    """
    made = dict(batch)
    for name, dim, value in settings.padding:
        x = made[name]
        sizes = list(x.shape)
        sizes[dim] = settings.sequence - sizes[dim]
        made[name] = torch.cat([x, x.new_full(sizes, value)], dim)
    return made
