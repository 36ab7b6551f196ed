"""MistralForCausalLM, distributed by autopar over 2 GPUs.

plan       cp2 (ring), zero 0, micro-batch 4 × 2, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 2 -- train.py (several nodes: launch.sh)
on cp      s is the length of this rank's part of the sequence, 1/2 of it: ids and labels come whole, and
           positions are those of the whole. Parameters are whole; their gradients are summed as over dp.
           Of 4 chunks of the sequence rank r has the chunks r and 3 - r, for equal work.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.attention import ring_attention
from runtime.collectives import split
from runtime.parameters import buffer, parameter, submodule
from runtime.settings import Settings

SETTINGS = Settings(
    pp=1, dp=1, cp=2, tp=1,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="none", zero=0, precision="bf16",
    stages=((0, 4),),
    optimizer="AdamW", optimizer_kwargs={},
    zigzag=True,
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


class MistralDecoderLayer(nn.Module):
    """4 layers: model.layers.0 … model.layers.3."""

    def __init__(self):
        super().__init__()
        parameter(self, "input_layernorm.weight", (64,))
        parameter(self, "self_attn.q_proj.weight", (64, 64))
        parameter(self, "self_attn.k_proj.weight", (32, 64))
        parameter(self, "self_attn.v_proj.weight", (32, 64))
        parameter(self, "self_attn.o_proj.weight", (64, 64))
        parameter(self, "post_attention_layernorm.weight", (64,))
        parameter(self, "mlp.gate_proj.weight", (160, 64))
        parameter(self, "mlp.up_proj.weight", (160, 64))
        parameter(self, "mlp.down_proj.weight", (64, 160))

    def forward(self, x, cos, sin):  # x: Shard(1)@cp [b, s, 64]
        b, s, _ = x.shape
        h = self.input_layernorm.weight * F.rms_norm(x, (64,), eps=1e-06)
        q = F.linear(h, self.self_attn.q_proj.weight).reshape(b, s, 4, 16).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = F.linear(h, self.self_attn.k_proj.weight).reshape(b, s, 2, 16).transpose(1, 2)
        k = rotate(k, cos, sin)
        v = F.linear(h, self.self_attn.v_proj.weight).reshape(b, s, 2, 16).transpose(1, 2)
        attn = ring_attention(q, k, v, axis="cp", is_causal=True, zigzag=True, window=8, scale=0.25)
        attn = attn.transpose(1, 2).reshape(b, s, 64)
        x = x + F.linear(attn, self.self_attn.o_proj.weight)

        h = self.post_attention_layernorm.weight * F.rms_norm(x, (64,), eps=1e-06)
        gate = F.linear(h, self.mlp.gate_proj.weight)
        up = F.linear(h, self.mlp.up_proj.weight)
        h = F.silu(gate) * up
        return x + F.linear(h, self.mlp.down_proj.weight)


class Model(nn.Module):
    """MistralForCausalLM, whole: what precedes the layers, the layers, the loss."""

    def __init__(self, stage=0):
        super().__init__()
        buffer(self, "model.rotary_emb.inv_freq", (8,), torch.float32)
        parameter(self, "model.embed_tokens.weight", (97, 64))
        for i in range(4):
            submodule(self, f"model.layers.{i}", MistralDecoderLayer())
        parameter(self, "model.norm.weight", (64,))
        parameter(self, "lm_head.weight", (97, 64))
        self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *, input_ids, labels):
        cos, sin = self._tables(input_ids.shape[1] // 2, input_ids.device)
        x = self._prologue(input_ids)
        for layer in self.model.layers.children():
            x = layer(x, cos, sin)
        return self._epilogue(x, labels)

    def _tables(self, s, device):
        """What layers read that depends on no parameter: every stage makes its own."""
        positions = torch.arange(2 * s, device=device).unsqueeze(0).unsqueeze(2).to(torch.float32)
        angles = positions * self.model.rotary_emb.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        cos = angles.cos().to(torch.bfloat16)
        sin = angles.sin().to(torch.bfloat16)
        cos = split(cos, dim=1, axis="cp")  # over cp: Replicate → Shard(1)
        sin = split(sin, dim=1, axis="cp")  # over cp: Replicate → Shard(1)
        return cos, sin

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        indices = split(input_ids, dim=1, axis="cp")  # over cp: Replicate → Shard(1)
        return F.embedding(indices, self.model.embed_tokens.weight)

    def _epilogue(self, x, labels):  # x: Shard(1)@cp [b, s, 64]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s, _ = x.shape
        x = self.model.norm.weight * F.rms_norm(x, (64,), eps=1e-06)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        logits = F.linear(x, self.lm_head.weight).to(torch.float32).reshape(b * s, 97)
        labels = split(labels, dim=1, axis="cp")  # over cp: Replicate → Shard(1)
        labels = labels.reshape(b * s)
        return F.cross_entropy(logits, labels, reduction="sum") / self._count


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s) != -100).sum()
