"""What one op costs on a rank, by its rule: FLOPs by the sizes of its factors, bytes by its operands and its result.

Attention computes the pairs of a query and a key that its mask leaves. A backward may be split in two: gradients of
inputs, and later those of weights.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from autopar.cost_models.layer_costs import OpCost
from autopar.cost_models.logits import head_costs, logits_cost
from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import NodeInfo, Role, arguments, info, node_inputs
from autopar.ir.ops import gathered_attention, ring_attention
from autopar.liveness.saved import local_bytes, numel
from autopar.placement import Strategy
from autopar.rules import Rule
from autopar.rules.arguments import option

aten = torch.ops.aten
_ZERO = sympy.Integer(0)
_ADDS = (aten.add.Tensor, aten.sub.Tensor)  # their gradient is that of the result, or a sum of it
_PRODUCTS = ("matmul", "experts", "opaque")


def op_cost(node: fx.Node, strategy: Strategy, rule: Rule, tp: int) -> OpCost:
    """One op under one strategy, on one rank. Backward of a matmul is two of the same size."""
    operands = [info(n) for n in node_inputs(node)]
    result = info(node)
    sharded = strategy.output.is_shard or any(p.is_shard for p in strategy.inputs)
    flops = _flops(operands, result, rule, node) / (tp if sharded else 1)
    read = [local_bytes(o, p, tp) for o, p in zip(operands, strategy.inputs, strict=True)]
    written = local_bytes(result, strategy.output, tp)
    forward = sympy.Add(*read) + written
    gradients = [r for r, o in zip(read, operands, strict=True) if o.requires_grad]
    backward = forward + sympy.Add(*gradients) if result.requires_grad else _ZERO
    if (logits := logits_cost(node, strategy, tp)) is not None:
        forward, backward = logits.forward_bytes, logits.backward_bytes if result.requires_grad else _ZERO
    if rule.kind == "view" or node.target is aten.to.dtype and not result.requires_grad:
        forward, backward = _ZERO, _ZERO
    factor = {"matmul": 2, "experts": 2, "opaque": 2, "attention": sympy.Rational(5, 2)}.get(rule.kind, 0)
    return OpCost(
        name=node.name,
        kind={"view": "memory", "experts": "matmul", "opaque": "matmul"}.get(rule.kind, rule.kind),
        forward_flops=flops,
        forward_bytes=forward,
        backward_flops=factor * flops if result.requires_grad else _ZERO,
        backward_bytes=backward,
        sharded=sharded,
        dgrad_wgrad=dgrad_wgrad(node, rule),
        needed=needed_share(node),
    )


def op_costs(node: fx.Node, strategy: Strategy, rule: Rule, tp: int) -> tuple[OpCost, ...]:
    """An op as the kernels that it is made of: a head with its loss is a product and passes over its logits."""
    cost = op_cost(node, strategy, rule, tp)
    return head_costs(node, strategy, cost, tp) if node.target is LINEAR_CROSS_ENTROPY else (cost,)


def _flops(operands: list[NodeInfo], result: NodeInfo, rule: Rule, node: fx.Node) -> sympy.Expr:
    if rule.kind == "opaque":
        return int(arguments(node)[4]) * numel(operands[0].shape[:-1])
    if rule.kind == "experts":
        _, index, _, gate = operands[:4]
        return 2 * 3 * numel(index.shape) * numel(gate.shape[1:])
    if rule.kind not in ("matmul", "attention"):
        return _ZERO
    sizes: dict[str, sympy.Expr] = {}
    for facts, dims in zip([*operands, result], [*rule.inputs, rule.output], strict=True):
        for size, factor in zip(facts.shape, dims, strict=True):
            if factor is not None:
                sizes.setdefault(factor, size)
    if rule.kind == "matmul":
        return 2 * numel(tuple(sizes.values()))
    # Two products, over e and over f.
    each = sizes["b"] * operands[0].shape[1] * (sizes["e"] + sizes["f"])
    return 2 * each * pairs(node, sizes["s"], sizes["t"])


def dgrad_wgrad(node: fx.Node, rule: Rule) -> tuple[float, float]:
    """What the gradients of inputs and those of weights take of an op's backward, when they come apart.

    A product has a matmul for each; the kernels of norms, factors and a head with its loss run twice.
    """
    graded = [n for n in node_inputs(node) if info(n).requires_grad]
    own = [n for n in graded if _is_weight(n)]
    if not own:
        return 1.0, 0.0
    if len(own) == len(graded):
        return 0.0, 1.0
    once = (rule.kind in _PRODUCTS or node.target in _ADDS) and node.target is not LINEAR_CROSS_ENTROPY
    return (0.5, 0.5) if once else (1.0, 1.0)


def keeps_gradient(node: fx.Node, rule: Rule) -> bool:
    """Whether the gradient of an op's result is kept until the second half; a sum's is that of what it adds."""
    return info(node).requires_grad and node.target not in _ADDS and all(dgrad_wgrad(node, rule))


def _is_weight(node: fx.Node) -> bool:
    """Whether a value is made of parameters alone."""
    if node.op == "placeholder":
        return info(node).role is Role.PARAMETER
    return bool(node_inputs(node)) and all(map(_is_weight, node_inputs(node)))


def pairs(node: fx.Node, rows: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """Pairs of a head of one sample; `rows`, `keys` at hand. A mask held as a tensor saves no kernel any.

    On cp, the busiest rank has the last rows where sequences are cut in order, and those in the middle in zigzag.
    """
    if node.target is ring_attention:
        keys = int(option(node, "ranks")) * rows
    if not option(node, "is_causal"):
        return rows * keys
    if node.target not in (ring_attention, gathered_attention):
        return rows * keys / 2
    last = (keys + rows) / 2 if option(node, "zigzag") else keys
    window = option(node, "window")
    return sympy.expand(_seen_before(last, window) - _seen_before(last - rows, window))


def needed_share(node: fx.Node) -> sympy.Expr:
    """The share of its pairs that attention needs whose mask is only a sliding window."""
    facts = info(node)
    if facts.window is None:
        return sympy.Integer(1)
    rows = facts.shape[-2]
    return _seen_before(rows, facts.window) / rows**2


def _seen_before(row: sympy.Expr, window: int | None) -> sympy.Expr:
    """Pairs of the rows before this one under a causal mask: as many keys as the row's position, `window` at most."""
    short = row if window is None else sympy.Min(row, window)
    return short**2 / 2 + (0 if window is None else window * (row - short))
