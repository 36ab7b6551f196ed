"""LlamaForCausalLM, distributed by autopar over 2 GPUs.

plan       pp2, zero 0, micro-batch 4 × 2 by 1f1b, recompute 2 groups of 2 + 1 attn, activation + 1 layer, bf16, AdamW
run        torchrun --nproc-per-node 2 -- train.py (several nodes: launch.sh)
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.parameters import buffer, parameter, submodule
from runtime.settings import Settings

SETTINGS = Settings(
    pp=2, dp=1, cp=1, tp=1,
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
RECOMPUTE = {  # layer → what backward computes again
    **dict.fromkeys(range(2, 3), ("attention", "activation")),
    **dict.fromkeys(range(3, 4), ("layer",)),
}
GROUPS = (  # layers that are recomputed as one are one unit
    *([f"model.layers.{i}" for i in range(first, first + 2)] for first in range(0, 2, 2)),
)


def rotate(x, cos, sin):
    """Rotary position embedding: each pair of the last dim is a point, rotated by its angle."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class LlamaDecoderLayer(nn.Module):
    """4 layers: model.layers.0 … model.layers.3 · recompute in 4 of 4."""

    def __init__(self, recompute):
        super().__init__()
        self._recompute = recompute
        parameter(self, "input_layernorm.weight", (64,))
        parameter(self, "self_attn.q_proj.weight", (64, 64))
        parameter(self, "self_attn.k_proj.weight", (32, 64))
        parameter(self, "self_attn.v_proj.weight", (32, 64))
        parameter(self, "self_attn.o_proj.weight", (64, 64))
        parameter(self, "post_attention_layernorm.weight", (64,))
        parameter(self, "mlp.gate_proj.weight", (160, 64))
        parameter(self, "mlp.up_proj.weight", (160, 64))
        parameter(self, "mlp.down_proj.weight", (64, 160))

    def forward(self, x, cos, sin):
        return self._recomputed("layer", self._layer, x, cos, sin)

    def _layer(self, x, cos, sin):  # x: [b, s, 64]
        attn = self._recomputed("attention", self._attention, x, cos, sin)
        x = x + attn

        h = self.post_attention_layernorm.weight * F.rms_norm(x, (64,), eps=1e-06)
        gate = F.linear(h, self.mlp.gate_proj.weight)
        up = F.linear(h, self.mlp.up_proj.weight)
        mlp = self._recomputed("activation", self._activation, gate, up)
        return x + mlp

    def _attention(self, x, cos, sin):  # x: [b, s, 64]
        b, s, _ = x.shape
        x = self.input_layernorm.weight * F.rms_norm(x, (64,), eps=1e-06)
        q = F.linear(x, self.self_attn.q_proj.weight).reshape(b, s, 4, 16).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = F.linear(x, self.self_attn.k_proj.weight).reshape(b, s, 2, 16).transpose(1, 2)
        k = rotate(k, cos, sin)
        v = F.linear(x, self.self_attn.v_proj.weight).reshape(b, s, 2, 16).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
        attn = attn.transpose(1, 2).reshape(b, s, 64)
        return F.linear(attn, self.self_attn.o_proj.weight)

    def _activation(self, gate, up):  # gate: [b, s, 160], up: [b, s, 160]
        h = F.silu(gate) * up
        return F.linear(h, self.mlp.down_proj.weight)

    def _recomputed(self, name, part, *values):
        """A part of the layer; where RECOMPUTE names it, backward computes it again."""
        if name in self._recompute and torch.is_grad_enabled():
            return checkpoint(part, *values, use_reentrant=False)
        return part(*values)


class Model(nn.Module):
    """LlamaForCausalLM: the layers of one stage, what precedes them on the first, the loss on the last."""

    def __init__(self, stage=0):
        super().__init__()
        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1
        self._start, self._stop = SETTINGS.stages[stage]
        buffer(self, "model.rotary_emb.inv_freq", (8,), torch.float32)
        if self._first:
            parameter(self, "model.embed_tokens.weight", (97, 64))
        for i in range(self._start, self._stop):
            submodule(self, f"model.layers.{i}", LlamaDecoderLayer(RECOMPUTE.get(i, ())))
        if self._last:
            parameter(self, "model.norm.weight", (64,))
            parameter(self, "lm_head.weight", (97, 64))
            self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *received, input_ids, labels):
        cos, sin = self._tables(input_ids.shape[1], input_ids.device)
        if self._first:
            x = self._prologue(input_ids)
        else:
            (x,) = received
        for i in self._range(0, 2)[::2]:
            x = checkpoint(self._layers, i, x, cos, sin, use_reentrant=False)
        for i in self._range(2, 4):
            x = self.model.layers[i](x, cos, sin)
        if self._last:
            return self._epilogue(x, labels)
        return x

    def _layers(self, start, x, cos, sin):
        """2 layers, which backward computes again together."""
        for i in range(start, start + 2):
            x = self.model.layers[i](x, cos, sin)
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
        return F.embedding(input_ids, self.model.embed_tokens.weight)

    def _epilogue(self, x, labels):  # x: [b, s, 64]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s, _ = x.shape
        x = self.model.norm.weight * F.rms_norm(x, (64,), eps=1e-06)
        logits = F.linear(x, self.lm_head.weight).to(torch.float32).reshape(b * s, 97)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s)
        return F.cross_entropy(logits, labels, reduction="sum") / self._count

    def _range(self, start, stop):
        """The layers from start to stop that this stage has."""
        return range(max(start, self._start), min(stop, self._stop))

    @staticmethod
    def between_stages(stage, b, s):
        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""
        return (((b, s, 64), torch.bfloat16),)


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s) != -100).sum()
