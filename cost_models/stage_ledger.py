"""The ledger of a stage, as people read it: where its time goes, what fills its memory; and what limits a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.block import PhaseTime
from autopar.cost_models.compute import StageShape, StageTime
from autopar.cost_models.data_parallel import DataTime, Overlap
from autopar.cost_models.memory import MemoryTerm, total_bytes

_RECOMPUTE = "recompute: "  # what begins the name of a term
# A loss is named in "limited by" from this share of the step on.
_WORTH_NAMING = 0.05


@dataclass(frozen=True)
class TimeTerm:
    """One line of a time ledger: seconds that delay the step, and seconds hidden behind others."""

    name: str
    time_s: float
    hidden_s: float = 0.0


@dataclass(frozen=True)
class StageLedger:
    """A rank's stage, or its virtual stages together: time of one micro-batch (terms add up to `micro_batch_s`),
    memory at the peak. `ranges`: the layers [start, stop) of each."""

    ranges: tuple[tuple[int, int], ...]
    recomputed: tuple[tuple[str, int], ...]  # (choice, layers)
    time: tuple[TimeTerm, ...]
    memory: tuple[MemoryTerm, ...]
    host: tuple[MemoryTerm, ...] = ()  # of offload: what a rank keeps in the host's memory

    @property
    def micro_batch_s(self) -> float:
        return sum(term.time_s for term in self.time)

    @property
    def peak_bytes(self) -> float:
        return total_bytes(self.memory)

    @property
    def host_bytes(self) -> float:
        return total_bytes(self.host)


def time_terms(times: Sequence[StageTime], data: Sequence[DataTime], micro_batches: int) -> tuple[TimeTerm, ...]:
    """One micro-batch, with the once-a-step communication spread over the micro-batches."""
    both = sum((time.forward + time.backward for time in times), PhaseTime())
    repeated: dict[str, PhaseTime] = {}
    for what, phase in (item for time in times for item in time.repeated.items()):
        repeated[what] = repeated.get(what, PhaseTime()) + phase
    once = sum((comm.first_forward + comm.last_backward for comm in data), Overlap())
    each = sum((comm.each_forward + comm.each_backward for comm in data), Overlap())
    exposed_s = each.exposed_s + once.exposed_s / micro_batches
    return (
        TimeTerm("matmul", both.matmul_s),
        TimeTerm("attention", both.attention_s),
        TimeTerm("memory-bound ops", both.memory_s),
        TimeTerm("tp communication", both.tp_s),
        TimeTerm("cp communication", both.cp_s),
        TimeTerm("launch floor", both.launch_s),
        *(term for what, phase in repeated.items() for term in _recompute_terms(what, phase)),
        TimeTerm("dp communication", exposed_s, each.hidden_s + once.hidden_s / micro_batches),
    )


def _recompute_terms(what: str, phase: PhaseTime) -> list[TimeTerm]:
    """What a choice of recompute computes again, and the tp collectives that run again within it."""
    terms = [TimeTerm(f"{_RECOMPUTE}{what}", phase.total_s - phase.tp_s)]
    return [*terms, TimeTerm(f"{_RECOMPUTE}tp communication in {what}", phase.tp_s)] if phase.tp_s else terms


def recomputed(shapes: Sequence[StageShape]) -> tuple[tuple[str, int], ...]:
    """Layers of the stages with each choice of recompute."""
    found: dict[str, int] = {}
    for what, n in (item for shape in shapes for chosen in shape.recomputed for item in chosen):
        found[what] = found.get(what, 0) + n
    return tuple(found.items())


def limited_by(
    stages: tuple[StageLedger, ...],
    micro_batches: int,
    bubble_s: float,
    after: tuple[TimeTerm, ...],
    step_s: float,
) -> str:
    """The largest loss of the slowest stage, or "compute" if none is worth naming."""
    slowest = max(stages, key=lambda stage: stage.micro_batch_s)
    losses = {
        term.name: term.time_s * micro_batches for term in slowest.time if term.name not in ("matmul", "attention")
    }
    repeated = [name for name in losses if name.startswith(_RECOMPUTE)]
    losses["memory"] = sum(losses.pop(name) for name in repeated)
    losses["bubble"] = bubble_s
    losses["optimizer"] = sum(term.time_s for term in after)
    worst = max(losses, key=lambda name: losses[name])
    return worst if losses[worst] >= _WORTH_NAMING * step_s else "compute"
