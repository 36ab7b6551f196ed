"""Why a model cannot be traced, in one message of ours: what, the user's line, and the way out.

torch's own text names symbols and environment variables of torch. It is kept only where the model's own forward fails
on the example inputs, without any trace.
"""

from __future__ import annotations

import ast
import linecache
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
from torch import nn

from ..errors import TraceError
from ..ir.graph import S
from .input_sizes import Dims
from .source import is_the_models, is_torchs, path_of_frames, place_of_error, place_of_frames

SIZES = (2, 3, 4, 5, 6, 7, 8, 16, 17, 100, 128, 1000, 4096, 4099)  # on which conditions on sizes are tried

_BRANCH = (
    "a branch on tensor values cannot be traced: use torch.where there, or put the branch into a submodule of its own, "
    "which is then kept whole"
)
_NUMBER = (
    "a number that is read from a tensor cannot be traced: keep it a 0-dim tensor (no .item(), int() or float()), or "
    "read it in a submodule of its own, which is then kept whole"
)
_SHAPE = "a shape that depends on values cannot be traced: keep the shape and mask (torch.where, x * mask)"
_TRANSFORM = (
    "torch.vmap and the transforms of torch.func cannot be traced: write it over whole tensors (broadcasting), or put "
    "it into a submodule of its own, which is then kept whole"
)
_SIZE = "the model fixes its batch or sequence size there: derive it from the input's shape"
_DEVICE = "tensors that forward makes must be on its input's device: device=x.device"
_OUTPUT = "forward returns an object that is no tensor, tuple or dict of tensors: return the loss, or give loss="
_REASONS = (  # (what torch says, what that means and what to do), the first that is found
    ("TransformError", _TRANSFORM),
    ("Could not extract specialized", _NUMBER),
    ("DynamicOutputShape", _SHAPE),
    ("Size-like symbols: u", _SHAPE),
    ("unbacked", _SHAPE),
    ("data-dependent", _BRANCH),
    ("DataDependent", _BRANCH),
    ("pecializ", _SIZE),
    ("Constraints violated", _SIZE),
    ("Expected op to be", _SIZE),  # torch's assertion of a guard at one length
    ("not on the expected device", _DEVICE),
    ("Expected all tensors to be on the same device", _DEVICE),
    ("not a known type", _OUTPUT),
)
_TOKENS = (
    "a loop over tokens would be written out for one length: use an op over the whole sequence (attention, a "
    "convolution, cumsum), or a loop over layers or heads"
)
_SAMPLES = "a loop over samples would be written out for one batch: use ops over the whole batch"
_OWN = (str(Path(logging.__file__).parent), str(Path(__file__).parent))  # frames of these are no model's
_LOGGER = "torch.fx.experimental.symbolic_shapes"


class InsideError(TraceError):
    """A failure inside a submodule, which could be kept whole. in_loop: where a loop over tokens asks for its items."""

    def __init__(self, message: str, path: str, in_loop: bool = False) -> None:
        super().__init__(message)
        self.path, self.in_loop = path, in_loop


class TransformError(Exception):
    """torch.vmap, or a transform of torch.func, runs."""


class _FoundError(Exception):
    """Ends an export as soon as what was looked for is known."""


def explain(error: Exception, model: nn.Module) -> str:
    """One message with the user's own lines, and the way out."""
    return f"tracing failed{place_of_error(error, model)}: {reason_of(error)}"


def reason_of(error: Exception) -> str:
    """An error of a trace in our words, with the way out; in its own where it is not known or the model raises it."""
    name, said = type(error).__name__, str(error)
    reason = next((reason for symptom, reason in _REASONS if symptom in f"{name} {said}"), None)
    if reason is None or _raised_by_the_model(error):
        own, *_ = said.strip().split("\n\n")
        reason = f"{name}: {own}"
    return reason


def _raised_by_the_model(error: BaseException) -> bool:
    """Whether an error comes from a `raise` of the user's own code."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and not is_torchs(traceback.tb_frame.f_code.co_filename)


def refuse_size(model: nn.Module, dims: Dims, export: Callable[[], Any]) -> TraceError:
    """The refusal of a model that holds for some sizes only: `export` runs again, and shows on which line."""
    with _guards(model, dims) as guards, _without_failing():
        export()
    return guards[0] if guards else TraceError(f"tracing failed: {_SIZE}")


@contextmanager
def _without_failing() -> Iterator[None]:
    try:
        yield
    except Exception:  # noqa: BLE001 - it has failed like this before
        return


@contextmanager
def _guards(model: nn.Module, dims: Dims) -> Iterator[list[TraceError]]:
    """Within: the first guard on sizes that does not hold for all of them ends the export, and is in the list."""
    logger, found = logging.getLogger(_LOGGER), list[TraceError]()
    names: dict[sympy.Symbol, sympy.Expr] = {}

    def listen(record: logging.LogRecord) -> bool:
        given = record.args if isinstance(record.args, tuple) else ()
        if str(record.msg).startswith("create_symbol"):
            _learn(names, given, dims)
        elif "[guard added]" in str(record.msg) and given[0] == "eval":
            found.extend(_condition(str(given[1]), names, model))
            if found:
                raise _FoundError
        return False

    level = logger.level
    logger.addFilter(listen)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeFilter(listen)
        logger.setLevel(level)


def _learn(names: dict[sympy.Symbol, sympy.Expr], created: tuple[Any, ...], dims: Dims) -> None:
    """Which of batch and sequence torch's new symbol is."""
    source = re.fullmatch(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]", str(created[2]))
    if source and (size := dims.get(source[1], {}).get(int(source[2]))):
        names[created[0]] = size


def _condition(text: str, names: Mapping[sympy.Symbol, sympy.Expr], model: nn.Module) -> list[TraceError]:
    """The refusal for a guard of this text; none where it holds for all sizes, or is not the model's."""
    frames = list(_frames())
    values = (value for frame in frames for value in frame.f_locals.values())
    expression = next((v for v in values if isinstance(v, sympy.Basic) and str(v) == text), None)
    if expression is None:
        return []
    condition = expression.subs(dict(names))
    not_for = false_for(condition)
    here = [frame for frame in reversed(frames) if is_the_models(frame.f_code.co_filename)]
    if not_for is None or not here:
        return []
    in_loop = _in_loop(here[-1].f_code.co_filename, here[-1].f_lineno)
    way_out = _SIZE if not in_loop else _TOKENS if S in condition.free_symbols else _SAMPLES
    place = place_of_frames([(frame, frame.f_lineno) for frame in here], model)
    said = f"tracing failed{place}: the model holds where {condition}, which is not so for {not_for}: {way_out}"
    if condition.free_symbols <= {S}:  # kept whole, a submodule sees the whole length, but not all samples
        return [InsideError(said, path_of_frames(here, model), in_loop)]
    return [TraceError(said)]


def false_for(condition: sympy.Basic) -> str | None:
    """Sizes for which a condition does not hold: "s=3"; None where it holds for all."""
    symbols = sorted(condition.free_symbols, key=str)
    for sizes in product(SIZES, repeat=len(symbols)):
        if condition.subs(dict(zip(symbols, sizes, strict=True))) == sympy.false:
            return ", ".join(f"{symbol}={n}" for symbol, n in zip(symbols, sizes, strict=True))
    return None


def _frames() -> Iterator[FrameType]:
    """From the logger's caller outwards to `refuse_size`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not refuse_size.__code__:
        if not frame.f_code.co_filename.startswith(_OWN):
            yield frame
        frame = frame.f_back


def _in_loop(file: str, line: int) -> bool:
    """Whether a line asks for the items of a loop."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return False
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.comprehension))
    return any(loop.iter.lineno <= line <= (loop.iter.end_lineno or 0) for loop in loops)
