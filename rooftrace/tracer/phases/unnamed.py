"""A cache in a plain tuple, which has no name: recognised by passing it back with the next token.

Only a trial can tell a cache from hidden states: each tensor of a cache comes back one longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.tensors import tensors_in, trees
from rooftrace.tracer.twins import replaced

_LIKELY = re.compile(r"past|cache|kv|mem")
"""What the names of arguments that take a cache have; no other is tried where one has it."""
_SHOWN = 200  # letters of an output in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Where a cache without a name is."""

    index: int  # of the item in the tuple that forward returns
    argument: str  # of forward, that takes it in the next call


def find_place(
    output: Any, arguments: Sequence[str], call: Callable[[Mapping[str, Any]], Any]
) -> tuple[CachePlace | None, str]:
    """The place of a cache in an output, or None and what was tried.

    arguments: names of those that default to None and were not passed.  call: runs the next token
    with one more argument.  It gets copies, as it may write into them.
    """
    if type(output) not in (tuple, list):
        return None, ""
    likely = [name for name in arguments if _LIKELY.search(name)]
    tried = ""
    for index, item in enumerate(output):
        tensors = tensors_in(item)
        if index == 0 or not tensors or any(tensor.dim() < 3 for tensor in tensors):
            continue
        if not likely and len(arguments) != 1:
            return None, f"; which of {', '.join(arguments)} takes it, no name says"
        for name in likely or arguments:
            try:
                again = call({name: replaced(item, torch.empty_like)})
            except Exception as error:  # whatever a user's module raises for what is no cache
                first_line = str(error).partition("\n")[0]
                result = f"raises {type(error).__name__}: {first_line:.{_SHOWN}}"
            else:
                if _comes_back_longer(index, output, again):
                    return CachePlace(index=index, argument=name), ""
                result = f"returns {shown(again)}"
            tried = tried or f"; item {index} passed back as {name} {result}"
    return None, tried


def _comes_back_longer(index: int, before: Sequence[Any], after: Any) -> bool:
    """Whether each tensor of an item is one longer along one dimension."""
    if type(after) is not type(before) or len(after) != len(before):
        return False
    old, new = tensors_in(before[index]), tensors_in(after[index])
    return len(old) == len(new) and all(
        a.dim() == b.dim()
        and [n - m for m, n in zip(a.shape, b.shape, strict=True) if n != m] == [1]
        for a, b in zip(old, new, strict=True)
    )


def shown(output: Any) -> str:
    """An output in a message: "(float32[2, 16, 100], (float32[2, 4, 16, 8], ...))"."""
    text = _shown(output)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _shown(item: Any) -> str:
    if isinstance(item, Tensor):
        return trees.label_of(item)
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shown(value)}' for key, value in item.items())}}}"
    if type(item) in (tuple, list):
        inside = ", ".join(map(_shown, item))
        return f"({inside})" if type(item) is tuple else f"[{inside}]"
    return "None" if item is None else type(item).__name__
