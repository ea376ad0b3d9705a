"""Hugging Face models: from a config to a module on meta."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from rooftrace._reading import FileKind, json_of, record_of, text_of
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.asking import Request
from rooftrace.tracer.inputs import Inputs, Loaded, module_inputs
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.targets.configchanges import with_settings
from rooftrace.tracer.targets.quantization import weights_precision
from rooftrace.tracer.targets.remote_code import check_config, without_code
from rooftrace.tracer.tensors import own_tensors
from rooftrace.tracer.values import META, REAL_VALUE, Values

_CONFIG = FileKind("JSON file", TargetError)
_ENCODER_DECODER = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
_ENCODER = ("MODEL_FOR_MASKED_LM_MAPPING",)
_OTHERS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


class _Config(TypedDict, total=False):
    """What is read of a config here; transformers checks the rest."""

    model_type: str | None
    architectures: list[str] | None


def from_file(path: Path, request: Request) -> Loaded:
    """The model of a config.json.  Raises TargetError for any other file."""
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    return from_config(config_in(path, request), name, str(path), request)


def config_in(path: Path, request: Request) -> Any:
    """The config object of a config.json.  Raises TargetError for any other file."""
    target = str(path)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no such file")
    where = f"target {target!r}"
    data = json_of(text_of(path, _CONFIG), where, _CONFIG)
    known = record_of(_Config, data if isinstance(data, dict) else {}, where, _CONFIG)
    kind = known.get("model_type")
    if not kind:
        raise TargetError(
            f"target {target!r}: a Hugging Face config has a model_type; this one has none"
        )
    if not request.trust_remote_code:
        check_config(data, target)
        data = without_code(data)
    transformers = _transformers()
    fields = (
        transformers.CONFIG_MAPPING[kind]().to_dict()
        if request.settings and (kind in transformers.CONFIG_MAPPING)
        else {}
    )
    data = with_settings(data, request.settings, fields, target)
    _check_counts(data, target)
    if kind not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"target {target!r}: model_type {kind!r} is unknown to transformers "
            f"{transformers.__version__}; upgrade transformers, or pass the module itself as "
            "file.py:attr"
        )
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:  # its validation raises errors of its own
        reason = " ".join(str(error).split())
        raise TargetError(f"target {target!r}: transformers refuses it: {reason}") from None


_MOST_MODULES = 20_000
"""Layers, or experts, that a config may ask for: each is a module that has to be built."""
_COUNTED = re.compile(r"(num|n)_(.*_)?(layer|block|expert|stage)s?|.*layers|depth")


def _check_counts(data: Mapping[str, Any], target: str) -> None:
    """Raise TargetError for a number of modules that nobody waits for."""
    for name, value in data.items():
        if isinstance(value, dict):
            _check_counts(value, target)
        elif _COUNTED.fullmatch(name) and isinstance(value, int) and value > _MOST_MODULES:
            raise TargetError(
                f"target {target!r}: {name}={value}: expected {_MOST_MODULES:,} at most, as each "
                "is a module that is built"
            )


def from_hub(target: str, request: Request) -> Loaded:
    """The model of a config in the local Hugging Face cache, or on the hub.  Raises TargetError."""
    config = config_on_hub(target, request)
    return from_config(config, target.removeprefix("hf:"), target, request)


def config_on_hub(target: str, request: Request) -> Any:
    """The config object of a repository, from the local cache or the hub.  Raises TargetError."""
    name = target.removeprefix("hf:")
    if request.settings:
        raise RequestError(
            f"{target}: settings change a config in a file; save this one with "
            "AutoConfig.from_pretrained(...).save_pretrained(FOLDER), and name that file"
        )
    trusted = request.trust_remote_code
    transformers = _transformers()
    try:
        if not trusted:
            data, _ = transformers.PretrainedConfig.get_config_dict(name)
            check_config(data, target)
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trusted)
    except TargetError:
        raise
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError(f"target {target!r}: {reason}") from None
    if not trusted:
        _forget_code(config)
    return config


def _forget_code(config: Any) -> None:
    """Take `auto_map` out of a config object and of those of its parts."""
    for value in list(vars(config).values()):
        if isinstance(value, _transformers().PretrainedConfig):
            _forget_code(value)
    vars(config).pop("auto_map", None)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise TargetError(
            "Hugging Face targets need transformers: pip install 'rooftrace[hf]'"
        ) from None
    return transformers


def _model_class(config: Any, target: str) -> Any:
    """The class named in `architectures`, else the first head that this config type has."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        named = isinstance(name, str) and name[:1].isupper()
        kind = getattr(transformers, name, None) if named else None
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    # An encoder has a causal head too, for use as a decoder; its config says if it is one.
    heads = (
        *(_ENCODER_DECODER if getattr(config, "is_encoder_decoder", False) else ()),
        *(() if getattr(config, "is_decoder", False) else _ENCODER),
        *_OTHERS,
    )
    for mapping in heads:
        classes = getattr(transformers, mapping, {})
        if type(config) in classes:
            kind = classes[type(config)]
            return kind[0] if isinstance(kind, (list, tuple)) else kind
    raise TargetError(
        f"target {target!r}: transformers has no model class for {type(config).__name__}"
    )


def from_config(config: Any, name: str, target: str, request: Request) -> Loaded:
    """The model of a config object, built on meta, and inputs for it.  Raises TargetError."""
    module = built_from(config, target)
    module.config.name_or_path = module.config.name_or_path or name
    return Loaded(module, _with_quantization(module_inputs(module, request), config), name)


def built_from(config: Any, target: str) -> Any:
    """The model of a config object, on meta; its whole numbers are known.  Raises TargetError."""
    kind = _model_class(config, target)
    config = _part_for(kind, config)
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = vars(torch).get(dtype)
    if not isinstance(dtype, torch.dtype):
        raise TargetError(
            f"target {target!r}: dtype is {config.dtype!r:.60}: expected the name of a dtype of "
            "torch, for example bfloat16"
        )
    recorder = Recorder(Values(draws=True), record=False)
    try:
        with torch.device(META), recorder:
            module = kind._from_config(config, dtype=dtype)
    except Exception as error:  # whatever the code of a model may raise
        reason = " ".join(str(error).split())
        raise TargetError(
            f"target {target!r}: {kind.__name__} cannot be built from it: {reason}"
        ) from error
    finally:
        recorder.values.close(keep=True)
    for tensor in (t for part in module.modules() for t in own_tensors(part)):
        if tensor.is_floating_point():  # it seldom decides anything, and what it makes is larger
            tensor.__dict__.pop(REAL_VALUE, None)
    return module


def _part_for(kind: Any, config: Any) -> Any:
    """The config that a model class takes: the whole, or the config of one part."""
    wanted = getattr(kind, "config_class", None) or type(config)
    parts = [part for part in vars(config).values() if type(part) is wanted]
    return parts[0] if parts and type(config) is not wanted else config


def _with_quantization(inputs: Inputs, config: Any) -> Inputs:
    """The weights' precision that the config declares, for `reprice`, as an assumption."""
    declared, problem = weights_precision(config)
    if declared is not None:
        text = (
            f"its quantization_config: weights are stored as {declared}, embeddings and head "
            "too; the module itself is traced unquantised"
        )
        return replace(
            inputs,
            workload={**inputs.workload, "declared_weights_dtype": declared},
            assumptions=(*inputs.assumptions, ("quantization", text)),
        )
    if problem is not None:
        text = f"{problem} is not understood: weights are priced unquantised; pass --weights-dtype"
        return replace(inputs, assumptions=(*inputs.assumptions, ("quantization", text)))
    return inputs
