"""A length beyond the table of positions is refused before anything is traced."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.api import parallelize
from autopar.errors import PlanError
from autopar.trace.positions import check_positions
from examples.gpt import GPT, GPTConfig

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


class Clamped(nn.Module):
    """Distances beyond the table are those of its last row."""

    def __init__(self) -> None:
        super().__init__()
        self.distances, self.ids = nn.Embedding(8, 4), nn.Embedding(64, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        others = positions[None, :].clone()
        others[others > 7] = 7
        apart = (
            self.distances(positions.clamp(max=7)) + self.distances(others) + self.distances(positions.clamp_(max=7))
        )
        loss: Tensor = (self.ids(input_ids) + apart).mean()
        return loss


class Shifted(nn.Module):
    """As OPT's: the table begins with two rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.ids = nn.Embedding(34, 4), nn.Embedding(64, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :] + 2
        loss: Tensor = (self.ids(input_ids) + self.positions(positions)).mean()
        return loss


def gpt() -> nn.Module:
    return GPT(GPTConfig(n_layer=2, n_head=2, d_model=16, block_size=32))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=64))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SIZES, vocab_size=64, max_position_embeddings=32))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, max_position_embeddings=32))


def check(model: nn.Module, sequence: int) -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    inputs = {"input_ids": ids} if isinstance(model, Clamped | Shifted) else {"input_ids": ids, "labels": ids}
    check_positions(model, inputs, sequence, f"sequence={sequence}")


@pytest.mark.parametrize("build", [gpt, gpt2])
def test_a_position_beyond_the_table(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.api.prepare", lambda *of: pytest.fail("traced"))
    model = build()
    check(model, 32)
    ids = torch.zeros(2, 16, dtype=torch.long)
    started = time.process_time()
    with pytest.raises(PlanError, match="sequence=33: the model's table of positions has 32 rows; use at most 32"):
        parallelize(model, 1, gpu="h100-sxm-80gb", inputs={"input_ids": ids, "labels": ids}, sequence=33)
    assert time.process_time() - started < 1


def test_positions_that_are_a_buffer() -> None:
    check(bert(), 32)
    with pytest.raises(PlanError, match="sequence=33: the model's table of positions has 32 rows; use at most 32"):
        check(bert(), 33)


@pytest.mark.parametrize("build", [llama, Clamped])
def test_what_has_no_such_table_is_not_refused(build: Any) -> None:
    """Whose vocabulary or distances are fewer than the tokens."""
    check(build(), 1000)


def test_a_table_that_is_shifted() -> None:
    check(Shifted(), 32)
    with pytest.raises(PlanError, match="sequence=33: the model's table of positions has 34 rows; use at most 32"):
        check(Shifted(), 33)
