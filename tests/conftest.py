"""Loaded before any test: one thread before anything computes, and the `--update-goldens` flag."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Before all else: a child forked from a parent whose matmuls ran on several threads hangs in its first one.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write golden files, compare nothing")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture
def golden(update_goldens: bool) -> Callable[[str, str], None]:
    """`golden(name, text)` asserts that tests/golden/`name` holds `text`, or writes it with --update-goldens."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if update_goldens:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        held = path.read_text() if path.exists() else None
        assert held == text, (
            f"{name} has changed: if that is right, run pytest --update-goldens and read the diff"
        )

    return compare
