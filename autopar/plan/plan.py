"""The plan: every choice the search makes, and nothing it can derive. Read, edited and written as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ..errors import PlanError
from ..placement import REPLICATE, Strategy
from ..runtime.choices import AXES, Batch, Compute, Mesh, Pipeline, Sharding
from .form import check_form, from_plain, to_plain
from .options import CHOICES, VALUES, check, check_choices
from .recompute import Activations
from .schedules import why_not, why_not_split

MASTERS = {"bf16": "fp32", "fp16": "fp32", "fp32": "fp32", "fp64": "fp64"}  # precision → of weights and states


@dataclass(frozen=True, eq=False)
class Solution:
    """One answer of the intra-op search on one axis, tp or cp, of `ranks` ranks.

    `strategies[block][node]` is the strategy of each node of each block (prologue, layer classes,
    epilogue). A parameter or an input is a node without inputs: its output is its stored placement.
    In a block that is left out every node is replicated.
    """

    ranks: int
    strategies: Mapping[str, Mapping[str, Strategy]]
    name: str = ""  # recognised layout, such as "megatron" or "ring"

    @cached_property
    def sharded(self) -> Mapping[str, Mapping[str, Strategy]]:
        """The blocks with a node that is not replicated."""

        def is_sharded(strategy: Strategy) -> bool:
            return any(placement != REPLICATE for placement in (*strategy.inputs, strategy.output))

        return {block: nodes for block, nodes in self.strategies.items() if any(map(is_sharded, nodes.values()))}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Solution):
            return NotImplemented
        return (self.ranks, self.name, self.sharded) == (other.ranks, other.name, other.sharded)

    def __hash__(self) -> int:
        return hash((self.ranks, self.name))


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
    """A complete plan: the choices by what they are about, the optimizer, and the placements.

    `solution` holds the placements on tp, of the program that `context`, those on cp, leaves to each of its ranks.
    """

    mesh: Mesh
    batch: Batch
    pipeline: Pipeline
    sharding: Sharding
    activations: Activations
    compute: Compute
    optimizer: Optimizer = Optimizer()
    solution: Solution = Solution(1, {})
    context: Solution = Solution(1, {})

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        global_batch: int,
        micro_batch: int,
        sequence: int,
        stages: tuple[tuple[int, int], ...],
        schedule: str = "none",
        **others: Any,
    ) -> Plan:
        """The plan of these choices by name, without placements unless given: ZeRO-0, no recompute, bf16."""
        given = {
            "global_batch": global_batch, "micro_batch": micro_batch, "sequence": sequence, "stages": stages,
            "schedule": schedule, "zero": 0, "recompute": (), "precision": "bf16", **others,
        }  # fmt: skip
        objects = {name: kind(**_taken(kind, given)) for name, kind in _OBJECTS.items()}
        return cls(mesh=mesh, **objects, **given)

    def changed(self, **choices: Any) -> Plan:
        """The same plan but for these choices, by their names or those of the plan's own fields."""
        objects = {name: replace(getattr(self, name), **_taken(kind, choices)) for name, kind in _OBJECTS.items()}
        return replace(self, **(objects | choices))

    @property
    def accumulation(self) -> int:
        """Micro-batches a step on each data-parallel rank."""
        return self.batch.micro_batches(self.mesh.dp)

    @property
    def virtual_stages(self) -> int:
        """Stages on each pipeline rank."""
        return len(self.pipeline.stages) // self.mesh.pp

    @property
    def pinned(self) -> dict[str, Any]:
        """Its choices that pins can fix, by name."""
        names = [name for name, of in _HOLDERS.items() if CHOICES[name].metadata["by"] == "pin"]
        axes = {axis: self.mesh.size(axis) for axis in AXES}
        return axes | {name: getattr(getattr(self, _HOLDERS[name]), name) for name in names}

    def __post_init__(self) -> None:
        for name in _OBJECTS:
            check_choices(getattr(self, name))
        check({axis: self.mesh.size(axis) for axis in AXES} | {"gpus": self.mesh.world_size})
        batch, stages, schedule = self.batch, self.pipeline.stages, self.pipeline.schedule
        check_cut(batch, self.mesh.cp)
        if batch.padded_from is not None and batch.padded_from >= batch.sequence:
            raise PlanError(
                f"padded_from={batch.padded_from} with sequence={batch.sequence}: samples are padded to a longer "
                "sequence; leave padded_from out for samples that are as long"
            )
        samples = batch.micro_batch * self.mesh.dp
        if batch.global_batch % samples:
            raise PlanError(
                f"global_batch={batch.global_batch} is not divisible by micro_batch={batch.micro_batch} "
                f"× dp={self.mesh.dp} = {samples}: use a multiple of {samples}"
            )
        if len(stages) % self.mesh.pp or not stages:
            raise PlanError(
                f"{len(stages)} stages for pp={self.mesh.pp}: give one layer range a stage, or the same number of "
                f"virtual stages a rank ({2 * self.mesh.pp}, {3 * self.mesh.pp}, …)"
            )
        if why := why_not(schedule, self.mesh.pp, self.virtual_stages, self.accumulation):
            raise PlanError(why)
        recomputes = bool(self.activations.recompute)
        if why := why_not_split(schedule, self.sharding.zero, recomputes, self.compute.compile):
            raise PlanError(why)
        check_precision(self.compute)
        if fault := sharding_fault(self.mesh, self.sharding):
            raise PlanError(fault)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML and JSON; `from_dict` is the inverse."""
        data: dict[str, Any] = {"mesh": {axis: self.mesh.size(axis) for axis in AXES}}
        for name, of in _HOLDERS.items():
            value = getattr(getattr(self, of), name)
            if value is not None or not CHOICES[name].metadata["rare"]:
                data[name] = to_plain(name, value)
        data["optimizer"] = {
            "name": self.optimizer.name,
            "kwargs": _plain(self.optimizer.kwargs),
            "groups": [{"names": list(names), **_plain(own)} for names, own in self.optimizer.groups],
        }
        data |= {"layout": self.solution.name, "placements": _placements(self.solution)}
        if self.mesh.cp > 1:
            data |= {"context": self.context.name, "context_placements": _placements(self.context)}
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        mesh = Mesh(**data["mesh"])
        return Plan.of(
            mesh,
            **{name: from_plain(name, data[name]) for name in _HOLDERS if name in data},
            optimizer=_read_optimizer(data["optimizer"]),
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


# The fields of a plan whose own fields are choices by name, and the field that holds each choice.
_OBJECTS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in VALUES if kind is not Mesh}
_HOLDERS = {field.name: name for name, kind in _OBJECTS.items() for field in fields(kind)}


def _taken(kind: type[Any], choices: dict[str, Any]) -> dict[str, Any]:
    """The choices of one value object, taken out of `choices`."""
    return {field.name: choices.pop(field.name) for field in fields(kind) if field.name in choices}


def check_precision(compute: Compute) -> None:
    """PlanError where there is no such precision, or its gradients cannot be reduced so."""
    check({"precision": compute.precision})
    legal = dict.fromkeys((MASTERS[compute.precision], compute.precision))
    if compute.reduce_dtype is not None and compute.reduce_dtype not in legal:
        raise PlanError(
            f"reduce_dtype={compute.reduce_dtype!r} with precision={compute.precision!r}: use {' or '.join(legal)}"
        )


def check_cut(batch: Batch, cp: int) -> None:
    """PlanError where the ranks of cp cannot have equal parts of a sequence."""
    if batch.sequence % cp:
        raise PlanError(
            f"{asked_length(batch)} is not divisible by cp={cp}: "
            f"use {lengths_that_work(batch, cp, 2 * cp)}, or another cp"
        )


def asked_length(batch: Batch) -> str:
    """The length that a user gave, and what it is padded to: "sequence=1001 padded to 1004"."""
    return f"sequence={batch.tokens}{f' padded to {batch.sequence}' if batch.padded else ''}"


def lengths_that_work(batch: Batch, multiple: int, pads: int) -> str:
    """The legal lengths around one that is not, and the padding that makes one: "1,000 or 1,004, pad_to_multiple_of=8".

    Who pads already is told of a multiple alone: the padded length is none of the user's choosing.
    """
    padding = f"pad_to_multiple_of={pads}"
    return padding if batch.padded else f"{nearest_lengths(batch.sequence, multiple)}, {padding}"


def nearest_lengths(sequence: int, multiple: int) -> str:
    """The legal sequence lengths around one that is not: "1,024 or 1,536"."""
    low, high = sequence // multiple * multiple, -(-sequence // multiple) * multiple
    return " or ".join(f"{length:,}" for length in (low, high) if length)


def _placements(solution: Solution) -> dict[str, dict[str, str]]:
    """Block → node → strategy; over several ranks all blocks where none is sharded, for none given are solved for."""
    shown = solution.sharded if solution.sharded or solution.ranks == 1 else solution.strategies
    return {block: {node: str(strategy) for node, strategy in nodes.items()} for block, nodes in shown.items()}


def _read_solution(ranks: int, placements: Mapping[str, Mapping[str, str]], name: str) -> Solution:
    strategies = {
        block: {node: Strategy.parse(text) for node, text in nodes.items()} for block, nodes in placements.items()
    }
    return Solution(ranks, strategies, name)


def sharding_fault(mesh: Mesh, sharding: Sharding) -> str:
    """Why what ZeRO shards cannot be grouped or offloaded so, with the way out; "" where it can."""
    zero, hsdp = sharding.zero, sharding.hsdp
    if sharding.offload and zero == 0:
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
