"""The runtime of a saved program: the modules that it imports, all of them and no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import nn

from autopar.api import parallelize
from autopar.emit.project import edited_files, files_as_written, reached_modules
from autopar.errors import PlanError
from autopar.verification.edits import find_edits
from tests.unit.emit.programs import emitted

TRAIN = (resources.files("autopar") / "emit" / "templates" / "train.py").read_text()
# Imports the programs in a folder, each in a process of its own, and prints what of the runtime each has loaded.
IMPORT = """
import os, sys
import torch
for name in sorted(os.listdir()):
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    sys.path.insert(0, name)
    import model, train
    assert not [m for m in sys.modules if m.startswith("autopar")]
    print(name, *sorted(m.partition(".")[2] for m in sys.modules if m.startswith("runtime.")))
    sys.stdout.flush()
    os._exit(0)
"""
PLANS: Mapping[str, Mapping[str, Any]] = {"llama": {"tp": 2}, "gpt": {"tp": 2, "pp": 2}, "mixtral": {}}


class Net(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


def save(folder: Path) -> Path:
    inputs: dict[str, Any] = {"input": torch.zeros(2, 4)}
    return parallelize(Net(4, 4), 1, gpu="cpu", global_batch=4, inputs=inputs).save(folder)


def test_a_program_has_the_modules_that_it_imports_and_no_other(tmp_path: Path) -> None:
    """What Python loads of the whole runtime is what is copied, and with that alone the program is loaded too."""
    whole = [path.stem for path in (resources.files("autopar") / "runtime").iterdir() if path.suffix == ".py"]  # type: ignore[attr-defined]
    reached = {name: reached_modules(emitted(name, **plan).source, TRAIN) for name, plan in PLANS.items()}
    for kind, copied in (("whole", dict.fromkeys(PLANS, whole)), ("reached", reached)):
        for name, modules in copied.items():
            folder = tmp_path / kind / name
            (folder / "runtime").mkdir(parents=True)
            (folder / "model.py").write_text(emitted(name, **PLANS[name]).source)
            (folder / "train.py").write_text(TRAIN)
            for module in {*modules, "__init__"}:
                text = (resources.files("autopar") / "runtime" / f"{module}.py").read_text()
                (folder / "runtime" / f"{module}.py").write_text(text)
        run = subprocess.run(
            [sys.executable, "-c", IMPORT], cwd=tmp_path / kind, env={}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        assert {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines()} == reached
    assert not {"attention", "flash", "tiles", "linear_loss", "experts", "norm", "opaque"} & {*reached["llama"]}
    assert "experts" in reached["mixtral"]


def test_the_runtime_lies_in_a_folder_once(tmp_path: Path) -> None:
    """As it was written it is kept in one archive: edits are found by it, and verify can run it."""
    folder = save(tmp_path / "program")
    copied = {path.name for path in (folder / "runtime").iterdir()}
    assert copied == {f"{name}.py" for name in ("__init__", *reached_modules((folder / "model.py").read_text(), TRAIN))}
    assert {path.name for path in (folder / ".original").rglob("*.py")} == {"model.py", "train.py"}
    with ZipFile(folder / ".original" / "runtime.zip") as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == {f"runtime/{name}" for name in copied}
    with (folder / "runtime" / "mesh.py").open("a") as file:
        file.write("MINE = 1\n")
    assert edited_files(folder) == ["runtime/mesh.py"]
    assert [edit.where for edit in find_edits(folder).places] == ["runtime/mesh.py: MINE"]


def test_modules_of_an_earlier_program_go(tmp_path: Path) -> None:
    """One saved before had the whole runtime, also in `.original`."""
    folder = save(tmp_path / "program")
    (folder / ".original" / "runtime.zip").unlink()
    for parent in (folder, folder / ".original"):
        (parent / "runtime").mkdir(exist_ok=True)
        for path in (folder / "runtime").iterdir():
            (parent / "runtime" / path.name).write_bytes(path.read_bytes())
        for name in ("flash.py", "gone.py"):
            (parent / "runtime" / name).write_text("# of an earlier version\n")
    assert edited_files(folder) == [] and not find_edits(folder).places
    before = {path.name for path in (folder / "runtime").iterdir()}
    save(folder)
    assert before - {path.name for path in (folder / "runtime").iterdir()} == {"flash.py", "gone.py"}
    assert not (folder / ".original" / "runtime").exists()


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive", None])
def test_a_damaged_archive_is_one_error(content: bytes | None, tmp_path: Path) -> None:
    """And whatever is in the folder may then be somebody's."""
    folder = save(tmp_path / "program")
    archive = folder / ".original" / "runtime.zip"
    whole = archive.read_bytes()
    archive.write_bytes(whole[:200] + b"\0" * 200 + whole[400:] if content is None else content)
    with pytest.raises(PlanError, match=".original is damaged .*: save the program again"):
        files_as_written(folder)
    assert "model.py" in edited_files(folder)
    with pytest.raises(PlanError, match="edited since"):
        save(folder)
