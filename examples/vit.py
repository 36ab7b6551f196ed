"""A vision transformer as people write it, without timm or transformers, trained on gratings that the file draws."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, PATCH, D, HEADS, LAYERS, CLASSES = 32, 8, 64, 4, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:  # [b, patches, d] -> [b, patches, d]
        b, n, d = x.shape
        q, k, v = (t.view(b, n, HEADS, d // HEADS).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, D, kernel_size=PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2, D))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of `labels` [b] for `images` [b, 3, 32, 32]."""
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(dim=1)), labels)


class Gratings:
    """Stripes at one of eight angles, with a phase, a colour and noise of their own: image i is always the same."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = index % CLASSES
        phase, *colour = torch.rand(4, generator=generator).tolist()
        angle = math.pi * label / CLASSES
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        stripes = torch.sin(0.8 * (x * math.cos(angle) + y * math.sin(angle)) + 2 * math.pi * phase)
        image = stripes * (0.5 + torch.tensor(colour)).view(3, 1, 1)
        noise = torch.randn(image.shape, generator=generator)
        return {"images": image + 0.3 * noise, "labels": torch.tensor(label)}


def build(seed: int = 0) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT()


def inputs() -> dict[str, Tensor]:
    return {"images": torch.zeros(2, 3, SIZE, SIZE), "labels": torch.zeros(2, dtype=torch.long)}


def main() -> None:
    from demo import prove  # type: ignore[import-not-found] # beside this script

    prove(build(), inputs(), folder=Path("out/vit"), data="vit:Gratings", steps=20, gpus=4, dp=2, tp=2, global_batch=32)


if __name__ == "__main__":
    main()
