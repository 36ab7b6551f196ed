"""Pads after the tokens of each sample, where the planned length is longer than the samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .settings import Settings


def padded(batch: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The batch with each dim of SETTINGS.padding as long as the planned sequence.

    Pads come last and targets there are ignored, so loss and gradients are those of the samples: autopar has proved
    that for this model.
    """
    made = dict(batch)
    for name, dim, value in settings.padding:
        x = made[name]
        sizes = list(x.shape)
        sizes[dim] = settings.sequence - sizes[dim]
        made[name] = torch.cat([x, x.new_full(sizes, value)], dim)
    return made
