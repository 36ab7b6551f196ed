"""`verify` passes what is right, and finds what is wrong: values, NaN, names, shapes, ranks that die or hang."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import Parallelized, parallelize
from autopar.compile.compiler import prepare
from autopar.emit.source import model_source
from autopar.errors import PlanError
from autopar.rules.attention import is_short
from autopar.verification import program as verification
from autopar.verification.parity import Parity, no_dropout, part_errors, relative_error, train_original
from autopar.verification.program import _largest
from autopar.verification.samples import Input, inputs_of, random_batch
from autopar.verification.shrink import small_enough

VOCABULARY, CLASSES, SEQUENCE = 32, 8, 16
IDS = torch.zeros(2, SEQUENCE, dtype=torch.long, device="meta")
OPTIONS: dict[str, Any] = {"gpu": "h100-sxm-80gb", "global_batch": 4, "inputs": {"input_ids": IDS, "labels": IDS}}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return result


class Tagger(nn.Module):
    """Fewer classes than ids, and dropout as a module, as a function and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(16, CLASSES)

    def logits(self, input_ids: Tensor) -> Tensor:
        x = F.dropout(self.token(input_ids), 0.2, self.training)
        for layer in self.layers:
            x = layer(x)
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
        result: Tensor = self.head(x + attended.transpose(1, 2).flatten(-2))
        return result

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())


class Headless(Tagger):
    """Returns logits: its loss is given."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(input_ids)


@cache
def planned() -> Parallelized:
    torch.manual_seed(0)
    return parallelize(Tagger(), 2, **OPTIONS, tp=2, sequence_parallel=False)


def edit(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    """Verify a program whose text is changed."""

    def changed(*args: Any, **options: Any) -> str:
        before = model_source(*args, **options)
        after = change(before)
        assert after != before
        return after

    monkeypatch.setattr(verification, "model_source", changed)


def test_a_right_program_with_dropout_holds() -> None:
    parity = planned().verify(2)
    assert parity.holds, parity
    assert "dropout set to 0 on both sides" in str(parity)


COPY = '        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce\n'
WRONG: dict[str, tuple[Callable[[str], str], set[str]]] = {
    "a copy_to less": (lambda text: text.replace(COPY, "", 1), {"gradients", "norm", "weights"}),
    "loss scaled": (
        lambda text: text.replace("/ self._count", "/ self._count * 1.001"),
        {"loss", "gradients", "norm"},
    ),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("change", "differing"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_program_differs(
    change: Callable[[str], str], differing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(monkeypatch, change)
    parity = planned().verify(1)
    assert not parity.holds and "DIFFERS" in str(parity)
    assert all(getattr(parity, what) > 1e-6 for what in differing), parity


def test_a_program_whose_loss_is_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    edit(monkeypatch, lambda text: text.replace("/ self._count", '/ self._count * float("nan")'))
    with pytest.raises(PlanError, match="step 0: the loss is nan"):
        planned().verify(1)


FAULT = """
import functools, os, time

_right = count_targets

@functools.wraps(_right)
def count_targets(**batch):
    open(f"{folder}/{{os.environ['RANK']}}.pid", "w").write(str(os.getpid()))
    if {dies} and os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(600)
"""


def test_a_rank_that_dies_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edit(monkeypatch, lambda text: text + FAULT.format(folder=tmp_path, dies=True))
    began = time.monotonic()
    with pytest.raises(PlanError, match="rank 1 failed first:\nit was killed"):
        planned().verify(1)
    assert time.monotonic() - began < 120
    assert_gone(tmp_path)


def test_nothing_outlives_a_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    edit(monkeypatch, lambda text: text + FAULT.format(folder=tmp_path, dies=False))
    communicate = subprocess.Popen.communicate

    def impatient(self: Any, timeout: float | None = None) -> Any:
        while timeout is not None and len(list(tmp_path.glob("*.pid"))) < 2 and self.poll() is None:
            time.sleep(0.1)  # until both ranks hang
        return communicate(self, timeout=timeout and 0.1)

    monkeypatch.setattr(subprocess.Popen, "communicate", impatient)
    with pytest.raises(PlanError, match="did not finish within 300 s: it hangs"):
        planned().verify(1)
    assert_gone(tmp_path, ranks=2)


def assert_gone(folder: Path, ranks: int = 1) -> None:
    """The processes that left their ids in `folder`, at least `ranks`, have ended."""
    files = list(folder.glob("*.pid"))
    assert len(files) >= ranks
    deadline = time.monotonic() + 10
    while any(_alive(int(file.read_text())) for file in files):
        assert time.monotonic() < deadline, "a rank outlives verify"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_nan_is_an_infinite_error() -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(1)}
    assert part_errors({"a": torch.ones(2), "b": torch.tensor([math.nan])}, expected) == {"a": 0.0, "b": math.inf}
    assert relative_error(math.nan, 1.0) == relative_error(1.0, math.nan) == math.inf
    assert not Parity(0.0, 0.0, math.nan, 0.0, "", "", 1, 1).holds


def test_the_floor_of_a_part_is_that_of_the_model() -> None:
    expected = {"large": torch.full((99,), 2.0), "zero": torch.zeros(1)}
    floor = 1e-3 * math.sqrt(99 * 4.0 / 100)
    assert part_errors({"zero": torch.tensor([1e-6])}, expected)["zero"] == pytest.approx(1e-6 / floor)


def test_a_part_has_the_names_and_shapes_of_the_model() -> None:
    expected = {"a": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"unexpected \['c'\]"):
        part_errors({"c": torch.ones(2)}, expected)
    with pytest.raises(ValueError, match="a: shape"):
        part_errors({"a": torch.ones(1)}, expected)


def test_every_name_is_on_some_rank() -> None:
    reference = {"gradients": {"a": 0, "b": 0}, "weights": {"a": 0, "b": 0}, "losses": [1.0, 2.0], "norms": [4.0, 4.0]}
    both = {"a": 0.0, "b": 2.0}
    reports = [
        {"losses": [1.0, 2.0], "norms": [2.0, 4.0], "gradients": {"a": 0.5}, "weights": both},
        {"losses": [1.0, math.nan], "norms": [4.0, 3.0], "gradients": {"b": 0.25}, "weights": both},
    ]
    assert _largest(reports, reference) == {
        "loss": math.inf, "norm": 0.5, "gradients": 0.5, "worst_gradient": "a", "weights": 2.0, "worst_weight": "b",
    }  # fmt: skip
    with pytest.raises(PlanError, match="no rank of the program has the gradients of b"):
        _largest(reports[:1], reference)


def test_a_factory_is_built_with_its_loss() -> None:
    def loss(logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    result = parallelize(Headless, 1, **OPTIONS, loss=loss)
    model, _, _ = small_enough(result.job, result.plan)
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    assert model(input_ids=ids, labels=ids).shape == ()
    assert not any(p.is_meta for p in model.parameters())


def test_a_window_shrinks_with_the_sequence() -> None:
    """And the shrunk program cuts sequences as the plan does: in order where the window is short."""
    from transformers import MistralConfig, MistralForCausalLM

    with torch.device("meta"):
        model = MistralForCausalLM(MistralConfig(num_hidden_layers=2, sliding_window=1024))
    result = parallelize(model, 4, gpu="h100-sxm-80gb", sequence=8192, global_batch=1, cp=4, attention="ring", zero=3)
    for window, small in ((1024, 4), (3000, 8), (3073, 12)):
        model.config.sliding_window = window
        narrow, plan, note = small_enough(result.job, result.plan)
        assert narrow.config.sliding_window == small  # type: ignore[union-attr]
        assert plan.mesh.cp == 2 and note.startswith("shrunk to 2")
        assert is_short(window, 4, 8192) == is_short(small, 2, plan.batch.sequence)


def test_samples_are_in_range() -> None:
    """Of ids by the table that reads them, of targets by the classes; ids are never ignored."""
    inputs = inputs_of(prepare(Tagger(), OPTIONS["inputs"], "fp64"))
    assert inputs == {
        "input_ids": Input(("b", "s"), "int64", (str(VOCABULARY),)),
        "labels": Input(("b", "s"), "int64", (str(CLASSES),), -100),
    }
    batch = random_batch(inputs, 4, SEQUENCE, 0)
    assert {name: list(t.shape) for name, t in batch.items()} == dict.fromkeys(("input_ids", "labels"), [4, SEQUENCE])
    assert batch["labels"].max() < CLASSES and (batch["labels"][0] == -100).all() and batch["input_ids"].min() >= 0


def test_the_original_runs_without_dropout() -> None:
    model = Tagger()
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    with no_dropout():
        assert model(ids, ids) == model(ids, ids) == model.eval()(ids, ids)
    assert model.train()(ids, ids) != model(ids, ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses = train_original(model, [{"input_ids": ids, "labels": ids}] * 2, {}, optimizer)["losses"]
    assert losses[0] == losses[1]


def test_a_loss_that_is_not_finite_is_said() -> None:
    model = Tagger()
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    with pytest.raises(PlanError, match=r"losses are \[nan\]: there is nothing to compare with"):
        parallelize(model, 1, **OPTIONS).verify(1)
