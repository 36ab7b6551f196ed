"""Whether sequences may be padded at their end: a proof, by typing a program, that pads change no loss.

Each value of a run on padded samples is held against that of the run without pads, op by op (padded_ops.py), from the
inputs to the loss. Where it holds for all parameters, it holds for the gradients too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..errors import PlanError
from ..ir.graph import COUNT, Block, NodeInfo, Program, Role, S, info, node_inputs, op_name
from ..ir.padding import Padding
from .arguments import option
from .padded_ops import result_of
from .padded_values import ANY, TRUTH, Interval, Padded, PadsMatter, Tokens, padded
from .padded_views import VIEWS, Lengths

aten = torch.ops.aten

_LOSSES: dict[Any, int] = {aten.cross_entropy_loss.default: 1, aten.nll_loss_nd.default: 1}  # where the target is


def padding_of(program: Program, samples: int, sequence: int) -> tuple[Padding, ...]:
    """How each input of `samples` tokens is padded to `sequence`; program: prepared, not yet cut or typed.

    PlanError naming the op, the user's line and the way out where pads might change what the model computes.
    """
    try:
        paddings = _paddings(program)
        _Typing(program, paddings, Lengths(samples, sequence)).run()
    except PadsMatter as found:
        raise PlanError(
            f"samples of {samples:,} tokens cannot be padded to {sequence:,}, for pads might change the loss: {found}; "
            f"or leave pad_to_multiple_of out, and give samples of {sequence:,} tokens"
        ) from found
    return paddings


def ignored_targets(program: Program) -> dict[str, int]:
    """The inputs that are targets of a cross-entropy, with the value that it ignores."""
    found: dict[str, int] = {}
    for _, node in program.each_op():
        if node.target in _LOSSES:
            name = input_name(node.args[1])
            found.setdefault(name, int(option(node, "ignore_index")))
    found.pop("", None)
    return found


def input_name(node: Any) -> str:
    """The model's input whose elements a node has, moved, cast, or some of them replaced; "" for none."""
    while isinstance(node, fx.Node) and node.op != "placeholder":
        node = _source(node)
    return info(node).ref if isinstance(node, fx.Node) and info(node).role is Role.INPUT else ""


def _source(node: fx.Node) -> Any:
    """What a view, a cast, or an op that replaces some elements takes its elements from; of `where`, the one branch
    that is an integer tensor of an input."""
    name = op_name(node)
    if node.target in VIEWS and node.args:
        return node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
    if name in ("to", "alias", "clone", "detach", "masked_fill"):
        return node.args[0]
    if name == "where":
        return next((n for n in node.args[1:] if isinstance(n, fx.Node) and input_name(n)), None)
    return None


def _paddings(program: Program) -> tuple[Padding, ...]:
    """Each dim of an input that is the sequence, with what it is padded with, as its dtype has it: ignored targets,
    else 0."""
    ignored, ids = ignored_targets(program), _ids(program)
    found: list[Padding] = []
    for name, facts in program.inputs.items():
        if (wrong := [n for n in facts.shape if S in n.free_symbols and n != S]) or not facts.shape:
            raise PadsMatter(
                f"input {name!r} has a dim of {wrong[0] if wrong else 0} elements, and only s can be padded"
            )
        value = ignored.get(name, 0)
        value = 0 if value < 0 and name in ids else value  # a table has no such row
        value = int(torch.tensor(value).to(facts.dtype))
        found += [Padding(name, dim, value) for dim, size in enumerate(facts.shape) if size == S]
    if not found:
        raise PadsMatter("no input has a sequence")
    return tuple(found)


def _ids(program: Program) -> set[str]:
    """The inputs that are rows of a table."""
    embeddings = (node for _, node in program.each_op() if node.target is aten.embedding.default)
    return {input_name(node.args[1]) for node in embeddings}


class _Typing:
    """One pass over the calls of a program, from its inputs to its loss; a call of equal values is typed once."""

    def __init__(self, program: Program, paddings: tuple[Padding, ...], lengths: Lengths) -> None:
        self.program, self.lengths = program, lengths
        self.values = {(p.input, p.dim): float(p.value) for p in paddings}
        self.done: dict[tuple[str, tuple[Padded, ...]], tuple[Padded, ...]] = {}

    def run(self) -> None:
        passed: dict[str, Padded] = {}
        for call in self.program.calls:
            block, given = self.program.blocks[call.block], tuple(passed[name] for name in call.inputs)
            if (key := (call.block, given)) not in self.done:
                self.done[key] = self._block(block, given)
            if call.outputs:
                passed.update(zip(call.outputs, self.done[key], strict=True))
            else:
                _check_whole(block, self.done[key])
        if COUNT in self.program.blocks:
            block = self.program.blocks[COUNT]
            _check_whole(block, self._block(block, ()))

    def _block(self, block: Block, given: tuple[Padded, ...]) -> tuple[Padded, ...]:
        typed: dict[fx.Node, Padded] = {}
        for node in block.nodes:
            try:
                if node.op == "placeholder":
                    typed[node] = self._placeholder(info(node), given)
                else:
                    typed[node] = result_of(node, [typed[n] for n in node_inputs(node)], self.lengths)
            except PadsMatter as found:
                raise PadsMatter(f"{_place(block, node)} {found}") from found
        return tuple(typed[node] for node in block.results)

    def _placeholder(self, facts: NodeInfo, given: tuple[Padded, ...]) -> Padded:
        if facts.role is Role.VALUE:
            return given[int(facts.ref)]
        dims: list[Tokens | None] = [Tokens(n) if S in n.free_symbols else None for n in facts.shape]
        pads = [self.values.get((facts.ref, dim), 0.0) for dim in range(len(dims))]
        return padded(dims, TRUTH if facts.dtype == torch.bool else ANY, [Interval(p, p) for p in pads])


def _place(block: Block, node: fx.Node) -> str:
    facts = info(node)
    where = ", ".join(filter(None, (facts.module, facts.source)))
    op = f"{op_name(node)} of " if node.op == "call_function" else ""
    return f"{op}{block.name}.{node.name}{f' ({where})' if where else ''}"


def _check_whole(block: Block, results: tuple[Padded, ...]) -> None:
    """The loss and the counts are of all tokens together."""
    for node, value in zip(block.results, results, strict=True):
        if any(value.dims):
            raise PadsMatter(f"{_place(block, node)} is a number for each token, and no loss")
