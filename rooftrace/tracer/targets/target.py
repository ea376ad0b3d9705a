"""From the name of a target on the command line to a module on meta and its inputs.

A target is ``package.module:attr``, ``path/file.py:attr``, the path of a Hugging Face config.json,
``hf:ORG/NAME`` (a locally cached config; no remote code), the name of a config that comes with
rooftrace, or a saved graph (handled by graphfile).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rooftrace.errors import TargetError, hint
from rooftrace.tracer.asking import Request, names
from rooftrace.tracer.inputs import Loaded, module_inputs
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.targets import huggingface
from rooftrace.tracer.targets.imports import failed, import_file, import_module
from rooftrace.tracer.targets.isolation import (
    own_imports,
)
from rooftrace.tracer.values import META, Values


def load_target(target: str, request: Request | None = None) -> Loaded:
    """Build the module that `target` names, on meta, and inputs of the requested sizes.

    Raises TargetError for a target that does not exist or is no module; RequestError for inputs
    that cannot be guessed.
    """
    request = request or Request()
    with own_imports(leave=True):
        return _load(target, request)


def _load(target: str, request: Request) -> Loaded:
    if target.startswith("hf:"):
        return huggingface.from_hub(target, request)
    config = names.config_file(target)
    if config is not None:
        return huggingface.from_file(config, request)
    if ":" in target:
        return _from_attribute(target, request)
    raise TargetError(
        f"target {target!r}: expected package.module:attr, path/file.py:attr, a Hugging Face "
        "config.json, hf:ORG/NAME, a saved graph (.json.gz), or a config that comes along: "
        f"{', '.join(names.configs())}{hint(target, names.configs())}"
    )


def _from_attribute(target: str, request: Request) -> Loaded:
    where, _, attribute = target.rpartition(":")
    source = (import_file if where.endswith(".py") else import_module)(where, target)
    module, inputs = _module_and_inputs(_attribute(source, attribute, target), target)
    made = module_inputs(module, request, inputs, target, attribute)
    return Loaded(module, made, attribute if where.endswith(".py") else target)


def _attribute(source: ModuleType, attribute: str, target: str) -> Any:
    value: Any = source
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [
                n
                for n, value in vars(source).items()
                if not n.startswith("_") and not isinstance(value, ModuleType)
            ]
            raise TargetError(
                f"target {target!r}: there is no {attribute!r}; "
                f"there are {', '.join(names[:12]) or 'no names at all'}"
            )
        value = getattr(value, part)
    return value


def _module_and_inputs(made: Any, target: str) -> tuple[nn.Module, Any]:
    """The module and inputs of a target: itself, or the result of a function or class."""
    inputs: Any = None
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TargetError(
                f"target {target!r}: expected a torch.nn.Module or a function that "
                f"returns one, got {type(made).__name__}"
            )
        made = built(made, target)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, inputs = made
    if not isinstance(made, nn.Module):
        raise TargetError(
            f"target {target!r}: expected a torch.nn.Module or (module, inputs), "
            f"got {type(made).__name__}"
        )
    return made, inputs


def built(function: Callable[..., Any], target: str) -> Any:
    """Call a user's factory on meta.

    Small values are known meanwhile, so that `linspace(...).item()` works in a constructor.
    """
    required = _required(function)
    if required:
        raise TargetError(
            f"target {target!r}: expected a function without required arguments; "
            f"it requires {', '.join(required)}"
        )
    recorder = Recorder(Values(draws=True), record=False)
    try:
        with torch.device(META), recorder:
            made = function()
    except (Exception, SystemExit) as error:  # whatever a user's function may raise
        raise failed("building the module", target, error) from error
    finally:
        recorder.values.close(keep=True)
    return made


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable written in C does not say
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
