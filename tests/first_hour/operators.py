"""Ops of few models: Kronecker products of parameters, Fourier transforms of features and of the sequence, numbers of
no stated dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


class Kronecker(nn.Module):
    """A weight that is a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.kron(self.left, self.right)).relu()


class KroneckerScale(nn.Module):
    """A scale that is a product of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.kron(self.left, self.right)


class ThreeFactors(nn.Module):
    """Of three, one of them used by itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(n, n)) for n in (2, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.kron(torch.kron(self.a, self.b), self.c) * self.a.sum()


class PlainNumbers(nn.Module):
    """Numbers of the default dtype that float32 rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.linspace(0, 0.1, 16, device=x.device) + torch.arange(16, device=x.device) / 7
        steps = steps + 1e6 * torch.finfo(torch.get_default_dtype()).eps
        shares = torch.full(x.shape, 0.3, device=x.device), torch.tensor(0.7, device=x.device)
        return x * shares[0] + torch.tanh(self.mix(x + steps)) * shares[1]


class Mixing(nn.Module):
    """FNet: the real part of a transform of tokens and features."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return mixed


class Filter(nn.Module):
    """A learned complex filter over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.rfft(x, dim=-1, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft(filtered, n=16, dim=-1, norm="ortho")


class LongConvolution(nn.Module):
    """A causal convolution with a kernel as long as wanted, by transforms of twice the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        kernel = torch.fft.rfft(self.kernel, n=2 * s, dim=0)
        return torch.fft.irfft(torch.fft.rfft(x, n=2 * s, dim=1) * kernel, n=2 * s, dim=1)[:, :s]


class WithLayers(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)
        self.tower.blocks = nn.ModuleList(layer() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.tower(ids)).flatten(0, 1), labels.flatten())


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("kronecker", lambda: WithLayers(Kronecker), _LM, {"dp": 2, "micro_batch": 2}),
    Case("kronecker scale", lambda: WithLayers(KroneckerScale), _LM, {"dp": 2}),
    Case("three factors", lambda: WithLayers(ThreeFactors), _LM, {"dp": 2}),
    Case("plain numbers", lambda: WithLayers(PlainNumbers), _LM, {"dp": 2, "micro_batch": 2}),
    Case("mixing", lambda: WithLayers(Mixing), _LM, {"dp": 2, "micro_batch": 2}),
    Case("filter", lambda: WithLayers(Filter), _LM, {"dp": 2}),
    Case("long convolution", lambda: WithLayers(LongConvolution), _LM, {"dp": 2}),
)
