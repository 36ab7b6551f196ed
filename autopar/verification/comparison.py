"""What `verify DIR` found: the edits, and a table of what they change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from .edits import Edits
from .parity import TOLERANCE
from .ranks import relative

_SHOWN = 5


@dataclass(frozen=True)
class Row:
    """A quantity on both sides, where it is a number, and the difference by the contract's metric."""

    what: str
    original: float | None
    program: float | None
    error: float


@dataclass(frozen=True)
class Comparison:
    """The edits of a saved program, and its run beside the original; no rows where it was not run."""

    edits: Edits
    against: str
    rows: tuple[Row, ...] = ()
    lost: tuple[str, ...] = ()  # parameters of the original that the program does not train
    steps: int = 0
    processes: int = 0

    @property
    def same(self) -> bool:
        """Whether a run has shown that nothing that is computed has changed."""
        return bool(self.rows) and not self.lost and all(row.error <= TOLERANCE for row in self.rows)

    def __str__(self) -> str:
        return "\n\n".join(part for part in (str(self.edits), self.edits.diff, self._table(), self._verdict()) if part)

    def _table(self) -> str:
        rows = [(r.what, _number(r.original), _number(r.program), f"{r.error:.1e}") for r in self.rows]
        align = ("left", "right", "right", "right")
        headers = ("after equal weights and batches", "original", "program", "difference")
        return tabulate(rows, headers, tablefmt="simple", colalign=align, disable_numparse=True) if rows else ""

    def _verdict(self) -> str:
        what = "the edit" if self.edits.places else "the program"
        if not self.rows:
            return f"not run: {self.against}" + (
                " · whether the edit changes what is computed is not known" * bool(self.edits.places)
            )
        ran = f"{self.steps} steps in fp64 on {self.processes} processes, against {self.against}"
        largest = max(row.error for row in self.rows)
        if self.same:
            changes = "does not change what is computed" if self.edits.places else "computes what the original computes"
            return f"equal to {max(largest, 1e-16):.0e}: {what} {changes} ({ran}; bound {TOLERANCE:.0e})"
        lost = f" · not trained by the program: {', '.join(self.lost)}" if self.lost else ""
        first = next((row.what for row in self.rows if row.error > TOLERANCE), "")
        said = f"first at: {first}" if first else "in what is trained"
        return f"differs by up to {largest:.1e}, {said} ({ran}; bound {TOLERANCE:.0e}){lost}"


def compared(
    edits: Edits, against: str, reports: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], processes: int
) -> Comparison:
    """Losses and norms of each step, and the gradients and weights that differ most."""
    rows = [
        Row(f"{what}, step {step}", reference[key][step], reports[0][key][step], error)
        for what, key in (("loss", "losses"), ("gradient norm", "norms"))
        for step, error in enumerate(_worst(reports, reference, key))
    ]
    lost: list[str] = []
    for what in ("gradients", "weights"):
        errors: dict[str, float] = {}
        for report in reports:
            errors |= {name: max(error, errors.get(name, 0.0)) for name, error in report[what].items()}
        lost += sorted(reference[what].keys() - errors.keys() - set(lost))
        worst = sorted(errors.items(), key=lambda pair: -pair[1])[:_SHOWN]
        rows += [Row(f"{what.removesuffix('s')} of {name}", None, None, error) for name, error in worst]
    return Comparison(edits, against, tuple(rows), tuple(lost), len(reference["losses"]), processes)


def _worst(reports: Sequence[Mapping[str, Any]], reference: Mapping[str, Any], key: str) -> list[float]:
    """The largest error of each step over the ranks."""
    return [max(errors) for errors in zip(*(relative(r[key], reference[key]) for r in reports), strict=True)]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.6f}" if math.isfinite(value) else str(value)
