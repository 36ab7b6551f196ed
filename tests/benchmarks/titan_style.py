"""A Llama on dp2·tp2 as an expert writes it by hand, in torchtitan's manner, beside autopar's program of it.

The model, plain, with the module names of torchtitan's Llama; `parallelize_by_hand` is its `parallelize.py`: tensor
and sequence parallelism by `parallelize_module`, a vocabulary-parallel loss, `fully_shard` of each layer and of the
whole. Run by tests/benchmarks/run.py on four processes: both sides train in the same ones, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

D, HEADS, LAYERS, SEQUENCE, VOCABULARY, HIDDEN = 512, 8, 8, 512, 256, 1408
GLOBAL_BATCH = 4


# --------------------------------------------------------------------------------
# The model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [b, s, d] -> [b, s, d]
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, D // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(y.transpose(1, 2).reshape(b, s, -1))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, HIDDEN, bias=False), nn.Linear(D, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """`forward` gives logits [b, s, vocabulary]."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(D, eps=1e-5), nn.Linear(D, VOCABULARY, bias=False)
        frequencies = 10_000.0 ** -(torch.arange(0, D // HEADS, 2) / (D // HEADS))
        angles = torch.outer(torch.arange(SEQUENCE).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, s = self.tok_embeddings(input_ids), input_ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:s], self.sin[:s])
        logits: Tensor = self.output(self.norm(x))
        return logits


def build() -> Llama:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Llama()


def loss(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


# --------------------------------------------------------------------------------
# By hand


def parallelize_by_hand(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor, sequence and loss parallelism on `mesh["tp"]`, then ZeRO-3 on `mesh["dp"]`."""
    tp = mesh["tp"]
    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, tp, whole)
    a_layer = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, tp, a_layer)
        fully_shard(layer, mesh=mesh["dp"])
    # As torchtitan: what is needed first in backward is not given back after forward.
    fully_shard([model.norm, model.output], mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"])


class ByHand:
    """The training step of torchtitan's trainer: loss, gradient norm, AdamW; the loss is averaged to be logged."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.model, self.dp = build().train(), mesh["dp"]
        parallelize_by_hand(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)

    def step(self, batch: dict[str, Tensor]) -> float:
        self.optimizer.zero_grad()
        with loss_parallel():
            result = loss(self.model(batch["input_ids"]), batch)
            result.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        assert isinstance(norm, DTensor)
        norm.full_tensor()
        self.optimizer.step()
        mean = result.detach()
        mean = mean.full_tensor() if isinstance(mean, DTensor) else mean
        dist.all_reduce(mean, group=self.dp.get_group())
        return mean.item() / self.dp.size()


# --------------------------------------------------------------------------------
# Both, in turn


def plan_text(zero: int | None) -> str:
    """model.py of dp2·tp2: with the same ZeRO stage and sequence parallelism as by hand, or as autopar chooses."""
    import autopar

    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    pins: dict[str, Any] = {} if zero is None else {"zero": zero, "sequence_parallel": True, "recompute": "none"}
    result = autopar.parallelize(
        build(), 4, gpu="cpu", inputs={"input_ids": ids, "labels": ids}, loss=loss, global_batch=GLOBAL_BATCH,
        dp=2, tp=2, pp=1, micro_batch=GLOBAL_BATCH // 2, **pins,
    )  # fmt: skip
    print(result, file=sys.stderr)
    return str(result.source())


def compare(folder: Path, pairs: int) -> dict[str, Any]:
    """Seconds of each step of both sides, and their first losses; on every rank."""
    from autopar.emit.source import load_source
    from autopar.runtime.trainer import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build()
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sides: dict[str, Any] = {"by hand": ByHand()}
    for path in sorted(folder.glob("*.py")):
        sides[path.stem] = Trainer(load_source(path.read_text()), weights, device="cpu")
    replica = dist.get_rank() // 2
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(pairs + 1):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        own = ids[2 * replica : 2 * replica + 2]
        batch = {"input_ids": own[:, :-1].contiguous(), "labels": own[:, 1:].contiguous()}
        for name, side in sides.items():
            dist.barrier()
            started = time.perf_counter()
            result = side.step(batch)
            dist.barrier()
            if number:  # the first warms up
                times[name].append(time.perf_counter() - started)
            losses[name].append(result if isinstance(result, float) else result.loss)
    return {"times": times, "losses": losses, "tokens": GLOBAL_BATCH * SEQUENCE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    report = compare(args.folder, args.pairs)
    if os.environ["RANK"] == "0":
        for name, seconds in report["times"].items():
            ratios = [a / b for a, b in zip(report["times"]["by hand"], seconds, strict=True)]
            print(name, f"{statistics.median(ratios):.3f}", [f"{s:.3f}" for s in seconds], file=sys.stderr)
        print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
