"""Conversions over cp, as ops on tp: linear maps; the sequence stays whole where ranks of cp exchange parts of it.

A dim of heads, though, that cp cuts or joins must be a shard on tp: each rank of tp then deals out its own heads
over cp. So all values cut over cp by heads have them in one order, whichever way they came there.
"""

from __future__ import annotations

from torch import fx

from ..ir.graph import S, arguments, info
from ..ir.ops import COLLECTIVES, convert
from ..placement import Placement, Shard, Strategy
from .factor import Dims, Rule, RuleMaker


def _conversion(node: fx.Node) -> Rule:
    shape = info(node).shape
    dims: Dims = tuple(f"d{i}" for i in range(len(shape)))
    moved = _moved_dims(node)
    heads = [dim for dim in moved if S not in shape[dim].free_symbols]
    return Rule(
        (dims,),
        dims,
        whole=frozenset(f"d{dim}" for dim in moved),
        linear=(frozenset({0}),),
        only=tuple(Strategy((Shard(dim),), Shard(dim)) for dim in heads),
        kind="view",
    )


def _moved_dims(node: fx.Node) -> tuple[int, ...]:
    """The dims along which a conversion, lowered or not, cuts or joins."""
    if node.target is convert:
        ends = (Placement.parse(str(text)) for text in node.args[1:3])
        return tuple(p.dim for p in ends if p.is_shard)
    return tuple(int(dim) for dim in arguments(node)[1:])


RULES: dict[object, RuleMaker] = {convert: _conversion, **dict.fromkeys(COLLECTIVES.values(), _conversion)}
