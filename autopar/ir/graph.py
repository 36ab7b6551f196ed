"""The program representation: a list of calls of a few blocks, each block a small torch.fx graph.

A traced model is one block called once. `trace.layers` cuts it into prologue, layer classes and
epilogue; from then on a model of 126 layers is three or four blocks and 128 calls. Shapes are sympy
expressions in `b` (samples of a micro-batch) and `s` (tokens of a sequence); so are shape arguments
of ops. Every fact about a node lives in one `NodeInfo`; nothing else touches `node.meta`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from ..placement import Placement, Strategy
from ..plan.recompute import RecomputeChoice, RecomputeRegion
from .custom import OpaqueCall
from .identifiers import COUNTS
from .lengths import FixedLength, Padding

B = sympy.Symbol("b", positive=True, integer=True)
S = sympy.Symbol("s", positive=True, integer=True)

Shape = tuple[sympy.Expr, ...]
_KEY = "autopar"


class Role(Enum):
    """What a node is. Parameters, buffers, inputs and values are the placeholders of a block."""

    OP = "op"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"  # a keyword input of the model
    VALUE = "value"  # an output of an earlier call
    CONVERT = "convert"


@dataclass(frozen=True)
class NodeInfo:
    """Typed facts of one node.

    `shape` is global (unsharded). `ref` names what a placeholder stands for: a parameter or buffer
    relative to the call's path, a keyword input, or (VALUE) the position among the call's inputs.
    `module` is the path of the module that ran the op and `source` the user's line; `island` what is in fp32 from here
    on, though the author computes it in half precision. `window`: of attention, what its mask is shown to be: causal,
    with so many of the last keys. `strategies`: of the node by mesh axis, once it is typed there.
    """

    shape: Shape
    dtype: torch.dtype
    requires_grad: bool = False
    role: Role = Role.OP
    ref: str = ""
    module: str = ""
    source: str = ""
    island: str = ""
    window: int | None = None
    strategies: Mapping[str, Strategy] = field(default_factory=dict)

    @property
    def strategy(self) -> Strategy | None:
        """On tp."""
        return self.strategies.get("tp")

    @property
    def placement(self) -> Placement:
        """On tp, of a program that is typed there."""
        return self.strategies["tp"].output

    def placement_on(self, axis: str) -> Placement | None:
        """How the value lies on an axis on which it is typed."""
        return self.strategies[axis].output if axis in self.strategies else None

    def typed(self, strategy: Strategy, axis: str = "tp") -> NodeInfo:
        return replace(self, strategies={**self.strategies, axis: strategy})

    def made(self, **changes: Any) -> NodeInfo:
        """The facts of an op on the value that leaves it lying as it does, on each axis."""
        passed = {axis: Strategy((s.output,), s.output) for axis, s in self.strategies.items()}
        return replace(self, **{"role": Role.OP, "ref": "", "strategies": passed, **changes})


def info(node: fx.Node) -> NodeInfo:
    facts: NodeInfo = node.meta[_KEY]
    return facts


def set_info(node: fx.Node, facts: NodeInfo) -> fx.Node:
    node.meta[_KEY] = facts
    return node


def set_strategy(node: fx.Node, strategy: Strategy, axis: str = "tp") -> None:
    set_info(node, info(node).typed(strategy, axis))


def update_info(node: fx.Node, **changes: Any) -> None:
    node.meta[_KEY] = replace(info(node), **changes)


def arguments(node: fx.Node) -> Any:
    """node.args, without fx's union of argument types: what an op takes at a position is known by the op."""
    return node.args


def op_name(node: fx.Node) -> str:
    """The name of an op without its overload: "linear", "add", "all_gather"."""
    target: Any = node.target
    name: str = getattr(target, "overloadpacket", target).__name__
    return name


def is_count(facts: NodeInfo) -> bool:
    """Whether a placeholder is a count of the global batch: the model has no such buffer."""
    return facts.role is Role.BUFFER and COUNTS.fullmatch(facts.ref) is not None


def node_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node in order, one entry for each occurrence."""
    found: list[fx.Node] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, fx.Node):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            for item in argument:
                visit(item)

    visit(node.args)
    visit(tuple(node.kwargs.values()))
    return found


@dataclass(frozen=True)
class Block:
    """One fx graph: placeholders, ops, and an output node that returns a tuple."""

    name: str
    graph: fx.Graph

    def copy(self) -> Block:
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        return Block(self.name, graph)

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes but the output, in order."""
        return [node for node in self.graph.nodes if node.op != "output"]

    @property
    def ops(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def placeholders(self, *roles: Role) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder" and (not roles or info(n).role in roles)]

    @property
    def output(self) -> fx.Node:
        last: fx.Node = next(iter(reversed(self.graph.nodes)))
        return last

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes the block returns."""
        returned: tuple[fx.Node, ...] = self.output.args[0]  # type: ignore[assignment]
        return returned


@dataclass(frozen=True)
class Call:
    """One use of a block. `path` prefixes its parameter names ("model.layers.3", or "" for none);
    `inputs` and `outputs` name the values that pass between calls, in the block's order."""

    block: str
    path: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def full_name(self, ref: str) -> str:
        return f"{self.path}.{ref}" if self.path else ref


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a parameter, a buffer or a model input."""

    shape: Shape
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass(frozen=True)
class Fused:
    """A parameter of the user's model that is emitted in parts: concatenated on `dim` they are it again."""

    parts: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its layers [start, stop), and the values it gets from and gives to its neighbours."""

    start: int
    stop: int
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()


# Names of the blocks that are not layers; "count" is called by no call: it has this rank's
# shares of the counts of the global batch, in their order; a program without counts has no such block.
MODEL, TABLES, PROLOGUE, EPILOGUE, COUNT = "model", "tables", "prologue", "epilogue", "count"
BETWEEN = "between"  # "between2", …: what a model does between two of its layers; placed and counted like a layer


@dataclass(frozen=True)
class Program:
    """A model as calls of blocks, with what lies outside them.

    name: class name of the model. tied: alias → original parameter name. fused: original name → parts. sequence_range:
    lengths of `s` for which the trace holds, of the multiples of sequence_multiple; fixed_length: of one alone, in
    shapes too. mutated: buffers that forward updates. opaque: modules that are kept whole, by name. persistent: the
    buffers of the model's state_dict, of which `buffers` holds those that the loss reads. stages, recompute and regions
    (block → what backward computes again in layers of that class) are set by the passes. zigzag: of 2·cp chunks of the
    sequence, rank r of cp has r and 2·cp − 1 − r: later queries meet more keys. padding: of samples shorter than `s`.
    """

    name: str
    blocks: dict[str, Block]
    calls: tuple[Call, ...]
    parameters: dict[str, TensorInfo]
    buffers: dict[str, TensorInfo]
    inputs: dict[str, TensorInfo]
    tied: dict[str, str] = field(default_factory=dict)
    fused: dict[str, Fused] = field(default_factory=dict)
    sequence_range: tuple[int, int] = (1, 1 << 30)
    sequence_multiple: int = 1
    fixed_length: FixedLength | None = None
    stages: tuple[Stage, ...] = ()
    recompute: tuple[RecomputeChoice, ...] = ()
    regions: dict[str, tuple[RecomputeRegion, ...]] = field(default_factory=dict)
    mutated: tuple[str, ...] = ()
    persistent: dict[str, TensorInfo] = field(default_factory=dict)
    opaque: dict[str, OpaqueCall] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    zigzag: bool = False
    padding: tuple[Padding, ...] = ()

    def copy_blocks(self) -> Program:
        """The same program with blocks that a pass may change."""
        return replace(self, blocks={name: block.copy() for name, block in self.blocks.items()})

    def stage_of_call(self, call: Call) -> range:
        """The stages that make a call: one, or all of them for tables."""
        if call.block == TABLES:
            return range(len(self.stages))
        if call.block in (PROLOGUE, EPILOGUE):
            index = 0 if call.block == PROLOGUE else len(self.stages) - 1
            return range(index, index + 1)
        layer = self.layer_calls.index(call)
        index = next(i for i, stage in enumerate(self.stages) if stage.start <= layer < stage.stop)
        return range(index, index + 1)

    def producer(self, value: str) -> tuple[Call, int]:
        """The call that gives a value, and its place among the call's outputs."""
        return next((c, c.outputs.index(value)) for c in self.calls if value in c.outputs)

    def value_info(self, value: str) -> NodeInfo:
        call, place = self.producer(value)
        return info(self.blocks[call.block].results[place])

    @property
    def layer_calls(self) -> tuple[Call, ...]:
        return tuple(c for c in self.calls if c.block not in (MODEL, TABLES, PROLOGUE, EPILOGUE))

    def is_between(self, block: str) -> bool:
        """Whether a block is what the model does between two layers, and so no module of its own."""
        return block.removeprefix(BETWEEN).isdigit() or block == BETWEEN

    def count(self, block: str) -> int:
        return sum(call.block == block for call in self.calls)

    def call_of(self, block: str) -> Call:
        """The first call of a block, which stands for all of them."""
        return next(call for call in self.calls if call.block == block)

    def each_op(self) -> Iterator[tuple[Block, fx.Node]]:
        for block in self.blocks.values():
            for node in block.ops:
                yield block, node
