"""A small GPT and the program that the emitter would write for it, by hand: what the runtime is tested with.

The layout has both styles: Megatron's in attention, sequence parallelism in the MLP.
"""

# mypy: disable-error-code="union-attr, arg-type, operator"
# Parameters are declared by name, as in every emitted program; nn.Module gives them no types.
from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.runtime.collectives import all_gather, all_reduce, copy_to, gather, reduce_scatter, split
from autopar.runtime.loss import cross_entropy, embedding
from autopar.runtime.parameters import buffer, local, parameter, summed, tie
from autopar.runtime.random import attention, dropout
from autopar.runtime.settings import Settings

LAYERS, D, HEADS, VOCABULARY, SEQUENCE = 2, 16, 2, 32, 6
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


class OriginalBlock(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.ModuleDict({"proj": nn.Linear(D, D)})
        names = {"qkv": 3 * D} if fused else {"q": D, "k": D, "v": D}
        for name, size in names.items():
            self.attn[name] = nn.Linear(D, size)
        self.mlp = nn.ModuleDict({"up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D)})
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.ln_1(x)
        parts = self.attn["qkv"](h).chunk(3, -1) if self.fused else [self.attn[n](h) for n in "qkv"]
        q, k, v = (p.view(b, s, HEADS, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, D)
        x = x + self.attn["proj"](y)
        out: Tensor = x + self.mlp["down"](F.gelu(self.mlp["up"](self.ln_2(x))))
        return out


class Original(nn.Module):
    """Labels are the next tokens; the loss is their mean."""

    def __init__(self, tied: bool, fused: bool, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, D)
        self.h = nn.ModuleList(OriginalBlock(fused) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, vocabulary, bias=False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) * self.scale
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), labels.flatten())


def original(tied: bool = False, fused: bool = False, vocabulary: int = VOCABULARY) -> Original:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Original(tied, fused, vocabulary).double()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """As weights.pt: parameters and buffers by original name, tied ones under both."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: value.detach() for name, value in named}


def count_targets(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def program(
    settings: Settings,
    tied: bool = False,
    fused: bool = False,
    recompute: tuple[int, ...] = (),
    p: float = 0.0,
    vocabulary: int = VOCABULARY,
) -> ModuleType:
    """What `from model import …` gives in a saved program."""
    module: Any = ModuleType("model")
    module.__file__ = __file__
    module.SETTINGS, module.LAYERS, module.INPUTS = settings, ("h",), ("input_ids", "labels")
    module.TIED = (("lm_head.weight", "wte.weight"),) if tied else ()
    module.Model = _model(settings, tied, recompute, p, vocabulary)
    module.count_targets = count_targets
    module.PARTS = {}
    if fused:
        for i in range(LAYERS):
            for kind in ("weight", "bias"):
                for j, part in enumerate("qkv"):
                    module.PARTS[f"h.{i}.attn.{part}.{kind}"] = (f"h.{i}.attn.qkv.{kind}", 0, j * D, D)
    return module  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, recompute: bool, p: float) -> None:
        super().__init__()
        self._recompute, self._p = recompute, p
        parameter(self, "ln_1.weight", (D,))
        parameter(self, "ln_1.bias", (D,))
        for part in "qkv":
            parameter(self, f"attn.{part}.weight", (D, D), shard=0)
            parameter(self, f"attn.{part}.bias", (D,), shard=0)
        parameter(self, "attn.proj.weight", (D, D), shard=1)
        parameter(self, "attn.proj.bias", (D,))
        parameter(self, "ln_2.weight", (D,))
        parameter(self, "ln_2.bias", (D,))
        parameter(self, "mlp.up.weight", (4 * D, D), shard=0)
        parameter(self, "mlp.up.bias", (4 * D,), shard=0)
        parameter(self, "mlp.down.weight", (D, 4 * D), shard=1)
        parameter(self, "mlp.down.bias", (D,))

    def forward(self, x: Tensor) -> Tensor:
        if self._recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._layer, x, use_reentrant=False)
            return out
        return self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = F.layer_norm(x, (D,), local(self.ln_1.weight), local(self.ln_1.bias))
        h = copy_to(h, axis="tp")
        q = F.linear(h, local(self.attn.q.weight), local(self.attn.q.bias)).view(b, s, -1, D // HEADS).transpose(1, 2)
        k = F.linear(h, local(self.attn.k.weight), local(self.attn.k.bias)).view(b, s, -1, D // HEADS).transpose(1, 2)
        v = F.linear(h, local(self.attn.v.weight), local(self.attn.v.bias)).view(b, s, -1, D // HEADS).transpose(1, 2)
        y = attention(q, k, v, dropout_p=self._p, is_causal=True, training=self.training, shards=("tp",))
        y = F.linear(y.transpose(1, 2).reshape(b, s, -1), local(self.attn.proj.weight))
        y = all_reduce(y, axis="tp") + local(self.attn.proj.bias)
        x = x + dropout(y, self._p, self.training)
        h = split(x, dim=1, axis="tp")
        h = F.layer_norm(h, (D,), summed(self.ln_2.weight), summed(self.ln_2.bias))
        h = all_gather(h, dim=1, axis="tp")
        h = F.gelu(F.linear(h, local(self.mlp.up.weight), local(self.mlp.up.bias)))
        h = reduce_scatter(F.linear(h, local(self.mlp.down.weight)), dim=1, axis="tp") + summed(self.mlp.down.bias)
        return x + gather(dropout(h, self._p, self.training, shards=("tp",)), dim=1, axis="tp")


def _model(
    settings: Settings, tied: bool, recompute: tuple[int, ...], p: float, vocabulary: int
) -> Callable[[int], nn.Module]:
    class Model(nn.Module):
        _count: Tensor

        def __init__(self, stage: int = 0) -> None:
            super().__init__()
            self._first, self._last = stage == 0, stage == settings.pp - 1
            if self._first:
                parameter(self, "wte.weight", (vocabulary, D), shard=0)
                buffer(self, "scale", (), torch.float64)
            self.h = nn.ModuleDict({str(i): Block(i in recompute, p) for i in range(*settings.stages[stage])})
            if self._last:
                parameter(self, "ln_f.weight", (D,))
                parameter(self, "ln_f.bias", (D,))
                if tied:
                    tie(self, "lm_head.weight", "wte.weight", (vocabulary, D), shard=0)
                else:
                    parameter(self, "lm_head.weight", (vocabulary, D), shard=0)

        def forward(self, *received: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
            if self._first:
                x = all_reduce(embedding(input_ids, local(self.wte.weight), vocabulary, "tp"), axis="tp")
                x = x * self.scale.to(x.dtype)
            else:
                (x,) = received
            for block in self.h.values():
                x = block(x)
            if not self._last:
                return x
            h = F.layer_norm(x, (D,), local(self.ln_f.weight), local(self.ln_f.bias))
            logits = F.linear(copy_to(h, axis="tp"), local(self.lm_head.weight))
            logits = logits.float() if settings.precision == "bf16" else logits
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), vocabulary, "tp")
            return loss / self._count

        @staticmethod
        def between_stages(stage: int, b: int, s: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
            return (((b, s, D), DTYPES[settings.precision]),)

    return Model


def make_settings(
    pp: int = 1, dp: int = 1, tp: int = 1, zero: int = 0, micro_batches: int = 1, **over: Any
) -> Settings:
    values: dict[str, Any] = {
        "pp": pp,
        "dp": dp,
        "cp": 1,
        "tp": tp,
        "global_batch": 8,
        "micro_batch": 8 // (dp * micro_batches),
        "sequence": SEQUENCE,
        "schedule": "none" if pp == 1 else ("1f1b" if micro_batches >= pp else "gpipe"),
        "zero": zero,
        "precision": "fp64",
        "stages": tuple((LAYERS * i // pp, LAYERS * (i + 1) // pp) for i in range(pp)),
    }
    return Settings(**{**values, **over})


def make_batches(steps: int, vocabulary: int = VOCABULARY) -> list[dict[str, Tensor]]:
    """Whole global batches of 8 samples: padding differs between samples, and the third is all padding."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (8, SEQUENCE + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for i in range(8):
            labels[i, SEQUENCE - i % 4 :] = -100
        labels[2] = -100
        batches.append({"input_ids": tokens[:, :-1], "labels": labels})
    return batches


def local_batch(batch: dict[str, Tensor], settings: Settings, replica: int) -> dict[str, Tensor]:
    return {name: x.chunk(settings.dp)[replica] for name, x in batch.items()}
