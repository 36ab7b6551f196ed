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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from ..ir.build import is_continuous
from ..ir.graph import NodeInfo, Shape, info, node_inputs
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Shard, Strategy
from .axes import Axis

Dims = tuple[str | None, ...]  # the factor of each dim; None: a dim that no factor shards


@dataclass(frozen=True)
class Rule:
    """How one node may be sharded, and what it costs.

    whole: factors that a kernel needs whole (softmax and norm dims). linear: each set of operand positions
    in which the op is jointly linear. even: factors whose shards must be of one size, for it is an argument.
    special: axis → strategies there beyond the factors, such as vocabulary-parallel cross-entropy on tp and ring
    attention on cp. multiple_of: if given, they are for axes whose size is a multiple of it, and want equal shards.
    only_on: factor → the one axis that can shard it, for a function of the runtime does which knows of no other.
    kind: "matmul", "attention", "experts", "memory" (bandwidth-bound) or "view" (free).
    units: factors that come in units (channels in groups), whose number must be divisible too.
    only: if given, all the strategies there are. exact: gradients too are whole, for the op is not written so that they
    could be summands.
    dims_on: axis → the dims of inputs and output there, where they are others: rows b·s are sharded by their sequence
    on cp.
    saves: positions of operands that a GPU kernel keeps for backward, and -1 for its result.
    """

    inputs: tuple[Dims, ...]
    output: Dims
    whole: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    special: Mapping[str, tuple[Strategy, ...]] = field(default_factory=dict)
    only_on: Mapping[str, str] = field(default_factory=dict)
    multiple_of: int = 0
    kind: str = "memory"
    saves: tuple[int, ...] = ()
    only: tuple[Strategy, ...] = ()
    exact: bool = False
    dims_on: Mapping[str, tuple[tuple[Dims, ...], Dims]] = field(default_factory=dict)
    units: Mapping[str, sympy.Expr] = field(default_factory=dict)

    @property
    def factors(self) -> list[str]:
        """Every factor once, in the order of first appearance."""
        seen = [f for dims in (*self.inputs, self.output) for f in dims if f is not None]
        return list(dict.fromkeys(seen))


def strategies(node: fx.Node, rule: Rule, axis: Axis, reading: tuple[Placement, ...] = ()) -> list[Strategy]:
    """Every legal strategy of a node on an axis, replicated first; reading: how its operands lie, where that counts."""
    operands = [info(n) for n in node_inputs(node)]
    result = info(node)
    if axis.name in rule.dims_on:
        inputs, output = rule.dims_on[axis.name]
        rule = replace(rule, inputs=inputs, output=output)
    if rule.only:
        sizes = {strategy: [n.shape[strategy.output.dim] for n in (*operands, result)] for strategy in rule.only}
        options = [strategy for strategy in rule.only if axis.offers(sizes[strategy], uneven=False)]
    else:
        candidates = dict.fromkeys(_candidates(operands, result, rule, axis))
        options = [s for s in candidates if _sensible(s, operands, result)]
    return axis.adapted(node, options, reading)


def _candidates(operands: list[NodeInfo], result: NodeInfo, rule: Rule, axis: Axis) -> Iterator[Strategy]:
    yield Strategy(tuple(REPLICATE for _ in operands), REPLICATE)
    if not rule.exact:  # a result without a gradient, as of detach, gives none back that could be counted twice
        yield Strategy(tuple(_shared(o) for o in operands), GRAD_PARTIAL if result.requires_grad else REPLICATE)
    for factor in rule.factors:
        sizes = _sizes(factor, operands, result, rule)
        allowed = factor not in rule.whole and rule.only_on.get(factor, axis.name) == axis.name
        if allowed and axis.offers(sizes, uneven=factor not in rule.even):
            yield _sharded(factor, operands, rule)
    for linear in rule.linear:
        partial = tuple(PARTIAL if i in linear else _shared(o) for i, o in enumerate(operands))
        yield Strategy(partial, PARTIAL)
    yield from _special(operands, rule, axis)


def _special(operands: list[NodeInfo], rule: Rule, axis: Axis) -> Iterator[Strategy]:
    """The strategies that a rule names itself, whose shards the axis offers."""
    if axis.size % (rule.multiple_of or 1):
        return
    for special in rule.special.get(axis.name, ()):
        shards = [(p, o) for p, o in zip(special.inputs, operands, strict=True) if p.is_shard]
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
