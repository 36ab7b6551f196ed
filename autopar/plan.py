"""The plan: every choice the search makes, and nothing it can derive. Read, edited and written as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import PlanError
from .mesh import AXES, Mesh
from .options import check
from .placement import Strategy
from .plan_form import check_form
from .recompute import Again, from_plain, to_plain
from .schedules import why_not, why_not_split

_OPTIONS = ("global_batch", "micro_batch", "sequence", "zero", "hsdp", "offload", "loss_chunks", "precision", "compile")
MASTERS = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp32", "fp64": "fp64"}  # precision → of weights and states


@dataclass(frozen=True)
class Solution:
    """One answer of the intra-op search on one axis, tp or cp, of `ranks` ranks.

    `strategies[block][node]` is the strategy of each node of each block (prologue, layer classes,
    epilogue). A parameter or an input is a node without inputs: its output is its stored placement.
    """

    ranks: int
    strategies: Mapping[str, Mapping[str, Strategy]]
    name: str = ""  # recognised layout, such as "megatron" or "ring"


@dataclass(frozen=True)
class Optimizer:
    """A torch optimizer class by name, with keyword arguments over torch's defaults.

    groups: (parameter names, their own keyword arguments), in the order of the user's parameter groups; none
    where one group has all that is trained.
    """

    name: str = "AdamW"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = ()


@dataclass(frozen=True)
class Plan:
    """A complete plan.

    `stages` holds the layer range [start, stop) of each pipeline stage, of which stage k runs on rank k % pp;
    `recompute` what backward computes again, by ranges of layers in ascending order. Batch sizes count samples,
    `sequence` the tokens of each that are computed, to which the trainer pads samples of `padded_from` tokens.
    `reduce_dtype`: in which replicas sum gradients, if not in that of the master weights.
    `solution` holds the placements on tp, of the program that `context`, those on cp, leaves to each of its ranks.
    `hsdp`: ranks that share out one copy of what ZeRO shards, the groups being replicas (None: all data ranks).
    `offload`: what ZeRO shards is kept in the host's memory, where the optimizer runs.
    """

    mesh: Mesh
    global_batch: int
    micro_batch: int
    sequence: int
    stages: tuple[tuple[int, int], ...]
    schedule: str = "none"
    zero: int = 0
    hsdp: int | None = None
    offload: bool = False
    recompute: tuple[Again, ...] = ()
    precision: str = "bf16"
    optimizer: Optimizer = Optimizer()
    loss_chunks: int = 1  # slices of the vocabulary in which head and loss are computed together
    compile: bool = False  # the layers run under torch.compile
    solution: Solution = Solution(1, {})
    reduce_dtype: str | None = None
    context: Solution = Solution(1, {})
    padded_from: int | None = None  # tokens of a sample, where the trainer pads it to `sequence`

    @property
    def tokens(self) -> int:
        """Tokens of a sample, pads not counted."""
        return self.padded_from or self.sequence

    @property
    def accumulation(self) -> int:
        """Micro-batches a step on each data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.mesh.dp)

    @property
    def sharding(self) -> str:
        """3, 3 hsdp8, 3 hsdp8 offload: the ZeRO stage with its groups and place."""
        return sharding_text(self.zero, self.hsdp, self.offload)

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        return len(self.stages) // self.mesh.pp

    def __post_init__(self) -> None:
        check({axis: self.mesh.size(axis) for axis in AXES} | {name: getattr(self, name) for name in _OPTIONS})
        check({"gpus": self.mesh.world_size})
        check_cut(self.sequence, self.padded_from, self.mesh.cp)
        if self.padded_from is not None and not 1 <= self.padded_from < self.sequence:
            raise PlanError(
                f"padded_from={self.padded_from} with sequence={self.sequence}: samples are padded to a longer "
                "sequence; leave padded_from out for samples that are as long"
            )
        samples = self.micro_batch * self.mesh.dp
        if self.global_batch % samples:
            raise PlanError(
                f"global_batch={self.global_batch} is not divisible by micro_batch={self.micro_batch} "
                f"× dp={self.mesh.dp} = {samples}: use a multiple of {samples}"
            )
        if len(self.stages) % self.mesh.pp or not self.stages:
            raise PlanError(
                f"{len(self.stages)} stages for pp={self.mesh.pp}: give one layer range a stage, or the same number of "
                f"virtual stages a rank ({2 * self.mesh.pp}, {3 * self.mesh.pp}, …)"
            )
        if why := why_not(self.schedule, self.mesh.pp, self.virtual_stages, self.accumulation):
            raise PlanError(why)
        if why := why_not_split(self.schedule, self.zero, bool(self.recompute), self.compile):
            raise PlanError(why)
        check_precision(self.precision, self.reduce_dtype)
        if fault := sharding_fault(self.mesh, self.zero, self.hsdp, self.offload):
            raise PlanError(fault)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML and JSON; `from_dict` is the inverse."""
        return {
            "mesh": {axis: self.mesh.size(axis) for axis in AXES},
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "sequence": self.sequence,
            **({"padded_from": self.padded_from} if self.padded_from else {}),
            "stages": [list(stage) for stage in self.stages],
            "schedule": self.schedule,
            "zero": self.zero,
            "hsdp": self.hsdp,
            "offload": self.offload,
            "recompute": to_plain(self.recompute),
            "loss_chunks": self.loss_chunks,
            "compile": self.compile,
            "precision": self.precision,
            **({"reduce_dtype": self.reduce_dtype} if self.reduce_dtype else {}),
            "optimizer": {
                "name": self.optimizer.name,
                "kwargs": _plain(self.optimizer.kwargs),
                "groups": [{"names": list(names), **_plain(own)} for names, own in self.optimizer.groups],
            },
            "layout": self.solution.name,
            "placements": _placements(self.solution),
            **self._context_dict(),
        }

    def _context_dict(self) -> dict[str, Any]:
        if self.mesh.cp == 1:
            return {}
        return {"context": self.context.name, "context_placements": _placements(self.context)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        mesh = Mesh(**data["mesh"])
        return Plan(
            mesh=mesh,
            global_batch=data["global_batch"],
            micro_batch=data["micro_batch"],
            sequence=data["sequence"],
            padded_from=data.get("padded_from"),
            stages=tuple((start, stop) for start, stop in data["stages"]),
            schedule=data["schedule"],
            zero=data["zero"],
            hsdp=data.get("hsdp"),
            offload=data.get("offload", False),
            recompute=from_plain(data["recompute"]),
            precision=data["precision"],
            reduce_dtype=data.get("reduce_dtype"),
            optimizer=_read_optimizer(data["optimizer"]),
            loss_chunks=data.get("loss_chunks", 1),
            compile=data.get("compile", False),
            solution=_read_solution(mesh.tp, data["placements"], data.get("layout", "")),
            context=_read_solution(mesh.cp, data.get("context_placements", {}), data.get("context", "")),
        )

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False, width=110))

    @staticmethod
    def load(path: Path) -> Plan:
        """The plan of a file that a person may have edited; PlanError naming the file and what is wrong in it."""
        try:
            data = yaml.safe_load(path.read_text())
            check_form(data)
            return Plan.from_dict(data)
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
            raise PlanError(f"{path}{line}: this is no YAML: {error.problem}") from error
        except (OSError, ValueError, TypeError, ArithmeticError, RecursionError, yaml.YAMLError) as error:
            raise PlanError(f"{path}: {error}") from error


def check_precision(precision: str, reduce_dtype: str | None) -> None:
    """PlanError where there is no such precision, or its gradients cannot be reduced so."""
    check({"precision": precision})
    legal = dict.fromkeys((MASTERS[precision], precision))
    if reduce_dtype is not None and reduce_dtype not in legal:
        raise PlanError(f"reduce_dtype={reduce_dtype!r} with precision={precision!r}: use {' or '.join(legal)}")


def check_cut(sequence: int, padded_from: int | None, cp: int) -> None:
    """PlanError where the ranks of cp cannot have equal parts of a sequence."""
    if sequence % cp:
        raise PlanError(
            f"{asked_length(sequence, padded_from)} is not divisible by cp={cp}: "
            f"use {lengths_that_work(sequence, padded_from, cp, 2 * cp)}, or another cp"
        )


def asked_length(sequence: int, padded_from: int | None) -> str:
    """The length that a user gave, and what it is padded to: "sequence=1001 padded to 1004"."""
    return f"sequence={sequence}" if padded_from is None else f"sequence={padded_from} padded to {sequence}"


def lengths_that_work(sequence: int, padded_from: int | None, multiple: int, pads: int) -> str:
    """The legal lengths around one that is not, and the padding that makes one: "1,000 or 1,004, pad_to_multiple_of=8".

    Who pads already is told of a multiple alone: the padded length is none of the user's choosing.
    """
    padding = f"pad_to_multiple_of={pads}"
    return f"{nearest_lengths(sequence, multiple)}, {padding}" if padded_from is None else padding


def nearest_lengths(sequence: int, multiple: int) -> str:
    """The legal sequence lengths around one that is not: "1,024 or 1,536"."""
    low, high = sequence // multiple * multiple, -(-sequence // multiple) * multiple
    return " or ".join(f"{length:,}" for length in (low, high) if length)


def _placements(solution: Solution) -> dict[str, dict[str, str]]:
    return {
        block: {node: str(strategy) for node, strategy in nodes.items()} for block, nodes in solution.strategies.items()
    }


def _read_solution(ranks: int, placements: Mapping[str, Mapping[str, str]], name: str) -> Solution:
    strategies = {
        block: {node: Strategy.parse(text) for node, text in nodes.items()} for block, nodes in placements.items()
    }
    return Solution(ranks, strategies, name)


def sharding_text(zero: int, hsdp: int | None, offload: bool) -> str:
    """3, 3 hsdp8, 3 hsdp8 offload."""
    return f"{zero}{f' hsdp{hsdp}' if hsdp else ''}{' offload' if offload else ''}"


def sharding_fault(mesh: Mesh, zero: int, hsdp: int | None, offload: bool) -> str:
    """Why what ZeRO shards cannot be grouped or offloaded so, with the way out; "" where it can."""
    if offload and zero == 0:
        return "offload with zero=0: whole masters and states of every rank would fill the host; use zero=1, 2 or 3"
    if hsdp is None:
        return ""
    if zero == 0:
        return f"hsdp={hsdp} with zero=0: ZeRO-0 shards nothing; use zero=1, 2 or 3, or leave hsdp out"
    data = mesh.dp * mesh.cp
    if hsdp > 1 and data % hsdp == 0:
        return ""
    ranks = f"{data} data ranks (dp={mesh.dp} × cp={mesh.cp})"
    legal = ", ".join(str(n) for n in range(2, data + 1) if data % n == 0)
    why = "a group of one shards nothing" if hsdp == 1 else f"it does not divide the {ranks}"
    return f"hsdp={hsdp}: {why}; use {f'one of {legal}' if legal else 'several data ranks'}, or leave hsdp out"


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as YAML and JSON can hold them."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in kwargs.items()}


def _read_optimizer(data: Mapping[str, Any]) -> Optimizer:
    groups = tuple(
        (tuple(group["names"]), {k: v for k, v in group.items() if k != "names"}) for group in data.get("groups", ())
    )
    return Optimizer(data["name"], dict(data["kwargs"]), groups)
