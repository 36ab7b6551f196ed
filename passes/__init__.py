"""The two ordered lists of passes: PREPARE before the search, PASSES after it."""

from .base import Pass
from .clean import Clean
from .decompose import Decompose
from .eliminate_dead_code import EliminateDeadCode
from .insert_casts import InsertCasts
from .insert_conversions import InsertConversions
from .insert_recompute import InsertRecompute
from .lower_conversions import LowerConversions
from .normalize_loss import NormalizeLoss
from .shard_parameters import ShardParameters
from .split_parameters import SplitParameters
from .split_stages import SplitStages

PREPARE: tuple[Pass, ...] = (
    Clean(),  # first: the patterns below are written for canonical casts and views
    Decompose(),
    SplitParameters(),  # after decompose: it has written splits as slices
    NormalizeLoss(),  # last: it copies the targets' ancestors, which must be final
)

PASSES: tuple[Pass, ...] = (
    SplitStages(),
    ShardParameters(),
    InsertConversions(),  # after typing: it compares placements
    InsertCasts(),  # after conversions: half-precision values travel, not fp32 ones
    InsertRecompute(),
    LowerConversions(),  # last of those that see placements as such
    EliminateDeadCode(),
)

__all__ = ["PASSES", "PREPARE", "Pass"]
