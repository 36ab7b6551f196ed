"""One op as source: every argument is in it, whether or not the op has a writer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.emit.expressions import expression
from autopar.emit.text import Text
from autopar.ir.graph import NodeInfo, S, set_info
from autopar.placement import REPLICATE, Strategy

aten = torch.ops.aten


def written(op: Any, *args: Any, result: torch.dtype = torch.float64, **kwargs: Any) -> str:
    """The source of an op; tensors among the arguments are operands called x0, x1, …"""
    graph, names = fx.Graph(), dict[fx.Node, str]()

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = set_info(graph.placeholder(f"x{len(names)}"), NodeInfo(tuple(value.shape), value.dtype))
        names[node] = node.name
        return node

    operands = tuple(operand(a) for a in args)
    node = graph.call_function(op, operands, {k: operand(v) for k, v in kwargs.items()})
    set_info(node, NodeInfo((), result))
    return expression(node, lambda n: Text(names[n]), "x.device", "self.training").source


X = torch.arange(12, dtype=torch.float64).view(3, 4) / 7 - 0.5
M = X > 0
COMPUTED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "x0 + x1": (aten.add.Tensor, (X, X), {}),
    "torch.ops.aten.add.Tensor(x0, x1, alpha=3)": (aten.add.Tensor, (X, X), {"alpha": 3}),
    "x0.sum((-1,), True, dtype=torch.float32)": (aten.sum.dim_IntList, (X, [-1], True), {"dtype": torch.float32}),
    "x0.sum((-1,), dtype=torch.float32)": (aten.sum.dim_IntList, (X, [-1], False), {"dtype": torch.float32}),
    "x0.sum(dtype=torch.float32)": (aten.sum.default, (X,), {"dtype": torch.float32}),
    "x0.mean((0,), dtype=torch.float32)": (aten.mean.dim, (X, [0]), {"dtype": torch.float32}),
    "torch.softmax(x0, -1, dtype=torch.float32)": (aten.softmax.int, (X, -1, torch.float32), {}),
    'F.gelu(x0, approximate="tanh")': (aten.gelu.default, (X,), {"approximate": "tanh"}),
    "F.softplus(x0, threshold=0.25)": (aten.softplus.default, (X, 1, 0.25), {}),
    "x0.to(torch.float32)": (aten.to.dtype, (X, torch.float32), {"memory_format": torch.preserve_format}),
    "x0.to(torch.float64, copy=True)": (aten.to.dtype, (X, torch.float64, False, True), {}),
    'x0.masked_fill(x1, float("-inf"))': (aten.masked_fill.Scalar, (X, M, -torch.inf), {}),
    'F.pad(x0, (0, 1), value=float("-inf"))': (aten.pad.default, (X, [0, 1], "constant", -torch.inf), {}),
    "F.pad(x0, (0, 1), value=0.1234567)": (aten.pad.default, (X, [0, 1], "constant", 0.1234567), {}),
    'F.pad(x0, (1, 1), mode="reflect")': (aten.pad.default, (X, [1, 1], "reflect"), {}),
    "~x0": (aten.bitwise_not.default, (M,), {}),
    "x0[:, 1:4:2]": (aten.slice.Tensor, (X.view(3, 4, 1)[..., 0].unsqueeze(2), 1, 1, 4, 2), {}),
    "x0.expand(2, 3, 4)": (aten.expand.default, (X, [2, 3, 4]), {}),
    "torch.ops.aten.expand.default(x0, (2, 3, 4), implicit=True)": (
        aten.expand.default, (X, [2, 3, 4]), {"implicit": True},
    ),
    "F.layer_norm(x0, (4,), eps=1e-05)": (aten.layer_norm.default, (X, [4], None, None, 1e-5, False), {}),
    "x0.amax((0,), True)": (aten.amax.default, (X, [0], True), {}),
}  # fmt: skip


@pytest.mark.parametrize("text", COMPUTED)
def test_source_computes_what_the_op_computes(text: str) -> None:
    op, args, kwargs = COMPUTED[text]
    expected = op(*args, **kwargs)
    assert written(op, *args, result=expected.dtype, **kwargs) == text
    operands = {f"x{i}": a for i, a in enumerate(a for a in args if isinstance(a, Tensor))}
    actual = eval(text, {"torch": torch, "F": torch.nn.functional, **operands})
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


FACTORIES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "torch.arange(0, s, 2, device=x.device)": (aten.arange.start_step, (0, S, 2), {}),
    "torch.arange(s, dtype=torch.float32, device=x.device)": (aten.arange.default, (S,), {"dtype": torch.float32}),
    "torch.eye(4, dtype=torch.bool, device=x.device)": (aten.eye.default, (4,), {"dtype": torch.bool}),
    "torch.linspace(0, 1, 5, device=x.device)": (aten.linspace.default, (0, 1, 5), {}),
    "torch.scalar_tensor(2, device=x.device)": (aten.scalar_tensor.default, (2,), {}),
    "torch.zeros_like(x0)": (aten.zeros_like.default, (X,), {}),
    'torch.full((s, s), float("-inf"), device=x.device)': (aten.full.default, ((S, S), -torch.inf), {}),
}


@pytest.mark.parametrize("text", FACTORIES)
def test_factories_are_given_the_device(text: str) -> None:
    op, args, kwargs = FACTORIES[text]
    assert written(op, *args, result=kwargs.get("dtype", torch.float32), **kwargs) == text


def test_factories_have_the_dtype_they_were_traced_with() -> None:
    """A program in fp64 has no float32 constants, whatever torch's default dtype."""
    text = written(aten.zeros.default, [4], result=torch.float64)
    assert text == "torch.zeros((4,), dtype=torch.float64, device=x.device)"


def test_a_dropout_of_evaluation_stays_one() -> None:
    assert written_dropout(True).endswith("self.training)")
    assert written_dropout(False).endswith("False)")


def written_dropout(train: bool) -> str:
    graph = fx.Graph()
    x = set_info(graph.placeholder("x"), NodeInfo((), torch.float64))
    node = graph.call_function(aten.dropout.default, (x, 0.5, train))
    set_info(node, NodeInfo((), torch.float64, strategies={"tp": Strategy((REPLICATE,), REPLICATE)}))
    return expression(node, lambda n: Text(n.name), "x.device", "self.training").source
