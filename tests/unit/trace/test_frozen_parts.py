"""What is under no_grad, and what reads no input: layers as others are, which keep nothing; what outlives them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ir.graph import Program, Role, info, op_name
from autopar.liveness.saved import Saved
from autopar.search.layouts import replicated
from autopar.trace.export import trace
from tests import models
from tests.distributed.programs import subject
from tests.first_hour import frozen_parts, learned_queries, shared_layers

CASES = {case.name: case for kind in (frozen_parts, learned_queries, shared_layers) for case in (*kind.CASES,)}


@cache
def program_of(name: str) -> Program:
    case = CASES[name]
    return models.layered(case.build().double(), {n: _double(x) for n, x in case.inputs.items()})


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def source_of(name: str, tp: int = 1) -> str:
    made = subject(CASES[name].build().double(), torch.float64, program_of(name))
    return made.source(made.plan(tp=tp, sequence=8))


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("distill", [f"teacher.blocks.{i}" for i in range(4)]), ("adapter", [f"encoder.{i}" for i in range(3)])],
)
def test_frozen_layers_are_one_class_that_keeps_nothing(name: str, frozen: list[str]) -> None:
    program = program_of(name)
    calls = [call for call in program.layer_calls if call.path in frozen]
    assert [call.path for call in calls] == frozen
    (block,) = {program.blocks[call.block] for call in calls}
    assert not any(op_name(node) == "detach" for node in block.ops), "nothing there has a gradient"
    saved = Saved(block, replicated(program).strategies[block.name], 1)
    assert not any(saved.kept_by(node) for node in block.ops)


def test_frozen_layers_are_sharded() -> None:
    source = source_of("distill", tp=2)
    assert 'parameter(self, "0.weight", (16, 16), shard=0, frozen=True)' in source
    assert 'parameter(self, "teacher.emb.weight", (64, 16), shard=0, frozen=True)' in source


def test_trained_parameters_are_detached_where_they_are_read() -> None:
    """The same layers twice: with a gradient, and without one."""
    program = program_of("stopped view")
    detached = [n for _, n in program.each_op() if op_name(n) == "detach"]
    assert {info(n.all_input_nodes[0]).role for n in detached} == {Role.PARAMETER}
    readers = {info(user).module for n in detached for user in n.users}
    assert readers == {info(n).module for n in detached}
    names = [info(n.all_input_nodes[0]).ref for n in detached]
    assert len(names) == len(set(names)) == 5, "each once: the embedding, and weight and bias of two layers"


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.first(x)
            with torch.enable_grad():
                h = self.second(h)
        return F.mse_loss(h, x)


def test_a_gradient_within_a_region_without_is_kept() -> None:
    program = trace(Nested(), {"x": torch.zeros(2, 4)}, torch.float32)
    trained = {
        info(n.all_input_nodes[1]).ref for _, n in program.each_op() if op_name(n) == "linear" and info(n).requires_grad
    }
    assert trained == {"second.weight"}


@pytest.mark.parametrize("name", ["learned queries", "query decoder"])
def test_blocks_that_read_nothing_are_given_the_batch(name: str) -> None:
    source = source_of(name)
    assert "x = self._prologue(ids.shape[0], ids.device)" in source
    assert "def _prologue(self, b, device):" in source


@pytest.mark.parametrize("name", CASES)
def test_no_view_of_a_parameter_leaves_a_block(name: str) -> None:
    """ZeRO-3 frees whole parameters after their block: its reader's backward would find nothing there."""
    for block in program_of(name).blocks.values():
        for result in block.results:
            base = result
            while base.op == "call_function" and op_name(base) in (
                "expand",
                "select",
                "reshape",
                "slice",
                "detach",
                "unsqueeze",
            ):
                base = base.all_input_nodes[0]
            assert info(base).role is not Role.PARAMETER, (block.name, result)


@pytest.mark.parametrize("name", [case.name for case in shared_layers.CASES])
def test_layers_own_the_parameters_that_they_read(name: str) -> None:
    """A parameter of the model between the uses of a layer is given to it as a value."""
    program = program_of(name)
    for call in program.layer_calls:
        if program.is_between(call.block):
            continue
        own = program.blocks[call.block].placeholders(Role.PARAMETER, Role.BUFFER)
        assert {call.full_name(info(n).ref) for n in own} <= program.parameters.keys() | program.buffers.keys()
