"""The type check: a program's placements against the rules, so that a wrong or missing collective is an error.

Run after every pass. Each level of a program has its checks:

    traced    every node has a shape and a dtype; no block reads what nothing gives
    typed     every node has a strategy of its rule
    converted every operand has the placement that its reader's strategy wants; conversions are in the table
    lowered   every collective is the one of its conversion
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from torch import fx

from ..errors import TypeCheckError
from ..ir.graph import B, Block, Program, Role, info, node_inputs
from ..ir.ops import COLLECTIVES, convert, is_collective
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Shard, conversion
from . import Axis, has_rule, rule_of, strategies


def verify(program: Program, axis: Axis, converted: bool) -> None:
    """Check a typed program; raises TypeCheckError naming block, node, user's line and placements."""
    for block in program.blocks.values():
        if not program.count(block.name):
            continue
        for node in block.placeholders():
            _check_placeholder(program, block, node)
        for node in block.ops:
            _check_node(block, node, axis, converted)
        if converted:
            _check_results(program, block)


def _check_placeholder(program: Program, block: Block, node: fx.Node) -> None:
    """Inputs and buffers are whole; a parameter is whole or a shard, and the same under each of its names."""
    facts = info(node)
    if facts.strategy is None:
        raise _error(block, node, "has no placement")
    if facts.role in (Role.INPUT, Role.BUFFER) and facts.placement != REPLICATE:
        raise _error(block, node, f"an {facts.role.value} is whole on every rank, not {facts.placement}")
    if facts.role is not Role.PARAMETER:
        return
    if facts.placement == PARTIAL:
        raise _error(block, node, "a parameter is whole or a shard, not Partial")
    name = program.call_of(block.name).full_name(facts.ref)
    if name in program.tied:
        for other_block, other in _uses(program, program.tied[name]):
            if info(other).placement != facts.placement:
                raise _error(
                    block,
                    node,
                    f"is tied to {other_block}.{other.name}, {info(other).placement}, but is {facts.placement}",
                )


def _uses(program: Program, name: str) -> Iterator[tuple[str, fx.Node]]:
    """(block, placeholder) of each use of a parameter."""
    for call in program.calls:
        for node in program.blocks[call.block].placeholders(Role.PARAMETER):
            if call.full_name(info(node).ref) == name:
                yield call.block, node


def _check_node(block: Block, node: fx.Node, axis: Axis, converted: bool) -> None:
    facts = info(node)
    if facts.strategy is None:
        raise _error(block, node, "has no placement")
    operands = tuple(info(n).placement for n in node_inputs(node))
    if facts.role is Role.CONVERT:
        _check_conversion(block, node, operands[0], axis)
        return
    if axis.size > 1 and facts.strategy not in strategies(node, rule_of(node), axis):
        raise _error(block, node, f"{facts.strategy} is no strategy of its rule on {axis.name}={axis.size}")
    if converted and operands != facts.strategy.inputs:
        given = ", ".join(map(str, operands))
        raise _error(block, node, f"wants ({facts.strategy}) but reads ({given}): a conversion is missing")


def _check_conversion(block: Block, node: fx.Node, source: Placement, axis: Axis) -> None:
    strategy = info(node).strategy
    assert strategy is not None
    found = conversion(source, strategy.output)
    if strategy.inputs != (source,) or found is None:
        raise _error(block, node, f"converts {strategy} but reads {source}")
    for placement in (source, strategy.output):
        size = info(node).shape[placement.dim] if placement.is_shard else 0
        if size and not axis.even(size):
            raise _error(
                block, node, f"converts along {placement}, where {size} is not divisible by {axis.name}={axis.size}"
            )
    if is_collective(node.target):
        dims = tuple(p.dim for p in (source, strategy.output) if p.is_shard)
        if node.target is not COLLECTIVES[found.function] or node.args[1:] != dims:
            raise _error(block, node, f"{strategy} is {found.function}{dims}, not {node.target.__name__}")  # type: ignore[union-attr]
    elif node.target is not convert:
        raise _error(block, node, "is no conversion")


def _check_results(program: Program, block: Block) -> None:
    for call in program.calls:
        if call.block != block.name:
            continue
        if not call.outputs:
            for result in block.results:
                if info(result).placement != REPLICATE:
                    raise _error(block, result, f"the loss leaves as {info(result).placement}, not whole")
            continue
        for value, result in zip(call.outputs, block.results, strict=True):
            for reader in (c for c in program.calls if value in c.inputs):
                place = str(reader.inputs.index(value))
                for node in program.blocks[reader.block].placeholders(Role.VALUE):
                    if info(node).ref == place and info(node).placement != info(result).placement:
                        raise _error(
                            block,
                            result,
                            f"leaves as {info(result).placement} but {reader.block} takes {info(node).placement}",
                        )


def _error(block: Block, node: fx.Node, problem: str) -> TypeCheckError:
    ops = list(block.graph.nodes)
    at = ops.index(node)
    around = "\n".join(f"    {'>' if n is node else ' '} {_line(n)}" for n in ops[max(0, at - 3) : at + 4])
    facts = info(node)
    where = f" ({facts.module or block.name}, {facts.source})" if facts.source else ""
    return TypeCheckError(f"{block.name}.{node.name}{where}: {problem}\n{around}")


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return "return"
    strategy = info(node).strategy
    operands = ", ".join(n.name for n in node_inputs(node))
    return f"{node.name}({operands})  {strategy if strategy else ''}"


def check_data_axis(program: Program) -> None:
    """Type the program on a data axis (micro-batches, dp), where the batch is Shard(0) and no op may communicate.

    Parameters enter as Replicate, grad Partial; the loss must leave as Partial. Raises TypeCheckError naming
    the first op that couples samples, where the loss over parts of a batch would not add up to the whole.
    """
    axis = Axis("data", 2, sequence=False, batch=True, model=False)
    values: dict[str, Placement] = {}
    for call in program.calls:
        block = program.blocks[call.block]
        placed: dict[fx.Node, Placement] = {}
        for node in block.nodes:
            if node.op == "placeholder":
                placed[node] = _data_placement(node, [values[name] for name in call.inputs])
            else:
                placed[node] = _infer(block, node, [placed[n] for n in node_inputs(node)], axis)
        for name, result in zip(call.outputs, block.results, strict=False):
            values[name] = placed[result]
        if not call.outputs and block.results and placed[block.results[0]] != PARTIAL:
            raise _error(
                block,
                block.results[0],
                f"the loss of a part of the batch is {placed[block.results[0]]}, not a summand of the whole loss: "
                "it does not depend on the batch, or is not a mean over samples",
            )


def _data_placement(node: fx.Node, passed: list[Placement]) -> Placement:
    facts = info(node)
    if facts.role is Role.VALUE:
        return passed[int(facts.ref)]
    if facts.role is Role.INPUT:
        return Shard(0) if facts.shape and facts.shape[0] == B else REPLICATE
    return GRAD_PARTIAL if facts.role is Role.PARAMETER and facts.requires_grad else REPLICATE


def _infer(block: Block, node: fx.Node, operands: list[Placement], axis: Axis) -> Placement:
    """The result's placement; values without a batch stay whole, those with it must keep it sharded."""
    options = strategies(node, rule_of(node), axis) if has_rule(node) else []
    # Without communication a whole value that is the same everywhere may feed work on parts of the batch.
    exact = [o for o in options if all(_feeds(p, w) for p, w in zip(operands, o.inputs, strict=True))]
    if _reads_batch_size(node):
        raise _error(block, node, "reads the batch size, which differs on each part of a batch: take a mean instead")
    needs_batch = B in set().union(*(size.free_symbols for size in info(node).shape))
    for option in sorted(exact, key=lambda o: o.output.is_shard, reverse=True):
        if not needs_batch or option.output.is_shard:
            return option.output
    if not has_rule(node) and all(p.whole for p in operands) and not needs_batch:
        return REPLICATE
    shown = ", ".join(map(str, operands))
    if not has_rule(node):
        raise _error(block, node, f"has no sharding rule ({node.target}), so it cannot be run on parts of a batch")
    raise _error(
        block,
        node,
        f"couples samples of a batch ({node.target}, operands on the data axis: {shown}): data parallelism and "
        "micro-batches would change what it computes; remove it or make it per sample",
    )


def _reads_batch_size(node: fx.Node) -> bool:
    """Whether the size of the batch is an operand, not a size of the result."""
    if has_rule(node) and rule_of(node).kind == "view":
        return False
    sizes: list[Any] = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, sympy.Expr)]
    return any(B in size.free_symbols for size in sizes)


def _feeds(given: Placement, wanted: Placement) -> bool:
    return given == wanted or (given == REPLICATE and wanted == GRAD_PARTIAL)
