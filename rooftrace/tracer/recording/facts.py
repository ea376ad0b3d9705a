"""Counts for cost rules that depend on values: distinct rows read, groups, masks, packed sequences.

FACTS is the table of ops with such counts; each op has a function that computes them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.recording import taperecords
from rooftrace.tracer.recording.by_value import is_mask
from rooftrace.tracer.recording.ops import Call, entering, is_random
from rooftrace.tracer.recording.overrides import Scope
from rooftrace.tracer.values import Values, choices, trees

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")

Fact = Callable[[Values, Call, dict[str, Any]], frozenset[int] | None]
"""Adds the counts of a call to a dict.  Returns the assumptions that they rest on; None if the call
needs no count."""

FACTS: dict[str, Fact] = {}


def facts_of(*names: str) -> Callable[[Fact], Fact]:
    """Register a function that computes the counts of the ops with these names."""
    return entering(FACTS, *names)


def learn_facts(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    """Add rows_touched, groups_touched, mask ... to `facts`; returns the assumptions they rest on.

    Raises IndexError for known indices out of range, as a CPU does.
    """
    _check_range(values, call)
    scope = Scope.current()
    if call.name in _SOFTMAX and scope is not None and scope.apart:
        facts["unfused_attention"] = scope.apart
    if not call.name.startswith("aten.") and is_random(call.func):
        facts["random"] = True
    fact = FACTS.get(call.name)
    taint = None if fact is None else fact(values, call, facts)
    if taint is not None:
        return taint
    sparse = next((t for t in call.tensors if t.layout is not torch.strided), None)
    if sparse is not None and sparse._nnz():  # the result of `to_sparse` on meta has none
        facts["stored"] = trees.pieces_of(sparse)[-1].numel()
    return taperecords.NO_TAINT


# -- rows ----------------------------------------------------------------------------------------


_INDEX = {"aten.embedding": 1, "aten.embedding_dense_backward": 1, "aten._embedding_bag": 1,
          "aten._embedding_bag_forward_only": 1, "aten._embedding_bag_backward": 1,
          "aten._embedding_bag_dense_backward": 1, "aten.index_select": 2, "aten.index_add": 2,
          "aten.index_add_": 2}  # fmt: skip
"""Position of the index argument."""


@facts_of(*_INDEX)
def _looked_up(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    return _rows(values, call.args[_INDEX[call.name]], facts)


@facts_of("aten.index")
def _indexed(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int] | None:
    indices = call.args[1]
    if len(indices) != 1 or not isinstance(indices[0], Tensor):
        return None
    entry = values.known(indices[0])
    if entry is None or entry.value.numel() > 1:
        return _rows(values, indices[0], facts)
    return entry.taint


def _rows(values: Values, index: Tensor, facts: dict[str, Any]) -> frozenset[int]:
    """The number of different rows that an index reads; for draws of ours, among how many.

    own_rows: how many classes have a row each, where all others share one.
    """
    draw = values.uniform.of(index)
    reached = {} if draw is None else values.results.once(draw.becomes, ("classes",), _of_classes)
    if reached:
        facts.update(reached)
        return taperecords.NO_TAINT
    entry = values.known(index)
    if entry is None:
        return taperecords.NO_TAINT
    facts.update(values.results.once(entry.value, ("rows",), _distinct))
    return entry.taint


def _of_classes(becomes: Tensor) -> dict[str, Any]:
    counts = torch.unique(becomes, return_counts=True)[1]
    single, classes = int((counts == 1).sum()), becomes.numel()
    if single == classes:
        return {"uniform_over": classes}
    return {"uniform_over": classes, "own_rows": single} if len(counts) == single + 1 else {}


def _distinct(index: Tensor) -> dict[str, Any]:
    return {"rows_touched": choices.counted(index)}


def _check_range(values: Values, call: Call) -> None:
    name, args = call.name, call.args
    if name == "aten.index":
        indexed = [(i, args[0].shape[n], True) for n, i in enumerate(args[1]) if i is not None]
    elif name == "aten.embedding":
        indexed = [(args[1], args[0].shape[0], False)]
    elif name in ("aten.index_select", "aten.gather"):
        indexed = [(args[2], args[0].shape[args[1]] if args[0].dim() else 1, False)]
    else:
        return
    for index, size, negative in indexed:
        entry = values.known(index)
        if entry is None or entry.taint or not entry.value.numel() or is_mask(entry.value):
            continue
        least, most = values.results.once(entry.value, ("range",), _range)
        if least < (-size if negative else 0) or most >= size:
            wrong = most if most >= size else least
            raise IndexError(f"index out of range in self: {wrong} of {size} rows ({name})")


def _range(index: Tensor) -> tuple[int, int]:
    least, most = index.aminmax()
    return int(least), int(most)


# -- groups --------------------------------------------------------------------------------------


@facts_of("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2")
def _groups(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    """The number of groups with rows, and the rows of all."""
    offsets = next((t for t in call.tensors if t.dtype == torch.int32 and t.dim() == 1), None)
    entry = values.known(offsets) if offsets is not None else None
    if entry is None:
        return taperecords.NO_TAINT
    sizes = torch.diff(entry.value, prepend=entry.value.new_zeros(1))
    facts["groups_touched"] = int((sizes > 0).sum())
    facts["rows_routed"] = int(sizes.sum())
    return entry.taint


# -- attention -----------------------------------------------------------------------------------


@facts_of("rooftrace.flex_attention", "rooftrace.flex_attention_backward")
def _flex(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int]:
    """FlexAttention: the number of visible pairs is one of its arguments."""
    pairs, mask = call.args[-2:]
    facts.update({"mask": mask} if pairs is None else {"mask": mask, "visible_pairs": pairs})
    return taperecords.NO_TAINT


# -- masks of attention ----------------------------------------------------------------------------

_MASK = {"rooftrace.attention": 3, "rooftrace.attention_backward": 4}
"""The position of the mask of attention; query and key are three and two arguments before it."""
_SCORES = frozenset(
    f"aten.{name}" for name in ("add", "add_", "where", "masked_fill", "masked_fill_", "baddbmm")
)
"""Ops that put a mask on scores that are written out."""
_PLANE = 2  # dimensions


def learn_mask_facts(
    values: Values, call: Call, outputs: Sequence[Tensor], facts: dict[str, Any]
) -> frozenset[int]:
    """Add the facts of a mask (see `Values.mask_facts`) to `facts`: of an attention, or of an op
    that puts a known mask on unknown scores.  Returns the assumptions that it rests on.
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
    return taperecords.NO_TAINT


def _learnt(
    values: Values, mask: Tensor, sizes: Sequence[int], scores: bool, facts: dict[str, Any]
) -> frozenset[int]:
    mask_facts, taint = values.mask_facts(mask, sizes[0], sizes[1], scores)
    facts.update(mask_facts or {})
    return taint


# -- packed sequences ------------------------------------------------------------------------------

_PACKED = (
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
"""Names in schemas of the number of keys that are there, of each sequence."""


@facts_of(*_PACKED)
def _packed(values: Values, call: Call, facts: dict[str, Any]) -> frozenset[int] | None:
    """Learn how many sequences have how many queries and keys; unknown ones count as equally long,
    by assumption."""
    passed = call.named
    starts, ends, used = (_passed(passed, *names) for names in (_QUERIES, _KEYS, _USED))
    if starts is None:
        return None
    lengths = [values.exact(item) for item in (starts, ends, used) if item is not None]
    if any(entry is None for entry in lengths) or (ends is None and used is None):
        text = "attention over packed sequences counts them as equally long"
        return frozenset([values.assume("lengths", text)])
    numbers = [entry.value.tolist() for entry in lengths if entry is not None]
    queries = _steps(numbers[0])
    keys = numbers[-1] if used is not None else _steps(numbers[1])
    kinds = Counter(zip(queries, keys, strict=True))
    facts["sequences"] = tuple((count, *kind) for kind, count in sorted(kinds.items()))
    return taperecords.NO_TAINT.union(*(entry.taint for entry in lengths if entry is not None))


def _passed(passed: dict[str, Any], *names: str) -> Tensor | None:
    return next((passed[name] for name in names if isinstance(passed.get(name), Tensor)), None)


def _steps(offsets: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(offsets)]
