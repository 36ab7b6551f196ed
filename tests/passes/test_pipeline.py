"""The lists of passes as a whole: dumps, and promises that hold of every pass."""

import dataclasses
import re
from pathlib import Path

import pytest

from autopar.compiler import compile_program
from autopar.passes import CONTEXT, PASSES, PREPARE, Pass
from tests.models import gpt
from tests.passes.programs import plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("step", [*PREPARE, *CONTEXT, *PASSES], ids=lambda step: step.name)
def test_a_pass_is_a_frozen_dataclass_in_a_file_of_its_name_with_a_test(step: Pass) -> None:
    assert dataclasses.is_dataclass(step) and step.__dataclass_params__.frozen
    assert type(step).__module__ == f"autopar.passes.{step.name}"
    assert (ROOT / "tests" / "passes" / f"test_{step.name}.py").exists()
    documentation = type(step).__doc__ or ""
    assert "Requires:" in documentation and "Ensures:" in documentation and "   |   " in documentation


def test_a_dump_has_a_numbered_file_for_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path / "dump"))
    compile_program(gpt()[1], plan(tp=1, stages=((0, 3),)))
    files = sorted((tmp_path / "dump").iterdir())
    assert [f.name for f in files] == [f"{i:02d}_{step.name}.txt" for i, step in enumerate(PASSES, 1)]
    for file in files:
        first, blank, third = file.read_text().splitlines()[:3]
        assert re.fullmatch(rf"# after {file.stem[3:]}: .+", first)
        assert (blank, third) == ("", "block count:")
    assert "ops unchanged" in files[0].read_text()


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    compile_program(gpt()[1], plan(tp=1, stages=((0, 3),)))
    assert not list(tmp_path.iterdir())
