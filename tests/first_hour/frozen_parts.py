"""Frozen parts under no_grad before, after and between trained ones; layers that run before any input joins."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IDS = torch.zeros(2, 8, dtype=torch.long)


class Tower(nn.Module):
    def __init__(self, layers: int = 2, d: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, d)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU()) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.emb(ids)
        for block in self.blocks:
            x = x + block(x)
        return x


class Distill(nn.Module):
    """A frozen teacher after the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Tower(2), Tower(4)
        self.teacher.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        own = self.student(ids)
        with torch.no_grad():
            target = self.teacher(ids)
        return F.mse_loss(own, target)


class Adapter(nn.Module):
    """A frozen encoder of images before a trained decoder, as CLIP before an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.out = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, 5)
        self.encoder, self.adapter = (nn.ModuleList(nn.Linear(16, 16) for _ in range(n)) for n in (3, 2))
        for part in (self.patch, self.encoder):
            part.requires_grad_(False)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        for block in self.encoder:
            x = x + block(x).relu()
        return F.layer_norm(x, (16,))

    def forward(self, pixels: Tensor, label: Tensor) -> Tensor:
        x = self.encode(pixels)
        for block in self.adapter:
            x = x + block(x).relu()
        return F.cross_entropy(self.out(x.mean(1)), label)


class Preferred(nn.Module):
    """Preferences against a frozen copy of the policy (DPO), by token."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.head = Tower(2), nn.Linear(16, 64)
        self.reference, self.reference_head = copy.deepcopy(self.policy), copy.deepcopy(self.head)
        for part in (self.reference, self.reference_head):
            part.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        own = self.head(self.policy(ids)).log_softmax(-1)
        with torch.no_grad():
            other = self.reference_head(self.reference(ids)).log_softmax(-1)
        gain = (own - other).gather(-1, labels.unsqueeze(-1))
        return -F.logsigmoid(0.5 * gain).mean()


class Stopped(nn.Module):
    """Two views, one of which stops the gradient (SimSiam): the same layers, with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.predict = Tower(2), nn.Linear(16, 16)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        own = self.predict(self.tower(left))
        with torch.no_grad():
            target = self.tower(right)
        return (own - target).square().mean()


class Queries(nn.Module):
    """Learned queries pass a list of layers before any input joins."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.emb, self.head = nn.Parameter(torch.randn(1, 3, 16)), nn.Embedding(64, 16), nn.Linear(16, 64)
        self.first, self.blocks = (nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q = self.queries.expand(ids.shape[0], -1, -1)
        for block in self.first:
            q = q + block(q).relu()
        x = self.emb(ids) + q.mean(1, keepdim=True)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Shared(Queries):
    """The queries pass the layers before they are repeated for each sample: these layers read nothing of a batch."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q = self.queries[0]
        for block in self.first:
            q = q + block(q).relu()
        q = torch.cat([q.expand(ids.shape[0], -1, -1), torch.zeros(ids.shape[0], 1, 16, device=ids.device)], 1)
        x = self.emb(ids) + q.mean(1, keepdim=True)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Decoder(nn.Module):
    """DETR's decoder: queries attend to each other, then to what the layers of an encoder have made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.emb, self.head = nn.Embedding(4, 16), nn.Embedding(64, 16), nn.Linear(16, 5)
        self.selves = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.cross = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        q = self.queries.weight.unsqueeze(0).repeat(ids.shape[0], 1, 1)
        for block in self.selves:
            parts = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in block(q).chunk(3, -1))
            q = q + F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.emb(ids)
        for block in self.encoder:
            x = x + block(x).relu()
        for block in self.cross:
            q = q + (block(q) @ x.transpose(1, 2)).softmax(-1) @ x
        return F.cross_entropy(self.head(q).mean(1), label)


INPUTS = {"ids": IDS, "labels": IDS}
LABEL = torch.zeros(2, dtype=torch.long)
