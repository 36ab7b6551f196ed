"""How attentions meet a sequence that cp cuts, in words."""

from __future__ import annotations

import torch

from autopar.compile.notes import context_note
from autopar.plan.plan import Plan, Solution
from autopar.runtime.choices import Mesh
from autopar.search.layouts import ALL_GATHER, RING, ULYSSES
from tests.distributed.test_context import encoder, llama
from tests.distributed.test_windows import qwen


def test_the_way_of_each_layout_is_named() -> None:
    made = encoder()
    for layout, words in (
        (RING, "cp=2: 4 of 4 attentions by ring attention"),
        (ULYSSES, "cp=2: 4 of 4 attentions by heads for the sequence by all-to-alls (Ulysses)"),
        (ALL_GATHER, "cp=2: 4 of 4 attentions by keys and values gathered"),
    ):
        assert context_note(made.program, made.plan(cp=2, context=layout).context) == words


def test_a_layout_that_heads_forbid_is_said_aloud() -> None:
    """8 heads over 16 ranks of cp: no rank could have one."""
    made = llama()
    solution = made.plan(cp=16, context=ULYSSES, sequence=32).context
    said = context_note(made.program, solution)
    assert said.startswith("cp=16: 0 of 4 attentions by heads") and "4 with ring attention" in said


def test_a_window_is_said_and_whether_a_mask_is_held() -> None:
    made = qwen(5)
    for layout, words in (
        (RING, "; 2 in a sliding window of 5 keys, no mask held"),
        (ALL_GATHER, "; 2 in a sliding window of 5 keys, no mask held"),
        (ULYSSES, "; 2 in a sliding window of 5 keys, by a mask of all pairs"),
    ):
        said = context_note(made.program, made.plan(cp=2, context=layout).context)
        assert said.startswith("cp=2: 4 of 4 attentions by ") and said.endswith(words)


def test_without_cp_there_is_nothing_to_say() -> None:
    assert context_note(encoder().program, Solution(1, {})) == ""


def test_a_plan_names_the_layout() -> None:
    made = encoder()
    plan: Plan = made.plan(cp=2, context=RING)
    assert plan.mesh == Mesh(cp=2) and Plan.from_dict(plan.to_dict()) == plan
    assert made.dtype == torch.float64
