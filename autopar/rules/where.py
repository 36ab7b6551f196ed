"""Where in the user's model a node is, for errors: its line, and the graph around it."""

from __future__ import annotations

from torch import fx

from ..errors import TypeCheckError
from ..ir.custom import OPAQUE
from ..ir.graph import Block, Program, info, node_inputs
from .arguments import option


def error(block: Block, node: fx.Node, problem: str, short: str = "") -> TypeCheckError:
    """The problem with block, node, module path, the user's line and the neighbouring ops; `short` for a table."""
    ops = list(block.graph.nodes)
    at = ops.index(node)
    around = "\n".join(f"    {'>' if n is node else ' '} {_line(n)}" for n in ops[max(0, at - 3) : at + 4])
    facts = info(node)
    place = f" ({facts.module or block.name}, {facts.source})" if facts.source else ""
    found = TypeCheckError(f"{block.name}.{node.name}{place}: {problem}\n{around}")
    found.short = f"{short or 'loss couples samples'} at {where(node)}"
    return found


def kept_whole(program: Program, node: fx.Node) -> str:
    """A line with why a module is opaque, and the user's lines there; "" of another op."""
    return f"\n  it is kept whole: {program.opaque[option(node, 'name')].reason}" if node.target is OPAQUE else ""


def where(node: fx.Node) -> str:
    """The user's line, or the node's name where there is none."""
    return info(node).source or node.name


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return "return"
    strategies = info(node).strategies
    strategy = strategies.get("tp") or strategies.get("cp")
    operands = ", ".join(n.name for n in node_inputs(node))
    return f"{node.name}({operands})  {strategy if strategy else ''}"
