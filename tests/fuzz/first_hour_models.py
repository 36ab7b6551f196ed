"""Small models of what new users bring, drawn by hypothesis and mixed: no layers, scores and logits [b, b], frozen
parts, shared glue, tables, prefixes, repeated biases, complex rotations, random draws, custom Functions, checks, named
losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.first_hour.kept_whole import Rounded

D, VOCABULARY, PREFIX = 16, 32, 4


@dataclass(frozen=True)
class HourSpec:
    layers: int  # 0: no list of layers
    table: str  # of positions: "none", "sliced", "fixed" (one length), "buffer"
    prefix: bool  # learned tokens before the text
    frozen: str  # "none", "before", "after": a part under no_grad, joined to the states
    glue: bool  # a root parameter between the layers
    bias: bool  # attention with a bias that is repeated over the batch
    rotary: bool  # attention with complex rotations
    noise: str  # "none", "normal", "dropped"
    function: bool  # a custom autograd.Function in the root
    check: bool  # of values, which only raises
    loss: str  # "tokens", "cosine", "pairs", "in-batch", "quarter"
    named: bool  # returned as {"loss": …}


def hour_specs() -> st.SearchStrategy[HourSpec]:
    return st.builds(
        HourSpec,
        layers=st.sampled_from((0, 1, 2, 2, 3)),
        table=st.sampled_from(("none", "sliced", "fixed", "buffer")),
        prefix=st.sampled_from((False, False, True)),
        frozen=st.sampled_from(("none", "none", "before", "after")),
        glue=st.booleans(),
        bias=st.sampled_from((False, False, True)),
        rotary=st.sampled_from((False, False, True)),
        noise=st.sampled_from(("none", "none", "normal", "dropped")),
        function=st.sampled_from((False, False, True)),
        check=st.sampled_from((False, False, True)),
        loss=st.sampled_from(("tokens", "tokens", "cosine", "pairs", "in-batch", "quarter")),
        named=st.booleans(),
    )


class Attention(nn.Module):
    """Of two heads, causal by its bias or by its kernel."""

    def __init__(self, spec: HourSpec) -> None:
        super().__init__()
        self.qkv, self.out, self.spec = nn.Linear(D, 3 * D), nn.Linear(D, D), spec

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        if self.spec.rotary:
            q, k = rotated(q), rotated(k)
        if not self.spec.bias:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, D))
        slopes = torch.arange(1, 3, device=x.device)[:, None, None] * 0.1
        alibi = (slopes * torch.arange(s, device=x.device)).to(x.dtype).repeat(b, 1, 1)
        q, k, v = (part.reshape(2 * b, s, D // 2) for part in (q, k, v))
        y = torch.baddbmm(alibi, q, k.transpose(1, 2)).softmax(-1) @ v
        return self.out(y.view(b, 2, s, D // 2).transpose(1, 2).reshape(b, s, D))


def rotated(x: Tensor) -> Tensor:
    """Pairs of features turned by their position, as complex numbers."""
    speeds = 1.0 / (1 + torch.arange(D // 4, device=x.device).to(x.dtype))
    angles = torch.arange(x.shape[2], device=x.device).to(x.dtype)[:, None] * speeds
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3)


class Layer(nn.Module):
    def __init__(self, spec: HourSpec) -> None:
        super().__init__()
        self.attention = Attention(spec) if spec.bias or spec.rotary else None
        self.up, self.down, self.noise = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), spec.noise

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(x)
        h = self.down(F.gelu(self.up(x)))
        if self.noise == "normal":
            h = h + 0.1 * torch.randn_like(h)
        if self.noise == "dropped":
            h = h * (torch.rand(h.shape[0], 1, 1, device=h.device) < 0.8)
        return x + h


class HourModel(nn.Module):
    positions: Tensor

    def __init__(self, spec: HourSpec, tokens: int) -> None:
        super().__init__()
        self.spec = spec
        self.emb, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        if spec.layers:
            self.blocks = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        else:
            self.only = Layer(spec)
        length = tokens if spec.table == "fixed" else 2 * tokens
        if spec.table == "buffer":
            self.register_buffer("positions", torch.sin(torch.arange(length * D).view(1, length, D) / 3))
        elif spec.table != "none":
            self.positions = nn.Parameter(torch.zeros(1, length, D))
        if spec.prefix:
            self.prompt = nn.Parameter(torch.zeros(1, PREFIX, D))
        if spec.frozen != "none":
            self.teacher = nn.ModuleList(nn.Linear(D, D) for _ in range(2)).requires_grad_(False)
        if spec.glue or spec.function:
            self.scale = nn.Parameter(torch.ones(D))

    def forward(self, ids: Tensor, labels: Tensor, second: Tensor | None = None) -> Any:
        if self.spec.check and (ids >= VOCABULARY).any():
            raise ValueError("ids beyond the vocabulary")
        loss = self._loss(self._states(ids), labels, second)
        return {"loss": loss} if self.spec.named else loss

    def _states(self, ids: Tensor) -> Tensor:
        spec, x = self.spec, self.emb(ids)
        if spec.table != "none":
            x = x + (self.positions if spec.table == "fixed" else self.positions[:, : ids.shape[1]])
        if spec.prefix:
            x = torch.cat([self.prompt.expand(ids.shape[0], -1, -1), x], 1)
        if spec.frozen == "before":
            x = x + self._taught(x)
        if spec.function:
            x = Rounded.apply(x, self.scale)  # type: ignore[no-untyped-call]
        for block in self.blocks if spec.layers else [self.only]:
            x = block(x)
            x = x * self.scale if spec.glue else x
        if spec.frozen == "after":
            x = x + self._taught(x)
        return x[:, PREFIX:] if spec.prefix else x

    def _taught(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.teacher:
                x = torch.tanh(layer(x))
        return x

    def _loss(self, x: Tensor, labels: Tensor, second: Tensor | None) -> Tensor:
        kind = self.spec.loss
        if kind == "quarter":
            b, s, d = x.shape
            x = x.view(b, s // 4, 4, d).mean(2)
        if second is None:
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        other = self._states(second)
        if kind == "cosine":
            return 1 - F.cosine_similarity(x, other, dim=-1).mean()
        if kind == "pairs":
            return -F.logsigmoid((self.head(x)[:, -1] - self.head(other)[:, -1]).mean(-1)).mean()
        scores = F.normalize(x.mean(1), dim=-1) @ F.normalize(other.mean(1), dim=-1).T
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))


def hour_batch(spec: HourSpec, samples: int, tokens: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (samples, length), generator=generator)

    batch = {"ids": ids(tokens), "labels": ids(tokens // 4 if spec.loss == "quarter" else tokens)}
    return batch | ({"second": ids(tokens)} if spec.loss in ("cosine", "pairs", "in-batch") else {})
