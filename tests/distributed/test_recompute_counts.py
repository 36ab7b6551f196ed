"""What recompute keeps and repeats, counted on emitted programs, is what the cost model says of each choice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models.compute import ModelPrice, price_model, stage_shape
from autopar.cost_models.describe import describe
from autopar.cost_models.hardware import gpu
from autopar.cost_models.stage_memory import stage_memory
from autopar.emit.source import load_source
from autopar.ir.graph import B, S
from autopar.plan.plan import Plan
from autopar.plan.recompute import by_layer
from autopar.runtime.memory import LiveStorage
from autopar.runtime.trainer import Trainer
from autopar.search.layouts import MEGATRON_SP, replicated
from tests.distributed.programs import VOCABULARY, Subject, gpt, llama, local_batch, subject
from tests.distributed.recorder import DataCollectives
from tests.harness import run_ranks

CHOICES = ("attention core", "attention", "activation", "mlp", "attention, mlp", "mlp | all", "all", "groups of 2")
NAMES = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "all_reduce"}


class ExplicitBlock(nn.Module):
    """Attention written out: the scores and their softmax are values of the graph."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        h = self.norm(x)
        q, k, v = (p(h).view(b, s, self.heads, d // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, d))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class ExplicitModel(nn.Module):
    def __init__(self, layers: int = 4, d: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList(ExplicitBlock(d, heads) for _ in range(layers))
        self.head = nn.Linear(d, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def explicit(dtype: torch.dtype) -> Subject:
    return subject(ExplicitModel(), dtype)


def price_of(model: Subject, plan: Plan) -> ModelPrice:
    solution = plan.solution if plan.mesh.tp > 1 else replicated(model.program)
    costs = describe(model.program, solution, {B: plan.batch.micro_batch, S: plan.batch.sequence})
    return price_model(
        costs, [plan.batch.micro_batch], plan.batch.sequence, gpu("h100-sxm-80gb"), plan.compute.precision
    )[0]


@pytest.mark.parametrize("make", [gpt, llama, explicit])
def test_each_choice_keeps_what_the_ledger_says(make: Any) -> None:
    """Activation bytes that are alive after a forward, within a tenth, of attentions fused and written out (M3)."""
    model: Subject = make(torch.float32)
    sequence = 64 if make is not gpt else 48
    plans = {
        choice: model.plan(micro_batch=4, global_batch=4, sequence=sequence, recompute=choice)
        for choice in ("none", *CHOICES)
    }
    sources = {choice: model.source(plan) for choice, plan in plans.items()}
    ids = torch.randint(VOCABULARY, (4, sequence))

    def on_rank(rank: int) -> dict[str, int]:
        kept: dict[str, int] = {}
        for choice, source in sources.items():
            trainer = Trainer(load_source(source), model.weights, device="cpu")
            trainer.model._count = torch.tensor(1)
            trainer.model(input_ids=ids, labels=ids).backward()  # what is made once is there
            with LiveStorage() as storage:
                storage.track([*trainer.model.parameters(), *trainer.model.buffers(), ids])
                storage.track(p.grad for p in trainer.model.parameters())
                before = storage.live()
                loss = trainer.model(input_ids=ids, labels=ids)
                kept[choice] = storage.live() - before
                del loss
        return kept

    (kept,) = run_ranks(1, on_rank)
    for choice, plan in plans.items():
        price = price_of(model, plan)
        shape = stage_shape(price, 0, len(price.layers), plan.activations.recompute)
        assert kept[choice] == pytest.approx(stage_memory(price, shape, 1).saved_bytes, rel=0.1), choice


def test_recomputing_attention_frees_what_its_kernel_keeps() -> None:
    """M3: written out, the scores go; of the fused one there were none to free."""
    freed: dict[str, float] = {}
    for name, model in {"fused": gpt(torch.float64), "explicit": explicit(torch.float64)}.items():
        plan = model.plan(micro_batch=4, sequence=48)
        (block,) = price_of(model, plan).classes
        freed[name] = block.saved_bytes - block.recomputed("attention core").saved_bytes
    heads, s, d = 2, 48, 32
    assert freed["fused"] <= 4 * s * 8 * (d + heads)  # the result, and a sum for each query
    assert freed["explicit"] >= 4 * heads * s * s * 8


def counted(model: Subject, plans: dict[str, Plan], group: str) -> dict[str, Counter[str]]:
    """Collectives of one step on a group, by plan."""
    sources = {name: model.source(plan) for name, plan in plans.items()}
    world = next(iter(plans.values())).mesh.world_size

    def on_rank(rank: int) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        for name, source in sources.items():
            trainer = Trainer(load_source(source), model.weights, device="cpu")
            batch = local_batch(trainer, model.batches[0])
            trainer.step(batch)
            with DataCollectives(trainer.mesh.group(group)) as counter:
                trainer.step(batch)
            found[name] = counter.counts
        return found

    first, *others = run_ranks(world, on_rank)
    assert all(other == first for other in others)
    return dict(first)


def test_zero3_gathers_no_more_with_recompute() -> None:
    """2 gathers of each unit and micro-batch, whatever is recomputed; a group is one unit."""
    model = gpt(torch.float64)
    plans = {c: model.plan(dp=2, zero=3, micro_batch=3, recompute=c) for c in ("none", *CHOICES, "groups of 4")}
    found = counted(model, plans, "data")
    layers, ends, micro_batches = 4, 3, 2  # the tied embedding, the positions, the last norm
    for choice, counts in found.items():
        size = {"groups of 2": 2, "groups of 4": 4}.get(choice, 1)
        assert counts["gather"] == 2 * micro_batches * (layers // size + ends), choice


@pytest.mark.slow
def test_collectives_within_a_region_run_again_and_are_priced() -> None:
    """Megatron's sequence parallelism: a gather for each sublayer that is recomputed from its norm, no reduction."""
    model = llama(torch.float64)
    plans = {c: model.plan(tp=2, layout=MEGATRON_SP, recompute=c) for c in ("none", *CHOICES)}
    found = counted(model, plans, "tp")
    for choice, plan in plans.items():
        price = price_of(model, plan)
        expected: Counter[str] = Counter()
        for layer, what in by_layer(plan.activations.recompute).items():
            costs = price.model.classes[price.model.layers[layer]]
            alone = next((a for a in costs.recompute if a.what == what), costs.recompute[-1])
            whole = what.startswith("groups") and layer % 2 == 0  # all but a group's last layer run to their end
            forward = [t.collective for t in costs.transfers if t.phase == "forward"]
            again = forward if whole else [costs.transfers[i].collective for i in alone.transfers]
            expected.update(NAMES[name] for name in again for _ in range(plan.accumulation))
        assert found[choice] - found["none"] == expected, choice
    assert found["attention core"] == found["activation"] == found["none"]
    assert found["attention, mlp"]["gather"] - found["none"]["gather"] == 2 * 4 * 3


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("choice", CHOICES)
def test_no_collective_is_saved_in_place(choice: str) -> None:
    """Backward runs a region's collectives again: no policy keeps the result of one (its mutation is not replayed)."""
    source = gpt(torch.float64).source(gpt(torch.float64).plan(tp=2, layout=MEGATRON_SP, recompute=choice))
    assert "checkpoint(" in source and "use_reentrant=False" in source
    assert not any(word in source for word in ("context_fn", "CheckpointPolicy", "selective", "MUST_SAVE"))
