"""Whether forward computes the same each time: a program holds what one call of it did.

A model may count its calls, keep a tensor for the next one, or draw from Python's random numbers. Forward runs a few
times on meta tensors, and the ops of two calls are compared with the numbers that they are given.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from ..errors import TraceError
from ..runtime.internals import TorchDispatchMode, tree_leaves
from .copies import copied
from .input_sizes import InputSizes
from .source import line_of_the_user

_MORE = 8  # calls of a model that draws random numbers which change nothing in two of them


class _Recorder(TorchDispatchMode):
    """The ops of one call with their numbers, and the tensors of earlier calls that it reads, each with its line.

    earlier: the tensors that calls before this one have made, by id.
    """

    def __init__(self, earlier: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[Any, str]] = []
        self.kept: list[tuple[Tensor, str]] = []
        self.made: dict[int, Tensor] = {}
        self._earlier = earlier

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves, line = tree_leaves((args, dict(kwargs or {}))), line_of_the_user()
        result = func(*args, **(kwargs or {}))
        self.ops.append(((func, *map(_comparable, leaves)), line))
        self.kept += [(x, line) for x in leaves if isinstance(x, Tensor) and id(x) in self._earlier]
        self.made |= {id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def check_repeatable(model: nn.Module, sizes: InputSizes) -> None:
    """TraceError where two calls of forward on meta tensors differ; nothing where it cannot run on them."""
    model, states = copied(model), _random_states()
    before = [(name, p, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)]
    made: dict[int, Tensor] = {}
    try:
        _call(model, sizes, made)  # which may make what the later ones read
        calls = [_call(model, sizes, made) for _ in range(2)]
        if _random_states() != states:
            calls += [_call(model, sizes, made) for _ in range(_MORE)]
    except Exception:  # noqa: BLE001 - what the trace will say with its place, or what is kept whole
        return
    after = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter, graded in before:
        if after.get(name) is not parameter:
            raise TraceError(f"forward replaces the parameter {name}: do so before, for the whole of training")
        if parameter.requires_grad != graded:
            raise TraceError(f"forward changes requires_grad of {name}: set it before, for the whole of training")
    for other in calls[1:]:
        _compare(calls[0], other)


def _comparable(value: Any) -> Any:
    """An argument as it is compared: a tensor by its shape, NaN (which equals nothing) as text."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return "nan" if isinstance(value, float) and math.isnan(value) else value


def _compare(first: _Recorder, other: _Recorder) -> None:
    """TraceError where two calls ran other ops, or read other tensors of earlier calls."""
    ops, kept = zip_longest(first.ops, other.ops), zip_longest(first.kept, other.kept)
    for one, two in ops:
        if one is None or two is None or one[0] != two[0]:
            raise _refusal((one or two)[1])
    for one, two in kept:
        if one is None or two is None or one[0] is not two[0]:
            raise _refusal((one or two)[1])


def _refusal(line: str) -> TraceError:
    return TraceError(
        f"two calls of forward on the same inputs differ at {line}, and a program holds one of them: keep what changes "
        "from call to call (a count, a state, Python's or numpy's random numbers) out of forward, or pass it as an "
        "input; draw with torch, and choose by torch.where"
    )


def _call(model: nn.Module, sizes: InputSizes, made: dict[int, Tensor]) -> _Recorder:
    """One call; `made` is given what it makes."""
    recorder = _Recorder(dict(made))
    with recorder:
        model(**sizes.example())
    made |= recorder.made
    return recorder


def _random_states() -> tuple[Any, str]:
    """The states of Python's generator and, where numpy is loaded, of numpy's: equal where nothing was drawn."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), repr(numpy.random.get_state()) if numpy else ""
