"""Making and replacing nodes, with their facts in step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .graph import NodeInfo, Shape, info, node_inputs, set_info

DOUBLED = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_NO_GRADIENT = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}


def is_continuous(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype have gradients and can be summed up over ranks."""
    return dtype.is_floating_point or dtype.is_complex


def derives_gradient(node: fx.Node) -> bool:
    """Whether a gradient flows through an op to any of its operands."""
    return node.target not in _NO_GRADIENT and any(info(n).requires_grad for n in node_inputs(node))


def call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: NodeInfo, shape: Shape | None = None, **kwargs: Any
) -> fx.Node:
    """A new op at the graph's insertion point, with the facts of `like` (and its own shape)."""
    node = graph.call_function(target, args, kwargs)
    facts = like.made(shape=like.shape if shape is None else shape)
    set_info(node, facts)
    requires = is_continuous(facts.dtype) and derives_gradient(node)
    return set_info(node, replace(facts, requires_grad=requires))


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Every reader of `old` reads `new`; `old` goes."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def eliminate_dead(graph: fx.Graph) -> None:
    """Remove ops and placeholders that nothing reads."""
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users:
            graph.erase_node(node)
