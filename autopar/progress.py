"""A line on stderr for what takes longer than a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 1.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Within it, after a second, stderr says what is being done: `autopar: tracing LlamaForCausalLM …`."""
    timer = threading.Timer(PATIENCE_S, lambda: print(f"autopar: {what} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
