"""Where a program's weights come from: the model's own values, or its initialisation recorded as data.

A meta model has no values. What its author wrote to initialise it is recorded as in-place ops per parameter
("normal_", 0.0, 0.02), to be drawn with a seed per parameter: the same values under every plan. An op on a part of
a parameter (the row of a padding token) is recorded with the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TraceError
from ..runtime.internals import TorchDispatchMode
from .copies import copied
from .huggingface import is_huggingface

Recipe = list[list[Any]]
_RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_")


@dataclass(frozen=True)
class Weights:
    """values: tensors by original name. recipes: recorded initialisation of the parameters without values."""

    values: Mapping[str, Tensor] = field(default_factory=dict)
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # parameters with neither: the program needs --init


def weights_of(model: nn.Module, factory: Callable[[], nn.Module] | None = None) -> Weights:
    """Values of a model with real weights; of a meta model its recorded initialisation and real buffers."""
    values = {name: tensor for name, tensor in tensors_of(model).items() if not tensor.is_meta}
    meta = [name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.is_meta]
    hollow = [name for name, tensor in model.named_buffers() if tensor.is_meta]
    if not meta and not hollow:
        return Weights(values)
    recipes: dict[str, Recipe] = {}
    if factory is not None:
        recipes, copied = _record(factory)
        tables = [name for name, tensor in _plain(model) if tensor.is_meta]
        values |= copied | _factory_buffers(factory, [*hollow, *tables])
    elif is_huggingface(model):
        recipes, copied = _record_huggingface(model)
        values |= copied | _huggingface_buffers(model, hollow)
    if lost := [name for name in hollow if name not in values]:
        raise TraceError(
            f"buffers {', '.join(lost[:4])} are on meta and their values are lost: pass the function that builds the "
            "model instead of the model, parallelize(build, …), or build it on the CPU"
        )
    missing = tuple(name for name in meta if name not in recipes and name not in values)
    return Weights(values, {name: recipe for name, recipe in recipes.items() if name in meta}, missing)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name, and the tensors that are plain attributes of modules (Meta's tables)."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in (*named, *_plain(model))}


def _plain(model: nn.Module) -> list[tuple[str, Tensor]]:
    modules = model.named_modules(remove_duplicate=False)
    return [(f"{p}.{n}".lstrip("."), t) for p, m in modules for n, t in vars(m).items() if isinstance(t, Tensor)]


def build_on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return factory()


# Factories, and ops that a parameter's values are computed by, as the in-place ops that `draw` can repeat.
_FACTORIES: dict[str, Callable[..., Recipe]] = {
    "ones": lambda *a: [["fill_", 1.0]],
    "zeros": lambda *a: [["zero_"]],
    "full": lambda size, value, *a: [["fill_", value]],
    "randn": lambda *a: [["normal_"]],
    "rand": lambda *a: [["uniform_"]],
}
_SCALINGS = {"mul": "mul_", "div": "div_", "add": "add_", "sub": "sub_", "clamp": "clamp_"}


class _Recorder(TorchDispatchMode):
    """What fills each storage: a factory, in-place ops in order, and arithmetic with numbers.

    `kept` holds the tensors seen: a freed storage's address would be another's.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipes: dict[int, Recipe] = {}
        self.broken: dict[int, str] = {}
        self.values: dict[int, Tensor] = {}  # copied from tensors that are not on meta (tables of sines)
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.kept.append(result)
            self._note(function, result, args, kwargs or {})
        return result

    def _note(self, function: Any, result: Tensor, args: Any, kwargs: Any) -> None:
        name = function._schema.name.removeprefix("aten::")
        plain = [*args[1:], *(v for k, v in kwargs.items() if k in ("mean", "std", "from", "to", "min", "max"))]
        if name in _FACTORIES:
            self.recipes[_storage(result)] = _FACTORIES[name](*args)
        elif name.endswith("_") and args and isinstance(args[0], Tensor):
            self._in_place(name, args[0], plain)
        elif name in _SCALINGS and isinstance(args[0], Tensor) and not any(isinstance(a, Tensor) for a in plain):
            before = self.recipes.get(_storage(args[0]))
            if before is not None:
                self.recipes[_storage(result)] = [*before, [_SCALINGS[name], *plain]]

    def _in_place(self, name: str, tensor: Tensor, plain: list[Any]) -> None:
        key = _storage(tensor)
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if name == "copy_" and whole and not plain[0].is_meta:
            self.values[key] = plain[0].detach().expand(tensor.shape).clone()
            self.recipes.pop(key, None)
            self.broken.pop(key, None)
        elif any(isinstance(a, Tensor) for a in plain):
            self.broken[key] = f"{name} with another tensor"
        elif whole and name in (*_RANDOM, "fill_", "zero_"):
            self.recipes[key] = [[name, *plain]]
            self.broken.pop(key, None)
            self.values.pop(key, None)
        elif key not in self.recipes:
            self.broken[key] = f"{name} on values that are not recorded"
        elif whole:
            self.recipes[key] = [*self.recipes[key], [name, *plain]]
        elif tensor.is_contiguous():
            start = int(tensor.storage_offset())
            self.recipes[key] = [*self.recipes[key], ["part", start, start + tensor.numel(), name, *plain]]
        else:
            self.broken[key] = f"{name} on a part of it that is not contiguous"

    def recipe(self, tensor: Tensor, name: str) -> Recipe | None:
        """What filled a tensor; raises TraceError where that cannot be repeated from numbers alone."""
        key = _storage(tensor)
        if key in self.broken:
            raise TraceError(f"the initialisation of {name} ({self.broken[key]}) cannot be recorded: use --init")
        found = self.recipes.get(key)
        if found and not tensor.is_contiguous() and any(step[0] == "part" for step in found):
            raise TraceError(
                f"the initialisation of {name} (a part of a transposed tensor) cannot be recorded: use --init"
            )
        return found


def _storage(tensor: Tensor) -> int:
    # Private: on meta every data_ptr is 0, and no public name tells two storages apart across views.
    return int(tensor.untyped_storage()._cdata)


def _record(factory: Callable[[], nn.Module]) -> tuple[dict[str, Recipe], dict[str, Tensor]]:
    recorder = _Recorder()
    with recorder, _truncated_normals(), torch.device("meta"):
        again = factory()
    return _recipes(recorder, again)


def _record_huggingface(model: nn.Module) -> tuple[dict[str, Recipe], dict[str, Tensor]]:
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    shadow: Any = copied(model, memo)
    _forget_initialised(shadow)
    recorder = _Recorder()
    with recorder, _truncated_normals(), torch.no_grad():
        shadow.initialize_weights()
    return _recipes(recorder, shadow)


@contextmanager
def _truncated_normals() -> Iterator[None]:
    """Within: truncated normals on meta are drawn by ops in place. torch's own draws again what lies outside, so that
    it does nothing on meta."""

    def draw(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        if not tensor.is_meta:
            return before(tensor, mean, std, a, b, generator)  # type: ignore[no-any-return]
        width = std * math.sqrt(2)
        low, high = (math.erf((bound - mean) / width) for bound in (a, b))
        with torch.no_grad():
            return tensor.uniform_(low, high).erfinv_().mul_(width).add_(mean).clamp_(a, b)

    init: Any = nn.init
    before = init._no_grad_trunc_normal_  # no public name is what both torch's and transformers' initialisers call
    init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = before


def _recipes(recorder: _Recorder, model: nn.Module) -> tuple[dict[str, Recipe], dict[str, Tensor]]:
    """Recipes, and values that were copied, by the names of parameters."""
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {name: recorder.recipe(p, name) for name, p in named.items()}
    copied = {name: recorder.values.get(_storage(p)) for name, p in named.items()}
    return (
        {name: recipe for name, recipe in found.items() if recipe is not None},
        {name: value for name, value in copied.items() if value is not None},
    )


def _huggingface_buffers(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Real values of meta buffers (RoPE tables), by the model's own initialisation of their modules."""
    values: dict[str, Tensor] = {}
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module: Any = copied(model.get_submodule(owner)).to_empty(device="cpu")
        _forget_initialised(module)
        with torch.no_grad():
            model._init_weights(module)  # type: ignore[operator] # HF's hook for one module
        values |= {f"{owner}.{leaf}".lstrip("."): b for leaf, b in module.named_buffers(recurse=False)}
    return {name: values[name] for name in names if name in values}


def _forget_initialised(model: nn.Module) -> None:
    """HF skips what it has flagged as initialised."""
    for module in model.modules():
        for item in (module, *module.parameters(recurse=False), *module.buffers(recurse=False)):
            if hasattr(item, "_is_hf_initialized"):
                del item._is_hf_initialized


def _factory_buffers(factory: Callable[[], nn.Module], names: list[str]) -> dict[str, Tensor]:
    """Real values of buffers: the factory again, its parameters put on meta as they are registered."""
    if not names:
        return {}
    with _hollow_parameters(), _NoDraws():  # type: ignore[no-untyped-call]
        model = factory()
    tensors = tensors_of(model)
    return {name: tensors[name] for name in names if name in tensors}


class _NoDraws(TorchDispatchMode):
    """Random in-place ops do nothing: parameters that are about to be dropped need no values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name.removeprefix("aten::") in _RANDOM and args[0].numel() > 1 << 16:
            return args[0]
        return function(*args, **(kwargs or {}))


@contextmanager
def _hollow_parameters() -> Iterator[None]:
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
