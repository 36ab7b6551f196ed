"""The sweep of Hugging Face classes: configs shrink by one function, some classes are planned and computed."""

from __future__ import annotations

import pytest

from tests.sweep.__main__ import summary
from tests.sweep.attempt import CRASHED, OWN, PLANNED, Outcome, attempt
from tests.sweep.configs import EXPERTS, LAYERS, VOCABULARY, shrink


def test_shrunk_configs_keep_their_proportions() -> None:
    config = {
        "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "num_hidden_layers": 32, "vocab_size": 32000,
        "layer_types": ["full", "full", *["sliding"] * 30], "num_experts": 64, "num_experts_per_tok": None,
        "attention_dropout": 0.1, "text_config": {"hidden_size": 64, "use_cache": True}, "moe_intermediate_size": 1407,
    }  # fmt: skip
    small = shrink(config)
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"] == 512
    assert small["num_hidden_layers"] == LAYERS and small["layer_types"] == ["full", "sliding"]
    assert (small["vocab_size"], small["num_experts"], small["attention_dropout"]) == (VOCABULARY, EXPERTS, 0.0)
    assert small["num_experts_per_tok"] == 2 and small["moe_intermediate_size"] % 8 == 0
    assert small["text_config"] == {"hidden_size": 8, "use_cache": False}


@pytest.mark.parametrize(
    "name",
    [
        "AlbertForSequenceClassification",
        "DeepseekV32ForCausalLM",  # sparse attention, which reads the mask
    ],
)
def test_a_class_is_planned_saved_and_computed(name: str) -> None:
    outcome = attempt(name, interpreted=True)
    assert outcome.outcome == PLANNED, f"{outcome.at}: {outcome.reason}"
    assert outcome.gradients is not None and outcome.gradients <= 1e-9


def test_the_table_counts_what_fails_by_itself_apart() -> None:
    kinds = {"A": "CausalLM", "B": "CausalLM", "C": "CausalLM"}
    outcomes = [Outcome("A", PLANNED), Outcome("B", CRASHED), Outcome("C", OWN)]
    row = next(line for line in summary(outcomes, kinds).splitlines() if "CausalLM" in line)
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["*ForCausalLM", "2", "1", "50%", "0", "1", "1"]
