"""What a trace says of a model: symbols, ties, buffers, dtypes, and the user's lines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import MODEL, B, Program, Role, S, info
from autopar.trace.export import trace
from examples.gpt import GPT, GPTConfig
from tests import models

IDS = torch.zeros(2, 16, dtype=torch.long, device="meta")
INPUTS = {"input_ids": IDS, "labels": IDS}


def test_sizes_are_symbols() -> None:
    """Batch and sequence everywhere, in shape arguments too; examples' sizes nowhere."""
    _, program = models.gpt()
    (attention,) = [n for n in program.blocks["Block"].ops if "scaled_dot" in str(n.target)]
    assert info(attention).shape == (B, 4, S, 16)
    reshapes = [n for n in program.blocks["Block"].ops if "reshape" in str(n.target)]
    assert {tuple(n.args[1])[:2] for n in reshapes} == {(B, S)}  # type: ignore[arg-type]
    assert {str(symbol) for _, n in program.each_op() for size in info(n).shape for symbol in size.free_symbols} == {
        "b",
        "s",
    }


def test_example_sizes_do_not_matter() -> None:
    def shapes(batch: int, sequence: int) -> list[str]:
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=2, d_model=32, block_size=64))
        ids = torch.zeros(batch, sequence, dtype=torch.long)
        program = trace(model, {"input_ids": ids, "labels": ids}, torch.float32)
        return [f"{n.target} {info(n).shape}" for n in program.blocks[MODEL].ops]

    assert shapes(1, 16) == shapes(2, 4) == shapes(3, 48)


class FlatAndBack(nn.Module):
    """As mixtures of experts do: tokens of all samples in one row, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.head = nn.Linear(20, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        b, s, d = x.shape
        for layer in self.layers:
            x = layer(x.view(-1, d)).view(b, s, d)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class InEights(FlatAndBack):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        if input_ids.shape[1] % 8:
            return super().forward(input_ids, labels) * 2
        return super().forward(input_ids, labels)


def test_views_that_flatten_and_come_back() -> None:
    """torch guards them by a condition that always holds and that it cannot prove."""
    program = trace(FlatAndBack(), INPUTS, torch.float32)
    assert program.sequence_range[1] > 4096
    assert (B, S, 20) in {info(n).shape for n in program.blocks[MODEL].ops}


def test_a_branch_that_not_all_lengths_take() -> None:
    """T1: a condition on sizes that is no bound is not dropped: the trace is of the example's length alone."""
    inputs = {name: tensor[:, :-1] for name, tensor in INPUTS.items()}
    fixed = trace(InEights(), inputs, torch.float32).fixed_length
    assert fixed is not None and fixed.tokens == inputs["labels"].shape[1]
    assert "input_ids.shape[1] % 8" in str(fixed)


def test_nodes_know_module_and_line() -> None:
    _, program = models.gpt()
    (gelu,) = [n for n in program.blocks["Block"].ops if "gelu" in str(n.target)]
    assert info(gelu).module == "mlp.gelu"
    (attention,) = [n for n in program.blocks["Block"].ops if "scaled_dot" in str(n.target)]
    assert "examples/gpt.py:" in info(attention).source


# --------------------------------------------------------------------------------
# T5: ties


def test_tied_by_storage() -> None:
    """One storage under two names is counted once; both names are kept."""
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=2, d_model=32, block_size=32))
    program = trace(model, INPUTS, torch.float32)
    assert program.tied == {"lm_head.weight": "transformer.wte.weight"}
    refs = [info(n).ref for n in program.blocks[MODEL].placeholders(Role.PARAMETER)]
    assert sorted(refs) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_equal_but_not_tied() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=2, d_model=32, block_size=32, tied=False))
    assert trace(model, INPUTS, torch.float32).tied == {}


class Shared(nn.Module):
    """One block object three times."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Linear(20, 20)
        self.embedding = nn.Embedding(50, 20)
        self.layers = nn.Sequential(block, block, block)
        self.head = nn.Linear(20, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.embedding(input_ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_one_object_used_three_times() -> None:
    program = trace(Shared(), INPUTS, torch.float32)
    assert {alias: original for alias, original in program.tied.items() if alias.endswith("weight")} == {
        "layers.1.weight": "layers.0.weight",
        "layers.2.weight": "layers.0.weight",
    }
    own = [name for name in program.parameters if name not in program.tied]
    assert own == ["embedding.weight", "layers.0.weight", "layers.0.bias", "head.weight", "head.bias"]


# --------------------------------------------------------------------------------
# T3, N7: buffers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        self.head = nn.Linear(20, 50)
        self.register_buffer("freqs", torch.arange(20) / 7, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x) * self.freqs.to(x.dtype)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def buffers(program: Program) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in program.buffers.items()}


def test_non_persistent_buffer_stays_a_buffer() -> None:
    """T3: used in every layer, absent from the parameters. N7: in its own dtype while parameters are cast."""
    program = trace(Scaled(), INPUTS, torch.bfloat16)
    assert buffers(program) == {"freqs": torch.float32}
    assert "freqs" not in program.parameters
    assert "freqs" not in Scaled().state_dict()
    (node,) = program.blocks[MODEL].placeholders(Role.BUFFER)
    assert len(node.users) == 2


def test_rope_tables_stay_fp32() -> None:
    _, program = models.llama(torch.bfloat16, meta=True)
    assert buffers(program)["model.rotary_emb.inv_freq"] == torch.float32
    cosines = [n for _, n in program.each_op() if ".cos" in str(n.target)]
    assert cosines and all(info(n).dtype == torch.float32 for n in cosines)


def test_fp64_raises_the_authors_float32() -> None:
    _, program = models.llama(torch.float64)
    floating = {info(n).dtype for _, n in program.each_op() if info(n).dtype.is_floating_point}
    assert floating == {torch.float64}
