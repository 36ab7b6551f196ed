"""One Python class a layer class."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import Block, Call, Role
from .emission import Emission
from .names import class_name


def layer_class(e: Emission, block: Block) -> str:
    """The class of a layer block: parameters, forward, and the body in a method of its own when recomputed."""
    calls = [c for c in e.program.layer_calls if c.block == block.name]
    names = e.value_names(block)
    body = e.body(block, names)
    arguments = ", ".join(names.values())
    returned = ", ".join(body.results)
    recomputed = any(e.program.layer_calls[i].block == block.name for i in e.program.recompute)
    parameters = [e.declare(n) for n in block.placeholders(Role.PARAMETER, Role.BUFFER)]
    lines = [
        f"class {class_name(block.name, e.program)}(nn.Module):",
        f'    """{_count_text(calls)}{_layout(e, calls)}."""',
        "",
        f"    def __init__(self{', recompute' if recomputed else ''}):",
        "        super().__init__()",
        *(["        self._recompute = recompute"] if recomputed else []),
        *(f"        {line}" for line in parameters),
        "",
    ]
    if recomputed:
        lines += [
            f"    def forward(self, {arguments}):",
            "        if self._recompute and torch.is_grad_enabled():",
            f"            return checkpoint(self._layer, {arguments}, use_reentrant=False)",
            f"        return self._layer({arguments})",
            "",
            f"    def _layer(self, {arguments}):{e.shapes(names)}",
        ]
    else:
        lines.append(f"    def forward(self, {arguments}):{e.shapes(names)}")
    lines += [f"        {line}" for line in body.lines]
    lines.append(f"        return {returned}")
    return "\n".join(lines)


def _layout(e: Emission, calls: Sequence[Call]) -> str:
    layout = e.plan.solution.name
    kinds = [f"tp={e.plan.mesh.tp}{f' ({layout})' if layout else ''}"] if e.plan.mesh.tp > 1 else []
    indices = [i for i, c in enumerate(e.program.layer_calls) if c in calls]
    again = [i for i in indices if i in e.program.recompute]
    if again:
        kinds.append("recomputed" if len(again) == len(indices) else f"{len(again)} of {len(indices)} recomputed")
    return "".join(f" · {kind}" for kind in kinds)


def _count_text(calls: Sequence[Call]) -> str:
    paths = list(dict.fromkeys(call.path for call in calls))
    layers = paths[0] if len(paths) == 1 else f"{len(paths)} layers: {paths[0]} … {paths[-1]}"
    return layers if len(paths) == len(calls) else f"{layers}, {len(calls)} uses"
