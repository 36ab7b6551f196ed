"""Model.forward: the first values or what was received, the layers, the loss or what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import PlanError
from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, Call, Role, info
from ..ir.sizes import dims_of
from ..plan.recompute import Again, by_layer
from .body import untold_sizes
from .emission import Emission
from .groups import group_of_layer, method_name
from .layer_runs import Run, layers_text, number_text, parent, path_text, runs
from .names import loop_name
from .text import attribute, size_from


def forward(e: Emission) -> list[str]:
    """The method, for all stages."""
    blocks = e.program.blocks
    inputs = ", ".join(e.program.inputs)
    received = "" if _alone(e) else loop_name("received", e.program)
    lines = [f"    def forward(self, *{received}, {inputs}):"]
    body = [*_tables(e), *_first_values(e), *_layers(e)]
    if EPILOGUE in blocks:
        last = f"return self._epilogue({arguments(e, e.program.call_of(EPILOGUE))})"
        body += [last] if _alone(e) else ["if self._last:", f"    {last}"]
    body += _return_sent(e)
    return [*lines, *(f"        {line}" for line in body)]


def _alone(e: Emission) -> bool:
    """Whether there is one stage, which is first and last."""
    return len(e.program.stages) == 1


def arguments(e: Emission, call: Call) -> str:
    """The values and inputs that a call reads, and what it cannot tell from them, as source."""
    return ", ".join(_read(e, call, lambda symbol: _size(e, symbol), f"{next(iter(e.program.inputs))}.device"))


def _read(e: Emission, call: Call, size: Callable[[Any], str], device: str) -> list[str]:
    block = e.program.blocks[call.block]
    read = [e.names[v] for v in call.inputs] + [info(n).ref for n in block.placeholders(Role.INPUT)]
    return [*read, *map(size, untold_sizes(block.ops, e.arguments(block))), *([] if read else [device])]


def _size(e: Emission, symbol: Any) -> str:
    """`b` or `s` by an input of the model, which has the whole sequence."""
    found = ((name, facts.shape, dims_of(facts.shape)) for name, facts in e.program.inputs.items())
    name, shape, dim = next((name, shape, dims[symbol]) for name, shape, dims in found if symbol in dims)
    return size_from(f"{name}.shape[{dim}]", shape[dim], symbol)


def _given(e: Emission, call: Call) -> str:
    return ", ".join(e.names[v] for v in call.outputs)


def _tables(e: Emission) -> list[str]:
    """The line that calls `_tables`, whose values every stage makes for itself; none without tables."""
    if TABLES not in e.program.blocks:
        return []
    call = e.program.call_of(TABLES)
    return [f"{_given(e, call)} = self._tables({arguments(e, call)})"]


def _first_values(e: Emission) -> list[str]:
    made: list[str] = []
    if PROLOGUE in e.program.blocks:
        call = e.program.call_of(PROLOGUE)
        made = [f"{_given(e, call)} = self._prologue({arguments(e, call)})"]
    if _alone(e):
        return made
    guarded = ["if self._first:", f"    {made[0]}"] if made else []
    return [*guarded, *_receive(e, bool(made))]


def _receive(e: Emission, otherwise: bool) -> list[str]:
    """What stages but the first unpack; where they differ, by the layer they start at."""
    local = loop_name("received", e.program)
    values = {stage.start: ", ".join(e.names[v] for v in stage.receives) for stage in e.program.stages[1:]}
    kinds = list(dict.fromkeys(values.values()))
    if len(kinds) == 1:
        return ["else:" if otherwise else "if not self._first:", f"    ({kinds[0]},) = {local}"]
    lines = []
    for start, given in values.items():
        lines += [f"if self._start == {start}:", f"    ({given},) = {local}"]
    return lines


def _return_sent(e: Emission) -> list[str]:
    """What stages but the last return; where they differ, by the layer they end at."""
    sent = {stage.stop: ", ".join(e.names[v] for v in stage.sends) for stage in e.program.stages[:-1]}
    if len(set(sent.values())) <= 1:
        return [f"return {values}" for values in dict.fromkeys(sent.values())]
    lines = []
    for stop, values in sent.items():
        lines += [f"if self._stop == {stop}:", f"    return {values}"]
    return lines


# --------------------------------------------------------------------------------
# The layers


def _layers(e: Emission) -> list[str]:
    """One loop for each run of layers whose lines are the same; a line for a layer unlike its neighbours."""
    lines: list[str] = []
    for run in _runs(e):
        if again := group_of_layer(e.program, run.start):
            lines += _group_loop(e, run, again)
        else:
            lines += _single(e, run) if len(run) == 1 else _loop(e, run)
    return lines


def _runs(e: Emission) -> list[Run]:
    calls = e.program.layer_calls
    groups = {id(call): group_of_layer(e.program, place) for place, call in enumerate(calls)}
    return runs(e.program, lambda call: (_given(e, call), arguments(e, call), groups[id(call)]))


def _group_loop(e: Emission, run: Run, again: Again) -> list[str]:
    """A line for each group of layers that backward computes again together."""
    call, index = e.program.layer_calls[run.start], loop_name("i", e.program)
    called = f"checkpoint(self.{method_name(e.program, again)}, {index}, {arguments(e, call)}, use_reentrant=False)"
    return [f"for {index} in {layers_text(e.program, run)}[::{again.group}]:", f"    {_given(e, call)} = {called}"]


def group_methods(e: Emission) -> list[list[str]]:
    """The method of each range of groups; PlanError where the emitted names of its layers' values differ."""
    methods: list[list[str]] = []
    for run in _runs(e):
        if not (again := group_of_layer(e.program, run.start)):
            continue
        if run.places != again.layers:
            raise PlanError(f"recompute: layers {again.start} to {again.stop - 1} are no groups: use 'layer' for them")
        call, index = e.program.layer_calls[run.start], loop_name("i", e.program)
        given, read = _given(e, call), ", ".join(_read(e, call, str, "device"))
        methods.append([
            f"    def {method_name(e.program, again)}(self, start, {read}):",
            f'        """{again.group} layers, which backward computes again together."""',
            f"        for {index} in range(start, start + {again.group}):",
            f"            {given} = {_layer_at(e, run, index)}({read})",
            f"        return {given}",
        ])  # fmt: skip
    return methods


def _single(e: Emission, run: Run) -> list[str]:
    call = e.program.layer_calls[run.start]
    layer = attribute(call.path, "submodule")
    if e.program.is_between(call.block):
        layer = f"self._{call.block}"
    line = f"{_given(e, call)} = {layer}({arguments(e, call)})"
    if e.program.is_between(call.block) and run.start in by_layer(e.program.recompute):
        line = f"{_given(e, call)} = checkpoint({layer}, {arguments(e, call)}, use_reentrant=False)"
    return [line] if _alone(e) else [f"if self._start <= {run.start} < self._stop:", f"    {line}"]


def _loop(e: Emission, run: Run) -> list[str]:
    calls = e.program.layer_calls[run.start : run.stop]
    layer, index = loop_name("layer", e.program), loop_name("i", e.program)
    own = parent(calls[0])
    whole = [c for c in e.program.layer_calls if parent(c) == own and not e.program.is_between(c.block)]
    once = len({c.path for c in whole}) == len(whole) == len(calls)
    if once and _is_regular(e, run) and (_alone(e) or _only_list(e, run)):
        loop = f"for {layer} in {attribute(own, 'submodule')}.children():"
    else:
        loop = f"for {index} in {layers_text(e.program, run)}:"
        layer = _layer_at(e, run, index)
    return [loop, f"    {_given(e, calls[0])} = {layer}({arguments(e, calls[0])})"]


def _is_regular(e: Emission, run: Run) -> bool:
    """Whether the layers of a run are members of a list by their numbers."""
    own = parent(e.program.layer_calls[run.start])
    return own != "" and not own[0].isdigit() and number_text(e.program, run, "i") is not None


def _layer_at(e: Emission, run: Run, index: str) -> str:
    """The layer of a run by its index, as source."""
    if _is_regular(e, run):
        own = attribute(parent(e.program.layer_calls[run.start]), "submodule")
        return f"{own}[{number_text(e.program, run, index)}]"
    return f"self.get_submodule({path_text(e.program, run, index)})"


def _only_list(e: Emission, run: Run) -> bool:
    """Whether every stage has layers of this list: it has no others."""
    return len(run) == len(e.program.layer_calls)
