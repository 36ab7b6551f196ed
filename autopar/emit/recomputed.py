"""Regions that backward computes again: each one line of its layer, and a method of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ..ir.graph import AgainRegion, Block, Role, info, node_inputs, set_info
from ..liveness.regions import gathered_order, is_random
from ..placement import Strategy
from .idioms import part
from .names import value_name
from .roles import Roles


@dataclass(frozen=True)
class Part:
    """A region while it is written: its method, its ops in the block, and what it reads of others."""

    region: AgainRegion
    method: str
    ops: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return next(node for node in self.ops if node.name == self.region.ops[-1])

    def has(self, other: Part) -> bool:
        """Whether another region is a part of this one."""
        return other is not self and set(other.ops) < set(self.ops)


def parts(block: Block, regions: Sequence[AgainRegion], renamed: Mapping[str, str]) -> list[Part]:
    """The regions of a block with their ops; `renamed`: nodes that stand for others, by name."""
    taken = {info(n).ref.partition(".")[0] for n in block.placeholders(Role.PARAMETER, Role.BUFFER)}
    found: list[Part] = []
    for region in regions:
        ops = _ops(block, region, renamed)
        reads = [n for node in ops for n in node_inputs(node) if n not in ops]
        values = tuple(dict.fromkeys(n for n in reads if info(n).role not in (Role.PARAMETER, Role.BUFFER)))
        method = value_name(f"_{region.name.replace(' ', '_')}", {*taken, *(p.method for p in found)})
        found.append(Part(region, method, ops, values))
    return found


def _ops(block: Block, region: AgainRegion, renamed: Mapping[str, str]) -> tuple[fx.Node, ...]:
    """The region's ops, and what passes have put between them; what converts at its borders stays outside."""
    own = {node for node in block.ops if renamed.get(node.name, node.name) in region.ops}
    for node in reversed(block.ops):
        if node.users and all(user in own for user in node.users) and any(n in own for n in node_inputs(node)):
            own.add(node)
    return tuple(node for node in gathered_order(block.ops, own) if node in own)


@dataclass
class Folded:
    """A block with each of some parts as one node; `nodes`: those of the block → these."""

    block: Block
    parts: Sequence[Part]
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = self.block.ops
        for own in self.parts:
            order = gathered_order(order, own.ops)
        result = {own.result: own for own in self.parts}
        inside = {node for own in self.parts for node in own.ops}
        graph = fx.Graph()
        for node in [*self.block.placeholders(), *order]:
            if node in result:
                self.nodes[node] = self._call(graph, result[node])
            elif node not in inside:
                self.nodes[node] = graph.node_copy(node, self.nodes.__getitem__)
        graph.output(tuple(self.nodes[node] for node in self.block.results))
        self.folded = Block(self.block.name, graph)

    def _call(self, graph: fx.Graph, own: Part) -> fx.Node:
        about: dict[str, Any] = {"method": own.method, "name": own.region.name, "always": own.region.always}
        about["random"] = any(map(is_random, own.ops))
        made = graph.call_function(part, tuple(self.nodes[n] for n in own.reads), about)
        facts = info(own.result)
        strategy = Strategy(tuple(info(n).placement for n in own.reads), facts.placement)
        return set_info(made, replace(facts, strategy=strategy))

    def roles(self, roles: Roles) -> Roles:
        """The roles of the block's values, for the nodes here."""
        made = Roles(self.folded, {})
        made.names = {self.nodes[n]: name for n, name in roles.names.items() if n in self.nodes}
        made.stream = {self.nodes[n] for n in roles.stream if n in self.nodes}
        made.weights = {self.nodes[n] for n in roles.weights if n in self.nodes}
        return made
