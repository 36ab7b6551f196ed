"""Names that are code, markup or no identifiers, through plan, emit, save, verify and train: none is executed.

A model with them is planned, saved and trained as any other, or refused by name. What a name would do, were it
evaluated anywhere (by Python, a shell, YAML), is to make a file, the canary.
"""

from __future__ import annotations

import itertools
import os
import runpy
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.api import Parallelized, parallelize
from autopar.emit.names import OF_MODEL, OF_RECOMPUTED_LAYER
from autopar.errors import PlanError
from autopar.ir.identifiers import COUNTS
from autopar.verification import ranks
from tests.harness import run_ranks, verify_in_fork
from tests.hostile import NAMES, SAMPLES, hostile_model, inputs
from tests.unit.emit.declared import undeclared

CANARY = "canary"
CODE = f"open('{CANARY}','w')"  # without a dot, which no name has
SHELL = f"touch {CANARY}"
FRAMES = (
    "{0}", "x[{0}]", "x if {0} else y", "x\n{0}\n", "x\r{0}\r", "x\x0c{0}", "x # \n    {0}", "x;{0};", "{{{0}}}",
    "{{{{{0}}}}}", "'+{0}+'", '"+{0}+"', '"""+{0}+"""', "'''+{0}+'''", '\\"+{0}+"', '"),{0},("', "x', {0}, '",
    "\\\n{0}", '"""\n{0}\n"""', "x\u2028{0}", "```\n{0}\n```", "lambda: {0}", "*{0}", "x=({0})", "f'{{{0}}}'", "@{0}\n",
    "\\x22+{0}+\\x22", "]+[{0}]+[",
)  # fmt: skip
SHELLS = ("$({0})", "`{0}`", "'; {0}; '", '"; {0}; "', "\n{0}\n", "x && {0}", "--job-name=x\n#SBATCH\n{0}")
AWKWARD = (
    "class", "None", "lambda", "a-b", "a b", "-1", "007", "1", "²", "٣", "ﬁ", "fi", "ﬁ2", "é", "e\u0301", "__x",
    "__x__", "_x", "\ud800", "\u202ex", "\x00", "\x1b[2J", "{}", "{0}", "%s", "%(x)s", "\\", "\\n", '"', "'", "x'", "#",
    "x:y", "x/y", "~", "$HOME", "*", "<script>", "| a | b |", "!!python/name:open", "&a", "*a", "- x", "x@1", "@1",
    "PATHS", "i", "b", "s", "torch", "F", "nn", "str", "print", "dict", "experts", "local", "checkpoint", "self",
    "layer", "value", "count_targets", "SETTINGS", "from runtime", "torch float32", "_0", "weight_0", "p_weight",
    "forward2", "x" * 300, "match", "_", "…",
)  # fmt: skip
NO_IDENTIFIERS = [
    "class", "a-b", "a b", "-1", "007", "²", "ﬁ", "fi", "__x", "None", "e\u0301", "1", "__x__", "{x}", "x\ny", "\ud800",
    "'", '"', "_",
]  # fmt: skip
RESERVED = ("_first", "_epilogue", "_count_2")
KINDS = (
    "class",
    "1st",
    "",
    "a b",
    "__X",
    "tables",
    "between",
    "count",
    "str",
    "ﬁ",
    "Layer2",
    "torch",
    "self",
    "Model",
    "x\ny",
    '"""',
)
PLANS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "sequence_parallel": False}, {"pp": 2, "micro_batch": 1}, {"dp": 2, "zero": 3},
    {"pp": 2, "recompute": "full"},
)  # fmt: skip


def is_name(text: str) -> bool:
    """Whether a module takes it for the name of a child, parameter or buffer; the emitted class needs some itself."""
    legal = bool(text) and "." not in text and not hasattr(nn.Module(), text) and text not in ("names", "put", "at")
    own = text in (*OF_MODEL, *OF_RECOMPUTED_LAYER) or COUNTS.fullmatch(text) or text.startswith("_between")
    return legal and not own


def is_kind(text: str) -> bool:
    """Whether Python takes it for the name of a class."""
    try:
        type(text, (), {})
    except (ValueError, UnicodeEncodeError):
        return False
    return True


CHARACTERS = st.characters(exclude_characters=".") | st.sampled_from(string.punctuation.replace(".", ""))
ATTACKS = st.sampled_from([f.format(CODE) for f in FRAMES] + [f.format(SHELL) for f in SHELLS])
ANY_NAME = st.one_of(ATTACKS, ATTACKS, st.sampled_from(AWKWARD), st.text(CHARACTERS, min_size=1, max_size=6))
NAMES_OF_A_MODEL = st.lists(ANY_NAME.filter(is_name), min_size=NAMES, max_size=NAMES, unique=True)
KIND = st.one_of(ATTACKS, st.sampled_from(KINDS), st.text(CHARACTERS, max_size=6)).filter(is_kind)


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A new folder inside, in which all is run that is run here, and where afterwards no canary is."""
    inside, before = folder / str(len(list(folder.iterdir()))), Path.cwd()
    inside.mkdir()
    os.chdir(inside)
    try:
        yield inside
    finally:
        os.chdir(before)
    assert not list(inside.rglob(CANARY)), "a name was executed"


def train(rank: int, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", "--steps", "1"]
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


def through_all(result: Parallelized, folder: Path) -> None:
    """Save, read what was written as its readers do, verify, train."""
    saved = result.save(folder / "program")
    source = (saved / "model.py").read_text()
    assert not undeclared(source)
    assert yaml.safe_load((saved / "plan.yaml").read_text()) == result.plan.to_dict()
    for script in ("launch.sh", "job.sbatch"):
        assert subprocess.run(["bash", "-n", str(saved / script)], check=False).returncode == 0
    sbatch = (saved / "job.sbatch").read_text().splitlines()
    assert len(sbatch) == 8 and not any(SHELL in line for line in sbatch)
    title, *rest = (saved / "README.md").read_text().splitlines()
    assert title == f"# {result.job.name}" and result.job.name.isidentifier()
    assert sum(line.startswith("#") for line in rest) == 2  # the headings: all else is in fences
    assert result.verify(steps=1).holds
    run_ranks(result.plan.mesh.world_size, train, saved)


@pytest.mark.parametrize("models", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_drawn_names_do_nothing(models: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has 22 names; the first one's are no identifiers, or other ones than they seem."""
    monkeypatch.setattr(ranks, "_run_child", verify_in_fork)
    plans = itertools.cycle(PLANS)

    @settings(
        max_examples=models - 2, derandomize=True, deadline=None, database=None,
        phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(NAMES_OF_A_MODEL, st.tuples(KIND, KIND, KIND))
    @example(names=NO_IDENTIFIERS, kinds=("", "class", "1st"))
    @example(names=NO_IDENTIFIERS, kinds=("a b", "self", "stage"))
    def check(names: list[str], kinds: tuple[str, str, str]) -> None:
        with fresh_folder(tmp_path) as folder:
            model = hostile_model(names, *kinds)
            through_all(parallelize(model, 2, gpu="cpu", inputs=inputs(), global_batch=SAMPLES, **next(plans)), folder)

    check()


@pytest.mark.parametrize("name", RESERVED)
def test_a_name_that_the_emitted_class_needs_is_refused(name: str) -> None:
    plain = [f"x{i}" for i in range(NAMES)]
    result = parallelize(
        hostile_model([*plain[:1], name, *plain[2:]], "Root", "Layer", "Layer"), 2, gpu="cpu", inputs=inputs(),
        global_batch=SAMPLES, dp=2,
    )  # fmt: skip
    with pytest.raises(PlanError, match=f"{name}.* of Root"):
        result.source()


@pytest.mark.parametrize("name", ["a-b", "class", "__x", "ﬁ", "x\ny", "", "self", CODE])
def test_an_input_that_is_no_argument_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is no name of an argument in Python: rename it"):
        parallelize(nn.Linear(2, 2), 1, gpu="cpu", inputs={name: torch.zeros(2, 2)})
