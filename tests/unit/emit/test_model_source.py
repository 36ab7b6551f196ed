"""What model.py reads like: goldens, every op visible, original names, a length that depth does not change."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from autopar.emit.source import load_source
from autopar.ir.graph import Role, info
from autopar.ir.ops import is_collective
from autopar.plan.recompute import RecomputeChoice, whole_layers
from autopar.runtime.compiled import _is_whole
from tests import models
from tests.unit.emit import handwritten_llama
from tests.unit.emit.declared import undeclared
from tests.unit.emit.programs import Emitted, calls, emitted

PLANS = {"tp2-sp": {"tp": 2, "layout": "megatron-sp"}, "tp2-pp2": {"tp": 2, "pp": 2}}
CASES = [(model, plan) for model in ("gpt", "llama") for plan in PLANS]
ALL_CASES = [(model, plan) for model in ("gpt", "llama", "gpt2", "t5", "vit") for plan in PLANS]
QUICK_CASES = [case for case in ALL_CASES if case != ("t5", "tp2-pp2")]  # T5 is traced for a minute
SLOWER = pytest.param(
    [case for case in ALL_CASES if case not in CASES],
    ("gemma2", "whisper", "bert", "qwen3", "parallel", "unet"),
    marks=pytest.mark.slow,
)
EACH_CASE = [pytest.param(*case, marks=[] if case in QUICK_CASES else [pytest.mark.slow]) for case in ALL_CASES]
aten = torch.ops.aten


def of(model: str, plan: str) -> Emitted:
    return emitted(model, **PLANS[plan])  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "plan"), EACH_CASE)
def test_golden(model: str, plan: str, golden: Callable[[str, str], None]) -> None:
    golden(f"emit/{model}-{plan}.py", of(model, plan).source)


RECOMPUTE = {
    "regions": ("gpt", {"tp": 2, "layout": "megatron-sp"}, (RecomputeChoice(0, 4, "attention core, mlp"),)),
    "mixed": (
        "llama",
        {"pp": 2},
        (RecomputeChoice(0, 2, "groups of 2"), RecomputeChoice(2, 3, "attention, activation"), RecomputeChoice(3, 4)),
    ),
}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_golden_with_recompute(name: str, golden: Callable[[str, str], None]) -> None:
    model, options, recompute = RECOMPUTE[name]
    golden(f"emit/{model}-recompute-{name}.py", emitted(model, recompute=recompute, **options).source)  # type: ignore[arg-type]


def test_methods_with_parts_that_are_recomputed_are_not_compiled_whole() -> None:
    """The runtime knows them by the names that they call."""
    model, options, recompute = RECOMPUTE["mixed"]
    program = load_source(emitted(model, recompute=recompute, **options).source)  # type: ignore[arg-type]
    layer = program.LlamaDecoderLayer
    whole = {name: _is_whole(method) for name, method in vars(layer).items() if inspect.isfunction(method)}
    parts = {name: value for name, value in whole.items() if name in ("_attention", "_activation")}
    assert parts and all(parts.values()) and not any(whole[name] for name in ("forward", "_layer", "_recomputed"))


OTHERS = {
    "mixtral-tp2": ("mixtral", {"tp": 2}),
    "mistral-cp2": ("mistral", {"cp": 2}),
    "gpt-pp2-zero3": ("gpt", {"pp": 2, "dp": 2, "zero": 3}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_golden_of_experts_windows_and_sharded_stages(name: str, golden: Callable[[str, str], None]) -> None:
    model, options = OTHERS[name]
    golden(f"emit/{name}.py", emitted(model, **options).source)


# --------------------------------------------------------------------------------
# Every op of a layer is in its source

OPERATORS = {
    aten.add.Tensor: ast.Add,
    aten.sub.Tensor: ast.Sub,
    aten.mul.Tensor: ast.Mult,
    aten.div.Tensor: ast.Div,
    aten.matmul.default: ast.MatMult,
    aten.neg.default: ast.USub,
    aten.slice.Tensor: ast.Subscript,
    aten.select.int: ast.Subscript,
}
CALLS = {
    "scaled_dot_product_attention": ("scaled_dot_product_attention", "attention"),
    "cross_entropy_loss": ("cross_entropy",),
}


def visible(node: fx.Node, count: Counter[object]) -> bool:
    """Takes the node's call or operator from what the source has; a bias is an argument of F.linear."""
    if node.target in OPERATORS:
        wanted: list[object] = [OPERATORS[node.target]]
    elif is_collective(node.target):
        wanted = [node.target.__name__]  # type: ignore[union-attr]
    else:
        name = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        wanted = list(CALLS.get(name, (name,)))
    if node.target is aten.add.Tensor:
        wanted.append("bias")
    for what in wanted:
        if count[what]:
            count[what] -= 1
            return True
    return False


def things(program: Emitted, tree: ast.ClassDef) -> Counter[object]:
    """Calls by their last name, operators by their class, and biases given to F.linear; of called functions too."""
    found: Counter[object] = Counter()
    functions = {node.name: node for node in program.tree.body if isinstance(node, ast.FunctionDef)}
    for method in [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"]:
        called = [functions[name] for name in calls(method) if name in functions]
        for code in (method, *called):
            found.update(name.rpartition(".")[2] for name in calls(code))
            found.update(type(n.op) for n in ast.walk(code) if isinstance(n, ast.BinOp | ast.UnaryOp))
            found[ast.Subscript] += sum(isinstance(n, ast.Subscript) for n in ast.walk(code))
        found["bias"] += sum(
            isinstance(n, ast.Call) and ast.unparse(n.func) == "F.linear" and len(n.args) == 3 for n in ast.walk(method)
        )
    return found


@pytest.mark.parametrize("recompute", [(), pytest.param(whole_layers((1, 2)), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_each_op_of_a_layer_is_in_its_source(model: str, plan: str, recompute: tuple[RecomputeChoice, ...]) -> None:
    program = emitted(model, recompute=recompute, **PLANS[plan])  # type: ignore[arg-type]
    for name in {call.block for call in program.program.layer_calls}:
        ops = program.program.blocks[name].ops
        assert len(ops) > 15
        count = things(program, program.class_of(name))
        hidden = [node.format_node() for node in ops if not visible(node, count)]
        assert not hidden, program.source


# --------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_original_parameter_names(model: str, plan: str) -> None:
    """The union of the stages has the original's names, but for the parts of a fused parameter."""
    program = of(model, plan)
    declared = declared_names(program)
    original, _ = models.gpt(n_layer=4) if model == "gpt" else models.llama(num_hidden_layers=4)
    expected = dict(original.named_parameters(remove_duplicate=False))
    fused = {part: name for name, f in program.program.fused.items() for part in f.parts}
    assert {fused.get(name, name) for name in declared} == set(expected)


def declared_names(program: Emitted) -> set[str]:
    """Parameters and ties that the classes declare, with the path of each layer."""
    kinds = ("parameter", "tie")
    found: set[str] = set()
    for tree in [n for n in program.tree.body if isinstance(n, ast.ClassDef)]:
        own = {
            str(node.args[1].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in kinds and isinstance(node.args[1], ast.Constant)
        }
        paths = [f"{c.path}." for c in program.program.layer_calls if c.block == tree.name] or [""]
        found |= {f"{path}{name}" for path in paths for name in own}
    return found


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_added_attributes_start_with_an_underscore(model: str, plan: str) -> None:
    """Attributes, parameters and methods that the original does not have."""
    program = of(model, plan)
    original, _ = models.gpt(n_layer=4) if model == "gpt" else models.llama(num_hidden_layers=4)
    named = [*original.named_modules(), *original.named_parameters(), *original.named_buffers()]
    known = {part for name, _ in named for part in name.split(".")}
    known |= set(dir(nn.Module()))
    for tree in [n for n in program.tree.body if isinstance(n, ast.ClassDef)]:
        attributes = {
            n.attr
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and ast.unparse(n.value).split(".")[0] == "self"
        }
        added = {name for name in attributes - known if not name.startswith("_")}
        assert not added, added
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} - {"forward", "between_stages"}
        assert all(name.startswith("_") for name in functions), functions


@pytest.mark.parametrize(("model", "plan"), EACH_CASE)
def test_values_shadow_nothing(model: str, plan: str) -> None:
    """No local name is a keyword, an imported name, a function that is called, or a constant."""
    program = of(model, plan)
    imported = {
        alias.asname or alias.name
        for node in program.tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    constants = {ast.unparse(t) for n in program.tree.body if isinstance(n, ast.Assign) for t in n.targets}
    called = [n.func for n in ast.walk(program.tree) if isinstance(n, ast.Call)]
    used = {function.id for function in called if isinstance(function, ast.Name)} - {"layer"}  # of the loop
    for function in [n for n in ast.walk(program.tree) if isinstance(n, ast.FunctionDef)]:
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names = stored | {argument.arg for argument in function.args.args} - {"self"}
        assert not names & (imported | constants | used | set(dir(builtins)))
        assert not any(keyword.iskeyword(name) for name in names)


@pytest.mark.parametrize(("model", "plan"), EACH_CASE)
def test_every_name_is_declared(model: str, plan: str) -> None:
    assert not undeclared(of(model, plan).source)


def test_the_walk_finds_what_is_not_declared() -> None:
    source = of("gpt", "tp2-pp2").source
    for line in ("open(1)", "import os", "from os import path", "def f(x): return x + eval(x)", "class C: y = exec"):
        assert undeclared(f"{source}{line}\n")


class Awkward(nn.Module):
    """Modules whose names are Python's, the runtime's, or the emitter's own."""

    NAMES = ("lambda_", "copy_to", "device", "forward_", "F", "torch_", "local", "b", "s", "nn")

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 20)
        layer = {name: nn.Linear(20, 20) for name in self.NAMES}
        self.layers = nn.ModuleList(nn.ModuleDict(layer) for _ in range(1))
        self.dropout_head = nn.Linear(20, models.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            for module in layer.values():  # type: ignore[operator]
                x = x + module(x).tanh()
        return nn.functional.cross_entropy(self.dropout_head(x).flatten(0, 1), labels.flatten())


def test_awkward_names() -> None:
    """The program loads, and computes what the model computes."""
    from tests.distributed.programs import assert_parity, subject

    made = subject(Awkward(), torch.float64)
    assert_parity(made, made.plan())
    load_source(made.source(made.plan()))


def test_values_are_named_from_module_paths() -> None:
    source = of("llama", "tp2-sp").source
    for name in ("q", "k", "v", "attn", "gate", "up", "mlp"):
        assert re.search(rf"^ +{name} = ", source, re.MULTILINE), name


# --------------------------------------------------------------------------------
# The whole file


@pytest.mark.parametrize("plan", [pytest.param(p, marks=[pytest.mark.slow] if p == "tp2-pp2" else []) for p in PLANS])
def test_length_does_not_depend_on_depth(plan: str) -> None:
    lengths = [
        emitted("llama", layers=layers, **PLANS[plan]).source.count("\n")  # type: ignore[arg-type]
        for layers in (4, 32)
    ]
    assert max(lengths) < 200
    assert abs(lengths[0] - lengths[1]) <= 2


def statements(source: str) -> int:
    """Lines of code: no blank lines, comments or docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate((line.strip() for line in source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docs for number, line in lines)


def test_a_llama_layer_is_as_short_as_a_handwritten_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The layer and the functions it calls, of the same layout (sequence-parallel tp)."""
    program = of("llama", "tp2-sp")
    layer = program.class_of("LlamaDecoderLayer")
    functions = {n.name: n for n in program.tree.body if isinstance(n, ast.FunctionDef)}
    called = [functions[name] for name in set(calls(layer)) if name in functions]
    shown = sum(statements(ast.get_source_segment(program.source, code) or "") for code in (layer, *called))
    written = sum(
        statements(inspect.getsource(code)) for code in (handwritten_llama.LlamaDecoderLayer, handwritten_llama.rotate)
    )
    with capsys.disabled():
        print(f"\na Llama layer: {shown} lines generated, {written} written by hand, ratio {shown / written:.2f}")
    assert written > 30 and shown > 30
    assert shown <= 1.3 * written


@pytest.mark.parametrize(("cases", "families"), [(CASES, ()), SLOWER])
def test_no_device_is_written_down(cases: list[tuple[str, str]], families: tuple[str, ...]) -> None:
    """T7: devices are those of the arguments, in every family's program."""
    sources = [of(model, plan).source for model, plan in cases] + [emitted(family).source for family in families]
    for source in sources:
        assert not re.search(r"cuda|[\"']cpu[\"']|[\"']meta[\"']|torch\.device", source)
        assert all(text.endswith("device") for text in re.findall(r"device=([\w.]+)", source))


@pytest.mark.parametrize(("model", "plan"), EACH_CASE)
def test_each_placement_change_is_a_line(model: str, plan: str) -> None:
    """A collective is the whole right side of its line."""
    program = of(model, plan)
    functions = {"copy_to", "all_reduce", "all_gather", "reduce_scatter", "gather", "split"}
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
            assert isinstance(node.args[0], ast.Name), ast.unparse(node)


@pytest.mark.parametrize("cases", [QUICK_CASES, pytest.param(ALL_CASES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_ruff_finds_nothing(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    """`ruff check --isolated` on the folder that is saved, within it, and elsewhere told what it has itself."""
    import autopar
    from examples.gpt import GPT, GPTConfig

    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    autopar.parallelize(
        lambda: GPT(GPTConfig(n_layer=2, d_model=32, block_size=32)), 4, gpu="h100-sxm-80gb", global_batch=8,
        inputs={"input_ids": ids, "labels": ids}, pp=2, tp=2, dp=1,
    ).save(tmp_path / "saved")  # fmt: skip
    for model, plan in cases:
        (tmp_path / "saved" / f"{model}_{plan.replace('-', '_')}.py").write_text(of(model, plan).source)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", str(tmp_path / "saved")]
    known = ["--config", "lint.isort.known-first-party = ['model', 'runtime']"]
    for options, folder in (([], tmp_path / "saved"), (known, Path.cwd())):
        done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout


def test_placeholders_are_declared_once() -> None:
    """A parameter that a layer reads twice is one line of its __init__."""
    program = of("gpt", "tp2-sp")
    for name, block in program.program.blocks.items():
        refs = [info(n).ref for n in block.placeholders(Role.PARAMETER)]
        assert len(refs) == len(set(refs)), name
