"""The command line, in this process, on a tiny model in the working directory."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.api import Parallelized
from autopar.cli import main
from autopar.compile.compiler import prepare
from autopar.plan.plan import Plan
from autopar.plan.recompute import whole_layers
from autopar.verification.parity import Parity

TINY = """
import torch
from examples.gpt import GPT, GPTConfig

def build():
    return GPT(GPTConfig(n_layer=2, d_model=32, block_size=32))

def big():
    return GPT(GPTConfig(n_layer=8, d_model=1024))

def sized(layers):
    return build()

def inputs():
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}

def short_inputs():
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}
"""
ON = ["--gpus", "2", "--gpu", "h100-sxm-80gb", "--global-batch", "8"]


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory; another one for each test, for imports are cached."""
    name = f"tiny_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*arguments: str) -> int:
    return main(arguments)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one message on stderr of a command that is refused."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("autopar: ") and "Traceback" not in captured.err
    return captured.err


# --------------------------------------------------------------------------------
# plan


def test_plan_prints_the_table_and_the_ledger(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", f"{tiny}:build", *ON, "--explain") == 0
    printed = capsys.readouterr().out
    assert "GPT · 34,688 parameters · 2 × H100-SXM-80GB · 8 × 16 tokens a step" in printed
    assert "micro×acc" in printed
    assert "stage 0 (layers 0–1, embedding, head)" in printed
    assert "why not" in printed


def test_plan_json(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document: the chosen plan, its estimate and the runners-up; each plan can be emitted."""
    assert run("plan", f"{tiny}:build", *ON, "--json", "--save", "plan.yaml") == 0
    found = json.loads(capsys.readouterr().out)
    plan = Plan.from_dict(found["plan"])
    assert plan.to_dict() == found["plan"] == Plan.load(tmp_path / "plan.yaml").to_dict()
    assert found["estimate"]["step_time_s"] > 0
    assert len(found["estimate"]["stages"]) == plan.mesh.pp
    assert found["runners_up"]
    for other in found["runners_up"]:
        assert Plan.from_dict(other["plan"]).mesh != plan.mesh
        assert other["reason"].startswith("why not")
        assert other["estimate"]["step_time_s"] >= found["estimate"]["step_time_s"]


def test_pins_reach_the_plan(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["--pp", "2", "--dp", "1", "--tp", "1", "--micro-batch", "2", "--schedule", "1f1b", "--recompute", "1,"]
    assert run("plan", f"{tiny}:build", *ON, *pins, "--precision", "fp32", "--lr", "0.5", "--json") == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out)["plan"])
    assert (plan.mesh.pp, plan.batch.micro_batch, plan.pipeline.schedule) == (2, 2, "1f1b")
    assert plan.activations.recompute == whole_layers((1,))
    assert (plan.compute.precision, plan.optimizer.kwargs) == ("fp32", {"lr": 0.5})


def test_forbid(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    bans = [part for zero in (0, 1, 2) for part in ("--forbid", f"zero={zero}")]
    assert run("plan", f"{tiny}:build", *ON, "--dp", "2", *bans, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["zero"] == 3


@pytest.mark.parametrize(
    ("option", "layout"), [("--sequence-parallel", "megatron-sp"), ("--no-sequence-parallel", "megatron")]
)
def test_sequence_parallel(tiny: str, option: str, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", f"{tiny}:build", *ON, "--tp", "2", option, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["layout"] == layout


def test_inputs_by_name(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", f"{tiny}:build", *ON, "--inputs", f"{tiny}:short_inputs") == 0
    assert "8 × 8 tokens a step" in capsys.readouterr().out


def test_huggingface_config_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with config.json, or the file itself; no weights are made or read."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "llama")
    assert run("plan", "llama", *ON, "--dp", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "LlamaForCausalLM"
    assert run("plan", "llama/config.json", *ON, "--dp", "2", "--sequence", "32") == 0
    assert "8 × 32 tokens a step" in capsys.readouterr().out


# --------------------------------------------------------------------------------
# emit, again after an edit, run


def test_emit_edit_emit(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("emit", f"{tiny}:build", *ON, "--tp", "2", "--out", "program") == 0
    assert "autopar run program" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "program").iterdir()}
    assert {"model.py", "train.py", "plan.yaml", "runtime", "README.md", "launch.sh", "job.sbatch"} <= written
    plan = yaml.safe_load((tmp_path / "program" / "plan.yaml").read_text())
    plan |= {"micro_batch": 2, "recompute": [1], "optimizer": {"name": "SGD", "kwargs": {"lr": 0.1}, "groups": []}}
    (tmp_path / "edited.yaml").write_text(yaml.safe_dump(plan))
    assert run("emit", f"{tiny}:build", "--plan", "edited.yaml", "--out", "again") == 0
    assert "2 × 4" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "again" / "plan.yaml").read_text()) == plan | {"recompute": {"1": "layer"}}
    source = (tmp_path / "again" / "model.py").read_text()
    assert "RECOMPUTE = range(1, 2)" in source and 'optimizer="SGD"' in source and "micro_batch=2" in source


def test_stages_of_an_edited_plan(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan without placements has them solved for; its stages are priced as they stand."""
    assert run("plan", f"{tiny}:build", *ON, "--pp", "2", "--dp", "1", "--tp", "1", "--save", "plan.yaml") == 0
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    plan |= {"mesh": {**plan["mesh"], "tp": 2}, "placements": {}, "layout": "megatron"}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert run("emit", f"{tiny}:build", "--plan", "plan.yaml", "--out", "program") == 0
    saved = Plan.load(tmp_path / "program" / "plan.yaml")
    assert saved.mesh.tp == 2 and saved.solution.strategies["Block"]
    capsys.readouterr()


PP2 = {"mesh": {"pp": 2, "dp": 1, "cp": 1, "tp": 2}, "schedule": "gpipe"}
NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "micro batch": ({"micro_batch": 3}, "global_batch=8 is not divisible by micro_batch=3 × dp=1 = 3: use a multiple"),
    "text for a number": ({"micro_batch": "two"}, "micro_batch: 'two' is not a whole number of samples, 1 to"),
    "heads": ({"mesh": {"pp": 1, "dp": 1, "tp": 3}}, "tp=3: 4 heads of Block.attn are not divisible by 3: use one of"),
    "a stage less": ({"stages": [[0, 1]]}, "do not hold each of the 2 layers of GPT exactly once, in order: the last"),
    "a gap": ({**PP2, "stages": [[0, 0], [1, 2]]}, "stage 0 has no layers; give 2 consecutive ranges"),
    "a layer twice": ({**PP2, "stages": [[0, 2], [1, 2]]}, "stage 1 starts at layer 1, where 2 is next (layers [1]"),
    "a layer in none": ({**PP2, "stages": [[1, 2], [2, 3]]}, "starts at layer 1, where 0 is next (layers [0] are in"),
    "backwards": ({**PP2, "stages": [[0, 3], [3, 2]]}, "stage 1 has no layers"),
    "no ranges": ({"stages": "all"}, "stages: 'all' is not a layer range [start, stop] for each stage, as [[0, 12]"),
    "recompute": ({"recompute": [7]}, "recompute names layers [7]"),
    "recompute in words": (
        {"recompute": "full"},
        "recompute: 'full' is not what to recompute of which layers, as {0-11: mlp, 12: layer}",
    ),
    "zero": ({"zero": 7}, "zero: 7 is not 0, 1, 2 or 3"),
    "true": ({"zero": True}, "zero: True is not 0, 1, 2 or 3"),
    "unknown key": ({"zeros": 1}, "no such key: zeros (did you mean 'zero'?)"),
    "no value": ({"zero": None}, "zero: None is not 0, 1, 2 or 3"),
    "an axis": ({"mesh": {"pp": 1, "dp": 1, "tp": 2, "ep": 2}}, "mesh: {"),
    "an axis less": ({"mesh": {"pp": 2}}, "mesh: {'pp': 2} is not a whole number for each of pp, dp, cp and tp"),
    "optimizer": ({"optimizer": {"name": "Lion", "kwargs": {}}}, "'Lion' is not known to be elementwise"),
    "its options": ({"optimizer": {"name": "AdamW", "kwargs": {"lrr": 1}}}, "lrr"),
    "optimizer as text": ({"optimizer": "AdamW"}, "optimizer: 'AdamW' is not a name, kwargs and perhaps groups"),
    "its groups": (
        {"optimizer": {"name": "AdamW", "kwargs": {}, "groups": [{"names": ["lm_head.weigth"]}]}},
        "optimizer: groups: parameter 'lm_head.weigth' is not in GPT (did you mean 'lm_head.weight'?)",
    ),
    "precision": ({"precision": "fp8"}, "precision: 'fp8' is not one of bf16, fp16, fp32, fp64"),
    "reduction": ({"reduce_dtype": "fp16"}, "reduce_dtype='fp16' with precision="),
    "schedule": ({"schedule": "1f1b"}, "schedule='1f1b' with pp=1: use none"),
    "layout": ({"layout": "megatrom"}, "layout 'megatrom' is not in GPT (did you mean 'megatron"),
    "a placement": (
        {"placements": {"Block": {"ln_1": "R, R, R -> S(0)"}}},
        "no strategy of its rule on tp=2: use one of ",
    ),
    "no placement": ({"placements": {"Block": {"ln_1": "sharded"}}}, "plan.yaml"),
    "a node": (
        {"placements": {"Block": {"ln_11": "R -> R"}}},
        "placements: Block: node 'ln_11' is not in GPT (did you",
    ),
    "a block": ({"placements": {"Blok": {}}}, "placements: block 'Blok' is not in GPT (did you mean 'Block'?)"),
}


def test_nonsense_in_a_plan(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}  # traced once, as the model is the same
    monkeypatch.setattr("autopar.api.prepare", lambda *of: made.get("") or made.setdefault("", prepare(*of)))
    assert run("plan", f"{tiny}:build", *ON, "--tp", "2", "--save", "good.yaml") == 0
    good = yaml.safe_load((tmp_path / "good.yaml").read_text())
    capsys.readouterr()
    for name, (changes, message) in NONSENSE.items():
        plan = {**good, **changes}
        for block, nodes in changes.get("placements", {}).items():
            plan["placements"] = {**good["placements"], block: {**good["placements"].get(block, {}), **nodes}}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
        said = refusal(capsys, "emit", f"{tiny}:build", "--plan", "plan.yaml", "--out", "program")
        assert message in said, (name, said)
    for text, message in (("", "a plan is a mapping"), ("zero: 1", "mesh is missing: it is a whole number for each")):
        (tmp_path / "plan.yaml").write_text(text)
        assert message in refusal(capsys, "emit", f"{tiny}:build", "--plan", "plan.yaml", "--out", "program")
    assert not (tmp_path / "program").exists()


def test_options_beside_a_plan(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", f"{tiny}:build", *ON, "--dp", "2", "--save", "plan.yaml") == 0
    capsys.readouterr()
    said = refusal(capsys, "emit", f"{tiny}:build", "--plan", "plan.yaml", "--out", "program", "--zero", "3")
    assert "--zero: with --plan this is read from plan.yaml" in said


def test_run_launches_torchrun_and_passes_its_code_on(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/distributed/test_saved_program.py launches a real one."""
    assert run("emit", f"{tiny}:build", *ON, "--dp", "2", "--out", "program") == 0
    capsys.readouterr()
    launched: list[list[str]] = []

    class Launch(nullcontext["Launch"]):
        def __init__(self, command: list[str]) -> None:
            super().__init__(self)
            launched.append(command)

        def wait(self) -> int:
            return 7

    monkeypatch.setattr(subprocess, "Popen", Launch)
    assert run("run", "program", "--", "--steps", "3", "--log", "log.jsonl") == 7
    (command,) = launched
    assert command[command.index("--nproc-per-node") + 1] == "2"
    dashes = command.index("--")
    assert command[dashes + 1 :] == ["program/train.py", "--steps", "3", "--log", "log.jsonl"]


# --------------------------------------------------------------------------------
# Errors


def test_names_that_lead_nowhere(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no module 'nowhere' here" in refusal(capsys, "plan", "nowhere:build", *ON)
    said = refusal(capsys, "plan", f"{tiny}:bild", *ON)
    assert "has no function 'bild' (did you mean 'build'?), but build, big, sized, inputs, short_inputs" in said
    assert "needs layers: name a function that needs no arguments" in refusal(capsys, "plan", f"{tiny}:sized", *ON)
    assert "write module:function" in refusal(capsys, "plan", f"{tiny}:build", *ON, "--inputs", "inputs")
    assert "--forbid zero: write name=value" in refusal(capsys, "plan", f"{tiny}:build", *ON, "--forbid", "zero")


def test_infeasible(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "plan", f"{tiny}:big", *ON, "--memory", "1GiB")
    assert "no plan fits 1.0 GiB a GPU" in said and "too much" in said


def test_debug_shows_the_traceback(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    with pytest.raises(ValueError, match="gpus=0"):
        run("plan", f"{tiny}:build", "--gpus", "0")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    for word in ("plan", "emit", "run", "verify", "examples:"):
        assert word in printed


@pytest.mark.parametrize(("largest", "code"), [(1e-12, 0), (1e-3, 1)])
def test_verify_gives_its_verdict_as_code(
    tiny: str, largest: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run itself is a matter of tests/distributed; here it is the word and the code."""
    parity = Parity(largest, largest, largest, largest, "a.weight", "b.weight", steps=5, processes=2)
    monkeypatch.setattr(Parallelized, "verify", lambda self, steps: parity)
    assert run("verify", f"{tiny}:build", *ON, "--dp", "2") == code
    assert ("computes what the model computes" if code == 0 else "DIFFERS") in capsys.readouterr().out


@pytest.mark.slow
def test_verify_on_processes(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", f"{tiny}:build", *ON, "--tp", "2") == 0
    assert "on 2 processes computes what the model computes" in capsys.readouterr().out


# --------------------------------------------------------------------------------
# verify DIR: an edited program


@pytest.fixture
def program(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run("emit", f"{tiny}:build", *ON, "--tp", "2", "--out", "program") == 0
    capsys.readouterr()
    return tmp_path / "program"


def edit(program: Path, before: str, after: str, file: str = "model.py") -> int:
    """The line of the edit."""
    text = (program / file).read_text()
    assert text.count(before) == 1
    (program / file).write_text(text.replace(before, after))
    return text[: text.index(before)].count("\n") + 1


def test_verify_a_program_that_is_not_edited(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "program", "--steps", "2") == 0
    printed = capsys.readouterr().out
    assert "the sources are as they were written" in printed
    assert "computes what the original computes (2 steps in fp64 on 2 processes, against the original model" in printed


GELU = 'F.gelu(h, approximate="tanh")'
AS_GELU = "0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))"


@pytest.mark.slow
def test_verify_an_edit_that_changes_nothing(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(program, GELU, AS_GELU)
    assert run("verify", "program", "--steps", "2") == 0
    printed = capsys.readouterr().out
    assert "model.py: Block.forward" in printed and f"+        h = {AS_GELU}" in printed
    assert "the edit does not change what is computed" in printed


def test_verify_an_edit_that_changes_the_activation(
    program: Path, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the model, and without it: then beside the program as it was written."""
    line = edit(program, GELU, "F.silu(h)")
    for against in ("the original model on one process", "the program as written (the model cannot be built here"):
        assert run("verify", "program", "--steps", "2") == 1
        printed = capsys.readouterr().out
        assert f"model.py: Block.forward  line {line}  −1  +1" in printed
        assert "differs by up to" in printed and "first at: loss, step 0" in printed and against in printed
        worst = [row for row in printed.splitlines() if row.startswith("gradient of")]
        assert len(worst) == 5 and any("mlp.c_fc" in row for row in worst)
        (tmp_path / f"{tiny}.py").unlink(missing_ok=True)
        sys.modules.pop(tiny, None)


@pytest.mark.slow
def test_verify_an_edit_that_does_not_run(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = edit(program, "F.gelu(h,", "F.gelu(hh,")
    said = refusal(capsys, "verify", "program", "--steps", "1")
    assert "model.py: Block.forward" in said
    assert f"model.py:{line}, in forward:" in said and "NameError: name 'hh' is not defined" in said
    edit(program, "F.gelu(hh,", "F.gelu(h,")
    edit(program, '"mlp.c_fc.bias", (128,)', '"mlp.c_fc.bias", (64,)')
    said = refusal(capsys, "verify", "program", "--steps", "1")
    assert "Block.__init__" in said and "mlp.c_fc.bias has shape [64], and its values [128]" in said


@pytest.mark.slow
def test_verify_names_edits_outside_the_model(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(program, "meter.start()", "meter.start()  # mine", "train.py")
    edit(program, "    if p == 0 or not training:", "    if p <= 0 or not training:", "runtime/random.py")
    assert run("verify", "program", "--steps", "1") == 0
    printed = capsys.readouterr().out
    assert "train.py: main" in printed and "runtime/random.py: dropout" in printed


def test_verify_a_folder_without_its_record(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program / ".original" / "original.json").unlink()
    assert "with its program as written: save it again" in refusal(capsys, "verify", "program")
