"""Program + plan → the text of model.py: one class per layer class, one Model for all ranks."""

from __future__ import annotations

from torch import fx

from ..ir.graph import COUNT, B, Block, Program, Role, info
from ..plan.plan import Plan
from .body import sizes_in
from .constants import constants
from .emission import Emission, Predicted
from .header import docstring
from .layer_class import layer_class
from .model_class import model_class
from .names import argument_name, check_attributes


def model_source(program: Program, plan: Plan, predicted: Predicted, header: str = "", opaque: bytes = b"") -> str:
    """The text of model.py; `header` (the plan table) goes into its docstring, the hash of `opaque` before its use.

    PlanError where an attribute of the model has a name that the emitted classes use themselves.
    """
    check_attributes(program)
    e = Emission(program, plan, predicted, opaque)
    names = dict.fromkeys(c.block for c in program.layer_calls if not program.is_between(c.block))
    layers = [layer_class(e, e.program.blocks[name]) for name in names]
    code = "\n\n\n".join([*e.functions.values(), *layers, model_class(e), *_count_function(e)])
    settings = constants(e, "PATHS[" in code)
    parts = [docstring(program, plan, predicted, header), _imports(e, settings + code), settings]
    return "\n\n".join(part.strip("\n") for part in parts) + f"\n\n\n{code}\n"


def _imports(e: Emission, code: str) -> str:
    groups: dict[str, set[str]] = {}
    for item in e.imports | {"settings.Settings"}:
        module, _, name = item.rpartition(".")
        groups.setdefault(module, set()).add(name)
    lines = ["import torch"] if "torch." in code else []
    lines += ["import torch.nn.functional as F"] if "F." in code else []
    lines += ["from torch import nn"]
    if "checkpoint(" in code:
        lines.append("from torch.utils.checkpoint import checkpoint")
    ours = [f"from runtime.{m} import {', '.join(sorted(names))}" for m, names in sorted(groups.items())]
    # Ruff sorts these two as one block or two, by where it is run.
    return "\n".join([*lines, "", "# isort: split", *ours])


def _count_function(e: Emission) -> list[str]:
    """count_targets, where the loss is divided by something of the global batch."""
    if COUNT not in e.program.blocks:
        return []
    block = e.program.blocks[COUNT]
    placeholders = _inputs_of_count(e, block)
    inputs = [info(n).ref for n in placeholders]
    names = {n: argument_name(info(n).ref) for n in placeholders}
    counts = {n: f"count_{i}" if i > 1 else "count" for i, n in enumerate(block.results, 1)}
    body = e.body(block, names, called=counts)
    given, own = ", ".join(inputs), ", ".join(names.values())
    doc = "The number of terms in the loss of these samples."
    if len(body.results) > 1:
        doc = "What these samples add to _count, _count_2, …"
    lines = [f"def count_targets({given}):", f'    """{doc}"""']
    if given != own:  # an input called `F` would hide the module of that name
        lines += [f"    return _counted({given})", "", "", f"def _counted({own}):"]
    return ["\n".join([*lines, *(f"    {line}" for line in body.returned())])]


def _inputs_of_count(e: Emission, block: Block) -> list[fx.Node]:
    """The inputs that the counts read, and those that tell the sizes and device of targets that forward makes."""
    found = block.placeholders(Role.INPUT)
    others = [node for other in e.program.blocks.values() for node in other.placeholders(Role.INPUT)]
    for size in sorted(sizes_in(block.ops) or {B}, key=str):
        if not any(size in info(node).shape for node in found):
            found += [node for node in others if size in info(node).shape][:1]
    return found
