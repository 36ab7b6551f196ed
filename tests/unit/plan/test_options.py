"""Every pin and option × every kind of wrong value: one PlanError, at once, before a model is built."""

from __future__ import annotations

import time
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.api import parallelize
from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan.options import JOB, OPTIONS, PINS
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh
from autopar.search.sizes import divisors

WHOLE = [name for name, option in OPTIONS.items() if "whole number" in option.form] + ["zero"]
NAMES = [name for name, option in OPTIONS.items() if option.names]
FLAGS = [name for name, option in OPTIONS.items() if option.form == "True or False"]
ARGUMENTS = sorted({*WHOLE, *NAMES, *FLAGS, "recompute"} - {"steps", "gpus_per_node", "optimizer"})
NUMBERS = st.one_of(
    st.floats(),
    st.booleans(),
    st.integers(max_value=-1),
    st.integers(min_value=10**9),
    st.integers(-9, 9).map(str),
    st.complex_numbers(),
    st.lists(st.integers(0, 9), max_size=2),
    st.sampled_from([nan, inf, -inf, 2.5, 2.0, "two", 10**15, 10**5000, (-1,), (True,), (0, 1.0), (0, 10**15), {}]),
)


def never() -> nn.Module:
    raise AssertionError("a model is built before its options are checked")


def refused(**options: Any) -> str:
    """The one message, given within a second."""
    started = time.process_time()
    with pytest.raises(PlanError) as raised:
        parallelize(never, **{"gpus": 8, "gpu": "h100-sxm-80gb", "global_batch": 16, **options})
    assert time.process_time() - started < 1
    said = str(raised.value)
    assert "\n" not in said and len(said) < 700
    return said


def test_the_table_has_every_pin() -> None:
    assert set(FLAGS) == {"compile", "offload", "sequence_parallel"}
    assert {*WHOLE, *NAMES, *FLAGS, "memory", "lr", "recompute"} == OPTIONS.keys()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ARGUMENTS), NUMBERS)
def test_numbers_of_every_kind(name: str, value: Any) -> None:
    if name in FLAGS and isinstance(value, bool):
        return
    assert name in refused(**{name: value})


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(PINS.keys() - {"recompute", "reduce_dtype", "sequence_parallel", "offload"})), NUMBERS)
def test_numbers_of_every_kind_that_are_forbidden(name: str, value: Any) -> None:
    assert f"forbid: {name}=" in refused(forbid={name: [value]})


@pytest.mark.parametrize(
    "memory", [nan, inf, -inf, -1, 0, True, "0GiB", "1.2.3GiB", "-1GiB", "inf", "70 bananas", [70], 10**400]
)
def test_memory(memory: Any) -> None:
    assert "memory=" in refused(memory=memory)


@pytest.mark.parametrize("lr", [nan, inf, -1.0, "0.1", [0.1], torch.tensor(0.1), 1j])
def test_learning_rates(lr: Any) -> None:
    with pytest.raises(PlanError, match="lr|learning rate"):
        parallelize(nn.Linear(2, 2), 1, gpu="h100-sxm-80gb", inputs={}, optimizer=("AdamW", {"lr": lr}))


@pytest.mark.parametrize("number", [nan, inf, -1, 0, 2.5, True, "2", 10**15, None])
def test_clusters_and_plans(number: Any) -> None:
    with pytest.raises(PlanError, match="gpus="):
        Cluster(number)
    for mesh, name in ((Mesh(dp=number), "dp"), (Mesh(), "micro_batch")):
        if number is not None:
            with pytest.raises(PlanError, match=name):
                Plan.of(mesh, 8, 1 if name == "dp" else number, 16, ((0, 2),))


def test_names_have_a_nearest() -> None:
    assert "(did you mean 'AdamW'?)" in refused_model(optimizer="Adamw")
    assert "(did you mean '1f1b'?)" in refused(schedule="1f1")
    assert "(did you mean 'ulysses'?)" in refused(attention="ulyses")
    assert "(did you mean 'micro_batch'?)" in refused(microbatch=2)
    assert "no such pin" in refused(forbid={"zeros": [1]}) and "'zero'" in refused(forbid={"zeros": [1]})
    assert "use a list of values" in refused(forbid={"zero": 3}) and "use a mapping" in refused(forbid=["zero"])


def refused_model(model: Any = None, **options: Any) -> str:
    with pytest.raises(PlanError) as raised:
        parallelize(model or nn.Linear(2, 2), 1, **{"gpu": "h100-sxm-80gb", "inputs": {}, **options})
    return str(raised.value)


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"global_batch": 3, "dp": 8}, "global_batch=3 is not divisible by dp=8: use global_batch=8"),
    ({"tp": 3}, "gpus=8 is not divisible by tp=3"),
    ({"sequence": 10, "cp": 4}, "sequence=10 is not divisible by cp=4"),
    ({"sequence": 10, "pad_to_multiple_of": 3, "cp": 8}, "sequence=10 padded to 12 is not divisible by cp=8"),
    ({"schedule": "1f1b", "pp": 1}, "1f1b needs pp > 1"),
    ({"zero": 0, "offload": True}, "offload needs zero=1, 2 or 3"),
    ({"zero": 0, "hsdp": 2}, "hsdp=2 needs zero=1, 2 or 3"),
    ({"schedule": "zero-bubble", "zero": 3, "dp": 2}, "zero-bubble with zero=2 or 3"),
    ({"reduce_dtype": "fp16"}, "reduce_dtype='fp16' with precision='bf16'"),
    ({"forbid": {"zero": [0, 1, 2, 3]}}, "no legal plan for 8 GPUs and global_batch=16 with no zero=0"),
    ({"gpu": "h100"}, "unknown gpu 'h100': nearest are h100-sxm-80gb"),
    ({"gpu": 7}, "gpu=7: use one of"),
    ({"sequence": 7, "attention": "ring"}, "attention='ring' is for cp > 1, and none divides gpus=8 and sequence=7"),
]


@pytest.mark.parametrize(("options", "message"), TOGETHER)
def test_what_cannot_go_together(options: dict[str, Any], message: str) -> None:
    assert message in refused(**options)


def test_what_a_legal_request_needs_is_not_refused() -> None:
    """What comes next is the model."""
    huge = {"gpus": 83160, "global_batch": 7_207_200, "micro_batch": 7_207_200, "pp": 2}
    legals: list[dict[str, Any]] = [
        {},
        {"gpus": 100_000, "global_batch": 10**7},
        huge,
        {**huge, "schedule": "1f1b"},  # left to the search
        {"schedule": "interleaved", "pp": 8},
        {"hsdp": 4},
    ]
    for legal in legals:
        with pytest.raises(AssertionError, match="a model is built"):
            parallelize(never, **{"gpus": 8, "gpu": "h100-sxm-80gb", "global_batch": 16, **legal})


# --------------------------------------------------------------------------------
# Models and inputs


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Net(nn.Linear):
    def forward(self, input: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input).mean()


X = torch.zeros(2, 2, device="meta")
MODELS: list[tuple[Any, dict[str, Any], str]] = [
    (nn.ReLU(), {}, "ReLU has no parameters: there is nothing to train"),
    (nn.Linear(2, 2).requires_grad_(False), {}, "all 2 parameters of Linear are frozen"),
    (Complex(), {}, "turns of Complex is torch.complex64: complex parameters are not supported"),
    ("gpt2", {}, "model='gpt2': give a module, or a function that builds one, or name it on the command line"),
    (7, {}, "model=7: give a module"),
    (lambda: [1, 2], {}, "the function that builds the model gave a list of 2: return the module"),
    (Net(2, 2), {"inputs": [X, X]}, "inputs=a list of 2: give them by the keywords of forward"),
    (Net(2, 2), {"inputs": {"input": X, "label": X}}, "label (did you mean 'labels'?): Net.forward has no such input"),
    (Net(2, 2), {"loss": "mse"}, "loss='mse': give a function"),
    (Net(2, 2), {"optimizer": 7}, "optimizer=7: use 'AdamW'"),
    (Net(2, 2), {"optimizer": ("AdamW", [1])}, "use 'AdamW', torch.optim.AdamW or"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "message"), MODELS)
def test_models_and_inputs(model: Any, options: dict[str, Any], message: str) -> None:
    assert message in refused_model(model, **options)


def test_no_model() -> None:
    with pytest.raises(PlanError, match="model=None: give a module"):
        parallelize(None, 1, gpu="h100-sxm-80gb")  # type: ignore[arg-type]


# --------------------------------------------------------------------------------
# plan.yaml, and texts of the command line


@pytest.mark.parametrize("number", [nan, inf, -1, 2.5, True, "2", 10**15, [2]])
def test_numbers_of_every_kind_in_a_plan_yaml(number: Any, tmp_path: Path) -> None:
    good = Plan.of(Mesh(dp=2), 8, 2, 16, ((0, 2),)).to_dict()
    keys = ("global_batch", "micro_batch", "sequence", "padded_from", "zero", "hsdp", "loss_chunks", "stages")
    changes: list[dict[str, Any]] = [{key: number} for key in keys if (key, number) != ("zero", True)]
    changes += [
        {"mesh": {"pp": 1, "dp": number, "tp": 1}},
        {"stages": [[0, number]]},
        {"recompute": {f"0-{10**15}": "mlp"}},
    ]
    for change in changes:
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**good, **change}))
        with pytest.raises(PlanError, match=next(iter(change))):
            Plan.load(tmp_path / "plan.yaml")


@pytest.mark.parametrize("name", sorted(JOB | PINS))
def test_texts_of_the_command_line_are_read_as_they_are_written(name: str) -> None:
    for text, value in (("3", 3), ("none", "none"), ("0,1", (0, 1)), ("-1", -1), ("2.5", 2.5), ("nan", nan)):
        read = OPTIONS[name].read(text)
        assert read in (text, value) or read != read
        assert OPTIONS[name].fits(read) in (True, False)


@pytest.mark.parametrize("n", [1, 2, 16, 97, 360, 9973**2, 10**10])
def test_divisors(n: int) -> None:
    found = divisors(n)
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == n and all(n % d == 0 for d in found)
    if n < 10**4:
        assert found == [d for d in range(1, n + 1) if n % d == 0]
