"""The models of the first hour, by kind."""

from __future__ import annotations

from . import checks, in_batch, kept_whole, named_loss, no_layers, operators, scores, shifted_loss
from .case import Case

CASES: tuple[Case, ...] = (
    *no_layers.CASES,
    *scores.CASES,
    *in_batch.CASES,
    *named_loss.CASES,
    *checks.CASES,
    *kept_whole.CASES,
    *operators.CASES,
    *shifted_loss.CASES,
)
