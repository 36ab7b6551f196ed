"""Ops that are not torch's: conversions over cp, and modules that are kept whole."""

from __future__ import annotations

import operator

from torch import fx

from ..ir.custom import OPAQUE
from ..ir.graph import B, S, Shape, arguments, info, node_inputs
from ..ir.ops import COLLECTIVES, convert
from ..placement import Placement, Shard, Strategy
from .factor import Dims, Rule, RuleMaker


def _conversion(node: fx.Node) -> Rule:
    """A conversion over cp, on tp: a linear map; the sequence stays whole where ranks of cp exchange parts of it.

    A dim of heads, though, that cp cuts or joins must be a shard on tp: each rank of tp then deals out its own heads
    over cp. So all values cut over cp by heads have them in one order, whichever way they came there.
    """
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


def _opaque(node: fx.Node) -> Rule:
    """A module that is kept whole: replicated on tp; on dp a slice of the batch, outermost of dim 0, where samples do
    not depend on each other."""
    _, _, given, samples, _ = arguments(node)
    inputs = [info(n).shape for n in node_inputs(node)]
    taken = tuple(_dims(shape, samples) for shape in inputs[:given])
    own = tuple((None,) * len(shape) for shape in inputs[given:])
    saved = tuple(range(given))
    return Rule((*taken, *own), _dims(info(node).shape, samples), kind="opaque", saves=saved, exact=True)


def _result(node: fx.Node) -> Rule:
    """One of the results of an opaque module: it lies as the first does."""
    (module,) = node_inputs(node)
    samples = module.target is OPAQUE and bool(arguments(module)[3])
    return Rule((_dims(info(module).shape, samples),), _dims(info(node).shape, samples), kind="view", exact=True)


def _dims(shape: Shape, samples: bool) -> Dims:
    batch = samples and bool(shape) and B in shape[0].free_symbols
    return tuple("n" if batch and i == 0 else None for i in range(len(shape)))


RULES: dict[object, RuleMaker] = {
    convert: _conversion,
    **dict.fromkeys(COLLECTIVES.values(), _conversion),
    OPAQUE: _opaque,
    operator.getitem: _result,
}
