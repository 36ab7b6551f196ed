"""Recomputation in model.py: its constants, the arguments of layers, and the methods that call checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..errors import PlanError
from ..ir.graph import Block, Call, Program, info, node_inputs, set_info
from ..liveness.regions import gathered_order, is_random
from ..placement import Strategy
from ..plan.recompute import LAYER, RecomputeChoice, RecomputeRegion, by_layer, group_of, regions_of
from .body import Body
from .code import Code, Statement, Suite, function, table
from .emission import Emission, untold_sizes
from .idioms import checkpointed, region_call
from .layer_runs import offset, parent
from .lines import is_constant
from .names import method_names
from .roles import Roles
from .sublayers import sublayers
from .text import quoted, tuple_text
from .value_names import Names

# --------------------------------------------------------------------------------
# Layers: which are told what, and by which constant


def recomputed_layers(program: Program) -> list[Call]:
    """The layers of which backward computes something again."""
    return [program.layer_calls[layer] for layer in by_layer(program.recompute)]


def _within_layers(program: Program) -> dict[int, str]:
    """Layer → what of it alone is computed again; groups of layers are not the layers' own."""
    return {layer: what for layer, what in by_layer(program.recompute).items() if group_of(what) == 1}


def _by_region(program: Program) -> bool:
    """Whether layers are told names of regions: where not all layers of a class have the same ones."""
    return any(not region.always for regions in program.regions.values() for region in regions)


def is_whole(program: Program, block: str) -> bool:
    """Whether some layer of a class is recomputed as one."""
    return any(program.layer_calls[i].block == block and what == LAYER for i, what in _within_layers(program).items())


def _differ(program: Program, block: str) -> bool:
    """Whether layers of the class differ in what of them is computed again."""
    return is_whole(program, block) or any(not region.always for region in program.regions.get(block, ()))


def recompute_argument(program: Program, block: str, layer: str) -> str:
    """The argument of a layer of the class that says what to compute again; `layer` is the source of its index."""
    if not _differ(program, block):
        return ""
    return f"RECOMPUTE.get({layer}, ())" if _by_region(program) else f"{layer} in RECOMPUTE"


def constants(program: Program) -> list[Code]:
    """RECOMPUTE: layers, or layer → regions; GROUPS: the paths of each group's layers, gathered for it as one."""
    groups = [_group_row(program, choice) for choice in program.recompute if choice.group > 1]
    code = [*_constant(program), table("GROUPS = (  # layers that are recomputed as one are one unit", groups)]
    return code if groups else code[:-1]


def _constant(program: Program) -> list[Code]:
    within = _within_layers(program)
    recomputed = {program.layer_calls[layer].block for layer in within}
    if not any(program.is_between(block) or _differ(program, block) for block in recomputed):
        return []
    if not _by_region(program):
        layers = _range(sorted(i for i, what in within.items() if what == LAYER))
        return [f"RECOMPUTE = {layers}  # layers whose activations backward computes again"]
    kinds = {what: _range([i for i in within if within[i] == what]) for what in within.values()}
    rows = [f"**dict.fromkeys({layers}, {tuple_text(regions_of(what) or (LAYER,))})" for what, layers in kinds.items()]
    return [table("RECOMPUTE = {  # layer → what backward computes again", rows, "}")]


def _range(layers: Sequence[int]) -> str:
    whole = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"range({layers[0]}, {layers[-1] + 1})" if whole else str(list(layers))


def _group_row(program: Program, choice: RecomputeChoice) -> str:
    paths = [call.path for call in program.layer_calls[choice.start : choice.stop]]
    less = offset(program, choice.layers)
    if less is None:
        groups = [tuple(paths[i : i + choice.group]) for i in range(0, len(paths), choice.group)]
        return f"*({', '.join(map(tuple_text, groups))},)"
    path = f"{parent(program.layer_calls[choice.start])}.{{i}}".lstrip(".")
    firsts = f"range({choice.start - less}, {choice.stop - less}, {choice.group})"
    return f'*([f"{path}" for i in range(first, first + {choice.group})] for first in {firsts})'


def group_at(program: Program, layer: int) -> RecomputeChoice | None:
    """The range of groups that a layer is in."""
    return next((choice for choice in program.recompute if choice.group > 1 and layer in choice.layers), None)


def group_method(program: Program, choice: RecomputeChoice) -> str:
    """The name of the method that computes a group of a range."""
    several = sum(other.group > 1 for other in program.recompute) > 1
    return f"_layers_{choice.start}" if several else "_layers"


def no_groups(choice: RecomputeChoice) -> PlanError:
    """The refusal of groups whose layers read or give values of different names."""
    return PlanError(f"recompute: layers {choice.start} to {choice.stop - 1} are no groups: use 'layer' for them")


def recomputed_text(program: Program, layers: Sequence[int]) -> list[str]:
    """Words for the docstring of these layers' class: "recomputed", "recompute: mlp"."""
    counts = Counter(what for layer, what in by_layer(program.recompute).items() if layer in layers)
    if not counts:
        return []
    if set(counts) == {LAYER}:
        return ["recomputed" if counts[LAYER] == len(layers) else f"{counts[LAYER]} of {len(layers)} recomputed"]
    alone = len(counts) == 1 and counts.total() == len(layers)
    return [f"recompute: {next(iter(counts))}" if alone else f"recompute in {counts.total()} of {len(layers)}"]


# --------------------------------------------------------------------------------
# The class of a layer


def layer_init(program: Program, block: str, declarations: Sequence[Code]) -> Suite:
    """The method __init__ of a layer's class."""
    if not _differ(program, block):
        return function("__init__", ["self"], ["super().__init__()", *declarations])
    body = ["super().__init__()", "self._recompute = recompute", *declarations]
    return function("__init__", ["self", "recompute"], body)


def layer_forward(program: Program, block: str, arguments: Sequence[str]) -> list[Suite]:
    """The method forward, where `_layer` computes the layer: for a class of which some are recomputed as one."""
    if not is_whole(program, block):
        return []
    parameters, layer = ["self", *arguments], f"self._layer({', '.join(arguments)})"
    if _by_region(program):
        parts = ", ".join([quoted(LAYER), "self._layer", *arguments])
        return [function("forward", parameters, [Statement(f"self._recomputed({parts})", returned=True)])]
    call = f"return {checkpointed('self._layer', *arguments)}"
    chosen = Suite("if self._recompute and torch.is_grad_enabled():", [call])
    return [function("forward", parameters, [chosen, Statement(layer, returned=True)])]


def by_regions(program: Program, block: str) -> list[Suite]:
    """The method by which a layer computes a part of it, for a class whose layers are told names of regions."""
    if not _differ(program, block) or not _by_region(program):
        return []
    call = f"return {checkpointed('part', '*values')}"
    chosen = Suite("if name in self._recompute and torch.is_grad_enabled():", [call])
    doc = ['"""A part of the layer; where RECOMPUTE names it, backward computes it again."""']
    return [function("_recomputed", ["self", "name", "part", "*values"], [chosen, "return part(*values)"], doc)]


# --------------------------------------------------------------------------------
# Regions of a layer: each one node of the layer, and a method


@dataclass(frozen=True)
class Outlined:
    """A region of a layer that has a method of its own: its ops in the block, and the values of others it reads."""

    region: RecomputeRegion
    method: str
    ops: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return next(node for node in self.ops if node.name == self.region.ops[-1])

    def has(self, other: Outlined) -> bool:
        """Whether another region is a part of this one."""
        return other is not self and set(other.ops) < set(self.ops)


def outlined(block: Block, regions: Sequence[RecomputeRegion], renamed: Mapping[str, str]) -> list[Outlined]:
    """The regions of a block with their ops; `renamed`: nodes that stand for others, by name."""
    parts: list[Outlined] = []
    names = method_names(block, [f"_{region.name.replace(' ', '_')}" for region in regions])
    for region, name in zip(regions, names, strict=True):
        ops = _ops(block, region, renamed)
        reads = [n for node in ops for n in node_inputs(node) if n not in ops]
        values = tuple(dict.fromkeys(n for n in reads if not is_constant(n)))
        parts.append(Outlined(region, name, ops, values))
    return parts


def _ops(block: Block, region: RecomputeRegion, renamed: Mapping[str, str]) -> tuple[fx.Node, ...]:
    """The region's ops, and what passes have put between them; what converts at its borders stays outside."""
    inside = {node for node in block.ops if renamed.get(node.name, node.name) in region.ops}
    for node in reversed(block.ops):
        if node.users and all(user in inside for user in node.users) and any(n in inside for n in node_inputs(node)):
            inside.add(node)
    return tuple(node for node in gathered_order(block.ops, inside) if node in inside)


@dataclass
class Outline:
    """A block with each of some regions as one node; `nodes`: node of the block → the one that stands for it."""

    source: Block
    regions: Sequence[Outlined]
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = self.source.ops
        for region in self.regions:
            order = gathered_order(order, region.ops)
        by_result = {region.result: region for region in self.regions}
        inside = {node for region in self.regions for node in region.ops}
        graph = fx.Graph()
        for node in [*self.source.placeholders(), *order]:
            if node in by_result:
                self.nodes[node] = self._call(graph, by_result[node])
            elif node not in inside:
                self.nodes[node] = graph.node_copy(node, self.nodes.__getitem__)
        graph.output(tuple(self.nodes[node] for node in self.source.results))
        self.block = Block(self.source.name, graph)

    def _call(self, graph: fx.Graph, region: Outlined) -> fx.Node:
        about: dict[str, Any] = {"method": region.method, "name": region.region.name, "always": region.region.always}
        about["random"] = any(map(is_random, region.ops))
        call = graph.call_function(region_call, tuple(self.nodes[n] for n in region.reads), about)
        facts = info(region.result)
        strategy = Strategy(tuple(info(n).placement for n in region.reads), facts.placement)
        return set_info(call, facts.typed(strategy))

    def roles(self, roles: Roles) -> Roles:
        """The roles of the source's values, for the nodes here."""
        copied = Roles(self.block, {})
        copied.names = {self.nodes[n]: name for n, name in roles.names.items() if n in self.nodes}
        copied.stream = {self.nodes[n] for n in roles.stream if n in self.nodes}
        copied.weights = {self.nodes[n] for n in roles.weights if n in self.nodes}
        return copied

    def named(self, names: Mapping[fx.Node, str]) -> Names:
        """Names of the source's nodes, for the nodes here."""
        return {self.nodes[node]: name for node, name in names.items()}

    def names(self, body: Body) -> Names:
        """Names of a body of the nodes here, for the source's nodes."""
        return {node: body.names[here] for node, here in self.nodes.items() if here in body.names}


def region_methods(e: Emission, block: Block, name: str) -> list[Suite]:
    """The method `name` of a layer, with a line for each region that is in no other, and these regions' methods."""
    regions, roles = outlined(block, e.program.regions.get(block.name, ()), e.renamed), e.roles(block)
    tops = [region for region in regions if not any(other.has(region) for other in regions)]
    outline = Outline(block, tops)
    ends = [part.ops[-1] for part in sublayers(block, roles)[:-1]]
    breaks = [outline.nodes[node] for node in ends if node in outline.nodes]
    body = Body(e, outline.block, outline.named(e.arguments(block)), breaks=breaks, roles=outline.roles(roles))
    known = outline.names(body)
    inner = [method for region in tops for method in _of_region(e, block, region, regions, known)]
    return [body.method(name, e.parameters(block)), *inner]


def _of_region(e: Emission, block: Block, region: Outlined, regions: Sequence[Outlined], known: Names) -> list[Suite]:
    """The methods of a region and of those within it; `known`: the names that values have where it is called."""
    within = [other for other in regions if region.has(other)]
    outline = Outline(block, within)
    inside = {outline.nodes[n] for n in region.ops if n in outline.nodes}
    ops = [node for node in outline.block.ops if node in inside]
    inputs = outline.named({n: known[n] for n in region.reads})
    if untold_sizes(ops, inputs):
        raise PlanError(
            f"recompute: {region.method} of {block.name} cannot be made from what it reads: use 'layer' for it"
        )
    body = Body(e, outline.block, inputs, ops, [outline.nodes[region.result]], roles=outline.roles(e.roles(block)))
    known = outline.names(body)
    inner = [method for other in within for method in _of_region(e, block, other, regions, known)]
    return [body.method(region.method), *inner]
