"""A program run on one device with a model's own weights: what a trace, a cleaned trace and a cut trace compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.ir.graph import Program
from autopar.verification.interpreter import Run, named_tensors


def run_program(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The loss, with autograd back to the model's parameters, which must be in the dtype of the trace."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return Run(program, named_tensors(program, model), tensors).loss()
