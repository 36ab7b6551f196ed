"""What the command line says before it does anything, and how it ends when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from autopar.api import parallelize
from autopar.cli import main
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh

ROOT = Path(__file__).resolve().parents[2]


def test_wrong_options_are_told_with_the_nearest_before_anything_is_loaded(tmp_path: Path) -> None:
    """In a process of its own, which has not loaded torch by then."""
    for arguments, message in (
        (["--optimizer", "Adamw"], "(did you mean 'AdamW'?)"),
        (["--optimiser", "AdamW"], "unrecognized arguments: --optimiser AdamW (did you mean '--optimizer'?)"),
        (["--sequence", "0"], "sequence=0: use a whole number of tokens, 1 to"),
        (["--tp", "2.5"], "tp='2.5': use a whole number of ranks, 1 to"),
        (["--zero", "7"], "zero=7: use 0, 1, 2 or 3"),
    ):
        code = f"""
import sys
from autopar.cli import main
code = main(["plan", "nowhere:build", *{arguments!r}])
assert code == 2 and "torch" not in sys.modules
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert message in done.stderr and done.stderr.count("\n") == 1


def test_wrong_commands_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pln"]) == 2
    assert "no command 'pln' (did you mean 'plan'?); there are plan, emit, run, verify" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist: name a saved program" in capsys.readouterr().err


def test_cp_without_a_sequence() -> None:
    model = torch.nn.Linear(4, 1)
    with pytest.raises(PlanError, match="cp=2: the inputs of Linear have no sequence to cut: leave cp"):
        parallelize(
            model, 2, gpu="cpu", cp=2, inputs={"input": torch.ones(4, 4)}, loss=lambda outputs, batch: outputs.mean()
        )


def test_choices_are_checked_before_the_model_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--forbid", "zero=7"], "forbid: zero=7: use 0, 1, 2 or 3"),
        (["--forbid", "zeros=1"], "zeros (did you mean 'zero'?): forbid has no such pin"),
        (["--gpus", "8", "--global-batch", "3", "--dp", "8"], "global_batch=3 is not divisible by dp=8"),
    ):
        assert main(["plan", "nowhere:build", "--gpus", "2", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_control_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and 130, wherever it comes."""

    def interrupted(*of: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.commands.named_model", interrupted)
    assert main(["plan", "any:build", "--gpus", "2"]) == 130
    assert capsys.readouterr().err == "autopar: interrupted\n"


def test_control_c_ends_what_runs(tmp_path: Path) -> None:
    """`run` waits until torchrun, which the terminal interrupts too, has ended its processes."""
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(Plan.of(Mesh(), 1, 1, 1, ((0, 1),)).to_dict()))
    (tmp_path / "train.py").write_text("import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "autopar.cli", "run", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # A shell starts what runs in its background with SIGINT ignored, and so may have started these tests.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heard,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "started").exists(), "torchrun did not start it"
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 130, said
    assert said.endswith("autopar: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nothing of it runs any more


def test_names_that_lead_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["plan", "no/such-model", "--gpus", "2"], "nor a name whose config is in the local Hugging Face cache"),
        (["run", "nowhere"], "nowhere is no saved program"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
