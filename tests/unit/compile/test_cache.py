"""The cache of prepared programs: what has an entry, what has none, and that no model gets another one's program.

`cache="name"` is the user's word that a name changes with the model's code: of two instances with plain attributes that
differ each has its own program even so; of two versions of one class, or two losses, only the name can tell.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar import api
from autopar.api import Parallelized, parallelize
from autopar.compile import cache as stored
from autopar.compile.model_key import key_of
from autopar.errors import PlanError
from autopar.ir.custom import OpaqueCall
from autopar.ir.graph import Program
from autopar.request import Job
from examples.gpt import GPT, GPTConfig
from tests import zoo

IDS = torch.zeros(2, 16, dtype=torch.long)
BATCH = {"input_ids": IDS, "labels": IDS}
OPTIONS: dict[str, Any] = {"gpu": "h100-sxm-80gb", "global_batch": 8, "inputs": BATCH}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOPAR_CACHE", raising=False)
    return tmp_path / "autopar"


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The class names of the models that `parallelize` has traced."""
    found: list[str] = []
    traced = api._traced

    def counted(job: Job) -> Program:
        found.append(job.name)
        return traced(job)

    monkeypatch.setattr(api, "_traced", counted)
    return found


def qwen(**changes: Any) -> nn.Module:
    return zoo.huggingface(
        "Qwen2ForCausalLM", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, use_cache=False, attention_dropout=0.0, **changes
    )()  # fmt: skip


def gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(**{"n_layer": 2, "d_model": 32, "block_size": 32, **changes}))


def plan(model: nn.Module, **options: Any) -> Parallelized:
    return parallelize(model, 2, **OPTIONS, **options)


def key(model: nn.Module, name: str | None = None) -> str | None:
    return key_of(model, BATCH, ("bf16",), name)


def test_a_hugging_face_model_is_traced_once_and_planned_alike(traces: list[str], folder: Path) -> None:
    first, second = plan(qwen()), plan(qwen())
    assert traces == ["Qwen2ForCausalLM"] and len([*folder.iterdir()]) == 1
    one, other = (re.sub(r"in [\d.]+ s", "", planned.source()) for planned in (first, second))
    assert one == other and first.plan == second.plan


def _of_eps(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def test_instances_that_differ_in_one_attribute_have_their_own_programs(traces: list[str]) -> None:
    one, other = qwen(), qwen()
    _of_eps(other)
    assert "0.5" not in plan(one).source() and "0.5" in plan(other).source()
    assert len(traces) == 2


def _scaled(model: Any) -> None:
    model.config.rms_norm_eps = 0.1


def _frozen(model: Any) -> None:
    model.model.embed_tokens.weight.requires_grad_(False)


def _tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def _buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2.0)


def _evaluated(model: Any) -> None:
    model.model.layers[0].eval()


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [_of_eps, _scaled, _frozen, _tied, _buffer, _evaluated, _eager])
def test_what_a_trace_reads_is_in_the_key(change: Callable[[Any], None]) -> None:
    model = qwen()
    before = key(model)
    assert before and before == key(model)
    change(model)
    assert key(model) not in (None, before)


def test_inputs_and_settings_are_in_the_key() -> None:
    model = qwen()
    keys = {
        key_of(model, BATCH, ("bf16",), None), key_of(model, BATCH, ("fp32",), None),
        key_of(model, {**BATCH, "labels": IDS + 1}, ("bf16",), None),
        key_of(model, {"input_ids": IDS[:, :8], "labels": IDS[:, :8]}, ("bf16",), None),
    }  # fmt: skip
    assert len(keys) == 4 and None not in keys


class _Norm(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def _hook(model: Any, patch: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *of: None)


def _forward(model: Any, patch: Any) -> None:
    model.model.norm.forward = lambda x: 2 * x


def _module(model: Any, patch: Any) -> None:
    model.model.norm = _Norm()


def _method(model: Any, patch: Any) -> None:
    patch.setattr(type(model.model.norm), "forward", lambda self, x: x)


def _function(model: Any, patch: Any) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    patch.setattr(modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))


def _attention(model: Any, patch: Any) -> None:
    from transformers import AttentionInterface

    patch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *of, **more: None)


def _functional(model: Any, patch: Any) -> None:
    patch.setattr(torch.nn.functional, "silu", lambda x: x)


def _object(model: Any, patch: Any) -> None:
    model.model.layers[0].scale = object()


def _subclass(model: Any, patch: Any) -> None:
    model.__class__ = type("Qwen2ForCausalLM", (type(model),), {})


@pytest.mark.parametrize(
    "change",
    [_hook, _forward, _module, _method, _function, _attention, _functional, _object, _subclass],
)
def test_a_model_with_code_of_the_user_in_it_is_not_kept(
    change: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen()
    change(model, monkeypatch)
    assert key(model) is None


def test_another_function_of_transformers_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    model = qwen()
    before = key(model)
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.eager_attention_forward)
    assert key(model) not in (None, before)


def test_other_models_are_kept_under_a_name(traces: list[str]) -> None:
    assert key(gpt()) is None
    plan(gpt(), cache="mine")
    plan(gpt(), cache="mine")
    assert traces == ["GPT"]
    plan(gpt(), cache="mine 2")
    plan(gpt(), cache=False)
    assert len(traces) == 3
    assert len({key(gpt(), "mine"), key(gpt(n_head=2), "mine"), key(gpt(dropout=0.5), "mine")}) == 3
    with pytest.raises(PlanError, match="cache=True: use a name that you change with the model's code"):
        plan(gpt(), cache=True)


def test_it_can_be_turned_off(traces: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    plan(gpt(), cache="mine")
    assert not folder.exists() and traces


@pytest.mark.parametrize("damage", ["", "cut", "changed", "bytes", "other form"])
def test_a_damaged_entry_is_told_and_written_anew(
    damage: str, traces: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = plan(gpt(), cache="mine").source()
    (file,) = folder.iterdir()
    text = file.read_text()
    body = "name = Nothing()\n"
    damaged = {"cut": text[: len(text) // 2], "changed": text.replace("aten.add", "aten.sub"), "": ""}
    file.write_bytes(
        damaged.get(damage, f"{stored._head(body)}\n{body}").encode() if damage != "bytes" else b"\xff\xfe"
    )
    capsys.readouterr()
    again = plan(gpt(), cache="mine").source()
    assert len(traces) == 2 and file.read_text() == text and len(again.splitlines()) == len(whole.splitlines())
    said = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
    assert len(said) == 1 and str(file) in said[0]


def test_a_program_with_a_module_that_is_kept_whole_is_not_written(folder: Path) -> None:
    program = plan(gpt(), cache="mine").program
    stored._write(folder / "other.txt", replace(program, opaque={"mlp": OpaqueCall("mlp", ((), {}))}))
    assert not (folder / "other.txt").exists()


def test_verify_traces_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(gpt(), cache="mine")
    for name in ("_read", "cache_directory", "key_of"):
        monkeypatch.setattr(stored, name, lambda *of: pytest.fail("verify reads the cache"))
    assert planned.verify(1).holds


def test_processes_write_at_once(folder: Path) -> None:
    program = plan(gpt(), cache="mine").program
    (file,) = folder.iterdir()
    context = multiprocessing.get_context("fork")

    def write() -> None:
        for _ in range(20):
            stored._write(file, program)

    writers = [context.Process(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert stored._read(file) is not None
    assert [*folder.iterdir()] == [file]


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = plan(gpt(), cache="mine").program
    monkeypatch.setattr(stored, "_MOST", 3)
    for i in range(6):
        stored._write(folder / f"{i}.txt", program)
    assert len([*folder.iterdir()]) == 3 and (folder / "5.txt").exists()
