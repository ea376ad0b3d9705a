"""Attention by blocks: limits that hold for any kernel, and what packing and splitting must do."""

import heapq
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftrace.costmodels.attention_time import (
    AMPERE,
    EXPONENTIALS,
    FLASH2,
    FLASH3,
    HOPPER,
    IDEAL,
    MOST_SPLITS,
    AttentionEngine,
    AttentionKernel,
    AttentionKnobs,
    attention_blocks,
    attention_engine,
    attention_seconds,
)
from rooftrace.hardware.chipfile import load_chip

KERNELS = {"a100-sxm-80": (FLASH2, AMPERE), "h100-sxm": (FLASH3, HOPPER)}
both = pytest.mark.parametrize("chip", KERNELS)


def engine(chip: str) -> AttentionEngine:
    found = attention_engine(load_chip(chip))
    assert found is not None
    return found


def case(**changed: float) -> dict[str, np.ndarray]:
    """One causal prompt, or a step of decode with queries=1, with some sizes changed."""
    sizes = {"batch": 4, "queries": 1024, "keys": 1024, "heads": 32, "kv_heads": 8, "width": 128}
    sizes = {**sizes, "kv_size": 2, "stored": 0, **changed}
    queries, keys = sizes["queries"], sizes["keys"]
    causal = queries * (keys - queries) + queries * (queries + 1) / 2
    sizes = {"visible": causal, "value_width": sizes["width"], **sizes}
    return {name: np.array([float(value)]) for name, value in sizes.items()}


def seconds(chip: str = "h100-sxm", knobs: AttentionKnobs | None = None, **changed: float) -> float:
    kernel, typical = KERNELS[chip]
    found = attention_seconds(case(**changed), engine(chip), kernel, knobs or typical)
    return float(found[0])


SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 300),
        "queries": st.integers(1, 3000),
        "width": st.sampled_from([64, 96, 128, 192, 256]),
        "kv_size": st.sampled_from([1, 2]),
        "kv_heads": st.integers(1, 8),
        "stored": st.sampled_from([0, 1]),
    }
)


@both
@given(sizes=SIZES, group=st.integers(1, 16), more=st.sampled_from([0, 1, 500, 20000]))
def test_never_faster_than_its_visible_flop_and_its_bytes(
    chip: str, sizes: dict[str, int], group: int, more: int
) -> None:
    heads, keys = sizes["kv_heads"] * group, sizes["queries"] + more
    sizes = {**sizes, "heads": heads, "keys": keys}
    given_ = {name: float(value[0]) for name, value in case(**sizes).items()}
    on = engine(chip)
    rate = on.narrow_rate if given_["kv_size"] < 2 else on.rate
    pairs = given_["batch"] * heads * given_["visible"]
    flop = 4 * pairs * given_["width"] / rate + pairs / (EXPONENTIALS * on.clocks)
    cache = given_["batch"] * keys * given_["kv_heads"] * 2 * given_["width"] * given_["kv_size"]
    outside = given_["batch"] * given_["queries"] * heads * 2 * given_["width"] * 2
    found = seconds(chip, IDEAL, **sizes)
    assert found >= max(flop, (cache + outside) / on.memory) * (1 - 1e-9)
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
    exponentials = 16 * 32 * (16384 * 16385 / 2) / (EXPONENTIALS * engine(chip).clocks)
    assert seconds(chip, IDEAL, **sizes) == pytest.approx(flop + exponentials, rel=0.05)


@both
def test_a_large_cache_streams_at_the_bandwidth(chip: str) -> None:
    bytes_ = 256 * 8192 * 8 * 2 * 128 * 2
    found = seconds(chip, IDEAL, batch=256, queries=1, keys=8192)
    assert found == pytest.approx(bytes_ / engine(chip).memory, rel=0.03)


def test_heads_of_a_group_share_a_tile() -> None:
    """Decode costs the same up to a tile of heads; queries pack only in FlashAttention 3."""
    one = {name: case(heads=8 * group, queries=1) for name, group in (("few", 1), ("many", 64))}
    for kernel in (FLASH2, FLASH3):
        few, many = (attention_blocks(sizes, 132, kernel).tiles for sizes in one.values())
        assert few == many == 1
    prompt = case(heads=64, kv_heads=8, queries=16, keys=16)
    assert attention_blocks(prompt, 132, FLASH3).count == 4 * 8
    assert attention_blocks(prompt, 132, FLASH2).count == 4 * 64


@given(batch=st.integers(1, 200), keys=st.integers(1, 100_000))
def test_splits_fill_the_sms_and_cover_the_keys(batch: int, keys: int) -> None:
    blocks = attention_blocks(case(batch=batch, queries=1, keys=keys, kv_heads=1), 132, FLASH3)
    split, longest = float(blocks.split[0]), float(blocks.longest[0])
    assert 1 <= split <= MOST_SPLITS
    assert split == 1 or split * batch <= 132
    assert split * longest >= keys
    assert longest < keys / split + 128


def test_flash_2_splits_only_what_it_packs() -> None:
    for heads, kv_heads, split in ((8, 8, False), (8, 1, True)):
        sizes = case(batch=1, queries=1, keys=8192, heads=heads, kv_heads=kv_heads)
        assert (attention_blocks(sizes, 108, FLASH2).split[0] > 1) == split


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
    on = AttentionEngine(132, 1e15, 1e15, float("inf"), float("inf"))
    keys = float(attention_seconds(sizes, on, FLASH3)[0]) / (4 * 128 * 128 * 132 / 1e15)
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
    knobs = KERNELS[chip][1]
    worse = getattr(knobs, name) * 0.5 if name in ("compute", "memory", "store") else 1.0
    cases = [{"stored": 1024}, {"batch": 4, "queries": 1, "keys": 16384, "stored": 1}]
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
    taken = [seconds("h100-sxm", replace(HOPPER, prepare=p), kv_size=1) for p in (0.0, 1e-6)]
    assert taken[1] - taken[0] == pytest.approx(1e-6)


def test_cases_do_not_disturb_each_other() -> None:
    cases = [case(), case(queries=1, keys=5000), case(batch=300, width=64, kv_size=1, stored=7)]
    together = {name: np.concatenate([one[name] for one in cases]) for name in cases[0]}
    on = engine("h100-sxm")
    alone = [float(attention_seconds(one, on, FLASH3, HOPPER)[0]) for one in cases]
    assert attention_seconds(together, on, FLASH3, HOPPER) == pytest.approx(alone)


def test_chips_without_sms_have_no_engine() -> None:
    assert attention_engine(replace(load_chip("h100-sxm"), sm_count=None)) is None
    assert engine("a100-sxm-80").narrow_rate == engine("a100-sxm-80").rate
    assert engine("h100-sxm").narrow_rate == pytest.approx(2 * engine("h100-sxm").rate, rel=1e-3)
