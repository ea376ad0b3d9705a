"""Attention in steps: what a traced op leaves in the table, which rows take blocks, and the fit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import ATTENTION_LIBRARIES, execution_model
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.kernels.attention import (
    IDEAL,
    LIBRARIES,
    attention_engine,
    attention_seconds,
)
from rooftrace.costmodels.kernels.attention_rows import (
    AMPERE,
    COLUMNS,
    CUDNN_HOPPER,
    HOPPER,
    attention_knobs,
    library_on,
    products_of,
)
from rooftrace.costmodels.kernels.knobs import (
    CLASSES,
    AttentionKnobs,
    Knobs,
    KnobsError,
    dump_knobs,
    load_knobs,
)
from rooftrace.costmodels.kernels.seconds import KernelTable, kernel_table
from rooftrace.errors import RequestError
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile import load_chip
from rooftrace.measured.fit.cases import Case, predict, step_case
from rooftrace.measured.fit.fitting import fit
from tests.costmodels.serving_support import LatentLayer

pytestmark = pytest.mark.quick

H100, A100 = load_chip("h100-sxm"), load_chip("a100-sxm-80")
UNKNOWN = replace(H100, sm_count=None)
USUAL = Knobs("usual", overlap=3.0, attention="usual")
USUALLY = CUDNN_HOPPER
"""What "usual" stands for where PyTorch runs on H100."""


def traced(
    queries: tuple[int, ...],
    keys: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    phase: str = "forward",
    masked: bool = False,
    **options: object,
) -> rt.types.OpGraph:
    """One scaled_dot_product_attention over [batch, heads, rows, width]."""

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            size = (queries[-2], (keys or queries)[-2])
            self.first = torch.nn.Linear(queries[-1], queries[-1], dtype=dtype)
            self.bias = torch.nn.Parameter(torch.empty(size, dtype=dtype)) if masked else None

        def forward(self, q, k, v):
            if phase == "training":
                q = self.first(q)
            return F.scaled_dot_product_attention(q, k, v, self.bias, **options)

    with torch.device("meta"):
        q, k = (torch.empty(size, dtype=dtype) for size in (queries, keys or queries))
        return rt.trace(Attend(), q, k, k, phase=phase, optimizer="none")


def columns(graph: rt.types.OpGraph, chip: Chip = H100) -> list[dict[str, float]]:
    """The rows of a graph's table that are attention, without the prefix of their columns."""
    table, _ = kernel_table(plan(graph, "eager"), chip)
    names = [f"attention {name}" for name in COLUMNS]
    rows = np.flatnonzero(table.data["attention kernels"])
    return [{n.partition(" ")[2]: float(table.data[n][row]) for n in names} for row in rows]


# -- what reaches the table ------------------------------------------------------------------------


def test_the_sizes_of_an_attention_are_in_its_row() -> None:
    (found,) = columns(traced((2, 32, 100, 64), (2, 8, 300, 64), enable_gqa=True))
    assert found == {
        "kernels": 1, "batch": 2, "queries": 100, "keys": 300, "visible": 100 * 300,
        "heads": 32, "kv_heads": 8, "width": 64, "value_width": 64, "kv_size": 2, "masked": 0,
        "paged": 0, "backward": 0, "size": 2, "rate": H100.peak("matrix", "bf16"),
        "library": LIBRARIES.index("cudnn"),
        "long": 0, "long_queries": 0, "long_keys": 0, "long_visible": 0,
    }  # fmt: skip


def test_a_causal_mask_leaves_half_and_numbers_hide_nothing() -> None:
    (causal,) = columns(traced((2, 4, 100, 64), is_causal=True))
    assert causal["visible"] == 100 * 101 / 2 and causal["masked"] == 0
    (biased,) = columns(traced((2, 4, 100, 64), masked=True))
    assert biased["visible"] == 100 * 100 and biased["masked"] == 1


def test_other_kernels_have_no_attention_and_fp32_has_no_rate() -> None:
    with torch.device("meta"):
        graph = rt.trace(torch.nn.Linear(8, 8), torch.empty(4, 8))
    assert columns(graph) == []
    (single,) = columns(traced((2, 4, 100, 64), dtype=torch.float32))
    assert single["kernels"] == 1 and single["rate"] == 0


def test_backward_is_told_from_forward() -> None:
    found = columns(traced((2, 4, 100, 64), phase="training"))
    assert [one["backward"] for one in found] == [0, 1]


def test_equal_attentions_of_a_step_are_one_row() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, F.scaled_dot_product_attention(x, x, x))

    with torch.device("meta"):
        graph = rt.trace(Twice(), torch.empty(2, 4, 100, 64, dtype=torch.half))
    assert len(columns(graph)) <= 2 and all(one["kernels"] == 1 for one in columns(graph))


# -- which rows take blocks ------------------------------------------------------------------------


def parts(
    graph: rt.types.OpGraph, knobs: Knobs, chip: Chip = H100
) -> tuple[KernelTable, np.ndarray]:
    table, _ = kernel_table(plan(graph, "eager"), chip)
    return table, table.seconds(knobs, False).device


def without_columns(table: KernelTable) -> KernelTable:
    data = {k: v * (not k.startswith("attention ")) for k, v in table.data.items()}
    return replace(table, data=data)


@pytest.mark.parametrize("chip", [H100, A100], ids=lambda chip: chip.name)
def test_a_row_takes_the_seconds_of_its_blocks(chip: Chip) -> None:
    table, device = parts(traced((4, 16, 500, 128)), USUAL, chip)
    (row,) = np.flatnonzero(table.data["attention kernels"])
    sizes = {name: table.data[f"attention {name}"][[row]] for name in COLUMNS}
    sizes["bytes"] = table.data["bytes"][[row]]
    on, numbers = attention_engine(chip), CUDNN_HOPPER if chip is H100 else AMPERE
    assert on is not None
    assert device[row] == attention_seconds(sizes, on, numbers, overlap=3.0).device[0]
    shares = without_columns(table).seconds(USUAL, False).device
    others = np.arange(len(table)) != row
    assert (device[others] == shares[others]).all() and device[row] > shares[row]


def test_what_is_not_known_keeps_the_share_of_its_class() -> None:
    """An unknown SM count, fp32, and attention that no kernel was called for.

    Backward keeps it, too, in FlashAttention 2 at the rate of the instructions of sm_80.
    """

    class ByHand(torch.nn.Module):
        def forward(self, q, k):
            return (q @ k.mT).softmax(-1) @ k

    with torch.device("meta"):
        q = torch.empty(8, 100, 64, dtype=torch.half)
        by_hand = plan(rt.trace(ByHand(), q, q), "efficient")
    written, _ = kernel_table(by_hand, H100)
    assert "attention" in {CLASSES[kind] for kind in written.kind}
    unknown, _ = kernel_table(plan(traced((2, 4, 100, 64)), "eager"), UNKNOWN)
    single, _ = kernel_table(plan(traced((2, 4, 100, 64), dtype=torch.float32), "eager"), H100)
    for table in (written, unknown, single):
        plain = without_columns(table).seconds(USUAL, False)
        found = table.seconds(USUAL, False)
        for name in ("compute", "memory", "device"):
            assert getattr(found, name) == pytest.approx(getattr(plain, name))
    flash2 = execution_model("eager", attention_library="flash2")
    table, _ = kernel_table(plan(traced((2, 4, 100, 64), phase="training"), flash2), H100)
    device = table.seconds(USUAL, False).device
    back = table.data["attention backward"] > 0
    plain = without_columns(table).seconds(USUAL, False).device
    assert back.any() and (device[back] > plain[back]).all()
    assert (device[back] < plain[back] / 0.61).all()


SHAPES = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 4, 16]), st.sampled_from([1, 49, 197, 1024]),
    st.sampled_from([32, 80, 128]),
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(shape=SHAPES, masked=st.booleans(), chip=st.sampled_from([H100, A100, UNKNOWN]))
def test_no_knobs_are_a_lower_bound_and_terms_stay_in_order(
    shape: tuple[int, ...], masked: bool, chip: Chip
) -> None:
    graph = traced(shape, masked=masked)
    plain = rt.estimate(graph, chip, execution_model("eager", knobs=None)).times
    for knobs in (Knobs("ideal"), USUAL):
        found = rt.estimate(graph, chip, execution_model("eager", knobs=knobs)).times
        assert found.t_bound <= found.t_serial <= found.t_est
        assert found.t_serial >= plain.t_serial * (1 - 1e-9)


@pytest.mark.parametrize("chip", [H100, A100], ids=lambda chip: chip.name)
def test_one_query_on_a_long_cache_takes_its_bytes_over_the_bandwidth(chip: Chip) -> None:
    graph = traced((64, 8, 1, 128), (64, 8, 32768, 128))
    _, device = parts(graph, Knobs("ideal"), chip)
    cache = 2 * 64 * 8 * 32768 * 128 * 2  # key and value, 2 bytes each
    assert device.max() == pytest.approx(cache / chip.memory_bandwidth.value, rel=0.03)


def test_what_the_last_cache_still_holds_is_sooner_there() -> None:
    table, cold = parts(traced((64, 8, 1, 128), (64, 8, 32768, 128)), USUAL)
    held = replace(table, data={**table.data, "warm": table.data["bytes"]})
    warm = held.seconds(replace(USUAL, cache=2.0), False).device
    assert cold.max() / 2 < warm.max() < 0.7 * cold.max()
    assert held.seconds(USUAL, False).device == pytest.approx(cold)


@pytest.mark.parametrize("chip", [H100, A100], ids=lambda chip: chip.name)
def test_a_longer_cache_takes_longer(chip: Chip) -> None:
    keys = (64, 256, 1024, 4096, 16384)
    times = [parts(traced((1, 8, 1, 128), (1, 8, n, 128)), USUAL, chip)[1].max() for n in keys]
    assert times == sorted(times) and times[-1] > 1.5 * times[0]


# -- knobs and fits --------------------------------------------------------------------------------


def decode(truth: Knobs) -> list[Case]:
    found = []
    for batch in (1, 4, 16, 64, 256):
        for keys in (128, 1024, 8192):
            graph = traced((batch, 32, 1, 128), (batch, 8, keys, 128), enable_gqa=True)
            one = step_case(f"{batch}x{keys}", graph, H100, "efficient", 1.0, str(batch))
            found.append(replace(one, seconds=predict([one], truth)[0]))
    return found


def test_decode_steps_tell_the_start_and_the_bandwidth() -> None:
    truth = replace(USUAL, launch=3e-6, attention=replace(USUALLY, start=4e-6, stream=0.6))
    begin = replace(USUAL, launch=3e-6)
    found = fit(decode(truth), begin, ("attention.start", "attention.stream"), check=False)
    at = {p.name: p for p in found.parameters}
    assert at["attention.start"].start == USUALLY.start
    assert at["attention.start"].value == pytest.approx(4e-6, rel=0.1)
    assert at["attention.stream"].value == pytest.approx(0.6, rel=0.05)
    assert isinstance(found.knobs.attention, AttentionKnobs)
    assert found.knobs.attention.combine == USUALLY.combine
    assert found.knobs.attention.stream == at["attention.stream"].value


def test_steps_of_decode_cannot_tell_what_only_fp8_and_pages_take() -> None:
    free = ("attention.stream", "attention.convert", "attention.prepare", "attention.request")
    found = fit(decode(USUAL), USUAL, free, check=False)
    assert set(found.unidentified) == set(free[1:])


def test_single_attentions_are_fitted_before_the_steps() -> None:
    truth = replace(USUAL, launch=3e-6, attention=replace(USUALLY, start=5e-6, stream=0.5))
    alone, begin = decode(truth), replace(USUAL, launch=3e-6)
    found = fit(alone[::3], begin, ("compute", "memory"), check=False, kernels=alone)
    at = {p.name: p.value for p in found.parameters}
    assert at["attention.start"] == pytest.approx(5e-6, rel=0.15)
    assert at["attention.stream"] == pytest.approx(0.5, rel=0.1)
    assert found.errors.mean < 0.02


def test_a_number_that_there_is_not_is_refused() -> None:
    with pytest.raises(RequestError, match=r"attention\.products.* or a class and a number"):
        fit(decode(USUAL), USUAL, ("attention.speed",))


@pytest.mark.parametrize("attention", ["usual", IDEAL, AMPERE, AttentionKnobs(start=2e-6)])
def test_files_keep_the_numbers(tmp_path, attention: AttentionKnobs | str) -> None:
    knobs = Knobs("mine", attention=attention)
    (tmp_path / "k.toml").write_text(dump_knobs(knobs))
    assert load_knobs(tmp_path / "k.toml") == knobs
    assert Knobs.from_dict(knobs.to_dict()) == knobs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('attention = "fast"', "attention='fast': expected a table of numbers, or 'usual'"),
        ("attention = 3", "attention=3: expected a text or a table"),
        (
            "[attention]\nspeed = 1.0",
            "attention: unknown key 'speed': expected one of products, convert",
        ),
        (
            "[attention]\nproducts = 0.0",
            "attention: products=0.0: expected a number of at least 1e-06",
        ),
        ("[attention]\nstart = -1.0", "attention: start=-1.0: expected a number of at least 0"),
        ('[attention]\nstart = "long"', "attention.start='long': expected a number"),
    ],
)
def test_bad_numbers_are_refused(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'schema = "rooftrace.knobs/1"\ntitle = "x"\n{text}\n')
    with pytest.raises(KnobsError) as refused:
        load_knobs(path)
    assert words in str(refused.value)


def test_what_comes_along_goes_by_the_generation() -> None:
    for name in ("typical-eager", "typical-compiled"):
        assert load_knobs(name).attention == "usual"
    a100, h100 = (Knobs.typical(chip, compiled=False) for chip in (A100, H100))
    assert HOPPER.products * h100.compute == pytest.approx(1, rel=0.15)
    assert AMPERE.products * a100.compute == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("chip", ["a100", "h100", "h200", "b200", "l40s", "rtx-4090", "mi300x"])
@pytest.mark.parametrize("name", ATTENTION_LIBRARIES)
def test_a_library_is_one_that_the_chip_can_run(chip: str, name: str) -> None:
    found = library_on(name, load_chip(chip))
    assert found in LIBRARIES
    if chip == "mi300x":
        assert found in ("aotriton", "rocm", name)
        return
    newest = {"h100": "flash3", "h200": "flash3", "b200": "trtllm"}.get(chip)
    if name in ("vllm", "sglang", "flash3", "flashmla") and newest:
        assert found == newest
    if name in ("vllm", "sdpa", "flash3", "cudnn") and not newest:
        assert found == "flash2"
    if name in ("flash2", "flashinfer", "triton", "trtllm"):
        assert found == name


@pytest.mark.parametrize(
    ("name", "chip", "kernel"),
    [
        ("vllm", "h100", "flashmla"), ("trtllm", "h200", "flashmla"),
        ("sglang", "h100", "flash3-mla"), ("sglang", "b200", "trtllm-mla"),
        ("vllm", "a100", "triton"), ("triton", "h100", "triton"),
    ],
)  # fmt: skip
def test_latents_have_kernels_of_their_kind(name: str, chip: str, kernel: str) -> None:
    assert library_on(name, load_chip(chip), latent=True) == kernel


@pytest.mark.parametrize("chip", ["a100", "l40s"])
def test_tensorrt_copies_no_queries_where_flash_attention_2_does(chip: str) -> None:
    theirs, flash2 = (attention_knobs("usual", load_chip(chip), n) for n in ("trtllm", "flash2"))
    assert flash2.prepare > 0 and theirs == replace(flash2, prepare=0.0)


def test_older_kernels_have_older_instructions_on_hopper() -> None:
    """FlashAttention 3 reaches about twice the rate of 2 there (Shah et al., 2024, figure 5: 370
    and 650 TFLOP/s for prompts of 8,192 and heads of 128; cuDNN, of its 9.19: 680 on H200)."""
    graph, took = traced((2, 16, 8192, 128)), {}
    flop = 4 * 2 * 16 * 8192 * 8192 * 128
    for name in ("sdpa", "flash2", "vllm"):
        execution = execution_model("eager", attention_library=name)
        table, _ = kernel_table(plan(graph, execution), H100)
        seconds = table.seconds(replace(USUAL, launch=0.0), False).device
        took[name] = flop / seconds[table.data["attention kernels"] > 0][0]
    assert took["flash2"] == pytest.approx(370e12, rel=0.15)
    assert took["sdpa"] == pytest.approx(680e12, rel=0.25)
    assert took["vllm"] == pytest.approx(650e12, rel=0.15)


def test_only_some_libraries_multiply_in_fp8() -> None:
    for name, size in (("flash3", 1), ("flash2", 2), ("flashinfer", 2), ("triton", 2)):
        found, rate, place = products_of("matrix", "fp8", H100, name)
        assert (found, LIBRARIES[int(place)]) == (size, name)
        assert rate == H100.peak("matrix", "fp8" if size == 1 else "bf16")


class LatentStep(LatentLayer):
    """One query on cached latents, in the sizes of DeepSeek's models."""

    heads, nope, rope, width, rank = 16, 128, 64, 128, 512

    def forward(self, x, latent, turned):
        return super().forward(x, (latent, turned))[0]


@pytest.mark.parametrize(
    ("chip", "library", "kernel"),
    [
        ("h100", "vllm", "flashmla"),
        ("h100", "sglang", "flash3-mla"),
        ("b200", "trtllm", "trtllm-mla"),
    ],
)
def test_a_step_on_latents_takes_the_seconds_of_the_kernel_of_its_library(
    chip: str, library: str, kernel: str
) -> None:
    """What the public way prices is what a table of measured rows is compared with."""
    with torch.device("meta"):
        model = LatentStep(256, by_head=False, own_turns=False).to(torch.bfloat16)
        sizes = (64, 1, 256), (64, 1, 4095, 512), (64, 1, 4095, 64)
        graph = rt.trace(model, *(torch.empty(size, dtype=torch.bfloat16) for size in sizes))
    on, execution = load_chip(chip), execution_model("serving", library=library)
    table, _ = kernel_table(plan(graph, execution), on)
    (row,) = np.flatnonzero(table.data["attention kernels"])
    assert LIBRARIES[int(table.data["attention library"][row])] == kernel
    knobs = execution.knobs_on(on)
    assert knobs is not None
    case = {name: np.array([float(table.data[f"attention {name}"][row])]) for name in COLUMNS}
    assert (case["heads"], case["kv_heads"], case["keys"]) == (16, 1, 4096)
    assert (case["width"], case["value_width"]) == (576, 512)
    case["bytes"] = table.data["bytes"][[row]] - table.data["warm"][[row]] * (1 - 1 / knobs.cache)
    engine = attention_engine(on)
    assert engine is not None
    numbers = attention_knobs("usual", on, kernel)
    alone = attention_seconds(
        case, engine, numbers, knobs.compute, knobs.memory, knobs.overlap
    ).device
    assert table.at_full_clock(knobs, False).device[row] == pytest.approx(alone[0])
    streamed = 64 * 4096 * 576 * 2 / on.memory_bandwidth.value
    assert streamed < alone[0] < 2 * streamed
