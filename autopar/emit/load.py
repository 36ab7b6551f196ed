"""An emitted model.py as a module of this process, on autopar's own copy of the runtime."""

from __future__ import annotations

import linecache
from types import ModuleType


def load_source(source: str, name: str = "model") -> ModuleType:
    """Execute the text of model.py; its `runtime` is autopar.runtime, and tracebacks show its lines."""
    text = source.replace("from runtime.", "from autopar.runtime.")
    filename = f"<{name}>/model.py"  # no folder: its weights are given, not read
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = ModuleType(name)
    module.__file__ = filename
    exec(compile(text, filename, "exec"), module.__dict__)  # our own text, which this process has just written
    return module
