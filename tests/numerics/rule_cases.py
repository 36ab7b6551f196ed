"""A few calls of every op that has a rule, and the check that runs one call under each of its strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autopar.ir.build import is_continuous
from autopar.ir.custom import EXPERTS
from autopar.ir.graph import (
    MODEL,
    Block,
    Call,
    NodeInfo,
    Program,
    Role,
    info,
    node_inputs,
    set_info,
    set_strategy,
)
from autopar.passes.insert_conversions import InsertConversions
from autopar.placement import Strategy
from autopar.plan.plan import Plan
from autopar.rules import Axis, TensorAxis, rule_of, strategies
from autopar.rules.verify import Level, verify
from autopar.runtime.choices import Mesh
from tests.numerics.spmd import (
    lay_out,
    lay_out_gradient,
    put_together,
    put_together_gradient,
    run_block,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A tensor argument. kind: "float" (with a gradient), "positive" (with one), "constant", "scale" (positive,
    without one), "fraction" (between 0 and 1, with one), "complex" (with one), "side" (1 or -1), "flag", "count"
    (integers from 1), or the exclusive bound of integers."""

    shape: tuple[int, ...]
    kind: str | int = "float"

    def draw(self, generator: torch.Generator) -> Tensor:
        if isinstance(self.kind, int):
            return torch.randint(self.kind, self.shape, generator=generator)
        if self.kind == "count":
            return torch.randint(1, 9, self.shape, generator=generator)
        if self.kind == "flag":
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.kind == "side":
            return 2 * torch.randint(2, self.shape, generator=generator) - 1
        if self.kind == "complex":
            return torch.randn(self.shape, generator=generator, dtype=torch.complex128).requires_grad_()
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        x = x.abs() + 0.5 if self.kind in ("positive", "scale") else x
        x = x.sigmoid() if self.kind == "fraction" else x
        return x.requires_grad_(self.kind not in ("constant", "scale"))


@dataclass(frozen=True)
class Case:
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def operands(self) -> list[Operand]:
        flat = [a for arg in self.args for a in (arg if isinstance(arg, list) else [arg])]
        return [a for a in flat if isinstance(a, Operand)]

    def draw(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [operand.draw(generator) for operand in self.operands]


# --------------------------------------------------------------------------------
# One op as a program


def node_of(target: Any, case: Case) -> fx.Node:
    """The op as a typed-fact node of a graph of its own; its facts are those of the op run unsharded."""
    return _program(target, case)[0].blocks[MODEL].ops[0]


def _program(target: Any, case: Case) -> tuple[Program, list[Tensor], Tensor]:
    """(the op as a program, its operands, its result)"""
    tensors = case.draw()
    graph, nodes = fx.Graph(), []
    for i, tensor in enumerate(tensors):
        facts = NodeInfo(_sizes(tensor), tensor.dtype, tensor.requires_grad, Role.VALUE, str(i))
        nodes.append(set_info(graph.placeholder(f"x{i}"), facts))
    fill = iter(nodes)
    values = iter(tensors)
    node = graph.call_function(target, _fill(case.args, fill), case.kwargs)
    result: Tensor = target(*_fill(case.args, values), **case.kwargs)
    grad = is_continuous(result.dtype) and any(t.requires_grad for t in tensors) and target not in _CUT
    set_info(node, NodeInfo(_sizes(result), result.dtype, grad))
    graph.output((node,))
    call = Call(MODEL, "", tuple(f"x{i}" for i in range(len(tensors))), ("y",))
    return Program("op", {MODEL: Block(MODEL, graph)}, (call,), {}, {}, {}), tensors, result


_CUT = {aten.detach.default}
_UNSET = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}


def _sizes(tensor: Tensor) -> tuple[sympy.Expr, ...]:
    return tuple(sympy.Integer(n) for n in tensor.shape)


def _fill(args: Any, operands: Any) -> tuple[Any, ...]:
    def one(argument: Any) -> Any:
        if isinstance(argument, list):
            return [one(a) for a in argument]
        return next(operands) if isinstance(argument, Operand) else argument

    return tuple(map(one, args))


def check(target: Any, case: Case, size: int) -> None:
    """Run one call under each of its strategies on `size` ranks; AssertionError names the strategy."""
    axis = TensorAxis(size, sequence=True)
    program, tensors, result = _program(target, case)
    node = program.blocks[MODEL].ops[0]
    for strategy in strategies(node, rule_of(node), axis):
        try:
            _check_strategy(program, strategy, tensors, result, axis)
        except Exception as error:
            raise AssertionError(f"{target} {[tuple(t.shape) for t in tensors]} ({strategy}) on {size}") from error


def _check_strategy(program: Program, strategy: Strategy, tensors: list[Tensor], result: Tensor, axis: Axis) -> None:
    program = program.copy_blocks()
    node = program.blocks[MODEL].ops[0]
    set_strategy(node, strategy)
    for operand, placement in zip(node_inputs(node), strategy.inputs, strict=True):
        set_strategy(operand, Strategy((), placement))
    plan = Plan.of(Mesh(tp=axis.size), 1, 1, 1, ((0, 1),))
    program = InsertConversions().apply(program, plan)
    verify(program, Level.CONVERTED, [axis])
    block = program.blocks[MODEL]
    held = {
        placeholder: [
            part.detach().requires_grad_(tensor.requires_grad) for part in lay_out(tensor, placement, axis.size)
        ]
        for placeholder, tensor, placement in zip(block.placeholders(), tensors, strategy.inputs, strict=True)
    }
    (parts,) = run_block(block, held, axis.size, {})
    if node.target in _UNSET:
        assert put_together([p.zero_() for p in parts], strategy.output).shape == result.shape
        return
    whole = put_together([p.detach() for p in parts], strategy.output)
    tolerance = 1e-5 if result.dtype == torch.float32 else 1e-9
    torch.testing.assert_close(whole, result, rtol=tolerance, atol=tolerance)
    if result.requires_grad and info(node).requires_grad:
        _check_gradients(strategy, tensors, result, list(held.values()), parts)


def _check_gradients(
    strategy: Strategy, tensors: list[Tensor], result: Tensor, held: list[list[Tensor]], parts: list[Tensor]
) -> None:
    size = len(parts)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    wanted = [i for i, t in enumerate(tensors) if t.requires_grad]
    expected = torch.autograd.grad(
        result, [tensors[i] for i in wanted], gradient, retain_graph=True, materialize_grads=True
    )
    flat = [part for i in wanted for part in held[i]]
    given = lay_out_gradient(gradient, strategy.output, size)
    used = [(p, g) for p, g in zip(parts, given, strict=True) if p.requires_grad]
    grads = torch.autograd.grad([p for p, _ in used], flat, [g for _, g in used], materialize_grads=True)
    for place, (i, right) in enumerate(zip(wanted, expected, strict=True)):
        whole = put_together_gradient(grads[place * size : (place + 1) * size], strategy.inputs[i])
        tolerance = 1e-5 if result.dtype == torch.float32 else 1e-9
        torch.testing.assert_close(whole, right, rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------
# The calls


def f(*shape: int) -> Operand:
    return Operand(shape)


def p(*shape: int) -> Operand:
    return Operand(shape, "positive")


def c(*shape: int) -> Operand:
    return Operand(shape, "constant")


def b(*shape: int) -> Operand:
    return Operand(shape, "flag")


def ids(bound: int, *shape: int) -> Operand:
    return Operand(shape, bound)


def _cases(*calls: Any) -> list[Case]:
    return [call if isinstance(call, Case) else Case(call) for call in calls]


_UNARY = (f(4, 6),), (f(12, 5),)
_UNARY_POSITIVE = (p(4, 6),), (p(12, 5),)
_COMPARED = (f(4, 6), 0.5), (c(12, 5), 0.5)
_PAIRS = (f(4, 6), f(4, 6)), (f(12, 4, 6), f(6)), (f(12, 5), f(12, 1)), (f(6), f(4, 1, 6)), (f(4, 6), f())

CASES: dict[object, list[Case]] = {
    aten.linear.default: _cases((f(12, 4, 6), f(12, 6)), (f(4, 5), f(7, 5)), (c(4, 6), f(12, 6))),
    aten.matmul.default: _cases(
        (f(12, 4, 6), f(12, 6, 4)),
        (f(4, 12, 4, 6), f(12, 6, 4)),
        (f(12, 4, 6), f(6, 5)),
        (f(1, 4, 6), f(12, 6, 4)),
        (f(4, 12), f(12)),
        (f(12), f(4, 12, 6)),
        (f(12), f(12)),
        (f(4, 6), f(12, 6, 4)),
    ),
    aten.bmm.default: _cases((f(12, 4, 6), f(12, 6, 4)), (f(5, 4, 6), f(5, 6, 7))),
    aten.mm.default: _cases((f(4, 6), f(6, 12)), (f(8, 5), f(5, 8))),
    aten.scaled_dot_product_attention.default: _cases(
        (f(12, 4, 5, 6), f(12, 4, 5, 6), f(12, 4, 5, 7), None, 0.0, True),
        Case((f(2, 8, 5, 6), f(2, 4, 5, 6), f(2, 4, 5, 6), None, 0.0, True), {"enable_gqa": True}),
        Case((f(2, 12, 5, 6), f(2, 2, 5, 6), f(2, 2, 5, 6), c(12, 5, 5)), {"enable_gqa": True}),
        Case((f(2, 12, 5, 6), f(2, 1, 5, 6), f(2, 1, 5, 6), None, 0.0, True), {"enable_gqa": True}),
        (f(4, 12, 5, 6), f(4, 12, 7, 6), f(4, 12, 7, 6), b(4, 12, 5, 7)),
        (f(4, 12, 5, 6), f(4, 12, 7, 6), f(4, 12, 7, 6), c(4, 1, 5, 7)),
        (f(4, 12, 5, 6), f(4, 12, 7, 6), f(4, 12, 7, 6), f(1, 12, 5, 7)),
        (f(4, 12, 5, 6), f(4, 12, 7, 6), f(4, 12, 7, 6), c(5, 7)),
    ),
    EXPERTS: _cases(
        (f(12, 6), ids(4, 12, 2), p(12, 2), f(4, 8, 6), f(4, 8, 6), f(4, 6, 8), "silu"),
        (f(5, 6), ids(3, 5, 1), p(5, 1), f(3, 7, 6), f(3, 7, 6), f(3, 6, 7), "gelu_tanh"),
        (c(4, 6), ids(2, 4, 2), c(4, 2), f(2, 12, 6), f(2, 12, 6), f(2, 6, 12), "relu"),
    ),
    aten.layer_norm.default: _cases(
        (f(12, 4, 6), [6], f(6), f(6), 1e-5), (f(4, 6), [6]), (f(12, 5, 4), [5, 4], f(5, 4), f(5, 4)),
        (f(4, 6), [6], None, f(6)),
    ),
    aten.rms_norm.default: _cases(
        (f(12, 4, 6), [6], f(6), 1e-5), (f(4, 6), [6], None, 1e-6), (f(12, 5, 4), [5, 4], f(5, 4)),
    ),
    aten.softmax.int: _cases((f(12, 4, 6), -1), (f(4, 6), 0)),
    aten.log_softmax.int: _cases((f(12, 4, 6), -1), (f(4, 6), 0)),
    aten.embedding.default: _cases((f(12, 6), ids(12, 4, 5)), (f(13, 6), ids(13, 4, 12)), (f(5, 7), ids(5, 3))),
    aten.cross_entropy_loss.default: _cases(
        (f(12, 24), ids(24, 12), None, 2, -100), (f(4, 13), ids(13, 4), None, 2, 3),
        (f(7, 5), ids(5, 7), None, 2, -100),
        (f(12, 24), ids(24, 12), None, 0), (f(12, 24), ids(24, 12), c(24), 2), (f(4, 12, 5), ids(12, 4, 5), None, 2),
    ),
    aten.reshape.default: _cases(
        (f(12, 4, 6), [48, 6]), (f(12, 24), [12, 4, 6]), (f(12, 4, 6), [12, 24]), (f(4, 1, 5), [4, 5]),
        (f(7, 4, 5), [7, 20]),
        (f(4, 6), [24]), (f(24), [1, 24]), (f(4, 6), [6, 4]), (f(1), []), (c(12, 4), [48]),
    ),
    aten.transpose.int: _cases((f(12, 4, 6), 1, 2), (f(4, 5), -1, 0)),
    aten.t.default: _cases((f(4, 6),), (f(12),)),
    aten.numpy_T.default: _cases((f(12, 4),), (f(12, 5),)),
    aten.mT.default: _cases((f(12, 4, 6),), (f(5, 4),)),
    aten.permute.default: _cases((f(12, 4, 6), [2, 0, 1]), (f(12, 4, 6), [-1, 0, 1])),
    aten.unsqueeze.default: _cases((f(4, 6), -1), (f(4, 6), 0), (f(12, 5), 1)),
    aten.squeeze.dim: _cases((f(4, 1, 6), 1), (f(12, 5, 1), -1), (f(4, 6), 0)),
    aten.expand.default: _cases((f(4, 1, 6), [4, 12, 6]), (f(6), [12, 6]), (f(4, 5), [12, 4, 5]), (f(1, 1), [4, 5])),
    aten.slice.Tensor: _cases((f(12, 4), 1, 0, 2), (f(12, 4), 0, 3, 9), (f(4, 12), -1, 1, 9, 2), (f(12, 5),)),
    aten.select.int: _cases((f(12, 4, 6), 1, 2), (f(12, 4), 0, -1), (f(4, 12), -2, 1)),
    aten.pad.default: _cases(
        (f(12, 4, 6), [1, 2]), (f(12, 4), [0, 1], "constant", 2.0), (f(12, 4, 6), [0, 0, 1, 1]),
        (f(12, 4, 6), [2, 1], "reflect"), (f(12, 5, 6), [2, 1], "reflect"),
    ),
    aten.constant_pad_nd.default: _cases((f(12, 4, 6), [1, 2]), (f(12, 4), [0, 1], 2.0), (f(12, 4), [1, 0], 0.0)),
    aten.cat.default: _cases(
        ([f(12, 4), f(12, 6)], 1), ([f(4, 12), f(6, 12)],), ([f(4, 5), f(4, 5), f(4, 5)], -1),
        ([f(4, 12), c(4, 12)], 0),
    ),
    **{op: _cases(*_PAIRS) for op in (aten.mul.Tensor, aten.maximum.default, aten.minimum.default)},
    **{
        op: _cases(*_PAIRS, (f(4, 6), 2.0), Case((f(4, 6), f(6)), {"alpha": 2}), (c(12, 5), f(12, 5)))
        for op in (aten.add.Tensor, aten.sub.Tensor)
    },
    aten.div.Tensor: _cases(
        (f(4, 6), p(4, 6)), (f(12, 4, 6), p(6)), (f(4, 6), 2.0), (f(12, 5), p(12, 1)), (f(6), p(4, 6)),
    ),
    aten.to.dtype: _cases((f(4, 6), torch.float32), (b(4, 6), torch.float64), (f(12, 5), torch.int64)),
    aten.pow.Tensor_Scalar: _cases((f(4, 6), 2), (p(12, 5), 0.5)),
    aten.clamp.default: _cases((f(4, 6), -0.5, 0.5), (f(12, 5), None, 0.5)),
    aten.gelu.default: _cases((f(4, 6),), Case((f(12, 5),), {"approximate": "tanh"})),
    **{
        op: _cases(*_UNARY)
        for op in (
            aten.neg.default, aten.silu.default, aten.relu.default, aten.cos.default, aten.sin.default,
            aten.abs.default,
            aten.softplus.default, aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten.detach.default,
            aten.alias.default, aten.clone.default,
        )
    },
    **{
        op: _cases(*_UNARY_POSITIVE)
        for op in (aten.log.default, aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default)
    },
    **{
        op: _cases(*_COMPARED)
        for op in (
            aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
            aten.rsub.Scalar, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar,
        )
    },
    **{
        op: _cases((f(4, 6), f(4, 6)), (c(12, 5), c(5)), (f(12, 5), c(12, 1)))
        for op in (aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor)
    },
    **{
        op: _cases((b(4, 6), b(4, 6)), (b(12, 5), b(5)))
        for op in (
            aten.logical_and.default, aten.logical_or.default, aten.__and__.Tensor, aten.__or__.Tensor,
            aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
        )
    },
    aten.logical_not.default: _cases((b(4, 6),), (b(12, 5),)),
    aten.bitwise_not.default: _cases((b(4, 6),), (b(12, 5),)),
    aten.where.self: _cases((b(4, 6), f(4, 6), f(4, 6)), (b(4, 1), f(4, 6), c()), (b(12, 1, 5), f(5), f(12, 4, 1))),
    aten.where.ScalarOther: _cases((b(4, 6), f(4, 6), 0.0), (b(6), f(12, 4, 6), 1.0)),
    aten.masked_fill.Scalar: _cases((f(4, 6), b(4, 6), -1.0), (f(12, 4, 6), b(4, 6), 0.0), (f(12, 5), b(12, 1), 0.0)),
    aten.dropout.default: _cases((f(4, 6), 0.0, True), (f(12, 5), 0.5, False)),
    aten.sum.default: _cases((f(4, 6),), (f(12, 5),), (b(12, 4),)),
    aten.mean.default: _cases((f(4, 6),), (f(12, 5),)),
    **{
        op: _cases((f(12, 4, 6), [-1]), (f(12, 4, 6), [0, 2], True), (f(12, 5), [1], True), (f(4, 6), [0]))
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)
    },
    aten.zeros.default: _cases(([12, 5],)),
    aten.ones.default: _cases(([12, 5],)),
    aten.full.default: _cases(([12, 5], 2.0)),
    aten.empty.memory_format: _cases(([12, 5],)),
    aten.new_ones.default: _cases((c(3), [12, 5]), (f(4, 6), [12])),
    aten.new_zeros.default: _cases((c(3), [12, 5])),
    aten.new_full.default: _cases((c(3), [12, 5], 2.0)),
    aten.arange.default: _cases((12,)),
    aten.arange.start: _cases((2, 12)),
}  # fmt: skip

# Their values depend on the position, or on nothing that a rank may hold a part of.
WHOLE_ONLY: set[object] = {aten.arange.default, aten.arange.start}
