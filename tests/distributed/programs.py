"""From a model and a few words about a plan to emitted programs on forked ranks, compared with one process.

subject = gpt(torch.float64)
errors = parity(subject, subject.plan(tp=2, pp=2, layout=MEGATRON_SP))
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import compile_program, cut_sequence, with_heads
from autopar.cost_models.hardware import gpu
from autopar.emit.emission import Predicted
from autopar.emit.source import load_source, model_source
from autopar.ir.graph import B, Program, S
from autopar.plan.plan import Optimizer, Plan, Solution
from autopar.plan.recompute import RecomputeChoice, choice, whole_layers
from autopar.rules import TensorAxis
from autopar.rules.attention import context_axis
from autopar.runtime.choices import Mesh
from autopar.runtime.opaque import OpaqueModule
from autopar.runtime.trainer import Trainer
from autopar.search.intra_op import solve
from autopar.search.layouts import MEGATRON, RING, Layout
from autopar.search.op_costs import Costs, TimeCosts
from autopar.trace.opaque import opaque_modules
from autopar.verification.parity import relative_errors
from tests import models
from tests.harness import Reference, cast, reference_run, run_ranks

VOCABULARY = models.VOCABULARY
SEQUENCE, GLOBAL_BATCH, STEPS = 16, 12, 5
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
PRECISION = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OPTIMIZERS = {
    "fp64": Optimizer("AdamW"),
    "fp32": Optimizer("SGD", {"lr": 0.02, "momentum": 0.9}),
    "bf16": Optimizer("SGD", {"lr": 0.02, "momentum": 0.9}),
    "fp16": Optimizer("SGD", {"lr": 0.02, "momentum": 0.9}),
}
Batch = dict[str, Tensor]


# --------------------------------------------------------------------------------
# A model with its program


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and the dtype it is trained in; its parameters have that dtype (half precision: fp32 masters)."""

    model: nn.Module
    program: Program
    dtype: torch.dtype
    data: tuple[Batch, ...] | None = None  # its own global batches; None: `batches()`

    @property
    def precision(self) -> str:
        return PRECISION[self.dtype]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """As weights.pt: parameters and buffers by original name, tied ones under both."""
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        return {name: value.detach() for name, value in named}

    @cached_property
    def reference(self) -> Reference:
        """What the model does on one process with its data."""
        return self.reference_on(self.batches)

    @property
    def batches(self) -> Sequence[Batch]:
        return batches() if self.data is None else self.data

    def reference_on(self, data: Sequence[Batch]) -> Reference:
        chosen = OPTIMIZERS[self.precision]
        make: Any = getattr(torch.optim, chosen.name)
        return reference_run(self.model, data, lambda parameters: make(parameters, **chosen.kwargs))

    def plan(
        self,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        *,
        cp: int = 1,
        context: Layout = RING,
        layout: Layout = MEGATRON,
        costs: Costs | None = None,
        micro_batch: int = 4,
        recompute: Sequence[int] | str = (),
        schedule: str = "1f1b",
        global_batch: int = GLOBAL_BATCH,
        sequence: int = SEQUENCE,
        zero: int = 0,
        reduce_dtype: str | None = None,
        hsdp: int | None = None,
        offload: bool = False,
        virtual_stages: int = 1,
        padded_from: int | None = None,
    ) -> Plan:
        layers = len(self.program.layer_calls)
        plan = Plan.of(
            mesh=Mesh(pp=pp, dp=dp, cp=cp, tp=tp),
            global_batch=global_batch,
            micro_batch=micro_batch,
            sequence=sequence,
            padded_from=padded_from,
            stages=stages(layers, pp * virtual_stages),
            schedule=schedule if pp > 1 else "none",
            zero=zero,
            hsdp=hsdp,
            offload=offload,
            recompute=recomputed(recompute, layers),
            precision=self.precision,
            optimizer=OPTIMIZERS[self.precision],
            reduce_dtype=reduce_dtype,
            context=Solution(cp, {}, context.name if cp > 1 else ""),
        )
        plan = plan.changed(context=self.context(plan, context))
        return plan.changed(solution=self.solution(plan, layout, costs))

    def context(self, plan: Plan, layout: Layout) -> Solution:
        cp = plan.mesh.cp
        if cp == 1:
            return Solution(1, {})
        values = {B: plan.batch.micro_batch, S: plan.batch.sequence}
        # Of sizes so small the cheapest is to do everything everywhere: priced at those of real models.
        costs = TimeCosts(gpu("h100-sxm-80gb"), self.precision, cp, {B: 1, S: 8192}, axis="cp")
        axis = context_axis(self.program, cp, values, layout.name, plan.mesh.tp)
        return solve(with_heads(self.program, plan), axis, costs, layout)

    def solution(self, plan: Plan, layout: Layout, costs: Costs | None = None) -> Solution:
        tp = plan.mesh.tp
        if tp == 1:
            return Solution(1, {})
        values = {B: plan.batch.micro_batch, S: plan.batch.sequence // plan.mesh.cp}
        axis = TensorAxis(tp, values, layout.sequence)
        costs = costs or TimeCosts(gpu("h100-sxm-80gb"), self.precision, tp, values)
        return solve(cut_sequence(self.program, plan), axis, costs, layout)

    def source(self, plan: Plan) -> str:
        return model_source(compile_program(self.program, plan), plan, Predicted())


def recomputed(which: Sequence[int] | str, layers: int) -> tuple[RecomputeChoice, ...]:
    """ "all", some layers, or what of each layer ("mlp"); a bar parts what is for each half of the layers."""
    if not isinstance(which, str):
        return whole_layers(map(int, which))
    words = ["layer" if text == "all" else text for text in which.split(" | ")]
    bounds = [layers * part // len(words) for part in range(len(words) + 1)]
    ranges = zip(pairwise(bounds), words, strict=True)
    return tuple(RecomputeChoice(start, stop, choice(text)) for (start, stop), text in ranges if text != "none")


def stages(layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """Consecutive ranges, the first ones a layer longer where `pp` does not divide."""
    share, rest = divmod(layers, pp)
    sizes = [share + (i < rest) for i in range(pp)]
    return tuple((sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(pp))


def subject(
    model: nn.Module, dtype: torch.dtype, program: Program | None = None, data: Sequence[Batch] | None = None
) -> Subject:
    """The model with parameters that leave no term of a gradient small: no bias is zero, no norm is one.

    `data`: its own global batches, for a model that takes other inputs than ids and labels. The model given is
    left as it is: it may be another subject's, whose reference has been computed.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    stored = torch.float32 if dtype.itemsize == 2 else dtype
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
            parameter.copy_(1.5 * noise if parameter.dim() > 1 else parameter + noise)
        cast(model, stored).train()
    if program is None:
        ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
        program = models.layered(model, {"input_ids": ids, "labels": ids}, dtype)
    return Subject(model, program, dtype, None if data is None else tuple(data))


# --------------------------------------------------------------------------------
# The models


@cache
def gpt(dtype: torch.dtype, layers: int = 4, dropout: float = 0.0) -> Subject:
    """examples/gpt.py: tied embeddings, fused QKV, biases, a vocabulary that tp does not divide."""
    model, program = models.gpt(dtype, n_layer=layers, d_model=32, dropout=dropout)
    return subject(model, dtype, program)


_SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 4}


@cache
def llama(dtype: torch.dtype, layers: int = 4) -> Subject:
    """HF Llama with grouped K/V heads."""
    model, program = models.llama(dtype, **{**_SMALL, "num_hidden_layers": layers})
    return subject(model, dtype, program)


@cache
def qwen(dtype: torch.dtype) -> Subject:
    """HF Qwen2: biases on q, k and v, tied embeddings."""
    model, program = models.qwen2(dtype, **_SMALL)
    return subject(model, dtype, program)


class ParallelBlock(nn.Module):
    """Attention and MLP read one norm and join one sum; a width and heads that 2 does not divide."""

    def __init__(self, d: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(d, width), nn.Linear(d, width), nn.Linear(width, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        h = self.norm(x)
        q, k, v = (p(h).view(b, s, self.heads, d // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        result: Tensor = x + self.out(attended) + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class ParallelModel(nn.Module):
    def __init__(self, layers: int = 3, d: int = 33, heads: int = 3, width: int = 45) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.position = nn.Embedding(64, d)
        self.blocks = nn.ModuleList(ParallelBlock(d, heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@cache
def parallel(dtype: torch.dtype, layers: int = 3) -> Subject:
    return subject(ParallelModel(layers), dtype)


# --------------------------------------------------------------------------------
# Data


def batches(steps: int = STEPS, samples: int = GLOBAL_BATCH, sequence: int = SEQUENCE) -> list[Batch]:
    """Global batches; the first third of the samples is all padding, the others are padded unequally."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        ids, labels = (torch.randint(VOCABULARY, (samples, sequence), generator=generator) for _ in range(2))
        padded = torch.arange(samples).unsqueeze(1) / samples * 0.8
        labels[torch.rand(samples, sequence, generator=generator) < padded] = -100
        labels[: samples // 3] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


# --------------------------------------------------------------------------------
# Ranks


@dataclass(frozen=True)
class Errors:
    """The worst error of each quantity on one rank, with the name of the worst tensor."""

    loss: float
    norm: float
    gradients: tuple[float, str]
    weights: tuple[float, str]
    names: frozenset[str] = field(default=frozenset(), repr=False)  # of the parameters of this rank's stage

    @property
    def worst(self) -> float:
        return worst([self.loss, self.norm, self.gradients[0], self.weights[0]])


def worst(errors: Sequence[float]) -> float:
    """The largest; NaN is larger than all."""
    return max(errors, key=lambda e: (e != e, e))


def trainer_of(
    source: str, weights: Mapping[str, Tensor] | Path, opaque: Mapping[str, OpaqueModule] | None = None, **options: Any
) -> Trainer:
    return Trainer(load_source(source, opaque=opaque), weights, seed=0, **options)


def local_batch(trainer: Trainer, batch: Batch) -> Batch:
    """This replica's samples of a global batch."""
    count = trainer.settings.global_batch // trainer.settings.dp
    start = trainer.mesh.rank("dp") * count
    return {name: tensor[start : start + count] for name, tensor in batch.items()}


def train_and_compare(
    source: str,
    weights: Mapping[str, Tensor] | Path,
    data: Sequence[Batch],
    reference: Reference,
    opaque: Mapping[str, OpaqueModule] | None = None,
) -> Errors:
    """On a rank: train on `data` and compare with the reference: first gradients, all losses and norms, weights."""
    trainer = trainer_of(source, weights, opaque)
    results = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(data):
        results.append(trainer.step(local_batch(trainer, batch)))
        if step == 0:
            gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}  # a buffer's, maybe
    losses = [_relative(r.loss, expected) for r, expected in zip(results, reference.losses, strict=True)]
    norms = [_relative(r.grad_norm, expected) for r, expected in zip(results, reference.norms, strict=True)]
    state = trainer.state_dict()
    return Errors(
        worst(losses),
        worst(norms),
        compare(gradients, reference.gradients[0]),
        compare(state, reference.weights),
        frozenset(state),
    )


def _relative(actual: float, expected: float) -> float:
    return abs(actual - expected) / abs(expected)


def compare(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The worst error and its name; a stage has some of the names, the floor is of the whole model."""
    errors = relative_errors({**expected, **actual}, expected)
    name = max(errors, key=lambda n: (errors[n] != errors[n], errors[n]))
    return errors[name], name


def parity(subject: Subject, plan: Plan, data: Sequence[Batch] | None = None, timeout: float = 120) -> Errors:
    """The worst errors over all ranks of an emitted program against one process."""
    reference = subject.reference if data is None else subject.reference_on(data)
    data = subject.batches if data is None else data
    source, weights = subject.source(plan), subject.weights
    opaque = opaque_modules(subject.program, subject.model)
    found: list[Errors] = run_ranks(
        plan.mesh.world_size,
        lambda rank: train_and_compare(source, weights, data, reference, opaque),
        timeout=timeout,
    )
    assert frozenset().union(*(e.names for e in found)) == reference.weights.keys()
    return max(found, key=lambda e: (e.worst != e.worst, e.worst))


def assert_parity(subject: Subject, plan: Plan, data: Sequence[Batch] | None = None) -> None:
    """The contract: everything within the tolerance of the precision, on every rank."""
    errors = parity(subject, plan, data)
    assert errors.worst <= TOLERANCE[subject.precision], errors
