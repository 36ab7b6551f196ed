"""What cannot be traced is refused in our words, with the user's line and the way out; checks that only raise pass."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.export import trace
from tests.first_hour import checks
from tests.first_hour.case import ids

LM = {"ids": ids(), "labels": ids()}
TORCHS = re.compile(r"Guard|TORCH|unhinted|Dim\.|draft_export|\bu\d+\b|L\[|specialize|[Cc]onstraint")


class Model(nn.Module):
    """Embeddings, `inner` over the states [b, s, 16], and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.inner = inner

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.emb(ids))).flatten(0, 1), labels.flatten())


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.new_ones(3, 3)  # the line


class Branch(nn.Module):
    """In the root, where nothing can be kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.emb(ids).sum()
        return loss if loss > 0 else -loss  # the line


class Loop(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, loss = self.emb(ids), self.emb.weight.sum()
        for t in range(x.shape[1]):  # the line
            loss = loss.tanh() + x[:, t].mean()
        return loss


class SampleLoop(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        return torch.stack([x[i].tanh().mean() for i in range(x.shape[0])]).mean()  # the line


class Size(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.emb(ids).mean()
        return -loss if ids.shape[0] * ids.shape[1] > 100 else loss  # the line


class Number(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        top = int(ids.max())  # the line
        loss: Tensor = self.emb(ids).sum()
        return loss * top


class Transformed(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return torch.vmap(torch.tanh)(self.emb(ids)).mean()  # the line


WAYS_OUT: list[tuple[nn.Module, str]] = [
    (Loop(), "a loop over tokens"),
    (SampleLoop(), "a loop over samples"),
    (Size(), "derive it from the input's shape"),
    (Branch(), "use torch.where there"),
    (Transformed(), "write it over whole tensors (broadcasting)"),
    (Number(), "keep it a 0-dim tensor"),
]


@pytest.mark.parametrize(("model", "way_out"), WAYS_OUT, ids=[way_out for _, way_out in WAYS_OUT])
def test_a_refusal_has_the_line_and_the_way_out(model: nn.Module, way_out: str) -> None:
    with pytest.raises(TraceError) as refused:
        trace(model, LM, torch.float32)
    said = str(refused.value)
    assert f"at {__file__}:" in said and way_out in said
    marked = next(line for line in said.splitlines() if "→" in line)
    assert marked.endswith("# the line")
    assert not TORCHS.search(said.replace(__file__, "")), said


def test_what_the_model_raises_itself_is_told_as_it_is() -> None:
    with pytest.raises(TraceError, match=r"(?s)# the line.*RuntimeError: "):
        trace(Model(Wrong()), LM, torch.float32)


@torch.library.custom_op("autopar_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


class Foreach(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids).clone()
        torch._foreach_mul_([x], 2.0)
        loss: Tensor = x.mean()
        return loss


class Custom(Branch):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scale = torch.ones(16, device=ids.device)
        double_(scale)
        loss: Tensor = (self.emb(ids) * scale).mean()
        return loss


@pytest.mark.parametrize("kind", [Foreach, Custom])
def test_ops_that_write_and_return_nothing_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match="returns no tensor: write it out of place"):
        trace(kind(), LM, torch.float32)


def test_a_check_of_torch_s_is_left_out() -> None:
    class Model(Branch):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            torch._check_tensor_all(ids >= 0)
            loss: Tensor = self.emb(ids).mean()
            return loss

    names = [str(node.target) for _, node in trace(Model(), LM, torch.float32).each_op()]
    assert "aten.mean.default" in names and "aten.item.default" not in names


LINES = {checks.Checked: 4, checks.Likelihood: 2, checks.CheckedLayers: 1, checks.CheckedTable: 1}


@pytest.mark.parametrize(("kind", "lines"), LINES.items(), ids=lambda x: str(x))
def test_checks_that_only_raise_are_left_out_and_come_back(kind: type[nn.Module], lines: int) -> None:
    before = kind.forward.__code__, checks.check_positive.__code__
    program = trace(kind(), LM, torch.float32)
    assert len(program.checks) == lines and not program.opaque
    assert (kind.forward.__code__, checks.check_positive.__code__) == before


EFFECTS = [
    checks.Caught, checks.Suppressed, checks.Naming, checks.Remembering, checks.Touching, checks.Asserted,
    checks.AssertedLater, checks.Swallowed, checks.Tried,
]  # fmt: skip


@pytest.mark.parametrize("kind", EFFECTS)
def test_checks_with_another_effect_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"torch\.where"):
        trace(kind(), LM, torch.float32)


@pytest.mark.parametrize("normal", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.filterwarnings("ignore")
def test_spectral_norm_is_refused_by_its_buffer(normal: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"changes the buffer .*_[uv], which outlives the forward: .*between steps"):
        trace(Model(normal(nn.Linear(16, 16))), LM, torch.float32)
