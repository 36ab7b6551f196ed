"""What "computes the same" means: the contract's metric, and float64 runs of models that cast to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

RMS_FLOOR = 1e-3


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """max|a − b| / max(max|b|, 1e-3 · RMS of all of `expected`), for each name, computed in float64.

    The RMS is that of one quantity over the whole model, so pass one quantity at a time (all gradients, or
    all weights): it keeps a tensor whose true value is zero (a key bias's gradient) from dividing by noise.
    NaN anywhere gives NaN or infinity. Raises ValueError where names or shapes differ.
    """
    if actual.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        raise ValueError(f"the two sides name different tensors: missing {missing}, unexpected {extra}")
    floor = RMS_FLOOR * _root_mean_square(expected.values())
    return {name: _relative_error(name, actual[name], expected[name], floor) for name in expected}


def _relative_error(name: str, actual: Tensor, expected: Tensor, floor: float) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    a, b = _double(actual), _double(expected)
    difference, scale = (a - b).abs().max().item(), max(b.abs().max().item(), floor)
    if scale > 0:
        return difference / scale
    return 0.0 if difference == 0 else float("inf")


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += _double(tensor).square().sum().item()
        count += tensor.numel()
    return float((squares / count) ** 0.5) if count else 0.0


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


class raise_float32(TorchFunctionMode):  # noqa: N801 - a context manager, named as torch names its own
    """Within it, the author's literal float32 casts (`.float()`, `.to(torch.float32)`, `dtype=torch.float32`)
    give float64, so that a float64 run of a model is float64 throughout:

        with raise_float32():
            loss = model.double()(**batch)

    Calls inside backward hooks and recomputed forwards count too: keep `backward()` within the block.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        raised = {key: _raised(value) for key, value in (kwargs or {}).items()}
        return func(*map(_raised, args), **raised)


def _raised(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
