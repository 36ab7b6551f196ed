"""What a saved folder knows of its model, kept as `.original/original.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..emit.project import KEPT
from ..errors import PlanError
from .samples import Input
from .sizes import read_size

_ANY = 720720 << 20  # samples and tokens, divisible by whatever a size is divided by
FILE = f"{KEPT}/original.json"


@dataclass(frozen=True)
class Record:
    """What the folder knows of its model. model, loss: `module:function`, where they can be imported by name."""

    model: str | None
    loss: str | None
    parameters: int
    inputs: Mapping[str, Input]
    constants: Mapping[str, bool | int | float | str]


def write_record(folder: Path, record: Record) -> None:
    (folder / FILE).write_text(json.dumps(dataclasses.asdict(record), indent=1))


def read_record(folder: Path) -> Record:
    """The record of a saved folder. PlanError where there is none, or it holds what no record does."""
    path = folder / FILE
    if not path.exists():
        raise PlanError(f"{folder} has no {FILE}, with its program as written: save it again")
    try:
        data = json.loads(path.read_text())
        record = Record(**{**data, "inputs": {name: _input(**own) for name, own in data["inputs"].items()}})
        _check(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PlanError(f"{path} is damaged ({type(error).__name__}: {error}): save the program again") from error
    return record


def _input(shape: Any, dtype: Any, values: Any, ignored: Any) -> Input:
    for size in (*shape, *values):
        read_size(size, {"b": _ANY, "s": _ANY})
    if not isinstance(getattr(torch, dtype), torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    if not values or not isinstance(ignored, int | None):
        raise ValueError(f"ids below {values!r}, of which {ignored!r} is ignored")
    return Input(tuple(shape), dtype, tuple(values), ignored)


def _check(record: Record) -> None:
    texts = (record.model, record.loss)
    if not all(text is None or isinstance(text, str) for text in texts) or not isinstance(record.parameters, int):
        raise ValueError(f"model, loss and parameters are {record.model!r}, {record.loss!r}, {record.parameters!r}")
    if wrong := [name for name, value in record.constants.items() if not isinstance(value, bool | int | float | str)]:
        raise ValueError(f"{', '.join(wrong)}: no number or text")
