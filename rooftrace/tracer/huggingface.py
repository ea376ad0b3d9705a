"""Hugging Face models: from a config to a module on meta, and inputs of the kind that it takes."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.inputs import check_names, is_tokens, last_token, parsed_inputs, random_tokens
from rooftrace.tracer.quantization import weights_precision
from rooftrace.tracer.request import Inputs, Loaded, Request, RequestError, TargetError
from rooftrace.tracer.values import META
from rooftrace.tracer.workload import cache_arguments

DEFAULT_LENGTH = 2048
"""Sequence length where none is asked for and the model allows it."""

_ENCODER_DECODER = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
_ENCODER = ("MODEL_FOR_MASKED_LM_MAPPING",)
_OTHERS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


def from_file(path: Path, request: Request) -> Loaded:
    """The model of a config.json.  Raises TargetError for a file that is none."""
    target = str(path)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no such file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"target {target!r}: not a JSON file: {error}") from None
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not kind:
        raise TargetError(
            f"target {target!r}: a Hugging Face config has a model_type; this one has none"
        )
    transformers = _transformers()
    if kind not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"target {target!r}: model_type {kind!r} is unknown to transformers "
            f"{transformers.__version__}; upgrade transformers, or pass the module itself as "
            "file.py:attr"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(data)
    except Exception as error:  # its validation raises errors of its own
        reason = " ".join(str(error).split())
        raise TargetError(f"target {target!r}: transformers refuses it: {reason}") from None
    return from_config(
        config, path.stem if path.stem != "config" else path.resolve().parent.name, target, request
    )


def from_hub(target: str, request: Request) -> Loaded:
    """The model of a config in the local Hugging Face cache, or on the hub.  Raises TargetError."""
    name = target.removeprefix("hf:")
    try:
        config = _transformers().AutoConfig.from_pretrained(
            name, trust_remote_code=request.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TargetError(f"target {target!r}: {reason}") from None
    return from_config(config, name, target, request)


def _transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
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
        if hasattr(transformers, name):
            return getattr(transformers, name)
    # An encoder has a causal head too, for use as a decoder; its config says if it is one.
    heads = (
        *(_ENCODER_DECODER if getattr(config, "is_encoder_decoder", False) else ()),
        *(() if getattr(config, "is_decoder", False) else _ENCODER),
        *_OTHERS,
    )
    for mapping in heads:
        found = getattr(transformers, mapping, {})
        if type(config) in found:
            kind = found[type(config)]
            return kind[0] if isinstance(kind, (list, tuple)) else kind
    raise TargetError(
        f"target {target!r}: transformers has no model class for {type(config).__name__}"
    )


def from_config(config: Any, name: str, target: str, request: Request) -> Loaded:
    """The model of a config object, built on meta, and inputs for it.  Raises TargetError."""
    module = built_from(config, target)
    module.config.name_or_path = module.config.name_or_path or name
    return Loaded(module, _with_quantization(model_inputs(module, request), config), name)


def built_from(config: Any, target: str) -> Any:
    """The model of a config object, on meta.  Raises TargetError."""
    kind = _model_class(config, target)
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    try:
        with torch.device(META):
            return kind._from_config(config, dtype=dtype)
    except Exception as error:  # whatever the code of a model may raise
        reason = " ".join(str(error).split())
        raise TargetError(
            f"target {target!r}: {kind.__name__} cannot be built from it: {reason}"
        ) from error


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


# -- inputs --------------------------------------------------------------------------------------


def model_inputs(module: nn.Module, request: Request) -> Inputs:
    """Inputs by the kind of the model's main input: tokens, images, or whatever --input gives.

    Raises RequestError for a size that the model does not have, or an input that cannot be guessed.
    """
    config: Any = module.config
    main: Any = getattr(module, "main_input_name", "input_ids")
    given = parsed_inputs(request.inputs)
    check_names(module, given)
    parameters = inspect.signature(module.forward).parameters
    if main not in given and main in parameters:
        if main == "pixel_values":
            given[main] = _image(module, config, request.batch or 1)
        elif main != "input_ids":
            raise RequestError(
                f"{type(module).__name__}: its main input is {main!r}, which cannot be guessed; "
                f"pass --input {main}=SHAPE:DTYPE, for example --input {main}=1,80,3000:fp32"
            )
    batch = next((int(t.shape[0]) for t in given.values() if t.dim()), request.batch or 1)
    if request.batch not in (None, batch):
        raise RequestError(f"--batch {request.batch}: the inputs that were given have {batch}")
    if main == "input_ids" or "decoder_input_ids" in parameters:
        return _Text(module, config, request, batch).inputs(given)
    for flag in ("seq", "kv"):
        if getattr(request, flag) is not None:
            raise RequestError(
                f"--{flag} {getattr(request, flag)}: {type(module).__name__} takes "
                f"{main}, which has no such length; leave it out"
            )
    return Inputs(
        (),
        given,
        workload={
            "batch": batch,
            "inputs": {name: list(tensor.shape) for name, tensor in given.items()},
        },
    )


def _image(module: nn.Module, config: Any, batch: int) -> Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    channels = getattr(vision, "num_channels", None) or 3
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty((batch, channels, height, width), dtype=dtype, device=META)


class _Text:
    """Token ids for a model that reads text, or writes it from something else."""

    def __init__(self, module: nn.Module, config: Any, request: Request, batch: int) -> None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.module, self.request, self.batch = module, request, batch
        self.vocabulary = int(getattr(text, "vocab_size", None) or config.vocab_size)
        self.limit = _limit(text)
        self.parameters = inspect.signature(module.forward).parameters
        keeps = bool(cache_arguments(module)) and bool(
            getattr(module, "can_generate", lambda: False)()
        )
        self.prompt = "input_ids"
        if "decoder_input_ids" in self.parameters:
            self.prompt = "decoder_input_ids"
        self.keeps = keeps

    def inputs(self, given: Mapping[str, Tensor]) -> Inputs:
        """Inputs of every phase; what is given stays as it is."""
        seq, kv = self._lengths(given)
        kwargs = {"input_ids": self._tokens(seq), **given}
        if getattr(self.module, "main_input_name", "input_ids") != "input_ids":
            kwargs = dict(given)
        kwargs.setdefault(self.prompt, self._tokens(seq))
        step = last_token(kwargs[self.prompt])
        cached = {**kwargs, self.prompt: self._tokens(kv)} if kv != seq else None
        labels: dict[str, Any] = {}
        if "labels" in self.parameters and "labels" not in given:
            labels["labels"] = kwargs[self.prompt]
        if "use_cache" in self.parameters:
            labels["use_cache"] = False
        return Inputs(
            (),
            kwargs,
            labels=labels,
            decode={self.prompt: step} if self.keeps else None,
            cached={"use_cache": True},
            cached_kwargs=cached,
            items=self.batch * seq,
            item="token",
            workload={"batch": self.batch, "seq": seq, **({"kv": kv} if self.keeps else {})},
            assumptions=(
                ("inputs", "token ids are drawn uniformly from the vocabulary, seed fixed"),
            ),
        )

    def _tokens(self, length: int) -> Tensor:
        return random_tokens(self.batch, length, self.vocabulary)

    def _lengths(self, given: Mapping[str, Tensor]) -> tuple[int, int]:
        """Length of the sequence and of the cache.  Raises RequestError for one too long."""
        request = self.request
        tokens = given.get(self.prompt)
        if tokens is not None and is_tokens(tokens):
            if request.seq not in (None, tokens.shape[1]):
                raise RequestError(
                    f"--seq {request.seq}: --input {self.prompt} has "
                    f"{tokens.shape[1]}; leave one of them out"
                )
            seq = int(tokens.shape[1])
        else:
            seq = request.seq or min(DEFAULT_LENGTH, self.limit or DEFAULT_LENGTH)
        if request.kv is not None and not self.keeps:
            raise RequestError(
                f"--kv {request.kv}: {type(self.module).__name__} keeps no cache; leave it out"
            )
        kv = request.kv or seq
        for flag, length in (("seq", seq), ("kv", kv)):
            if self.limit and length > self.limit and _has_table(self.module, self.limit):
                raise RequestError(
                    f"--{flag} {length}: {type(self.module).__name__} has a "
                    f"position table of {self.limit} entries"
                )
        return seq, kv


def _limit(config: Any) -> int | None:
    """The longest sequence that a config speaks of."""
    for name in ("max_target_positions", "max_position_embeddings", "n_positions"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _has_table(module: nn.Module, limit: int) -> bool:
    """Whether some embedding has about `limit` rows: learned positions cannot be extended."""
    return any(
        isinstance(m, nn.Embedding) and limit <= m.num_embeddings <= limit + 8
        for m in module.modules()
    )
