"""The body of one block: which ops share a line, what each value is called, which comments it carries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ir.graph import B, Block, NodeInfo, Role, S, info, node_inputs, op_name
from ..ir.ops import is_collective
from ..placement import Kind
from ..rules import rule_of
from .expressions import expression
from .names import value_name
from .text import Text

aten = torch.ops.aten

_WIDTH = 108
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)
_NAMED_FOR_MODULE = {
    aten.linear.default, aten.embedding.default, aten.scaled_dot_product_attention.default, aten.matmul.default,
}  # fmt: skip
_NAMED_FOR_OP = {
    aten.cross_entropy_loss.default: "loss", aten.cos.default: "cos", aten.sin.default: "sin",
    aten.arange.default: "positions",
}  # fmt: skip
_NOTE = {Kind.REPLICATE: "Replicate", Kind.GRAD_PARTIAL: "Replicate, grad Partial", Kind.PARTIAL: "Partial"}
_BACKWARD = {
    "copy_to": "all-reduce", "split": "all-gather", "gather": "slice", "all_gather": "reduce-scatter",
    "all_reduce": "nothing", "reduce_scatter": "all-gather", "all_to_all": "all-to-all", "take_shard": "zero-pad",
    "grad_from_first": "keep on one rank", "value_from_first": "nothing", "all_reduce_both": "all-reduce",
    "both_from_first": "keep on one rank", "pad_shard": "slice",
}  # fmt: skip


@dataclass
class Body:
    """Lines of Python for a block's ops.

    parameter: the expression of a parameter or buffer placeholder. arguments: what each VALUE and INPUT
    placeholder is called; without any, `b`, `s` and `device` are arguments. After `write`, `results` are
    the names returned and `imports` what the lines use of the runtime.
    """

    block: Block
    parameter: Callable[[fx.Node], str]
    arguments: Mapping[fx.Node, str]
    tp: int
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    names: dict[fx.Node, str] = field(default_factory=dict)
    folded: set[fx.Node] = field(default_factory=set)

    def write(self) -> None:
        self.names = dict(self.arguments)
        self.order = {node: i for i, node in enumerate(self.block.graph.nodes)}
        self.folded = {node for node in self.block.ops if self._folds(node)}
        if self.arguments:
            self._sizes()
        for node in self.block.ops:
            if node not in self.folded:
                self._statement(node)
        self.results = [self.names[node] for node in self.block.results]

    def last_use(self, node: fx.Node) -> int:
        """The position of the last line that reads a node, through the ops folded into that line."""
        return max((self._line_of(user) for user in node.users), default=-1)

    def _line_of(self, node: fx.Node) -> int:
        while node in self.folded:
            (node,) = node.users
        return self.order[node]

    # which ops share a line

    def _folds(self, node: fx.Node) -> bool:
        """Whether a node is written inside its only reader: views after what they view, a bias in its linear."""
        if len(node.users) != 1 or node in self.block.results or is_collective(node.target):
            return False
        (reader,) = node.users
        if reader.op == "output" or node_inputs(reader).count(node) > 1:
            return False
        first = node_inputs(reader)[0] is node
        if node.target is aten.linear.default and _is_bias_add(reader):
            return first and info(node).placement == info(reader).placement
        if _is_postfix(reader):
            return first
        if node.target in (aten.slice.Tensor, aten.neg.default, aten.select.int, aten.to.dtype):
            return not is_collective(reader.target)
        return node.target is aten.mul.Tensor and reader.target is aten.add.Tensor

    # statements

    def _sizes(self) -> None:
        """`b` and `s`, where shapes need them, from the first value that has both."""
        used = set()
        for node in self.block.ops:
            for argument in (*node.args, *node.kwargs.values()):
                used |= _symbols(argument)
        if not used & {B, S}:
            return
        sources = [n for n in self.names if _dims_of(info(n))]
        source = next((n for n in sources if used <= set(_dims_of(info(n)))), sources[0] if sources else None)
        assert source is not None, f"nothing tells the sizes of {self.block.name}"
        facts, name = info(source), self.names[source]
        dims = _dims_of(facts)
        if used >= {B, S} and not facts.placement.is_shard and facts.shape[:2] == (B, S):
            rest = ", _" * (len(facts.shape) - 2)
            self.lines.append(f"b, s{rest} = {name}.shape")
            return
        for symbol in (B, S):
            if symbol in used:
                whole = f"{name}.shape[{dims[symbol]}]"
                sharded = facts.placement.is_shard and facts.placement.dim == dims[symbol]
                note = f"  # each rank has 1/{self.tp} of it" if sharded else ""
                self.lines.append(f"{symbol} = {whole}{f' * {self.tp}' if sharded else ''}{note}")

    def _statement(self, node: fx.Node) -> None:
        text = self._text(node)
        name = self._name(node)
        line = f"{name} = {text.source}"
        comment = self._comment(node)
        if len(line) > _WIDTH and (inner := self._longest_folded(node)):
            self.folded.discard(inner)
            self._statement(inner)
            self._statement(node)
            return
        self.names[node] = name
        self.imports |= text.imports
        if comment and len(line) + len(comment) > _WIDTH:
            self.lines += [f"# {comment}", line]
        else:
            self.lines.append(f"{line}  # {comment}" if comment else line)

    def _longest_folded(self, node: fx.Node) -> fx.Node | None:
        """What to give a line of its own: the op under a chain of views, so that the views stay together."""
        viewed = node
        while _is_postfix(viewed) and node_inputs(viewed)[0] in self.folded:
            viewed = node_inputs(viewed)[0]
        if viewed is not node:
            return viewed
        inside = [n for n in node_inputs(node) if n in self.folded]
        return max(inside, key=lambda n: len(self._text(n).source), default=None)

    def _text(self, node: fx.Node) -> Text:
        imports: set[str] = set()

        def render(operand: Any) -> Text:
            text = self._operand(operand)
            imports.update(text.imports)
            return text

        if _is_bias_add(node) and node_inputs(node)[0] in self.folded:
            product, bias = node_inputs(node)
            given = [render(operand).source for operand in (*node_inputs(product), bias)]
            text = Text(f"F.linear({', '.join(given)})")
        else:
            text = expression(node, render, self._device(), "self.training")
        return Text(text.source, text.precedence, text.imports | imports)

    def _operand(self, node: fx.Node) -> Text:
        if node in self.folded:
            return self._text(node)
        if info(node).role in (Role.PARAMETER, Role.BUFFER):
            return Text(self.parameter(node))
        return Text(self.names[node])

    def _device(self) -> str:
        return f"{next(iter(self.arguments.values()))}.device" if self.arguments else "device"

    # names

    def _name(self, node: fx.Node) -> str:
        head = self._head(node)
        facts = info(head)
        if head.target in _NORMS:
            return self._free("h", node)
        if head.target in _NAMED_FOR_MODULE and facts.module:
            return self._free(_short(facts.module), node)
        if head.target in _NAMED_FOR_OP:
            return self._free(_NAMED_FOR_OP[head.target], node)
        read = self._reads(head)
        for operand in read:
            if self.last_use(operand) <= self.order[node] and operand not in self.block.results:
                return self.names[operand]
        base = op_name(head).strip("_")
        weights = [n for n in node_inputs(head) if info(n).role in (Role.PARAMETER, Role.BUFFER)]
        if not read and weights:
            return self._free(info(weights[0]).ref.rpartition(".")[2], node)
        return self._free(f"{self.names[read[0]]}_{base}" if read else base, node)

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """The named values that a line reads, through folded ops."""
        found: list[fx.Node] = []
        for operand in node_inputs(node):
            found += self._reads(operand) if operand in self.folded else [operand] if operand in self.names else []
        return found

    def _head(self, node: fx.Node) -> fx.Node:
        """The op a line is about: the innermost of a chain of views and casts."""
        while (_is_postfix(node) or _is_bias_add(node)) and node_inputs(node)[0] in self.folded:
            node = node_inputs(node)[0]
        return node

    def _free(self, base: str, node: fx.Node) -> str:
        """The base, or with a number where another live value has it."""
        return value_name(base, {name for other, name in self.names.items() if self.last_use(other) > self.order[node]})

    # comments

    def _comment(self, node: fx.Node) -> str:
        facts = info(node)
        if self.tp == 1 or facts.strategy is None:
            return ""
        if is_collective(node.target):
            source, target = facts.strategy.inputs[0], facts.strategy.output
            name = op_name(node)
            backward = f"; backward: {_BACKWARD[name]}" if facts.requires_grad else ""
            return f"{_placement(source)} → {_placement(target)}{backward}"
        head = self._head(node)
        strategy = info(head).strategy
        if head.target is not aten.linear.default or strategy is None:
            return ""
        weight = strategy.inputs[1]
        if weight.is_shard:
            return "column-parallel" if weight.dim == 0 else "row-parallel → Partial"
        return ""


def _placement(placement: Any) -> str:
    return f"Shard({placement.dim})" if placement.is_shard else _NOTE[placement.kind]


def _is_postfix(node: fx.Node) -> bool:
    """Written after its operand: x.transpose(1, 2), x.to(dtype), x[..., 8:]."""
    if node.op != "call_function" or is_collective(node.target) or not node_inputs(node):
        return False
    cast = node.target is aten.to.dtype
    return cast or rule_of(node).kind == "view" and len(node_inputs(node)) == 1


def _is_bias_add(node: fx.Node) -> bool:
    """linear(x, w) + bias, a parameter of the width of its result."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node_inputs(node)) != 2:
        return False
    product, bias = node_inputs(node)
    if product.target is not aten.linear.default or info(bias).role is not Role.PARAMETER:
        return False
    return len(node_inputs(product)) == 2 and info(bias).shape == info(product).shape[-1:]


def _short(module: str) -> str:
    """ "self_attn.q_proj" → "q"; "mlp.c_fc" → "c_fc"; "self_attn" → "attn"."""
    leaf = module.rpartition(".")[2].removeprefix("self_")
    if leaf.endswith("head"):
        return "logits"
    return leaf.removesuffix("_proj") if leaf != "c_proj" else leaf


def _symbols(argument: Any) -> set[Any]:
    if isinstance(argument, list | tuple):
        return set().union(*(_symbols(a) for a in argument)) if argument else set()
    return set(getattr(argument, "free_symbols", ()))


def _dims_of(facts: NodeInfo) -> dict[Any, int]:
    return {size: i for i, size in enumerate(facts.shape) if size in (B, S)}
