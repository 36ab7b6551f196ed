"""Time of computing: a roofline per op, summed over a block, at least what the host needs to launch it.

T_op = (T_math^q + T_memory^q)^(1/q)        q = 4, a smooth maximum (COST_MODEL 2.1; no tiles yet)
T_block = max(Σ T_op, launches · t_launch)  the host runs ahead: a floor of blocks, not ops
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import sympy

from autopar.cost_models.collectives import Group, collective_time_s
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.layer_costs import CHUNKS, B, LayerCosts, S, Transfer
from autopar.errors import PlanError
from autopar.plan.recompute import LAYER, group_of

_SMOOTHNESS = 4
KINDS = ("matmul", "attention", "memory")
# Kernels an op launches in backward: both gradients of a matmul, one otherwise.
_BACKWARD_LAUNCHES = {"matmul": 2, "attention": 1, "memory": 1}


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one pass over a block, by cause; they add up to `total_s`."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0  # what the host floor adds to the three above
    tp_s: float = 0.0
    cp_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.matmul_s + self.attention_s + self.memory_s + self.launch_s + self.tp_s + self.cp_s

    def __add__(self, other: PhaseTime) -> PhaseTime:
        return PhaseTime(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.launch_s + other.launch_s,
            self.tp_s + other.tp_s,
            self.cp_s + other.cp_s,
        )

    def __mul__(self, factor: float) -> PhaseTime:
        return PhaseTime(
            factor * self.matmul_s,
            factor * self.attention_s,
            factor * self.memory_s,
            factor * self.launch_s,
            factor * self.tp_s,
            factor * self.cp_s,
        )


@dataclass(frozen=True)
class RecomputePrice:
    """A choice of what backward computes again, per layer: bytes kept instead, seconds of what runs again.

    live_bytes: what backward holds again at once, of all the layers of a group.
    """

    saved_bytes: float
    time: PhaseTime
    live_bytes: float
    group: int = 1


@dataclass(frozen=True)
class BlockPrice:
    """A block with numbers: seconds and bytes of one micro-batch on one rank, recompute excluded."""

    name: str
    forward: PhaseTime
    backward: PhaseTime
    dgrad_wgrad: tuple[PhaseTime, PhaseTime]  # of backward: the gradients of inputs, those of weights
    sync_s: float  # tp reductions of gradients, once a gradient synchronisation
    parameters: int
    tied_parameters: int
    saved_bytes: float
    working_bytes: float
    buffer_bytes: int = 0
    data: tuple[tuple[str, float], ...] = ()  # (collective, bytes) over dp within forward and backward
    logits_bytes: float = 0.0  # of saved_bytes
    logits_peak_bytes: float = 0.0  # the most at once of one micro-batch, saved_bytes included
    recompute: Mapping[str, RecomputePrice] = field(default_factory=dict)
    waiting_bytes: float = 0.0

    @property
    def work_s(self) -> float:
        return self.forward.total_s + self.backward.total_s

    def recomputed(self, what: str) -> RecomputePrice:
        """The price of a choice; in a group all layers but the last run to their end."""
        if (size := group_of(what)) == 1:
            if what not in self.recompute:
                raise PlanError(f"recompute: {self.name} has no {what}: it has {', '.join(map(repr, self.recompute))}")
            return self.recompute[what]
        one = self.recompute[LAYER]
        time = (self.forward * (size - 1) + one.time) * (1 / size)
        return RecomputePrice(one.saved_bytes / size, time, size * one.live_bytes, size)


def op_time_s(kind: str, flops: float, size_bytes: float, hardware: Hardware, precision: str) -> float:
    """Seconds of one op on an idle device; `kind` picks the achieved share of peak."""
    efficiency = hardware.attention_efficiency if kind == "attention" else hardware.matmul_efficiency
    math_s = flops / (hardware.peak(precision) * efficiency) if kind != "memory" else 0.0
    memory_s = size_bytes / (hardware.memory_bytes_per_s * hardware.memory_efficiency)
    largest = max(math_s, memory_s)
    if largest == 0.0:
        return 0.0
    return float(largest * (1 + (min(math_s, memory_s) / largest) ** _SMOOTHNESS) ** (1 / _SMOOTHNESS))


def price_block(
    layer: LayerCosts,
    micro_batches: Sequence[int],
    sequence: int,
    hardware: Hardware,
    precision: str,
    groups: Mapping[str, Group],
) -> list[BlockPrice]:
    """The block at each micro-batch size (samples); `sequence`: tokens of a rank; `groups`: of cp and of tp."""
    evaluate = block_evaluator(layer)
    return [price_values(layer, evaluate(b, sequence, 1), hardware, precision, groups) for b in micro_batches]


_TORCHS = {"FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv, "PythonMod": operator.mod}  # its own of sympy


@lru_cache(maxsize=256)
def block_evaluator(layer: LayerCosts) -> Callable[[int, int, int], list[float]]:
    """All expressions of a block as one compiled function of (b, s, chunks); equal ones are computed once."""
    expressions: list[sympy.Expr] = []
    for op in layer.ops:
        expressions += [op.forward_flops, op.forward_bytes, op.backward_flops, op.backward_bytes]
        expressions += op.launches or (1, _BACKWARD_LAUNCHES[op.kind])
    expressions += [transfer.size_bytes for transfer in (*layer.transfers, *layer.data_transfers)]
    expressions += [size for part in layer.recompute for size in (part.saved_bytes, part.live_bytes)]
    expressions += [layer.saved_bytes, layer.working_bytes]
    expressions += [layer.logits_bytes, layer.logits_peak_bytes, layer.waiting_bytes]
    expressions = [sympy.sympify(expression) for expression in expressions]
    unique = list(dict.fromkeys(expressions))
    place = {expression: index for index, expression in enumerate(unique)}
    order = [place[expression] for expression in expressions]
    function = sympy.lambdify((B, S, CHUNKS), unique, modules=[_TORCHS, "math"])

    def evaluate(b: int, s: int, chunks: int) -> list[float]:
        values = function(b, s, chunks)
        return [float(values[index]) for index in order]

    return evaluate


def price_values(
    layer: LayerCosts, values: list[float], hardware: Hardware, precision: str, groups: Mapping[str, Group]
) -> BlockPrice:
    backward = dict.fromkeys(KINDS, 0.0)
    dgrad_wgrad, dgrad_wgrad_launches = (dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)), [0.0, 0.0]
    backward_launches = 0.0
    ops: list[tuple[float, float]] = []
    op_s: dict[tuple[str, str], float] = {}
    for index, op in enumerate(layer.ops):
        f_flops, f_bytes, b_flops, b_bytes, f_launches, b_launches = values[6 * index : 6 * index + 6]
        op_s[op.name, "forward"] = op_time_s(op.kind, f_flops, f_bytes, hardware, precision)
        op_s[op.name, "backward"] = op_time_s(op.kind, b_flops, b_bytes, hardware, precision)
        ops.append((op_s[op.name, "forward"], f_launches))
        backward[op.kind] += op_s[op.name, "backward"]
        b_launches = b_launches if b_flops or b_bytes else 0
        backward_launches += b_launches
        for half, share in enumerate(op.dgrad_wgrad):
            dgrad_wgrad[half][op.kind] += share * op_s[op.name, "backward"]
            dgrad_wgrad_launches[half] += share * b_launches
    at = 6 * len(layer.ops)
    comm_s = [
        _transfer_s(transfer, size_bytes, op_s, groups, hardware)
        for transfer, size_bytes in zip(layer.transfers, values[at:], strict=False)
    ]

    def over_ranks(phase: str, places: Iterable[int] = range(len(comm_s))) -> tuple[float, float]:
        """Seconds over cp, and over tp."""
        chosen = [(layer.transfers[i], comm_s[i]) for i in places if layer.transfers[i].phase == phase]
        over_cp, over_tp = (sum(s for t, s in chosen if t.axis == axis) for axis in ("cp", "tp"))
        return over_cp, over_tp

    over_dp = zip(layer.data_transfers, values[at + len(layer.transfers) :], strict=False)
    saved, working, logits, logits_peak, waiting = values[-5:]
    kept = values[-5 - 2 * len(layer.recompute) : -5]
    recompute = {
        part.what: RecomputePrice(
            kept[2 * i],
            _forward(layer, ops, part.ops, over_ranks("forward", part.transfers), hardware),
            kept[2 * i + 1],
        )
        for i, part in enumerate(layer.recompute)
    }
    return BlockPrice(
        name=layer.name,
        forward=_forward(layer, ops, range(len(ops)), over_ranks("forward"), hardware),
        backward=_phase(backward, backward_launches, over_ranks("backward"), hardware),
        dgrad_wgrad=(
            _phase(dgrad_wgrad[0], dgrad_wgrad_launches[0], over_ranks("backward"), hardware),
            _phase(dgrad_wgrad[1], dgrad_wgrad_launches[1], (0.0, 0.0), hardware),
        ),
        sync_s=sum(over_ranks("sync")),
        parameters=layer.parameters,
        tied_parameters=layer.tied_parameters,
        saved_bytes=saved,
        working_bytes=working,
        buffer_bytes=layer.buffer_bytes,
        data=tuple((transfer.collective, size_bytes) for transfer, size_bytes in over_dp),
        logits_bytes=logits,
        logits_peak_bytes=logits_peak,
        recompute=recompute,
        waiting_bytes=waiting,
    )


def _transfer_s(
    transfer: Transfer,
    size_bytes: float,
    op_s: Mapping[tuple[str, str], float],
    groups: Mapping[str, Group],
    hardware: Hardware,
) -> float:
    """Seconds of a transfer that delay the block; op_s: of each (op, phase)."""
    each_s = collective_time_s(transfer.collective, size_bytes, groups[transfer.axis], hardware)
    if transfer.behind:  # while one part of the op is computed
        each_s -= hardware.overlap * min(each_s, op_s[transfer.behind, transfer.phase] / (transfer.times + 1))
    return transfer.times * each_s


def _forward(
    layer: LayerCosts,
    ops: Sequence[tuple[float, float]],
    places: Sequence[int],
    over_ranks_s: tuple[float, float],
    hardware: Hardware,
) -> PhaseTime:
    """Seconds of some of the block's ops, by kind; ops: (seconds, launches) of each."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for place in places:
        seconds[layer.ops[place].kind] += ops[place][0]
    return _phase(seconds, sum(ops[place][1] for place in places), over_ranks_s, hardware)


def _phase(
    seconds: dict[str, float], launches: float, over_ranks_s: tuple[float, float], hardware: Hardware
) -> PhaseTime:
    cp_s, tp_s = over_ranks_s
    device_s = sum(seconds.values())
    floor_s = max(0.0, launches * hardware.launch_s - device_s)
    return PhaseTime(seconds["matmul"], seconds["attention"], seconds["memory"], floor_s, tp_s, cp_s)
