"""Models whose lengths go together in ways of their own: masks as long as the inputs, multiples, ratios, prefixes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, ids


class Model(nn.Module):
    """Embeddings, residual layers, logits, and the mean loss of a target for each token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, width) for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# --------------------------------------------------------------------------------
# Buffers as long as the inputs


class CausalBuffer(Model):
    """The causal mask of minGPT, cut to the length."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(48)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, (b, t) = self.emb(ids), ids.shape
        for block in self.blocks:
            q, k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in block(x).chunk(3, -1))
            scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 16)
        return self.loss(x, labels)


class Waves(Model):
    """A table of positions as a buffer, which the root reads and each layer again."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.sin(torch.arange(8.0)[:, None] / torch.arange(1.0, 17.0)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids) + self.table[: ids.shape[1]]
        for block in self.blocks:
            x = x + block(x * self.table[: x.shape[1]]).relu()
        return self.loss(x, labels)


class Distances(Model):
    """A bias of distances, cut in two dims and added to the scores of fused attention."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__(48)
        places = torch.arange(8.0)
        self.register_buffer("bias", -(places[:, None] - places).abs())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, (b, t) = self.emb(ids), ids.shape
        for block in self.blocks:
            q, k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in block(x).chunk(3, -1))
            out = F.scaled_dot_product_attention(q, k, v, self.bias[:t, :t].to(q.dtype))
            x = x + out.transpose(1, 2).reshape(b, t, 16)
        return self.loss(x, labels)


# --------------------------------------------------------------------------------
# Lengths that must be a multiple


class Pairs(Model):
    """Tokens in pairs, by `t // 2`."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        b, t, d = x.shape
        y = x.view(b, t // 2, 2, d)
        return self.loss(self.run((y + y.mean(2, keepdim=True)).reshape(b, t, d)), labels)


class Chunks(Model):
    """Attention within chunks of four tokens, in every layer."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        b, t, d = x.shape
        for block in self.blocks:
            q = block(x).view(b, t // 4, 4, d)
            x = x + F.scaled_dot_product_attention(q, q, q).view(b, t, d)
        return self.loss(x, labels)


class Patches(Model):
    """Four tokens as one row of layers that are four times as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        b, t, d = x.shape
        return self.loss(self.run(x.view(b, -1, 4 * d)).view(b, t, d), labels)


# --------------------------------------------------------------------------------
# Lengths in a fixed ratio


class Stacked(Model):
    """Four frames a label, put together by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 16)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        b, t, _ = frames.shape
        return self.loss(self.run(self.proj(frames).view(b, t // 4, 4, 16).mean(2)), labels)


class Strided(Model):
    """Four frames a label, by a convolution with a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 4, stride=4)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.run(self.conv(frames.transpose(1, 2)).transpose(1, 2)), labels)


class Subsampled(Model):
    """Four frames a label, as speech encoders have them: two convolutions that each halve the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 16, 3, stride=2, padding=1)
        self.second = nn.Conv1d(16, 16, 3, stride=2, padding=1)

    def forward(self, frames: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.first(frames.transpose(1, 2)).relu())
        return self.loss(self.run(x.transpose(1, 2)), labels)


# --------------------------------------------------------------------------------
# Integers that are no sequence


class Attributes(Model):
    """So many attribute ids of each sample beside its tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.mix = nn.Linear(count * 16, 16)

    def forward(self, ids: Tensor, attributes: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.run(self.emb(ids) + self.mix(self.emb(attributes).flatten(1))[:, None]), labels)


# --------------------------------------------------------------------------------
# A batch of one


class Squeezed(Model):
    """Size-one dims are dropped, which for one sample is the batch too."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.run(self.emb(ids)).squeeze()).view(-1, VOCABULARY), labels.flatten())


class Unbatched(Model):
    """One sample is run without a batch dim."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        x = self.run(x[0])[None] if ids.shape[0] == 1 else self.run(x)
        return self.loss(x, labels)


# --------------------------------------------------------------------------------
# Sequences longer than the tokens


class Prompt(Model):
    """Learned states before those of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, 4, 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(ids.shape[0], -1, -1), self.emb(ids)], 1)
        for block in self.blocks:
            b, t, d = x.shape
            x = x + block(x).view(b, t, 4, d // 4).relu().reshape(b, t, d)
        return self.loss(x[:, 4:], labels)


class ImageFirst(Model):
    """The patches of an image before the text, and causal attention over both."""

    def __init__(self) -> None:
        super().__init__(48)
        self.proj = nn.Linear(6, 16)

    def forward(self, image: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([self.proj(image), self.emb(ids)], 1)
        b, t, d = x.shape
        for block in self.blocks:
            q, k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in block(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        return self.loss(x[:, image.shape[1] :], labels)


class Ends(Model):
    """A learned state before the tokens and one after them, and a score of each sample from both."""

    def __init__(self) -> None:
        super().__init__(48)
        self.ends, self.score = nn.Parameter(torch.randn(2, 16)), nn.Linear(32, 5)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        first, last = (end.expand(ids.shape[0], 1, 16) for end in self.ends)
        x = torch.cat([first, self.emb(ids), last], 1)
        b, t, d = x.shape
        for block in self.blocks:
            q, k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in block(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        return F.cross_entropy(self.score(torch.cat([x[:, 0], x[:, -1]], -1)), label)


LM = {"ids": ids(), "labels": ids()}
ONE = {name: tensor[:1] for name, tensor in LM.items()}
FRAMES = {"frames": torch.zeros(2, 32, 8), "labels": ids()}
IMAGE = {"image": torch.zeros(2, 4, 6), **LM}

CASES = (
    Case("causal_buffer", CausalBuffer, LM),
    Case("waves", Waves, LM, slow=True),
    Case("distances", Distances, LM, slow=True),
    Case("pairs", Pairs, LM, slow=True),
    Case("chunks", Chunks, LM),
    Case("patches", Patches, LM, slow=True),
    Case("stacked", Stacked, FRAMES, slow=True),
    Case("strided", Strided, FRAMES),
    Case("subsampled", Subsampled, FRAMES, slow=True),
    Case("attributes", lambda: Attributes(3), {**LM, "attributes": ids(3)}, slow=True),
    Case("more_attributes", lambda: Attributes(12), {**LM, "attributes": ids(12)}, slow=True),
    Case("as_many_attributes", lambda: Attributes(8), {**LM, "attributes": ids()}),
    Case("squeezed", Squeezed, ONE, slow=True),
    Case("unbatched", Unbatched, ONE, slow=True),
    Case("prompt", Prompt, LM),
    Case("image_first", ImageFirst, IMAGE, slow=True),
    Case("ends", Ends, {"ids": ids(), "label": torch.zeros(2, dtype=torch.long)}, slow=True),
)
