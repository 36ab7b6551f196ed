"""The harness itself: forked ranks, and the contract's metric."""

import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.precision import raise_float32
from autopar.verification.parity import relative_errors
from tests.harness import RankError, assert_golden, assert_parity, reference_run, run_ranks


def test_ranks_communicate_and_return_tensors() -> None:
    scale = torch.tensor(10.0)

    def fn(rank: int, offset: int) -> dict[str, object]:
        x = scale * rank + offset  # a closure over a tensor of the parent
        dist.all_reduce(x)
        return {"sum": x, "env": (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])}

    results = run_ranks(3, fn, 1)
    assert [result["env"] for result in results] == [(str(r), str(r), "3") for r in range(3)]
    assert all(torch.equal(result["sum"], torch.tensor(33.0)) for result in results)


def test_ranks_compute_and_differentiate_after_the_parent_did() -> None:
    def work(rank: int) -> Tensor:
        weight = torch.ones(300, 300, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(work(0), run_ranks(2, work)[1])


def test_first_failure_is_raised_with_its_traceback_and_rank() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            raise ValueError("broken on purpose")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 3 failed:.*in fn.*ValueError: broken on purpose"):
        run_ranks(3, fn)
    assert time.monotonic() - start < 30


def test_a_rank_that_dies_is_named_before_those_that_heard_of_it() -> None:
    def fn(rank: int) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match="^rank 2 of 3 died of SIGKILL"):
        run_ranks(3, fn)


def test_an_unpicklable_result_is_an_error_not_a_hang() -> None:
    with pytest.raises(RankError, match="rank 0 of 1 failed"):
        run_ranks(1, lambda rank: lambda: rank)


def test_a_hang_names_the_ranks_still_running_and_where() -> None:
    def stuck_here(rank: int) -> None:
        if rank != 1:
            time.sleep(60)

    with pytest.raises(RankError, match=r"(?s)still running after 3 s: rank 0, 2 of 3.*stuck_here"):
        run_ranks(3, stuck_here, timeout=3.0)


def test_an_early_rank_waits_for_the_others_to_finish() -> None:
    def fn(rank: int) -> float:
        x = torch.full((1 << 16,), float(rank))
        if rank == 0:
            dist.send(x, 1)
            return 0.0
        time.sleep(0.5)
        dist.recv(x, 0)
        return x.sum().item()

    assert run_ranks(2, fn) == [0.0, 0.0]


def test_error_is_relative_to_the_largest_value_of_each_tensor() -> None:
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.5])}
    actual = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([0.5])}
    assert relative_errors(actual, expected) == {"a": 0.25, "b": 0.0}


def test_a_zero_tensor_is_measured_against_the_rms_of_the_model() -> None:
    expected = {"weight": torch.full((3,), 2.0), "key_bias": torch.zeros(1)}
    actual = {"weight": torch.full((3,), 2.0), "key_bias": torch.tensor([1e-6])}
    floor = 1e-3 * math.sqrt(3 * 4.0 / 4)
    assert relative_errors(actual, expected)["key_bias"] == pytest.approx(1e-6 / floor)


def test_names_and_shapes_must_agree() -> None:
    one = {"a": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"missing \['a'\], unexpected \['b'\]"):
        relative_errors({"b": torch.zeros(2)}, one)
    with pytest.raises(ValueError, match=r"a: shape \(1,\), expected \(2,\)"):
        relative_errors({"a": torch.zeros(1)}, one)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_parity_fails_on_values_that_are_not_finite(bad: float) -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(AssertionError, match="1 of 2 gradients differ"):
        assert_parity({"a": torch.ones(2), "b": bad * torch.ones(1)}, expected, 1e-5, "gradients")


def test_parity_names_the_worst_first() -> None:
    expected = {name: torch.ones(2) for name in ("small", "large", "fine")}
    actual = {"small": torch.ones(2) * 1.01, "large": torch.ones(2) * 2, "fine": torch.ones(2)}
    with pytest.raises(AssertionError, match=r"(?s)2 of 3 .*large.*small") as caught:
        assert_parity(actual, expected, 1e-3)
    assert "fine" not in str(caught.value)


def test_raise_float32_raises_every_literal_cast() -> None:
    x = torch.ones(2, dtype=torch.float64) / 3
    with raise_float32():
        results = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.softmax(-1, dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
            x.type(torch.float32),
            torch.full((2,), 0.3),
            torch.arange(3) / 7,
        ]
    assert all(result.dtype is torch.float64 for result in results)
    assert x.float().dtype is torch.full((2,), 0.3).dtype is torch.float32


def test_reference_run_clips_and_leaves_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    batches = [{"input": torch.randn(8, 4)} for _ in range(3)]
    run = reference_run(
        model,
        batches,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        clip=0.1,
        loss_of=lambda outputs, batch: (outputs - batch["input"]).square().sum(),
        dtype=torch.float64,
    )
    assert torch.equal(model.weight, before)
    assert len(run.losses) == len(run.gradients) == len(run.norms) == 3
    first = run.gradients[0]
    norm = torch.cat([gradient.flatten() for gradient in first.values()]).norm().item()
    assert norm == pytest.approx(run.norms[0]) and norm > 0.1
    assert run.weights["weight"].dtype is torch.float64


def test_a_golden_must_equal_its_file(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    with pytest.raises(AssertionError, match="--update-goldens"):
        assert_golden(path, "a program\n", update=False)
    assert_golden(path, "a program\n", update=True)
    assert_golden(path, "a program\n", update=False)
    with pytest.raises(AssertionError, match="--update-goldens"):
        assert_golden(path, "another program\n", update=False)
