"""Classes of layers that are one class of the model are called by their lists and their place there."""

from __future__ import annotations

import pytest

from autopar.emit.names import class_names
from autopar.ir.graph import Call, Program

T5 = {"encoder.block": ["T5", "T52", "T52"], "decoder.block": ["T53", "T54", "T54"]}
CASES: list[tuple[dict[str, list[str]], dict[str, str]]] = [
    ({"layers": ["A", "A"]}, {"A": "A"}),
    ({"layers": ["A", "B", "A"]}, {"A": "A", "B": "B"}),
    ({"layers": ["A", "A2", "A2", "A3"]}, {"A": "AFirst", "A2": "A", "A3": "ALast"}),
    (T5, {"T5": "T5EncoderFirst", "T52": "T5Encoder", "T53": "T5DecoderFirst", "T54": "T5Decoder"}),
    ({"up_part.layers": ["A"], "down.layers": ["A2"]}, {"A": "AUpPart", "A2": "ADown"}),
    # The place does not tell them apart: by turns, in lists that differ by a number or by no word, in several lists.
    ({"layers": ["A", "A2", "A", "A2"]}, {"A": "A", "A2": "A2"}),
    ({"stages.0": ["A"], "stages.1": ["A2"]}, {"A": "A", "A2": "A2"}),
    ({"a-b": ["A"], "c d": ["A2"]}, {"A": "A", "A2": "A2"}),
    ({"one": ["A", "A2"], "two": ["A", "A2"]}, {"A": "A", "A2": "A2"}),
    # Another class of the model has the name.
    ({"one": ["A"], "two": ["A2"], "three": ["AOne"]}, {"A": "A", "A2": "A2", "AOne": "AOne"}),
    # Digits of the model's own.
    ({"layers": ["Conv2", "Conv3"]}, {"Conv2": "Conv2", "Conv3": "Conv3"}),
]


@pytest.mark.parametrize(("lists", "names"), CASES)
def test_class_names(lists: dict[str, list[str]], names: dict[str, str]) -> None:
    calls = tuple(Call(block, f"{path}.{i}") for path, blocks in lists.items() for i, block in enumerate(blocks))
    assert class_names(Program("Model", {}, calls, {}, {}, {})) == names
