"""Machines as data: what one GPU can do and how GPUs are linked. Figures and sources: `hardware/*.yaml`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import PlanError
from autopar.plan.options import check, shown

DEFAULT_GPU = "h100-sxm-80gb"
GIB = 2**30
_DATA = Path(__file__).parent / "hardware"


@dataclass(frozen=True)
class Link:
    """What a GPU can send: achieved bytes/s per direction, and seconds a hop."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Host:
    """A GPU's share of its node's CPU side: usable bytes, achieved bytes/s of its memory, and of PCIe each way."""

    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


@dataclass(frozen=True)
class Hardware:
    """One GPU (or one process on a CPU) and its links.

    Efficiencies are achieved shares of the peak; `overlap` is the share of a collective that can be hidden
    behind computing (0 on a CPU, whose cores do both). `host` is None where the device is the host itself.
    """

    name: str
    peak_flops: Mapping[str, float]  # FLOP/s by dtype
    memory_bytes_per_s: float
    memory_bytes: float  # usable, before the context
    gpus_per_node: int
    intra: Link
    inter: Link
    base_latency_s: float  # of any collective
    launch_s: float  # host time of one eager op
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    context_bytes: float
    communicator_bytes: float
    allocator_slack: float  # reserved over allocated, minus one
    overlap: float = 1.0
    host: Host | None = None
    source: str = ""

    @property
    def label(self) -> str:
        """The name as the table prints it: H100-SXM-80GB."""
        return self.name.upper()

    @property
    def unit(self) -> str:
        """What there are several of: "GPU", or "process" of a CPU."""
        return unit_of(self.name)

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of matmuls in this precision. PlanError where the hardware has none."""
        if precision not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise PlanError(f"{self.name} has no {precision} peak (known: {known}): choose another precision or GPU")
        return self.peak_flops[precision]


@dataclass(frozen=True)
class Cluster:
    """`gpus` of one kind, in nodes of `gpus_per_node` (default: the usual node of that GPU)."""

    gpus: int
    gpu: str = DEFAULT_GPU
    gpus_per_node: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str):
            raise PlanError(f"gpu={shown(self.gpu)}: use one of {', '.join(gpu_names())}")
        check({"gpus": 0 if self.gpus is None else self.gpus, "gpus_per_node": self.gpus_per_node})
        if self.gpu != "cpu":
            gpu(self.gpu)

    @property
    def hardware(self) -> Hardware:
        """The GPU with this cluster's node size. `cpu` is measured at first use (see calibrate.py)."""
        return replace(gpu(self.gpu, processes=self.gpus), gpus_per_node=self.per_node)

    @property
    def per_node(self) -> int:
        """GPUs of a node, known without measuring a CPU, all whose processes are one node."""
        return self.gpus_per_node or (self.gpus if self.gpu == "cpu" else gpu(self.gpu).gpus_per_node)

    @property
    def unit(self) -> str:
        """One of what `gpus` counts: "GPU", or "process" on a CPU."""
        return unit_of(self.gpu)

    @property
    def count(self) -> str:
        """ "64 GPUs", or "4 processes" on a CPU."""
        return f"{self.gpus} {unit_of(self.gpu, self.gpus)}"

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    def __str__(self) -> str:
        if self.gpu == "cpu":
            return f"{self.count} on this CPU"
        nodes = f" ({self.nodes} nodes × {min(self.gpus, self.per_node)})" if self.nodes > 1 else ""
        return f"{self.gpus} × {gpu(self.gpu).label}{nodes}"


def unit_of(name: str, count: int = 1) -> str:
    """What a plan for this hardware is spread over, in words: "GPU", "GPUs", "process", "processes"."""
    if name == "cpu":
        return "process" if count == 1 else "processes"
    return "GPU" if count == 1 else "GPUs"


def gpu(name: str, processes: int = 1) -> Hardware:
    """The entry of this name; for "cpu", this machine shared by `processes`. PlanError if unknown."""
    if name == "cpu":
        return _cpu(processes)
    table = _gpu_table()
    if name not in table:
        near = get_close_matches(name.lower(), table, n=3, cutoff=0.3)
        raise PlanError(f"unknown gpu {name!r}: nearest are {', '.join(near) or 'none'}; all: {', '.join(gpu_names())}")
    return table[name]


def gpu_names() -> tuple[str, ...]:
    """Every known name, "cpu" last."""
    return (*_gpu_table(), "cpu")


def default_gpu() -> str:
    """The local GPU's entry where torch sees one, else h100-sxm-80gb."""
    import torch

    if not torch.cuda.is_available():
        return DEFAULT_GPU
    properties = torch.cuda.get_device_properties(0)
    return match_device(properties.name, properties.total_memory)


def match_device(device_name: str, memory_bytes: float) -> str:
    """The entry whose words fit a CUDA device name ("NVIDIA H100 80GB HBM3") and whose memory is nearest."""
    words = device_name.lower().replace("-", " ").split()
    families = {name: name.split("-")[0] for name in _gpu_table()}
    fits = [name for name, family in families.items() if family in words or family.removeprefix("rtx") in words]
    if not fits:
        return DEFAULT_GPU
    pcie = [name for name in fits if ("pcie" in name) == ("pcie" in words)] or fits
    return min(pcie, key=lambda name: abs(_gpu_table()[name].memory_bytes - memory_bytes))


@cache
def _gpu_table() -> dict[str, Hardware]:
    data = yaml.safe_load((_DATA / "gpus.yaml").read_text())
    nodes = yaml.safe_load((_DATA / "nodes.yaml").read_text())
    by_gpu = {node["gpu"]: node for node in nodes["nodes"].values()}
    return {
        name: _entry(name, row, data["archs"][row["arch"]], data["common"], by_gpu.get(name, nodes["default"]))
        for name, row in data["gpus"].items()
    }


def _entry(
    name: str,
    row: Mapping[str, Any],
    arch: Mapping[str, float],
    common: Mapping[str, float],
    node: Mapping[str, Any],
) -> Hardware:
    linked = row["nvlink_domain"] >= node["gpus"]
    # PCIe carries both neighbours of a ring over one port, so half of the achieved rate each way.
    intra_gbps = row["nvlink_gbps"] * common["nvlink_achieved"] if linked else row["pcie"]["achieved_gbps"] / 2
    inter_gbps = node["nics"] * node["nic_gbit"] / 8 / node["gpus"] * common["nic_achieved"]
    gemm = row.get("gemm_max_eff", arch["gemm"]) * common["typical_gemm"]
    return Hardware(
        name=name,
        peak_flops={dtype: tera * 1e12 for dtype, tera in row["peak"].items()},
        memory_bytes_per_s=row["hbm_gbps"] * 1e9,
        memory_bytes=row["mem_usable_gib"] * GIB,
        gpus_per_node=node["gpus"],
        intra=Link(intra_gbps * 1e9, common["intra_step_us"] * 1e-6),
        inter=Link(inter_gbps * 1e9, common["inter_step_us"] * 1e-6),
        base_latency_s=common["base_latency_us"] * 1e-6,
        launch_s=common["launch_us"] * 1e-6,
        matmul_efficiency=gemm,
        attention_efficiency=arch["attention"],
        memory_efficiency=arch["memory"],
        context_bytes=common["context_gib"] * GIB,
        communicator_bytes=common["communicator_gib"] * GIB,
        allocator_slack=common["allocator_slack"],
        host=Host(
            node["host_gib"] * GIB * common["host_usable"] / node["gpus"],
            node["host_gbps"] * 1e9 * common["host_achieved"] / node["gpus"],
            row["pcie"]["achieved_gbps"] * 1e9,
        ),
        source=f"{row['src']}; node: {node['src']}",
    )


def _cpu(processes: int) -> Hardware:
    """This machine's CPU as `processes` single-thread GPUs (torchrun gives each process one thread)."""
    from autopar.cost_models.calibrate import measure_cpu

    measured = measure_cpu()
    share = min(1.0, (os.cpu_count() or 1) / processes)
    link = Link(measured.all_reduce_bytes_per_s * share, 0.0)
    return Hardware(
        name="cpu",
        peak_flops={dtype: flops * share for dtype, flops in measured.matmul_flops.items()},
        memory_bytes_per_s=measured.copy_bytes_per_s * share,
        memory_bytes=physical_memory_bytes() / processes,
        gpus_per_node=processes,
        intra=link,
        inter=link,
        base_latency_s=measured.all_reduce_latency_s / share,
        launch_s=measured.launch_s,
        matmul_efficiency=1.0,  # the peak is itself a measured matmul
        attention_efficiency=0.5,
        memory_efficiency=1.0,
        context_bytes=0.0,
        communicator_bytes=0.0,
        allocator_slack=0.0,
        overlap=0.0,
        source=measured.source,
    )


def physical_memory_bytes() -> float:
    """RAM of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
