"""The state that the writers of model.py share: the program, its plan, the names and the roles of its values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..ir.counts import dims_of
from ..ir.graph import EPILOGUE, PROLOGUE, B, Block, Program, S, info
from ..plan.plan import Plan
from .idioms import Idioms
from .names import class_names
from .roles import Roles
from .value_names import Names, block_arguments, value_names


@dataclass(frozen=True)
class Predicted:
    """The predictions of the cost model for header and log; `mfu` of 1, `peak_bytes` of the fullest GPU.

    unit: what the plan is spread over, "GPU" or "process" of a CPU.
    """

    step_s: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    peak_bytes: float | None = None
    mfu: float | None = None
    unit: str = "GPU"


@dataclass
class Emission:
    """One emission of model.py. names: value that passes between calls → its Python name; classes: layer block → class.

    opaque: the file of the modules that are kept whole, whose hash the program has. functions and renamed are those of
    the idioms.
    """

    program: Program
    plan: Plan
    predicted: Predicted
    opaque: bytes = b""
    _roles: dict[str, Roles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        idioms = Idioms(self.program)
        self.program, self.functions, self.renamed = idioms.program, idioms.functions, idioms.renamed
        self.names = value_names(self.program)
        self.classes = class_names(self.program)

    @property
    def alone(self) -> bool:
        """Whether there is one stage, which is first and last."""
        return len(self.program.stages) == 1

    @property
    def outside(self) -> list[Block]:
        """The blocks with parameters that are no layers: what comes before, between and after them."""
        between = [call.block for call in self.program.layer_calls if self.program.is_between(call.block)]
        blocks = self.program.blocks
        return [blocks[name] for name in dict.fromkeys((PROLOGUE, *between, EPILOGUE)) if name in blocks]

    def roles(self, block: Block) -> Roles:
        """The roles of a block's values; its results have the names that their readers use."""
        if block.name not in self._roles:
            results: dict[fx.Node, str] = {}
            if self.program.count(block.name):
                outputs = (self.names[value] for value in self.program.call_of(block.name).outputs)
                results = dict(zip(block.results, outputs, strict=False))
            self._roles[block.name] = Roles(block, results)
        return self._roles[block.name]

    def arguments(self, block: Block) -> Names:
        """The names that a block's values and inputs have in it."""
        return block_arguments(self.program, block, self.names)

    def parameters(self, block: Block) -> list[str]:
        """The arguments of a block's method: values, inputs, sizes that none of these tells; a device without any."""
        names = self.arguments(block)
        return [*names.values(), *map(str, untold_sizes(block.ops, names)), *([] if names else ["device"])]


def sizes_in(ops: Sequence[fx.Node]) -> set[Any]:
    """The sizes among `b` and `s` that some op takes as an argument."""
    return _symbols([argument for node in ops for argument in (*node.args, *node.kwargs.values())]) & {B, S}


def untold_sizes(ops: Sequence[fx.Node], arguments: Collection[fx.Node]) -> list[Any]:
    """The sizes among `b` and `s` that the ops need and no argument's shape has: a method takes them too."""
    known = {symbol for node in arguments for symbol in dims_of(info(node).shape)}
    return [size for size in (B, S) if size in sizes_in(ops) - known]


def _symbols(argument: Any) -> set[Any]:
    if isinstance(argument, list | tuple):
        return {symbol for item in argument for symbol in _symbols(item)}
    return set(getattr(argument, "free_symbols", ()))
