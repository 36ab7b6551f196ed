"""What parameters, gradients and optimizer states take, in bytes, by ZeRO stage.

They follow DESIGN §6's table, a function of (ZeRO stage, micro-batches m, precision). P elements a rank,
D data ranks, c bytes of the compute dtype, w of masters (bf16, fp16: 2, 4; fp32: 4, 4; fp64: 8, 8), g of gradients:
those of the reduction (w, or c if so pinned) while whole, w as shards and once reduced:

    ZeRO  compute copy               master w, states  gradients                   gathered for a while
    0     half cP (else the master)  whole             whole                       –
    1     cP                         1/D               whole if m > 1, else 1/D    –
    2     cP                         1/D               1/D                         –
    3     –                          1/D               1/D                         unit, next unit, shared ends

In whole precision (fp32, fp64) one data rank has plain parameters, as with ZeRO 0, whatever the ZeRO stage.
With hsdp D is the ranks of a group. With offload masters, states and reduced gradients lie on the host (memory.py),
but those that wait for the other groups of hsdp; a unit's part passes through the device on its way.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.plan.plan import MASTERS, Optimizer

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class States:
    """Everything the size of parameters, gradients and optimizer states depends on."""

    zero: int
    micro_batches: int
    shards: int  # ranks that share out one copy: of the data axis (dp × cp), or of a group of hsdp
    precision: str
    optimizer: Optimizer = Optimizer()
    reduce_dtype: str | None = None  # of gradients; None: of the masters
    copies: int = 1  # groups of hsdp
    offload: bool = False

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.precision]

    @property
    def master_bytes(self) -> int:
        return BYTES[MASTERS[self.precision]]

    @property
    def reduce_bytes(self) -> int:
        """Of a gradient as replicas sum it, and as it is accumulated before."""
        return BYTES[self.reduce_dtype] if self.reduce_dtype else self.master_bytes

    @property
    def has_copy(self) -> bool:
        """The parameters computed with are another tensor than those the optimizer updates: those of fully_shard, which
        in whole precision leaves out ZeRO-0 and one data rank alone (autopar/runtime/data_parallel.py)."""
        alone = self.shards * self.copies == 1 and not self.offload
        return self.compute_bytes < self.master_bytes or self.zero > 0 and not alone

    @property
    def keeps_whole_gradients(self) -> bool:
        """Between micro-batches, unsharded."""
        return self.zero == 0 or (self.zero == 1 and self.micro_batches > 1)

    @property
    def waits_for_copies(self) -> bool:
        """Reduced gradients stay on the device between micro-batches, until the groups of hsdp add theirs."""
        return self.copies > 1 and self.zero >= 2 and self.micro_batches > 1

    @property
    def reduces_behind_backward(self) -> bool:
        """Reductions run while backward computes: not the buckets outside fully_shard, which follow it, nor where
        the host adds up what each micro-batch brings, for which backward waits (torch copies without a stream then).
        """
        on_host = self.offload and self.zero >= 2 and self.micro_batches > 1 and not self.waits_for_copies
        return self.has_copy and not on_host


def optimizer_state_bytes(optimizer: Optimizer, precision: str) -> int:
    """Bytes a parameter of the optimizer's states, which torch keeps in the (master) parameter's dtype."""
    tensors = {
        "SGD": 1 if optimizer.kwargs.get("momentum", 0) else 0,
        "Adagrad": 1,
        "RMSprop": 1 + bool(optimizer.kwargs.get("momentum", 0)) + bool(optimizer.kwargs.get("centered", False)),
        "Adadelta": 2,
        **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 2),
    }
    if optimizer.name not in tensors:
        raise PlanError(f"optimizer {optimizer.name!r} has no memory model: use one of {', '.join(sorted(tensors))}")
    amsgrad = bool(optimizer.kwargs.get("amsgrad", False)) and optimizer.name in ("Adam", "AdamW")
    return (tensors[optimizer.name] + amsgrad) * BYTES[MASTERS[precision]]
