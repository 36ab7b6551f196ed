"""What "computes the same" means: the contract's metric, and runs of the original in float64 without dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..runtime.internals import tree_leaves
from ..runtime.precision import raise_float32
from .same_draws import same_draws

RMS_FLOOR = 1e-3
TOLERANCE = 1e-9

# Where the probability is among the arguments.
_DROPOUT: dict[Callable[..., Any], tuple[int, str]] = {
    F.dropout: (1, "p"),
    torch.dropout: (1, "p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}


@dataclass(frozen=True)
class Parity:
    """The largest errors over all ranks, by the contract's metric (DESIGN, top), and where they are."""

    loss: float
    gradients: float
    norm: float
    weights: float
    worst_gradient: str
    worst_weight: str
    steps: int
    processes: int
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether every error is within the contract's 1e-9; NaN is not."""
        return all(error <= TOLERANCE for error in (self.loss, self.gradients, self.norm, self.weights))

    def __str__(self) -> str:
        verdict = "computes what the model computes" if self.holds else "DIFFERS from the model"
        return (
            f"the program on {self.processes} processes {verdict}: after {self.steps} steps in fp64 the largest "
            f"difference to one process is {self.loss:.1e} (loss), {self.gradients:.1e} (gradients, "
            f"{self.worst_gradient}), {self.norm:.1e} (total norm), {self.weights:.1e} (weights, {self.worst_weight})"
            f"; bound {TOLERANCE:.0e}{f' · {self.note}' if self.note else ''}"
        )


def relative_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """max|a − b| / max(max|b|, 1e-3 · RMS of all of `expected`), for each name, computed in float64.

    The RMS is that of one quantity over the whole model, so pass one quantity at a time (all gradients, or
    all weights): it keeps a tensor whose true value is zero (a key bias's gradient) from dividing by noise.
    NaN gives infinity. Raises ValueError where names or shapes differ.
    """
    if actual.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
        raise ValueError(f"the two sides name different tensors: missing {missing}, unexpected {extra}")
    floor = RMS_FLOOR * _root_mean_square(expected.values())
    return {name: _relative_error(name, actual[name], expected[name], floor) for name in expected}


def part_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """`relative_errors` of some of the model's tensors, as a pipeline stage has them; the RMS is over all of them."""
    errors = relative_errors({**expected, **actual}, expected)
    return {name: errors[name] for name in actual}


def relative_error(actual: float, expected: float) -> float:
    """|a − b| / |b| of two numbers; NaN gives infinity."""
    return _infinite_if_nan(abs(actual - expected) / max(abs(expected), 1e-300))


def _infinite_if_nan(error: float) -> float:
    return math.inf if math.isnan(error) else error  # no comparison is true of NaN: `max` would pass over it


def _relative_error(name: str, actual: Tensor, expected: Tensor, floor: float) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if expected.numel() == 0:
        return 0.0
    a, b = _double(actual), _double(expected)
    difference, scale = (a - b).abs().max().item(), max(b.abs().max().item(), floor)
    if scale > 0:
        return _infinite_if_nan(difference / scale)
    return 0.0 if difference == 0 else math.inf


def _root_mean_square(tensors: Iterable[Tensor]) -> float:
    squares, count = 0.0, 0
    for tensor in tensors:
        squares += _double(tensor).square().sum().item()
        count += tensor.numel()
    return float((squares / count) ** 0.5) if count else 0.0


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


class no_dropout(TorchFunctionMode):  # noqa: N801 - as above
    """Within it, every dropout has probability 0, that of attention included."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUT:
            place, name = _DROPOUT[func]
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs |= {name: 0.0} if len(args) <= place else {}
        return func(*args, **kwargs)


def train_original(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    constants: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    draws: bool = False,
) -> dict[str, Any]:
    """A step for each batch, without dropout: losses, norms, first gradients; weights persistent buffers."""
    result: dict[str, Any] = {"losses": [], "norms": []}
    for batch in batches:
        optimizer.zero_grad()
        with raise_float32(), no_dropout(), same_draws() if draws else nullcontext():
            loss = loss_of(model(**batch, **constants))
            loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result["losses"].append(loss.item())
        result["norms"].append(float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()))
        result.setdefault("gradients", gradients)
        optimizer.step()
    saved = model.state_dict()
    buffers = {n: b.clone() for n, b in model.named_buffers(remove_duplicate=False) if n in saved}
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()} | buffers
    return result


def loss_of(outputs: Any) -> Tensor:
    """The loss among what a traced forward returns: called "loss", or the first 0-dim float (`trace.signature`)."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        outputs = outputs["loss"]
    leaves = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return next(leaf for leaf in leaves if leaf.shape == () and leaf.is_floating_point())
