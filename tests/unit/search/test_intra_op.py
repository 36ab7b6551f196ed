"""The intra-op solver against enumeration of all placements, and its layouts of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import fx

from autopar.cost_models.hardware import gpu
from autopar.errors import InfeasibleError
from autopar.ir.graph import B, Block, Call, NodeInfo, Program, Role, S, info, node_inputs, set_info
from autopar.placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Shard, Strategy, conversion
from autopar.plan.plan import Solution
from autopar.rules import TensorAxis, rule_of, strategies
from autopar.search.intra_op import solve
from autopar.search.layouts import FREE, MEGATRON, MEGATRON_SP, Layout
from autopar.search.op_costs import Costs, TimeCosts
from tests.models import RandomCosts, gpt, llama

aten = torch.ops.aten
BF16 = torch.bfloat16
AXIS = TensorAxis(2, {B: 2, S: 8}, True)
TIME = TimeCosts(gpu("h100-sxm-80gb"), "bf16", 2, {B: 2, S: 8})


# --------------------------------------------------------------------------------
# Small graphs: x [b, s, 6] → [b, s, 6], called twice in a row, so that what comes in goes out


class _Builder:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.placeholder("x", (B, S, 6), Role.VALUE, "0")

    def placeholder(self, name: str, shape: tuple[Any, ...], role: Role, ref: str) -> fx.Node:
        return self._typed(self.graph.placeholder(name), shape, role=role, ref=ref)

    def weight(self, name: str, *shape: int) -> fx.Node:
        return self.placeholder(name, shape, Role.PARAMETER, name)

    def op(self, target: Any, *args: fx.Node, width: int = 6) -> fx.Node:
        return self._typed(self.graph.call_function(target, args), (B, S, width))

    def linear(self, x: fx.Node, name: str, width: int = 6) -> fx.Node:
        return self.op(aten.linear.default, x, self.weight(name, width, int(info(x).shape[-1])), width=width)

    def program(self, result: fx.Node) -> Program:
        self.graph.output((result,))
        calls = (Call("Layer", "0", ("x",), ("y",)), Call("Layer", "1", ("y",), ("z",)))
        return Program("small", {"Layer": Block("Layer", self.graph)}, calls, {}, {}, {})

    def _typed(self, node: fx.Node, shape: tuple[Any, ...], **more: Any) -> fx.Node:
        return set_info(node, NodeInfo(tuple(map(sympy.sympify, shape)), BF16, requires_grad=True, **more))


def _mlp() -> Program:
    g = _Builder()
    h = g.op(aten.gelu.default, g.linear(g.x, "up", 8), width=8)
    return g.program(g.op(aten.add.Tensor, g.x, g.linear(h, "down")))


def _parallel_attention() -> Program:
    """Attention and MLP side by side (the softmax stands for attention: it keeps its dim whole)."""
    g = _Builder()
    a = g._typed(g.graph.call_function(aten.softmax.int, (g.linear(g.x, "attention"), -1)), (B, S, 6))
    m = g.op(aten.gelu.default, g.linear(g.x, "mlp"))
    return g.program(g.op(aten.add.Tensor, a, m))


def _gate() -> Program:
    g = _Builder()
    gate, up = g.linear(g.x, "gate", 7), g.linear(g.x, "up", 7)  # uneven: 7 on 2 ranks
    return g.program(g.linear(g.op(aten.mul.Tensor, gate, up, width=7), "down"))


# --------------------------------------------------------------------------------
# The objective, written again: strategies, and conversions once for each (value, placement wanted)


def _price(costs: Costs, node: fx.Node, strategy: Strategy) -> float:
    if node.op == "placeholder":
        return costs.stored(info(node), strategy.output) if info(node).role is Role.PARAMETER else 0.0
    return costs.strategy(node, strategy)


def objective(program: Program, solution: Solution, costs: Costs) -> float:
    """Seconds of a solution over all calls of all blocks."""
    total = 0.0
    shared: set[str] = set()  # tied parameters are stored once
    for name, chosen in solution.strategies.items():
        block, call = program.blocks[name], program.call_of(name)
        paid: set[tuple[fx.Node, Placement]] = set()
        cost = 0.0
        for node in block.nodes:
            full = call.full_name(info(node).ref)
            full = program.tied.get(full, full) if info(node).role is Role.PARAMETER else ""
            if full not in shared:
                cost += _price(costs, node, chosen[node.name])
            shared |= {full} & {*program.tied.values()}
            paid |= set(zip(node_inputs(node), chosen[node.name].inputs, strict=True))
        for place, result in enumerate(block.results):
            paid.add((result, _taken(program, solution, call, place)))
        for value, wanted in paid:
            if (source := chosen[value.name].output) != wanted:
                cost += costs.conversion(info(value), source, wanted)
        total += program.count(name) * cost
    return total


def _taken(program: Program, solution: Solution, call: Call, place: int) -> Placement:
    """The placement in which readers take a result; the loss is whole."""
    if not call.outputs:
        return REPLICATE
    name = call.outputs[place]
    reader = next(c for c in program.calls if name in c.inputs)
    values = program.blocks[reader.block].placeholders(Role.VALUE)
    node = next(n for n in values if info(n).ref == str(reader.inputs.index(name)))
    return solution.strategies[reader.block][node.name].output


def _legal(facts: NodeInfo, source: Placement, target: Placement) -> bool:
    """On two ranks: the conversion exists, and runs along no dim of odd size."""
    dims = [p.dim for p in (source, target) if p.is_shard]
    if source.is_shard and target.is_shard and source.dim == target.dim:
        return False
    sizes = [facts.shape[d].subs({B: 2, S: 8}) for d in dims]
    return conversion(source, target) is not None and all(n % 2 == 0 for n in sizes)


def _least(program: Program, costs: Costs) -> float:
    """The least objective over all placements: depth first, cut where the sum already exceeds the best."""
    block = program.blocks["Layer"]
    nodes = block.nodes
    options = [sorted(((_price(costs, n, o), o) for o in _options(n)), key=lambda pair: pair[0]) for n in nodes]
    rest = [sum(choices[0][0] for choices in options[i:]) for i in range(len(nodes) + 1)]
    best = float("inf")

    @cache
    def conversion_cost(value: fx.Node, source: Placement, target: Placement) -> float:
        return costs.conversion(info(value), source, target) if _legal(info(value), source, target) else float("inf")

    def reads(chosen: _Chosen, paid: frozenset[_Read], wanted: Iterable[_Read]) -> tuple[float, frozenset[_Read]]:
        new = {read for read in wanted if chosen[read[0]].output != read[1]} - paid
        return sum(conversion_cost(v, chosen[v].output, target) for v, target in new), paid | new

    def visit(i: int, cost: float, chosen: _Chosen, paid: frozenset[_Read]) -> None:
        nonlocal best
        if cost + rest[i] >= best:
            return
        if i == len(nodes):
            best = min(best, cost + reads(chosen, paid, [(block.results[0], chosen[nodes[0]].output)])[0])
            return
        for price, option in options[i]:
            more, now = reads(chosen, paid, zip(node_inputs(nodes[i]), option.inputs, strict=True))
            visit(i + 1, cost + price + more, {**chosen, nodes[i]: option}, now)

    visit(0, 0.0, {}, frozenset())
    return best * program.count("Layer")


_Read = tuple[fx.Node, Placement]
_Chosen = dict[fx.Node, Strategy]


def _options(node: fx.Node) -> Iterator[Strategy]:
    if node.op != "placeholder":
        yield from strategies(node, rule_of(node), AXIS)
        return
    yield Strategy((), REPLICATE)
    yield Strategy((), GRAD_PARTIAL)
    if info(node).role is Role.VALUE:
        yield Strategy((), PARTIAL)
    for dim, size in enumerate(info(node).shape):
        if B not in size.free_symbols:  # tp never shards the batch
            yield Strategy((), Shard(dim))


@pytest.mark.parametrize("costs", [TIME, *map(RandomCosts, range(3))], ids=["time", "0", "1", "2"])
@pytest.mark.parametrize("build", [_mlp, _parallel_attention, _gate])
def test_the_optimum_is_that_of_enumeration(build: Callable[[], Program], costs: Costs) -> None:
    program = build()
    assert len(program.blocks["Layer"].nodes) <= 8
    found = objective(program, solve(program, AXIS, costs, FREE), costs)
    assert found == pytest.approx(_least(program, costs), rel=1e-6)


def test_a_conversion_is_paid_once_however_many_read_it() -> None:
    """Three readers of one gathered value cost one gather, beside the reduce-scatter of the result."""

    class Table:
        def strategy(self, node: fx.Node, strategy: Strategy) -> float:
            return float(node.target is aten.linear.default and not strategy.inputs[1].is_shard)

        def stored(self, facts: NodeInfo, placement: Placement) -> float:
            return 0.0

        def conversion(self, facts: NodeInfo, source: Placement, target: Placement) -> float:
            return 0.3

    g = _Builder()
    a, b, c = (g.linear(g.x, name, 8) for name in "abc")
    total = g.op(aten.add.Tensor, g.op(aten.add.Tensor, a, b, width=8), c, width=8)
    program = g.program(g.linear(total, "down"))
    solution = solve(program, AXIS, Table(), Layout("sequence", True, Shard(1), None))
    assert objective(program, solution, Table()) == pytest.approx(2 * (0.3 + 0.3))


# --------------------------------------------------------------------------------
# Layouts of models of realistic width


def _wide_gpt(**changes: Any) -> Program:
    sizes = {"d_model": 4096, "n_head": 32, "vocab_size": 32000, "n_layer": 2, "block_size": 4096}
    return gpt(BF16, True, **{**sizes, **changes})[1]


def _wide_llama(**changes: Any) -> Program:
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    return llama(BF16, True, **{**sizes, **changes})[1]


def _solve(program: Program, layout: Layout, tp: int = 4) -> tuple[Solution, TimeCosts]:
    values = {B: 1, S: 4096}
    costs = TimeCosts(gpu("h100-sxm-80gb"), "bf16", tp, values)
    axis = TensorAxis(tp, values, layout.sequence)
    return solve(program, axis, costs, layout), costs


def _text(solution: Solution) -> str:
    return "\n".join(
        f"{block}.{node}: {strategy}"
        for block, nodes in solution.strategies.items()
        if block != "tables"
        for node, strategy in nodes.items()
    )


@pytest.mark.parametrize("layout", [MEGATRON, MEGATRON_SP], ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_layouts_are_megatrons(model: str, layout: Layout, golden: Callable[[str, str], None]) -> None:
    program = {"gpt": _wide_gpt, "llama": _wide_llama}[model]()
    solution, _ = _solve(program, layout)
    golden(f"intra_op/{model}_{layout.name}.txt", _text(solution) + "\n")


def test_megatron_shards_as_megatron_does() -> None:
    """What the goldens hold, in words: column, row, bias once after the reduction, vocabulary-parallel ends."""
    program = _wide_gpt()
    for layout, hidden in ((MEGATRON, REPLICATE), (MEGATRON_SP, Shard(1))):
        solution, _ = _solve(program, layout)
        of, ends = solution.strategies["Block"], solution.strategies["epilogue"]
        for column in ("c_attn", "c_attn_1", "c_attn_2", "c_fc"):
            assert str(of[column]) == "Rp, S(0) -> S(2)"
        for row in ("c_proj", "c_proj_1"):
            assert str(of[row]) == "S(2), S(1) -> P"
            bias_add = of[row.replace("c_proj", "c_proj_add")]
            assert bias_add.inputs[0] == bias_add.output == hidden
        norm = REPLICATE if layout is MEGATRON else GRAD_PARTIAL
        assert of["ln_1"].inputs == (hidden, norm, norm)
        assert solution.strategies["prologue"]["wte"].inputs[0] == Shard(0) == ends["lm_head"].inputs[1]
        assert str(ends["root_cross_entropy_loss"]) == "S(1), R -> R"


@pytest.mark.parametrize("program", [_wide_gpt, _wide_llama], ids=["gpt", "llama"])
def test_the_free_optimum_costs_no_more_than_a_layout(program: Callable[[], Program]) -> None:
    cost = {}
    for layout in (FREE, MEGATRON, MEGATRON_SP):
        solution, costs = _solve(program(), layout)
        cost[layout.name] = objective(program(), solution, costs)
    assert cost["free"] <= 1.000001 * min(cost["megatron"], cost["megatron-sp"])


# --------------------------------------------------------------------------------
# Sizes that do not divide


def _shards(program: Program, solution: Solution, op: Any) -> set[Placement]:
    return {
        placement
        for block, node in program.each_op()
        if node.target is op and program.count(block.name)
        for placement in (
            *solution.strategies[block.name][node.name].inputs,
            solution.strategies[block.name][node.name].output,
        )
    }


@pytest.mark.parametrize("layout", [MEGATRON, MEGATRON_SP, FREE], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("heads", "tp"), [({"n_head": 25}, 2), ({"n_head": 20}, 8)], ids=["25 on 2", "20 on 8"])
def test_uneven_heads_are_never_sharded(heads: dict[str, int], tp: int, layout: Layout) -> None:
    """S2: GPT-2 XL's 25 heads on 2 ranks."""
    program = _wide_gpt(d_model=1600, **heads)
    solution, _ = _solve(program, layout, tp)
    assert Shard(1) not in _shards(program, solution, aten.scaled_dot_product_attention.default)


def test_fewer_groups_of_keys_than_ranks_are_whole_and_query_heads_sharded() -> None:
    """S3: 2 K/V heads on 4 ranks. Each rank reads one of them, for a summand of its gradient."""
    program = _wide_llama(num_key_value_heads=2)
    for layout in (MEGATRON, FREE):
        solution, _ = _solve(program, layout, tp=4)
        found = [
            solution.strategies[block.name][node.name]
            for block, node in program.each_op()
            if node.target is aten.scaled_dot_product_attention.default
        ]
        assert {strategy.inputs[:3] for strategy in found} == {(Shard(1), GRAD_PARTIAL, GRAD_PARTIAL)}


def test_groups_of_keys_that_do_not_divide_the_ranks_are_never_sharded() -> None:
    program = _wide_llama(num_key_value_heads=2)
    solution, _ = _solve(program, FREE, tp=3)
    assert Shard(1) not in _shards(program, solution, aten.scaled_dot_product_attention.default)


@pytest.mark.parametrize("layout", [MEGATRON, MEGATRON_SP, FREE], ids=lambda layout: layout.name)
def test_an_uneven_vocabulary_is_sharded_and_never_gathered(layout: Layout) -> None:
    """S1: 50257 on 8 ranks."""
    program = _wide_gpt(vocab_size=50257)
    solution, _ = _solve(program, layout, 8)
    ends = solution.strategies["epilogue"]
    assert ends["lm_head"].inputs[1] == Shard(0)
    for block, node in program.each_op():
        for value, wanted in _conversions(program, solution, block, node):
            dims = [p.dim for p in (solution.strategies[block.name][value.name].output, wanted) if p.is_shard]
            assert 50257 not in [info(value).shape[d] for d in dims]


def _conversions(
    program: Program, solution: Solution, block: Block, node: fx.Node
) -> Iterator[tuple[fx.Node, Placement]]:
    if not program.count(block.name):
        return
    chosen = solution.strategies[block.name]
    for value, wanted in zip(node_inputs(node), chosen[node.name].inputs, strict=True):
        if chosen[value.name].output != wanted:
            yield value, wanted


def test_widths_that_megatron_cannot_divide_are_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="no legal megatron placement over 3: widths not divisible by it: 64"):
        _solve(gpt()[1], MEGATRON, tp=3)


def test_a_sequence_that_does_not_divide_is_named() -> None:
    with pytest.raises(InfeasibleError, match="over 3: .*; nor is the sequence of 4096"):
        _solve(gpt()[1], MEGATRON_SP, tp=3)


def test_two_products_are_added_before_they_are_reduced() -> None:
    """Routed and shared experts, attention and MLP side by side: their sum is no residual one, and reduced once."""
    g = _Builder()
    ups = [g.op(aten.gelu.default, g.linear(g.x, name, 8), width=8) for name in ("up", "other_up")]
    both = g.op(aten.add.Tensor, *(g.linear(up, name) for up, name in zip(ups, ("down", "other_down"), strict=True)))
    program = g.program(g.op(aten.add.Tensor, g.x, both))
    strategies = solve(program, AXIS, TIME, MEGATRON).strategies["Layer"]
    assert strategies[both.name] == Strategy((PARTIAL, PARTIAL), PARTIAL)
    assert strategies["add_tensor_1"].output == REPLICATE


def test_a_layout_leaves_small_products_to_the_costs() -> None:
    """A router beside large products: whole where a gather of its scores costs more than what dividing it saves."""
    g = _Builder()
    scores = g.op(aten.softmax.int, g.linear(g.x, "router", 2), -1, width=2)  # type: ignore[arg-type]
    h = g.op(aten.gelu.default, g.linear(g.x, "up", 600), width=600)
    down = g.linear(h, "down", 2)
    program = g.program(g.linear(g.op(aten.mul.Tensor, scores, down, width=2), "out"))
    strategies = solve(program, AXIS, TIME, MEGATRON).strategies["Layer"]
    assert not strategies["router"].output.is_shard and strategies["up"].output.is_shard
