"""Which dtype is computed, stored and reduced, fp64 throughout, and the dynamic loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .mesh import from_each_rank
from .settings import Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_LARGEST = 2.0**127  # in fp32, which scaled losses have
_SHOWN = 5
Named = tuple[str, Tensor]  # parts of one tensor may each have its name


def compute_dtype(settings: Settings) -> torch.dtype:
    """The dtype of parameters in forward and of activations."""
    return DTYPES[settings.precision]


def storage_dtype(settings: Settings) -> torch.dtype:
    """The dtype of parameters and optimizer states: fp32 masters under half precision."""
    return torch.float32 if settings.half else DTYPES[settings.precision]


def reduction_dtype(settings: Settings) -> torch.dtype:
    """The dtype in which the replicas' gradients are summed, and whole ones accumulated over micro-batches."""
    return DTYPES[settings.reduce_dtype] if settings.reduce_dtype else storage_dtype(settings)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In float64, numbers that name no dtype (`torch.full((8,), 0.3)`) are float64 too; else they are what they are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class raise_float32(TorchFunctionMode):
    """Within it, the author's literal float32 (`.float()`, `.to(torch.float32)`, `dtype=torch.float32`) gives float64,
    and so do numbers that name no dtype: a float64 run of a model is float64 throughout.

        with raise_float32():
            loss = model.double()(**batch)

    Calls inside backward hooks and recomputed forwards count too: keep `backward()` within the block.
    """

    def __enter__(self) -> Self:
        self._default = default_dtype(torch.float64)
        self._default.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._default.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_raised, args), **{key: _raised(value) for key, value in (kwargs or {}).items()})


def _raised(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class LossScale:
    """The factor that keeps small fp16 gradients from becoming zero, as torch.amp.GradScaler: `initial` at first, half
    of it after a step whose gradients overflow, which is skipped, twice as much after `interval` clean ones in a row.

    A step overflows where the gradient norm of the whole model is not finite. All ranks have that number, of one
    all-reduce over the world, so they decide alike. `patience` skipped steps in a row, or a scale below 1, end the run.
    Disabled (for precisions that need none), it is 1 and skips nothing.
    """

    def __init__(
        self, initial: float = 65536.0, interval: int = 2000, patience: int = 20, enabled: bool = True
    ) -> None:
        if not 1 <= initial <= _LARGEST or interval < 1 or patience < 1:
            raise ValueError(f"loss scale {initial:g}, interval {interval}, patience {patience}: use 1 or more")
        self.scale = initial if enabled else 1.0
        self.clean = 0  # steps since the scale last changed
        self.skipped = 0  # steps in a row
        self.enabled, self.interval, self.patience = enabled, interval, patience

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: in fp32 at least, for 65,536 is too large for fp16."""
        return loss.float() * self.scale if self.enabled else loss

    def overflows(self, norm: float) -> bool:
        """Whether the step that had gradients of this norm, scaled or not, is to be skipped."""
        return self.enabled and not math.isfinite(norm)

    def update(self, overflow: bool) -> None:
        """Count one step."""
        if not self.enabled:
            return
        if overflow:
            self.scale, self.clean, self.skipped = self.scale / 2, 0, self.skipped + 1
            return
        self.clean, self.skipped = self.clean + 1, 0
        if self.clean >= self.interval:  # more, where a run with a longer one is resumed
            self.scale, self.clean = min(2 * self.scale, _LARGEST), 0

    @property
    def hopeless(self) -> bool:
        """Whether there is no use in a smaller scale."""
        return self.enabled and (self.scale < 1 or self.skipped >= self.patience)

    def state(self) -> dict[str, Tensor]:
        """The numbers that a checkpoint keeps."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("scale", "clean", "skipped")}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.scale = float(state["scale"])
        self.clean, self.skipped = int(state["clean"]), int(state["skipped"])


def overflow_error(scale: LossScale, loss: float, gradients: Iterable[Named]) -> OverflowError:
    """The error that ends a run, naming the parameters of all ranks whose gradient is not finite. Every rank calls.

    gradients: this rank's parts, by original name.
    """
    where = "so backward overflows" if math.isfinite(loss) else "so forward overflows"
    return OverflowError(
        f"fp16: {scale.skipped} steps in a row were skipped, and the loss scale has come down to {scale.scale:g}, but "
        f"the gradient of {_shown(not_finite(gradients))} is still not finite. The loss is {loss:g}, {where}: "
        "mask with torch.finfo(x.dtype).min rather than -1e9, compute that part in float32, or train in bf16"
    )


def not_finite_error(step: int, loss: float, norm: float, gradients: Iterable[Named]) -> FloatingPointError:
    """The error of a run whose loss or gradients are not finite, before they change a weight. Every rank calls."""
    names = not_finite(gradients)
    bad = f"the gradient of {_shown(names)} is not finite" if names else "each gradient is finite, their norm is not"
    return FloatingPointError(
        f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; {bad}. No weight was changed by this step: "
        "look at its samples, or go on from the last checkpoint with a smaller --lr or with --clip"
    )


def not_finite(tensors: Iterable[Named]) -> list[str]:
    """Names of all ranks' tensors that are not finite, in the order of the stages. Every rank calls."""
    by_rank = from_each_rank([name for name, x in tensors if not x.isfinite().all()])
    return list(dict.fromkeys(name for names in by_rank for name in names))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
