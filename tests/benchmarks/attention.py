"""Ring attention against attention over gathered keys and values, at equal work: causal, zigzag, cp=2, two processes.

python -m tests.benchmarks.attention [--pairs N]      the last line is JSON: seconds of forward and backward, by way
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.attention import gathered_attention, ring_attention
from autopar.runtime.collectives import all_gather
from autopar.runtime.mesh import init_mesh
from tests.distributed.handwritten import make_settings
from tests.harness import run_ranks

TOKENS, HEADS, KV_HEADS, WIDTH = 4096, 8, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs: int = parser.parse_args().pairs
    times = run_ranks(2, rank_main, pairs, timeout=600)
    print(json.dumps({"tokens": TOKENS, "times": times[0]}))


def in_order(x: Tensor) -> Tensor:
    """All tokens, from the chunks 0, 3, 1 and 2 of the two ranks."""
    first, last, second, third = all_gather(x, 2, "cp").chunk(4, 2)
    return torch.cat([first, second, third, last], 2)


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ring_attention(q, k, v, "cp", is_causal=True, zigzag=True)


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gathered_attention(q, in_order(k), in_order(v), "cp", is_causal=True, zigzag=True)


def rank_main(rank: int, pairs: int) -> dict[str, list[float]]:
    init_mesh(make_settings(cp=2), "cpu")
    random = torch.Generator().manual_seed(rank)
    shapes = [(1, heads, TOKENS // 2, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *inputs, grad = (torch.randn(shape, generator=random) for shape in shapes)
    ways = {"ring": ring, "all-gather": gathered}
    results = {name: gradients(attend, inputs, grad) for name, attend in ways.items()}
    for one, other in zip(results["ring"], results["all-gather"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(pairs):
        for name, attend in ways.items():
            dist.barrier()
            started = time.perf_counter()
            gradients(attend, inputs, grad)
            dist.barrier()
            times[name].append(time.perf_counter() - started)
    return times


def gradients(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.requires_grad_() for x in inputs]
    return torch.autograd.grad(attend(*leaves), leaves, grad)


if __name__ == "__main__":
    main()
