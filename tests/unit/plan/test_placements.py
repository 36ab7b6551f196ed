"""plan.yaml has the placements of the blocks that are sharded: one that it leaves out is read as replicated."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import yaml

import autopar
from autopar.api import Parallelized
from autopar.given_plan import with_given
from autopar.plan.plan import Plan, Solution
from autopar.search.layouts import replicated
from examples.gpt import GPT, GPTConfig


@cache
def planned(tp: int) -> Parallelized:
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    result: Parallelized = autopar.parallelize(
        GPT(GPTConfig(64, n_layer=2, n_head=4, d_model=32, block_size=64)), 2, gpu="h100-sxm-80gb", global_batch=4,
        inputs={"input_ids": ids, "labels": ids}, tp=tp, sequence_parallel=False,
    )  # fmt: skip
    return result


def read(plan: Plan, folder: Path) -> Plan:
    plan.save(folder / "plan.yaml")
    return Plan.load(folder / "plan.yaml")


def test_without_tensor_parallelism_there_are_none(tmp_path: Path) -> None:
    plan = planned(1).plan
    assert plan.solution.strategies and plan.to_dict()["placements"] == {}
    assert planned(1).source(read(plan, tmp_path)) == planned(1).source()


def test_a_replicated_block_is_left_out(tmp_path: Path) -> None:
    """It has the program, and the price, that the plan with its placements has: an older file still loads."""
    result = planned(2)
    solution = result.plan.solution
    strategies = {**solution.strategies, "Block": replicated(result.program).strategies["Block"]}
    whole = result.plan.changed(solution=Solution(2, strategies, solution.name))
    part = read(whole, tmp_path)
    assert set(part.solution.strategies) == set(strategies) - {"Block"}
    older = whole.to_dict()
    older["placements"] = {b: {n: str(s) for n, s in nodes.items()} for b, nodes in strategies.items()}
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(older))
    assert Plan.load(tmp_path / "older.yaml") == whole
    given = [with_given(result, plan) for plan in (part, whole)]
    assert given[0].plan == given[1].plan and given[0].estimate == given[1].estimate
    assert result.source(part) == result.source(whole) != result.source()


def test_a_solution_that_shards_nothing_is_no_plan_without_placements(tmp_path: Path) -> None:
    """Where none are given they are solved for, so these are written."""
    plan = planned(2).plan
    plan = plan.changed(solution=Solution(2, replicated(planned(2).program).strategies))
    assert read(plan, tmp_path) == plan
