"""The choices of a plan, by what they are about: mesh, batch, pipeline, sharding, compute.

A choice is declared here alone: flags, pins, plan.yaml and SETTINGS are derived from these fields and what `choice`
says of each. What backward computes again is in `autopar/plan/recompute.py`: no program reads it when it runs.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from functools import cached_property
from typing import Any

AXES = ("pp", "dp", "cp", "tp")
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zero-bubble")
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")


def choice(legal: Any, help: str = "", *, default: Any = MISSING, by: str = "pin", rare: bool = False) -> Any:
    """A field of a value object; one without a default stands in every plan.yaml and in all SETTINGS.

    legal: the words or numbers that may be chosen, bool, or the unit of a whole number; "recompute" and "layer ranges"
    are forms of their own. help: for the command line. by: who chooses, the user in a "pin" or in the "job", or ""
    where it follows from other choices. rare: plan.yaml leaves it out where it is None.
    """
    return field(default=default, metadata={"legal": legal, "help": help, "by": by, "rare": rare})


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes. Rank = ((pp·dp + d)·cp + c)·tp + t, tp innermost (neighbours on NVLink)."""

    pp: int = choice("stages", "pipeline stages", default=1)
    dp: int = choice("replicas", "replicas", default=1)
    cp: int = choice("ranks", "parts of a sequence", default=1)
    tp: int = choice("ranks", "tensor-parallel ranks", default=1)

    @cached_property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        value: int = getattr(self, axis)
        return value

    def __str__(self) -> str:
        return "·".join(f"{axis}{self.size(axis)}" for axis in AXES if self.size(axis) > 1) or "1 process"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The data of a step: samples of a step and of a micro-batch, and the tokens of each that are computed.

    padded_from: tokens of a sample, where the trainer pads it to `sequence` tokens.
    """

    global_batch: int = choice("samples", "samples of a step (default: 8 a GPU)", by="job")
    micro_batch: int = choice("samples", "samples of a micro-batch")
    sequence: int = choice("tokens", "tokens of a sample", by="job")
    padded_from: int | None = choice("tokens", default=None, by="", rare=True)

    @property
    def tokens(self) -> int:
        """Tokens of a sample, pads not counted."""
        return self.padded_from or self.sequence

    @property
    def padded(self) -> bool:
        return self.tokens < self.sequence

    def micro_batches(self, dp: int) -> int:
        """Micro-batches of a step on each of `dp` replicas."""
        return self.global_batch // (self.micro_batch * dp)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """stages: the layer range [start, stop) of each pipeline stage, of which stage k runs on rank k % pp."""

    stages: tuple[tuple[int, int], ...] = choice("layer ranges", by="")
    schedule: str = choice(SCHEDULES, "order of forwards and backwards on the stages")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The ZeRO stage, what data ranks share out: 0 nothing, 1 states and masters, 2 also gradients, 3 also parameters.

    hsdp: ranks that share out one copy, the groups being replicas (None: all data ranks). offload: what is shared out
    lies in the host's memory, where the optimizer runs.
    """

    zero: int = choice((0, 1, 2, 3), "what replicas share out: states, gradients, parameters (0, 1, 2 or 3)")
    hsdp: int | None = choice(
        "ranks", "ranks that share out one copy, the groups being replicas (default: all)", default=None
    )
    offload: bool = choice(bool, "keep masters, states and the optimizer on the host", default=False)

    def text(self) -> str:
        """3, 3 hsdp8, 3 hsdp8 offload: as tables show it."""
        return f"{self.zero}{f' hsdp{self.hsdp}' if self.hsdp else ''}{' offload' if self.offload else ''}"


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The dtypes in which a program computes, and whether it is compiled.

    compile: the layers run under torch.compile. reduce_dtype: in which replicas sum gradients (None: in that of the
    master weights).
    """

    compile: bool = choice(bool, "run the layers under torch.compile", default=False, by="job")
    precision: str = choice(PRECISIONS, "default: bf16, fp32 on a CPU", by="job")
    reduce_dtype: str | None = choice(
        PRECISIONS, "in which replicas sum gradients: fp32, or the compute dtype", default=None, rare=True
    )

    def text(self) -> str:
        """bf16, bf16 (gradients summed in fp32): as the header of model.py shows it."""
        return self.precision + (f" (gradients summed in {self.reduce_dtype})" if self.reduce_dtype else "")

    @property
    def half(self) -> bool:
        """Whether forward and backward compute in 16 bits, with fp32 masters."""
        return self.precision in ("bf16", "fp16")
