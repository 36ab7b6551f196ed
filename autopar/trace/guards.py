"""What is on while a model is exported: no graphs on the terminal, and no custom autograd.Function traced silently."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch

from ..errors import TraceError


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
def custom_functions_refused() -> Iterator[None]:
    """Within: calling a custom autograd.Function is an error, for its backward would be lost."""
    apply = torch.autograd.Function.__dict__["apply"]

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            raise TraceError(
                f"forward calls {cls.__name__}, a torch.autograd.Function, whose backward a trace does not have: call "
                "it in a submodule of its own, which is then kept whole"
            )
        return apply.__func__(cls, *args, **kwargs)

    function: Any = torch.autograd.Function
    function.apply = classmethod(checked)
    try:
        yield
    finally:
        function.apply = apply
