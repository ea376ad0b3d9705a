"""How many tokens a static cache holds, where transformers counts them on the device.

Transformers 4 counts the slots that are not zero, which no trace knows.  The calls that fill a
cache say it too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from rooftrace.tracer.patches import original_of, replaced

_LENGTH = "_rooftrace_length"
"""Attribute of a layer of a cache: the tokens that recorded calls have put into it."""


@contextlib.contextmanager
def static_caches_counted() -> Iterator[None]:
    """Inside, a layer of a static cache knows its length from the calls that filled it."""
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "StaticLayer", None)
    if kind is None or "cumulative_length" in kind.__init__.__code__.co_names:
        yield
        return
    update, length = original_of(kind, "update"), original_of(kind, "get_seq_length")

    def counted(layer: Any, key_states: Any, *args: Any, **kwargs: Any) -> Any:
        before = vars(layer).get(_LENGTH) if layer.is_initialized else 0
        filled = update(layer, key_states, *args, **kwargs)
        if before is not None:  # else the user has filled it
            setattr(layer, _LENGTH, before + key_states.shape[-2])
        return filled

    def told(layer: Any) -> Any:
        known = vars(layer).get(_LENGTH)
        return length(layer) if known is None else known

    with replaced(kind, {"update": counted, "get_seq_length": told}):
        yield
