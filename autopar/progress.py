"""What is being done and how far it is, on stderr, for what takes longer than a second.

On a terminal it is one line that is redrawn; elsewhere a line now and then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

PATIENCE_S = 1.0
_REDRAW_S, _NEXT_LINE_S = 0.2, 10.0
T = TypeVar("T")


@dataclass
class Progress:
    """How far something is. total: of how many parts, if that is known; part: the name of the one in work.

    count: asked for the parts that are done, where another process does them.
    """

    what: str
    total: int | None = None
    done: int = 0
    part: str = ""
    count: Callable[[], int] | None = None

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each counted as done when the next is asked for."""
        for item in items:
            yield item
            self.done += 1

    def at_layer(self, number: int, layers: int) -> None:
        """The one that is in work is this, of so many."""
        self.total, self.done, self.part = layers, number - 1, f"layer {number} of {layers}"

    @property
    def so_far(self) -> int:
        return self.done if self.count is None else self.count()

    def __str__(self) -> str:
        """ "tracing GPT (layer 3 of 12)", "searching the plans (120 of 4,210)"."""
        so_far = f"{self.so_far:,} of {self.total:,}" if self.total and not self.part else ""
        return f"{self.what}{f' ({self.part or so_far})' if self.part or so_far else ''}"


@contextmanager
def progress(what: str, total: int | None = None, count: Callable[[], int] | None = None) -> Iterator[Progress]:
    """Within it, after a second, stderr says what is being done: `autopar: tracing GPT (layer 3 of 32) …`."""
    state, ended = Progress(what, total, count=count), threading.Event()
    watch = threading.Thread(target=_watch, args=(state, ended), daemon=True)
    watch.start()
    try:
        yield state
    finally:
        ended.set()
        watch.join()


def _watch(state: Progress, ended: threading.Event) -> None:
    if ended.wait(PATIENCE_S):
        return
    (_redraw if sys.stderr.isatty() else _write_lines)(state, ended)


def _redraw(state: Progress, ended: threading.Event) -> None:
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}" if state.total else "{desc} … {elapsed}"
    with tqdm(total=state.total, bar_format=form, leave=False, dynamic_ncols=True, file=sys.stderr) as bar:
        while True:
            bar.n = state.so_far
            bar.set_description_str(f"autopar: {state}")  # which redraws the line
            if ended.wait(_REDRAW_S):
                return


def _write_lines(state: Progress, ended: threading.Event) -> None:
    said = ""
    while True:
        if str(state) != said:
            said = str(state)
            print(f"autopar: {said} …", file=sys.stderr, flush=True)
        if ended.wait(_NEXT_LINE_S):
            return
