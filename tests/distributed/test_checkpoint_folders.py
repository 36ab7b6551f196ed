"""Folders of checkpoints: whole ones, damaged ones, and which of them stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.runtime import folders
from tests.harness import run_ranks


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _write(folder: Path, step: int, size: int = 100, keep: int | None = None) -> None:
    def write(partial: Path) -> None:
        for name in ("__0_0.distcp", ".metadata"):
            (partial / name).write_bytes(bytes([step]) * size)

    folders.write_folder(folder, {"step": step, "samples": step, "seed": 0, "plan": {}}, write, keep)


def _truncate(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"\3" * 99)


def _flip(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"\3" * 50 + b"\2" + b"\3" * 49)


def _exchange(folder: Path) -> None:
    shutil.copy(folder.parent / "step-2" / "__0_0.distcp", folder)


def _list_of_another(folder: Path) -> None:
    shutil.copy(folder.parent / "step-2" / ".metadata", folder)


def _more_ranks(folder: Path) -> None:
    (folder / "__1_0.distcp").write_bytes(b"")


def _fewer(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()


def _no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _manifest_of_another(folder: Path) -> None:
    shutil.copy(folder.parent / "step-2" / "manifest.json", folder)


def _edited_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 30'))


def _sealed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest of another form, whose seal is right: it is no secret."""

    def write(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["seal"]
        change(manifest)
        path.write_text(json.dumps({**manifest, "seal": folders._seal(manifest)}))

    return write


def _deep_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def _half_a_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:40])


FAULTS: Sequence[tuple[Callable[[Path], None], str]] = (
    (_truncate, r"step-3/__0_0.distcp is damaged, or of another save: 99 bytes of 100"),
    (_flip, r"step-3/__0_0.distcp is damaged, or of another save: its hash"),
    (_exchange, r"step-3/__0_0.distcp is damaged, or of another save"),
    (_list_of_another, r"step-3/.metadata is damaged, or of another save"),
    (_more_ranks, r"step-3 is mixed: __1_0.distcp is not of its save by 1 ranks"),
    (_fewer, r"step-3 is not whole: __0_0.distcp is missing"),
    (_no_manifest, r"step-3 is not whole: its save did not end, or manifest.json is missing"),
    (_manifest_of_another, r"step-3/manifest.json is damaged, or of another save"),
    (_edited_manifest, r"step-3/manifest.json is damaged, or of another save"),
    (_half_a_manifest, r"step-3/manifest.json is damaged, or of another save"),
    (_deep_manifest, r"step-3/manifest.json is damaged, or of another save"),
    (_sealed(lambda m: m.pop("plan")), r"step-3/manifest.json is damaged, or of another save"),
    (_sealed(lambda m: m.update(samples="3")), r"step-3/manifest.json is damaged, or of another save"),
    (_sealed(lambda m: m["files"].update({".metadata": 3})), r"step-3/manifest.json is damaged, or of another save"),
)


def test_what_is_damaged_or_mixed_is_refused_by_name_and_the_one_before_taken(tmp_path: Path) -> None:
    def on_rank(rank: int) -> None:
        for number, (damage, words) in enumerate(FAULTS):
            folder = tmp_path / str(number)
            for step in (1, 2, 3):
                _write(folder, step)
            found = folders.find_checkpoint(folder)
            assert found and found[0] == folder / "step-3"
            damage(folder / "step-3")
            with pytest.raises(ValueError, match=words):
                folders.find_checkpoint(folder / "step-3")
            found = folders.find_checkpoint(folder)
            assert found and found[0] == folder / "step-2" and found[1]["step"] == 2
            shutil.rmtree(folder / "step-1")
            shutil.rmtree(folder / "step-2")
            with pytest.raises(ValueError, match=words):
                folders.find_checkpoint(folder)
            _write(folder, 3)
            assert folders.find_checkpoint(folder)
            assert len(list(folder.glob("replaced-step-3-*"))) == 1  # nothing is thrown away
        assert folders.find_checkpoint(tmp_path / "none") is None

    run_ranks(1, on_rank)


def test_a_folder_that_one_rank_does_not_see_is_refused_by_all(tmp_path: Path) -> None:
    """As where nodes do not share a disk: no rank waits for another."""

    def on_rank(rank: int) -> None:
        _write(tmp_path / "0", 1)
        with pytest.raises(ValueError, match="1/step-1 is not whole"):
            folders.find_checkpoint(tmp_path / str(rank) / "step-1")

    run_ranks(2, on_rank, timeout=30)


def test_a_damaged_folder_is_none_of_those_that_stay(tmp_path: Path) -> None:
    def on_rank(rank: int) -> None:
        for step in (1, 2, 3):
            _write(tmp_path, step)
        _truncate(tmp_path / "step-3")
        _write(tmp_path, 4, keep=2)
        assert names(tmp_path) == {"step-2", "step-3", "step-4"}
        _write(tmp_path, 5, keep=2)
        assert names(tmp_path) == {"step-4", "step-5"}

    run_ranks(1, on_rank)


def test_a_save_is_done_where_an_older_one_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if path.name == "step-1.partial":
            raise OSError("busy")
        remove(path, ignore_errors)

    def on_rank(rank: int) -> None:
        _write(tmp_path, 1)
        monkeypatch.setattr(shutil, "rmtree", busy)
        _write(tmp_path, 2, keep=1)
        assert names(tmp_path) == {"step-1.partial", "step-2"}

    run_ranks(1, on_rank)
