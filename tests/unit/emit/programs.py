"""model.py of small models under plans written by hand, and its syntax tree."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autopar.compile.cache import remembered
from autopar.compile.compiler import compile_program, cut_sequence, prepare, with_heads
from autopar.cost_models.hardware import gpu
from autopar.emit.emission import Predicted
from autopar.emit.source import model_source
from autopar.ir.graph import B, Program, S
from autopar.plan.plan import Plan, Solution
from autopar.plan.recompute import RecomputeChoice
from autopar.rules import TensorAxis
from autopar.rules.attention import context_axis
from autopar.runtime.choices import Mesh
from autopar.search.intra_op import solve
from autopar.search.layouts import MEGATRON, MEGATRON_SP, RING, Layout, replicated
from autopar.search.op_costs import TimeCosts
from autopar.trace.huggingface import default_inputs
from tests import models, zoo

SEQUENCE = 16
LAYOUTS = {layout.name: layout for layout in (MEGATRON, MEGATRON_SP)}


@dataclass(frozen=True)
class Emitted:
    """A compiled program and the text of its model.py, without predictions."""

    program: Program
    plan: Plan

    @cached_property
    def source(self) -> str:
        return model_source(self.program, self.plan, Predicted())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def class_of(self, name: str) -> ast.ClassDef:
        return next(node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name)


@cache
def emitted(
    model: str,
    pp: int = 1,
    tp: int = 1,
    layout: str = "megatron",
    layers: int = 4,
    recompute: tuple[RecomputeChoice, ...] = (),
    dropout: float = 0.0,
    dp: int = 1,
    cp: int = 1,
    zero: int = 0,
) -> Emitted:
    """The GPT of examples/gpt.py, HF's Llama or Mistral, of width 64, or a family of tests/zoo.py; in bf16."""
    program = _program(model, layers, dropout)
    layers = len(program.layer_calls)
    plan = Plan.of(
        mesh=Mesh(pp=pp, dp=dp, cp=cp, tp=tp),
        global_batch=8 * dp,
        micro_batch=4,
        sequence=SEQUENCE,
        stages=tuple((i * layers // pp, (i + 1) * layers // pp) for i in range(pp)),
        schedule="1f1b" if pp > 1 else "none",
        zero=zero,
        recompute=recompute,
    )
    plan = plan.changed(context=_context(program, plan))
    plan = plan.changed(solution=_solution(cut_sequence(program, plan), tp, LAYOUTS[layout]))
    return Emitted(compile_program(program, plan), plan)


@cache
def _program(model: str, layers: int, dropout: float) -> Program:
    """As the compiler prepares it."""
    if model == "gpt":
        return models.gpt(torch.bfloat16, meta=True, n_layer=layers, dropout=dropout)[1]
    return _hugging_face(model, layers) if model in ("llama", "mistral") else _family(model)


def _hugging_face(name: str, layers: int) -> Program:
    """A deep model takes no longer than a shallow one; each layer of Mistral is in a window of 8 keys."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=models.VOCABULARY, max_position_embeddings=128,
    )  # fmt: skip
    with torch.device("meta"):
        if name == "mistral":
            model: Any = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes))
    return _kept(model, default_inputs(model, 2, SEQUENCE), "bf16")


def _family(name: str) -> Program:
    family = zoo.FAMILIES[name]
    with torch.device("meta"):
        model = family.build()
    inputs = family.inputs(2, torch.Generator().manual_seed(0))
    return _kept(model, {**inputs, **family.arguments}, "bf16")


def _context(program: Program, plan: Plan) -> Solution:
    """The placements over cp by ring attention, of lengths at which the sequence is cut."""
    cp = plan.mesh.cp
    if cp == 1:
        return Solution(1, {})
    values = {B: plan.batch.micro_batch, S: plan.batch.sequence}
    costs = TimeCosts(gpu("h100-sxm-80gb"), "bf16", cp, {B: 1, S: 8192}, axis="cp")
    return solve(with_heads(program, plan), context_axis(program, cp, values, RING.name, plan.mesh.tp), costs, RING)


def _kept(model: nn.Module, inputs: Mapping[str, Any], precision: str) -> Program:
    """Prepared once for all workers, by the product's cache, in pytest's folder; the tests' own models each time."""
    folder = {"AUTOPAR_CACHE": "on", "XDG_CACHE_HOME": str(Path(__file__).parents[3] / ".pytest_cache")}
    with patch.dict(os.environ, folder):
        return remembered(lambda: prepare(model, inputs, precision), model, inputs, (precision, "refuse"), None)


def _solution(program: Program, tp: int, layout: Layout) -> Solution:
    if tp == 1:
        return replicated(program)
    # Of a size at which splitting the work pays: the layout is then the one it is named for.
    tokens = any(S in tensor.shape for tensor in program.inputs.values())
    values = {B: 4, S: 4096} if tokens else {B: 64, S: 1}
    axis = TensorAxis(tp, values, layout.sequence)
    return solve(program, axis, TimeCosts(gpu("h100-sxm-80gb"), "bf16", tp, values), layout)


def calls(tree: ast.AST) -> list[str]:
    """The dotted names of what is called."""
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def methods(tree: ast.ClassDef, names: Sequence[str]) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
