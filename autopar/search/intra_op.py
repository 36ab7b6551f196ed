"""The intra-op search: one 0/1 program for the whole model on one mesh axis, solved by HiGHS.

Variables
    y[node, k]         node takes its k-th strategy (binary; placeholders that stand for the same
                       parameter or value share theirs)
    e[read, from, to]  the read of a value converts it from its placement to the one wanted
    c[value, from, to] the conversion is made (paid once, however many readers)
Minimise Σ count(block) · (strategy costs + conversion costs), subject to
    Σ_k y[node, k] = 1
    Σ_to   e[read, from, to] = Σ y[value, k with output from]
    Σ_from e[read, from, to] = Σ y[reader, k with input to]
    c[value, from, to] ≥ e[read, from, to]
With the two flow equations only the y need be integer, and HiGHS closes a whole GPT in hundredths of a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import sympy
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import fx

from ..errors import InfeasibleError
from ..ir.build import is_continuous
from ..ir.graph import TABLES, Block, NodeInfo, Program, Role, S, info, node_inputs
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Strategy, conversion
from ..plan.plan import Solution
from ..rules import Axis, rule_of, strategies
from .layouts import FREE, Layout
from .op_costs import Costs
from .sharing import Unit, shared_units, value_groups

_SMALL_SHARE = 0.02  # of the largest weight of a block: then a product is beside the work of its layer


def solve(program: Program, axis: Axis, costs: Costs, layout: Layout = FREE) -> Solution:
    """The cheapest typing of the program on the axis; raises InfeasibleError where there is none."""
    return _Search(program, axis, costs, layout).solution()


@dataclass
class _Search:
    program: Program
    axis: Axis
    costs: Costs
    layout: Layout
    groups: dict[str, Unit] = field(default_factory=dict)
    shared: dict[tuple[str, str], Unit] = field(default_factory=dict)
    choices: dict[Unit, list[Strategy]] = field(default_factory=dict)
    first: dict[Unit, int] = field(default_factory=dict)  # column of y[unit, 0]
    objective: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    conversions: dict[tuple[Unit, Placement, Placement, str], int] = field(default_factory=dict)
    products: dict[fx.Node, bool] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)  # block → elements of its largest weight

    def __post_init__(self) -> None:
        self.groups = value_groups(self.program)
        self.shared = shared_units(self.program, self.groups)

    def solution(self) -> Solution:
        blocks = [b for b in self.program.blocks.values() if self.program.count(b.name)]
        for block in blocks:
            for node in block.nodes:
                self._decide(block, node)
        for block in blocks:
            for node in block.ops:
                self._read(block, node)
            self._return(block)
        chosen = self._optimise()
        strategies = {
            block.name: {node.name: chosen[self._unit(block, node)] for node in block.nodes} for block in blocks
        }
        return Solution(self.axis.size, strategies, self.layout.name)

    # variables

    def _unit(self, block: Block, node: fx.Node) -> Unit:
        return self.shared.get((block.name, node.name), f"{block.name}:{node.name}")

    def _decide(self, block: Block, node: fx.Node) -> None:
        unit = self._unit(block, node)
        if unit in self.choices:
            return
        weight = self.program.count(block.name)
        options = self._options(block, node)
        self.choices[unit] = options
        self.first[unit] = len(self.objective)
        for rank, option in enumerate(options):
            self._column(weight * self._cost(node, option) + 1e-12 * rank, integral=True)
        self._row({self.first[unit] + k: 1.0 for k in range(len(options))}, 1.0, 1.0)

    def _cost(self, node: fx.Node, option: Strategy) -> float:
        if node.op == "placeholder":
            return self.costs.stored(info(node), option.output) if info(node).role is Role.PARAMETER else 0.0
        return self.costs.strategy(node, option)

    def _options(self, block: Block, node: fx.Node) -> list[Strategy]:
        facts = info(node)
        if block.name == TABLES or facts.role in (Role.BUFFER, Role.INPUT):
            return [Strategy((REPLICATE,) * len(node_inputs(node)), REPLICATE)]
        if facts.role is Role.OP:
            return self._strategies(block, node)
        placements = self.axis.stored(facts) if facts.role is Role.PARAMETER else self._between_blocks(facts)
        return [Strategy((), p) for p in placements]

    def _strategies(self, block: Block, node: fx.Node) -> list[Strategy]:
        """Those of an op's rule that the layout leaves."""
        options = strategies(node, rule_of(node), self.axis)
        if self.layout.places(info(node).shape) and self._is_residual(block, node):
            options = [o for o in options if o.output == self.layout.hidden]
        divides = self.layout.divides if self._is_large(block, node) else None
        if divided := [o for o in options if divides is not None and divides(node, o)]:
            return divided
        if self.layout.attention and rule_of(node).kind == "attention":
            return _preferred(options, self.layout.attention)
        return options

    def _is_large(self, block: Block, node: fx.Node) -> bool:
        """Whether a layout has its way with an op: what a small product (a router's) is worth, the costs say."""
        if rule_of(node).kind != "matmul":
            return True
        if block.name not in self.largest:
            self.largest[block.name] = max(map(_weight_size, block.ops), default=0)
        return _weight_size(node) >= _SMALL_SHARE * self.largest[block.name]

    def _between_blocks(self, facts: NodeInfo) -> list[Placement]:
        """How a value that passes between blocks may lie."""
        if not facts.requires_grad:
            return [REPLICATE, *(self.axis.shards(facts) if self.axis.cuts_integers else [])]
        if self.layout.places(facts.shape):
            assert self.layout.hidden is not None
            return [self.layout.hidden]
        return [REPLICATE, GRAD_PARTIAL, *self.axis.shards(facts), PARTIAL]

    def _is_residual(self, block: Block, node: fx.Node) -> bool:
        """A sum of two activations shaped like the values between layers, not a bias, nor of two products.

        Two products (attention and MLP side by side, routed and shared experts) are added before they are reduced.
        """
        operands = [info(n) for n in node_inputs(node)]
        hidden = {info(n).shape for n in block.placeholders(Role.VALUE) if info(n).requires_grad}
        return (
            node.target is torch.ops.aten.add.Tensor
            and len(operands) == 2
            and all(o.requires_grad and o.role is not Role.PARAMETER for o in operands)
            and all(o.shape in hidden for o in operands)
            and not all(map(self._is_product, node_inputs(node)))
        )

    def _is_product(self, node: fx.Node) -> bool:
        """Whether a value is what a product gives, through views, and sums with biases or other products."""
        if node not in self.products:
            kind = rule_of(node).kind if node.op == "call_function" else ""
            operands = node_inputs(node)
            if node.target is torch.ops.aten.add.Tensor:
                product = all([info(n).role is Role.PARAMETER or self._is_product(n) for n in operands])
            else:
                view = kind == "view" and bool(operands)
                product = self._is_product(operands[0]) if view else kind in ("matmul", "experts")
            self.products[node] = product
        return self.products[node]

    # constraints

    def _read(self, block: Block, node: fx.Node) -> None:
        unit = self._unit(block, node)
        for slot, value in enumerate(node_inputs(node)):
            wanted: dict[Placement, list[int]] = defaultdict(list)
            for k, option in enumerate(self.choices[unit]):
                wanted[option.inputs[slot]].append(self.first[unit] + k)
            self._flow(block, value, wanted)

    def _return(self, block: Block) -> None:
        """What a block returns has the placement that its readers in other blocks share; the loss is whole."""
        call = self.program.call_of(block.name)
        for i, value in enumerate(block.results):
            wanted: dict[Placement, list[int]] = defaultdict(list)
            if not call.outputs:
                one = self._column(0.0)
                self._row({one: 1.0}, 1.0, 1.0)
                wanted[self.axis.loss].append(one)
            else:
                unit = self.groups[call.outputs[i]]
                for k, option in enumerate(self.choices[unit]):
                    wanted[option.output].append(self.first[unit] + k)
            self._flow(block, value, wanted)

    def _flow(self, block: Block, value: fx.Node, wanted: Mapping[Placement, list[int]]) -> None:
        unit = self._unit(block, value)
        given: dict[Placement, list[int]] = defaultdict(list)
        for k, option in enumerate(self.choices[unit]):
            given[option.output].append(self.first[unit] + k)
        leaving: dict[Placement, dict[int, float]] = {p: {} for p in given}
        arriving: dict[Placement, dict[int, float]] = {p: {} for p in wanted}
        for source in given:
            for target in wanted:
                if source != target and not legal_conversion(info(value), source, target, self.axis):
                    continue
                edge = self._column(0.0)
                leaving[source][edge] = arriving[target][edge] = 1.0
                if source != target:
                    self._row({self._conversion(block, value, source, target): 1.0, edge: -1.0}, 0.0, np.inf)
        for placement, edges in leaving.items():
            self._row({**edges, **dict.fromkeys(given[placement], -1.0)}, 0.0, 0.0)
        for placement, edges in arriving.items():
            self._row({**edges, **dict.fromkeys(wanted[placement], -1.0)}, 0.0, 0.0)

    def _conversion(self, block: Block, value: fx.Node, source: Placement, target: Placement) -> int:
        key = (self._unit(block, value), source, target, block.name)
        if key not in self.conversions:
            cost = self.costs.conversion(info(value), source, target)
            self.conversions[key] = self._column(self.program.count(block.name) * cost + 1e-11)
        return self.conversions[key]

    def _column(self, cost: float, integral: bool = False) -> int:
        self.objective.append(cost)
        self.integral.append(int(integral))
        return len(self.objective) - 1

    def _row(self, entries: dict[int, float], low: float, high: float) -> None:
        self.rows.append((entries, low, high))

    def _optimise(self) -> dict[Unit, Strategy]:
        data = [(v, r, c) for r, (entries, _, _) in enumerate(self.rows) for c, v in entries.items()]
        values, rows, columns = map(np.array, zip(*data, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.objective))).tocsr()
        low, high = (np.array([row[i] for row in self.rows]) for i in (1, 2))
        # Seconds are far below HiGHS's absolute tolerances: the objective is scaled to microseconds.
        result = milp(
            1e6 * np.array(self.objective),
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.array(self.integral),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-9},
        )
        if result.x is None:
            raise InfeasibleError(_no_placement(self.program, self.axis, self.layout))
        return {
            unit: options[int(np.argmax(result.x[self.first[unit] : self.first[unit] + len(options)]))]
            for unit, options in self.choices.items()
        }


def _weight_size(node: fx.Node) -> int:
    """Elements of the parameters that a product reads."""
    if rule_of(node).kind not in ("matmul", "experts"):
        return 0
    weights = [info(n).shape for n in node_inputs(node) if info(n).role is Role.PARAMETER]
    return sum(int(sympy.Mul(*shape)) for shape in weights)


def _preferred(options: list[Strategy], placements: tuple[Placement, ...]) -> list[Strategy]:
    """Attention as the layout names it, else by any shard, else whole."""
    named = [o for o in options if o.inputs[: len(placements)] == placements]
    return named or [o for o in options if o.output.is_shard] or options


def _no_placement(program: Program, axis: Axis, layout: Layout) -> str:
    """Which sizes stand in the way: no collective runs along a dim whose shards would differ in size."""
    dims = {int(n) for t in program.parameters.values() for n in t.shape if n.is_Integer and len(t.shape) > 1}
    uneven = ", ".join(str(n) for n in sorted(dims) if n % axis.size) or "none of the parameters'"
    lengths = {
        n for _, node in program.each_op() for n in info(node).shape if layout.sequence and n.free_symbols == {S}
    }
    odd = sorted({(axis.number(n), str(n)) for n in lengths if not axis.even(n)})
    sequence = "".join(f"; nor is the sequence of {n}{f' ({size})' * (size != 's')}" for n, size in odd)
    return f"no legal {layout.name} placement over {axis.size}: widths not divisible by it: {uneven}{sequence}"


def legal_conversion(facts: NodeInfo, source: Placement, target: Placement, axis: Axis) -> bool:
    """Whether a conversion exists and no collective runs along a dim whose shards differ in size."""
    if conversion(source, target) is None:
        return False
    if facts.role is Role.PARAMETER and target.is_shard and not axis.cuts_parameters:
        return False
    if PARTIAL in (source, target) and not is_continuous(facts.dtype):
        return False
    if GRAD_PARTIAL in (source, target) and not facts.requires_grad:
        return False
    if source.is_shard and target.is_shard and source.dim == target.dim:
        return False
    return all(axis.even(facts.shape[p.dim]) for p in (source, target) if p.is_shard)
