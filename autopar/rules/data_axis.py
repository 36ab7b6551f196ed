"""Typing on the data axes (micro-batches, dp): what adds up over parts of a batch, and what it needs to.

Parameters enter as Replicate, grad Partial, the batch as a shard of its dim, the loss leaves as Partial. A value with
the batch among its dims must stay sharded there; one without it, already reduced, may be converted. A program that
needs no conversion may be cut into any micro-batches and replicas, also where a value that is the same on all parts
becomes a summand (a weight penalty): each micro-batch takes its share. One that needs other conversions, all of
reduced values, into replicas only, for micro-batches do not communicate; one coupled otherwise not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from ..errors import TypeCheckError
from ..ir.graph import B, Block, Call, Program, Role, info, node_inputs, op_name
from ..ir.ops import COLLECTIVES, convert, is_collective
from ..placement import CONVERSIONS, GRAD_PARTIAL, PARTIAL, REPLICATE, Kind, Placement, Shard, Strategy, conversion
from . import Axis, Rule, has_rule, rule_of, strategies
from .arguments import option
from .coupling import Coupling
from .random import draws
from .rows import Rows, rows_of_cat, rows_of_reshape
from .where import error, kept_whole, where

aten = torch.ops.aten

AXIS = Axis("dp", 2, sequence=False, batch=True, model=False)


@dataclass(frozen=True)
class DataTypes:
    """The strategy of each node on dp, and the placement that each result of a block leaves with."""

    strategies: Mapping[fx.Node, Strategy]
    results: Mapping[str, tuple[Placement, ...]]
    coupling: Coupling | None


def data_types(program: Program) -> DataTypes:
    """Type a program on dp, with the fewest conversions of reduced values; `coupling` says what that forbids."""
    try:
        return _Typing(program).run()
    except TypeCheckError as found:
        return DataTypes({}, {}, Coupling(found.short, str(found), replicas=False))


def check_data_axis(program: Program) -> None:
    """TypeCheckError for a program with dp > 1 in which a conversion over dp is missing or wrong."""
    _Typing(program, converted=True).run()


@dataclass(frozen=True)
class _Typed:
    """A placement; of a shard also which rows it has."""

    placement: Placement
    rows: Rows = Rows()


@dataclass
class _Typing:
    """One typing of a program. converted: the conversions are there already, and no other is allowed."""

    program: Program
    converted: bool = False
    entries: dict[tuple[str, str], _Typed] = field(default_factory=dict)
    outputs: dict[str, tuple[_Typed, ...]] = field(default_factory=dict)
    chosen: dict[fx.Node, Strategy] = field(default_factory=dict)
    first_conversion: tuple[Block, fx.Node] | None = None

    def run(self) -> DataTypes:
        """Type every block; where calls of a block disagree on a value that passes between them, again with both."""
        while self._pass_values():
            self.first_conversion = None
        results = {name: tuple(t.placement for t in typed) for name, typed in self.outputs.items()}
        return DataTypes(self.chosen, results, self._coupling())

    def _pass_values(self) -> bool:
        """One round over the calls; whether an entry changed."""
        values: dict[str, _Typed] = {}
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

    def _leave_as_read(self, values: dict[str, _Typed]) -> None:
        """A result leaves in the placement in which its readers take it."""
        for call in self.program.calls:
            for place, name in enumerate(call.inputs):
                values[name] = self._join(call, values[name], self.entries[call.block, str(place)])
        for call in self.program.calls:
            if call.outputs:
                left = zip(self.outputs[call.block], call.outputs, strict=True)
                self.outputs[call.block] = tuple(self._join(call, old, values[name]) for old, name in left)

    def _join(self, call: Call, one: _Typed | None, other: _Typed) -> _Typed:
        if one is None or one == other:
            return other
        order = (REPLICATE, GRAD_PARTIAL, PARTIAL)
        if self.converted or one.placement not in order or other.placement not in order:
            block = self.program.blocks[call.block]
            problem = f"is given values that lie differently over dp ({one.placement}, {other.placement})"
            raise error(block, block.nodes[0], problem)
        return max(one, other, key=lambda typed: order.index(typed.placement))

    def _block(self, block: Block, call: Call) -> None:
        typed: dict[fx.Node, _Typed] = {}
        for node in block.nodes:
            if node.op == "placeholder":
                typed[node] = self._placeholder(block, node)
                self.chosen[node] = Strategy((), typed[node].placement)
            else:
                typed[node] = self._op(block, node, [typed[n] for n in node_inputs(node)])
        leaving = self.outputs.get(block.name) or tuple(typed[n] for n in block.results)
        if not call.outputs:
            leaving = (_Typed(PARTIAL),)
        for node, wanted in zip(block.results, leaving, strict=True):
            given = typed[node].placement
            if given != wanted.placement:
                if _couples(given, wanted.placement):
                    self._note(block, node)
                if given.is_shard or self.converted:
                    raise error(block, node, f"leaves as {given} over dp, not as {wanted.placement}")
        self.outputs[block.name] = leaving

    def _placeholder(self, block: Block, node: fx.Node) -> _Typed:
        facts = info(node)
        if facts.role is Role.VALUE:
            return self.entries[block.name, facts.ref]
        if facts.role is Role.INPUT:
            return _Typed(Shard(0) if facts.shape and facts.shape[0] == B else REPLICATE)
        return _Typed(GRAD_PARTIAL if facts.role is Role.PARAMETER and facts.requires_grad else REPLICATE)

    def _op(self, block: Block, node: fx.Node, given: list[_Typed]) -> _Typed:
        if node.target is convert or is_collective(node.target):
            return self._conversion(block, node, given[0])
        if draws(node.target) and not _has_batch(node):
            raise error(block, node, "draws random numbers for the batch as a whole, others on each part of a batch")
        if _reads_batch_size(node):
            raise error(block, node, "reads the size of the batch, which is another one on each part of a batch")
        placements = [t.placement for t in given]
        moved = _moved_rows(node, given)
        options: list[tuple[Strategy, Rows | None]] = [moved] if moved else self._options(node)
        if is_batch_statistic(node):
            options = [(_synchronised(node), None)]
            self._note(block, node)
        costs = [(self._cost(node, placements, strategy), i) for i, (strategy, _) in enumerate(options)]
        priced = [(cost, i) for cost, i in costs if cost is not None]
        if not priced or not moved and not _same_rows(given):
            short = "" if has_rule(node) else f"{op_name(node)} has no sharding rule,"
            raise error(block, node, _problem(node, placements) + kept_whole(self.program, node), short)
        strategy, rows = options[min(priced)[1]]
        if any(_couples(source, wanted) for source, wanted in zip(placements, strategy.inputs, strict=True)):
            self._note(block, node)
        self.chosen[node] = strategy
        return _Typed(strategy.output, rows or (_common(given) if strategy.output.is_shard else Rows()))

    def _options(self, node: fx.Node) -> list[tuple[Strategy, Rows | None]]:
        """Strategies whose result keeps the batch sharded, where it has one; those with a shard first."""
        whole = [Strategy((REPLICATE,) * len(node_inputs(node)), REPLICATE)]
        # Of what has no batch any op gives gradients back that can be summed up.
        known = has_rule(node) or not any(map(_has_batch, node_inputs(node)))
        options = strategies(node, rule_of(node), AXIS) if known else whole
        sharded = sorted(options, key=lambda s: s.output.is_shard, reverse=True)
        batched = _has_batch(node)
        return [(s, None) for s in sharded if s.output.is_shard == batched]

    def _cost(self, node: fx.Node, given: list[Placement], strategy: Strategy) -> float | None:
        """Collectives, forward and backward, that the operands need; None where one may not be converted."""
        cost = 0.0
        for operand, source, wanted in zip(node_inputs(node), given, strategy.inputs, strict=True):
            if source == wanted:
                continue
            found = conversion(source, wanted)
            if found is None or self.converted or source.is_shard or wanted.is_shard:
                return None
            backward = found.backward is not None and info(operand).requires_grad
            cost += 0.1 + (found.forward is not None) + backward
        return cost

    def _conversion(self, block: Block, node: fx.Node, given: _Typed) -> _Typed:
        """One over dp is what it says; one over tp is linear, and the same on each part of a batch."""
        source, target, axis = ends(node)
        if axis != AXIS.name:
            self.chosen[node] = Strategy((given.placement,), given.placement)
            return given
        if given.placement.kind is not source or given.placement.is_shard:
            raise error(block, node, f"converts {source.value} to {target.value} over dp but reads {given.placement}")
        self.chosen[node] = Strategy((given.placement,), Placement(target))
        return _Typed(Placement(target))

    def _note(self, block: Block, node: fx.Node) -> None:
        self.first_conversion = self.first_conversion or (block, node)

    def _coupling(self) -> Coupling | None:
        if self.first_conversion is None:
            return None
        block, node = self.first_conversion
        problem = "needs numbers of the whole batch, which micro-batches do not exchange"
        coupled = "batch norm" if is_batch_statistic(node) else "loss"
        short = f"{coupled} couples samples at {where(node)}"
        return Coupling(short, str(error(block, node, problem)), replicas=True)


def _couples(source: Placement, wanted: Placement) -> bool:
    """Whether a conversion needs what other parts of the batch have; a share of what all parts have does not."""
    return source != wanted and not becomes_share(source, wanted)


def becomes_share(source: Placement, wanted: Placement) -> bool:
    """Whether a conversion is of a value that is the same on all parts of a batch, to a summand."""
    return source in (REPLICATE, GRAD_PARTIAL) and wanted == PARTIAL


def is_batch_statistic(node: fx.Node) -> bool:
    """A batch norm that takes mean and variance from its samples: the emitted one does so over all replicas."""
    return node.target is aten.batch_norm.default and bool(option(node, "training"))


def _synchronised(node: fx.Node) -> Strategy:
    x, *others = node_inputs(node)
    shared = (GRAD_PARTIAL if info(n).requires_grad else REPLICATE for n in others)
    return Strategy((Shard(0), *shared), Shard(0))


def ends(node: fx.Node) -> tuple[Kind, Kind, str]:
    """(kind before, kind after, axis) of a conversion, lowered or not."""
    if node.target is convert:
        source, target, axis = (str(a) for a in node.args[1:4])
        return Placement.parse(source).kind, Placement.parse(target).kind, axis
    kinds = next(k for k, c in CONVERSIONS.items() if COLLECTIVES[c.function] is node.target)
    return *kinds, str(node.kwargs["axis"])


def _has_batch(node: fx.Node) -> bool:
    return any(B in size.free_symbols for size in info(node).shape)


def _moved_rows(node: fx.Node, given: list[_Typed]) -> tuple[Strategy, Rows] | None:
    """Views and concatenations after which a rank's samples are several runs of rows, and back."""
    if node.target is aten.cat.default:
        return rows_of_cat(node, [(t.placement, t.rows) for t in given])
    if node.target is aten.reshape.default:
        return rows_of_reshape(node, given[0].placement, given[0].rows)
    return None


def _same_rows(given: list[_Typed]) -> bool:
    return len({t.rows for t in given if t.placement.is_shard}) <= 1


def _common(given: list[_Typed]) -> Rows:
    return next((t.rows for t in given if t.placement.is_shard), Rows())


def _problem(node: fx.Node, given: list[Placement]) -> str:
    if not has_rule(node):
        return f"has no sharding rule ({node.target}), so it cannot be run on parts of a batch"
    shown = ", ".join(map(str, given))
    return (
        f"couples samples of a batch ({node.target}, operands on the data axis: {shown}): data parallelism and "
        "micro-batches would change what it computes; make it per sample, or train with dp=1 and "
        "micro_batch=global_batch"
    )


def _reads_batch_size(node: fx.Node) -> bool:
    """Whether the size of the batch is an operand, not a size of the result."""
    rule: Rule | None = rule_of(node) if has_rule(node) else None
    arguments = [*node.args, *node.kwargs.values()]
    if rule is not None and rule.kind == "view":
        arguments = [option(node, "fill_value"), option(node, "s")]  # of scalar_tensor; others' numbers are sizes
    sizes = [a for a in arguments if isinstance(a, sympy.Expr)]
    return any(B in size.free_symbols for size in sizes)
