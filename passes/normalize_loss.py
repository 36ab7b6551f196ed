"""Write a mean loss as a sum over the global number of targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from autopar.errors import TraceError
from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import COUNT, MODEL, Block, NodeInfo, Program, Role, arguments, info, set_info
from autopar.plan import Plan

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class NormalizeLoss:
    """A mean over targets has no Partial form, so micro-batches and ranks could not be summed: sum ÷ global count has.

    Requires: a clean program whose output is the loss. Ensures: the loss is a sum over samples divided by
    the buffer `_count`; block "count" computes this batch's number of targets from the inputs.

        loss = cross_entropy(logits, t)   |   loss = div(cross_entropy(logits, t, reduction=sum), _count)
    """

    name: ClassVar[str] = "normalize_loss"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        block = program.blocks[MODEL]
        losses = [n for n in block.ops if n.target is aten.cross_entropy_loss.default and _reduction(n) == _MEAN]
        if len(losses) != 1:
            found = ", ".join(f"{n.target} ({info(n).source})" for n in losses) or "none"
            raise TraceError(
                f"one mean cross-entropy loss is supported, found {found}: return F.cross_entropy(logits, labels)"
            )
        (loss,) = losses
        logits, target = loss.args[:2]
        ignore = loss.args[4] if len(loss.args) > 4 else -100
        smoothing = loss.args[5] if len(loss.args) > 5 else 0.0
        weight = loss.args[2] if len(loss.args) > 2 else None
        if weight is not None or smoothing:
            raise TraceError(
                f"class weights and label smoothing are not supported ({info(loss).source}): use plain cross-entropy"
            )
        assert isinstance(target, fx.Node) and isinstance(ignore, int)
        if info(target).dtype.is_floating_point:
            raise TraceError(
                f"targets that are probabilities are not supported ({info(loss).source}): use class indices"
            )
        counting = _count_block(target, ignore)
        graph = block.graph
        with graph.inserting_before(block.ops[0]):
            count = graph.placeholder("_count")
        dtype = info(loss).dtype
        set_info(count, NodeInfo((), dtype, role=Role.BUFFER, ref="_count"))
        with graph.inserting_before(loss):
            total = call(graph, aten.cross_entropy_loss.default, (logits, target, None, _SUM, ignore), info(loss))
            mean = call(graph, aten.div.Tensor, (total, count), info(loss))
        replace_node(loss, mean)
        eliminate_dead(graph)
        return replace(program, blocks={**program.blocks, COUNT: counting})


def _reduction(node: fx.Node) -> int:
    return int(arguments(node)[3]) if len(node.args) > 3 else _MEAN


def _count_block(target: fx.Node, ignore: int) -> Block:
    """A graph from the model's inputs to the number of targets that are not ignored."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in mapping:
            for operand in node.all_input_nodes:
                copy(operand)
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        return mapping[node]

    copied = copy(target)
    facts = info(target)
    valid = call(graph, aten.ne.Scalar, (copied, ignore), replace(facts, dtype=torch.bool))
    total = call(graph, aten.sum.default, (valid,), replace(facts, dtype=torch.int64), shape=())
    graph.output((total,))
    if any(info(n).role is Role.PARAMETER for n in graph.nodes if n.op == "placeholder"):
        raise TraceError(f"the loss's targets depend on parameters ({facts.source}): they must come from the inputs")
    return Block(COUNT, graph)
