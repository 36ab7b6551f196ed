"""The type check: what goes silently wrong in other systems is an error here, before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from autopar.cost_models.hardware import gpu
from autopar.errors import TypeCheckError
from autopar.ir.build import replace_node
from autopar.ir.graph import B, Block, Program, Role, S, info, node_inputs, set_strategy, update_info
from autopar.ir.ops import COLLECTIVES, convert
from autopar.passes import PASSES
from autopar.placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Shard, Strategy
from autopar.plan.plan import Plan
from autopar.rules import Axis, TensorAxis
from autopar.rules.verify import Level, verify
from autopar.runtime.choices import Mesh
from autopar.search.intra_op import solve
from autopar.search.layouts import MEGATRON, MEGATRON_SP, Layout
from autopar.search.op_costs import TimeCosts
from tests.models import gpt

VALUES = {B: 2, S: 16}


def _program(layout: Layout, until: str) -> tuple[Program, Axis]:
    """The small GPT on 2 ranks after the passes up to `until`."""
    program = gpt()[1]
    axis = TensorAxis(2, VALUES, layout.sequence)
    solution = solve(program, axis, TimeCosts(gpu("h100-sxm-80gb"), "bf16", 2, VALUES), layout)
    plan = Plan.of(Mesh(tp=2), 2, 2, 16, ((0, 3),), precision="fp64", solution=solution)
    for step in PASSES:
        program = step.apply(program, plan)
        if step.name == until:
            break
    verify(program, step.leaves, [axis])
    return program, axis


def _node(block: Block, name: str) -> fx.Node:
    found: fx.Node = next(n for n in block.graph.nodes if n.name == name)
    return found


def _operand(block: Block, name: str, place: int = 0) -> fx.Node:
    return node_inputs(_node(block, name))[place]


def _assert_refused(program: Program, axis: Axis, match: str, level: Level = Level.CONVERTED) -> None:
    with pytest.raises(TypeCheckError, match=match):
        verify(program, level, [axis])


@pytest.mark.parametrize("until", ["insert_conversions", "lower_conversions"])
@pytest.mark.parametrize(
    ("layout", "reader", "place"),
    [
        (MEGATRON, "c_fc", 0),  # copy_to: the gradient of the input would be one rank's
        (MEGATRON, "c_proj_add_1", 0),  # all-reduce: S5, the bias added on each summand
        (MEGATRON_SP, "c_fc", 0),
        (MEGATRON_SP, "c_proj_add_1", 0),
    ],
)
def test_a_missing_conversion(until: str, layout: Layout, reader: str, place: int) -> None:
    program, axis = _program(layout, until)
    conversion = _operand(program.blocks["Block"], reader, place)
    replace_node(conversion, node_inputs(conversion)[0])
    _assert_refused(program, axis, rf"(?s)Block\.{reader} .*a conversion is missing")


@pytest.mark.parametrize("wrong", ["gather", "reduce_scatter", "copy_to"])
def test_a_wrong_collective(wrong: str) -> None:
    """gather instead of all_gather: the loss is right, the gradient is one rank's share of it."""
    program, axis = _program(MEGATRON_SP, "lower_conversions")
    collective = _operand(program.blocks["Block"], "c_fc")
    assert collective.target is COLLECTIVES["all_gather"]
    collective.target = COLLECTIVES[wrong]
    _assert_refused(program, axis, rf"is all_gather\(1,\), not {wrong}")


def test_a_collective_along_a_wrong_dim() -> None:
    program, axis = _program(MEGATRON_SP, "lower_conversions")
    collective = _operand(program.blocks["Block"], "c_fc")
    collective.args = (collective.args[0], 2)
    _assert_refused(program, axis, r"is all_gather\(1,\)")


@pytest.mark.parametrize(
    ("layout", "node", "strategy", "why"),
    [
        (MEGATRON, "root_add", "P, R -> P", "Partial + Replicate"),
        (MEGATRON, "c_proj_add", "P, R -> P", "S5: a row-parallel bias added once on each rank"),
        (MEGATRON, "c_proj_add", "P, Rp -> P", "S5"),
        (MEGATRON_SP, "ln_1", "S(1), R, R -> S(1)", "S6: the norm's gradient not summed over tp"),
        (MEGATRON_SP, "c_proj_add", "S(1), R -> S(1)", "S6, of a bias"),
        (MEGATRON, "c_fc", "R, S(0) -> S(2)", "the input's gradient not summed"),
        (MEGATRON, "c_proj", "S(2), S(1) -> R", "a row-parallel product not reduced"),
        (MEGATRON, "gelu_gelu", "P -> P", "gelu of a summand"),
        (MEGATRON, "ln_1", "S(2), S(0), S(0) -> S(2)", "a norm over a part of its dim"),
        (MEGATRON, "c_fc", "S(0), Rp -> S(0)", "the batch on tp"),
        (MEGATRON, "c_fc", "R, R -> S(2)", "S9: a plain tensor where a sharded one is meant"),
    ],
)  # fmt: skip
def test_a_typing_that_no_rule_has(layout: Layout, node: str, strategy: str, why: str) -> None:
    program, axis = _program(layout, "shard_parameters")
    set_strategy(_node(program.blocks["Block"], node), Strategy.parse(strategy))
    _assert_refused(program, axis, "is no strategy of its rule", level=Level.TYPED)


def test_a_plain_tensor_meets_a_sharded_one() -> None:
    """S9: a weight left whole that its reader takes as a shard; a node that nothing typed."""
    program, axis = _program(MEGATRON, "insert_conversions")
    weight = _node(program.blocks["Block"], "mlp_c_fc_weight")
    set_strategy(weight, Strategy((), REPLICATE))
    _assert_refused(program, axis, "c_fc .*a conversion is missing")
    update_info(weight, strategies={})
    _assert_refused(program, axis, "mlp_c_fc_weight.* has no placement")


def test_a_norm_weight_without_its_sum_over_the_sequence() -> None:
    """S6: stored as plain Replicate, and read by each rank for its own part of the sequence."""
    program, axis = _program(MEGATRON_SP, "insert_conversions")
    weight = _operand(program.blocks["Block"], "ln_1", 1)
    assert info(weight).placement == GRAD_PARTIAL
    set_strategy(weight, Strategy((), REPLICATE))
    _assert_refused(program, axis, r"ln_1 .*wants \(S\(1\), Rp, Rp -> S\(1\)\) but reads \(S\(1\), R, Rp\)")


def test_values_that_blocks_pass_have_one_placement() -> None:
    program, axis = _program(MEGATRON_SP, "insert_conversions")
    block = program.blocks["epilogue"]
    (value,) = block.placeholders(Role.VALUE)
    with block.graph.inserting_before(block.ops[0]):
        split = block.graph.call_function(convert, (value, "R", "S(1)", "tp"))
    split.meta["autopar"] = info(value).made(role=Role.CONVERT).typed(Strategy((REPLICATE,), Shard(1)))
    value.replace_all_uses_with(split, delete_user_cb=lambda user: user is not split)
    set_strategy(value, Strategy((), REPLICATE))
    _assert_refused(program, axis, r"leaves as S\(1\) but epilogue takes R")


@pytest.mark.parametrize(
    ("block", "node", "placement", "match"),
    [
        ("Block", "ln_1_weight", PARTIAL, "a parameter is whole or a shard"),
        ("prologue", "input_ids", Shard(1), "an input is whole on every rank"),
        ("epilogue", "lm_head_weight", GRAD_PARTIAL, "is tied to"),
    ],
)
def test_what_enters_a_block(block: str, node: str, placement: Any, match: str) -> None:
    """An edited plan.yaml may say anything."""
    program, axis = _program(MEGATRON, "shard_parameters")
    set_strategy(_node(program.blocks[block], node), Strategy((), placement))
    with pytest.raises(TypeCheckError, match=match):
        verify(program, Level.TYPED, [axis])


def test_a_collective_along_an_uneven_dim() -> None:
    """S1: logits of 97 columns may lie in two chunks, but cannot be gathered from them."""
    program, axis = _program(MEGATRON, "lower_conversions")
    head = _node(program.blocks["epilogue"], "root_reshape")
    loss = _node(program.blocks["epilogue"], "root_cross_entropy_loss")
    with program.blocks["epilogue"].graph.inserting_before(loss):
        gathered = program.blocks["epilogue"].graph.call_function(COLLECTIVES["gather"], (head, 1), {"axis": "tp"})
    gathered.meta["autopar"] = info(head).made(role=Role.CONVERT).typed(Strategy((Shard(1),), REPLICATE))
    loss.replace_input_with(head, gathered)
    _assert_refused(program, axis, "97 is not divisible by tp=2")


def test_the_message_names_block_line_and_neighbours() -> None:
    program, axis = _program(MEGATRON, "shard_parameters")
    set_strategy(_node(program.blocks["Block"], "root_add"), Strategy.parse("P, R -> P"))
    with pytest.raises(TypeCheckError) as error:
        verify(program, Level.TYPED, [axis])
    message = str(error.value)
    assert message.startswith("Block.root_add (")
    assert "examples/gpt.py:" in message
    assert "    > root_add(" in message and "c_proj_add(" in message


def test_every_program_has_facts_and_reads_what_is_given() -> None:
    """Also before there are placements."""
    program = gpt()[1]
    bare = program.copy_blocks()
    bare.blocks["epilogue"].ops[0].meta.clear()
    with pytest.raises(TypeCheckError, match="has no shape and dtype"):
        verify(bare, Level.TRACED)
    with pytest.raises(TypeCheckError, match="Block reads .*, which no call before it gives"):
        verify(replace(program, calls=program.calls[1:]), Level.TRACED)


def test_a_lowered_program_has_no_conversions_left() -> None:
    program, axis = _program(MEGATRON, "insert_conversions")
    _assert_refused(program, axis, "is a conversion still", Level.LOWERED)
