"""An emitted model.py as a module of this process, on autopar's own copy of the runtime."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from types import ModuleType

from ..runtime.opaque import OpaqueModule


def load_source(source: str, name: str = "model", opaque: Mapping[str, OpaqueModule] | None = None) -> ModuleType:
    """Execute the text of model.py; its `runtime` is autopar.runtime, and tracebacks show its lines.

    opaque: the modules that it keeps whole, which a saved program has beside it.
    """
    text = re.sub(r"^from runtime\.", "from autopar.runtime.", source, flags=re.MULTILINE)
    filename = f"<{name}>/model.py"  # no folder: its weights are given, not read
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = ModuleType(name)
    module.__file__ = filename
    exec(compile(text, filename, "exec"), module.__dict__)  # our own text, which this process has just written
    if opaque:
        module.OPAQUE.modules = opaque
    return module
