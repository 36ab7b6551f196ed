"""The ops that are not aten's: the abstract `convert` and the collectives that it is lowered to.

They are only names in a graph: the emitted program calls the functions of the same name in
autopar.runtime.collectives and autopar.runtime.attention.
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


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis: str,
    ranks: int,
    hops: int,
    is_causal: bool,
    zigzag: bool,
    window: int | None = None,
    scale: float | None,
) -> Any:
    """Attention of this rank's part of the sequence to all of it: K and V go around the `ranks` of the axis.

    hops: how often those of a rank are passed on, at most.
    """
    raise AssertionError("a graph node, not to be called")


def gathered_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis: str,
    is_causal: bool,
    zigzag: bool,
    window: int | None = None,
    scale: float | None,
) -> Any:
    """Attention of this rank's part of the sequence to keys and values that are whole."""
    raise AssertionError("a graph node, not to be called")


def is_collective(target: Any) -> bool:
    return COLLECTIVES.get(getattr(target, "__name__", "")) is target
