"""A choice is declared once: made-up ones, added to value objects and nowhere else, are found wherever choices are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
MADE_UP = {  # name → the field of a value object that it is put before
    "gloss": "    zero: int = choice(",
    "polish": "    precision: str = choice(",
    "varnish": "    micro_batch: int = choice(",
    "wax": "    schedule: str = choice(",
}
TRIED = """
import contextlib, io, json, sys
import torch
from autopar import parallelize
from autopar.cli import main
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.search.pins import Pins
from examples.gpt import GPT, GPTConfig

names = sys.argv[1:]
ids = torch.zeros(2, 8, dtype=torch.long)
inputs = {"input_ids": ids, "labels": ids}
model = GPT(GPTConfig(vocab_size=32, n_layer=1, n_head=2, d_model=8, block_size=8))
pinned = parallelize(model, 2, gpu="cpu", inputs=inputs, global_batch=4, **dict.fromkeys(names, 3))
free = parallelize(model, 2, gpu="cpu", inputs=inputs, global_batch=4)
written = pinned.plan.to_dict()


def refused(wrong):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            wrong()
        except PlanError as said:
            error.write(str(said))
    return error.getvalue()


def found(name):
    return {
        "pin": refused(lambda: Pins(**{name: 0})),
        "command": refused(lambda: main(["plan", f"--{name}", "x", "module:build"])),
        "yaml": refused(lambda: Plan.from_dict(written | {name: 0})),
        "values": [written[name], getattr(pinned.load().SETTINGS, name), free.plan.to_dict()[name]],
        "sources": [f"{name}=3" in pinned.source(), name in free.source()],
        "documented": parallelize.__doc__,
        "help": help.getvalue(),
    }


with contextlib.redirect_stdout(io.StringIO()) as help, contextlib.suppress(SystemExit):
    main(["plan", "--help"])
assert Plan.from_dict(written) == pinned.plan != free.plan
print(json.dumps({name: found(name) for name in names}))
"""


def test_a_choice_is_declared_once(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "autopar", tmp_path / "autopar", ignore=shutil.ignore_patterns("__pycache__"))
    declared = tmp_path / "autopar/runtime/choices.py"
    source = declared.read_text()
    for name, before in MADE_UP.items():
        assert source.count(before) == 1
        source = source.replace(before, f'    {name}: int = choice("coats", "coats of {name}", default=1)\n{before}')
    declared.write_text(source)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", TRIED, *MADE_UP], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert not ran.returncode, ran.stderr[-2000:]
    for name, found in json.loads(ran.stdout.splitlines()[-1]).items():
        legal = f"{name}={{}}: use a whole number of coats, 1 to 100,000"
        assert legal.format(0) in found["pin"] and legal.format(0) in found["yaml"]
        assert legal.format("'x'") in found["command"]
        assert f"--{name} N" in found["help"] and f"coats of {name}" in found["help"]
        assert f"{name}: coats of {name}" in found["documented"]
        assert (found["values"], found["sources"]) == ([3, 3, 1], [True, False])
