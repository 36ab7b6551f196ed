"""Random numbers that a model and its program draw alike, so that the two can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime.internals import TorchDispatchMode


class same_draws(TorchDispatchMode):  # noqa: N801 - a context manager, named as torch names its own
    """Within it, every sample draws the same random numbers, in each call: a program that runs parts of a batch, in
    another order, then draws what the model draws. A sample is an index of dim 0. The numbers are float32's, which
    both sides can hold.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        # Attention and native dropout, whose probability is 0 here, return several.
        several = len(func._schema.returns) != 1
        if several or torch.Tag.nondeterministic_seeded not in func.tags and "normal_functional" not in str(func):
            return func(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            result = func(*args, **kwargs)
            pieces = [_draw_alone(func, args, kwargs, result, i) for i in range(len(result) if result.dim() else 0)]
            drawn = torch.cat(pieces) if pieces else _seeded(func, args, kwargs)
        return result.copy_(drawn.float() if result.is_floating_point() else drawn)


def _draw_alone(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor, sample: int) -> Tensor:
    """What one sample draws: tensors and sizes of the whole batch are cut."""

    def cut(argument: Any) -> Any:
        if isinstance(argument, Tensor) and argument.dim() and len(argument) == len(result):
            return argument[sample : sample + 1]
        return [1, *argument[1:]] if isinstance(argument, list) and argument == list(result.shape) else argument

    return _seeded(func, tuple(map(cut, args)), kwargs)


def _seeded(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Drawn from one seed, in float64: in float32 an op may draw otherwise."""
    torch.manual_seed(0)
    doubled = (a.double().clone() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)
    floating = kwargs.get("dtype") is None or kwargs["dtype"].is_floating_point
    is_int = "randint" in str(func) or "randperm" in str(func)
    chosen = {"dtype": torch.float64} if takes_dtype and floating and not is_int else {}
    result: Tensor = func(*doubled, **{**kwargs, **chosen})
    return result
