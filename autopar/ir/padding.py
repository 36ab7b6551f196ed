"""What is put after the tokens of a sample so that its length divides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """One dim of one input that is a sequence: it is padded with `value` at its end."""

    input: str
    dim: int
    value: int
