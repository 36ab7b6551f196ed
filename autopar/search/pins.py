"""What is asked of the search: the job, the choices that the user has fixed, and whether these can go together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan.options import CHOICES, PINS, check, check_names, shown
from autopar.plan.plan import Optimizer, asked_length, check_cut, check_precision
from autopar.plan.recompute import Activations, RecomputeChoice, choice, whole_layers
from autopar.rules.spread import Coupling
from autopar.runtime.choices import AXES, Batch, Compute, Sharding

from .sizes import divisors, listed

_NOT_FORBIDDEN = ("recompute", "reduce_dtype", "sequence_parallel")

Recompute = str | int | tuple[int, ...] | tuple[RecomputeChoice, ...]
Values = TypeVar("Values", bound=Any)


class Pins:
    """Choices fixed by the user, by the names of `PINS` in `plan/options.py`; one that is left free is None.

    forbid: values that are not to be chosen, by the same names.
    """

    def __init__(self, forbid: Mapping[str, Collection[Any]] | None = None, **fixed: Any) -> None:
        check_names(fixed, PINS, "no such pin; there are")
        check(fixed)
        self.forbid = {} if forbid is None else forbid
        _check_forbidden(self.forbid)
        words = fixed.get("recompute")
        if isinstance(words, str) and words not in ("none", "full"):
            fixed["recompute"] = choice(words)
        self._fixed = {name: fixed[name] for name in PINS if fixed.get(name) is not None}

    def __getattr__(self, name: str) -> Any:
        if name not in PINS:
            raise AttributeError(name)
        return self._fixed.get(name)

    def allows(self, name: str, value: Any) -> bool:
        """Neither pinned to something else nor forbidden."""
        pinned = getattr(self, name)
        return (pinned is None or pinned == value) and value not in self.forbid.get(name, ())

    @property
    def recompute_choices(self) -> tuple[RecomputeChoice, ...] | None:
        """What is recomputed where the pin names layers; None where it does not."""
        if not isinstance(self.recompute, tuple):
            return None
        given: tuple[Any, ...] = self.recompute
        plain = whole_layers(sorted(layer for layer in given if isinstance(layer, int)))
        return plain or tuple(choice for choice in given if isinstance(choice, RecomputeChoice))

    def applied(self, values: Values) -> Values:
        """A value object of the plan with what is fixed of it; layers to recompute, which a pin may name otherwise, as
        they are."""
        fixed = {f.name: self._fixed[f.name] for f in fields(values) if f.name in self._fixed}
        fixed = {name: value for name, value in fixed.items() if CHOICES[name].metadata["legal"] != "recompute"}
        return replace(values, **fixed)

    def also_forbidding(self, forbid: Mapping[str, Collection[Any]]) -> Pins:
        """The same pins with more that is forbidden."""
        both = {name: {*self.forbid.get(name, ()), *forbid.get(name, ())} for name in {**self.forbid, **forbid}}
        return Pins(both, **self._fixed)

    def __str__(self) -> str:
        pinned = [f"{name}={value}" for name, value in self._fixed.items()]
        return ", ".join(pinned + [f"no {name}={value}" for name, values in self.forbid.items() for value in values])


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
            if fault := PINS[name].fault(name, value):
                raise PlanError(f"forbid: {fault}")


@dataclass(frozen=True)
class Request:
    """What is to be trained, and in how many bytes a GPU; `batch` leaves its micro-batch to the search.

    coupling: whether the model couples samples.
    """

    batch: Batch
    compute: Compute
    budget_bytes: float
    optimizer: Optimizer = Optimizer()
    pins: Pins = Pins()
    coupling: Coupling | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "compute"):
            object.__setattr__(self, name, self.pins.applied(getattr(self, name)))

    @cached_property
    def sharding(self) -> Sharding:
        """What the pins fix of it; the search chooses the rest."""
        return self.pins.applied(Sharding(zero=0))

    @cached_property
    def activations(self) -> Activations:
        """Likewise."""
        return self.pins.applied(Activations(recompute=()))


def check_request(request: Request, cluster: Cluster, context: bool = False) -> None:
    """PlanError, with the arithmetic, where pins and cluster or batch cannot go together. context: cp may be free."""
    pins, gpus = request.pins, cluster.gpus
    check_precision(request.compute)
    if pins.cp is not None and request.batch.sequence > 1:
        check_cut(request.batch, pins.cp)
    if pins.attention is not None and pins.cp is None and not context:
        parts = next((f"pad_to_multiple_of={2 * c}, " for c in divisors(gpus) if c > 1), "")
        raise PlanError(
            f"attention={pins.attention!r} is for cp > 1, and none divides gpus={gpus} and "
            f"{asked_length(request.batch)}: use {parts}another length or number of GPUs, or leave it free"
        )
    _check_mesh(pins, gpus, context)
    _check_batch(pins, request.batch.global_batch)


def _check_mesh(pins: Pins, gpus: int, context: bool) -> None:
    """PlanError where the pinned sizes do not divide the GPUs, or leave some idle."""
    sizes = {name: getattr(pins, name) for name in AXES if getattr(pins, name) is not None}
    pinned = prod(sizes.values())
    text = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if gpus % pinned:
        way = f"use gpus={_multiples_beside(gpus, pinned)}"
        if len(sizes) == 1:
            way += f", or {next(iter(sizes))} one of {listed(divisors(gpus))}"
        raise PlanError(f"gpus={gpus} is not divisible by {text}{f' = {pinned}' if len(sizes) > 1 else ''}: {way}")
    if len(sizes.keys() - {"cp"}) == 3 and pinned != gpus and not (context and pins.cp is None):
        raise PlanError(f"{text} = {pinned} leaves {gpus - pinned} of gpus={gpus} idle: use gpus={pinned}, or free one")


def _check_batch(pins: Pins, batch: int) -> None:
    """PlanError where the pinned micro-batch and replicas do not divide the global batch."""
    sizes = {name: getattr(pins, name) for name in ("micro_batch", "dp") if getattr(pins, name)}
    samples = prod(sizes.values())
    if batch % samples:
        text = " × ".join(f"{name}={size}" for name, size in sizes.items())
        raise PlanError(
            f"global_batch={batch} is not divisible by {text}{f' = {samples}' if len(sizes) > 1 else ''}: "
            f"use global_batch={_multiples_beside(batch, samples)}, or values whose product divides it "
            f"(one of {listed(divisors(batch))})"
        )


def _multiples_beside(count: int, step: int) -> str:
    """The multiples of `step` next to `count`: "8 or 12"; without 0."""
    low, high = count // step * step, -(-count // step) * step
    return " or ".join(str(multiple) for multiple in (low, high) if multiple)
