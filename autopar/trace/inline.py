"""Regions that a context manager made in the user's forward, written into the graph around them.

`with torch.no_grad():` and `with torch.autocast(…):` are exported as ops that call a graph of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..errors import TraceError
from ..ir.build import is_continuous
from ..ir.graph import arguments, op_name
from .source import excerpt, module_path, place

aten = torch.ops.aten
_GRADIENTS, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def inline_regions(module: fx.GraphModule) -> None:
    """Replace each region by its ops, in place.

    What enters a region without gradients is detached where it is read, so that layers stay layers. A region with
    autocast switched off is its ops: no autocast is on around it (`trace` refuses that). Raises TraceError for autocast
    switched on.
    """
    for node in list(module.graph.nodes):
        if node.op != "call_function" or op_name(node) not in (_GRADIENTS, _AUTOCAST):
            continue
        if op_name(node) == _GRADIENTS:
            enabled, region, *operands = arguments(node)
        else:
            device, dtype, enabled, _, region, *operands = arguments(node)
            if enabled:
                first = _first(module, region)
                raise TraceError(
                    f"torch.autocast({device!r}, dtype={dtype}) is switched on inside forward{place(first)}: its casts "
                    "depend on the device. Leave it out and choose precision=, with explicit .float() "
                    f"or .to(dtype) where a part needs another dtype{excerpt(first)}"
                )
        detached = op_name(node) == _GRADIENTS and not enabled
        inner = getattr(module, region.target)
        inline_regions(inner)
        _inline(node, inner.graph, operands, detached)
    module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op != "get_attr")


def _first(module: fx.GraphModule, region: fx.Node) -> fx.Node:
    graph = getattr(module, str(region.target)).graph
    first: fx.Node = next(n for n in graph.nodes if n.op == "call_function")
    return first


def _inline(node: fx.Node, region: fx.Graph, operands: list[Any], detached: bool) -> None:
    graph = node.graph
    inner = [n for n in region.nodes if n.op == "placeholder"]
    entered = dict(zip(inner, operands, strict=True))
    mapping: dict[Any, Any] = dict(entered)
    with graph.inserting_before(node):
        for n in region.nodes:
            if n.op == "call_function":
                read = _detached(graph, entered, mapping, n) if detached else mapping
                mapping[n] = graph.node_copy(n, read.__getitem__)
    output = next(n for n in region.nodes if n.op == "output")
    # What only passes through a region keeps its gradient.
    results = [entered[r] if r in entered else mapping[r] for r in arguments(output)[0]]
    for reader in list(node.users):
        reader.replace_all_uses_with(results[arguments(reader)[1]])
        graph.erase_node(reader)
    graph.erase_node(node)


def _detached(graph: fx.Graph, entered: dict[fx.Node, Any], mapping: dict[Any, Any], reader: fx.Node) -> dict[Any, Any]:
    """What `reader` reads: what entered the region detached, once in each module, where it is read."""
    module, read = module_path(reader), {}
    for n in reader.all_input_nodes:
        if n in entered and (n, module) not in mapping:
            mapping[n, module] = _detach(graph, entered[n], reader)
        read[n] = mapping[(n, module) if n in entered else n]
    return read


def _detach(graph: fx.Graph, operand: Any, reader: fx.Node) -> Any:
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_continuous(value.dtype):
        return operand
    new = graph.call_function(aten.detach.default, (operand,))
    new.meta = {**reader.meta, "val": value}
    return new
