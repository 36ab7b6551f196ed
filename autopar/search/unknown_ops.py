"""Ops without a sharding rule: what leaving them whole on tp costs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping

import sympy

from ..cost_models.describe import op_cost
from ..ir.graph import Program, info, node_inputs, op_name
from ..placement import REPLICATE, Strategy
from ..rules import is_known, rule_of


def warn_unknown(program: Program, values: Mapping[sympy.Symbol, int]) -> None:
    """Warn once of each op without a rule: its name, the user's line, and its share of the memory traffic."""
    traffic, places = defaultdict[str, float](float), dict[str, str]()
    total = 0.0
    for block, node in program.each_op():
        whole = Strategy((REPLICATE,) * len(node_inputs(node)), REPLICATE)
        moved = float(op_cost(node, whole, rule_of(node), 1).forward_bytes.subs(dict(values)))
        total += (size := program.count(block.name) * moved)
        if program.count(block.name) and not is_known(node):
            traffic[op_name(node)] += size
            places.setdefault(op_name(node), info(node).source or node.name)
    for name, size in traffic.items():
        share = size / total if total else 0.0
        warnings.warn(
            f"{name} at {places[name]} has no sharding rule: it is replicated on tp ({share:.1%} of the bytes that a "
            "forward moves)",
            stacklevel=2,
        )
