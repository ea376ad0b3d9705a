"""Attention over packed sequences whose offsets are known: exact pairs, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.fusion import plan
from rooftrace.costmodels.ops import MATRIX
from rooftrace.graph import load_graphs, save_graphs

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch 2.9 and before
    varlen_attn = None

varlen = pytest.mark.skipif(varlen_attn is None, reason="this torch has no varlen_attn")
LENGTHS = ([4096] + 63 * [64], [1, 7, 300], [128, 64], [5], 40 * [3] + [17, 17, 200])
HEADS, WIDTH = 8, 64


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def counted(graph: rt.types.OpGraph, counts: Sequence[str], part: str = "forward") -> int:
    """FLOP of matrix work in attention."""
    planned = plan(graph, "eager")
    return sum(
        cost.flops(MATRIX, counts)
        for op, cost in zip(planned.graph.ops, planned.op_costs, strict=True)
        if "attn" in op.target or "attention" in op.target
        if op.part == part
    )


def dense(graph: rt.types.OpGraph, part: str = "forward") -> int:
    return counted(graph, ("useful", "masked"), part)


def by_torch(lengths: Sequence[int], heads: int = HEADS, backward: bool = False) -> int:
    """What FlopCounterMode counts for the sequences one after the other."""
    total = 0
    for length in lengths:
        q = torch.empty(1, heads, length, WIDTH, device="meta", requires_grad=backward)
        with FlopCounterMode(display=False) as counter:
            out = F.scaled_dot_product_attention(q, q, q)
            if backward:
                out.sum().backward()
        total += counter.get_total_flops()
    return total


class Jagged(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH, dtype=torch.float16)
        self.causal = causal

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        rows = self.project(rows)
        q = torch.nested.nested_tensor_from_jagged(rows, offsets).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, is_causal=self.causal)
        return out.values().float().sum()


def rows_of(lengths: Sequence[int]) -> Tensor:
    return torch.zeros(sum(lengths), HEADS, WIDTH, dtype=torch.float16)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_jagged_attention_counts_the_pairs_of_each_sequence(lengths: list[int]) -> None:
    graph = rt.trace(Jagged(), rows_of(lengths), offsets_of(lengths))
    assert dense(graph) == by_torch(lengths)
    assert not graph.assumptions


@pytest.mark.parametrize("lengths", LENGTHS[:3], ids=str)
def test_backward_of_jagged_attention_counts_them_too(lengths: list[int]) -> None:
    step = dict(phase="training", optimizer="none")
    graph = rt.trace(Jagged(causal=True), rows_of(lengths), offsets_of(lengths), **step)
    each = sum(n * (n + 1) // 2 for n in lengths) * HEADS
    assert counted(graph, ["useful"]) == each * 2 * (WIDTH + WIDTH)
    assert counted(graph, ["useful"], "backward") == each * 4 * (WIDTH + WIDTH)
    assert counted(graph, ["recompute"], "backward") == each * 2 * WIDTH
    assert not graph.assumptions


def test_the_lengths_are_in_a_saved_graph_and_under_every_execution(tmp_path: Path) -> None:
    graph = rt.trace(Jagged(), rows_of(LENGTHS[0]), offsets_of(LENGTHS[0]))
    (again,) = load_graphs(save_graphs({"": graph}, tmp_path / "graph.json")).values()
    whole = {
        rt.estimate(each, "h100-sxm", execution).flops
        for each in (graph, again)
        for execution in ("eager", "compiled", "efficient", "serving")
    }
    assert len(whole) == 1 and dense(again) == by_torch(LENGTHS[0])


@pytest.mark.parametrize("equal", [True, False])
def test_unknown_offsets_count_as_equally_long_by_name(equal: bool) -> None:
    lengths = [32] * 6 if equal else [64, 128]
    offsets = offsets_of(lengths).to("meta")
    graph = rt.trace(Jagged(), rows_of(lengths).to("meta"), offsets)
    said = [item.text for item in graph.assumptions if item.kind == "lengths"]
    assert said == ["attention over packed sequences counts them as equally long"]
    mean = sum(lengths) // len(lengths)
    assert dense(graph) == by_torch([mean] * len(lengths))


# -- varlen_attn -----------------------------------------------------------------------------------


def band(queries: int, keys: int, window: tuple[int, int]) -> int:
    """Pairs that FlashAttention shows: the last query stands at the last key."""
    left, right = window
    return sum(
        (left < 0 or at - left <= j) and (right < 0 or j <= at + right)
        for at in range(keys - queries, keys)
        for j in range(keys)
    )


CASES: list[tuple[list[int], list[int], tuple[int, int]]] = [
    ([128, 64], [128, 64], (-1, -1)),
    ([128, 64], [128, 64], (-1, 0)),
    ([70, 3, 1], [70, 90, 41], (16, 0)),
    ([9, 20], [30, 20], (-1, 0)),
    ([30, 20], [9, 20], (-1, 0)),
    ([33, 8], [40, 8], (5, 7)),
]


def varlen_graph(
    lengths: Sequence[int], keys: Sequence[int], window: tuple[int, int] = (-1, -1),
    heads: tuple[int, int] = (8, 8), widths: tuple[int, int] = (64, 64), **how: Any,
) -> rt.types.OpGraph:  # fmt: skip
    starts, ends = offsets_of(lengths, torch.int32), offsets_of(keys, torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        grouped = heads[0] != heads[1]
        options = {"window_size": window, **({"enable_gqa": True} if grouped else {})}
        most = max(lengths), max(keys)
        return varlen_attn(q, k, v, starts, ends, *most, **options).float().sum()

    sizes = (sum(lengths), heads[0], widths[0]), (sum(keys), heads[1], widths[0])
    q, k, v = (torch.zeros(size, dtype=torch.float16) for size in (*sizes, sizes[1]))
    v = v.new_zeros(*v.shape[:-1], widths[1])
    if how:
        q.requires_grad_()
    return rt.trace(attend, q, k, v, starts, ends, **how)


@varlen
@pytest.mark.parametrize("case", CASES, ids=str)
def test_varlen_attention_counts_what_its_window_shows(
    case: tuple[list[int], list[int], tuple[int, int]],
) -> None:
    lengths, keys, window = case
    graph = varlen_graph(lengths, keys, window)
    pairs = sum(band(n, m, window) for n, m in zip(lengths, keys, strict=True))
    assert counted(graph, ["useful"]) == 8 * pairs * 2 * (64 + 64)
    whole = sum(n * m for n, m in zip(lengths, keys, strict=True))
    assert dense(graph) == 8 * whole * 2 * (64 + 64)
    assert not rt.estimate(graph, "h100-sxm").unsupported_ops() and not graph.assumptions


@varlen
def test_varlen_attention_of_grouped_heads_and_narrow_values() -> None:
    graph = varlen_graph([128, 64], [128, 64], heads=(8, 2), widths=(64, 32))
    assert dense(graph) == 8 * (128**2 + 64**2) * 2 * (64 + 32)
    (op,) = (op for op in graph.ops if "varlen" in op.target)
    cost = plan(graph, "eager").op_costs[graph.ops.index(op)]
    read = {i: size for i, size in ((a.storage, s) for a, s in cost.traffic.items() if not a.write)}
    q, k, v = (graph.values[i] for i in op.inputs[:3])
    assert read[k.storage] == 192 * 2 * 64 * 2  # keys at their own heads, once
    assert read[v.storage] == 192 * 2 * 32 * 2
    assert read[q.storage] == 192 * 8 * 64 * 2


@varlen
def test_torch_counts_the_same_of_varlen_attention() -> None:
    from torch.utils.flop_counter import flop_registry

    lengths, keys = [70, 3, 1], [70, 90, 41]
    q, k = torch.zeros(74, 8, 64), torch.zeros(201, 8, 64)
    starts, ends = offsets_of(lengths, torch.int32), offsets_of(keys, torch.int32)
    formula: Callable[..., int] = flop_registry[torch.ops.torch_attn._varlen_attn]
    assert dense(varlen_graph(lengths, keys)) == formula(q, k, k, starts, ends, 70, 90)


@varlen
def test_varlen_attention_backward_is_twice_its_forward() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64, dtype=torch.float16)

        def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
            q = self.project(rows)
            causal: Tensor = varlen_attn(q, q, q, offsets, offsets, 128, 128, window_size=(-1, 0))
            return causal.float().sum()

    rows, offsets = torch.zeros(192, 8, 64, dtype=torch.float16), offsets_of([128, 64], torch.int32)
    graph = rt.trace(Attend(), rows, offsets, phase="training", optimizer="none")
    pairs = 8 * (128 * 129 + 64 * 65) // 2
    assert counted(graph, ["useful"], "backward") == pairs * 4 * (64 + 64)
    assert counted(graph, ["recompute"], "backward") == pairs * 2 * 64


@varlen
def test_varlen_attention_of_unknown_offsets_says_so() -> None:
    q = torch.zeros(192, 8, 64, dtype=torch.float16, device="meta")
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    graph = rt.trace(lambda q, at: varlen_attn(q, q, q, at, at, 128, 128), q, offsets)
    assert [item.kind for item in graph.assumptions] == ["lengths"]
    assert dense(graph) == 2 * 8 * 96**2 * 2 * (64 + 64)


# -- the package flash_attn ------------------------------------------------------------------------


def test_ops_of_flash_attn_count_by_their_offsets() -> None:
    """Ops as the package registers them (2.7), with its schema and its shape function."""
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define(
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
        "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "
        "float softmax_scale, bool causal, SymInt window_size_left=-1, "
        "SymInt window_size_right=-1) -> (Tensor, Tensor)"
    )
    library.impl(
        "_flash_attn_varlen_forward",
        lambda q, *rest: (torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])),
        "Meta",
    )
    try:
        q, at = rows_of([128, 64]), offsets_of([128, 64], torch.int32)

        def attend(q: Tensor, at: Tensor) -> Tensor:
            call = torch.ops.flash_attn._flash_attn_varlen_forward
            return call(q, q, q, at, at, 128, 128, 0.0, 0.125, True, 31, 0)[0]

        graph = rt.trace(attend, q, at)
    finally:
        library._destroy()
    pairs = band(128, 128, (31, 0)) + band(64, 64, (31, 0))
    assert counted(graph, ["useful"]) == HEADS * pairs * 2 * (WIDTH + WIDTH)


# -- seconds ---------------------------------------------------------------------------------------


def seconds(lengths: Sequence[int], chip: str = "h100-sxm") -> float:
    """Of the attention kernel alone."""
    graph = rt.trace(Jagged(), rows_of(lengths), offsets_of(lengths))
    rows = rt.estimate(graph, chip, rt.tools.execution_model("efficient", knobs=None)).rows
    return sum(row.timing.t_device for row in rows if "attention" in row.name)


@pytest.mark.parametrize("chip", ["h100-sxm", "a100-sxm-80"])
def test_a_long_sequence_among_short_ones_takes_its_own_time(chip: str) -> None:
    long, short, both = [4096], 63 * [64], [4096] + 63 * [64]
    alone, beside, together = (seconds(each, chip) for each in (long, short, both))
    assert alone < together < alone + beside + 2e-6
    mean = seconds([sum(both) // len(both)] * len(both), chip)
    assert mean < together / 2  # what counting all as equally long would say


# -- packed batches of transformers ----------------------------------------------------------------


@pytest.mark.parametrize("how", ["sdpa", "flex_attention"])
def test_position_ids_that_start_again_hide_the_other_documents(how: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    lengths = [64, 8, 16, 40]
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=50, attn_implementation=how,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    call = dict(input_ids=torch.zeros(1, sum(lengths), dtype=torch.long), use_cache=False)
    graph = rt.trace(model, position_ids=places, phase="forward", **call)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    seen = [op.facts["visible_pairs"] for op in graph.expand().ops if "attention" in op.target]
    assert seen == [pairs] * 2
    assert counted(graph.expand(), ["useful"]) == 2 * 4 * pairs * 2 * (16 + 16)


def test_offsets_that_the_code_works_out_from_real_lengths_are_known() -> None:
    class Packed(Jagged):
        def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
            ends = mask.sum(-1).cumsum(0)
            return super().forward(rows, F.pad(ends, (1, 0)))

    lengths = [30, 4, 11]
    mask = torch.arange(30)[None] < torch.tensor(lengths)[:, None]
    graph = rt.trace(Packed(), rows_of(lengths), mask)
    assert dense(graph) == by_torch(lengths) and not graph.assumptions
