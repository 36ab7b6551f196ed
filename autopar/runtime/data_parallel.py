"""ZeRO 0–3. One engine, `fully_shard`; ZeRO-0 in fp32 and fp64 leaves parameters plain and all-reduces.

| stage | gathers a step | gradient reductions a step | resident between micro-batches               |
|-------|----------------|----------------------------|----------------------------------------------|
| 0     | 0              | 1 all-reduce               | parameters and gradients whole               |
| 1     | 1              | 1 reduce-scatter           | compute copy and gradients whole             |
| 2     | 1              | m reduce-scatters          | compute copy whole, gradients sharded        |
| 3     | 2m             | m reduce-scatters          | both sharded                                 |

of each unit (a layer, or the rest of the stage), with m micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from .mesh import Mesh
from .parameters import Container, Value, materialise
from .precision import compute_dtype, reduction_dtype

BUCKET_ELEMENTS = 8 * 2**20


def distribute(
    model: nn.Module, layers: Sequence[str], value: Value, mesh: Mesh, groups: Sequence[Sequence[str]] = ()
) -> DataParallel:
    """Give a model on the meta device its values and lay its parameters out over the data axis.

    `layers`: paths of the ModuleDicts whose members are units. `groups`: paths of members that are one unit together:
    what backward computes again as one is then gathered once for it. One unit at a time is whole in memory.
    """
    settings = mesh.settings
    plain = not settings.half and (settings.zero == 0 or mesh.size("data") == 1)
    for unit in _units(model, layers, groups):
        for name, module in unit.items():
            materialise(module, f"{name}." if name else "", value)
        if not plain:
            _shard(list(unit.values()), mesh)
    return Replicated(model, mesh) if plain else Sharded(model, mesh)


def _units(model: nn.Module, layers: Sequence[str], groups: Sequence[Sequence[str]]) -> Iterator[dict[str, nn.Module]]:
    """The modules of each unit by path: each layer or group of layers, then the model for what is left."""
    modules = dict(model.named_modules())
    together = {name: tuple(group) for group in groups for name in group}
    done: set[str] = set()
    for path in layers:
        held = modules.get(path, nn.Module())  # a stage may have no layer of a list
        for index, layer in held.named_children():
            name = f"{path}.{index}".lstrip(".")
            if type(layer) is Container or name in done:  # else it holds parameters beside the layers
                continue
            unit = {own: modules[own] for own in together.get(name, (name,))}
            done |= unit.keys()
            yield unit
    yield {"": model}


class Replicated:
    """Plain parameters, whole on each replica: gradients are all-reduced in buckets once a step."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._mesh = model, mesh

    def before_backward(self, last: bool) -> None:
        """Called before the backward of each micro-batch; `last` of the step's."""

    def after_backward(self) -> None:
        """Called after a step's last backward; then each gradient is the global one, or its shard."""
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        self._sum_partial(parameters)
        if self._mesh.size("data") > 1:
            all_reduce_buckets([local_part(p.grad) for p in parameters], self._mesh.group("data"))

    def _sum_partial(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients of replicated parameters used in sharded work: once a step rather than at each use."""
        partial = [p for p in parameters if isinstance(p.grad, DTensor) and p.grad.placements[0].is_partial()]
        if not partial:
            return
        all_reduce_buckets([local_part(p.grad) for p in partial], self._mesh.group("tp"))
        for p in partial:
            p.grad = DTensor.from_local(local_part(p.grad), self._mesh.axes["tp"], [Replicate()], run_check=False)


class Sharded:
    """fully_shard with the knobs of each ZeRO stage."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        assert isinstance(model, FSDPModule)
        self._model, self._settings = model, mesh.settings

    def before_backward(self, last: bool) -> None:
        zero = self._settings.zero
        self._model.set_requires_gradient_sync(last or zero >= 2)
        self._model.set_reshard_after_backward(last or zero == 3)
        # In a pipeline other micro-batches are between forward and backward: their prefetch order must stay.
        self._model.set_is_last_backward(last or self._settings.pp == 1)

    def after_backward(self) -> None:
        """Nothing is left to do: fully_shard has reduced in the backwards."""


DataParallel = Replicated | Sharded  # how the replicas of a stage keep their gradients together


def _shard(unit: list[nn.Module], mesh: Mesh) -> None:
    # fully_shard would cast RoPE tables given to a layer: the emitted program does its own casts.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(mesh.settings),
        reduce_dtype=reduction_dtype(mesh.settings),
        cast_forward_inputs=False,
    )
    over = mesh.root["replicate", "shard"] if mesh.root["replicate"].size() > 1 else mesh.root["shard"]
    fully_shard(
        unit if len(unit) > 1 else unit[0], mesh=over, reshard_after_forward=mesh.settings.zero == 3, mp_policy=policy
    )
    # Losses are shares of the global mean, so gradients are summed. Sum first: gloo has no scaled reduction.
    # These two are not recursive, hence set on every unit.
    first = unit[0]
    assert isinstance(first, FSDPModule)
    first.set_force_sum_reduction_for_comms(True)
    first.set_gradient_divide_factor(1.0)


def local_part(x: Tensor | None) -> Tensor:
    """This rank's part of a gradient or state, sharing its memory."""
    assert x is not None
    return x.to_local() if isinstance(x, DTensor) else x


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
