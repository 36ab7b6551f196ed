"""parallelize and what it returns: table, ledger, what-if, source, saved folder, estimate."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.api import Parallelized, estimate, parallelize
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.plan.recompute import whole_layers
from autopar.runtime.weights import draw
from examples.gpt import GPT, GPTConfig
from tests.harness import run_ranks

IDS = torch.zeros(2, 16, dtype=torch.long, device="meta")
OPTIONS: dict[str, Any] = {"gpu": "h100-sxm-80gb", "global_batch": 8, "inputs": {"input_ids": IDS, "labels": IDS}}


def build() -> GPT:
    return GPT(GPTConfig(n_layer=2, d_model=32, block_size=32))


@cache
def planned() -> Parallelized:
    return parallelize(build, 2, **OPTIONS)


def test_names_of_the_package() -> None:
    assert autopar.parallelize is parallelize
    assert {"parallelize", "estimate", "Cluster", "Plan", "PlanError"} <= set(autopar.__all__)
    with pytest.raises(AttributeError, match="no attribute 'paralelize'"):
        autopar.paralelize  # noqa: B018


def test_table() -> None:
    text = str(planned())
    assert text.startswith("GPT · 34,688 parameters · 2 × H100-SXM-80GB · 8 × 16 tokens a step · bf16 · AdamW · budget")
    for column in ("micro×acc", "tokens/s/GPU", "MFU", "peak GiB", "bubble", "sharded", "limited by"):
        assert column in text
    assert "searched" in text and "prediction level L0" in text


def test_explain_has_a_ledger_of_each_stage() -> None:
    pinned = parallelize(build, 2, **OPTIONS, pp=2, dp=1, tp=1)
    text = pinned.explain()
    assert "stage 0 (layer 0, embedding)" in text and "stage 1 (layer 1, head)" in text
    assert "activations" in text and "one micro-batch" in text


def test_compare_shows_both() -> None:
    text = planned().compare(pp=2, dp=1, tp=1)
    assert " 2   2   1   1   1" in text
    assert "why not pp2" in text


def test_fully_pinned_is_an_estimate() -> None:
    pins: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "zero": 1, "micro_batch": 2, "recompute": "full"}
    found = estimate(build, 2, **OPTIONS, **pins)
    result = parallelize(build, 2, **OPTIONS, **pins)
    assert found == result.estimate
    assert (result.plan.sharding.zero, result.plan.batch.micro_batch, result.plan.activations.recompute) == (
        1,
        2,
        whole_layers((0, 1)),
    )
    assert found.step_time_s > 0 and found.peak_bytes > 0


def test_saved_folder(tmp_path: Path) -> None:
    """A meta model's initialisation is saved as data; the plan reads back as it was."""
    result = parallelize(build, 2, **OPTIONS, tp=2)
    folder = result.save(tmp_path / "program")
    assert Plan.load(folder / "plan.yaml") == result.plan
    recipes = json.loads((folder / "init.json").read_text())
    assert recipes["transformer.wpe.weight"] == [["normal_", 0.0, 0.02]]
    assert not (folder / "weights.pt").exists()
    assert "torchrun --nproc-per-node 2 -- train.py" in (folder / "README.md").read_text()
    assert "GPT · 34,688 parameters" in (folder / "model.py").read_text()
    assert len((folder / "train.py").read_text().splitlines()) < 150
    assert not any("autopar" in line for path in (folder / "runtime").glob("*.py") for line in imports(path))


def imports(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.lstrip().startswith(("import ", "from "))]


def test_saved_values_of_a_real_model(tmp_path: Path) -> None:
    """Buffers and both names of a tied weight; a folder that is written again keeps nothing of before."""
    parallelize(build, 2, **OPTIONS, dp=2).save(tmp_path)
    model = build()
    parallelize(model, 2, **OPTIONS, dp=2).save(tmp_path)
    assert not (tmp_path / "init.json").exists()
    values = torch.load(tmp_path / "weights.pt", weights_only=True)
    named = dict(model.named_parameters(remove_duplicate=False))
    assert values.keys() == named.keys()
    assert all(torch.equal(values[name], parameter) for name, parameter in named.items())


def test_meta_model_without_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = build()
    result = parallelize(model, 2, **OPTIONS, dp=2)
    result.save(tmp_path)
    assert "have no values: train with --init DIR" in capsys.readouterr().out
    with pytest.raises(PlanError, match="have no values"):
        result.build()


def test_a_factory_is_built_with_its_initialisation() -> None:
    """By seed, and as the saved folder would be."""
    result = parallelize(build, 1, **{**OPTIONS, "gpu": "cpu"})
    name = "transformer.wpe.weight"

    def drawn(rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        trainer, other = result.build(device="cpu"), result.build(device="cpu", seed=1)
        values = trainer.state_dict()[name].clone(), other.state_dict()[name].clone()
        return *values, trainer.step(batch(8)).loss

    ((first, second, loss),) = run_ranks(1, drawn)
    assert torch.equal(first, draw(result.weights.recipes[name], first.shape, 0, name))
    assert not torch.equal(first, second) and loss > 0


def batch(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, 16, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def test_a_meta_huggingface_model_is_built() -> None:
    """Its buffers (RoPE tables) have values, its parameters recipes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32))
    result = parallelize(model, 1, gpu="cpu", global_batch=2, sequence=16)
    (loss,) = run_ranks(1, lambda rank: result.build(device="cpu").step(batch(2)).loss)
    assert loss > 0


def test_parameter_groups_are_emitted_by_name() -> None:
    """Fused parameters by their parts."""
    model = build()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    source = parallelize(model, 2, **OPTIONS, tp=2, optimizer=optimizer).source()
    assert "PARAMETER_GROUPS" in source
    assert '"transformer.h.0.attn.c_attn._bias_0"' in source and '"weight_decay": 0.0' in source


def test_sequence_parallel_is_a_pin() -> None:
    on = parallelize(build, 2, **OPTIONS, tp=2, sequence_parallel=True)
    off = parallelize(build, 2, **OPTIONS, tp=2, sequence_parallel=False)
    assert (on.plan.solution.name, off.plan.solution.name) == ("megatron-sp", "megatron")
    assert "reduce_scatter" in on.source() and "reduce_scatter" not in off.source()
