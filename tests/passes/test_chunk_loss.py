"""chunk_loss: a head and its loss become one op where nothing but rows stands between them."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.ir.graph import Program, info
from autopar.ir.text import program_text
from autopar.passes.chunk_loss import ChunkLoss
from autopar.plan.plan import Plan
from tests.passes.programs import assert_becomes, plan, read, typed

HEAD = """
block epilogue:
  x: [b, s, 8] {dtype} = value 0
  labels: [b, s] int = input labels
  w: [5, 8] {dtype} = parameter w
"""


def program(lines: str, dtype: str = "bf16") -> Program:
    """An epilogue of x, labels and w with these lines."""
    inside = "".join(f"  {line.strip()}\n" for line in lines.strip().splitlines())
    return read(f"{HEAD.strip()}\n{inside}\nloss = epilogue(x)".format(dtype=dtype))


def chunked(strategies: str, chunks: int = 4) -> Plan:
    return plan(strategies).changed(loss_chunks=chunks)


PLAIN = """
logits: [b, s, 5] {dtype} = linear(x, w)
rows: [b*s, 5] {dtype} = reshape(logits, [b*s, -1])
to: [b*s, 5] fp32 = to(rows, torch.float32)
target: [b*s] int = reshape(labels, [b*s])
total: [] fp32 = cross_entropy_loss(to, target, None, 2, -100)
return total
"""
OVER_TP = """
epilogue.x: -> Rp
epilogue.labels: -> R
epilogue.w: -> S(0)
epilogue.logits: Rp, S(0) -> S(2)
epilogue.rows: S(2) -> S(1)
epilogue.to: S(1) -> S(1)
epilogue.target: R -> R
epilogue.total: S(1), R -> R
"""


def test_views_move_before_the_head_and_the_vocabulary_stays_sharded() -> None:
    after = assert_becomes(
        ChunkLoss(),
        typed(program(PLAIN), chunked(OVER_TP)),
        """
        block epilogue:
          x: [b, s, 8] Rp = value 0
          labels: [b, s] R = input labels
          w: [5, 8] S(0) = parameter w
          target: [b*s] R = reshape(labels, [b*s])
          reshape_default: [b*s, 8] Rp = reshape(x, [b*s, 8])
          linear_cross_entropy_default: [] R = linear_cross_entropy(reshape_default, w, target, chunks=4)
          return linear_cross_entropy_default

        loss = epilogue(x)
        """,
        chunked(OVER_TP),
    )
    (loss,) = after.blocks["epilogue"].results
    assert str(info(loss).dtype) == "torch.float32"


def on_one_rank(lines: str, dtype: str = "fp64") -> Program:
    return ChunkLoss().apply(typed(program(lines, dtype), plan(tp=1).changed(loss_chunks=2)), chunked("", 2))


def fused(made: Program) -> str:
    """The line of the op, without its dtype and shape."""
    (line,) = (line for line in program_text(made).splitlines() if "linear_cross_entropy(" in line)
    return line.partition(" = ")[2]


def test_a_bias_a_factor_and_a_soft_cap_become_options() -> None:
    """Gemma: cap · tanh(logits / cap), here after a factor, and with another id that is ignored."""
    made = on_one_rank("""
        bias: [5] fp64 = parameter bias
        logits: [b, s, 5] fp64 = linear(x, w)
        biased: [b, s, 5] fp64 = add(logits, bias)
        scaled: [b, s, 5] fp64 = mul(biased, 0.5)
        divided: [b, s, 5] fp64 = div(scaled, 30.0)
        curved: [b, s, 5] fp64 = tanh.default(divided)
        capped: [b, s, 5] fp64 = mul(curved, 30.0)
        rows: [b*s, 5] fp64 = reshape(capped, [b*s, 5])
        target: [b*s] int = reshape(labels, [b*s])
        total: [] fp64 = cross_entropy_loss(rows, target, None, 2, 3)
        return total
        """)
    options = "chunks=2, scale=0.5, softcap=30.0, ignore_index=3"
    assert fused(made) == f"linear_cross_entropy(reshape_default, w, target, bias, {options})"


def test_the_shift_of_the_labels_takes_rows_away_before_the_head() -> None:
    made = on_one_rank("""
        logits: [b, s, 5] fp64 = linear(x, w)
        kept: [b, s - 1, 5] fp64 = slice(logits, 1, 0, -1)
        rows: [b*(s - 1), 5] fp64 = reshape(kept, [b*(s - 1), 5])
        shifted: [b, s - 1] int = slice(labels, 1, 1, 9223372036854775807)
        target: [b*(s - 1)] int = reshape(shifted, [b*(s - 1)])
        total: [] fp64 = cross_entropy_loss(rows, target, None, 2, -100)
        return total
        """)
    block = made.blocks["epilogue"]
    assert [info(n).shape[-1] for n in block.ops if "slice" in n.name and info(n).requires_grad] == [8]
    assert fused(made).startswith("linear_cross_entropy(")


KEPT_WHOLE = {
    "label smoothing": "total: [] fp64 = cross_entropy_loss(rows, target, None, 2, -100, 0.1)",
    "a mean": "total: [] fp64 = cross_entropy_loss(rows, target, None, 1, -100)",
    "a second reader": "read: [] fp64 = sum.default(rows)\n"
    "plain: [] fp64 = cross_entropy_loss(rows, target, None, 2, -100)\ntotal: [] fp64 = add(plain, read)",
    "another function": "curved: [b*s, 5] fp64 = exp.default(rows)\n"
    "total: [] fp64 = cross_entropy_loss(curved, target, None, 2, -100)",
}


@pytest.mark.parametrize("why", KEPT_WHOLE)
def test_other_losses_are_refused(why: str) -> None:
    lines = f"""
    logits: [b, s, 5] fp64 = linear(x, w)
    rows: [b*s, 5] fp64 = reshape(logits, [b*s, 5])
    target: [b*s] int = reshape(labels, [b*s])
    {KEPT_WHOLE[why]}
    return total
    """
    with pytest.raises(PlanError, match="loss_chunks=2: .* use loss_chunks=1"):
        on_one_rank(lines)


def test_a_conversion_between_head_and_loss_is_refused() -> None:
    """Row-parallel logits are summands: their log-sum-exp is not known before they are added up."""
    strategies = OVER_TP.replace("-> Rp", "-> S(2)").replace("w: -> S(0)", "w: -> S(1)")
    strategies = strategies.replace("Rp, S(0) -> S(2)", "S(2), S(1) -> P").replace("rows: S(2) -> S(1)", "rows: P -> P")
    strategies = strategies.replace("to: S(1) -> S(1)", "to: P -> P").replace("total: S(1), R", "total: R, R")
    with pytest.raises(PlanError, match="conversion"):
        ChunkLoss().apply(typed(program(PLAIN), chunked(strategies)), chunked(strategies))


def test_whole_logits_stay_where_the_plan_wants_no_slices() -> None:
    before = typed(program(PLAIN), plan(OVER_TP))
    assert ChunkLoss().apply(before, plan(OVER_TP)) is before
