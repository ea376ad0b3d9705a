"""Answers beside loops over single estimates, and beside sums that are written out here."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.studies.solving.serving import undominated
from rooftrace.studies.solving.workloads import Limits, Mix, RequestKind

WIDTH, LAYERS, HEADS = 128, 3, 4
BATCHES, CACHES = range(1, 65), range(16, 3001)


@cache
def tiny(folder: Path) -> str:
    """The config of a small Llama, as a target."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=32 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.to_json_file(folder / "tiny.json", use_diff=False)
    return str(folder / "tiny.json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def form(target: str) -> rt.types.Form:
    """Its decode steps: most questions are about these, which are traced and priced once."""
    return rt.tools.form(target, phase="decode", over={"batch": BATCHES, "kv": CACHES})


@cache
def step(target: str, batch: int, kv: int) -> rt.types.OpGraph:
    """A decode step, traced once for all tests."""
    return rt.trace(target, phase="decode", batch=batch, kv=kv)


def decode(
    target: str, batch: int, kv: int, chip: str | rt.types.Chip = "h200-sxm"
) -> rt.types.Estimate:
    return rt.estimate(step(target, batch, kv), chip=chip, execution="serving")


def slow(name: str, **facts: float) -> rt.types.Chip:
    """A chip with some facts at these values."""
    chip = rt.load_chip(name)
    changed: Any = {
        key: replace(getattr(chip, key), value=value, text=str(value))
        for key, value in facts.items()
    }
    return replace(chip, **changed)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_largest_batch_is_that_of_a_loop_over_estimates(target: str) -> None:
    steps = {batch: decode(target, batch, 600).t_est for batch in range(18, 24)}
    limit = (steps[20] + steps[21]) / 2
    expected = max(batch for batch, step in steps.items() if step <= limit)
    answer = rt.solve(target, find="batch", tpot=limit, kv=600, over=range(18, 24), chips=1)
    assert answer.best is not None
    assert answer.best.sizes == {"batch": expected, "kv": 600}
    assert answer.best.step == pytest.approx(steps[expected], rel=1e-9)
    assert answer.margins(answer.best)["tpot"] == pytest.approx(1 - steps[expected] / limit)
    assert answer.breaks == ("tpot",)


def test_a_limit_holds_with_a_chance_that_rises_with_it(target: str, form: rt.types.Form) -> None:
    steps = [rt.estimate(step(target, batch, 2048), "a100-sxm-80", "serving") for batch in (8, 9)]
    ends = steps[0].t_est, steps[1].t_est
    chances = []
    for part in (0.001, 0.5, 0.999):  # the answer is a batch of 8 for all of them
        limit = ends[0] + part * (ends[1] - ends[0])
        answer = rt.solve(form, find="batch", tpot=limit, kv=2048, chip="a100-sxm-80")
        assert answer.best is not None and answer.best.sizes["batch"] == 8
        chances.append(answer.chance)
        assert answer.chances == {"tpot": answer.chance}
        assert answer.chance == pytest.approx(steps[0].chance(limit))
        assert answer.to_dict()["chance"] == answer.chance
        shown = " ".join(str(answer).split())
        assert f"holds with a chance of {answer.chance:.0%}" in shown
        stored = "weights bf16, cache bf16"
        assert f"({answer.best.labels['execution']}, {stored}): {answer.chance:.0%}" in shown
        assert "one copy of the model" in shown
    assert chances == sorted(set(chances)) and chances[0] > 0.2 and chances[-1] < 0.8


def test_memory_is_a_limit_as_any_other(target: str, form: rt.types.Form) -> None:
    peaks = {batch: decode(target, batch, 600).memory.peak for batch in (24, 25)}
    chip = slow("h200-sxm", memory_capacity=(peaks[24] + peaks[25]) / 2)
    answer = rt.solve(form, find="batch", kv=600, chip=chip, chips=1)
    assert answer.best is not None
    assert answer.best.sizes["batch"] == 24 and answer.best.memory == peaks[24]
    assert answer.breaks == ("memory",)
    halved = rt.solve(form, find="batch", kv=600, chip=chip, chips=1, kept_free=0.5)
    assert halved.best is not None and halved.best.sizes["batch"] < 24


def test_the_head_names_the_model_as_a_report_does(target: str, form: rt.types.Form) -> None:
    step = rt.report(target, phases=["decode"], kv=600, dtype="fp8", execution="efficient")
    asked = {"find": "batch", "step": "1 ms", "kv": 600, "chips": 1}
    head = next(line for line in str(step).splitlines() if "parameters" in line)
    assert head.endswith("parameters, fp8")
    assert str(rt.solve(form, **asked, dtype="fp8")).startswith(f"{head}, decode\n")
    assert str(rt.solve(form, **asked)).startswith(f"{head.removesuffix('fp8')}bf16, decode\n")
    two = str(rt.solve(form, **asked, dtype=["bf16", "fp8"]))
    assert two.startswith("tiny, decode\n") and "formulas proven for batch 1 to 64, kv 16" in two


@pytest.mark.slow
def test_proven_sizes_are_those_of_each_number_of_chips(target: str) -> None:
    answer = rt.solve(target, step="1ms", chip="h200-sxm", chips=[1, 2], kv=600, over=range(1, 9))
    proven = [text for text in answer.rests if "proven" in text]
    assert any(text.endswith(" on 1 x h200-sxm") for text in proven)
    assert any(text.endswith(" on 2 x h200-sxm") for text in proven)


def test_the_interval_of_steps_gives_one_of_sizes(form: rt.types.Form) -> None:
    batches = range(20, 65, 2)
    intervals = {
        batch: form.estimate("h200-sxm", "serving", batch=batch, kv=600).t_interval
        for batch in batches
    }
    limit = form.estimate("h200-sxm", "serving", batch=30, kv=600).t_est
    answer = rt.solve(form, find="batch", tpot=limit, kv=600, over=batches, chips=1)
    assert answer.span is not None
    low, high = (
        max(
            (batch for batch, step in intervals.items() if step and step[end] <= limit),
            default=None,
        )
        for end in (1, 0)
    )
    told = [None if end is None else end.sizes["batch"] for end in answer.span]
    assert told == [low, high]


def test_nothing_that_holds_is_said_with_what_comes_nearest(
    target: str, form: rt.types.Form
) -> None:
    answer = rt.solve(form, find="batch", tpot=1e-9, kv=600, chips=1)
    assert answer.best is None and answer.second is None
    assert answer.nearest is not None
    steps = {batch: decode(target, batch, 600).t_est for batch in (1, 8, 64)}
    assert answer.nearest.tpot <= min(steps.values()) * (1 + 1e-9)
    assert "no candidate meets the limits" in str(answer) and "nearest" in str(answer)


def test_a_size_that_is_no_batch(target: str, form: rt.types.Form) -> None:
    limit = decode(target, 64, 1500).t_est * (1 + 1e-9)
    answer = rt.solve(form, find="kv", tpot=limit, batch=64, chips=1)
    assert answer.best is not None and answer.best.sizes["batch"] == 64
    longest = answer.best.sizes["kv"]
    assert decode(target, 64, longest).t_est <= limit < decode(target, 64, longest + 1).t_est
    assert not answer.front


# -- deployments -----------------------------------------------------------------------------------


def test_the_cheapest_is_that_of_a_loop_over_chips_precisions_and_batches(target: str) -> None:
    prices = {"h200-sxm": 3.0, "l4": 0.8}
    limit, kv = 2e-3, 500
    expected = {}
    for chip, dtype, batch in itertools.product(prices, ("bf16", "fp8"), (3, 20, 28)):
        graph = step(target, batch, kv)
        result = rt.estimate(graph, chip=chip, execution="serving", dtype=dtype)
        if result.t_est <= limit and result.memory.peak <= rt.load_chip(chip).room():
            expected[chip, dtype, batch] = prices[chip] / 3600 * result.t_est / batch * 1e6
    answer = rt.solve(
        target, find="cheapest", tpot=limit, kv=kv, over=(3, 20, 28), chips=1,
        chip=list(prices), dtype=["bf16", "fp8"], price=prices,
    )  # fmt: skip
    best = min(expected, key=lambda key: expected[key])
    assert answer.best is not None
    found = (answer.best.chip, answer.best.labels["dtype"], answer.best.sizes["batch"])
    assert found == best
    assert answer.best.dollars == pytest.approx(expected[best], rel=1e-9)
    others = [key for key in expected if key[:2] != best[:2]]
    second = min(others, key=lambda key: expected[key])
    assert answer.second is not None
    assert (answer.second.chip, answer.second.labels["dtype"]) == second[:2]
    assert answer.second.dollars == pytest.approx(expected[second], rel=1e-9)


def test_an_answer_at_an_edge_of_what_was_looked_at_says_so(form: rt.types.Form) -> None:
    for find, batch, end in (("latency", 20, "smallest"), ("throughput", 23, "largest")):
        answer = rt.solve(form, find=find, kv=600, over=range(20, 24), chips=1)
        assert answer.best is not None and answer.best.sizes["batch"] == batch
        assert f"batch {batch} is the {end} that was looked at" in " ".join(str(answer).split())


@pytest.mark.slow
def test_a_mix_adds_the_prefills_to_each_token(target: str) -> None:
    mix = Mix.of("200:50@3,800:100@1")
    answer = rt.solve(target, find="throughput", mix=mix, over=(1, 5, 8), chips=1)
    assert answer.best is not None
    batch = answer.best.sizes["batch"]
    step = decode(target, batch, mix.kv).t_est
    prefills = {
        seq: rt.estimate(
            rt.trace(target, phase="prefill", batch=1, seq=seq), chip="h200-sxm",
            execution="serving",
        ).t_est
        for seq in (200, 800)
    }  # fmt: skip
    prefill = (3 * prefills[200] + prefills[800]) / 4
    outputs = (3 * 50 + 100) / 4
    assert answer.best.tpot == pytest.approx(step + (batch - 1) * prefill / outputs, rel=1e-9)
    others = (batch - 1) * prefill / outputs  # on average, of requests that join the same step
    waited = answer.best.tpot + step + others
    assert answer.best.ttft == pytest.approx(waited + prefills[800], rel=1e-9)
    assert answer.best.rate == pytest.approx(batch / (step + batch * prefill / outputs), rel=1e-9)
    apart = rt.solve(target, find="throughput", mix=mix, over=(1, 5, 8), chips=1, apart=True)
    assert apart.best is not None and apart.best.tpot == apart.best.step
    sent = 800 * 2 * 2 * (WIDTH // HEADS) * LAYERS * 2 / 50e9  # bf16 keys and values of 2 heads
    assert apart.best.ttft == pytest.approx(prefills[800] + sent, rel=1e-9)
    own = decode(target, apart.best.sizes["batch"], mix.kv).t_est / apart.best.sizes["batch"]
    assert apart.best.per_chip == pytest.approx(1 / (own + prefill / outputs), rel=1e-9)


def test_prefills_on_another_kind_of_chip_cost_what_their_chips_do(target: str) -> None:
    prices, powers = {"h200-sxm": 5.0, "l40s": 1.0}, {"h200-sxm": 900.0, "l40s": 300.0}
    answer = rt.solve(
        target, find="cheapest", mix="300:40", over=(4, 8), chips=1, chip="h200-sxm",
        apart=True, prefill_chip="l40s", price=prices, power=powers,
    )  # fmt: skip
    best = answer.best
    assert best is not None
    prefill = rt.estimate(
        rt.trace(target, phase="prefill", batch=1, seq=300), chip="l40s", execution="serving"
    ).t_est
    batch = best.sizes["batch"]
    decoding = 40 * decode(target, batch, answer.service.mix.kv).t_est / batch
    assert best.tpot == best.step
    assert best.prefilling == pytest.approx(prefill / (prefill + decoding), rel=1e-6)
    dollars = (5 * decoding + 1 * prefill) / 3600 / 40 * 1e6
    assert best.dollars == pytest.approx(dollars, rel=1e-6)
    assert best.joules == pytest.approx((900 * decoding + 300 * prefill) / 40, rel=1e-6)
    shown = " ".join(str(answer).split())
    assert "l40s of prefill for each h200-sxm of decode" in shown
    assert "price of l40s: 1 dollar/hour (as asked for)" in shown


def test_a_prefill_that_its_chip_cannot_hold_is_no_answer(target: str) -> None:
    asked = {"find": "throughput", "mix": "300:40", "over": (4, 8), "chips": 1, "apart": True}
    small = rt.types.Chip.with_facts(rt.load_chip("l40s"), {"memory_capacity": 2.0**29 + 2.0**20})
    assert rt.solve(target, **asked, prefill_chip="l40s").best is not None
    assert rt.solve(target, **asked, prefill_chip=small).best is None


def test_joules_are_power_over_rate(form: rt.types.Form) -> None:
    answer = rt.solve(form, find="energy", kv=600, chips=1, power=500.0)
    assert answer.best is not None
    assert answer.best.joules == pytest.approx(500 / answer.best.rate)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 60), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    )
)
def test_the_mean_cache_is_that_of_all_steps(kinds: list[tuple[int, int, int]]) -> None:
    lengths = [
        prompt + step
        for prompt, output, share in kinds
        for _ in range(share)
        for step in range(1, output + 1)
    ]
    mix = Mix(tuple(RequestKind(*kind) for kind in kinds))
    assert mix.kv == math.ceil(round(sum(lengths) / len(lengths), 9))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_the_front_holds_what_no_other_is_at_least_equal_to(pairs: list[tuple[int, int]]) -> None:
    points = [(float(a), float(b), number, 0) for number, (a, b) in enumerate(pairs)]
    kept = {point[:2] for point in undominated(points)}
    beaten = {
        (a, b) for a, b in pairs if any(x >= a and y >= b and (x, y) != (a, b) for x, y in pairs)
    }
    assert kept == {(float(a), float(b)) for a, b in pairs if (a, b) not in beaten}


# -- several chips ---------------------------------------------------------------------------------


EXACT: dict[str, float] = {"rel": 1e-12, "abs": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "sizes"), [("decode", {"kv": 500}), ("training", {"seq": 64})])
def test_several_chips_are_the_step_over_a_mesh(
    target: str, phase: str, sizes: dict[str, int]
) -> None:
    chip, system = "h100-sxm", None if phase == "decode" else "dgx-h100"
    joined: dict[str, Any] = {"system": system} if system else {"chip": chip}
    execution = "serving" if phase == "decode" else "efficient"
    answer = rt.solve(
        target, find="throughput", phase=phase, chips=[1, 2], over=(4, 8), **joined, **sizes
    )
    assert sorted(row.chips for row in answer.rows) == [1, 2]
    for row in answer.rows:
        graph = rt.trace(target, phase=phase, mesh={"tp": row.chips}, **row.sizes)
        told = rt.estimate(graph, execution=execution, **joined)
        assert row.step == pytest.approx(told.t_est, **EXACT)
        assert row.sent == pytest.approx(told.times.t_exposed, **EXACT)
        assert row.per_chip == pytest.approx(told.items_per_s_per_chip, **EXACT)
        assert (row.memory, row.limiter) == (told.memory.peak, told.times.regime)
        assert row.estimate.t_est == told.t_est


def test_a_mesh_says_how_many_chips(target: str) -> None:
    answer = rt.solve(
        target, find="throughput", phase="decode", kv=500, over=(4, 8), mesh={"dp": 2}, chip="l4"
    )
    graph = rt.trace(target, phase="decode", kv=500, batch=8, mesh={"dp": 2})
    told = rt.estimate(graph, chip="l4", execution="serving")
    assert answer.best is not None and answer.best.chips == 2
    assert answer.best.rate == pytest.approx(told.items_per_s, **EXACT)
    with pytest.raises(RequestError, match="over meshes; leave one of them out"):
        rt.solve(target, phase="decode", kv=500, mesh={"dp": 2}, chips=2)


def test_what_cannot_be_split_says_why(target: str, form: rt.types.Form) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.empty(4, 64)
    answer = rt.solve(model, x, find="batch", phase="training", over=range(1, 65), chips=[1, 2])
    assert {row.chips for row in answer.rows} == {1}
    (reason,) = answer.left_out
    assert reason.startswith("2 chips: ") and "built already" in reason
    heads = rt.solve(target, find="throughput", kv=500, over=(4,), chips=[1, 8])
    assert {row.chips for row in heads.rows} == {1}
    assert "tp=8: 4 attention heads cannot be spread evenly" in heads.left_out[0]
    with pytest.raises(RequestError, match="2 chips: a saved form is of 1 chip"):
        rt.solve(form, find="batch", kv=500, chips=2)


def test_as_few_chips_as_hold_the_limits(target: str) -> None:
    peaks = [
        rt.estimate(
            rt.trace(target, phase="decode", kv=600, batch=4, mesh=mesh), chip="h200-sxm"
        ).memory.peak
        for mesh in ({}, {"tp": 2})
    ]
    asked: dict[str, Any] = {"find": "throughput", "kv": 600, "over": (4, 5)}
    small = slow("h200-sxm", memory_capacity=(peaks[0] + peaks[1]) / 2)
    answer = rt.solve(target, chip=[small], **asked)
    assert [row.chips for row in answer.rows] == [2] and answer.rows[0].memory >= peaks[1]


def test_more_chips_are_tried_where_they_could_be_better(target: str) -> None:
    asked: dict[str, Any] = {"kv": 600, "over": [4, 64]}
    one = decode(target, 64, 600).t_est
    enough = rt.solve(target, find="throughput", tpot=one * 1.01, **asked)
    assert enough.best is not None and enough.best.sizes["batch"] == 64
    assert enough.evaluated == 2  # one chip holds the larger batch
    short = rt.solve(target, find="throughput", tpot=one * 0.99, **asked)
    assert short.evaluated > enough.evaluated  # two chips might hold it: they are traced too
    largest = rt.solve(target, find="batch", tpot=one * 0.99, **asked)
    assert largest.evaluated == 2


# -- rates, lengths, capacity ----------------------------------------------------------------------


def peaks() -> rt.types.ExecutionModel:
    """Serving by the peaks of the datasheet, which have no fixed times."""
    return replace(rt.tools.execution_model("serving"), knobs=None)


def without_host() -> rt.types.Chip:
    """A chip whose gaps and launches take no time: HBM or computing limits."""
    return slow("h200-sxm", kernel_gap=1e-12, graph_launch=1e-12, dispatch_compiled=1e-12)


def regimes(target: str, chip: rt.types.Chip) -> str:
    graph = step(target, 64, 500)
    result = rt.estimate(graph, chip=chip, execution=peaks())
    return result.times.regime


def test_a_needed_rate_is_where_the_limiter_changes(target: str) -> None:
    quick = without_host()
    answer = rt.solve(target, find="rates", batch=64, kv=500, chip=quick, execution=peaks())
    bandwidth, flops, link = answer.rates
    assert bandwidth.needed is not None and flops.needed is not None

    def at(factor: float, fact: str) -> str:
        if fact == "flops":
            rates = tuple(
                replace(p, rate=replace(p.rate, value=p.rate.value * factor)) for p in quick.peaks
            )
            return regimes(target, replace(quick, peaks=rates))
        changed = replace(quick.memory_bandwidth, value=quick.memory_bandwidth.value * factor)
        return regimes(target, replace(quick, memory_bandwidth=changed))

    assert at(bandwidth.factor * 1.0001, "hbm") == "compute"
    assert at(bandwidth.factor * 0.9999, "hbm") != "compute"
    assert at(flops.factor * 0.9999, "flops") == "compute"
    assert at(flops.factor * 1.0001, "flops") != "compute"
    assert link.needed is None and "nothing" in link.why


def test_attention_passes_the_mlp_where_a_loop_says_so(target: str, form: rt.types.Form) -> None:
    chip = without_host()
    answer = rt.solve(form, find="passing", batch=16, execution=peaks(), chip=chip)
    assert answer.after is not None and answer.before is not None
    assert answer.after.size == answer.before.size + 1

    def shares(kv: int) -> tuple[float, float]:
        graph = step(target, 16, kv)
        by_family = rt.estimate(graph, chip=chip, execution=peaks()).by_family()
        return by_family["attention"].t_device, by_family["dense"].t_device

    attention, mlp = shares(answer.before.size)
    assert attention <= mlp
    attention, mlp = shares(answer.after.size)
    assert attention > mlp


def test_chips_by_capacity(target: str) -> None:
    peak = decode(target, 4, 1000).memory.peak
    chip = slow("h200-sxm", memory_capacity=peak / 2.5)
    answer = rt.solve(target, find="chips", batch=4, kv=1000, chip=chip)
    (row,) = answer.rows
    assert (row.chips, row.memory) == (3, peak)
    assert row.used == pytest.approx(2.5 / 3)
    full = rt.solve(target, find="chips", batch=4, kv=1000, chip=chip, kept_free=0.5)
    assert full.rows[0].chips == 5


def test_a_saved_form_gives_the_same_answer(
    target: str, form: rt.types.Form, tmp_path: Path
) -> None:
    path = form.save(tmp_path / "form.json.gz")
    limit = decode(target, 20, 600).t_est * (1 + 1e-9)
    wanted: dict[str, Any] = {"find": "batch", "tpot": limit, "kv": 600, "chips": 1}
    told = rt.solve(target, over=range(18, 24), **wanted)
    saved = rt.solve(path, over=range(18, 24), **wanted)
    assert told.to_dict()["rows"] == saved.to_dict()["rows"] != []


# -- what is refused -------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"find": "bach"}, "did you mean 'batch'"),
    ({"tpot": "30 parsecs"}, "'30 parsecs': expected a time"),
    ({"tpot": -1.0}, "tpot -1.0: expected a time"),
    ({"ttft": 1.0}, "give them with mix="),
    ({"mix": "2048"}, "'2048': expected PROMPT:OUTPUT"),
    ({"mix": "0:5"}, "at least one token"),
    ({"mix": ""}, "it is empty"),
    ({"mix": "10:5", "kv": 7}, "kv: the mix says"),
    ({"mix": "10:5", "find": "kv"}, "kv cannot be open"),
    ({"apart": True}, "apart: it is for"),
    ({"prefill_chip": "l40s"}, "prefill_chip l40s: it is for prefills that run apart"),
    ({"pue": 0.5}, "pue 0.5: expected a factor of at least 1"),
    ({"find": "rates", "tpot": 1.0}, "find rates takes no limit"),
    ({"chips": 0}, "expected numbers from 1"),
    ({"price": {"h100": 3}}, "no chip of this question"),
    ({"price": -1.0}, "expected a number above 0"),
    ({"find": "cheapest", "chip": "rtx-pro-6000-max-q"}, "no price is known"),
    ({"kept_free": 1.0}, "expected a share"),
    ({"over": {"batch": (1, 2), "kv": (1, 2)}}, "one size is left open"),
    ({"over": "9..1"}, "the range is empty"),
    ({"at": {"kv": 5}}, "it is for a saved form"),
    ({"tpot": 1.0, "phase": "prefill"}, "of decode steps"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=lambda part: str(part)[:40])
def test_a_question_that_contradicts_itself(target: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        rt.solve(target, **asked)
    assert said in str(error.value)


def test_a_form_says_which_sizes_it_wants(form: rt.types.Form) -> None:
    with pytest.raises(RequestError, match="say kv"):
        rt.solve(form, find="batch", tpot=1.0)
    with pytest.raises(RequestError, match="did you mean 'kv'"):
        rt.solve(form, find="batch", tpot=1.0, at={"kvv": 3, "kv": 150})


def test_limits_are_told_in_words() -> None:
    assert str(Limits(tpot=0.03)) == "a time per token of at most 30.0 ms"
    assert not str(Limits())
