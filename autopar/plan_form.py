"""What each key of a plan.yaml may hold: an edited plan is told which key is wrong, and what belongs there."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from .errors import PlanError
from .recompute import FORM, is_plain

_AXES = {"pp", "dp", "tp"}  # cp may be left out


def check_form(data: Any) -> None:
    """PlanError naming the keys that are unknown, missing or of another form than `FORMS` says."""
    if not isinstance(data, dict):
        raise PlanError(f"a plan is a mapping with the keys {', '.join(FORMS)}, and not {_short(data)}")
    for key in data:
        if key not in FORMS:
            raise PlanError(f"no such key: {key}{nearest(str(key), FORMS)}; a plan has {', '.join(FORMS)}")
    for key, (fits, form) in FORMS.items():
        if key not in data and key not in _OPTIONAL:
            raise PlanError(f"{key} is missing: it is {form}")
        if key in data and not fits(data[key]):
            raise PlanError(f"{key}: {_short(data[key])} is not {form}")


def nearest(name: str, names: Iterable[str]) -> str:
    """ " (did you mean 'zero'?)", or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _wholes(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


def _stages(value: Any) -> bool:
    return isinstance(value, list) and all(_wholes(stage) and len(stage) == 2 for stage in value)


def _mesh(value: Any) -> bool:
    return isinstance(value, dict) and _AXES <= set(value) <= _AXES | {"cp"} and all(map(_whole, value.values()))


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


def _whole_or_none(value: Any) -> bool:
    return value is None or _whole(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


_OPTIONAL = {
    "layout", "loss_chunks", "compile", "reduce_dtype", "context", "context_placements", "hsdp", "offload",
    "padded_from",
}  # fmt: skip
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "mesh": (_mesh, "a whole number for each of pp, dp, cp and tp, as {pp: 1, dp: 2, cp: 1, tp: 4}"),
    "global_batch": (_whole, "a whole number of samples"),
    "micro_batch": (_whole, "a whole number of samples"),
    "sequence": (_whole, "a whole number of tokens"),
    "padded_from": (_whole, "a whole number of tokens of a sample, which is padded to `sequence`"),
    "stages": (_stages, "a layer range [start, stop] for each stage, as [[0, 12], [12, 24]]"),
    "schedule": (_text, "the name of a schedule"),
    "zero": (_whole, "0, 1, 2 or 3"),
    "hsdp": (_whole_or_none, "a whole number of ranks that share out one copy, or null for all data ranks"),
    "offload": (_flag, "true or false"),
    "recompute": (
        is_plain,
        f"what to recompute of which layers, as {{0-11: mlp, 12: layer}}, or {{}} for none; words: {FORM}",
    ),
    "loss_chunks": (_whole, "a whole number of slices of the vocabulary, 1 for whole logits"),
    "compile": (_flag, "true or false"),
    "precision": (_text, "bf16, fp16, fp32 or fp64"),
    "reduce_dtype": (_text, "fp32, or the precision itself"),
    "optimizer": (_optimizer, "a name, kwargs and perhaps groups, as {name: AdamW, kwargs: {lr: 0.001}, groups: []}"),
    "layout": (_text, "the name of a layout of tensor parallelism"),
    "placements": (_placements, "a strategy for each node of each block, as {Block: {ln_1: 'R, R, R -> R'}}, or {}"),
    "context": (_text, "ring, ulysses or all_gather: the layout of context parallelism"),
    "context_placements": (_placements, "a strategy on cp for each node of each block, as in placements"),
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
