"""What ranks exchange for an op or a conversion, as collectives with their bytes."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import fx

from autopar.cost_models.layer_costs import Transfer
from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import NodeInfo, arguments, info, node_inputs
from autopar.ir.ops import convert, ring_attention
from autopar.liveness.saved import local_bytes, numel, tensor_bytes
from autopar.placement import GRAD_PARTIAL, Placement, Strategy, conversion
from autopar.rules.arguments import option

aten = torch.ops.aten


def conversion_transfers(facts: NodeInfo, source: Placement, target: Placement) -> list[Transfer]:
    """The collectives of converting a value on one axis, forward and (where a gradient flows) backward."""
    found = conversion(source, target)
    if found is None:
        return []
    size = tensor_bytes(facts)
    transfers = [Transfer(found.forward, size, "forward")] if found.forward else []
    if found.backward and facts.requires_grad:
        transfers.append(Transfer(found.backward, size, "backward"))
    return transfers


def op_transfers(node: fx.Node, strategy: Strategy) -> list[Transfer]:
    """Collectives inside an op: vocabulary-parallel cross-entropy agrees on maximum, sum and target logit."""
    if node.target not in (aten.cross_entropy_loss.default, LINEAR_CROSS_ENTROPY):
        return []
    logits = int(node.target is LINEAR_CROSS_ENTROPY)  # the operand that has the vocabulary
    if strategy.inputs[logits].is_shard and strategy.output.whole:
        rows = info(node_inputs(node)[0]).shape[0]
        return [Transfer("all_reduce", rows * 4, "forward")] * 3
    return []


def context_transfers(node: fx.Node, strategy: Strategy, tp: int) -> list[Transfer]:
    """What the ranks of cp exchange: conversions over it, and the keys and values of ring attention.

    A ring sends each rank's K and V on ranks − 1 times, or no further than a sliding window reaches, in backward again,
    and with them their gradients, in fp32 for half precision (autopar/runtime/attention.py).
    """
    result = info(node)
    if node.target is ring_attention:
        hops = int(option(node, "hops"))
        sent = [(info(n), p) for n, p in zip(node_inputs(node)[1:], strategy.inputs[1:], strict=True)]
        own = sympy.Add(*(local_bytes(facts, placement, tp) for facts, placement in sent))
        if strategy.inputs[0].is_shard and not strategy.inputs[1].is_shard:  # each rank of tp sends one head
            own = own / sent[0][0].shape[1]
        transfers = [Transfer("send", own, "forward", "cp", hops, node.name)]
        if result.requires_grad:
            both = own + own / result.dtype.itemsize * max(4, result.dtype.itemsize)
            transfers.append(Transfer("send", both, "backward", "cp", hops, node.name))
        return transfers
    if node.target is not convert or arguments(node)[3] != "cp":
        return []
    value, source, target = (arguments(node)[0], *map(Placement.parse, arguments(node)[1:3]))
    # Before or after, each dim is whole once.
    whole = tuple(n if (n / m) >= 1 else m for n, m in zip(info(value).shape, result.shape, strict=True))
    size = numel(whole) * result.dtype.itemsize / (tp if strategy.output.is_shard else 1)
    return [replace(t, size_bytes=size, axis="cp") for t in conversion_transfers(result, source, target)]


def parameter_transfers(facts: NodeInfo, stored: Placement) -> list[Transfer]:
    """A replicated parameter used in sharded work has its gradient summed once a gradient sync."""
    if stored == GRAD_PARTIAL and facts.requires_grad:
        return [Transfer("all_reduce", tensor_bytes(facts), "sync")]
    return []
