"""The objective of the intra-op search: seconds of ops, conversions and stored parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import sympy
from torch import fx

from ..cost_models.block import op_time_s
from ..cost_models.collectives import axis_group, collective_time_s
from ..cost_models.hardware import Hardware
from ..cost_models.layer_costs import Transfer
from ..cost_models.op_costs import op_cost
from ..cost_models.transfers import conversion_transfers, op_transfers, parameter_transfers
from ..ir.graph import B, NodeInfo, S, info
from ..liveness.saved import tensor_bytes
from ..placement import Placement, Strategy
from ..rules import rule_of
from ..runtime.choices import Mesh

_LAUNCH_S = 5e-6  # one eager kernel
_STATE_BYTES = 16  # a parameter with its gradient and Adam states (COST_MODEL 2.4)


class Costs(Protocol):
    """What the objective is made of, in seconds a micro-batch."""

    def strategy(self, node: fx.Node, strategy: Strategy) -> float: ...

    def stored(self, facts: NodeInfo, placement: Placement) -> float: ...

    def conversion(self, facts: NodeInfo, source: Placement, target: Placement) -> float: ...


@dataclass(frozen=True)
class TimeCosts:
    """Seconds on a machine: a roofline for ops, the collectives of conversions, at numbers for b and s.

    ranks: of the mesh axis `axis`, tp or cp.
    accumulation: micro-batches a gradient sync, over which the reduction of a parameter's gradient is spread.
    memory_s_per_byte: what a stored byte is worth: a micro-batch's time over the memory of a GPU, so that a
    layout which takes all of the memory is worth as much as one that takes twice as long.
    """

    hardware: Hardware
    precision: str
    ranks: int
    values: Mapping[sympy.Symbol, int]
    accumulation: int = 8
    memory_s_per_byte: float = 1e-12
    axis: str = "tp"

    def strategy(self, node: fx.Node, strategy: Strategy) -> float:
        cost = op_cost(node, strategy, rule_of(node), self.ranks)
        phases = ((cost.forward_flops, cost.forward_bytes), (cost.backward_flops, cost.backward_bytes))
        time = sum(
            op_time_s(cost.kind, self._number(flops), self._number(size), self.hardware, self.precision)
            for flops, size in phases
        )
        saved = self._number(tensor_bytes(info(node))) / (self.ranks if strategy.output.is_shard else 1)
        return time + self._transfers(op_transfers(node, strategy)) + self.memory_s_per_byte * saved

    def stored(self, facts: NodeInfo, placement: Placement) -> float:
        elements = self._number(tensor_bytes(facts)) / facts.dtype.itemsize
        size = _STATE_BYTES * elements / (self.ranks if placement.is_shard else 1)
        sync = self._transfers(parameter_transfers(facts, placement))
        return sync / self.accumulation + self.memory_s_per_byte * size

    def conversion(self, facts: NodeInfo, source: Placement, target: Placement) -> float:
        # Even one that only slices or pads is a kernel each way.
        return 2 * _LAUNCH_S + self._transfers(conversion_transfers(facts, source, target))

    def _transfers(self, transfers: Iterable[Transfer]) -> float:
        group = axis_group(Mesh(**{self.axis: self.ranks}), self.axis, self.hardware.gpus_per_node)
        return sum(collective_time_s(t.collective, self._number(t.size_bytes), group, self.hardware) for t in transfers)

    def _number(self, size: sympy.Expr) -> float:
        return _evaluate(size, self.values[B], self.values[S])


@lru_cache(maxsize=1 << 16)
def _evaluate(size: sympy.Expr, b: int, s: int) -> float:
    return float(size.subs({B: b, S: s}))
