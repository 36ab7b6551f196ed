"""What the writers of model.py share: the program, its plan, the names of values, the imports collected so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..ir.graph import EPILOGUE, PROLOGUE, TABLES, Block, Call, Program, Role, info
from ..placement import Kind
from ..plan import Plan
from .body import Body
from .names import argument_name, value_name
from .text import size_text


@dataclass(frozen=True)
class Predicted:
    """What the cost model said of the plan, for the header and the log."""

    step_s: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None


@dataclass
class Emission:
    """One emission of model.py. `names`: value that passes between calls → its Python name."""

    program: Program
    plan: Plan
    predicted: Predicted
    imports: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = self._name_values()

    def _name_values(self) -> dict[str, str]:
        """Hidden states are `x` along the chain of layers; tables keep the names of their own lines.

        They share Model.forward with its arguments, and a layer with its own: none has the name of another.
        """
        taken = {*self.program.inputs, *map(argument_name, self.program.inputs)}
        names: dict[str, str] = {}
        for call in self.program.calls:
            if call.block == TABLES:
                body = Body(self.program.blocks[TABLES], lambda node: "buffer", self.tables_arguments(), 1)
                body.write()
                for value, result in zip(call.outputs, body.results, strict=True):
                    names[value] = value_name(result, taken)
                    taken.add(names[value])
        chain = self.is_chain()
        for number, call in enumerate(c for c in self.program.calls if c.block != TABLES):
            for place, value in enumerate(call.outputs):
                base = f"x{place or ''}" if chain else f"x{number}{f'_{place}' if place else ''}"
                names[value] = value_name(base, taken)
        return names

    def is_chain(self) -> bool:
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

    def tables_arguments(self) -> dict[fx.Node, str]:
        block = self.program.blocks[TABLES]
        return {n: argument_name(info(n).ref) for n in block.placeholders(Role.INPUT)}

    def value_names(self, block: Block) -> dict[fx.Node, str]:
        """Arguments of a block: `x` for the one value with a gradient, else the name its producer gave it."""
        call = self.program.call_of(block.name)
        names: dict[fx.Node, str] = {}
        for node in block.placeholders(Role.VALUE):
            names[node] = self.names[call.inputs[int(info(node).ref)]]
        for node in block.placeholders(Role.INPUT):
            names[node] = argument_name(info(node).ref)
        return names

    def lists(self) -> list[str]:
        return list(dict.fromkeys(call.path.rpartition(".")[0] for call in self.program.layer_calls))

    def tied(self) -> dict[str, str]:
        """Aliases that the loss reads, with the name that keeps the values (which it need not read itself)."""
        used = self.used(self.program.calls)
        return {alias: original for alias, original in self.program.tied.items() if alias in used}

    def used(self, calls: Sequence[Call]) -> set[str]:
        """Every parameter that some calls read, by the name it is read under."""
        return {
            call.full_name(info(n).ref)
            for call in calls
            for n in self.program.blocks[call.block].placeholders(Role.PARAMETER)
        }

    def _tied_before(self, node: fx.Node) -> str | None:
        """The name under which a parameter of prologue or epilogue has been declared last, before this one."""
        blocks = [self.program.blocks[name] for name in (PROLOGUE, EPILOGUE) if name in self.program.blocks]
        declared = [n for block in blocks for n in block.placeholders(Role.PARAMETER)]
        if node not in declared:
            return None
        before = [info(n).ref for n in declared[: declared.index(node)]]
        tied, ref = self.tied(), info(node).ref
        return next((n for n in reversed(before) if tied.get(n, n) == tied.get(ref, ref)), None)

    def on_several_stages(self) -> dict[str, str]:
        """Parameters that several stages use under one name, as those of a layer object, each its own original."""
        stages: dict[str, set[int]] = {}
        for call in self.program.calls:
            for name in self.used([call]):
                stages.setdefault(name, set()).update(self.program.stage_of_call(call))
        return {name: name for name, used in stages.items() if len(used) > 1}

    def declare(self, node: fx.Node) -> str:
        """parameter(…), tie(…) or buffer(…) of a placeholder."""
        facts = info(node)
        shape = tuple_text([size_text(n) for n in facts.shape], quote=False)
        if facts.role is Role.BUFFER:
            self.imports.add("parameters.buffer")
            return f'buffer(self, "{facts.ref}", {shape}, {facts.dtype})'
        shard = f", shard={facts.placement.dim}" if facts.placement.is_shard else ""
        frozen = "" if facts.requires_grad else ", frozen=True"
        if other := self._tied_before(node):
            self.imports.add("parameters.tie")
            return f'tie(self, "{facts.ref}", "{other}", {shape}{shard}{frozen})'
        self.imports.add("parameters.parameter")
        return f'parameter(self, "{facts.ref}", {shape}{shard}{frozen})'

    def access(self, node: fx.Node) -> str:
        facts = info(node)
        path = f"self.{facts.ref}"
        if any(part.isdigit() for part in facts.ref.split(".")):
            kind = "buffer" if facts.role is Role.BUFFER else "parameter"
            path = f'self.get_{kind}("{facts.ref}")'
        if facts.role is Role.BUFFER or self.plan.mesh.tp == 1:
            return path
        function = "summed" if facts.placement.kind is Kind.GRAD_PARTIAL else "local"
        self.imports.add(f"parameters.{function}")
        return f"{function}({path})"

    def body(self, block: Block, names: dict[fx.Node, str]) -> Body:
        body = Body(block, self.access, names, self.plan.mesh.tp)
        body.write()
        self.imports |= body.imports
        return body

    def shapes(self, names: dict[fx.Node, str]) -> str:
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


def tuple_text(items: Sequence[str], quote: bool = True) -> str:
    """Source of a tuple of strings, or (quote=False) of expressions."""
    if not items:
        return "()"
    shown = [f'"{item}"' if quote else item for item in items]
    return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"


def dict_text(values: Mapping[str, Any]) -> str:
    """Source of a dict of plain values."""
    return "{" + ", ".join(f'"{k}": {v!r}' for k, v in values.items()) + "}"
