"""Loaded before any test: one thread before anything computes, and the `--update-goldens` flag."""

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
