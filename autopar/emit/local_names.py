"""What the value of a line is called: its role, what its module or op is, or what it changes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import fx

from ..ir.custom import LINEAR_CROSS_ENTROPY
from ..ir.graph import Role, arguments, info, node_inputs, op_name
from .roles import ACTIVATIONS, ATTENTIONS, HEAVY, NORMS, SOFTMAX

if TYPE_CHECKING:
    from .body import Body

aten = torch.ops.aten

_OF_OP = {
    aten.cross_entropy_loss.default: "loss", aten.mse_loss.default: "loss", LINEAR_CROSS_ENTROPY: "loss",
    aten.cos.default: "cos", aten.sin.default: "sin", aten.arange.default: "positions",
    aten.arange.start: "positions",
    **dict.fromkeys(ATTENTIONS, "attn"), **dict.fromkeys(SOFTMAX, "probs"),
}  # fmt: skip
# What an op without a gradient makes: indices, distances, masks. The op's own name would be Python's.
_OF_NUMBERS = {
    "sub": "difference", "abs": "distance", "neg": "distance", "min": "least", "max": "greatest", "add": "total",
    "mul": "product", "div": "quotient", "where": "chosen", "cat": "joined", "sum": "total", "pow": "power",
    "masked_fill": "filled", "scalar_tensor": "constant", "full": "constant", "all": "whole", "any": "some",
    "round": "rounded", "index": "indexed", "slice": "part",
}  # fmt: skip
_RUNNING = ("h", "x")  # names of values that are what they are now


def line_name(body: Body, node: fx.Node) -> str:
    """The name of a line's value."""
    head = body.head(node)
    role = body.roles.of(node)
    if role:
        # A mask of biases that are trained is no mask.
        return body.free("bias" if role == "mask" and info(node).requires_grad else role, node)
    changed = _changed(body, head)
    if changed is not None and head.target not in NORMS:
        kept = body.names[changed]
        if body.dies(changed, node):
            return kept
        return body.free("h" if kept == "x" else kept, node)
    if head.target in _OF_OP:
        return body.free(_OF_OP[head.target], node)
    running = [n for n in body.reads(head) if body.names[n] in _RUNNING and body.dies(n, node)]
    if running and info(node).requires_grad and (head.target in NORMS or len(body.reads(head)) == 1):
        return body.names[running[0]]
    return body.free(_own(body, head, node), node)


def _changed(body: Body, head: fx.Node) -> fx.Node | None:
    """The value that a line changes: its main operand, through what is folded into the line."""
    main = body.roles.main(head) or (node_inputs(head)[0] if head.target in ACTIVATIONS else None)
    if body.roles.is_residual(head):
        main = next(n for n in node_inputs(head) if n in body.roles.stream)
    while main is not None and main in body.folded:
        main = body.roles.main(main)
    return main if main in body.names else None


def _own(body: Body, head: fx.Node, node: fx.Node) -> str:
    facts = info(head)
    if head.target in HEAVY and facts.module:
        return _short(facts.module)
    if facts.dtype == torch.bool or _hides(head):
        return "mask"
    if info(node).requires_grad:
        return "h"
    weights = [n for n in node_inputs(head) if info(n).role in (Role.PARAMETER, Role.BUFFER)]
    if not body.reads(head) and weights:
        return info(weights[0]).ref.rpartition(".")[2]
    name = op_name(head).strip("_")
    return _OF_NUMBERS.get(name, name)


def _hides(head: fx.Node) -> bool:
    """Whether an op makes of truth values what is added to scores: a constant, or so low a number that no softmax sees
    a score with it."""
    if head.target not in (aten.where.ScalarOther, aten.masked_fill.Scalar):
        return False
    filled, number = node_inputs(head)[head.target is aten.where.ScalarOther], arguments(head)[2]
    return isinstance(number, int | float) and number <= -1e4 and not node_inputs(filled)


def _short(module: str) -> str:
    """ "self_attn.q_proj" → "q"; "mlp.c_fc" → "c_fc"; "self_attn" → "attn"."""
    leaf = next((part for part in reversed(module.split(".")) if not part.isdigit()), "h").removeprefix("self_")
    if leaf.endswith("head"):
        return "logits"
    if re.search(r"relative|position", leaf) and "bias" in leaf:
        return "position_bias"
    return leaf.removesuffix("_proj") if leaf != "c_proj" else leaf
