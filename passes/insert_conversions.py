"""Insert `convert` wherever a value's placement is not the one its reader wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.graph import Block, Program, Role, arguments, info, node_inputs, set_info
from autopar.ir.ops import convert
from autopar.placement import Placement, Shard, Strategy
from autopar.plan.plan import Plan
from autopar.rules import AXES
from autopar.rules.verify import LEVELS, Level
from autopar.rules.vision import Share

aten = torch.ops.aten

# Ops with a size argument: its position among the arguments.
SIZED: dict[Any, int] = {
    aten.reshape.default: 1, aten.expand.default: 1, aten.zeros.default: 0, aten.ones.default: 0,
    aten.full.default: 0, aten.empty.memory_format: 0, aten.new_ones.default: 1, aten.new_zeros.default: 1,
    aten.new_full.default: 1, aten.new_empty.default: 1,
}  # fmt: skip

# Ops of channels in groups: the argument that is their number.
_GROUPED = {
    **dict.fromkeys((aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding,
                     aten.conv3d.default, aten.conv_transpose1d.default, aten.conv_transpose2d.input), "groups"),
    aten.group_norm.default: "num_groups",
}  # fmt: skip


@dataclass(frozen=True)
class InsertConversions:
    """One `convert` for each (value, wanted placement), shared by its readers; size arguments made local.

    Requires: nodes typed on the axis. Ensures: every op reads operands in the placements of its strategy, and every
    result of a block has the placement that its readers in other blocks expect. On dp size arguments stay: where they
    are not those of a rank as they are, `cut_batch` makes them so.

        y = linear(h, w)                 |   h_rp = convert(h, "R", "Rp", "tp")
                                         |   y = linear(h_rp, w)
        reshape(y, [b, s, 4, 16]): S(2)  |   reshape(y, [b, s, 2, 16])
    """

    name: ClassVar[str] = "insert_conversions"
    axis: str = "tp"

    @property
    def leaves(self) -> Level:
        return LEVELS[self.axis][1]

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        program = program.copy_blocks()
        for block in program.blocks.values():
            if not program.count(block.name) or plan.mesh.size(self.axis) == 1:
                continue
            made: dict[tuple[fx.Node, Placement], fx.Node] = {}
            for node in block.ops:
                strategy = info(node).strategies[self.axis]
                map_operands(node, strategy.inputs, partial(self._as, made=made))
                if node.target in SIZED and self.axis != "dp":
                    localise(node, self.axis, plan.mesh.size(self.axis))
                if node.target in _GROUPED and strategy.output == strategy.inputs[0] == Shard(1):
                    _share_groups(node, _GROUPED[node.target], plan.mesh.size(self.axis))
            self._convert_results(program, block, made)
        return program

    def _convert_results(self, program: Program, block: Block, made: dict[tuple[fx.Node, Placement], fx.Node]) -> None:
        results = tuple(
            self._as(node, _expected(program, block, place, self.axis), block.output, made)
            for place, node in enumerate(block.results)
        )
        block.output.args = (results,)

    def _as(
        self,
        value: fx.Node,
        wanted: Placement,
        reader: fx.Node,
        made: dict[tuple[fx.Node, Placement], fx.Node],
    ) -> fx.Node:
        facts, lies = info(value), _placement(value, self.axis)
        if lies == wanted:
            return value
        if (value, wanted) not in made:
            with value.graph.inserting_before(reader):
                new = value.graph.call_function(convert, (value, str(lies), str(wanted), self.axis))
            facts = facts.made(role=Role.CONVERT).typed(Strategy((lies,), wanted), self.axis)
            made[value, wanted] = set_info(new, facts)
        return made[value, wanted]


def _placement(node: fx.Node, axis: str) -> Placement:
    placement = info(node).placement_on(axis)
    assert placement is not None, f"{node.name} has not been typed on {axis}"
    return placement


def map_operands(
    node: fx.Node, wanted: Sequence[Placement], read: Callable[[fx.Node, Placement, fx.Node], fx.Node]
) -> None:
    """Replace each operand by read(operand, the placement wanted of it, node)."""
    placements = iter(wanted)

    def read_next(operand: fx.Node) -> fx.Node:
        return read(operand, next(placements), node)

    node.args = _map_nodes(node.args, read_next)
    node.kwargs = {key: _map_nodes(value, read_next) for key, value in node.kwargs.items()}


def _map_nodes(argument: Any, read: Callable[[fx.Node], fx.Node]) -> Any:
    """The argument with each node replaced, in the order of `node_inputs`."""
    if isinstance(argument, fx.Node):
        return read(argument)
    if isinstance(argument, tuple):
        return tuple(_map_nodes(a, read) for a in argument)
    if isinstance(argument, list):
        return [_map_nodes(a, read) for a in argument]
    return argument


def _expected(program: Program, block: Block, place: int, axis: str) -> Placement:
    """The placement in which readers of a block's result take it; the loss as the axis has it."""
    if not program.call_of(block.name).outputs:
        return AXES[axis].loss
    value = program.call_of(block.name).outputs[place]
    for call in program.calls:
        if value in call.inputs:
            reader = program.blocks[call.block]
            index = str(call.inputs.index(value))
            return next(_placement(n, axis) for n in reader.placeholders(Role.VALUE) if info(n).ref == index)
    return _placement(block.results[place], axis)


def localise(node: fx.Node, axis: str, ranks: int) -> None:
    """Divide the size argument of an op whose result is sharded along that dim; −1 where shards differ in size."""
    facts, position, placement = info(node), SIZED[node.target], _placement(node, axis)
    if not placement.is_shard or not node_inputs(node) and position:
        return
    shape: list[Any] = list(arguments(node)[position])  # another axis may have divided another dim
    dim = placement.dim
    size = facts.shape[dim]
    even = size.free_symbols or int(size) % ranks == 0
    shape[dim] = size / ranks if even else sympy.Integer(-1)
    node.update_arg(position, shape)


def _share_groups(node: fx.Node, name: str, ranks: int) -> None:
    """Each rank runs its share of the groups."""
    target: Any = node.target
    position = [a.name for a in target._schema.arguments].index(name)
    if position < len(node.args) and arguments(node)[position] > 1:
        node.update_arg(position, Share.of(arguments(node)[position], ranks))
    elif name in node.kwargs:
        node.update_kwarg(name, Share.of(int(node.kwargs[name]), ranks))  # type: ignore[arg-type]
