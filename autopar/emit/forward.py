"""Model.forward: the first values or those received, the layers, the loss or what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir.counts import dims_of
from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, Call, Role, info
from .code import Code, Statement, Suite, function
from .emission import Emission, untold_sizes
from .idioms import checkpointed
from .layer_runs import layers_text, number_text, parent, path_text, runs
from .names import loop_name
from .recomputed import group_at, group_method, no_groups, recomputed_layers
from .text import attribute, size_from


def forward(e: Emission) -> Suite:
    """The method, for all stages."""
    blocks = e.program.blocks
    received = "*" if e.alone else f"*{loop_name('received', e.program)}"
    body = [*_call_of(e, TABLES, "_tables"), *_first_values(e), *_layers(e)]
    if EPILOGUE in blocks:
        last = Statement(f"self._epilogue({', '.join(_arguments(e, e.program.call_of(EPILOGUE)))})", returned=True)
        body.append(last if e.alone else Suite("if self._last:", [last]))
    return function("forward", ["self", received, *e.program.inputs], [*body, *_return_sent(e)])


def _arguments(e: Emission, call: Call) -> list[str]:
    """The values and inputs that a call reads, and what it cannot tell from them, as source."""
    return _read(e, call, lambda symbol: _size(e, symbol), f"{next(iter(e.program.inputs))}.device")


def _read(e: Emission, call: Call, size: Callable[[Any], str], device: str) -> list[str]:
    block = e.program.blocks[call.block]
    read = [e.names[v] for v in call.inputs] + [info(n).ref for n in block.placeholders(Role.INPUT)]
    return [*read, *map(size, untold_sizes(block.ops, e.arguments(block))), *([] if read else [device])]


def _size(e: Emission, symbol: Any) -> str:
    """The source of `b` or `s`, by an input of the model, which has the whole sequence."""
    dims = ((name, facts.shape, dims_of(facts.shape)) for name, facts in e.program.inputs.items())
    name, shape, dim = next((name, shape, of_name[symbol]) for name, shape, of_name in dims if symbol in of_name)
    return size_from(f"{name}.shape[{dim}]", shape[dim], symbol)


def _outputs(e: Emission, call: Call) -> tuple[str, ...]:
    return tuple(e.names[v] for v in call.outputs)


def _called(e: Emission, call: Call, called: str, *index: str, recomputed: bool = False) -> Statement:
    """The values of a call, by the source of what is called; recomputed: whether backward makes the call again."""
    arguments = [*index, *_arguments(e, call)]
    value = checkpointed(called, *arguments) if recomputed else f"{called}({', '.join(arguments)})"
    return Statement(value, _outputs(e, call))


def _call_of(e: Emission, block: str, method: str) -> list[Statement]:
    """The line that calls `_tables` or `_prologue`; none without such a block."""
    return [_called(e, e.program.call_of(block), f"self.{method}")] if block in e.program.blocks else []


def _first_values(e: Emission) -> list[Code]:
    """The lines that give the first layer its values: the prologue on the first stage, unpacking on the others."""
    prologue = _call_of(e, PROLOGUE, "_prologue")
    if e.alone:
        return [*prologue]
    received = loop_name("received", e.program)
    values = {stage.start: tuple(e.names[v] for v in stage.receives) for stage in e.program.stages[1:]}
    heads = {start: f"if self._start == {start}:" for start in values}
    if len(set(values.values())) == 1:  # all stages after the first
        heads = {next(iter(values)): "else:" if prologue else "if not self._first:"}
    unpacked = [Suite(head, [f"({', '.join(values[start])},) = {received}"]) for start, head in heads.items()]
    return [*([Suite("if self._first:", prologue)] if prologue else []), *unpacked]


def _return_sent(e: Emission) -> list[Code]:
    """The returns of all stages but the last, with an `if` by the layer a stage ends at where they differ."""
    names = {stage.stop: ", ".join(e.names[v] for v in stage.sends) for stage in e.program.stages[:-1]}
    if len(set(names.values())) <= 1:
        return [Statement(sent, returned=True) for sent in dict.fromkeys(names.values())]
    return [Suite(f"if self._stop == {stop}:", [Statement(sent, returned=True)]) for stop, sent in names.items()]


# --------------------------------------------------------------------------------
# The layers


def _layers(e: Emission) -> list[Code]:
    """One loop for each run of layers whose lines are the same; a line for a layer unlike its neighbours."""
    lines: list[Code] = []
    for run in forward_runs(e):
        if group := group_at(e.program, run.start):
            lines.append(_group_loop(e, run, group_method(e.program, group), group.group))
        else:
            lines.append(_single(e, run) if len(run) == 1 else _loop(e, run))
    return lines


def forward_runs(e: Emission) -> list[range]:
    """Runs of layers that read and give values of the same names: each a loop of forward."""
    calls = e.program.layer_calls
    groups = {id(call): group_at(e.program, place) for place, call in enumerate(calls)}
    return runs(e.program, lambda call: (_outputs(e, call), _arguments(e, call), groups[id(call)]))


def _group_loop(e: Emission, run: range, method: str, size: int) -> Suite:
    """A line for each group of `size` layers that backward computes again together, by their method."""
    index = loop_name("i", e.program)
    line = _called(e, e.program.layer_calls[run.start], f"self.{method}", index, recomputed=True)
    return Suite(f"for {index} in {layers_text(e.program, run)}[::{size}]:", [line])


def group_methods(e: Emission) -> list[Suite]:
    """The method of each range of groups; PlanError where the emitted names of its layers' values differ."""
    methods: list[Suite] = []
    for run in forward_runs(e):
        if not (group := group_at(e.program, run.start)):
            continue
        if run != group.layers:
            raise no_groups(group)
        call, index = e.program.layer_calls[run.start], loop_name("i", e.program)
        read, outputs = _read(e, call, str, "device"), _outputs(e, call)
        layer = Statement(f"{_layer_at(e, run, index)}({', '.join(read)})", outputs)
        loop = Suite(f"for {index} in range(start, start + {group.group}):", [layer])
        body: list[Code] = [loop, Statement(", ".join(outputs), returned=True)]
        doc = [f'"""{group.group} layers, which backward computes again together."""']
        methods.append(function(group_method(e.program, group), ["self", "start", *read], body, doc))
    return methods


def _single(e: Emission, run: range) -> Code:
    """The line of a layer, or of what is between two."""
    call = e.program.layer_calls[run.start]
    between = e.program.is_between(call.block)
    called = f"self._{call.block}" if between else attribute(call.path, "submodule")
    line = _called(e, call, called, recomputed=between and call in recomputed_layers(e.program))
    return line if e.alone else Suite(f"if self._start <= {run.start} < self._stop:", [line])


def _loop(e: Emission, run: range) -> Suite:
    """A loop over layers: over the children of their list, where these are all of it, else by index."""
    calls = e.program.layer_calls[run.start : run.stop]
    layer, index = loop_name("layer", e.program), loop_name("i", e.program)
    path = parent(calls[0])
    whole = [c for c in e.program.layer_calls if parent(c) == path and not e.program.is_between(c.block)]
    once = len({c.path for c in whole}) == len(whole) == len(calls)
    # Every stage has layers of the list where there is no other.
    if once and _is_regular(e, run) and (e.alone or len(run) == len(e.program.layer_calls)):
        head = f"for {layer} in {attribute(path, 'submodule')}.children():"
    else:
        head, layer = f"for {index} in {layers_text(e.program, run)}:", _layer_at(e, run, index)
    return Suite(head, [_called(e, calls[0], layer)])


def _is_regular(e: Emission, run: range) -> bool:
    """Whether the layers of a run are members of a list by their numbers."""
    path = parent(e.program.layer_calls[run.start])
    return path != "" and not path[0].isdigit() and number_text(e.program, run, "i") is not None


def _layer_at(e: Emission, run: range, index: str) -> str:
    """The layer of a run by its index, as source."""
    if _is_regular(e, run):
        layers = attribute(parent(e.program.layer_calls[run.start]), "submodule")
        return f"{layers}[{number_text(e.program, run, index)}]"
    return f"self.get_submodule({path_text(e.program, run, index)})"
