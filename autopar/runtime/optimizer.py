"""The optimizer, the exact global gradient norm, and tied parameters that live on two stages."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .data_parallel import all_reduce_buckets, local_part
from .mesh import Mesh

Parameters = Mapping[str, nn.Parameter]
Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]  # (parameter names, options over the defaults)


class Optimizer:
    """A torch optimizer by class name, run on this rank's parts of the parameters.

    Elementwise optimizers compute the same on parts, without the cost of DTensor's dispatch for each op.
    Parameters named in no group take `options`, over torch's defaults. on_host: the parts are offloaded.
    """

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        options: Mapping[str, Any],
        groups: Groups = (),
        on_host: bool = False,
    ) -> None:
        self._parameters = parameters
        self._parts = {n: nn.Parameter(local_part(p.detach()), p.requires_grad) for n, p in parameters.items()}
        named = {n for names, _ in groups for n in names}
        layout = [*groups, ([n for n in parameters if n not in named], {})]
        param_groups = [
            {"params": [self._parts[n] for n in names if n in parameters and parameters[n].requires_grad], **own}
            for names, own in layout
        ]
        kind = getattr(torch.optim, name)
        if on_host and _fuses(kind, [options, *(own for _, own in groups)]):
            options = {**options, "fused": True}  # one pass over memory instead of ten
        self._optimizer: torch.optim.Optimizer = kind(param_groups, **options)

    def zero_grad(self) -> None:
        for p in (*self._parameters.values(), *self._parts.values()):
            p.grad = None

    def step(self) -> None:
        for name, p in self._parameters.items():
            self._parts[name].grad = None if p.grad is None else local_part(p.grad)
        self._optimizer.step()

    def states(self, name: str) -> dict[str, Tensor]:
        """The state tensors of a parameter, laid out as it is; they share memory with the optimizer's own."""
        own = self._optimizer.state.get(self._parts[name], {})
        return {key: self._like(name, value) for key, value in own.items() if isinstance(value, Tensor)}

    def load_states(self, name: str, states: Mapping[str, Tensor]) -> None:
        """Take states as saved. Counters go where torch's load_state_dict has them."""
        part = self._parts[name]
        options = next((g for g in self._optimizer.param_groups if any(p is part for p in g["params"])), {})
        on_device = bool(options.get("fused") or options.get("capturable"))
        own = {key: local_part(value) for key, value in states.items()}
        moved = {key: x if key == "step" and not on_device else x.to(part.device) for key, x in own.items()}
        self._optimizer.state[part].update(moved)

    def _like(self, name: str, value: Tensor) -> Tensor:
        p = self._parameters[name]
        if not isinstance(p, DTensor) or value.dim() == 0:
            return value
        if value.device.type != p.device_mesh.device_type:
            # Offloaded. `_spec` is private, but the public from_local would move all states to the GPU.
            return DTensor(value, p._spec, requires_grad=False)
        return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _fuses(kind: type[torch.optim.Optimizer], options: Iterable[Mapping[str, Any]]) -> bool:
    """Whether torch has one kernel for a whole update, and the user has not asked for another way."""
    others = {"fused", "foreach", "capturable", "differentiable"}
    return "fused" in inspect.signature(kind).parameters and all(others.isdisjoint(given) for given in options)


def square_sum(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """This rank's summand of the squared global gradient norm, 0-dim fp64.

    A part that r ranks of the stage hold counts 1/r on each, so that the plain sum over all ranks is exact.
    """
    ranks = mesh.size("data") * mesh.size("tp")
    by_copies: dict[float, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_copies.setdefault(ranks / _shards(p.grad), []).append(local_part(p.grad))
    # On the mesh's device, where it is added up over the ranks; offloaded gradients are on the host.
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for copies, grads in by_copies.items():
        total += torch.nn.utils.get_total_norm(grads).double().square().to(mesh.device) / copies
    return total


def _shards(x: Tensor) -> int:
    """Into how many different parts a tensor is cut."""
    if not isinstance(x, DTensor):
        return 1
    return math.prod(x.device_mesh.size(i) for i, p in enumerate(x.placements) if not p.is_replicate())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Unscale and clip in one pass: every rank multiplies by the same factor."""
    for p in parameters:
        if p.grad is not None and factor != 1:
            local_part(p.grad).mul_(factor)


def clip_factor(norm: float, limit: float | None) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies by, given the norm; 1 without a limit."""
    return limit / (norm + 1e-6) if limit is not None and norm + 1e-6 > limit else 1.0


class Tied:
    """Parameters that are one in the original model and several here, for different stages or layers use them.

    pairs: (alias, original); (name, name) for a layer object that several stages use.

    The copies start equal, and stay so: each gets the sum of all gradients.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], parameters: Parameters, mesh: Mesh) -> None:
        self._copies: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        self._device = mesh.device
        self.aliases: set[str] = set()  # copies on this stage that another one stands for
        if not pairs:
            return
        held: list[list[str]] = [list(parameters)]
        if mesh.size("pp") > 1:
            held *= mesh.size("pp")
            dist.all_gather_object(held, list(parameters), group=mesh.group("pp"))
        tied: dict[str, list[str]] = {}
        for alias, original in pairs:
            tied.setdefault(original, [original]).append(alias)
        for names in tied.values():
            stages = [i for i, stage in enumerate(held) if not set(names).isdisjoint(stage)]
            group = _group_of_stages(stages, mesh) if len(stages) > 1 else None
            own = [name for name in dict.fromkeys(names) if name in parameters]
            if own and (group or len(own) > 1):
                trained = [parameters[name] for name in own if parameters[name].requires_grad]
                self._copies += [(trained, group)] if trained else []
                self.aliases |= set(own[1:] if mesh.rank("pp") == stages[0] else own)

    def sum_gradients(self) -> None:
        for copies, group in self._copies:
            for p in copies:
                if p.grad is None:  # read without a gradient here; the other stages wait
                    p.grad = torch.zeros_like(p)
            total, *others = [local_part(p.grad) for p in copies]
            for grad in others:
                total += grad
            if group:
                summed = total.to(self._device)  # offloaded gradients are on the host
                all_reduce_buckets([summed], group)
                total.copy_(summed)
            for grad in others:
                grad.copy_(total)


def _group_of_stages(stages: Sequence[int], mesh: Mesh) -> dist.ProcessGroup:
    """The ranks of `stages` with this rank's replica and shard. Called by every rank, in the same order."""
    if len(stages) == mesh.size("pp"):
        return mesh.group("pp")
    columns = mesh.root.mesh[list(stages)].flatten(1).T.tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(columns)
    return group
