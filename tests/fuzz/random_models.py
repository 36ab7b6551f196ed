"""Small models that nobody would write by hand, drawn by hypothesis: mixtures of layers, residuals, shared and frozen
parameters, odd widths and vocabularies, several inputs and outputs, buffers, a second list of layers that the first
reads, a skip over all layers, and losses of several kinds, some of them given by the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

LONGEST = 16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "elu": F.elu,
}
NORMS = ("layer", "rms", "none", "layer-plain")
LAYERS = (
    "mlp",
    "gated",
    "fused-gated",
    "attention",
    "eager-attention",
    "grouped-attention",
    "conv",
    "mix",
    "pointwise",
)
LOSSES = ("cross-entropy", "smoothed", "mse", "masked-mean", "two", "pooled", "bce")


@dataclass(frozen=True)
class LayerSpec:
    kind: str
    norm: str
    activation: str
    bias: bool
    residual: str  # "add", "scaled", "none"


@dataclass(frozen=True)
class ModelSpec:
    """d = heads · head; `repeats`: the layers are used so many times over, as objects of their own or (shared) the
    same ones; `side`: a second input; `frozen`: what has no gradient."""

    layers: tuple[LayerSpec, ...]
    repeats: int
    shared_layers: bool
    heads: int
    head: int
    width: int
    vocabulary: int
    features: bool  # floating features [b, s, f] rather than token ids
    side: str  # "none", "types" (token types), "scale" ([b] floats)
    tied: bool
    shared_norm: bool
    frozen: str  # "nothing", "embedding", "first layer", "biases"
    buffers: str  # "none", "persistent", "table"
    unused: bool  # a parameter that the loss never reaches
    loss: str
    output: str  # "loss", "tuple", "dict", "logits" (the loss is the user's callable)
    encoder: int  # layers of a list of their own, over a third input, whose result all others attend to
    skip: bool  # what the first layer gives is added to what the last one gives
    dropout: bool  # modules of dropout 0

    @property
    def d(self) -> int:
        return self.heads * self.head


def _layer_specs() -> st.SearchStrategy[LayerSpec]:
    return st.builds(
        LayerSpec,
        kind=st.sampled_from(LAYERS),
        norm=st.sampled_from(NORMS),
        activation=st.sampled_from(sorted(ACTIVATIONS)),
        bias=st.booleans(),
        residual=st.sampled_from(("add", "add", "scaled", "none")),
    )


def model_specs() -> st.SearchStrategy[ModelSpec]:
    return st.builds(
        ModelSpec,
        layers=st.lists(_layer_specs(), min_size=1, max_size=3).map(tuple),
        repeats=st.integers(1, 3),
        shared_layers=st.sampled_from((False, False, False, True)),
        heads=st.sampled_from((2, 4, 4, 3, 1)),
        head=st.sampled_from((4, 6, 8, 3)),
        width=st.sampled_from((16, 24, 17, 10, 33)),
        vocabulary=st.sampled_from((32, 17, 11, 50)),
        features=st.sampled_from((False, False, True)),
        side=st.sampled_from(("none", "none", "types", "scale")),
        tied=st.booleans(),
        shared_norm=st.booleans(),
        frozen=st.sampled_from(("nothing", "nothing", "embedding", "first layer", "biases")),
        buffers=st.sampled_from(("none", "persistent", "table")),
        unused=st.sampled_from((False, False, True)),
        loss=st.sampled_from(LOSSES),
        output=st.sampled_from(("loss", "tuple", "dict", "logits")),
        encoder=st.sampled_from((0, 0, 0, 1, 2)),
        skip=st.sampled_from((False, False, True)),
        dropout=st.booleans(),
    )


# --------------------------------------------------------------------------------
# The layers


def make_norm(kind: str, d: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(d)
    if kind == "layer-plain":
        return nn.LayerNorm(d, elementwise_affine=False)
    return nn.RMSNorm(d, eps=1e-6) if kind == "rms" else nn.Identity()


class Feedforward(nn.Module):
    """An MLP: plain, gated by a second projection, or with gate and up in one."""

    def __init__(self, spec: LayerSpec, model: ModelSpec) -> None:
        super().__init__()
        self.kind, self.activation = spec.kind, ACTIVATIONS[spec.activation]
        double = 2 if spec.kind == "fused-gated" else 1
        self.up = nn.Linear(model.d, double * model.width, bias=spec.bias)
        if spec.kind == "gated":
            self.gate = nn.Linear(model.d, model.width, bias=spec.bias)
        self.down = nn.Linear(model.width, model.d, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "gated":
            h = self.activation(self.gate(x)) * h
        elif self.kind == "fused-gated":
            gate, h = h.chunk(2, dim=-1)
            h = self.activation(gate) * h
        else:
            h = self.activation(h)
        return self.down(h)


class Attention(nn.Module):
    """Fused by one kernel, written out with a softmax, or with fewer K/V heads than query heads."""

    def __init__(self, spec: LayerSpec, model: ModelSpec) -> None:
        super().__init__()
        self.kind, self.heads, self.head = spec.kind, model.heads, model.head
        self.groups = 1 if spec.kind == "grouped-attention" else model.heads
        if spec.kind == "attention":
            self.qkv = nn.Linear(model.d, 3 * model.d, bias=spec.bias)
        else:
            self.q = nn.Linear(model.d, model.d, bias=spec.bias)
            self.k, self.v = (nn.Linear(model.d, self.groups * self.head, bias=spec.bias) for _ in range(2))
        self.out = nn.Linear(model.d, model.d, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        parts = self.qkv(x).split(d, dim=-1) if self.kind == "attention" else (self.q(x), self.k(x), self.v(x))
        counts = (self.heads, self.groups, self.groups)
        q, k, v = (p.view(b, s, n, self.head).transpose(1, 2) for p, n in zip(parts, counts, strict=True))
        if self.kind == "eager-attention":
            mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1) / self.head**0.5).masked_fill(~mask, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Convolution(nn.Module):
    """A causal depthwise convolution over the sequence, and a pointwise one."""

    def __init__(self, spec: LayerSpec, model: ModelSpec) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(model.d, model.d, 3, groups=model.d, bias=spec.bias)
        self.pointwise = nn.Conv1d(model.d, model.d, 1, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(F.pad(x.transpose(1, 2), (2, 0)))
        return self.pointwise(self.activation(h)).transpose(1, 2)


class Mix(nn.Module):
    """Running means over the sequence, mixed by an einsum."""

    def __init__(self, spec: LayerSpec, model: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(model.d, model.d))
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        mean = x.cumsum(1) / count.unsqueeze(-1)
        return torch.einsum("bsi,ij->bsj", self.activation(mean), self.weight)


class Pointwise(nn.Module):
    """No matmul: a learned scale and shift, a clamp, a square."""

    def __init__(self, spec: LayerSpec, model: ModelSpec) -> None:
        super().__init__()
        # Not torch.empty: vectors get noise on top of what they hold, and memory may hold NaN.
        self.scale, self.shift = nn.Parameter(torch.ones(model.d)), nn.Parameter(torch.zeros(model.d))
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(x * self.scale + self.shift).clamp(-2, 2)
        return torch.where(h > 0, h.pow(2), h)


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("mlp", "gated", "fused-gated"), Feedforward),
    **dict.fromkeys(("attention", "eager-attention", "grouped-attention"), Attention),
    "conv": Convolution,
    "mix": Mix,
    "pointwise": Pointwise,
}


class Cross(nn.Module):
    """Attention to what the encoder gives."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.heads, self.head = model.heads, model.head
        self.q, self.k, self.v, self.out = (nn.Linear(model.d, model.d) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        b, s, d = x.shape
        parts = (self.q(x), self.k(memory), self.v(memory))
        q, k, v = (p.view(b, -1, self.heads, self.head).transpose(1, 2) for p in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d))


class Layer(nn.Module):
    def __init__(self, spec: LayerSpec, model: ModelSpec, norm: nn.Module | None, cross: bool = False) -> None:
        super().__init__()
        self.norm = make_norm(spec.norm, model.d) if norm is None else norm
        self.inner = _KINDS[spec.kind](spec, model)
        self.cross = Cross(model) if cross else None
        self.dropout = nn.Dropout(0.0) if model.dropout else nn.Identity()
        self.residual = spec.residual

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if self.cross is not None:
            x = x + self.cross(x, memory)
        h = self.dropout(self.inner(self.norm(x)))
        if self.residual == "none":
            return h
        return x + h if self.residual == "add" else 0.7 * x + 0.5 * h


# --------------------------------------------------------------------------------
# The model


class RandomModel(nn.Module):
    scale: Tensor
    table: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        d = spec.d
        self.embed = nn.Linear(5, d) if spec.features else nn.Embedding(spec.vocabulary, d)
        if spec.side == "types":
            self.types = nn.Embedding(3, d)
        if spec.buffers == "persistent":
            self.register_buffer("scale", torch.linspace(0.5, 1.5, d))
        if spec.buffers == "table":
            self.register_buffer("table", torch.sin(torch.arange(LONGEST * d).view(LONGEST, d) / 3), persistent=False)
        norm = make_norm("layer", d) if spec.shared_norm and not spec.shared_layers else None
        again = range(1 if spec.shared_layers else spec.repeats)
        cross = spec.encoder > 0
        self.layers = nn.ModuleList(Layer(layer, spec, norm, cross) for _ in again for layer in spec.layers)
        if cross:
            self.source = nn.Embedding(7, d)
            self.encoder = nn.ModuleList(Layer(spec.layers[0], spec, None) for _ in range(spec.encoder))
        self.norm = norm or nn.LayerNorm(d)
        self.head = nn.Linear(d, 1 if spec.loss == "bce" else spec.vocabulary)
        if spec.tied and not spec.features and spec.loss != "bce":
            self.head.weight = self.embed.weight
        if spec.unused:
            self.spare = nn.Linear(d, 3)
        self._freeze()

    def _freeze(self) -> None:
        frozen = {
            "nothing": [],
            "embedding": list(self.embed.parameters()),
            "first layer": list(self.layers[0].inner.parameters()),  # type: ignore[union-attr]
            "biases": [p for name, p in self.named_parameters() if name.endswith("bias")],
        }[self.spec.frozen]
        for parameter in frozen:
            parameter.requires_grad_(False)

    def forward(
        self,
        labels: Tensor | None = None,
        input_ids: Tensor | None = None,
        features: Tensor | None = None,
        token_types: Tensor | None = None,
        sample_scale: Tensor | None = None,
        source_ids: Tensor | None = None,
    ) -> Any:
        if (input_ids is None) == (features is None):
            raise ValueError("exactly one of input_ids and features")
        x = self._first_state(self.embed(input_ids if features is None else features), token_types, sample_scale)
        memory = None if source_ids is None else self._encode(source_ids)
        states = []
        for _ in range(self.spec.repeats if self.spec.shared_layers else 1):
            for layer in self.layers:
                x = layer(x, memory)
                states.append(x)
        logits = self.head(self.norm(x + states[0] if self.spec.skip else x))
        if self.spec.output == "logits" or labels is None:
            return logits
        loss = loss_of(self.spec, logits, labels)
        if self.spec.output == "dict":
            return {"logits": logits, "loss": loss}
        return (loss, logits) if self.spec.output == "tuple" else loss

    def _first_state(self, x: Tensor, token_types: Tensor | None, sample_scale: Tensor | None) -> Tensor:
        if token_types is not None:
            x = x + self.types(token_types)
        if sample_scale is not None:
            x = x * sample_scale[:, None, None]
        if self.spec.buffers == "persistent":
            x = x * self.scale
        return x + self.table[: x.shape[1]] if self.spec.buffers == "table" else x

    def _encode(self, source_ids: Tensor) -> Tensor:
        memory = self.source(source_ids)
        for layer in self.encoder:
            memory = layer(memory)
        return memory


def loss_of(spec: ModelSpec, logits: Tensor, labels: Tensor) -> Tensor:
    kind = spec.loss
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), (labels > 0).to(logits.dtype))
    if kind == "pooled":
        return F.cross_entropy(logits.mean(1), labels[:, 0].clamp(min=0))
    valid = (labels != -100).to(logits.dtype)
    if kind == "mse":
        return F.mse_loss(logits, F.one_hot(labels.clamp(min=0), logits.shape[-1]).to(logits.dtype))
    if kind == "masked-mean":
        return (logits.logsumexp(-1) * valid).sum() / valid.sum().clamp(min=1)
    smoothing = 0.1 if kind == "smoothed" else 0.0
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    return loss + 0.01 * logits.pow(2).mean() if kind == "two" else loss


def batch_of(spec: ModelSpec, samples: int, sequence: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One global batch: labels are padding in places, and never all of them."""
    generator = torch.Generator().manual_seed(seed)
    bound = spec.vocabulary
    labels = torch.randint(bound, (samples, sequence), generator=generator)
    labels[torch.rand(samples, sequence, generator=generator) < 0.3] = -100
    labels[:, 0] = torch.randint(bound, (samples,), generator=generator)
    batch = {"labels": labels}
    if spec.features:
        batch["features"] = torch.randn(samples, sequence, 5, generator=generator, dtype=dtype)
    else:
        batch["input_ids"] = torch.randint(bound, (samples, sequence), generator=generator)
    if spec.side == "types":
        batch["token_types"] = torch.randint(3, (samples, sequence), generator=generator)
    if spec.side == "scale":
        batch["sample_scale"] = torch.rand(samples, generator=generator, dtype=dtype) + 0.5
    if spec.encoder:
        batch["source_ids"] = torch.randint(7, (samples, sequence), generator=generator)
    return batch
