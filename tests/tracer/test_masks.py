"""Masks as facts: counted against real tensors, by hand at sizes that no tensor can have."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given as drawn, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.graph import Op, OpGraph
from rooftrace.tracer.values import masks
from rooftrace.tracer.values.implicit import Implicit
from rooftrace.tracer.values.intervals import NoPatternError, shown_pairs

SIZES = (512, 1_000, 2_047, 2_048, 2_049, 4_096, 5_000, 8_192, 16_384, 32_768, 65_537, 131_072)
WINDOW, CHUNK, PREFIX = 1_024, 1_500, 700


def _mask(rows: int, columns: int, visible: Callable[[int, int], bool]) -> Tensor:
    return torch.tensor([[visible(r, c) for c in range(columns)] for r in range(rows)])


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (_mask(4, 4, lambda r, c: True), "none"),
        (_mask(4, 4, lambda r, c: c <= r), "causal"),
        (_mask(2, 5, lambda r, c: c <= r + 3), "causal"),
        (_mask(6, 6, lambda r, c: 2 <= c <= r), "causal"),  # two padded on the left
        (_mask(6, 6, lambda r, c: c <= min(r, 3)), "causal"),  # and two on the right
        (_mask(6, 6, lambda r, c: r - 2 < c <= r), "sliding-window"),
        (_mask(6, 6, lambda r, c: r - 2 < c <= r and c >= 1), "sliding-window"),
        (_mask(8, 8, lambda r, c: abs(r - c) <= 2), "band"),
        (_mask(8, 8, lambda r, c: c <= r and r // 3 == c // 3), "chunked"),
        (_mask(8, 8, lambda r, c: c <= r and (r >= 2) == (c >= 2)), "packed"),
        (_mask(8, 8, lambda r, c: (r >= 3) == (c >= 3)), "packed"),
        (_mask(8, 8, lambda r, c: c <= max(r, 3)), "prefix"),
        (_mask(4, 4, lambda r, c: c < 3), "padding"),
        (_mask(4, 4, lambda r, c: c != 2), "full"),
        (_mask(4, 4, lambda r, c: (r + c) % 2 == 0), "full"),
    ],
)
def test_masks_have_patterns(mask: Tensor, kind: str) -> None:
    facts = masks.facts_of(Implicit.of(mask), *mask.shape)
    assert facts == {
        "visible_pairs": int(mask.sum()),
        "mask": kind,
        "window": int(mask.sum(1).max()),
        "visible_keys": int(mask.any(0).sum()),
    }


# -- any elementwise op on ranges, against torch -------------------------------------------------

_NUMBERS = st.integers(1, 9)


@st.composite
def _plans(draw: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A random truth about a query, a key and a few values of the batch."""
    number = draw(_NUMBERS)
    numbers: Any = draw(
        st.sampled_from([
            lambda q, k, d: q - k, lambda q, k, d: (q - k).abs(), lambda q, k, d: q // number,
            lambda q, k, d: k % number, lambda q, k, d: (q - k) % number, lambda q, k, d: d * k,
            lambda q, k, d: torch.where(k > number, q, k), lambda q, k, d: -k * 0.5,
            lambda q, k, d: (k / number).floor(), lambda q, k, d: torch.maximum(q, k - number),
            lambda q, k, d: k.clamp(2, 7), lambda q, k, d: q * (k > number), lambda q, k, d: q & 3,
        ])
    )  # fmt: skip
    limit, sign = draw(st.integers(-6, 12)), draw(st.integers(0, 5))
    if draw(st.booleans()):
        inner, other = draw(_plans()), draw(st.integers(0, 3))
        join: Any = (torch.logical_and, torch.logical_or, torch.logical_xor, torch.ne)[other]
        return lambda q, k, d: join(inner(q, k, d), numbers(q, k, d) <= limit)
    compare: Any = (torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne)[sign]
    return lambda q, k, d: compare(numbers(q, k, d), limit)


def attended(mask: Callable[..., Any], *args: Tensor, rows: int, columns: int, **also: Any) -> Op:
    """The attention of a module that makes its mask, traced on meta tensors."""

    class Attending(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *inputs: Tensor) -> Tensor:
            made = mask(*inputs)
            return F.scaled_dot_product_attention(x, y, y, attn_mask=made)

    sizes = [(also.get("batch", 1), also.get("heads", 1), n, 8) for n in (rows, columns)]
    empty = [torch.empty(size, device="meta") for size in sizes]
    graph = rt.trace(Attending(), *empty, *args)
    return next(op for op in graph.ops if op.name == "rooftrace.attention")


@settings(max_examples=30, deadline=None)
@drawn(plan=_plans(), rows=st.integers(1, 24), columns=st.integers(2, 24), batch=st.integers(1, 3))
def test_a_mask_counts_as_torch_counts_it(
    plan: Callable[..., Tensor], rows: int, columns: int, batch: int
) -> None:
    def mask(d: Tensor) -> Tensor:
        q = torch.arange(rows, device=d.device).view(1, 1, rows, 1)
        k = torch.arange(columns, device=d.device).view(1, 1, 1, columns)
        return plan(q, k, d.view(-1, 1, 1, 1)).expand(batch, 1, rows, columns)

    data = torch.arange(batch) - 1
    real = mask(data)
    held = masks.facts_of(_implied(mask, data), rows, columns)
    assert held is not None
    assert held["visible_pairs"] == round(int(real.sum()) / batch)
    assert held["window"] == int(real.sum(-1).max())


def _implied(mask: Callable[..., Tensor], data: Tensor) -> Implicit:
    """What the tracer holds of a mask where nothing of more than an element is written out."""
    from rooftrace.tracer.recording import Recorder
    from rooftrace.tracer.values import masks

    seen: list[Implicit] = []
    before = masks.MAX_INTEGERS, masks.MAX_FLOATS
    masks.MAX_INTEGERS = masks.MAX_FLOATS = 24
    try:
        recorder = Recorder()
        with recorder:
            meta = torch.empty_like(data, device="meta")
            recorder.values.learn(meta, data)
            value = recorder.values.implicit(mask(meta))
            assert value is not None
            seen.append(value)
        recorder.close()
    finally:
        masks.MAX_INTEGERS, masks.MAX_FLOATS = before
    return seen[0]


# -- sizes -----------------------------------------------------------------------------------------


def causal(n: int) -> int:
    return n * (n + 1) // 2


def within(n: int, width: int) -> int:
    w = min(n, width)
    return causal(w) + (n - w) * w


def in_chunks(n: int, chunk: int) -> int:
    return n // chunk * causal(chunk) + causal(n % chunk)


def ranges(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n, device="meta")[:, None], torch.arange(n, device="meta")


def tril(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device="meta").tril()


def biased(n: int) -> Tensor:
    return torch.full((n, n), float("-inf"), device="meta").triu(1)


def filled(n: int) -> Tensor:
    q, k = ranges(n)
    return torch.zeros(n, n, device="meta").masked_fill(k > q, torch.finfo(torch.float32).min)


def bert(n: int) -> Tensor:
    q, k = ranges(n)
    return (1.0 - ((k <= q) & (k > q - WINDOW)).float()) * -10_000.0


def alibi(n: int) -> Tensor:
    q, k = ranges(n)
    slopes = torch.tensor([2.0**-1, 2.0**-8], device="meta").view(2, 1, 1)
    return slopes * (k - q) + biased(n)


def chunked(n: int) -> Tensor:
    q, k = ranges(n)
    return torch.logical_and(k <= q, torch.eq(k // CHUNK, q // CHUNK))[None, None]


def prefix(n: int) -> Tensor:
    q, k = ranges(n)
    return (k <= q) | (k < PREFIX)


def padded(n: int) -> Tensor:
    mask = torch.full((1, 1, n, n), -1e9, device="meta").triu(1)
    mask[..., :PREFIX] = -1e9
    return mask


def sliced(n: int) -> Tensor:
    mask = torch.zeros(n, n, dtype=torch.bool, device="meta")
    mask[n // 2 :, : n // 2] = True
    mask[: n // 4].fill_(True)
    return mask


def documents(n: int) -> Tensor:
    q, k = ranges(n)
    lengths = torch.tensor([n // 2, n // 4, n - n // 2 - n // 4], device="meta")
    places = torch.repeat_interleave(torch.arange(3, device="meta"), lengths)
    return (places[:, None] == places) & (k <= q)


PATTERNS: dict[str, tuple[Callable[[int], Tensor], Callable[[int], int], str]] = {
    "tril": (tril, causal, "causal"),
    "triu of infinities": (biased, causal, "causal"),
    "masked_fill": (filled, causal, "causal"),
    "(1 - mask) * -10000": (bert, lambda n: within(n, WINDOW), "sliding-window"),
    "alibi": (alibi, causal, "causal"),
    "chunks": (chunked, lambda n: in_chunks(n, CHUNK), "chunked"),
    "prefix": (prefix, lambda n: causal(n) + causal(min(n, PREFIX) - 1), "prefix"),
    "padding in place": (padded, lambda n: causal(max(n - PREFIX, 0)), "causal"),
    "boxes": (sliced, lambda n: (n - n // 2) * (n // 2) + n // 4 * n, "full"),
    "documents": (documents, lambda n: sum(map(causal, (n // 2, n // 4, n - n // 2 - n // 4))),
                  "packed"),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_a_mask_is_exact_at_any_size(name: str) -> None:
    made, pairs, kind = PATTERNS[name]
    for size in SIZES:
        op = attended(partial(made, size), rows=size, columns=size, heads=2)
        assert op.facts["visible_pairs"] == pairs(size), size
        small = {"none", "padding", "causal"} if size <= CHUNK else set()
        assert op.facts["mask"] in {kind} | small, size


def test_real_masks_are_read_at_any_size() -> None:
    size = 2_500  # over four million elements
    real = torch.ones(size, size, dtype=torch.bool).tril() & (torch.arange(size) % 7 > 0)
    op = attended(lambda mask: mask, real, rows=size, columns=size)
    assert op.facts["visible_pairs"] == int(real.sum())
    added = torch.zeros(size, size).masked_fill(~real, float("-inf"))
    op = attended(lambda mask: mask, added, rows=size, columns=size)
    assert op.facts["visible_pairs"] == int(real.sum())


def test_padding_of_a_batch_is_a_mean() -> None:
    size, lengths = 3_000, torch.tensor([3_000, 1_000, 500])

    def mask(lengths: Tensor) -> Tensor:
        q, k = ranges(size)
        return ((k < lengths[:, None])[:, None, None] & (k <= q)).expand(3, 1, size, size)

    op = attended(mask, lengths, rows=size, columns=size, batch=3)
    right = sum(causal(n) + (size - n) * n for n in lengths.tolist())
    assert op.facts["visible_pairs"] == round(right / 3)
    assert op.facts["mask"] == "causal"


def test_a_truth_is_reduced_at_any_size() -> None:
    size = 5_000
    seen: list[int] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shown = tril(size)[None]
            rows = shown.sum(-1)
            seen.extend([int(shown.sum()), int(rows[0, 17]), bool(shown.any()), bool(shown.all())])
            return x[: int((rows > 2_500).sum())]

    graph = rt.trace(Asking(), torch.empty(size, 4))
    assert seen == [causal(size), 18, True, False]
    assert graph.values[graph.outputs[0]].shape == (2_500, 4)
    assert not graph.assumptions


@pytest.mark.parametrize("batch", [2, 1 << 14])
@pytest.mark.parametrize("length", [1, 300])
def test_documents_are_counted_at_any_batch(batch: int, length: int) -> None:
    """As transformers tells packed sequences: a position that does not follow begins another."""
    x = torch.empty(batch, 300, device="meta")

    def documents(x: Tensor) -> Tensor:
        position = (torch.arange(300, device=x.device) % length).expand(x.shape)
        begins = position.diff(prepend=position[:, :1] - 1) != 1
        return x if bool((begins.cumsum(-1)[:, -1] == 0).all()) else x * 2

    graph = rt.trace(documents, x)
    assert not graph.assumptions
    assert ("aten.mul.Tensor" in {op.target for op in graph.ops}) == (length < 300)


def test_unknown_parts_are_named_and_known_parts_kept() -> None:
    size = 3_000

    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k = ranges(size)
            keep = (x.sum(-1)[:, :, None] > 0) & (k <= q)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    graph = rt.trace(Half(), torch.empty(1, 1, size, 8, device="meta"))
    op = next(op for op in graph.ops if op.name == "rooftrace.attention")
    assert op.facts["visible_pairs"] == causal(size)
    assert [a.kind for a in graph.assumptions] == ["mask"]
    assert "taken as visible" in graph.assumptions[0].text
    notes = rt.estimate(graph, "h100-sxm", "serving").notes
    assert not any(note.startswith("mask-numbers") for note in notes)  # it is still read


def test_scores_that_are_written_out_know_what_masks_them() -> None:
    size = 2_100

    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bias = torch.full((size, size), -1e9, device=x.device).triu(1)
            first = (x @ x.mT + bias).softmax(-1) @ x
            q, k = ranges(size)
            scores = x @ x.mT
            scores.masked_fill_(k < q - 9, float("-inf"))
            second = torch.where(k <= q, scores, float("-inf")).softmax(-1)
            return second @ first

    graph = rt.trace(Written(), torch.empty(2, size, 8, device="meta"))
    facts = [op.facts for op in graph.ops if "visible_pairs" in op.facts]
    both = within(size, 10)
    assert [f["visible_pairs"] for f in facts] == [causal(size), both + causal(size) - size, both]
    assert not graph.assumptions


def test_layers_with_other_masks_are_not_repeated() -> None:
    size = 4_096

    class Layer(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            q, k = ranges(size)
            kinds = (k <= q)[None, None], ((k <= q) & (k > q - WINDOW))[None, None]
            for number, layer in enumerate(self.layers):
                x = layer(x, kinds[number % 3 > 0])
            return x

    graph = rt.trace(Stack(), torch.empty(1, 1, size, 8, device="meta"))
    assert _pairs(graph) == [causal(size), *[within(size, WINDOW)] * 2] * 2


def _pairs(graph: OpGraph) -> list[int]:
    return [
        op.facts["visible_pairs"]
        for op in graph.ops
        if op.name == "rooftrace.attention"
        for _ in range(graph.times(op))
    ]


def test_a_mask_without_pattern_is_named() -> None:
    noise = torch.rand(24, 1) > 0.5
    value = Implicit.applied("logical_xor", Implicit.of(noise), Implicit.of(noise.T),
                             dtype=torch.bool)  # fmt: skip
    assert shown_pairs(value, 24, 24).pairs == int((noise ^ noise.T).sum())
    size = 1 << 15
    wide = torch.rand(size, 1) > 0.5
    value = Implicit.applied("logical_xor", Implicit.of(wide), Implicit.of(wide.T),
                             dtype=torch.bool)  # fmt: skip
    with pytest.raises(NoPatternError):
        shown_pairs(value, size, size)


@pytest.mark.parametrize(("batch", "heads"), [*itertools.product((1, 3), (1, 2))])
def test_planes_count_once_each(batch: int, heads: int) -> None:
    slopes = torch.tensor([3.0, 5.0][:heads]).view(1, heads, 1, 1)
    lengths = torch.tensor([9, 4, 6][:batch]).view(batch, 1, 1, 1)
    q, k = torch.arange(9).view(9, 1), torch.arange(9)
    real = ((q - k) <= slopes) & (k < lengths)
    value = Implicit.applied(
        "logical_and",
        Implicit.applied("le", Implicit.of(q - k), Implicit.of(slopes), dtype=torch.bool),
        Implicit.applied("lt", Implicit.of(k), Implicit.of(lengths), dtype=torch.bool),
        dtype=torch.bool,
    )
    assert shown_pairs(value, 9, 9).pairs == round(int(real.sum()) / (batch * heads))


def test_a_buffer_that_is_overwritten_is_known_from_then_on() -> None:
    size = 3_000

    def mask() -> Tensor:
        made = torch.empty(size, size, device="meta")
        made.fill_(float("-inf"))
        return made.triu_(1)

    assert attended(mask, rows=size, columns=size).facts["visible_pairs"] == causal(size)

    def half() -> Tensor:
        made = torch.empty(size, size, dtype=torch.bool, device="meta")
        made[: size // 2] = True
        return made

    assert "visible_pairs" not in attended(half, rows=size, columns=size).facts


def test_masks_that_modules_keep_are_known() -> None:
    size, kept = 2_100, 2_500

    class Kept(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            ones = torch.ones(kept, kept, dtype=dtype)
            self.register_buffer("bias", ones.tril().view(1, 1, kept, kept))

        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.mT
            hidden = self.bias[:, :, :size, :size] == 0
            return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x

    for dtype in (torch.bool, torch.float32):
        graph = rt.trace(Kept(dtype), torch.empty(1, 2, size, 8))
        assert _masked(graph) == [causal(size)]
        assert not graph.assumptions


def _masked(graph: OpGraph) -> list[int]:
    return [op.facts["visible_pairs"] for op in graph.ops if "visible_pairs" in op.facts]


def test_masks_of_torch_s_own_layers_are_known() -> None:
    size, lengths = 2_100, (2_100, 700)
    padded = torch.stack([torch.arange(size) >= n for n in lengths])

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2)
            self.outer = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(size, device=x.device)
            x = self.inner(x, mask=mask, src_key_padding_mask=hidden)
            return self.outer(x, x, x, attn_mask=mask)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that masks of two types are slow
        graph = rt.trace(Encoder(), torch.empty(2, size, 16), padded)
    both = causal(size) + causal(lengths[1]) + (size - lengths[1]) * lengths[1]
    assert _masked(graph) == [both // 2, both // 2, causal(size)]


def test_an_unknown_mask_of_other_numbers_is_no_mask_of_attention() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keep = x.sigmoid() > x.mean(-1, keepdim=True)
            return x.masked_fill(~keep, float("-inf")).topk(2)[0]

    graph = rt.trace(Router(), torch.empty(64, 256, device="meta"))
    assert "mask" not in {a.kind for a in graph.assumptions}
    assert not _masked(graph)


def test_large_numbers_of_data_hide_nothing() -> None:
    class Residual(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + F.relu(y)

    x = torch.randn(2, 8, 16) * 1e8
    graph = rt.trace(Residual(), x, torch.empty(2, 8, 16, device="meta"))
    assert not _masked(graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [float("-inf"), -1e4, -1e9, -32768.0, None])
def test_numbers_that_code_fills_in_hide(dtype: torch.dtype, number: float | None) -> None:
    fill = torch.finfo(dtype).min if number is None else max(number, torch.finfo(dtype).min)
    if number == float("-inf"):
        fill = number
    mask = torch.zeros(4, 4, dtype=dtype).masked_fill(torch.ones(4, 4).triu(1) > 0, fill)
    facts = masks.facts_of(Implicit.of(mask), 4, 4)
    assert facts is not None and facts["visible_pairs"] == causal(4)


def test_an_estimate_says_which_share_rests_on_an_unknown_mask() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    keep = torch.empty(1, 1, 2_100, 2_100, dtype=torch.bool, device="meta")
    graph = rt.trace(Masked(), torch.empty(1, 4, 2_100, 64, device="meta"), keep)
    (note,) = (note for note in rt.estimate(graph, "h100-sxm").notes if "rests on" in note)
    assert note.endswith(f" % of the step rests on: {masks.UNSURE}")
    assert float(note.split(" %")[0]) > 80  # all but the launch
