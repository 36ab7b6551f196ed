"""Masks proven to be causal, with and without a window; and near misses, which must not be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.ir.graph import B, Block, Program, Role, S, info
from autopar.ir.masks import CausalMask, causal_mask, hides_nothing
from tests.passes.programs import read

# Rows i and keys j as Hugging Face makes them, with a batch and a head of size 1.
POSITIONS = """
block model:
  ids: [b, s] int = input ids
  p: [s] int = arange(s)
  q: [1, s] int = unsqueeze(p, 0)
  i: [1, 1, s, 1] int = reshape(q, [1, 1, s, 1])
  k: [1, 1, s] int = unsqueeze(q, 1)
  j: [1, 1, 1, s] int = unsqueeze(k, 2)
"""
CAUSAL = "le: [1, 1, s, s] bool = le.Tensor(j, i)\n"
NEAR = "far: [1, 1, s, 1] int = sub(i, {w})\n  near: [1, 1, s, s] bool = gt.Tensor(j, far)\n"
BOTH = "m: [1, 1, s, s] bool = __and__.Tensor(le, near)\n"


def program(lines: str, result: str = "m") -> Program:
    text = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return read(f"{POSITIONS.strip()}\n{text}\n  return {result}")


def proven(given: Program) -> CausalMask | None:
    (mask,) = given.blocks["model"].results
    return causal_mask(mask, S, S)


def run(block: Block, length: int, samples: int = 2) -> Tensor:
    """The mask at one length, by torch; inputs are drawn."""
    values: dict[fx.Node, Any] = {}

    def number(x: Any) -> Any:
        return int(x.subs({S: length, B: samples})) if hasattr(x, "subs") else x

    for node in block.nodes:
        if node.op == "placeholder":
            assert info(node).role is Role.INPUT
            shape = [number(n) for n in info(node).shape]
            values[node] = torch.randint(2, shape, generator=torch.Generator().manual_seed(length))
            continue
        args = fx.node.map_aggregate(node.args, lambda x: values[x] if isinstance(x, fx.Node) else number(x))
        values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
    result: Tensor = values[block.results[0]]
    return result


def seen(length: int, window: int | None) -> Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return (j <= i) & (j > i - (window or length))


TRUE = {
    "Hugging Face's causal": ("m: [1, 1, s, s] bool = le.Tensor(j, i)", None),
    "Hugging Face's window": (
        NEAR.format(w=5) + CAUSAL + "one: [] bool = ones([], dtype=torch.bool)\n"
        "some: [1, 1, s, s] bool = __and__.Tensor(one, near)\n"
        "every: [1, 1, s, s] bool = __and__.Tensor(some, le)\n"
        "m: [b, 1, s, s] bool = expand(every, [b, 1, s, s])",
        5,
    ),
    "a window of one": (NEAR.format(w=1) + CAUSAL + BOTH, 1),
    "by distance": (
        "d: [1, 1, s, s] int = sub(i, j)\nnear: [1, 1, s, s] bool = lt.Scalar(d, 7)\n"
        "le: [1, 1, s, s] bool = ge.Scalar(d, 0)\n" + BOTH,
        7,
    ),
    "the narrower of two": (
        NEAR.format(w=9) + CAUSAL + "both: [1, 1, s, s] bool = __and__.Tensor(le, near)\n"
        "d: [1, 1, s, s] int = sub(i, j)\nless: [1, 1, s, s] bool = lt.Scalar(d, 4)\n"
        "m: [1, 1, s, s] bool = logical_and(both, less)",
        4,
    ),
    "triangles": (
        "one: [s, s] bool = ones([s, s], dtype=torch.bool)\nlow: [s, s] bool = tril(one)\n"
        "m: [s, s] bool = triu(low, -3)",
        4,
    ),
    "what a triangle leaves out": (
        "one: [s, s] bool = ones([s, s], dtype=torch.bool)\nup: [s, s] bool = triu(one, 1)\n"
        "m: [s, s] bool = logical_not(up)",
        None,
    ),
    "read the other way round": (
        "a: [1, s] int = unsqueeze(p, 0)\nc: [s, 1] int = unsqueeze(p, 1)\nu: [s, s] bool = le.Tensor(c, a)\n"
        "m: [s, s] bool = transpose(u, 0, 1)",
        None,
    ),
    "scaled and shifted": (
        "x: [1, 1, s, 1] int = mul.Tensor(i, 2)\ny: [1, 1, 1, s] int = mul.Tensor(j, 2)\n"
        "z: [1, 1, 1, s] int = sub(y, 1)\nm: [1, 1, s, s] bool = le.Tensor(z, x)",
        None,
    ),
    "with what always holds": (
        CAUSAL + "rows: [1, 1, s, 1] bool = ge.Scalar(i, 0)\nm: [1, 1, s, s] bool = __and__.Tensor(le, rows)",
        None,
    ),
}
FALSE = {
    "one key ahead": "k1: [1, 1, s, 1] int = add(i, 1)\nm: [1, 1, s, s] bool = le.Tensor(j, k1)",
    "without the row's own": "m: [1, 1, s, s] bool = lt.Tensor(j, i)",
    "a window without the row's own": NEAR.format(w=0) + CAUSAL + BOTH,
    "the future": "m: [1, 1, s, s] bool = ge.Tensor(j, i)",
    "everything": "m: [s, s] bool = ones([s, s], dtype=torch.bool)",
    "nothing": CAUSAL + "no: [] bool = zeros([], dtype=torch.bool)\nm: [1, 1, s, s] bool = __and__.Tensor(le, no)",
    "a window to both sides": (
        "d: [1, 1, s, s] int = sub(i, j)\na: [1, 1, s, s] int = abs(d)\nm: [1, 1, s, s] bool = le.Scalar(a, 4)"
    ),
    "only the near": NEAR.format(w=5).replace("near:", "m:"),
    "either": NEAR.format(w=5) + CAUSAL + "m: [1, 1, s, s] bool = __or__.Tensor(le, near)",
    "all but a window": NEAR.format(w=5)
    + CAUSAL
    + "far_: [1, 1, s, s] bool = logical_not(near)\nm: [1, 1, s, s] bool = __and__.Tensor(le, far_)",
    "not both": NEAR.format(w=5) + CAUSAL + BOTH.replace("m:", "n:") + "m: [1, 1, s, s] bool = logical_not(n)",
    "by half the row": "x: [1, 1, 1, s] int = mul.Tensor(j, 2)\nm: [1, 1, s, s] bool = le.Tensor(x, i)",
    "a window that grows with the row": (
        "x: [1, 1, s, 1] int = mul.Tensor(j, 2)\n".replace("j", "i").replace("x:", "t:")
        + CAUSAL
        + "y: [1, 1, 1, s] int = mul.Tensor(j, 3)\nnear: [1, 1, s, s] bool = ge.Tensor(y, t)\n"
        + BOTH
    ),
    "chunks": (
        CAUSAL + "a: [1, 1, s, 1] int = floor_divide(i, 4)\nc: [1, 1, 1, s] int = floor_divide(j, 4)\n"
        "near: [1, 1, s, s] bool = eq.Tensor(a, c)\n" + BOTH
    ),
    "padding": (
        "real: [b, s] bool = ne.Scalar(ids, 0)\nkeys: [b, 1, 1, s] bool = reshape(real, [b, 1, 1, s])\n"
        + CAUSAL
        + "m: [b, 1, s, s] bool = __and__.Tensor(le, keys)"
    ),
    "packed sequences": (
        "a: [b, 1, s, 1] int = reshape(ids, [b, 1, s, 1])\nc: [b, 1, 1, s] int = reshape(ids, [b, 1, 1, s])\n"
        "near: [b, 1, s, s] bool = eq.Tensor(a, c)\n" + CAUSAL + BOTH.replace("[1,", "[b,")
    ),
    "other rows in each sample": (
        "n: [b] int = arange(b)\nx: [b, 1, 1, 1] int = reshape(n, [b, 1, 1, 1])\n"
        "y: [b, 1, s, 1] int = add(i, x)\nm: [b, 1, s, s] bool = le.Tensor(j, y)"
    ),
    "one row for all": (
        "z: [1, 1, 1, 1] int = slice(i, 2, 0, 1)\nf: [1, 1, 1, s] bool = le.Tensor(j, z)\n"
        "m: [1, 1, s, s] bool = expand(f, [1, 1, s, s])"
    ),
    "keys that begin later": (
        "w: [s + 3] int = arange(s + 3)\nx: [s] int = slice(w, 0, 3, 9223372036854775807)\n"
        "y: [1, s] int = unsqueeze(x, 0)\nz: [s, 1] int = unsqueeze(p, 1)\nm: [s, s] bool = le.Tensor(y, z)"
    ),
    "backwards": (
        "x: [s] int = sub(s, p)\ny: [s, 1] int = unsqueeze(x, 1)\nz: [1, s] int = unsqueeze(p, 0)\n"
        "m: [s, s] bool = le.Tensor(z, y)"
    ).replace("sub(s, p)", "neg(p)"),
}  # fmt: skip


NO_MASK = {
    "everything": FALSE["everything"],
    "rows from the first on": "r: [1, 1, s, 1] bool = ge.Scalar(i, 0)\nm: [b, 1, s, s] bool = expand(r, [b, 1, s, s])",
    "keys up to the last": (
        "last: [1, 1, 1, s] int = sub(j, s)\nk0: [1, 1, 1, s] bool = lt.Scalar(last, 0)\n"
        "one: [] bool = ones([], dtype=torch.bool)\nm: [1, 1, 1, s] bool = __and__.Tensor(one, k0)"
    ),
    "a window of all": "x: [1, 1, s, 1] int = sub(i, s)\nm: [1, 1, s, s] bool = gt.Tensor(j, x)",
}
SOME_MASK = {
    "all but the first row": "m: [1, 1, s, 1] bool = gt.Scalar(i, 0)",
    "all but the last key": "last: [1, 1, 1, s] int = sub(j, s)\nm: [1, 1, 1, s] bool = lt.Scalar(last, -1)",
    "all but one pair": "x: [1, 1, s, 1] int = sub(i, s)\ny: [1, 1, s, 1] int = add(x, 1)\n"
    "m: [1, 1, s, s] bool = gt.Tensor(j, y)",
    **{name: lines for name, (lines, _) in TRUE.items()},
    **{name: lines for name, lines in FALSE.items() if name not in ("everything", "either")},
}


@pytest.mark.parametrize("name", NO_MASK)
def test_a_mask_that_hides_nothing_is_proven(name: str) -> None:
    given = program(NO_MASK[name])
    assert hides_nothing(given.blocks["model"].results[0], S, S)
    assert all(run(given.blocks["model"], length).all() for length in (1, 2, 6, 13)), "what the test says is so"


@pytest.mark.parametrize("name", SOME_MASK)
def test_a_mask_that_hides_something_is_none_that_hides_nothing(name: str) -> None:
    given = program(SOME_MASK[name])
    assert not hides_nothing(given.blocks["model"].results[0], S, S)
    assert not run(given.blocks["model"], 13).all(), "what the test says is so"


@pytest.mark.parametrize("name", TRUE)
def test_a_causal_mask_is_proven(name: str) -> None:
    lines, window = TRUE[name]
    given = program(lines)
    assert proven(given) == CausalMask(window)
    for length in (1, 2, 6, 13):
        assert torch.equal(run(given.blocks["model"], length).expand(2, 1, -1, -1)[0, 0], seen(length, window)), (
            "what the test says of the mask is so"
        )


@pytest.mark.parametrize("name", FALSE)
def test_a_near_miss_is_not(name: str) -> None:
    given = program(FALSE[name])
    assert proven(given) is None
    mask = run(given.blocks["model"], 13).expand(2, 1, -1, -1)
    every = [seen(13, window) for window in (None, *range(1, 13))]
    assert not any(torch.equal(mask, one.expand_as(mask)) for one in every), "what the test calls a miss is one"


def test_rows_and_keys_of_other_lengths_are_not() -> None:
    (mask,) = program(TRUE["Hugging Face's causal"][0]).blocks["model"].results
    assert causal_mask(mask, S, S) is not None
    assert causal_mask(mask, S, 2 * S) is None and causal_mask(mask, 2 * S, S) is None


def random_mask(draw: random.Random, offsets: Sequence[str] = ("0", "1", "2", "3")) -> tuple[str, str]:
    """Comparisons of positions with random offsets, joined at random: the lines, and the name of the result."""
    lines, conditions = [], []
    for n in range(draw.randint(1, 3)):
        a, c = draw.sample(["i", "j"], 2)
        size = {"i": "[1, 1, s, 1]", "j": "[1, 1, 1, s]"}[c]
        lines.append(f"x{n}: {size} int = {draw.choice(['add', 'sub'])}({c}, {draw.choice(offsets)})")
        lines.append(f"c{n}: [1, 1, s, s] bool = {draw.choice(['le', 'lt', 'ge', 'gt', 'eq'])}.Tensor({a}, x{n})")
        conditions.append(f"c{n}")
        if draw.random() < 0.3:
            lines.append(f"n{n}: [1, 1, s, s] bool = logical_not(c{n})")
            conditions[-1] = f"n{n}"
    name, *others = conditions
    for n, other in enumerate(others):
        op = draw.choice(["__and__.Tensor", "__and__.Tensor", "__or__.Tensor"])
        lines.append(f"m{n}: [1, 1, s, s] bool = {op}({name}, {other})")
        name = f"m{n}"
    return "\n".join(lines), name


def test_what_is_proven_of_random_masks_is_so() -> None:
    draw, found = random.Random(0), []
    for _ in range(80):
        given = program(*random_mask(draw))
        if (mask := proven(given)) is not None:
            found.append(mask.window)
            for length in (1, 3, 9):
                assert torch.equal(run(given.blocks["model"], length)[0, 0], seen(length, mask.window)), given
    assert found.count(None) >= 2 and len(found) - found.count(None) >= 3, "few of them are causal masks"


def test_what_hides_nothing_of_random_masks_does_not() -> None:
    draw, found = random.Random(0), 0
    for _ in range(240):
        given = program(*random_mask(draw, ["0", "1", "s", "s - 1", "s - 2"]))
        if hides_nothing(given.blocks["model"].results[0], S, S):
            assert all(run(given.blocks["model"], length).all() for length in (1, 2, 3, 9)), given
            found += 1
    assert found >= 8, "few of them hide nothing"
