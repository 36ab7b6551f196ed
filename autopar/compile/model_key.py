"""What a trace of a model can depend on, as text: equal texts mean equal programs. The key of the cache of programs.

The text has every attribute of every module and config (flags, hooks, hidden attributes too), names, shapes, dtypes and
sharing of parameters, the values of buffers and of other tensors, and the inputs with their values; the trace runs on
meta tensors, so that the values of parameters never reach it. Then the code: all that the module's files and the files
of transformers that they import define, object by object, as it is in this process, with size and time of the files;
the versions of Python, torch and transformers; autopar's own sources. That is all that forward runs and reads.

By default a model has a key only where all of that code is transformers', torch's or Python's: what a user has written
or put in place of something (a class, a hook, a function, a forward) reads what no key can list. With `vouched`, a name
by the user, code and objects that are not plain data are in the key by their names alone.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CODE = (
    types.FunctionType, types.MethodType, type, functools.partial, types.BuiltinFunctionType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
)  # fmt: skip
_PACKAGES = (
    "torch",
    "transformers",
    "huggingface_hub",
    "numpy",
    "packaging",
    "tqdm",
    "typing_extensions",
    "safetensors",
)
# Parts of transformers that no forward in training is in.
_ELSEWHERE = (
    "transformers.generation", "transformers.quantizers", "transformers.models.auto", "transformers.tokenization",
    "transformers.utils.chat",
)  # fmt: skip
# Names that are others in each process or come with a first use, and that no forward reads.
_OF_THE_PROCESS = (
    "_CAN_RECORD_REGISTRY", "SESSION_ID", "_original_object_hash", "__slotnames__",
    "_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value",
)  # fmt: skip
_ALWAYS = ("torch", "torch.nn.functional", "torch.nn.modules.module", "torch.nn.parameter")


class UnknownError(ValueError):
    """Something that a trace may depend on has no text."""


def key_of(model: nn.Module, inputs: Mapping[str, Any], settings: tuple[Any, ...], vouched: str | None) -> str | None:
    """The name of the model's program in the cache; None where only a user who vouches for it can give it one."""
    text = _Text(vouched is not None)
    try:
        text.add((vouched, settings, _surroundings()))
        text.add(dict(inputs))
        text.add(model)
        for name in _modules_of(model) if vouched is None else ():
            text.namespace(name)
    except (UnknownError, RecursionError):
        return None
    return text.digest.hexdigest()


def _surroundings() -> tuple[Any, ...]:
    transformers = sys.modules.get("transformers")
    return (
        sys.version, str(torch.__version__), torch.version.git_version, getattr(transformers, "__version__", ""),
        torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(), torch.cuda.is_available(), _own_sources(),
    )  # fmt: skip


@functools.cache
def _own_sources() -> str:
    """A hash of autopar's own files."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for folder in sorted({root, (root / "passes").resolve(), (root / "cost_models").resolve()}):
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _modules_of(model: nn.Module) -> Iterator[str]:
    """The files that a model's classes are in, and those of transformers that these get something from."""
    waiting = list(_ALWAYS)
    waiting += [kind.__module__ for module in model.modules() for kind in type(module).__mro__]
    seen = {"builtins"}
    while waiting:
        name = waiting.pop()
        if name in seen or name not in sys.modules or name.startswith(_ELSEWHERE):
            continue
        seen.add(name)
        yield name
        if name.startswith("transformers."):
            for value in list(vars(sys.modules[name]).values()):
                home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                home = home if isinstance(home, str) else type(value).__module__
                waiting += [home] if home.startswith("transformers.") else []


class _Text:
    """The text, as it is hashed. An object that is met again is a number, as in the sharing of parameters."""

    def __init__(self, vouched: bool) -> None:
        self.digest, self.vouched = hashlib.sha256(), vouched
        self._seen: dict[int, tuple[int, Any]] = {}

    def _write(self, *parts: Any) -> None:
        for part in parts:
            self.digest.update(f"{part!r};".encode())

    def add(self, value: Any, loosely: bool = False) -> None:
        """Whatever a trace can read of a value; UnknownError where that is not known (`loosely`: its class alone)."""
        if type(value) in _PLAIN or isinstance(value, torch.Size):
            return self._write(type(value).__name__, value)
        if id(value) in self._seen:
            return self._write("seen", self._seen[id(value)][0])
        self._seen[id(value)] = len(self._seen), value  # kept: its id is its own
        if isinstance(value, _CODE):
            return self._code(value, loosely)
        self._write(type(value).__module__, type(value).__qualname__)
        if not (loosely or self.vouched):
            _check_home(type(value))
        self._object(value, loosely)

    def _object(self, value: Any, loosely: bool) -> None:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict | tuple | list | set | frozenset):
            return self._items(value, loosely)
        if isinstance(value, Enum):
            return self._write(value.name, value.value)
        described = isinstance(value, nn.Module) or _is_config(value)
        for kind in type(value).__mro__ if described and not self.vouched else ():
            _check_class(kind)
        if described or self.vouched or (loosely and type(value).__module__.startswith("transformers.")):
            return self._items(dict(vars(value)) if hasattr(value, "__dict__") else {}, loosely)
        if not loosely:
            raise UnknownError(f"{type(value)}")

    def _items(self, value: Any, loosely: bool) -> None:
        if isinstance(value, dict):
            items = ((k, v) for k, v in dict.items(value) if k not in _OF_THE_PROCESS and not (loosely and _is_own(v)))
            value = [part for item in items for part in item]
        self._write(len(value))
        for item in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
            self.add(item, loosely)

    def _tensor(self, value: Tensor) -> None:
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer) and not self.vouched:
            raise UnknownError(f"{type(value)}")
        self._write(value.shape, value.dtype, value.requires_grad, value.device.type, value.layout)
        self.add([value._backward_hooks])  # no public name says that there are hooks
        if not isinstance(value, nn.Parameter) and not value.is_meta:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self.digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())

    def _code(self, value: Any, loosely: bool) -> None:
        self._write(getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__qualname__))
        if isinstance(value, functools.partial):
            self.add([value.func, value.args, value.keywords], loosely)
        elif isinstance(value, types.MethodType):
            self.add([value.__func__, value.__self__], loosely)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type) and not self.vouched:
            _check_home(value)

    def _function(self, value: types.FunctionType) -> None:
        code = value.__code__
        self._write(Path(code.co_filename).name, code.co_firstlineno, code.co_code)
        if not _is_trusted(value) and not self.vouched:
            raise UnknownError(f"{value.__qualname__} of {code.co_filename}")
        self.add([value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None)], loosely=True)
        for cell in value.__closure__ or ():
            try:
                self.add(cell.cell_contents, loosely=True)
            except ValueError as error:
                if isinstance(error, UnknownError):
                    raise

    def namespace(self, name: str) -> None:
        """All that a file defines, as it is now."""
        module = sys.modules[name]
        file = getattr(module, "__file__", None)
        stat = Path(file).stat() if file else None
        self._write(name, stat and (stat.st_size, stat.st_mtime_ns))
        for key, value in sorted(vars(module).items()):
            if key.startswith("__") or key in _OF_THE_PROCESS or isinstance(value, types.ModuleType):
                continue
            self._write(key)
            self.add(value, loosely=True)
            if isinstance(value, type) and value.__module__ == name:
                for attribute in sorted(vars(value).keys() - {*_OF_THE_PROCESS}):
                    self._write(attribute)
                    self._member(vars(value)[attribute])

    def _member(self, held: Any) -> None:
        if isinstance(held, property):
            self.add([held.fget, held.fset], loosely=True)
        elif isinstance(held, staticmethod | classmethod):
            self.add(held.__func__, loosely=True)
        elif not isinstance(held, types.MappingProxyType | types.GetSetDescriptorType):
            self.add(held, loosely=True)


def _check_home(kind: type) -> None:
    home = kind.__module__.partition(".")[0]
    if home not in _PACKAGES and home not in sys.stdlib_module_names:
        raise UnknownError(f"{kind} is not in a file of transformers, torch or Python")


def _check_class(kind: type) -> None:
    """UnknownError unless a class is what its file, of a package, has under its name."""
    _check_home(kind)
    home: Any = sys.modules.get(kind.__module__)
    if functools.reduce(lambda o, n: getattr(o, n, None), kind.__qualname__.split("."), home) is not kind:
        raise UnknownError(f"{kind} is another than {kind.__module__}.{kind.__qualname__}")


def _is_config(value: Any) -> bool:
    """Whether a value is a config of transformers, which is its attributes."""
    return any(kind.__name__ in ("PreTrainedConfig", "GenerationConfig") for kind in type(value).__mro__)


def _is_own(value: Any) -> bool:
    """Whether autopar has put a function into a table of transformers, as a trace does."""
    return isinstance(value, types.FunctionType) and value.__module__.startswith("autopar.")


def _is_package(module: str) -> bool:
    return module.partition(".")[0] in _PACKAGES


def _is_trusted(function: types.FunctionType) -> bool:
    """Whether a function is of an installed file of `_PACKAGES` or of Python, or one that a dataclass is given."""
    file, name = function.__code__.co_filename, function.__name__
    if file.startswith("<"):
        return file.startswith("<frozen ") or (name.startswith("__") and name != "__call__")
    return file.startswith(_folders()) or (file.startswith(_python()) and "-packages" not in file)


def _python() -> str:
    return f"{sysconfig.get_paths()['stdlib']}/"


@functools.cache
def _folders() -> tuple[str, ...]:
    found = [getattr(sys.modules.get(name), "__file__", None) or "" for name in _PACKAGES]
    return tuple(f"{Path(file).parent}/" if file.endswith("__init__.py") else file for file in found if file)
