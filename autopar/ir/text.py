"""A program as text, for dumps, tests of passes and goldens."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..plan.recompute import to_plain
from .graph import Block, Program, info, op_name


def program_text(program: Program) -> str:
    """Blocks, then calls, stages and recomputed layers."""
    parts = [block_text(block) for block in program.blocks.values()]
    calls = [
        f"{', '.join(c.outputs) or 'loss'} = {c.block}({', '.join(c.inputs)})" + (f"  # {c.path}" if c.path else "")
        for c in program.calls
    ]
    stages = [f"stage {i}: {s.start}–{s.stop}, {s.receives} → {s.sends}" for i, s in enumerate(program.stages)]
    recompute = [f"recompute: {to_plain(program.recompute)}"] if program.recompute else []
    return "\n\n".join([*parts, "\n".join([*calls, *stages, *recompute])]) + "\n"


def block_text(block: Block) -> str:
    """One node a line: name, shape, placements (on tp, cp, dp, once typed), and what it is."""
    lines = [f"block {block.name}:"]
    for node in block.graph.nodes:
        if node.op == "output":
            lines.append(f"  return {', '.join(n.name for n in block.results)}")
            continue
        facts = info(node)
        shape = ", ".join(map(str, facts.shape))
        lies = {axis: facts.placement_on(axis) for axis in ("tp", "cp", "dp")}
        placed = "".join(f" {p}{'' if axis == 'tp' else f'@{axis}'}" for axis, p in lies.items() if p is not None)
        what = f"{facts.role.value} {facts.ref}" if node.op == "placeholder" else _expression(node)
        shown = f"  # window={facts.window}" if facts.window is not None else ""
        lines.append(f"  {node.name}: [{shape}]{placed} = {what}{shown}")
    return "\n".join(lines)


def _expression(node: fx.Node) -> str:
    arguments = [_show(a) for a in node.args] + [f"{k}={_show(v)}" for k, v in node.kwargs.items()]
    return f"{op_name(node)}({', '.join(arguments)})"


def _show(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_show, argument))}]"
    return str(argument)
