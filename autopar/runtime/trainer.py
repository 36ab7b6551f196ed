"""One training step of an emitted program, on this rank."""

from __future__ import annotations

import inspect
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bounds import outside_error, take_noticed
from .checkpoint import State, resumed_values
from .compiled import compile_layers
from .data import padded
from .data_parallel import distribute, full, local_part
from .folders import Manifest, find_checkpoint, refuse_later, write_folder
from .mesh import from_each_rank, init_mesh
from .optimizer import (
    LeftOut,
    Optimizer,
    Tied,
    clip_factor,
    scale_gradients,
    square_sum,
)
from .parameters import kept_buffers, unused, update_statistics
from .pipeline import Batch, make_run
from .precision import (
    LossScale,
    compute_dtype,
    default_dtype,
    not_finite,
    not_finite_error,
    overflow_error,
)
from .random import seed_generators
from .settings import Program
from .weights import Names, by_name, copied_names, read_weights, with_copies


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the targets of the global batch. grad_norm: of the whole model, before clipping.

    loss_scale: of this step, 1 but in fp16; skipped: its gradients overflowed, so the parameters stay as they were.
    stop: a rank was asked to end the run.
    """

    loss: float
    grad_norm: float
    loss_scale: float = 1.0
    skipped: bool = False
    stop: bool = False


class Trainer:
    """The models of this rank's stages with their data parallelism, optimizer and schedule.

    program: the emitted model.py as a module. weights: tensors by original name, a folder with weights.pt
    (or init.json beside the program), or a folder of `save`, of which the latest whole checkpoint is resumed.
    seed: of initialisation and dropout, 0 or a checkpoint's. lr: over the plan's.
    loss_scale: of fp16, where a checkpoint has none.
    """

    def __init__(
        self,
        program: ModuleType,
        weights: Path | Mapping[str, Tensor] | None = None,
        *,
        seed: int | None = None,
        lr: float | None = None,
        clip: float | None = None,
        loss_scale: LossScale | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        defined = Program.of(program)
        folder = Path(program.__file__ or ".").parent
        self.settings, self.clip, self._stop = defined.SETTINGS, clip, False
        self.mesh = init_mesh(self.settings, device)
        self._init = weights.resolve() if isinstance(weights, Path) else None
        weights = folder if weights is None or self._init == folder.resolve() else weights
        saved, manifest = (self._init and find_checkpoint(self._init)) or (None, {})
        self.steps = manifest.get("step", 0)
        self.samples = manifest.get("samples", 0)  # consumed by all replicas
        self.seed: int = manifest.get("seed", 0) if seed is None else seed
        self._saved = (saved.parent, self.steps) if saved else None
        seed_generators(self.seed + self.steps, self.mesh)  # not the dropout masks of the first steps again
        self.models: list[nn.Module] = [defined.Model(stage).train() for stage in self.mesh.stages]
        copies = copied_names(self.models, dict(defined.TIED))
        self.names = Names({**dict(defined.TIED), **copies}, defined.PARTS)
        self._distribute(defined, resumed_values(saved, folder) if saved else read_weights(weights, folder, self.seed))
        self._spread = self._spread_parts()
        self.tied = Tied((*defined.TIED, *copies.items()), self.parameters, self.mesh)
        self.left_out = LeftOut(defined.OPTIONAL, self.names.original, self.models, self.parameters)
        self.optimizer = self._make_optimizer(defined, copies, lr)
        fp16 = self.settings.precision == "fp16"
        self.loss_scale = loss_scale if loss_scale and fp16 else LossScale(enabled=fp16)
        self._run = make_run(self.models, self.data_parallel, self.mesh, self.loss_scale)
        self._count_targets = defined.count_targets
        self._state = State(self.parameters, self.optimizer, self.names, self.buffers, self.loss_scale)
        if saved:
            self._resume(saved, manifest)

    def _distribute(self, program: Program, values: Any) -> None:
        """Give the models their values, and the data ranks their shares of each."""
        value = self.names.value(values)
        self.data_parallel = [
            distribute(model, program.LAYERS, value, self.mesh, program.GROUPS, program.ENDS) for model in self.models
        ]
        for model in self.models if self.settings.compile else ():
            compile_layers(model, program.LAYERS)
        parts = (*self.models, unused(program.UNUSED, value))
        self.parameters = by_name(parts)
        self.buffers = {name: b for part in parts for name, b in kept_buffers(part).items()}

    def _make_optimizer(self, program: Program, copies: Mapping[str, str], lr: float | None) -> Optimizer:
        settings = self.settings
        if settings.offload and self.mesh.device.type == "cuda":
            _use_cores()
        options = settings.optimizer_kwargs | ({} if lr is None else {"lr": lr})
        groups = with_copies(program.PARAMETER_GROUPS, copies)
        return Optimizer(self.parameters, settings.optimizer, options, groups, settings.offload)

    @property
    def model(self) -> nn.Module:
        """The model of this rank's stage, or a list of those of its virtual stages."""
        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)

    def step(self, batch: Batch) -> StepResult:
        """Train on this replica's samples of one global batch: [global_batch / dp, ...] a tensor.

        Samples that are shorter than the plan's sequence by plan are padded here, before anything is cut over cp.
        Floating inputs are cast to the compute dtype, as fully_shard's cast_forward_inputs would.
        Raises ValueError where the batch has other sizes than those planned, IndexError where an id or a target is
        outside its table, FloatingPointError naming parameters where loss or gradients are not finite, OverflowError
        where no loss scale makes them so.
        """
        self._check_sizes(batch)
        batch = padded(batch, self.settings.padding, self.settings.sequence)
        dtype = compute_dtype(self.settings)
        batch = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}
        self.optimizer.zero_grad()
        self._count(batch)
        with default_dtype(dtype):
            loss = self._run(batch)
        for stage in self.data_parallel:
            stage.after_backward()
        self.tied.sum_gradients()
        self.left_out.drop(self.mesh)
        result = self._totals(loss, batch)
        self._update(result)
        for model in self.models if not result.skipped else ():  # what overflowed is no statistic
            update_statistics(model)
        self.steps, self.samples = self.steps + 1, self.samples + self.settings.global_batch
        return result

    def _update(self, result: StepResult) -> None:
        """Unscale and clip the gradients and step the optimizer, unless they overflow."""
        if not self.loss_scale.enabled and not math.isfinite(result.loss + result.grad_norm):
            raise not_finite_error(self.steps, result.loss, result.grad_norm, self._own_gradients())
        if not result.skipped:
            factor = clip_factor(result.grad_norm, self.clip) / result.loss_scale
            scale_gradients(self.parameters.values(), factor)
            self.optimizer.step()
        self.loss_scale.update(result.skipped)
        if self.loss_scale.hopeless:
            raise overflow_error(self.loss_scale, result.loss, self._own_gradients())

    def _own_gradients(self) -> list[tuple[str, Tensor]]:
        return [(self.names.whole(n), local_part(p.grad)) for n, p in self.parameters.items() if p.grad is not None]

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradients of this stage's parameters after a step, clipped if asked, by original name.

        Every rank calls. Tensors come from this rank's own copy: compare them on every rank.
        """
        return self._whole({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    def state_dict(self) -> dict[str, Tensor]:
        """The whole parameters and persistent buffers of this stage, by original name. Every rank calls."""
        return self._whole({**self.parameters, **self.buffers})

    def _resume(self, saved: Path, manifest: Manifest) -> None:
        """Fill all from a checkpoint; random numbers go on where each rank has the place in the mesh that it had."""
        plan = manifest["plan"]
        same_mesh = all(plan[axis] == getattr(self.settings, axis) for axis in ("pp", "dp", "cp", "tp"))
        same_optimizer = plan["optimizer"] == self.settings.optimizer
        if not same_optimizer and dist.get_rank() == 0:
            print(f"{saved} has states of {plan['optimizer']}: {self.settings.optimizer}'s start anew", flush=True)
        self._state.load(saved, same_mesh and self.seed == manifest["seed"], same_optimizer)

    def prepare_saves(self, folder: Path) -> None:
        """Have SIGTERM end the run after a step. Raises ValueError where DIR has checkpoints of another run."""
        folder.mkdir(parents=True, exist_ok=True)  # now, if it cannot be made
        if folder.resolve() != self._init:  # there the latest whole one was taken: what is later is damaged
            refuse_later(folder, self.steps)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stop", True))

    def save(self, folder: Path, keep: int | None = None) -> None:
        """Write DIR/step-N, which any plan can resume, and keep the latest `keep` (None: all); every rank calls.

        Raises FloatingPointError where a trained parameter is not finite.
        """
        if self._saved == (folder.resolve(), self.steps):
            return
        trained = [(self.names.whole(n), local_part(p.detach())) for n, p in self.parameters.items() if p.requires_grad]
        if bad := not_finite(trained):
            raise FloatingPointError(f"after {self.steps} steps {bad[0]} is not finite: nothing was saved to {folder}")
        manifest = {"step": self.steps, "samples": self.samples, "seed": self.seed, "plan": asdict(self.settings)}
        write_folder(folder, manifest, self._state.save, keep)
        self._saved = folder.resolve(), self.steps

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = {self.names.original(name): full(t) for name, t in tensors.items()}
        if self._spread:
            shared = {name: t.cpu() for name, t in whole.items() if name in self._spread}
            stages = from_each_rank(shared, self.mesh.group("pp"))
            others = {name: t for stage in stages for name, t in stage.items() if self._spread[name]}
            whole |= {name: t.to(self.mesh.device) for name, t in others.items() if name not in whole}
        return self.names.join(whole)

    def _spread_parts(self) -> dict[str, bool]:
        """Parts of parameters of which several stages have some → whether this stage has some of the same parameter."""
        if not self.names.parts:
            return {}
        here = {self.names.whole(name) for name in self.parameters}
        stages = from_each_rank(here, self.mesh.group("pp"))
        spread = {name for name in self.names.wholes if sum(name in stage for stage in stages) > 1}
        return {part: fused in here for part, (fused, *_) in self.names.parts.items() if fused in spread}

    def _check_sizes(self, batch: Batch) -> None:
        planned = self.settings
        forward = inspect.signature(self.models[0].forward).parameters.values()
        taken = [p.name for p in forward if p.kind is p.KEYWORD_ONLY]
        if taken and batch.keys() != set(taken):
            raise ValueError(f"the batch has {', '.join(batch)}, but this program takes {', '.join(taken)}")
        samples, length = planned.global_batch // planned.dp, planned.tokens
        lengths = [x.shape[1] for x in batch.values() if x.dim() == 2 and not x.is_floating_point()]
        other_length = planned.vocabulary is not None and bool(lengths) and length not in lengths
        other_length |= any(batch[name].shape[dim] != length for name, dim, _ in planned.padding)
        if other_length or any(x.shape[:1] != (samples,) for x in batch.values()):
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in batch.items())
            asked = f"{samples} samples (global_batch={planned.global_batch} / dp={planned.dp}) of {length} tokens"
            raise ValueError(f"the batch is {shapes}; this program was planned for {asked}: plan again for others")

    def _count(self, batch: Batch) -> None:
        """Give the model what the loss is divided by: `_count`, `_count_2`, … of the whole global batch."""
        if self._count_targets is None:
            return
        wanted = inspect.signature(self._count_targets).parameters
        counts = self._count_targets(**{name: batch[name] for name in wanted})
        for i, count in enumerate(counts if isinstance(counts, tuple) else (counts,), 1):
            if self.mesh.size("dp") > 1:
                total = count.double()  # a sum of half-precision masks would be rounded at every rank
                dist.all_reduce(total, group=self.mesh.group("dp"))
                count = total.to(count.dtype)
            for model in self.models:
                setattr(model, f"_count_{i}" if i > 1 else "_count", count)

    def _totals(self, loss: Tensor, batch: Batch) -> StepResult:
        """Loss, gradient norm and whether to stop, the same on every rank: one all-reduce, one wait for the device.

        IndexError where an id or a target is outside its table.
        """
        owned = (p for name, p in self.parameters.items() if name not in self.tied.aliases)
        loss = loss.double() / self.mesh.size("tp")
        stop = torch.full_like(loss, float(self._stop))
        totals = torch.stack([loss, square_sum(owned, self.mesh), take_noticed(loss), stop])
        if self.settings.world_size > 1:
            dist.all_reduce(totals)
        loss_sum, squares, outside, stopping = totals.tolist()
        if outside:
            raise outside_error(self.steps, batch)
        scale = self.loss_scale.scale
        norm = math.sqrt(squares) / scale
        return StepResult(loss_sum / scale, norm, scale, self.loss_scale.overflows(norm), stopping > 0)


def _use_cores() -> None:
    """This process's share of the node's cores, for an optimizer on the CPU: torchrun gives each process one thread."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
