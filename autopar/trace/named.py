"""A model by name: `module:function` in the working directory, or a Hugging Face config that loads offline."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PlanError


def named_model(
    name: str, inputs: str | None = None
) -> tuple[nn.Module | Callable[[], nn.Module], Mapping[str, Any] | None]:
    """The function that builds the model, or a model on meta; and its example inputs, where someone gives them.

    inputs: `module:function`; default: a function `inputs()` beside the one that builds the model. Raises PlanError
    where a name leads nowhere.
    """
    given: Mapping[str, Any] | None = _function(inputs, "--inputs")() if inputs else None
    if ":" not in name:
        return _of_config(name), given
    build = _function(name, "MODEL")
    beside = getattr(sys.modules[name.partition(":")[0]], "inputs", None)
    if given is None and callable(beside):
        given = beside()
    return build, given


def _function(name: str, option: str) -> Callable[[], Any]:
    """What `module:function` names, importable from the working directory and callable without arguments."""
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise PlanError(f"{option} {name}: write module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # something that the user's module imports
        raise PlanError(f"{option} {name}: no module {error.name!r} here ({Path.cwd()}) or installed") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        offered = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == path]
        raise PlanError(f"{option} {name}: {path} has no function {attribute!r}, but {', '.join(offered) or 'none'}")
    required = [p.name for p in inspect.signature(function).parameters.values() if _is_required(p)]
    if required:
        raise PlanError(f"{option} {name}: needs {', '.join(required)}: name a function that needs no arguments")
    return function  # type: ignore[no-any-return]


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _of_config(name: str) -> nn.Module:
    """A Hugging Face causal language model on meta, from its config alone."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PlanError(f"MODEL {name}: needs transformers (pip install 'autopar[hf]'), or module:function") from error
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(
            f"MODEL {name}: neither module:function, nor a config file or folder, nor a name whose config is in the "
            f"local Hugging Face cache ({reason})"
        ) from error
    return model
