"""What a search is asked, with the choices by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost_models.hardware import Cluster
from autopar.cost_models.layer_costs import ModelCosts
from autopar.runtime.choices import Batch, Compute
from autopar.search import search as searching
from autopar.search.pins import Request
from autopar.search.search import SearchResult


def request(
    global_batch: int,
    sequence: int,
    budget_bytes: float = 1e12,
    precision: str = "bf16",
    padded_from: int | None = None,
    **others: Any,
) -> Request:
    batch = Batch(global_batch=global_batch, micro_batch=1, sequence=sequence, padded_from=padded_from)
    return Request(batch, Compute(precision=precision), budget_bytes, **others)


def search(
    models: Sequence[ModelCosts],
    cluster: Cluster,
    *,
    illegal: Mapping[str, str] | None = None,
    keep: int = 5,
    **asked: Any,
) -> SearchResult:
    """In the GPU's usable memory, unless `budget_bytes` is given."""
    asked.setdefault("budget_bytes", cluster.hardware.memory_bytes)
    return searching.search(models, cluster, request(**asked), illegal, keep)
