"""Lengths of the sequences that are packed in one attention kernel, where its offsets are known."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from torch import Tensor

from rooftrace.tracer.ops import Call
from rooftrace.tracer.tape import records
from rooftrace.tracer.values import Values

PACKED = (
    "aten._flash_attention_forward",
    "aten._flash_attention_backward",
    "aten._flash_attention_forward_no_dropout_inplace",
    "aten._efficient_attention_forward",
    "aten._efficient_attention_backward",
    "torch_attn._varlen_attn",
    "torch_attn._varlen_attn_backward",
    "torch_attn._varlen_attn_out",
    *(
        f"{package}._flash_attn_varlen_{part}"
        for package in ("flash_attn", "flashattn")
        for part in ("forward", "backward")
    ),
)
"""Attention kernels that take offsets of sequences."""
_QUERIES = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
_KEYS = ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")
_USED = ("seqused_k", "seqlen_k")
"""How many of the keys of each sequence are there, as several schemas name it."""


def sequence_facts(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int] | None:
    """Learn how many sequences have how many queries and keys; unknown ones count as equally long,
    by assumption."""
    names = (argument.name for argument in call.func._schema.arguments)
    passed = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    starts, ends, used = (_passed(passed, *names) for names in (_QUERIES, _KEYS, _USED))
    if starts is None:
        return None
    told = [values.exact(item) for item in (starts, ends, used) if item is not None]
    if any(entry is None for entry in told) or (ends is None and used is None):
        text = "attention over packed sequences counts them as equally long"
        return frozenset([values.assume("lengths", text)])
    numbers = [entry.value.tolist() for entry in told if entry is not None]
    queries = _steps(numbers[0])
    keys = numbers[-1] if used is not None else _steps(numbers[1])
    kinds = Counter(zip(queries, keys, strict=True))
    facts["sequences"] = tuple((count, *kind) for kind, count in sorted(kinds.items()))
    return records.NO_TAINT.union(*(entry.taint for entry in told if entry is not None))


def _passed(passed: dict[str, Any], *names: str) -> Tensor | None:
    return next((passed[name] for name in names if isinstance(passed.get(name), Tensor)), None)


def _steps(offsets: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(offsets)]
