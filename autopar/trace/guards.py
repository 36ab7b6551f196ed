"""What is on while a model is exported: no graphs on the terminal, and no custom autograd.Function is traced."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn


class _WithoutGraphs(io.TextIOBase):
    """A stream without the whole graph that torch prints where export fails."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if "torch.ops.aten" not in text:
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def quiet() -> Iterator[None]:
    """Within: a failing export says what failed in its exception alone."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(_WithoutGraphs(sys.stderr)):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def custom_functions(apply: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Within: `apply(kind, args, kwargs)` stands for each call of a custom autograd.Function, whose backward a trace
    would lose."""
    original = torch.autograd.Function.__dict__["apply"]

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):
            return original.__func__(cls, *args, **kwargs)
        return apply(cls, args, kwargs)

    function: Any = torch.autograd.Function
    function.apply = classmethod(applied)
    try:
        yield
    finally:
        function.apply = original


def refuse_recurrent(model: nn.Module) -> None:
    """Let the LSTMs, GRUs and RNNs of a model that is to be traced say that they cannot be, where they are called.

    Export would unroll them to the example's sequence, and fail at the end without a place.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.forward = _unless_symbolic(module)


def _unless_symbolic(module: nn.RNNBase) -> Any:
    forward, dim = module.forward, 1 if module.batch_first else 0

    def checked(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, torch.Tensor) and isinstance(x.shape[dim], torch.SymInt):
            raise TypeError(
                f"{type(module).__name__} is recurrent over a sequence of any length, which a trace cannot hold, nor "
                "can it be kept whole: use attention, convolutions or linear recurrences as products instead"
            )
        return forward(x, *args, **kwargs)

    return checked
