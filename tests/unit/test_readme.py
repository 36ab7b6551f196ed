"""The tables of techniques: what they name is there, in README and in docs."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import autopar
from autopar.plan.options import OPTIONS, PINS

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[list[str]]:
    """technique, pin, generated code, price."""
    text = (ROOT / "docs/techniques.md").read_text()
    _, _, table = text.partition("| technique | pin or option | generated code | price |\n|---|---|---|---|\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.partition("\n\n")[0].splitlines()]


@cache
def written() -> str:
    """What may stand in a generated program: the goldens, what writes it, and its runtime."""
    folders = ("tests/golden/emit", "autopar/emit", "autopar/runtime")
    return "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_pins_options_and_generated_names_exist(row: list[str]) -> None:
    technique, pin, code, price = row
    assert technique and pin and code and price
    options = {*inspect.signature(autopar.parallelize).parameters, *PINS, "forbid"}
    assert set(re.findall(r"(\w+)=", pin)) <= options
    flags = " ".join((ROOT / "autopar" / path).read_text() for path in ("cli.py", "emit/templates/train.py"))
    named = re.findall(r"--([\w-]+)", pin + code)
    assert all(f"--{name}" in flags or name.replace("-", "_") in OPTIONS for name in named)
    called = {name for text in re.findall(r"`([^`]+)`", code) for name in re.findall(r"(\w+)\(", text)}
    assert not {name for name in called if name not in written()}


def test_readme_has_a_short_line_for_each_pin() -> None:
    text = (ROOT / "README.md").read_text()
    lines = text.partition("| technique | pin or option |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert lines and max(map(len, lines)) <= 160
    named = set(re.findall(r"(\w+)=", " ".join(lines)))
    assert {*PINS} <= named <= {*inspect.signature(autopar.parallelize).parameters, *PINS}
