"""Random samples for a model's inputs: ids in the range of the table that reads them, targets in that of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..emit.text import size_text
from ..ir.graph import Program, arguments, info
from ..rules.padding import input_name
from .sizes import read_size

_IGNORED = -100  # the target that F.cross_entropy skips by default

aten = torch.ops.aten
_SIZE_DIM: dict[Any, int] = {aten.embedding.default: 0, aten.cross_entropy_loss.default: 1}  # of what ids index


@dataclass(frozen=True)
class Input:
    """What an input may be; sizes are in terms of b and s. values: an id is below each. ignored: a target."""

    shape: tuple[str, ...]
    dtype: str
    values: tuple[str, ...] = ("2",)
    ignored: int | None = None


def inputs_of(program: Program) -> dict[str, Input]:
    """The tensor inputs of a traced model."""
    values, ignored = _ranges(program)
    return {
        name: Input(
            tuple(map(size_text, facts.shape)),
            str(facts.dtype).removeprefix("torch."),
            values.get(name, ("2",)),
            ignored.get(name),
        )
        for name, facts in program.inputs.items()
    }


def random_batch(inputs: Mapping[str, Input], samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """Random samples in fp64; a fifth of the targets, and one whole sample, are ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    for name, given in inputs.items():
        sizes = {"b": samples, "s": sequence}
        shape = [read_size(size, sizes) for size in given.shape]
        dtype = getattr(torch, given.dtype)
        if dtype.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
            continue
        values = min(read_size(size, sizes) for size in given.values)
        batch[name] = torch.randint(0, values, shape, generator=generator).to(dtype)
        if given.ignored is not None:
            batch[name][torch.rand(shape, generator=generator) < 0.2] = given.ignored
            if samples > 1:
                batch[name][0] = given.ignored
    return batch


def _ranges(program: Program) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """The sizes that an input of ids or targets is below; which is ignored, of those that are targets only."""
    sizes: dict[str, tuple[str, ...]] = {}
    ignored: dict[str, int] = {}
    ids: set[str] = set()
    for _, node in (found for found in program.each_op() if found[1].target in _SIZE_DIM):
        whole, index = arguments(node)[:2]
        if not (name := input_name(program, index)):
            continue  # targets that forward makes, such as the places of the samples
        size = size_text(info(whole).shape[_SIZE_DIM[node.target]])
        sizes[name] = tuple(dict.fromkeys((*sizes.get(name, ()), size)))
        if node.target is aten.embedding.default:
            ids.add(name)
        else:
            ignored[name] = arguments(node)[4] if len(node.args) > 4 else _IGNORED
    return sizes, {name: value for name, value in ignored.items() if name not in ids}
