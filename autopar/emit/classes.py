"""The classes: one for each class of layers, and Model, with the layers of one stage, prologue and epilogue."""

from __future__ import annotations

from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, Block, Role, info
from .body import Body
from .code import Code, Statement, Suite, class_of_module, function
from .emission import Emission
from .forward import forward, forward_runs, group_methods
from .layer_runs import layers_text, offset, parent, path_text, runs
from .parameters import declarations
from .placements import argument_shapes, placement_table
from .recomputed import (
    by_regions,
    is_whole,
    layer_forward,
    layer_init,
    recompute_argument,
    recomputed_text,
    region_methods,
)
from .sublayers import sublayer_methods
from .text import docstring, sizes_text


def layer_class(e: Emission, block: Block) -> Suite:
    """The class of a layer block: parameters, forward, and what backward computes again in methods of their own."""
    whole = is_whole(e.program, block.name)
    methods_of = region_methods if e.program.regions.get(block.name) else sublayer_methods
    methods = [
        layer_init(e.program, block.name, [*declarations(e, block)]),
        *layer_forward(e.program, block.name, e.parameters(block)),
        *methods_of(e, block, "_layer" if whole else "forward"),
        *by_regions(e.program, block.name),
    ]
    table = placement_table(block.placeholders(Role.PARAMETER), e.arguments(block), e.plan.mesh.tp)
    return class_of_module(e.classes[block.name], docstring(_summary(e, block), table), methods)


def _summary(e: Emission, block: Block) -> str:
    """The first line of the docstring: which layers, how many uses, the layout, what is computed again."""
    places = [i for i, call in enumerate(e.program.layer_calls) if call.block == block.name]
    paths = list(dict.fromkeys(e.program.layer_calls[i].path for i in places))
    layers = paths[0] if len(paths) == 1 else f"{len(paths)} layers: {paths[0]} … {paths[-1]}"
    uses = "" if len(paths) == len(places) else f", {len(places)} uses"
    layout = e.plan.solution.name
    over_tp = [f"tp={e.plan.mesh.tp}{f' ({layout})' if layout else ''}"] if e.plan.mesh.tp > 1 else []
    kinds = "".join(f" · {kind}" for kind in (*over_tp, *recomputed_text(e.program, places)))
    return f"{layers}{uses}{kinds}."


# --------------------------------------------------------------------------------
# Model


def model_class(e: Emission) -> Suite:
    """One class for all ranks: the stage chooses its part."""
    tables = [e.program.blocks[TABLES]] if TABLES in e.program.blocks else []
    methods = [_init(e), forward(e), *group_methods(e), *(_method(e, block) for block in (*tables, *e.outside))]
    methods += [*_range_method(e), *_between_stages(e)]
    first = f"{e.program.name}: the layers of one stage, what precedes them on the first, the loss on the last."
    if e.alone:
        first = f"{e.program.name}, whole: what precedes the layers, the layers, the loss."
    parameters = {info(n).ref: n for block in e.outside for n in block.placeholders(Role.PARAMETER)}
    doc = docstring(first, placement_table(list(parameters.values()), {}, e.plan.mesh.tp))
    return class_of_module("Model", doc, methods)


# --------------------------------------------------------------------------------
# Parameters and layers


def _init(e: Emission) -> Suite:
    """The method __init__: the parameters of prologue, layers and epilogue that the stage has."""
    blocks = e.program.blocks
    body: list[Code] = ["super().__init__()"]
    if not e.alone:
        last = "SETTINGS.pp - 1" if e.plan.virtual_stages == 1 else "len(SETTINGS.stages) - 1"
        body += [f"self._first, self._last = stage == 0, stage == {last}"]
        body += ["self._start, self._stop = SETTINGS.stages[stage]"]
    body += declarations(e, blocks[TABLES]) if TABLES in blocks else []
    body += _guarded(e, blocks[PROLOGUE], "self._first") if PROLOGUE in blocks else []
    built: set[str] = set()
    for run in runs(e.program, lambda call: call.block):
        block, paths = e.program.layer_calls[run.start].block, {e.program.layer_calls[i].path for i in run}
        if e.program.is_between(block):
            body += _guarded(e, blocks[block], f"self._start <= {run.start} < self._stop")
        elif not (e.alone and paths <= built):  # layers used again are there; another stage may need them for itself
            new = _new_layers(e, run)
            body += [] if new in body else [new]  # else used before: declared already
        built |= paths
    body += _guarded(e, blocks[EPILOGUE], "self._last") if EPILOGUE in blocks else []
    return function("__init__", ["self", "stage=0"], body)


def _guarded(e: Emission, block: Block, guard: str) -> list[Code]:
    """The declarations of a block, on the stages that have it."""
    declared = [*declarations(e, block)]
    return [Suite(f"if {guard}:", declared)] if declared and not e.alone else [*declared]


def _new_layers(e: Emission, run: range) -> Code:
    """The layers of one list and one class."""
    block = e.program.layer_calls[run.start].block
    less = offset(e.program, run) if e.alone else None
    index = str(run.start) if len(run) == 1 else f"i + {less}" if less else "i"
    layer = f"{e.classes[block]}({recompute_argument(e.program, block, index)})"
    line = f"submodule(self, {path_text(e.program, run, 'i')}, {layer})"
    if len(run) > 1:
        return Suite(f"for i in {layers_text(e.program, run)}:", [line])
    return line if e.alone else Suite(f"if self._start <= {run.start} < self._stop:", [line])


# --------------------------------------------------------------------------------
# Methods


def _method(e: Emission, block: Block) -> Suite:
    """The method of a block that is not a layer."""
    names = e.arguments(block)
    body, shapes = Body(e, block, names).returned(), argument_shapes(names, e.plan.mesh.tp)
    return function(f"_{block.name}", ["self", *e.parameters(block)], body, docstring(_purpose(e, block)), shapes)


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


def _range_method(e: Emission) -> list[Suite]:
    """The method that says which layers of a run a stage has, where a stage may have some of them."""
    every = [*runs(e.program, lambda call: call.block), *forward_runs(e)]
    if e.alone or not any(1 < len(run) < len(e.program.layer_calls) for run in every):
        return []
    doc = ['"""The layers from start to stop that this stage has."""']
    body = Statement("range(max(start, self._start), min(stop, self._stop))", returned=True)
    return [function("_range", ["self", "start", "stop"], [body], doc)]


def _between_stages(e: Emission) -> list[Suite]:
    """The method that gives (local shape, dtype) of each value that a stage sends."""
    rows = []
    for stage in e.program.stages[:-1]:
        sent = [f"({_local_shape(e, v)}, {e.program.value_info(v).dtype})" for v in stage.sends]
        rows.append(f"({', '.join(sent)},)")
    if not rows:
        return []
    doc = ['"""What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""']
    shapes = rows[0] if len(set(rows)) == 1 else f"({', '.join(rows)},)[stage]"
    method = function("between_stages", ["stage", "b", "s"], [f"return {shapes}"], doc)
    return [Suite(f"@staticmethod\n{method.head}", method.body)]


def _local_shape(e: Emission, value: str) -> str:
    facts = e.program.value_info(value)
    shape = list(facts.shape)
    if facts.placement.is_shard:
        shape[facts.placement.dim] = shape[facts.placement.dim] / e.plan.mesh.tp
    return sizes_text(shape)
