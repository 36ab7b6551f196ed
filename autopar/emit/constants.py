"""The constants of model.py: settings, where the layers are, tied and fused parameters."""

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
from ..ir.unread import unread_buffers, unread_parameters
from ..runtime.choices import AXES
from . import again, groups
from .emission import Emission, tuple_text
from .layer_runs import lists
from .text import is_plain_part, literal, quoted, size_text

_INDENT = "    "


def constants(e: Emission, paths: bool) -> str:
    """The module-level constants; `paths`: with the layers' paths, where the code reads them."""
    lines = ["SETTINGS = Settings(", *(f"{_INDENT}{line}," for line in _settings(e)), ")"]
    lines.append(f"LAYERS = {tuple_text(lists(e.program))}  # where the layers are; each is a unit of data parallelism")
    lines += _ends(e)
    if paths:
        lines.append(f"PATHS = {tuple_text([call.path for call in e.program.layer_calls])}  # of the layers")
    tied = [literal(pair) for pair in {**e.on_several_stages(), **e.tied()}.items()]
    lines += _rows("TIED", tied, "(alias, original)")
    if e.program.opaque:
        e.imports.add("opaque.OpaqueModules")
        lines.append("# Modules that are kept whole: their classes are in opaque.pt, of this hash.")
        lines.append(f"OPAQUE = OpaqueModules(__file__, {quoted(hashlib.sha256(e.opaque).hexdigest())})")
        lines += _optional(e)
    lines += again.constant(e.program) + groups.constant(e.program)
    lines += _fused_constants(e)
    if unused := _unused(e):
        lines += [
            "# What the loss never reads, kept to be saved: (name, shape), of a buffer also its dtype",
            "UNUSED = (",
        ]
        lines += [*(f"{_INDENT}{row}," for row in unused), ")"]
    if e.plan.optimizer.groups:
        lines += ["# (parameter names, options over the optimizer's)", "PARAMETER_GROUPS = ("]
        lines += [f"    ({tuple_text(names)}, {literal(own)})," for names, own in _groups(e)]
        lines.append(")")
    return "\n".join(lines)


def _settings(e: Emission) -> list[str]:
    """The arguments of SETTINGS: each choice that has no default or is not the default one, then what else is known."""
    plan = e.plan
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
    if e.predicted.step_s is not None:
        settings.append(f"predicted_step_s={e.predicted.step_s:.6g}")
    if e.predicted.flops_per_step and e.predicted.peak_flops:
        settings.append(f"flops_per_step={e.predicted.flops_per_step:.6g}, peak_flops={e.predicted.peak_flops:.6g}")
    return settings


def _written(values: Any) -> dict[str, Any]:
    """The choices of a value object that SETTINGS names."""
    named = {field.name: (getattr(values, field.name), field.default) for field in fields(values)}
    return {name: value for name, (value, default) in named.items() if value != default}


def _ends(e: Emission) -> list[str]:
    """ENDS: the methods of Model with the modules whose parameters they read, for a plan that gathers parameters."""
    if e.plan.sharding.zero == 0 and not e.plan.compute.half:
        return []
    rows = []
    for block in dict.fromkeys(call.block for call in e.program.calls if not call.path):
        refs = [info(n).ref for n in e.program.blocks[block].placeholders(Role.PARAMETER)]
        owners = dict.fromkeys(ref.rpartition(".")[0] for ref in refs)
        if own := [owner for owner in owners if owner]:
            rows.append(f'{_INDENT}"_{block}": {tuple_text(own)},')
    return ["ENDS = {  # methods of Model, and where what they read is: units too", *rows, "}"] if rows else []


def _is_given(module: fx.Node, node: fx.Node) -> bool:
    """Whether an opaque module is called with a parameter, beside those of its own."""
    tensors, _, given, _, _ = arguments(module)
    return node in tensors[:given]


def _optional(e: Emission) -> list[str]:
    """OPTIONAL: the names that only opaque modules read; a tied parameter is read under each of its names."""
    tied, read, elsewhere = e.program.tied, dict[tuple[str, ...], list[str]](), set[str]()
    for block, node in ((b, n) for b in e.program.blocks.values() for n in b.placeholders(Role.PARAMETER)):
        paths = tuple(call.full_name("") for call in e.program.calls if call.block == block.name)
        if all(user.target is OPAQUE and not _is_given(user, node) for user in node.users):
            read.setdefault(paths, []).append(info(node).ref)
        else:
            elsewhere |= {tied.get(path + info(node).ref, path + info(node).ref) for path in paths}
    rows: list[str] = []
    for paths, refs in read.items():
        free = [[ref for ref in refs if tied.get(path + ref, path + ref) not in elsewhere] for path in paths]
        if paths == ("",) or any(of_path != free[0] for of_path in free):
            rows += [quoted(path + ref) for path, of_path in zip(paths, free, strict=True) for ref in of_path]
        elif free[0]:
            short = _paths([path.rstrip(".") for path in paths])
            rows += ["*(", f'{_INDENT}f"{{path}}.{{name}}"', f"{_INDENT}for path in {short}", f"{_INDENT}for name in ("]
            rows += [*(f"{_INDENT * 2}{quoted(ref)}," for ref in free[0]), f"{_INDENT})", ")"]
    lines = [_INDENT + (row if row.startswith(("*(", _INDENT)) else f"{row},") for row in rows]
    return ["OPTIONAL = (  # parameters that only these modules read", *lines, ")"] if rows else []


def _rows(name: str, rows: Sequence[str], comment: str) -> list[str]:
    """A tuple on one line where it fits, else a row a line."""
    line = f"{name} = {tuple_text(rows, quote=False)}  # {comment}"
    return [line] if len(line) <= 100 else [f"{name} = (  # {comment}", *(f"{_INDENT}{row}," for row in rows), ")"]


def _data_settings(e: Emission) -> list[str]:
    """What the default data must know: the number of token ids, and whether the model shifts labels itself."""
    if PROLOGUE not in e.program.blocks:
        return []
    for node in e.program.blocks[PROLOGUE].ops:
        if node.target is torch.ops.aten.embedding.default and _reads_input(node.args[1]):
            weight = node_inputs(node)[0]
            shifts = {torch.ops.aten.pad.default, torch.ops.aten.slice.Tensor}
            same = COUNT in e.program.blocks and any(n.target in shifts for n in e.program.blocks[COUNT].ops)
            labels = "same" if same else "next"
            return [f'vocabulary={size_text(info(weight).shape[0])}, labels="{labels}"']
    return []


def _groups(e: Emission) -> list[tuple[list[str], Mapping[str, Any]]]:
    """The user's parameter groups by the program's names: fused parameters by their parts, tied ones by all."""
    fused, tied = e.program.fused, e.tied()

    def program_names(name: str) -> Sequence[str]:
        return fused[name].parts if name in fused else (name, *(a for a, original in tied.items() if original == name))

    return [
        ([own for name in names for own in program_names(name)], kwargs) for names, kwargs in e.plan.optimizer.groups
    ]


def _unused(e: Emission) -> list[str]:
    """Rows of UNUSED."""

    def row(name: str, tensor: TensorInfo, *dtype: torch.dtype) -> str:
        shape = tuple_text([size_text(size) for size in tensor.shape], quote=False)
        return f"({quoted(name)}, {', '.join([shape, *map(str, dtype)])})"

    program = e.program
    buffers = [(name, program.persistent[name]) for name in unread_buffers(program)]
    rows = [row(name, program.parameters[name]) for name in unread_parameters(program)]
    return rows + [row(name, tensor, tensor.dtype) for name, tensor in buffers]


def _fused_constants(e: Emission) -> list[str]:
    """PARTS: part → (parameter of the original model, dim, start, length)."""
    if not e.program.fused:
        return []
    lines = [
        "# Parameters that are slices of one of the original model: part → (original, dim, start, length)",
        "PARTS = {",
    ]
    done: set[str] = set()
    for call in e.program.calls:
        rows = [] if call.block in done else _part_rows(e, call)
        done.add(call.block)
        if not rows:
            continue
        paths = [c.path for c in e.program.calls if c.block == call.block]
        prefix = "{path}." if call.path else ""
        lines.append(f"{_INDENT}**{{")
        lines.append(f'{_INDENT * 2}f"{prefix}{{part}}": (f"{prefix}{{original}}", dim, start, length)')
        if call.path:
            lines.append(f"{_INDENT * 2}for path in {_paths(paths)}")
        lines.append(f"{_INDENT * 2}for part, original, dim, start, length in (")
        lines += [f"{_INDENT * 3}{row}," for row in rows]
        lines += [f"{_INDENT * 2})", f"{_INDENT}}},"]
    return [*lines, "}"]


def _part_rows(e: Emission, call: Call) -> list[str]:
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


def _reads_input(node: Any) -> bool:
    while isinstance(node, fx.Node) and is_collective(node.target):
        node = node.args[0]
    return isinstance(node, fx.Node) and info(node).role is Role.INPUT


def _paths(paths: Sequence[str]) -> str:
    parent = paths[0].rpartition(".")[0]
    if list(paths) == [f"{parent}.{i}" for i in range(len(paths))] and all(map(is_plain_part, parent.split("."))):
        return f'(f"{parent}.{{i}}" for i in range({len(paths)}))'
    return tuple_text(paths)
