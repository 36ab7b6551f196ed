"""What an opaque module does, found by running it on real values of a few sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import TraceError
from ..ir.custom import OpaqueCall
from ..ir.graph import B, S
from ..runtime.internals import tree_flatten, tree_unflatten
from ..runtime.opaque import Applied
from .copies import copied
from .refusals import reason_of

_PRIMES = (3, 5, 7, 11, 13)
_BATCH, _DRAWS = 4, 16
Sizes = Mapping[Any, int]


class RefusedError(TraceError):
    """A module that no program can run: nor can the one around it."""


@dataclass(frozen=True)
class Taken:
    """A tensor that the module is called with: a size an expression."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    def draw(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        """Normal numbers of a random scale a row, flags, or zeros and ones as ids."""
        shape = [int(n.subs(dict(sizes))) for n in self.shape]
        if self.dtype.is_complex:
            real = torch.float64 if self.dtype == torch.complex128 else torch.float32
            return torch.view_as_complex(Taken((*self.shape, sympy.Integer(2)), real).draw(sizes, generator))
        if self.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(2, shape, generator=generator, dtype=self.dtype)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        rows = (shape[0], *[1] * (len(shape) - 1)) if shape else ()
        return (x * 10 ** (2 * torch.rand(rows, generator=generator, dtype=torch.float64) - 1)).to(self.dtype)


@dataclass(frozen=True)
class Returned:
    """A tensor that it returns. dims: (ratio, dims of tensors taken), whose product a size is."""

    dims: tuple[tuple[Fraction, tuple[tuple[int, int], ...]], ...]
    dtype: torch.dtype
    requires_grad: bool

    def like(self, tensors: Sequence[Tensor]) -> Tensor:
        """An empty tensor of the sizes that follow from those taken."""
        shape = []
        for ratio, places in self.dims:
            size: Any = ratio.numerator
            for tensor, dim in places:
                size = size * tensors[tensor].shape[dim]
            shape.append(size // ratio.denominator if ratio.denominator != 1 else size)
        return tensors[0].new_empty(shape, dtype=self.dtype)


class Trial:
    """A module with values on the CPU, and a call of it: `leaves` of (args, kwargs) with `Taken` for tensors.

    dtype: of the program. A float64 program is tried in float32, which the author's own casts mean there.
    """

    def __init__(self, path: str, module: nn.Module, leaves: Sequence[Any], form: Any, dtype: torch.dtype) -> None:
        self.path, self.original, self.form, self.dtype = path, module, form, dtype
        own = torch.float32 if dtype == torch.float64 else dtype
        self.leaves = [_of_dtype(leaf, dtype, own) if isinstance(leaf, Taken) else leaf for leaf in leaves]
        self.taken = [leaf for leaf in self.leaves if isinstance(leaf, Taken)]
        self.module = _with_values(module, own)
        self.result: list[Any] = []
        self.result_form: Any = None

    def in_float32(self) -> Trial:
        """The same in float32: half precision rounds differently for every number of rows."""
        leaves = [_of_dtype(x, self.dtype, torch.float32) if isinstance(x, Taken) else x for x in self.leaves]
        return Trial(self.path, self.original, leaves, self.form, torch.float32)

    def run(self, sizes: Sizes, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """(tensors taken, tensors returned) of one call; TraceError where it raises."""
        generator = torch.Generator().manual_seed(seed)
        tensors = [t.draw(sizes, generator) for t in self.taken]
        return tensors, self.call(tensors)

    def call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = self._filled([t.requires_grad_() if t.is_floating_point() else t for t in tensors])
        versions = [t._version for t in tensors]  # no public name counts the writes to a tensor
        try:
            result = self.module(*args, **kwargs)
        except Exception as error:
            raise TraceError(f"{self.what} can neither be traced nor run: {reason_of(error)}") from error
        if versions != [t._version for t in tensors]:
            raise TraceError(f"{self.what} cannot be traced, and it changes in place what it is given")
        self.result, self.result_form = tree_flatten(result)
        return [x for x in self.result if isinstance(x, Tensor)]

    def like_result(self, tensors: Sequence[Tensor]) -> Any:
        """The tensors in the form that the module returns."""
        given = iter(tensors)
        return tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in self.result], self.result_form)

    def as_called(self) -> OpaqueCall:
        empty = [torch.empty(0, device="meta") for _ in self.taken]
        function = self.module.function if isinstance(self.module, Applied) else None
        return OpaqueCall(self.path, self._filled(empty), function=function)

    @property
    def what(self) -> str:
        return f"{self.path} ({type(self.module).__name__})"

    # what runs show

    def returned(self) -> list[Returned]:
        """Each result: its sizes as those of the tensors taken. TraceError where sizes depend on values."""
        symbols = sorted({s for t in self.taken for n in t.shape for s in n.free_symbols}, key=str)
        first = {symbol: _PRIMES[i] for i, symbol in enumerate(symbols)}
        changed = [{**first, symbol: _PRIMES[-1 - i] + 6} for i, symbol in enumerate(symbols)]
        runs = [self.run(sizes) for sizes in [first, *changed]]
        self._check_state()
        if len({tuple(r.dim() for r in results) for _, results in runs}) != 1:
            raise TraceError(f"{self.what} returns different tensors for different values")
        return [
            Returned(
                tuple(self._size(i, d, runs) for d in range(result.dim())),
                self.dtype if self.dtype == torch.float64 and result.dtype == torch.float32 else result.dtype,
                any(results[i].requires_grad for _, results in runs),
            )
            for i, result in enumerate(runs[0][1])
        ]

    def _size(
        self, result: int, dim: int, runs: Sequence[tuple[list[Tensor], list[Tensor]]]
    ) -> tuple[Fraction, tuple[tuple[int, int], ...]]:
        """A size that is the same in all runs, or in a fixed ratio to a size taken or to the product of two."""
        sizes = [results[result].shape[dim] for _, results in runs]
        if len(set(sizes)) == 1:
            return Fraction(sizes[0]), ()
        places = [(t, d) for t, taken in enumerate(self.taken) for d, n in enumerate(taken.shape) if n.free_symbols]
        pairs = list(combinations_with_replacement(places, 2))
        for candidate in [*((place,) for place in places), *pairs]:
            products = [math.prod(tensors[t].shape[d] for t, d in candidate) for tensors, _ in runs]
            ratios = {Fraction(n, product) for n, product in zip(sizes, products, strict=True)}
            if len(ratios) == 1:
                return ratios.pop(), candidate
        raise TraceError(f"{self.what} cannot be traced, and the sizes of what it returns depend on values")

    def _check_state(self) -> None:
        """TraceError where a call draws random numbers or changes a buffer."""
        before = torch.random.get_rng_state()
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        sizes = {symbol: _PRIMES[0] for t in self.taken for n in t.shape for symbol in n.free_symbols}
        for seed in range(_DRAWS):  # what it does may depend on values
            self.run(sizes, seed)
        if not torch.equal(before, torch.random.get_rng_state()):
            raise RefusedError(
                f"{self.what} cannot be traced, and it draws random numbers, which would differ on each GPU: move its "
                "dropout out of it"
            )
        for name, buffer in self.module.named_buffers():
            if not torch.equal(buffers[name], buffer):
                raise RefusedError(f"{self.what} cannot be traced, and it changes its buffer {name}")

    def treats_samples_alone(self, shapes: Sequence[tuple[sympy.Expr, ...]], read: Collection[int]) -> bool:
        """Whether two halves of a batch give what the whole gives, in each of some runs on values of many scales.

        shapes: of the tensors taken, in b and s. read: which results are; the first tells how the others lie.
        """
        batched = [bool(shape) and B in shape[0].free_symbols for shape in shapes]
        inner = any(B in n.free_symbols for shape in shapes for n in shape[1:])
        if inner or not any(batched):
            return False
        taken = [Taken(shape, t.dtype) for shape, t in zip(shapes, self.taken, strict=True)]
        for seed in range(_DRAWS):
            generator = torch.Generator().manual_seed(seed)
            whole = [t.draw({B: _BATCH, S: 6}, generator) for t in taken]
            halves = list(
                zip(*(x.chunk(2) if cut else (x, x) for x, cut in zip(whole, batched, strict=True)), strict=True)
            )
            results = self.call(whole)
            parts = [self.call(half) for half in halves]
            for place, (result, *pieces) in enumerate(zip(results, *parts, strict=True)):
                if place and place not in read:
                    continue
                if not result.dim() or result.shape[0] != sum(p.shape[0] for p in pieces):
                    return False
                if not torch.allclose(torch.cat(pieces), result, rtol=1e-4, atol=1e-6, equal_nan=True):
                    return False
        return True

    def flops_a_row(self, shapes: Sequence[tuple[sympy.Expr, ...]]) -> int:
        """Of forward, for each row (all dims but the last) of the first tensor taken."""
        taken = [Taken(shape, t.dtype) for shape, t in zip(shapes, self.taken, strict=True)]
        generator = torch.Generator().manual_seed(0)
        args, kwargs = self._filled([t.draw({B: _BATCH, S: 6}, generator) for t in taken])
        with FlopCounterMode(display=False) as counter:
            self.module(*args, **kwargs)
        rows = int(sympy.Mul(*shapes[0][:-1]).subs({B: _BATCH, S: 6})) if shapes else 1
        return int(counter.get_total_flops()) // rows

    def _filled(self, tensors: Sequence[Tensor]) -> Any:
        given = iter(tensors)
        return tree_unflatten([next(given) if isinstance(x, Taken) else x for x in self.leaves], self.form)


def _of_dtype(taken: Taken, given: torch.dtype, wanted: torch.dtype) -> Taken:
    return Taken(taken.shape, wanted) if taken.dtype == given else taken


def _with_values(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU; what is on meta gets small random values."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        target = dtype if tensor.is_floating_point() and isinstance(tensor, nn.Parameter) else tensor.dtype
        value = tensor.detach().to("cpu", target) if not tensor.is_meta else _drawn(tensor, target, generator)
        memo[id(tensor)] = (
            nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.clone()
        )
    return copied(module, memo).train()


def _drawn(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=dtype)
    return (0.1 * torch.randn(tensor.shape, generator=generator)).to(dtype)
