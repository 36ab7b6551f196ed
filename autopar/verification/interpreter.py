"""A prepared program run op by op on one device, each call of a block after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from ..ir.graph import COUNT, B, Block, Call, NodeInfo, Program, Role, S, info, node_inputs, op_name

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True)
class Step:
    """One op of a run with its value. operands: the steps that made its operands; reads: parameters among them."""

    block: Block
    node: fx.Node
    value: Any
    operands: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The op, and where the user wrote it."""
        facts = info(self.node)
        where = ", ".join(filter(None, (facts.module, facts.source)))
        return f"{op_name(self.node)} of {self.block.name}.{self.node.name}{f' ({where})' if where else ''}"


class StepError(Exception):
    """An op that cannot be run on the values that it is given."""

    def __init__(self, block: Block, node: fx.Node, error: Exception) -> None:
        super().__init__(f"{Step(block, node, None).place}: {str(error).splitlines()[0]}")
        self.step = Step(block, node, None)


@dataclass
class Run:
    """A run of `program` on `tensors`, its parameters and buffers by name, and on the model's inputs.

    dtype: that of all floating values; None for those of the trace. steps: what has been run, where they are `kept`.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    dtype: torch.dtype | None = None
    kept: bool = False
    steps: list[Step] = field(default_factory=list)
    last: int | None = None  # the step of the loss
    _numbers: dict[sympy.Expr, int | float] = field(default_factory=dict)

    def loss(self) -> Tensor:
        """The loss, with autograd back to the parameters; StepError where an op raises."""
        values: dict[str, tuple[Tensor, int | None]] = {}
        if COUNT in self.program.blocks:
            counts = self._block(Call(COUNT, ""), values)
            values |= {"_count" if i == 0 else f"_count_{i + 1}": count for i, count in enumerate(counts)}
        results: list[tuple[Tensor, int | None]] = []
        for call in self.program.calls:
            results = self._block(call, values)
            values |= dict(zip(call.outputs, results, strict=False))
        loss, self.last = results[0]
        return loss

    @cached_property
    def _sizes(self) -> dict[sympy.Symbol, int]:
        """The numbers that `b` and `s` stand for."""
        sizes = {B: 0, S: 0}
        for name, facts in self.program.inputs.items():
            if name in self.inputs:
                sizes |= {e: n for e, n in zip(facts.shape, self.inputs[name].shape, strict=True) if e in sizes}
        return sizes

    def _block(self, call: Call, values: Mapping[str, tuple[Tensor, int | None]]) -> list[tuple[Tensor, int | None]]:
        """The results of a call, each with the step that MADE it."""
        block = self.program.blocks[call.block]
        results: dict[fx.Node, tuple[Any, int | None]] = {}
        for node in block.nodes:
            if node.op == "placeholder":
                value, step = self._placeholder(info(node), call, values)
            else:
                value, step = self._op(block, node, {n: results[n][0] for n in node_inputs(node)}), None
            value = self._typed(node, value)
            if self.kept and node.op != "placeholder":
                operands = tuple(i for n in node_inputs(node) if (i := results[n][1]) is not None)
                reads = [call.full_name(info(n).ref) for n in node_inputs(node) if info(n).role is Role.PARAMETER]
                step = len(self.steps)
                self.steps.append(Step(block, node, value, operands, tuple(reads)))
            results[node] = value, step
        return [results[node] for node in block.results]

    def _placeholder(
        self, facts: NodeInfo, call: Call, values: Mapping[str, tuple[Tensor, int | None]]
    ) -> tuple[Tensor, int | None]:
        if facts.role is Role.VALUE:
            return values[call.inputs[int(facts.ref)]]
        if facts.role is Role.INPUT:
            return self.inputs[facts.ref], None
        return values[facts.ref] if facts.ref in values else (self.tensors[call.full_name(facts.ref)], None)

    def _op(self, block: Block, node: fx.Node, operands: Mapping[fx.Node, Any]) -> Any:
        def real(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return operands[argument]
            if isinstance(argument, sympy.Expr):
                return self._number(argument)
            if isinstance(argument, torch.device):
                return torch.device("cpu")  # the trace ran on meta
            if isinstance(argument, torch.dtype):
                return self._dtype(argument)
            return [real(a) for a in argument] if isinstance(argument, list | tuple) else argument

        target: Any = node.target
        try:
            return target(*map(real, node.args), **{k: real(v) for k, v in node.kwargs.items()})
        except Exception as error:  # whatever an op raises, its place is told
            raise StepError(block, node, error) from error

    def _number(self, size: sympy.Expr) -> int | float:
        if size not in self._numbers:
            number = size.subs(self._sizes)
            self._numbers[size] = int(number) if number.is_integer else float(number)
        return self._numbers[size]

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None or not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        return _COMPLEX[self.dtype] if dtype.is_complex else self.dtype

    def _typed(self, node: fx.Node, value: Any) -> Any:
        """A value in the run's dtype, of the shape that its facts say."""
        facts = info(node)
        if not isinstance(value, Tensor):
            return value
        shape = tuple(map(self._number, facts.shape))
        assert tuple(value.shape) == shape, f"{node.name} is {tuple(value.shape)}, its facts say {shape}"
        value = value if self.dtype is None else value.to(self._dtype(facts.dtype))
        assert value.dtype == self._dtype(facts.dtype), f"{node.name} is {value.dtype}, its facts say {facts.dtype}"
        return value


def named_tensors(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by their names in its program, which has some in parts."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for original, fused in program.fused.items():
        sizes = [int(program.parameters[part].shape[fused.dim]) for part in fused.parts]
        tensors |= zip(fused.parts, tensors[original].split(sizes, fused.dim), strict=True)
    return tensors
