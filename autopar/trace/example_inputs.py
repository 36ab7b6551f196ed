"""Example inputs of Hugging Face models, from their config and the signature of forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TraceError

# For each main input of transformers: its example, of a config, a batch and a sequence length.
_LONGEST_DEFAULT = 8192
_Maker = Callable[[Any, int, int], Tensor | None]


def default_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    """Meta tensors for one forward of a transformers model with a loss: its main input and labels.

    Raises TraceError for models whose main input or labels are not known: pass `inputs`.
    """
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    example = _MAKERS[main](config, batch, sequence) if main in _MAKERS and main in takes else None
    if example is None:
        raise _unknown(model, f"its main input {main!r}")
    if "labels" not in takes or type(model).__name__.endswith(("ForCTC", "ForMultipleChoice")):
        raise _unknown(model, "what its labels are")
    inputs: dict[str, Any] = {main: example}
    if example.dim() > 2 and example.shape[1] == sequence:
        sequence -= 1  # the trace tells the sequence by its length: mel bins are none
    inputs["labels"] = _labels(model, batch, sequence)
    return inputs


def longest_sequence(model: nn.Module) -> int | None:
    """The longest sequence that the config allows; None where the inputs are no sequences of tokens."""
    if str(getattr(model, "main_input_name", "input_ids")) not in ("input_ids", "input_features"):
        return None
    config: Any = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    found = [getattr(config, name, None) for name in names]
    return next((int(length) for length in found if length), _LONGEST_DEFAULT)


def _ids(config: Any, batch: int, sequence: int) -> Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long, device="meta")


def _images(config: Any, batch: int, sequence: int) -> Tensor:
    """[batch, channels, height, width]; 224 where the config fixes no size."""
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros(batch, getattr(config, "num_channels", 3), height, width, device="meta")


def _features(config: Any, batch: int, sequence: int) -> Tensor | None:
    """[batch, mel bins, frames], where the config has Whisper's names: its encoder halves the frames."""
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        return None
    return torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions, device="meta")


def _waveform(config: Any, batch: int, sequence: int) -> Tensor:
    """[batch, samples]: one second at 16 kHz."""
    return torch.zeros(batch, 16_000, device="meta")


_MAKERS: dict[str, _Maker] = {
    "input_ids": _ids,
    "pixel_values": _images,
    "input_features": _features,
    "input_values": _waveform,
}


def _labels(model: nn.Module, batch: int, sequence: int) -> Tensor:
    """One a token, or one a sample for classifiers."""
    name = type(model).__name__
    if name.endswith("ForTokenClassification") or not name.endswith("Classification"):
        return torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return torch.zeros(batch, dtype=torch.long, device="meta")


def _unknown(model: nn.Module, what: str) -> TraceError:
    return TraceError(
        f"example inputs of {type(model).__name__} cannot be made ({what}): pass them by keyword, labels included, "
        "inputs={…}; meta tensors will do"
    )
