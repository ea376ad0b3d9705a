"""Inputs of a module at requested sizes, with guesses for Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import RequestError
from rooftrace.tracer import Request, RequestLengths
from rooftrace.tracer.inputs.calls import (
    Inputs,
    cache_arguments,
    call_inputs,
    counted,
    is_tokens,
    last_token,
    parsed_inputs,
    random_tokens,
)
from rooftrace.tracer.inputs.labels import labels_of, takes_labels
from rooftrace.tracer.inputs.modalities import (
    TOKENS,
    grids,
    guessed,
    other_than_text,
    outcome,
    placeholders,
    required,
)
from rooftrace.tracer.values import REAL_VALUE, dtype_name, inputs_on_meta, parameters_of, twin

# -- hugging face models ---------------------------------------------------------------------------

DEFAULT_LENGTH = 2048
"""Default sequence length, where the model allows it."""
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Parameters that hold the type of each token of a prompt (text, image ...)."""
_SEPARATORS = ("sep_token_id", "eos_token_id")
"""Fields of the token behind each text of a pair, the likeliest first."""
_ENCODERS = ("encoder_config", "text_encoder", "encoder")
"""Fields of the config of an encoder of text."""
_SHORTEST = 3
"""Tokens of a prompt that identify the caches of a step of requests."""
_DRAWN = (("inputs", "token ids are drawn uniformly from the vocabulary, seed fixed"),)
CHOICES = 4
"""Answers to a question of several choices, as in SWAG, RACE and MMLU."""
_CHOSEN = (("inputs", f"input_ids: {CHOICES} choices for each sample, as SWAG and RACE have"),)


def model_inputs(module: nn.Module, request: Request) -> Inputs:
    """Inputs by the names of the model's parameters, its config, and the user's --input.

    Raises RequestError for a size that the model does not have, or an input that cannot be guessed.
    """
    config: Any = module.config
    passed = parsed_inputs(request.inputs)
    _check_names(module, passed)
    patches = grids(module, passed)
    rows = [] if patches else [int(t.shape[0]) for t in passed.values() if t.dim()]
    batch = next(iter(rows), request.batch or 1)
    passed |= patches
    if request.batch not in (None, batch):
        raise RequestError(f"--batch {request.batch}: the inputs that were given have {batch}")
    # The name of the model's main input, else of its first parameter
    parameters = list(parameters_of(module))
    named: str = getattr(module, "main_input_name", "input_ids")
    main = named if named in parameters or not parameters else parameters[0]
    tokens, others = _chosen(module, config, main, passed, batch, request)
    if tokens:
        return _Text(module, config, request, batch).inputs({**others, **passed}, tokens)
    for flag in ("seq", "kv"):
        if getattr(request, flag) is not None:
            raise RequestError(
                f"--{flag} {getattr(request, flag)}: {type(module).__name__} takes "
                f"{main}, which has no such length; leave it out"
            )
    inputs = {**others, **passed}
    shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
    find = partial(labels_of, inputs=inputs, batch=batch)
    return Inputs(kwargs=inputs, find_labels=find, workload={"batch": batch, "inputs": shapes})


def _check_names(module: nn.Module, texts: Mapping[str, Any]) -> None:
    """Raise RequestError for an input that the module's forward does not take."""
    parameters = parameters_of(module)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in texts:
        if name not in parameters:
            raise RequestError(
                f"--input {name}: {type(module).__name__}.forward takes "
                f"{', '.join(parameters) or 'no arguments'}"
            )


def _chosen(
    module: Any,
    config: Any,
    main: str,
    passed: Mapping[str, Tensor],
    batch: int,
    request: Request,
) -> tuple[list[str], dict[str, Tensor]]:
    """Names of the model's token-id inputs, and its other inputs besides the user's.

    A model that writes text gets text; any other gets the first layout that it accepts.
    """
    parameters = parameters_of(module)
    needed = [n for n in dict.fromkeys((main, *required(module))) if n not in passed]
    ids_needed = [name for name in needed if name.endswith("input_ids")]
    possible = list(dict.fromkeys([*(name for name in TOKENS if name in parameters), *ids_needed]))
    writes = bool(getattr(module, "can_generate", lambda: False)())
    only_text = all(name in TOKENS for name in needed)
    only_text = only_text and (main in TOKENS or main in passed)
    prompts = {main, *needed, "decoder_input_ids"}
    if writes and "decoder_input_ids" not in parameters:
        prompts.add("input_ids")
    text = [name for name in possible if name in prompts]
    if only_text and (passed or not other_than_text(module)):
        return text, {}
    length = min(request.seq or DEFAULT_LENGTH, _limit(module, config) or DEFAULT_LENGTH)
    shape = (batch, *_choices(module), length)
    ids = {name: random_tokens(shape, _vocabulary(module, config, name)) for name in possible}
    if only_text and writes:
        prompt = {name: ids[name] for name in text}
        if outcome(module, prompt, training=False)[1] is None:
            return text, {}
    guess, complaint = guessed(module, config, main, ids, passed, batch)
    if guess is None:
        unknown = [n for n in needed if n not in {*possible, *other_than_text(module)}]
        missing = next((n for n in (*unknown, *needed) if n not in TOKENS), main)
        detail = f" (to a guess it says {complaint})" if complaint else ""
        raise RequestError(
            f"{type(module).__name__}: its input {missing!r} cannot be guessed{detail}; "
            f"pass --input {missing}=SHAPE:DTYPE, for example --input {missing}=1,80,3000:fp32, "
            f"or what else its forward takes ({', '.join(parameters)})"
        )
    return (
        [name for name in guess if name in possible],
        {name: tensor for name, tensor in guess.items() if name not in possible},
    )


def _text(config: Any) -> Any:
    """The config of the text part of a model with several parts; of two, of the one that writes."""
    if not hasattr(config, "get_text_config"):
        return config
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def _choices(module: nn.Module) -> tuple[int, ...]:
    """The dimension of a prompt between batch and sequence: of a head that chooses, else none."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    # By this suffix transformers names models that take [batch, choices, sequence].
    return (CHOICES,) if any(kind.endswith("ForMultipleChoice") for kind in kinds) else ()


def _vocabulary(module: nn.Module, config: Any, name: str) -> int:
    """Rows of the table that the ids of this name are looked up in; an encoder may have another."""
    parts = [_text(config), config]
    if name == "input_ids" and "decoder_input_ids" in parameters_of(module):
        parts = [*(getattr(config, part, None) for part in _ENCODERS), *parts]
    sizes = (getattr(part, "vocab_size", None) for part in parts)
    return next((int(size) for size in sizes if size), 1000)


class _Text:
    """Token ids for a model that reads text, or writes it from something else."""

    def __init__(self, module: nn.Module, config: Any, request: Request, batch: int) -> None:
        self.module, self.request, self.batch = module, request, batch
        self.config = config
        self.limit = _limit(module, config)
        self.parameters = parameters_of(module)
        self.writes = bool(getattr(module, "can_generate", lambda: False)())
        self.prompt = "input_ids"
        if "decoder_input_ids" in self.parameters:
            self.prompt = "decoder_input_ids"
        self.keeps = self.writes and bool(cache_arguments(module))
        self.choices = _choices(module)

    def inputs(self, passed: Mapping[str, Tensor], tokens: Sequence[str]) -> Inputs:
        """Inputs of every phase: `passed` as they are, and ids for the names in `tokens`."""
        if self.request.lengths is not None:
            return self._of_requests(self.request.lengths, passed, tokens)
        seq, kv = self._lengths(passed)
        kwargs = dict(passed)
        for name in tokens:
            kwargs.setdefault(name, self._tokens(seq, name))
        if "input_ids" in tokens and "input_ids" not in passed:
            kwargs |= self._with_placeholders(kwargs["input_ids"], passed)
            if not self.writes:
                kwargs["input_ids"] = self._read(kwargs)
        step = last_token(kwargs[self.prompt]) if self.keeps else None
        cached = {**kwargs, self.prompt: self._tokens(kv, self.prompt)} if kv != seq else None
        labels: dict[str, Any] = {}
        likely = self.writes and takes_labels(self.module) - {*passed} == {"labels"}
        if likely:
            labels["labels"] = kwargs[self.prompt]
        if "use_cache" in self.parameters:
            labels["use_cache"] = False
        return Inputs(
            kwargs=kwargs,
            labels=labels,
            labels_likely=likely,
            find_labels=partial(labels_of, inputs=kwargs, batch=self.batch),
            decode={self.prompt: step} if self.keeps else None,
            cached={"use_cache": True},
            cached_kwargs=cached,
            **counted(kwargs[self.prompt], kwargs.values(), self.writes),
            workload={"batch": self.batch, "seq": seq, **({"kv": kv} if self.keeps else {})},
            assumptions=(*_DRAWN, *(_CHOSEN if self.choices and self.prompt in tokens else ())),
        )

    def _of_requests(
        self, lengths: RequestLengths, passed: Mapping[str, Tensor], tokens: Sequence[str]
    ) -> Inputs:
        """Inputs of a step of requests: the new tokens of all in one row."""
        name = type(self.module).__name__
        if not self.keeps or passed or list(tokens) != ["input_ids"]:
            raise RequestError(
                f"--cached, --new: {name} takes {', '.join((*tokens, *passed))}; expected a "
                "decoder that takes input_ids alone and keeps a cache"
            )
        last = max(map(sum, zip(lengths.cached, lengths.new, strict=True)))
        if self.limit and last > self.limit and _has_table(self.module, self.limit):
            raise RequestError(
                f"--cached, --new: a request of {last:,} positions, and {name} has a position "
                f"table of {self.limit:,} entries"
            )
        prompt = {self.prompt: self._tokens(max(lengths.longest, _SHORTEST), self.prompt)}
        return Inputs(
            kwargs=prompt,
            decode={self.prompt: self._tokens(lengths.tokens, self.prompt)},
            cached={"use_cache": True},
            cached_kwargs=prompt,
            items=lengths.tokens,
            item="token",
            workload={"requests": lengths.groups()},
            lengths=lengths,
            assumptions=_DRAWN,
        )

    def _with_placeholders(self, tokens: Tensor, passed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A prompt with placeholders for images, videos and sounds behind its first token.

        If forward takes the type of each token, that is added.
        """
        holders = placeholders(self.module, self.config, passed) if passed else []
        if not holders:
            return {"input_ids": tokens}
        if REAL_VALUE not in tokens.__dict__:
            raise RequestError(
                f"{type(self.module).__name__}: a prompt of {tokens.numel():,} tokens is too large "
                "to place images and sounds in; pass a smaller --batch or --seq"
            )
        ids: Tensor = tokens.__dict__[REAL_VALUE].clone()
        types = torch.zeros_like(ids)
        start = 1
        for type_id, token, count in holders:
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
        wanted = [n for n in _TYPES if n in self.parameters and n not in passed]
        return {"input_ids": twin(ids), **{name: twin(types) for name in wanted}}

    def _read(self, kwargs: Mapping[str, Tensor]) -> Tensor:
        """The prompt, or a pair of texts with their special tokens if the head takes only that."""
        drawn = kwargs["input_ids"]
        value = drawn.__dict__.get(REAL_VALUE)
        if value is None or outcome(self.module, kwargs, training=False)[1] is None:
            return drawn
        value, length = value.clone(), value.shape[-1]
        marks = (getattr(self.config, name, None) for name in _SEPARATORS)
        mark = next((m for m in marks if isinstance(m, int)), None)
        asks = getattr(self.config, "question_token_id", None)
        if mark is not None:  # behind the first text, before the second, behind that
            value[..., [length // 4, length // 4 + 1, length - 1]] = mark
        if asks is not None:
            value[..., 0] = asks
        pair = twin(value)
        error = outcome(self.module, {**kwargs, "input_ids": pair}, training=False)[1]
        return drawn if error is not None else pair

    def _tokens(self, length: int, name: str) -> Tensor:
        rows = _vocabulary(self.module, self.config, name)
        return random_tokens((self.batch, *self.choices, length), rows)

    def _lengths(self, passed: Mapping[str, Tensor]) -> tuple[int, int]:
        """Length of the sequence and of the cache.  Raises RequestError if either is too long."""
        request = self.request
        tokens = passed.get(self.prompt)
        if tokens is not None and (self.choices or is_tokens(tokens)):
            if request.seq not in (None, tokens.shape[-1]):
                raise RequestError(
                    f"--seq {request.seq}: --input {self.prompt} has "
                    f"{tokens.shape[-1]}; leave one of them out"
                )
            seq = int(tokens.shape[-1])
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


def _limit(module: nn.Module, config: Any) -> int | None:
    """The longest sequence that a config names, less the rows of its table that stand for no place.

    None if it names none.
    """
    for name in ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(_text(config), name, None)
        if isinstance(limit, int) and limit > 0:
            return limit - _unused_rows(module, limit)
    return None


def _unused_rows(module: nn.Module, limit: int) -> int:
    """Rows of a table of positions up to that of padding, which no token has."""
    for path, part in module.named_modules():
        positional = "position" in path.rpartition(".")[2] and isinstance(part, nn.Embedding)
        if positional and part.padding_idx is not None and part.num_embeddings == limit:
            return int(part.padding_idx) + 1
    return 0


def _has_table(module: nn.Module, limit: int) -> bool:
    """Whether some embedding has about `limit` rows: learned positions cannot be extended."""
    return any(
        isinstance(m, nn.Embedding) and limit <= m.num_embeddings <= limit + 8
        for m in module.modules()
    )


# -- modules ---------------------------------------------------------------------------------------
# Inputs of a module at the sizes of a request: the target's, described in text, or guessed.


def module_inputs(
    module: nn.Module,
    request: Request,
    inputs: Any = None,
    target: str = "",
    attribute: str = "",
) -> Inputs:
    """Inputs of a module at the sizes of the request.

    They come with the module, from the request, or from the config of a Hugging Face model.  Raises
    RequestError where there are none, or for a size that the inputs do not have.
    """
    target = target or type(module).__name__
    args, kwargs = _arguments(inputs)
    described = parsed_inputs(request.inputs)
    _check_names(module, described)
    if not args and not kwargs and hasattr(module, "main_input_name"):
        return model_inputs(module, request)  # a Hugging Face model names its inputs
    if not args and not kwargs and not described:
        raise RequestError(
            f"{target}: no inputs; let {attribute} return (module, inputs), or pass "
            "--input NAME=SHAPE:DTYPE, for example --input x=8,3,224,224:fp32"
            if attribute
            else f"{target}: no inputs; pass them, or their shapes, for example "
            'inputs={"x": "8,3,224,224:fp32"}'
        )
    return _fixed_inputs(module, args, {**kwargs, **described}, target, request)


def _fixed_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: str, request: Request
) -> Inputs:
    """Inputs that the target's code, or --input, gave: only their batch can be changed."""
    for flag in ("seq", "kv"):
        if getattr(request, flag) is not None:
            raise RequestError(
                f"--{flag} {getattr(request, flag)}: {target} makes its own inputs; change their "
                "length there, or pass --input NAME=SHAPE:DTYPE"
            )
    inputs = call_inputs(module, args, kwargs, request.batch)
    shown = _described(inputs.args, inputs.kwargs)
    return replace(inputs, workload={**inputs.workload, "inputs": shown})


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs that a target returned with its module, as arguments of a call on meta.

    A `partial` of the module has some of both kinds.
    """
    if isinstance(inputs, partial):
        moved: tuple[tuple[Any, ...], dict[str, Any]]
        moved = inputs_on_meta((inputs.args, inputs.keywords))
        return moved
    inputs = inputs_on_meta(inputs)
    if inputs is None:
        return (), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _described(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Each argument in a few characters: "fp32[8, 3, 224, 224]"."""
    named = {**{str(i): item for i, item in enumerate(args)}, **kwargs}
    return {
        name: f"{dtype_name(item.dtype)}[{', '.join(map(str, item.shape))}]"
        if isinstance(item, Tensor)
        else repr(item)[:60]
        for name, item in named.items()
    }
