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
from ..plan.options import nearest


def named_model(
    name: str, inputs: str | None = None
) -> tuple[nn.Module | Callable[[], nn.Module], Mapping[str, Any] | None]:
    """The function that builds the model, or a model on meta; and its example inputs, where someone gives them.

    inputs: `module:function`; default: a function `inputs()` beside the one that builds the model. Raises PlanError
    where a name leads nowhere.
    """
    given: Mapping[str, Any] | None = _without_arguments(inputs, "--inputs")() if inputs else None
    if ":" not in name:
        return _of_config(name), given
    build = _without_arguments(name, "MODEL")
    beside = getattr(sys.modules[name.partition(":")[0]], "inputs", None)
    if given is None and callable(beside):
        given = beside()
    return build, given


def named_function(name: str, option: str) -> Callable[..., Any]:
    """What `module:function` names, importable from the working directory. PlanError naming what is offered there."""
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
        near = nearest(attribute, offered)
        raise PlanError(
            f"{option} {name}: {path} has no function {attribute!r}{near}, but {', '.join(offered) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def _without_arguments(name: str, option: str) -> Callable[[], Any]:
    function = named_function(name, option)
    required = [p.name for p in inspect.signature(function).parameters.values() if _is_required(p)]
    if required:
        raise PlanError(f"{option} {name}: needs {', '.join(required)}: name a function that needs no arguments")
    return function


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _of_config(name: str) -> nn.Module:
    """A Hugging Face model on meta, from its config alone."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise PlanError(f"MODEL {name}: needs transformers (pip install 'autopar[hf]'), or module:function") from error
    try:
        config: Any = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(f"MODEL {name}: {_why_no_config(name, error)}") from error
    kind = _class_of(name, config)
    with torch.device("meta"):
        model: nn.Module = kind(config)
    return model


def _why_no_config(name: str, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if Path(name).exists():
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        if not file.exists():
            return (
                f"the folder has no config.json; it has {', '.join(sorted(p.name for p in Path(name).iterdir())[:5])}"
            )
        return f"{file} is no config of a model that transformers knows ({reason})"
    return (
        "neither module:function, nor a config file or folder, nor a name whose config is in the local Hugging Face "
        f"cache ({reason}); nothing is downloaded: fetch its config.json, and name that"
    )


def _class_of(name: str, config: Any) -> Callable[[Any], nn.Module]:
    """The class that the config names, if it has a loss; else the one that its model type is trained as."""
    import transformers

    named = [getattr(transformers, architecture, None) for architecture in config.architectures or ()]
    for kind in named:
        if kind is not None and "labels" in inspect.signature(kind.forward).parameters:
            return kind  # type: ignore[no-any-return]
    for head in _heads(config):
        mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING", {})
        if type(config) in mapping:
            return mapping[type(config)]  # type: ignore[no-any-return]
    asked = ", ".join(config.architectures or ()) or "no architectures"
    raise PlanError(
        f"MODEL {name}: a config of {config.model_type!r} with {asked}, for which transformers has no class with a "
        "loss: write a function that builds the model, name it as module:function, and give its --loss"
    )


def _heads(config: Any) -> tuple[str, ...]:
    """What a model type may be trained as, the likeliest first; a bidirectional encoder is in the causal list too."""
    if getattr(config, "is_encoder_decoder", False):
        return ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    return ("MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
