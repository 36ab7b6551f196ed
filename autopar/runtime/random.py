"""Dropout: masks agree where a tensor is replicated, differ where it is sharded, and replay under recompute.

Each use draws a seed from the default CPU generator, which `torch.utils.checkpoint` restores before it runs a
forward again. That generator is seeded alike on the ranks of cp and tp, differently over pp and dp.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .mesh import Mesh, current


def seed_generators(seed: int, mesh: Mesh) -> None:
    """Seed the default generators for this rank's stage and replica."""
    replica = mesh.rank("pp") * mesh.size("dp") + mesh.rank("dp")
    # Far apart, so that seeds next to each other do not share streams.
    torch.manual_seed((seed * 0x9E3779B97F4A7C15 + replica * 0x632BE59BD9B4E019) % 2**63)


def streams() -> dict[str, Tensor]:
    """The states of the default generators of this process: torch's on CPU and GPU, and Python's."""
    _, numbers, gauss = random.getstate()
    python = torch.tensor([*numbers, math.nan if gauss is None else gauss], dtype=torch.float64)
    states = {"cpu": torch.get_rng_state(), "python": python}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def restore_streams(states: Mapping[str, Tensor]) -> None:
    """Go on where `streams` was called."""
    if states:
        torch.set_rng_state(states["cpu"])
        *numbers, gauss = states["python"].tolist()
        random.setstate((random.Random.VERSION, tuple(map(int, numbers)), None if math.isnan(gauss) else gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextmanager
def aside() -> Iterator[None]:
    """Draw within it without moving the model's streams, which go on after it where they were."""
    before = streams()
    try:
        yield
    finally:
        restore_streams(before)


def seed_data(seed: int) -> None:
    """Seed what a dataset draws by: torch, Python and, where it is imported, numpy. To be called `aside`."""
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def dropout(x: Tensor, p: float, training: bool, shards: tuple[str, ...] = ()) -> Tensor:
    """F.dropout; `shards` names the axes on which `x` is sharded, where masks must differ."""
    if p == 0 or not training:
        return x
    if p == 1:
        return x * 0
    return _masked(x, p, shards)


def _masked(x: Tensor, p: float, shards: tuple[str, ...]) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(_draw_seed(shards))
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
    return x * keep * (1 / (1 - p))


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, training: bool, shards: tuple[str, ...] = (), **options: Any
) -> Tensor:
    """F.scaled_dot_product_attention with its other options, its dropout seeded as that of `dropout`."""
    if dropout_p == 0 or not training:
        return F.scaled_dot_product_attention(q, k, v, **options)
    return _seeded_attention(q, k, v, dropout_p, shards, **options)


def _seeded_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, shards: tuple[str, ...], **options: Any
) -> Tensor:
    seed = _draw_seed(shards)
    devices = [q.device] if q.device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)


def _draw_seed(shards: tuple[str, ...]) -> int:
    mesh, index = current(), 0
    for axis in shards:
        index = index * mesh.size(axis) + mesh.rank(axis)
    return (int(torch.randint(2**62, ()).item()) + index * 0x2545F4914F6CDD1D) % 2**63
