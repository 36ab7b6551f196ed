"""GPT, distributed by autopar: tp2."""

import torch
import torch.nn.functional as F
from torch import nn

# isort: split
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
    """4 layers: transformer.h.0 … transformer.h.3 · tp=2 (megatron-sp)."""

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

    def forward(self, x):  # x: S(1)@tp [b, s/2, 64]
        b = x.shape[0]
        s = x.shape[1] * 2  # each rank has 1/2 of it
        h = F.layer_norm(x, (64,), weight=summed(self.ln_1.weight), bias=summed(self.ln_1.bias), eps=1e-05)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate, grad Partial; backward: reduce-scatter
        c_attn = F.linear(h, local(self.attn.c_attn._weight_0), local(self.attn.c_attn._bias_0))  # column-parallel
        c_attn = c_attn.reshape(b, s, 2, 16).transpose(1, 2)
        c_attn_2 = F.linear(h, local(self.attn.c_attn._weight_1), local(self.attn.c_attn._bias_1))  # column-parallel
        c_attn_2 = c_attn_2.reshape(b, s, 2, 16).transpose(1, 2)
        c_attn_3 = F.linear(h, local(self.attn.c_attn._weight_2), local(self.attn.c_attn._bias_2))  # column-parallel
        c_attn_3 = c_attn_3.reshape(b, s, 2, 16).transpose(1, 2)
        attn = F.scaled_dot_product_attention(c_attn, c_attn_2, c_attn_3, is_causal=True)
        attn = attn.transpose(1, 2).reshape(b, s, 32)
        c_proj = F.linear(attn, local(self.attn.c_proj.weight))  # row-parallel → Partial
        c_proj = reduce_scatter(c_proj, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        c_proj = c_proj + summed(self.attn.c_proj.bias)
        x = x + c_proj
        h = F.layer_norm(x, (64,), weight=summed(self.ln_2.weight), bias=summed(self.ln_2.bias), eps=1e-05)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate, grad Partial; backward: reduce-scatter
        c_fc = F.linear(h, local(self.mlp.c_fc.weight), local(self.mlp.c_fc.bias))  # column-parallel
        c_fc = F.gelu(c_fc, approximate="tanh")
        c_proj = F.linear(c_fc, local(self.mlp.c_proj.weight))  # row-parallel → Partial
        c_proj = reduce_scatter(c_proj, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        c_proj = c_proj + summed(self.mlp.c_proj.bias)
        x = x + c_proj
        return x


class Model(nn.Module):
    """GPT: the layers of one stage, what precedes them on the first, the loss on the last."""

    def __init__(self, stage=0):
        super().__init__()
        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1
        self._start, self._stop = SETTINGS.stages[stage]
        if self._first:
            parameter(self, "transformer.wte.weight", (97, 64), shard=0)
            parameter(self, "transformer.wpe.weight", (64, 64), shard=0)
        for i in range(self._start, self._stop):
            submodule(self, f"transformer.h.{i}", Block())
        if self._last:
            parameter(self, "transformer.ln_f.weight", (64,))
            parameter(self, "transformer.ln_f.bias", (64,))
            tie(self, "lm_head.weight", "transformer.wte.weight", (97, 64), shard=0)

    def forward(self, *received, input_ids, labels):
        x = self._prologue(input_ids)
        for layer in self.transformer.h.children():
            x = layer(x)
        if self._last:
            return self._epilogue(x, labels)

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        s = input_ids.shape[1]
        positions = torch.arange(s, device=input_ids.device)
        wte = embedding(input_ids, local(self.transformer.wte.weight), size=97, axis="tp")
        wpe = embedding(positions, local(self.transformer.wpe.weight), size=64, axis="tp")
        wte = wte + wpe
        wte = reduce_scatter(wte, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return wte

    def _epilogue(self, x, labels):  # x: S(1)@tp [b, s/2, 64]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b = x.shape[0]
        s = x.shape[1] * 2  # each rank has 1/2 of it
        h = F.layer_norm(x, (64,), weight=summed(self.transformer.ln_f.weight), bias=summed(self.transformer.ln_f.bias), eps=1e-05)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate, grad Partial; backward: reduce-scatter
        labels = labels.reshape(b * s)
        logits = F.linear(h, local(self.lm_head.weight)).reshape(b * s, -1).to(torch.float32)  # column-parallel
        loss = cross_entropy(logits, labels, size=97, axis="tp")
        loss = loss / self._count
        return loss


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    labels = labels.reshape(b * s)
    labels = labels != -100
    labels = labels.sum()
    return labels
