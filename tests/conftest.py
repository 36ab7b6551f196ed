"""Loaded before any test: one thread before anything computes, `--update-goldens`, and cases that take turns."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.harness import assert_golden

# Before all else: a child forked from a parent whose matmuls ran on several threads hangs in its first one.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write golden files, compare nothing")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Of a test marked `in_turn(n)` the first of each n cases stays in `make test`."""
    seen: Counter[str] = Counter()
    for item in items:
        if turns := item.get_closest_marker("in_turn"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % turns.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture
def golden(update_goldens: bool) -> Callable[[str, str], None]:
    """`golden(name, text)`: tests/golden/`name` holds `text`; with --update-goldens it is written there."""
    return lambda name, text: assert_golden(Path(__file__).parent / "golden" / name, text, update_goldens)
