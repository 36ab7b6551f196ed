"""Which submodules are kept whole, and what is learnt of them by running them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from autopar.compile.compiler import compile_program
from autopar.compile.notes import opaque_shares
from autopar.emit.emission import Predicted
from autopar.emit.project import pack_opaque, save_opaque
from autopar.emit.source import model_source
from autopar.errors import PlanError, TraceError
from autopar.ir.custom import OPAQUE
from autopar.ir.graph import B, Program, S, arguments, info
from autopar.ir.text import program_text
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh
from autopar.runtime.opaque import OpaqueModule, OpaqueModules
from autopar.trace.opaque import opaque_modules
from tests import models
from tests.distributed.opaque_models import (
    BatchSquash,
    BranchingModel,
    Noisy,
    OpaqueModel,
    PerSample,
    Scan,
    Selected,
    Squash,
    StraightThrough,
)
from tests.hostile import Hostile

IDS = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "labels": torch.zeros(2, 16, dtype=torch.long)}


def traced(model: nn.Module, dtype: torch.dtype = torch.float64) -> Program:
    return models.layered(model, IDS, dtype)


def opaque_node(program: Program) -> Any:
    return next(node for _, node in program.each_op() if node.target is OPAQUE)


@pytest.mark.parametrize(
    ("kind", "alone"),
    [(Squash, True), (StraightThrough, True), (Selected, True), (PerSample, True), (BatchSquash, False)],
)
def test_whether_it_treats_samples_alone_is_found_by_running_it(kind: type[nn.Module], alone: bool) -> None:
    program = traced(OpaqueModel(kind, layers=2))
    assert program.opaque.keys() == {"Tripled" if kind is StraightThrough else "inner"}
    assert arguments(opaque_node(program))[3] is alone
    assert program.count("Block") == 2  # the layers are one class still


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_shapes_and_dtypes_are_those_of_a_run(dtype: torch.dtype) -> None:
    program = traced(OpaqueModel(layers=1), dtype)
    values, counts = (n for _, n in program.each_op() if n.args and n.args[0] is opaque_node(program))
    assert (info(values).shape, info(values).dtype) == ((B, S, sympy.Integer(32)), dtype)
    assert (info(counts).shape, info(counts).dtype) == ((B, S), torch.int64)
    assert info(values).requires_grad and not info(counts).requires_grad


def test_a_loop_over_tokens_is_kept_whole_for_every_length() -> None:
    program = traced(OpaqueModel(Scan, layers=2))
    (kept,) = program.opaque.values()
    assert (kept.path, program.fixed_length) == ("blocks.0.inner", None)
    assert "for t in range(1, x.shape[1])" in kept.reason and "a loop over tokens" in kept.reason
    node = opaque_node(program)
    assert info(node).shape[:2] == (B, S) and arguments(node)[3] is True


def test_flops_are_counted_and_shared_out() -> None:
    program = traced(OpaqueModel(BatchSquash, layers=2))
    assert arguments(opaque_node(program))[4] == 2 * 32 * 32  # one linear
    ours, others, head = 2 * 32 * 32, 2 * 2 * 16 * 32, 2 * 16 * 97
    assert opaque_shares(program, 16)["inner"] == pytest.approx(2 * ours / (2 * (ours + others) + head))


def test_a_layer_that_branches_itself_is_kept_whole() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mix(x)
            return torch.stack([row if row.sum() > 0 else -row for row in y])

    model = OpaqueModel(layers=2)
    model.blocks = nn.ModuleList(Layer() for _ in range(2))
    program = traced(model)
    assert program.opaque.keys() == {"Layer"} and program.count("Layer") == 2


def test_modules_that_differ_in_a_number_are_two() -> None:
    class Threshold(nn.Module):
        def __init__(self, at: float) -> None:
            super().__init__()
            self.at = at

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([row if row.sum() > self.at else -row for row in x])

    model = OpaqueModel(layers=3)
    for block, at in zip(model.blocks, (0.0, 1.0, 1.0), strict=True):
        block.inner = Threshold(at)
    program = traced(model)
    assert program.opaque.keys() == {"inner", "inner_2"}
    assert [program.count(name) for name in ("Block", "Block2")] == [1, 2]


def test_it_is_saved_without_values_and_with_its_classes(tmp_path: Any) -> None:
    model = OpaqueModel(layers=1)
    modules = opaque_modules(traced(model), model)
    assert all(tensor.is_meta for tensor in modules["inner"].module.state_dict().values())
    assert not model.blocks[0].inner.mix.weight.is_meta  # type: ignore[union-attr]
    packed = pack_opaque(modules)
    save_opaque(tmp_path, packed)
    written = OpaqueModules(str(tmp_path / "model.py"), hashlib.sha256(packed).hexdigest())
    assert type(written["inner"].module) is type(modules["inner"].module)
    save_opaque(tmp_path, pack_opaque({}))
    assert not (tmp_path / "opaque.pt").exists()

    class Local(Squash): ...

    model = OpaqueModel(Local, layers=1)
    with pytest.raises(PlanError, match="at the top of a module"):
        pack_opaque(opaque_modules(traced(model), model))


def test_another_file_in_its_place_is_not_loaded(tmp_path: Path) -> None:
    """A pickle runs what it names: `opaque.pt` is only the one whose hash model.py has."""
    harmless = pack_opaque({"inner": OpaqueModule(nn.Identity(), ((), {}))})
    (tmp_path / "opaque.pt").write_bytes(Hostile(tmp_path / "canary").zipped())
    with pytest.raises(ValueError, match="opaque.pt is not the file that was written with model.py"):
        OpaqueModules(str(tmp_path / "model.py"), hashlib.sha256(harmless).hexdigest())["inner"]
    assert not (tmp_path / "canary").exists()


# --------------------------------------------------------------------------------
# Refused


def test_a_branch_outside_any_submodule_is_refused() -> None:
    with pytest.raises(TraceError, match="a branch on tensor values"):
        traced(BranchingModel(StraightThrough, layers=1))


def test_a_custom_function_that_gives_sizes_by_value_is_refused() -> None:
    class Positive(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x[x > 0]

    class Model(OpaqueModel):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            chosen: Tensor = Positive.apply(self.embedding(input_ids))  # type: ignore[no-untyped-call]
            return chosen.mean()

    with pytest.raises(TraceError, match=r"Positive.*sizes of what it returns depend on values"):
        traced(Model(nn.Identity, layers=1))


def test_a_custom_function_that_changes_what_it_takes_is_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            scale.mul_(2)
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return gradients[0], None

    class Model(OpaqueModel):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x: Tensor = Doubled.apply(self.embedding(input_ids), labels)  # type: ignore[no-untyped-call]
            return x.mean()

    with pytest.raises(TraceError, match=r"Doubled.*changes in place what it is given"):
        traced(Model(nn.Identity, layers=1))


def test_random_numbers_inside_are_refused() -> None:
    with pytest.raises(TraceError, match=r"blocks\.0\.inner \(Noisy\).*draws random numbers"):
        traced(OpaqueModel(Noisy, layers=1))


def test_sizes_that_depend_on_values_are_kept_inside_the_module_around_them() -> None:
    class Choose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sum(-1) > 0).nonzero().squeeze(-1)

    class Around(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.choose, self.mix = Choose(), nn.Linear(d, d)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            chosen = self.choose(rows)
            return rows.index_add(0, chosen, self.mix(rows[chosen])).view_as(x)

    program = traced(OpaqueModel(Around, layers=1))
    assert program.opaque.keys() == {"inner"} and program.opaque["inner"].path == "blocks.0.inner"


def test_two_models_in_turn_give_the_programs_that_each_gives_alone() -> None:
    """Their opaque modules have the same name, and other shapes."""
    alone = program_text(traced(OpaqueModel(Squash, layers=1)))
    kept = traced(OpaqueModel(Squash, layers=1))
    assert program_text(traced(OpaqueModel(PerSample, layers=2))) != alone
    again = traced(OpaqueModel(Squash, layers=1))
    assert program_text(kept) == alone == program_text(again)
    plan = Plan.of(Mesh(dp=2), 4, 1, 16, ((0, 1),), precision="fp64")
    sources = [model_source(compile_program(program, plan), plan, Predicted()) for program in (kept, again)]
    assert sources[0] == sources[1]
