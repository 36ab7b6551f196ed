"""Measure this machine's CPU: matmul rate, copy rate, cost of a small op, one all-reduce over gloo.

First form (level L1 for the `cpu` entry only). Results are kept in a file of the user's cache directory
(`AUTOPAR_CACHE` overrides it), named by a fingerprint of the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_SMALL_BYTES, _LARGE_BYTES = 4 * 1024, 8 * 1024 * 1024
_TIMEOUT_S = 20.0
# Loopback TCP on a laptop-class core, for machines where two processes cannot be started.
_ESTIMATED_LATENCY_S, _ESTIMATED_BYTES_PER_S = 200e-6, 1e9


@dataclass(frozen=True)
class CpuMeasurement:
    """One thread of this machine: FLOP/s and bytes/s; an all-reduce of two processes as alpha-beta."""

    matmul_flops: Mapping[str, float]
    copy_bytes_per_s: float
    launch_s: float
    all_reduce_latency_s: float
    all_reduce_bytes_per_s: float
    source: str


def measure_cpu() -> CpuMeasurement:
    """The cached measurement of this machine, made now if there is none (about 2 s)."""
    path = cache_directory() / f"cpu-{fingerprint()}.json"
    if path.exists():
        return CpuMeasurement(**json.loads(path.read_text()))
    measured = _measure()
    with contextlib.suppress(OSError):  # a read-only home only costs the next caller two seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(measured)))
    return measured


def cache_directory() -> Path:
    """`AUTOPAR_CACHE` where it names a folder, else autopar/ in the user's cache directory."""
    folder = os.environ.get("AUTOPAR_CACHE", "on")
    if folder not in ("on", "off"):  # words for the cache of programs
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "autopar"


def fingerprint() -> str:
    """Names this machine, torch version and what is measured."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    facts = (platform.node(), platform.machine(), model, str(os.cpu_count()), torch.__version__, *_DTYPES)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _measure() -> CpuMeasurement:
    with _one_thread():
        matmul = {name: _matmul_flops(dtype) for name, dtype in _DTYPES.items()}
        copy = _copy_bytes_per_s()
        launch = _launch_s()
    latency, bandwidth, how = _all_reduce()
    return CpuMeasurement(matmul, copy, launch, latency, bandwidth, f"measured on this machine; all-reduce {how}")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _best_s(function: Callable[[], object], repeat: int = 5) -> float:
    function()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _matmul_flops(dtype: torch.dtype, size: int = 384) -> float:
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best_s(lambda: a @ b)


def _copy_bytes_per_s(size_bytes: int = 32 * 1024 * 1024) -> float:
    source, target = torch.ones(size_bytes // 4), torch.empty(size_bytes // 4)
    return 2 * size_bytes / _best_s(lambda: target.copy_(source))


def _launch_s(count: int = 500) -> float:
    x = torch.ones(4, requires_grad=True)

    def small_ops() -> None:
        for _ in range(count):
            x.mul(2.0)

    return _best_s(small_ops) / count


def _all_reduce() -> tuple[float, float, str]:
    """(latency in s, bus bandwidth in bytes/s, how it was obtained), of two gloo processes."""
    attempts = [("in a new process", _all_reduce_spawned)]
    if threading.active_count() == 1 and not torch.cuda.is_available():
        attempts.insert(0, ("between forked processes", _all_reduce_forked))
    for how, attempt in attempts:
        with contextlib.suppress(OSError, EOFError, ValueError, subprocess.SubprocessError, RuntimeError):
            small_s, large_s = attempt()
            # For two ranks the bus bandwidth is bytes/s: 2(n-1)/n = 1.
            return small_s, _LARGE_BYTES / max(large_s - small_s, 1e-6), how
    return _ESTIMATED_LATENCY_S, _ESTIMATED_BYTES_PER_S, "estimated (two processes could not be started)"


def _all_reduce_forked() -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        workers = [context.Process(target=_worker, args=(rank, store, sender), daemon=True) for rank in range(2)]
        try:
            for worker in workers:
                worker.start()
            if not receiver.poll(_TIMEOUT_S):
                raise RuntimeError("the all-reduce of two processes did not finish")
            small_s, large_s = receiver.recv()
        finally:
            for worker in workers:
                worker.join(1.0)
                if worker.is_alive():
                    worker.kill()
    return small_s, large_s


def _all_reduce_spawned() -> tuple[float, float]:
    """The same in a fresh interpreter, for a parent with threads or a CUDA context (unsafe to fork)."""
    code = "from autopar.cost_models import calibrate as c; print(*c._all_reduce_forked())"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, timeout=2 * _TIMEOUT_S, check=True, env=environment)
    small_s, large_s = map(float, out.stdout.split())
    return small_s, large_s


def _worker(rank: int, store: str, sender: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    times = []
    for size_bytes in (_SMALL_BYTES, _LARGE_BYTES):
        tensor = torch.ones(size_bytes // 4)
        times.append(_best_s(lambda tensor=tensor: dist.all_reduce(tensor)))  # type: ignore[misc]
    if rank == 0:
        sender.send(tuple(times))
    dist.barrier()
    dist.destroy_process_group()
