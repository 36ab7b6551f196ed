"""Modules that are kept whole: replicated on tp; on the data axis one slice of the batch at a time."""

import operator

from torch import fx

from ..ir.custom import OPAQUE
from ..ir.graph import B, Shape, arguments, info, node_inputs
from .factor import Dims, Rule, RuleMaker


def _opaque(node: fx.Node) -> Rule:
    """Whole in, whole out. The batch, outermost of dim 0, where samples do not depend on each other."""
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


RULES: dict[object, RuleMaker] = {OPAQUE: _opaque, operator.getitem: _result}
