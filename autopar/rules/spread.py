"""How a program lies on the data axis, found by propagation from its inputs, and what that leaves of plans.

Each op takes, of its strategies, the one that needs the fewest collectives. A program that needs no conversion may be
cut into any micro-batches and replicas, also where a value that is the same on all parts becomes a summand (a weight
penalty): each takes its share. One that needs other conversions, as of a mean over the batch that is used in it, or of
features that each sample is compared with, may be cut into replicas only, for micro-batches do not communicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
from torch import fx

from ..errors import PlanError, TypeCheckError
from ..ir.custom import OPAQUE
from ..ir.graph import B, Block, Call, Program, Role, info, node_inputs, op_name
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Strategy, conversion
from ..plan.plan import Plan
from . import DataAxis, has_rule, rule_of, strategies
from .arguments import option
from .data_axis import becomes_share, has_batch, is_batch_statistic
from .random import draws
from .where import error, kept_whole, where

AXIS = DataAxis()
_ORDER = (REPLICATE, GRAD_PARTIAL, PARTIAL)  # a value that is read in two of these is given in the later one
_GATHER = 100.0  # more than any collectives of reduced values: samples are gathered where nothing else will do


@dataclass(frozen=True)
class Coupling:
    """Why a model's samples cannot be spread freely: at which op (short), with the graph around it (detail).

    replicas: whether dp may nevertheless be more than one.
    """

    short: str
    detail: str
    replicas: bool

    def __str__(self) -> str:
        return f"{self.short}: one micro-batch{'' if self.replicas else ', dp=1'}"

    def check(self, plan: Plan) -> None:
        """PlanError for a plan that it forbids."""
        if plan.accumulation > 1 or plan.mesh.dp > 1 and not self.replicas:
            way = "micro_batch=global_batch/dp" if self.replicas else "dp=1, micro_batch=global_batch"
            raise PlanError(
                f"dp={plan.mesh.dp} with {plan.accumulation} micro-batches would not compute the model: {self.detail}\n"
                f"  use {way} (pp and tp are free)"
            )


@dataclass(frozen=True)
class DataTypes:
    """The strategy of each node on dp, and the placement that each result of a block leaves with.

    coupling: what samples have to do with each other, and so what is forbidden; where even replicas are, there are no
    strategies.
    """

    strategies: Mapping[fx.Node, Strategy]
    results: Mapping[str, tuple[Placement, ...]]
    coupling: Coupling | None


def data_types(program: Program) -> DataTypes:
    """Type a program on dp."""
    try:
        return _Typing(program).run()
    except TypeCheckError as problem:
        return DataTypes({}, {}, Coupling(problem.short, str(problem), replicas=False))


def has_whole_batch(program: Program) -> bool:
    """Whether a value of a program that is typed on dp has the samples of all replicas, or an op reads their number."""
    return any(
        reads_batch_size(node) or has_batch(node) and not placement.is_shard
        for _, node in program.each_op()
        if (placement := info(node).placement_on(AXIS.name)) is not None
    )


@dataclass
class _Typing:
    """One typing of a program."""

    program: Program
    entries: dict[tuple[str, str], Placement] = field(default_factory=dict)
    outputs: dict[str, tuple[Placement, ...]] = field(default_factory=dict)
    chosen: dict[fx.Node, Strategy] = field(default_factory=dict)
    first_coupling: tuple[Block, fx.Node] | None = None

    def run(self) -> DataTypes:
        """Type every block; where calls of a block disagree on a value that passes between them, again with both."""
        while self._pass_values():
            self.first_coupling = None
        return DataTypes(self.chosen, self.outputs, self._coupling())

    def _pass_values(self) -> bool:
        """One round over the calls; whether an entry changed."""
        values: dict[str, Placement] = {}
        done: set[str] = set()
        before = dict(self.entries), dict(self.outputs)
        for call in self.program.calls:
            for place, name in enumerate(call.inputs):
                key = call.block, str(place)
                self.entries[key] = self._join(call, self.entries.get(key), values[name])
            if call.block not in done:
                self._block(self.program.blocks[call.block], call)
                done.add(call.block)
            values.update(zip(call.outputs, self.outputs[call.block], strict=False))
        self._leave_as_read(values)
        return (self.entries, self.outputs) != before

    def _leave_as_read(self, values: dict[str, Placement]) -> None:
        """A result leaves in the placement in which its readers take it."""
        for call in self.program.calls:
            for place, name in enumerate(call.inputs):
                values[name] = self._join(call, values[name], self.entries[call.block, str(place)])
        for call in self.program.calls:
            if call.outputs:
                leaving = zip(self.outputs[call.block], call.outputs, strict=True)
                self.outputs[call.block] = tuple(self._join(call, old, values[name]) for old, name in leaving)

    def _join(self, call: Call, one: Placement | None, other: Placement) -> Placement:
        if one is None or one == other:
            return other
        if one not in _ORDER or other not in _ORDER:
            block = self.program.blocks[call.block]
            raise error(block, block.nodes[0], f"is given values that lie differently over dp ({one}, {other})")
        return max(one, other, key=_ORDER.index)

    def _block(self, block: Block, call: Call) -> None:
        for node in block.nodes:
            if node.op == "placeholder":
                self.chosen[node] = Strategy((), self._placeholder(block, node))
            else:
                self.chosen[node] = self._op(block, node)
        leaving = self.outputs.get(block.name) or tuple(self.chosen[n].output for n in block.results)
        if not call.outputs:
            leaving = (AXIS.loss,)
        for node, wanted in zip(block.results, leaving, strict=True):
            source = self.chosen[node].output
            if source != wanted and _price(node, source, wanted) is None:
                raise error(block, node, f"leaves as {source} over dp, not as {wanted}")
            if _couples(source, wanted):
                self._note(block, node)
        self.outputs[block.name] = leaving

    def _placeholder(self, block: Block, node: fx.Node) -> Placement:
        facts = info(node)
        if facts.role is Role.VALUE:
            return self.entries[block.name, facts.ref]
        return AXIS.stored(facts)[0] if facts.role is Role.PARAMETER else AXIS.given(facts)

    def _op(self, block: Block, node: fx.Node) -> Strategy:
        """The strategy of an op that needs the fewest collectives; those whose result keeps its shard come first."""
        reading = tuple(self.chosen[n].output for n in node_inputs(node))
        # Of what has no batch any op gives gradients back that can be summed up.
        proven = has_rule(node) or not any(map(has_batch, node_inputs(node)))
        options = sorted(strategies(node, rule_of(node), AXIS, reading), key=lambda s: not s.output.is_shard)
        priced = [(_prices(node, reading, option), i) for i, option in enumerate(options) if proven]
        priced = [(price, i) for price, i in priced if price is not None]
        if not priced:
            short = "" if has_rule(node) else f"{op_name(node)} has no sharding rule,"
            raise error(block, node, _problem(node, reading) + kept_whole(self.program, node), short)
        strategy = options[min(priced)[1]]
        gives_whole = has_batch(node) and not strategy.output.is_shard
        couples = any(_couples(source, wanted) for source, wanted in zip(reading, strategy.inputs, strict=True))
        if couples or gives_whole or reads_batch_size(node) or is_batch_statistic(node):
            self._note(block, node)
        return strategy

    def _note(self, block: Block, node: fx.Node) -> None:
        self.first_coupling = self.first_coupling or (block, node)

    def _coupling(self) -> Coupling | None:
        if self.first_coupling is None:
            return None
        block, node = self.first_coupling
        problem = "needs numbers of the whole batch, which micro-batches do not exchange"
        coupled = "batch norm" if is_batch_statistic(node) else "loss"
        short = f"{coupled} couples samples at {where(node)}"
        return Coupling(short, str(error(block, node, problem)), replicas=True)


def _prices(node: fx.Node, reading: tuple[Placement, ...], strategy: Strategy) -> float | None:
    """The collectives that the operands need for a strategy; None where one has no conversion."""
    operands = list(zip(node_inputs(node), reading, strategy.inputs, strict=True))
    if node.target is OPAQUE and any(info(n).role is Role.PARAMETER and now != wanted for n, now, wanted in operands):
        return None  # a module that is kept whole reads its parameters itself
    prices = [_price(*operand) for operand in operands]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def _price(value: fx.Node, source: Placement, wanted: Placement) -> float | None:
    """The collectives of a conversion over dp, forward and backward; None where there is none."""
    if source == wanted:
        return 0.0
    found = conversion(source, wanted)
    if found is None:
        return None
    backward = found.backward is not None and info(value).requires_grad
    return 0.1 + (found.forward is not None) + backward + _GATHER * source.is_shard


def _couples(source: Placement, wanted: Placement) -> bool:
    """Whether a conversion needs what other parts of the batch have; a share of what all parts have does not."""
    return source != wanted and not becomes_share(source, wanted)


def _problem(node: fx.Node, reading: tuple[Placement, ...]) -> str:
    if draws(node.target):
        return "draws random numbers for the batch as a whole, others on each part of a batch"
    if not has_rule(node):
        return f"has no sharding rule ({node.target}), so it cannot be run on parts of a batch"
    shown = ", ".join(map(str, reading))
    return (
        f"couples samples of a batch ({node.target}, operands on the data axis: {shown}): data parallelism and "
        "micro-batches would change what it computes; make it per sample, or train with dp=1 and "
        "micro_batch=global_batch"
    )


def reads_batch_size(node: fx.Node) -> bool:
    """Whether the size of the batch is an operand of an op, not a size of its result."""
    arguments = [*node.args, *node.kwargs.values()]
    if has_rule(node) and rule_of(node).kind == "view":
        arguments = [option(node, "fill_value"), option(node, "s")]  # of scalar_tensor; others' numbers are sizes
    sizes = [a for a in arguments if isinstance(a, sympy.Expr)]
    return any(B in size.free_symbols for size in sizes)
