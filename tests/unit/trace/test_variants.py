"""Every variant of the field notes plans on meta, and its program computes what eager computes with its weights.

`make test` has every fourth model once, with sdpa or with eager attention in turn; the others are slow.
"""

from __future__ import annotations

import py_compile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Program
from autopar.request import with_loss
from autopar.trace.export import trace
from autopar.trace.huggingface import traceable
from tests import zoo
from tests.interpreter import run_program

WITH_BATCH_NORM = {"resnet", "timm_resnet50", "hf_resnet:eager"}
BY_MODEL = {
    name.partition(":")[0]: [n for n in zoo.VARIANTS if n.split(":")[0] == name.split(":")[0]] for name in zoo.VARIANTS
}
QUICK = {names[i % len(names)] for i, names in enumerate(BY_MODEL.values()) if i % 4 == 0}


def _options(name: str) -> dict[str, Any]:
    return {"batch_norm": "synchronise"} if name in WITH_BATCH_NORM else {}


def test_there_are_35_variants() -> None:
    assert len(zoo.VARIANTS) == 35


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in zoo.VARIANTS]
)
def test_a_variant_plans_on_meta(name: str, tmp_path: Path) -> None:
    """fp32, so that the program that is planned is the one held against eager."""
    warnings.simplefilter("ignore")
    family = zoo.VARIANTS[name]
    with torch.device("meta"):
        model = family.build().train()
    example = {**family.inputs(4, torch.Generator().manual_seed(0)), **family.arguments}
    result = autopar.parallelize(
        model, gpus=8, gpu="h100-sxm-80gb", inputs=example, loss=family.loss, precision="fp32", **_options(name)
    )
    assert result.plan.mesh.world_size <= 8 and result.estimate.step_time_s > 0
    (tmp_path / "model.py").write_text(result.source())
    py_compile.compile(str(tmp_path / "model.py"), doraise=True)
    kept_whole = {"mlp.experts"} if name.startswith("gpt_oss") else set()  # experts with biases and their own gate
    assert result.program.opaque.keys() == kept_whole
    assert len(result.program.layer_calls) >= 4
    if not kept_whole:  # what is kept whole runs in emitted programs only: tests/distributed/test_moe.py trains it
        _check_against_eager(result.program, family)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.VARIANTS)
def test_a_variant_plans_in_bf16(name: str) -> None:
    """The precision that is trained, whose casts fp32 has not."""
    warnings.simplefilter("ignore")
    family = zoo.VARIANTS[name]
    with torch.device("meta"):
        model = family.build().train()
    example = {**family.inputs(4, torch.Generator().manual_seed(0)), **family.arguments}
    result = autopar.parallelize(
        model, gpus=8, gpu="h100-sxm-80gb", inputs=example, loss=family.loss, tp=2, dp=2, pp=2, **_options(name)
    )
    compile(result.source(), f"{name}/model.py", "exec")


def _check_against_eager(program: Program, family: zoo.Family) -> None:
    """Loss and gradients, to fp32's rounding."""
    torch.manual_seed(0)
    model = family.build().train()
    inputs = {**family.inputs(3, torch.Generator().manual_seed(1)), **family.arguments}
    if family.loss:
        model = with_loss(model, family.loss, inputs)
    expected = _eager_loss(model, inputs)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    loss = run_program(program, model, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        mine, theirs = (torch.zeros(()) if g is None else g for g in (parameter.grad, gradients[parameter_name]))
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, msg=parameter_name)


def _eager_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    outputs = model(**inputs)
    if isinstance(outputs, Tensor):
        return outputs
    loss: Tensor = outputs["loss"] if "loss" in outputs else outputs[0]
    return loss


# What no variant is; the others are slow. (Of mixtral_aux, what is traced on meta is the GPU's branch, `histc` of
# integers, which the CPU has not: only its prepared program runs there.)
OTHERS = {"parallel", "unet"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OTHERS else [pytest.mark.slow]) for name in zoo.FAMILIES]
)
def test_loss_of_the_trace(name: str) -> None:
    """As traced, before anything is prepared or cut into layers."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    family = zoo.FAMILIES[name]
    model = family.build().train()
    inputs = {**family.inputs(3, torch.Generator().manual_seed(1)), **family.arguments}
    with traceable(model, inputs):
        program = trace(model, inputs, torch.float32, **_options(name))
    torch.testing.assert_close(run_program(program, model, inputs), _eager_loss(model, inputs), rtol=1e-5, atol=1e-6)
