"""Ring attention and attention over gathered keys, against attention on one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from autopar.runtime import attention
from autopar.runtime.attention import gathered_attention, ring_attention
from autopar.runtime.mesh import current, init_mesh
from autopar.runtime.tiles import Tile
from tests.distributed.handwritten import make_settings
from tests.harness import assert_parity, run_ranks
from tests.tiles import area

BATCH, SEQUENCE = 2, 48


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int] = (8, 2)  # of queries, of keys and values
    widths: tuple[int, int] = (16, 16)  # of queries and keys, of values
    causal: bool = True
    zigzag: bool = True
    window: int | None = None
    scale: float | None = None
    keys: int = SEQUENCE
    dtype: torch.dtype = torch.float64

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, laid out as projections give them."""
        (h, g), (e, f) = self.heads, self.widths
        shapes = (SEQUENCE, h, e), (self.keys, g, e), (self.keys, g, f), (SEQUENCE, h, f)
        random = torch.Generator().manual_seed(0)
        values = [torch.randn(BATCH, *shape, dtype=torch.float64, generator=random) for shape in shapes]
        return [x.transpose(1, 2).to(self.dtype) for x in values]

    @property
    def mask(self) -> Tensor:
        rows, keys = torch.arange(SEQUENCE)[:, None], torch.arange(self.keys)
        near = rows - keys < (self.window or self.keys)
        return (keys <= rows) & near if self.causal else torch.ones(SEQUENCE, self.keys, dtype=torch.bool)

    def expected(self) -> dict[str, Tensor]:
        """The output and the gradients, in fp64."""
        q, k, v, grad = (x.double() for x in self.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        repeats = self.heads[0] // self.heads[1]
        scores = q @ k.repeat_interleave(repeats, 1).mT * (self.scale or self.widths[0] ** -0.5)
        out = scores.masked_fill(~self.mask, -torch.inf).softmax(-1) @ v.repeat_interleave(repeats, 1)
        gradients = torch.autograd.grad(out, leaves, grad)
        return dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))

    def part(self, x: Tensor) -> Tensor:
        """This rank's tokens, from the definition."""
        size, rank = current().size("cp"), current().rank("cp")
        if not self.zigzag:
            return x.chunk(size, 2)[rank]
        chunks = x.chunk(2 * size, 2)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 2)

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": self.causal, "zigzag": self.zigzag, "window": self.window}
        return ring_attention(q, k, v, "cp", **options, scale=self.scale)

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": self.causal, "zigzag": self.zigzag, "window": self.window}
        return gathered_attention(q, k, v, "cp", **options, scale=self.scale)


LAYOUTS = {
    "zigzag": Case(),
    "in order": Case(zigzag=False),
    "bidirectional": Case(causal=False, zigzag=False),
    "bidirectional zigzag": Case(causal=False),
}
CASES = {
    **{
        f"{name}, {h}/{g} heads of {e} and {f}": replace(case, heads=(h, g), widths=(e, f))
        for name, case in LAYOUTS.items()
        for (h, g), (e, f) in (((8, 2), (16, 16)), ((3, 3), (5, 5)), ((4, 1), (12, 8)), ((2, 2), (3, 9)))
    },
    **{
        f"window of {window}, zigzag={zigzag}": Case(window=window, zigzag=zigzag)
        for window, zigzag in itertools.product((1, 5, 6, 13, 99), (False, True))
    },
    "scaled": Case(scale=0.3),
    "to another sequence": Case(causal=False, zigzag=False, keys=24),
}


def run(attend: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Tensor]:
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    kept = [x.detach().clone() for x in (*inputs, grad)]
    gradients = torch.autograd.grad(out, leaves, grad)
    assert all(map(torch.equal, kept, (*inputs, grad))), "an input was changed"
    return dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))


def check_ring(case: Case, tolerance: float, what: str, around: Callable[..., Any] | None = None) -> None:
    attend = case.ring if around is None else lambda *x: around(case.ring, *x)
    actual = run(attend, [case.part(x) for x in case.tensors()])
    assert {x.dtype for x in actual.values()} == {case.dtype}
    assert_parity(actual, {name: case.part(x) for name, x in case.expected().items()}, tolerance, what)


def check_gathered(case: Case, tolerance: float, what: str) -> None:
    q, k, v, grad = case.tensors()
    actual = run(case.gathered, [case.part(q), k, v, case.part(grad)])
    for name in ("k", "v"):
        actual[name] = actual[name].double()
        dist.all_reduce(actual[name])  # the gradients are summands
    expected = case.expected()
    assert_parity(actual, expected | {name: case.part(expected[name]) for name in ("out", "q")}, tolerance, what)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_ring_and_gathered_are_attention_on_one_process(cp: int) -> None:
    def rank_main(rank: int) -> None:
        init_mesh(make_settings(cp=cp), "cpu")
        for name, case in CASES.items():
            check_ring(case, 1e-10, f"ring, {name}")
            check_gathered(case, 1e-10, f"gathered, {name}")

    run_ranks(cp, rank_main)


def test_in_lower_precision() -> None:
    def rank_main(rank: int) -> None:
        init_mesh(make_settings(cp=4), "cpu")
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)):
            for name, case in {**LAYOUTS, "window": Case(window=7)}.items():
                check_ring(replace(case, dtype=dtype), tolerance, f"{dtype}, {name}")
                check_gathered(replace(case, dtype=dtype), tolerance, f"{dtype}, {name}")

    run_ranks(4, rank_main)


def test_recomputed_by_a_checkpoint() -> None:
    def around(attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(attend, *inputs, use_reentrant=False)
        return out

    def rank_main(rank: int) -> None:
        init_mesh(make_settings(cp=4), "cpu")
        check_ring(Case(), 1e-12, "checkpointed", around)

    run_ranks(4, rank_main)


def test_in_a_compiled_function() -> None:
    """The graph breaks around the whole of it, and nowhere else."""

    def rank_main(rank: int) -> None:
        init_mesh(make_settings(cp=2), "cpu")
        compiled: Callable[..., Any] = torch.compile(lambda attend, *inputs: attend(*inputs) * 1.0, backend="aot_eager")
        check_ring(Case(), 1e-10, "compiled", compiled)
        (why,) = torch._dynamo.utils.counters["graph_break"]
        assert "torch.compiler.disable" in why

    run_ranks(2, rank_main)


def test_a_second_derivative_is_refused() -> None:
    def rank_main(rank: int) -> str:
        init_mesh(make_settings(cp=2), "cpu")
        case = Case()
        q, k, v, _ = (case.part(x).detach().requires_grad_() for x in case.tensors())
        (first,) = torch.autograd.grad(case.ring(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.square().sum().backward()
        return "refused"

    assert run_ranks(2, rank_main) == ["refused"] * 2


class Layer(nn.Module):
    """x + attention of x over x; x [b, s/c, 16]."""

    def __init__(self, seed: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self._attend = nn.Linear(16, 48, dtype=torch.float64), attend
        random = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            p.data = torch.randn(p.shape, dtype=p.dtype, generator=random) / 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self._attend(q, k, v).transpose(1, 2).flatten(2)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def test_in_the_stages_of_a_pipeline() -> None:
    """pp2·cp2, 4 micro-batches under 1F1B: rings of one stage run while the other is elsewhere in its schedule."""
    x = torch.randn(4, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def on_one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    layers = [Layer(i, on_one_process) for i in range(2)]
    layers[1](layers[0](x)).square().sum().backward()
    expected = [gradients(layer) for layer in layers]

    def rank_main(rank: int) -> dict[str, Tensor]:
        mesh = init_mesh(make_settings(pp=2, cp=2), "cpu")
        stage, case = mesh.rank("pp"), Case()
        layer = Layer(stage, case.ring)
        own = case.part(x[:, None])[:, 0]
        piped = PipelineStage(layer, stage, 2, mesh.device, group=mesh.group("pp"))
        schedule = Schedule1F1B(piped, 4, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
        if stage == 0:
            schedule.step(own)
        else:
            schedule.step(target=torch.zeros(4))
        for p in layer.parameters():
            dist.all_reduce(p.grad, group=mesh.group("cp"))
        return gradients(layer)

    results = run_ranks(4, rank_main)
    for stage, ranks in enumerate((results[:2], results[2:])):
        for result in ranks:
            assert_parity(result, expected[stage], 1e-12, f"gradients of stage {stage}")


# What it does, by a recorder


class Recorder:
    """`log`: the bytes that each batch of transfers sends, as it starts, "compute" for each block, "wait" as one ends.

    `area`: scores computed. `held`: the most tensors received that are in memory at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.area, self.held = list[int | str](), 0, 0
        self._received = list[StorageWeakRef]()
        self._start, self._wait = dist.batch_isend_irecv, attention._wait
        monkeypatch.setattr(dist, "batch_isend_irecv", self._batch)
        monkeypatch.setattr(attention, "_wait", self._waited)
        for name, queries, keys in (("block_forward", 2, 3), ("block_backward", 3, 6)):
            monkeypatch.setattr(attention, name, self._counted(getattr(attention, name), queries, keys))

    def _batch(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        self.log.append(sum(op.tensor.nbytes for op in ops if op.op is dist.isend))
        self._received += [StorageWeakRef(op.tensor.untyped_storage()) for op in ops if op.op is dist.irecv]
        self.held = max(self.held, sum(not storage.expired() for storage in self._received))
        return self._start(ops)

    def _waited(self, works: list[dist.Work]) -> None:
        if works:
            self.log.append("wait")
        self._wait(works)

    def _counted(self, fn: Callable[..., Any], queries: int, keys: int) -> Callable[..., Any]:
        def block(*args: Any) -> Any:
            self.log.append("compute")
            self.area += area(Tile(range(args[queries].shape[2]), range(args[keys].shape[2]), args[0]))
            return fn(*args)

        return block


@dataclass(frozen=True)
class Pass:
    log: list[int | str]
    area: int
    held: int


def record(cp: int, case: Case) -> list[tuple[Pass, Pass]]:
    """Forward and backward of each rank."""

    def rank_main(rank: int) -> tuple[Pass, Pass]:
        init_mesh(make_settings(cp=cp), "cpu")
        *inputs, grad = (case.part(x) for x in case.tensors())
        with pytest.MonkeyPatch.context() as monkeypatch:
            forward = Recorder(monkeypatch)
            out = case.ring(*(x.detach().requires_grad_() for x in inputs))
        with pytest.MonkeyPatch.context() as monkeypatch:
            backward = Recorder(monkeypatch)
            out.backward(grad)
        first, second = (Pass(recorder.log, recorder.area, recorder.held) for recorder in (forward, backward))
        return first, second

    return run_ranks(cp, rank_main)


def test_s16_keys_and_values_travel_with_their_own_heads_while_others_are_used() -> None:
    """32 query and 8 K/V heads, cp=4, zigzag: transfers have the bytes of 8 heads, and the work is equal."""
    case = Case(heads=(32, 8), dtype=torch.bfloat16)
    kv = 2 * BATCH * 8 * (SEQUENCE // 4) * 16 * 2  # bytes of K and V of one rank; of their gradients, in fp32: twice
    use: list[int | str] = ["compute", "wait"]
    ranks = record(4, case)
    for forward, backward in ranks:
        assert forward.log == [kv, *use, kv, *use, kv, *use, "compute"]
        assert backward.log == [kv, *use, kv, *use, kv + 2 * kv, *use, 2 * kv, *use, 2 * kv, "wait"]
        assert forward.held <= 2 * 2 and backward.held <= 2 * 3  # K and V in use and to come; their gradients to come
    for areas in ([rank[i].area for rank in ranks] for i in (0, 1)):
        assert max(areas) <= 1.05 * min(areas)
        assert sum(areas) == SEQUENCE * (SEQUENCE + 1) // 2  # and no masked score is computed


def sent(each: Pass) -> int:
    return sum(entry for entry in each.log if isinstance(entry, int))


def test_blocks_are_sent_no_further_than_they_are_seen() -> None:
    kv = 2 * BATCH * 2 * (SEQUENCE // 4) * 16 * 8
    in_order = record(4, Case(zigzag=False))
    assert [sent(forward) for forward, _ in in_order] == [kv, 2 * kv, 3 * kv, 0]
    # Each block's gradients make as many hops, the last one home: from the rank that used it last.
    assert [sent(backward) for _, backward in in_order] == [kv, (2 + 1) * kv, (3 + 2) * kv, 3 * kv]
    near = record(4, Case(zigzag=False, window=SEQUENCE // 4))  # a row sees this chunk and the one before
    assert [sent(forward) for forward, _ in near] == [kv, kv, kv, 0]
    assert [sent(backward) for _, backward in near] == [kv, 2 * kv, 2 * kv, kv]
    for each in (*in_order, *near):
        assert each[0].area == each[1].area
    assert sum(forward.area for forward, _ in near) == int(Case(window=SEQUENCE // 4).mask.sum())
