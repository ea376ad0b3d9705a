"""One step of a server: requests with caches of different lengths, their new tokens in one row.

The model runs once on the new tokens of all requests, as a server with continuous batching does.
Its cache holds the rows of all of them; its attention is one op that knows where each begins.
That takes a model whose attention goes through the attention interface of transformers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import NoCacheError, RequestError
from rooftrace.tracer import RequestLengths
from rooftrace.tracer.phases.calls import ModuleCalls
from rooftrace.tracer.recording import attend
from rooftrace.tracer.values import Values, parameters_of, tensors_in, twin, with_tensors

_INTERFACE = "rooftrace_packed"
"""Under which transformers finds our attention."""
_PROBES = (1, 2)
"""Cached lengths that distinguish the rows of a cache from its other dimensions."""
_FREE = {"s_aux": "sinks, a score for each head beside the keys", "softcap": "the cap of scores"}
"""Changes of scores inside the kernel, in some models, that no rule counts."""


def check_lengths(lengths: RequestLengths | None, module: nn.Module) -> RequestLengths:
    """The lengths of a step of requests.  Raises RequestError where there are none."""
    if lengths is None:
        raise RequestError(
            f"phase requests of {type(module).__name__}: its requests are missing; list them, for "
            "example --cached 4096,100 --new 1,512"
        )
    return lengths


def step_inputs(calls: ModuleCalls, lengths: RequestLengths) -> dict[str, Tensor]:
    """The new tokens of all requests, and their positions if the module takes them."""
    fed = dict(calls.inputs.decode or {})
    if "position_ids" in parameters_of(calls.module):
        fed["position_ids"] = twin(torch.tensor([lengths.positions()]))
    return fed


def joined_state(calls: ModuleCalls, lengths: RequestLengths) -> dict[str, Any]:
    """The arguments by which a step continues: the caches of all requests, one behind another.

    Raises NoCacheError for a module without a cache, RequestError for one whose state is no row for
    each token.
    """
    longest = max(lengths.longest, _PROBES[1] + 1)
    states = [_prompted(calls, length) for length in (*_PROBES, longest)]
    counts = {len(tensors_in(state)) for state in states}
    if len(counts) > 1:
        raise _refused(calls.module, "its cache has more tensors for longer prompts")
    joined: dict[int, Tensor] = {}
    for short, other, long in zip(*map(tensors_in, states), strict=True):
        if not long.dim():  # a scalar of the cache, as the width of a window
            joined[id(long)] = long
            continue
        dimension = _length_dimension(calls.module, short, other)
        held = long.shape[dimension]
        if held > longest:
            raise _refused(calls.module, "its cache has more rows than positions")
        rows = sum(lengths.rows(0 if held == longest else held + 1))
        shape = (*long.shape[:dimension], rows, *long.shape[dimension + 1 :])
        joined[id(long)] = torch.empty(shape, dtype=long.dtype, device=long.device)
    return with_tensors(states[-1], lambda tensor: joined[id(tensor)])  # type: ignore[no-any-return]


def _prompted(calls: ModuleCalls, length: int) -> dict[str, Any]:
    output, state = calls.prompted(calls.inputs.prompt_of(length))
    if not state:
        raise NoCacheError(calls.without_cache("requests", output))
    if "encoder_outputs" in state:
        raise _refused(calls.module, "it has an encoder")
    return state


def _length_dimension(module: nn.Module, short: Tensor, other: Tensor) -> int:
    """The dimension of a cache that grows with its length by one row for each token."""
    differing = [
        axis
        for axis, (a, b) in enumerate(zip(short.shape, other.shape, strict=True))
        if b - a == _PROBES[1] - _PROBES[0] and a == _PROBES[0]
    ]
    if len(differing) != 1 or short.shape[0] != 1:
        raise _refused(
            module, f"it keeps a state {list(short.shape)} that is no row for each token"
        )
    return differing[0]


@contextlib.contextmanager
def packed(calls: ModuleCalls, lengths: RequestLengths, values: Values) -> Iterator[None]:
    """Inside, attention of the module is that of packed requests.

    Raises RequestError at the end where no attention went through the interface.
    """
    module = calls.module
    parts = [part.config for part in module.modules() if hasattr(part, "config")]
    configs = {id(each): each for each in parts if hasattr(each, "_attn_implementation")}
    if not configs:
        raise _refused(module, "it does not choose its attention by a config of transformers")
    _register()
    before = {number: each._attn_implementation for number, each in configs.items()}
    step = _PackedStep(module, lengths, values)
    token = _STEP.set(step)
    try:
        for each in configs.values():
            each._attn_implementation = _INTERFACE
        yield
    finally:
        _STEP.reset(token)
        for number, each in configs.items():
            each._attn_implementation = before[number]
    if not step.attentions:
        raise _refused(module, "its attention is written out")


@dataclass(slots=True)
class _PackedStep:
    """The requests of the step that runs in this context, and how many attentions it had."""

    module: nn.Module
    lengths: RequestLengths
    values: Values
    attentions: int = 0


_STEP: ContextVar[_PackedStep | None] = ContextVar("_STEP", default=None)


def _register() -> None:
    """Tell transformers of our attention, which makes no mask.  Others do not ask for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_INTERFACE, _attention)
    AttentionMaskInterface.register(_INTERFACE, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    part: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, [1, tokens, heads, width]; no probabilities."""
    step = _STEP.get()
    if step is None:
        raise RequestError(f"attention {_INTERFACE!r} is for rooftrace's phase requests alone")
    name, window = type(part).__name__, sliding_window or 0
    for option, words in _FREE.items():
        if others.get(option) is not None:
            step.values.assume("attention", f"{words}: not counted")
    if others.get("position_bias") is not None or attention_mask is not None:
        raise _refused(step.module, f"{name} adds a mask or a bias to its scores")
    lengths = step.lengths
    rows, tokens = key.shape[-2], query.shape[-2]
    if (query.shape[0], tokens, rows) != (1, lengths.tokens, lengths.keys(window)):
        raise _refused(
            step.module,
            f"{name} has {tokens:,} queries and {rows:,} keys, for {lengths.tokens:,} tokens and "
            f"{lengths.keys(window):,} rows",
        )
    step.attentions += 1
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    return attend(query, key, value, lengths, window, scale).transpose(1, 2).contiguous(), None


def _refused(module: nn.Module, reason: str) -> RequestError:
    return RequestError(
        f"phase requests of {type(module).__name__}: {reason}; it takes a decoder whose attention "
        "goes through the attention interface of transformers.  Requests of one length are "
        "--phase decode or prefill with --batch"
    )
