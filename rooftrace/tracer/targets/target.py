"""From the name of a target on the command line to a module on meta and its inputs.

A target is ``package.module:attr``, ``path/file.py:attr``, the path of a Hugging Face config.json,
``hf:ORG/NAME`` (a locally cached config; no remote code), the name of a config that comes with
rooftrace, an exported program (.pt2, .onnx), or a saved graph (handled by graphfile).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError, TargetError, hint
from rooftrace.tracer.asking import Request, names
from rooftrace.tracer.inputs import Loaded, call_inputs, module_inputs
from rooftrace.tracer.patches import contexts
from rooftrace.tracer.programs import load_program
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.targets import huggingface
from rooftrace.tracer.targets.imports import failed, import_file, import_module
from rooftrace.tracer.targets.isolation import (
    own_imports,
)
from rooftrace.tracer.targets.otherconfigs import other_model
from rooftrace.tracer.values import META, Values


def load_target(target: str, request: Request | None = None) -> Loaded:
    """Build the module that `target` names, on meta, and inputs of the requested sizes.

    Raises TargetError for a target that does not exist or is no module; RequestError for inputs
    that cannot be guessed.
    """
    request = request or Request()
    with own_imports(leave=True):
        return _load(target, request)


def load_module(
    target: str, request: Request | None = None, *, real: bool = False
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build the module that `target` names without any inputs for it, on meta.

    Beside it stand sentences on what its files leave open, and on how they say that it is stored.
    real: with its weights, as its own code makes them; a config has none.  Raises TargetError for a
    target that does not exist or is no module, and RequestError for weights that there are not.
    """
    request = request or Request()
    config = names.config_file(target)
    if real and (config is not None or target.startswith("hf:")):
        raise RequestError(
            f"{target}: a config has no weights; name a file of weights, or code that makes them"
        )
    with contexts.apart(), own_imports(leave=True):
        if names.is_program(target):
            if real:
                raise RequestError(f"{target}: the weights of a program are not read")
            return load_program(target, request)[0], ()
        if target.startswith("hf:"):
            built_of = huggingface.config_on_hub(target, request)
        elif config is not None:
            foreign = _foreign(config)
            if foreign is not None:
                return foreign[0], ()
            built_of = huggingface.config_in(config, request)
        else:
            return _code_of(target, request, real)[0], ()
        built_here = huggingface.built_from(built_of, target)
        return built_here.module, tuple(text for _, text in built_here.assumptions)


def _load(target: str, request: Request) -> Loaded:
    if target.startswith("hf:"):
        return huggingface.from_hub(target, request)
    if names.is_program(target):
        program, args, kwargs = load_program(target, request)
        return Loaded(program, call_inputs(program, args, kwargs), target)
    config = names.config_file(target)
    if config is not None:
        foreign = _foreign(config)
        if foreign is not None:
            inputs = module_inputs(foreign[0], request, foreign[1], target)
            return Loaded(foreign[0], inputs, config.resolve().parent.name)
        return huggingface.from_file(config, request)
    module, inputs, where, attribute = _code_of(target, request)
    made = module_inputs(module, request, inputs, target, attribute)
    return Loaded(module, made, attribute if where.endswith(".py") else target)


def _foreign(config: Path) -> tuple[nn.Module, Any] | None:
    """The module of a file of another library than transformers, and arguments; None of a config.

    Raises TargetError for a file of which none builds a module.
    """
    if config.suffix == ".gguf":
        return None
    data = huggingface.fields_in(config)
    return None if data.get("model_type") else other_model(data, str(config))


def _code_of(target: str, request: Request, real: bool = False) -> tuple[nn.Module, Any, str, str]:
    """The module and inputs of a target that is code, its file or package, and the attribute."""
    if ":" in target:
        where, _, attribute = target.rpartition(":")
        source = (import_file if where.endswith(".py") else import_module)(where, target)
        function = _attribute(source, attribute, target)
        made = _module_and_inputs(function, target, _settings(function, target, request), real)
        return *made, where, attribute
    raise TargetError(
        f"target {target!r}: expected package.module:attr, path/file.py:attr, a Hugging Face "
        "config.json, hf:ORG/NAME, an exported program (.pt2, .onnx), a saved graph (.json.gz), or "
        "a config that comes along: "
        f"{', '.join(names.configs())}{hint(target, names.configs())}"
    )


def _settings(function: Any, target: str, request: Request) -> Mapping[str, Any]:
    """Keyword arguments for a function that builds a module; over a mesh, that is one of them.

    Raises RequestError for a mesh that nothing takes.
    """
    if request.checkpoint != "none":
        raise RequestError(
            f"--checkpoint {request.checkpoint}: {target} is code, which checkpoints its module "
            "itself"
        )
    if not request.mesh:
        return request.settings
    from rooftrace.tracer.sharded import meshes

    takes = inspect.signature(function).parameters if callable(function) else {}
    if isinstance(function, nn.Module) or "mesh" not in takes:
        shown = ",".join(f"{axis}={size}" for axis, size in request.mesh.items())
        raise RequestError(
            f"--mesh {shown}: {target} takes no `mesh`; name a function build(mesh) that shards "
            "the module which it returns"
        )
    return {**request.settings, "mesh": meshes.devices()}


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


def _module_and_inputs(
    made: Any, target: str, settings: Mapping[str, Any], real: bool = False
) -> tuple[nn.Module, Any]:
    """The module and inputs of a target: itself, or the result of a function or class."""
    inputs: Any = None
    if isinstance(made, nn.Module) and settings:
        raise RequestError(
            f"{next(iter(settings))}=: target {target!r} is a module that is built already; name "
            "a function or a class, which takes keyword arguments"
        )
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TargetError(
                f"target {target!r}: expected a torch.nn.Module or a function that "
                f"returns one, got {type(made).__name__}"
            )
        made = built(made, target, real, settings)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, inputs = made
    if not isinstance(made, nn.Module):
        raise TargetError(
            f"target {target!r}: expected a torch.nn.Module or (module, inputs), "
            f"got {type(made).__name__}"
        )
    return made, inputs


def built(
    function: Callable[..., Any],
    target: str,
    real: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Call a user's factory on meta.  real: where it stands, with weights.

    settings: keyword arguments for it.  Raises RequestError for those that it does not take.
    Small values are known on meta meanwhile, so that `linspace(...).item()` works in a constructor.
    """
    keywords = dict(settings or {})
    _check_keywords(function, keywords, target)
    required = [name for name in _required(function) if name not in keywords]
    if required == ["mesh"]:
        raise TargetError(
            f"target {target!r}: it takes a mesh; name its axes, for example --mesh dp=4,tp=8"
        )
    if required:
        raise TargetError(
            f"target {target!r}: expected a function without required arguments; "
            f"it requires {', '.join(required)}"
        )
    try:
        return function(**keywords) if real else _on_meta(partial(function, **keywords))
    except (Exception, SystemExit) as error:  # whatever a user's function may raise
        raise failed("building the module", target, error) from error


def _check_keywords(function: Callable[..., Any], keywords: Mapping[str, Any], target: str) -> None:
    """Raise RequestError for a keyword argument that a function does not take."""
    if not keywords:
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name, value in keywords.items():
        if name not in parameters:
            raise RequestError(
                f"{name}={value!r:.40}: {target} takes {', '.join(parameters) or 'no arguments'}"
                f"{hint(name, tuple(parameters))}"
            )


def _on_meta(function: Callable[..., Any]) -> Any:
    recorder = Recorder(Values(draws=True), record=False)
    try:
        with torch.device(META), recorder:
            return function()
    finally:
        recorder.values.close(keep=True)


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
