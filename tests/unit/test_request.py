"""What a user may ask for, and the defaults that are said aloud."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan.options import read_memory
from autopar.plan.plan import Optimizer
from autopar.request import Job, make_job, read_optimizer, with_loss

IDS = torch.zeros(2, 16, dtype=torch.long, device="meta")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(input_ids.float()))
        return result


def job(model: Any = Net, gpus: int | Cluster | None = 2, **options: Any) -> Job:
    defaults: dict[str, Any] = dict.fromkeys(
        ("gpu", "memory", "loss", "sequence", "global_batch", "optimizer", "precision"), None
    )
    return make_job(model, gpus, **{**defaults, "batch_norm": "refuse", "inputs": {"input_ids": IDS}, **options})


def test_defaults_are_said_aloud() -> None:
    made = job(gpu="a100-sxm4-80gb")
    assert (made.batch.global_batch, made.batch.sequence, made.compute.precision) == (16, 16, "bf16")
    assert made.optimizer == Optimizer("AdamW")
    assert made.notes == ("global_batch=16 (8 a GPU)",)
    assert any("gpu=h100-sxm-80gb (default)" in note for note in job().notes)
    assert job(global_batch=4, gpu="a100-sxm4-80gb").notes == ()


def test_a_factory_is_built_on_meta() -> None:
    made = job()
    assert made.factory is Net and next(made.model.parameters()).is_meta
    real = Net()
    assert job(real).model is real and job(real).factory is None


def test_cluster_and_cpu() -> None:
    cluster = Cluster(16, "l4-24gb", gpus_per_node=4)
    assert job(gpus=cluster).cluster is cluster
    assert job(gpus=4, gpu="cpu").compute.precision == "fp32"


def test_sequence_of_the_config() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9,
        max_position_embeddings=100_000,
    )  # fmt: skip
    made = job(lambda: LlamaForCausalLM(config), inputs=None, gpu="l4-24gb")
    assert made.batch.sequence == 8192
    assert "sequence=8192 (of the model's config)" in made.notes
    assert set(made.inputs) >= {"input_ids", "labels"}
    assert job(lambda: LlamaForCausalLM(config), inputs=None, sequence=64).batch.sequence == 64


def test_a_sequence_of_inputs_that_have_none() -> None:
    with pytest.raises(PlanError, match="sequence=77: the inputs of Net have no tokens: leave it out"):
        job(inputs={"x": torch.zeros(2, 8), "y": torch.zeros(2, 8)}, sequence=77)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("70GiB", 70 * 2**30), ("512 MiB", 2**29), ("80GB", 80e9), ("1.5gib", 1.5 * 2**30), (1000, 1000)],
)
def test_memory(text: Any, size_bytes: float) -> None:
    assert read_memory(text) == size_bytes


def test_memory_that_is_none() -> None:
    with pytest.raises(PlanError, match="memory='70 bananas': use '70GiB', '512MiB'"):
        read_memory("70 bananas")


def test_optimizer_forms() -> None:
    model = Net()
    assert read_optimizer(model, "SGD") == read_optimizer(model, torch.optim.SGD) == Optimizer("SGD")
    assert read_optimizer(model, (torch.optim.SGD, {"momentum": 0.9})) == Optimizer("SGD", {"momentum": 0.9})
    made = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    assert read_optimizer(model, made) == Optimizer("AdamW", {"lr": 1e-4, "weight_decay": 0.0})


def test_parameter_groups_keep_their_names() -> None:
    model = Net()
    groups = [
        {"params": [model.first.weight, model.second.weight], "weight_decay": 0.1},
        {"params": [model.first.bias, model.second.bias], "lr": 1e-5},
    ]
    found = read_optimizer(model, torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.0))
    assert found.kwargs == {"lr": 1e-4, "weight_decay": 0.0}
    assert found.groups == (
        (("first.weight", "second.weight"), {"weight_decay": 0.1}),
        (("first.bias", "second.bias"), {"lr": 1e-5}),
    )


def test_the_options_of_one_group_are_the_optimizer_s() -> None:
    model = Net()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    assert read_optimizer(model, torch.optim.AdamW(groups, weight_decay=0.1)) == Optimizer(
        "AdamW", {"weight_decay": 0.0}
    )
    named = torch.optim.AdamW(model.named_parameters(), lr=1e-4)
    assert read_optimizer(model, named) == Optimizer("AdamW", {"lr": 1e-4})


def test_parameters_left_out_of_the_optimizer_must_be_frozen() -> None:
    model = Net()
    optimizer = torch.optim.AdamW([*model.first.parameters(), model.second.weight], lr=1e-4)
    with pytest.raises(PlanError, match=r"second.bias would be trained .* freeze them, requires_grad_\(False\), or"):
        read_optimizer(model, optimizer)
    model.second.requires_grad_(False)
    assert read_optimizer(model, optimizer) == Optimizer("AdamW", {"lr": 1e-4})


def test_with_loss_changes_the_forward_alone() -> None:
    model = Net()
    trained = with_loss(
        model, lambda outputs, batch: (outputs - batch["target"]).square().mean(), ("input_ids", "target")
    )
    assert dict(trained.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert type(trained).__name__ == "Net" and isinstance(trained, Net)
    x = torch.ones(2, 4)
    expected = (model(x) - 1).square().mean()
    assert torch.equal(trained(input_ids=x, target=torch.ones(2, 4)), expected)
    assert model(x).shape == (2, 4)
