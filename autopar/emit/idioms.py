"""Groups of ops that a person would write as one call, made one node of the graph before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..ir.graph import Block, Program, arguments, info, node_inputs, set_info
from ..placement import Strategy
from .text import quoted

aten = torch.ops.aten

_ROTATIONS = {
    "halves": """    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)""",
    "pairs": "    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)",
}


def rotate(x: Any, cos: Any, sin: Any, function: str) -> Any:
    """Rotary position embedding, by the module-level function of that name."""
    raise AssertionError("a graph node, not to be called")


def region_call(*values: Any, method: str, name: str, always: bool, random: bool) -> Any:
    """A region of a layer that backward computes again, by its method: `random` where it draws dropout masks."""
    raise AssertionError("a graph node, not to be called")


def checkpointed(called: str, *arguments: str) -> str:
    """The source of a call that backward makes again."""
    return f"checkpoint({', '.join([called, *arguments])}, use_reentrant=False)"


def call_of_region(node: fx.Node, values: Sequence[str]) -> str:
    """The source of a region: where only some of a class's layers compute it again, the layer knows whether it does."""
    method = f"self.{node.kwargs['method']}"
    if node.kwargs["always"]:
        return checkpointed(method, *values)
    return f"self._recomputed({', '.join([quoted(str(node.kwargs['name'])), method, *values])})"


@dataclass
class Idioms:
    """`program` with its idioms as single nodes; `functions`: name → source of what they call.

    renamed: node of an idiom → the op whose place it has, by name.
    """

    program: Program
    functions: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.program = self.program.copy_blocks()
        for block in self.program.blocks.values():
            for node in block.ops:
                if node.target is aten.add.Tensor and (rotation := _rotation(node)):
                    self._replace(block, node, rotation)
            block.graph.eliminate_dead_code()

    def _replace(self, block: Block, node: fx.Node, rotation: _Rotation) -> None:
        operands = (rotation.x, rotation.cos, rotation.sin)
        with block.graph.inserting_before(node):
            call = block.graph.call_function(rotate, operands, {"function": self._name(rotation)})
        placements = tuple(info(operand).placement for operand in operands)
        set_info(call, info(node).typed(Strategy(placements, info(node).placement)))
        self.renamed[call.name] = node.name
        node.replace_all_uses_with(call)

    def _name(self, rotation: _Rotation) -> str:
        """The name of the function that does this rotation, written where it is new."""
        for number in range(1, 10):
            name = "rotate" if number == 1 else f"rotate_{number}"
            source = rotation.source(name)
            if self.functions.setdefault(name, source) == source:
                return name
        raise AssertionError("there are few ways to write a rotation")


@dataclass(frozen=True)
class _Rotation:
    """x · cos + rotated(x) · sin. `dim`: where cos and sin get a dim of 1 first, or None."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    kind: str
    dim: int | None

    def source(self, name: str) -> str:
        wider = "" if self.dim is None else f"    cos, sin = cos.unsqueeze({self.dim}), sin.unsqueeze({self.dim})\n"
        return (
            f"def {name}(x, cos, sin):\n"
            f'    """Rotary position embedding: each pair of the last dim is a point, rotated by its angle."""\n'
            f"{wider}{_ROTATIONS[self.kind]}\n"
            f"    return x * cos + rotated * sin"
        )


def _rotation(node: fx.Node) -> _Rotation | None:
    """add(mul(x, cos), mul(rotated(x), sin)), in any order of operands."""
    products = node_inputs(node)
    factors = [node_inputs(product) for product in products]
    if node.kwargs or [len(pair) for pair in factors] != [2, 2]:
        return None
    if any(product.target is not aten.mul.Tensor or len(product.users) > 1 for product in products):
        return None
    for straight, crossed in (factors, factors[::-1]):
        for rotated, sin in (crossed, crossed[::-1]):
            source = _rotated(rotated)
            if source and len(rotated.users) == 1 and source[0] in straight:
                cos = straight[1 - straight.index(source[0])]
                return _wider(_Rotation(source[0], cos, sin, source[1], None))
    return None


def _wider(rotation: _Rotation) -> _Rotation:
    """The rotation with the unsqueeze of cos and sin inside, where both have the same."""
    both = [rotation.cos, rotation.sin]
    if any(n.target is not aten.unsqueeze.default for n in both) or both[0].args[1] != both[1].args[1]:
        return rotation
    dim: Any = both[0].args[1]
    cos, sin = (node_inputs(n)[0] for n in both)
    return replace(rotation, cos=cos, sin=sin, dim=int(dim))


def _rotated(node: fx.Node) -> tuple[fx.Node, str] | None:
    """x and the kind of a rotation by a right angle: (-second half, first half), or so in neighbouring pairs."""
    parts, kind = _joined(node)
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return None
    second, first = node_inputs(parts[0])[0], parts[1]
    if {first.target, second.target} != {aten.slice.Tensor} or first.args[0] is not second.args[0]:
        return None
    x = node_inputs(first)[0]
    last, width, placement = len(info(x).shape) - 1, info(x).shape[-1], info(x).placement
    if not width.is_number or int(width) % 2 or placement.is_shard and placement.dim == last:
        return None
    end, half = int(width), int(width) // 2
    wanted = [(0, half, 1), (half, end, 1)] if kind == "halves" else [(0, end, 2), (1, end, 2)]
    return (x, kind) if [_range(part, last, end) for part in (first, second)] == wanted else None


def _joined(node: fx.Node) -> tuple[list[fx.Node], str]:
    """The values that an op joins along the last dim, and how: halves by cat, or pairs by a stack that is flattened."""
    last = len(info(node).shape) - 1
    if node.target is aten.cat.default:
        return (node_inputs(node), "halves") if [*arguments(node)[1:], 0][0] in (-1, last) else ([], "")
    stack = node_inputs(node)[0] if node.target is aten.reshape.default else node
    if stack.target is not aten.stack.default or len(stack.users) > 1 or stack.args[1:] not in ((-1,), (last + 1,)):
        return [], ""
    parts = node_inputs(stack)
    return (parts, "pairs") if info(node).shape[:-1] == info(parts[0]).shape[:-1] else ([], "")


def _range(node: fx.Node, last: int, width: int) -> tuple[int, int, int] | None:
    """Start, end and step of a slice of the last dim."""
    dim, start, end, step = [*arguments(node)[1:], *[None] * 4][:4]
    if (dim or 0) not in (-1, last):
        return None
    return int(start or 0), width if end is None else min(int(end), width), int(step or 1)
