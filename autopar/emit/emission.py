"""What the writers of model.py share: the program, its plan, the names of values, the imports collected so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..ir.graph import EPILOGUE, PROLOGUE, Block, Call, Program, Role, info
from ..placement import Kind
from ..plan.plan import Plan
from .body import Body, untold_sizes
from .call_names import block_arguments, value_names
from .comments import placement_text
from .idioms import Idioms
from .placement_table import local_shape
from .roles import Roles
from .text import attribute, quoted, size_text

_SHAPES = 48  # the width of a comment beside a method's arguments


@dataclass(frozen=True)
class Predicted:
    """What the cost model said of the plan, for the header and the log; `mfu` of 1, `peak_bytes` of the fullest GPU.

    unit: what the plan is spread over, "GPU" or "process" of a CPU.
    """

    step_s: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    peak_bytes: float | None = None
    mfu: float | None = None
    unit: str = "GPU"


@dataclass
class Emission:
    """One emission of model.py. `names`: value that passes between calls → its Python name.

    opaque: the file of the modules that are kept whole, whose hash the program has.
    """

    program: Program
    plan: Plan
    predicted: Predicted
    opaque: bytes = b""
    imports: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    _roles: dict[str, Roles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        idioms = Idioms(self.program)
        self.program, self.functions, self.renamed = idioms.program, idioms.functions, idioms.renamed
        self.names = value_names(self.program)

    def roles(self, block: Block) -> Roles:
        """The roles of a block's values; what it returns is called as its readers call it."""
        if block.name not in self._roles:
            results: dict[fx.Node, str] = {}
            if self.program.count(block.name):
                given = (self.names[value] for value in self.program.call_of(block.name).outputs)
                results = dict(zip(block.results, given, strict=False))
            self._roles[block.name] = Roles(block, results)
        return self._roles[block.name]

    def arguments(self, block: Block) -> dict[fx.Node, str]:
        """What a block's values and inputs are called in it."""
        return block_arguments(self.program, block, self.names)

    def parameters(self, block: Block) -> list[str]:
        """The arguments of a block's method: values, inputs, sizes that none of these tells; a device without any."""
        names = self.arguments(block)
        return [*names.values(), *map(str, untold_sizes(block.ops, names)), *([] if names else ["device"])]

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
        between = [c.block for c in self.program.layer_calls if self.program.is_between(c.block)]
        blocks = [self.program.blocks[n] for n in (PROLOGUE, *between, EPILOGUE) if n in self.program.blocks]
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
            for name in sorted(self.used([call])):
                stages.setdefault(name, set()).update(self.program.stage_of_call(call))
        return {name: name for name, used in stages.items() if len(used) > 1}

    def declare(self, node: fx.Node) -> str:
        """parameter(…), tie(…) or buffer(…) of a placeholder; nothing where it is declared already."""
        facts = info(node)
        shape = tuple_text([size_text(n) for n in facts.shape], quote=False)
        if facts.role is Role.BUFFER and self.is_statistic(node):
            path, _, name = facts.ref.rpartition(".")
            self.imports.add("norm.statistics")
            declared = f"statistics(self, {quoted(path)}, {facts.shape[0]}, {facts.dtype})"
            return declared if name == "running_mean" else ""
        if facts.role is Role.BUFFER:
            self.imports.add("parameters.buffer")
            kept = ", persistent=True" * self._is_among(node, self.program.persistent)
            return f"buffer(self, {quoted(facts.ref)}, {shape}, {facts.dtype}{kept})"
        shard = f", shard={facts.placement.dim}" if facts.placement.is_shard else ""
        frozen = "" if facts.requires_grad else ", frozen=True"
        other = self._tied_before(node)
        if other == facts.ref and len(self.program.stages) == 1:
            return ""  # used again where it has been declared
        if other:
            self.imports.add("parameters.tie")
            return f"tie(self, {quoted(facts.ref)}, {quoted(other)}, {shape}{shard}{frozen})"
        self.imports.add("parameters.parameter")
        return f"parameter(self, {quoted(facts.ref)}, {shape}{shard}{frozen})"

    def is_statistic(self, node: fx.Node) -> bool:
        """Whether a buffer is a running mean or variance, which training changes."""
        return self._is_among(node, self.program.mutated)

    def _is_among(self, node: fx.Node, names: Collection[str]) -> bool:
        calls = [c for c in self.program.calls if node in self.program.blocks[c.block].placeholders()]
        return any(call.full_name(info(node).ref) in names for call in calls)

    def access(self, node: fx.Node) -> str:
        facts = info(node)
        path = attribute(facts.ref, "buffer" if facts.role is Role.BUFFER else "parameter")
        cast = not facts.shape and self.plan.compute.precision in ("bf16", "fp16")  # fully_shard casts all others
        if facts.role is Role.BUFFER or (self.plan.mesh.tp == 1 and not cast):
            return path
        function = "summed" if facts.placement.kind is Kind.GRAD_PARTIAL else "local"
        self.imports.add(f"parameters.{function}")
        return f"{function}({path})"

    def body(
        self,
        block: Block,
        names: Mapping[fx.Node, str],
        ops: Sequence[fx.Node] | None = None,
        results: Sequence[fx.Node] | None = None,
        breaks: Collection[fx.Node] = (),
        called: Mapping[fx.Node, str] | None = None,
        roles: Roles | None = None,
    ) -> Body:
        """The lines of a block, or of some of its ops; `roles` where they are not those of the program's block."""
        ops, results = block.ops if ops is None else ops, block.results if results is None else results
        body = Body(
            ops, results, roles or self.roles(block), self.access, names, self.plan.mesh.tp, breaks, called or {}
        ).write()
        self.imports |= body.imports
        return body

    def shapes(self, names: Mapping[fx.Node, str]) -> str:
        """A comment with the local shapes of the arguments that have a gradient."""
        shown = []
        for node, name in names.items():
            facts = info(node)
            if not facts.requires_grad:
                continue
            kind = f"{placement_text(facts.placement)}@tp " if self.plan.mesh.tp > 1 else ""
            kind = f"{placement_text(facts.context)}@cp {kind}" if facts.context is not None else kind
            shown.append(f"{name}: {kind}{local_shape(facts, self.plan.mesh.tp)}")
        shown = shown if len(", ".join(shown)) < _SHAPES else shown[:1]
        return f"  # {', '.join(shown)}" if shown else ""


def tuple_text(items: Sequence[str], quote: bool = True) -> str:
    """Source of a tuple of strings, or (quote=False) of expressions."""
    if not items:
        return "()"
    shown = [quoted(item) if quote else item for item in items]
    return f"({shown[0]},)" if len(shown) == 1 else f"({', '.join(shown)})"
