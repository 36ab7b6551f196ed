"""GPT2LMHeadModel, distributed by autopar over 4 GPUs.

plan       pp2·tp2 (megatron), zero 0, micro-batch 4 × 2 by 1f1b, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 4 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_reduce, copy_to
from runtime.loss import cross_entropy, embedding
from runtime.parameters import local, parameter, submodule, tie
from runtime.settings import Settings

SETTINGS = Settings(
    pp=2, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="1f1b", zero=0, precision="bf16",
    stages=((0, 2), (2, 4)),
    optimizer="AdamW", optimizer_kwargs={},
    vocabulary=97, labels="same",
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
            ("attn.c_attn._weight_0", "attn.c_attn.weight", 1, 0, 32),
            ("attn.c_attn._weight_1", "attn.c_attn.weight", 1, 32, 32),
            ("attn.c_attn._weight_2", "attn.c_attn.weight", 1, 64, 32),
            ("attn.c_attn._bias_0", "attn.c_attn.bias", 0, 0, 32),
            ("attn.c_attn._bias_1", "attn.c_attn.bias", 0, 32, 32),
            ("attn.c_attn._bias_2", "attn.c_attn.bias", 0, 64, 32),
        )
    },
}


class GPT2Block(nn.Module):
    """4 layers: transformer.h.0 … transformer.h.3 · tp=2 (megatron).

    ln_1.weight, ln_1.bias  [32]        Replicate
    attn.c_attn._weight_0   [32, 32]    Shard(1) → [32, 16]  column-parallel
    attn.c_attn._bias_0     [32]        Shard(0) → [16]
    attn.c_attn._weight_1   [32, 32]    Shard(1) → [32, 16]  column-parallel
    attn.c_attn._bias_1     [32]        Shard(0) → [16]
    attn.c_attn._weight_2   [32, 32]    Shard(1) → [32, 16]  column-parallel
    attn.c_attn._bias_2     [32]        Shard(0) → [16]
    attn.c_proj.weight      [32, 32]    Shard(0) → [16, 32]  row-parallel
    attn.c_proj.bias        [32]        Replicate
    ln_2.weight, ln_2.bias  [32]        Replicate
    mlp.c_fc.weight         [32, 128]   Shard(1) → [32, 64]  column-parallel
    mlp.c_fc.bias           [128]       Shard(0) → [64]
    mlp.c_proj.weight       [128, 32]   Shard(0) → [64, 32]  row-parallel
    mlp.c_proj.bias         [32]        Replicate
    x                       [b, s, 32]  Replicate
    """

    def __init__(self):
        super().__init__()
        parameter(self, "ln_1.weight", (32,))
        parameter(self, "ln_1.bias", (32,))
        parameter(self, "attn.c_attn._weight_0", (32, 32), shard=1)
        parameter(self, "attn.c_attn._bias_0", (32,), shard=0)
        parameter(self, "attn.c_attn._weight_1", (32, 32), shard=1)
        parameter(self, "attn.c_attn._bias_1", (32,), shard=0)
        parameter(self, "attn.c_attn._weight_2", (32, 32), shard=1)
        parameter(self, "attn.c_attn._bias_2", (32,), shard=0)
        parameter(self, "attn.c_proj.weight", (32, 32), shard=0)
        parameter(self, "attn.c_proj.bias", (32,))
        parameter(self, "ln_2.weight", (32,))
        parameter(self, "ln_2.bias", (32,))
        parameter(self, "mlp.c_fc.weight", (32, 128), shard=1)
        parameter(self, "mlp.c_fc.bias", (128,), shard=0)
        parameter(self, "mlp.c_proj.weight", (128, 32), shard=0)
        parameter(self, "mlp.c_proj.bias", (32,))

    def forward(self, x):  # x: Replicate@tp [b, s, 32]
        b, s, _ = x.shape
        h = F.layer_norm(x, (32,), local(self.ln_1.weight), local(self.ln_1.bias), eps=1e-05)
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        q = h @ local(self.attn.c_attn._weight_0) + local(self.attn.c_attn._bias_0)
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        k = h @ local(self.attn.c_attn._weight_1) + local(self.attn.c_attn._bias_1)
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = h @ local(self.attn.c_attn._weight_2) + local(self.attn.c_attn._bias_2)
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3535533905932738)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        attn = attn @ local(self.attn.c_proj.weight)  # row-parallel → Partial
        attn = all_reduce(attn, axis="tp")  # Partial → Replicate; backward: nothing
        x = attn + local(self.attn.c_proj.bias) + x

        h = F.layer_norm(x, (32,), local(self.ln_2.weight), local(self.ln_2.bias), eps=1e-05)
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        h = h @ local(self.mlp.c_fc.weight) + local(self.mlp.c_fc.bias)  # column-parallel
        h_2 = ((h + h.pow(3.0) * 0.044715) * 0.7978845608028654).tanh() + 1.0
        h = h * 0.5 * h_2
        mlp = h @ local(self.mlp.c_proj.weight)  # row-parallel → Partial
        mlp = all_reduce(mlp, axis="tp")  # Partial → Replicate; backward: nothing
        return x + (mlp + local(self.mlp.c_proj.bias))


class Model(nn.Module):
    """GPT2LMHeadModel: the layers of one stage, what precedes them on the first, the loss on the last.

    transformer.wte.weight                          [97, 32]  Shard(0) → ≤ [49, 32]  a range of its rows
    transformer.wpe.weight                          [64, 32]  Shard(0) → [32, 32]    a range of its rows
    transformer.ln_f.weight, transformer.ln_f.bias  [32]      Replicate
    lm_head.weight                                  [97, 32]  Shard(0) → ≤ [49, 32]  column-parallel
    """

    def __init__(self, stage=0):
        super().__init__()
        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1
        self._start, self._stop = SETTINGS.stages[stage]
        if self._first:
            parameter(self, "transformer.wte.weight", (97, 32), shard=0)
            parameter(self, "transformer.wpe.weight", (64, 32), shard=0)
        for i in range(self._start, self._stop):
            submodule(self, f"transformer.h.{i}", GPT2Block())
        if self._last:
            parameter(self, "transformer.ln_f.weight", (32,))
            parameter(self, "transformer.ln_f.bias", (32,))
            tie(self, "lm_head.weight", "transformer.wte.weight", (97, 32), shard=0)
            self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *received, input_ids, labels):
        if self._first:
            x = self._prologue(input_ids)
        else:
            (x,) = received
        for layer in self.transformer.h.children():
            x = layer(x)
        if self._last:
            return self._epilogue(x, labels)
        return x

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        s = input_ids.shape[1]
        positions = torch.arange(s, device=input_ids.device).unsqueeze(0)
        wte = embedding(input_ids, local(self.transformer.wte.weight), size=97, axis="tp")
        x = wte + embedding(positions, local(self.transformer.wpe.weight), size=64, axis="tp")
        x = all_reduce(x, axis="tp")  # Partial → Replicate; backward: nothing
        return x

    def _epilogue(self, x, labels):  # x: Replicate@tp [b, s, 32]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s, _ = x.shape
        x = F.layer_norm(
            x,
            (32,),
            local(self.transformer.ln_f.weight),
            local(self.transformer.ln_f.bias),
            eps=1e-05,
        )
        x = copy_to(x, axis="tp")  # forward: nothing; backward: all-reduce
        logits = F.linear(x, local(self.lm_head.weight)).to(torch.float32).reshape(b * s, -1)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s)
        return cross_entropy(logits, labels, size=97, axis="tp") / self._count

    @staticmethod
    def between_stages(stage, b, s):
        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""
        return (((b, s, 32), torch.bfloat16),)


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s) != -100).sum()
