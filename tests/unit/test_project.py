"""Promises about the sources themselves: sizes, and who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "autopar" / "runtime"


def _sources(*folders: str) -> list[Path]:
    """Python files below, each once: autopar/passes and autopar/cost_models are links to the root."""
    found = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in found if ROOT / "tests" / "golden" not in path.parents)


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(level, module) of every import in the file; `from torch import fx` gives torch and torch.fx."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.level, module
            yield from ((node.level, f"{module}.{alias.name}".lstrip(".")) for alias in node.names)


@pytest.mark.parametrize(
    ("folder", "cap"),
    [("autopar", 300), ("passes", 300), ("examples", 300), ("cost_models", 400), ("tests", 400)],
)
def test_files_stay_short(folder: str, cap: int) -> None:
    inside = [path for path in _sources(folder) if ROOT / folder in path.parents]
    long = {_name(path): _lines(path) for path in inside if _lines(path) > cap}
    assert not long, f"over {cap} lines: split by idea"


@pytest.mark.parametrize("folder", ["autopar", "passes", "examples"])
def test_functions_stay_short(folder: str) -> None:
    """Signature and docstring, which may be long, are not counted. The cost models are to be rewritten: one has 59."""
    long = []
    for path in _sources(folder):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                first = function.body[1:2] if ast.get_docstring(function) else function.body[:1]
                lines = (function.end_lineno or 0) - first[0].lineno + 1 if first else 0
                cost = ROOT / "cost_models" in path.parents
                long += [f"{_name(path)}: {function.name} has {lines} lines"] * (lines > 40 and not cost)
    assert not long


# To be mended with their files; the cost models and what searches by them are to be rewritten.
MANY_DECISIONS = {
    "autopar/trace/initialise.py: weights_of",
    "autopar/trace/layers.py: _extract",
    "autopar/trace/layers.py: _split",
    "autopar/trace/opaque.py: complete",
    "autopar/trace/sizes.py: check_sizes",
    "autopar/trace/trial.py: treats_samples_alone",
    "autopar/verification/shrink.py: small_enough",
    "cost_models/data_parallel.py: _gradient_time",
    "cost_models/describe.py: _layer_costs",
    "cost_models/fusion.py: _cost",
    "cost_models/pipeline.py: simulate_one",
}


def _decisions(function: ast.FunctionDef) -> int:
    """1, and 1 for each branch, loop, handler, comprehension, `if` in one, `and` and `or`."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.Assert):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def test_functions_decide_little() -> None:
    """At most 15 decisions: ruff's complexity does not count `and`, `or` and comprehensions."""
    many = {
        f"{_name(path)}: {function.name}"
        for path in _sources("autopar", "passes", "cost_models")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and _decisions(function) > 15
    }
    assert not many - MANY_DECISIONS, "find a better form: a table, a function with a name, a value made once"
    assert not MANY_DECISIONS - many, "mended: take them out of the list"


def test_the_runtime_stays_small() -> None:
    """4,130 since checkpoints are whole or refused (pieces, manifests, signals, readers of their own pickles), bad data
    are named, and the choices of a plan are declared where a program reads them."""
    total = sum(_lines(path) for path in _sources("autopar/runtime"))
    assert total <= 4130, f"autopar/runtime has {total} lines"


def test_each_private_module_of_torch_is_imported_in_one_place() -> None:
    """There the reason stands, and there it changes with torch; a test of its own says what it must do."""
    places: dict[str, set[str]] = {}
    for path in _sources("autopar", "passes", "cost_models"):
        for _, module in _imports(path):
            parts = module.split(".")
            private = next((n for n, part in enumerate(parts) if part.startswith("_")), 0)
            if parts[0] == "torch" and private:
                places.setdefault(".".join(parts[: private + 1]), set()).add(_name(path))
    assert {"torch.utils._pytree", "torch.utils._python_dispatch"} <= places.keys()
    assert not {module: files for module, files in places.items() if len(files) > 1}


@pytest.mark.parametrize("path", _sources("autopar/runtime"), ids=_name)
def test_the_runtime_needs_only_torch(path: Path) -> None:
    """It is copied into saved programs: only torch (without fx), the standard library, and itself by `.`."""
    depth = len(path.relative_to(RUNTIME).parts)
    allowed = sys.stdlib_module_names | {"torch"}
    for level, module in _imports(path):
        assert level <= depth, f"{'.' * level}{module} reaches out of the runtime"
        assert level or module.split(".")[0] in allowed, module
        assert not f"{module}.".startswith("torch.fx."), "the runtime builds no graph"


def test_importing_the_runtime_loads_no_compiler_module() -> None:
    code = """
import importlib, pkgutil, sys
import autopar.runtime
for module in pkgutil.walk_packages(autopar.runtime.__path__, "autopar.runtime."):
    importlib.import_module(module.name)
print(*(name for name in sys.modules if name.startswith("autopar.")))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert not [name for name in run.stdout.split() if not f"{name}.".startswith("autopar.runtime.")]


def test_no_module_exists_twice() -> None:
    """`import passes` would load a second copy of autopar.passes, with classes that are not its classes."""
    for path in _sources("autopar", "passes", "cost_models", "tests", "examples"):
        bare = {m for level, m in _imports(path) if level == 0 and m.split(".")[0] in ("passes", "cost_models")}
        assert not bare, f"{_name(path)} imports {bare}: write autopar.passes, autopar.cost_models"
