"""GPT, distributed by autopar over 4 GPUs.

plan       pp2·dp2, zero 3, micro-batch 4 × 2 by 1f1b, recompute none, bf16, AdamW
run        torchrun --nproc-per-node 4 -- train.py (several nodes: launch.sh)
"""

import torch
import torch.nn.functional as F
from torch import nn

from runtime.parameters import parameter, submodule, tie
from runtime.settings import Settings

SETTINGS = Settings(
    pp=2, dp=2, cp=1, tp=1,
    global_batch=16, micro_batch=4, sequence=16,
    schedule="1f1b", zero=3, precision="bf16",
    stages=((0, 2), (2, 4)),
    optimizer="AdamW", optimizer_kwargs={},
    vocabulary=97, labels="next",
)
LAYERS = ("transformer.h",)  # where the layers are; each is a unit of data parallelism
ENDS = {  # methods of Model, and where what they read is: units too
    "_prologue": ("transformer.wte", "transformer.wpe"),
    "_epilogue": ("transformer.ln_f", "lm_head"),
}
TIED = (("lm_head.weight", "transformer.wte.weight"),)  # (alias, original)
# Parameters that are slices of one of the original model: part → (original, dim, start, length)
PARTS = {
    **{
        f"{path}.{part}": (f"{path}.{original}", dim, start, length)
        for path in (f"transformer.h.{i}" for i in range(4))
        for part, original, dim, start, length in (
            ("attn.c_attn._weight_0", "attn.c_attn.weight", 0, 0, 64),
            ("attn.c_attn._weight_1", "attn.c_attn.weight", 0, 64, 64),
            ("attn.c_attn._weight_2", "attn.c_attn.weight", 0, 128, 64),
            ("attn.c_attn._bias_0", "attn.c_attn.bias", 0, 0, 64),
            ("attn.c_attn._bias_1", "attn.c_attn.bias", 0, 64, 64),
            ("attn.c_attn._bias_2", "attn.c_attn.bias", 0, 128, 64),
        )
    },
}


class Block(nn.Module):
    """4 layers: transformer.h.0 … transformer.h.3."""

    def __init__(self):
        super().__init__()
        parameter(self, "ln_1.weight", (64,))
        parameter(self, "ln_1.bias", (64,))
        parameter(self, "attn.c_attn._weight_0", (64, 64))
        parameter(self, "attn.c_attn._bias_0", (64,))
        parameter(self, "attn.c_attn._weight_1", (64, 64))
        parameter(self, "attn.c_attn._bias_1", (64,))
        parameter(self, "attn.c_attn._weight_2", (64, 64))
        parameter(self, "attn.c_attn._bias_2", (64,))
        parameter(self, "attn.c_proj.weight", (64, 64))
        parameter(self, "attn.c_proj.bias", (64,))
        parameter(self, "ln_2.weight", (64,))
        parameter(self, "ln_2.bias", (64,))
        parameter(self, "mlp.c_fc.weight", (256, 64))
        parameter(self, "mlp.c_fc.bias", (256,))
        parameter(self, "mlp.c_proj.weight", (64, 256))
        parameter(self, "mlp.c_proj.bias", (64,))

    def forward(self, x):  # x: [b, s, 64]
        b, s, _ = x.shape
        h = F.layer_norm(x, (64,), self.ln_1.weight, self.ln_1.bias, eps=1e-05)
        q = F.linear(h, self.attn.c_attn._weight_0, self.attn.c_attn._bias_0)
        q = q.reshape(b, s, 4, 16).transpose(1, 2)
        k = F.linear(h, self.attn.c_attn._weight_1, self.attn.c_attn._bias_1)
        k = k.reshape(b, s, 4, 16).transpose(1, 2)
        v = F.linear(h, self.attn.c_attn._weight_2, self.attn.c_attn._bias_2)
        v = v.reshape(b, s, 4, 16).transpose(1, 2)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attn = attn.transpose(1, 2).reshape(b, s, 64)
        x = x + F.linear(attn, self.attn.c_proj.weight, self.attn.c_proj.bias)

        h = F.layer_norm(x, (64,), self.ln_2.weight, self.ln_2.bias, eps=1e-05)
        h = F.gelu(F.linear(h, self.mlp.c_fc.weight, self.mlp.c_fc.bias), approximate="tanh")
        return x + F.linear(h, self.mlp.c_proj.weight, self.mlp.c_proj.bias)


class Model(nn.Module):
    """GPT: the layers of one stage, what precedes them on the first, the loss on the last."""

    def __init__(self, stage=0):
        super().__init__()
        self._first, self._last = stage == 0, stage == SETTINGS.pp - 1
        self._start, self._stop = SETTINGS.stages[stage]
        if self._first:
            parameter(self, "transformer.wte.weight", (97, 64))
            parameter(self, "transformer.wpe.weight", (64, 64))
        for i in range(self._start, self._stop):
            submodule(self, f"transformer.h.{i}", Block())
        if self._last:
            parameter(self, "transformer.ln_f.weight", (64,))
            parameter(self, "transformer.ln_f.bias", (64,))
            tie(self, "lm_head.weight", "transformer.wte.weight", (97, 64))
            self.register_buffer("_count", torch.zeros((), dtype=torch.int64), persistent=False)  # the trainer sets it

    def forward(self, *received, input_ids, labels):
        if self._first:
            x = self._prologue(input_ids)
        else:
            (x,) = received
        for layer in self.transformer.h.children():
            x = layer(x)
        if self._last:
            return self._epilogue(x, labels)
        return x

    def _prologue(self, input_ids):
        """What runs before the first layer."""
        s = input_ids.shape[1]
        positions = torch.arange(s, device=input_ids.device)
        wte = F.embedding(input_ids, self.transformer.wte.weight)
        return wte + F.embedding(positions, self.transformer.wpe.weight)

    def _epilogue(self, x, labels):  # x: [b, s, 64]
        """What runs after the last layer: this micro-batch's share of the mean loss."""
        b, s, _ = x.shape
        x = F.layer_norm(
            x, (64,), self.transformer.ln_f.weight, self.transformer.ln_f.bias, eps=1e-05
        )
        labels = labels.reshape(b * s)
        # in fp32: loss
        logits = F.linear(x, self.lm_head.weight).reshape(b * s, 97).to(torch.float32)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss / self._count

    @staticmethod
    def between_stages(stage, b, s):
        """What a stage sends to the next one on each rank: (shape, dtype) of each tensor."""
        return (((b, s, 64), torch.bfloat16),)


def count_targets(labels):
    """The number of terms in the loss of these samples."""
    b, s = labels.shape
    return (labels.reshape(b * s) != -100).sum()
