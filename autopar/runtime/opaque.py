"""Modules of the user's own that are kept whole: their Python runs as it is, on parameters of the program."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .internals import tree_flatten, tree_leaves, tree_unflatten
from .mesh import current
from .optimizer import reached
from .parameters import local
from .precision import raise_float32

FILE = "opaque.pt"


@dataclass(frozen=True)
class OpaqueModule:
    """A module without values, and what it is called with: args and kwargs, any tensor where one is given."""

    module: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]

    def __call__(self, holder: nn.Module, *tensors: Tensor) -> Any:
        """The tensors that the module returns, given those it takes; its parameters are those of `holder`."""
        names = {name for name, _ in _named(self.module)}
        values = {name: local(value) for name, value in _named(holder) if name in names}
        trained = {name: value for name, value in values.items() if value.requires_grad}
        marked = {name: _Mark.apply(value, holder, name) for name, value in trained.items()}  # type: ignore[no-untyped-call]
        leaves, form = tree_flatten(self.inputs)
        inputs = iter(tensors)
        args, kwargs = tree_unflatten([next(inputs) if isinstance(x, Tensor) else x for x in leaves], form)
        self.module.train(holder.training)
        with raise_float32() if current().settings.precision == "fp64" else nullcontext():
            result = torch.func.functional_call(self.module, values | marked, args, kwargs)
        returned = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        returned = list(_ReadAll.apply(len(returned), *returned, *trained.values()))  # type: ignore[no-untyped-call]
        return returned[0] if len(returned) == 1 else tuple(returned)


class Applied(nn.Module):
    """A custom torch.autograd.Function as a module without parameters."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def _module(kept: Any) -> nn.Module:
    """A module, or the class of a Function, as it was saved."""
    return kept if isinstance(kept, nn.Module) else Applied(kept)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones under each name."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


class OpaqueModules:
    """The opaque modules of a program, by name: those of the file beside it, read when first wanted.

    The file holds classes, so that reading it runs code: it must be the one that was written with the program, whose
    `sha256` the program has.
    """

    def __init__(self, program: str, sha256: str) -> None:
        self.file, self._sha256 = Path(program).parent / FILE, sha256

    @cached_property
    def modules(self) -> Mapping[str, OpaqueModule]:
        written = self.file.read_bytes()
        if hashlib.sha256(written).hexdigest() != self._sha256:
            raise ValueError(f"{self.file} is not the file that was written with model.py: save the program again")
        try:
            saved = torch.load(io.BytesIO(written), map_location="cpu", weights_only=False)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{self.file} needs the classes of the original model ({error}): put their source on PYTHONPATH"
            ) from error
        return {name: OpaqueModule(_module(kept), inputs) for name, (kept, inputs) in saved.items()}

    def __getitem__(self, name: str) -> OpaqueModule:
        return self.modules[name]


class _ReadAll(torch.autograd.Function):
    """The results as they are; a parameter that this call left out has a gradient of zero.

    Which parameters a module reads may depend on values, so on the rank; a reduction of gradients needs all.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.like = [(p.shape, p.dtype, p.device) for p in tensors[count:]]
        results = tuple(x.view_as(x) for x in tensors[:count])
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return None, *gradients, *zeros


class _Mark(torch.autograd.Function):
    """A parameter as it is; its gradient, where it has one, is noted."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, holder: nn.Module, name: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.key = holder, name
        return p.view_as(p)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradients[0] is not None:
            reached.add(ctx.key)
        return gradients[0], None, None
