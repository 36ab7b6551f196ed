"""Sharding rules in factor notation, and the strategies that follow from a rule.

A rule names the dims of each operand and of the result by factors: `x[*b i] w[o i] -> y[*b o]`.
Sharding a factor shards every tensor that has it (DESIGN §4):

- a factor of the result: operands that lack it are used for different work on each rank, so their
  gradient is Partial;
- a contracted factor: the result is Partial;
- an op that is linear in some operands also takes these as Partial and gives a Partial result; the other
  operands' gradients are then Partial, since each rank multiplies them with another summand;
- every op takes all operands with Partial gradients and gives the same (backward is linear in it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from ..ir.build import is_continuous
from ..ir.graph import B, NodeInfo, S, Shape, info, node_inputs
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Shard, Strategy

Dims = tuple[str | None, ...]  # the factor of each dim; None: a dim that no factor shards


@dataclass(frozen=True)
class Rule:
    """How one node may be sharded, and what it costs.

    whole: factors that a kernel needs whole (softmax and norm dims). linear: each set of operand positions
    in which the op is jointly linear. even: factors whose shards must be of one size, for it is an argument.
    special: strategies on tp beyond the factors, such as vocabulary-parallel cross-entropy; tp_only: factors that only
    a function of the runtime can shard, which knows of tp alone. multiple_of: if given, they
    are for axes whose size is a multiple of it, and want equal shards.
    kind: "matmul", "attention", "experts", "memory" (bandwidth-bound) or "view" (free).
    units: factors that come in units (channels in groups), whose number must be divisible too.
    only: if given, the strategies on every axis but the context axis. exact: gradients too are whole, for the op is
    not written so that they could be summands.
    context: strategies beyond the factors for the context axis, such as ring attention. rows: the dims of inputs and
    output there, where rows b·s are sharded by their sequence; those of the other axes where it is None.
    saves: positions of operands that a GPU kernel keeps for backward, and -1 for its result.
    """

    inputs: tuple[Dims, ...]
    output: Dims
    whole: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    special: tuple[Strategy, ...] = ()
    tp_only: frozenset[str] = frozenset()
    multiple_of: int = 0
    kind: str = "memory"
    saves: tuple[int, ...] = ()
    only: tuple[Strategy, ...] = ()
    exact: bool = False
    context: tuple[Strategy, ...] = ()
    rows: tuple[tuple[Dims, ...], Dims] | None = None
    units: Mapping[str, sympy.Expr] = field(default_factory=dict)

    @property
    def factors(self) -> list[str]:
        """Every factor once, in the order of first appearance."""
        seen = [f for dims in (*self.inputs, self.output) for f in dims if f is not None]
        return list(dict.fromkeys(seen))


@dataclass(frozen=True)
class Axis:
    """What a mesh axis offers: its size, and which dims may be sharded on it.

    On tp the batch is never offered and the sequence only with sequence parallelism; on a data axis
    only the batch is. `values` gives the numbers of `b` and `s` for divisibility.
    context: the axis cp. It shards the sequence, also of merged rows b·s, by which no collective runs; parameters
    are whole on it, and read for different work on each rank; the loss leaves as a summand of each. inner: the ranks
    of tp, over which a shard of heads is dealt out again. parts: how many a sequence is cut into, if not one a rank.
    """

    name: str
    size: int
    sequence: bool = False
    batch: bool = False
    model: bool = True
    context: bool = False
    inner: int = 1
    parts: int = 0
    values: dict[sympy.Symbol, int] = field(default_factory=dict)

    def number(self, size: sympy.Expr) -> int:
        """A size at the values of `b` and `s`."""
        return int(size if size.is_Integer else size.subs(self.values))

    def offers(self, sizes: Iterable[sympy.Expr], uneven: bool = True) -> bool:
        """Whether a factor with dims of these sizes may be sharded here, evenly or (`uneven`) by the chunk rule."""
        sizes = list(sizes)
        symbols = set().union(*(size.free_symbols for size in sizes))
        if B in symbols and self.context:
            return all(S in size.free_symbols for size in sizes)
        if B in symbols:
            return self.batch
        if not (self.sequence if S in symbols else self.model):
            return False
        numbers = {self.number(size) for size in sizes}
        if self.context and S in symbols and not all(S in size.free_symbols for size in sizes):
            return False
        shares = self.parts or self.size if S in symbols else self.size * self.inner
        if all(n % shares == 0 for n in numbers):
            return True
        return uneven and not self.context and len(numbers) == 1 and S not in symbols and self._none_empty(min(numbers))

    def _none_empty(self, number: int) -> bool:
        """Whether the chunk rule leaves something to every rank: 4 in chunks of ceil(4/3) are 2, 2 and 0."""
        return -(-number // self.size) * (self.size - 1) < number

    def even(self, size: sympy.Expr) -> bool:
        """Whether shards of a dim of this size are equal, so that collectives may run along it."""
        if B in size.free_symbols:
            return not self.context
        return self.number(size) % (self.parts or self.size if S in size.free_symbols else self.size) == 0

    @property
    def loss(self) -> Placement:
        """How the loss leaves: whole, or a summand of each rank's part of the sequence."""
        return PARTIAL if self.context else REPLICATE


def strategies(node: fx.Node, rule: Rule, axis: Axis) -> list[Strategy]:
    """Every legal strategy of a node on an axis, replicated first."""
    operands = [info(n) for n in node_inputs(node)]
    result = info(node)
    if axis.context and rule.rows is not None:
        rule = replace(rule, inputs=rule.rows[0], output=rule.rows[1])
    if rule.only:
        return [o for o in rule.only if axis.offers([n.shape[o.output.dim] for n in (*operands, result)], uneven=False)]
    found = dict.fromkeys(_candidates(operands, result, rule, axis))
    return [s for s in found if _sensible(s, operands, result)]


def _candidates(operands: list[NodeInfo], result: NodeInfo, rule: Rule, axis: Axis) -> Iterator[Strategy]:
    yield Strategy(tuple(REPLICATE for _ in operands), REPLICATE)
    if not rule.exact:  # a result without a gradient, as of detach, gives none back that could be counted twice
        yield Strategy(tuple(_shared(o) for o in operands), GRAD_PARTIAL if result.requires_grad else REPLICATE)
    for factor in rule.factors:
        sizes = _sizes(factor, operands, result, rule)
        if axis.context and factor in rule.tp_only:
            continue
        if factor not in rule.whole and axis.offers(sizes, uneven=factor not in rule.even):
            yield _sharded(factor, operands, rule)
    for linear in rule.linear:
        partial = tuple(PARTIAL if i in linear else _shared(o) for i, o in enumerate(operands))
        yield Strategy(partial, PARTIAL)
    for special in rule.context if axis.context else rule.special:
        shards = [(p, o) for p, o in zip(special.inputs, operands, strict=True) if p.is_shard]
        if rule.multiple_of and axis.size % rule.multiple_of:
            continue
        if all(axis.offers([o.shape[p.dim]], uneven=not rule.multiple_of) for p, o in shards):
            yield special


def _shared(operand: NodeInfo) -> Placement:
    """A whole operand that each rank uses for different work."""
    return GRAD_PARTIAL if operand.requires_grad else REPLICATE


def _sharded(factor: str, operands: list[NodeInfo], rule: Rule) -> Strategy:
    inputs = tuple(
        Shard(dims.index(factor)) if factor in dims else _shared(o)
        for o, dims in zip(operands, rule.inputs, strict=True)
    )
    return Strategy(inputs, Shard(rule.output.index(factor)) if factor in rule.output else PARTIAL)


def _sizes(factor: str, operands: list[NodeInfo], result: NodeInfo, rule: Rule) -> list[sympy.Expr]:
    tensors = [*zip(operands, rule.inputs, strict=True), (result, rule.output)]
    sizes = [facts.shape[i] for facts, dims in tensors for i, f in enumerate(dims) if f == factor]
    return sizes + ([rule.units[factor]] if factor in rule.units else [])


def _sensible(strategy: Strategy, operands: list[NodeInfo], result: NodeInfo) -> bool:
    """Without a gradient the two whole placements are one; a Partial needs numbers that can be summed."""
    pairs = [*zip(strategy.inputs, operands, strict=True), (strategy.output, result)]
    for placement, facts in pairs:
        if placement == GRAD_PARTIAL and not facts.requires_grad:
            return False
        if placement == PARTIAL and not is_continuous(facts.dtype):
            return False
    return True


def aligned(shape: Shape, result: Shape) -> Dims:
    """Broadcasting: dims are matched from the right; one of size 1 is no part of a factor."""
    offset = len(result) - len(shape)
    return tuple(None if n == 1 or n != result[offset + i] else f"d{offset + i}" for i, n in enumerate(shape))


RuleMaker = Callable[[fx.Node], Rule]

_TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")


def einsum(
    spec: str, *, whole: str = "", linear: tuple[str, ...] = (), kind: str = "memory", saves: str = ""
) -> RuleMaker:
    """A rule from a line such as "x[*b i] w[o i] -> y[*b o]".

    `*b` stands for the leading dims that the other factors of the tensor leave over. Operands that the node
    lacks (an absent bias) are dropped from the end. `linear` lists operand names that are linear together
    ("x y"); `saves` names what backward keeps; `whole` lists factors.
    """
    left, right = spec.split("->")
    tensors = _TENSOR.findall(left)
    names = [name for name, _ in tensors]
    ((result, output),) = _TENSOR.findall(right)

    def make(node: fx.Node) -> Rule:
        operands = node_inputs(node)
        inputs = tuple(
            _expand(dims.split(), len(info(o).shape)) for o, (_, dims) in zip(operands, tensors, strict=False)
        )
        return Rule(
            inputs,
            _expand(output.split(), len(info(node).shape)),
            whole=frozenset(whole.split()),
            linear=tuple(frozenset(names.index(n) for n in group.split()) for group in linear),
            kind=kind,
            saves=tuple(-1 if n == result else names.index(n) for n in saves.split()),
        )

    return make


def _expand(dims: list[str], rank: int) -> Dims:
    """Write `*b` out as b0, b1, …: as many as the rank leaves."""
    extra = rank - sum(not d.startswith("*") for d in dims)
    named: list[str | None] = []
    for dim in dims:
        if dim.startswith("*"):
            named += [f"{dim[1:]}{i}" for i in range(extra)]
        else:
            named.append(dim)
    return tuple(named)
