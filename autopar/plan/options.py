"""Every option and pin by name: the values it takes, and what it is for.

One table, read by `parallelize`, the command line and plan.yaml, so that a wrong value is refused alike everywhere and
before anything is traced. The choices of a plan are declared in `runtime/choices.py`, and come from there. What values
mean together is for `search/pins.py`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from ..errors import PlanError
from ..runtime.choices import Batch, Compute, Mesh, Pipeline, Sharding
from .recompute import FORM, MOST_LAYERS, Activations, RecomputeChoice, choice

VALUES = (Mesh, Batch, Pipeline, Sharding, Activations, Compute)  # the choices of a plan, in the order of plan.yaml
CONTEXT_LAYOUTS = ("ring", "ulysses", "all_gather")
# Elementwise: a shard of the state needs only the shard of the parameter.
OPTIMIZERS = ("AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop")
# Beyond what anyone trains on, and few enough for the search to go through.
MOST_GPUS, MOST_SAMPLES, MOST_TOKENS = 100_000, 10**7, 10**8
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"tb": 10**12}


@dataclass(frozen=True)
class Option:
    """The values of one option.

    form: what is legal, in words. names: the legal words, where it takes words; a wrong one is told the nearest.
    read: the value of a text of the command line; what cannot be read stays text, which is then refused by name.
    """

    form: str
    fits: Callable[[Any], bool]
    help: str
    read: Callable[[str], Any] = str
    metavar: str = ""
    names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What it is for, and its legal words."""
        return self.help + (f": {', '.join(self.names)}" if self.names else "")

    def fault(self, name: str, value: Any) -> str:
        """ "zero=7: use 0, 1, 2 or 3", or "" where the value is legal."""
        if self.fits(value):
            return ""
        near = nearest(value, self.names) if isinstance(value, str) else ""
        return f"{name}={shown(value)}: use {self.form}{near}"


def check(values: Mapping[str, Any]) -> None:
    """PlanError for the first value of OPTIONS that is not legal; None leaves an option free."""
    for name, value in values.items():
        if value is not None and (fault := OPTIONS[name].fault(name, value)):
            raise PlanError(fault)


def check_names(names: Iterable[str], legal: Iterable[str], message: str) -> None:
    """PlanError for names that are not among the legal ones, each with the nearest."""
    legal = tuple(legal)
    if unknown := sorted(set(names) - set(legal)):
        raise PlanError(f"{', '.join(name + nearest(name, legal) for name in unknown)}: {message} {', '.join(legal)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """ " (did you mean 'zero'?)", or nothing where no name is near."""
    by_lower = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def shown(value: Any) -> str:
    """A wrong value in a message, on one line and cut to 80 characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_memory(memory: str | float) -> float:
    """Bytes of "70GiB", "512 MiB", "80GB" or a number of bytes. PlanError for anything else, 0 and infinity."""
    if fault := OPTIONS["memory"].fault("memory", memory):
        raise PlanError(fault)
    return _bytes(memory)


def _bytes(memory: Any) -> float:
    """NaN where it is no size."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)\s*", memory)
        return float(match[1]) * _UNITS.get(match[2].lower(), math.nan) if match else math.nan
    is_number = isinstance(memory, int | float) and not isinstance(memory, bool)
    return float(memory) if is_number and abs(memory) < 2**63 else math.nan


# --------------------------------------------------------------------------------
# Kinds of options

_MOST = {"samples": MOST_SAMPLES, "tokens": MOST_TOKENS, "slices": 65_536}  # of other units MOST_GPUS


def _option(field: Field[Any]) -> Option:
    """What the field of a value object takes."""
    legal, help = field.metadata["legal"], field.metadata["help"]
    if legal in _FORMS:
        return _FORMS[legal](help)
    if legal is bool:
        return _flag(help)
    if isinstance(legal, str):
        return _whole(legal, help, _MOST.get(legal, MOST_GPUS))
    return _one_of(legal, help) if isinstance(legal[0], str) else _number(legal, help)


def _whole(unit: str, help: str, most: int) -> Option:
    form, metavar = f"a whole number of {unit}, 1 to {most:,}", unit.upper() if unit in ("samples", "tokens") else "N"
    return Option(form, lambda value: is_whole(value) and 1 <= value <= most, help, _read_whole, metavar)


def _number(legal: tuple[int, ...], help: str) -> Option:
    form = f"{', '.join(map(str, legal[:-1]))} or {legal[-1]}"
    return Option(form, lambda value: is_whole(value) and value in legal, help, _read_whole, "N")


def _read_whole(text: str) -> Any:
    return int(text) if re.fullmatch(r"[+-]?\d{1,30}", text) else text


def _one_of(names: tuple[str, ...], help: str) -> Option:
    form = f"one of {', '.join(names)}"
    return Option(form, lambda v: isinstance(v, str) and v in names, help, metavar="NAME", names=names)


def _flag(help: str) -> Option:
    def read(text: str) -> Any:
        return {"true": True, "false": False}.get(text.lower(), text)

    return Option("True or False", lambda value: isinstance(value, bool), help, read)


def _recompute(help: str) -> Option:
    form = f"'none', 'full', {FORM}, a number of layers or layer indices (below {MOST_LAYERS:,})"
    return Option(form, _is_recompute, help, _read_recompute, "WHAT")


def _is_recompute(value: Any) -> bool:
    if isinstance(value, str):
        try:
            return value in ("none", "full") or bool(choice(value))
        except PlanError:
            return False
    if not isinstance(value, tuple):
        return is_whole(value) and 0 <= value < MOST_LAYERS
    layers = [part for part in value if not isinstance(part, RecomputeChoice)]
    return all(is_whole(layer) and 0 <= layer < MOST_LAYERS for layer in layers) and len(layers) in (0, len(value))


def _read_recompute(text: str) -> str | int | tuple[int, ...]:
    parts = text.rstrip(",").split(",")
    if not all(re.fullmatch(r"\s*\d{1,30}\s*", part) for part in parts):
        return text
    layers = tuple(map(int, parts))
    return layers[0] if len(layers) == 1 and not text.endswith(",") else layers


def _layer_ranges(help: str) -> Option:
    def is_range(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_layer, value))

    def is_layer(value: Any) -> bool:
        return is_whole(value) and 0 <= value <= MOST_LAYERS

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(is_range, value))

    return Option("a layer range [start, stop] for each stage, as [[0, 12], [12, 24]]", fits, help)


def _is_lr(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def _read_float(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


_FORMS: Mapping[Any, Callable[[str], Option]] = {"recompute": _recompute, "layer ranges": _layer_ranges}

# --------------------------------------------------------------------------------
# The table

CHOICES = {field.name: field for kind in VALUES for field in fields(kind)}  # of a plan, by name
CHOSEN = {name: _option(field) for name, field in CHOICES.items()}


def _chosen_by(who: str) -> dict[str, Option]:
    return {name: option for name, option in CHOSEN.items() if CHOICES[name].metadata["by"] == who}


# What is trained, and on what.
JOB: dict[str, Option] = {
    "gpus": _whole("GPUs", "how many (default: this machine's)", MOST_GPUS),
    "gpus_per_node": _whole("GPUs", "of a node (default: the usual node)", MOST_GPUS),
    "memory": Option(
        "'70GiB', '512MiB', '80GB' or a number of bytes, more than 0",
        lambda value: 0 < _bytes(value) < math.inf,
        "budget per GPU, as 70GiB (default: the GPU's usable memory)",
        metavar="SIZE",
    ),
    **_chosen_by("job"),
    "pad_to_multiple_of": _whole("tokens", "pad samples to the next multiple, out of the loss", MOST_TOKENS),
    "optimizer": _one_of(OPTIMIZERS, "an elementwise torch.optim class (default: AdamW)"),
    "lr": Option("a number, 0 or more", _is_lr, "learning rate (default: the optimizer's)", _read_float, "LR"),
    "batch_norm": _one_of(
        ("refuse", "synchronise"), "of all replicas' samples, in one micro-batch (default: refuse)"
    ),
}  # fmt: skip
# Choices of the search that the user may fix, or forbid by value: the plan's, and what decides several of them.
PINS: dict[str, Option] = _chosen_by("pin") | {
    "virtual_stages": _whole("stages", "stages of each pipeline rank (interleaved, zero-bubble)", MOST_LAYERS),
    "attention": _one_of(CONTEXT_LAYOUTS, "how the ranks of cp attend to the whole sequence"),
    "sequence_parallel": _flag("Megatron's layout with or without it"),
}
OPTIONS = JOB | PINS | {"steps": _whole("steps", "how many to train (default: 5)", 10**6)}


def check_choices(values: object) -> None:
    """PlanError for the first field of a value object that is not legal; None where it may be left open is."""
    for field in fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        if field.metadata["legal"] == "recompute" or (value is None and field.default is None):
            continue  # a plan has ranges of layers, where the option takes words
        if fault := CHOSEN[field.name].fault(field.name, value):
            raise PlanError(fault)
