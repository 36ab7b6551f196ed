"""Write means over the batch as sums over global counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.counts import Counts, of_inputs_only
from autopar.ir.graph import COUNT, MODEL, B, Program, Shape, arguments, info, node_inputs
from autopar.placement import Placement
from autopar.plan.plan import Plan
from autopar.rules import has_rule, rule_of, strategies
from autopar.rules.arguments import option
from autopar.rules.losses import MEAN, SUM, terms
from autopar.rules.losses import RULES as LOSSES
from autopar.rules.spread import AXIS
from autopar.rules.verify import Level

aten = torch.ops.aten

_CLASSIFICATION = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default)
_MEANS = (aten.mean.default, aten.mean.dim)
_SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
_ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_REVERSED = (aten.rsub.Scalar, aten.rsub.Tensor)
_LINEAR = (*_ADDITIONS, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.neg.default,
           aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.to.dtype,
           aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default)  # fmt: skip
# Ops that take a tensor where the author gave the batch size.
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


@dataclass(frozen=True)
class NormalizeLoss:
    """A mean has no Partial form, so micro-batches and ranks could not be summed: sum ÷ global count has.

    Requires: a clean program whose output is the loss. Ensures: no mean runs over the batch; what is summed over
    the batch and depends on inputs only (how many targets there are, the sum of a mask) is a buffer, `_count`,
    `_count_2`, …, of which block "count" computes this rank's share; so is a multiple of the batch size. A mean that
    cannot be written so is left: `rules/spread.py` says what that means for plans.

        loss = cross_entropy(logits, t)   |   loss = div(cross_entropy(logits, t, reduction=sum), _count)
        loss = mean(x)                    |   loss = div(sum(x), _count)
        n = clamp(sum(mask), 1)           |   n = clamp(_count, 1)
        loss = rsub(loss, 1.0)            |   loss = sub(full([], 1.0), loss)
    """

    name: ClassVar[str] = "normalize_loss"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        block = program.blocks[MODEL]
        counts = Counts(block.graph)
        targets: dict[tuple[Any, ...], fx.Node] = {}
        for node in block.ops:
            if node.target in _CLASSIFICATION and option(node, "reduction") == MEAN:
                _sum_over_targets(node, counts, targets)
            elif node.target in LOSSES and option(node, "reduction") == MEAN and _has_batch(terms(node)):
                _sum_over_terms(node, counts)
            elif node.target in _MEANS and _has_batch(_averaged(node)):
                _sum_over_dims(node, counts)
            elif node.target in _ARITHMETIC:
                _divide_by_global_size(node, counts)
        known: dict[fx.Node, bool] = {}
        for node in block.ops:
            if _is_count(node, known):
                replace_node(node, counts.of(node))
        _Terms().of(block.results[0])
        eliminate_dead(block.graph)
        blocks = {**program.blocks, MODEL: block}
        counting = counts.block()
        return replace(program, blocks=blocks if counting is None else {**blocks, COUNT: counting})


class _Terms:
    """Numbers added to what the loss is a linear function of become tensors, of which each part of a batch may have a
    share: in `(1 - mean) * 0.5 + 0.1` both."""

    def __init__(self) -> None:
        self._sums: dict[fx.Node, bool] = {}

    def of(self, node: fx.Node) -> None:
        if not self._is_sum(node):
            return
        if node.target in _REVERSED and len(node.args) == 2 and not node.kwargs:  # no alpha
            node = _reverse(node)
        if node.target in _ADDITIONS and isinstance(arguments(node)[1], int | float):
            node.update_arg(1, _as_tensor(node, arguments(node)[1]))
        if node.target in _LINEAR:
            for operand in node_inputs(node):
                self.of(operand)

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether the batch has been summed up in a value."""
        if _has_batch(info(node).shape):
            return False
        if node not in self._sums:
            inputs = node_inputs(node)
            self._sums[node] = any(_has_batch(info(n).shape) or self._is_sum(n) for n in inputs)
        return self._sums[node]


def _as_tensor(node: fx.Node, number: float) -> fx.Node:
    facts = replace(info(node), requires_grad=False)
    with node.graph.inserting_before(node):
        return call(node.graph, aten.full.default, ([], number), facts, (), dtype=facts.dtype)


def _reverse(node: fx.Node) -> fx.Node:
    """rsub(x, n) as sub(n, x)."""
    x, number = arguments(node)
    number = _as_tensor(node, number) if isinstance(number, int | float) else number
    with node.graph.inserting_before(node):
        new = call(node.graph, aten.sub.Tensor, (number, x), info(node))
    replace_node(node, new)
    return new


def _has_batch(sizes: Shape) -> bool:
    return any(B in size.free_symbols for size in sizes)


def _leaves_batch(node: fx.Node) -> bool:
    return _has_batch(info(node_inputs(node)[0]).shape) and not _has_batch(info(node).shape)


def _is_count(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a value is summed over the batch of inputs only, so that parts of the batch may each count their own."""
    if node.target not in _SUMS or not _leaves_batch(node) or not of_inputs_only(node, known):
        return False
    return _is_of_each(node_inputs(node)[0])


def _is_of_each(value: fx.Node) -> bool:
    """Whether a value has what each sample has, so that its sum is that of the sums of parts of the batch: not of pairs
    of samples, nor beside a maximum of all."""
    lies = _lies(value, {})
    return lies is not None and lies.is_shard


def _lies(node: fx.Node, known: dict[fx.Node, Placement | None]) -> Placement | None:
    """How a value of inputs lies on dp where nothing is exchanged; None where its op needs other samples."""
    if node not in known:
        operands = [_lies(n, known) for n in node_inputs(node)]
        reading = tuple(p for p in operands if p is not None)
        if node.op == "placeholder":
            known[node] = AXIS.given(info(node))
        elif len(reading) < len(operands) or not has_rule(node):
            known[node] = None
        else:
            options = [s.output for s in strategies(node, rule_of(node), AXIS, reading) if s.inputs == reading]
            known[node] = max(options, key=lambda p: p.is_shard, default=None)
    return known[node]


def _product(sizes: Shape) -> sympy.Expr:
    return sympy.Mul(*sizes)


def _divide(node: fx.Node, total: fx.Node, count: fx.Node) -> None:
    """node = total ÷ count. Both are before it."""
    with node.graph.inserting_before(node):
        mean = call(node.graph, aten.div.Tensor, (total, count), info(node))
    replace_node(node, mean)


def _as_sum(node: fx.Node) -> fx.Node:
    """The same loss with reduction=sum."""
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    position = names.index("reduction")
    given = list(arguments(node))
    given += [a.default_value for a in target._schema.arguments[len(given) : position + 1]]
    given[position] = SUM
    with node.graph.inserting_before(node):
        kwargs: dict[str, Any] = {name: value for name, value in node.kwargs.items() if name != "reduction"}
        return call(node.graph, target, tuple(given), info(node), **kwargs)


def _sum_over_terms(node: fx.Node, counts: Counts) -> None:
    count = counts.of_size(_product(terms(node)))
    if count is not None:
        _divide(node, _as_sum(node), count)


def _averaged(node: fx.Node) -> Shape:
    """The sizes of the dims that a mean runs over."""
    shape, dims = info(node_inputs(node)[0]).shape, _dims(node)
    return tuple(shape[d] for d in dims)


def _dims(node: fx.Node) -> list[int]:
    rank = len(info(node_inputs(node)[0]).shape)
    dims = option(node, "dim") if node.target is aten.mean.dim else None
    return [d % rank for d in dims] if dims else list(range(rank))


def _sum_over_dims(node: fx.Node, counts: Counts) -> None:
    count = counts.of_size(_product(_averaged(node)))
    if count is None:
        return
    with node.graph.inserting_before(node):
        if node.target is aten.mean.default:
            total = call(node.graph, aten.sum.default, (node.args[0],), info(node))
        else:
            keep = (True,) if option(node, "keepdim") else ()
            total = call(node.graph, aten.sum.dim_IntList, (node.args[0], _dims(node), *keep), info(node))
    if (dtype := option(node, "dtype")) is not None:
        total.kwargs = {"dtype": dtype}
    _divide(node, total, count)


def _divide_by_global_size(node: fx.Node, counts: Counts) -> None:
    """x / x.shape[0]: the author's batch is the global one."""
    for position, size in enumerate(arguments(node)):
        if isinstance(size, sympy.Expr) and B in size.free_symbols and B not in sympy.cancel(size / B).free_symbols:
            count = counts.of_size(size)
            if count is not None:
                node.update_arg(position, count)


def _sum_over_targets(node: fx.Node, counts: Counts, targets: dict[tuple[Any, ...], fx.Node]) -> None:
    """Divided by the targets that are not ignored, each counted with the weight of its class."""
    target, weight, ignored = arguments(node)[1], option(node, "weight"), option(node, "ignore_index")
    if info(target).dtype.is_floating_point:  # probabilities: every row counts as one
        _sum_over_terms(node, counts)
        return
    key = target, ignored, weight
    if key not in targets and weight is None:
        targets[key] = _count_valid(node, target, ignored)
    elif key not in targets and of_inputs_only(target, {}) and _is_of_each(target):
        targets[key] = _weigh_classes(node, target, ignored, weight, counts)
    if key in targets:
        _divide(node, _as_sum(node), targets[key])


def _count_valid(loss: fx.Node, target: fx.Node, ignored: int) -> fx.Node:
    graph, facts = loss.graph, info(target)
    with graph.inserting_before(loss):
        valid = call(graph, aten.ne.Scalar, (target, ignored), replace(facts, dtype=torch.bool))
        return call(graph, aten.sum.default, (valid,), replace(facts, dtype=torch.int64), shape=())


def _weigh_classes(loss: fx.Node, target: fx.Node, ignored: int, weight: fx.Node, counts: Counts) -> fx.Node:
    """Σ weight[target] as Σ weight · (how often each class occurs), for how often depends on inputs only."""
    graph, classes = loss.graph, info(weight).shape
    facts = replace(info(target), dtype=torch.int64, shape=(_product(info(target).shape),))
    with graph.inserting_before(loss):
        rows = call(graph, aten.reshape.default, (target, list(facts.shape)), facts)
        valid = call(graph, aten.ne.Scalar, (rows, ignored), replace(facts, dtype=torch.bool))
        ones = call(graph, aten.to.dtype, (valid, torch.int64), facts)
        index = call(graph, aten.mul.Tensor, (rows, ones), facts)
        zeros = call(graph, aten.new_zeros.default, (rows, list(classes)), facts, classes)
        occurs = call(graph, aten.scatter_add.default, (zeros, 0, index, ones), facts, classes)
        weighed = call(graph, aten.mul.Tensor, (weight, counts.of(occurs)), info(weight))
        return call(graph, aten.sum.default, (weighed,), info(weight), shape=())
