"""autopar: from an nn.Module to a readable distributed PyTorch program.

Public names are resolved on first use, so that `import autopar.runtime` loads no compiler module.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "parallelize": "api",
    "estimate": "api",
    "Parallelized": "api",
    "Cluster": "cost_models.hardware",
    "Plan": "plan.plan",
    "PlanError": "errors",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(f"autopar.{_PUBLIC[name]}"), name)
