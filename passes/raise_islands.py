"""Compute in fp32 what half precision would lose, before the search, so that it is priced as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import eliminate_dead
from autopar.ir.graph import MODEL, Program, Role, arguments, info, node_inputs
from autopar.ir.results import RESULT_OF
from autopar.plan.plan import Plan
from autopar.rules.arguments import option
from autopar.rules.verify import Level

from .islands import Islands, is_half

aten = torch.ops.aten

_COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default)
_PROBABILITIES = (aten.softmax.int, aten.sigmoid.default)
_SQUARES = (aten.pow.Tensor_Scalar, aten.square.default, aten.mul.Tensor)
_SUMS = (aten.mean.dim, aten.sum.dim_IntList)
_STEPS_TO_CHOICE = 4  # from the probabilities to topk: a bias, a view


@dataclass(frozen=True)
class RaiseIslands:
    """Give a half-precision program the fp32 islands that its author did not write.

    Requires: a prepared program of one block. Ensures: each cast to fp32 of these is marked with its name. (The loss
    is raised by insert_casts: its logits are to travel in half precision.)

        positions   numbers computed from sizes alone: bf16 has no 257, fp16 no 2,049
        router      probabilities of which the largest are chosen: what is rounded to the same is chosen by chance
        norm        sums of squares written out: fp16 has no square of 256; layer_norm and rms_norm do this inside

        p = softmax(x, -1); k = topk(p, 2)   |   p = softmax(to(x, float32), -1); k = topk(p, 2)
    """

    name: ClassVar[str] = "raise_islands"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        of_sizes: dict[fx.Node, bool] = {}
        islands = Islands(lambda name, value: name == "positions" and _of_sizes(value, of_sizes))
        for node in program.blocks[MODEL].ops:
            if name := _begins(node, of_sizes) if is_half(node) else "":
                islands.begin(node, name)
            else:
                islands.follow(node)
        eliminate_dead(graph)
        return program


def _begins(node: fx.Node, of_sizes: dict[fx.Node, bool]) -> str:
    """The island that an op in half precision begins, if any."""
    counted = node.target is aten.to.dtype and not _is_real(node_inputs(node)[0])
    if (node.target in _COUNTING or counted) and _of_sizes(node, of_sizes):
        return "positions"
    if node.target in _PROBABILITIES and option(node, "dtype") is None and _chosen_from(node, _STEPS_TO_CHOICE):
        return "router"
    if _is_square(node) and all(user.target in _SUMS and option(user, "dtype") is None for user in node.users):
        return "norm"
    return ""


def _is_real(node: fx.Node) -> bool:
    """Of a floating dtype, or of truth values, which half precision holds exactly."""
    return info(node).dtype.is_floating_point or info(node).dtype == torch.bool


def _of_sizes(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a value needs neither the batch nor a parameter: sizes, numbers and buffers alone."""
    if node not in known:
        given = node.op == "placeholder" and info(node).role is not Role.BUFFER
        known[node] = not given and all([_of_sizes(n, known) for n in node_inputs(node)])
    return known[node]


def _chosen_from(node: fx.Node, steps: int) -> bool:
    """Whether the largest of these values are taken, within a few ops."""
    readers = [user for user in node.users if user.op == "call_function"]
    if any(RESULT_OF.get(user.target, (None,))[0] is aten.topk.default for user in readers):
        return True
    return steps > 0 and any(_chosen_from(user, steps - 1) for user in readers if len(info(user).shape) > 1)


def _is_square(node: fx.Node) -> bool:
    operands = node_inputs(node)
    if node.target not in _SQUARES or not node.users:
        return False
    if node.target is aten.mul.Tensor:
        return len(operands) == 2 and operands[0] is operands[1]
    return node.target is aten.square.default or arguments(node)[1] == 2
