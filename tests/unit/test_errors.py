"""One clear error before anything is launched: what is wrong with its arithmetic, where it is, and the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import Parallelized, parallelize
from autopar.errors import InfeasibleError, PlanError, TraceError
from autopar.ir.graph import Role, info
from autopar.trace.export import trace
from examples.gpt import GPT, GPTConfig

SMALL = GPTConfig(n_layer=2, d_model=32, block_size=32)


def ids(sequence: int = 16) -> dict[str, Tensor]:
    tokens = torch.zeros(2, sequence, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def plan(model: nn.Module | None = None, gpus: int = 2, **options: Any) -> Parallelized:
    if model is None:
        with torch.device("meta"):
            model = GPT(SMALL)
    return parallelize(
        model, gpus, **{"gpu": "h100-sxm-80gb", "global_batch": 8, "inputs": ids(), "dp": 2, "tp": 1, **options}
    )


def refusal(model: nn.Module | None = None, gpus: int = 2, **options: Any) -> str:
    with pytest.raises(PlanError) as raised:
        plan(model, gpus, **options)
    return str(raised.value)


# --------------------------------------------------------------------------------
# Requests


def test_inputs_missing() -> None:
    said = refusal(inputs=None)
    assert "inputs are missing: GPT is no Hugging Face model" in said
    assert "inputs={'input_ids': ids, 'labels': labels}" in said


def test_budget_too_small() -> None:
    """Short by how much, and of what term most."""
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=8, d_model=1024))
    with pytest.raises(InfeasibleError) as raised:
        plan(model, memory="1GiB", offload=False)
    said = str(raised.value)
    assert "no plan fits 1.0 GiB a GPU with dp=2, tp=1" in said
    assert "too much" in said and "AdamW states" in said and "Use more GPUs" in said
    with pytest.raises(InfeasibleError, match="the nearest .dp2, zero 3 offload, .* Most of it: .*, reduction buffers"):
        plan(model, memory="1GiB")  # with the states on the host, other terms lead


def test_gpus() -> None:
    assert "gpus=0: use a whole number of GPUs, 1 to 100,000" in refusal(gpus=0)
    assert "gpus=7 is not divisible by tp=2: use gpus=6 or 8, or tp one of 1, 7" in refusal(gpus=7, tp=2, dp=None)
    assert "dp=2 × tp=2 = 4: use gpus=4 or 8" in refusal(gpus=7, tp=2)


def test_no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(PlanError, match="no GPU here: say how many to plan for, gpus=64, or gpus=4, gpu='cpu'"):
        parallelize(GPT(SMALL), inputs=ids())


def test_global_batch() -> None:
    said = refusal(global_batch=7)
    assert "global_batch=7 is not divisible by dp=2: use global_batch=6 or 8" in said
    assert "global_batch=8 is not divisible by micro_batch=3 × dp=2 = 6: use global_batch=6 or 12" in refusal(
        micro_batch=3
    )
    assert "global_batch=0" in refusal(global_batch=0)


def test_unknown_gpu() -> None:
    assert "unknown gpu 'h100': nearest are h100-sxm-80gb, h100-pcie-80gb" in refusal(gpu="h100")


def test_pins() -> None:
    assert "tpp (did you mean 'tp'?): no such option; there are pp, dp, cp, tp" in refusal(tpp=2)
    assert "globalbatch (did you mean 'global_batch'?)" in refusal(globalbatch=2)
    assert "tpp (did you mean 'tp'?): forbid has no such pin" in refusal(forbid={"tpp": [2]})
    assert "zero=7: use 0, 1, 2 or 3" in refusal(zero=7)
    assert "recompute='some': use 'none', 'full'" in refusal(recompute="some")
    assert "pp=3" in refusal(gpus=3, pp=3, dp=1)  # of 2 layers
    assert "precision='fp8': use one of bf16, fp16, fp32, fp64" in refusal(precision="fp8")
    assert "memory='much': use '70GiB', '512MiB'" in refusal(memory="much")


def test_optimizer() -> None:
    said = refusal(optimizer=torch.optim.LBFGS)
    assert "'LBFGS' is not known to be elementwise" in said and "AdamW" in said
    assert "lrr" in refusal(optimizer=("AdamW", {"lrr": 1}))
    other = nn.Linear(2, 2)
    assert "2 parameters of the optimizer are not the model's" in refusal(optimizer=torch.optim.SGD(other.parameters()))


def test_heads_that_tp_does_not_divide() -> None:
    """S2: GPT-2-XL has 25 heads. A free search never proposes tp=2; the footer says why."""
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=2, n_head=25, d_model=100, block_size=32))
    said = refusal(model, tp=2, dp=1)
    assert "25 heads of Block.attn are not divisible by 2" in said and "use one of tp=1, 5" in said
    free = plan(model, tp=None, dp=None)
    assert all(candidate.plan.mesh.tp == 1 for candidate in free.result.best)
    assert "tp=2 (25 heads" in str(free)


def test_launched_with_another_world_size(tmp_path: Path) -> None:
    """The saved program, by one process where two were planned: says so before any process group is made."""
    torch.manual_seed(0)
    plan(GPT(SMALL), precision="fp32").save(tmp_path)
    environment = {**os.environ, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), "--steps", "1"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "planned for 2 processes (pp=1 × dp=2 × cp=1 × tp=1) and was launched with 1" in done.stderr
    assert "torchrun --nproc-per-node 2" in done.stderr


# --------------------------------------------------------------------------------
# Models that cannot be traced as asked


class Chain(nn.Module):
    """Two residual layers between an embedding and a head; `d` differs from any size of the inputs."""

    max_len = 24

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.head = nn.Linear(20, 50)

    def logits(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1), labels.flatten())


class BranchOnValues(Chain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if x.sum() > 0:  # the line that the error names
            x = x * 2
        return self.loss(x, labels)


def test_branch_on_values() -> None:
    """T1: refused with the user's own line."""
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# the line that the error names"))
    said = refusal(BranchOnValues())
    assert f"{__file__}:{line}" in said
    assert "a branch on tensor values cannot be traced: use torch.where" in said


class BranchOnShapes(Chain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if input_ids.shape[1] > self.max_len:
            raise ValueError("too long")
        x = self.embedding(input_ids)
        x = x * 2 if self.head.weight.shape[0] < 10 else x * 3
        return self.loss(x, labels)


def test_branch_on_shapes() -> None:
    """T1: a branch on sizes is taken as the sizes say; lengths for which it would differ are refused."""
    found = plan(BranchOnShapes())
    assert found.program.sequence_range[1] == 24
    assert "* 3" in found.source()
    assert "sequence=32: the model's forward allows 2 to 24" in refusal(BranchOnShapes(), sequence=32)


class FixedBatch(Chain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.loss(x.reshape(4 * 16, 20).reshape(4, 16, 20), labels)


class FixedLength(Chain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.loss(x.reshape(x.size(0) * 16, 20).reshape(x.size(0), 16, 20), labels)


def test_size_of_the_example_in_the_model() -> None:
    """T11: never specialised in silence."""
    said = refusal(FixedBatch())
    assert said.startswith(f"tracing failed at {__file__}:")
    assert "the model fixes its batch or sequence size" in said and "derive it from the input's shape" in said
    fixed = plan(FixedLength()).program.fixed_length
    assert fixed is not None
    assert fixed.tokens == 16


def test_batch_of_one_as_example() -> None:
    """T11: a batch of one is no specialisation: the program keeps its batch as a symbol."""
    one = {name: tensor[:1] for name, tensor in ids().items()}
    program = plan(inputs=one, micro_batch=2).program
    shapes = {str(info(n).shape[0]) for n in program.blocks["prologue"].placeholders(Role.INPUT)}
    assert shapes == {"b"}


class Part(nn.Module):
    """A layer that does something which cannot be traced, on the line that the error names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.kind == "nonzero":
            y = y[(y.sum(-1) > 0).nonzero().squeeze(-1)]  # nonzero
        if self.kind == "boolean indexing":
            y = y[y > 0]  # boolean indexing
        if self.kind == "item":
            y = y * y.sum().item()  # item
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(y)  # autocast
        if self.kind == "in place":
            x.mul_(2)  # in place
        return y


class Parts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Part(kind), Part("")])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        ("nonzero", "keep the shape and mask (torch.where, x * mask)"),
        ("boolean indexing", "keep the shape and mask (torch.where, x * mask)"),
        ("item", "numbers as 0-dim tensors, not .item()"),
        ("autocast", "choose precision="),
        ("in place", "write it out of place there"),
    ],
)
def test_what_cannot_be_traced(kind: str, way_out: str) -> None:
    """Module path, file and line, the lines around it, and what to do."""
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith(f"  # {kind}"))
    with pytest.raises(TraceError) as error:
        trace(Parts(kind), {"x": torch.zeros(3, 4)}, torch.float32)
    said = str(error.value)
    assert "layers.0" in said and f"{__file__}:{line}" in said and way_out in said
    assert f"→ {line:4d}  {lines[line - 1]}" in said and lines[line - 2].strip() in said


class OnTheCpu(Chain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.loss(x + torch.ones(20, device="cpu"), labels)


def test_tensors_on_another_device() -> None:
    """T7: what forward makes must be where its inputs are."""
    with pytest.raises(TraceError, match="device=x.device"):
        trace(OnTheCpu(), ids(), torch.float32)


def test_ambient_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "call parallelize outside it and choose precision=" in refusal()


class Logits(Chain):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits(self.embedding(input_ids))


def test_no_loss() -> None:
    said = refusal(Logits(), inputs={"input_ids": ids()["input_ids"]})
    assert "Logits.forward must return the loss first (a 0-dim tensor)" in said and "loss=a callable" in said


def test_loss_that_is_given() -> None:
    def loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    assert "F.cross_entropy(" in plan(Logits(), loss=loss).source()


# --------------------------------------------------------------------------------
# T2: a Hugging Face signature


class OneOfTwo(Chain):
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return self.logits(x).square().mean() if labels is None else self.loss(x, labels)


@pytest.mark.parametrize("names", [("inputs_embeds",), ("input_ids", "labels"), ("inputs_embeds", "labels")])
def test_keywords_with_none_as_default(names: tuple[str, ...]) -> None:
    """T2: the traced program takes exactly the keywords given; None arguments are concrete."""
    given = {**ids(), "inputs_embeds": torch.zeros(2, 16, 20, device="meta")}
    program = trace(OneOfTwo(), {name: given[name] for name in names}, torch.float32)
    assert set(program.inputs) == set(names)
    with_none = {**{name: given[name] for name in names}, "attention_mask": None}
    assert set(trace(OneOfTwo(), with_none, torch.float32).inputs) == set(names)


def test_neither_of_two() -> None:
    with pytest.raises(TraceError, match="give one of input_ids and inputs_embeds"):
        trace(OneOfTwo(), {"labels": ids()["labels"]}, torch.float32)


def test_keywords_reach_the_program() -> None:
    source = plan(OneOfTwo()).source()
    assert "def forward(self, *, input_ids, labels):" in source
