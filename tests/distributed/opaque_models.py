"""Models with submodules that cannot be traced; classes that a saved program can import."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 97


class Squash(nn.Module):
    """Branches on the values of each sample, and returns two tensors."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)
        self.rare = nn.Linear(d, d)  # read for large samples only
        self.register_buffer("scale", torch.full((d,), 0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for row in x:
            if row.abs().max() > 1.5:
                row = self.rare(row / row.abs().max())
            rows.append(self.mix(row) * self.scale.to(row.dtype))
        return torch.stack(rows), (x > 0).sum(-1)


class BatchSquash(nn.Module):
    """Branches on a mean over all samples."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(x)
        return y if x.mean() > 0 else -y


class Tripled(torch.autograd.Function):
    """Its backward is not the derivative of its forward: a trace of forward alone gives other gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0]


class StraightThrough(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Tripled.apply(self.mix(x))  # type: ignore[no-untyped-call]
        return result


class Selected(nn.Module):
    """Rows that are chosen by value: a size that depends on values, inside."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        chosen = (rows.sum(-1) > 0).nonzero().squeeze(-1)
        return rows.index_add(0, chosen, self.mix(rows[chosen])).view_as(x)


class PerSample(nn.Module):
    """torch.vmap, which no trace can hold."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows: Tensor = torch.vmap(lambda row: self.mix(row).tanh() * row.abs().amax())(x)
        return rows, rows.detach().argmax(-1)


class Scan(nn.Module):
    """A state that each token updates, as a state-space layer has it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        gates, states = self.mix(x), [x[:, 0]]
        for t in range(1, x.shape[1]):
            states.append(gates[:, t].sigmoid() * states[-1] + x[:, t])
        return torch.stack(states, 1)


class Marked(nn.Module):
    """`rare` is for samples with a flag; without one a sample has no gradient here. Nothing reads `never`."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.rare, self.never = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        return torch.stack([self.rare(row) if flag else row.detach() for row, flag in zip(x, flags, strict=True)])


class MarkedBlock(nn.Module):
    def __init__(self, d: int, reads: bool) -> None:
        super().__init__()
        self.inner, self.reads = Marked(d), reads

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x, flags)
        return result + F.linear(result, self.inner.rare.weight) if self.reads else result


class MarkedModel(nn.Module):
    """Samples with the token 0 have a flag. If `reads`, all samples read the weight of `rare`."""

    def __init__(self, layers: int = 4, d: int = 16, reads: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList(MarkedBlock(d, reads) for _ in range(layers))
        self.head = nn.Linear(d, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, flags = self.embedding(input_ids), (input_ids == 0).any(-1)
        for block in self.blocks:
            x = block(x, flags)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Noisy(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(x)
        return F.dropout(y, 0.1) if y.sum() > 0 else y


class Block(nn.Module):
    def __init__(self, d: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.inner = kind(2 * d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(F.gelu(self.up(self.norm(x))))
        if isinstance(h, tuple):
            h = h[0] * (h[1].unsqueeze(-1) > 8)
        result: Tensor = x + self.down(h)
        return result


class OpaqueModel(nn.Module):
    def __init__(self, kind: type[nn.Module] = Squash, layers: int = 4, d: int = 16, ids: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ids, d)
        self.blocks = nn.ModuleList(Block(d, kind) for _ in range(layers))
        self.head = nn.Linear(d, ids)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class BranchingModel(OpaqueModel):
    """Branches on values in its own forward, where nothing can be kept whole."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels)
        return 2 * loss if loss > 3 else loss
