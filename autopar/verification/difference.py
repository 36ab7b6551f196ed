"""Two runs of a program, on samples and on the same samples with pads: whether they differ, and where first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import torch
from torch import Tensor

from ..ir.graph import Program, info, op_name
from .interpreter import Run, Step

_RESULTS, _VALUES = 1e-9, 1e-11  # relative errors, of what a run gives and of what an op does
_ROUNDING = 1e-12  # of the largest gradient, what a gradient that is 0 may be
_FILLS = ("masked_fill", "where", "full", "full_like", "new_full", "scalar_tensor", "mul", "add", "sub", "to")


@dataclass(frozen=True)
class Outcome:
    """What a run gives, with all that its ops have made. buffers: those that forward has updated."""

    run: Run
    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @staticmethod
    def of(
        program: Program, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Outcome:
        """Run a program on `tensors` in one dtype, on copies of those that it updates. StepError where an op raises."""
        copies = {
            name: tensor.detach().to(
                dtype if tensor.is_floating_point() else tensor.dtype, copy=name in program.mutated
            )
            for name, tensor in tensors.items()
        }
        copies |= {alias: copies[name] for alias, name in program.tied.items() if name in copies}
        trained = {n for n, t in program.parameters.items() if t.requires_grad and n in copies} - set(program.tied)
        leaves = {name: copies[name].detach().requires_grad_() for name in sorted(trained)}
        copies |= leaves | {alias: leaves[name] for alias, name in program.tied.items() if name in leaves}
        run = Run(program, copies, inputs, dtype, kept=True)
        loss = run.loss()
        gradients = _gradients(loss, list(leaves.values()))
        buffers = {name: copies[name].detach() for name in program.mutated if name in copies}
        return Outcome(run, loss.detach(), dict(zip(leaves, gradients, strict=True)), buffers)

    @property
    def results(self) -> dict[str, Tensor]:
        return {"the loss": self.loss, **self.gradients, **self.buffers}

    @property
    def is_finite(self) -> bool:
        return all(bool(result.isfinite().all()) for result in self.results.values())

    def value_gradients(self) -> dict[int, Tensor]:
        """The gradient of each step's value that has one."""
        assert self.run.last is not None
        steps = self.run.steps
        places = [i for i, s in enumerate(steps) if isinstance(s.value, Tensor) and s.value.requires_grad]
        return dict(zip(places, _gradients(steps[self.run.last].value, [steps[i].value for i in places]), strict=True))


def _gradients(loss: Tensor, of: Sequence[Tensor]) -> Sequence[Tensor]:
    if not of or not loss.requires_grad:
        return [torch.zeros_like(x) for x in of]
    return torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True, materialize_grads=True)


def difference(plain: Outcome, longer: Outcome) -> str:
    """What pads change, and the first op that lets them; "" where loss and gradients are the same and no value is nan.

    Values are compared at the real tokens. An op is named whose own operands agree there, so that what differs on its
    way to the loss, but not in it, is none.
    """
    if nan := _first_nan(plain, longer):
        return nan
    largest = max((float(g.abs().max()) for g in plain.gradients.values() if g.numel()), default=0.0)
    changed = [
        name
        for name, result in plain.results.items()
        if not _is_close(result, longer.results[name], _RESULTS, largest * _ROUNDING)
    ]
    if not changed:
        return ""
    changed.sort(key=lambda name: bool(longer.results[name].isfinite().all()))  # what has no number says more
    if changed[0] == "the loss" and (step := _first_value(plain.run, longer.run)):
        return f"pads change the loss: {step.place} is the first op with other values at the real tokens"
    step, what = _first_gradient(plain, longer, changed[0]), f"pads change the gradient of {changed[0]}"
    return f"{what}: {step.place} is the first op of backward that gives another, or none" if step else what


def _first_nan(plain: Outcome, longer: Outcome) -> str:
    """The first op that is nan with pads alone, or the one that made the infinite number of which it is."""
    steps = longer.run.steps
    place = next((i for i, s in enumerate(steps) if _is_nan(s.value) and not _is_nan(plain.run.steps[i].value)), None)
    if place is None:
        return ""
    origin = place
    while infinite := [i for i in steps[origin].operands if _is_infinite(steps[i]) > _is_infinite(plain.run.steps[i])]:
        origin = infinite[0]
    if origin != place and op_name(steps[origin].node) not in _FILLS:
        return (
            f"pads have no number: {steps[origin].place} is infinite there, and {op_name(steps[place].node)} then nan"
        )
    return f"pads have no number: {steps[place].place} is nan there"


def _first_value(plain: Run, longer: Run) -> Step | None:
    """The first op with another value at the real tokens, of those by which the loss is another; one of the user's."""
    assert plain.last is not None
    changed: list[Step] = []
    followed = {plain.last}
    for i in range(plain.last, -1, -1):
        if i in followed and not _same_at_tokens(plain.steps[i].value, longer.steps[i].value):
            changed.insert(0, plain.steps[i])
            followed.update(plain.steps[i].operands)
    return next((step for step in changed if info(step.node).source), next(iter(changed), None))


def _first_gradient(plain: Outcome, longer: Outcome, changed: str) -> Step | None:
    """The op, in the order of backward, that gives one of its operands another gradient, or one that is not finite."""
    steps, before, after = plain.run.steps, plain.value_gradients(), longer.value_gradients()
    finite = bool(longer.results[changed].isfinite().all())
    for i in sorted(before, reverse=True):
        if not (_same_at_tokens(before[i], after[i]) if finite else after[i].isfinite().all()):
            return next((step for step in steps[i + 1 :] if i in step.operands), steps[i])
    names = {name for name in plain.run.program.parameters if plain.run.program.tied.get(name, name) == changed}
    return next((step for step in steps if names & set(step.reads)), None)


def _is_nan(value: object) -> bool:
    return isinstance(value, Tensor) and bool(value.isnan().any())


def _is_infinite(step: Step) -> bool:
    return isinstance(step.value, Tensor) and bool(step.value.isinf().any())


def _same_at_tokens(plain: object, longer: object) -> bool:
    """Whether a value with pads begins with the one without, in each dim that is longer: b·s is b such parts."""
    if not isinstance(plain, Tensor) or not isinstance(longer, Tensor):
        return True
    parts = [[1] if m == n else _divisors(gcd(m, n)) for m, n in zip(plain.shape, longer.shape, strict=True)]
    return any(_is_close(plain, _beginning(longer, plain.shape, outer), _VALUES, 1e-14) for outer in product(*parts))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 4096) + 1) if number % n == 0]


def _beginning(x: Tensor, sizes: Sequence[int], outer: Sequence[int]) -> Tensor:
    """Of each dim its first `size` elements, or as many of each of its `outer` parts."""
    for dim, (size, parts) in enumerate(zip(sizes, outer, strict=True)):
        if x.shape[dim] != size:
            x = x.unflatten(dim, (parts, -1)).narrow(dim + 1, 0, size // parts).flatten(dim, dim + 1)
    return x


def _is_close(a: Tensor, b: Tensor, relative: float, least: float) -> bool:
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a.detach(), b.detach()))
    if not a.is_floating_point() or not a.numel():
        return torch.equal(a, b)
    largest = float(a.abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(a, b, rtol=0, atol=relative * largest + least, equal_nan=True)
