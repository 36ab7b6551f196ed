"""Random chains of ops on x [b, s, 4]: of those that the check accepts, loss and gradients are the same with pads.

Pads are ids 0, whose embedding is 0 half of the time: what divides, or takes roots and norms, then meets a pole there
that no real token has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir.graph import B, Program, S, TensorInfo
from autopar.rules.padding import paddings_of
from autopar.runtime.data import padded
from autopar.verification.padding import compare_with_pads
from tests.interpreter import run_program
from tests.passes.programs import read

TOKENS, LENGTH, ROWS, WORDS = 5, 8, 9, 7
X = "[b, s, 4]"

# Of x, another value y, and a fresh prefix n; each gives {n} [b, s, 4].
STEPS: dict[str, str] = {
    "linear": f"{{n}}: {X} = linear({{x}}, w)",
    "add": f"{{n}}: {X} = add({{x}}, {{y}})",
    "multiply": f"{{n}}: {X} = mul({{x}}, {{y}})",
    "divide": f"{{n}}: {X} = div({{x}}, {{y}})",
    "divide by a square": (
        f"{{n}}a: {X} = pow({{y}}, 2)\n{{n}}b: {X} = add({{n}}a, 0.01)\n{{n}}: {X} = div({{x}}, {{n}}b)"
    ),
    "divide by the mask": f"{{n}}: {X} = div({{x}}, u)",
    "mask": f"{{n}}: {X} = mul({{x}}, u)",
    "choose": f"{{n}}: {X} = where.self(ub, {{x}}, {{y}})",
    "fill": f"{{n}}: {X} = masked_fill.Scalar({{x}}, nub, -1.0)",
    "square root": f"{{n}}a: {X} = abs({{x}})\n{{n}}: {X} = sqrt({{n}}a)",
    "square root, eps": f"{{n}}a: {X} = pow({{x}}, 2)\n{{n}}b: {X} = add({{n}}a, 0.01)\n{{n}}: {X} = sqrt({{n}}b)",
    "inverse root": f"{{n}}a: {X} = abs({{x}})\n{{n}}: {X} = rsqrt({{n}}a)",
    "logarithm": f"{{n}}a: {X} = abs({{x}})\n{{n}}: {X} = log({{n}}a)",
    "exponential": f"{{n}}: {X} = exp({{x}})",
    "bell": f"{{n}}a: {X} = pow({{x}}, 2)\n{{n}}b: {X} = neg({{n}}a)\n{{n}}: {X} = exp({{n}}b)",
    "power": f"{{n}}a: {X} = abs({{x}})\n{{n}}: {X} = pow({{n}}a, 0.5)",
    "odd power": f"{{n}}: {X} = pow({{x}}, 2.5)",
    "gelu": f"{{n}}: {X} = gelu({{x}})",
    "layer norm": f"{{n}}: {X} = layer_norm({{x}}, [4], None, None, 1e-05)",
    "layer norm, eps 0": f"{{n}}: {X} = layer_norm({{x}}, [4], v, None, 0.0)",
    "rms norm": f"{{n}}: {X} = rms_norm({{x}}, [4], v, 1e-06)",
    "rms norm, eps 0": f"{{n}}: {X} = rms_norm({{x}}, [4], None, 0.0)",
    "over its norm": f"{{n}}a: [b, s, 1] = linalg_vector_norm({{x}}, 2, [-1], True)\n{{n}}: {X} = div({{x}}, {{n}}a)",
    "over its norm, eps": (
        "{n}a: [b, s, 1] = linalg_vector_norm({x}, 2, [-1], True)\n{n}b: [b, s, 1] = clamp_min({n}a, 1e-6)\n"
        f"{{n}}: {X} = div({{x}}, {{n}}b)"
    ),
    "over its deviation": f"{{n}}a: [b, s, 1] = std.dim({{x}}, [-1], True, True)\n{{n}}: {X} = div({{x}}, {{n}}a)",
    "its variance": f"{{n}}a: [b, s, 1] = var.dim({{x}}, [-1], True, True)\n{{n}}: {X} = add({{x}}, {{n}}a)",
    "its largest": f"{{n}}a: [b, s, 1] = amax({{x}}, [-1], True)\n{{n}}: {X} = sub({{x}}, {{n}}a)",
    "softmax": f"{{n}}: {X} = softmax({{x}}, -1)",
    "softmax over tokens": f"{{n}}: {X} = softmax({{x}}, 1)",
    "hidden features": f"{{n}}a: {X} = masked_fill.Scalar({{x}}, nub, -inf)\n{{n}}: {X} = softmax({{n}}a, -1)",
    "running sum": f"{{n}}: {X} = cumsum({{x}}, 1)",
    "running sum of features": f"{{n}}: {X} = cumsum({{x}}, -1)",
    "running product": f"{{n}}: {X} = cumprod({{x}}, 1)",
    "running exponential": f"{{n}}: {X} = logcumsumexp({{x}}, 1)",
    "reversed": f"{{n}}: {X} = flip({{x}}, [1])",
    "reversed features": f"{{n}}: {X} = flip({{x}}, [-1])",
    "rolled": f"{{n}}: {X} = roll({{x}}, [1], [1])",
    "the one before": f"{{n}}: {X} = constant_pad_nd({{x}}, [0, 0, 1, -1], 0.0)",
    "the one after": f"{{n}}: {X} = constant_pad_nd({{x}}, [0, 0, -1, 1], 0.0)",
    "the mean": f"{{n}}a: [b, 1, 4] = mean({{x}}, [1], True)\n{{n}}: {X} = add({{x}}, {{n}}a)",
    "the largest": f"{{n}}a: [b, 1, 4] = amax({{x}}, [1], True)\n{{n}}: {X} = add({{x}}, {{n}}a)",
    "the mask's mean": (
        f"{{n}}a: {X} = mul({{x}}, u)\n{{n}}b: [b, 1, 4] = sum.dim_IntList({{n}}a, [1], True)\n"
        f"{{n}}c: [b, 1, 4] = div({{n}}b, total)\n{{n}}: {X} = add({{x}}, {{n}}c)"
    ),
}
POSITIONS = {
    "of all": "p", "of the mask": "pm", "of the mask, times it": "pt", "from 2": "p2", "of an id": "pi",
    "clamped": "pc",
}  # fmt: skip
LOOKUPS = {
    "embedding": "{n}a: {shape} = embedding(places, {i})", "index": "{n}a: {shape} = index.Tensor(places, [{i}])",
}  # fmt: skip
MASKS = {  # with their shape
    "keys": ("kb", "b, 1, s"), "causal": ("le", "s, s"), "causal and keys": ("lek", "b, s, s"),
    "window": ("win", "s, s"), "window and keys": ("wink", "b, s, s"), "pairs": ("pair", "b, s, s"),
    "all": ("every", "b, 1, s"),
}  # fmt: skip
FILLS = ("-inf", "-1e9", repr(torch.finfo(torch.float64).min))
LOSSES = {
    "of the mask": f"la: {X} = mul({{x}}, {{x}})\nlb: {X} = mul(la, u)\nloss: [] = sum(lb)",
    "of all": f"la: {X} = mul({{x}}, {{x}})\nloss: [] = sum(la)",
    "of the mask's mean": (
        f"la: {X} = mul({{x}}, u)\nlb: [b, 4] = sum.dim_IntList(la, [1])\nlc: [b, 4] = pow(lb, 2)\nloss: [] = sum(lc)"
    ),
    "of the first": "la: [b, 4] = select({x}, 1, 0)\nlb: [b, 4] = mul(la, la)\nloss: [] = sum(lb)",
    "cross-entropy": (
        "la: [b, s, 7] = linear({x}, head)\nlb: [b*s, 7] = reshape(la, [b * s, 7])\n"
        "lc: [b*s] int = reshape(labels, [b * s])\nloss: [] = cross_entropy_loss(lb, lc, None, 2, -100)"
    ),
    "cross-entropy of a probability": (
        "la: [b, s, 7] = linear({x}, head)\nlb: [b, s, 7] = log_softmax.int(la, -1)\n"
        "lc: [b, 7, s] = transpose(lb, 1, 2)\nloss: [] = nll_loss_nd(lc, labels, None, 2, -100)"
    ),
}
HEAD = f"""block model:
ids: [b, s] int = input ids
mask: [b, s] int = input mask
labels: [b, s] int = input labels
words: [{WORDS}, 4] = parameter words
places: [{ROWS}, 4] = parameter places
w: [4, 4] = parameter w
v: [4] = parameter v
head: [{WORDS}, 4] = parameter head
x: {X} = embedding(words, ids)
m: [b, s] = to(mask, torch.float64)
u: [b, s, 1] = unsqueeze(m, -1)
total: [b, 1, 1] = sum.dim_IntList(u, [1], True)
mb: [b, s] bool = ne.Scalar(mask, 0)
ub: [b, s, 1] bool = unsqueeze(mb, -1)
nub: [b, s, 1] bool = logical_not(ub)
kb: [b, 1, s] bool = unsqueeze(mb, 1)
masks: [b, 1, s] int = unsqueeze(mask, 1)
every: [b, 1, s] bool = ge.Scalar(masks, 0)
p: [s] int = arange(s)
p2: [s] int = add(p, 2)
pc: [s] int = clamp(p2, 0, {ROWS - 1})
pm: [b, s] int = cumsum(mask, 1)
pt: [b, s] int = mul(pm, mask)
other: [b, s] bool = ne.Scalar(ids, 9)
pi: [b, s] int = cumsum(other, 1)
rows: [s, 1] int = unsqueeze(p, 1)
columns: [1, s] int = unsqueeze(p, 0)
le: [s, s] bool = le.Tensor(columns, rows)
near: [s, 1] int = sub(rows, 3)
after: [s, s] bool = gt.Tensor(columns, near)
win: [s, s] bool = bitwise_and.Tensor(le, after)
lek: [b, s, s] bool = bitwise_and.Tensor(le, kb)
wink: [b, s, s] bool = bitwise_and.Tensor(win, kb)
pair: [b, s, s] bool = bitwise_and.Tensor(ub, kb)
"""


def attention(x: str, n: str, mask: str, fill: str) -> str:
    """Written out."""
    name = MASKS[mask][0]
    shape = MASKS[mask][1]
    return f"""{n}a: [b, 4, s] = transpose({x}, 1, 2)
{n}b: [b, s, s] = matmul({x}, {n}a)
{n}c: [{shape}] bool = logical_not({name})
{n}d: [b, s, s] = masked_fill.Scalar({n}b, {n}c, {fill})
{n}e: [b, s, s] = softmax({n}d, -1)
{n}: {X} = matmul({n}e, {x})"""


def fused(x: str, n: str, mask: str | None, causal: bool) -> str:
    lines, given = [f"{n}a: [b, 1, s, 4] = unsqueeze({x}, 1)"], "None"
    if mask is not None:
        name, shape = MASKS[mask]
        full = f"b, 1, {shape.removeprefix('b, ')}" if shape.startswith("b") else f"1, {shape}"
        lines.append(f"{n}b: [{full}] bool = unsqueeze({name}, {1 if shape.startswith('b') else 0})")
        given = f"{n}b"
    lines += [
        f"{n}c: [b, 1, s, 4] = scaled_dot_product_attention({n}a, {n}a, {n}a, {given}, 0.0, {causal})",
        f"{n}: {X} = squeeze.dim({n}c, 1)",
    ]
    return "\n".join(lines)


def looked_up(x: str, n: str, where: str, how: str) -> str:
    index = POSITIONS[where]
    shape = "[b, s, 4]" if index in ("pm", "pt", "pi") else "[s, 4]"
    return LOOKUPS[how].format(n=n, shape=shape, i=index) + f"\n{n}: {X} = add({x}, {n}a)"


def step(draw: st.DrawFn, values: list[str], n: str) -> str:
    """One step from the last value, or an earlier one."""
    x, y = values[-1], draw(st.sampled_from(values))
    kind = draw(st.sampled_from(("step", "step", "step", "written", "fused", "looked up")))
    if kind == "written":
        return attention(x, n, draw(st.sampled_from(list(MASKS))), draw(st.sampled_from(FILLS)))
    if kind == "fused":
        mask = draw(st.sampled_from([None, *MASKS]))
        return fused(x, n, mask, mask is None and draw(st.booleans()))
    if kind == "looked up":
        return looked_up(x, n, draw(st.sampled_from(list(POSITIONS))), draw(st.sampled_from(list(LOOKUPS))))
    return STEPS[draw(st.sampled_from(list(STEPS)))].format(x=x, y=y, n=n)


@st.composite
def programs(draw: st.DrawFn) -> str:
    values, lines = ["x"], [HEAD.strip()]
    for i in range(draw(st.integers(1, 3))):
        lines.append(step(draw, values, f"t{i}"))
        values.append(f"t{i}")
    lines += [LOSSES[draw(st.sampled_from(list(LOSSES)))].format(x=values[-1]), "return loss"]
    return "\n".join(lines)


class Weights(nn.Module):
    def __init__(self, seed: int, zero: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.places, self.w, self.v, self.head = (
            nn.Parameter(torch.randn(*size, dtype=torch.float64))
            for size in ((WORDS, 4), (ROWS, 4), (4, 4), (4,), (WORDS, 4))
        )
        if zero:
            self.words.data[0] = 0


def batch(seed: int, full: bool) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    data = {"ids": torch.randint(1, WORDS, (2, TOKENS)), "labels": torch.randint(WORDS, (2, TOKENS))}
    data["labels"][0, 1] = -100
    data["mask"] = torch.ones_like(data["ids"])
    if not full:
        data["mask"][0, 2:4] = 0
    return data


def results(program: Program, model: nn.Module, data: dict[str, Tensor]) -> list[Tensor]:
    loss = run_program(program, model, data)
    return [
        loss.detach(),
        *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True),
    ]


def check(text: str, seed: int, zero: bool, full: bool) -> str:
    """What becomes of a program: "refused", "not finite" without pads, or "accepted" and the same with pads."""
    inputs = {name: TensorInfo((B, S), torch.int64) for name in ("ids", "mask", "labels")}
    program = replace(read(text), inputs=inputs)
    try:
        compare_with_pads(program, {}, TOKENS, LENGTH)
    except PlanError:
        return "refused"
    model, data = Weights(seed, zero), batch(seed, full)
    right = results(program, model, data)
    if not all(r.isfinite().all() for r in right):
        return "not finite"
    rows = tuple((p.input, p.dim, p.value) for p in paddings_of(program))
    longer = padded(data, rows, LENGTH)
    for with_pads, without in zip(results(program, model, longer), right, strict=True):
        torch.testing.assert_close(with_pads, without, rtol=1e-9, atol=1e-9)
    return "accepted"


def search(examples: int) -> Counter[str]:
    """The outcome of so many draws, the same ones each time."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(), st.integers(0, 9), st.booleans(), st.booleans())
    def run(text: str, seed: int, zero: bool, full: bool) -> None:
        counts[check(text, seed, zero, full)] += 1

    run()
    return counts


@pytest.mark.parametrize("examples", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_what_is_accepted_computes_the_same(examples: int) -> None:
    counts = search(examples)
    print(dict(counts))
    assert counts["accepted"] > 0.2 * counts.total(), counts
    assert counts["refused"] > 0.2 * counts.total(), counts
