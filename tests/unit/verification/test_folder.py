"""What `verify DIR` reads of a folder: sizes by a grammar of their own, records, values to train with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.api import parallelize
from autopar.cli import main
from autopar.verification import ranks
from autopar.verification.sizes import read_size
from tests.harness import verify_in_fork

VALUES = {"b": 6, "s": 8}
SIZES = {
    "s": 8, "12": 12, "2 * s + 1": 17, "s - 1": 7, "b * s // 4": 12, "(b + s) // 2 % 4": 3, "-(b - s)": 2, "s/4": 2,
    "max(b, s - 4, 5)": 6, "min(b, s) * 2": 12, "s - b - 1": 1,
}  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str) -> None:
    assert read_size(text, VALUES) == SIZES[text]


@pytest.mark.parametrize(
    "text",
    ["", "x", "s s", "s +", "(s", "s)", "s / 3", "s // 0", "2 ** 3", "9**9**9", "b.real", "max", "max()", "b(1)",
     "s[0]", "__import__('os')", "(" * 150 + "s", "1" * 300, "s,", "\ud800", "٣", "s if b else s", 3, None],
    ids=repr,
)  # fmt: skip
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        read_size(text, VALUES)


@given(st.text("bs0123456789+-*/%() ,maxin\n.", max_size=12))
def test_any_text_is_a_number_or_one_error(text: str) -> None:
    try:
        assert isinstance(read_size(text, VALUES), int)
    except ValueError as error:
        assert "is not a size" in str(error)


# --------------------------------------------------------------------------------
# Damaged folders


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu() + x
        return x.square().mean()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved program of one process."""
    result = parallelize(Small(), 1, gpu="cpu", inputs={"x": torch.zeros(2, 4)}, global_batch=2, precision="fp32")
    return result.save(tmp_path_factory.mktemp("verify") / "program")


@pytest.fixture
def program(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ranks, "_run_child", verify_in_fork)
    shutil.copytree(written, tmp_path / "program")
    return tmp_path / "program"


def refusal(program: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that verify says of a folder."""
    assert main(["verify", str(program), "--steps", "1"]) == 2
    said = capfd.readouterr().err
    assert said.count("Traceback") == 0 and said.startswith("autopar: ")
    return said


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no mapping": lambda record: [record],
    "a key less": lambda record: {k: v for k, v in record.items() if k != "parameters"},
    "a key more": lambda record: record | {"other": 1},
    "a size that is code": lambda record: _with_input(record, shape=["__import__('os').getpid()", "4"]),
    "a size that is no text": lambda record: _with_input(record, shape=[2, 4]),
    "a dtype that is a function": lambda record: _with_input(record, dtype="load"),
    "no values": lambda record: _with_input(record, values=[]),
    "a model that is no text": lambda record: record | {"model": 1},
    "a constant that is a list": lambda record: record | {"constants": {"x": []}},
    "inputs that are a list": lambda record: record | {"inputs": []},
}


def _with_input(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return record | {"inputs": {"x": record["inputs"]["x"] | changes}}


@pytest.mark.parametrize("change", RECORDS.values(), ids=RECORDS.keys())
def test_a_damaged_record_is_one_error(
    change: Callable[[dict[str, Any]], Any], program: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = program / ".original" / "original.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert "original.json is damaged" in refusal(program, capfd)


FILES: dict[str, tuple[str, str]] = {
    ".original/original.json": ('{"model": ', "original.json is damaged"),
    ".original/plan.yaml": ("!!python/object/apply:os.getpid []", "plan.yaml"),
    ".original/model.py": ("\udcff", "model.py is damaged"),
    "plan.yaml": ("[" * 600, "plan.yaml"),  # deeper than Python's stack
    "model.py": ("\udcff", "model.py is damaged"),
    "train.py": ("def", "cannot train"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_error(name: str, program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, said = FILES[name]
    (program / name).write_text(text, errors="surrogateescape")
    assert said in refusal(program, capfd)


# --------------------------------------------------------------------------------
# "The same" is said of a folder that can train


def test_a_folder_that_trains_is_the_same(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(program), "--steps", "1"]) == 0
    assert "computes what the original computes" in capfd.readouterr().out


def test_a_folder_is_asked_for_what_training_begins_with(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not for a checkpoint in it, which --init alone would read."""
    (program / "step-1").mkdir()
    assert main(["verify", str(program), "--steps", "1"]) == 0, capfd.readouterr().err


def test_a_folder_without_what_trains_is_refused(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (program / "train.py").unlink()
    assert "cannot train" in refusal(program, capfd)


VALUES_THAT_DO_NOT_TRAIN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "not finite": (lambda w: w | {"layers.0.weight": torch.full((4, 4), torch.nan)}, "layers.0.weight: not finite"),
    "of another shape": (lambda w: w | {"layers.0.weight": torch.zeros(3, 4)}, "layers.0.weight"),
    "missing": (lambda w: {n: t for n, t in w.items() if n != "layers.1.bias"}, "layers.1.bias"),
}


@pytest.mark.parametrize("name", VALUES_THAT_DO_NOT_TRAIN)
def test_values_that_do_not_train(name: str, program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, said = VALUES_THAT_DO_NOT_TRAIN[name]
    torch.save(change(torch.load(program / "weights.pt")), program / "weights.pt")
    assert main(["verify", str(program), "--steps", "1"]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "layers.0.weight"), ('{"layers', "damaged"), ("[]", "damaged"), ('{"layers.0.weight": 3}', "damaged")],
)
def test_recipes_that_do_not_train(
    text: str | None, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_run_child", verify_in_fork)
    made = parallelize(Small, 1, gpu="cpu", inputs={"x": torch.zeros(2, 4)}, global_batch=2, precision="fp32")
    recipes = made.save(tmp_path / "program") / "init.json"
    recipes.unlink() if text is None else recipes.write_text(text)
    assert main(["verify", str(tmp_path / "program"), "--steps", "1"]) == 2
    assert said in capfd.readouterr().err


def test_not_run_is_not_the_same(
    program: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.verification.folder.LARGEST", 1)
    assert main(["verify", str(program)]) == 1
    assert "not run" in capfd.readouterr().out
