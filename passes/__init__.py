"""The ordered lists of passes: PREPARE before the search, CONTEXT to cut sequences over cp, PASSES after it.

HEADS are those of CONTEXT that come before the placements on cp are solved.
"""

from .base import Pass
from .chunk_loss import ChunkLoss
from .clean import Clean
from .cut_batch import CutBatch
from .cut_sequence import CutSequence
from .decompose import Decompose
from .eliminate_dead_code import EliminateDeadCode
from .fit_literals import FitLiterals
from .group_heads import GroupHeads
from .insert_casts import InsertCasts
from .insert_conversions import InsertConversions
from .insert_recompute import InsertRecompute
from .lower_conversions import LowerConversions
from .normalize_loss import NormalizeLoss
from .raise_islands import RaiseIslands
from .read_masks import ReadMasks
from .read_positions import ReadPositions
from .repeat_heads import RepeatHeads
from .shard_parameters import ShardParameters
from .share_masks import ShareMasks
from .split_complex import SplitComplex
from .split_parameters import SplitParameters
from .split_projections import SplitProjections
from .split_stages import SplitStages
from .spread_replicas import SpreadReplicas

PREPARE: tuple[Pass, ...] = (
    Clean(),  # first: the patterns below are written for canonical casts and views
    SplitComplex(),  # before others know sums and products: it writes some
    FitLiterals(),
    ReadPositions(),
    ReadMasks(),
    ShareMasks(),  # after read_masks: it reads masks of truth values
    Decompose(),
    SplitProjections(),  # after decompose: it has written splits as slices, biases as adds
    SplitParameters(),  # after split_projections: it has moved slices of products to their weights
    NormalizeLoss(),  # after these: it copies the targets' ancestors, which must be final
    RaiseIslands(),
)

HEADS: tuple[Pass, ...] = (
    GroupHeads(),
    RepeatHeads(),  # after group_heads: by no more than it takes
)

CONTEXT: tuple[Pass, ...] = (
    *HEADS,  # first: the placements are solved with them
    ShardParameters("cp"),
    InsertConversions("cp"),
    CutSequence(),  # last: of sizes it knows the placements alone
)

PASSES: tuple[Pass, ...] = (
    SplitStages(),
    ShardParameters(),
    InsertRecompute(),  # after typing, by which regions are found; before conversions: they come to lie outside
    InsertConversions(),  # after typing: it compares placements
    SpreadReplicas(),  # after conversions over tp, which are linear and so the same on each part of a batch
    InsertConversions("dp"),
    CutBatch(),  # after both: of sizes it knows the placements alone
    InsertCasts(),  # after conversions: half-precision values travel, not fp32 ones
    ChunkLoss(),  # after casts: the loss is in fp32, with or without chunks
    LowerConversions(),  # last of those that see placements as such
    EliminateDeadCode(),
)

__all__ = ["CONTEXT", "HEADS", "PASSES", "PREPARE", "Pass"]
