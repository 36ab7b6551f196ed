"""Time of a collective: alpha-beta over the slowest link on its path, as nccl-tests counts bytes.

    ring:  T = base + inter_hops · l_inter + (steps − inter_hops) · l_intra + factor(n) · S / bandwidth
           steps and factor: all-reduce 2(n−1), 2(n−1)/n; all-gather and reduce-scatter n−1, (n−1)/n
    tree (all-reduce only): the latency is base + 2((g−1) l_intra + log₂N · l_inter) instead

n ranks in N nodes, g ranks a node. A group with g ranks a node uses g network cards, so its bandwidth between
nodes is min(intra, g · inter) (COST_MODEL 2.2). Source: NCCL src/graph/tuning.cc, first form (one protocol).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from autopar.cost_models.hardware import Hardware
from autopar.runtime.choices import Mesh

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Group:
    """Ranks that take part in one collective, `per_node` of them in each node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.per_node)


def axis_group(mesh: Mesh, axis: str, gpus_per_node: int) -> Group:
    """The group of one mesh axis ("data" = dp × cp), ranks numbered pp, dp, cp, tp from outer to inner."""
    inner = {
        "tp": 1,
        "cp": mesh.tp,
        "data": mesh.tp,
        "dp": mesh.cp * mesh.tp,
        "pp": mesh.dp * mesh.cp * mesh.tp,
    }
    ranks = mesh.dp * mesh.cp if axis == "data" else mesh.size(axis)
    return Group(ranks, max(1, min(ranks, gpus_per_node // inner[axis])))


def sharding_groups(mesh: Mesh, shards: int, gpus_per_node: int) -> tuple[Group, Group]:
    """Ranks of the data axis that share out one copy, neighbours, and ranks that hold the same part of theirs."""
    copies = mesh.dp * mesh.cp // shards
    within = max(1, min(shards, gpus_per_node // mesh.tp))
    return Group(shards, within), Group(copies, max(1, min(copies, gpus_per_node // (mesh.tp * shards))))


def collective_time_s(collective: str, size_bytes: float, group: Group, hardware: Hardware) -> float:
    """Seconds of one collective on `size_bytes`, the whole (gathered) tensor; 0 for a group of one.

    `all_to_all`: each rank holds 1/n of the tensor and keeps 1/n of that. `send` is one message.
    """
    n = group.ranks
    if n <= 1 or size_bytes <= 0:
        return 0.0
    bytes_on_wire = size_bytes * _factor(collective, n)
    latency = min(_ring_latency_s(collective, group, hardware), _tree_latency_s(collective, group, hardware))
    return latency + bytes_on_wire / bandwidth_bytes_per_s(collective, group, hardware)


def bandwidth_bytes_per_s(collective: str, group: Group, hardware: Hardware) -> float:
    """Achieved bytes/s of the slowest link on the path, by rank."""
    if group.nodes == 1:
        return hardware.intra.bytes_per_s
    cards = 1 if collective == "send" else group.per_node
    return min(hardware.intra.bytes_per_s, cards * hardware.inter.bytes_per_s)


def _factor(collective: str, n: int) -> float:
    share = (n - 1) / n
    factors = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share / n,
        "broadcast": 1.0,
        "send": 1.0,
    }
    return factors[collective]


def _ring_latency_s(collective: str, group: Group, hardware: Hardware) -> float:
    rounds = 2 if collective == "all_reduce" else 1
    steps, across = rounds * (group.ranks - 1), rounds * (group.nodes - 1)
    if collective == "send":
        steps, across = 1, int(group.nodes > 1)
    return hardware.base_latency_s + across * hardware.inter.latency_s + (steps - across) * hardware.intra.latency_s


def _tree_latency_s(collective: str, group: Group, hardware: Hardware) -> float:
    if collective != "all_reduce":
        return float("inf")
    hops = 2 * ((group.per_node - 1) * hardware.intra.latency_s + log2(group.nodes) * hardware.inter.latency_s)
    return hardware.base_latency_s + hops
