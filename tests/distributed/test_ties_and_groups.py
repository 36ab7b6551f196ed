"""What a review found: ties in any order, frozen and unread parameters, parameter groups, sizes of a batch."""

# mypy: disable-error-code="union-attr, assignment"
# Modules that are added by name have no types.
from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.source import load_source
from autopar.request import read_optimizer
from autopar.runtime.trainer import Trainer
from tests.distributed.programs import (
    VOCABULARY,
    Subject,
    assert_parity,
    batches,
    compare,
    gpt,
    local_batch,
    subject,
    train_and_compare,
    trainer_of,
)
from tests.harness import reference_run, run_ranks

FP64 = torch.float64
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2, "micro_batch": 3},
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3, "micro_batch": 3},
    "zero3-pp2": {"dp": 2, "pp": 2, "zero": 3, "micro_batch": 3},
}
each_plan = pytest.mark.parametrize("plan", PLANS)


def slow(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


class Net(nn.Module):
    """Two blocks between a table and a head that is registered first."""

    def __init__(self, d: int = 32, heads: tuple[str, ...] = ("head",)) -> None:
        super().__init__()
        self.head: nn.Module
        self.second: nn.Module
        for name in heads:
            self.add_module(name, nn.Linear(d, VOCABULARY, bias=False))
        self.blocks = nn.ModuleList(copy.deepcopy(gpt(FP64, 2).model.get_submodule("transformer.h.0")) for _ in "ab")
        self.norm = nn.LayerNorm(d)
        self.embedding = nn.Embedding(VOCABULARY, d)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


# --------------------------------------------------------------------------------
# Ties


class TwoHeads(Net):
    """The table is also the head and a second head; the name that comes first, `spare`, is used by none."""

    def __init__(self) -> None:
        super().__init__(heads=("spare", "head", "second"))
        self.second.weight = self.embedding.weight = self.spare.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.cross_entropy((self.head(x) + self.second(x * 0.5)).flatten(0, 1), labels.flatten())


@cache
def tied(kind: str = "Net") -> Subject:
    model = {"Net": Net, "TwoHeads": TwoHeads}[kind]()
    model.head.weight = model.embedding.weight
    assert dict(model.named_parameters()).keys() & {"head.weight", "spare.weight", "embedding.weight"} == {
        "spare.weight" if kind == "TwoHeads" else "head.weight"
    }
    return subject(model, FP64)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [*(("Net", plan) for plan in PLANS), ("TwoHeads", "one"), ("TwoHeads", "pp2"), ("TwoHeads", "zero3")],
)
def test_a_head_registered_before_the_table_that_it_is(kind: str, plan: str) -> None:
    assert_parity(tied(kind), tied(kind).plan(**PLANS[plan]))


class ReadDetached(Net):
    """The table is read again at the end, there without a gradient."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) + F.linear(x, self.embedding.weight.detach())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("plan", ["pp2", "zero3-pp2"])
def test_a_table_that_the_last_stage_reads_without_a_gradient(plan: str) -> None:
    model = subject(ReadDetached(), FP64)
    assert_parity(model, model.plan(**PLANS[plan]))


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), ("zero3-pp2", "one")])
def test_a_checkpoint_holds_it_under_the_original_name(first: str, second: str, tmp_path: Path) -> None:
    _saved_and_resumed(tied(), first, second, tmp_path)


def _saved_and_resumed(model: Subject, first: str, second: str, tmp_path: Path) -> None:
    plans = [model.plan(**PLANS[name]) for name in (first, second)]
    sources = [model.source(plan) for plan in plans]

    def save(rank: int) -> None:
        trainer = trainer_of(sources[0], model.weights)
        trainer.step(local_batch(trainer, batches(2)[0]))
        trainer.save(tmp_path / "saved")

    def resume(rank: int) -> tuple[float, str]:
        trainer = Trainer(load_source(sources[1]), tmp_path / "saved")
        trainer.step(local_batch(trainer, batches(2)[1]))
        return compare(trainer.state_dict(), model.reference_on(batches(2)).weights)

    run_ranks(plans[0].mesh.world_size, save)
    for error, name in run_ranks(plans[1].mesh.world_size, resume):
        assert error <= 1e-9, name


class SharedNorm(Net):
    """Each layer's first norm and the last one are the same object; the layers differ otherwise."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.blocks[0]
        for block in list(self.blocks)[1:]:
            block.ln_1 = first.ln_1
        self.norm = first.ln_1


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_norm_that_layers_and_the_model_share(plan: str) -> None:
    model = subject(SharedNorm(), FP64)
    assert_parity(model, model.plan(**PLANS[plan]))


def test_a_checkpoint_fills_every_copy_of_it(tmp_path: Path) -> None:
    _saved_and_resumed(subject(SharedNorm(), FP64), "zero3-pp2", "tp2", tmp_path)


# --------------------------------------------------------------------------------
# Parameters that are not trained


@cache
def frozen(kind: str) -> Subject:
    """`table`: and a norm; `half`: and the whole of the first block; `tied`: a frozen table that is the head."""
    model = Net()
    names = {"table": ("embedding", "norm"), "half": ("embedding", "blocks.0"), "tied": ("embedding",)}
    if kind == "tied":
        model.head.weight = model.embedding.weight
    for name in names[kind]:
        model.get_submodule(name).requires_grad_(False)
    if kind == "table":
        model.blocks[1].get_submodule("ln_2").requires_grad_(False)
    return subject(model, FP64)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [*(slow("table", plan) for plan in PLANS), ("half", "pp2"), ("half", "zero3-pp2"), ("tied", "pp2")],
)
def test_frozen_parameters_get_no_gradient_and_stay(kind: str, plan: str) -> None:
    model = frozen(kind)
    still = {name for name, p in model.model.named_parameters() if not p.requires_grad}
    source = model.source(model.plan(**PLANS[plan]))
    reference = model.reference

    def check(rank: int) -> float:
        errors = train_and_compare(source, model.weights, batches(), reference)
        trainer = trainer_of(source, model.weights)
        trainer.step(local_batch(trainer, batches(1)[0]))
        assert not still & trainer.gradients().keys()
        state = trainer.state_dict()
        assert all(torch.equal(state[name], model.weights[name]) for name in still & state.keys())
        return errors.worst

    ranks = model.plan(**PLANS[plan]).mesh.world_size
    assert max(run_ranks(ranks, check)) <= 1e-9


class Unread(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(32, 3)
        self.blocks[1].extra = nn.Parameter(torch.ones(3, 5))


@pytest.mark.parametrize("plan", [slow("one"), "pp2", slow("tp2"), "zero3"])
def test_parameters_that_the_loss_never_reads_are_kept_and_saved(plan: str, tmp_path: Path) -> None:
    model = subject(Unread(), FP64)
    assert_parity(model, model.plan(**PLANS[plan]))  # all names, too
    chosen = model.plan(**PLANS[plan])
    source = model.source(chosen)
    names = {"unread.weight", "unread.bias", "blocks.1.extra"}

    def reload(rank: int) -> set[str]:
        trainer = trainer_of(source, model.weights)
        trainer.step(local_batch(trainer, batches(1)[0]))
        trainer.save(tmp_path / "saved")
        state = Trainer(load_source(source), tmp_path / "saved").state_dict()
        found = names & state.keys()
        assert all(torch.equal(state[name], model.weights[name]) for name in found)
        return found

    assert set().union(*run_ranks(chosen.mesh.world_size, reload)) == names


# --------------------------------------------------------------------------------
# Parameter groups


@pytest.mark.in_turn(2)
@each_plan
def test_groups_reach_ties_and_stages_without_a_member(plan: str) -> None:
    """The table, under another name on the last stage; the head's norm, whose group the first stage has none of."""
    model = tied()
    chosen = model.plan(**PLANS[plan])

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        named = dict(zip(dict(model.model.named_parameters()), parameters, strict=True))
        first = [named.pop("norm.weight"), named.pop("norm.bias")]
        groups: list[dict[str, Any]] = [
            {"params": first, "lr": 3e-3},
            {"params": [named.pop("head.weight")], "weight_decay": 0.5},
            {"params": list(named.values())},
        ]
        return torch.optim.AdamW(groups, weight_decay=0.1)

    reference = reference_run(model.model, batches(), make)
    optimizer = read_optimizer(model.model, make(model.model.parameters()))
    source = model.source(replace(chosen, optimizer=optimizer))

    def check(rank: int) -> float:
        return train_and_compare(source, model.weights, batches(), reference).worst

    assert max(run_ranks(chosen.mesh.world_size, check)) <= 1e-9


# --------------------------------------------------------------------------------
# Layers at the root, sizes of a batch


class Root(nn.Sequential):
    """The layers are the model's own children, beside a norm; one name for a table that is also the head."""

    def __init__(self, d: int = 32) -> None:
        super().__init__(*(copy.deepcopy(gpt(FP64, 2).model.get_submodule("transformer.h.0")) for _ in range(4)))
        self.table = nn.Parameter(torch.ones(VOCABULARY, d))
        self.norm = nn.LayerNorm(d)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = F.embedding(input_ids, self.table)
        for i in range(4):
            x = self.get_submodule(str(i))(x)
        return F.cross_entropy(F.linear(self.norm(x), self.table).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("plan", [slow("one"), "pp2", "zero3"])
def test_layers_that_are_children_of_the_model(plan: str) -> None:
    model = subject(Root(), FP64)
    assert_parity(model, model.plan(**PLANS[plan]))


def test_a_batch_of_other_inputs_is_refused_by_name() -> None:
    model = gpt(FP64, 2)
    source = model.source(model.plan())

    def refuse(rank: int) -> None:
        batch = batches(1)[0]
        with pytest.raises(ValueError, match="the batch has ids, labels, but this program takes input_ids, labels"):
            trainer_of(source, model.weights).step({"ids": batch["input_ids"], "labels": batch["labels"]})

    run_ranks(1, refuse)


@pytest.mark.parametrize(
    ("samples", "sequence", "shapes"), [(6, 16, r"input_ids \[6, 16\], labels \[6, 16\]"), (12, 8, r"\[12, 8\]")]
)
def test_a_batch_of_other_sizes_than_planned_is_refused(samples: int, sequence: int, shapes: str) -> None:
    model = gpt(FP64, 2)
    source = model.source(model.plan())

    def refuse(rank: int) -> None:
        trainer = trainer_of(source, model.weights)
        with pytest.raises(ValueError, match=shapes + r".* planned for 12 samples \(.*\) of 16 tokens"):
            trainer.step(batches(1, samples, sequence)[0])

    run_ranks(1, refuse)
