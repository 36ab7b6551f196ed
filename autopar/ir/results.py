"""Ops of several results as one op a result: `topk` as `topk_values` and `topk_indices`.

A node of a program has one value, and so one shape and one placement. The emitted program writes
`torch.topk(x, 2).values`; where both results of an op that ranks are read, the values are gathered at the indices, and
where both of another are read it runs twice.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_SEVERAL = (
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim, aten.kthvalue.default,
    aten.median.dim, aten.cummax.default, aten.cummin.default, aten.var_mean.correction, aten.std_mean.correction,
    aten.var_mean.dim, aten.aminmax.default,
)  # fmt: skip
_UNNAMED = {"var_mean": ("var", "mean"), "std_mean": ("std", "mean")}
_library = torch.library.Library("autopar_results", "DEF")

# op of several results → the op of each; op of a result → (the op it is of, the place and the name of the result)
RESULTS: dict[Any, tuple[Any, ...]] = {}
RESULT_OF: dict[Any, tuple[Any, int, str]] = {}


def _register(target: Any) -> None:
    packet, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    names = _UNNAMED.get(packet) or tuple(r.name for r in target._schema.returns)
    takes = str(target._schema).partition("(")[2].rpartition(" -> ")[0]
    made = []
    for place, name in enumerate(names):
        own = "_".join(filter(None, (packet, overload.replace("default", ""), name)))
        _library.define(f"{own}({takes} -> Tensor")
        _library.impl(
            own, lambda *args, _place=place, **kwargs: target(*args, **kwargs)[_place], "CompositeImplicitAutograd"
        )
        op = getattr(torch.ops.autopar_results, own).default
        RESULT_OF[op] = (target, place, name)
        made.append(op)
    RESULTS[target] = tuple(made)


for _target in _SEVERAL:
    _register(_target)
