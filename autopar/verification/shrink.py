"""A model and plan small enough to be trained here, in fp64, on a few processes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..plan.plan import Plan
from ..plan.recompute import RecomputeChoice, group_of
from ..request import Job, with_loss
from ..rules.attention import is_short
from ..runtime.choices import AXES, Mesh
from ..trace.huggingface import is_huggingface

LARGEST = 40_000_000  # parameters that are trained as they are, in fp64
MOST_PROCESSES = 8


def small_enough(job: Job, plan: Plan) -> tuple[nn.Module, Plan, str]:
    """The model and plan as they are, or shrunk with the plan's structure."""
    size = sum(p.numel() for p in job.model.parameters())
    hollow = any(p.is_meta for p in job.model.parameters())
    if size <= LARGEST and plan.mesh.world_size <= MOST_PROCESSES:
        return with_values(job) if hollow else job.model, fewer_samples(plan), ""
    if not hasattr(getattr(job.model, "config", None), "num_attention_heads") or not is_huggingface(job.model):
        raise PlanError(
            f"{size / 1e6:.0f} M parameters on {plan.mesh.world_size} processes are too many here: verify a smaller "
            f"model of the same classes (at most {LARGEST / 1e6:.0f} M parameters, {MOST_PROCESSES} processes)"
        )
    mesh = Mesh(**{axis: min(plan.mesh.size(axis), 2) for axis in AXES})
    mesh = replace(mesh, dp=1) if mesh.world_size > MOST_PROCESSES else mesh
    if grouped := bool(plan.sharding.hsdp) and mesh.world_size // mesh.dp * 4 <= MOST_PROCESSES:
        mesh = replace(mesh, dp=4)
    count = mesh.pp * min(plan.virtual_stages, 2)
    layers = 2 * count
    stages = tuple((i * 2, i * 2 + 2) for i in range(count))
    schedule = plan.pipeline.schedule if mesh.pp > 1 else "none"
    recompute = _shrunk_recompute(plan, stages)
    small = plan.changed(
        mesh=mesh, stages=stages, schedule=schedule, recompute=recompute, micro_batch=1,
        global_batch=2 * mesh.pp * mesh.dp, sequence=32, hsdp=2 if grouped else None,
        padded_from=29 if plan.batch.padded else None,
    )  # fmt: skip
    window = _shrunk_window(job.model, plan, small)
    return narrow(job.model, layers, window), small, f"shrunk to {layers} narrow layers on {mesh}"


def _shrunk_recompute(plan: Plan, stages: tuple[tuple[int, int], ...]) -> tuple[RecomputeChoice, ...]:
    """The plan's choices of recompute in turn, a stage each; a group has a stage's layers."""
    kinds = list(dict.fromkeys(chosen.what for chosen in plan.activations.recompute))
    spread = zip(stages, itertools.cycle(kinds), strict=False) if kinds else ()
    return tuple(
        RecomputeChoice(start, stop, f"groups of {stop - start}" if group_of(what) > 1 else what)
        for (start, stop), what in spread
    )


def with_values(job: Job) -> nn.Module:
    """A meta model again, on the CPU."""
    if job.factory is not None:
        model = seeded(job.factory)
        return model if job.loss is None else with_loss(model, job.loss, job.inputs)
    if not is_huggingface(job.model):
        raise PlanError("the model has no values to compare with: build it on the CPU, or pass its factory")
    kind, config = type(job.model), copy.deepcopy(job.model.config)
    return seeded(lambda: kind(config))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def fewer_samples(plan: Plan) -> Plan:
    """At most four micro-batches: enough for every phase of a schedule."""
    batches = min(plan.accumulation, max(4, plan.mesh.pp))
    return plan.changed(global_batch=batches * plan.batch.micro_batch * plan.mesh.dp)


def _shrunk_window(model: nn.Module, plan: Plan, small: Plan) -> int | None:
    """The model's sliding window in a shorter sequence: as long a part of it, and cut over cp in the same order."""
    window: int | None = getattr(model.config, "sliding_window", None)
    if window is None or window >= plan.batch.sequence:
        return window
    widths = list(range(2, small.batch.sequence))
    if plan.mesh.cp > 1:
        short = is_short(window, plan.mesh.cp, plan.batch.sequence)
        widths = [w for w in widths if is_short(w, small.mesh.cp, small.batch.sequence) == short]
    return min(widths, key=lambda w: abs(w * plan.batch.sequence - window * small.batch.sequence))


def narrow(model: nn.Module, layers: int, window: int | None) -> nn.Module:
    """A Hugging Face model of the same class with few, narrow layers and the same head grouping."""
    config: Any = copy.deepcopy(model.config)
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    narrow = {"num_hidden_layers": layers, "vocab_size": 256, "head_dim": 8, "sliding_window": window}
    ratio = heads // groups if groups else 1
    narrow |= {"num_attention_heads": 4 * ratio, "num_key_value_heads": 4, "hidden_size": 32 * ratio}
    narrow["intermediate_size"] = 64 * ratio
    for name, value in narrow.items():
        if hasattr(config, name) and getattr(config, name) is not None:
            setattr(config, name, value)
    pad = getattr(config, "pad_token_id", None)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, pad if token == "pad_token_id" and pad is not None and 0 <= pad < 256 else None)
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:layers]
    return seeded(lambda: type(model)(config))
