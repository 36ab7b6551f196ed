"""Whether samples may be padded: a model is run on drawn samples as they are and with pads, and must compute the same.

It is evidence, not proof: what pads change only for values that are never drawn would pass. A model has two layers of
each class, and a large one is narrow.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..compile.compiler import prepare
from ..errors import PlanError
from ..ir.graph import Call, Program, Role
from ..ir.reads import read_names
from ..progress import progress
from ..request import Job
from ..rules.padding import paddings_of
from ..rules.random import draws
from ..runtime.data import padded
from ..trace.huggingface import is_huggingface
from .difference import Outcome, difference
from .draws import DRAWS, FEW, Draw, batch, batched, elements, parameters
from .interpreter import Run, Step, StepError
from .program import DROPOUT_ARGUMENT, without_dropout
from .shrink import narrow, with_values

_SHORT, _PADS = 16, 5
_AS_IS = 4_000_000  # elements of the parameters of two layers of each class
_ELEMENT_BYTES = 40  # in fp64 a parameter, its gradients without and with pads, and what backward adds (measured)
_MOST_LAYERS, _MANY = 8, 8_000_000
_LONGEST, _LONGEST_WORK = 2048, 20_000_000_000  # tokens, and parameters × tokens, of a forward at the true length


def check_padding(job: Job, program: Program, tokens: int, sequence: int) -> None:
    """PlanError, naming the first op at fault, where samples of `tokens` padded to `sequence` give another training."""
    with progress("running the model with pads"):
        _check_ops(program)
        compare_with_pads(*_runnable(job, program), tokens, sequence)


def compare_with_pads(program: Program, buffers: Mapping[str, Tensor], tokens: int, sequence: int) -> None:
    """PlanError where loss or gradients of some draw differ with pads, or a value is nan at them, in fp64.

    program: prepared, of any precision. buffers: those that it reads.
    """
    program = replace(without_dropout(program)[0], padding=paddings_of(program))
    _check_ops(program)
    short, longer = _lengths(program, tokens, sequence)
    size, shown = elements(program), False
    try:
        for draw in DRAWS if size <= _MANY else FEW:
            tensors, samples = parameters(program, draw, short) | dict(buffers), batch(program, draw, short)
            shown |= _compare(program, tensors, samples, longer, draw)
        if longer < sequence <= _LONGEST and size * sequence <= _LONGEST_WORK:
            _compare_at_length(program, parameters(program, DRAWS[0], tokens) | dict(buffers), tokens, sequence)
    except _Differs as change:
        raise PlanError(
            f"samples of {tokens:,} tokens cannot be padded to {sequence:,}: {change}. Mask pads there by an input "
            "such as `attention_mask`, which is 0 at them, or by targets, which are ignored at them; or leave "
            f"pad_to_multiple_of out, and give samples of {sequence:,} tokens"
        ) from change
    if not shown:
        raise PlanError(
            "pad_to_multiple_of: for drawn values the model's loss or its gradients are not finite, so that nothing "
            f"shows what pads change: leave it out, and give samples of {sequence:,} tokens"
        )


class _Differs(Exception):
    """What pads change, by which op."""


def _compare(
    program: Program, tensors: Mapping[str, Tensor], samples: Mapping[str, Tensor], sequence: int, draw: Draw
) -> bool:
    """Whether the draw shows something: without pads all is finite. _Differs where pads change it."""
    dtypes = [torch.float64]
    if not draw.at_pads and torch.float64 not in {t.dtype for t in program.parameters.values()}:
        dtypes.append(torch.float32)  # in which an epsilon may be 0
    for dtype in dtypes:
        try:
            plain = Outcome.of(program, tensors, samples, dtype)
        except StepError as error:
            raise PlanError(f"pad_to_multiple_of: the model cannot be run on drawn samples: {error}") from error
        if not plain.is_finite:
            return dtype != torch.float64
        try:
            longer = Outcome.of(program, tensors, _padded(program, samples, sequence), dtype)
        except StepError as error:
            raise _Differs(f"pads cannot be computed: {error}") from error
        if (dtype == torch.float64 or not longer.is_finite) and (change := difference(plain, longer)):
            raise _Differs(change)
    return True


def _compare_at_length(program: Program, tensors: Mapping[str, Tensor], tokens: int, sequence: int) -> None:
    """The forward of one sample at the true lengths, which may be beyond a table of positions, or a window."""
    names, samples = batched(program), batch(program, DRAWS[0], tokens)
    samples = {name: x[:1] if name in names else x for name, x in samples.items()}
    tensors = dict(tensors) | {a: tensors[name] for a, name in program.tied.items() if name in tensors}
    runs = [Run(program, tensors, inputs, torch.float64) for inputs in (samples, _padded(program, samples, sequence))]
    try:
        with torch.no_grad():
            plain, longer = (float(run.loss()) for run in runs)
    except StepError as error:
        raise _Differs(f"pads cannot be computed: {error}") from error
    if math.isfinite(plain) and not math.isclose(plain, longer, rel_tol=1e-9):
        raise _Differs(f"pads change the loss at this length, from {plain:.12g} to {longer:.12g}")


def _padded(program: Program, samples: Mapping[str, Tensor], sequence: int) -> dict[str, Tensor]:
    return padded(samples, [(p.input, p.dim, p.value) for p in program.padding], sequence)


# --------------------------------------------------------------------------------
# What is run


def _check_ops(program: Program) -> None:
    """PlanError where an op cannot be compared: a module that is kept whole, or one that draws random numbers."""
    for name, call in program.opaque.items():
        raise PlanError(
            f"pad_to_multiple_of: {name} is kept whole, and so is not run to see what pads change"
            f"{f' ({call.reason})' if call.reason else ''}: leave it out, and give samples of the padded length"
        )
    for block, node in program.each_op():
        if draws(node.target) and node.target not in DROPOUT_ARGUMENT:
            raise PlanError(
                f"pad_to_multiple_of: {Step(block, node, None).place} draws random numbers, which are others for "
                "another length: leave it out, and give samples of the padded length"
            )


def _runnable(job: Job, program: Program) -> tuple[Program, dict[str, Tensor]]:
    """A program with two layers of each class, narrow if need be, and the buffers that it reads."""
    program, model, whole = _shallow(program), job.model, ""
    if elements(program) > _AS_IS and is_huggingface(model):
        program, model, whole = _narrowed(job, program)
    size, room = elements(program), room_bytes()
    if size * _ELEMENT_BYTES > room:
        raise PlanError(
            f"pad_to_multiple_of: two layers of each class have {size / 1e6:.0f} M parameters, and {_ELEMENT_BYTES} "
            f"bytes each to see what pads change are more than the {room / 2**30:.1f} GiB that are free here{whole}: "
            "plan where there is more, or leave it out, and give samples of the padded length"
        )
    names = read_names(program, Role.BUFFER) & set(program.buffers)
    values = dict(model.named_buffers(remove_duplicate=False))
    if any(values[name].is_meta for name in names):
        values = dict(with_values(job).named_buffers(remove_duplicate=False))
    return program, {name: values[name].detach() for name in names}


def room_bytes() -> int:
    """Free memory of this machine."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _narrowed(job: Job, program: Program) -> tuple[Program, nn.Module, str]:
    """The program of a narrow model of the same class, that model, and "".

    Where the class makes none of a narrower config, the program and model as they are, which is dearer and shows no
    less, and why.
    """
    config: Any = job.model.config
    try:
        layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
        model = narrow(job.model, min(layers, _MOST_LAYERS), window and min(window, 4))
        return _shallow(prepare(model, job.inputs, job.compute.precision, job.batch_norm)), model, ""
    except Exception as error:  # whatever the class makes of another config
        return program, job.model, f" (no narrow model can be made of its config: {error!r:.200})"


def _shallow(program: Program) -> Program:
    """The program with two calls of each block: those that follow give what the second one gave."""
    calls: list[Call] = []
    counts: Counter[str] = Counter()
    latest: dict[str, Call] = {}
    names: dict[str, str] = {}
    for call in program.calls:
        counts[call.block] += 1
        if counts[call.block] <= 2:
            latest[call.block] = replace(call, inputs=tuple(names.get(name, name) for name in call.inputs))
            calls.append(latest[call.block])
        else:
            names |= zip(call.outputs, latest[call.block].outputs, strict=True)
    return replace(program, calls=tuple(calls))


def _lengths(program: Program, tokens: int, sequence: int) -> tuple[int, int]:
    """Lengths without and with pads that stand for those asked: the same where they are short."""
    (low, high), multiple = program.sequence_range, program.sequence_multiple
    pads = -(-min(sequence - tokens, _PADS) // multiple) * multiple
    short = -(-max(_SHORT, low + pads) // multiple) * multiple
    if sequence <= 2 * _SHORT or not short < sequence or short > high:
        return tokens, sequence
    return short - pads, short
