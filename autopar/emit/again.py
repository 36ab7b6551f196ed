"""Which layers compute what again: the constant RECOMPUTE, and how a layer's class reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..ir.graph import Program
from ..plan.recompute import LAYER, by_layer, group_of, regions_of
from .emission import tuple_text


def choices(program: Program) -> dict[int, str]:
    """Layer → what is chosen for it within its own class; a group is the model's."""
    return {layer: what for layer, what in by_layer(program.recompute).items() if group_of(what) == 1}


def by_name(program: Program) -> bool:
    """Whether layers are told names of regions: where not all layers of a class have the same ones."""
    return any(not region.always for own in program.regions.values() for region in own)


def is_whole(program: Program, block: str) -> bool:
    """Whether some layer of a class is recomputed as one."""
    return any(program.layer_calls[i].block == block and what == LAYER for i, what in choices(program).items())


def flags(program: Program, block: str) -> bool:
    """Whether a layer of the class must be told what it recomputes."""
    return is_whole(program, block) or any(not region.always for region in program.regions.get(block, ()))


def flag(program: Program, block: str, layer: str) -> str:
    """What a layer is told, `layer` being the source of its index."""
    if not flags(program, block):
        return ""
    return f"RECOMPUTE.get({layer}, ())" if by_name(program) else f"{layer} in RECOMPUTE"


def constant(program: Program) -> list[str]:
    """RECOMPUTE: layers, or layer → regions."""
    blocks = {call.block for call in program.layer_calls}
    between = any(program.is_between(program.layer_calls[i].block) for i in choices(program))
    if not between and not any(flags(program, block) for block in blocks):
        return []
    chosen = {i: what for i, what in choices(program).items() if by_name(program) or what == LAYER}
    if not by_name(program):
        return [f"RECOMPUTE = {_range(sorted(chosen))}  # layers whose activations backward computes again"]
    lines = ["RECOMPUTE = {  # layer → what backward computes again"]
    for what in dict.fromkeys(chosen.values()):
        names = tuple_text(regions_of(what) or (LAYER,))
        lines.append(f"    **dict.fromkeys({_range([i for i in chosen if chosen[i] == what])}, {names}),")
    return [*lines, "}"]


def _range(layers: Sequence[int]) -> str:
    whole = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"range({layers[0]}, {layers[-1] + 1})" if whole else str(list(layers))


def forward(program: Program, arguments: str) -> list[str]:
    """The method forward of a class of which some layers are recomputed as one."""
    if by_name(program):
        called = ", ".join(['"layer"', "self._layer", *([arguments] if arguments else [])])
        return [f"    def forward(self, {arguments}):", f"        return self._again({called})", ""]
    return [
        f"    def forward(self, {arguments}):",
        "        if self._recompute and torch.is_grad_enabled():",
        f"            return checkpoint(self._layer, {arguments}, use_reentrant=False)",
        f"        return self._layer({arguments})",
        "",
    ]


def method() -> list[str]:
    """The method by which a layer computes a part of it, again in backward where the plan says so."""
    return [
        "    def _again(self, name, part, *values):",
        '        """A part of the layer; where RECOMPUTE names it, backward computes it again."""',
        "        if name in self._recompute and torch.is_grad_enabled():",
        "            return checkpoint(part, *values, use_reentrant=False)",
        "        return part(*values)",
    ]


def kinds(chosen: Sequence[str], layers: int) -> list[str]:
    """What the docstring of a class of so many layers says: "recomputed", "recompute: mlp"."""
    counts = Counter(chosen)
    if not counts:
        return []
    if set(counts) == {LAYER}:
        return ["recomputed" if counts[LAYER] == layers else f"{counts[LAYER]} of {layers} recomputed"]
    alone = len(counts) == 1 and counts.total() == layers
    return [f"recompute: {next(iter(counts))}" if alone else f"recompute in {counts.total()} of {layers}"]
