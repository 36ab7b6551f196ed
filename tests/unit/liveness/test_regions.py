"""Regions of a layer class, found from its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import Block, op_name
from autopar.liveness.regions import Region, find_regions, gathered_order, is_random
from autopar.liveness.saved import Saved
from autopar.search.layouts import replicated
from tests import models


def block_of(program: Any) -> tuple[Block, Saved]:
    block = program.blocks[program.layer_calls[0].block]
    return block, Saved(block, replicated(program).strategies[block.name], 1)


def found(make: Callable[..., Any], **options: Any) -> dict[str, Region]:
    return {region.name: region for region in find_regions(block_of(make(**options)[1])[1])}


def names(region: Region) -> list[str]:
    return [op_name(node) for node in region.ops]


def test_regions_of_a_gpt_and_a_llama() -> None:
    gpt, llama = found(models.gpt), found(models.llama)
    assert set(gpt) == set(llama) == {"attention core", "attention", "activation", "mlp"}
    assert names(gpt["activation"]) == ["gelu", "linear", "add"]  # with its bias, which is a part of one call
    assert names(llama["activation"]) == ["silu", "mul", "linear"]
    # Rotation keeps nothing: q and k are kept rotated, and it does not run again.
    assert names(llama["attention core"]) == ["scaled_dot_product_attention", "transpose", "reshape", "linear"]
    assert names(llama["mlp"])[0] == "rms_norm" and names(llama["attention"])[0] == "rms_norm"
    assert set(llama["attention core"].ops) < set(llama["attention"].ops)


def test_a_region_ends_where_its_result_leaves() -> None:
    for make in (models.gpt, models.llama, models.qwen2):
        for region in found(make).values():
            own = set(region.ops)
            assert all(user in own for node in region.ops[:-1] for user in node.users)
            assert op_name(region.result) == ("add" if make is models.gpt else "linear")


def test_r6_attention_without_dropout_is_not_random() -> None:
    """R6: judged by the argument: dropout_p=0.0 draws nothing, 0.1 does."""
    for p in (0.0, 0.1):
        block, _ = block_of(models.gpt(dropout=p)[1])
        attention = [node for node in block.ops if op_name(node) == "scaled_dot_product_attention"]
        assert [is_random(node) for node in attention] == [p > 0]
        assert any(map(is_random, block.ops)) == (p > 0)
        assert set(found(models.gpt, dropout=p)) == {"attention core", "attention", "activation", "mlp"}


class TwoBranches(nn.Module):
    """Dropout of the stream lies between the ops of the MLP: gathered, their masks would be drawn in another order."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(d, 16), nn.Linear(d, 16), nn.Linear(16, d)

    def forward(self, x: Tensor) -> Tensor:
        act = F.dropout(F.gelu(self.up(x)), 0.1, self.training)
        beside = F.dropout(x, 0.1, self.training)
        result: Tensor = beside + self.down(F.dropout(act * self.gate(x), 0.1, self.training))
        return result


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 8)
        self.blocks = nn.ModuleList(TwoBranches() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def test_masks_are_drawn_in_the_order_without_recompute() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    block, saved = block_of(models.layered(Branched(), {"input_ids": ids, "labels": ids}))
    for region in find_regions(saved):
        ordered = gathered_order(block.ops, region.ops)
        assert list(filter(is_random, ordered)) == list(filter(is_random, block.ops))
    assert "activation" not in {region.name for region in find_regions(saved)}
