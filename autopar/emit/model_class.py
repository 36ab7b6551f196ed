"""The class Model: the layers of one stage, prologue and epilogue, and what travels between stages."""

from __future__ import annotations

from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, B, Block, Call, Role, S, info, is_count
from .emission import Emission, tuple_text
from .names import class_name, loop_name
from .text import size_text


def model_class(e: Emission) -> str:
    """One class for all ranks: the stage chooses its part."""
    blocks = e.program.blocks
    methods = []
    for name in (TABLES, PROLOGUE, EPILOGUE):
        if name in blocks:
            methods.append(_method(e, blocks[name]))
    lines = [
        "class Model(nn.Module):",
        f'    """{e.program.name}: the layers of one stage, what precedes them on the first, the loss on the last."""',
        "",
        "    def __init__(self, stage=0):",
        "        super().__init__()",
        "        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1",
        "        self._start, self._stop = SETTINGS.stages[stage]",
        *_declarations(e),
        "",
        *_forward(e),
        *(line for method in methods for line in ["", *method]),
        *([""] if len(e.program.stages) > 1 else []),
        *_between_stages(e),
    ]
    return "\n".join(lines)


def _declarations(e: Emission) -> list[str]:
    blocks = e.program.blocks
    lines: list[str] = []
    for name, guard in ((TABLES, ""), (PROLOGUE, "self._first")):
        if name in blocks:
            lines += _guarded(e, blocks[name], guard)
    if e.program.layer_calls:
        e.imports.add("parameters.submodule")
        lines.append("        for i in range(self._start, self._stop):")
        lines.append(f"            submodule(self, {_layer_path(e, 'i')}, {_layer_new(e, 'i')})")
    if EPILOGUE in blocks:
        lines += _guarded(e, blocks[EPILOGUE], "self._last")
    return lines


def _guarded(e: Emission, block: Block, guard: str) -> list[str]:
    own = [n for n in block.placeholders(Role.PARAMETER, Role.BUFFER) if not is_count(info(n))]
    declared = [e.declare(n) for n in own]
    if not guard or not declared:
        return [f"        {line}" for line in declared]
    return [f"        if {guard}:", *(f"            {line}" for line in declared)]


def _layer_path(e: Emission, index: str) -> str:
    """The path of layer `index`, as source."""
    paths = [c.path for c in e.program.layer_calls]
    parent = paths[0].rpartition(".")[0]
    if paths == [f"{parent}.{i}".lstrip(".") for i in range(len(paths))]:
        return f'f"{parent}.{{{index}}}"' if parent else f"str({index})"
    return f"{tuple_text(paths)}[{index}]"


def _layer_new(e: Emission, index: str) -> str:
    blocks = [c.block for c in e.program.layer_calls]
    again = {blocks[i] for i in e.program.recompute}

    def new(block: str) -> str:
        flag = f"{index} in RECOMPUTE" if block in again else ""
        return f"{class_name(block, e.program)}({flag})"

    if len(set(blocks)) == 1:
        return new(blocks[0])
    first = ", ".join(class_name(block, e.program) for block in blocks)
    flag = f"{index} in RECOMPUTE" if again else ""
    return f"({first})[{index}]({flag})"


def _forward(e: Emission) -> list[str]:
    names, blocks = e.names, e.program.blocks
    inputs = ", ".join(e.program.inputs)
    lines = [f"    def forward(self, *{loop_name('received', e.program)}, {inputs}):"]
    if TABLES in blocks:
        lines += _make_tables(e, names)
    lines += _first_values(e, names)
    if e.program.layer_calls:
        lines += _chain_loop(e, names) if _is_loop(e, names) else _unrolled(e, names)
    if EPILOGUE in blocks:
        lines += [
            "        if self._last:",
            f"            return self._epilogue({_arguments(e, e.program.call_of(EPILOGUE), names)})",
        ]
    lines += _return_sent(e)
    return lines


def _return_sent(e: Emission) -> list[str]:
    """What stages but the last return; where they differ, by the layer they end at."""
    sent = {stage.stop: ", ".join(e.names[v] for v in stage.sends) for stage in e.program.stages[:-1]}
    if len(set(sent.values())) <= 1:
        return [f"        return {values}" for values in dict.fromkeys(sent.values())]
    lines = []
    for stop, values in sent.items():
        lines += [f"        if self._stop == {stop}:", f"            return {values}"]
    return lines


def _make_tables(e: Emission, names: dict[str, str]) -> list[str]:
    """The call of `_tables`, which takes the sizes of the batch where it reads no input."""
    given = ", ".join(names[v] for v in e.program.call_of(TABLES).outputs)
    if arguments := e.tables_arguments():
        return [f"        {given} = self._tables({', '.join(info(n).ref for n in arguments)})"]
    name, tensor = max(e.program.inputs.items(), key=lambda item: len({B, S} & set(item[1].shape)))
    sizes = [f"{name}.shape[{tensor.shape.index(symbol)}]" if symbol in tensor.shape else "None" for symbol in (B, S)]
    return [f"        {given} = self._tables({', '.join(sizes)}, {name}.device)"]


def _first_values(e: Emission, names: dict[str, str]) -> list[str]:
    blocks, stages = e.program.blocks, e.program.stages
    lines: list[str] = []
    if PROLOGUE in blocks:
        call = e.program.call_of(PROLOGUE)
        given = ", ".join(names[v] for v in call.outputs)
        made = f"{given} = self._prologue({_arguments(e, call, names)})"
        if len(stages) == 1:
            return [f"        {made}"]
        lines += ["        if self._first:", f"            {made}"]
    return lines + _receive(e, names)


def _receive(e: Emission, names: dict[str, str]) -> list[str]:
    """What stages but the first unpack; where they differ, by the layer they start at."""
    local = loop_name("received", e.program)
    values = {stage.start: ", ".join(names[v] for v in stage.receives) for stage in e.program.stages[1:]}
    kinds = list(dict.fromkeys(values.values()))
    if len(kinds) == 1:
        otherwise = "else:" if PROLOGUE in e.program.blocks else "if not self._first:"
        return [f"        {otherwise}", f"            ({kinds[0]},) = {local}"]
    lines = []
    for start, given in values.items():
        lines += [f"        if self._start == {start}:", f"            ({given},) = {local}"]
    return lines


def _arguments(e: Emission, call: Call, names: dict[str, str]) -> str:
    values = [names[v] for v in call.inputs]
    inputs = [info(n).ref for n in e.program.blocks[call.block].placeholders(Role.INPUT)]
    return ", ".join([*values, *inputs])


def _is_loop(e: Emission, names: dict[str, str]) -> bool:
    """Whether every layer's line would be the same: a layer may read an input or a table that others do not."""
    lines = {(_arguments(e, c, names), tuple(names[v] for v in c.outputs)) for c in e.program.layer_calls}
    return e.is_chain() and len(lines) == 1


def _chain_loop(e: Emission, names: dict[str, str]) -> list[str]:
    call = e.program.layer_calls[0]
    given = ", ".join(names[v] for v in call.outputs)
    layer, index = loop_name("layer", e.program), loop_name("i", e.program)
    path = _layer_path(e, index)
    once = len({c.path for c in e.program.layer_calls}) == len(e.program.layer_calls)
    if once and path.startswith('f"'):
        loop = f"for {layer} in self.{e.lists()[0]}.children():"
    else:
        loop, layer = f"for {index} in range(self._start, self._stop):", f"self.get_submodule({path})"
    return [f"        {loop}", f"            {given} = {layer}({_arguments(e, call, names)})"]


def _unrolled(e: Emission, names: dict[str, str]) -> list[str]:
    lines = []
    for i, call in enumerate(e.program.layer_calls):
        given = ", ".join(names[v] for v in call.outputs)
        lines.append(f"        if self._start <= {i} < self._stop:")
        lines.append(f'            {given} = self.get_submodule("{call.path}")({_arguments(e, call, names)})')
    return lines


def _method(e: Emission, block: Block) -> list[str]:
    names = e.tables_arguments() if block.name == TABLES else e.value_names(block)
    body = e.body(block, names)
    arguments = ", ".join(names.values()) or "b, s, device"
    doc = {
        TABLES: "What layers read that depends on no parameter: every stage makes its own.",
        PROLOGUE: "What runs before the first layer.",
        EPILOGUE: "What runs after the last layer: this micro-batch's share of the mean loss.",
    }[block.name]
    return [
        f"    def _{block.name}(self, {arguments}):{e.shapes(names)}",
        f'        """{doc}"""',
        *(f"        {line}" for line in body.lines),
        f"        return {', '.join(body.results)}",
    ]


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
