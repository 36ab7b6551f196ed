"""The constants of an emitted program: what the plan chose, in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Written at the top of every emitted model.py; batch sizes count samples, `sequence` tokens.

    predicted_step_s: the cost model's step time, seconds. flops_per_step: model FLOPs of a step over all
    ranks (forward and backward, no recompute), for MFU. peak_flops: of one device in this precision, FLOP/s.
    vocabulary: tokens the model knows, where it has any. labels: what the default data give the model, the
    "next" token of each input or the "same" ones, where the model shifts them (as Hugging Face models do).
    zigzag: of 2·cp chunks of a sequence, rank r of cp has r and 2·cp − 1 − r; else it has the r-th of cp.
    hsdp: ranks that share out one copy of what ZeRO shards (None: all data ranks). offload: it lies on the host.
    padded_from: tokens of a sample, where it is padded to `sequence`; padding: (input, dim, value) of each such dim.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    global_batch: int
    micro_batch: int
    sequence: int
    schedule: str  # "none", "gpipe", "1f1b", "interleaved", "zero-bubble"
    zero: int
    precision: str  # "bf16", "fp16", "fp32", "fp64"
    stages: tuple[tuple[int, int], ...]  # layer range of each stage; stage k is on rank k % pp
    optimizer: str = "AdamW"
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    predicted_step_s: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    vocabulary: int | None = None
    labels: str = "next"
    compile: bool = False  # the layers run under torch.compile
    zigzag: bool = False
    reduce_dtype: str | None = None  # "bf16", "fp16" or "fp32", of gradients over the replicas; None: of the masters
    hsdp: int | None = None
    offload: bool = False
    padded_from: int | None = None
    padding: tuple[tuple[str, int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a sample, pads not counted."""
        return self.padded_from or self.sequence

    @property
    def half(self) -> bool:
        """Whether forward and backward compute in 16 bits, with fp32 masters."""
        return self.precision in ("bf16", "fp16")

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

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
        return self.global_batch // (self.micro_batch * self.dp)
