"""Parameters and buffers in model.py: how each is declared, read, and tied to another."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from ..ir.graph import Block, Call, Role, info, is_count
from ..placement import Kind
from .emission import Emission
from .text import attribute, quoted, sizes_text


def declarations(e: Emission, block: Block) -> Iterator[str]:
    """A line for each parameter and buffer of a block that is not declared yet: parameter(…), tie(…), buffer(…), …"""
    for node in block.placeholders(Role.PARAMETER, Role.BUFFER):
        if line := _parameter(e, node) if info(node).role is Role.PARAMETER else _buffer(e, node):
            yield line


def _parameter(e: Emission, node: fx.Node) -> str:
    facts = info(node)
    shard = f", shard={facts.placement.dim}" if facts.placement.is_shard else ""
    options = f"{sizes_text(facts.shape)}{shard}{'' if facts.requires_grad else ', frozen=True'}"
    other = _tied_before(e, node)
    if other is None:
        return f"parameter(self, {quoted(facts.ref)}, {options})"
    if other == facts.ref and e.alone:
        return ""  # used again where it has been declared
    return f"tie(self, {quoted(facts.ref)}, {quoted(other)}, {options})"


def _buffer(e: Emission, node: fx.Node) -> str:
    facts = info(node)
    if is_count(facts):
        value = f"torch.zeros({sizes_text(facts.shape)}, dtype={facts.dtype})"
        return f"self.register_buffer({quoted(facts.ref)}, {value}, persistent=False)  # the trainer sets it"
    if _is_among(e, node, e.program.mutated):  # a running mean, declared with its variance and count
        path, _, name = facts.ref.rpartition(".")
        declared = f"statistics(self, {quoted(path)}, {facts.shape[0]}, {facts.dtype})"
        return declared if name == "running_mean" else ""
    kept = ", persistent=True" * _is_among(e, node, e.program.persistent)
    return f"buffer(self, {quoted(facts.ref)}, {sizes_text(facts.shape)}, {facts.dtype}{kept})"


def _is_among(e: Emission, node: fx.Node, names: Collection[str]) -> bool:
    """Whether some call reads a buffer under one of the names."""
    calls = [c for c in e.program.calls if node in e.program.blocks[c.block].placeholders()]
    return any(call.full_name(info(node).ref) in names for call in calls)


def _tied_before(e: Emission, node: fx.Node) -> str | None:
    """The name under which a parameter of prologue or epilogue has been declared last, before this one."""
    declared = [n for block in e.outside for n in block.placeholders(Role.PARAMETER)]
    if node not in declared:
        return None
    before = [info(n).ref for n in declared[: declared.index(node)]]
    originals, ref = tied(e), info(node).ref
    return next((n for n in reversed(before) if originals.get(n, n) == originals.get(ref, ref)), None)


def tied(e: Emission) -> dict[str, str]:
    """Aliases that the loss reads, with the name that keeps the values (which it need not read itself)."""
    read = _read(e, e.program.calls)
    return {alias: original for alias, original in e.program.tied.items() if alias in read}


def tied_over_stages(e: Emission) -> dict[str, str]:
    """Every alias with its original, and as its own original each parameter that several stages use under one name."""
    stages: dict[str, set[int]] = {}
    for call in e.program.calls:
        for name in sorted(_read(e, [call])):
            stages.setdefault(name, set()).update(e.program.stage_of_call(call))
    return {name: name for name, used in stages.items() if len(used) > 1} | tied(e)


def _read(e: Emission, calls: Sequence[Call]) -> set[str]:
    """Every parameter that some calls read, by the name it is read under."""
    return {
        call.full_name(info(n).ref) for call in calls for n in e.program.blocks[call.block].placeholders(Role.PARAMETER)
    }


def access(e: Emission, node: fx.Node) -> str:
    """The expression of a parameter or buffer; of a parameter, where tp shards some, of what this rank has of it."""
    facts = info(node)
    path = attribute(facts.ref, "buffer" if facts.role is Role.BUFFER else "parameter")
    cast = not facts.shape and e.plan.compute.precision in ("bf16", "fp16")  # fully_shard casts all others
    if facts.role is Role.BUFFER or (e.plan.mesh.tp == 1 and not cast):
        return path
    return f"{'summed' if facts.placement.kind is Kind.GRAD_PARTIAL else 'local'}({path})"
