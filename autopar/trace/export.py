"""nn.Module → Program: torch.export on the meta device, then our own node facts.

The trace is the training IR before decomposition, with batch and sequence as symbols (DESIGN §3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from ..errors import TraceError
from ..ir.graph import Program, S
from ..ir.lengths import FixedLength
from ..runtime.precision import default_dtype
from . import repeats
from .checks import branches_refused
from .copies import copied
from .importer import Importer
from .input_sizes import InputSizes, first_guess, other_sizes
from .literals import Literals
from .loss_shapes import LossShapes
from .opaque import Opaque
from .refusals import InsideError, explain
from .repeatable import check_repeatable
from .signature import check_inputs, name_keywords
from .sizes import SizesError, check_sizes, difference, holds, one_length

_MOST_SUGGESTIONS = 6  # of torch, that are followed one after the other
_MOST_EXPORTS = 3  # of other relations between the inputs' sizes


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
    first = first_guess(inputs, dtype)
    name_keywords(shadow, inputs)
    check_repeatable(shadow, first)
    opaque = Opaque(model, shadow, dtype)
    exported, sizes = opaque.export(lambda: _export(shadow, first))
    program = opaque.complete(Importer(model, exported, sizes, batch_norm).program())
    if first.has_sequence and not sizes.has_sequence:
        length = first.values[S]
        fixed = one_length(shadow, first) or FixedLength(length, limits=sizes.limits)
        return replace(program, fixed_length=fixed, sequence_range=(length, length))
    low, high = program.sequence_range
    here = {S: first.values[S]}
    if here[S] < low and sizes.has_sequence and difference(shadow, exported, sizes, here, _export_at) is None:
        low = here[S]  # of one part, which torch takes for a size of its own
    return replace(program, sequence_range=(low, high))


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
    return copied(model, memo).train()


def _export(model: nn.Module, first: InputSizes) -> tuple[ExportedProgram, InputSizes]:
    """Export for as many sizes of the inputs as the model allows."""
    refused: list[SizesError] = []
    why: TraceError | None = None
    for sizes in _relations(model, first):
        try:
            return _export_at(model, sizes), replace(sizes, limits=str(why or ""))
        except SizesError as error:
            refused.append(error)
            why = why or error.told(model)
            if isinstance(why, InsideError) and why.in_loop:
                raise why from None  # at one length it would be written out
        except TraceError as error:
            if why is None or not isinstance(error.__cause__, AssertionError):  # torch's, of a guard at a fixed size
                raise
    raise next((error for error in refused if str(error)), None) or why or refused[0]


def _relations(model: nn.Module, first: InputSizes) -> Iterator[InputSizes]:
    """Relations of the input sizes to try: the first guess, what the model runs with, the example's length."""
    yield first
    yield from islice(other_sizes(first, model), _MOST_EXPORTS)
    if first.has_sequence:
        yield first.fixed_at({S: first.values[S]})


def _export_at(model: nn.Module, sizes: InputSizes) -> ExportedProgram:
    """Export with named dynamic dims, in the ranges and multiples that torch suggests; SizesError where none holds."""
    shapes, deferred = sizes.symbolic(), False
    for _ in range(_MOST_SUGGESTIONS):
        export = partial(_attempt, model, sizes, shapes, deferred)
        try:
            exported = export()
        except torch._dynamo.exc.UserError as error:  # private path, public class: the only error export documents
            if suggested := _suggested(error.msg, shapes):
                shapes = suggested
            elif "satisfy the generated guard" in error.msg and not deferred:
                deferred = True  # torch's own guards, which hold for all sizes but which it cannot prove
            elif "onstraints violated" in error.msg or "pecializ" in error.msg:
                raise SizesError("", sizes, export) from None
            else:
                raise TraceError(explain(error, model)) from error
            continue
        except (repeats.NotRepeatedError, TraceError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever the user's forward raised, told with its place
            raise TraceError(explain(error, model)) from error
        if deferred:
            check_sizes(model, exported, sizes, _export_at)
        if deferred or holds(exported, sizes):
            return exported
        deferred = True  # so that what does not hold is an assertion, with its place
    raise SizesError("", sizes, export)


def _attempt(model: nn.Module, sizes: InputSizes, shapes: dict[str, Any], deferred: bool) -> ExportedProgram:
    unified = model.register_forward_pre_hook(partial(_unify, sizes), with_kwargs=True, prepend=True)
    try:
        with default_dtype(sizes.dtype), Literals(), LossShapes(), branches_refused():
            return torch.export.export(
                model, (), sizes.example(), strict=False, dynamic_shapes=shapes,
                prefer_deferred_runtime_asserts_over_guards=deferred,
            )  # fmt: skip
    finally:
        unified.remove()


def _unify(sizes: InputSizes, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    """Tell torch that dims of one size are equal before forward runs.

    Otherwise it learns so where they first meet, and cannot halve a batch that was made of two.
    """
    first: dict[sympy.Expr, Any] = {}
    for name, dims in sizes.dims.items():
        for d, size in dims.items():
            torch._check(first.setdefault(size, inputs[name].shape[d]) == inputs[name].shape[d])


def _suggested(said: str, shapes: dict[str, Any]) -> dict[str, Any] | None:
    """The dynamic dims with the ranges and multiples that torch suggests; None where it has none, or one size alone."""
    if "Suggested fixes" not in said:
        return None
    refined: Any = refine_dynamic_shapes_from_suggested_fixes(said, shapes)
    dims = [dim for of in refined.values() for dim in (of or {}).values()]
    return None if any(isinstance(dim, int) for dim in dims) else dict(refined)
