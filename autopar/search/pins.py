"""What is asked of the search: the job, and the choices that the user has fixed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autopar.errors import PlanError
from autopar.options import OPTIONS, PINS, check, check_names, shown
from autopar.plan import Optimizer
from autopar.recompute import Again, choice, whole_layers
from autopar.rules.coupling import Coupling

_NOT_FORBIDDEN = ("recompute", "reduce_dtype", "sequence_parallel")

Recompute = str | int | tuple[int, ...] | tuple[Again, ...]


@dataclass(frozen=True)
class Pins:
    """Choices fixed by the user; None leaves one free.

    attention: the layout of cp, "ring", "ulysses" or "all_gather".
    recompute: "none", "full" (each layer whole), regions ("attention core, mlp"), "groups of 2", the number of layers
    in each stage, or the layer indices. loss_chunks: slices of the vocabulary in which head and loss are computed,
    1 for whole logits. reduce_dtype is not searched: gradients are summed in the dtype of the master weights, unless
    it says otherwise.
    """

    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    zero: int | None = None
    hsdp: int | None = None
    offload: bool | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    recompute: Recompute | None = None
    loss_chunks: int | None = None
    reduce_dtype: str | None = None
    attention: str | None = None
    forbid: Mapping[str, Collection[Any]] = field(default_factory=dict)  # by the names above

    def __post_init__(self) -> None:
        check({f.name: getattr(self, f.name) for f in fields(self) if f.name != "forbid"})
        _check_forbidden(self.forbid)
        if isinstance(self.recompute, str) and self.recompute not in ("none", "full"):
            object.__setattr__(self, "recompute", choice(self.recompute))

    def allows(self, name: str, value: Any) -> bool:
        """Neither pinned to something else nor forbidden."""
        pinned = getattr(self, name)
        return (pinned is None or pinned == value) and value not in self.forbid.get(name, ())

    @property
    def again(self) -> tuple[Again, ...] | None:
        """What is recomputed where the pin names layers; None where it does not."""
        if not isinstance(self.recompute, tuple):
            return None
        given = self.recompute
        plain = whole_layers(sorted(layer for layer in given if isinstance(layer, int)))
        return plain or tuple(again for again in given if isinstance(again, Again))

    def __str__(self) -> str:
        pinned = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "forbid"]
        pinned = [text for text in pinned if not text.endswith("=None")]
        forbidden = [f"no {name}={value}" for name, values in self.forbid.items() for value in values]
        return ", ".join(pinned + forbidden)


def _check_forbidden(forbid: Any) -> None:
    """PlanError where names or values are none that a pin may have."""
    if not isinstance(forbid, Mapping):
        raise PlanError(f"forbid={shown(forbid)}: use a mapping from names to values, as {{'zero': [3]}}")
    for name, values in forbid.items():
        if name in _NOT_FORBIDDEN:
            raise PlanError(f"forbid={name!r}: pin it to what you want instead")
        check_names([str(name)], [pin for pin in PINS if pin not in _NOT_FORBIDDEN], "forbid has no such pin; use")
        if isinstance(values, str) or not isinstance(values, Collection):
            raise PlanError(f"forbid={{{name!r}: {shown(values)}}}: use a list of values, as {{{name!r}: [...]}}")
        for value in values:
            if fault := OPTIONS[name].fault(name, value):
                raise PlanError(f"forbid: {fault}")


@dataclass(frozen=True)
class Request:
    """What is to be trained: samples a step, tokens a sample, bytes a GPU may use; whether samples are coupled."""

    global_batch: int
    sequence: int
    budget_bytes: float
    precision: str = "bf16"
    optimizer: Optimizer = Optimizer()
    pins: Pins = Pins()
    coupling: Coupling | None = None
    compile: bool = False
    padded_from: int | None = None  # tokens of a sample, where it is padded to `sequence`
