"""What one block of the model costs on one rank: symbolic facts, no hardware.

A block is the prologue (embedding), one layer class, or the epilogue (head and loss), under one tp
solution. Expressions are sympy in `b` (samples of a micro-batch) and `s` (tokens of a sequence).
`describe` makes these from the traced graph; every other cost model only reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from autopar.ir.graph import B, S

CHUNKS = sympy.Symbol("c", positive=True, integer=True)  # slices of the vocabulary in which a loss is computed


@dataclass(frozen=True)
class OpCost:
    """One op on one rank. FLOPs count a multiply-add as two; bytes are HBM traffic of unfused eager kernels."""

    name: str
    kind: str  # "matmul", "attention" or "memory" (bandwidth-bound)
    forward_flops: sympy.Expr
    forward_bytes: sympy.Expr
    backward_flops: sympy.Expr
    backward_bytes: sympy.Expr
    sharded: bool  # tp divides its work
    launches: tuple[sympy.Expr, sympy.Expr] | None = None  # kernels forward and backward, where not those of its kind
    dgrad_wgrad: tuple[float, float] = (1.0, 0.0)  # of backward, where gradients of inputs and of weights come apart
    needed: sympy.Expr = sympy.Integer(1)  # the share of its FLOPs that the model needs: a mask's kernel does all

    @property
    def model_flops(self) -> sympy.Expr:
        """Forward FLOPs that the model needs of it."""
        return self.forward_flops * self.needed


@dataclass(frozen=True)
class Transfer:
    """`times` equal collectives over tp or cp. `size_bytes` is the whole (gathered) tensor, as nccl-tests counts it.

    behind: the op that computes meanwhile, in as many parts and one more. `phase` is "forward" (repeated by
    recompute), "backward", or "sync" (once a gradient synchronisation: parameters whose gradient is Partial).
    """

    collective: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"
    size_bytes: sympy.Expr
    phase: str
    axis: str = "tp"
    times: int = 1
    behind: str = ""


@dataclass(frozen=True)
class RecomputeCosts:
    """One choice of what a layer computes again in backward: `what` is a text of `autopar.plan.recompute`.

    saved_bytes: kept from forward to backward instead. live_bytes: what backward holds again at once.
    ops, transfers: places in the block's of what runs again (all up to the last op that keeps something).
    """

    what: str
    saved_bytes: sympy.Expr
    live_bytes: sympy.Expr
    ops: tuple[int, ...]
    transfers: tuple[int, ...]


@dataclass(frozen=True)
class LayerCosts:
    """One block under one solution.

    parameters: elements this rank holds before data sharding (tied copies counted once, in the first block).
    saved_bytes: activations kept from forward to backward for one micro-batch, without recompute.
    again: what of it can be recomputed, the whole layer last; none for the ends of a model.
    working_bytes: the largest transient beside what is saved (workspace of one op, its gradient).
    waiting_bytes: gradients kept beside what is saved, once those of inputs are done and those of weights are not.
    buffer_bytes: of the model's buffers that it reads, whole on each rank.
    data_transfers: collectives over dp within forward and backward, of values of the whole batch.
    logits_bytes: of saved_bytes, what the loss keeps of its logits; logits_peak_bytes: the most of them at once.
    """

    name: str
    ops: tuple[OpCost, ...]
    transfers: tuple[Transfer, ...]
    parameters: int
    tied_parameters: int  # elements that another block also holds (an extra copy when the two are on different stages)
    saved_bytes: sympy.Expr
    working_bytes: sympy.Expr
    buffer_bytes: int = 0
    data_transfers: tuple[Transfer, ...] = ()
    logits_bytes: sympy.Expr = sympy.Integer(0)
    logits_peak_bytes: sympy.Expr = sympy.Integer(0)
    recompute: tuple[RecomputeCosts, ...] = ()
    waiting_bytes: sympy.Expr = sympy.Integer(0)

    @property
    def model_flops(self) -> sympy.Expr:
        """Forward FLOPs that the model needs on this rank."""
        return sympy.Add(*(op.model_flops for op in self.ops))


@dataclass(frozen=True)
class BoundaryValue:
    """A value that passes between layers, on one rank: made in layer `made`, `read` in that one at last.

    gradient_bytes: of the gradient that comes back; that of a floating value does, be it needed or not.
    apart: a stage keeps it once, and no layer counts it in its saved_bytes. kept: the layer that reads it counts it.
    """

    made: int
    read: int
    size_bytes: sympy.Expr
    gradient_bytes: sympy.Expr
    once_per_stage: bool
    kept: bool


@dataclass(frozen=True)
class StageConstant:
    """A value that depends on no parameter, as a mask: each stage with a layer of `readers` makes its own. It counts as
    kept, which it is if an op of theirs keeps it, or if they are recomputed."""

    readers: tuple[int, ...]
    size_bytes: sympy.Expr


@dataclass(frozen=True)
class ModelCosts:
    """The whole model under one tp solution: prologue, each layer in order, epilogue.

    `layers[i]` is the class name of layer i; `classes` maps names to costs. `chains[i]` numbers the chain of layers
    that it belongs to, any neighbours of which can be recomputed as one (empty: none can).
    `unsharded_flops`: forward FLOPs of one micro-batch of the original model (for MFU: ×3 with backward).
    `cp`, `context`: the ranks and the name of the solution on cp; then `s` is the tokens of one of these ranks.
    `sharded_fraction`: share of FLOPs that tp divides, 0 to 1, at the given b, s.
    `passed`: the values that pass between layers; `tables`: those that every stage makes for its layers.
    `tables_bytes`: buffers that every stage has, to make these.
    `chunked`: the epilogue with head and loss in `CHUNKS` slices of the vocabulary; None where they cannot be, and
    `not_chunked` says why.
    """

    tp: int
    solution: str
    prologue: LayerCosts
    classes: dict[str, LayerCosts]
    layers: tuple[str, ...]
    epilogue: LayerCosts
    unsharded_flops: sympy.Expr
    sharded_fraction: float
    constants_bytes: int = 0
    chunked: LayerCosts | None = None
    not_chunked: str = "the model has no cross-entropy"
    chains: tuple[int, ...] = ()
    cp: int = 1
    context: str = ""
    boundary_values: tuple[BoundaryValue, ...] = ()
    constants: tuple[StageConstant, ...] = ()


__all__ = [
    "CHUNKS",
    "B",
    "BoundaryValue",
    "LayerCosts",
    "ModelCosts",
    "OpCost",
    "RecomputeCosts",
    "S",
    "StageConstant",
    "Transfer",
]
