"""A choice with its prices, before layers are spread over stages, and lower bounds of its step."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.compute import ModelPrice
from autopar.plan.schedules import MULTI_STAGE

from .space import Choice


@dataclass(frozen=True)
class Case:
    """A choice with the prices of one solution; no plan of it is faster than `bound_s`."""

    bound_s: float
    choice: Choice
    price: ModelPrice


def bound_s(choice: Choice, price: ModelPrice) -> float:
    """No step is shorter.

    Stage k starts after one forward through the stages before it, and its last backward is followed by one
    through them: T ≥ m·w_k + Σ_{i<k} w_i. Where all pp of these are equal, Σ w_k = T·(1 − (1 − 1/m)^pp).

    Of virtual stages and halves of a backward, one micro-batch passes through all, and the average rank works all it
    has beside its bubble.
    """
    m, pp, work_s = choice.micro_batches, choice.mesh.pp, price.work_s
    if choice.schedule in MULTI_STAGE:
        chain_s = price.chain_s if choice.schedule == "zero-bubble" else work_s
        return max(m * work_s / pp + bubble_s(choice, price), chain_s)
    return work_s / (1 - (1 - 1 / m) ** pp)


def bubble_s(choice: Choice, price: ModelPrice) -> float:
    """What a rank idles at least, beside forward and backward of its micro-batches, where stages are nearly equal.

    pp − 1 stages of as many layers as each has at least, and of the shortest kind: F + B of interleaved, F + I − W of
    zero-bubble (COST_MODEL 2.3). 0 for other schedules.
    """
    if choice.schedule not in MULTI_STAGE:
        return 0.0
    layers = len(price.layers) // (choice.mesh.pp * choice.virtual_stages)
    return (choice.mesh.pp - 1) * layers * price.idle_s[choice.schedule == "zero-bubble"]
