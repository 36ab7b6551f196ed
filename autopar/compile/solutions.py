"""The placements that the search chooses from: for each way of cutting sequences over cp, each layout over tp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import sympy

from ..cost_models.describe import describe
from ..cost_models.layer_costs import ModelCosts
from ..errors import InfeasibleError, PlanError, TypeCheckError
from ..ir.graph import B, Program, S, info, node_inputs
from ..passes.cut_sequence import check_length
from ..plan.plan import Plan, Solution
from ..progress import progress
from ..request import Job
from ..rules import TensorAxis, rule_of
from ..rules.arguments import option
from ..rules.attention import context_axis
from ..search.intra_op import solve
from ..search.layouts import CONTEXT_LAYOUTS, FREE, ULYSSES, Layout, replicated
from ..search.op_costs import TimeCosts
from ..search.pins import Pins
from .compiler import cut_sequence, sequence_only, with_heads

_LEAST_SHARDED = 0.5


class Key(NamedTuple):
    """Which placements a plan has: sizes and layouts of both axes."""

    cp: int
    context: str
    tp: int
    layout: str

    @staticmethod
    def of(plan: Plan) -> Key:
        return Key(plan.mesh.cp, plan.context.name, plan.mesh.tp, plan.solution.name)


@dataclass(frozen=True)
class Placements:
    """Solutions on cp and on tp, and the program of one rank of cp, on which the second was found."""

    context: Solution
    solution: Solution
    program: Program


Solutions = Mapping[Key, Placements]


def with_placements(plan: Plan, solutions: Solutions) -> Plan:
    """A plan of the search, which has names of placements, with these."""
    found = solutions[Key.of(plan)]
    return plan.changed(context=found.context, solution=found.solution)


def solve_layouts(
    program: Program, job: Job, cps: Sequence[int], tps: Sequence[int], layouts: Sequence[Layout], pins: Pins
) -> tuple[dict[Key, Placements], dict[str, str]]:
    """The solutions of the intra-op search for each pair of sizes, equal ones once; and why some sizes have none."""
    contexts = [layout for layout in CONTEXT_LAYOUTS if pins.allows("attention", layout.name)]
    solver = _Solver(program, job, tuple(layouts))
    cases = [(cp, tp, over_cp) for cp in cps for tp in tps for over_cp in (contexts if cp > 1 else (None,))]
    with progress("solving the placements", len(cases)) as so_far:
        for cp, tp, over_cp in so_far.over(cases):
            so_far.part = f"tp={tp}" + (f", cp={cp} {over_cp.name}" if over_cp else "")
            solver.solve(cp, tp, over_cp)
    sizes = {f"cp={key.cp}" for key in solver.found} | {f"tp={key.tp}" for key in solver.found}
    return solver.found, {size: reason for size, reason in solver.unsolved.items() if size not in sizes}


@dataclass
class _Solver:
    """Solves each layout once a size of tp, and keeps its placements for larger sizes of cp: sequences scale alike."""

    program: Program
    job: Job
    layouts: tuple[Layout, ...]
    found: dict[Key, Placements] = field(default_factory=dict)
    unsolved: dict[str, str] = field(default_factory=dict)
    _solved: dict[tuple[object, ...], Solution] = field(default_factory=dict)

    def solve(self, cp: int, tp: int, context: Layout | None) -> None:
        """Add the solutions of one pair of sizes, with one layout on cp."""
        over_cp, local = Solution(1, {}), self.program
        try:
            if context is not None:
                over_cp, local = self._context(cp, tp, context)
        except (InfeasibleError, PlanError) as error:
            self.unsolved[f"cp={cp}"] = str(error)
            return
        others = [p for key, p in self.found.items() if (key.cp, key.tp) == (cp, tp) and key.context != over_cp.name]
        if any(over_cp.strategies == other.context.strategies for other in others):
            return
        for name, solution in self._over_tp(cp, tp, over_cp.name, local):
            self.found[Key(cp, over_cp.name, tp, name)] = Placements(over_cp, solution, local)

    def _context(self, cp: int, tp: int, layout: Layout) -> tuple[Solution, Program]:
        """One way of cutting sequences over cp, with the program that it leaves to a rank."""
        values = {B: 1, S: self.job.batch.sequence}
        if layout is not ULYSSES and _drops(self.program):
            raise InfeasibleError("attention dropout: its ranks would draw other masks than one device; set it to 0")
        plan = sequence_only(self.program, cp, tp, self.job.batch, layout.name)
        prepared = with_heads(self.program, plan)
        costs = TimeCosts(self.job.cluster.hardware, self.job.compute.precision, cp, values, axis="cp")
        axis = context_axis(self.program, cp, values, layout.name, tp)
        check_length(self.job.batch, cp, axis.parts > cp)
        key = (layout.name, tuple(axis.offers([heads]) for heads in _heads(prepared)), _names(prepared))
        if key not in self._solved:
            self._solved[key] = solve(prepared, axis, costs, layout)
        try:
            return self._cut(plan, self._solved[key])
        except TypeCheckError:  # of a smaller size, where more dims divide
            self._solved[key] = solve(prepared, axis, costs, layout)
            return self._cut(plan, self._solved[key])

    def _cut(self, plan: Plan, found: Solution) -> tuple[Solution, Program]:
        solution = replace(found, ranks=plan.mesh.cp)
        return solution, cut_sequence(self.program, plan.changed(context=solution))

    def _over_tp(self, cp: int, tp: int, context: str, program: Program) -> list[tuple[str, Solution]]:
        """The solutions on tp, by the names of their layouts."""
        if tp == 1:
            return [("", replicated(program))]
        values = {B: 1, S: self.job.batch.sequence // cp}
        costs = TimeCosts(self.job.cluster.hardware, self.job.compute.precision, tp, values)
        made: list[tuple[str, Solution]] = []
        for layout in self.layouts if cp == 1 else [layout for layout in self.layouts if layout is not FREE]:
            key = (layout.name, tp, context, (self.job.batch.sequence // cp) % tp, _names(program))
            try:
                if key not in self._solved:
                    axis = TensorAxis(tp, values, layout.sequence)
                    self._solved[key] = solve(program, axis, costs, layout)
            except InfeasibleError as error:
                self.unsolved[f"tp={tp}"] = str(error)
                continue
            if all(self._solved[key].strategies != other.strategies for _, other in made):
                made.append((layout.name, self._solved[key]))
        return made


def _drops(program: Program) -> bool:
    """Whether an attention has dropout."""
    return any(rule_of(n).kind == "attention" and option(n, "dropout_p") for _, n in program.each_op())


def _heads(program: Program) -> list[sympy.Expr]:
    """Of q, k and v of each attention: what Ulysses shares out, where the sizes allow it."""
    nodes = [node for _, node in program.each_op() if rule_of(node).kind == "attention"]
    return [info(operand).shape[1] for node in nodes for operand in node_inputs(node)[:3]]


def _names(program: Program) -> tuple[str, ...]:
    return tuple(f"{block.name}.{node.name}" for block, node in program.each_op())


def models_of(job: Job, program: Program, solutions: Solutions, pins: Pins) -> list[ModelCosts]:
    """The costs of each solution; without those that divide so little that they are fewer ranks, and idle ones."""
    whole = describe(program, replicated(program), {B: 1, S: job.batch.sequence}).unsharded_flops
    models: list[ModelCosts] = []
    for key, placements in solutions.items():
        costs = describe(
            placements.program, placements.solution, {B: 1, S: job.batch.sequence // key.cp}, job.compute.compile
        )
        flops = whole.subs(S, key.cp * S)
        models.append(replace(costs, cp=key.cp, context=key.context, unsharded_flops=flops))
    divided = [m for m in models if m.tp == 1 or m.sharded_fraction >= _LEAST_SHARDED]
    return divided if pins.tp is None or any(m.tp == pins.tp for m in divided) else models
