"""The class Model: the layers of one stage, prologue and epilogue, and what travels between stages."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, Block, Role, info, is_count
from . import again
from .emission import Emission, tuple_text
from .forward import forward, group_methods
from .layer_runs import Run, layers_text, offset, parent, path_text, runs
from .names import class_name
from .placement_table import placement_table
from .text import docstring, size_text


def model_class(e: Emission) -> str:
    """One class for all ranks: the stage chooses its part."""
    blocks = e.program.blocks
    between = list(dict.fromkeys(c.block for c in e.program.layer_calls if e.program.is_between(c.block)))
    methods = [_method(e, blocks[name]) for name in (TABLES, PROLOGUE, *between, EPILOGUE) if name in blocks]
    code = [*_declarations(e), "", *forward(e)]
    together = group_methods(e)
    ranges = _range_method() if any("self._range(" in line for line in code) else []
    lines = [
        "class Model(nn.Module):",
        *(f"    {line}".rstrip() for line in _docstring(e, between)),
        "",
        "    def __init__(self, stage=0):",
        "        super().__init__()",
        *_bounds(e),
        *code,
        *(line for method in (*together, *methods, ranges) if method for line in ["", *method]),
        *([""] if len(e.program.stages) > 1 else []),
        *_between_stages(e),
    ]
    return "\n".join(lines)


def _bounds(e: Emission) -> list[str]:
    """What tells the stages apart."""
    if len(e.program.stages) == 1:
        return []
    last = "SETTINGS.pp - 1" if e.plan.virtual_stages == 1 else "len(SETTINGS.stages) - 1"
    return [
        f"        self._first, self._last = stage == 0, stage == {last}",
        "        self._start, self._stop = SETTINGS.stages[stage]",
    ]


def _docstring(e: Emission, between: Sequence[str]) -> list[str]:
    blocks = e.program.blocks
    first = f"{e.program.name}: the layers of one stage, what precedes them on the first, the loss on the last."
    if len(e.program.stages) == 1:
        first = f"{e.program.name}, whole: what precedes the layers, the layers, the loss."
    outside = [name for name in (PROLOGUE, *between, EPILOGUE) if name in blocks]
    parameters = {info(n).ref: n for name in outside for n in blocks[name].placeholders(Role.PARAMETER)}
    if e.plan.mesh.tp == 1 or not parameters:
        return docstring(first)
    return docstring(first, placement_table(list(parameters.values()), [], e.plan.mesh.tp))


def _range_method() -> list[str]:
    return [
        "    def _range(self, start, stop):",
        '        """The layers from start to stop that this stage has."""',
        "        return range(max(start, self._start), min(stop, self._stop))",
    ]


# --------------------------------------------------------------------------------
# Parameters and layers


def _declarations(e: Emission) -> list[str]:
    blocks, alone = e.program.blocks, len(e.program.stages) == 1
    lines: list[str] = []
    for name, guard in ((TABLES, ""), (PROLOGUE, "" if alone else "self._first")):
        if name in blocks:
            lines += _guarded(e, blocks[name], guard)
    made: set[str] = set()
    for run in runs(e.program, lambda call: call.block):
        block, paths = e.program.layer_calls[run.start].block, {e.program.layer_calls[i].path for i in run.places}
        if e.program.is_between(block):
            guard = "" if alone else f"self._start <= {run.start} < self._stop"
            lines += _guarded(e, blocks[block], guard)
        elif not (alone and paths <= made):  # layers used again are there; another stage may need them for itself
            new = _new_layers(e, run)
            lines += [] if alone and len(run) == 1 and new[0] in lines else new  # else used before: declared already
        made |= paths
    if EPILOGUE in blocks:
        lines += _guarded(e, blocks[EPILOGUE], "" if alone else "self._last")
    return [f"        {line}" for line in lines]


def _guarded(e: Emission, block: Block, guard: str) -> list[str]:
    own = [n for n in block.placeholders(Role.PARAMETER, Role.BUFFER) if not is_count(info(n))]
    declared = [text for n in own if (text := e.declare(n))]
    if not guard or not declared:
        return declared
    return [f"if {guard}:", *(f"    {line}" for line in declared)]


def _new_layers(e: Emission, run: Run) -> list[str]:
    """The layers of one list and one class."""
    e.imports.add("parameters.submodule")
    block = e.program.layer_calls[run.start].block
    name = class_name(block, e.program)
    alone = len(e.program.stages) == 1
    if len(run) == 1:
        flag = again.flag(e.program, block, str(run.start))
        line = f"submodule(self, {path_text(e.program, run, 'i')}, {name}({flag}))"
        return [line] if alone else [f"if self._start <= {run.start} < self._stop:", f"    {line}"]
    less = offset(e.program, run) if alone else None
    flag = again.flag(e.program, block, f"i{f' + {less}' if less else ''}")
    return [
        f"for i in {layers_text(e.program, run)}:",
        f"    submodule(self, {path_text(e.program, run, 'i')}, {name}({flag}))",
    ]


# --------------------------------------------------------------------------------
# Methods


def _method(e: Emission, block: Block) -> list[str]:
    names = e.arguments(block)
    body = e.body(block, names)
    return [
        f"    def _{block.name}(self, {', '.join(e.parameters(block))}):{e.shapes(names)}",
        *(f"        {line}" for line in docstring(_purpose(e, block))),
        *(f"        {line}".rstrip() for line in body.returned()),
    ]


def _purpose(e: Emission, block: Block) -> str:
    if not e.program.is_between(block.name):
        return {
            TABLES: "What layers read that depends on no parameter: every stage makes its own.",
            PROLOGUE: "What runs before the first layer.",
            EPILOGUE: "What runs after the last layer: this micro-batch's share of the mean loss.",
        }[block.name]
    calls = e.program.layer_calls
    if len(calls) == 1:
        return "What runs before the head."
    place = calls.index(e.program.call_of(block.name))
    before, after = (parent(c[0]) if c else "" for c in (calls[place - 1 : place], calls[place + 1 : place + 2]))
    if before and before == after:
        return f"What comes between one use of {before} and the next."
    return f"What comes between {before or 'the layers before'} and {after or 'the layers after'}."


def _between_stages(e: Emission) -> list[str]:
    """(local shape, dtype) of each value that a stage sends."""
    rows = []
    for stage in e.program.stages[:-1]:
        sent = [f"({_local_shape(e, v)}, {e.program.value_info(v).dtype})" for v in stage.sends]
        rows.append(f"({', '.join(sent)},)")
    lines = [
        "    @staticmethod",
        "    def between_stages(stage, b, s):",
        '        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""',
    ]
    if not rows:
        return []
    if len(set(rows)) == 1:
        return [*lines, f"        return {rows[0]}"]
    return [*lines, f"        return ({', '.join(rows)}{',' if rows else ''})[stage]"]


def _local_shape(e: Emission, value: str) -> str:
    facts = e.program.value_info(value)
    shape = list(facts.shape)
    if facts.placement.is_shard:
        shape[facts.placement.dim] = shape[facts.placement.dim] / e.plan.mesh.tp
    return tuple_text([size_text(n) for n in shape], quote=False)
