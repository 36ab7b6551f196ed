"""Names of values: of the lines of a body, and of what passes between calls of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import fx

from ..ir.custom import LINEAR_CROSS_ENTROPY
from ..ir.graph import TABLES, Block, Call, Program, Role, arguments, info, node_inputs, op_name
from .lines import Lines
from .names import argument_name, free_names, value_name
from .roles import ACTIVATIONS, ATTENTIONS, HEAVY, NORMS, SOFTMAX, Roles

aten = torch.ops.aten
Names = dict[fx.Node, str]

_MOST_OPS = 6  # in one line
_OF_OP = {
    aten.cross_entropy_loss.default: "loss", aten.mse_loss.default: "loss", LINEAR_CROSS_ENTROPY: "loss",
    aten.cos.default: "cos", aten.sin.default: "sin", aten.arange.default: "positions",
    aten.arange.start: "positions",
    **dict.fromkeys(ATTENTIONS, "attn"), **dict.fromkeys(SOFTMAX, "probs"),
}  # fmt: skip
# What an op without a gradient makes: indices, distances, masks. The op's own name would be Python's.
_OF_NUMBERS = {
    "sub": "difference", "abs": "distance", "neg": "distance", "min": "least", "max": "greatest", "add": "total",
    "mul": "product", "div": "quotient", "where": "chosen", "cat": "joined", "sum": "total", "pow": "power",
    "masked_fill": "filled", "scalar_tensor": "constant", "full": "constant", "all": "whole", "any": "some",
    "round": "rounded", "index": "indexed", "slice": "part",
}  # fmt: skip
# Of them those that change a number, not what it is a number of: a distance in a larger unit, labels shifted by one.
_CHANGING = {"min", "max", "add", "mul", "div", "where", "pow", "masked_fill", "round", "cat"}
_FILLED = {"zeros", "ones", "constant"}
_RUNNING = ("h", "x")  # names of values that are what they are now


def name_lines(
    lines: Lines,
    names: Names,
    fits: Callable[[fx.Node, str], bool] = lambda node, name: True,
    length: Callable[[fx.Node], int] | None = None,
    fixed: Mapping[fx.Node, str] | None = None,
) -> Iterator[fx.Node]:
    """Name the values of all lines in order, in `names`; each op of a line is given when it is named.

    A line of too many ops, or one that does not fit under its name, is cut at its longest op. fixed: names of some
    lines, whatever their ops are.
    """
    fixed = fixed or {}

    def named(node: fx.Node) -> Iterator[fx.Node]:
        name = fixed.get(node) or _line_name(lines, names, node)
        if (lines.size(node) > _MOST_OPS or not fits(node, name)) and (inner := lines.cut(node, length or lines.size)):
            yield from named(inner)
            yield from named(node)
        else:
            names[node] = name
            yield node

    for node in lines.ops:
        if node not in lines.folded:
            yield from named(node)


# --------------------------------------------------------------------------------
# The value of a line: its role, what its module or op is, or what it changes


def _line_name(lines: Lines, names: Names, node: fx.Node) -> str:
    """The name of a line's value: that of a value which it changes and which dies there, else one that is free."""
    role = lines.roles.of(node)
    changed = None if role else _changed(lines, names, node)
    if changed is not None and lines.dies(changed, node):
        return names[changed]
    if role == "mask" and info(node).requires_grad:
        base = "bias"  # a mask of biases that are trained is no mask
    elif changed is not None:
        base = "h" if names[changed] == "x" else names[changed]
    else:
        base = role or _name_by_op(lines, names, node)
    return value_name(base, {name for other, name in names.items() if lines.last_use(other) > lines.order[node]})


def _changed(lines: Lines, names: Names, node: fx.Node) -> fx.Node | None:
    """The value that a line changes: its main operand, or the one hidden state that it reads last."""
    head, reads = lines.head(node), lines.reads(lines.head(node))
    if head.target not in NORMS and (main := _main_operand(lines, head)) in names:
        return main
    if head.target in _OF_OP or not info(node).requires_grad or head.target not in NORMS and len(reads) != 1:
        return None
    return next((value for value in reads if names[value] in _RUNNING and lines.dies(value, node)), None)


def _main_operand(lines: Lines, head: fx.Node) -> fx.Node | None:
    """The operand that an op dresses, activates or adds to, through what is folded into the line."""
    main = lines.roles.main(head) or (node_inputs(head)[0] if head.target in ACTIVATIONS else None)
    if lines.roles.is_residual(head):
        main = next(n for n in node_inputs(head) if n in lines.roles.stream)
    while main is not None and main in lines.folded:
        main = lines.roles.main(main)
    return main


def _name_by_op(lines: Lines, names: Names, node: fx.Node) -> str:
    """A name for what an op makes: by the op, its module, or the values that it is made of."""
    head, facts = lines.head(node), info(lines.head(node))
    if head.target in _OF_OP:
        return _OF_OP[head.target]
    if head.target in HEAVY and facts.module:
        return _short(facts.module)
    if facts.dtype == torch.bool or _hides(head):
        return "mask"
    if info(node).requires_grad:
        return "h"
    weights = [n for n in node_inputs(head) if info(n).role in (Role.PARAMETER, Role.BUFFER)]
    reads = lines.reads(head)
    if not reads and weights:
        return info(weights[0]).ref.rpartition(".")[2]
    name, stems = op_name(head).strip("_"), {re.sub(r"_\d+$", "", names[value]) for value in reads} - _FILLED
    return stems.pop() if name in _CHANGING and len(stems) == 1 else _OF_NUMBERS.get(name, name)


def _hides(head: fx.Node) -> bool:
    """Whether an op makes of truth values what is added to scores: a constant, or so low a number that no softmax sees
    a score with it."""
    if head.target not in (aten.where.ScalarOther, aten.masked_fill.Scalar):
        return False
    filled, number = node_inputs(head)[head.target is aten.where.ScalarOther], arguments(head)[2]
    return isinstance(number, int | float) and number <= -1e4 and not node_inputs(filled)


def _short(module: str) -> str:
    """ "self_attn.q_proj" → "q"; "mlp.c_fc" → "c_fc"; "self_attn" → "attn"."""
    leaf = next((part for part in reversed(module.split(".")) if not part.isdigit()), "h").removeprefix("self_")
    if leaf.endswith("head"):
        return "logits"
    if re.search(r"relative|position", leaf) and "bias" in leaf:
        return "position_bias"
    return leaf.removesuffix("_proj") if leaf != "c_proj" else leaf


# --------------------------------------------------------------------------------
# Values between calls


def value_names(program: Program) -> dict[str, str]:
    """Value → its name: `x` for the hidden state that the next call reads last, else what it is in its block.

    They share Model.forward with its arguments, and a layer with its own: none has the name of another that is
    still to be read.
    """
    inputs = {*program.inputs, *map(argument_name, program.inputs)}
    tables = [call for call in program.calls if call.block == TABLES]
    others = [call for call in program.calls if call.block != TABLES]
    names: dict[str, str] = {}
    for call in tables:
        names |= free_names(
            zip(call.outputs, _names_inside(program, call, names), strict=True), inputs | {*names.values()}
        )
    last_use = {value: place for place, call in enumerate(others) for value in call.inputs}
    last_use |= dict.fromkeys(names, len(others))
    inside: dict[str, list[str]] = {}
    for place, call in enumerate(others):
        bases = inside.setdefault(call.block, []) or _names_inside(program, call, names)
        inside[call.block] = bases
        brief = [last_use.get(value, -1) <= place + 1 for value in call.outputs]
        taken = inputs | {names[value] for value in names if last_use.get(value, -1) > place}
        names |= free_names(zip(call.outputs, _names_outside(program, call, bases, brief), strict=False), taken)
    return names


def block_arguments(program: Program, block: Block, names: Mapping[str, str]) -> Names:
    """Names of the values and inputs that a block reads: those that values have in its first call, and of inputs."""
    call = program.call_of(block.name)
    values = {n: names[call.inputs[int(info(n).ref)]] for n in block.placeholders(Role.VALUE)}
    return {**values, **{n: argument_name(info(n).ref) for n in block.placeholders(Role.INPUT)}}


def _names_inside(program: Program, call: Call, names: Mapping[str, str]) -> list[str]:
    """The names that the lines of a block give its results, whatever its readers call them."""
    if not call.outputs:
        return []
    block = program.blocks[call.block]
    inside = block_arguments(program, block, names)
    for _ in name_lines(Lines(block.ops, block.results, Roles(block, {})), inside):
        pass
    return [inside[node] for node in block.results]


def _names_outside(program: Program, call: Call, bases: list[str], brief: list[bool]) -> list[str]:
    """Names for a call's results in Model.forward: `x` for the hidden state, which only the next call reads.

    brief: whether only the next call reads a result. The hidden state has a gradient; there is one at most.
    """
    results = program.blocks[call.block].results
    possible = [i for i, node in enumerate(results[: len(brief)]) if brief[i] and info(node).requires_grad]
    stream = [i for i in possible if bases[i].partition("_")[0] in ("x", "h")]
    hidden = next(iter(stream or possible), None)
    return ["x" if i == hidden else _lasting_name(program, call, i, base) for i, base in enumerate(bases)]


def _lasting_name(program: Program, call: Call, place: int, base: str) -> str:
    """The name of a value that is read later: `skip` for a hidden state, an encoder's result by that name."""
    if base.partition("_")[0] not in ("x", "h"):
        return base
    module = info(program.blocks[call.block].results[place]).module
    return "encoder_out" if "encoder" in f"{call.path}.{module}" and "decoder" not in module else "skip"
