"""The constants of model.py: settings, where the layers are, tied, fused and unread parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from ..ir.custom import OPAQUE
from ..ir.graph import COUNT, PROLOGUE, Call, Role, TensorInfo, arguments, info, node_inputs
from ..ir.ops import is_collective
from ..ir.reads import unread_buffers, unread_parameters
from ..runtime.choices import AXES
from . import recomputed
from .code import Code, Suite, table, text_of
from .emission import Emission
from .layer_runs import lists
from .parameters import tied, tied_over_stages
from .text import is_plain_part, literal, quoted, size_text, sizes_text, tuple_of, tuple_text

_WIDTH = 100  # columns of a tuple that is written on one line


def constants(e: Emission, paths: bool) -> list[Code]:
    """The module-level constants; `paths`: with the layers' paths, where the code reads them."""
    code: list[Code] = [table("SETTINGS = Settings(", _settings(e))]
    code.append(f"LAYERS = {tuple_text(lists(e.program))}  # where the layers are; each is a unit of data parallelism")
    code += _ends(e)
    if paths:
        code.append(f"PATHS = {tuple_text([call.path for call in e.program.layer_calls])}  # of the layers")
    code.append(_tied(e))
    code += _opaque(e) + recomputed.constants(e.program) + _parts(e)
    if unused := _unused(e):
        code.append("# What the loss never reads, kept to be saved: (name, shape), of a buffer also its dtype")
        code.append(table("UNUSED = (", unused))
    if e.plan.optimizer.groups:
        groups = [tuple_of([tuple_text(names), literal(kwargs)]) for names, kwargs in _groups(e)]
        code += ["# (parameter names, options over the optimizer's)", table("PARAMETER_GROUPS = (", groups)]
    return code


# --------------------------------------------------------------------------------
# Settings


def _settings(e: Emission) -> list[str]:
    """The arguments of SETTINGS: each choice that has no default or is not the default one, then what else is known."""
    plan, predicted = e.plan, e.predicted
    compute = _written(plan.compute)
    words = _written(plan.pipeline) | _written(plan.sharding) | {"precision": compute.pop("precision")}
    stages, batch = words.pop("stages"), _written(plan.batch)
    padded = {"padded_from": batch.pop("padded_from", None)}
    lines: list[Mapping[str, Any]] = [
        {axis: plan.mesh.size(axis) for axis in AXES}, batch, words, {"stages": stages},
        {"optimizer": plan.optimizer.name, "optimizer_kwargs": plan.optimizer.kwargs},
        *({name: value} for name, value in compute.items()),
    ]  # fmt: skip
    lines += [{"zigzag": True}] if e.program.zigzag else []
    if e.program.padding:
        lines.append(padded | {"padding": tuple((p.input, p.dim, p.value) for p in e.program.padding)})
    settings = [", ".join(f"{name}={literal(value)}" for name, value in line.items()) for line in lines]
    settings += _data_settings(e)
    if predicted.step_s is not None:
        settings.append(f"predicted_step_s={predicted.step_s:.6g}")
    if predicted.flops_per_step and predicted.peak_flops:
        settings.append(f"flops_per_step={predicted.flops_per_step:.6g}, peak_flops={predicted.peak_flops:.6g}")
    return settings


def _written(values: Any) -> dict[str, Any]:
    """The choices of a value object that SETTINGS names."""
    named = {field.name: (getattr(values, field.name), field.default) for field in fields(values)}
    return {name: value for name, (value, default) in named.items() if value != default}


def _data_settings(e: Emission) -> list[str]:
    """The settings that the default data needs: the number of token ids, and whether the model shifts labels itself."""
    if PROLOGUE not in e.program.blocks:
        return []
    for node in e.program.blocks[PROLOGUE].ops:
        if node.target is torch.ops.aten.embedding.default and _is_of_input(node.args[1]):
            weight = node_inputs(node)[0]
            shifts = {torch.ops.aten.pad.default, torch.ops.aten.slice.Tensor}
            same = COUNT in e.program.blocks and any(n.target in shifts for n in e.program.blocks[COUNT].ops)
            labels = "same" if same else "next"
            return [f'vocabulary={size_text(info(weight).shape[0])}, labels="{labels}"']
    return []


def _is_of_input(node: Any) -> bool:
    """Whether a value is an input of the model, perhaps as it lies on other ranks."""
    while isinstance(node, fx.Node) and is_collective(node.target):
        node = node.args[0]
    return isinstance(node, fx.Node) and info(node).role is Role.INPUT


# --------------------------------------------------------------------------------
# Parameters


def _ends(e: Emission) -> list[Code]:
    """ENDS: the methods of Model with the modules whose parameters they read, for a plan that gathers parameters."""
    if e.plan.sharding.zero == 0 and not e.plan.compute.half:
        return []
    rows = []
    for block in dict.fromkeys(call.block for call in e.program.calls if not call.path):
        refs = [info(n).ref for n in e.program.blocks[block].placeholders(Role.PARAMETER)]
        owners = dict.fromkeys(ref.rpartition(".")[0] for ref in refs)
        if named := [owner for owner in owners if owner]:
            rows.append(f'"_{block}": {tuple_text(named)}')
    return [table("ENDS = {  # methods of Model, and where what they read is: units too", rows, "}")] if rows else []


def _tied(e: Emission) -> Code:
    """TIED, on one line where it fits."""
    rows = [literal(pair) for pair in tied_over_stages(e).items()]
    line = f"TIED = {tuple_of(rows)}  # (alias, original)"
    return line if len(line) <= _WIDTH else table("TIED = (  # (alias, original)", rows)


def _groups(e: Emission) -> list[tuple[list[str], Mapping[str, Any]]]:
    """The user's parameter groups by the program's names: fused parameters by their parts, tied ones by all."""
    fused, aliases = e.program.fused, tied(e)

    def program_names(name: str) -> Sequence[str]:
        return (
            fused[name].parts if name in fused else (name, *(a for a, original in aliases.items() if original == name))
        )

    groups = e.plan.optimizer.groups
    return [([each for name in names for each in program_names(name)], kwargs) for names, kwargs in groups]


def _unused(e: Emission) -> list[str]:
    """Rows of UNUSED."""

    def row(name: str, tensor: TensorInfo, *dtype: torch.dtype) -> str:
        return tuple_of([quoted(name), sizes_text(tensor.shape), *map(str, dtype)])

    program = e.program
    buffers = [(name, program.persistent[name]) for name in unread_buffers(program)]
    rows = [row(name, program.parameters[name]) for name in unread_parameters(program)]
    return rows + [row(name, tensor, tensor.dtype) for name, tensor in buffers]


def _parts(e: Emission) -> list[Code]:
    """PARTS: part → (parameter of the original model, dim, start, length), a comprehension for each class of layers."""
    if not e.program.fused:
        return []
    rows = []
    for block in dict.fromkeys(call.block for call in e.program.calls):
        calls = [call for call in e.program.calls if call.block == block]
        if parts := _part_rows(e, calls[0]):
            prefix = "{path}." if calls[0].path else ""
            row = [f'f"{prefix}{{part}}": (f"{prefix}{{original}}", dim, start, length)']
            row += [f"for path in {_paths([call.path for call in calls])}"] if prefix else []
            over_parts = table("for part, original, dim, start, length in (", parts)
            rows.append(text_of([Suite("**{", [*row, over_parts], "}")]))
    comment = "# Parameters that are slices of one of the original model: part → (original, dim, start, length)"
    return [comment, table("PARTS = {", rows, "}")]


def _part_rows(e: Emission, call: Call) -> list[str]:
    """The parts that a call of a block reads, by names relative to it."""
    rows = []
    block = e.program.blocks[call.block]
    refs = {info(n).ref for n in block.placeholders(Role.PARAMETER)}
    for original, fused in e.program.fused.items():
        start = 0
        for part in fused.parts:
            relative = part.removeprefix(f"{call.path}.") if call.path else part
            length = int(e.program.parameters[part].shape[fused.dim])
            if relative in refs:
                whole = original.removeprefix(f"{call.path}.") if call.path else original
                rows.append(literal((relative, whole, fused.dim, start, length)))
            start += length
    return rows


# --------------------------------------------------------------------------------
# Modules that are kept whole


def _opaque(e: Emission) -> list[Code]:
    """OPAQUE: their file; OPTIONAL: the names that only they read. A tied parameter is read under each of its names."""
    if not e.program.opaque:
        return []
    rows: list[str] = []
    read, elsewhere = _readers(e)
    originals = e.program.tied
    for paths, refs in read.items():
        free = [[ref for ref in refs if originals.get(path + ref, path + ref) not in elsewhere] for path in paths]
        if paths == ("",) or any(of_path != free[0] for of_path in free):
            rows += [quoted(path + ref) for path, of_path in zip(paths, free, strict=True) for ref in of_path]
        elif free[0]:
            names = table("for name in (", [*map(quoted, free[0])])
            row: list[Code] = ['f"{path}.{name}"', f"for path in {_paths([path.rstrip('.') for path in paths])}", names]
            rows.append(text_of([Suite("*(", row, ")")]))
    return [
        "# Modules that are kept whole: their classes are in opaque.pt, of this hash.",
        f"OPAQUE = OpaqueModules(__file__, {quoted(hashlib.sha256(e.opaque).hexdigest())})",
        *([table("OPTIONAL = (  # parameters that only these modules read", rows)] if rows else []),
    ]


def _readers(e: Emission) -> tuple[dict[tuple[str, ...], list[str]], set[str]]:
    """The paths of a block's calls → the parameters of it that opaque modules alone read; and what others read."""
    originals, read, elsewhere = e.program.tied, dict[tuple[str, ...], list[str]](), set[str]()
    for block, node in ((b, n) for b in e.program.blocks.values() for n in b.placeholders(Role.PARAMETER)):
        paths = tuple(call.full_name("") for call in e.program.calls if call.block == block.name)
        if all(user.target is OPAQUE and not _is_argument(user, node) for user in node.users):
            read.setdefault(paths, []).append(info(node).ref)
        else:
            elsewhere |= {originals.get(path + info(node).ref, path + info(node).ref) for path in paths}
    return read, elsewhere


def _is_argument(module: fx.Node, node: fx.Node) -> bool:
    """Whether an opaque module is called with a parameter, beside those of its own."""
    tensors, _, count, _, _ = arguments(module)
    return node in tensors[:count]


def _paths(paths: Sequence[str]) -> str:
    """Source of the paths: a range of a list, or all of them."""
    parent = paths[0].rpartition(".")[0]
    if list(paths) == [f"{parent}.{i}" for i in range(len(paths))] and all(map(is_plain_part, parent.split("."))):
        return f'(f"{parent}.{{i}}" for i in range({len(paths)}))'
    return tuple_text(paths)
