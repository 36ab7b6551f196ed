"""Loaded before any test: one thread before anything computes, no cache of programs but where a test asks for one,
`--update-goldens`, and cases that take turns."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.harness import assert_golden

# Before all else: a child forked from a parent whose matmuls ran on several threads hangs in its first one.
torch.set_num_threads(1)

os.environ["AUTOPAR_CACHE"] = "off"  # the tests of the trace are to trace


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write golden files, compare nothing")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: Sequence[pytest.Function]) -> None:
    """Of a test marked `in_turn(n)` a part of the cases stays in `make test`."""
    marked = defaultdict(list)
    for item in items:
        if turns := item.get_closest_marker("in_turn"):
            marked[item.nodeid.partition("[")[0], turns.args[0]].append(item)
    for (_, n), cases in marked.items():
        kept = cases_in_turn([_values(case) for case in cases], n)
        for i in set(range(len(cases))) - kept:
            cases[i].add_marker(pytest.mark.slow)


def _values(case: pytest.Function) -> dict[str, str]:
    return {name: repr(value) for name, value in case.callspec.params.items()}


def cases_in_turn(cases: Sequence[Mapping[str, object]], n: int) -> set[int]:
    """The first of each n cases, and each value of a parameter that several cases have at least once."""
    often = {value for value, times in Counter(v for case in cases for v in case.items()).items() if times > 1}
    kept = set(range(0, len(cases), n))
    unseen = often - {value for i in kept for value in cases[i].items()}
    for i, case in enumerate(cases):
        if unseen & case.items():
            kept.add(i)
            unseen -= case.items()
    return kept


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture
def golden(update_goldens: bool) -> Callable[[str, str], None]:
    """`golden(name, text)`: tests/golden/`name` holds `text`; with --update-goldens it is written there."""
    return lambda name, text: assert_golden(Path(__file__).parent / "golden" / name, text, update_goldens)
