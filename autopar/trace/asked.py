"""A model, its inputs and its loss, looked at before anything is built or traced."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import PlanError
from ..ir.identifiers import is_plain
from ..plan.options import check_names, shown


def check_arguments(model: Any, inputs: Any, loss: Any) -> None:
    """PlanError where they are of another kind than `parallelize` takes."""
    if not isinstance(model, nn.Module) and not callable(model):
        named = ", or name it on the command line: autopar plan module:function" if isinstance(model, str) else ""
        raise PlanError(f"model={shown(model)}: give a module, or a function that builds one{named}")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise PlanError(
            f"inputs={_kind(inputs)}: give them by the keywords of forward, "
            "inputs={'input_ids': ids, 'labels': labels}"
        )
    if wrong := [name for name in inputs or () if not isinstance(name, str) or not is_plain(name) or name == "self"]:
        raise PlanError(f"inputs: {shown(wrong[0])} is no name of an argument in Python: rename it")
    if loss is not None and not callable(loss):
        raise PlanError(f"loss={shown(loss)}: give a function (outputs, batch) -> scalar")


def check_model(model: Any) -> None:
    """PlanError where a model has nothing to train, or parameters that no plan can hold."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"the function that builds the model gave {_kind(model)}: return the module")
    kind, parameters = type(model).__name__, dict(model.named_parameters())
    if not parameters:
        raise PlanError(f"{kind} has no parameters: there is nothing to train")
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise PlanError(f"all {len(parameters)} parameters of {kind} are frozen: there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise PlanError(
                f"{name} of {kind} is {parameter.dtype}: complex parameters are not supported; keep real and imaginary "
                "parts in one real parameter [..., 2], and use torch.view_as_complex in forward"
            )

    _check_hooks(model)


def _check_hooks(model: nn.Module) -> None:
    """PlanError for hooks that change gradients: a program would run without them, and so would `verify`'s copy."""
    hooked = [(name, p) for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    hooked += [(name, m) for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if hooked:  # no public names for any of them
        raise PlanError(
            f"{hooked[0][0] or type(model).__name__} has a hook on its gradient, which a program would not run: remove "
            "it, and write an autograd.Function, or change the loss so that its gradient is what you want"
        )


def check_keywords(model: nn.Module, inputs: Mapping[str, Any], with_loss: bool) -> None:
    """PlanError where forward takes no such keyword. with_loss: the others are the loss's, which may want any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if with_loss or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    legal = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    check_names(map(str, inputs), legal, f"{type(model).__name__}.forward has no such input; it takes")


def _kind(value: Any) -> str:
    """ "a list of 3" of a value that may be long."""
    return f"a {type(value).__name__}{f' of {len(value)}' if isinstance(value, list | tuple) else ''}"
