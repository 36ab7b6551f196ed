"""Mark what backward computes again: regions of layers, layers, groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import Block, Program, info
from autopar.ir.values import chains
from autopar.liveness.regions import Region, find_regions, gathered_order
from autopar.liveness.saved import Saved
from autopar.plan.plan import Plan
from autopar.plan.recompute import RecomputeChoice, RecomputeRegion, by_layer, regions_of
from autopar.rules.verify import Level


@dataclass(frozen=True)
class InsertRecompute:
    """What the plan names is emitted inside torch.utils.checkpoint (non-reentrant).

    Requires: typed nodes without conversions, stages. Ensures: `recompute` holds the plan's choices; `regions` those
    of each class, whose ops lie next to each other; a group is a chain of layers on one stage.

        x = self._layer(x)        |   x = checkpoint(self._layer, x, use_reentrant=False)
        h = F.gelu(h)             |   h = checkpoint(self._activation, h, use_reentrant=False)
        h = F.linear(h, w)        |
    """

    name: ClassVar[str] = "insert_recompute"
    leaves: ClassVar[Level] = Level.TYPED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        if not plan.activations.recompute:
            return program
        layers = len(program.layer_calls)
        unknown = [i for i in by_layer(plan.activations.recompute) if not 0 <= i < layers]
        if unknown:
            raise PlanError(f"recompute names layers {unknown}, but {program.name} has layers 0 to {layers - 1}")
        for chosen in plan.activations.recompute:
            _check_groups(program, chosen)
        program = program.copy_blocks()
        wanted = _wanted(program, plan.activations.recompute)
        regions = {name: _mark(program, program.blocks[name], names, plan) for name, names in wanted.items()}
        return replace(program, recompute=plan.activations.recompute, regions=regions)


def _wanted(program: Program, recompute: Sequence[RecomputeChoice]) -> dict[str, list[str]]:
    """The regions of each block that some of its layers recompute."""
    found: dict[str, dict[str, None]] = {}
    for layer, what in by_layer(recompute).items():
        if names := regions_of(what):
            found.setdefault(program.layer_calls[layer].block, {}).update(dict.fromkeys(names))
    return {block: list(names) for block, names in found.items()}


def _mark(program: Program, block: Block, names: Sequence[str], plan: Plan) -> tuple[RecomputeRegion, ...]:
    """The block's regions of these names, each with its ops next to each other."""
    chosen = [region for region in _regions(program, block, names, plan.mesh.tp) if region.name in names]
    for region in sorted(chosen, key=lambda region: -len(region.ops)):  # the part of a sublayer after the whole
        _gather(block, region)
    choices = by_layer(plan.activations.recompute)
    layers = [choices.get(i, "") for i, call in enumerate(program.layer_calls) if call.block == block.name]
    return tuple(
        RecomputeRegion(
            region.name,
            tuple(node.name for node in region.ops),
            always=all(region.name in regions_of(what) for what in layers),
        )
        for region in chosen
    )


def _regions(program: Program, block: Block, names: Sequence[str], tp: int) -> list[Region]:
    """All regions of the block; PlanError where some of `names` are none of them, or the block is no layer."""
    if program.is_between(block.name):
        regions = []
    else:
        strategies = {node.name: strategy for node in block.nodes if (strategy := info(node).strategy)}
        regions = find_regions(Saved(block, strategies, tp))
    if missing := sorted(set(names) - {region.name for region in regions}):
        shown = ", ".join(map(repr, [*dict.fromkeys(region.name for region in regions), "layer"]))
        raise PlanError(f"recompute: {block.name} has no {', '.join(missing)}: it has {shown}")
    return regions


def _gather(block: Block, region: Region) -> None:
    """Move the region's ops next to each other."""
    placed: fx.Node | None = None
    for node in gathered_order(block.ops, region.ops):
        if placed is not None:
            placed.append(node)
        placed = node


def _check_groups(program: Program, chosen: RecomputeChoice) -> None:
    """PlanError where a group's layers are not one after the other on one stage."""
    if chosen.group == 1:
        return
    size, number = chosen.group, chains(program)
    if len(chosen.layers) % size:
        layers = f"layers {chosen.start} to {chosen.stop - 1}"
        raise PlanError(f"recompute: {layers} are no {chosen.what}: give a multiple of {size} layers")
    stages = [next(i for i, s in enumerate(program.stages) if s.start <= layer < s.stop) for layer in chosen.layers]
    for first in range(0, len(chosen.layers), size):
        own = chosen.layers[first : first + size]
        if len(set(stages[first : first + size])) > 1:
            raise PlanError(f"recompute: layers {own[0]} to {own[-1]} are a group, but on two stages: move the range")
        if len({number[layer] for layer in own}) > 1:
            raise PlanError(
                f"recompute: layers {own[0]} to {own[-1]} of {program.name} are no group: they differ, or other layers "
                "read what they give; use 'layer' for them"
            )
