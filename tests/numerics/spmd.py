"""Sharded programs run in one process: a value is a list of tensors, one a rank.

Conversions are what the placements mean (DESIGN §4), not what the runtime's functions do: put the whole value
together by the source's column, lay it out by the target's, and the gradient the other way round. A Partial is
laid out as random summands, so that an op which is not linear cannot pass by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import Block, Program, Role, info, node_inputs
from autopar.placement import REPLICATE, Kind, Placement, Shard

aten = torch.ops.aten
Ranks = list[Tensor]


# --------------------------------------------------------------------------------
# Layouts


def chunks(x: Tensor, dim: int, size: int) -> Ranks:
    """DTensor's rule: ceil(n / size) each, the last ones smaller or empty."""
    n = x.shape[dim]
    width = -(-n // size)
    starts = [min(rank * width, n) for rank in range(size + 1)]
    return [x.narrow(dim, starts[r], starts[r + 1] - starts[r]).clone() for r in range(size)]


def lay_out(x: Tensor, placement: Placement, size: int) -> Ranks:
    """The value on each rank."""
    if placement.is_shard:
        return chunks(x, placement.dim, size)
    return _summands(x, size) if placement.kind is Kind.PARTIAL else [x.clone() for _ in range(size)]


def lay_out_gradient(x: Tensor, placement: Placement, size: int) -> Ranks:
    """The gradient on each rank: the other column of the table."""
    if placement.is_shard:
        return chunks(x, placement.dim, size)
    return _summands(x, size) if placement.kind is Kind.GRAD_PARTIAL else [x.clone() for _ in range(size)]


def put_together(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole value; AssertionError where ranks should agree and do not."""
    return _whole(parts, placement, Kind.PARTIAL)


def put_together_gradient(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole gradient; AssertionError where ranks should agree and do not."""
    return _whole(parts, placement, Kind.GRAD_PARTIAL)


def _whole(parts: Sequence[Tensor], placement: Placement, summed: Kind) -> Tensor:
    if placement.is_shard:
        return torch.cat(list(parts), placement.dim)
    if placement.kind is summed:
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-9, atol=1e-9)
    return parts[0].clone()


def _summands(x: Tensor, size: int) -> Ranks:
    generator = torch.Generator().manual_seed(x.numel())
    parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(size - 1)]
    return [*parts, x - sum(parts)]


class _Convert(torch.autograd.Function):
    """One node of autograd over all ranks."""

    @staticmethod
    def forward(ctx: Any, source: Placement, target: Placement, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.source, ctx.target = source, target
        return tuple(lay_out(put_together(parts, source), target, len(parts)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = put_together_gradient(grads, ctx.target)
        return None, None, *lay_out_gradient(whole, ctx.source, len(grads))


def convert(parts: Sequence[Tensor], source: Placement, target: Placement) -> Ranks:
    return list(_Convert.apply(source, target, *parts))  # type: ignore[no-untyped-call]


# --------------------------------------------------------------------------------
# Blocks and programs


def run_block(
    block: Block, placeholders: Mapping[fx.Node, Ranks], size: int, values: Mapping[sympy.Symbol, int]
) -> list[Ranks]:
    """The results of a typed and converted block, given what its placeholders hold on each rank."""
    held: dict[fx.Node, Ranks] = dict(placeholders)
    for node in block.ops:
        held[node] = _run_node(node, held, size, values)
    return [held[node] for node in block.results]


def _run_node(node: fx.Node, held: Mapping[fx.Node, Ranks], size: int, values: Mapping[sympy.Symbol, int]) -> Ranks:
    strategy = info(node).strategy
    assert strategy is not None
    if info(node).role is Role.CONVERT:
        value: fx.Node = node.args[0]  # type: ignore[assignment]
        return convert(held[value], strategy.inputs[0], strategy.output)
    if node.target is aten.embedding.default and strategy.inputs[0] == Shard(0):
        weight, ids = (held[n] for n in node.all_input_nodes)
        return _vocabulary_embedding(weight, ids)
    if node.target is aten.cross_entropy_loss.default and strategy.inputs[0] == Shard(1):
        logits: fx.Node = node.args[0]  # type: ignore[assignment]
        held = {**held, logits: convert(held[logits], Shard(1), REPLICATE)}
    if node.target is LINEAR_CROSS_ENTROPY and strategy.inputs[1] == Shard(0):
        return _vocabulary_loss(node, held)
    if node.target is aten.scaled_dot_product_attention.default and strategy.output == Shard(1) != strategy.inputs[1]:
        held = {**held, **{n: _one_head(held[n]) for n in node_inputs(node)[1:3]}}
    return [_call(node, lambda n, r=rank: held[n][r], values) for rank in range(size)]  # type: ignore[misc]


def _call(node: fx.Node, read: Callable[[fx.Node], Tensor], values: Mapping[sympy.Symbol, int]) -> Tensor:
    def real(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return read(argument)
        if isinstance(argument, sympy.Expr):
            return int(argument.subs(dict(values)))
        if isinstance(argument, list | tuple):
            return [real(a) for a in argument]
        return argument

    target: Any = node.target
    result: Tensor = target(*map(real, node.args), **{k: real(v) for k, v in node.kwargs.items()})
    return result


def _one_head(parts: Ranks) -> Ranks:
    """Of K/V heads that every rank has, the one that its query heads read: query heads are dealt out in order."""
    groups, size = parts[0].shape[1], len(parts)
    return [part[:, [rank // (size // groups)]] for rank, part in enumerate(parts)]


def _vocabulary_loss(node: fx.Node, held: Mapping[fx.Node, Ranks]) -> Ranks:
    """Each rank makes its own logits; the loss is of all of them."""
    x, weight, target, *bias = (held[n] for n in node_inputs(node))
    logits = [torch.nn.functional.linear(*parts) for parts in zip(x, weight, *bias, strict=True)]
    options: dict[str, Any] = dict(node.kwargs)
    scale, cap = options.get("scale", 1.0), options.get("softcap")
    logits = [z * scale if cap is None else cap * torch.tanh(z * scale / cap) for z in logits]
    ignored = options.get("ignore_index", -100)
    logits = convert(logits, Shard(1), REPLICATE)
    loss = torch.nn.functional.cross_entropy
    return [loss(z, t, reduction="sum", ignore_index=ignored) for z, t in zip(logits, target, strict=True)]


def _vocabulary_embedding(weight: Ranks, ids: Ranks) -> Ranks:
    """Each rank looks up its own rows; rows of other ranks count as zero."""
    found, start = [], 0
    for table, index in zip(weight, ids, strict=True):
        here = (index >= start) & (index < start + len(table))
        rows = torch.nn.functional.pad(table, (0, 0, 0, 1))[torch.where(here, index - start, len(table))]
        found.append(rows)
        start += len(table)
    return found


def run_program(
    program: Program,
    size: int,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    values: Mapping[sympy.Symbol, int],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a compiled program on `size` ranks: {parameter as the program names it: whole gradient}.

    `parameters` holds parameters and buffers, by the program's names (parts of a fused one each).
    """
    leaves: dict[str, tuple[Placement, Ranks]] = {}
    passed: dict[str, Ranks] = {}
    for call in program.calls:
        block = program.blocks[call.block]
        held: dict[fx.Node, Ranks] = {}
        for node in block.placeholders():
            facts = info(node)
            if facts.role is Role.VALUE:
                held[node] = passed[call.inputs[int(facts.ref)]]
            elif facts.role is Role.PARAMETER:
                name = call.full_name(facts.ref)
                name = program.tied.get(name, name)
                if name not in leaves:
                    parts = [p.requires_grad_() for p in lay_out(parameters[name], facts.placement, size)]
                    leaves[name] = facts.placement, parts
                held[node] = leaves[name][1]
            else:
                whole = inputs[facts.ref] if facts.role is Role.INPUT else parameters[call.full_name(facts.ref)]
                held[node] = [whole] * size
        results = run_block(block, held, size, values)
        passed.update(zip(call.outputs, results, strict=False))
    (loss,) = results
    flat = [part for _, parts in leaves.values() for part in parts]
    grads = iter(torch.autograd.grad(loss, flat, [torch.ones_like(part) for part in loss]))
    gradients = {
        name: put_together_gradient([next(grads) for _ in parts], placement)
        for name, (placement, parts) in leaves.items()
    }
    return put_together([part.detach() for part in loss], REPLICATE), gradients
