"""The models that tests share, small or of realistic width, each with its traced and prepared program.

Each is traced once a process: the program is shared (passes copy before they change), the model is the caller's own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from autopar.compile.compiler import run
from autopar.ir.graph import NodeInfo, Program
from autopar.passes import PREPARE
from autopar.placement import Placement, Strategy
from autopar.trace.export import trace
from autopar.trace.huggingface import default_inputs, traceable
from autopar.trace.layers import class_names, split_layers
from examples.gpt import GPT, GPTConfig

VOCABULARY = 97  # of the small models; odd, so that its shards are uneven


def prepare(model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Program:
    """The program of one block, traced and run through PREPARE; batch norm synchronised."""
    with traceable(model, inputs):
        program = trace(model, inputs, dtype, batch_norm="synchronise")
    return run(PREPARE, program)


def layered(model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Program:
    """The prepared program cut into layers, as the search and the passes take it."""
    return split_layers(prepare(model, inputs, dtype), class_names(model))


def gpt(dtype: torch.dtype = torch.float64, meta: bool = False, **changes: Any) -> tuple[nn.Module, Program]:
    """examples/gpt.py, tied, with 3 layers of width 64; `meta`: without weights."""
    return _own(_gpt(dtype, meta, **changes))


def llama(dtype: torch.dtype = torch.float64, meta: bool = False, **changes: Any) -> tuple[nn.Module, Program]:
    """Hugging Face's Llama with 3 layers of width 64 and grouped K/V heads (4 and 2)."""
    return _own(_llama(dtype, meta, **changes))


def qwen2(dtype: torch.dtype = torch.float64, meta: bool = False, **changes: Any) -> tuple[nn.Module, Program]:
    """Hugging Face's Qwen2 (QKV biases, tied embeddings) with 2 layers of width 64 and grouped K/V heads."""
    return _own(_qwen2(dtype, meta, **changes))


def _own(made: tuple[nn.Module, Program]) -> tuple[nn.Module, Program]:
    return copy.deepcopy(made[0]), made[1]


@cache
def _gpt(dtype: torch.dtype, meta: bool, **changes: Any) -> tuple[nn.Module, Program]:
    small = GPTConfig(vocab_size=VOCABULARY, n_layer=3, n_head=4, d_model=64, block_size=64)
    model = seeded(lambda: GPT(replace(small, **changes)), meta)
    ids = torch.zeros(2, 16, dtype=torch.long)
    return model, layered(model, {"input_ids": ids, "labels": ids}, dtype)


@cache
def _llama(dtype: torch.dtype, meta: bool, **changes: Any) -> tuple[nn.Module, Program]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_hf_sizes(), **changes})
    return _huggingface(lambda: LlamaForCausalLM(config), dtype, meta)


@cache
def _qwen2(dtype: torch.dtype, meta: bool, **changes: Any) -> tuple[nn.Module, Program]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{**_hf_sizes(), "num_hidden_layers": 2, "tie_word_embeddings": True, **changes})
    return _huggingface(lambda: Qwen2ForCausalLM(config), dtype, meta)


def _hf_sizes() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
    }


def _huggingface(build: Any, dtype: torch.dtype, meta: bool) -> tuple[nn.Module, Program]:
    model = seeded(build, meta)
    return model, layered(model, default_inputs(model, 2, 16), dtype)


def seeded(build: Any, meta: bool) -> Any:
    """The model with weights that depend on nothing else, or on the meta device."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(0)
        return build()


@dataclass(frozen=True)
class RandomCosts:
    """A random cost, by seed, for every choice of the intra-op search: its solutions are random legal plans."""

    seed: int

    def strategy(self, node: fx.Node, strategy: Strategy) -> float:
        return self._draw(node.name, strategy)

    def stored(self, facts: NodeInfo, placement: Placement) -> float:
        return self._draw(facts.ref, placement)

    def conversion(self, facts: NodeInfo, source: Placement, target: Placement) -> float:
        return self._draw(facts.shape, source, target)

    def _draw(self, *key: object) -> float:
        """Seconds in [0, 1e-4), the same for the same key in every process."""
        return 1e-4 * random.Random(f"{self.seed} {' '.join(map(str, key))}").random()
