"""GPT, distributed by autopar over 2 GPUs.

plan       tp2 (megatron-sp), zero 0, micro-batch 4 × 2, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 2 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_gather, reduce_scatter
from runtime.loss import cross_entropy, embedding
from runtime.parameters import local, parameter, submodule, summed, tie
from runtime.settings import Settings

SETTINGS = Settings(
    pp=1, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="none", zero=0, precision="bf16",
    stages=((0, 4),),
    optimizer="AdamW", optimizer_kwargs={},
    vocabulary=97, labels="next",
)
LAYERS = ("transformer.h",)  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("transformer.wte", "transformer.wpe"),
    "_epilogue": ("transformer.ln_f", "lm_head"),
}
TIED = (("lm_head.weight", "transformer.wte.weight"),)  # (alias, original)
# Parameters that are slices of one of the original model: part → (original, dim, start, length)
PARTS = {
    **{
        f"{path}.{part}": (f"{path}.{original}", dim, start, length)
        for path in (f"transformer.h.{i}" for i in range(4))
        for part, original, dim, start, length in (
            ("attn.c_attn._weight_0", "attn.c_attn.weight", 0, 0, 64),
            ("attn.c_attn._weight_1", "attn.c_attn.weight", 0, 64, 64),
            ("attn.c_attn._weight_2", "attn.c_attn.weight", 0, 128, 64),
            ("attn.c_attn._bias_0", "attn.c_attn.bias", 0, 0, 64),
            ("attn.c_attn._bias_1", "attn.c_attn.bias", 0, 64, 64),
            ("attn.c_attn._bias_2", "attn.c_attn.bias", 0, 128, 64),
        )
    },
}


class Block(nn.Module):
    """4 layers: transformer.h.0 … transformer.h.3 · tp=2 (megatron-sp).

    ln_1.weight, ln_1.bias  [64]        Replicate                gradient summed over tp
    attn.c_attn._weight_0   [64, 64]    Shard(0) → [32, 64]      column-parallel
    attn.c_attn._bias_0     [64]        Shard(0) → [32]
    attn.c_attn._weight_1   [64, 64]    Shard(0) → [32, 64]      column-parallel
    attn.c_attn._bias_1     [64]        Shard(0) → [32]
    attn.c_attn._weight_2   [64, 64]    Shard(0) → [32, 64]      column-parallel
    attn.c_attn._bias_2     [64]        Shard(0) → [32]
    attn.c_proj.weight      [64, 64]    Shard(1) → [64, 32]      row-parallel
    attn.c_proj.bias        [64]        Replicate                gradient summed over tp
    ln_2.weight, ln_2.bias  [64]        Replicate                gradient summed over tp
    mlp.c_fc.weight         [256, 64]   Shard(0) → [128, 64]     column-parallel
    mlp.c_fc.bias           [256]       Shard(0) → [128]
    mlp.c_proj.weight       [64, 256]   Shard(1) → [64, 128]     row-parallel
    mlp.c_proj.bias         [64]        Replicate                gradient summed over tp
    x                       [b, s, 64]  Shard(1) → [b, s/2, 64]
    """

    def __init__(self):
        super().__init__()
        parameter(self, "ln_1.weight", (64,))
        parameter(self, "ln_1.bias", (64,))
        parameter(self, "attn.c_attn._weight_0", (64, 64), shard=0)
        parameter(self, "attn.c_attn._bias_0", (64,), shard=0)
        parameter(self, "attn.c_attn._weight_1", (64, 64), shard=0)
        parameter(self, "attn.c_attn._bias_1", (64,), shard=0)
        parameter(self, "attn.c_attn._weight_2", (64, 64), shard=0)
        parameter(self, "attn.c_attn._bias_2", (64,), shard=0)
        parameter(self, "attn.c_proj.weight", (64, 64), shard=1)
        parameter(self, "attn.c_proj.bias", (64,))
        parameter(self, "ln_2.weight", (64,))
        parameter(self, "ln_2.bias", (64,))
        parameter(self, "mlp.c_fc.weight", (256, 64), shard=0)
        parameter(self, "mlp.c_fc.bias", (256,), shard=0)
        parameter(self, "mlp.c_proj.weight", (64, 256), shard=1)
        parameter(self, "mlp.c_proj.bias", (64,))

    def forward(self, x):  # x: Shard(1)@tp [b, s/2, 64]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = F.layer_norm(x, (64,), summed(self.ln_1.weight), summed(self.ln_1.bias), eps=1e-05)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.attn.c_attn._weight_0), local(self.attn.c_attn._bias_0))
        q = q.reshape(b, s, 2, 16).transpose(1, 2)
        k = F.linear(h, local(self.attn.c_attn._weight_1), local(self.attn.c_attn._bias_1))
        k = k.reshape(b, s, 2, 16).transpose(1, 2)
        v = F.linear(h, local(self.attn.c_attn._weight_2), local(self.attn.c_attn._bias_2))
        v = v.reshape(b, s, 2, 16).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attn = attn.transpose(1, 2).reshape(b, s, 32)
        attn = F.linear(attn, local(self.attn.c_proj.weight))  # row-parallel → Partial
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        x = x + (attn + summed(self.attn.c_proj.bias))

        h = F.layer_norm(x, (64,), summed(self.ln_2.weight), summed(self.ln_2.bias), eps=1e-05)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        h = F.linear(h, local(self.mlp.c_fc.weight), local(self.mlp.c_fc.bias))  # column-parallel
        h = F.gelu(h, approximate="tanh")
        mlp = F.linear(h, local(self.mlp.c_proj.weight))  # row-parallel → Partial
        mlp = reduce_scatter(mlp, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + (mlp + summed(self.mlp.c_proj.bias))


class Model(nn.Module):
    """GPT, whole: what precedes the layers, the layers, the loss.

    transformer.wte.weight                          [97, 64]  Shard(0) → ≤ [49, 64]  a range of its rows
    transformer.wpe.weight                          [64, 64]  Shard(0) → [32, 64]    a range of its rows
    transformer.ln_f.weight, transformer.ln_f.bias  [64]      Replicate              gradient summed over tp
    lm_head.weight                                  [97, 64]  Shard(0) → ≤ [49, 64]  column-parallel
    """

    def __init__(self, stage=0):
        super().__init__()
        parameter(self, "transformer.wte.weight", (97, 64), shard=0)
        parameter(self, "transformer.wpe.weight", (64, 64), shard=0)
        for i in range(4):
            submodule(self, f"transformer.h.{i}", Block())
        parameter(self, "transformer.ln_f.weight", (64,))
        parameter(self, "transformer.ln_f.bias", (64,))
        tie(self, "lm_head.weight", "transformer.wte.weight", (97, 64), shard=0)
        self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *, input_ids, labels):
        x = self._prologue(input_ids)
        for layer in self.transformer.h.children():
            x = layer(x)
        return self._epilogue(x, labels)

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        s = input_ids.shape[1]
        positions = torch.arange(s, device=input_ids.device)
        wte = embedding(input_ids, local(self.transformer.wte.weight), size=97, axis="tp")
        x = wte + embedding(positions, local(self.transformer.wpe.weight), size=64, axis="tp")
        x = reduce_scatter(x, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x

    def _epilogue(self, x, labels):  # x: Shard(1)@tp [b, s/2, 64]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        x = F.layer_norm(
            x,
            (64,),
            summed(self.transformer.ln_f.weight),
            summed(self.transformer.ln_f.bias),
            eps=1e-05,
        )
        x = all_gather(x, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        labels = labels.reshape(b * s)
        # in fp32: loss
        logits = F.linear(x, local(self.lm_head.weight)).reshape(b * s, -1).to(torch.float32)
        loss = cross_entropy(logits, labels, size=97, axis="tp")
        return loss / self._count


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (labels.reshape(b * s) != -100).sum()
