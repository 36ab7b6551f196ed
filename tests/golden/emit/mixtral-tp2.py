"""MixtralForCausalLM, distributed by autopar over 2 GPUs.

plan       tp2 (megatron), zero 0, micro-batch 4 × 2, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 2 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_reduce, copy_to, split
from runtime.experts import experts
from runtime.loss import embedding
from runtime.parameters import buffer, local, parameter, submodule, summed
from runtime.settings import Settings

SETTINGS = Settings(
    pp=1, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="none", zero=0, precision="bf16",
    stages=((0, 4),),
    optimizer="AdamW", optimizer_kwargs={},
    vocabulary=97, labels="same",
)
LAYERS = ("model.layers",)  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("model.embed_tokens",),
    "_epilogue": ("model.norm", "lm_head"),
}
TIED = ()  # (alias, original)
# Parameters that are slices of one of the original model: part → (original, dim, start, length)
PARTS = {
    **{
        f"{path}.{part}": (f"{path}.{original}", dim, start, length)
        for path in (f"model.layers.{i}" for i in range(4))
        for part, original, dim, start, length in (
            ("mlp.experts._gate_up_proj_0", "mlp.experts.gate_up_proj", 1, 0, 72),
            ("mlp.experts._gate_up_proj_1", "mlp.experts.gate_up_proj", 1, 72, 72),
        )
    },
}


def rotate(x, cos, sin):
    """Rotary position embedding: each pair of the last dim is a point, rotated by its angle."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class MixtralDecoderLayer(nn.Module):
    """4 layers: model.layers.0 … model.layers.3 · tp=2 (megatron).

    input_layernorm.weight                            [32]         Replicate
    self_attn.q_proj.weight                           [32, 32]     Shard(0) → [16, 32]     column-parallel
    self_attn.k_proj.weight, self_attn.v_proj.weight  [16, 32]     Shard(0) → [8, 32]      column-parallel
    self_attn.o_proj.weight                           [32, 32]     Shard(1) → [32, 16]     row-parallel
    post_attention_layernorm.weight                   [32]         Replicate
    mlp.gate.weight                                   [4, 32]      Replicate               gradient summed over tp
    mlp.experts._gate_up_proj_0                       [4, 72, 32]  Shard(1) → [4, 36, 32]
    mlp.experts._gate_up_proj_1                       [4, 72, 32]  Shard(1) → [4, 36, 32]
    mlp.experts.down_proj                             [4, 32, 72]  Shard(2) → [4, 32, 36]
    x                                                 [b, s, 32]   Replicate
    """

    def __init__(self):
        super().__init__()
        parameter(self, "input_layernorm.weight", (32,))
        parameter(self, "self_attn.q_proj.weight", (32, 32), shard=0)
        parameter(self, "self_attn.k_proj.weight", (16, 32), shard=0)
        parameter(self, "self_attn.v_proj.weight", (16, 32), shard=0)
        parameter(self, "self_attn.o_proj.weight", (32, 32), shard=1)
        parameter(self, "post_attention_layernorm.weight", (32,))
        parameter(self, "mlp.gate.weight", (4, 32))
        parameter(self, "mlp.experts._gate_up_proj_0", (4, 72, 32), shard=1)
        parameter(self, "mlp.experts._gate_up_proj_1", (4, 72, 32), shard=1)
        parameter(self, "mlp.experts.down_proj", (4, 32, 72), shard=2)

    def forward(self, x, cos, sin):  # x: Replicate@tp [b, s, 32]
        x = self._attention(x, cos, sin)
        return self._experts(x)

    def _attention(self, x, cos, sin):  # x: Replicate@tp [b, s, 32]
        b, s, _ = x.shape
        h = local(self.input_layernorm.weight) * F.rms_norm(x, (32,), eps=1e-05)
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        q = F.linear(h, local(self.self_attn.q_proj.weight)).reshape(b, s, 2, 8).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = F.linear(h, local(self.self_attn.k_proj.weight)).reshape(b, s, 1, 8).transpose(1, 2)
        k = rotate(k, cos, sin)
        v = F.linear(h, local(self.self_attn.v_proj.weight)).reshape(b, s, 1, 8).transpose(1, 2)
        attn = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3535533905932738, enable_gqa=True
        )
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        attn = F.linear(attn, local(self.self_attn.o_proj.weight))  # row-parallel → Partial
        attn = all_reduce(attn, axis="tp")  # Partial → Replicate; backward: nothing
        return x + attn

    def _experts(self, x):  # x: Replicate@tp [b, s, 32]
        b, s, _ = x.shape
        h = local(self.post_attention_layernorm.weight) * F.rms_norm(x, (32,), eps=1e-05)
        h = h.reshape(b * s, 32)
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        probs = torch.softmax(F.linear(h, summed(self.mlp.gate.weight)).to(torch.float32), -1)
        topk_indices = probs.topk(2).indices
        h_2 = probs.gather(-1, topk_indices)
        h_2 = h_2 / h_2.sum((-1,), True)
        h = experts(
            h,
            topk_indices,
            h_2,
            local(self.mlp.experts._gate_up_proj_0),
            local(self.mlp.experts._gate_up_proj_1),
            local(self.mlp.experts.down_proj),
            F.silu,
        )
        h = all_reduce(h, axis="tp")  # Partial → Replicate; backward: nothing
        return x + h.reshape(b, s, 32)


class Model(nn.Module):
    """MixtralForCausalLM, whole: what precedes the layers, the layers, the loss.

    model.embed_tokens.weight  [97, 32]  Shard(0) → ≤ [49, 32]  a range of its rows
    model.norm.weight          [32]      Shard(0) → [16]
    lm_head.weight             [97, 32]  Shard(1) → [97, 16]    row-parallel
    """

    def __init__(self, stage=0):
        super().__init__()
        buffer(self, "model.rotary_emb.inv_freq", (4,), torch.float32)
        parameter(self, "model.embed_tokens.weight", (97, 32), shard=0)
        for i in range(4):
            submodule(self, f"model.layers.{i}", MixtralDecoderLayer())
        parameter(self, "model.norm.weight", (32,), shard=0)
        parameter(self, "lm_head.weight", (97, 32), shard=1)
        self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *, input_ids, labels):
        cos, sin = self._tables(input_ids.shape[1], input_ids.device)
        x = self._prologue(input_ids)
        for layer in self.model.layers.children():
            x = layer(x, cos, sin)
        return self._epilogue(x, labels)

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

    def _epilogue(self, x, labels):  # x: Replicate@tp [b, s, 32]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s, _ = x.shape
        x = F.rms_norm(x, (32,), eps=1e-05)
        x = split(x, dim=2, axis="tp")  # Replicate → Shard(2); backward: all-gather
        x = local(self.model.norm.weight) * x
        logits = F.linear(x, local(self.lm_head.weight))  # row-parallel → Partial
        logits = all_reduce(logits, axis="tp")  # Partial → Replicate; backward: nothing
        logits = logits.to(torch.float32).reshape(b * s, 97)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s)
        return F.cross_entropy(logits, labels, reduction="sum") / self._count


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(b * s) != -100).sum()
