"""Repeat keys and values for Ulysses, where their heads are fewer than the ranks that share them out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.graph import Program, Role, info, node_inputs, set_info
from autopar.plan.plan import Plan
from autopar.rules.verify import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class RepeatHeads:
    """Each K/V head as often as it takes for every rank of cp and tp to have as many; the least that does.

    Requires: nothing. Ensures: under Ulysses, K/V heads of fused attention are shared out evenly where q's are.

        attention(q, k, v): 8 and 2 heads, cp=4   |   attention(q, k_2, v_2), k_2 = repeat_interleave(k, 2, 1)
    """

    name: ClassVar[str] = "repeat_heads"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        if plan.context.name != "ulysses" or plan.mesh.cp == 1:
            return program
        program = program.copy_blocks()
        for _, node in program.each_op():
            if node.target is aten.scaled_dot_product_attention.default:
                _repeat(node, plan.mesh.cp * plan.mesh.tp)
        return program


def _repeat(node: fx.Node, ranks: int) -> None:
    q, k, v = node_inputs(node)[:3]
    if not all(info(n).shape[1].is_Integer for n in (q, k)):  # parts of a sequence, or no heads at all
        return
    heads, groups = (int(info(n).shape[1]) for n in (q, k))
    times = next((n for n in range(1, heads // groups + 1) if heads % (groups * n) == groups * n % ranks == 0), 1)
    if times == 1:
        return
    made = {}
    for operand in dict.fromkeys((k, v)):
        facts = info(operand)
        with node.graph.inserting_before(node):
            name = f"{operand.name}_repeated"  # plans name nodes, whatever fx would call them
            new = node.graph.create_node(
                "call_function", aten.repeat_interleave.self_int, (operand, times, 1), name=name
            )
        shape = (facts.shape[0], sympy.Integer(groups * times), *facts.shape[2:])
        made[operand] = set_info(new, replace(facts, shape=shape, role=Role.OP, ref=""))
    node.args = (q, made[k], made[v], *node.args[3:])
