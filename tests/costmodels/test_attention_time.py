"""Attention by blocks: limits that hold for any kernel, and what packing and splitting must do."""

import heapq
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rooftrace.costmodels.kernels.attention import (
    EFFICIENT,
    EXPONENTIALS,
    FLASH3,
    FLASHINFER,
    FLASHMLA,
    IDEAL,
    LIBRARIES,
    PAGED2,
    SPLIT2,
    TRITON,
    TRTLLM,
    TRTLLM_MLA,
    AttentionEngine,
    AttentionKernel,
    attention_blocks,
    attention_engine,
    attention_seconds,
)
from rooftrace.costmodels.kernels.attention_rows import (
    AMPERE,
    GEFORCE,
    HOPPER,
    attention_knobs,
    library_on,
)
from rooftrace.costmodels.kernels.knobs import AttentionKnobs
from rooftrace.hardware.chipfile import load_chip

pytestmark = pytest.mark.quick

USUAL = {"a100-sxm-80": AMPERE, "h100-sxm": HOPPER}
both = pytest.mark.parametrize("chip", USUAL)


def engine(chip: str) -> AttentionEngine:
    found = attention_engine(load_chip(chip))
    assert found is not None
    return found


def case(on: AttentionEngine | None = None, **changed: Any) -> dict[str, np.ndarray]:
    """One causal prompt, or a step of decode with queries=1, with some sizes changed."""
    sizes = {"batch": 4, "queries": 1024, "keys": 1024, "heads": 32, "kv_heads": 8, "width": 128}
    sizes = {**sizes, "kv_size": 2, "masked": 0, "paged": 1, **changed}
    queries, keys = sizes["queries"], sizes["keys"]
    causal = queries * (keys - queries) + queries * (queries + 1) / 2
    sizes = {"visible": causal, "value_width": sizes["width"], "size": sizes["kv_size"], **sizes}
    rate = 1.0 if on is None else on.rate * (2 if sizes["size"] < 2 else 1)
    moved = 2 * queries * sizes["heads"] * 2 + keys * sizes["kv_heads"] * 2 * sizes["kv_size"]
    sizes = {"rate": rate, "bytes": sizes["batch"] * sizes["width"] * moved, **sizes}
    return {name: np.atleast_1d(np.asarray(value, dtype=float)) for name, value in sizes.items()}


def seconds(chip: str = "h100-sxm", knobs: AttentionKnobs | None = None, **changed: float) -> float:
    on = engine(chip)
    return float(attention_seconds(case(on, **changed), on, knobs or USUAL[chip]).device[0])


SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 300),
        "queries": st.integers(1, 3000),
        "width": st.sampled_from([64, 96, 128, 192, 256]),
        "kv_size": st.sampled_from([1, 2]),
        "kv_heads": st.integers(1, 8),
        "masked": st.sampled_from([0, 1]),
        "paged": st.sampled_from([0, 1]),
    }
)


@both
@given(sizes=SIZES, group=st.integers(1, 16), more=st.sampled_from([0, 1, 500, 20000]))
def test_never_faster_than_its_visible_flop_and_its_bytes(
    chip: str, sizes: dict[str, int], group: int, more: int
) -> None:
    heads, keys = sizes["kv_heads"] * group, sizes["queries"] + more
    sizes = {**sizes, "heads": heads, "keys": keys}
    on = engine(chip)
    given_ = {name: float(value[0]) for name, value in case(on, **sizes).items()}
    rate = given_["rate"]
    pairs = given_["batch"] * heads * given_["visible"]
    flop = 4 * pairs * given_["width"] / rate + pairs / (EXPONENTIALS * on.clocks)
    found = seconds(chip, IDEAL, **sizes)
    assert found >= max(flop, given_["bytes"] / on.memory) * (1 - 1e-9)
    assert np.isfinite(found)


@both
@given(sizes=SIZES, keys=st.integers(1, 5000), step=st.integers(1, 5000))
def test_more_keys_take_no_less(chip: str, sizes: dict[str, int], keys: int, step: int) -> None:
    """With queries kept and the kernels around it free of charge."""
    first = {**sizes, "heads": sizes["kv_heads"] * 4, "keys": sizes["queries"] + keys}
    longer = {**first, "keys": first["keys"] + step}
    assert seconds(chip, IDEAL, **longer) >= seconds(chip, IDEAL, **first) * (1 - 1e-9)


@both
def test_decode_grows_with_the_batch(chip: str) -> None:
    found = [seconds(chip, batch=b, queries=1, keys=2000) for b in (1, 4, 16, 64, 256, 1024)]
    assert found == sorted(found)


@both
def test_a_large_prompt_comes_near_the_peak(chip: str) -> None:
    sizes = {"batch": 16, "queries": 16384, "keys": 16384}
    flop = 4 * 16 * 32 * (16384 * 16385 / 2) * 128 / engine(chip).rate
    on, vector = engine(chip), {"h100-sxm": 0, "a100-sxm-80": 8}[chip]
    pairs = 16 * 32 * (16384 * 16385 / 2)
    scores = pairs * (1 / (EXPONENTIALS * on.clocks) + vector / on.lanes)
    assert seconds(chip, IDEAL, **sizes) == pytest.approx(flop + scores, rel=0.05)


@both
def test_a_large_cache_streams_at_the_bandwidth(chip: str) -> None:
    bytes_ = 256 * 8192 * 8 * 2 * 128 * 2
    found = seconds(chip, IDEAL, batch=256, queries=1, keys=8192)
    assert found == pytest.approx(bytes_ / engine(chip).memory, rel=0.03)


def test_heads_of_a_group_share_a_tile() -> None:
    """Decode costs the same up to a tile of heads; queries pack only in FlashAttention 3."""
    one = {name: case(heads=8 * group, queries=1) for name, group in (("few", 1), ("many", 64))}
    for kernel in (PAGED2, FLASH3):
        few, many = (attention_blocks(sizes, 132, kernel).tiles for sizes in one.values())
        assert few == many == 1
    prompt = case(heads=64, kv_heads=8, queries=16, keys=16)
    assert attention_blocks(prompt, 132, FLASH3).count == 4 * 8
    assert attention_blocks(prompt, 132, PAGED2).count == 4 * 64


@given(batch=st.integers(1, 200), keys=st.integers(1, 100_000))
def test_splits_fill_the_sms_and_cover_the_keys(batch: int, keys: int) -> None:
    blocks = attention_blocks(case(batch=batch, queries=1, keys=keys, kv_heads=1), 132, FLASH3)
    split, longest = float(blocks.split[0]), float(blocks.longest[0])
    assert 1 <= split <= FLASH3.most
    assert split == 1 or split * batch <= 132 + 1e-9
    assert split * longest >= keys
    assert longest < keys / split + 128


def test_with_pages_flash_2_splits_only_what_it_packs() -> None:
    for heads, kv_heads, split in ((8, 8, False), (8, 1, True)):
        sizes = case(batch=1, queries=1, keys=8192, heads=heads, kv_heads=kv_heads)
        assert (attention_blocks(sizes, 108, PAGED2).split[0] > 1) == split
        assert attention_blocks(sizes, 108, SPLIT2).split[0] > 1
        assert attention_blocks(sizes, 108, EFFICIENT).split[0] == 1


def placed(queries: int, heads: int, units: int, kernel: AttentionKernel) -> float:
    """Keys until the last block ends, when the SM that is free first takes the longest block.

    The formula's tail is a bound on it: kernels order blocks for their cache, too.
    """
    rows, keys = kernel.rows, kernel.keys
    ends = [min(queries, (i + 1) * rows) for i in range(-(-queries // rows))]
    walks = sorted((-(-end // keys) * keys for end in ends for _ in range(heads)), reverse=True)
    free = [0] * units
    for walk in walks:
        heapq.heappushpop(free, free[0] + walk)
    return max(free)


@pytest.mark.parametrize("queries", [512, 1024, 4096, 16384])
@pytest.mark.parametrize("blocks", [100, 200, 500, 1000, 10_000])
def test_the_tail_against_blocks_placed_one_by_one(queries: int, blocks: int) -> None:
    heads = blocks * 128 // queries + 1
    sizes = case(batch=heads, heads=1, kv_heads=1, queries=queries, keys=queries)
    assert attention_blocks(sizes, 132, FLASH3).split[0] == 1
    on = AttentionEngine(132, 1e15, 2e11, 1.0, float("inf"), family="hopper", wide=True)
    step = 4 * 128 * 128 * 132 / 1e15 + 128 * 132 / (EXPONENTIALS * 2e11)
    only_keys = {**sizes, "rate": np.array([1e15]), "bytes": np.array([0.0])}
    keys = float(attention_seconds(only_keys, on).device[0]) / step
    exact = placed(queries, heads, 132, FLASH3)
    assert exact * (1 - 1e-9) <= keys <= exact * (1.02 if blocks > 5000 else 1.5)


def test_an_fp8_cache_halves_what_decode_reads() -> None:
    wide, narrow = (
        seconds(knobs=IDEAL, batch=256, queries=1, keys=8192, kv_size=s) for s in (2, 1)
    )
    assert narrow == pytest.approx(wide / 2, rel=0.05)


@both
@pytest.mark.parametrize("name", [field.name for field in fields(AttentionKnobs)])
def test_every_number_moves_some_case(chip: str, name: str) -> None:
    """Towards slower: shares and rates down, seconds up."""
    knobs = USUAL[chip]
    worse = getattr(knobs, name) * 0.5 if name in ("products", "stream") else 1.0
    cases = [{}, {"batch": 4, "queries": 1, "keys": 16384}]
    cases = [{**one, "kv_size": size} for one in cases for size in (1, 2)]
    slower = replace(knobs, **{name: worse})
    ratios = [seconds(chip, slower, **one) / seconds(chip, **one) for one in cases]
    assert min(ratios) >= 1
    assert max(ratios) > 1.01


def test_copies_are_made_for_fp8_and_for_groups() -> None:
    """FlashAttention 2 needs none for one request, one head, or heads without groups."""
    once = {"queries": 1, "keys": 100}
    free = replace(AMPERE, prepare=0.0)
    for changed, copied in (
        ({}, True),
        ({"batch": 1}, False),
        ({"kv_heads": 1}, False),
        ({"kv_heads": 32}, False),
    ):
        taken = [seconds("a100-sxm-80", k, **once, **changed) for k in (AMPERE, free)]
        assert (taken[0] > taken[1]) == copied
    for paged in (0, 1):
        hopper = (replace(HOPPER, prepare=p) for p in (0.0, 1e-6))
        taken = [seconds("h100-sxm", k, kv_size=1, paged=paged) for k in hopper]
        assert taken[1] - taken[0] == pytest.approx(1e-6 * paged, abs=1e-15)


@both
def test_cases_do_not_disturb_each_other(chip: str) -> None:
    on = engine(chip)
    changed = [{}, {"queries": 1, "keys": 5000}, {"batch": 300, "width": 64, "kv_size": 1}]
    changed += [{"masked": 1}, {"paged": 0}, {"paged": 0, "queries": 1, "batch": 1}]
    cases = [case(on, **one) for one in changed]
    together = {name: np.concatenate([one[name] for one in cases]) for name in cases[0]}
    alone = [float(attention_seconds(one, on, HOPPER).device[0]) for one in cases]
    assert attention_seconds(together, on, HOPPER).device == pytest.approx(alone)


@both
@given(sizes=SIZES, faster=st.floats(0.1, 10))
def test_a_chip_that_is_faster_in_all_takes_that_much_less(
    chip: str, sizes: dict[str, int], faster: float
) -> None:
    on, knobs = engine(chip), USUAL[chip]
    one = case(on, **{**sizes, "heads": 4 * sizes["kv_heads"], "keys": sizes["queries"]})
    quick = replace(
        on, rate=faster * on.rate, clocks=faster * on.clocks, lanes=faster * on.lanes,
        memory=faster * on.memory,
    )  # fmt: skip
    times = ("start", "combine", "prepare", "request")
    shorter = replace(knobs, **{name: getattr(knobs, name) / faster for name in times})
    found = attention_seconds({**one, "rate": faster * one["rate"]}, quick, shorter).device
    assert found * faster == pytest.approx(attention_seconds(one, on, knobs).device)


@both
@given(sizes=SIZES)
def test_what_a_chip_sustains_scales_its_share_of_the_time(
    chip: str, sizes: dict[str, int]
) -> None:
    """Half of compute and of memory is twice the time, apart from fixed seconds."""
    on = engine(chip)
    one = case(on, **{**sizes, "heads": sizes["kv_heads"], "keys": sizes["queries"]})
    whole = attention_seconds(one, on, overlap=3.0)
    half = attention_seconds(one, on, compute=0.5, memory=0.5, overlap=3.0)
    for name in ("compute", "memory", "device"):
        assert getattr(half, name) == pytest.approx(2 * getattr(whole, name))
    assert (whole.device >= np.maximum(whole.compute, whole.memory) * (1 - 1e-9)).all()


def seen(queries: int, keys: int, window: int) -> list[int]:
    """Keys that each row sees, counted: those before it and itself, up to a window."""
    return [min(window, keys - queries + i + 1) for i in range(queries)]


@given(queries=st.integers(1, 300), more=st.integers(0, 300), window=st.integers(1, 700))
def test_the_longest_walk_of_a_window_is_found_from_its_pairs(
    queries: int, more: int, window: int
) -> None:
    keys = queries + more
    rows = seen(queries, keys, window)
    sizes = case(queries=queries, keys=keys, visible=sum(rows), heads=1, kv_heads=1, batch=500)
    longest = float(attention_blocks(sizes, 132, FLASH3).longest[0])
    assert longest == -(-min(max(rows) + 127, keys) // 128) * 128


def test_a_window_takes_less_than_all_before_it() -> None:
    whole = seconds(batch=1, queries=16384, keys=16384)
    part = seconds(batch=1, queries=16384, keys=16384, visible=sum(seen(16384, 16384, 1024)))
    assert whole / 8 < part < whole / 5


@both
def test_masks_of_numbers_run_on_a_slower_kernel(chip: str) -> None:
    assert seconds(chip, masked=1) > 1.3 * seconds(chip, masked=0)


def test_the_usual_numbers_are_those_of_the_generation() -> None:
    mine = AttentionKnobs(start=1e-6)
    for name, usual in (("a100-sxm-80", AMPERE), ("h200-sxm", HOPPER), ("rtx-4090", GEFORCE)):
        chip = load_chip(name)
        assert attention_knobs("usual", chip, "vllm") == usual
        assert attention_knobs(mine, chip, "vllm") == mine
        assert attention_knobs("usual", replace(chip, sm_count=None), "vllm") == GEFORCE


def test_chips_without_sms_have_no_engine() -> None:
    assert attention_engine(replace(load_chip("h100-sxm"), sm_count=None)) is None
    for chip, lanes in (("a100-sxm-80", 64), ("h100-sxm", 128), ("rtx-4090", 128)):
        assert engine(chip).lanes / engine(chip).clocks == pytest.approx(lanes, rel=0.01)


def test_blocks_of_unequal_requests_are_those_that_a_loop_over_them_makes() -> None:
    lengths = [4096] + 63 * [64]
    mean = sum(lengths) / len(lengths)
    pairs = {n: n * (n + 1) // 2 for n in lengths}
    sizes = case(
        batch=64, queries=mean, keys=mean, visible=sum(pairs[n] for n in lengths) / 64, kv_heads=32,
        long=1, long_queries=4096, long_keys=4096, long_visible=pairs[4096],
    )  # fmt: skip
    for kernel in (FLASH3, SPLIT2, EFFICIENT):
        together = attention_blocks(sizes, 132, kernel)
        each = [
            attention_blocks(case(batch=1, queries=n, keys=n, kv_heads=32), 1, kernel)
            for n in lengths
        ]
        assert together.count[0] == pytest.approx(sum(one.count[0] for one in each))
        walked = sum(one.count[0] * one.mean[0] for one in each)
        assert together.count[0] * together.mean[0] == pytest.approx(walked)
        assert together.longest[0] == max(one.longest[0] for one in each)


@pytest.mark.parametrize("chip", ["a100-sxm-80", "h200-sxm", "b200-sxm", "l4", "mi300x"])
@pytest.mark.parametrize("library", LIBRARIES)
@given(sizes=SIZES, group=st.integers(1, 16), past=st.sampled_from([0, 40, 490, 6000]))
def test_no_attention_takes_less_for_more(
    chip: str, library: str, sizes: dict[str, int], group: int, past: int
) -> None:
    """Requests, queries, keys before them, and groups of heads: each grows by itself.

    Only where the first query of a paged cache joins its group into one tile, more queries can take
    less: FlashAttention 2 copies queries to do so (`prepare`), and splits keys of such tiles alone,
    as cuDNN does on Hopper.
    So can what passes a rule of a library.
    """
    on, library_on_chip = engine(chip), library_on(library, load_chip(chip))
    knobs = attention_knobs("usual", load_chip(chip), library_on_chip)
    grown = np.arange(1.0, 200.0)
    # A plan gives SMs whole steps of all tiles: of one tile more they may get more equal shares.
    slack = 5e-3 if library_on_chip == "flash3-mla" else 1e-9
    for name in ("batch", "queries", "past", "kv_heads", "width"):
        first = name == "queries" and library_on_chip in ("flash2", "cudnn")
        chain = {**sizes, "past": past, name: grown + first}
        heads, keys = chain["kv_heads"] * group, chain["queries"] + chain.pop("past")
        cases = case(on, **chain, heads=heads, keys=keys)
        cases["library"] = np.array([float(LIBRARIES.index(library_on_chip))])
        cases = {key: np.broadcast_to(value, grown.shape).copy() for key, value in cases.items()}
        device = attention_seconds(cases, on, knobs, overlap=3.0).device
        falls = np.diff(device) < -slack * device[1:]
        assert not (falls & ~passes_a_rule(library_on_chip, cases)).any(), name


def passes_a_rule(library: str, cases: dict[str, np.ndarray]) -> np.ndarray:
    """The steps of a chain at which a library takes other tiles, or cuts keys otherwise."""
    queries, width = cases["queries"], cases["width"]
    rules = [width > most for most in (64, 128, 192)]
    if library == "triton":
        rules += [cases["batch"] * cases["kv_heads"] > 128, queries > 1]
    changes = np.any([np.diff(rule) for rule in rules], axis=0)
    return changes | ((library == "flashinfer") & (queries[1:] > 1))


def test_libraries_cut_keys_where_their_rules_say() -> None:
    def split(kernel: AttentionKernel, **sizes: int) -> float:
        return attention_blocks(case(heads=8, kv_heads=8, **sizes), 142, kernel).split[0]

    # Two blocks for each of 142 SMs: 256 rows of 8 heads are 16 blocks of 128 rows for a request.
    of_8, of_9 = (split(FLASHINFER, batch=n, queries=256, keys=256) for n in (8, 9))
    assert (of_8, of_9) == (2, 1)
    of_16, of_17 = (split(TRITON, batch=n, queries=1, keys=8192) for n in (16, 17))
    assert (of_16, of_17) == (16, 1)
    prompt = case(batch=1, queries=4096, keys=4096, heads=8, kv_heads=8)
    assert split(TRITON, batch=1, queries=4096, keys=4096) == 1
    for width, keys in ((64, 256), (128, 128), (192, 64), (256, 64)):
        assert PAGED2.tile({**prompt, "width": np.array([float(width)])})[1] == keys
    few, more = (
        attention_seconds(
            case(engine("l40s"), batch=1, queries=q, keys=8192, heads=8, kv_heads=8)
            | {"library": np.array([float(LIBRARIES.index("flashinfer"))])},
            engine("l40s"), AttentionKnobs(combine=1e-6, merge=merge * 142e-9),
        ).device[0]
        for q, merge in ((256, 0), (256, 1))
    )  # fmt: skip
    assert more - few == pytest.approx(256 * 8 * 1e-9)


@pytest.mark.parametrize("chip", ["h100-sxm", "h200-sxm", "b200-sxm", "l40s"])
@pytest.mark.parametrize("library", ["vllm", "sglang", "trtllm", "flashinfer"])
@pytest.mark.parametrize("heads", [(64, 8), (8, 1), (16, 2), (32, 32)])
def test_one_more_request_of_decode_costs_its_share(
    chip: str, library: str, heads: tuple[int, int]
) -> None:
    """Plans cut keys so that SMs have equal shares: no wave of blocks is a step of a batch."""
    batch = np.arange(1.0, 301.0)
    on, kernel = engine(chip), library_on(library, load_chip(chip))
    one = case(on, batch=batch, queries=1, keys=4097, heads=heads[0], kv_heads=heads[1])
    sizes = {name: np.broadcast_to(value, batch.shape).copy() for name, value in one.items()}
    sizes["library"] = np.full(300, float(LIBRARIES.index(kernel)))
    knobs = attention_knobs("usual", load_chip(chip), kernel)
    device = attention_seconds(sizes, on, knobs, memory=0.91, overlap=3.0).device
    grows, share = device[1:] / device[:-1], batch[1:] / batch[:-1]
    assert (grows <= share + 0.08).all()
    assert device[200] <= 1.7 * sizes["bytes"][200] / (0.91 * on.memory)


@pytest.mark.parametrize(
    ("heads", "kernel", "tiles"),
    [
        (16, TRTLLM_MLA, 1), (32, TRTLLM_MLA, 2), (128, TRTLLM_MLA, 1),
        (16, FLASHMLA, 1), (128, FLASHMLA, 2),
    ],
)  # fmt: skip
def test_latents_are_read_once_for_each_tile_of_heads(
    heads: int, kernel: AttentionKernel, tiles: int
) -> None:
    sizes = case(queries=1, keys=4096, heads=heads, kv_heads=1, width=576, value_width=512)
    assert attention_blocks(sizes, 132, kernel).tiles == tiles


def test_a_latent_streams_once_though_it_is_key_and_value() -> None:
    on, bytes_ = engine("h200-sxm"), 64 * 32768 * 576 * 2
    sizes = case(
        on, batch=64, queries=1, keys=32768, heads=16, kv_heads=1, width=576, value_width=512,
        bytes=bytes_, library=LIBRARIES.index("flashmla"),
    )  # fmt: skip
    found = float(attention_seconds(sizes, on, IDEAL).device[0])
    assert found == pytest.approx(bytes_ / on.memory, rel=0.05)


def test_a_prompt_of_tensorrt_llm_is_not_split() -> None:
    prompt = case(batch=1, heads=1, kv_heads=1, queries=8192, keys=8192)
    assert attention_blocks(prompt, 132, TRTLLM).split == 1
    assert attention_blocks({**prompt, "queries": np.array([1.0])}, 132, TRTLLM).split > 1
