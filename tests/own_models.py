"""Models that tests plan beside those of transformers and timm: nanoGPT written out, parallel attention, a UNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

VOCABULARY = 97  # odd, so that its shards are uneven


def nanogpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, n_layer=4, n_head=4, d_model=32, block_size=64))


class EagerAttentionGPT(GPT):
    """nanoGPT's attention written out: scores, a buffer of ones as mask, softmax, values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            block.attn = EagerAttention(config)


class EagerAttention(nn.Module):
    bias: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        ones = torch.ones(config.block_size, config.block_size)
        self.register_buffer("bias", torch.tril(ones).view(1, 1, *ones.shape))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.size()
        q, k, v = self.c_attn(x).split(d, dim=2)
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / (d // self.heads) ** 0.5)
        scores = scores.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        result: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, s, d))
        return result


def nanogpt_eager() -> nn.Module:
    return EagerAttentionGPT(GPTConfig(vocab_size=VOCABULARY, n_layer=4, n_head=4, d_model=32, block_size=64))


class ParallelBlock(nn.Module):
    """Attention and MLP read one norm and join one sum, as in GPT-J and PaLM."""

    def __init__(self, d: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, width), nn.Linear(width, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        h = self.norm(x)
        q, k, v = (t.view(b, s, self.heads, d // self.heads).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        result: Tensor = x + self.out(attended) + self.down(F.gelu(self.up(h)))
        return result


class ParallelGPT(nn.Module):
    def __init__(self, layers: int = 4, d: int = 32, heads: int = 4, width: int = 72) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, d), nn.Embedding(64, d)
        self.blocks = nn.ModuleList(ParallelBlock(d, heads, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class ConvBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(4, outside)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Skips from each way down to its way up: values that are read several stages later. Regression on images."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(ConvBlock(w, 2 * w) for w in widths)
        self.up = nn.ModuleList(ConvBlock(4 * w, w) for w in reversed(widths))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, pixel_values: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values)
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1))
        prediction = self.out(x)
        return {"loss": F.mse_loss(prediction, target), "prediction": prediction}
