"""Offload: masters, reduced gradients, optimizer states and the optimizer on the host; the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar.emit.project import save_tensors
from autopar.emit.source import load_source
from autopar.runtime import optimizer as runtime_optimizer
from autopar.runtime.mesh import Mesh, init_mesh
from autopar.runtime.optimizer import Optimizer, Tied, square_sum
from autopar.runtime.trainer import Trainer
from autopar.runtime.weights import Names
from autopar.search.layouts import MEGATRON_SP
from tests.distributed.half import assert_half
from tests.distributed.handwritten import make_settings
from tests.distributed.programs import Subject, assert_parity, compare, gpt, llama, local_batch, trainer_of
from tests.distributed.recorder import sharded_groups
from tests.harness import run_ranks

MODELS = {"gpt": gpt, "llama": llama}  # tied embeddings, and not
SAMPLES = {(1, 1): 12, (1, 3): 4, (2, 1): 6, (2, 3): 2, (4, 3): 1}  # (dp, micro-batches) → samples of each


# --------------------------------------------------------------------------------
# The contract


def case(model: str, zero: int, dp: int, m: int, slow: bool = False, **more: Any) -> Any:
    name = "-".join([model, f"zero{zero}", f"dp{dp}", f"m{m}", *(f"{key}{value}" for key, value in more.items())])
    return pytest.param(model, zero, dp, m, more, id=name, marks=[pytest.mark.slow] if slow else [])


QUICK = [
    case("gpt", 1, 1, 3),
    case("llama", 3, 1, 1),
    case("gpt", 2, 2, 3),
    case("llama", 1, 2, 3, tp=2),
    case("gpt", 3, 2, 3, recompute="all"),
    case("gpt", 3, 2, 3, pp=2),
    case("llama", 2, 4, 3, hsdp=2),
]
FULL = [
    case(model, zero, dp, m, True, **more)
    for model in MODELS
    for zero in (1, 2, 3)
    for dp in (1, 2)
    for m in (1, 3)
    for more in ({}, {"tp": 2, "layout": MEGATRON_SP}, {"pp": 2})
    if m == 3 or "pp" not in more
]


@pytest.mark.parametrize(
    ("model", "zero", "dp", "m", "more"), QUICK + [c for c in FULL if c.id not in {quick.id for quick in QUICK}]
)
def test_parity(model: str, zero: int, dp: int, m: int, more: dict[str, Any]) -> None:
    made = MODELS[model](torch.float64)
    assert_parity(made, made.plan(dp=dp, zero=zero, micro_batch=SAMPLES[dp, m], offload=True, **more))


def test_bf16() -> None:
    made = llama(torch.bfloat16)
    assert_half(made, made.plan(dp=2, zero=2, micro_batch=2, offload=True))


# --------------------------------------------------------------------------------
# Norm, clip and tied gradients


def test_z2_what_is_added_up_over_ranks_is_on_the_mesh_s_device() -> None:
    """Gradients on the host, the mesh on another device: NCCL has nothing for a CPU scalar."""

    def on_rank(rank: int) -> str:
        mesh = init_mesh(make_settings())
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        return square_sum([p], Mesh(mesh.settings, torch.device("meta"), mesh.root, mesh.axes)).device.type

    assert run_ranks(1, on_rank) == ["meta"]


def test_z2_tied_gradients_are_added_up_on_the_mesh_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank(rank: int) -> set[str]:
        mesh = init_mesh(make_settings(pp=2))
        name = ("wte", "head")[rank]
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        seen: set[str] = set()
        with monkeypatch.context() as patched:
            tied = Tied([("head", "wte")], {name: p}, Mesh(mesh.settings, torch.device("meta"), mesh.root, mesh.axes))
            reduce = lambda tensors, group: seen.update(t.device.type for t in tensors)  # noqa: E731
            patched.setattr(runtime_optimizer, "all_reduce_buckets", reduce)
            with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to copy back
                tied.sum_gradients()
        return seen

    assert run_ranks(2, on_rank) == [{"meta"}] * 2


@pytest.mark.parametrize(
    "plan", [{"dp": 2, "micro_batch": 2, "zero": 2}, {"dp": 2, "tp": 2, "micro_batch": 2, "zero": 3}]
)
def test_z2_clipping_with_offload_is_clipping_without(plan: dict[str, Any]) -> None:
    made = gpt(torch.float64)
    sources = [made.source(made.plan(**plan, offload=offload)) for offload in (False, True)]
    weights = made.weights

    def on_rank(rank: int) -> list[dict[str, Tensor]]:
        states = []
        for source in sources:
            trainer = Trainer(load_source(source), weights, clip=0.1)
            norms = [trainer.step(local_batch(trainer, batch)).grad_norm for batch in made.batches[:2]]
            assert min(norms) > 0.1
            states.append(trainer.state_dict())
        return states

    for without, offloaded in run_ranks(plan["dp"] * plan.get("tp", 1), on_rank, timeout=120):
        assert compare(offloaded, without)[0] <= 1e-9


# --------------------------------------------------------------------------------
# Optimizer and checkpoints


@pytest.mark.parametrize(
    ("name", "options", "fused"),
    [("AdamW", {}, True), ("SGD", {"momentum": 0.9}, True), ("NAdam", {}, False), ("AdamW", {"foreach": True}, False)],
)
def test_the_optimizer_is_one_kernel_on_the_host_where_torch_has_one(
    name: str, options: dict[str, Any], fused: bool
) -> None:
    parameters = {"w": nn.Parameter(torch.ones(4))}
    optimizers = [Optimizer(parameters, name, options, on_host=on_host) for on_host in (True, False)]
    assert [bool(o._optimizer.defaults.get("fused")) for o in optimizers] == [fused, False]


def test_states_of_offloaded_parts_lie_in_a_checkpoint_as_their_parameters_and_stay_where_they_are() -> None:
    """Also states on another device than the mesh's (meta, as the host beside a mesh of GPUs)."""

    def on_rank(rank: int) -> list[tuple[bool, tuple[int, ...], tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)]))  # parts of 3 and 2 rows
        optimizer = Optimizer({"w": p}, "SGD", {"momentum": 0.9})
        p.grad = torch.ones_like(p)
        optimizer.step()
        (states,) = optimizer._optimizer.state.values()
        pieces = []
        for device in ("cpu", "meta"):
            states["momentum_buffer"] = states["momentum_buffer"].to(device)
            piece = Names().piece("w", p).of_state(optimizer.states("w")["momentum_buffer"])
            pieces.append((piece.values is states["momentum_buffer"], piece.offsets, piece.size))
        return pieces

    for rank, pieces in enumerate(run_ranks(2, on_rank)):
        assert pieces == [(True, (3 * rank, 0), (5, 3))] * 2


def test_a_checkpoint_resumes_with_and_without_offload(tmp_path: Path) -> None:
    made: Subject = gpt(torch.float64)
    plans = [
        made.plan(dp=2, zero=3, micro_batch=2, offload=True),
        made.plan(tp=2, micro_batch=4),
        made.plan(dp=2, zero=1, micro_batch=2, offload=True),
    ]
    sources, weights = [made.source(plan) for plan in plans], made.weights
    save_tensors(tmp_path / "weights.pt", dict(made.model.named_buffers()))

    def train(rank: int, place: int) -> float:
        program = load_source(sources[place])
        program.__file__ = str(tmp_path / "model.py")
        trainer = Trainer(program, tmp_path / f"saved{place - 1}" if place else weights)
        result = trainer.step(local_batch(trainer, made.batches[place]))
        trainer.save(tmp_path / f"saved{place}")
        return result.loss

    for place in range(3):
        losses = run_ranks(2, train, place, timeout=120)
        assert losses == pytest.approx([made.reference.losses[place]] * 2, rel=1e-9)


def test_what_a_rank_keeps_is_given_to_the_host() -> None:
    """torch's own policy is in force, on every unit."""
    made = llama(torch.float64)
    source, weights = made.source(made.plan(dp=2, zero=2, micro_batch=2, offload=True)), made.weights

    def on_rank(rank: int) -> None:
        trainer = trainer_of(source, weights)
        trainer.step(local_batch(trainer, made.batches[0]))
        kept = [p for group in sharded_groups(trainer.model) for p in group.fsdp_params]
        assert len(kept) == len(trainer.parameters) and all(p.offload_to_cpu and not p.pin_memory for p in kept)

    run_ranks(2, on_rank, timeout=120)
