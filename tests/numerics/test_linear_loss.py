"""Head and loss in slices of the vocabulary: values, gradients, and how much of the logits is ever alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost_models.logits import logits_cost
from autopar.cost_models.op_costs import op_costs
from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import NodeInfo, Role, set_info
from autopar.placement import REPLICATE, Strategy
from autopar.rules import rule_of
from autopar.runtime.linear_loss import linear_cross_entropy
from autopar.runtime.memory import LiveStorage

_ROLES = {"x": Role.VALUE, "w": Role.PARAMETER, "t": Role.INPUT, "z": Role.VALUE}
ROWS, WIDTH, VOCABULARY = 11, 6, 29
CHUNKS = [1, 2, 3, 29, 40]  # 3 leaves a short last slice, 40 is more than there are columns
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.25},
    "capped": {"softcap": 1.5},
    "scaled and capped": {"scale": -0.5, "softcap": 2.0},
    "another ignored id": {"ignore_index": 3},
}


def operands(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight, bias, targets of which some are ignored."""
    g = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(shape, generator=g).to(dtype) for shape in ((rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    target = torch.randint(VOCABULARY, (rows,), generator=g)
    target[::4], target[1] = -100, 3
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), target


def whole(x: Tensor, w: Tensor, target: Tensor, b: Tensor | None, **options: Any) -> Tensor:
    cap = options.get("softcap")
    logits = options.get("scale", 1.0) * F.linear(x, w, b)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits, target, reduction="sum", ignore_index=options.get("ignore_index", -100))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert (actual - expected).detach().abs().max() <= tolerance * max(1.0, float(expected.detach().abs().max()))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients_are_those_of_whole_logits(shape: str, chunks: int, biased: bool) -> None:
    x, w, b, target = operands()
    options = SHAPES[shape]
    if options.get("ignore_index") == 3:
        target = target.masked_fill(target == -100, 3)
    bias, leaves = (b, [x, w, b]) if biased else (None, [x, w])
    expected = whole(x, w, target, bias, **options)
    actual = linear_cross_entropy(x, w, target, chunks, bias=bias, **options)
    close(actual, expected)
    # Divided by a count, and scaled as for fp16: the factor comes from above.
    wanted = torch.autograd.grad(expected * 1024 / 7, leaves)
    for gradient, right in zip(torch.autograd.grad(actual * 1024 / 7, leaves), wanted, strict=True):
        close(gradient, right)
    # The op of the graph is the same function.
    close(LINEAR_CROSS_ENTROPY(x, w, target, bias, chunks=chunks, **options), expected)


def test_each_half_of_a_backward_computes_what_the_price_says() -> None:
    """All of it, twice: a Function of Python is not told which of its gradients are wanted now."""
    x, w, _, target = operands()
    node = loss_node(LINEAR_CROSS_ENTROPY, torch.float64, chunks=3)
    product, passes = op_costs(node, Strategy((REPLICATE,) * 3, REPLICATE), rule_of(node), 1)

    def flops(*leaves: Tensor) -> Any:
        loss = linear_cross_entropy(x, w, target, 3)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss, leaves)
        return counter.get_total_flops()

    whole = flops(x, w)
    assert [flops(x) / whole, flops(w) / whole] == list(product.dgrad_wgrad)
    assert product.dgrad_wgrad == passes.dgrad_wgrad


def test_a_second_backward_finds_what_the_first_did() -> None:
    """Zero-bubble schedules run a backward twice, for inputs and for weights: it must not use up what it keeps."""
    x, w, _, target = operands()
    loss = linear_cross_entropy(x, w, target, 3)
    (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
    (weight,) = torch.autograd.grad(loss, [w], retain_graph=True)
    again = torch.autograd.grad(loss, [x, w])
    assert torch.equal(again[0], first) and torch.equal(again[1], weight)


@pytest.mark.parametrize("frozen", ["x", "w", "b"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    x, w, b, target = operands()
    {"x": x, "w": w, "b": b}[frozen].requires_grad_(False)
    linear_cross_entropy(x, w, target, 3, bias=b).backward()
    expected = [t.detach().clone().requires_grad_(t.requires_grad) for t in (x, w, b)]
    whole(expected[0], expected[1], target, expected[2]).backward()
    for t, right in zip((x, w, b), expected, strict=True):
        assert (t.grad is None) == (right.grad is None)
        if t.grad is not None and right.grad is not None:
            close(t.grad, right.grad)


def test_rows_that_are_all_ignored_count_for_nothing() -> None:
    x, w, _, target = operands()
    loss = linear_cross_entropy(x, w, torch.full_like(target, -100), 3)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any() and not w.grad.any()  # type: ignore[union-attr]


def test_classes_that_a_bias_rules_out() -> None:
    """A slice whose logits are all -inf (a padded vocabulary): exp(-inf - -inf) would be NaN."""
    x, w, b, target = operands()
    with torch.no_grad():
        b[:10] = -torch.inf
        target[target.ge(0) & target.lt(10)] = 20
    loss = linear_cross_entropy(x, w, target, 3, bias=b)
    close(loss, whole(x, w, target, b))
    for gradient in torch.autograd.grad(loss, [x, w, b]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_whole_logits_raised_to_fp32(dtype: torch.dtype) -> None:
    """N8, and the gradient of the rows: of 40 slices a summand each, added in fp32."""
    x, w, _, target = operands(dtype, rows=64)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    right = torch.autograd.grad(whole(exact[0], exact[1], target, None), exact)

    def errors(loss: Tensor) -> list[float]:
        found = torch.autograd.grad(loss, [x, w])
        return [float((a - e).abs().max() / e.abs().max()) for a, e in zip(found, right, strict=True)]

    raised = F.cross_entropy(F.linear(x, w).float(), target, reduction="sum")
    sliced = linear_cross_entropy(x, w, target, 29)
    assert sliced.dtype == torch.float32
    close(sliced, raised, 1e-6)
    for mine, plain in zip(errors(sliced), errors(raised), strict=True):
        assert mine <= 2 * plain


# --------------------------------------------------------------------------------
# Memory

LARGE = 4099  # columns, beside which a row of 16 is little


def measured(loss: Any, dtype: torch.dtype) -> int:
    """Bytes alive at most in forward and backward, beyond operands and their gradients."""
    x = torch.randn(96, 16).to(dtype).requires_grad_()
    w = torch.randn(LARGE, 16).to(dtype).requires_grad_()
    target = torch.randint(LARGE, (96,))
    with LiveStorage() as storage:
        storage.track([x, w, target])
        storage.reset()
        before = storage.peak
        loss(x, w, target).backward()
        gradients = sum(t.grad.nbytes for t in (x, w) if t.grad is not None)
        return int(storage.peak - before - gradients)


def loss_node(target: Any, dtype: torch.dtype, **options: Any) -> fx.Node:
    """A loss of 96 rows, with its head if it has one."""
    graph = fx.Graph()

    def tensor(name: str, shape: tuple[int, ...], kind: torch.dtype) -> fx.Node:
        graded = kind.is_floating_point
        return set_info(graph.placeholder(name), NodeInfo(shape, kind, requires_grad=graded, role=_ROLES[name]))

    x, w, ids = tensor("x", (96, 16), dtype), tensor("w", (LARGE, 16), dtype), tensor("t", (96,), torch.int64)
    logits = tensor("z", (96, LARGE), dtype)
    operands = (x, w, ids) if target is LINEAR_CROSS_ENTROPY else (logits, ids)
    return set_info(graph.call_function(target, operands, options), NodeInfo((), torch.float32, requires_grad=True))


def predicted(target: Any, dtype: torch.dtype, **options: Any) -> float:
    node = loss_node(target, dtype, **options)
    cost = logits_cost(node, Strategy((REPLICATE,) * len(node.args), REPLICATE), 1)
    assert cost is not None
    return float(cost.peak_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunks", [2, 8])
def test_logits_are_never_whole_and_as_large_as_the_ledger_says(chunks: int, dtype: torch.dtype) -> None:
    """M1: the most of the logits, their copy in fp32 and their gradient at once, measured, within 10%."""
    peak = measured(lambda x, w, t: linear_cross_entropy(x, w, t, chunks), dtype)
    expected = predicted(LINEAR_CROSS_ENTROPY, dtype, chunks=chunks)
    assert expected == pytest.approx(peak, rel=0.1)
    assert peak < 96 * LARGE * max(4, dtype.itemsize)  # the whole logits of the loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_whole_logits_are_counted_with_copy_and_gradient(dtype: torch.dtype) -> None:
    """M1: log-softmax, its gradient, and the gradient of the logits."""

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, w)
        logits = logits.float() if dtype == torch.bfloat16 else logits
        return F.cross_entropy(logits, target, reduction="sum")

    peak = measured(loss, dtype)
    assert predicted(torch.ops.aten.cross_entropy_loss.default, dtype) == pytest.approx(peak, rel=0.1)
