"""The cheapest recompute, against enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from autopar.search.recompute import ClassOptions, Option, cheapest

option = st.builds(
    Option,
    what=st.just(""),
    time_s=st.integers(1, 9).map(float),
    frees_bytes=st.integers(-2, 9).map(float),
    workspace_bytes=st.integers(0, 9).map(float),
    group=st.sampled_from([1, 1, 2, 3]),
)
layer_class = st.builds(
    lambda count, options: ClassOptions(
        count, tuple(Option(f"{i}", *list(vars(o).values())[1:]) for i, o in enumerate(options))
    ),
    st.integers(0, 4),
    st.lists(option, min_size=0, max_size=3),
)
classes_of = st.lists(layer_class, min_size=1, max_size=3)
Mix = list[tuple[Option, int]]


def mixes(own: ClassOptions) -> Iterator[Mix]:
    """Every way to recompute layers of a class by two choices at most, nothing being one, and groups of one size."""
    yield []
    for one in own.options:
        for n in range(one.group, own.count + 1, one.group):
            yield [(one, n)]
            rest = own.count - n
            others = (two for two in own.options if min(one.group, two.group) == 1)
            yield from ([(one, n), (two, rest)] for two in others if rest and rest % two.group == 0)


def enumerate_cheapest(
    classes: list[ClassOptions], saved_bytes: float, workspace_bytes: float, room_bytes: float
) -> float | None:
    best: float | None = None
    for combination in product(*(list(mixes(own)) for own in classes)):
        chosen = [item for mix in combination for item in mix]
        if fits(chosen, saved_bytes, workspace_bytes, room_bytes):
            time_s = sum(o.time_s * n for o, n in chosen)
            best = time_s if best is None else min(best, time_s)
    return best


def fits(chosen: Mix, saved_bytes: float, workspace_bytes: float, room_bytes: float) -> bool:
    freed = sum(o.frees_bytes * n for o, n in chosen)
    return saved_bytes - freed + max([workspace_bytes, *(o.workspace_bytes for o, _ in chosen)]) <= room_bytes


# Two that free as much: groups of two as far as they go, the slower one for the layer that is left.
@example([ClassOptions(3, (Option("0", 1.0, 3.0, 0.0, 2), Option("1", 2.0, 3.0, 0.0)))], 9, 0, 0)
# One that frees more in less time, but in groups: as many as there are, though fewer would do.
@example([ClassOptions(3, (Option("0", 1.0, 4.0, 0.0, 2), Option("1", 2.0, 3.0, 0.0)))], 9, 0, 0)
@given(classes_of, st.integers(0, 40), st.integers(0, 9), st.integers(0, 40))
def test_it_is_the_cheapest(classes: list[ClassOptions], saved: int, workspace: int, room: int) -> None:
    found = cheapest(classes, saved, workspace, room)
    expected = enumerate_cheapest(classes, saved, workspace, room)
    if found is None:
        assert expected is None
        return
    chosen: Mix = []
    for own, mix in zip(classes, found, strict=True):
        by_name = {o.what: o for o in own.options}
        assert sum(n for _, n in mix) <= own.count and all(n % by_name[what].group == 0 for what, n in mix)
        chosen += [(by_name[what], n) for what, n in mix]
    assert expected == sum(o.time_s * n for o, n in chosen)
    assert fits(chosen, saved, workspace, room)


def test_nothing_is_recomputed_when_all_fits() -> None:
    assert cheapest([ClassOptions(8, (Option("layer", 1.0, 5.0, 3.0),))], 40.0, 1.0, 41.0) == ((),)


def test_what_is_dear_for_what_it_frees_is_left_alone() -> None:
    options = (
        Option("attention core", 1.0, 1.0, 0.0),
        Option("activation", 1.0, 4.0, 0.0),
        Option("layer", 9.0, 9.0, 0.0),
    )
    assert cheapest([ClassOptions(8, options)], 40.0, 0.0, 30.0) == ((("activation", 3),),)
    assert cheapest([ClassOptions(8, options)], 40.0, 0.0, 3.0) == ((("layer", 1), ("activation", 7)),)
