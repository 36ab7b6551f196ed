"""Prepared programs are kept between runs, as text, in $XDG_CACHE_HOME/autopar (~/.cache/autopar).

A program is in a file named by its key (`model_key`), with a checksum in its first line; files are replaced as a whole,
so that processes can share the folder. AUTOPAR_CACHE=off turns it off. `verify` traces anew and never reads it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from torch import nn

from ..cost_models.calibrate import cache_directory
from ..errors import PlanError
from ..ir.graph import Program
from ..ir.reader import UnwrittenError, read_program, write_program
from .model_key import key_of

_MOST = 200  # programs in the folder; those that were not read for longest go
_HEAD = "# autopar: a prepared program, sha256 "


def remembered(
    make: Callable[[], Program], model: nn.Module, inputs: Mapping[str, Any], settings: tuple[Any, ...], cache: Any
) -> Program:
    """The program that `make` gives for these arguments, from the cache where it is there.

    cache: None: of Hugging Face models whose code is all transformers' and torch's, as installed. A name: of any model;
    the user vouches that the name changes whenever code, loss or values that its forward reads do. False: of none.
    """
    if not (cache is None or cache is False or (isinstance(cache, str) and cache)):
        raise PlanError(f"cache={cache!r}: use a name that you change with the model's code, or False for no cache")
    off = cache is False or os.environ.get("AUTOPAR_CACHE") == "off" or "AUTOPAR_DUMP" in os.environ
    key = None if off else key_of(model, inputs, settings, cache or None)
    if key is None:
        return make()
    file = cache_directory() / f"{key}.txt"
    program = _read(file)
    if program is None:
        program = make()
        with suppress(OSError):  # a folder that cannot be written is no cache
            _write(file, program)
    return program


def _read(file: Path) -> Program | None:
    """The program in a file; None where there is none, or, with a line to say so, where it is damaged."""
    try:
        head, _, text = file.read_text().partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        head = text = ""
    try:
        if head != _head(text):
            raise ValueError("its checksum is another")
        program = read_program(text)
        os.utime(file)
    except Exception as error:  # noqa: BLE001 - whatever a text can be wrong in: the model is traced instead
        print(f"autopar: {file} is damaged and is written anew: {error}", file=sys.stderr)
        return None
    return program


def _head(text: str) -> str:
    return _HEAD + hashlib.sha256(text.encode()).hexdigest()


def _write(file: Path, program: Program) -> None:
    """Write a program that a text holds whole: without modules that are kept as they are."""
    if program.opaque:
        return
    try:
        text = write_program(program)
        if write_program(read_program(text)) != text:
            return
    except (UnwrittenError, ValueError):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, suffix=".new", delete=False) as new:
        new.write(f"{_head(text)}\n{text}")
    os.replace(new.name, file)
    entries = sorted([*file.parent.glob("*.txt"), *file.parent.glob("*.new")], key=lambda f: f.stat().st_mtime)
    for old in entries[:-_MOST]:
        old.unlink(missing_ok=True)
