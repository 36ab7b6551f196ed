"""What each key of a plan.yaml may hold: an edited plan is told which key is wrong, and what belongs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import PlanError
from .options import OPTIONS, is_whole, nearest, shown
from .recompute import FORM, MOST_LAYERS, is_plain

_AXES = {"pp", "dp", "tp"}  # cp may be left out


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


def _stages(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_range, value))


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_whole(n) and 0 <= n <= MOST_LAYERS for n in value)


def _mesh(value: Any) -> bool:
    if not isinstance(value, dict) or not _AXES <= set(value) <= _AXES | {"cp"}:
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


def _option(name: str) -> tuple[Callable[[Any], bool], str]:
    """As `parallelize` takes it."""
    return OPTIONS[name].fits, OPTIONS[name].form


_OPTIONAL = {
    "layout", "loss_chunks", "compile", "reduce_dtype", "context", "context_placements", "hsdp", "offload",
    "padded_from",
}  # fmt: skip
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mesh": (_mesh, "a whole number for each of pp, dp, cp and tp, as {pp: 1, dp: 2, cp: 1, tp: 4}"),
    "global_batch": _option("global_batch"),
    "micro_batch": _option("micro_batch"),
    "sequence": _option("sequence"),
    "padded_from": (OPTIONS["sequence"].fits, "a whole number of tokens of a sample, which is padded to `sequence`"),
    "stages": (_stages, "a layer range [start, stop] for each stage, as [[0, 12], [12, 24]]"),
    "schedule": _option("schedule"),
    "zero": _option("zero"),
    "hsdp": (
        lambda value: value is None or OPTIONS["hsdp"].fits(value),
        "a whole number of ranks that share out one copy, or null for all data ranks",
    ),
    "offload": _option("offload"),
    "recompute": (
        is_plain,
        f"what to recompute of which layers, as {{0-11: mlp, 12: layer}}, or {{}} for none; words: {FORM}",
    ),
    "loss_chunks": _option("loss_chunks"),
    "compile": _option("compile"),
    "precision": _option("precision"),
    "reduce_dtype": _option("reduce_dtype"),
    "optimizer": (_optimizer, "a name, kwargs and perhaps groups, as {name: AdamW, kwargs: {lr: 0.001}, groups: []}"),
    "layout": (_text, "the name of a layout of tensor parallelism"),
    "placements": (_placements, "a strategy for each node of each block, as {Block: {ln_1: 'R, R, R -> R'}}, or {}"),
    "context": (
        lambda value: value == "" or OPTIONS["attention"].fits(value),
        "ring, ulysses or all_gather: the layout of context parallelism",
    ),
    "context_placements": (_placements, "a strategy on cp for each node of each block, as in placements"),
}
