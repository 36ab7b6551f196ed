"""The models of the first hour, by kind."""

from __future__ import annotations

from . import (
    checks,
    complex_rotary,
    fixed_length,
    frozen_parts,
    in_batch,
    kept_whole,
    learned_queries,
    lengths,
    named_loss,
    no_layers,
    operators,
    repeated_bias,
    scores,
    shared_layers,
    shifted_loss,
    sliced_table,
)
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
    *fixed_length.CASES,
    *frozen_parts.CASES,
    *learned_queries.CASES,
    *shared_layers.CASES,
    *sliced_table.CASES,
    *repeated_bias.CASES,
    *lengths.CASES,
    *complex_rotary.CASES,
)
