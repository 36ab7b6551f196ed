"""How much of a model's work is in modules that are kept whole: every rank of tp does all of it."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from autopar.cost_models.describe import op_cost
from autopar.ir.custom import OPAQUE
from autopar.ir.graph import Program, arguments, node_inputs
from autopar.placement import REPLICATE, Strategy
from autopar.rules import rule_of


def opaque_shares(program: Program, values: Mapping[sympy.Symbol, int]) -> dict[str, float]:
    """Opaque module → its share of the model's FLOPs, largest first; `values` are numbers for b and s."""
    of_module = dict.fromkeys(program.opaque, 0.0)
    total = 0.0
    for block, node in program.each_op():
        whole = Strategy((REPLICATE,) * len(node_inputs(node)), REPLICATE)
        flops = float(op_cost(node, whole, rule_of(node), 1).forward_flops.subs(dict(values)))
        flops *= program.count(block.name)
        total += flops
        if node.target is OPAQUE:
            of_module[arguments(node)[1]] += flops
    shares = {name: flops / total if total else 0.0 for name, flops in of_module.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def opaque_note(program: Program, values: Mapping[sympy.Symbol, int], classes: Mapping[str, str]) -> list[str]:
    """A line for each opaque module, for the plan table. `classes`: module path → class name."""
    return [
        f"{name} ({classes.get(program.opaque[name].path, 'an autograd.Function')}) cannot be traced and is kept whole "
        f"on every GPU of tp: {share:.1%} of FLOPs"
        for name, share in opaque_shares(program, values).items()
    ]
