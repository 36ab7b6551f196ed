"""A program run on one device with a model's own weights: what a trace, a cleaned trace and a cut trace compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from autopar.ir.graph import COUNT, B, Block, Call, Program, Role, S, info


def run_program(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The loss, with autograd back to the model's parameters, which must be in the dtype of the trace."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    held: dict[str, Tensor] = {}
    sizes = _sizes(program, tensors)
    if COUNT in program.blocks:
        counts = _run_block(program, program.blocks[COUNT], Call(COUNT, ""), model, tensors, held, sizes)
        held |= {"_count" if i == 0 else f"_count_{i + 1}": count for i, count in enumerate(counts)}
    results: list[Tensor] = []
    for call in program.calls:
        results = _run_block(program, program.blocks[call.block], call, model, tensors, held, sizes)
        held |= dict(zip(call.outputs, results, strict=False))
    return results[0]


def _sizes(program: Program, inputs: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
    sizes = {B: 0, S: 0}
    for name, facts in program.inputs.items():
        if name in inputs:
            sizes |= {e: n for e, n in zip(facts.shape, inputs[name].shape, strict=True) if e in sizes}
    return sizes


def _run_block(
    program: Program,
    block: Block,
    call: Call,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    sizes: Mapping[sympy.Symbol, int],
) -> list[Tensor]:
    values: dict[fx.Node, Any] = {}

    def real(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, sympy.Expr):
            number = argument.subs(dict(sizes))
            return int(number) if number.is_integer else float(number)
        if isinstance(argument, torch.device):
            return torch.device("cpu")  # the trace ran on meta
        return [real(a) for a in argument] if isinstance(argument, list | tuple) else argument

    for node in block.nodes:
        facts = info(node)
        if node.op == "call_function":
            target: Any = node.target
            values[node] = target(*map(real, node.args), **{k: real(v) for k, v in node.kwargs.items()})
        elif facts.role is Role.VALUE:
            values[node] = held[call.inputs[int(facts.ref)]]
        else:
            given = inputs if facts.role is Role.INPUT else held
            values[node] = (
                given[facts.ref] if facts.ref in given else _tensor(program, model, call.full_name(facts.ref))
            )
        value = values[node]
        if isinstance(value, Tensor):
            shape = tuple(int(n.subs(dict(sizes))) for n in facts.shape)
            assert tuple(value.shape) == shape, f"{node.name} is {tuple(value.shape)}, its facts say {shape}"
            assert value.dtype == facts.dtype, f"{node.name} is {value.dtype}, its facts say {facts.dtype}"
    return [values[node] for node in block.results]


def _tensor(program: Program, model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its name in the program: parts of fused parameters are cut out."""
    for original, fused in program.fused.items():
        if name in fused.parts:
            index = fused.parts.index(name)
            sizes = [int(program.parameters[part].shape[fused.dim]) for part in fused.parts]
            return _tensor(program, model, original).split(sizes, fused.dim)[index]  # type: ignore[no-any-return]
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    tensor: Tensor = named[name]
    return tensor
