"""The two ordered lists of passes: PREPARE before the search, PASSES after it."""

from .base import Pass
from .clean import Clean
from .decompose import Decompose
from .normalize_loss import NormalizeLoss

PREPARE: tuple[Pass, ...] = (
    Clean(),  # first: the patterns below are written for canonical casts and views
    Decompose(),
    NormalizeLoss(),  # last: it copies the targets' ancestors, which must be final
)
