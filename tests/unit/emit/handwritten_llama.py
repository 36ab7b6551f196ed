"""A Llama layer with tensor and sequence parallelism as a person writes it for this runtime: the standard of length.

The same layout as the generated layer of tests/golden/emit/llama-tp2-sp.py: column-parallel q, k, v, gate and up,
row-parallel o and down, activations between the blocks sharded by sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.collectives import all_gather, reduce_scatter
from autopar.runtime.parameters import local, parameter, summed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


class LlamaDecoderLayer(nn.Module):
    def __init__(self) -> None:
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = F.rms_norm(x, (64,), summed(self.input_layernorm.weight), eps=1e-6)
        h = all_gather(h, dim=1, axis="tp")
        b, s, _ = h.shape
        q = F.linear(h, local(self.self_attn.q_proj.weight)).view(b, s, 2, 16).transpose(1, 2)
        k = F.linear(h, local(self.self_attn.k_proj.weight)).view(b, s, 1, 16).transpose(1, 2)
        v = F.linear(h, local(self.self_attn.v_proj.weight)).view(b, s, 1, 16).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attn = attn.transpose(1, 2).reshape(b, s, 32)
        attn = F.linear(attn, local(self.self_attn.o_proj.weight))
        x = x + reduce_scatter(attn, dim=1, axis="tp")

        h = F.rms_norm(x, (64,), summed(self.post_attention_layernorm.weight), eps=1e-6)
        h = all_gather(h, dim=1, axis="tp")
        gate = F.linear(h, local(self.mlp.gate_proj.weight))
        up = F.linear(h, local(self.mlp.up_proj.weight))
        h = F.linear(F.silu(gate) * up, local(self.mlp.down_proj.weight))
        return x + reduce_scatter(h, dim=1, axis="tp")
