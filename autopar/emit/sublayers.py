"""A layer as sublayers, each with its norm and its residual, for a method or a paragraph of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ..ir.custom import EXPERTS
from ..ir.graph import Block, Role, info, node_inputs
from .body import Body
from .code import Statement, Suite, function, length, returning
from .emission import Emission, untold_sizes
from .names import free_names, method_names
from .placements import argument_shapes
from .roles import ACTIVATIONS, ATTENTION, ATTENTIONS, HEAVY, MLP, NORMS, PROJECTIONS, SOFTMAX, Roles

_LONG = 25  # lines of a body that is better read as several methods


@dataclass(frozen=True)
class Sublayer:
    """Consecutive ops of a block that end in the residual stream; `name` is that of their method."""

    name: str
    ops: tuple[fx.Node, ...]

    def results(self, block: Block) -> list[fx.Node]:
        """The values that later ops, or the readers of the block, take of it."""
        inside = set(self.ops)
        return [n for n in self.ops if n in block.results or any(u not in inside for u in n.users)]

    def reads(self) -> set[fx.Node]:
        """Values that come from before, and placeholders."""
        inside = set(self.ops)
        return {operand for node in self.ops for operand in node_inputs(node) if operand not in inside}


def sublayers(block: Block, roles: Roles) -> list[Sublayer]:
    """The sublayers of a layer; one where nothing but the whole holds together."""
    parts: list[list[fx.Node]] = [[]]
    ops = block.ops
    for place, node in enumerate(ops):
        parts[-1].append(node)
        if place < len(ops) - 1 and _ends(place, ops, block, roles):
            parts.append([])
    if len(parts) > 1 and not any(n.target in HEAVY for n in parts[-1]):
        last = parts.pop()
        parts[-1] += last
    names = method_names(block, [_name(part, roles) for part in parts])
    return [Sublayer(name, tuple(part)) for name, part in zip(names, parts, strict=True)]


def _ends(place: int, ops: Sequence[fx.Node], block: Block, roles: Roles) -> bool:
    """Whether the stream alone goes on after an op, of the values with a gradient."""
    node, done = ops[place], set(ops[: place + 1])
    if node not in roles.stream or len(node.users) == 1 and next(iter(node.users)).target in NORMS:
        return False
    computed = [n for n in ops[: place + 1] if info(n).requires_grad]
    before = [n for n in block.placeholders(Role.VALUE) if n in roles.stream]
    live = [n for n in (*computed, *before) if any(u not in done and u.op != "output" for u in n.users)]
    return live == [node]


def _name(part: Sequence[fx.Node], roles: Roles) -> str:
    """The name of a sublayer's method: by its ops, by its modules, or that of its last module."""
    targets, modules = [n.target for n in part], [info(n).module for n in part if n.target in HEAVY]
    several = sum(map(PROJECTIONS.__contains__, targets)) > 1
    if EXPERTS in targets:
        return "_experts"
    if not {*ATTENTIONS, *SOFTMAX}.isdisjoint(targets) or any(map(ATTENTION.search, modules)):
        return "_cross_attention" if _reads_another(part, roles) else "_attention"
    if any(map(MLP.search, modules)) or several and not ACTIVATIONS.isdisjoint(targets):
        return "_mlp"
    names = [part for module in modules for part in module.split(".")[:1] if not part.isdigit()]
    return f"_{_snake(names[-1])}" if names else "_part"


def _reads_another(part: Sequence[fx.Node], roles: Roles) -> bool:
    """Whether a projection reads a value from outside that is not of the stream: an encoder's output."""
    inside = set(part)
    outside = {n for node in part if node.target in PROJECTIONS for n in node_inputs(node) if n not in inside}
    outside |= {roles.maker(n) for node in part if node.target in PROJECTIONS for n in node_inputs(node)} - inside
    return any(info(n).role is Role.VALUE and info(n).requires_grad and n not in roles.stream for n in outside)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


# --------------------------------------------------------------------------------
# Methods


def sublayer_methods(e: Emission, block: Block, name: str) -> list[Suite]:
    """The method `name` of a layer, with a paragraph a sublayer; where that is long, also a method a sublayer."""
    names = e.arguments(block)
    parts = sublayers(block, e.roles(block))
    body = Body(e, block, names, breaks={part.ops[-1] for part in parts[:-1]})
    separable = len(parts) > 1 and not any(untold_sizes(part.ops, part.reads()) for part in parts)
    if not separable or length(body.statements) <= _LONG:
        return [body.method(name, e.parameters(block))]
    calls: list[Statement] = []
    methods: list[Suite] = []
    known = dict(names)
    for place, part in enumerate(parts):
        reads, results = part.reads(), part.results(block)
        # What comes along the stream is the first argument.
        inputs = dict(sorted(((n, known[n]) for n in known if n in reads), key=lambda item: item[1] != "x"))
        inside = Body(e, block, inputs, part.ops, results)
        methods.append(inside.method(part.name))
        live = {node for later in parts[place + 1 :] for node in later.reads()} | set(block.results)
        known |= free_names(
            zip(results, inside.result_names, strict=True), {name for node, name in known.items() if node in live}
        )
        call = f"self.{part.name}({', '.join(inputs.values())})"
        calls.append(Statement(call, tuple(known[node] for node in results)))
    returned = returning(calls, [known[node] for node in block.results])
    shapes = argument_shapes(names, e.plan.mesh.tp)
    return [function(name, ["self", *e.parameters(block)], returned, comment=shapes), *methods]
