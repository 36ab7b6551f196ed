"""What somebody has edited in a folder is not overwritten, unless they say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import Parallelized, parallelize
from autopar.cli import main
from autopar.emit.project import edited_files
from autopar.errors import PlanError


class Net(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


@pytest.fixture(scope="module")
def result() -> Parallelized:
    inputs: dict[str, Any] = {"input": torch.zeros(2, 4)}
    return parallelize(Net(4, 4), 1, gpu="h100-sxm-80gb", global_batch=4, inputs=inputs)


def append(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("a") as file:
            file.write("# mine\n")

    return edit


@pytest.mark.parametrize(
    "name",
    ["model.py", "train.py", "plan.yaml", "launch.sh", "job.sbatch", "README.md", "runtime/loss.py", "runtime/mine.py"],
)
def test_an_edited_file_is_named_and_kept(name: str, result: Parallelized, tmp_path: Path) -> None:
    result.save(tmp_path / "program")
    result.save(tmp_path / "program")  # as written: written again
    assert edited_files(tmp_path / "program") == []
    append(name)(tmp_path / "program")
    before = (tmp_path / "program" / name).read_text()
    with pytest.raises(PlanError, match=f"edited since: {name}. Write to another folder, or .* overwrite=True"):
        result.save(tmp_path / "program")
    assert (tmp_path / "program" / name).read_text() == before
    result.save(tmp_path / "program", overwrite=[name])
    assert edited_files(tmp_path / "program") == []


def test_overwrite(result: Parallelized, tmp_path: Path) -> None:
    result.save(tmp_path)
    for name in ("model.py", "launch.sh"):
        append(name)(tmp_path)
    with pytest.raises(PlanError, match="model.py, launch.sh"):
        result.save(tmp_path)
    with pytest.raises(PlanError, match="edited since: launch.sh"):
        result.save(tmp_path, overwrite=["model.py"])
    result.save(tmp_path, overwrite=True)
    assert edited_files(tmp_path) == []


def test_a_folder_of_something_else(result: Parallelized, tmp_path: Path) -> None:
    """Other files stay; those of the same name are somebody's."""
    for name in ("README.md", "notes.txt"):
        append(name)(tmp_path)
    with pytest.raises(PlanError, match="edited since: README.md. Write"):
        result.save(tmp_path)
    assert not (tmp_path / "model.py").exists()
    (tmp_path / "README.md").unlink()
    result.save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "# mine\n"


def test_a_path_that_is_a_file(result: Parallelized, tmp_path: Path) -> None:
    append("file")(tmp_path)
    for path in (tmp_path / "file", tmp_path / "file" / "program"):
        with pytest.raises(PlanError, match="file is a file, and a program is a folder: name another"):
            result.save(path)


def test_the_command_line_refuses_before_it_looks_at_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append("out/model.py")(tmp_path)
    append("file")(tmp_path)
    for arguments, message in (
        (["emit", "nowhere:build", "--out", str(tmp_path / "out")], "edited since: model.py"),
        (["emit", "nowhere:build", "--out", str(tmp_path / "file")], "is a file"),
        (["emit", "nowhere:build", "--out", str(tmp_path / "out"), "--force", "--gpus", "2"], "no module 'nowhere'"),
        (["plan", "nowhere:build", "--save", str(tmp_path)], "name a file in a folder that exists"),
        (["plan", "nowhere:build", "--save", str(tmp_path / "no" / "plan.yaml")], "name a file in a folder"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
