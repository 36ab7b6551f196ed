"""T5ForConditionalGeneration, distributed by autopar over 2 GPUs.

plan       tp2 (megatron-sp), zero 0, micro-batch 4 × 2, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 2 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_gather, all_to_all, reduce_scatter, split
from runtime.loss import cross_entropy, embedding
from runtime.parameters import local, parameter, submodule, summed, tie
from runtime.settings import Settings

SETTINGS = Settings(
    pp=1, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="none", zero=0, precision="bf16",
    stages=((0, 7),),
    optimizer="AdamW", optimizer_kwargs={},
    vocabulary=97, labels="next",
)
LAYERS = ("encoder.block", "decoder.block")  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("encoder.embed_tokens",),
    "_between": ("encoder.final_layer_norm", "decoder.embed_tokens"),
    "_epilogue": ("decoder.final_layer_norm", "lm_head"),
}
TIED = (  # (alias, original)
    ("encoder.embed_tokens.weight", "shared.weight"),
    ("decoder.embed_tokens.weight", "shared.weight"),
    ("lm_head.weight", "shared.weight"),
)


class T5BlockEncoderFirst(nn.Module):
    """encoder.block.0 · tp=2 (megatron-sp).

    layer.0.layer_norm.weight                             [32]        Replicate                gradient summed over tp
    layer.0.SelfAttention.q.weight                        [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.k.weight                        [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.v.weight                        [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.relative_attention_bias.weight  [32, 4]     Replicate                gradient summed over tp
    layer.0.SelfAttention.o.weight                        [32, 32]    Shard(1) → [32, 16]      row-parallel
    layer.1.layer_norm.weight                             [32]        Replicate                gradient summed over tp
    layer.1.DenseReluDense.wi.weight                      [72, 32]    Shard(0) → [36, 32]      column-parallel
    layer.1.DenseReluDense.wo.weight                      [32, 72]    Shard(1) → [32, 36]      row-parallel
    x                                                     [b, s, 32]  Shard(1) → [b, s/2, 32]
    """

    def __init__(self):
        super().__init__()
        parameter(self, "layer.0.layer_norm.weight", (32,))
        parameter(self, "layer.0.SelfAttention.q.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.k.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.v.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.relative_attention_bias.weight", (32, 4))
        parameter(self, "layer.0.SelfAttention.o.weight", (32, 32), shard=1)
        parameter(self, "layer.1.layer_norm.weight", (32,))
        parameter(self, "layer.1.DenseReluDense.wi.weight", (72, 32), shard=0)
        parameter(self, "layer.1.DenseReluDense.wo.weight", (32, 72), shard=1)

    def forward(self, x, attention_mask_2):  # x: Shard(1)@tp [b, s/2, 32]
        position_bias, x = self._attention(x, attention_mask_2)
        x = self._mlp(x)
        return position_bias, x

    def _attention(self, x, attention_mask_2):  # x: Shard(1)@tp [b, s/2, 32]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = summed(self.layer[0].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.layer[0].SelfAttention.q.weight))  # column-parallel
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        k = F.linear(h, local(self.layer[0].SelfAttention.k.weight))  # column-parallel
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = F.linear(h, local(self.layer[0].SelfAttention.v.weight))  # column-parallel
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        positions = torch.arange(s, dtype=torch.int64, device=x.device)
        positions = split(positions, dim=0, axis="tp")  # Replicate → Shard(0)
        positions_2 = torch.arange(s, dtype=torch.int64, device=x.device).unsqueeze(0)
        difference = positions_2 - positions.unsqueeze(1)
        distance = difference.abs()
        distance_2 = (distance.to(torch.float32) / 8).log() / 2.772588722239781 * 8
        distance_2 = distance_2.to(torch.int64)
        distance_2 = distance_2 + 8
        distance_2 = distance_2.min(torch.full_like(distance_2, 15))
        distance = torch.where(distance < 8, distance, distance_2)
        indices = (difference > 0).to(torch.int64) * 16 + distance
        position_bias = F.embedding(
            indices, summed(self.layer[0].SelfAttention.relative_attention_bias.weight)
        )
        position_bias = position_bias.permute(2, 0, 1)
        # Shard(1) → Shard(0); backward: all-to-all
        position_bias = all_to_all(position_bias, from_dim=1, to_dim=0, axis="tp")
        position_bias = position_bias.unsqueeze(0)
        bias = torch.where(attention_mask_2, position_bias, torch.finfo(torch.bfloat16).min)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        attn = F.linear(attn, local(self.layer[0].SelfAttention.o.weight))  # row-parallel → Partial
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        x = x + attn
        return position_bias, x

    def _mlp(self, x):  # x: Shard(1)@tp [b, s/2, 32]
        h = summed(self.layer[1].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        h = F.relu(F.linear(h, local(self.layer[1].DenseReluDense.wi.weight)))  # column-parallel
        mlp = F.linear(h, local(self.layer[1].DenseReluDense.wo.weight))  # row-parallel → Partial
        mlp = reduce_scatter(mlp, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + mlp


class T5BlockEncoder(nn.Module):
    """2 layers: encoder.block.1 … encoder.block.2 · tp=2 (megatron-sp).

    layer.0.layer_norm.weight         [32]          Replicate                gradient summed over tp
    layer.0.SelfAttention.q.weight    [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.k.weight    [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.v.weight    [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.o.weight    [32, 32]      Shard(1) → [32, 16]      row-parallel
    layer.1.layer_norm.weight         [32]          Replicate                gradient summed over tp
    layer.1.DenseReluDense.wi.weight  [72, 32]      Shard(0) → [36, 32]      column-parallel
    layer.1.DenseReluDense.wo.weight  [32, 72]      Shard(1) → [32, 36]      row-parallel
    x                                 [b, s, 32]    Shard(1) → [b, s/2, 32]
    position_bias                     [1, 4, s, s]  Shard(1) → [1, 2, s, s]
    """

    def __init__(self):
        super().__init__()
        parameter(self, "layer.0.layer_norm.weight", (32,))
        parameter(self, "layer.0.SelfAttention.q.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.k.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.v.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.o.weight", (32, 32), shard=1)
        parameter(self, "layer.1.layer_norm.weight", (32,))
        parameter(self, "layer.1.DenseReluDense.wi.weight", (72, 32), shard=0)
        parameter(self, "layer.1.DenseReluDense.wo.weight", (32, 72), shard=1)

    def forward(self, x, attention_mask_2, position_bias):  # x: Shard(1)@tp [b, s/2, 32]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = summed(self.layer[0].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.layer[0].SelfAttention.q.weight))  # column-parallel
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        k = F.linear(h, local(self.layer[0].SelfAttention.k.weight))  # column-parallel
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = F.linear(h, local(self.layer[0].SelfAttention.v.weight))  # column-parallel
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        bias = torch.where(attention_mask_2, position_bias, torch.finfo(torch.bfloat16).min)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        attn = F.linear(attn, local(self.layer[0].SelfAttention.o.weight))  # row-parallel → Partial
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        x = x + attn

        h = summed(self.layer[1].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        h = F.relu(F.linear(h, local(self.layer[1].DenseReluDense.wi.weight)))  # column-parallel
        mlp = F.linear(h, local(self.layer[1].DenseReluDense.wo.weight))  # row-parallel → Partial
        mlp = reduce_scatter(mlp, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + mlp


class T5BlockDecoderFirst(nn.Module):
    """decoder.block.0 · tp=2 (megatron-sp).

    layer.0.layer_norm.weight                             [32]        Replicate                gradient summed over tp
    layer.0.SelfAttention.q.weight                        [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.k.weight                        [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.v.weight                        [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.relative_attention_bias.weight  [32, 4]     Replicate                gradient summed over tp
    layer.0.SelfAttention.o.weight                        [32, 32]    Shard(1) → [32, 16]      row-parallel
    layer.1.layer_norm.weight                             [32]        Replicate                gradient summed over tp
    layer.1.EncDecAttention.q.weight                      [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.1.EncDecAttention.k.weight                      [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.1.EncDecAttention.v.weight                      [32, 32]    Shard(0) → [16, 32]      column-parallel
    layer.1.EncDecAttention.o.weight                      [32, 32]    Shard(1) → [32, 16]      row-parallel
    layer.2.layer_norm.weight                             [32]        Replicate                gradient summed over tp
    layer.2.DenseReluDense.wi.weight                      [72, 32]    Shard(0) → [36, 32]      column-parallel
    layer.2.DenseReluDense.wo.weight                      [32, 72]    Shard(1) → [32, 36]      row-parallel
    x                                                     [b, s, 32]  Shard(1) → [b, s/2, 32]
    encoder_out                                           [b, s, 32]  Shard(1) → [b, s/2, 32]
    """

    def __init__(self):
        super().__init__()
        parameter(self, "layer.0.layer_norm.weight", (32,))
        parameter(self, "layer.0.SelfAttention.q.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.k.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.v.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.relative_attention_bias.weight", (32, 4))
        parameter(self, "layer.0.SelfAttention.o.weight", (32, 32), shard=1)
        parameter(self, "layer.1.layer_norm.weight", (32,))
        parameter(self, "layer.1.EncDecAttention.q.weight", (32, 32), shard=0)
        parameter(self, "layer.1.EncDecAttention.k.weight", (32, 32), shard=0)
        parameter(self, "layer.1.EncDecAttention.v.weight", (32, 32), shard=0)
        parameter(self, "layer.1.EncDecAttention.o.weight", (32, 32), shard=1)
        parameter(self, "layer.2.layer_norm.weight", (32,))
        parameter(self, "layer.2.DenseReluDense.wi.weight", (72, 32), shard=0)
        parameter(self, "layer.2.DenseReluDense.wo.weight", (32, 72), shard=1)

    def forward(self, x, encoder_out, attention_mask_3):  # x: Shard(1)@tp [b, s/2, 32]
        position_bias, x = self._attention(x)
        x = self._cross_attention(x, encoder_out, attention_mask_3)
        x = self._mlp(x)
        return position_bias, x

    def _attention(self, x):  # x: Shard(1)@tp [b, s/2, 32]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = summed(self.layer[0].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.layer[0].SelfAttention.q.weight))  # column-parallel
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        k = F.linear(h, local(self.layer[0].SelfAttention.k.weight))  # column-parallel
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = F.linear(h, local(self.layer[0].SelfAttention.v.weight))  # column-parallel
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        positions = torch.arange(s, dtype=torch.int64, device=x.device)
        positions = split(positions, dim=0, axis="tp")  # Replicate → Shard(0)
        positions_2 = torch.arange(s, dtype=torch.int64, device=x.device).unsqueeze(0)
        difference = positions_2 - positions.unsqueeze(1)
        distance = -difference.min(torch.zeros_like(difference))
        distance_2 = (distance.to(torch.float32) / 16).log() / 2.0794415416798357 * 16
        distance_2 = distance_2.to(torch.int64)
        distance_2 = distance_2 + 16
        distance_2 = distance_2.min(torch.full_like(distance_2, 31))
        indices = torch.where(distance < 16, distance, distance_2)
        position_bias = F.embedding(
            indices, summed(self.layer[0].SelfAttention.relative_attention_bias.weight)
        )
        position_bias = position_bias.permute(2, 0, 1)
        # Shard(1) → Shard(0); backward: all-to-all
        position_bias = all_to_all(position_bias, from_dim=1, to_dim=0, axis="tp")
        position_bias = position_bias.unsqueeze(0)
        positions = torch.arange(s, device=x.device).unsqueeze(1)
        mask = positions >= torch.arange(s, device=x.device).unsqueeze(0)
        mask = mask.reshape(1, 1, s, s)
        bias = torch.where(mask, position_bias, torch.finfo(torch.bfloat16).min)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        attn = F.linear(attn, local(self.layer[0].SelfAttention.o.weight))  # row-parallel → Partial
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        x = x + attn
        return position_bias, x

    def _cross_attention(self, x, encoder_out, attention_mask_3):  # x: Shard(1)@tp [b, s/2, 32]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = summed(self.layer[1].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.layer[1].EncDecAttention.q.weight))  # column-parallel
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        # Shard(1) → Replicate; backward: reduce-scatter
        encoder_out = all_gather(encoder_out, dim=1, axis="tp")
        k = F.linear(encoder_out, local(self.layer[1].EncDecAttention.k.weight))  # column-parallel
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = F.linear(encoder_out, local(self.layer[1].EncDecAttention.v.weight))  # column-parallel
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        zeros = torch.zeros((), dtype=torch.bfloat16, device=x.device)
        mask = torch.where(attention_mask_3, zeros, torch.finfo(torch.bfloat16).min)
        mask = mask.expand(b, 2, s, s)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        # row-parallel → Partial
        attn = F.linear(attn, local(self.layer[1].EncDecAttention.o.weight))
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + attn

    def _mlp(self, x):  # x: Shard(1)@tp [b, s/2, 32]
        h = summed(self.layer[2].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        h = F.relu(F.linear(h, local(self.layer[2].DenseReluDense.wi.weight)))  # column-parallel
        mlp = F.linear(h, local(self.layer[2].DenseReluDense.wo.weight))  # row-parallel → Partial
        mlp = reduce_scatter(mlp, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + mlp


class T5BlockDecoder(nn.Module):
    """2 layers: decoder.block.1 … decoder.block.2 · tp=2 (megatron-sp).

    layer.0.layer_norm.weight         [32]          Replicate                gradient summed over tp
    layer.0.SelfAttention.q.weight    [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.k.weight    [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.v.weight    [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.0.SelfAttention.o.weight    [32, 32]      Shard(1) → [32, 16]      row-parallel
    layer.1.layer_norm.weight         [32]          Replicate                gradient summed over tp
    layer.1.EncDecAttention.q.weight  [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.1.EncDecAttention.k.weight  [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.1.EncDecAttention.v.weight  [32, 32]      Shard(0) → [16, 32]      column-parallel
    layer.1.EncDecAttention.o.weight  [32, 32]      Shard(1) → [32, 16]      row-parallel
    layer.2.layer_norm.weight         [32]          Replicate                gradient summed over tp
    layer.2.DenseReluDense.wi.weight  [72, 32]      Shard(0) → [36, 32]      column-parallel
    layer.2.DenseReluDense.wo.weight  [32, 72]      Shard(1) → [32, 36]      row-parallel
    x                                 [b, s, 32]    Shard(1) → [b, s/2, 32]
    position_bias                     [1, 4, s, s]  Shard(1) → [1, 2, s, s]
    encoder_out                       [b, s, 32]    Shard(1) → [b, s/2, 32]
    """

    def __init__(self):
        super().__init__()
        parameter(self, "layer.0.layer_norm.weight", (32,))
        parameter(self, "layer.0.SelfAttention.q.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.k.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.v.weight", (32, 32), shard=0)
        parameter(self, "layer.0.SelfAttention.o.weight", (32, 32), shard=1)
        parameter(self, "layer.1.layer_norm.weight", (32,))
        parameter(self, "layer.1.EncDecAttention.q.weight", (32, 32), shard=0)
        parameter(self, "layer.1.EncDecAttention.k.weight", (32, 32), shard=0)
        parameter(self, "layer.1.EncDecAttention.v.weight", (32, 32), shard=0)
        parameter(self, "layer.1.EncDecAttention.o.weight", (32, 32), shard=1)
        parameter(self, "layer.2.layer_norm.weight", (32,))
        parameter(self, "layer.2.DenseReluDense.wi.weight", (72, 32), shard=0)
        parameter(self, "layer.2.DenseReluDense.wo.weight", (32, 72), shard=1)

    def forward(self, x, position_bias, encoder_out, attention_mask_3):  # x: Shard(1)@tp [b, s/2, 32]
        x = self._attention(x, position_bias)
        x = self._cross_attention(x, encoder_out, attention_mask_3)
        return self._mlp(x)

    def _attention(self, x, position_bias):  # x: Shard(1)@tp [b, s/2, 32]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = summed(self.layer[0].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.layer[0].SelfAttention.q.weight))  # column-parallel
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        k = F.linear(h, local(self.layer[0].SelfAttention.k.weight))  # column-parallel
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = F.linear(h, local(self.layer[0].SelfAttention.v.weight))  # column-parallel
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        positions = torch.arange(s, device=x.device).unsqueeze(1)
        mask = positions >= torch.arange(s, device=x.device).unsqueeze(0)
        mask = mask.reshape(1, 1, s, s)
        bias = torch.where(mask, position_bias, torch.finfo(torch.bfloat16).min)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        attn = F.linear(attn, local(self.layer[0].SelfAttention.o.weight))  # row-parallel → Partial
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + attn

    def _cross_attention(self, x, encoder_out, attention_mask_3):  # x: Shard(1)@tp [b, s/2, 32]
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        h = summed(self.layer[1].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.layer[1].EncDecAttention.q.weight))  # column-parallel
        q = q.reshape(b, s, 2, 8).transpose(1, 2)
        # Shard(1) → Replicate; backward: reduce-scatter
        encoder_out = all_gather(encoder_out, dim=1, axis="tp")
        k = F.linear(encoder_out, local(self.layer[1].EncDecAttention.k.weight))  # column-parallel
        k = k.reshape(b, s, 2, 8).transpose(1, 2)
        v = F.linear(encoder_out, local(self.layer[1].EncDecAttention.v.weight))  # column-parallel
        v = v.reshape(b, s, 2, 8).transpose(1, 2)
        zeros = torch.zeros((), dtype=torch.bfloat16, device=x.device)
        mask = torch.where(attention_mask_3, zeros, torch.finfo(torch.bfloat16).min)
        mask = mask.expand(b, 2, s, s)
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        attn = attn.transpose(1, 2).reshape(b, s, 16)
        # row-parallel → Partial
        attn = F.linear(attn, local(self.layer[1].EncDecAttention.o.weight))
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + attn

    def _mlp(self, x):  # x: Shard(1)@tp [b, s/2, 32]
        h = summed(self.layer[2].layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        h = F.relu(F.linear(h, local(self.layer[2].DenseReluDense.wi.weight)))  # column-parallel
        mlp = F.linear(h, local(self.layer[2].DenseReluDense.wo.weight))  # row-parallel → Partial
        mlp = reduce_scatter(mlp, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x + mlp


class Model(nn.Module):
    """T5ForConditionalGeneration, whole: what precedes the layers, the layers, the loss.

    encoder.embed_tokens.weight      [97, 32]  Shard(0) → ≤ [49, 32]  a range of its rows
    encoder.final_layer_norm.weight  [32]      Replicate              gradient summed over tp
    decoder.embed_tokens.weight      [97, 32]  Shard(0) → ≤ [49, 32]  a range of its rows
    decoder.final_layer_norm.weight  [32]      Replicate              gradient summed over tp
    lm_head.weight                   [97, 32]  Shard(0) → ≤ [49, 32]  column-parallel
    """

    def __init__(self, stage=0):
        super().__init__()
        parameter(self, "encoder.embed_tokens.weight", (97, 32), shard=0)
        submodule(self, "encoder.block.0", T5BlockEncoderFirst())
        for i in range(1, 3):
            submodule(self, f"encoder.block.{i}", T5BlockEncoder())
        parameter(self, "encoder.final_layer_norm.weight", (32,))
        tie(self, "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", (97, 32), shard=0)
        submodule(self, "decoder.block.0", T5BlockDecoderFirst())
        for i in range(1, 3):
            submodule(self, f"decoder.block.{i}", T5BlockDecoder())
        parameter(self, "decoder.final_layer_norm.weight", (32,))
        tie(self, "lm_head.weight", "decoder.embed_tokens.weight", (97, 32), shard=0)
        self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *, input_ids, labels, attention_mask):
        attention_mask_2, labels_2, attention_mask_3 = self._tables(attention_mask, labels)
        x = self._prologue(input_ids)
        position_bias, x = self.encoder.block[0](x, attention_mask_2)
        for i in range(1, 3):
            x = self.encoder.block[i](x, attention_mask_2, position_bias)
        encoder_out, x = self._between(x, labels_2)
        position_bias, x = self.decoder.block[0](x, encoder_out, attention_mask_3)
        for i in range(1, 3):
            x = self.decoder.block[i](x, position_bias, encoder_out, attention_mask_3)
        return self._epilogue(x, labels)

    def _tables(self, attention_mask, labels):
        """What layers read that depends on no parameter: every stage makes its own."""
        b, s = attention_mask.shape
        attention_mask_2 = attention_mask.to(torch.bool).reshape(b, 1, 1, s).expand(b, 1, s, s)
        zeros = torch.zeros((b, s), dtype=torch.int64, device=attention_mask.device)[..., :1]
        labels = torch.cat((zeros, labels[..., :-1]), dim=1)
        labels = labels[..., 1:]
        constant = torch.scalar_tensor(0, dtype=torch.int64, device=attention_mask.device)
        constant = constant.expand(b).unsqueeze(1)
        labels = torch.cat((constant, labels), dim=1)
        labels_2 = labels.masked_fill(labels == -100, 0)
        attention_mask_3 = attention_mask.to(torch.bool).reshape(b, 1, 1, s).expand(b, 1, s, s)
        return attention_mask_2, labels_2, attention_mask_3

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        x = embedding(input_ids, local(self.encoder.embed_tokens.weight), size=97, axis="tp")
        x = reduce_scatter(x, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return x

    def _between(self, x, labels_2):  # x: Shard(1)@tp [b, s/2, 32]
        """What comes between encoder.block and decoder.block."""
        encoder_out = summed(self.encoder.final_layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        x = embedding(labels_2, local(self.decoder.embed_tokens.weight), size=97, axis="tp")
        x = reduce_scatter(x, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return encoder_out, x

    def _epilogue(self, x, labels):  # x: Shard(1)@tp [b, s/2, 32]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s = x.shape[0], x.shape[1] * 2  # x has 1/2 of s
        x = summed(self.decoder.final_layer_norm.weight) * F.rms_norm(x, (32,), eps=1e-06)
        x = x * 0.1767766952966369
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
