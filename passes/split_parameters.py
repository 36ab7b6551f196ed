"""Give each slice of a parameter that is only read in slices a parameter of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.build import eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Fused, Program, Role, TensorInfo, arguments, info, set_info
from autopar.plan.plan import Plan
from autopar.rules.verify import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitParameters:
    """A shard of [gate; up] holds rows of gate alone: shards of gate and of up have to be parameters themselves.

    Requires: splits written as slices. Ensures: a parameter whose readers are slices that together are all of it
    is one parameter a slice, recorded in `fused`.

        gate = slice(w, 1, 0, 72); up = slice(w, 1, 72, 144)   |   _w_0, _w_1
    """

    name: ClassVar[str] = "split_parameters"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        tied = set(program.tied) | set(program.tied.values())
        for node in program.blocks[MODEL].placeholders(Role.PARAMETER):
            slices = _slices(node)
            if slices and info(node).ref not in tied:
                program = _split(program, node, slices)
        eliminate_dead(program.blocks[MODEL].graph)
        return program


def _slices(node: fx.Node) -> list[fx.Node]:
    """The readers of a parameter in order, if they are slices of one dim that cover it once each; else none."""
    readers = list(node.users)
    if len(readers) < 2 or any(r.target is not aten.slice.Tensor or len(r.args) != 4 for r in readers):
        return []
    shape = info(node).shape
    if any(not size.is_Integer for r in readers for size in info(r).shape):  # the rows of a sequence of any length
        return []
    if len({int(arguments(r)[1]) % len(shape) for r in readers}) != 1:
        return []
    dim, end = int(arguments(readers[0])[1]) % len(shape), 0
    ordered = sorted(readers, key=_start)
    for reader in ordered:
        if _start(reader) != end:
            return []
        end += int(info(reader).shape[dim])
    return ordered if end == int(shape[dim]) else []


def _start(node: fx.Node) -> int:
    return int(arguments(node)[2] or 0)


def _split(program: Program, node: fx.Node, slices: list[fx.Node]) -> Program:
    facts, graph = info(node), node.graph
    dim = int(arguments(slices[0])[1]) % len(facts.shape)
    owner, _, leaf = facts.ref.rpartition(".")
    names = tuple(f"{owner}._{leaf}_{i}" if owner else f"_{leaf}_{i}" for i in range(len(slices)))
    if taken := sorted({*names} & {*program.parameters, *program.buffers}):
        raise PlanError(f"{facts.ref} is read in parts, one to be called {taken[0]}, as another is: rename it")
    parameters = dict(program.parameters)
    original = parameters.pop(facts.ref)
    for name, part in zip(names, slices, strict=True):
        with graph.inserting_before(node):
            new = graph.placeholder(name.replace(".", "_"))
        set_info(new, replace(facts, shape=info(part).shape, ref=name))
        replace_node(part, new)
        parameters[name] = TensorInfo(info(new).shape, original.dtype, original.requires_grad)
    return replace(program, parameters=parameters, fused={**program.fused, facts.ref: Fused(names, dim)})
