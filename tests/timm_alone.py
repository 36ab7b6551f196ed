"""timm without torchvision, whose wheels want CUDA's torch: the Makefile copies this file into the environment, which
loads it when Python starts. Where torchvision is installed it does nothing.

timm's models import torchvision, and use none of its transforms: while timm is imported, torchvision is modules that
have every name, and afterwards it is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _AnyName(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> str:
        return name


class _Stub(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _StubFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def _stubs() -> Iterator[None]:
    finder = _StubFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


class _Alone(Loader):
    """timm's own loader, with the stubs."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _stubs():
            self.own.exec_module(module)


class _TimmFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "timm" else None
        if spec is None or spec.loader is None or PathFinder.find_spec("torchvision"):
            return None
        spec.loader = _Alone(spec.loader)
        return spec


sys.meta_path.insert(0, _TimmFinder())
