"""`verify DIR`: a saved program, perhaps edited, against the original: by its text, and by what it computes.

A saved folder keeps its sources as they were written, and how its inputs look, in `.original`: so that the edits can
be named, and the program as written be run beside the edited one, without the model at hand. Where the model can be
built again (a function by name, a Hugging Face class by its config) it is the model that the program is held against.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from ..emit.project import KEPT, KEPT_RUNTIME, WRITTEN
from ..errors import PlanError
from ..ir.graph import Program
from ..plan.plan import Plan
from ..progress import progress
from ..request import Job, with_loss
from ..trace.huggingface import is_huggingface
from ..trace.named import named_function, named_model
from .comparison import Comparison, compared
from .edits import Edits, find_edits
from .program import constants_of, train_reference
from .ranks import Task, reference_of, run_task, steps_done
from .record import Record, read_record, write_record
from .samples import inputs_of, random_batch
from .shrink import LARGEST, MOST_PROCESSES, fewer_samples, seeded


def keep_original(folder: Path, job: Job, program: Program) -> None:
    """Put beside a program that has just been written what `verify_folder` needs."""
    kept = folder / KEPT
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for path in (folder / name for name in WRITTEN):
        if path.exists():
            shutil.copy(path, kept)
    shutil.make_archive(str(kept / Path(KEPT_RUNTIME).stem), "zip", folder, "runtime")
    model = None if job.factory is None else _importable(job.factory)
    if job.factory is None and _is_plain_huggingface(job.model):
        model = ""  # its config, kept here
        config: Any = job.model.config
        config.save_pretrained(kept)
        text = json.loads((kept / "config.json").read_text())
        (kept / "config.json").write_text(json.dumps(text | {"architectures": [type(job.model).__name__]}, indent=1))
    constants = {
        name: value for name, value in constants_of(job).items() if isinstance(value, bool | int | float | str)
    }
    size = sum(p.numel() for p in job.model.parameters())
    loss = None if job.loss is None else _importable(job.loss)
    if job.loss is not None and loss is None:
        model = None  # a model without its loss is no reference
    write_record(folder, Record(model, loss, size, inputs_of(program), constants))


def verify_folder(folder: Path, model: str | None = None, steps: int = 5) -> Comparison:
    """Name the edits of a saved program, and train it beside the original in fp64 on CPU processes.

    model: `module:function` or a config, over the one recorded. Raises PlanError where the folder has no record, lacks
    what training needs, or the program does not run.
    """
    folder = folder.resolve()
    record = read_record(folder)
    edits, plan = find_edits(folder), fewer_samples(_plan_of(folder))
    if record.parameters > LARGEST or plan.mesh.world_size > MOST_PROCESSES:
        much = f"{record.parameters / 1e6:,.0f} M parameters on {plan.mesh.world_size} processes"
        return Comparison(edits, f"{much} are too many to train here: compared by its text alone")
    original, why = _original(record, folder, model)
    sizes = plan.batch.global_batch, plan.batch.sequence
    batches = [random_batch(record.inputs, plan.batch.global_batch, plan.batch.tokens, seed) for seed in range(steps)]
    processes = plan.mesh.world_size
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as scratch, _naming(edits):
        if original is not None:
            weights, reference = train_reference(original.double().train(), batches, record.constants, plan)
            against = "the original model on one process"
        else:
            weights, against = None, f"the program as written ({why})"
            written = Task(batches, None, None, str(folder / KEPT), str(folder), *sizes)
            reference = reference_of(_run(written, Path(scratch) / "written", folder, processes))
        edited = Task(batches, weights, reference, str(folder), str(folder), *sizes)
        reports = _run(edited, Path(scratch) / "edited", folder, processes)
    return compared(edits, against, reports, reference, processes)


def _plan_of(folder: Path) -> Plan:
    """The plan of a folder that can train as far as its files tell: what `autopar run` and train.py read is there."""
    plan, written = Plan.load(folder / "plan.yaml"), Plan.load(folder / KEPT / "plan.yaml")
    if plan.mesh != written.mesh:
        raise PlanError(f"{folder}/plan.yaml is of {plan.mesh}, and model.py of {written.mesh}: emit it again")
    try:
        compile((folder / "train.py").read_bytes(), "train.py", "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise PlanError(f"{folder} cannot train: {folder / 'train.py'}: {error}") from error
    return written


@contextmanager
def _naming(edits: Edits) -> Iterator[None]:
    """Whatever goes wrong within is told after what was edited: it is the likely cause."""
    try:
        yield
    except PlanError as error:
        if not edits.places:
            raise
        raise PlanError(f"{edits}\n\nthe edited program does not run: {error}") from error


def _run(task: Task, scratch: Path, folder: Path, processes: int) -> list[dict[str, Any]]:
    scratch.mkdir()
    what = "as written" if task.reference is None else "as it is now"
    try:
        doing = f"training the program {what} on {processes} processes"
        with progress(doing, len(task.batches), lambda: steps_done(scratch)):
            return run_task(task, scratch)
    except PlanError as error:
        raise PlanError(_at_the_users_line(str(error), folder)) from error


def _at_the_users_line(said: str, folder: Path) -> str:
    """The last line of the user's sources in what the ranks have said, and the exception there; else all of it."""
    frames = re.findall(rf'File "{re.escape(str(folder))}/(\S+\.py)", line (\d+)(?:, in (\S+))?\n(.*)', said)
    own = [frame for frame in frames if not frame[0].startswith("runtime/")]
    raised = [line for line in said.splitlines() if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b.*", line)]
    if not raised:
        return said
    reason = re.sub(r"^\[rank\d+\]: ?", "", raised[0])
    if not own:
        return f"the program in {folder} fails: {reason}\n(AUTOPAR_DEBUG=1 shows the traceback)"
    file, line, function, text = own[-1]
    return f"{folder}/{file}:{line}, in {function or 'the file'}:\n    {text.strip()}\n{reason}"


# --------------------------------------------------------------------------------
# The original model


def _original(record: Record, folder: Path, given: str | None) -> tuple[nn.Module | None, str]:
    """The model with values, if it can be built again, and why not."""
    name = given if given is not None else record.model
    if name is None:
        return None, "the model is not known by name: --model module:function gives it"
    try:
        loss = named_function(record.loss, "--loss") if record.loss else None
        build, _ = named_model(name or str(folder / KEPT))
    except (PlanError, ImportError) as error:
        if given is not None:
            raise
        return None, f"the model cannot be built here: {error}"
    if isinstance(build, nn.Module):
        kind, config = type(build), build.config
        model = seeded(lambda: kind(config))
    else:
        model = seeded(build)
    return (model if loss is None else with_loss(model, loss, [*record.inputs, *record.constants])), ""


def _is_plain_huggingface(model: nn.Module) -> bool:
    """Whether its class and config alone give the model: nothing frozen, no adapter."""
    return (
        is_huggingface(model)
        and type(model).__module__.startswith("transformers.")
        and all(p.requires_grad for p in model.parameters())
    )


def _importable(function: Callable[..., Any]) -> str | None:
    """`module:function` if that is what the function is called anywhere."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", "") or "").stem
    with suppress(ImportError, ValueError):
        if module and name.isidentifier() and importlib.util.find_spec(module):
            return f"{module}:{name}"
    return None
