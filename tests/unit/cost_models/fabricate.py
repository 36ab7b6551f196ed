"""ModelCosts of GPT-like models from closed formulas, for tests that need costs but no traced graph."""

from __future__ import annotations

import sympy

from autopar.cost_models.layer_costs import (
    B,
    BoundaryValue,
    LayerCosts,
    ModelCosts,
    OpCost,
    RecomputeCosts,
    S,
    Transfer,
)

BYTES = 2  # a bf16 element


def matmul(name: str, inputs: int, outputs: int) -> OpCost:
    """A linear layer on [b, s, inputs]."""
    tokens = B * S
    flops = 2 * tokens * inputs * outputs
    traffic = BYTES * (tokens * (inputs + outputs) + inputs * outputs)
    return OpCost(name, "matmul", flops, traffic, 2 * flops, 2 * traffic, True)


def elementwise(name: str, width: int, passes: int = 4) -> OpCost:
    """A memory-bound op that touches [b, s, width] `passes` times."""
    traffic = passes * BYTES * B * S * width
    return OpCost(name, "memory", sympy.Integer(0), traffic, sympy.Integer(0), traffic, False)


def attention(width: int) -> OpCost:
    """Causal flash attention over `width` = heads × head size of this rank."""
    flops = 2 * B * S**2 * width
    traffic = 4 * BYTES * B * S * width
    return OpCost("attention", "attention", flops, traffic, sympy.Rational(5, 2) * flops, 2 * traffic, True)


def tp_transfers(hidden: int, tp: int, each_way: int = 2) -> tuple[Transfer, ...]:
    """Megatron's all-reduces of the hidden states."""
    if tp == 1:
        return ()
    size = BYTES * B * S * hidden
    return tuple(Transfer("all_reduce", size, phase) for phase in ("forward", "backward") for _ in range(each_way))


def layer(name: str, hidden: int, ffn: int, kv_share: float, tp: int) -> LayerCosts:
    """A Llama layer: gated MLP, grouped keys and values."""
    kv = int(hidden * kv_share)
    ops = (
        elementwise("input_norm", hidden),
        matmul("q", hidden, hidden // tp),
        matmul("k", hidden, kv // tp),
        matmul("v", hidden, kv // tp),
        elementwise("rope", (hidden + kv) // tp),
        attention(hidden // tp),
        matmul("o", hidden // tp, hidden),
        elementwise("add", hidden, 3),
        elementwise("post_norm", hidden),
        matmul("gate", hidden, ffn // tp),
        matmul("up", hidden, ffn // tp),
        elementwise("silu", ffn // tp, 5),
        matmul("down", ffn // tp, hidden),
        elementwise("add", hidden, 3),
    )
    whole = 4 * hidden  # both norms: their inputs and outputs
    saved = BYTES * B * S * (whole + (2 * hidden + 2 * kv + 3 * ffn) // tp)
    return LayerCosts(
        name=name,
        ops=ops,
        transfers=tp_transfers(hidden, tp),
        parameters=(2 * hidden * (hidden + kv) + 3 * hidden * ffn) // tp + 2 * hidden,
        tied_parameters=0,
        saved_bytes=saved,
        working_bytes=2 * BYTES * B * S * max(hidden, ffn // tp),
        recompute=again(saved, len(ops), hidden, ffn // tp, tp),
    )


def again(saved: sympy.Expr, ops: int, hidden: int, width: int, tp: int) -> tuple[RecomputeCosts, ...]:
    """The activation of the MLP, which keeps what it reads; the layer, of which all runs again."""
    product = BYTES * B * S * width
    silu = RecomputeCosts("activation", saved - product, product, (ops - 3,), ())
    forward = tuple(range(2)) if tp > 1 else ()
    return silu, RecomputeCosts("layer", BYTES * B * S * hidden, saved, tuple(range(ops)), forward)


def ends(hidden: int, vocabulary: int, tp: int, tied: bool) -> tuple[LayerCosts, LayerCosts]:
    """Embedding; final norm, head and cross-entropy."""
    table = vocabulary * hidden // tp
    output = BYTES * B * S * hidden
    logits = 10 * B * S * vocabulary // tp
    prologue = LayerCosts(
        "prologue", (elementwise("embedding", hidden, 2),), tp_transfers(hidden, tp, 1), table, 0,
        8 * B * S, output,
    )  # fmt: skip
    head = matmul("head", hidden, vocabulary // tp)
    ops = (elementwise("norm", hidden), head, elementwise("loss", vocabulary // tp, 10))
    epilogue = LayerCosts(
        "epilogue", ops, tp_transfers(hidden, tp, 1), hidden + (0 if tied else table), table if tied else 0,
        logits + output, logits / 2,
    )  # fmt: skip
    return prologue, epilogue


def model(
    *,
    layers: int = 32,
    hidden: int = 4096,
    ffn: int = 14336,
    kv_share: float = 0.25,
    vocabulary: int = 128256,
    tp: int = 1,
    tied: bool = False,
    classes: int = 1,
) -> ModelCosts:
    """Llama-3-8B by default; with `classes` > 1 the layers alternate between classes of different widths."""
    table = {
        f"layer{index}": layer(f"layer{index}", hidden, ffn * (index + 2) // 2, kv_share, tp)
        for index in range(classes)
    }
    whole = {
        f"layer{index}": layer(f"layer{index}", hidden, ffn * (index + 2) // 2, kv_share, 1) for index in range(classes)
    }
    names = tuple(f"layer{index % classes}" for index in range(layers))
    prologue, epilogue = ends(hidden, vocabulary, tp, tied)
    flops = sympy.Add(*(whole[name].model_flops for name in names), ends(hidden, vocabulary, 1, tied)[1].model_flops)
    return ModelCosts(
        tp, "megatron" if tp > 1 else "", prologue, table, names, epilogue, flops, 1.0,
        boundary_values=hidden_states(layers, hidden),
    )  # fmt: skip


def hidden_states(layers: int, hidden: int) -> tuple[BoundaryValue, ...]:
    """From each layer to the next, which keeps it as the input of its norm."""
    size = BYTES * B * S * hidden
    return tuple(BoundaryValue(n, n + 1, size, size, once_per_stage=False, kept=True) for n in range(layers - 1))
