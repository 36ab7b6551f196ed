"""What was edited in a saved program, by its text: which class and method, how many lines, the lines themselves."""

from __future__ import annotations

import ast
import difflib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from ..emit.project import KEPT, files_as_written
from ..errors import PlanError


@dataclass(frozen=True)
class Edit:
    """One place. where: file and class.method; lines are counted from 1, in the edited file."""

    where: str
    line: int
    removed: int
    added: int


@dataclass(frozen=True)
class Edits:
    """Every edited place, and the unified diff."""

    places: tuple[Edit, ...]
    diff: str

    def __str__(self) -> str:
        if not self.places:
            return "the sources are as they were written"
        rows = [(e.where, f"line {e.line}", f"−{e.removed}", f"+{e.added}") for e in self.places]
        return "edited:\n" + tabulate(rows, tablefmt="plain", disable_numparse=True)


def find_edits(folder: Path) -> Edits:
    """The sources of a saved program against those that were written, kept in `KEPT`."""
    written = {name: text for name, text in files_as_written(folder).items() if name.endswith(".py")}
    current = _sources(folder)
    places: list[Edit] = []
    diffs: list[str] = []
    for name in sorted(written.keys() | current.keys(), key=lambda name: (name.count("/"), name)):
        before = _lines(written.get(name, b""), folder / KEPT / name)
        after = _lines(current.get(name, b""), folder / name)
        if before != after:
            places += _places(name, before, after)
            diffs += difflib.unified_diff(before, after, f"{name} (as written)", f"{name} (edited)", n=2)
    return Edits(tuple(places), "".join(diffs).rstrip())


def _sources(folder: Path) -> dict[str, bytes]:
    """The files of a saved program that train, by name: the scripts and the runtime."""
    paths = [*folder.glob("*.py"), *folder.glob("runtime/**/*.py")]
    try:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    except OSError as error:
        raise PlanError(f"{error.filename} is damaged ({error}): save the program again") from error


def _lines(content: bytes, path: Path) -> list[str]:
    try:
        return io.TextIOWrapper(io.BytesIO(content), "utf-8").readlines()
    except ValueError as error:
        raise PlanError(f"{path} is damaged ({error}): save the program again") from error


def _places(name: str, before: Sequence[str], after: Sequence[str]) -> list[Edit]:
    """The edits of a file: those of one method are one."""
    found: dict[str, Edit] = {}
    owners = (_owners(before), _owners(after))
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    for kind, i, i_end, j, j_end in changes:
        if kind == "equal":
            continue
        owner = owners[1][j] if j < j_end else owners[0][i]
        where = f"{name}: {owner}"
        so_far = found.get(where, Edit(where, j + 1, 0, 0))
        found[where] = Edit(where, so_far.line, so_far.removed + i_end - i, so_far.added + j_end - j)
    return list(found.values())


def _owners(lines: Sequence[str]) -> list[str]:
    """Of each line, the class and method that it belongs to; of a line of neither, the name that it assigns."""
    owners = ["top of the file"] * len(lines)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ["(does not parse)"] * len(lines)
    for node in tree.body:
        _mark(node, "", owners)
    return owners


def _mark(node: ast.stmt, prefix: str, owners: list[str]) -> None:
    named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        name = prefix + node.name
    elif isinstance(node, ast.Assign) and not prefix:
        name = ast.unparse(node.targets[0])
    else:
        return
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    owners[first - 1 : node.end_lineno] = [name] * ((node.end_lineno or first) - first + 1)
    if named and isinstance(node, ast.ClassDef):
        for child in node.body:
            _mark(child, f"{name}.", owners)
