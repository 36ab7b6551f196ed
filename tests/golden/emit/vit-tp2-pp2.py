"""ViTForImageClassification, distributed by autopar over 4 GPUs.

plan       pp2·tp2 (megatron), zero 0, micro-batch 4 × 2 by 1f1b, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 4 -- train.py (several nodes: launch.sh)
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.collectives import all_reduce, copy_to, gather, split
from runtime.parameters import local, parameter, submodule
from runtime.settings import Settings

SETTINGS = Settings(
    pp=2, dp=1, cp=1, tp=2,
    global_batch=8, micro_batch=4, sequence=16,
    schedule="1f1b", zero=0, precision="bf16",
    stages=((0, 2), (2, 4)),
    optimizer="AdamW", optimizer_kwargs={},
)
LAYERS = ("vit.layers",)  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("vit.embeddings.patch_embeddings.projection", "vit.embeddings"),
    "_epilogue": ("vit.layernorm", "classifier"),
}
TIED = ()  # (alias, original)


class ViTLayer(nn.Module):
    """4 layers: vit.layers.0 … vit.layers.3 · tp=2 (megatron).

    layernorm_before.weight, layernorm_before.bias  [32]         Replicate
    attention.q_proj.weight                         [32, 32]     Shard(0) → [16, 32]  column-parallel
    attention.q_proj.bias                           [32]         Shard(0) → [16]
    attention.k_proj.weight                         [32, 32]     Shard(0) → [16, 32]  column-parallel
    attention.k_proj.bias                           [32]         Shard(0) → [16]
    attention.v_proj.weight                         [32, 32]     Shard(0) → [16, 32]  column-parallel
    attention.v_proj.bias                           [32]         Shard(0) → [16]
    attention.o_proj.weight                         [32, 32]     Shard(1) → [32, 16]  row-parallel
    attention.o_proj.bias                           [32]         Replicate
    layernorm_after.weight, layernorm_after.bias    [32]         Replicate
    mlp.fc1.weight                                  [72, 32]     Shard(0) → [36, 32]  column-parallel
    mlp.fc1.bias                                    [72]         Shard(0) → [36]
    mlp.fc2.weight                                  [32, 72]     Shard(1) → [32, 36]  row-parallel
    mlp.fc2.bias                                    [32]         Replicate
    x                                               [b, 10, 32]  Replicate
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

    def forward(self, x):  # x: Replicate@tp [b, 10, 32]
        x = self._attention(x)
        return self._mlp(x)

    def _attention(self, x):  # x: Replicate@tp [b, 10, 32]
        b = x.shape[0]
        h = F.layer_norm(
            x,
            (32,),
            local(self.layernorm_before.weight),
            local(self.layernorm_before.bias),
            eps=1e-12,
        )
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        q = F.linear(h, local(self.attention.q_proj.weight), local(self.attention.q_proj.bias))
        q = q.reshape(b, 10, 2, 8).transpose(1, 2)
        k = F.linear(h, local(self.attention.k_proj.weight), local(self.attention.k_proj.bias))
        k = k.reshape(b, 10, 2, 8).transpose(1, 2)
        v = F.linear(h, local(self.attention.v_proj.weight), local(self.attention.v_proj.bias))
        v = v.reshape(b, 10, 2, 8).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, scale=0.3535533905932738)
        attn = attn.transpose(1, 2).reshape(b, 10, 16)
        attn = F.linear(attn, local(self.attention.o_proj.weight))  # row-parallel → Partial
        attn = all_reduce(attn, axis="tp")  # Partial → Replicate; backward: nothing
        return attn + local(self.attention.o_proj.bias) + x

    def _mlp(self, x):  # x: Replicate@tp [b, 10, 32]
        h = F.layer_norm(
            x,
            (32,),
            local(self.layernorm_after.weight),
            local(self.layernorm_after.bias),
            eps=1e-12,
        )
        h = copy_to(h, axis="tp")  # forward: nothing; backward: all-reduce
        h = F.gelu(F.linear(h, local(self.mlp.fc1.weight), local(self.mlp.fc1.bias)))
        mlp = F.linear(h, local(self.mlp.fc2.weight))  # row-parallel → Partial
        mlp = all_reduce(mlp, axis="tp")  # Partial → Replicate; backward: nothing
        return mlp + local(self.mlp.fc2.bias) + x


class Model(nn.Module):
    """ViTForImageClassification: the layers of one stage, what precedes them on the first, the loss on the last.

    vit.embeddings.patch_embeddings.projection.weight  [32, 3, 8, 8]  Shard(0) → [16, 3, 8, 8]
    vit.embeddings.patch_embeddings.projection.bias    [32]           Shard(0) → [16]
    vit.embeddings.cls_token                           [1, 1, 32]     Shard(2) → [1, 1, 16]
    vit.embeddings.position_embeddings                 [1, 10, 32]    Shard(2) → [1, 10, 16]
    vit.layernorm.weight, vit.layernorm.bias           [32]           Replicate
    classifier.weight                                  [10, 32]       Shard(1) → [10, 16]       row-parallel
    classifier.bias                                    [10]           Replicate
    """

    def __init__(self, stage=0):
        super().__init__()
        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1
        self._start, self._stop = SETTINGS.stages[stage]
        if self._first:
            parameter(self, "vit.embeddings.patch_embeddings.projection.weight", (32, 3, 8, 8), shard=0)
            parameter(self, "vit.embeddings.patch_embeddings.projection.bias", (32,), shard=0)
            parameter(self, "vit.embeddings.cls_token", (1, 1, 32), shard=2)
            parameter(self, "vit.embeddings.position_embeddings", (1, 10, 32), shard=2)
        for i in range(self._start, self._stop):
            submodule(self, f"vit.layers.{i}", ViTLayer())
        if self._last:
            parameter(self, "vit.layernorm.weight", (32,))
            parameter(self, "vit.layernorm.bias", (32,))
            parameter(self, "classifier.weight", (10, 32), shard=1)
            parameter(self, "classifier.bias", (10,))
            self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *received, pixel_values, labels):
        if self._first:
            x = self._prologue(pixel_values)
        else:
            (x,) = received
        for layer in self.vit.layers.children():
            x = layer(x)
        if self._last:
            return self._epilogue(x, labels)
        return x

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
        x = x + local(self.vit.embeddings.position_embeddings)
        x = gather(x, dim=2, axis="tp")  # Shard(2) → Replicate; backward: slice
        return x

    def _epilogue(self, x, labels):  # x: Replicate@tp [b, 10, 32]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        x = F.layer_norm(
            x, (32,), local(self.vit.layernorm.weight), local(self.vit.layernorm.bias), eps=1e-12
        )
        x = x[:, 0]
        x = split(x, dim=1, axis="tp")  # Replicate → Shard(1); backward: all-gather
        logits = F.linear(x, local(self.classifier.weight))  # row-parallel → Partial
        logits = all_reduce(logits, axis="tp")  # Partial → Replicate; backward: nothing
        logits = (logits + local(self.classifier.bias)).to(torch.float32)  # in fp32: loss
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss / self._count

    @staticmethod
    def between_stages(stage, b, s):
        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""
        return (((b, 10, 32), torch.bfloat16),)


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    return (labels != -100).sum()
