"""What the search found, for people: plan table, ledger of each stage, what the runners-up lose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from tabulate import tabulate

from autopar.cost_models.stage_ledger import StageLedger
from autopar.cost_models.step_time import Estimate
from autopar.plan.plan import Plan
from autopar.plan.recompute import summary

from .search import Candidate, SearchResult
from .sizes import gib, unit_for

_HEADERS = (
    "#", "pp", "dp", "cp", "tp", "zero", "micro×acc", "schedule", "recompute", "step", "tokens/s/GPU", "MFU",
    "peak GiB", "bubble", "sharded", "limited by",
)  # fmt: skip
_LEFT = {"schedule", "recompute", "limited by"}
# Below this a line of a ledger says nothing.
_SMALLEST_MS, _SMALLEST_BYTES = 5e-4, 2**10


def plan_table(result: SearchResult, model_name: str, parameters: int) -> str:
    """The table of DESIGN §1: a header line, a row a plan (best first), what was searched, notes."""
    align = ["left" if header in _LEFT else "right" for header in _HEADERS]
    # The headers as a row: tabulate pads real ones to four spaces.
    size, size_bytes = unit_for(max(candidate.estimate.peak_bytes for candidate in result.best))
    words = {"tokens/s/GPU": f"{_unit(result)}/s/{result.cluster.unit}", "peak GiB": f"peak {size}"}
    headers = [words.get(title, title) for title in _HEADERS]
    rows = [_row(number, candidate, size_bytes) for number, candidate in enumerate(result.best, start=1)]
    table = tabulate([headers, *rows], tablefmt="plain", colalign=align, disable_numparse=True)
    body = "\n".join(f" {line}".rstrip() for line in table.splitlines())
    notes = "".join(f"\n {note}" for note in (*_loss_notes(result), *_padding_notes(result), *result.notes))
    return f"{header(result, model_name, parameters)}\n\n{body}\n {footer(result)}{notes}"


def _loss_notes(result: SearchResult) -> list[str]:
    """Which rows compute their loss in slices of the vocabulary."""
    slices = {number: candidate.plan.activations.loss_chunks for number, candidate in enumerate(result.best, start=1)}
    return [f"#{number}: head and loss in {n} slices of the vocabulary" for number, n in slices.items() if n > 1]


def _padding_notes(result: SearchResult) -> list[str]:
    """What counts pads and what does not."""
    batch = result.request.batch
    counted = f"times, memory and MFU count all, tokens/s the {batch.tokens:,}"
    return [f"{batch.tokens:,} tokens a sample, padded to {batch.sequence:,}: {counted}"] if batch.padded else []


def header(result: SearchResult, model_name: str, parameters: int) -> str:
    """Model, machine, batch, precision, optimizer, budget."""
    request = result.request
    length = f" × {request.batch.tokens:,}" if request.batch.sequence > 1 else ""
    padded = f", padded to {request.batch.sequence:,}" if request.batch.padded else ""
    return " · ".join(
        (
            model_name,
            f"{count_text(parameters)} parameters",
            str(result.cluster),
            f"{request.batch.global_batch:,}{length} {_unit(result)} a step{padded}",
            precision_text(request.compute.precision, request.pins.reduce_dtype),
            request.optimizer.name,
            f"budget {gib(request.budget_bytes)} a {result.cluster.unit}",
        )
    )


def precision_text(precision: str, reduce_dtype: str | None) -> str:
    """ "bf16", or "bf16, gradients summed in bf16"."""
    return precision if reduce_dtype is None else f"{precision}, gradients summed in {reduce_dtype}"


def _unit(result: SearchResult) -> str:
    """What is counted: tokens, or samples of a model whose inputs have no sequence."""
    return "tokens" if result.request.batch.sequence > 1 else "samples"


def footer(result: SearchResult) -> str:
    """How much was searched, what is not legal, how far to trust the figures."""
    parts = [f"searched {result.searched:,} plan{'s' * (result.searched != 1)} in {result.elapsed_s:.1f} s"]
    if result.do_not_fit:
        parts.append(f"{result.do_not_fit:,} do not fit")
    if result.pruned:
        parts.append(f"{result.pruned:,} cannot win")
    if result.not_priced:
        parts.append(f"{result.not_priced:,} not priced: enough that promise more were (pins narrow the search)")
    if result.not_legal:
        parts.append(f"not legal: {', '.join(result.not_legal)}")
    parts.append("prediction level " + ("L1 (measured here)" if result.cluster.gpu == "cpu" else "L0 (datasheet)"))
    return " · ".join(parts)


def explain(result: SearchResult, candidate: Candidate | None = None) -> str:
    """Memory and time of each stage, side by side, the parts of a step, and why the runners-up lose."""
    shown = candidate or result.chosen
    parts = [_stage_text(number, stage, shown.estimate) for number, stage in enumerate(shown.estimate.stages)]
    step = [(term.name, milliseconds(term.time_s)) for term in shown.estimate.step]
    step.append(("step", milliseconds(shown.estimate.step_time_s)))
    parts.append(_plain(step, ("one step", "ms")))
    if notes := _notes(shown.plan):
        parts.append("\n".join(notes))
    others = [other for other in result.best if other is not shown]
    return "\n\n".join([*parts, "\n".join(why_not(other, shown) for other in others)]).rstrip()


def _notes(plan: Plan) -> list[str]:
    """How to read the ledger: what is priced as hidden by nothing, what as one kernel."""
    notes = []
    if plan.mesh.tp > 1:
        notes.append("tp communication is exposed: a layer waits for its collectives, and nothing runs beside them")
    if plan.compute.compile:
        notes.append("compiled layers: ops between two products, attentions or collectives are priced as one kernel;")
        notes.append("activations as without torch.compile, which keeps no more")
    if (chunks := plan.activations.loss_chunks) > 1:
        notes.append(
            f"head and loss in {chunks} slices of the vocabulary: at most one of the logits is in memory, "
            "and backward computes each again"
        )
    return notes


def why_not(other: Candidate, chosen: Candidate) -> str:
    """One line: how much slower, and the parts of the step that grew most."""
    longer = other.estimate.step_time_s / chosen.estimate.step_time_s - 1
    ours, theirs = step_parts(chosen), step_parts(other)
    names = dict.fromkeys([*ours, *theirs])
    changes = sorted(((theirs.get(name, 0.0) - ours.get(name, 0.0), name) for name in names), reverse=True)
    grown = [f"{name} +{duration(delta)}" for delta, name in changes[:2] if delta > 0.005 * chosen.estimate.step_time_s]
    why = ", ".join(grown) or "no single part stands out"
    return f"why not {describe(other.plan)}: {longer:+.1%} step time: {why}"


def step_parts(candidate: Candidate) -> dict[str, float]:
    """Seconds of a step by cause: the slowest stage's micro-batches, the bubble, and what follows the pipeline."""
    estimate = candidate.estimate
    slowest = max(estimate.stages, key=lambda stage: stage.micro_batch_s)
    parts = {term.name: term.time_s * candidate.plan.accumulation for term in slowest.time}
    parts["bubble"] = estimate.step[0].time_s - sum(parts.values())
    parts["optimizer"] = sum(term.time_s for term in estimate.step[1:])
    return parts


def describe(plan: Plan) -> str:
    """The choices of a plan in one phrase: pp2·dp8·tp4, zero 1, 1 × 64 1f1b, recompute none."""
    schedule = f" {schedule_text(plan)}" if plan.pipeline.schedule != "none" else ""
    batches = f"{plan.batch.micro_batch} × {plan.accumulation}{schedule}"
    loss = f", loss in {plan.activations.loss_chunks} slices" if plan.activations.loss_chunks > 1 else ""
    over_cp = f" ({plan.context.name})" if plan.mesh.cp > 1 else ""
    return f"{plan.mesh}{over_cp}, zero {plan.sharding.text()}, {batches}, recompute {recompute_text(plan)}{loss}"


def schedule_text(plan: Plan) -> str:
    """ "1f1b", "interleaved ×2" (stages a rank); "–" without a pipeline."""
    name = plan.pipeline.schedule if plan.pipeline.schedule != "none" else "–"
    return f"{name} ×{plan.virtual_stages}" if plan.virtual_stages > 1 else name


def recompute_text(plan: Plan) -> str:
    """As the column of the table has it."""
    return summary(plan.activations.recompute, plan.pipeline.stages[-1][1])


def _row(number: int, candidate: Candidate, size_bytes: int) -> list[str]:
    plan, estimate = candidate.plan, candidate.estimate
    return [
        str(number),
        *(str(plan.mesh.size(axis)) for axis in ("pp", "dp", "cp", "tp")),
        plan.sharding.text(),
        f"{plan.batch.micro_batch} × {plan.accumulation}",
        schedule_text(plan),
        recompute_text(plan),
        duration(estimate.step_time_s),
        _rate(estimate.tokens_per_s_per_gpu),
        f"{estimate.mfu:.1%}",
        f"{estimate.peak_bytes / size_bytes:.{1 if estimate.peak_bytes > size_bytes else 3}f}",
        f"{estimate.bubble:.1%}" if plan.mesh.pp > 1 else "–",
        f"{100 * candidate.model.sharded_fraction:.1f}".removesuffix(".0") + "%",
        estimate.limited_by,
    ]


def _stage_text(number: int, stage: StageLedger, estimate: Estimate) -> str:
    """Memory on the left, time of one micro-batch on the right."""
    unit, unit_bytes = unit_for(stage.peak_bytes)
    sizes = [(term.name, term.size_bytes) for term in stage.memory if term.size_bytes > _SMALLEST_BYTES]
    sizes.append(("peak", stage.peak_bytes))
    sizes += [(f"host: {term.name}", term.size_bytes) for term in stage.host]
    memory = [(name, f"{size / unit_bytes:.3f}") for name, size in sizes]
    time = []
    for term in stage.time:
        hidden = f"(hidden {milliseconds(term.hidden_s)})" if term.hidden_s * 1e3 > _SMALLEST_MS else ""
        if hidden or term.time_s * 1e3 > _SMALLEST_MS:
            time.append((term.name, milliseconds(term.time_s), hidden))
    time.append(("one micro-batch", milliseconds(stage.micro_batch_s), ""))
    rows = [
        [f"  {left[0]}" if left[0] else "", left[1], f"  {right[0]}" if right[0] else "", right[1], right[2]]
        for left, right in zip_longest(memory, time, fillvalue=("", "", ""))
    ]
    return _plain(rows, (_stage_name(number, stage, len(estimate.stages)), unit, "  time of one micro-batch", "ms", ""))


def _stage_name(number: int, stage: StageLedger, stages: int) -> str:
    parts = [_layers_text(stage.ranges)]
    parts += ["embedding"] if number == 0 else []
    parts += ["head"] if number == stages - 1 else []
    if stages == 1 and stage.ranges == ((0, 1),):  # perhaps without a list of layers, and then all is one
        parts = ["the whole model"]
    parts += [f"recomputed: {n} × {what}" for what, n in stage.recomputed]
    virtual = [str(number + k * stages) for k in range(len(stage.ranges))]
    return f"stage{'s' * (len(virtual) > 1)} {' and '.join(virtual)} ({', '.join(parts)})"


def _layers_text(ranges: Sequence[tuple[int, int]]) -> str:
    """ "layers 0–15", "layers 0–1 and 4–5", "layer 3"."""
    each = [f"{start}–{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in ranges]
    return f"layer{'s' * (each != [str(ranges[0][0])])} {' and '.join(each)}"


def _plain(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    align = ["left" if column % 2 == 0 else "right" for column in range(len(headers))]
    text = tabulate(
        rows,
        headers=headers,
        tablefmt="plain",
        colalign=align,
        disable_numparse=True,
        preserve_whitespace=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())


def duration(seconds: float) -> str:
    """5.31 s, 812 ms, 340 µs."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-2 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"


def milliseconds(seconds: float) -> str:
    """Three digits after the point below ten milliseconds, one above."""
    value = seconds * 1e3
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def count_text(number: int) -> str:
    """8.03 B, 124 M, 36,864."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if unit == "M" else f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
