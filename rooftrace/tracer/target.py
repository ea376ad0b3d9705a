"""From what a user names on the command line to a module on meta and its inputs.

A target is ``package.module:attr``, ``path/file.py:attr``, the path of a Hugging Face config.json,
``hf:ORG/NAME`` (a locally cached config; no remote code), or a saved graph (handled by graphfile).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.capture import META, Recorder, TraceError
from rooftrace.tracer.lower import torch_dtype
from rooftrace.tracer.values import Values
from rooftrace.tracer.workload import Inputs, RequestError, meta_inputs, with_value

_SEED = 0


class TargetError(ValueError):
    """A target that cannot be found or built: quotes it and says what was expected."""


@dataclass(frozen=True)
class Request:
    """Sizes and switches for a target.

    batch; seq: prompt or sequence length; kv: cached length of a decode step (default seq).  inputs:
    extra or replacing inputs by name, "shape:dtype".  trust_remote_code: let a Hugging Face repository
    run its own code.
    """

    batch: int | None = None
    seq: int | None = None
    kv: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "kv"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"--{name} {value}: expected a whole number of at least 1")


@dataclass(frozen=True)
class Loaded:
    """A module on meta with inputs for it."""

    module: nn.Module
    inputs: Inputs
    name: str


def load_target(target: str, request: Request | None = None) -> Loaded:
    """Build the module that `target` names, on meta, and inputs of the requested sizes.

    Raises TargetError for a target that is not there or is no module; RequestError for inputs that
    cannot be guessed.
    """
    request = request or Request()
    if target.startswith("hf:"):
        return _hugging_face(_hub_config(target, request), target.removeprefix("hf:"), request)
    if target.endswith(".json") or (os.path.isdir(target) and (Path(target) / "config.json").is_file()):
        path = Path(target)
        path = path / "config.json" if path.is_dir() else path
        return _hugging_face(_config(path), path.stem if path.stem != "config" else path.parent.name, request)
    if ":" in target:
        return _from_attribute(target, request)
    raise TargetError(
        f"target {target!r}: expected package.module:attr, path/file.py:attr, a Hugging Face config.json, "
        "hf:ORG/NAME or a saved graph (.json.gz)")


# -- Python targets ---------------------------------------------------------------------------------

def _from_attribute(target: str, request: Request) -> Loaded:
    where, _, attribute = target.rpartition(":")
    source = _import_file(where, target) if where.endswith(".py") else _import_module(where, target)
    made: Any = source
    for part in attribute.split("."):
        if not hasattr(made, part):
            names = [n for n in vars(source) if not n.startswith("_")]
            raise TargetError(f"target {target!r}: {where} has no {attribute!r}; it has {', '.join(names[:12])}")
        made = getattr(made, part)
    inputs: Any = None
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise TargetError(f"target {target!r}: expected a torch.nn.Module or a function that returns one, "
                              f"got {type(made).__name__}")
        made = _build(made, target)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, inputs = made
    if not isinstance(made, nn.Module):
        raise TargetError(f"target {target!r}: expected a torch.nn.Module or (module, inputs), "
                          f"got {type(made).__name__}")
    args, kwargs = _arguments(inputs)
    if request.inputs:
        kwargs = {**kwargs, **{name: _parsed_input(name, text) for name, text in request.inputs.items()}}
    if not args and not kwargs:
        raise RequestError(
            f"{target}: no inputs; let {attribute} return (module, inputs), or pass "
            "--input NAME=SHAPE:DTYPE, for example --input x=8,3,224,224:fp32")
    args, kwargs = meta_inputs(args), meta_inputs(kwargs)
    if request.batch is not None:
        args, kwargs = _with_batch((args, kwargs), request.batch)
    workload = {"batch": _batch_of((args, kwargs)), "inputs": _described(args, kwargs)}
    return Loaded(made, Inputs(args, kwargs, workload=workload), attribute if where.endswith(".py") else target)


def _import_file(where: str, target: str) -> Any:
    path = Path(where)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no file {where!r}")
    name = f"_rooftrace_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"target {target!r}: {where!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that it can import its neighbours, as when it is run
    spec.loader.exec_module(module)
    return module


def _import_module(where: str, target: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise TargetError(f"target {target!r}: cannot import {where!r}: {error}") from None


def _build(function: Callable[..., Any], target: str) -> Any:
    """Call a user's factory on meta.  Values of small tensors made there are followed, so that
    `linspace(...).item()` and the like work."""
    recorder = Recorder(Values(), record=False)
    try:
        with torch.device(META), recorder:
            made = function()
    except TypeError as error:
        if "required positional argument" in str(error):
            raise TargetError(f"target {target!r}: expected a function without required arguments: {error}") from None
        raise
    recorder.keep_values()
    return made


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs is None:
        return (), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def _with_batch(tree: Any, batch: int) -> Any:
    """Inputs whose first dimension is the batch of the first input, with another batch size."""
    old = _batch_of(tree)

    def resize(item: Any) -> Any:
        if isinstance(item, Tensor) and item.dim() and item.shape[0] == old:
            return torch.empty((batch, *item.shape[1:]), dtype=item.dtype, device=META)
        if isinstance(item, (list, tuple)):
            return type(item)(resize(x) for x in item)
        if isinstance(item, dict):
            return {k: resize(v) for k, v in item.items()}
        return item
    return resize(tree)


def _batch_of(tree: Any) -> int:
    from rooftrace.tracer.capture import tensors_in

    found = [t for t in tensors_in(tree) if t.dim()]
    return int(found[0].shape[0]) if found else 1


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    from rooftrace.tracer.lower import dtype_name

    named = {**{str(i): a for i, a in enumerate(args)}, **kwargs}
    return {name: (f"{dtype_name(v.dtype)}[{', '.join(map(str, v.shape))}]" if isinstance(v, Tensor) else repr(v)[:60])
            for name, v in named.items()}


def _parsed_input(name: str, text: str) -> Tensor:
    shape_text, _, dtype_text = text.partition(":")
    try:
        shape = tuple(int(n) for n in shape_text.replace("x", ",").split(",") if n)
    except ValueError:
        raise RequestError(
            f"--input {name}={text}: expected SHAPE:DTYPE, for example {name}=8,3,224,224:fp32") from None
    dtype = torch_dtype(dtype_text or "fp32")
    if dtype.is_floating_point or dtype.is_complex:
        return torch.empty(shape, dtype=dtype, device=META)
    generator = torch.Generator().manual_seed(_SEED)
    return with_value(torch.randint(0, 2, shape, generator=generator).to(dtype))


# -- Hugging Face targets ---------------------------------------------------------------------------

def _transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise TargetError("Hugging Face targets need transformers: pip install 'rooftrace[hf]'") from None
    return transformers


def _config(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"target {str(path)!r}: there is no such file")
    try:
        data = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"target {str(path)!r}: not a JSON file: {error}") from None
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not kind:
        raise TargetError(f"target {str(path)!r}: a Hugging Face config has a model_type; this one has none")
    transformers = _transformers()
    if kind not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"target {str(path)!r}: model_type {kind!r} is unknown to transformers {transformers.__version__}; "
            "upgrade transformers, or pass the module itself as file.py:attr")
    return transformers.CONFIG_MAPPING[kind].from_dict(data)


def _hub_config(target: str, request: Request) -> Any:
    transformers = _transformers()
    name = target.removeprefix("hf:")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=request.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TargetError(f"target {target!r}: {reason}") from None


_HEADS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
          "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
          "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
          "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", "MODEL_MAPPING")


def _model_class(config: Any, transformers: Any) -> Any:
    """The class named in `architectures`, else the first head that this config type has."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for mapping in _HEADS:
        found = getattr(transformers, mapping, {})
        if type(config) in found:
            kind = found[type(config)]
            return kind[0] if isinstance(kind, (list, tuple)) else kind
    raise TargetError(f"transformers has no model class for {type(config).__name__}")


def _hugging_face(config: Any, name: str, request: Request) -> Loaded:
    transformers = _transformers()
    kind = _model_class(config, transformers)
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    with torch.device(META):
        module = kind._from_config(config, dtype=dtype)
    module.config.name_or_path = module.config.name_or_path or name
    return Loaded(module, _hugging_face_inputs(module, config, request), name)


def _hugging_face_inputs(module: nn.Module, config: Any, request: Request) -> Inputs:
    """Inputs by the kind of the model's main input: text, image or audio features."""
    import inspect

    parameters = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    batch = request.batch or 1
    given = {n: _parsed_input(n, t) for n, t in request.inputs.items()}
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    if main in given:
        return Inputs((), given, workload={"batch": int(given[main].shape[0])})
    if main == "input_ids" and "input_ids" in parameters:
        return _text_inputs(module, config, request, batch, given, parameters)
    vision = getattr(config, "vision_config", None) or config
    if main == "pixel_values":
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
        channels = getattr(vision, "num_channels", None) or 3
        pixels = torch.empty((batch, channels, height, width), dtype=dtype, device=META)
        return Inputs((), {"pixel_values": pixels, **given},
                      workload={"batch": batch, "inputs": _described((), {"pixel_values": pixels})})
    raise RequestError(
        f"{type(module).__name__}: its main input is {main!r}, which cannot be guessed; pass "
        f"--input {main}=SHAPE:DTYPE, for example --input {main}=1,80,3000:fp32")


def _text_inputs(module: nn.Module, config: Any, request: Request, batch: int, given: Mapping[str, Tensor],
                 parameters: Mapping[str, Any]) -> Inputs:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", None) or getattr(config, "vocab_size", 32000))
    limit = getattr(text, "max_position_embeddings", None)
    seq = request.seq or min(2048, limit or 2048)
    kv = request.kv or seq
    for flag, length in (("seq", seq), ("kv", kv)):
        if isinstance(limit, int) and limit > 0 and length > limit and _has_position_table(module, limit):
            raise RequestError(f"--{flag} {length}: this model has a position table of {limit} entries")

    def tokens(length: int) -> Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        return with_value(torch.randint(min(5, vocabulary - 1), vocabulary, (batch, length), generator=generator))
    kwargs: dict[str, Any] = {"input_ids": tokens(seq), **given}
    cached_kwargs: dict[str, Any] = {"input_ids": tokens(kv), **given}
    decode: dict[str, Any] = {"input_ids": tokens(1)}
    if "decoder_input_ids" in parameters:
        kwargs["decoder_input_ids"] = tokens(seq)
        cached_kwargs = {"input_ids": tokens(seq), "decoder_input_ids": tokens(kv), **given}
        decode = {"decoder_input_ids": tokens(1)}
    has_labels = "labels" in parameters
    labels = {"labels": kwargs.get("decoder_input_ids", kwargs["input_ids"])} if has_labels else {}
    keeps = "past_key_values" in parameters or "cache_params" in parameters
    generative = bool(getattr(module, "can_generate", lambda: False)())
    if "use_cache" in parameters:
        labels["use_cache"] = False
    return Inputs(
        (), kwargs, labels=labels, decode=decode if keeps and generative else None,
        cached={"use_cache": True}, cached_kwargs=cached_kwargs if kv != seq else None,
        items=batch * seq, item="token",
        workload={"batch": batch, "seq": seq, "kv": kv},
        assumptions=(("inputs", "token ids are drawn uniformly from the vocabulary with a fixed seed"),))


def _has_position_table(module: nn.Module, limit: int) -> bool:
    """Whether some embedding has about `limit` rows: learned positions cannot be extended."""
    return any(isinstance(m, nn.Embedding) and limit <= m.num_embeddings <= limit + 8 for m in module.modules())


def with_inputs(loaded: Loaded, inputs: Inputs) -> Loaded:
    """The same module with other inputs."""
    return replace(loaded, inputs=inputs)


__all__ = ["Loaded", "Request", "RequestError", "TargetError", "TraceError", "load_target", "with_inputs"]
