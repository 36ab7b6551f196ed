"""The optimizer, the exact global gradient norm, and gradients that ranks agree on: of tied parameters, and of those
that only some calls read."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .data_parallel import all_reduce_buckets, local_part
from .mesh import Mesh, from_each_rank
from .weights import Groups

Parameters = Mapping[str, nn.Parameter]
reached: set[tuple[nn.Module, str]] = set()  # parameters of opaque modules with a gradient in this step: (holder, name)


class Optimizer:
    """A torch optimizer by class name, run on this rank's parts of the parameters.

    Elementwise optimizers compute the same on parts, without the cost of DTensor's dispatch for each op.
    Parameters named in no group take `options`, over torch's defaults. on_host: the parts are offloaded.
    """

    def __init__(
        self, parameters: Parameters, name: str, options: Mapping[str, Any], groups: Groups = (), on_host: bool = False
    ) -> None:
        self._parameters = parameters
        self._parts = {n: nn.Parameter(local_part(p.detach()), p.requires_grad) for n, p in parameters.items()}
        kind = getattr(torch.optim, name)
        if on_host and _fuses(kind, [options, *(changes for _, changes in groups)]):
            options = {**options, "fused": True}  # one pass over memory instead of ten
        self._optimizer: torch.optim.Optimizer = kind(self._param_groups(groups), **options)

    def _param_groups(self, groups: Groups) -> list[dict[str, Any]]:
        """The groups as torch takes them, with those of their parameters that this rank has and that are trained."""
        grouped = {name for names, _ in groups for name in names}
        trained = {name: part for name, part in self._parts.items() if part.requires_grad}
        layout = [*groups, ([name for name in trained if name not in grouped], {})]
        return [{"params": [trained[n] for n in names if n in trained], **changes} for names, changes in layout]

    def zero_grad(self) -> None:
        for p in (*self._parameters.values(), *self._parts.values()):
            p.grad = None

    def step(self) -> None:
        for name, p in self._parameters.items():
            self._parts[name].grad = None if p.grad is None else local_part(p.grad)
        self._optimizer.step()

    def states(self, name: str) -> dict[str, Tensor]:
        """The optimizer's own tensors for a parameter: states of this rank's part, and counters."""
        states = self._optimizer.state.get(self._parts[name], {})
        return {key: value for key, value in states.items() if isinstance(value, Tensor)}

    def load_states(self, name: str, states: Mapping[str, Tensor]) -> None:
        """Take states as saved. Counters go where torch's load_state_dict has them."""
        part = self._parts[name]
        options = next((g for g in self._optimizer.param_groups if any(p is part for p in g["params"])), {})
        on_device = bool(options.get("fused") or options.get("capturable"))
        moved = {key: x if key == "step" and not on_device else x.to(part.device) for key, x in states.items()}
        self._optimizer.state[part].update(moved)


def _fuses(kind: type[torch.optim.Optimizer], options: Iterable[Mapping[str, Any]]) -> bool:
    """Whether torch has one kernel for a whole update, and the user has not asked for another way."""
    others = {"fused", "foreach", "capturable", "differentiable"}
    return "fused" in inspect.signature(kind).parameters and all(others.isdisjoint(chosen) for chosen in options)


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
    """The factor by which torch.nn.utils.clip_grad_norm_ would multiply gradients of this norm; 1 without a limit."""
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
        by_stage = from_each_rank(set(parameters), mesh.group("pp"))
        tied: dict[str, list[str]] = {}
        for alias, original in pairs:
            tied.setdefault(original, [original]).append(alias)
        for names in tied.values():
            stages = [i for i, stage in enumerate(by_stage) if not stage.isdisjoint(names)]
            group = _group_of_stages(stages, mesh)
            here = {name: parameters[name] for name in names if name in parameters}
            if here and (group or len(here) > 1):
                trained = [p for p in here.values() if p.requires_grad]
                self._copies += [(trained, group)] if trained else []
                self.aliases |= set([*here][1:] if mesh.rank("pp") == stages[0] else here)

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


def _group_of_stages(stages: Sequence[int], mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks of `stages` with this rank's replica and shard; None where it is one stage.

    Called by every rank, in the same order.
    """
    if len(stages) < 2:
        return None
    if len(stages) == mesh.size("pp"):
        return mesh.group("pp")
    columns = mesh.root.mesh[list(stages)].flatten(1).T.tolist()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(columns)
    return group


class LeftOut:
    """Parameters that opaque modules have read in no call of a step, on any rank, have no gradient, as in the original:
    an optimizer leaves them alone, and a gradient of zero would let them decay.

    names: the whole program's parameters that only opaque modules read.
    """

    def __init__(
        self, names: Sequence[str], original: Callable[[str], str], models: Iterable[nn.Module], parameters: Parameters
    ) -> None:
        self._flag = {name: i for i, name in enumerate(dict.fromkeys(map(original, names)))}
        modules = (named for model in models for named in model.named_modules())
        self._paths = {module: f"{path}." if path else "" for path, module in modules}
        self._original, self._parameters = original, parameters

    def drop(self, mesh: Mesh) -> None:
        """Every rank calls, after a step's gradients are summed."""
        if not self._flag:
            return
        read = {self._original(self._paths[holder] + name) for holder, name in reached if holder in self._paths}
        reached.clear()
        flags = torch.tensor([name in read for name in self._flag], dtype=torch.int32, device=mesh.device)
        if mesh.settings.world_size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        graded = flags.tolist()
        for name, p in self._parameters.items():
            place = self._flag.get(self._original(name))
            if place is not None and not graded[place]:
                p.grad = None
