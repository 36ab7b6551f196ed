"""ViTForImageClassification, distributed by autopar over 2 GPUs.

plan       tp2 (megatron-sp), zero 0, micro-batch 4 × 2, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 2 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_gather, all_to_all, gather, reduce_scatter
from runtime.parameters import local, parameter, submodule, summed
from runtime.settings import Settings

SETTINGS = Settings(
    pp=1, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="none", zero=0, precision="bf16",
    stages=((0, 4),),
    optimizer="AdamW", optimizer_kwargs={},
)
LAYERS = ("vit.layers",)  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("vit.embeddings.patch_embeddings.projection", "vit.embeddings"),
    "_epilogue": ("vit.layernorm", "classifier"),
}
TIED = ()  # (alias, original)


class ViTLayer(nn.Module):
    """4 layers: vit.layers.0 … vit.layers.3 · tp=2 (megatron-sp).

    layernorm_before.weight, layernorm_before.bias  [32]         Replicate              gradient summed over tp
    attention.q_proj.weight                         [32, 32]     Shard(0) → [16, 32]    column-parallel
    attention.q_proj.bias                           [32]         Shard(0) → [16]
    attention.k_proj.weight                         [32, 32]     Shard(0) → [16, 32]    column-parallel
    attention.k_proj.bias                           [32]         Shard(0) → [16]
    attention.v_proj.weight                         [32, 32]     Shard(0) → [16, 32]    column-parallel
    attention.v_proj.bias                           [32]         Shard(0) → [16]
    attention.o_proj.weight                         [32, 32]     Shard(1) → [32, 16]    row-parallel
    attention.o_proj.bias                           [32]         Replicate              gradient summed over tp
    layernorm_after.weight, layernorm_after.bias    [32]         Replicate              gradient summed over tp
    mlp.fc1.weight                                  [72, 32]     Shard(0) → [36, 32]    column-parallel
    mlp.fc1.bias                                    [72]         Shard(0) → [36]
    mlp.fc2.weight                                  [32, 72]     Shard(1) → [32, 36]    row-parallel
    mlp.fc2.bias                                    [32]         Replicate              gradient summed over tp
    x                                               [b, 10, 32]  Shard(1) → [b, 5, 32]
    """

    def __init__(self):
        super().__init__()
        parameter(self, "layernorm_before.weight", (32,))
        parameter(self, "layernorm_before.bias", (32,))
        parameter(self, "attention.q_proj.weight", (32, 32), shard=0)
        parameter(self, "attention.q_proj.bias", (32,), shard=0)
        parameter(self, "attention.k_proj.weight", (32, 32), shard=0)
        parameter(self, "attention.k_proj.bias", (32,), shard=0)
        parameter(self, "attention.v_proj.weight", (32, 32), shard=0)
        parameter(self, "attention.v_proj.bias", (32,), shard=0)
        parameter(self, "attention.o_proj.weight", (32, 32), shard=1)
        parameter(self, "attention.o_proj.bias", (32,))
        parameter(self, "layernorm_after.weight", (32,))
        parameter(self, "layernorm_after.bias", (32,))
        parameter(self, "mlp.fc1.weight", (72, 32), shard=0)
        parameter(self, "mlp.fc1.bias", (72,), shard=0)
        parameter(self, "mlp.fc2.weight", (32, 72), shard=1)
        parameter(self, "mlp.fc2.bias", (32,))

    def forward(self, x):  # x: Shard(1)@tp [b, 5, 32]
        x = self._attention(x)
        return self._mlp(x)

    def _attention(self, x):  # x: Shard(1)@tp [b, 5, 32]
        b = x.shape[0]
        h = F.layer_norm(
            x,
            (32,),
            summed(self.layernorm_before.weight),
            summed(self.layernorm_before.bias),
            eps=1e-12,
        )
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        q = F.linear(h, local(self.attention.q_proj.weight), local(self.attention.q_proj.bias))
        q = q.reshape(b, 10, 2, 8).transpose(1, 2)
        k = F.linear(h, local(self.attention.k_proj.weight), local(self.attention.k_proj.bias))
        k = k.reshape(b, 10, 2, 8).transpose(1, 2)
        v = F.linear(h, local(self.attention.v_proj.weight), local(self.attention.v_proj.bias))
        v = v.reshape(b, 10, 2, 8).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, scale=0.3535533905932738)
        attn = attn.transpose(1, 2).reshape(b, 10, 16)
        attn = F.linear(attn, local(self.attention.o_proj.weight))  # row-parallel → Partial
        attn = reduce_scatter(attn, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return attn + summed(self.attention.o_proj.bias) + x

    def _mlp(self, x):  # x: Shard(1)@tp [b, 5, 32]
        h = F.layer_norm(
            x,
            (32,),
            summed(self.layernorm_after.weight),
            summed(self.layernorm_after.bias),
            eps=1e-12,
        )
        h = all_gather(h, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        h = F.gelu(F.linear(h, local(self.mlp.fc1.weight), local(self.mlp.fc1.bias)))
        mlp = F.linear(h, local(self.mlp.fc2.weight))  # row-parallel → Partial
        mlp = reduce_scatter(mlp, dim=1, axis="tp")  # Partial → Shard(1); backward: all-gather
        return mlp + summed(self.mlp.fc2.bias) + x


class Model(nn.Module):
    """ViTForImageClassification, whole: what precedes the layers, the layers, the loss.

    vit.embeddings.patch_embeddings.projection.weight  [32, 3, 8, 8]  Shard(0) → [16, 3, 8, 8]
    vit.embeddings.patch_embeddings.projection.bias    [32]           Shard(0) → [16]
    vit.embeddings.cls_token                           [1, 1, 32]     Shard(2) → [1, 1, 16]
    vit.embeddings.position_embeddings                 [1, 10, 32]    Shard(1) → [1, 5, 32]
    vit.layernorm.weight, vit.layernorm.bias           [32]           Replicate                 gradient summed over tp
    classifier.weight                                  [10, 32]       Shard(0) → [5, 32]        column-parallel
    classifier.bias                                    [10]           Shard(0) → [5]
    """

    def __init__(self, stage=0):
        super().__init__()
        parameter(self, "vit.embeddings.patch_embeddings.projection.weight", (32, 3, 8, 8), shard=0)
        parameter(self, "vit.embeddings.patch_embeddings.projection.bias", (32,), shard=0)
        parameter(self, "vit.embeddings.cls_token", (1, 1, 32), shard=2)
        parameter(self, "vit.embeddings.position_embeddings", (1, 10, 32), shard=1)
        for i in range(4):
            submodule(self, f"vit.layers.{i}", ViTLayer())
        parameter(self, "vit.layernorm.weight", (32,))
        parameter(self, "vit.layernorm.bias", (32,))
        parameter(self, "classifier.weight", (10, 32), shard=0)
        parameter(self, "classifier.bias", (10,), shard=0)
        self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *, pixel_values, labels):
        x = self._prologue(pixel_values)
        for layer in self.vit.layers.children():
            x = layer(x)
        return self._epilogue(x, labels)

    def _prologue(self, pixel_values):
        """What runs before the first layer."""
        b = pixel_values.shape[0]
        projection = F.conv2d(
            pixel_values,
            local(self.vit.embeddings.patch_embeddings.projection.weight),
            local(self.vit.embeddings.patch_embeddings.projection.bias),
            stride=8,
        )
        projection = projection.reshape(b, 16, 9).transpose(1, 2)
        x = torch.cat((local(self.vit.embeddings.cls_token).expand(b, 1, 16), projection), dim=1)
        # Shard(2) → Shard(1); backward: all-to-all
        x = all_to_all(x, from_dim=2, to_dim=1, axis="tp")
        return x + local(self.vit.embeddings.position_embeddings)

    def _epilogue(self, x, labels):  # x: Shard(1)@tp [b, 5, 32]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        x = F.layer_norm(
            x, (32,), summed(self.vit.layernorm.weight), summed(self.vit.layernorm.bias), eps=1e-12
        )
        x = all_gather(x, dim=1, axis="tp")  # Shard(1) → Replicate; backward: reduce-scatter
        logits = F.linear(x[:, 0], local(self.classifier.weight), local(self.classifier.bias))
        logits = gather(logits, dim=1, axis="tp")  # Shard(1) → Replicate; backward: slice
        # in fp32: loss
        return F.cross_entropy(logits.to(torch.float32), labels, reduction="sum") / self._count


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    return (labels != -100).sum()
