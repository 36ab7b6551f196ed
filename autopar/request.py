"""What the user asked for, checked and with its defaults: model, inputs, cluster, batch, optimizer, budget."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .cost_models.hardware import Cluster, default_gpu
from .errors import PlanError
from .ir.identifiers import identifier
from .plan.options import OPTIMIZERS, check, nearest, read_memory, shown
from .plan.plan import Optimizer
from .runtime.choices import Batch, Compute
from .trace.asked import check_arguments, check_keywords, check_model
from .trace.example_inputs import default_inputs, longest_sequence
from .trace.huggingface import huggingface_of
from .trace.initialise import build_on_meta
from .trace.input_sizes import sequence_length
from .trace.signature import keyword_signature

_LONGEST_DEFAULT = 8192

Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
OptimizerLike = str | type[torch.optim.Optimizer] | tuple[Any, Mapping[str, Any]] | torch.optim.Optimizer | None


@dataclass(frozen=True)
class Job:
    """A checked request; the search chooses the micro-batch. `notes` are the defaults taken, to be said aloud."""

    model: nn.Module
    factory: Callable[[], nn.Module] | None
    inputs: Mapping[str, Any]
    cluster: Cluster
    batch: Batch
    compute: Compute
    budget_bytes: float | None
    optimizer: Optimizer
    notes: tuple[str, ...]
    batch_norm: str = "refuse"
    loss: Loss | None = None  # which `model` has, and a model that `factory` builds has not

    @property
    def name(self) -> str:
        """The name of the model's class, as an identifier."""
        return identifier(type(self.model).__name__, "Model")


def make_job(
    model: nn.Module | Callable[[], nn.Module],
    gpus: int | Cluster | None,
    *,
    gpu: str | None,
    memory: str | float | None,
    inputs: Mapping[str, Any] | None,
    loss: Loss | None,
    sequence: int | None,
    global_batch: int | None,
    optimizer: OptimizerLike,
    precision: str | None,
    batch_norm: str,
    compile: bool = False,
    pad_to_multiple_of: int | None = None,
) -> Job:
    """Check what was asked; raises PlanError naming what is wrong and the way out."""
    notes: list[str] = []
    check({
        "sequence": sequence, "global_batch": global_batch, "precision": precision, "batch_norm": batch_norm,
        "compile": compile, "pad_to_multiple_of": pad_to_multiple_of, "memory": memory,
    })  # fmt: skip
    cluster = read_cluster(gpus, gpu, notes)
    check_arguments(model, inputs, loss)
    factory = None if isinstance(model, nn.Module) else model
    module = model if isinstance(model, nn.Module) else build_on_meta(model)
    check_model(module)
    chosen_optimizer = read_optimizer(module, optimizer)
    tokens = _sequence(module, inputs, sequence, notes)
    if global_batch is None:
        global_batch = default_batch(cluster)
        notes.append(f"global_batch={global_batch} (8 a {cluster.unit})")
    batch = batch_of(tokens, pad_to_multiple_of, global_batch)
    if inputs is None:
        inputs = _default_inputs(module, batch.sequence)
    elif inputs.get("use_cache") and huggingface_of(module) is not None:
        inputs = {**inputs, "use_cache": False}  # of generation
    check_keywords(module, inputs, with_loss=loss is not None)
    if loss is not None:
        module = with_loss(module, loss, inputs)
    compute = Compute(precision=precision or default_precision(cluster), compile=compile)
    budget_bytes = None if memory is None else read_memory(memory)
    return Job(
        module, factory, inputs, cluster, batch, compute, budget_bytes, chosen_optimizer, tuple(notes), batch_norm, loss
    )


def default_precision(cluster: Cluster) -> str:
    """In which to compute, where nobody says."""
    return "fp32" if cluster.gpu == "cpu" else "bf16"


def default_batch(cluster: Cluster) -> int:
    """Samples of a step, where nobody says."""
    return 8 * cluster.gpus


def read_cluster(gpus: int | Cluster | None, gpu: str | None, notes: list[str]) -> Cluster:
    """The cluster that was asked for; what is taken by default is added to `notes`."""
    if isinstance(gpus, Cluster):
        return gpus
    if gpus is None:
        gpus = torch.cuda.device_count()
        if not gpus:
            raise PlanError("no GPU here: say how many to plan for, gpus=64, or gpus=4, gpu='cpu'")
        notes.append(f"gpus={gpus} (all of this machine)")
    if gpu is None:
        gpu = default_gpu()
        notes.append(f"gpu={gpu} ({'this machine' if torch.cuda.is_available() else 'default'})")
    return Cluster(gpus, gpu)


def _sequence(model: nn.Module, inputs: Mapping[str, Any] | None, asked: int | None, notes: list[str]) -> int:
    """The length asked, else of the inputs, else the longest the config allows up to 8,192; 1 without tokens.

    Floating inputs of two dims are tables of features, as the trace takes them: no sequence. PlanError where a length
    is asked for inputs without tokens.
    """
    if inputs is not None:
        known = max(sequence_length(inputs), 1)
    else:
        inner = huggingface_of(model)
        known = _LONGEST_DEFAULT if inner is None else min(longest_sequence(inner) or 1, _LONGEST_DEFAULT)
    if asked is not None and asked > 1 and known == 1:
        raise PlanError(f"sequence={asked}: the inputs of {type(model).__name__} have no tokens: leave it out")
    if asked is None and inputs is None and known > 1:
        notes.append(f"sequence={known} (of the model's config)")
    return known if asked is None else asked


def batch_of(tokens: int, multiple: int | None, samples: int) -> Batch:
    """Samples of so many tokens, each padded to the next multiple of `multiple`, if given."""
    if multiple is not None and tokens == 1:
        raise PlanError("pad_to_multiple_of is for sequences, and these inputs have none: leave it out")
    sequence = tokens if multiple is None else -(-tokens // multiple) * multiple
    padded_from = tokens if tokens < sequence else None
    return Batch(global_batch=samples, micro_batch=1, sequence=sequence, padded_from=padded_from)


def _default_inputs(model: nn.Module, sequence: int) -> dict[str, Any]:
    inner = huggingface_of(model)
    if inner is None:
        raise PlanError(
            f"inputs are missing: {type(model).__name__} is no Hugging Face model, so pass example inputs by keyword, "
            "inputs={'input_ids': ids, 'labels': labels}, labels included (meta tensors will do)"
        )
    return default_inputs(inner, 2, min(sequence, 128))


def with_loss(model: nn.Module, loss: Loss, names: Iterable[str]) -> nn.Module:
    """The same model, names and all, whose forward takes a batch of `names` and returns `loss(outputs, batch)`."""
    kind = type(model)
    accepted = inspect.signature(kind.forward).parameters

    def forward(self: Any, **batch: Any) -> torch.Tensor:
        outputs = kind.forward(self, **{name: value for name, value in batch.items() if name in accepted})
        return loss(outputs, batch)

    forward.__signature__ = keyword_signature(names, "self")  # type: ignore[attr-defined]
    clone = copy.copy(model)
    clone.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return clone


def read_optimizer(model: nn.Module, optimizer: OptimizerLike) -> Optimizer:
    """A class, its name, (class, kwargs), or an optimizer made for this model, whose groups are kept by name."""
    if optimizer is None:
        return Optimizer()
    if isinstance(optimizer, torch.optim.Optimizer):
        return _read_instance(model, optimizer)
    kind, kwargs = optimizer if isinstance(optimizer, tuple) and len(optimizer) == 2 else (optimizer, {})
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", None)
    if name is None or not isinstance(kwargs, Mapping):
        raise PlanError(f"optimizer={shown(optimizer)}: use 'AdamW', torch.optim.AdamW or ('AdamW', {{'lr': 1e-3}})")
    _check_elementwise(name)
    for key, value in kwargs.items():
        _check_hyperparameter(name, key, value)
    try:
        getattr(torch.optim, name)([nn.Parameter(torch.zeros(1))], **kwargs)
    except (TypeError, ValueError) as error:
        raise PlanError(f"optimizer {name} with {dict(kwargs)}: {error}") from error
    return Optimizer(name, dict(kwargs))


def _read_instance(model: nn.Module, optimizer: torch.optim.Optimizer) -> Optimizer:
    kind: Any = type(optimizer)
    name = kind.__name__
    _check_elementwise(name)
    defaults = kind([nn.Parameter(torch.zeros(1))]).defaults
    changed = {k: v for k, v in optimizer.defaults.items() if v != defaults.get(k)}
    trained = [(names, options) for names, options in _groups_by_name(model, optimizer) if names]
    _check_all_trained(model, {name for names, _ in trained for name in names})
    if len(trained) == 1:
        return Optimizer(name, changed | trained[0][1])
    return Optimizer(name, changed, tuple(trained))


def _groups_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(names of its parameters that are trained, its options that are not the optimizer's) of each group."""
    names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        missing = sum(id(p) not in names for p in group["params"])
        if missing:
            raise PlanError(f"{missing} parameters of the optimizer are not the model's: build it from this model")
        options = {k: group[k] for k, v in optimizer.defaults.items() if group[k] != v}
        yield tuple(names[id(p)] for p in group["params"] if p.requires_grad), options


def _check_all_trained(model: nn.Module, names: Collection[str]) -> None:
    """PlanError where the model has parameters with a gradient beside those of `names`."""
    if left_out := [n for n, p in model.named_parameters() if p.requires_grad and n not in names]:
        shown = ", ".join(left_out[:4]) + (f" and {len(left_out) - 4} more" if len(left_out) > 4 else "")
        raise PlanError(
            f"{shown} would be trained and are not in the optimizer: freeze them, requires_grad_(False), or pass them "
            "to the optimizer too"
        )


def _check_elementwise(name: str) -> None:
    if name not in OPTIMIZERS:
        raise PlanError(
            f"optimizer {name!r}{nearest(name, OPTIMIZERS)} is not known to be elementwise, so shards of its state "
            f"would compute something else: use one of {', '.join(OPTIMIZERS)}"
        )


def _check_hyperparameter(optimizer: str, name: str, value: Any) -> None:
    """PlanError for what plan.yaml cannot hold, and for numbers that torch takes but cannot train with."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    if any(not isinstance(n, bool | int | float | str | None) for n in numbers):
        raise PlanError(f"optimizer {optimizer}: {name}={shown(value)}: use plain numbers, True or False")
    if any(isinstance(n, int | float) and not abs(n) < 1e38 for n in numbers):
        raise PlanError(f"optimizer {optimizer}: {name}={shown(value)}: use finite numbers")
