"""The lengths of sequences that a model takes, and what lengthens a sample to one of them."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError


@dataclass(frozen=True)
class FixedLength:
    """The one length that a model takes, or that its trace holds for; its shapes have it in place of `s`.

    place: where forward fails at others, " at file.py:12" and the lines around it. limits: why no trace holds for
    others.
    """

    tokens: int
    place: str = ""
    limits: str = ""

    def __str__(self) -> str:
        if self.limits:
            return f"the program is that of sequences of {self.tokens} alone: for others {self.limits}"
        return f"the model takes sequences of {self.tokens} alone{self.place}"

    def check(self, asked: str, sequence: int) -> None:
        """PlanError where other sequences are asked for, as `asked` says."""
        if sequence != self.tokens:
            raise PlanError(f"{asked}: use {self.tokens}, for {self}")

    def check_uncut(self, asked: str, cp: int) -> None:
        """PlanError for cp > 1, which gives each rank a part of the sequence."""
        if cp > 1:
            raise PlanError(f"{asked} would cut the sequence: use cp=1, for {self}")


def check_multiple(multiple: int, asked: str, *lengths: int) -> None:
    """PlanError where a length is none of the multiples that the model takes."""
    for length in lengths:
        if length % multiple:
            near = [n for n in (length // multiple * multiple, -(-length // multiple) * multiple) if n]
            raise PlanError(
                f"{asked}: {length} is not divisible by {multiple}, of which the model's forward makes parts of a "
                f"sequence: use {' or '.join(map(str, near))}"
            )


@dataclass(frozen=True)
class Padding:
    """One dim of one input that is a sequence: it is padded with `value` at its end."""

    input: str
    dim: int
    value: int
