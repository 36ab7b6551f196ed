"""The families of tests/zoo.py as subjects of parity tests."""

from __future__ import annotations

from functools import cache

import torch

from autopar.request import with_loss
from tests import models, zoo
from tests.distributed.programs import GLOBAL_BATCH, STEPS, Batch, Subject, subject


@cache
def family(name: str, dtype: torch.dtype) -> Subject:
    """A small model of the family with its program, and five global batches of its own kind of input."""
    chosen = zoo.FAMILIES[name]
    model = models.seeded(chosen.build, meta=False)
    generator = torch.Generator().manual_seed(0)
    stored = torch.float32 if dtype.itemsize == 2 else dtype
    data = [_floating(chosen.inputs(GLOBAL_BATCH, generator), stored) for _ in range(STEPS)]
    inputs = {**{key: value[:2] for key, value in data[0].items()}, **chosen.arguments}
    if chosen.loss:
        model = with_loss(model, chosen.loss, data[0])
    made = subject(model, dtype, models.layered(model, inputs, dtype), data)
    return made


def _floating(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating inputs as the model is stored."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
