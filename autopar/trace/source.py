"""Where in the user's model something is: module path and source line, of a node or of an exception."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from torch import fx, nn

# Frames of torch and of ours are not the user's source.
NOT_THE_USERS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))

_MODEL_CODE = tuple(f"{Path(torch.__file__).parent / part}{os.sep}" for part in ("nn", "distributions"))


def is_torchs(file: str) -> bool:
    """Whether a source file is torch's, ours or generated."""
    return file.startswith((*NOT_THE_USERS, "<"))


def is_the_models(file: str) -> bool:
    """Whether a source file has code of models: the user's, a library's, or a module or distribution of torch."""
    return file.startswith(_MODEL_CODE) or not is_torchs(file)


def line_of_the_user() -> str:
    """The innermost line of the user's that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_torchs(frame.f_code.co_filename):
        frame = frame.f_back
    return "forward" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def source_line(stack_trace: str | None) -> str:
    """The innermost user line of a recorded stack trace, as file:line."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace or "")
    own = [f for f in frames if not f[0].startswith((*NOT_THE_USERS, "<"))] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def module_path(node: fx.Node) -> str:
    """The path of the module that ran an exported op."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    return re.sub(r"@\d+", "", paths[-1]) if paths else ""


def place(node: fx.Node) -> str:
    """ " in model.layers.3.mlp, at file.py:12" of an exported op, with what is known of it."""
    module, line = module_path(node), source_line(node.stack_trace)
    return (f" in {module}" if module else "") + (f", at {line}" if module and line else f" at {line}" if line else "")


def excerpt(node: fx.Node) -> str:
    """The source lines around an exported op, on lines of their own; "" where the file is not there."""
    file, _, line = source_line(node.stack_trace).rpartition(":")
    lines = _excerpt(file, int(line)) if file else ""
    return f"\n{lines}" if lines else ""


def place_of_error(error: BaseException, model: nn.Module) -> str:
    """The innermost user frame of an exception, its module's path, and the source lines around it."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return place_of_frames(frames, model)


def place_of_frames(frames: Sequence[tuple[FrameType, int]], model: nn.Module) -> str:
    """The same of frames with their lines, the innermost last."""
    at, path = "", path_of_frames([frame for frame, _ in frames], model)
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not is_torchs(file):
            at = f" at {file}:{line}\n{_excerpt(file, line)}\n"
    inside = f" in {path}" if path else ""
    return f"{inside},{at}" if inside and at else inside or at


def path_of_frames(frames: Sequence[FrameType], model: nn.Module) -> str:
    """The path of the innermost module whose methods these frames run, the innermost last; "" for the model itself."""
    names = {id(module): name for name, module in model.named_modules()}
    owners = (id(frame.f_locals.get("self")) for frame in reversed(frames))
    return next((names[owner] for owner in owners if owner in names), "")


def _excerpt(file: str, line: int) -> str:
    """The line and two on each side, the line itself marked."""
    lines = []
    for number in range(max(1, line - 2), line + 3):
        text = linecache.getline(file, number).rstrip()
        if text:
            lines.append(f"  {'→' if number == line else ' '} {number:4d}  {text}")
    return "\n".join(lines)
