"""Which names Python takes as they stand, and what is made of those that it does not."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.identifiers import identifier, is_index, is_plain, printable


@pytest.mark.parametrize("name", ["x", "_x", "q_proj", "é", "print", "match"])
def test_plain_names(name: str) -> None:
    assert is_plain(name) and identifier(name, "v") == name


@pytest.mark.parametrize(
    ("name", "instead"),
    {
        "class": "class_", "a-b": "a_b", "a b": "a_b", "-1": "_1", "1st": "v1st", "": "v", "__x": "_x",
        "__init__": "_init__", "ﬁ": "v_", "e\u0301": "e_", "x\ny": "x_y", "²": "v_", "--": "v_",
    }.items(),
)  # fmt: skip
def test_others(name: str, instead: str) -> None:
    assert not is_plain(name) and identifier(name, "v") == instead


@given(st.text(max_size=5))
def test_what_is_made_is_plain_and_means_itself(name: str) -> None:
    made = identifier(name, "v")
    assert is_plain(made) and not keyword.iskeyword(made) and identifier(made, "v") == made
    namespace: dict[str, object] = {}
    exec(
        f"class C:\n    {made} = 1\n    def read_it(self): return self.{made}\nx = C().read_it(), '{made}' in vars(C)",
        namespace,
    )
    assert namespace["x"] == (1, True)


def test_indices() -> None:
    assert all(map(is_index, ("0", "7", "12")))
    assert not any(map(is_index, ("007", "-1", "²", "٣", "", "1 ", "9" * 5000)))


@given(st.text(max_size=5))
def test_printable(text: str) -> None:
    assert printable(text).replace("\n", "").isprintable() and printable(text).count("\n") == text.count("\n")
