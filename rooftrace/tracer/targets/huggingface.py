"""Hugging Face models: from a config to a module on meta, and inputs of the kind that it takes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.asking import Inputs, Loaded, Request, RequestError, TargetError
from rooftrace.tracer.phases import cache_arguments
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.targets.inputs import (
    check_names,
    is_tokens,
    last_token,
    parsed_inputs,
    random_tokens,
)
from rooftrace.tracer.targets.modalities import (
    TOKENS,
    grids,
    guessed,
    other_than_text,
    placeholders,
    required,
)
from rooftrace.tracer.targets.quantization import weights_precision
from rooftrace.tracer.tensors import own_tensors, parameters_of
from rooftrace.tracer.twins import twin
from rooftrace.tracer.values import META, REAL_VALUE, Values

DEFAULT_LENGTH = 2048
"""Sequence length where none is asked for and the model allows it."""
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Parameters that say of each token of a prompt what it stands for."""
_TRIAL = 16
"""Sequence length where it is tried out which inputs a model accepts."""

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
    """The model of a config object, on meta; its whole numbers are known.  Raises TargetError."""
    kind = _model_class(config, target)
    config = _part_for(kind, config)
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
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
    """The config that a model class takes: it may be for a part of what the config describes."""
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


# -- inputs --------------------------------------------------------------------------------------


def model_inputs(module: nn.Module, request: Request) -> Inputs:
    """Inputs by the names of the model's parameters and its config, and whatever --input gives.

    Raises RequestError for a size that the model does not have, or an input that cannot be guessed.
    """
    config: Any = module.config
    given = parsed_inputs(request.inputs)
    check_names(module, given)
    patches = grids(module, given)
    rows = [] if patches else [int(t.shape[0]) for t in given.values() if t.dim()]
    batch = next(iter(rows), request.batch or 1)
    given |= patches
    if request.batch not in (None, batch):
        raise RequestError(f"--batch {request.batch}: the inputs that were given have {batch}")
    main = _main_input(module)
    tokens, others = _chosen(module, config, main, given, batch)
    if tokens:
        return _Text(module, config, request, batch).inputs({**others, **given}, tokens)
    for flag in ("seq", "kv"):
        if getattr(request, flag) is not None:
            raise RequestError(
                f"--{flag} {getattr(request, flag)}: {type(module).__name__} takes "
                f"{main}, which has no such length; leave it out"
            )
    inputs = {**others, **given}
    shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
    return Inputs((), inputs, workload={"batch": batch, "inputs": shapes})


def _main_input(module: nn.Module) -> str:
    """The argument that the model is about; the first where it names none that it takes."""
    parameters = list(parameters_of(module))
    named: str = getattr(module, "main_input_name", "input_ids")
    return named if named in parameters or not parameters else parameters[0]


def _chosen(
    module: Any, config: Any, main: str, given: Mapping[str, Tensor], batch: int
) -> tuple[list[str], dict[str, Tensor]]:
    """Names of the token ids that the model is given, and its other inputs beside the given ones.

    A model that writes text is given text; of the layouts of others the first that they accept.
    """
    parameters = parameters_of(module)
    needed = [n for n in dict.fromkeys((main, *required(module))) if n not in given]
    ids_needed = [name for name in needed if name.endswith("input_ids")]
    possible = list(dict.fromkeys([*(name for name in TOKENS if name in parameters), *ids_needed]))
    writes = bool(getattr(module, "can_generate", lambda: False)())
    only_text = all(name in TOKENS for name in needed)
    if (
        only_text
        and (main in TOKENS or main in given)
        and (writes or given or not other_than_text(module))
    ):
        prompts = {main, *needed, "decoder_input_ids"}
        if writes and "decoder_input_ids" not in parameters:
            prompts.add("input_ids")
        return [name for name in possible if name in prompts], {}
    length = min(_TRIAL, _limit(_text(config)) or _TRIAL)
    ids = {name: random_tokens(batch, length, _vocabulary(config)) for name in possible}
    found, complaint = guessed(module, config, main, ids, given, batch)
    if found is None:
        missing = next((n for n in needed if n not in TOKENS), main)
        said = f" (to a guess it says {complaint})" if complaint else ""
        raise RequestError(
            f"{type(module).__name__}: its input {missing!r} cannot be guessed{said}; "
            f"pass --input {missing}=SHAPE:DTYPE, for example --input {missing}=1,80,3000:fp32"
        )
    return (
        [name for name in found if name in possible],
        {name: tensor for name, tensor in found.items() if name not in possible},
    )


def _text(config: Any) -> Any:
    """The config of the part that reads text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _vocabulary(config: Any) -> int:
    text = _text(config)
    found = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None)
    return int(found or 1000)


class _Text:
    """Token ids for a model that reads text, or writes it from something else."""

    def __init__(self, module: nn.Module, config: Any, request: Request, batch: int) -> None:
        self.module, self.request, self.batch = module, request, batch
        self.config = config
        self.vocabulary = _vocabulary(config)
        self.limit = _limit(_text(config))
        self.parameters = parameters_of(module)
        self.writes = bool(getattr(module, "can_generate", lambda: False)())
        self.prompt = "input_ids"
        if "decoder_input_ids" in self.parameters:
            self.prompt = "decoder_input_ids"
        self.keeps = self.writes and bool(cache_arguments(module))

    def inputs(self, given: Mapping[str, Tensor], tokens: Sequence[str]) -> Inputs:
        """Inputs of every phase, of which `tokens` are ids; what is given stays as it is."""
        seq, kv = self._lengths(given)
        kwargs = dict(given)
        for name in tokens:
            kwargs.setdefault(name, self._tokens(seq))
        if "input_ids" in tokens and "input_ids" not in given:
            kwargs |= self._with_placeholders(kwargs["input_ids"], given)
        step = last_token(kwargs[self.prompt])
        cached = {**kwargs, self.prompt: self._tokens(kv)} if kv != seq else None
        labels: dict[str, Any] = {}
        own_loss = "labels" in self.parameters and "labels" not in given
        if own_loss and (self.writes or not other_than_text(self.module)):
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

    def _with_placeholders(self, tokens: Tensor, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A prompt in which images, videos and sounds have their places, behind the first token.

        With it goes, where forward asks for it, what each token stands for.
        """
        places = placeholders(self.module, self.config, given) if given else []
        if not places:
            return {"input_ids": tokens}
        ids: Tensor = tokens.__dict__[REAL_VALUE].clone()
        types = torch.zeros_like(ids)
        start = 1
        for type_id, token, count in places:
            ids[ids == token] = 0
            each = count // self.batch
            if start + each > ids.shape[1]:
                raise RequestError(
                    f"{type(self.module).__name__}: its inputs stand for {each} tokens of the "
                    f"prompt, which has {ids.shape[1]}; pass a larger --seq"
                )
            ids[:, start : start + each] = token
            types[:, start : start + each] = type_id
            start += each
        asked = [n for n in _TYPES if n in self.parameters and n not in given]
        return {"input_ids": twin(ids), **{name: twin(types) for name in asked}}

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
        # A decode step stands behind the cache, and both have to fit.
        kv = request.kv or max(1, min(seq, (self.limit or seq + 1) - 1))
        for flag, length, last in (("seq", seq, seq), ("kv", kv, kv + 1 if self.keeps else kv)):
            if self.limit and last > self.limit and _has_table(self.module, self.limit):
                raise RequestError(
                    f"--{flag} {length}: {type(self.module).__name__} has a "
                    f"position table of {self.limit} entries"
                )
        return seq, kv


def _limit(config: Any) -> int | None:
    """The longest sequence that a config speaks of."""
    for name in ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len"):
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
