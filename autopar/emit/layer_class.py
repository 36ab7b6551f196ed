"""One Python class a layer class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ..errors import PlanError
from ..ir.graph import Block, Call, Role, info
from ..plan.recompute import by_layer
from . import again, recomputed
from .body import untold_sizes
from .emission import Emission
from .names import class_name, value_name
from .placement_table import placement_table
from .recomputed import Folded, Part
from .regions import Region, regions
from .text import docstring

_LONG = 25  # lines of a body that is better read as several methods


def layer_class(e: Emission, block: Block) -> str:
    """The class of a layer block: parameters, forward, and what backward computes again in methods of their own."""
    names = e.arguments(block)
    flagged = again.flags(e.program, block.name)
    declared = [text for n in block.placeholders(Role.PARAMETER, Role.BUFFER) if (text := e.declare(n))]
    lines = [
        f"class {class_name(block.name, e.program)}(nn.Module):",
        *(f"    {line}".rstrip() for line in _docstring(e, block, names)),
        "",
        f"    def __init__(self{', recompute' if flagged else ''}):",
        "        super().__init__()",
        *(["        self._recompute = recompute"] if flagged else []),
        *(f"        {line}" for line in declared),
        "",
    ]
    whole = again.is_whole(e.program, block.name)
    if whole:
        lines += again.forward(e.program, ", ".join(e.parameters(block)))
    lines += _methods(e, block, names, "_layer" if whole else "forward")
    if flagged and again.by_name(e.program):
        lines += ["", *again.method()]
    return "\n".join(lines)


def _methods(e: Emission, block: Block, names: Mapping[fx.Node, str], name: str) -> list[str]:
    """The body of a layer: one method with a paragraph a region, or where that is long a method a region."""
    if own := recomputed.parts(block, e.program.regions.get(block.name, ()), e.renamed):
        return _recomputed_methods(e, block, names, name, own)
    parts = regions(block, e.roles(block))
    body = e.body(block, names, breaks={part.ops[-1] for part in parts[:-1]})
    short = len([line for line in body.lines if line]) <= _LONG
    if len(parts) == 1 or short or any(untold_sizes(part.ops, part.reads()) for part in parts):
        return _method(name, e.parameters(block), e.shapes(names), body.returned())
    calls: list[str] = []
    methods: list[str] = []
    known = dict(names)
    for place, part in enumerate(parts):
        given, results = _given(part, known), part.results(block)
        inside = e.body(block, given, part.ops, results)
        methods += ["", *_method(part.name, given.values(), e.shapes(given), inside.returned())]
        live = {node for later in parts[place + 1 :] for node in later.reads()} | set(block.results)
        taken = {name for node, name in known.items() if node in live}
        for node, base in zip(results, inside.result_names, strict=True):
            known[node] = value_name(base, taken)
            taken.add(known[node])
        called = f"self.{part.name}({', '.join(given.values())})"
        calls.append(f"{', '.join(known[node] for node in results)} = {called}")
    returned = ", ".join(known[node] for node in block.results)
    if calls[-1].startswith(f"{returned} = "):
        calls[-1] = f"return {calls[-1].removeprefix(f'{returned} = ')}"
    else:
        calls.append(f"return {returned}")
    return [*_method(name, e.parameters(block), e.shapes(names), calls), *methods]


def _recomputed_methods(
    e: Emission, block: Block, names: Mapping[fx.Node, str], name: str, own: Sequence[Part]
) -> list[str]:
    """The body of a layer with a line for each region that is in no other, then these regions' methods."""
    roles, tops = e.roles(block), [part for part in own if not any(other.has(part) for other in own)]
    folded = Folded(block, tops)
    ends = {part.ops[-1].name for part in regions(block, roles)[:-1]}
    after = [folded.nodes[n] for n in block.ops if n.name in ends and n in folded.nodes]
    inside = {folded.nodes[n]: text for n, text in names.items()}
    body = e.body(folded.folded, inside, breaks=after, roles=folded.roles(roles))
    lines = _method(name, e.parameters(block), e.shapes(names), body.returned())
    known = {n.name: text for n, text in body.names.items()}
    for part in tops:
        lines += ["", *_region_method(e, block, part, own, known)]
    return lines


def _region_method(e: Emission, block: Block, part: Part, own: Sequence[Part], known: Mapping[str, str]) -> list[str]:
    """The method of a region, and of one within it; `known`: what its caller calls values, by node name."""
    roles, inner = e.roles(block), [other for other in own if part.has(other)]
    folded = Folded(block, inner)
    ops = [node for node in folded.folded.ops if node in {folded.nodes[n] for n in part.ops if n in folded.nodes}]
    given = {folded.nodes[n]: known[n.name] for n in part.reads}
    body = e.body(folded.folded, given, ops, [folded.nodes[part.result]], roles=folded.roles(roles))
    if untold_sizes(ops, given):
        raise PlanError(
            f"recompute: {part.method} of {block.name} cannot be made from what it reads: use 'layer' for it"
        )
    lines = _method(part.method, given.values(), e.shapes(given), body.returned())
    names = {n.name: text for n, text in body.names.items()}
    for other in inner:
        lines += ["", *_region_method(e, block, other, own, names)]
    return lines


def _given(part: Region, known: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """The arguments of a region's method: what comes along the stream first."""
    reads = part.reads()
    made = {node: name for node, name in known.items() if node in reads}
    return dict(sorted(made.items(), key=lambda item: item[1] != "x"))


def _method(name: str, arguments: Iterable[str], shapes: str, body: Sequence[str]) -> list[str]:
    return [
        f"    def {name}({', '.join(['self', *arguments])}):{shapes}",
        *(f"        {line}".rstrip() for line in body),
    ]


def _docstring(e: Emission, block: Block, names: Mapping[fx.Node, str]) -> list[str]:
    calls = [c for c in e.program.layer_calls if c.block == block.name]
    first = f"{_count_text(calls)}{_layout(e, calls)}."
    parameters = block.placeholders(Role.PARAMETER)
    if e.plan.mesh.tp == 1 or not parameters:
        return docstring(first)
    values = [(name, info(node)) for node, name in names.items() if info(node).requires_grad]
    return docstring(first, placement_table(parameters, values, e.plan.mesh.tp))


def _layout(e: Emission, calls: Sequence[Call]) -> str:
    layout = e.plan.solution.name
    kinds = [f"tp={e.plan.mesh.tp}{f' ({layout})' if layout else ''}"] if e.plan.mesh.tp > 1 else []
    indices = [i for i, c in enumerate(e.program.layer_calls) if c in calls]
    chosen = [what for i, what in by_layer(e.program.recompute).items() if i in indices]
    kinds += again.kinds(chosen, len(indices))
    return "".join(f" · {kind}" for kind in kinds)


def _count_text(calls: Sequence[Call]) -> str:
    paths = list(dict.fromkeys(call.path for call in calls))
    layers = paths[0] if len(paths) == 1 else f"{len(paths)} layers: {paths[0]} … {paths[-1]}"
    return layers if len(paths) == len(calls) else f"{layers}, {len(calls)} uses"
