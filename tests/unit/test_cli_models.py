"""A model by its Hugging Face config, of any architecture class; what is said where that leads nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopar.errors import PlanError
from autopar.trace.named import named_model

_D: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, tuple[transformers.PretrainedConfig, str]] = {
    "causal": (transformers.Qwen2Config(**_D, vocab_size=64, architectures=["Qwen2ForCausalLM"]), "Qwen2ForCausalLM"),
    "masked": (transformers.BertConfig(**_D, vocab_size=64, architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
    "an encoder without its head": (
        transformers.BertConfig(**_D, vocab_size=64, architectures=["BertModel"]),
        "BertForMaskedLM",
    ),
    "encoder-decoder": (
        transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=64),
        "T5ForConditionalGeneration",
    ),
    "speech": (
        transformers.WhisperConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        ),
        "WhisperForConditionalGeneration",
    ),
    "vision": (transformers.ViTConfig(**_D, image_size=16, patch_size=8), "ViTForImageClassification"),
    "a class of its own choice": (
        transformers.BertConfig(**_D, vocab_size=64, architectures=["BertForSequenceClassification"]),
        "BertForSequenceClassification",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), CONFIGS.values(), ids=CONFIGS.keys())
def test_every_architecture_class(config: transformers.PretrainedConfig, expected: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    model, inputs = named_model(str(tmp_path / "config.json"))
    assert isinstance(model, nn.Module) and type(model).__name__ == expected and inputs is None
    assert all(p.device == torch.device("meta") for p in model.parameters())
    again, _ = named_model(str(tmp_path))
    assert type(again) is type(model)


def test_configs_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(PlanError, match=r"the folder has no config.json; it has notes.txt"):
        named_model(str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(PlanError, match="is no config of a model that transformers knows .*unheard-of"):
        named_model(str(path))
    path.write_text("{")
    with pytest.raises(PlanError, match="is no config of a model"):
        named_model(str(path))
    transformers.EncodecConfig().save_pretrained(tmp_path)
    with pytest.raises(
        PlanError, match="a config of 'encodec' with no architectures, for which transformers has no class"
    ):
        named_model(str(path))


def test_a_name_that_is_not_here_says_what_to_do() -> None:
    with pytest.raises(PlanError, match="nothing is downloaded: fetch its config.json, and name that"):
        named_model("no/such-model")
