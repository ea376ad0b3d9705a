"""Facts of masks: the pairs of queries and keys that an attention computes, or that scores keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rooftrace.tracer.ops import Call
from rooftrace.tracer.tape import records
from rooftrace.tracer.values import Values

_MASK = {"rooftrace.attention": 3, "rooftrace.attention_backward": 4}
"""Where attention has its mask; query and key stand three and two places before it."""
_SCORES = frozenset(
    f"aten.{name}" for name in ("add", "add_", "where", "masked_fill", "masked_fill_", "baddbmm")
)
"""Ops that put a mask on scores that are written out."""
_PLANE = 2  # dimensions


def learn_mask_facts(
    values: Values, call: Call, outputs: Sequence[Tensor], facts: dict[str, Any]
) -> frozenset[int]:
    """Add what a mask says (see `Values.mask_facts`) to `facts`: of an attention, or of an op that
    puts a known mask on unknown scores.  Returns the assumptions that it rests on.
    """
    if call.name in _MASK:
        position = _MASK[call.name]
        query, key, mask = (call.args[position - back] for back in (3, 2, 0))
        if mask is not None:
            return _learnt(values, mask, (query.shape[-2], key.shape[-2]), False, facts)
    elif call.name in _SCORES:
        scores = outputs[0] if outputs else call.args[0]
        if scores.is_floating_point() and scores.dim() >= _PLANE:
            value = values.implicit(scores)
            if value is not None and not value.certain:
                return _learnt(values, scores, scores.shape[-2:], True, facts)
    return records.NO_TAINT


def _learnt(
    values: Values, mask: Tensor, sizes: Sequence[int], scores: bool, facts: dict[str, Any]
) -> frozenset[int]:
    known, taint = values.mask_facts(mask, sizes[0], sizes[1], scores)
    facts.update(known or {})
    return taint
