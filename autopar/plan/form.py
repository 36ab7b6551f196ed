"""What each key of a plan.yaml may hold: an edited plan is told which key is wrong, and what belongs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import Any

from ..errors import PlanError
from ..runtime.choices import AXES
from . import recompute
from .options import CHOICES, CHOSEN, OPTIONS, nearest, shown

_AXES = {*AXES} - {"cp"}  # cp may be left out


def check_form(data: Any) -> None:
    """PlanError naming the keys that are unknown, missing or of another form than `FORMS` says."""
    if not isinstance(data, dict):
        raise PlanError(f"a plan is a mapping with the keys {', '.join(FORMS)}, and not {shown(data)}")
    for key in data:
        if key not in FORMS:
            raise PlanError(f"no such key: {key}{nearest(str(key), FORMS)}; a plan has {', '.join(FORMS)}")
    for key, (fits, form) in FORMS.items():
        if key not in data and key not in _OPTIONAL:
            raise PlanError(f"{key} is missing: it is {form}")
        if key in data and not fits(data[key]):
            near = nearest(data[key], OPTIONS[key].names) if key in OPTIONS and isinstance(data[key], str) else ""
            raise PlanError(f"{key}: {shown(data[key])} is not {form}{near}")


def to_plain(name: str, value: Any) -> Any:
    """A choice as YAML and JSON can hold it."""
    return _PLAIN[name][0](value) if name in _PLAIN else value


def from_plain(name: str, value: Any) -> Any:
    """The inverse of `to_plain`, of a value that `check_form` has let pass."""
    return _PLAIN[name][1](value) if name in _PLAIN else value


_PLAIN: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "recompute": (recompute.to_plain, recompute.from_plain),
    "stages": (
        lambda stages: [list(stage) for stage in stages],
        lambda stages: tuple((start, stop) for start, stop in stages),
    ),
}


def _mesh(value: Any) -> bool:
    if not isinstance(value, dict) or not _AXES <= set(value) <= {*AXES}:
        return False
    return all(OPTIONS[axis].fits(size) for axis, size in value.items())


def _optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not set(value) <= {"name", "kwargs", "groups"}:
        return False
    groups = value.get("groups", [])
    named = isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("names"), list) for g in groups)
    return isinstance(value.get("name"), str) and isinstance(value.get("kwargs"), dict) and named


def _placements(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(nodes, dict) for nodes in value.values()):
        return False
    return all(isinstance(text, str) for nodes in value.values() for text in nodes.values())


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _choice(name: str) -> tuple[Callable[[Any], bool], str]:
    """As the value object takes it."""
    option = CHOSEN[name]
    if CHOICES[name].default is not None:
        return option.fits, option.form
    return lambda value: value is None or option.fits(value), f"{option.form}, or null"


_RECOMPUTE = (
    recompute.is_plain,
    f"what to recompute of which layers, as {{0-11: mlp, 12: layer}}, or {{}} for none; words: {recompute.FORM}",
)
_OPTIONAL = {name for name, field in CHOICES.items() if field.default is not MISSING}
_OPTIONAL |= {"layout", "context", "context_placements"}
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mesh": (_mesh, "a whole number for each of pp, dp, cp and tp, as {pp: 1, dp: 2, cp: 1, tp: 4}"),
    **{name: _RECOMPUTE if name == "recompute" else _choice(name) for name in CHOICES if name not in AXES},
    "optimizer": (_optimizer, "a name, kwargs and perhaps groups, as {name: AdamW, kwargs: {lr: 0.001}, groups: []}"),
    "layout": (_text, "the name of a layout of tensor parallelism"),
    "placements": (_placements, "a strategy for each node of each block, as {Block: {ln_1: 'R, R, R -> R'}}, or {}"),
    "context": (
        lambda value: value == "" or OPTIONS["attention"].fits(value),
        "ring, ulysses or all_gather: the layout of context parallelism",
    ),
    "context_placements": (_placements, "a strategy on cp for each node of each block, as in placements"),
}
