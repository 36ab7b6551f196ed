"""Folders of checkpoints: DIR/step-N is there whole or not at all, and one that has changed since is not loaded.

A save goes to DIR/step-N.partial, gets a manifest with the size and hash of every file, and only then its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from .mesh import from_each_rank

MANIFEST, PARTIAL, LIST = "manifest.json", ".partial", ".metadata"  # torch's LIST says which tensor lies in which file
T = TypeVar("T")
Manifest = Mapping[str, Any]  # step, samples, seed, plan, files: name → [size, hash]


def together(action: Callable[[], T]) -> list[T]:
    """Run an action on every rank and return the results by rank. If one fails, all raise its error: none waits."""
    mine: tuple[Any, Exception | None]
    try:
        mine = action(), None
    except Exception as error:  # noqa: BLE001 - all raise it, below
        mine = None, error
    ranks: list[tuple[Any, Exception | None]] = from_each_rank(mine)
    for _, failure in ranks:
        if failure is not None:
            raise failure
    return [result for result, _ in ranks]


def on_first(action: Callable[[], T]) -> T:
    """Run an action on rank 0 and return its result on all ranks."""
    return together(lambda: action() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def write_folder(folder: Path, facts: Mapping[str, Any], write: Callable[[Path], None], keep: int | None) -> None:
    """Write DIR/step-N: every rank `write`s files of its own, and rank 0 says that all are there.

    facts: of the manifest; `step` is N. keep: how many of the latest stay. Raises OSError where it cannot be written.
    """
    target = folder / f"step-{facts['step']}"
    partial = target.with_suffix(PARTIAL)
    try:
        on_first(lambda: _clear(folder, partial))
        write(partial)
        files = {name: entry for entries in together(lambda: _written(partial)) for name, entry in entries.items()}
        on_first(lambda: _finish(target, {**facts, "ranks": dist.get_world_size(), "files": files}, keep))
    except Exception as error:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{target} was not saved ({error}); what {folder} had before it still has") from error


def _clear(folder: Path, partial: Path) -> None:
    for left in folder.glob(f"step-*{PARTIAL}"):  # of saves that did not end
        shutil.rmtree(left)
    partial.mkdir(parents=True)


def _written(partial: Path) -> dict[str, list[Any]]:
    """Size and hash of the files that this rank has written."""
    names = [path.name for path in partial.glob(f"__{dist.get_rank()}_*")]
    return {name: _entry(partial / name) for name in names + [LIST] * (dist.get_rank() == 0)}


def _entry(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _finish(target: Path, manifest: Manifest, keep: int | None) -> None:
    partial = target.with_suffix(PARTIAL)
    for name in manifest["files"]:
        if not (partial / name).exists():
            raise FileNotFoundError(f"{name} of another rank is not in {partial}: use a folder that all ranks share")
    with (partial / MANIFEST).open("w") as file:
        json.dump({**manifest, "seal": _seal(manifest)}, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    if target.exists():  # damaged, or `refuse_later` had refused to begin
        target.rename(target.with_name(f"replaced-{target.name}-{time.time_ns()}"))
    partial.rename(target)
    _sync(target.parent)
    for old in _older(target, keep) if keep else ():
        with suppress(OSError):  # the save is done: what cannot go now may go with the next
            shutil.rmtree(old.rename(old.with_suffix(PARTIAL)))  # never half a folder under a good name


def _older(latest: Path, keep: int) -> list[Path]:
    """The checkpoints older than the `keep` latest whole ones, damaged ones too; none while there are fewer."""
    before = [path for path in _folders(latest.parent) if _number(path) <= _number(latest)]
    kept = list(islice(filter(_has_its_files, before), keep))
    if len(kept) < keep:
        return []
    return [path for path in before if _number(path) < _number(kept[-1])]


def _has_its_files(folder: Path) -> bool:
    """Whether all files are there in their size; their contents, which take long, are not read."""
    try:
        files = _manifest(folder)["files"]
        return all((folder / name).stat().st_size == size for name, (size, _) in files.items())
    except (ValueError, OSError):
        return False


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _seal(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, default=str).encode()).hexdigest()


def _is_form(manifest: Manifest) -> bool:
    """Whether a manifest has the fields that a save writes: anybody can make the seal of anything."""
    numbers = [manifest[name] for name in ("step", "samples", "seed", "ranks")]
    numbers += [size for size, _ in manifest["files"].values()]
    return all(type(number) is int for number in numbers) and isinstance(manifest["plan"], dict)


def _folders(folder: Path) -> list[Path]:
    """The checkpoints in DIR, the latest first."""
    numbered = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(numbered, key=_number, reverse=True)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def refuse_later(folder: Path, step: int) -> None:
    """Raise ValueError where DIR has checkpoints of later steps than that at which a run begins."""
    if any(_number(path) > step for path in _folders(folder)):
        raise ValueError(
            f"--save {folder} has {_folders(folder)[0].name}, and this run begins at step {step}: go on from what it "
            f"has by --init {folder}, or give another folder"
        )


def find_checkpoint(folder: Path) -> tuple[Path, Manifest] | None:
    """The checkpoint that is DIR, or the latest whole one in it, with its manifest. Every rank calls.

    Raises ValueError, naming files, where DIR has checkpoints and none is whole. None: it has none at all.
    """
    if on_first(lambda: folder.suffix == PARTIAL or any((folder / name).exists() for name in (MANIFEST, LIST))):
        return folder, _checked(folder)
    faults = []
    for path in on_first(lambda: _folders(folder)):
        try:
            checkpoint = path, _checked(path)
        except (ValueError, OSError) as error:
            faults.append(str(error))
        else:
            if faults and dist.get_rank() == 0:
                print(f"resuming {path}: {'; '.join(faults)}", flush=True)
            return checkpoint
    faults += on_first(lambda: [f"{path} is not whole: its save did not end" for path in folder.glob(f"*{PARTIAL}")])
    if faults:
        raise ValueError("; ".join(faults))
    return None


def _checked(folder: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose files are those that were saved; each rank reads its share of them."""
    return together(lambda: _check(folder, dist.get_rank(), dist.get_world_size()))[0]


def _check(folder: Path, rank: int, ranks: int) -> Manifest:
    manifest = _manifest(folder)
    files: Mapping[str, list[Any]] = manifest["files"]
    present = {path.name for path in folder.glob("*.distcp")} | {LIST} & {path.name for path in folder.iterdir()}
    if missing := sorted(files.keys() - present):
        raise ValueError(f"{folder} is not whole: {', '.join(missing)} is missing")
    if others := sorted(present - files.keys()):
        raise ValueError(f"{folder} is mixed: {', '.join(others)} is not of its save by {manifest['ranks']} ranks")
    for name in sorted(files)[rank::ranks]:
        size = (folder / name).stat().st_size
        if size != files[name][0]:
            raise ValueError(f"{folder / name} is damaged, or of another save: {size} bytes of {files[name][0]}")
        if _entry(folder / name) != files[name]:
            raise ValueError(f"{folder / name} is damaged, or of another save: its hash is not the manifest's")
    return manifest


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if folder.suffix == PARTIAL or not path.exists():
        raise ValueError(f"{folder} is not whole: its save did not end, or {MANIFEST} is missing")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        sealed = manifest.pop("seal") == _seal(manifest) and _is_form(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sealed = False
    if not sealed or folder in _folders(folder.parent) and _number(folder) != manifest["step"]:
        raise ValueError(f"{path} is damaged, or of another save")
    return manifest
