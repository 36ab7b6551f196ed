"""Every family and variant: the trace, cleaned and cut into layers, computes what eager computes with its weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.graph import Program
from autopar.passes import PREPARE
from autopar.request import with_loss
from autopar.trace.export import trace
from autopar.trace.huggingface import traceable
from autopar.trace.layers import class_names, split_layers
from tests import zoo
from tests.interpreter import run_program

WITH_BATCH_NORM = {"resnet", "timm_resnet50", "hf_resnet:eager"}
# On meta their load-balancing takes the GPU's branch, `histc` of integers, which the CPU has not.
NOT_ON_CPU = {"mixtral_aux:sdpa", "mixtral_aux:eager"}
ALL = {**zoo.FAMILIES, **zoo.VARIANTS}
CASES = [
    pytest.param(name, marks=[] if name in zoo.FAMILIES else [pytest.mark.slow])
    for name in ALL
    if name not in NOT_ON_CPU
]


def eager_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    outputs = model(**inputs)
    if isinstance(outputs, Tensor):
        return outputs
    loss: Tensor = outputs["loss"] if "loss" in outputs else outputs[0]
    return loss


def traced(model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype, **options: Any) -> Program:
    with traceable(model, inputs):
        return trace(model, inputs, dtype, **options)


def layered(program: Program, model: nn.Module) -> Program:
    for step in PREPARE:
        program = step.apply(program, None)
    return split_layers(program, class_names(model))


@pytest.mark.parametrize("name", CASES)
def test_loss_of_the_trace(name: str) -> None:
    """fp32, to 1e-5 of rounding; as traced, and once prepared and cut into layers. Gradients once cut."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    family = ALL[name]
    model = family.build().train()
    inputs = {**family.inputs(3, torch.Generator().manual_seed(1)), **family.arguments}
    if family.loss:
        model = with_loss(model, family.loss, inputs)
    options = {"batch_norm": "synchronise"} if name in WITH_BATCH_NORM else {}
    expected = eager_loss(model, inputs)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    program = traced(model, inputs, torch.float32, **options)
    torch.testing.assert_close(run_program(program, model, inputs), expected, rtol=1e-5, atol=1e-6)
    program = layered(program, model)
    assert len(program.layer_calls) >= 4
    model.zero_grad()
    loss = run_program(program, model, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        mine, theirs = (torch.zeros(()) if g is None else g for g in (parameter.grad, gradients[parameter_name]))
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=parameter_name)
