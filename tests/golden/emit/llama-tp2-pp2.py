"""LlamaForCausalLM, distributed by autopar over 4 GPUs.

plan       pp2·tp2 (megatron), zero 0, micro-batch 4 × 2 by 1f1b, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 4 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_reduce, copy_to, split
from runtime.loss import embedding
from runtime.parameters import buffer, local, parameter, submodule
from runtime.settings import Settings

SETTINGS = Settings(
    pp=2, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="1f1b", zero=0, precision="bf16",
    stages=((0, 2), (2, 4)),
    optimizer="AdamW", optimizer_kwargs={},
    vocabulary=97, labels="same",
)
LAYERS = ("model.layers",)  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("model.embed_tokens",),
    "_epilogue": ("model.norm", "lm_head"),
}
TIED = ()  # (alias, original)


def rotate(x, cos, sin):
    """Rotary position embedding: each pair of the last dim is a point, rotated by its angle."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class LlamaDecoderLayer(nn.Module):
    """4 layers: model.layers.0 … model.layers.3 · tp=2 (megatron).

    input_layernorm.weight                            [64]        Replicate
    self_attn.q_proj.weight                           [64, 64]    Shard(0) → [32, 64]  column-parallel
    self_attn.k_proj.weight, self_attn.v_proj.weight  [32, 64]    Shard(0) → [16, 64]  column-parallel
    self_attn.o_proj.weight                           [64, 64]    Shard(1) → [64, 32]  row-parallel
    post_attention_layernorm.weight                   [64]        Replicate
    mlp.gate_proj.weight, mlp.up_proj.weight          [160, 64]   Shard(0) → [80, 64]  column-parallel
    mlp.down_proj.weight                              [64, 160]   Shard(1) → [64, 80]  row-parallel
    x                                                 [b, s, 64]  Replicate
    """

    def __init__(self):
        super().__init__()
        parameter(self, "input_layernorm.weight", (64,))
        parameter(self, "self_attn.q_proj.weight", (64, 64), shard=0)
        parameter(self, "self_attn.k_proj.weight", (32, 64), shard=0)
        parameter(self, "self_attn.v_proj.weight", (32, 64), shard=0)
        parameter(self, "self_attn.o_proj.weight", (64, 64), shard=1)
        parameter(self, "post_attention_layernorm.weight", (64,))
        parameter(self, "mlp.gate_proj.weight", (160, 64), shard=0)
        parameter(self, "mlp.up_proj.weight", (160, 64), shard=0)
        parameter(self, "mlp.down_proj.weight", (64, 160), shard=1)

    def forward(self, x, cos, sin):  # x: Replicate@tp [b, s, 64]
        b, s, _ = x.shape
        h = local(self.input_layernorm.weight) * F.rms_norm(x, (64,), eps=1e-06)
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        q = F.linear(h, local(self.self_attn.q_proj.weight)).reshape(b, s, 2, 16).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = F.linear(h, local(self.self_attn.k_proj.weight)).reshape(b, s, 1, 16).transpose(1, 2)
        k = rotate(k, cos, sin)
        v = F.linear(h, local(self.self_attn.v_proj.weight)).reshape(b, s, 1, 16).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
        attn = attn.transpose(1, 2).reshape(b, s, 32)
        attn = F.linear(attn, local(self.self_attn.o_proj.weight))  # row-parallel → Partial
        attn = all_reduce(attn, axis="tp")  # Partial → Replicate; backward: nothing
        x = x + attn

        h = local(self.post_attention_layernorm.weight) * F.rms_norm(x, (64,), eps=1e-06)
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        gate = F.linear(h, local(self.mlp.gate_proj.weight))  # column-parallel
        up = F.linear(h, local(self.mlp.up_proj.weight))  # column-parallel
        h = F.silu(gate) * up
        mlp = F.linear(h, local(self.mlp.down_proj.weight))  # row-parallel → Partial
        mlp = all_reduce(mlp, axis="tp")  # Partial → Replicate; backward: nothing
        return x + mlp


class Model(nn.Module):
    """LlamaForCausalLM: the layers of one stage, what precedes them on the first, the loss on the last.

    model.embed_tokens.weight  [97, 64]  Shard(0) → ≤ [49, 64]  a range of its rows
    model.norm.weight          [64]      Shard(0) → [32]
    lm_head.weight             [97, 64]  Shard(1) → [97, 32]    row-parallel
    """

    def __init__(self, stage=0):
        super().__init__()
        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1
        self._start, self._stop = SETTINGS.stages[stage]
        buffer(self, "model.rotary_emb.inv_freq", (8,), torch.float32)
        if self._first:
            parameter(self, "model.embed_tokens.weight", (97, 64), shard=0)
        for i in range(self._start, self._stop):
            submodule(self, f"model.layers.{i}", LlamaDecoderLayer())
        if self._last:
            parameter(self, "model.norm.weight", (64,), shard=0)
            parameter(self, "lm_head.weight", (97, 64), shard=1)
            self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *received, input_ids, labels):
        cos, sin = self._tables(input_ids.shape[1], input_ids.device)
        if self._first:
            x = self._prologue(input_ids)
        else:
            (x,) = received
        for layer in self.model.layers.children():
            x = layer(x, cos, sin)
        if self._last:
            return self._epilogue(x, labels)
        return x

    def _tables(self, s, device):
        """What layers read that depends on no parameter: every stage makes its own."""
        positions = torch.arange(s, device=device).unsqueeze(0).unsqueeze(2).to(torch.float32)
        angles = positions * self.model.rotary_emb.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos = angles.cos().to(torch.bfloat16)
        sin = angles.sin().to(torch.bfloat16)
        return cos, sin

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        x = embedding(input_ids, local(self.model.embed_tokens.weight), size=97, axis="tp")
        x = all_reduce(x, axis="tp")  # Partial → Replicate; backward: nothing
        return x

    def _epilogue(self, x, labels):  # x: Replicate@tp [b, s, 64]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s, _ = x.shape
        x = F.rms_norm(x, (64,), eps=1e-06)
        x = split(x, dim=2, axis="tp")  # Replicate → Shard(2); backward: all-gather
        x = local(self.model.norm.weight) * x
        logits = F.linear(x, local(self.lm_head.weight))  # row-parallel → Partial
        logits = all_reduce(logits, axis="tp")  # Partial → Replicate; backward: nothing
        logits = logits.to(torch.float32).reshape(b * s, 97)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s)
        return F.cross_entropy(logits, labels, reduction="sum") / self._count

    @staticmethod
    def between_stages(stage, b, s):
        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""
        return (((b, s, 64), torch.bfloat16),)


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s) != -100).sum()
