"""Parameters and samples that are drawn to see what pads change: some put poles or large numbers at pads."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

from ..ir.graph import Program, Role, arguments, info
from ..ir.reads import read_names
from .samples import Input, inputs_of, random_batch
from .sizes import read_size

aten = torch.ops.aten

_SAMPLES = 3
_TABLES = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)
_ALL, _HOLES, _ENDS, _STARTS = "all tokens", "holes", "ends", "starts"  # what a mask hides


@dataclass(frozen=True)
class Draw:
    """How samples and parameters are drawn. at_pads: the factor of those rows of tables that pads alone read."""

    seed: int
    mask: str
    at_pads: float = 1


DRAWS = (
    Draw(0, _ALL), Draw(1, _HOLES), Draw(2, _ENDS), Draw(3, _ALL, 0), Draw(4, _ENDS, 0), Draw(5, _ALL, 10),
    Draw(6, _HOLES, 10), Draw(7, _STARTS),
)  # fmt: skip
FEW = (DRAWS[1], DRAWS[4], DRAWS[5], DRAWS[7])  # of a model so large that each takes a second


def _read(program: Program) -> list[str]:
    """The parameters that the program reads, by their first names."""
    read = {program.tied.get(name, name) for name in read_names(program, Role.PARAMETER)}
    return [name for name in program.parameters if name in read]


def elements(program: Program) -> int:
    """Of all parameters that the program reads."""
    return int(sum(sympy.Mul(*program.parameters[name].shape) for name in _read(program)))


def parameters(program: Program, draw: Draw, tokens: int) -> dict[str, Tensor]:
    """Matrices that keep the size of what they multiply, vectors around 1; rows that pads alone read × at_pads."""
    generator = torch.Generator().manual_seed(draw.seed)
    tables, values = _tables(program), {}
    for name in _read(program):
        shape = [int(n) for n in program.parameters[name].shape]
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.3 * x
        if name in tables:
            x[0], x[tokens:] = x[0] * draw.at_pads, x[tokens:] * draw.at_pads
        values[name] = x * 0 if not draw.at_pads and name.endswith("bias") else x
    return values


def _tables(program: Program) -> set[str]:
    """Parameters of which rows are taken."""
    nodes = [
        (call, arguments(node)[0])
        for call in program.calls
        for node in program.blocks[call.block].ops
        if node.target in _TABLES
    ]
    names = {call.full_name(info(n).ref) for call, n in nodes if info(n).role is Role.PARAMETER}
    return {program.tied.get(name, name) for name in names}


def batched(program: Program) -> set[str]:
    """The inputs that are cut into samples."""
    return {name for name, facts in inputs_of(program).items() if facts.shape and facts.shape[0] == "b"}


def batch(program: Program, draw: Draw, tokens: int) -> dict[str, Tensor]:
    """Random samples; where pads have rows of their own, no id is among these."""
    inputs, names = inputs_of(program), batched(program)
    parts = [random_batch(inputs, 1, tokens, _SAMPLES * draw.seed + i) for i in range(_SAMPLES)]
    samples = {n: torch.cat([part[n] for part in parts]) if n in names else parts[0][n] for n in inputs}
    generator = torch.Generator().manual_seed(draw.seed)
    for name, facts in inputs.items():
        x = samples[name]
        if x.is_floating_point() or "s" not in facts.shape:
            continue
        if facts.values == ("2",) and facts.ignored is None:
            samples[name] = _mask(x, draw, generator)
        elif draw.at_pads != 1 and (ids := _ids(facts, tokens)) > 1:
            samples[name] = 1 + x % (ids - 1)
    return samples


def _ids(facts: Input, tokens: int) -> int:
    """How many ids there are without those of pads; 0 of targets."""
    return 0 if facts.ignored is not None else min(tokens, *(read_size(n, {"b": 1, "s": tokens}) for n in facts.values))


def _mask(x: Tensor, draw: Draw, generator: torch.Generator) -> Tensor:
    """0 and 1 for each token; each sample has a token that is there.

    Where the starts are hidden (padding on the left), the first rows of causal attention see no key. A mask of finite
    numbers spreads such a row over all keys, pads too, and the last of these rows predicts the first real token.
    """
    place = torch.arange(x.shape[-1])
    if draw.mask == _ALL:
        return torch.ones_like(x)
    if draw.mask == _HOLES:
        kept = (torch.rand(x.shape, generator=generator) < 0.6) | (place == 0)
    else:
        lengths = torch.linspace(1, x.shape[-1], x.shape[0]).long().view(-1, *[1] * (x.dim() - 1))
        kept = place < lengths if draw.mask == _ENDS else place >= x.shape[-1] - lengths
    return kept.expand(x.shape).to(x.dtype)
