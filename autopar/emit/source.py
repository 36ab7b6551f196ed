"""Program + plan → the text of model.py: one class per layer class, one Model for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, B, Block, Call, Program, Role, S, info, node_inputs
from ..passes.normalize_loss import COUNT
from ..placement import Kind
from ..plan import Plan
from .body import Body
from .expressions import size_text

_INDENT = "    "


@dataclass(frozen=True)
class Predicted:
    """What the cost model said of the plan, for the header and the log."""

    step_s: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None


def model_source(program: Program, plan: Plan, predicted: Predicted, header: str = "") -> str:
    """The text of model.py."""
    return _ModelSource(program, plan, predicted).text(header)


@dataclass
class _ModelSource:
    program: Program
    plan: Plan
    predicted: Predicted
    imports: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)  # value that passes between calls → its Python name

    def __post_init__(self) -> None:
        self.names = self._name_values()

    def text(self, header: str) -> str:
        names = dict.fromkeys(call.block for call in self.program.layer_calls)
        layers = [self._layer_class(self.program.blocks[name]) for name in names]
        count = self._count_function()
        model = self._model_class()
        constants = self._constants()
        code = "\n\n\n".join([*layers, model, count])
        parts = [_docstring(self.program, self.plan, header), self._imports(constants + code), constants]
        return "\n\n".join(part.strip("\n") for part in parts) + f"\n\n\n{code}\n"

    # module level

    def _imports(self, code: str) -> str:
        groups: dict[str, set[str]] = {}
        for item in self.imports | {"settings.Settings"}:
            module, _, name = item.rpartition(".")
            groups.setdefault(module, set()).add(name)
        lines = ["import torch"] if "torch." in code else []
        lines += ["import torch.nn.functional as F"] if "F." in code else []
        lines += ["from torch import nn"]
        if self.program.recompute:
            lines.append("from torch.utils.checkpoint import checkpoint")
        ours = [f"from runtime.{m} import {', '.join(sorted(names))}" for m, names in sorted(groups.items())]
        return "\n".join([*lines, "", *ours])

    def _constants(self) -> str:
        plan, mesh = self.plan, self.plan.mesh
        settings = [
            f"pp={mesh.pp}, dp={mesh.dp}, cp={mesh.cp}, tp={mesh.tp}",
            f"global_batch={plan.global_batch}, micro_batch={plan.micro_batch}, sequence={plan.sequence}",
            f'schedule="{plan.schedule}", zero={plan.zero}, precision="{plan.precision}"',
            f"stages={_tuple([str(stage) for stage in plan.stages], quote=False)}",
            f'optimizer="{plan.optimizer.name}", optimizer_kwargs={_dict(plan.optimizer.kwargs)}',
        ]
        settings += self._data_settings()
        if self.predicted.step_s is not None:
            settings.append(f"predicted_step_s={self.predicted.step_s:.6g}")
        if self.predicted.flops_per_step and self.predicted.peak_flops:
            settings.append(
                f"flops_per_step={self.predicted.flops_per_step:.6g}, peak_flops={self.predicted.peak_flops:.6g}"
            )
        lines = ["SETTINGS = Settings(", *(f"{_INDENT}{line}," for line in settings), ")"]
        lines.append(f"LAYERS = {_tuple(self._lists())}  # where the layers are; each is a unit of data parallelism")
        tied = [f'("{alias}", "{original}")' for alias, original in {**self._tied(), **self._on_several_stages()}.items()]
        lines.append(f"TIED = {_tuple(tied, quote=False) if tied else '()'}  # (alias, original)")
        if self.program.recompute:
            recompute = sorted(self.program.recompute)
            whole = recompute == list(range(recompute[0], recompute[-1] + 1))
            shown = f"range({recompute[0]}, {recompute[-1] + 1})" if whole else str(recompute)
            lines.append(f"RECOMPUTE = {shown}  # layers whose activations backward computes again")
        lines += self._fused_constants()
        if self.plan.optimizer.groups:
            lines += ["# (parameter names, options over the optimizer's)", "PARAMETER_GROUPS = ("]
            lines += [f"    ({_tuple(names)}, {_dict(own)})," for names, own in self._groups()]
            lines.append(")")
        return "\n".join(lines)

    def _data_settings(self) -> list[str]:
        """What the default data must know: the number of token ids, and whether the model shifts labels itself."""
        if PROLOGUE not in self.program.blocks:
            return []
        for node in self.program.blocks[PROLOGUE].ops:
            if node.target is torch.ops.aten.embedding.default and _reads_input(node.args[1]):
                weight = node_inputs(node)[0]
                shifts = {torch.ops.aten.pad.default, torch.ops.aten.slice.Tensor}
                same = any(n.target in shifts for n in self.program.blocks[COUNT].ops)
                labels = "same" if same else "next"
                return [f'vocabulary={size_text(info(weight).shape[0])}, labels="{labels}"']
        return []

    def _groups(self) -> list[tuple[list[str], Mapping[str, Any]]]:
        """The user's parameter groups by the program's names: fused parameters by their parts."""
        fused = self.program.fused
        return [
            ([part for name in names for part in (fused[name].parts if name in fused else (name,))], own)
            for names, own in self.plan.optimizer.groups
        ]

    def _fused_constants(self) -> list[str]:
        """PARTS: part → (parameter of the original model, dim, start, length)."""
        if not self.program.fused:
            return []
        lines = ["# Parameters that are slices of one of the original model: part → (original, dim, start, length)", "PARTS = {"]
        done: set[str] = set()
        for call in self.program.calls:
            rows = [] if call.block in done else self._part_rows(call)
            done.add(call.block)
            if not rows:
                continue
            paths = [c.path for c in self.program.calls if c.block == call.block]
            prefix = f"{{path}}." if call.path else ""
            lines.append(f'{_INDENT}**{{')
            lines.append(f'{_INDENT * 2}f"{prefix}{{part}}": (f"{prefix}{{original}}", dim, start, length)')
            if call.path:
                lines.append(f"{_INDENT * 2}for path in {_paths(paths)}")
            lines.append(f"{_INDENT * 2}for part, original, dim, start, length in (")
            lines += [f"{_INDENT * 3}{row}," for row in rows]
            lines += [f"{_INDENT * 2})", f"{_INDENT}}},"]
        return [*lines, "}"]

    def _part_rows(self, call: Call) -> list[str]:
        rows = []
        block = self.program.blocks[call.block]
        refs = {info(n).ref for n in block.placeholders(Role.PARAMETER)}
        for original, fused in self.program.fused.items():
            start = 0
            for part in fused.parts:
                relative = part.removeprefix(f"{call.path}.") if call.path else part
                length = int(self.program.parameters[part].shape[fused.dim])
                if relative in refs:
                    whole = original.removeprefix(f"{call.path}.") if call.path else original
                    rows.append(f'("{relative}", "{whole}", {fused.dim}, {start}, {length})')
                start += length
        return rows

    def _lists(self) -> list[str]:
        return list(dict.fromkeys(call.path.rpartition(".")[0] for call in self.program.layer_calls))

    def _tied(self) -> dict[str, str]:
        """Aliases that the loss reads, with the name that keeps the values."""
        used = {
            call.full_name(info(n).ref)
            for call in self.program.calls
            for n in self.program.blocks[call.block].placeholders(Role.PARAMETER)
        }
        return {alias: original for alias, original in self.program.tied.items() if alias in used and original in used}

    def _on_several_stages(self) -> dict[str, str]:
        """The parameters of a layer object that several stages use, each its own original."""
        stages: dict[str, set[int]] = {}
        for call in self.program.layer_calls:
            for node in self.program.blocks[call.block].placeholders(Role.PARAMETER):
                stages.setdefault(call.full_name(info(node).ref), set()).update(self.program.stage_of_call(call))
        return {name: name for name, used in stages.items() if len(used) > 1}

    def _count_function(self) -> str:
        block = self.program.blocks[COUNT]
        names = {n: info(n).ref for n in block.placeholders(Role.INPUT)}
        body = self._body(block, names)
        arguments = ", ".join(names.values())
        return "\n".join(
            [
                f"def count_targets({arguments}):",
                f'{_INDENT}"""The number of terms in the loss of these samples."""',
                *(f"{_INDENT}{line}" for line in body.lines),
                f"{_INDENT}return {body.results[0]}",
            ]
        )

    # a layer class

    def _layer_class(self, block: Block) -> str:
        calls = [c for c in self.program.layer_calls if c.block == block.name]
        names = self._value_names(block)
        body = self._body(block, names)
        arguments = ", ".join(names.values())
        returned = ", ".join(body.results)
        recomputed = any(self.program.layer_calls[i].block == block.name for i in self.program.recompute)
        parameters = [self._declare(n) for n in block.placeholders(Role.PARAMETER, Role.BUFFER)]
        lines = [
            f"class {block.name}(nn.Module):",
            f'    """{_count_text(calls)}{self._layout(calls)}."""',
            "",
            f"    def __init__(self{', recompute' if recomputed else ''}):",
            "        super().__init__()",
            *(["        self._recompute = recompute"] if recomputed else []),
            *(f"        {line}" for line in parameters),
            "",
        ]
        if recomputed:
            lines += [
                f"    def forward(self, {arguments}):",
                "        if self._recompute and torch.is_grad_enabled():",
                f"            return checkpoint(self._layer, {arguments}, use_reentrant=False)",
                f"        return self._layer({arguments})",
                "",
                f"    def _layer(self, {arguments}):{self._shapes(names)}",
            ]
        else:
            lines.append(f"    def forward(self, {arguments}):{self._shapes(names)}")
        lines += [f"        {line}" for line in body.lines]
        lines.append(f"        return {returned}")
        return "\n".join(lines)

    def _layout(self, calls: Sequence[Call]) -> str:
        layout = self.plan.solution.name
        kinds = [f"tp={self.plan.mesh.tp}{f' ({layout})' if layout else ''}"] if self.plan.mesh.tp > 1 else []
        indices = [i for i, c in enumerate(self.program.layer_calls) if c in calls]
        again = [i for i in indices if i in self.program.recompute]
        if again:
            kinds.append("recomputed" if len(again) == len(indices) else f"{len(again)} of {len(indices)} recomputed")
        return "".join(f" · {kind}" for kind in kinds)

    def _shapes(self, names: dict[fx.Node, str]) -> str:
        """A comment with the local shapes of the arguments that have a gradient."""
        shown = []
        for node, name in names.items():
            facts = info(node)
            if not facts.requires_grad:
                continue
            sizes = [size_text(n) for n in facts.shape]
            if facts.placement.is_shard:
                sizes[facts.placement.dim] += f"/{self.plan.mesh.tp}"
            kind = f"{facts.placement}@tp " if self.plan.mesh.tp > 1 else ""
            shown.append(f"{name}: {kind}[{', '.join(sizes)}]")
        return f"  # {', '.join(shown)}" if shown else ""

    def _value_names(self, block: Block) -> dict[fx.Node, str]:
        """Arguments of a block: `x` for the one value with a gradient, else the name its producer gave it."""
        call = self.program.call_of(block.name)
        names: dict[fx.Node, str] = {}
        for node in block.placeholders(Role.VALUE):
            names[node] = self.names[call.inputs[int(info(node).ref)]]
        for node in block.placeholders(Role.INPUT):
            names[node] = info(node).ref
        return names

    def _name_values(self) -> dict[str, str]:
        """Hidden states are `x` along the chain of layers; tables keep the names of their own lines."""
        names: dict[str, str] = {}
        chain, number = self._is_chain(), 0
        for call in self.program.calls:
            if call.block == TABLES:
                body = Body(self.program.blocks[TABLES], lambda node: "buffer", self._tables_arguments(), 1)
                body.write()
                names.update(zip(call.outputs, body.results, strict=True))
                continue
            for place, value in enumerate(call.outputs):
                names[value] = f"x{place or ''}" if chain else f"x{number}{f'_{place}' if place else ''}"
            number += 1
        return names

    def _is_chain(self) -> bool:
        """Whether each layer reads only tables and exactly what the call before it gave."""
        tables = {v for c in self.program.calls if c.block == TABLES for v in c.outputs}
        previous: tuple[str, ...] | None = None
        for call in self.program.calls:
            if call.block == TABLES:
                continue
            varying = tuple(v for v in call.inputs if v not in tables)
            if previous is not None and varying != previous:
                return False
            previous = call.outputs
        return True

    def _declare(self, node: fx.Node) -> str:
        """parameter(…), tie(…) or buffer(…) of a placeholder."""
        facts = info(node)
        shape = _tuple([size_text(n) for n in facts.shape], quote=False)
        if facts.role is Role.BUFFER:
            self.imports.add("parameters.buffer")
            return f'buffer(self, "{facts.ref}", {shape}, {facts.dtype})'
        shard = f", shard={facts.placement.dim}" if facts.placement.is_shard else ""
        if facts.ref in self._tied():
            self.imports.add("parameters.tie")
            return f'tie(self, "{facts.ref}", "{self._tied()[facts.ref]}", {shape}{shard})'
        self.imports.add("parameters.parameter")
        return f'parameter(self, "{facts.ref}", {shape}{shard})'

    def _access(self, node: fx.Node) -> str:
        facts = info(node)
        path = f"self.{facts.ref}"
        if any(part.isdigit() for part in facts.ref.split(".")):
            owner, _, leaf = facts.ref.rpartition(".")
            path = f'self.get_submodule("{owner}").{leaf}'
        if facts.role is Role.BUFFER or self.plan.mesh.tp == 1:
            return path
        function = "summed" if facts.placement.kind is Kind.GRAD_PARTIAL else "local"
        self.imports.add(f"parameters.{function}")
        return f"{function}({path})"

    def _body(self, block: Block, names: dict[fx.Node, str]) -> Body:
        body = Body(block, self._access, names, self.plan.mesh.tp)
        body.write()
        self.imports |= body.imports
        return body

    # the model

    def _tables_arguments(self) -> dict[fx.Node, str]:
        block = self.program.blocks[TABLES]
        return {n: info(n).ref for n in block.placeholders(Role.INPUT)}

    def _model_class(self) -> str:
        blocks = self.program.blocks
        methods = []
        for name in (TABLES, PROLOGUE, EPILOGUE):
            if name in blocks:
                methods.append(self._method(blocks[name]))
        lines = [
            "class Model(nn.Module):",
            f'    """{self.program.name}: the layers of one pipeline stage, with the embedding on the first and the loss on the last."""',
            "",
            "    def __init__(self, stage=0):",
            "        super().__init__()",
            "        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1",
            "        self._start, self._stop = SETTINGS.stages[stage]",
            *self._declarations(),
            "",
            *self._forward(),
            *(line for method in methods for line in ["", *method]),
            "",
            *self._between_stages(),
        ]
        return "\n".join(lines)

    def _declarations(self) -> list[str]:
        blocks = self.program.blocks
        lines: list[str] = []
        for name, guard in ((TABLES, ""), (PROLOGUE, "self._first")):
            if name in blocks:
                lines += self._guarded(blocks[name], guard)
        self.imports.add("parameters.submodule")
        lines.append("        for i in range(self._start, self._stop):")
        lines.append(f"            submodule(self, {self._layer_path('i')}, {self._layer_new('i')})")
        if EPILOGUE in blocks:
            lines += self._guarded(blocks[EPILOGUE], "self._last")
        return lines

    def _guarded(self, block: Block, guard: str) -> list[str]:
        own = [n for n in block.placeholders(Role.PARAMETER, Role.BUFFER) if info(n).ref != "_count"]
        declared = [self._declare(n) for n in own]
        if not guard or not declared:
            return [f"        {line}" for line in declared]
        return [f"        if {guard}:", *(f"            {line}" for line in declared)]

    def _layer_path(self, index: str) -> str:
        """The path of layer `index`, as source."""
        paths = [c.path for c in self.program.layer_calls]
        parent = paths[0].rpartition(".")[0]
        if paths == [f"{parent}.{i}".lstrip(".") for i in range(len(paths))]:
            return f'f"{parent}.{{{index}}}"' if parent else f"str({index})"
        return f"{_tuple(paths)}[{index}]"

    def _layer_new(self, index: str) -> str:
        blocks = [c.block for c in self.program.layer_calls]
        again = {blocks[i] for i in self.program.recompute}

        def new(block: str) -> str:
            return f"{block}({f'{index} in RECOMPUTE' if block in again else ''})"

        if len(set(blocks)) == 1:
            return new(blocks[0])
        first = ", ".join(blocks)
        flag = f"{index} in RECOMPUTE" if again else ""
        return f"({first})[{index}]({flag})"

    def _forward(self) -> list[str]:
        names, blocks = self.names, self.program.blocks
        inputs = ", ".join(self.program.inputs)
        lines = [f"    def forward(self, *received, {inputs}):"]
        if TABLES in blocks:
            lines += self._make_tables(names)
        lines += self._first_values(names)
        lines += self._chain_loop(names) if self._is_chain() else self._unrolled(names)
        if EPILOGUE in blocks:
            lines += ["        if self._last:", f"            return self._epilogue({self._arguments(EPILOGUE, names)})"]
        sent = {", ".join(names[v] for v in stage.sends) for stage in self.program.stages if stage.sends}
        if len(sent) == 1:
            lines.append(f"        return {sent.pop()}")
        elif sent:
            given = [f"({', '.join(names[v] for v in stage.sends)},)" for stage in self.program.stages[:-1]]
            lines.append(f"        return ({', '.join(f'lambda: {g}' for g in given)},)[self._stage]()")
        return lines

    def _make_tables(self, names: dict[str, str]) -> list[str]:
        """The call of `_tables`, which takes the sizes of the batch where it reads no input."""
        given = ", ".join(names[v] for v in self.program.call_of(TABLES).outputs)
        if arguments := self._tables_arguments():
            return [f"        {given} = self._tables({', '.join(arguments.values())})"]
        name, tensor = max(self.program.inputs.items(), key=lambda item: len({B, S} & set(item[1].shape)))
        sizes = [
            f"{name}.shape[{tensor.shape.index(symbol)}]" if symbol in tensor.shape else "None" for symbol in (B, S)
        ]
        return [f"        {given} = self._tables({', '.join(sizes)}, {name}.device)"]

    def _first_values(self, names: dict[str, str]) -> list[str]:
        blocks, stages = self.program.blocks, self.program.stages
        lines: list[str] = []
        if PROLOGUE in blocks:
            call = self.program.call_of(PROLOGUE)
            given = ", ".join(names[v] for v in call.outputs)
            made = f"{given} = self._prologue({self._arguments(PROLOGUE, names)})"
            if len(stages) == 1:
                return [f"        {made}"]
            lines += ["        if self._first:", f"            {made}"]
        received = dict.fromkeys(", ".join(names[v] for v in stage.receives) for stage in stages[1:])
        if len(received) == 1:
            (values,) = received
            lines += ["        else:" if lines else "        if not self._first:", f"            ({values},) = received"]
        return lines

    def _arguments(self, block: str, names: dict[str, str]) -> str:
        call = self.program.call_of(block)
        values = [names[v] for v in call.inputs]
        inputs = [info(n).ref for n in self.program.blocks[block].placeholders(Role.INPUT)]
        return ", ".join([*values, *inputs])

    def _chain_loop(self, names: dict[str, str]) -> list[str]:
        call = self.program.layer_calls[0]
        given = ", ".join(names[v] for v in call.outputs)
        path = self._layer_path("i")
        parent = self._lists()[0]
        regular = path.startswith('f"') and len(set(c.path for c in self.program.layer_calls)) == len(
            self.program.layer_calls
        )
        same = len({tuple(names[v] for v in c.inputs) for c in self.program.layer_calls}) == 1
        if regular and same:
            loop, layer = f"for layer in self.{parent}.children():", "layer"
        else:
            loop, layer = "for i in range(self._start, self._stop):", f"self.get_submodule({path})"
        return [f"        {loop}", f"            {given} = {layer}({self._arguments(call.block, names)})"]

    def _unrolled(self, names: dict[str, str]) -> list[str]:
        lines = []
        for i, call in enumerate(self.program.layer_calls):
            given = ", ".join(names[v] for v in call.outputs)
            values = ", ".join(names[v] for v in call.inputs)
            lines.append(f"        if self._start <= {i} < self._stop:")
            lines.append(f'            {given} = self.get_submodule("{call.path}")({values})')
        return lines

    def _method(self, block: Block) -> list[str]:
        names = self._tables_arguments() if block.name == TABLES else self._value_names(block)
        body = self._body(block, names)
        arguments = ", ".join(names.values()) or "b, s, device"
        doc = {
            TABLES: "What layers read that depends on no parameter: every stage makes its own.",
            PROLOGUE: "What runs before the first layer.",
            EPILOGUE: "What runs after the last layer: this micro-batch's share of the mean loss.",
        }[block.name]
        return [
            f"    def _{block.name}(self, {arguments}):{self._shapes(names)}",
            f'        """{doc}"""',
            *(f"        {line}" for line in body.lines),
            f"        return {', '.join(body.results)}",
        ]

    def _between_stages(self) -> list[str]:
        """(local shape, dtype) of each value that a stage sends."""
        rows = []
        for stage in self.program.stages[:-1]:
            sent = [f"({self._local_shape(v)}, {self.program.value_info(v).dtype})" for v in stage.sends]
            rows.append(f"({', '.join(sent)},)")
        lines = [
            "    @staticmethod",
            "    def between_stages(stage, b, s):",
            '        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""',
        ]
        if len(set(rows)) == 1:
            return [*lines, f"        return {rows[0]}"]
        return [*lines, f"        return ({', '.join(rows)}{',' if rows else ''})[stage]"]

    def _local_shape(self, value: str) -> str:
        facts = self.program.value_info(value)
        shape = list(facts.shape)
        if facts.placement.is_shard:
            shape[facts.placement.dim] = shape[facts.placement.dim] / self.plan.mesh.tp
        return _tuple([size_text(n) for n in shape], quote=False)


def _docstring(program: Program, plan: Plan, header: str) -> str:
    first = f"{program.name}, distributed by autopar: {plan.mesh}."
    inside = f"{first}\n\n{header.strip()}\n" if header else first
    return f'"""{inside}"""'


def _count_text(calls: Sequence[Call]) -> str:
    if len(calls) == 1:
        return calls[0].path
    return f"{len(calls)} layers: {calls[0].path} … {calls[-1].path}"


def _reads_input(node: Any) -> bool:
    while isinstance(node, fx.Node) and info(node).role is Role.CONVERT:
        node = node.args[0]
    return isinstance(node, fx.Node) and info(node).role is Role.INPUT


def _paths(paths: Sequence[str]) -> str:
    parent = paths[0].rpartition(".")[0]
    if list(paths) == [f"{parent}.{i}" for i in range(len(paths))]:
        return f'(f"{parent}.{{i}}" for i in range({len(paths)}))'
    return _tuple(paths)


def _tuple(items: Sequence[str], quote: bool = True) -> str:
    shown = [f'"{item}"' if quote else item for item in items]
    return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"


def _dict(values: object) -> str:
    items = dict(values)  # type: ignore[call-overload]
    return "{" + ", ".join(f'"{k}": {v!r}' for k, v in items.items()) + "}"
