"""Program + solution → ModelCosts: what each block computes, moves and keeps on one tp rank, as formulas.

What is kept is what the ops' GPU kernels save for backward (not what a CPU or meta trace saves: other kernels).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

import sympy
import torch
from torch import fx

from autopar.cost_models.boundary_values import boundary_values, constants, once_per_stage
from autopar.cost_models.fusion import fused
from autopar.cost_models.layer_costs import CHUNKS, LayerCosts, ModelCosts, Transfer
from autopar.cost_models.logits import logits_cost
from autopar.cost_models.op_costs import keeps_gradient, op_costs
from autopar.cost_models.recompute import PlacedTransfer, largest, recompute_costs
from autopar.cost_models.transfers import context_transfers, conversion_transfers, op_transfers, parameter_transfers
from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import (
    EPILOGUE,
    PROLOGUE,
    TABLES,
    Block,
    Program,
    Role,
    Shape,
    info,
    is_count,
    node_inputs,
    set_strategy,
)
from autopar.ir.heads import find_heads, why_no_head, with_chunks
from autopar.ir.ops import gathered_attention, ring_attention
from autopar.ir.values import chains
from autopar.liveness.saved import Saved, local_bytes, numel, tensor_bytes
from autopar.placement import Placement, Strategy
from autopar.plan.plan import Solution
from autopar.rules import Axis, TensorAxis, rule_of
from autopar.rules.data_axis import is_batch_statistic
from autopar.rules.spread import DataTypes, data_types

aten = torch.ops.aten
_ZERO = sympy.Integer(0)


def describe(
    program: Program, solution: Solution, values: Mapping[sympy.Symbol, int], compiled: bool = False
) -> ModelCosts:
    """The whole model under one solution; `values` (numbers of b and s) are for the sharded share of FLOPs.

    compiled: the layers run under torch.compile.
    """
    axis = TensorAxis(solution.ranks, values)
    by_themselves = once_per_stage(program)
    costs = {
        name: _layer_costs(
            program,
            Saved(block, solution.strategies[name], axis.size, by_themselves[name]),
            axis,
            compiled and _is_layer(program, name),
        )
        for name, block in program.blocks.items()
        if program.count(name)
    }
    empty = LayerCosts("none", (), (), 0, 0, _ZERO, _ZERO)
    typed = data_types(program)
    costs = {name: replace(c, data_transfers=_data_transfers(program.blocks[name], typed)) for name, c in costs.items()}
    chunked = _chunked_epilogue(program, solution, axis)
    layers = tuple(call.block for call in program.layer_calls)
    whole, divided = _model_flops([(c, program.count(name)) for name, c in costs.items()], solution.ranks)
    total = float((whole + divided).subs(dict(values)))
    return ModelCosts(
        tp=solution.ranks,
        solution=solution.name,
        prologue=costs.get(PROLOGUE, empty),
        classes={name: costs[name] for name in dict.fromkeys(layers)},
        layers=layers,
        epilogue=costs.get(EPILOGUE, empty),
        unsharded_flops=whole + divided,
        sharded_fraction=float(divided.subs(dict(values))) / total if total else 0.0,
        constants_bytes=costs[TABLES].buffer_bytes if TABLES in costs else 0,
        chunked=None if isinstance(chunked, str) else replace(chunked, data_transfers=costs[EPILOGUE].data_transfers),
        not_chunked=chunked if isinstance(chunked, str) else "",
        chains=chains(program),
        boundary_values=boundary_values(program, solution.strategies, axis.size),
        constants=constants(program, solution.strategies, axis.size),
    )


def _model_flops(costs: Sequence[tuple[LayerCosts, int]], ranks: int) -> tuple[sympy.Expr, sympy.Expr]:
    """The model's FLOPs that each rank does whole, and those that ranks share out: a rank has 1/tp of these."""
    done = sum((n * c.model_flops for c, n in costs), _ZERO)
    shared = sum((n * op.model_flops for c, n in costs for op in c.ops if op.sharded), _ZERO)
    return done - shared, shared * ranks


def _data_transfers(block: Block, types: DataTypes) -> tuple[Transfer, ...]:
    """The collectives of the conversions over dp, each once, and of the statistics of batch norms."""
    if types.coupling is not None and not types.coupling.replicas:
        return ()
    wanted = [
        (value, to) for n in block.ops for value, to in zip(node_inputs(n), types.strategies[n].inputs, strict=True)
    ]
    wanted += zip(block.results, types.results[block.name], strict=True)
    found: list[Transfer] = []
    for value, to in dict.fromkeys(wanted):
        found += conversion_transfers(info(value), types.strategies[value].output, to)
    for node in filter(is_batch_statistic, block.ops):
        size = numel(info(node).shape[1:2]) * 4
        found += [Transfer("all_reduce", size, phase) for phase in ("forward", "forward", "backward")]
    return tuple(found)


def _chunked_epilogue(program: Program, solution: Solution, axis: Axis) -> LayerCosts | str:
    """The epilogue with head and loss in slices of the vocabulary, or why they cannot be."""
    if not program.count(EPILOGUE):
        return why_no_head(None)
    block = program.blocks[EPILOGUE].copy()
    for node in block.nodes:
        set_strategy(node, solution.strategies[EPILOGUE][node.name])
    if not find_heads(block):
        return why_no_head(block)
    block = with_chunks(block, CHUNKS)
    strategies = {n.name: info(n).strategies["tp"] for n in block.nodes}
    return _layer_costs(program, Saved(block, strategies, axis.size, once_per_stage(program)[EPILOGUE]), axis)


def _is_layer(program: Program, name: str) -> bool:
    """Whether a block is a class of layers, and not what lies between or beside them."""
    return name not in (PROLOGUE, EPILOGUE, TABLES) and not program.is_between(name)


def _layer_costs(program: Program, saved: Saved, axis: Axis, compiled: bool = False) -> LayerCosts:
    block, strategies = saved.block, saved.of
    placed_transfers = block_transfers(saved)
    logits = [cost for n in block.ops if (cost := logits_cost(n, strategies[n.name], axis.size)) is not None]
    ops = {n: op_costs(n, strategies[n.name], rule_of(n), axis.size) for n in block.ops}
    is_layer = any(c.block == block.name for c in program.layer_calls)
    call = program.call_of(block.name)
    parameters = {
        call.full_name(info(n).ref): _local_numel(info(n).shape, strategies[n.name].output, axis)
        for n in block.placeholders(Role.PARAMETER)
    }
    tied = sum(size for name, size in parameters.items() if name in program.tied)
    return LayerCosts(
        name=block.name,
        ops=tuple(fused(block, strategies, ops, axis.size) if compiled else [c for n in ops for c in ops[n]]),
        transfers=tuple(move.transfer for move in placed_transfers),
        parameters=sum(parameters.values()) - tied,
        tied_parameters=tied,
        saved_bytes=saved.total_bytes(),
        working_bytes=_working_bytes(saved),
        waiting_bytes=_total(
            local_bytes(info(n), strategies[n.name].output, axis.size)
            for n in block.ops
            if keeps_gradient(n, rule_of(n))
        ),
        buffer_bytes=sum(int(tensor_bytes(info(n))) for n in block.placeholders(Role.BUFFER) if not is_count(info(n))),
        logits_bytes=_total(cost.kept_bytes for cost in logits),
        logits_peak_bytes=largest([cost.peak_bytes for cost in logits]),
        recompute=recompute_costs(saved, placed_transfers) if is_layer else (),
    )


def block_transfers(saved: Saved) -> list[PlacedTransfer]:
    """Each conversion once, however many ops read its result; collectives within ops; sums of gradients."""
    found: list[PlacedTransfer] = []
    first = {read: n for n in reversed(saved.block.ops) for read in saved.reads(n)}
    for value, target in dict.fromkeys(read for n in saved.block.ops for read in saved.reads(n)):
        for transfer in conversion_transfers(info(value), saved.of[value.name].output, target):
            found.append(PlacedTransfer(transfer, value, first[value, target]))
    for node in saved.block.ops:
        within = op_transfers(node, saved.of[node.name]) + context_transfers(node, saved.of[node.name], saved.tp)
        found += [PlacedTransfer(transfer, node, node) for transfer in within]
    for node in saved.block.placeholders(Role.PARAMETER):
        sums = parameter_transfers(info(node), saved.of[node.name].output)
        found += [PlacedTransfer(transfer, node, None) for transfer in sums]
    return found


def _working_bytes(saved: Saved) -> sympy.Expr:
    """The largest op's operands and result, which backward holds again as gradients."""
    sizes = []
    for node in saved.block.ops:
        if (cost := logits_cost(node, saved.of[node.name], saved.tp)) is not None:
            sizes.append(cost.peak_bytes - cost.kept_bytes + _accumulated(node, saved.of[node.name], saved.tp))
            continue
        values = [(v, p) for v, p in saved.reads(node) if info(v).role is not Role.PARAMETER]
        both = [*values, (node, saved.of[node.name].output)]
        sizes.append(_total(local_bytes(info(v), p, saved.tp) for v, p in both) + _summed_bytes(node, saved))
    return largest(sizes)


def _summed_bytes(node: fx.Node, saved: Saved) -> sympy.Expr:
    """What attention over a cut sequence sums in fp32 in backward: gradients of q, K and V; in a ring also those of
    K and V that come and go, and two blocks of K and V (autopar/runtime/attention.py)."""
    if node.target not in (ring_attention, gathered_attention):
        return _ZERO
    (q, *kv), width = saved.reads(node), info(node).dtype.itemsize
    own_q, own_kv = (_total(local_bytes(info(v), p, saved.tp) for v, p in values) / width for values in ([q], kv))
    sums = max(4, width) * (own_q + (4 if node.target is ring_attention else 1) * own_kv)
    return sums + (2 * width * own_kv if node.target is ring_attention else 0)


def _accumulated(node: fx.Node, strategy: Strategy, tp: int) -> sympy.Expr:
    """Of a head with its loss: the gradient of the rows, summed in the loss's precision, and in theirs."""
    if node.target is not LINEAR_CROSS_ENTROPY:
        return _ZERO
    rows = info(node_inputs(node)[0])
    bytes_each = max(4, rows.dtype.itemsize) + rows.dtype.itemsize
    return numel(rows.shape) * bytes_each / (tp if strategy.inputs[0].is_shard else 1)


def _local_numel(shape: Shape, placement: Placement, axis: Axis) -> int:
    """Elements of the first (largest) shard, by the chunk rule."""
    sizes = [int(n) for n in shape]
    if placement.is_shard:
        sizes[placement.dim] = -(-sizes[placement.dim] // axis.size)
    return prod(sizes)


def _total(sizes: Iterable[sympy.Expr]) -> sympy.Expr:
    return sympy.Add(*sizes)
