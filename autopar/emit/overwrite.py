"""A folder that is about to be written: what somebody has edited in it is not lost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..errors import PlanError

KEPT = ".original"  # the folder, inside a saved program, with its files as they were written
# Text that a saved program consists of, and that people edit.
WRITTEN = ("model.py", "train.py", "plan.yaml", "README.md", "launch.sh", "job.sbatch", "init.json")


def check_folder(folder: Path, overwrite: bool | Collection[str] = False) -> None:
    """PlanError where a program cannot be written to `folder`, or files edited by hand would be lost.

    overwrite: True for whatever is there, or the names of files that may be overwritten.
    """
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            where = "" if part == folder else f"{folder}: "
            raise PlanError(f"{where}{part} is a file, and a program is a folder: name another")
    allowed = edited_files(folder) if overwrite is True else overwrite or ()
    if lost := [name for name in edited_files(folder) if name not in allowed]:
        shown = ", ".join(lost[:6]) + (f" and {len(lost) - 6} more" if len(lost) > 6 else "")
        raise PlanError(
            f"{folder} has files that were not written by autopar, or edited since: {shown}. Write to another folder, "
            "or overwrite them with --force (in Python: overwrite=True)"
        )


def edited_files(folder: Path) -> list[str]:
    """Files that writing a program to `folder` would change or remove, and that are not as autopar wrote them."""
    runtime = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("runtime/**/*")) if path.is_file()]
    names = [*WRITTEN, *(name for name in runtime if "__pycache__" not in name)]
    return [name for name in names if (folder / name).exists() and not _as_written(folder, name)]


def _as_written(folder: Path, name: str) -> bool:
    kept = folder / KEPT / name
    return kept.is_file() and kept.read_bytes() == (folder / name).read_bytes()
