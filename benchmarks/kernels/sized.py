"""Seconds of an attention kernel by its sizes alone: the model of time, without a trace.

The pairs of a mask are counted exactly (`cases.pairs`), so what is off here is off in the model of
blocks, steps and bytes (`rooftrace/costmodels/kernels/attention.py`), not in what was traced.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import documents, pairs

from rooftrace.costmodels.kernels.attention_rows import products_of
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.hardware.chip import Chip
from rooftrace.measured.fit.cases import Case, predict

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))
from rows import columns, table

SIZE = 2
"""Bytes of bf16."""


def sizes_of_attention(sizes: dict[str, Any], tensor: bool) -> AttentionSizes:
    """The record of rooftrace; documents are requests of their mean length.

    tensor: whether the mask is one, which the kernel reads, over all pairs.
    """
    batch, queries, keys, mask = (sizes[name] for name in ("batch", "queries", "keys", "mask"))
    kv_heads = sizes["heads"] if tensor else sizes["kv_heads"]
    visible: float = pairs(mask, queries, keys) if not tensor else queries * keys
    if mask.startswith("documents") and not tensor:
        count = len(documents(mask))
        batch, queries, keys, visible = count, queries / count, keys / count, visible / count
    if queries == 1 and mask.startswith("window"):
        keys = visible
    width = sizes["width"]
    return AttentionSizes(
        batch, queries, keys, visible, sizes["heads"], kv_heads, width, width, SIZE, masked=tensor
    )


def sized(sizes: dict[str, Any], chip: Chip, library: str, tensor: bool, knobs: Knobs) -> float:
    """Milliseconds of a kernel of this library."""
    one = sizes_of_attention(sizes, tensor)
    rows = one.batch * one.queries * one.heads + one.batch * one.keys * one.kv_heads
    moved = 2 * rows * one.width * SIZE + tensor * one.queries * one.keys * SIZE
    row = (1, moved, 0, moved, 0, 0, 0, 1, *[0] * 9)
    made = columns(one, 1, *products_of("matrix", "bf16", chip, library))
    case = Case(name="", table=table(chip, ["attention"], [row], [made]), seconds=1.0)
    return 1e3 * predict([case], replace(knobs))[0]
