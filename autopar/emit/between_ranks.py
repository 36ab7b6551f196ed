"""Functions of the runtime in which ranks meet, as Python: collectives, and attention to a sequence that cp cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..ir.graph import arguments, info, node_inputs, op_name
from ..ir.ops import gathered_attention, is_collective, ring_attention
from ..rules.arguments import option
from .text import Render, Text, literal

Writer = Callable[[fx.Node, Render], Text]


def writer_over_ranks(target: Any) -> Writer | None:
    """What writes an op of ours that reads values of other ranks; None for other ops."""
    return _collective if is_collective(target) else _WRITERS.get(target)


def _collective(node: fx.Node, render: Render) -> Text:
    name = op_name(node)
    keys = {"all_to_all": ("from_dim", "to_dim")}.get(name, ("dim",))
    value, *dims = arguments(node)
    shown = "".join(f", {k}={d}" for k, d in zip(keys[: len(dims)], dims, strict=True))
    text = f'{name}({render(value).source}{shown}, axis="{node.kwargs["axis"]}")'
    return Text(text, imports=frozenset({f"collectives.{name}"}))


def _attention(node: fx.Node, render: Render) -> Text:
    name, imports = op_name(node), {f"attention.{op_name(node)}"}
    q, k, v = (render(n).source for n in node_inputs(node))
    strategy = info(node).strategy
    if strategy is not None and strategy.inputs[0].is_shard and not strategy.inputs[1].is_shard:
        k, v = (f'head_of({x}, axis="tp")' for x in (k, v))  # fewer K/V heads than ranks of tp
        imports.add("heads.head_of")
    given = [q, k, v, f'axis="{node.kwargs["axis"]}"']
    given += [f"{flag}=True" for flag in ("is_causal", "zigzag") if node.kwargs[flag]]
    given += [f"window={node.kwargs['window']}"] if option(node, "window") is not None else []
    given += [f"scale={literal(node.kwargs['scale'])}"] if node.kwargs["scale"] is not None else []
    return Text(f"{name}({', '.join(given)})", imports=frozenset(imports))


_WRITERS: dict[Any, Writer] = {
    ring_attention: _attention,
    gathered_attention: _attention,
}
