"""The constants of an emitted program: what the plan chose, in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

from torch import nn

from .choices import Batch, Compute, Mesh, Pipeline, Sharding


@dataclass(frozen=True, kw_only=True)
class Settings(Mesh, Batch, Pipeline, Sharding, Compute):
    """Written at the top of every emitted model.py: the plan's choices, and what follows from plan and model.

    predicted_step_s: the cost model's step time, seconds. flops_per_step: model FLOPs of a step over all
    ranks (forward and backward, no recompute), for MFU. peak_flops: of one device in this precision, FLOP/s.
    vocabulary: tokens the model knows, where it has any. labels: what the default data give the model, the
    "next" token of each input or the "same" ones, where the model shifts them (as Hugging Face models do).
    zigzag: of 2·cp chunks of a sequence, rank r of cp has r and 2·cp − 1 − r; else it has the r-th of cp.
    padding: (input, dim, value) of each dim that is padded.
    """

    optimizer: str = "AdamW"
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    predicted_step_s: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    vocabulary: int | None = None
    labels: str = "next"
    zigzag: bool = False
    padding: tuple[tuple[str, int, int], ...] = ()

    @property
    def replicas(self) -> int:
        """Groups of data ranks that each hold a copy of what is sharded."""
        data = self.dp * self.cp
        # In half precision the sharded parameters are the fp32 masters even where nothing is sharded, so ZeRO-0 is
        # fully_shard over (replicate=data, shard=1). FIELD_NOTES: in fp32 that would hold a second copy.
        if self.zero == 0:
            return data if self.half else 1
        return data // (self.hsdp or data)

    @property
    def accumulation(self) -> int:
        """Micro-batches a step on each data-parallel rank."""
        return self.micro_batches(self.dp)


@dataclass(frozen=True)
class Program:
    """The definitions of an emitted model.py, by their names; a program leaves out those that it does not need."""

    Model: Callable[[int], nn.Module]
    SETTINGS: Settings
    LAYERS: Sequence[str]
    TIED: Sequence[tuple[str, str]]
    PARTS: Mapping[str, tuple[str, int, int, int]] = field(default_factory=dict)
    GROUPS: Sequence[Any] = ()
    ENDS: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    UNUSED: Sequence[tuple[Any, ...]] = ()
    OPTIONAL: Sequence[str] = ()
    PARAMETER_GROUPS: Sequence[tuple[tuple[str, ...], dict[str, Any]]] = ()
    count_targets: Callable[..., Any] | None = None

    @staticmethod
    def of(module: ModuleType) -> Program:
        return Program(**{f.name: getattr(module, f.name) for f in fields(Program) if hasattr(module, f.name)})
