"""Programs read from the short form of text, that `program_text` prints, with types where it prints none.

    block model:
      x: [b, s, 8] = input x
      w: [16, 8] = parameter w
      y: [b, s, 16] = linear(x, w)
      return y

`[4] bf16` gives a dtype (default fp64); `op.overload(…)` an overload where the common one is not meant. After the
blocks, calls: `h, t = Layer(x, t)  # layers.0`, or `loss = …` for the one without outputs.
"""

from __future__ import annotations

import re
from dataclasses import replace
from textwrap import dedent
from typing import Any

import torch

from autopar.ir.build import derives_gradient
from autopar.ir.graph import MODEL, Call, Program, Role, TensorInfo, info, update_info
from autopar.ir.reader import read_program, write
from autopar.ir.text import program_text
from autopar.passes import Pass
from autopar.passes.shard_parameters import ShardParameters
from autopar.placement import Strategy
from autopar.plan.plan import Plan, Solution
from autopar.runtime.choices import Mesh

aten = torch.ops.aten

_DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64, "int": torch.int64,
    "bool": torch.bool,
}  # fmt: skip
_OVERLOADS = {
    "add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor", "to": "dtype", "mean": "dim", "slice": "Tensor",
    "pow": "Tensor_Scalar", "transpose": "int", "split": "Tensor", "select": "int", "flatten": "using_ints",
    "unflatten": "int", "softmax": "int",
}  # fmt: skip
_LINE = re.compile(r"(\w+): \[([^\]]*)\] ?(\w*) = (.*)")
_CALL = re.compile(r"([\w, ]+) = (\w+)\(([\w, ]*)\)(?:  # ([\w.]+))?")


def read(text: str) -> Program:
    """The program that a text describes; a block called "model" alone needs no call."""
    blocks: list[str] = []
    calls: list[Call] = []
    for part in dedent(text).strip().split("\n\n"):
        head, *lines = part.splitlines()
        if head.startswith("block "):
            blocks.append("\n    ".join([f"def {head.removeprefix('block ').rstrip(':')}():", *map(_line, lines)]))
        else:
            calls += map(_call, [head, *lines])
    calls = calls or [Call(MODEL, "")]
    lines = ["name = 'Model'", f"calls = {write(tuple(calls))}", "parameters = {}", "buffers = {}", "inputs = {}"]
    program = read_program("\n".join([*lines, *blocks]))
    for block in program.blocks.values():
        for node in block.nodes:
            facts = info(node)
            grad = derives_gradient(node) if node in block.ops else facts.role in (Role.PARAMETER, Role.VALUE)
            update_info(node, requires_grad=facts.dtype.is_floating_point and grad)
    parameters = {
        call.full_name(info(n).ref): TensorInfo(info(n).shape, info(n).dtype, True)
        for call in calls
        for n in program.blocks[call.block].placeholders(Role.PARAMETER)
    }
    return replace(program, parameters=parameters)


def _line(line: str) -> str:
    """A line of a block as `write_program` writes it."""
    if line.strip().startswith("return "):
        return f"{line.strip()},"
    match = _LINE.fullmatch(line.strip())
    assert match, line
    name, shape, dtype, what = match.groups()
    facts = f"({shape}{',' if shape else ''}), {write(_DTYPES[dtype or 'fp64'])}"
    if made := re.fullmatch(r"([\w.]+)\((.*)\)", what):
        return f"{name}: NodeInfo({facts}) = {_op(made[1])}({made[2].replace('torch.', '')})"
    role, ref = what.split(" ")
    return f"{name}: NodeInfo({facts}, role={Role(role)}, ref={ref!r}) = placeholder({name!r})"


def _op(name: str) -> str:
    """The whole name of an op: "add" is aten.add.Tensor here, where nothing is said."""
    packet, _, overload = name.partition(".")
    if name == "getitem":
        return name
    if hasattr(torch.ops.autopar_results, packet):
        return f"autopar_results.{packet}.default"
    return f"aten.{packet}.{overload or _OVERLOADS.get(packet, 'default')}"


def _call(line: str) -> Call:
    match = _CALL.fullmatch(line)
    assert match, line
    outputs, block, inputs, path = match.groups()
    given = () if outputs == "loss" else tuple(outputs.split(", "))
    return Call(block, path or "", tuple(filter(None, inputs.split(", "))), given)


def plan(strategies: str = "", tp: int = 2, stages: tuple[tuple[int, int], ...] = ((0, 1),), **more: Any) -> Plan:
    """A plan from lines `block.node: S(2), S(1) -> P`."""
    chosen: dict[str, dict[str, Strategy]] = {}
    for line in filter(None, map(str.strip, strategies.splitlines())):
        where, strategy = line.split(": ")
        block, node = where.split(".")
        chosen.setdefault(block, {})[node] = Strategy.parse(strategy)
    schedule = "none" if len(stages) == 1 else "gpipe"
    mesh = Mesh(pp=len(stages), tp=tp)
    return Plan.of(mesh, 2, 2, 8, stages, schedule, precision="fp64", solution=Solution(tp, chosen), **more)


def context_plan(strategies: str = "", cp: int = 2, tp: int = 1, layout: str = "ring", sequence: int = 8) -> Plan:
    """A plan that cuts sequences, with placements on cp as lines of `plan`."""
    chosen = plan(strategies, tp=1).solution.strategies
    mesh = Mesh(cp=cp, tp=tp)
    return Plan.of(mesh, 2, 2, sequence, ((0, 1),), precision="fp64", context=Solution(cp, chosen, layout))


def typed(program: Program, plan: Plan) -> Program:
    return ShardParameters().apply(program, plan)


def assert_becomes(step: Pass, program: Program | str, expected: str, plan: Plan | None = None) -> Program:
    """The pass gives the expected program, changes nothing in the one it was given, and a second time nothing."""
    before = read(program) if isinstance(program, str) else program
    text = program_text(before)
    after = step.apply(before, plan)
    assert program_text(before) == text, "a pass changes its own copy"
    shown = program_text(after).removesuffix("\n\nloss = model()\n").rstrip("\n")
    assert shown == dedent(expected).strip("\n"), f"the pass gives\n{shown}"
    return after
