"""ZeRO 0–3. One engine, `fully_shard`; ZeRO-0 in fp32 and fp64 leaves parameters plain and all-reduces.

| stage | gathers a step | gradient reductions a step | resident between micro-batches               |
|-------|----------------|----------------------------|----------------------------------------------|
| 0     | 0              | 1 all-reduce               | parameters and gradients whole               |
| 1     | 1              | 1 reduce-scatter           | compute copy and gradients whole             |
| 2     | 1              | m reduce-scatters          | compute copy whole, gradients sharded        |
| 3     | 2m             | m reduce-scatters          | both sharded                                 |

of each unit (units.py), with m micro-batches. With hsdp these are collectives of a group, and the groups all-reduce
their parts once a step. With offload what is sharded lies on the host: a unit's part is copied to the device before its
gather, and its reduced gradient back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate

from .mesh import Mesh
from .parameters import Value, materialise
from .precision import compute_dtype, reduction_dtype
from .units import FsdpUnit, Prefetch, units_of

BUCKET_ELEMENTS = 8 * 2**20


def distribute(
    model: nn.Module,
    layers: Sequence[str],
    value: Value,
    mesh: Mesh,
    groups: Sequence[Sequence[str]] = (),
    ends: Mapping[str, Sequence[str]] | None = None,
) -> DataParallel:
    """Give a model on the meta device its values and lay its parameters out over the data axis.

    `layers`: paths of the ModuleDicts whose members are units. `groups`: paths of members that are one unit together:
    what backward computes again as one is then gathered once for it. `ends`: the model's methods outside of layers,
    each a unit of the modules whose parameters it reads. One unit at a time is whole in memory.
    """
    settings = mesh.settings
    alone = mesh.size("data") == 1 and not settings.offload
    plain = not settings.half and (settings.zero == 0 or alone)
    units = units_of(model, layers, groups, ends or {})
    for unit in (*units, FsdpUnit({"": model})):
        for path, module in unit.modules.items():
            materialise(module, path, value)
        if not plain:
            _shard(list(unit.modules.values()), mesh)
    return Replicated(model, mesh) if plain else Sharded(model, units, mesh)


class Replicated:
    """Plain parameters, whole on each replica: gradients are all-reduced in buckets once a step."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh

    def before_backward(self, last: bool) -> None:
        """Called before the backward of each micro-batch; `last` of the step's."""

    def after_weight_gradients(self, last: bool) -> None:
        """Called where a backward computes weight gradients by themselves, after them; `last` of the step's."""

    def after_backward(self) -> None:
        """Called after a step's last backward; then each gradient is the global one, or its shard."""
        _sum_gradients(self._model.parameters(), self._mesh)


class Sharded:
    """fully_shard with the knobs of each ZeRO stage."""

    def __init__(self, model: nn.Module, units: Sequence[FsdpUnit], mesh: Mesh) -> None:
        assert isinstance(model, FSDPModule)
        self._model, self._settings, self._mesh = model, mesh.settings, mesh
        prefetch = Prefetch(model, [unit.first for unit in units if not unit.method])
        for unit in units:
            if unit.method:
                _run_in(unit, model, prefetch)

    def before_backward(self, last: bool) -> None:
        zero = self._settings.zero
        self._model.set_requires_gradient_sync(last or zero >= 2)
        self._model.set_requires_all_reduce(last)  # between groups of hsdp, and replicas of ZeRO-0
        self._model.set_reshard_after_backward(last or zero == 3)
        # In a pipeline other micro-batches are between forward and backward: their prefetch order must stay.
        self._model.set_is_last_backward(last or self._settings.pp == 1)

    def after_weight_gradients(self, last: bool) -> None:
        """Add gradients up in the dtype of their reduction and reduce them, as hooks do in a whole backward.

        By private functions, as torch's own PipelineStage.perform_reduce_grad: there are no public ones.
        """
        self.before_backward(last)
        state = fully_shard.state(self._model)  # type: ignore[attr-defined]
        for unit in state._state_ctx.all_states:
            for group in unit._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()

    def after_backward(self) -> None:
        """fully_shard has reduced in the backwards, but for what it does not take."""
        _sum_gradients(_scalars(self._model), self._mesh)


DataParallel = Replicated | Sharded  # how the replicas of a stage keep their gradients together


def _scalars(model: nn.Module) -> list[nn.Parameter]:
    """Parameters without a dim, which fully_shard refuses: each rank keeps them whole."""
    return [p for p in model.parameters() if not p.dim()]


def _sum_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sum the gradients of parameters that are whole on each replica over the data axis.

    Those of replicated parameters used in sharded work are summed over tp first: once a step, not at each use.
    """
    trained = [p for p in parameters if p.grad is not None]
    partial = [p for p in trained if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()]
    if partial:
        all_reduce_buckets([local_part(p.grad) for p in partial], mesh.group("tp"))
    for p in partial:
        p.grad = DTensor.from_local(local_part(p.grad), mesh.axes["tp"], [Replicate()], run_check=False)
    if trained and mesh.size("data") > 1:
        all_reduce_buckets([local_part(p.grad) for p in trained], mesh.group("data"))


def _run_in(unit: FsdpUnit, model: nn.Module, prefetch: Prefetch) -> None:
    """Have the model's method run as the forward of its unit, which has none of its own."""
    setattr(unit.first, unit.method, getattr(model, unit.method))
    register_fsdp_forward_method(unit.first, unit.method)
    method = getattr(unit.first, unit.method)

    def run(*args: Any) -> Any:
        output = method(*args)
        prefetch.note(unit.first, output)
        return output

    setattr(model, unit.method, run)


def _shard(modules: list[nn.Module], mesh: Mesh) -> None:
    # fully_shard would cast RoPE tables given to a layer: the emitted program does its own casts.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(mesh.settings),
        reduce_dtype=reduction_dtype(mesh.settings),
        cast_forward_inputs=False,
    )
    over = mesh.root["replicate", "shard"] if mesh.root["replicate"].size() > 1 else mesh.root["shard"]
    place = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if mesh.settings.offload else OffloadPolicy()
    one = modules if len(modules) > 1 else modules[0]
    reshard = mesh.settings.zero == 3
    scalars = {p for module in modules for p in _scalars(module)}
    fully_shard(
        one, mesh=over, reshard_after_forward=reshard, mp_policy=policy, offload_policy=place, ignored_params=scalars
    )
    # Losses are shares of the global mean, so gradients are summed. Sum first: gloo has no scaled reduction.
    # These two are not recursive, hence set on every unit.
    unit = modules[0]
    assert isinstance(unit, FSDPModule)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)


def local_part(x: Tensor | None) -> Tensor:
    """This rank's part of a gradient or state, sharing its memory."""
    assert x is not None
    return x.to_local() if isinstance(x, DTensor) else x


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank that holds a part; all of them must call."""
    if isinstance(x, DTensor):
        x = x.detach().to(x.device_mesh.device_type)  # offloaded parts are on the host
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def all_reduce_buckets(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors in place over a group: small ones together, large ones as they are."""
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        flat = torch.cat([t.flatten() for t in bucket])
        dist.all_reduce(flat, group=group)
        for t, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            t.copy_(total.view_as(t))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for t in tensors:
        full = sum(b.numel() for b in bucket) + t.numel() > BUCKET_ELEMENTS
        if bucket and (full or t.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(t)
    if bucket:
        yield bucket
