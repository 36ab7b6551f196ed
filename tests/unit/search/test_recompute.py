"""The cheapest recompute, against enumeration."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from autopar.search.recompute import ClassOption, cheapest

options = st.lists(
    st.builds(
        ClassOption,
        count=st.integers(0, 4),
        time_s=st.integers(1, 9).map(float),
        frees_bytes=st.integers(-2, 9).map(float),
        workspace_bytes=st.integers(0, 9).map(float),
    ),
    min_size=1,
    max_size=3,
)


def enumerate_cheapest(
    classes: list[ClassOption], saved_bytes: float, workspace_bytes: float, room_bytes: float
) -> float | None:
    best: float | None = None
    for counts in product(*(range(option.count + 1) for option in classes)):
        chosen = list(zip(classes, counts, strict=True))
        freed = sum(option.frees_bytes * count for option, count in chosen)
        workspace = max([workspace_bytes, *(option.workspace_bytes for option, count in chosen if count)])
        if saved_bytes - freed + workspace <= room_bytes:
            time_s = sum(option.time_s * count for option, count in chosen)
            best = time_s if best is None else min(best, time_s)
    return best


@given(options, st.integers(0, 40), st.integers(0, 9), st.integers(0, 40))
def test_it_is_the_cheapest(classes: list[ClassOption], saved: int, workspace: int, room: int) -> None:
    counts = cheapest(classes, saved, workspace, room)
    expected = enumerate_cheapest(classes, saved, workspace, room)
    if counts is None:
        assert expected is None
        return
    chosen = list(zip(classes, counts, strict=True))
    assert expected == sum(option.time_s * count for option, count in chosen)
    freed = sum(option.frees_bytes * count for option, count in chosen)
    peak = max([workspace, *(option.workspace_bytes for option, count in chosen if count)])
    assert saved - freed + peak <= room


def test_nothing_is_recomputed_when_all_fits() -> None:
    assert cheapest([ClassOption(8, 1.0, 5.0, 3.0)], 40.0, 1.0, 41.0) == (0,)
