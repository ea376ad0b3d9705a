"""Hugging Face models: from a config to a module on meta."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn

from rooftrace._reading import FileKind, json_of, record_of, text_of
from rooftrace.errors import RequestError, TargetError, hint
from rooftrace.tracer import Request
from rooftrace.tracer.inputs import Loaded, module_inputs
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.targets import quantized_weights
from rooftrace.tracer.targets.configs import (
    ComputeDtype,
    check_config,
    in_fp32,
    precision_of,
    unbuilt,
    with_own_attention,
    without_code,
)
from rooftrace.tracer.targets.declared import Declared, declared_in
from rooftrace.tracer.targets.isolation import once, standing
from rooftrace.tracer.targets.quantized_weights import Marked, marked
from rooftrace.tracer.values import META, REAL_VALUE, Values, own_tensors

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
    """Fields of a config that are read here; transformers checks the rest."""

    model_type: str | None
    architectures: list[str] | None


class Described(NamedTuple):
    """A config, the precision of its model, and the storage that files next to it declare."""

    config: Any
    name: str
    target: str  # as it was named, or the path of its file
    precision: ComputeDtype
    declared: tuple[Declared, ...]
    assumptions: tuple[tuple[str, str], ...]  # kind and text
    data: Mapping[str, Any]
    tensors: Mapping[str, quantized_weights.GgufTensor] = MappingProxyType({})  # of a GGUF file


def fields_in(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; `model_type` is there in a config of transformers.

    Raises TargetError for a file that is not there, or no record.
    """
    where = f"target {str(path)!r}"
    if not path.is_file():
        raise TargetError(f"{where}: there is no such file")
    data = json_of(text_of(path, _CONFIG), where, _CONFIG)
    record_of(_Config, data if isinstance(data, dict) else {}, where, _CONFIG)
    return data if isinstance(data, dict) else {}


def config_in_gguf(path: Path, request: Request) -> Described:
    """The model in the header of a GGUF file.  Raises TargetError for other files."""
    target = str(path)
    fields, tensors = quantized_weights.read_gguf(path)
    fields = with_settings(fields, request.settings, fields, target)
    described = _described(fields, path.stem, None, target, _in_folder(None))
    return described._replace(tensors=tensors, declared=())


def config_in(path: Path, data: Mapping[str, Any], request: Request) -> Described:
    """The model of a config.json and its neighbour files.  Raises TargetError for other files.

    data: its fields (see `fields_in`).
    """
    target, kind = str(path), data.get("model_type")
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
    folder = path.resolve().parent if path.name == "config.json" else None
    name = path.stem if folder is None else folder.name
    return _described(data, name, folder, target, _in_folder(folder))


def _config_of(data: Mapping[str, Any], target: str) -> Any:
    """The config object of the fields of a config.  Raises TargetError."""
    _check_counts(data, target)
    transformers, kind = _transformers(), data.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"target {target!r}: model_type {kind!r:.60} is unknown to transformers "
            f"{transformers.__version__}; upgrade transformers, or pass the module itself as "
            "file.py:attr"
        )
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(without_quantization(data))
    except Exception as error:  # its validation raises custom errors
        reason = " ".join(str(error).split())
        raise TargetError(f"target {target!r}: transformers refuses it: {reason}") from None


Find = Callable[[str], Path | None]
"""The path of a file of a checkpoint by its name; None where there is none."""


def _in_folder(folder: Path | None) -> Find:
    """Files in a folder; None: nobody knows where they stand."""
    return lambda file: folder / file if folder and (folder / file).is_file() else None


def _in_repository(name: str) -> Find:
    """Files of a repository: in the local cache, or fetched where the hub can be reached."""

    def find(file: str) -> Path | None:
        from transformers.utils import cached_file

        with contextlib.suppress(OSError, ValueError):
            path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
            return None if path is None else Path(path)
        return None

    return find


def _described(
    data: Mapping[str, Any],
    name: str,
    folder: Path | None,
    target: str,
    find: Find,
    config: Any = None,
) -> Described:
    """The model that the fields of a config describe.

    folder: of the checkpoint's tensors; None where nobody knows.  find: its other files.  config:
    its object, where there is one.  Raises TargetError.
    """

    def neighbour(file: str) -> Any:
        path = find(file)
        return None if path is None else json_of(text_of(path, _CONFIG), str(path), _CONFIG)

    data, attention = with_own_attention(data)
    notes = []
    if attention:
        text = (
            f"the config names {attention}: attention runs as torch's scaled_dot_product_attention,"
            " which is priced as a flash kernel"
        )
        notes.append(("attention", text))
    try:
        precision, declared = precision_of(data, folder), declared_in(data, neighbour, name)
    except TargetError as error:
        raise TargetError(f"target {target!r}: {error}") from None
    config = _config_of(data, target) if config is None else config
    return Described(config, name, target, precision, declared, tuple(notes), data)


def without_quantization(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its quantisation and dtypes, which are read here, at any depth."""
    left = {k: v for k, v in data.items() if k not in _READ_HERE}
    return {k: without_quantization(v) if isinstance(v, Mapping) else v for k, v in left.items()}


_READ_HERE = ("quantization_config", "compression_config", "quantization", "dtype", "torch_dtype")
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


def config_on_hub(target: str, request: Request) -> Described:
    """The model of a repository's config, cached here or on the hub.  Raises TargetError."""
    name = target.removeprefix("hf:")
    if request.settings:
        raise RequestError(
            f"{target}: settings change a config in a file; save this one with "
            "AutoConfig.from_pretrained(...).save_pretrained(FOLDER), and name that file"
        )
    trusted = request.trust_remote_code
    transformers = _transformers()
    try:
        data, _ = transformers.PretrainedConfig.get_config_dict(name)
        config = None
        if trusted:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)
        else:
            check_config(data, target)
            data = without_code(data)
    except TargetError:
        raise
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError(f"target {target!r}: {reason}") from None
    find = _in_repository(name)
    path = find("config.json")
    return _described(data, name, None if path is None else path.parent, target, find, config)


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


def from_config(described: Described, request: Request) -> Loaded:
    """The model of a config, built on meta, and inputs for it.

    Where nothing names its precision, and its call or its loss refuses the default, it is
    built in fp32.  Raises TargetError, and RequestError for inputs that cannot be guessed.
    """
    # A trace leaves a module as it was; one that is spread over processes is changed.
    stands = standing()
    stays = stands is not None and stands.spread is not None  # another one is spread already
    spread = not stays and (request.mesh or request.checkpoint != "none")
    key = json.dumps(described._replace(config=None), default=repr)
    anew = spread or described.tensors
    built = built_from(described) if anew else once(key, partial(built_from, described))
    module = built.module
    module.config.name_or_path = module.config.name_or_path or described.name
    try:
        inputs = module_inputs(module, request)
        if described.precision.assumed:
            inputs.trained(module)
    except RequestError as error:
        if not described.precision.assumed:
            raise
        return from_config(described._replace(precision=in_fp32(error)), request)
    kv = {} if built.kv is None else {"declared_kv_dtype": built.kv}
    inputs = replace(
        inputs,
        workload={**inputs.workload, **kv},
        assumptions=(*inputs.assumptions, *built.assumptions),
    )
    return Loaded(module, inputs, described.name)


class Built(NamedTuple):
    """The model of a config on meta, the precision of its cache, and assumptions on it."""

    module: Any
    kv: str | None
    assumptions: tuple[tuple[str, str], ...]  # kind and text


def _assumed(
    described: Described, module: nn.Module, stored: Marked
) -> tuple[tuple[str, str], ...]:
    """Gaps and declarations of a config: kinds and texts of assumptions."""
    said = described.precision.text
    more = unbuilt(described.data, module, described.declared)
    return (
        *described.assumptions,
        *(("config", text) for text in _defaulted(described, module)),
        *((("precision", said),) if said else ()),
        *(("quantization", text) for text in stored.texts),
        *((("unbuilt", more),) if more else ()),
    )


def _defaulted(described: Described, module: nn.Module) -> Iterator[str]:
    """Sentences on built parts whose config is not in the file, so that it is transformers'."""
    config, data = described.config, described.data
    of_text = config.get_text_config() if "num_hidden_layers" in data else None  # an older form
    built = {id(getattr(part, "config", None)) for part in module.modules()}
    for name in getattr(type(config), "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and part is not of_text and not data.get(name) and id(part) in built:
            yield (
                f"the config has no {name}: this part is built with transformers' defaults for "
                f"{type(part).__name__}, whatever the checkpoint has"
            )


def built_from(described: Described) -> Built:
    """The model of a config, on meta, its weights marked with the formats that are declared.

    Raises TargetError.
    """
    taken = described.precision
    module = module_of(described.config, taken.dtype, described.target)
    if not described.declared:
        described = described._replace(precision=taken.by_size(module.num_parameters()))
    if described.precision.dtype is not taken.dtype:
        module = module_of(described.config, described.precision.dtype, described.target)
    stored = (
        Marked(None, (quantized_weights.mark_gguf(module, described.tensors),))
        if described.tensors
        else marked(module, described.declared)
    )
    return Built(module, stored.kv, _assumed(described, module, stored))


def module_of(config: Any, dtype: torch.dtype, target: str) -> Any:
    """The model of a config object, on meta; its integers have values.  Raises TargetError."""
    kind = _model_class(config, target)
    # The config that the class takes: the outer one, or the config of one part.
    wanted = getattr(kind, "config_class", None) or type(config)
    parts = [part for part in vars(config).values() if type(part) is wanted]
    config = parts[0] if parts and type(config) is not wanted else config
    recorder = Recorder(Values(draws=True), record=False)
    try:
        with torch.device(META), recorder:
            module = kind._from_config(config, dtype=dtype)
    except Exception as error:  # whatever the code of a model may raise
        reason = " ".join(str(error).split())
        raise TargetError(
            f"target {target!r}: {kind.__name__} cannot be built from it: {type(error).__name__}: "
            f"{reason}"
        ) from error
    finally:
        recorder.values.close(keep=True)
    for tensor in (t for part in module.modules() for t in own_tensors(part)):
        if tensor.is_floating_point():  # it seldom decides anything, and its results are larger
            tensor.__dict__.pop(REAL_VALUE, None)
    return module


# -- configchanges ---------------------------------------------------------------------------------
# A Hugging Face config with some fields changed, before a model is built of it.


PREFIX = "config."
_LAYERS = re.compile(r"(num|n)_(.*_)?layers?|.*layers")
"""Fields that count layers; lists with an item for each layer follow them."""


def with_settings(
    data: Mapping[str, Any], settings: Mapping[str, Any], defaults: Mapping[str, Any], target: str
) -> dict[str, Any]:
    """The config as plain data with these settings; names begin with "config.".

    defaults: the fields that a config of this type has.  Where a number of layers changes, a list
    with an item for each layer is cut, or goes on as it began.  Raises RequestError for a field
    that there is not, or a value of another kind.
    """
    changed: dict[str, Any] = dict(data)
    for name, value in settings.items():
        if not name.startswith(PREFIX):
            raise RequestError(
                f"{name}={value!r:.40}: the settings of {target} begin with {PREFIX!r}, for "
                f"example {PREFIX}num_hidden_layers"
            )
        _change(changed, name.removeprefix(PREFIX).split("."), value, defaults, name)
    return changed


def _change(
    data: dict[str, Any], path: list[str], value: Any, defaults: Mapping[str, Any], name: str
) -> None:
    first, *rest = path
    fields = {**defaults, **data}
    if first not in fields:
        names = [field for field, old in fields.items() if isinstance(old, (int, float, str, dict))]
        raise RequestError(
            f"{name}={value!r:.40}: the config has no field {first!r}{hint(first, names)}"
        )
    old = fields[first]
    if rest:
        if not isinstance(old, Mapping):
            raise RequestError(f"{name}={value!r:.40}: {first!r} has no fields of its own")
        part = dict(old)
        _change(part, rest, value, {}, name)
        data[first] = part
        return
    plain = isinstance(old, (int, float, str)) or old is None
    if not plain or (isinstance(old, (int, float)) and isinstance(value, str)):
        raise RequestError(f"{name}={value!r:.40}: expected a value such as {old!r:.40}")
    data[first] = value
    if _LAYERS.fullmatch(first) and isinstance(old, int) and isinstance(value, int):
        for field, items in fields.items():
            if isinstance(items, list) and len(items) == old > 1:
                data[field] = [items[i % old] for i in range(value)]
