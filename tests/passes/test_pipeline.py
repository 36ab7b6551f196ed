"""The lists of passes as a whole: dumps, and promises that hold of every pass."""

import dataclasses
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from autopar.api import dump_folder, parallelize
from autopar.compile.compiler import compile_program, run
from autopar.errors import TypeCheckError
from autopar.ir.graph import Program
from autopar.passes import CONTEXT, PASSES, PREPARE, Pass
from autopar.plan.plan import Plan
from autopar.rules.verify import Level
from examples.gpt import GPT, GPTConfig
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


def test_a_dump_has_a_numbered_file_for_each_pass_of_the_chosen_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of PREPARE; what the search tries over cp, and verify on its own program, is not there."""
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path / "dump"))
    ids = torch.zeros(2, 8, dtype=torch.long)
    model = GPT(GPTConfig(vocab_size=32, n_layer=1, n_head=2, d_model=8, block_size=8))
    result = parallelize(model, 2, gpu="cpu", inputs={"input_ids": ids, "labels": ids}, attention="ring", cp=2)
    names = [f"{i:02d}_{step.name}.txt" for i, step in enumerate((*PREPARE, *CONTEXT, *PASSES), 1)]
    assert sorted(f.name for f in (tmp_path / "dump").iterdir()) == names[: len(PREPARE)]
    result.source()
    assert sorted(f.name for f in (tmp_path / "dump").iterdir()) == names
    for name in names:
        first, blank, third = (tmp_path / "dump" / name).read_text().splitlines()[:3]
        assert re.fullmatch(rf"# after {name[3:-4]}: .+", first)
        assert (blank, third[:6]) == ("", "block ")
    assert "ops unchanged" in (tmp_path / "dump" / names[-len(PASSES)]).read_text()


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    compile_program(gpt()[1], plan(tp=1, stages=((0, 3),)), dump_folder())
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class Breaking:
    """A pass that leaves an op which reads what comes after it."""

    name: ClassVar[str] = "breaking"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        broken = program.copy_blocks()
        block = broken.blocks["epilogue"]
        block.output.prepend(block.ops[0])
        return broken


def test_what_a_pass_breaks_is_found_before_the_next() -> None:
    with pytest.raises(TypeCheckError, match="which does not come before it"):
        run([Breaking()], gpt()[1])
