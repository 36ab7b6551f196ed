"""What each input of a model is padded with, where its samples are shorter than the planned sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..errors import PlanError
from ..ir.graph import Program, Role, S, info, op_name
from ..ir.lengths import Padding
from .arguments import option

aten = torch.ops.aten

_LOSSES: dict[Any, int] = {aten.cross_entropy_loss.default: 1, aten.nll_loss_nd.default: 1}  # where the target is
# Ops whose elements are those of their first operand, moved, cast, or some of them replaced.
_SAME_ELEMENTS = {
    "reshape", "squeeze", "transpose", "t", "numpy_T", "mT", "permute", "unsqueeze", "expand", "slice", "select", "pad",
    "constant_pad_nd", "cat", "tril", "triu", "to", "alias", "clone", "detach", "masked_fill",
}  # fmt: skip


def paddings_of(program: Program) -> tuple[Padding, ...]:
    """Each dim of an input that is the sequence, with what it is padded with: ignored targets, else 0.

    program: prepared. PlanError where no input has a sequence, or one has a dim of another length that grows with it.
    """
    ignored, ids = ignored_targets(program), _ids(program)
    paddings: list[Padding] = []
    for name, facts in program.inputs.items():
        if other := [size for size in facts.shape if S in size.free_symbols and size != S]:
            raise PlanError(
                f"pad_to_multiple_of: input {name!r} has a dim of {other[0]} elements, and only s can be padded: leave "
                "it out, and give samples of the padded length"
            )
        value = ignored.get(name, 0)
        value = 0 if value < 0 and name in ids else value  # a table has no such row
        value = int(torch.tensor(value).to(facts.dtype))
        paddings += [Padding(name, dim, value) for dim, size in enumerate(facts.shape) if size == S]
    if not paddings:
        raise PlanError("pad_to_multiple_of: no input has a sequence to be padded: leave it out")
    return tuple(paddings)


def ignored_targets(program: Program) -> dict[str, int]:
    """The inputs that are targets of a cross-entropy, with the value that it ignores."""
    ignored: dict[str, int] = {}
    for _, node in program.each_op():
        if node.target in _LOSSES:
            name = input_name(program, node.args[1])
            ignored.setdefault(name, int(option(node, "ignore_index")))
    ignored.pop("", None)
    return ignored


def input_name(program: Program, node: Any) -> str:
    """The model's input whose elements a node has, moved, cast, or some of them replaced; "" for none."""
    while isinstance(node, fx.Node):
        facts = info(node)
        if facts.role is Role.VALUE:
            node = _passed(program, node)
        elif node.op == "placeholder":
            return facts.ref if facts.role is Role.INPUT else ""
        else:
            node = _source(program, node)
    return ""


def _passed(program: Program, value: fx.Node) -> fx.Node:
    """What an earlier call gives as this value to the first call of its block."""
    call = next(call for call in program.calls if program.blocks[call.block].graph is value.graph)
    producer, place = program.producer(call.inputs[int(info(value).ref)])
    return program.blocks[producer.block].results[place]


def _source(program: Program, node: fx.Node) -> Any:
    """The operand that a node has its elements from; of `where`, the one branch that has an input's."""
    name = op_name(node)
    if name == "where":
        return next((n for n in node.args[1:] if input_name(program, n)), None)
    if name not in _SAME_ELEMENTS or not node.args:
        return None
    return node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]


def _ids(program: Program) -> set[str]:
    """The inputs that are rows of a table."""
    embeddings = (node for _, node in program.each_op() if node.target is aten.embedding.default)
    return {input_name(program, node.args[1]) for node in embeddings}
