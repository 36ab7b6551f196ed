"""What goes into a traced model and what comes out: the user's keywords, and which result is the loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..errors import TraceError
from ..runtime.internals import tree_leaves, tree_unflatten


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """TraceError where tensors are inside other inputs: pipelines and batches split keywords, not what is in them."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            continue
        inside = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if inside:
            keys = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"{len(inside)} tensors"
            raise TraceError(
                f"input {name!r} is a {type(value).__name__} with tensors in it ({keys}): pass each as a keyword of "
                f"its own, with a module around yours whose forward puts {name} together"
            )


def keyword_signature(names: Iterable[str], *first: str) -> inspect.Signature:
    """Of a function that takes `names` as keywords: torch.export wants to see each, and sees none in **kwargs."""
    before = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    return inspect.Signature([*before, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names)])


def name_keywords(model: nn.Module, names: Iterable[str]) -> None:
    """Let a forward that takes inputs as **kwargs, as wrappers do, take each by its name."""
    forward: Any = model.forward
    taken = inspect.signature(forward).parameters.values()
    if {p.name for p in taken if p.kind is not p.VAR_KEYWORD}.issuperset(names):
        return

    def named(**inputs: Any) -> Any:
        return forward(**inputs)

    named.__signature__ = keyword_signature(names)  # type: ignore[attr-defined]
    model.forward = named


def keywords(exported: ExportedProgram) -> dict[str, str]:
    """Name of a placeholder → the keyword of forward that it stands for (`input` is exported as `input_1`)."""
    users = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    spec = exported.call_spec.in_spec
    assert spec is not None
    _, named = tree_unflatten(list(range(len(users))), spec)
    return {users[place]: name for name, place in named.items() if isinstance(place, int)}


def loss_of(exported: ExportedProgram, results: list[Any], model: nn.Module) -> Any:
    """The result that is the loss: forward's own, the one called "loss", the first, or the only 0-dim float."""
    spec = exported.call_spec.out_spec
    assert spec is not None
    returned = tree_unflatten(list(range(len(results))), spec)
    places: list[Any]
    if isinstance(returned, Mapping) and "loss" in returned:
        places = [returned["loss"]]
    else:
        scalars = [i for i, result in enumerate(results) if _is_loss(result)]
        first = next(iter(tree_leaves(returned)), None)
        places = [first] if first in scalars else scalars if len(scalars) == 1 else []
    if len(places) != 1 or not isinstance(places[0], int) or not _is_loss(results[places[0]]):
        raise TraceError(
            f"{type(model).__name__}.forward must return the loss first (a 0-dim tensor), or as 'loss' of a dict, not "
            f"{_shown(returned, results)}: pass labels in inputs, or loss=a callable (outputs, batch) -> scalar"
        )
    return results[places[0]]


def _is_loss(result: Any) -> bool:
    value = getattr(result, "meta", {}).get("val")
    return isinstance(value, torch.Tensor) and value.shape == () and value.is_floating_point()


def _shown(returned: Any, results: list[Any]) -> str:
    """ "{'logits': (2, 16, 50)}" of what forward returned."""
    if isinstance(returned, Mapping):
        return "{" + ", ".join(f"{k!r}: {_shown(v, results)}" for k, v in returned.items()) + "}"
    if isinstance(returned, list | tuple):
        return "(" + ", ".join(_shown(v, results) for v in returned) + ")"
    if not isinstance(returned, int):
        return repr(returned)
    value = getattr(results[returned], "meta", {}).get("val")
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(results[returned])
