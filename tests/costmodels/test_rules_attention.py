"""Attention: against torch's counter, and against a count of visible pairs one by one."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

import rooftrace.tracer.recording.recurrent  # noqa: F401  defines torch.ops.rooftrace
from tests.costmodels.rules_support import cost, meta

pytestmark = pytest.mark.quick

BF16 = torch.bfloat16
MATRIX = ["matmul"]


def qkv(batch, heads, kv_heads, queries, length, e, ev):
    return (
        meta(batch, heads, queries, e, dtype=BF16),
        meta(batch, kv_heads, length, e, dtype=BF16),
        meta(batch, kv_heads, length, ev, dtype=BF16),
    )


def forward(q, k, v, mask=None, causal=False):
    return lambda: torch.ops.rooftrace.attention(q, k, v, mask, 0.0, causal, 1.0)


def backward(q, k, v, mask=None, causal=False):
    out, lse = forward(q, k, v)()
    return lambda: torch.ops.rooftrace.attention_backward(
        torch.empty_like(out), q, k, v, mask, out, lse, 0.0, causal, 1.0
    )


def torch_flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


SHAPES = st.tuples(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(SHAPES, st.booleans())
@settings(max_examples=40, deadline=None)
def test_dense_flops_are_those_of_two_batched_products(shape, causal):
    batch, kv_heads, group, queries, length, e, ev = shape
    q, k, v = qkv(batch, kv_heads * group, kv_heads, queries, length, e, ev)
    scores = meta(batch * kv_heads * group, queries, length)
    expanded = (
        torch.bmm,
        (meta(*scores.shape[:2], e), meta(scores.shape[0], e, length)),
        (scores, meta(scores.shape[0], length, ev)),
    )
    dense = torch_flops(lambda: [expanded[0](*pair) for pair in expanded[1:]])
    found = cost(forward(q, k, v, causal=causal))
    assert found.flops(MATRIX) == dense
    grads = cost(backward(q, k, v, causal=causal))
    assert grads.flops(MATRIX) == 2 * dense


@given(SHAPES)
@settings(max_examples=40, deadline=None)
def test_causal_pairs_are_counted_one_by_one(shape):
    batch, kv_heads, group, queries, length, e, ev = shape
    q, k, v = qkv(batch, kv_heads * group, kv_heads, queries, length, e, ev)
    allowed = torch.ones(
        queries, length, dtype=torch.bool
    ).tril()  # what torch documents is_causal as
    pairs = sum(bool(x) for row in allowed.tolist() for x in row)
    found = cost(forward(q, k, v, causal=True))
    heads = batch * kv_heads * group
    assert found.flops(MATRIX, ["useful"]) == heads * pairs * 2 * (e + ev)
    assert found.flops(MATRIX, ["masked"]) == heads * (queries * length - pairs) * 2 * (e + ev)
    again = cost(backward(q, k, v, causal=True))
    assert again.flops(MATRIX, ["recompute"]) == heads * pairs * 2 * e


def test_the_tracers_count_of_visible_pairs_wins():
    q, k, v = qkv(2, 4, 4, 8, 8, 16, 16)
    mask = meta(2, 1, 8, 8, dtype=torch.bool)
    found = cost(forward(q, k, v, mask), visible_pairs=20)
    assert found.flops(MATRIX, ["useful"]) == 2 * 4 * 20 * 2 * (16 + 16)
    assert found.flops(MATRIX) == 2 * 4 * 64 * 2 * (16 + 16)


def test_a_mask_that_nobody_classified_hides_nothing():
    q, k, v = qkv(2, 4, 4, 8, 8, 16, 16)
    found = cost(forward(q, k, v, meta(2, 1, 8, 8, dtype=torch.bool)))
    assert found.flops(MATRIX, ["masked"]) == 0


def test_a_kernel_that_reads_a_mask_computes_the_pairs_that_it_hides_all_the_same():
    q, k, v = qkv(1, 1, 1, 8, 8, 16, 16)
    mask = meta(8, 8, dtype=torch.bool)
    found = cost(forward(q, k, v, mask), visible_pairs=20, mask="sliding-window")
    window = cost(forward(q, k, v), visible_pairs=20, mask="sliding-window")
    assert found.flops(MATRIX, ["masked_executed"]) == window.flops(MATRIX, ["masked"])
    assert found.flops(MATRIX) == window.flops(MATRIX)
    assert found.flops(["vector"]) - window.flops(["vector"]) == 5 * (64 - 20)


def test_attention_moves_no_scores():
    q, k, v = qkv(2, 8, 2, 128, 256, 64, 32)
    found = cost(forward(q, k, v))
    query, key, value, out = 2 * 8 * 128 * 64, 2 * 2 * 256 * 64, 2 * 2 * 256 * 32, 2 * 8 * 128 * 32
    assert found.bytes() == 2 * (query + key + value + out) + 4 * (
        2 * 8 * 128
    )  # and the log-sum-exp


def test_attention_backward_moves_everything_once():
    q, k, v = qkv(2, 8, 2, 128, 256, 64, 32)
    query, key, value, out = 2 * 8 * 128 * 64, 2 * 2 * 256 * 64, 2 * 2 * 256 * 32, 2 * 8 * 128 * 32
    read = 2 * (query + key + value + out + out) + 4 * (2 * 8 * 128)
    assert cost(backward(q, k, v)).bytes() == read + 2 * (query + key + value)


def test_a_broadcast_mask_is_read_once():
    q, k, v = qkv(2, 8, 8, 16, 16, 4, 4)
    mask = meta(16, 16, dtype=torch.bool)
    plain, masked = cost(forward(q, k, v)), cost(forward(q, k, v, mask.expand(2, 8, 16, 16)))
    assert masked.bytes() - plain.bytes() == 16 * 16


def test_one_query_with_a_window_reads_the_window():
    q, k, v = qkv(1, 8, 2, 1, 4096, 64, 64)
    found = cost(forward(q, k, v), visible_pairs=128)
    assert found.bytes() == 2 * (8 * 64 + 2 * (2 * 128 * 64) + 8 * 64) + 4 * 8


def test_queries_of_a_group_share_a_tile_of_keys():
    q, k, v = qkv(1, 8, 2, 16, 32, 4, 4)
    assert {w.rows for w in cost(forward(q, k, v)).work if w.operation == "matmul"} == {16 * 4}


ATEN = {
    "_scaled_dot_product_flash_attention": lambda q, k, v, causal: (
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    ),
    "_scaled_dot_product_efficient_attention": lambda q, k, v, causal: (
        torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    ),
    "_scaled_dot_product_cudnn_attention": lambda q, k, v, causal: (
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATEN)
def test_aten_forms_count_as_torch_counts(name, causal):
    q, k, v = qkv(2, 4, 4, 128, 256, 64, 64)
    call = lambda: ATEN[name](q, k, v, causal)  # noqa: E731
    found = cost(call, name)
    assert found.flops(MATRIX) == torch_flops(call)
    ours = cost(forward(q, k, v, causal=causal))
    assert found.flops(MATRIX, ["useful"]) == ours.flops(MATRIX, ["useful"])


def test_aten_backward_counts_as_torch_counts_with_its_recompute():
    q, k, v = qkv(2, 4, 4, 128, 256, 64, 64)
    out, lse, *_ = ATEN["_scaled_dot_product_efficient_attention"](q, k, v, False)
    seed = meta(dtype=torch.int64)
    call = lambda: torch.ops.aten._scaled_dot_product_efficient_attention_backward(  # noqa: E731
        torch.empty_like(out),
        q,
        k,
        v,
        None,
        out,
        lse,
        seed,
        seed,
        0.0,
        [True, True, True, False],
        False,
    )
    found = cost(call, "_scaled_dot_product_efficient_attention_backward")
    assert found.flops(MATRIX) + found.flops(MATRIX, ["recompute"]) == torch_flops(call)


def test_packed_sequences_count_as_equally_long():
    q = meta(6 * 32, 4, 16, dtype=BF16)
    offsets = meta(7, dtype=torch.int32)
    call = lambda: torch.ops.aten._flash_attention_forward(  # noqa: E731
        q, q, q, offsets, offsets, 32, 32, 0.0, False, False
    )
    assert cost(call, "_flash_attention_forward").flops(MATRIX) == 6 * 4 * 32 * 32 * 2 * (16 + 16)


def test_softmax_is_vector_work_on_visible_pairs():
    q, k, v = qkv(1, 1, 1, 4, 4, 8, 8)
    found = cost(forward(q, k, v, causal=True))
    assert found.flops(["vector"]) == 5 * (1 + 2 + 3 + 4) + 4 * 8


@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_masks_from_either_corner_are_counted_one_by_one(queries, length):
    q, k = meta(2, queries, 3, 8, dtype=BF16), meta(2, length, 3, 8, dtype=BF16)
    for kind, diagonal in ((1, 0), (2, max(length - queries, 0))):
        visible = int(torch.ones(queries, length, dtype=torch.bool).tril(diagonal).sum())
        call = lambda kind=kind: torch.ops.aten._efficient_attention_forward(  # noqa: E731
            q, k, k, None, None, None, None, None, 0.0, kind, False
        )
        useful = cost(call, "_efficient_attention_forward").flops(MATRIX, ["useful"])
        assert useful == 2 * 3 * visible * 2 * (8 + 8)
