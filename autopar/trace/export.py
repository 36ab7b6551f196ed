"""nn.Module → Program: torch.export on the meta device, then our own node facts.

The trace is the training IR before decomposition, with batch and sequence as symbols (DESIGN §3).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ..errors import TraceError
from ..ir.graph import Program
from ..ir.lengths import FixedLength
from . import repeats
from .importer import Importer
from .literals import Literals
from .loss_shapes import LossShapes
from .opaque import Opaque
from .refusals import explain, refuse_size
from .signature import check_inputs, name_keywords
from .sizes import check_sizes
from .source import place_of_error

_MAX_SEQUENCE = 1 << 20


def trace(
    model: nn.Module,
    inputs: Mapping[str, Any],
    dtype: torch.dtype,
    fold: bool = False,
    batch_norm: str = "refuse",
) -> Program:
    """Trace `model(**inputs)`, whose result is or begins with the loss, into a program of one block.

    `inputs` are example keyword inputs, batch on dim 0; integer inputs of two dims (ids, labels) fix
    the sequence length. Values are never read: weights may be on meta. `dtype` is the compute dtype, of floating
    inputs too. With `fold` the inner layers of deep lists are stand-ins (see `repeats`). batch_norm: "refuse", or
    "synchronise" to let forward update running statistics.
    Raises TraceError where the model branches on values or depends on ambient autocast.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise TraceError(
            "tracing under torch.autocast would lose its casts: call parallelize outside it and choose precision="
        )
    check_inputs(inputs)
    shadow = _meta_copy(model, dtype)
    if fold and not repeats.fold(shadow):
        raise repeats.NotRepeatedError("no list of equal layers")
    example, dims = _example(inputs, dtype)
    name_keywords(shadow, example)
    opaque = Opaque(model, shadow, dtype)
    fixed = None
    try:
        exported = opaque.export(lambda: _export(shadow, example, dims))
    except OneLengthError as error:
        fixed, dims = error.fixed, _without_sequence(dims)
        exported = opaque.export(lambda: _export(shadow, example, dims))
    program = opaque.complete(Importer(model, exported, example, dims, dtype, batch_norm).program())
    return program if fixed is None else replace(program, fixed_length=fixed, sequence_range=(fixed.tokens,) * 2)


class OneLengthError(TraceError):
    """The model runs at the example's length alone: to be traced with sizes in place of `s`."""

    def __init__(self, fixed: FixedLength) -> None:
        super().__init__(str(fixed))
        self.fixed = fixed


def _without_sequence(dims: dict[str, dict[int, str]]) -> dict[str, dict[int, str]]:
    return {name: {d: kind for d, kind in of.items() if kind != "s"} for name, of in dims.items()}


def _meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with meta tensors: parameters in `dtype`, buffers in their own (RoPE tables stay fp32)."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        target = dtype if parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, device="meta", dtype=target), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        target = torch.float64 if dtype == torch.float64 and buffer.is_floating_point() else buffer.dtype
        memo[id(buffer)] = torch.empty(buffer.shape, device="meta", dtype=target)
    return copy.deepcopy(model, memo).train()


def _example(inputs: Mapping[str, Any], dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, dict[int, str]]]:
    """Meta inputs, floating ones in the compute dtype, and, for each, which dims are batch ("b") and sequence ("s")."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise TraceError("no example inputs: pass inputs={'input_ids': …, 'labels': …} (labels included)")
    ids = [v for v in tensors.values() if v.dim() == 2 and not v.is_floating_point()]
    sequence = max((v.shape[1] for v in ids), default=0)
    batch = next(size for size in (4, 3, 5) if size != sequence)
    example: dict[str, Any] = dict(inputs)
    dims: dict[str, dict[int, str]] = {}
    for name, tensor in tensors.items():
        dims[name] = {0: "b"} if tensor.dim() else {}
        if tensor.dim() > 1 and tensor.shape[1] == sequence and sequence > 1:
            dims[name][1] = "s"
        shape = (batch, *tensor.shape[1:]) if tensor.dim() else ()
        example[name] = torch.empty(shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta")
    return example, dims


def _export(model: nn.Module, example: dict[str, Any], dims: dict[str, dict[int, str]]) -> torch.export.ExportedProgram:
    """Export with named dynamic dims, narrowing the sequence range to what the model allows."""
    low, high, deferred = 2, _MAX_SEQUENCE, False
    for _ in range(4):
        symbols = {"b": Dim("b", min=1), "s": Dim("s", min=low, max=high)}
        shapes = {
            name: {d: symbols[kind] for d, kind in dims[name].items()} if name in dims else None for name in example
        }
        export = partial(_attempt, model, example, shapes, deferred)
        try:
            exported = export()
            if deferred:
                check_sizes(exported, dims, lambda length: _at_length(model, example, dims, length))
            return exported
        except torch._dynamo.exc.UserError as error:  # private path, public class: the only error export documents
            fix = re.search(r"s = Dim\('s'(?:, min=(\d+))?(?:, max=(\d+))?\)", str(error))
            if fix:
                low, high = int(fix[1] or low), int(fix[2] or high)
            elif alone := re.search(r"^ *s = (\d+)$", str(error), re.MULTILINE):
                _refuse_other_lengths(int(alone[1]), lambda length: _at_length(model, example, dims, length), model)
                raise refuse_size(model, dims, export) from error
            elif "satisfy the generated guard" in str(error) and not deferred:
                deferred = True  # torch's own guards, which hold for all sizes but which it cannot prove
            else:
                if "onstraints violated" in str(error) or "pecializ" in str(error):
                    raise refuse_size(model, dims, export) from error
                raise TraceError(explain(error, model)) from error
        except (repeats.NotRepeatedError, TraceError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the user's forward raised, told with its place
            raise TraceError(explain(error, model)) from error
    raise TraceError(f"no range of sequence lengths could be found for the model (last tried {low}…{high})")


def _attempt(
    model: nn.Module, example: dict[str, Any], shapes: dict[str, Any], deferred: bool
) -> torch.export.ExportedProgram:
    with Literals(), LossShapes():
        return torch.export.export(
            model, (), example, strict=False, dynamic_shapes=shapes,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )  # fmt: skip


def _at_length(
    model: nn.Module, example: dict[str, Any], dims: dict[str, dict[int, str]], length: int
) -> torch.export.ExportedProgram:
    """The export for one sequence length."""
    resized = dict(example)
    for name, of in dims.items():
        shape = [length if of.get(d) == "s" else n for d, n in enumerate(example[name].shape)]
        resized[name] = torch.empty(shape, dtype=example[name].dtype, device="meta")
    return _export(model, resized, _without_sequence(dims))


def _refuse_other_lengths(tokens: int, at_length: Callable[[int], Any], model: nn.Module) -> None:
    """OneLengthError where forward fails at every other length that is tried, with the place of the first failure."""
    place = ""
    for length in (2 * tokens, 4 * tokens, tokens // 2, tokens - 1):
        try:
            at_length(max(length, 1))
            return
        except TraceError as error:
            place = place or place_of_error(error.__cause__ or error, model)
    raise OneLengthError(FixedLength(tokens, place.rstrip()))
