"""Caches with a window: a step writes new rows over the oldest, a prompt keeps the last rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftrace.costmodels.ops.price import price_ops
from tests.costmodels.serving_support import TOKENS, changed, differences, filled, traced

B, S, H, E, WINDOW, FIRST = 2, 12, 2, 8, 4, 1
FP64 = 8  # bytes


class Windowed(nn.Module):
    """One attention over the last WINDOW positions.

    how: the cache holds all rows but the oldest when a token comes ("all but the oldest", as
    transformers), or drops the oldest then ("shifted"); or it keeps the first rows for good, too,
    as StreamingLLM (arXiv 2309.17453).
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(TOKENS, H * E)

    def forward(self, ids: Tensor, memory: Any = None) -> dict[str, Any]:
        rows = self.table(ids).unflatten(-1, (H, E)).transpose(1, 2)
        if memory is None:
            memory = [rows[:, :, :0], rows[:, :, :0]]
        keys, values = (self._grown(cache, rows) for cache in memory)
        causal = rows.shape[2] > 1
        out = F.scaled_dot_product_attention(rows, keys, values, is_causal=causal)
        return {"logits": out, "memory": [self._kept(keys), self._kept(values)]}

    def _grown(self, cache: Tensor, rows: Tensor) -> Tensor:
        if self.how == "all but the oldest" or not cache.shape[2]:
            return torch.cat((cache, rows), 2)
        if self.how == "shifted":
            return torch.cat((cache[:, :, 1:], rows), 2)
        return torch.cat((cache[:, :, :FIRST], cache[:, :, FIRST + 1 :], rows), 2)

    def _kept(self, rows: Tensor) -> Tensor:
        least = WINDOW - (self.how == "all but the oldest")
        return rows[:, :, -least:] if rows.shape[2] > WINDOW or least < WINDOW else rows


@pytest.mark.parametrize("how", ["all but the oldest", "shifted", "first rows too"])
def test_a_step_writes_the_new_rows_only(how: str) -> None:
    model = filled(Windowed(how), torch.float64)
    graph = traced(model, "decode", B, WINDOW - (how == "all but the oldest"))
    result, notes = changed(graph, "static-cache")
    assert notes[0].startswith("static-cache: 2 cache appends")
    appended = [op for op in result.ops if op.name == "rooftrace.cache_append"]
    row = B * H * E * FP64
    assert [price_ops(result)[0][op.id].bytes() for op in appended] == [2 * row, 2 * row]
    assert differences(graph, result, model) == 0


def test_a_prompt_keeps_the_last_rows() -> None:
    model = filled(Windowed("all but the oldest"), torch.float64)
    graph = traced(model, "prefill", B, S)
    result, notes = changed(graph, "static-cache")
    assert notes[0].startswith("static-cache: 2 cache appends")
    row, kept = B * H * E * FP64, WINDOW - 1
    kept_by = [
        [g.values[g.values[v].storage].nbytes for v in g.outputs[1:]] for g in (graph, result)
    ]
    assert kept_by == [[S * row] * 2, [kept * row] * 2]
    costs = price_ops(result)[0]
    ends = [op for op in result.ops if op.outputs[0] in result.outputs[1:]]
    assert [costs[op.id].bytes() for op in ends] == [2 * kept * row] * 2  # read and written
    assert differences(graph, result, model) == 0


def test_a_cache_that_leaves_whole_too_is_left() -> None:
    class Both(Windowed):
        def _kept(self, rows: Tensor) -> Any:
            return [rows, rows[:, :, -2:]]

    model = filled(Both("all but the oldest"), torch.float64)
    graph = traced(model, "prefill", B, S)
    assert changed(graph, "static-cache")[0] is graph
