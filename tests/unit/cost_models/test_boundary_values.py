"""What crosses a pipeline boundary by the cost model, against what the compiled program's stages send."""

from __future__ import annotations

from itertools import combinations

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.compile.compiler import compile_program, cut_sequence
from autopar.cost_models.boundary_values import boundary_evaluator
from autopar.cost_models.describe import describe
from autopar.cost_models.layer_costs import BoundaryValue, ModelCosts, StageConstant
from autopar.ir.graph import B, Program, S
from autopar.plan.plan import Plan
from autopar.search.layouts import MEGATRON, MEGATRON_SP, replicated
from tests.distributed.families import family
from tests.distributed.programs import Subject, llama

VALUES = {B: 4, S: 16}
PLANS = {
    "alone": {},
    "tp2": {"tp": 2, "layout": MEGATRON},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
}
QUICK = [("gpt2", "alone"), ("t5", "alone"), ("unet", "alone"), ("t5", "tp2-sp")]
SLOW = [(name, "alone") for name in ("bert", "whisper", "convnext", "mixtral")]
SLOW += [("t5", "tp2"), ("whisper", "tp2-sp"), ("qwen3", "tp2-sp")]


def costs_of(program: Program, plan: Plan) -> ModelCosts:
    local = cut_sequence(program, plan)
    return describe(local, plan.solution if plan.mesh.tp > 1 else replicated(local), VALUES)


def sent(program: Program, plan: Plan) -> list[tuple[int, int]]:
    """Of each boundary: bytes of the values that the program sends over it, and of those that have gradients."""
    found = []
    for stage in program.stages[:-1]:
        values = [program.value_info(value) for value in stage.sends]
        sizes = [
            int(
                sympy.Mul(*v.shape, v.dtype.itemsize).subs(
                    {B: plan.batch.micro_batch, S: plan.batch.sequence // plan.mesh.cp}
                )
            )
            // (plan.mesh.tp if v.placement.is_shard else 1)
            for v in values
        ]
        floating = [size for size, v in zip(sizes, values, strict=True) if v.dtype.is_floating_point]
        found.append((sum(sizes), sum(floating)))
    return found


def crossing(made: Subject, plan: Plan) -> list[tuple[float, float]]:
    """The same by the cost model."""
    boundaries = boundary_evaluator(costs_of(made.program, plan).boundary_values, (), len(made.program.layer_calls))(
        plan.batch.micro_batch, plan.batch.sequence // plan.mesh.cp
    )
    stops = [stop for _, stop in plan.pipeline.stages[:-1]]
    return [(boundaries.values_bytes[stop], boundaries.gradients_bytes[stop]) for stop in stops]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("name", "how"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_the_price_of_each_boundary_is_what_the_program_sends(name: str, how: str) -> None:
    """A stage a layer, so that there is every boundary; encoder outputs, skips and masks are carried over several."""
    made = family(name, torch.bfloat16)
    layers = len(made.program.layer_calls)
    plan = made.plan(pp=layers, schedule="gpipe", **PLANS[how])  # type: ignore[arg-type]
    real = sent(compile_program(made.program, plan), plan)
    assert crossing(made, plan) == real
    if name in ("t5", "whisper", "unet"):
        assert len({values for values, _ in real}) > 1  # more than the hidden state


def test_a_boundary_under_cp_is_crossed_by_a_rank_s_tokens() -> None:
    made = llama(torch.float32)
    plan = made.plan(pp=4, cp=2, schedule="gpipe")
    assert crossing(made, plan) == sent(compile_program(made.program, plan), plan)
    assert crossing(made, plan)[0] == (4 * 8 * 32 * 4, 4 * 8 * 32 * 4)


# --------------------------------------------------------------------------------
# Against the definition

LAYERS = 6


@st.composite
def values(draw: st.DrawFn) -> BoundaryValue:
    made = draw(st.integers(0, LAYERS - 1))
    read = draw(st.integers(made, LAYERS - 1))
    size = sympy.Integer(draw(st.integers(1, 99)))
    gradient = draw(st.sampled_from([size, sympy.Integer(0)]))
    return BoundaryValue(made, read, size, gradient, draw(st.booleans()) or read > made + 1, draw(st.booleans()))


@st.composite
def constants(draw: st.DrawFn) -> StageConstant:
    readers = draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))
    return StageConstant(tuple(sorted(readers)), sympy.Integer(draw(st.integers(1, 99))))


@given(st.lists(values(), max_size=8), st.lists(constants(), max_size=4), st.integers(1, 4))
def test_every_split_sends_and_keeps_by_the_definition(
    passing: list[BoundaryValue], made: list[StageConstant], stages: int
) -> None:
    boundaries = boundary_evaluator(tuple(passing), tuple(made), LAYERS)(1, 1)
    for cut in combinations(range(1, LAYERS), stages - 1):
        for start, stop in zip((0, *cut), (*cut, LAYERS), strict=True):
            received = [v for v in passing if v.made < start <= v.read]
            going = [v for v in passing if v.made < stop <= v.read]
            receives = sum(v.size_bytes for v in received) + sum(v.gradient_bytes for v in going)
            assert boundaries.receives_bytes(start, stop) == float(receives)
            own = [v for v in passing if start <= v.made < stop]
            fullest_times = sum(v.size_bytes for v in own if v.once_per_stage)  # once, whether it is read here or sent
            fullest_times += sum(
                v.size_bytes for v in own if not v.once_per_stage and v in going
            )  # no layer of the stage counts it
            fullest_times -= sum(
                v.size_bytes for v in received if not v.once_per_stage and v.kept
            )  # it lies in its buffer
            fullest_times += sum(t.size_bytes for t in made if not {*range(start, stop)}.isdisjoint(t.readers))
            assert boundaries.kept_bytes(start, stop) == float(fullest_times)
            fullest_times -= sum(
                v.size_bytes for v in received if not v.once_per_stage and not v.kept
            )  # counted by the layer that
            assert boundaries.kept_bytes(start, stop, whole_first_layer=True) == float(
                fullest_times
            )  # is recomputed from it
