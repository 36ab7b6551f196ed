"""The ops that are not aten's: the abstract `convert` and the collectives that it is lowered to.

They are only names in a graph: the emitted program calls the functions of the same name in
autopar.runtime.collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..placement import CONVERSIONS


def convert(value: Any, source: str, target: str, axis: str) -> Any:
    """value, whose placement on the axis is `source`, with placement `target`."""
    raise AssertionError("a graph node, not to be called")


def _named(name: str) -> Callable[..., Any]:
    def collective(value: Any, *dims: int, axis: str) -> Any:
        raise AssertionError("a graph node, not to be called")

    collective.__name__ = collective.__qualname__ = name
    return collective


# By the name of the runtime's function.
COLLECTIVES: dict[str, Callable[..., Any]] = {
    conversion.function: _named(conversion.function) for conversion in CONVERSIONS.values()
}


def is_collective(target: Any) -> bool:
    return COLLECTIVES.get(getattr(target, "__name__", "")) is target
