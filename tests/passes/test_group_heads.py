"""group_heads: K/V heads that the author repeats, read as groups on cp."""

import pytest

from autopar.ir.graph import info, update_info
from autopar.passes.group_heads import GroupHeads
from tests.passes.programs import assert_becomes, context_plan, read

_BEFORE = """
block model:
  q: [b, 8, s, 4] = parameter q
  k: [b, 2, s, 4] = parameter k
  v: [b, 2, s, 4] = parameter v
  m: [s, s] bool = input m
  k1: [b, 2, 1, s, 4] = unsqueeze(k, 2)
  k2: [b, 2, 4, s, 4] = expand(k1, [b, 2, 4, s, 4])
  k3: [b, 8, s, 4] = reshape(k2, [b, 8, s, 4])
  v3: [b, 8, s, 4] = repeat_interleave.self_int(v, 4, 1)
  a: [b, 8, s, 4] = scaled_dot_product_attention(q, k3, v3, {mask})
  return a
"""
_AFTER = """
block model:
  q: [b, 8, s, 4] = parameter q
  k: [b, 2, s, 4] = parameter k
  v: [b, 2, s, 4] = parameter v
  a: [b, 8, s, 4] = scaled_dot_product_attention(q, k, v, None, enable_gqa=True)
  return a
"""


@pytest.mark.parametrize("layout", ["ring", "ulysses", "all_gather"])
def test_repeated_heads_are_read_as_groups(layout: str) -> None:
    before = _BEFORE.format(mask="None").replace("  m: [s, s] bool = input m\n", "")
    assert_becomes(GroupHeads(), before, _AFTER, context_plan(layout=layout))


def test_so_they_are_where_a_window_stands_for_the_mask() -> None:
    """Under Ulysses the mask stays, and kernels with a mask want a K/V head a query head."""
    program = read(_BEFORE.format(mask="m"))
    (attention,) = (n for n in program.blocks["model"].ops if "attention" in str(n.target))
    update_info(attention, window=5)
    expected = _AFTER.replace("None, enable_gqa=True)", "m, enable_gqa=True)  # window=5")
    expected = expected.replace("  a:", "  m: [s, s] = input m\n  a:")
    assert_becomes(GroupHeads(), program, expected, context_plan(layout="ring"))
    same = GroupHeads().apply(program, context_plan(layout="ulysses"))
    assert [n.name for n in same.blocks["model"].nodes] == [n.name for n in program.blocks["model"].nodes]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("v, 4, 1)", "v, 4, 2)"),  # another dim
        ("v3: [b, 8, s, 4] = repeat_interleave.self_int(v, 4, 1)", "v3: [b, 8, s, 4] = parameter w"),
        ("unsqueeze(k, 2)", "reshape(k, [b, 1, 2, s, 4])"),
        ("{mask}", "m"),  # a mask that nothing is known of
    ],
)
def test_others_stay(old: str, new: str) -> None:
    text = _BEFORE.replace(old, new).format(mask="None")
    if "reshape(k," in text:  # the heads one after the other, then again
        text = text.replace("k1: [b, 2, 1, s, 4]", "k1: [b, 1, 2, s, 4]").replace("b, 2, 4, s, 4", "b, 4, 2, s, 4")
    program = read(text)
    after = GroupHeads().apply(program, context_plan(layout="ring"))
    shapes = [[info(n).shape for n in p.blocks["model"].nodes] for p in (program, after)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_groups_that_tp_cannot_share_out_stay_repeated(tp: int) -> None:
    program = read(_BEFORE.format(mask="None"))
    after = GroupHeads().apply(program, context_plan(layout="ring", tp=tp))
    assert len(after.blocks["model"].nodes) == len(program.blocks["model"].nodes) - (0 if tp == 3 else 5)


def test_without_cp_nothing_changes() -> None:
    program = read(_BEFORE.format(mask="None"))
    assert GroupHeads().apply(program, context_plan(cp=1)) is program
