"""What becomes of one class: built small, run by itself, planned, saved; compared with itself where asked."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.compile.compiler import prepare
from autopar.errors import PlanError
from autopar.runtime.precision import raise_float32
from autopar.trace.example_inputs import default_inputs
from autopar.trace.moe import written_experts
from autopar.verification.parity import no_dropout, relative_errors
from tests.interpreter import run_program
from tests.sweep.configs import VOCABULARY, shrink

SEQUENCE, BATCH = 16, 2
_SPECIAL = 4  # ids at both ends that models give a meaning
_BATCH_NORM = ("refuse", "synchronise")  # without and with norms of batches, whose statistics the user must choose
PLANNED, REFUSED, CRASHED, OWN = "planned", "refused", "crashed", "own forward fails"


@dataclass(frozen=True)
class Outcome:
    """outcome: one of the four. at: the step it ended in. reason: the error's first lines. error: of a comparison."""

    name: str
    outcome: str
    at: str = ""
    reason: str = ""
    where: str = ""
    seconds: float = 0.0
    gradients: float | None = None  # the largest error, as tests/interpreter.py computes them
    processes: float | None = None  # the same, by processes


def build(name: str) -> nn.Module:
    """The class `name` of transformers with a small config, seeded."""
    import transformers

    kind: Any = getattr(transformers, name)
    config = kind.config_class
    torch.manual_seed(0)
    model: nn.Module = kind(config.from_dict(shrink(config().to_dict()))).train()
    return model


def batch_of(model: nn.Module) -> dict[str, Any]:
    """The product's own example inputs with values: ids that stand for nothing special, but for the last of each."""
    generator = torch.Generator().manual_seed(1)
    config: Any = model.config
    words = getattr(config.get_text_config(), "vocab_size", VOCABULARY)
    batch = default_inputs(model, BATCH, SEQUENCE)
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        classes = config.num_labels if name == "labels" and value.dim() == 1 else words
        if value.is_floating_point():
            batch[name] = torch.randn(value.shape, generator=generator)
        else:
            lowest = min(_SPECIAL, classes - 2)
            batch[name] = torch.randint(lowest, max(classes - _SPECIAL, 2), value.shape, generator=generator)
    if "input_ids" in batch and isinstance(getattr(config, "eos_token_id", None), int):
        batch["input_ids"][:, -1] = config.eos_token_id  # what some classifiers look for
    return batch


def loss_of(outputs: Any) -> Tensor:
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs["loss"] if "loss" in outputs else outputs[0]
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError("forward returns no loss")
    return loss


def attempt(name: str, interpreted: bool = False, processes: bool = False) -> Outcome:
    """What becomes of the class `name`; `interpreted` and `processes` compare gradients with its own."""
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    at, failed = "build", OWN
    try:
        model = build(name)
        at, failed = "inputs", CRASHED
        batch = batch_of(model)
        at, failed = "forward", OWN
        loss_of(model(**batch)).backward()
        at, failed = "plan", CRASHED
        normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        sequence = SEQUENCE if "input_ids" in batch else None
        result = autopar.parallelize(
            model, gpus=2, gpu="cpu", sequence=sequence, global_batch=16, batch_norm=_BATCH_NORM[normed]
        )
        at = "save"
        with tempfile.TemporaryDirectory() as folder:
            result.save(os.path.join(folder, "program"))
        at = "interpret"
        kept_whole = bool(result.program.opaque)  # runs in a saved program alone
        by_interpreter = interpret(model, batch) if interpreted and not kept_whole else None
        at = "processes"
        by_processes = worst(result.verify(2)) if processes or interpreted and kept_whole else None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        refused = isinstance(error, PlanError) and failed == CRASHED
        reason = f"{type(error).__name__}: {error}"[:1500]
        return Outcome(name, REFUSED if refused else failed, at, reason, _where(error), _since(begin))
    return Outcome(name, PLANNED, "", "", "", _since(begin), by_interpreter, by_processes)


def interpret(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """The largest error of loss and gradients of the traced program against the model's own, both in fp64."""
    raised = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    model = model.double()
    program = prepare(model, raised, "fp64", "synchronise")
    with raise_float32(), no_dropout(), written_experts(model):
        own = _gradients(model, lambda: loss_of(model(**raised)))
    with raise_float32(), no_dropout():
        mine = _gradients(model, lambda: run_program(program, model, raised))
    without = {name: mine.get(name, torch.zeros_like(value)) for name, value in own.items()}
    return max(relative_errors(without, own).values())


def _gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss = run()
    loss.backward()
    return {"(loss)": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(parity: Any) -> float:
    return float(max(parity.loss, parity.gradients, parity.norm, parity.weights))


def _where(error: BaseException) -> str:
    """The last frames, of the first cause."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)[-4:]
    return " < ".join(f"{os.sep.join(f.filename.split(os.sep)[-2:])}:{f.lineno} {f.name}" for f in reversed(frames))


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 1)


@contextlib.contextmanager
def silent() -> Any:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
