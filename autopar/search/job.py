"""From a job to the search: the sizes of cp and tp worth a look, and the search under the job's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cost_models.hardware import Cluster
from ..cost_models.layer_costs import ModelCosts
from ..errors import PlanError
from ..ir.graph import B, Program, S
from ..ir.lengths import check_multiple
from ..ir.reads import read_elsewhere
from ..plan.options import check
from ..plan.plan import asked_length
from ..request import Job, batch_of, default_batch, default_precision, read_cluster
from ..rules.spread import data_types
from ..runtime.choices import Compute
from .layouts import position_rows, why_not
from .pins import Pins, Request
from .search import SearchResult, search
from .sizes import divisors
from .space import NO_STAGES, check_space

_WORTH_CUTTING = 16_384  # tokens of a sequence, from which on cp is looked at unasked
_SHORTEST_PART = 1_024  # tokens of a rank of cp, unasked


def check_choices(
    pins: Pins,
    gpus: int | Cluster | None,
    *,
    gpu: str | None,
    global_batch: int | None,
    sequence: int | None,
    pad_to_multiple_of: int | None,
    precision: str | None,
    compile: bool | None,
) -> None:
    """PlanError where pins, cluster and sizes cannot go together, with the arguments of `parallelize`.

    Asked before a model is built or traced: the same space as the search's, of a model with any layers.
    """
    check({
        "global_batch": global_batch, "sequence": sequence, "pad_to_multiple_of": pad_to_multiple_of,
        "precision": precision, "compile": compile,
    })  # fmt: skip
    cluster = read_cluster(gpus, gpu, [])
    multiple = None if sequence is None else pad_to_multiple_of  # nothing is known of the length of the inputs
    batch = batch_of(sequence or 1, multiple, global_batch or default_batch(cluster))
    compute = Compute(precision=precision or default_precision(cluster), compile=bool(compile))
    check_space(Request(batch, compute, 0.0, pins=pins), cluster)


def check_layers(program: Program, job: Job, pins: Pins) -> None:
    """PlanError where a pin names layers that the model has not."""
    layers = len(program.layer_calls)
    named = pins.recompute if isinstance(pins.recompute, tuple) else ()
    if wrong := sorted(layer for layer in named if isinstance(layer, int) and layer >= layers):
        has = f"has layers 0 to {layers - 1}" if layers else "has no list of layers"
        raise PlanError(f"recompute={named}: {job.name} {has}, and none is {', '.join(map(str, wrong))}")
    if isinstance(pins.recompute, int) and pins.recompute > layers:
        raise PlanError(f"recompute={pins.recompute}: {job.name} has {layers} layers to recompute")


def search_job(
    job: Job, program: Program, models: Sequence[ModelCosts], pins: Pins, illegal: Mapping[str, str]
) -> SearchResult:
    """The search over the costs of each solution, with what the model itself forbids. illegal: "tp=3" → why."""
    if not models:
        reasons = "; ".join(f"{size} ({why})" for size, why in illegal.items())
        raise PlanError(f"no placements for {str(pins) or 'any size'}: {reasons}")
    if all(program.is_between(call.block) for call in program.layer_calls):
        illegal = {**illegal, NO_STAGES: "the model has no list of layers, the items of a ModuleList or Sequential"}
    if elsewhere := next(read_elsewhere(program), None):
        name, layer, _ = elsewhere
        illegal = {**illegal, "zero=3 and pp > 1": f"{name} is read outside its layer, {layer.path}"}
        pins = pins.also_forbidding({"zero": [3], "pp": range(2, job.cluster.gpus + 1)})
    budget = job.cluster.hardware.memory_bytes if job.budget_bytes is None else job.budget_bytes
    request = Request(job.batch, job.compute, budget, job.optimizer, pins, data_types(program).coupling)
    return search(models, job.cluster, request, illegal)


def tp_sizes(job: Job, pins: Pins) -> list[int]:
    """tp sizes worth a look: divisors of the cluster inside one node, unless pinned."""
    if pins.tp is not None:
        return [pins.tp]
    return [t for t in divisors(job.cluster.gpus) if t <= job.cluster.hardware.gpus_per_node]


def cp_sizes(program: Program, job: Job, pins: Pins) -> list[int]:
    """cp sizes worth a look: for long sequences, or fewer samples than GPUs, unless pinned."""
    _check_cp(program, job, pins)
    if program.fixed_length:
        return [1]
    if pins.cp is not None:
        return [pins.cp]
    sizes = [c for c in divisors(job.cluster.gpus) if job.batch.sequence % (c * program.sequence_multiple) == 0]
    if pins.attention is not None:
        return [c for c in sizes if c > 1]
    wanted = job.batch.sequence >= _WORTH_CUTTING or job.batch.global_batch < job.cluster.gpus
    return [c for c in sizes if c == 1 or wanted and job.batch.sequence // c >= _SHORTEST_PART]


def _check_cp(program: Program, job: Job, pins: Pins) -> None:
    """PlanError where the pins ask for ranks of cp, and the model has no sequence that could be cut."""
    ranks = max(pins.cp or 1, 1 if pins.attention is None else 2)
    if fixed := program.fixed_length:
        fixed.check_uncut(f"attention={pins.attention!r}" if pins.attention else f"cp={pins.cp}", ranks)
    elif job.batch.sequence == 1 and ranks > 1:
        raise PlanError(f"cp={ranks}: the inputs of {job.name} have no sequence to cut: leave cp and attention free")


def illegal_sizes(program: Program, job: Job, pins: Pins) -> dict[str, str]:
    """Why some tp sizes cannot be; PlanError where the pinned one cannot, or the sequence is too long."""
    values = {B: 1, S: job.batch.sequence}
    low, high = program.sequence_range
    tokens, asked = job.batch.tokens, asked_length(job.batch)
    if program.fixed_length:
        program.fixed_length.check(asked, job.batch.sequence)
    check_multiple(program.sequence_multiple, asked, tokens, job.batch.sequence)
    if tokens < low or job.batch.sequence > high:
        raise PlanError(f"{asked}: the model's forward allows {low} to {high} (a branch on the length)")
    if (rows := position_rows(program)) is not None and rows < job.batch.sequence:
        raise PlanError(f"{asked}: the model's table of positions has {rows} rows; use at most {rows}")
    reasons = {tp: why_not(program, tp, values) for tp in tp_sizes(job, pins) if tp > 1}
    if pins.tp is not None and reasons.get(pins.tp):
        nodes = range(1, job.cluster.hardware.gpus_per_node + 1)
        legal = ", ".join(str(tp) for tp in nodes if why_not(program, tp, values) is None)
        raise PlanError(f"tp={pins.tp}: {reasons[pins.tp]}: use one of tp={legal}, or leave tp free")
    return {f"tp={tp}": reason for tp, reason in reasons.items() if reason is not None}
