"""The ops of a traced model, in runs: tables, prologue, layers with what lies between them, epilogue.

Ops between two layers join the layer before where the same follow every layer of a list and read no parameter;
others are a run of their own, "between". What follows the last layer of a list joins it where it is the same again.
Without a list of layers a model is one run "between" and the epilogue.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..ir.graph import BETWEEN, EPILOGUE, PROLOGUE, TABLES, Block, Role, info, is_count
from .lists import LayerLists


@dataclass
class Segment:
    """The ops of one call, in graph order, before they become a block. path: of the layer, or the block's name."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        return self.path not in (TABLES, PROLOGUE, BETWEEN, EPILOGUE)


def segments(block: Block, lists: LayerLists) -> list[Segment]:
    """Every op of the block in exactly one segment, in the order of the calls."""
    ops, free = block.ops, _free_of_parameters(block)
    paths = [lists.layer(info(node).module) for node in ops]
    inside = [i for i, path in enumerate(paths) if path is not None]
    if not inside:
        return _without_lists(ops, free)
    tables, prologue = Segment(TABLES), Segment(PROLOGUE)
    for node in ops[: inside[0]]:
        (tables if node in free else prologue).nodes.append(node)
    layers, gaps = _layers_and_gaps(ops[inside[0] :], paths[inside[0] :], free, tables)
    _join_gaps(layers, gaps)
    _move_private(free, tables, prologue)
    epilogue = Segment(EPILOGUE, gaps[-1])
    middle = [s for layer, gap in zip(layers, [*gaps[:-1], []], strict=True) for s in (layer, Segment(BETWEEN, gap))]
    return [tables, prologue, *middle, epilogue]


def _without_lists(ops: list[fx.Node], free: set[fx.Node]) -> list[Segment]:
    """A model without a list of layers: all before its last module is one run, which can be recomputed as a layer is.

    Head and loss stay together in the epilogue, where the loss can be computed in slices, with what is made of labels.
    """
    modules = [info(node).module for node in ops]
    last = max((i for i, module in enumerate(modules) if module), default=0)
    head = next((i + 1 for i in range(last - 1, -1, -1) if modules[i] != modules[last]), 0)
    if not _reads_parameters(ops[:head]):
        head = 0
    before, epilogue = Segment(BETWEEN, ops[:head]), Segment(EPILOGUE, ops[head:])
    _move_private(free, before, epilogue)
    return [Segment(PROLOGUE), before, epilogue]


def _layers_and_gaps(
    ops: list[fx.Node], paths: list[str | None], free: set[fx.Node], tables: Segment
) -> tuple[list[Segment], list[list[fx.Node]]]:
    """The layers, and after each the ops outside lists; those free of parameters go to the tables, but for the last."""
    layers: list[Segment] = []
    gaps: list[list[fx.Node]] = []
    last = max(i for i, path in enumerate(paths) if path is not None)
    in_layers: set[fx.Node] = set()
    for i, (node, path) in enumerate(zip(ops, paths, strict=True)):
        if path is None and (i > last or node not in free or in_layers.intersection(node.all_input_nodes)):
            gaps[-1].append(node)
            in_layers.add(node)
            continue
        if path is None:
            tables.nodes.append(node)
            continue
        in_layers.add(node)
        if layers and layers[-1].path == path:  # with what the model did in the midst of the layer
            layers[-1].nodes += [*gaps[-1], node]
            gaps[-1] = []
        else:
            layers.append(Segment(path, [node]))
            gaps.append([])
    return layers, gaps


def _join_gaps(layers: list[Segment], gaps: list[list[fx.Node]]) -> None:
    """Move to each layer the ops after it, where the same follow the other layers of its list."""
    places = defaultdict(list)
    for i, layer in enumerate(layers):
        places[layer.path.rpartition(".")[0]].append(i)
    for members in places.values():
        inner = [gaps[i] for i in members if i + 1 in members]
        shape = _targets(inner[0]) if inner else []
        if not shape or any(_targets(gap) != shape or _reads_parameters(gap) for gap in inner):
            continue
        for i in members:
            if _targets(gaps[i][: len(shape)]) == shape and not _reads_parameters(gaps[i][: len(shape)]):
                layers[i].nodes += gaps[i][: len(shape)]
                gaps[i] = gaps[i][len(shape) :]


def _targets(nodes: list[fx.Node]) -> list[Any]:
    return [node.target for node in nodes]


def _reads_parameters(nodes: list[fx.Node]) -> bool:
    return any(n.op == "placeholder" and info(n).role is Role.PARAMETER for node in nodes for n in node.all_input_nodes)


def _free_of_parameters(block: Block) -> set[fx.Node]:
    """Ops that depend on no parameter: every stage can compute them from its inputs."""
    free: set[fx.Node] = set()
    for node in block.nodes:
        if node.op == "placeholder":
            if info(node).role in (Role.BUFFER, Role.INPUT) and not is_count(info(node)):
                free.add(node)
        elif all(n in free for n in node.all_input_nodes):
            free.add(node)
    return free


def _move_private(free: set[fx.Node], source: Segment, target: Segment) -> None:
    """Values free of parameters that only one other run reads belong to it (positions of a learned embedding, say)."""
    home = set(target.nodes)
    for node in reversed(list(source.nodes)):
        if node in free and node.users and all(user in home for user in node.users):
            source.nodes.remove(node)
            target.nodes.insert(0, node)
            home.add(node)
