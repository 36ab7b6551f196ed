"""model.py of small models under plans written by hand, and its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from autopar.compile.compiler import compile_program, prepare
from autopar.cost_models.hardware import gpu
from autopar.emit.emission import Predicted
from autopar.emit.source import model_source
from autopar.ir.graph import B, Program, S
from autopar.plan.plan import Plan, Solution
from autopar.plan.recompute import Again
from autopar.rules import Axis
from autopar.runtime.choices import Mesh
from autopar.search.intra_op import solve
from autopar.search.layouts import MEGATRON, MEGATRON_SP, Layout, replicated
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
    recompute: tuple[Again, ...] = (),
    dropout: float = 0.0,
) -> Emitted:
    """The GPT of examples/gpt.py or HF's Llama, of width 64, or a family of tests/zoo.py; in bf16."""
    if model == "gpt":
        _, program = models.gpt(torch.bfloat16, meta=True, n_layer=layers, dropout=dropout)
    else:
        program = _llama(layers) if model == "llama" else _family(model)
    layers = len(program.layer_calls)
    plan = Plan.of(
        mesh=Mesh(pp=pp, tp=tp),
        global_batch=8,
        micro_batch=4,
        sequence=SEQUENCE,
        stages=tuple((i * layers // pp, (i + 1) * layers // pp) for i in range(pp)),
        schedule="1f1b" if pp > 1 else "none",
        recompute=recompute,
        solution=_solution(program, tp, LAYOUTS[layout]),
    )
    return Emitted(compile_program(program, plan), plan)


def _llama(layers: int) -> Program:
    """As the compiler prepares it: a deep model takes no longer than a shallow one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=models.VOCABULARY, max_position_embeddings=128,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return prepare(model, default_inputs(model, 2, SEQUENCE), "bf16")


def _family(name: str) -> Program:
    family = zoo.FAMILIES[name]
    with torch.device("meta"):
        model = family.build()
    inputs = family.inputs(2, torch.Generator().manual_seed(0))
    return prepare(model, {**inputs, **family.arguments}, "bf16")


def _solution(program: Program, tp: int, layout: Layout) -> Solution:
    if tp == 1:
        return replicated(program)
    # Of a size at which splitting the work pays: the layout is then the one it is named for.
    tokens = any(S in tensor.shape for tensor in program.inputs.values())
    values = {B: 4, S: 4096} if tokens else {B: 64, S: 1}
    axis = Axis("tp", tp, sequence=layout.sequence, values=values)
    return solve(program, axis, TimeCosts(gpu("h100-sxm-80gb"), "bf16", tp, values), layout)


def calls(tree: ast.AST) -> list[str]:
    """The dotted names of what is called."""
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def methods(tree: ast.ClassDef, names: Sequence[str]) -> list[ast.FunctionDef]:
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
