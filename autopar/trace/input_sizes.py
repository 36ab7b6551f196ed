"""How the sizes of a model's inputs go together: which dims are the batch, the sequence, or in a fixed ratio to it.

The first guess is read from the example. Where the model fixes a size there, other relations and other lengths are
tried, those nearest to the first guess first, by running the model on meta tensors of these sizes, which costs little.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim

from ..ir.graph import B, S
from .copies import copied
from .repeats import NotRepeatedError
from .source import place_of_error

Dims = Mapping[str, Mapping[int, sympy.Expr]]  # input → dim → its size
LONGEST = 1 << 20
_MOST_TIMES = 64  # the sequence may be of another dim, or another dim of it
_MOST_CHANGES, _MOST_TRIED = 2, 160


@dataclass(frozen=True)
class InputSizes:
    """The sizes of the example inputs in `b` and `s`, and the numbers at which the model is traced.

    inputs: the user's, of which tensors are used by shape and dtype alone; floating ones are traced in `dtype`.
    dims: input → dim → its size; a dim that is not there has the size of the user's example.
    limits: why not all the sizes of the first guess.
    """

    inputs: Mapping[str, Any]
    dtype: torch.dtype
    dims: Dims
    values: Mapping[sympy.Symbol, int]
    limits: str = ""

    def at(self, values: Mapping[sympy.Symbol, int]) -> InputSizes:
        """The same at other numbers."""
        return replace(self, values={**self.values, **values})

    def fixed_at(self, values: Mapping[sympy.Symbol, int]) -> InputSizes:
        """The same with numbers in place of symbols."""
        dims = {name: {d: size.subs(values) for d, size in of.items()} for name, of in self.dims.items()}
        return replace(self.at(values), dims=dims)

    @property
    def has_sequence(self) -> bool:
        return any(S in size.free_symbols for dims in self.dims.values() for size in dims.values())

    def example(self) -> dict[str, Any]:
        """The inputs as meta tensors of these sizes; what is no tensor is as it was."""
        example = dict(self.inputs)
        for name, dims in self.dims.items():
            given = self.inputs[name]
            shape = [int(dims[d].subs(self.values)) if d in dims else n for d, n in enumerate(given.shape)]
            dtype = self.dtype if given.is_floating_point() else given.dtype
            example[name] = torch.empty(shape, dtype=dtype, device="meta")
        return example

    def symbolic(self) -> dict[str, Any]:
        """The dynamic_shapes of torch.export: each size a multiple of b, or of s or the largest part of it in all."""
        part = math.lcm(*(int(sympy.denom(size.coeff(S))) for dims in self.dims.values() for size in dims.values()))
        roots = {B: Dim("b", min=1), S: Dim("s", min=-(-2 // part), max=LONGEST // part)}

        def dim(size: sympy.Expr) -> Any:
            (symbol,) = size.free_symbols
            times = int(size.coeff(symbol) * (part if symbol == S else 1))
            return times * roots[symbol] if times > 1 else roots[symbol]

        named = {name: {d: dim(n) for d, n in of.items() if n.free_symbols} for name, of in self.dims.items()}
        return {name: named.get(name) for name in self.inputs}

    def failure(self, model: nn.Module) -> str | None:
        """Where forward fails at these sizes, on meta; None where it runs."""
        model = copied(model)  # forward may keep what it makes, such as tables of a length
        try:
            model(**self.example())
        except NotRepeatedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the user's forward raises
            return place_of_error(error, model)
        return None


def sequence_length(inputs: Mapping[str, Any]) -> int:
    """The tokens of the example: the length of most integer inputs of two dims, of equally many the largest; or 0."""
    ids = [v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == 2 and not v.is_floating_point()]
    counts = Counter(int(v.shape[1]) for v in ids)
    return max(counts, key=lambda length: (counts[length], length), default=0)


def first_guess(inputs: Mapping[str, Any], dtype: torch.dtype) -> InputSizes:
    """Dim 0 of every tensor is the batch, and dim 1 the sequence where it is as long."""
    length = sequence_length(inputs)
    dims: dict[str, dict[int, sympy.Expr]] = {}
    for name, tensor in inputs.items():
        if isinstance(tensor, Tensor):
            dims[name] = {0: B} if tensor.dim() else {}
            if tensor.dim() > 1 and tensor.shape[1] == length > 1:
                dims[name][1] = S
    batch = next(size for size in (4, 3, 5) if size != length)  # no size of the user's, which forward may have fixed
    return InputSizes(inputs, dtype, dims, {B: batch, S: length})


def other_sizes(first: InputSizes, model: nn.Module) -> Iterator[InputSizes]:
    """Relations between the inputs' sizes with which the model runs at another length than the example's."""
    for sizes in islice(_nearest(first), _MOST_TRIED):
        if sizes.failure(model) is None:
            yield sizes


def other_lengths(length: int) -> list[int]:
    """One less; less by a share of the length, which keeps the divisors that a model may want; twice as many."""
    shares = [length - length // p for p in sympy.primefactors(length)]
    return list(dict.fromkeys(n for n in (length - 1, *shares, 2 * length) if n > 1))


def _nearest(first: InputSizes) -> Iterator[InputSizes]:
    """The first guess at other lengths, then with the sequence in one tensor more or fewer, then in two."""
    groups = list(_groups(first))
    for changes in range(_MOST_CHANGES + 1):
        for changed in combinations(groups, changes):
            dims = {name: dict(of) for name, of in first.dims.items()}
            for name, group in changed:
                for d, size in group.items():
                    if dims[name].pop(d, None) is None:
                        dims[name][d] = size
            sizes = replace(first, dims=dims)
            if sizes.has_sequence:
                yield from (sizes.at({S: n}) for n in other_lengths(first.values[S]))


def _groups(first: InputSizes) -> Iterator[tuple[str, dict[int, sympy.Expr]]]:
    """The dims of a tensor that may go with the sequence: all of one size, and where these are several each of them."""
    for name in first.dims:
        shape = first.inputs[name].shape
        for n in dict.fromkeys(shape[1:]):
            small, large = sorted((n, first.values[S]))
            if small and large % small == 0 and large // small <= _MOST_TIMES:
                group = {d: sympy.Rational(n, first.values[S]) * S for d, m in enumerate(shape) if d and m == n}
                yield name, group
                yield from ((name, {d: size}) for d, size in group.items() if len(group) > 1)
