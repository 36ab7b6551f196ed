"""`pad_to_multiple_of`, from the call and the command line to the saved program, and what the errors say of it."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import autopar
from autopar.api import Parallelized
from autopar.cli import main
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.runtime.data import StandardLibrary, load_dataset, padded
from examples.gpt import GPT, GPTConfig
from tests.distributed.handwritten import make_settings

TINY = """
import torch
from examples.gpt import GPT, GPTConfig

def build():
    return GPT(GPTConfig(n_layer=2, d_model=32, block_size=32))

def inputs():
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}
"""


def planned(
    model: Any = None, sequence: int = 29, multiple: int | None = 4, gpus: int = 2, **pins: Any
) -> Parallelized:
    torch.manual_seed(0)
    model = model or GPT(GPTConfig(64, n_layer=2, n_head=4, d_model=32, block_size=64))
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    result: Parallelized = autopar.parallelize(
        model, gpus, gpu="h100-sxm-80gb", inputs={"input_ids": ids, "labels": ids}, sequence=sequence,
        pad_to_multiple_of=multiple, global_batch=4, **pins,
    )  # fmt: skip
    return result


@cache
def ring() -> Parallelized:
    return planned(cp=2, attention="ring")


def test_the_plan_is_that_of_the_padded_length() -> None:
    plan = ring().plan
    assert (plan.batch.sequence, plan.batch.padded_from, plan.batch.tokens) == (32, 29, 29)
    assert Plan.from_dict(plan.to_dict()) == plan and plan.to_dict()["padded_from"] == 29
    longer = plan.changed(padded_from=None)
    assert "padded_from" not in longer.to_dict() and longer.batch.tokens == 32


def test_what_counts_pads_is_said() -> None:
    result = ring()
    assert "4 × 29 tokens a step, padded to 32 ·" in str(result)
    assert "29 tokens a sample, padded to 32: times, memory and MFU count all, tokens/s the 29" in str(result)
    whole = planned(sequence=32, multiple=None, cp=2, attention="ring")
    assert result.estimate.step_time_s == whole.estimate.step_time_s
    assert result.estimate.tokens_per_s_per_gpu == pytest.approx(whole.estimate.tokens_per_s_per_gpu * 29 / 32)


def test_the_program_says_what_is_padded_with_what() -> None:
    source = ring().source()
    assert 'padded_from=29, padding=(("input_ids", 1, 0), ("labels", 1, -100)),' in source
    assert "29 tokens padded to 32" in source
    unpadded = planned(sequence=32, cp=2, attention="ring")  # 4 divides it already
    assert unpadded.plan.batch.padded_from is None and "padd" not in unpadded.source()


def test_the_padded_program_computes_the_model() -> None:
    parity = ring().verify(2)
    assert parity.holds, parity


class Mean(nn.Module):
    """A class for each sample, of the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 16), nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(input_ids).mean(1)), labels[:, 0] % 4)


def test_what_pads_change_is_refused_before_the_search_and_of_a_plan_that_is_given() -> None:
    with pytest.raises(PlanError, match=r"29 tokens cannot be padded to 32: pads change the loss: mean of .*\.py:\d+"):
        planned(Mean())
    result = planned(Mean(), 32, None)
    with pytest.raises(PlanError, match="27 tokens cannot be padded to 32"):
        result.source(result.plan.changed(padded_from=27))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multiple": 0}, "pad_to_multiple_of=0: use a whole number of tokens, 1 to 100,000,000"),
        ({"sequence": 1}, "pad_to_multiple_of is for sequences, and these inputs have none"),
        (
            {"sequence": 62, "multiple": 100},
            "sequence=62 padded to 100: the model's table of positions has 64 rows; use",
        ),
        (
            {"multiple": None, "cp": 2, "sequence": 30, "attention": "ring"},
            "use 28 or 32, pad_to_multiple_of=4, another",
        ),
        (
            {"multiple": 2, "cp": 2, "attention": "ring"},
            "sequence=29 padded to 30 is not divisible by 2 × cp=2, as causal attention needs for equal work on each "
            "rank: use pad_to_multiple_of=4, another cp",
        ),
        (
            {"multiple": 3, "cp": 4, "sequence": 28, "gpus": 4},
            "sequence=28 padded to 30 is not divisible by cp=4: use pad_to_multiple_of=8, or another cp",
        ),
        ({"multiple": None, "cp": 2}, "use 28 or 30, pad_to_multiple_of=4, or another cp"),
        ({"multiple": None, "attention": "ring"}, "and sequence=29: use pad_to_multiple_of=4, another length"),
    ],
    ids=str,
)
def test_errors_name_lengths_and_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as refused:
        planned(**changes)
    assert message in str(refused.value)


@pytest.mark.parametrize("tokens", [32, 33])
def test_samples_are_shorter_than_what_they_are_padded_to(tokens: int) -> None:
    with pytest.raises(PlanError, match=f"padded_from={tokens} with sequence=32: samples are padded to a longer"):
        ring().plan.changed(padded_from=tokens)


# --------------------------------------------------------------------------------
# In the runtime


def test_each_dim_is_padded_at_its_end_with_its_own_value() -> None:
    padding = (("ids", 1, 0), ("labels", 1, -100), ("bias", 1, 0), ("bias", 2, 0))
    batch = {
        "ids": torch.tensor([[1, 2, 3]]),
        "labels": torch.tensor([[4, 5, -100]]),
        "bias": torch.ones(1, 3, 3, dtype=torch.bool),
        "kept": torch.ones(1, 7),
    }
    made = padded(batch, padding, 5)
    assert made["ids"].tolist() == [[1, 2, 3, 0, 0]] and made["labels"].tolist() == [[4, 5, -100, -100, -100]]
    assert made["bias"].dtype is torch.bool and made["bias"].shape == (1, 5, 5)
    assert made["bias"].sum() == 9 and made["bias"][0, :3, :3].all()
    assert made["kept"] is batch["kept"] and batch["ids"].shape == (1, 3)
    assert padded(batch, (), 5) == batch


def test_the_default_data_are_samples_without_pads() -> None:
    data = load_dataset(None, make_settings(sequence=32, padded_from=29, vocabulary=256))
    assert isinstance(data, StandardLibrary) and len(data[0]["input_ids"]) == 29


# --------------------------------------------------------------------------------
# On the command line


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"padded_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{name}:build"


def test_a_plan_with_pads_is_edited_and_emitted_again(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpus", "2", "--gpu", "h100-sxm-80gb", "--global-batch", "8", "--cp", "2", "--attention", "ring"]
    asked = ["--sequence", "29", "--pad-to-multiple-of", "4"]
    assert main(["emit", tiny, *options, *asked, "--out", "program"]) == 0
    plan = yaml.safe_load((tmp_path / "program" / "plan.yaml").read_text())
    assert (plan["sequence"], plan["padded_from"]) == (32, 29)
    (tmp_path / "edited.yaml").write_text(yaml.safe_dump(plan | {"micro_batch": 2, "padded_from": 27}))
    assert main(["emit", tiny, "--plan", "edited.yaml", "--out", "again"]) == 0
    assert yaml.safe_load((tmp_path / "again" / "plan.yaml").read_text()) == plan | {
        "micro_batch": 2,
        "padded_from": 27,
    }
    assert "padded_from=27, padding=" in (tmp_path / "again" / "model.py").read_text()
    capsys.readouterr()
    assert main(["emit", tiny, "--plan", "edited.yaml", "--out", "no", "--pad-to-multiple-of", "8"]) == 2
    assert "--pad-to-multiple-of: with --plan this is read from edited.yaml" in capsys.readouterr().err
    (tmp_path / "edited.yaml").write_text(yaml.safe_dump(plan | {"padded_from": "all"}))
    assert main(["emit", tiny, "--plan", "edited.yaml", "--out", "no"]) == 2
    assert "padded_from: 'all' is not a whole number of tokens, 1 to" in capsys.readouterr().err


@pytest.mark.slow
def test_a_saved_program_with_pads_is_the_model(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpus", "2", "--gpu", "h100-sxm-80gb", "--global-batch", "8", "--cp", "2"]
    assert main(["emit", tiny, *options, "--sequence", "29", "--pad-to-multiple-of", "4", "--out", "program"]) == 0
    assert main(["verify", "program", "--steps", "2"]) == 0
    assert "the program computes what the original computes" in capsys.readouterr().out
