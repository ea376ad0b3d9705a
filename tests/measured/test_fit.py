"""Fits to times made with known knobs: what they can tell is found, the rest is named."""

import math
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.kernels import numbers
from rooftrace.costmodels.kernels.engines import group_class, op_class
from rooftrace.costmodels.kernels.intervals import Residuals
from rooftrace.costmodels.kernels.knobs import CLASSES, NATIVE, Knobs, Share
from rooftrace.costmodels.kernels.seconds import kernel_table
from rooftrace.costmodels.kernels.tiles import p_norm
from rooftrace.errors import RequestError
from rooftrace.hardware.chipfile import load_chip
from rooftrace.measured.bench.runfile import OpTime
from rooftrace.measured.fit.calibrating import usual_start
from rooftrace.measured.fit.cases import (
    Case,
    Stack,
    alone_case,
    by_seconds,
    errors,
    kernel_cases,
    predict,
    profiled_cases,
    step_case,
)
from rooftrace.measured.fit.fitting import Space, deviations_of, fit, most_of
from rooftrace.measured.fit.planning import (
    beaten,
    bounds_of,
    check_bound,
    choose,
    is_better,
    next_step,
    slopes_of,
)

CHIP = load_chip("rtx-4090")
START = Knobs("start", overlap=3.0, launch=3e-6, shares={"layer norm": Share(memory=0.8)})
TRUTH = replace(START, compute=0.8, memory=0.6)


class Mlp(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(self.norm(x)))
        return x


@cache
def step(width: int, rows: int, depth: int = 2) -> rt.types.OpGraph:
    with torch.device("meta"):
        return rt.trace(Mlp(width, depth).half(), torch.empty(rows, width, dtype=torch.half))


@cache
def untimed(width: int, rows: int, execution: str) -> Case:
    return step_case(f"{width}x{rows}", step(width, rows), CHIP, execution, 1.0, str(rows))


def cases(truth: Knobs, noise: float = 0.0, sizes=None, execution="eager") -> list[Case]:
    draw = random.Random(0)
    found = []
    for width in (256, 1024, 4096):
        for rows in sizes or (512, 4096, 16384, 65536):
            one = untimed(width, rows, execution)
            (seconds,) = predict([one], truth)
            found.append(replace(one, seconds=seconds * math.exp(draw.gauss(0, noise))))
    return found


def declared() -> list[tuple[str, numbers.KnobFacts]]:
    """Every number of the records of knobs with what is said of it, by the name that fits use."""
    records = (("", Knobs), ("tiling.", numbers.Tiling), ("attention.", numbers.AttentionKnobs))
    return [
        (f"{before}{item.name}", facts)
        for before, record in records
        for item, facts in numbers.knobs_of(record)
    ] + [(f"mm.{item.name}", facts) for item, facts in numbers.knobs_of(Share)]


@pytest.mark.parametrize(("name", "facts"), declared())
def test_a_fit_frees_a_knob_as_its_declaration_says(name: str, facts: numbers.KnobFacts) -> None:
    if facts.prior is None:
        with pytest.raises(RequestError, match="free knob"):
            Space(START, [name], CHIP)
        return
    space = Space(START, [name], CHIP)
    assert space.priors == [facts.prior]
    path = f"shares.{name}" if name.startswith("mm.") else name
    for move in (-0.1, 0.0, 0.1):
        number = numbers.numbers_of(space.knobs([move]))[path]
        moved = space.starts[0] * math.exp(move)
        assert number == pytest.approx(min(max(moved, facts.least), facts.fitted))


# -- the formula -----------------------------------------------------------------------------------


def test_without_knobs_to_turn_a_table_has_the_times_of_an_estimate() -> None:
    graph = step(1024, 4096)
    ideal = execution_model("eager", knobs=Knobs("ideal"))
    plain = rt.estimate(graph, CHIP, execution_model("eager", knobs=None))
    same = rt.estimate(graph, CHIP, ideal)
    assert same.times.t_serial == pytest.approx(plain.times.t_serial, rel=1e-3)
    assert same.t_est == pytest.approx(plain.t_est, rel=1e-3)


def test_a_prediction_is_the_estimate_by_the_same_knobs() -> None:
    graph = step(4096, 16384)
    one = step_case("x", graph, CHIP, "eager", 1.0)
    (seconds,) = predict([one], TRUTH)
    estimate = rt.estimate(graph, CHIP, execution_model("eager", knobs=TRUTH))
    assert seconds == pytest.approx(estimate.times.t_serial, rel=1e-9)
    assert estimate.times.t_bound <= estimate.times.t_serial <= estimate.t_est


def test_slower_knobs_take_longer_and_shares_touch_their_class_only() -> None:
    table, _ = kernel_table(plan(step(1024, 4096), "eager"), CHIP)
    before = table.seconds(START, False).device
    norms = replace(START, shares={"layer norm": Share(memory=0.4)})
    after = table.seconds(norms, False).device
    kinds = [CLASSES[k] for k in table.kind]
    for kind, a, b in zip(kinds, before, after, strict=True):
        assert b > a if kind == "layer norm" else b == a
    assert (table.seconds(TRUTH, False).device > before).all()


def test_norms_of_order_one_add_and_of_infinite_order_take_the_larger() -> None:
    import numpy as np

    a, b = np.array([3.0, 1.0]), np.array([4.0, 1.0])
    assert p_norm(1, a, b) == pytest.approx([7, 2])
    assert p_norm(2, a, b) == pytest.approx([5, math.sqrt(2)])
    assert p_norm(math.inf, a, b) == pytest.approx([4, 1])


def test_classes_go_by_the_heaviest_op_of_a_kernel() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(
                nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, groups=16),
                nn.Conv2d(16, 16, 7, groups=16), nn.Conv2d(16, 16, 3, groups=4),
            )  # fmt: skip
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x):
            return torch.relu(self.norm(self.convs(x))).mean((2, 3)).softmax(-1)

    with torch.device("meta"):
        graph = rt.trace(Net(), torch.empty(2, 8, 32, 32))
    kernels = [op for op in graph.ops if op.kind == "kernel"]
    assert [op_class(op, graph) for op in kernels] == [
        "conv", "conv 1x1", NATIVE, NATIVE, "grouped conv",
        "batch norm", "elementwise", "reduction", "softmax",
    ]  # fmt: skip
    assert group_class(graph, [op.id for op in kernels[-4:]]) == "batch norm"


def test_the_backward_of_convolutions_is_of_a_class_of_its_own() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 16, 3),
            nn.Conv2d(16, 16, 1),
        )  # fmt: skip
        graph = rt.trace(model, torch.empty(2, 16, 32, 32), phase="training", optimizer="none")
    backward = [op for op in graph.ops if op.name == "aten.convolution_backward"]
    assert [op_class(op, graph) for op in backward] == [
        "conv 1x1 backward",
        "conv backward",
        "grouped conv backward",
        NATIVE,
    ]


# -- the fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_what_the_chip_sustains_is_found_within_its_error(noise: float) -> None:
    found = fit(cases(TRUTH, noise), START)
    at = {p.name: p for p in found.parameters}
    for name in ("compute", "memory"):
        truth = getattr(TRUTH, name)
        assert at[name].identified
        assert abs(math.log(at[name].value / truth)) < 3 * at[name].error + 0.02
    assert found.errors.mean < 0.01 + noise and found.left_out is not None
    assert found.left_out.mean < 0.02 + 2 * noise
    assert found.knobs.compute == at["compute"].value


def test_what_the_measurements_cannot_tell_is_named_and_left_alone() -> None:
    small = cases(TRUTH, sizes=(1, 2, 4, 8, 16), execution="efficient")
    # A few rows: nothing here is bound by compute.
    found = fit(small, START, free=("compute", "memory", "pooling.memory"))
    assert set(found.unidentified) == {"compute", "pooling.memory"}
    assert found.knobs.compute == START.compute and "pooling" not in found.knobs.shares
    assert found.knobs.memory == pytest.approx(TRUTH.memory, rel=0.1)


def test_one_bad_measurement_does_not_move_the_fit() -> None:
    good = cases(TRUTH)
    spoilt = [*good[:-1], replace(good[-1], seconds=20 * good[-1].seconds)]
    found = fit(spoilt, START, check=False)
    assert found.knobs.memory == pytest.approx(TRUTH.memory, rel=0.06)
    assert found.errors.worst_case == good[-1].name and found.errors.worst < -0.9


def test_the_share_of_a_class_and_the_launch_are_found_too() -> None:
    truth = replace(START, launch=9e-6, shares={"layer norm": Share(memory=0.55)})
    found = fit(cases(truth), START, free=("launch", "layer norm.memory"))
    assert found.knobs.share("layer norm").memory == pytest.approx(0.55, rel=0.1)
    assert found.knobs.launch == pytest.approx(9e-6, rel=0.1)


def test_knobs_that_stand_for_each_other_are_reported_as_correlated() -> None:
    found = fit(cases(TRUTH, sizes=(65536,) * 4), START, free=("memory", "elementwise.memory",
                                                              "layer norm.memory"))  # fmt: skip
    pairs = {frozenset(pair) for pair in found.correlations}
    assert frozenset(("memory", "elementwise.memory")) in pairs or found.unidentified


def test_spreads_come_from_what_was_left_out() -> None:
    quiet, noisy = (fit(cases(TRUTH, noise), START).knobs.spread for noise in (0.0, 0.1))
    assert quiet < 0.02 < noisy < 0.3


def test_a_prediction_has_an_interval_by_the_spread_of_its_classes() -> None:
    graph = step(4096, 16384)
    spreads = {"mm": Share(spread=0.1), "layer norm": Share(spread=0.4)}
    estimate = rt.estimate(
        graph, CHIP, execution_model("eager", knobs=replace(START, shares=spreads))
    )
    low, high = estimate.t_interval
    assert low < estimate.t_est < high
    assert math.exp(1.645 * 0.1) < high / estimate.t_est < math.exp(1.645 * 0.4)
    assert low == pytest.approx(max(estimate.t_bound, estimate.t_est**2 / high))
    assert rt.estimate(graph, CHIP, execution_model("eager", knobs=None)).t_interval is None


def test_the_host_can_be_the_limit() -> None:
    truth = replace(START, dispatch=40e-6)
    found = fit(cases(truth, sizes=(1, 8, 64, 512)), START, free=("dispatch",), check=False)
    assert found.knobs.dispatch == pytest.approx(40e-6, rel=0.05)


def test_compiled_code_and_graphs_have_their_own_dispatch() -> None:
    tiny = step(256, 1)
    slow = replace(START, dispatch=1.0)
    for execution, launches in (("compiled", CHIP.dispatch_compiled), ("efficient", None)):
        one = step_case("x", tiny, CHIP, execution, 1.0)
        (seconds,) = predict([one], slow)
        estimate = rt.estimate(tiny, CHIP, execution_model(execution, knobs=slow))
        assert seconds <= estimate.t_est < 1e-3
        if launches is not None:
            assert seconds >= one.dispatches * launches.value


def test_errors_on_paper() -> None:
    found = errors(["a", "b", "c"], [1.1, 0.5, 1.0], [1.0, 1.0, 1.0])
    assert found.bias == pytest.approx(-0.4 / 3) and found.mean == pytest.approx(0.2)
    assert found.median == pytest.approx(0.1) and (found.worst, found.worst_case) == (-0.5, "b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: (found[:1], {}), "1 measurements for 2 knobs"),
        (lambda found: (found, {"free": ["speed"]}), "free knob 'speed': expected one of compute"),
        (lambda found: (found, {"free": ["mm.speed", "memory"]}), "free knob 'mm.speed'"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change, words: str) -> None:
    given, options = change(cases(TRUTH, sizes=(512,)))
    with pytest.raises(RequestError, match=words):
        fit(given, START, **options)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), None])
def test_a_time_that_is_none_is_refused(seconds) -> None:
    with pytest.raises(RequestError, match="expected a time above 0"):
        step_case("x", step(256, 8), CHIP, "eager", seconds)


def test_several_chips_are_not_mixed() -> None:
    other = step_case("y", step(256, 8), load_chip("l4"), "eager", 1.0)
    with pytest.raises(RequestError, match="several chips"):
        fit([*cases(TRUTH, sizes=(512,)), other], START)


# -- few measurements, and which numbers to free ---------------------------------------------------


def test_one_measurement_moves_the_pace_a_part_of_its_way_and_many_all_of_it() -> None:
    many = cases(replace(START, pace=0.7))
    one = fit(many[:1], START, ("pace",), check=False).knobs.pace
    all_of_them = fit(many, START, ("pace",), check=False).knobs.pace
    # By the priors, 0.2 around the start and 0.1 around the truth: 0.8 of the way.
    assert math.log(one) == pytest.approx(0.8 * math.log(0.7), rel=0.1)
    assert all_of_them == pytest.approx(0.7, rel=0.01)


def test_measurements_at_the_start_leave_it_where_it_is() -> None:
    found = fit(cases(START), START, ("pace",), check=False)
    assert found.knobs.pace == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("truth", "names"),
    [
        (START, []),
        (replace(START, pace=0.8), ["pace"]),
        (replace(START, compute=1.2, memory=0.6), ["compute", "memory"]),
    ],
)
def test_as_many_numbers_are_free_as_the_truth_has(truth: Knobs, names: list[str]) -> None:
    found, tried = choose(cases(truth, noise=0.02), START)
    assert [p.name for p in found.parameters] == names
    assert list(tried)[:3] == ["nothing", "pace", "compute, memory"]
    assert found.knobs.use == ("no fit", "one factor", "fitted")[len(names)]
    assert list(found.knobs.residuals) == [found.knobs.use]
    for name in names:
        assert getattr(found.knobs, name) == pytest.approx(getattr(truth, name), rel=0.06)


def test_with_too_few_to_leave_out_one_factor_is_fitted_and_the_interval_is_the_usual_one() -> None:
    few = cases(replace(START, pace=0.8), sizes=(512,))[:2]
    usual = Residuals(levels=(0.9,), low=(-1.0,), high=(2.0,), spread=0.1, count=50, groups=20)
    start = replace(START, spread=0.3, residuals={"one factor": usual})
    found, tried = choose(few, start)
    assert not tried and [p.name for p in found.parameters] == ["pace"]
    assert found.left_out is None and 0.8 < found.knobs.pace < 0.9
    assert found.knobs.spread == pytest.approx(0.1 * math.sqrt(2))  # one number, one group
    assert found.knobs.ends() == (-1.0, 2.0)


def test_a_gain_by_chance_is_none() -> None:
    some = [replace(c, seconds=1.0, group=str(i)) for i, c in enumerate(cases(START)[:6])]
    plain = [1.1, 0.9, 1.1, 0.9, 1.1, 0.9]
    assert is_better(some, [1.05, 0.95, 1.05, 0.95, 1.05, 0.95], plain)
    assert not is_better(some, [1.0, 0.7, 1.0, 1.1, 1.0, 1.1], plain)  # now better, now worse
    assert not is_better(some, plain, plain)


def test_an_interval_holds_what_it_says_of_cases_that_no_fit_had_seen() -> None:
    made = [replace(one, group=one.name) for n in range(6) for one in cases(TRUTH)]
    draw = random.Random(5)
    noisy = [
        replace(one, seconds=one.seconds * math.exp(draw.gauss(0, 0.1)), group=f"{one.name} {n}")
        for n, one in enumerate(made)
    ]
    found = fit(noisy[:36], START)
    low, high = found.knobs.ends()
    rows = zip(noisy[36:], predict(noisy[36:], found.knobs), strict=True)
    off = [math.log(one.seconds / seconds) for one, seconds in rows]
    deviations = deviations_of(noisy[36:], found.knobs)
    inside = [low * d <= o <= high * d for o, d in zip(off, deviations, strict=True)]
    assert 0.75 <= sum(inside) / len(inside) <= 1.0  # 36 of them: 0.9 +- 3 standard errors
    narrow = fit(cases(TRUTH, 0.02), START).knobs
    assert narrow.ends()[1] * narrow.spread < high * found.knobs.spread


# -- single kernels --------------------------------------------------------------------------------


def kernels_of(truth: Knobs) -> list[Case]:
    """The kernels of three steps, each with its time by these knobs."""
    found = []
    for width in (512, 1024, 2048):
        planned = plan(step(width, 8192), "eager")
        model = execution_model("eager", knobs=truth)
        priced = rt.estimate(planned.source, CHIP, model)
        seconds = [row.timing.t_device for row in priced.rows]
        found += kernel_cases(planned, CHIP, seconds, str(width), str(width))
    return found


def test_kernels_tell_the_shares_of_their_classes() -> None:
    slow = replace(TRUTH, compute=1.0, memory=1.0, shares={"elementwise": Share(memory=0.5)})
    alone = kernels_of(slow)
    found = fit(cases(slow), replace(START, shares={}), ("compute", "memory"), kernels=alone)
    assert found.knobs.share("elementwise").memory * found.knobs.memory == pytest.approx(
        0.5, rel=0.05
    )
    assert found.errors.mean < 0.02
    assert {"elementwise.memory"} <= {p.name for p in found.parameters if p.identified}


def test_more_is_fitted_only_where_it_helps_on_what_was_left_out() -> None:
    start = replace(START, shares={})
    plain, tried = choose(cases(TRUTH), replace(start, shares=START.shares))
    both = "compute, memory"
    assert list(tried) == ["nothing", "pace", both, "compute, memory, launch, dispatch"]
    assert tried["compute, memory"] == plain.left_out
    assert [p.name for p in plain.parameters] == ["compute", "memory"]
    slow = replace(TRUTH, shares={"layer norm": Share(memory=0.1)})
    better, tried = choose(cases(slow), start, kernels_of(slow))
    assert better.left_out is not None
    assert better.left_out.mean < 0.5 * tried["compute, memory"].mean
    assert "layer norm.memory" in {p.name for p in better.parameters}


def test_alike_ops_of_a_profile_are_one_case_if_it_has_as_many_as_the_graph() -> None:
    planned = plan(step(1024, 4096), "eager")
    shapes = ((4096, 1024), (1024, 1024))
    ops = [
        OpTime(target="aten::mm", seconds=4e-3, count=2, shapes=shapes),
        OpTime(target="aten::relu", seconds=1e-3, count=7),
    ]
    (found,) = profiled_cases(planned, CHIP, ops, "x")
    assert found.seconds == 4e-3 and found.table.data["count"].sum() == 2
    assert CLASSES[found.table.kind[0]] == "mm" and "mm of layers" in found.name
    inside = [OpTime(target="aten::mm", seconds=1e-6, count=2, shapes=shapes, total=5e-3)]
    assert profiled_cases(planned, CHIP, inside, "x")[0].seconds == 5e-3


def test_an_operation_alone_begins_with_a_cold_cache_and_tells_nothing_if_short() -> None:
    planned = plan(step(256, 512), "eager")
    assert alone_case("x", planned, CHIP, 1e-6) is None
    one = alone_case("x", planned, CHIP, 1e-3)
    assert one is not None
    whole = step_case("x", planned, CHIP, "eager", 1e-3)
    held = [(t.data["warm"] * t.data["count"]).sum() for t in (one.table, whole.table)]
    assert 0 < held[0] < held[1]
    cpu = replace(CHIP, kind="cpu")
    assert alone_case("x", plan(step(4096, 65536), "eager"), cpu, 1e-1) is None  # mapped anew


# -- where the host waits --------------------------------------------------------------------------


def test_on_a_cpu_ops_and_their_calls_add_up() -> None:
    cpu = replace(CHIP, kind="cpu")
    graph = step(256, 512)
    one, other = (step_case("x", graph, chip, "eager", 1.0) for chip in (cpu, CHIP))
    knobs = replace(START, dispatch=1e-3)
    (serial,), (beside,) = predict([one], knobs), predict([other], knobs)
    assert beside == pytest.approx(other.dispatches * 1e-3 + other.host)
    assert other.host > 0  # views, and calls of modules
    assert serial > one.dispatches * 1e-3 + one.host
    assert other.dispatches > one.dispatches  # on a GPU a library's products take the host longer
    estimate = rt.estimate(graph, cpu, execution_model("eager", knobs=knobs))
    assert estimate.t_est == pytest.approx(serial, rel=1e-6)


# -- where a fit begins ----------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["eager", "compiled", "naive"])
@pytest.mark.parametrize("chip", [CHIP, load_chip("h100-sxm"), replace(CHIP, kind="cpu")])
def test_a_fit_begins_at_the_knobs_of_an_estimate_without_one(chip, execution: str) -> None:
    graph = step(256, 8)
    own = execution_model(execution, knobs=replace(START, compute=0.123))
    begun = usual_start(chip, own)
    assert begun.cache == (2 if chip.kind == "gpu" else 1)  # what measured steps find in a cache
    assert replace(begun, cache=1.0) == rt.estimate(graph, chip, execution).knobs


def test_on_a_cpu_too_a_number_that_nothing_tells_keeps_its_typical_value() -> None:
    cpu = replace(CHIP, kind="cpu")
    typical = usual_start(cpu, execution_model("eager"))
    assert typical.compute < 1 and typical.memory < 1
    small = [replace(one, table=replace(one.table, chip=cpu)) for one in cases(START, sizes=(1, 2))]
    found = fit(small, typical, check=False)
    for name in found.unidentified:
        assert getattr(found.knobs, name) == getattr(typical, name)
    assert "compute" in found.unidentified


# -- the chip's rates ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compute", "memory", "pace", "mm.compute", "layer norm.memory"])
def test_no_share_of_a_fit_is_above_the_rates_of_the_chip(name: str) -> None:
    space = Space(START, [name], CHIP)
    high = space.knobs([5.0])
    compute, memory = most_of(CHIP)
    for kind in CLASSES:
        reached = high.reached(kind)
        assert reached[0] <= compute * (1 + 1e-9) and reached[1] <= memory * (1 + 1e-9)
    quick = replace(TRUTH, compute=6.99)
    few = [replace(c, seconds=predict([c], quick)[0]) for c in cases(TRUTH)]
    found = fit(few, START, [name], check=False)
    assert all(found.knobs.reached(k)[0] <= compute * (1 + 1e-9) for k in CLASSES)


def test_a_data_center_gpu_has_less_room_above_its_peak_than_a_card() -> None:
    assert most_of(load_chip("h100-sxm"))[0] < most_of(CHIP)[0] <= 1.25


def test_the_bound_of_a_step_is_its_flop_and_bytes_at_the_most_that_a_chip_reaches() -> None:
    class Product(nn.Module):
        def forward(self, x, y):
            return x @ y

    n = 4096
    with torch.device("meta"):
        a = torch.empty(n, n, dtype=torch.half)
        graph = rt.trace(Product(), a, a)
    case = step_case("product", graph, CHIP, "eager", 1.0)
    compute, _ = most_of(CHIP)
    assert bounds_of([case]) == pytest.approx([2 * n**3 / (compute * CHIP.peak("matrix", "fp16"))])


def test_steps_below_the_bound_are_left_out_and_named() -> None:
    fine = cases(TRUTH, sizes=(16384,))
    assert not beaten(fine)
    wrong = replace(fine[0], seconds=fine[0].seconds / 50)
    kept, told = check_bound([wrong, *fine[1:]])
    assert kept == fine[1:] and list(told) == [wrong.name]
    assert "NVIDIA GeForce RTX 4090" in told[wrong.name] and "at least" in told[wrong.name]
    with pytest.raises(RequestError, match="beat this chip's bound: measure it again"):
        check_bound([wrong])


# -- kernels of one step, and what to measure next -------------------------------------------------


def test_kernels_of_a_step_weigh_by_their_seconds() -> None:
    made = by_seconds(
        [replace(c, seconds=s) for c, s in zip(cases(TRUTH), (1, 1, 8), strict=False)]
    )
    assert [case.weight for case in made] == pytest.approx([10 / 66, 10 / 66, 80 / 66])
    of = errors(["a", "b"], [1.2, 8.0], [1.0, 10.0], [1.0, 10.0])
    assert of.bias == pytest.approx(9.2 / 11 - 1)  # that of the sum


def test_kernels_of_one_step_free_one_factor_at_most() -> None:
    start = replace(START, pace=1.0)
    apart = cases(replace(TRUTH, compute=1.0, memory=0.5), noise=0.02)
    found, tried = choose(by_seconds([replace(c, group=c.name) for c in apart]), start)
    assert list(tried) == ["nothing", "pace"] and [p.name for p in found.parameters] == ["pace"]
    found, _ = choose(by_seconds([replace(c, group=c.name) for c in cases(start)]), start)
    assert not found.parameters


def test_one_model_that_is_off_as_models_differ_tells_no_factor() -> None:
    def chosen(pace: float) -> int:
        of_one = by_seconds([replace(c, group=c.name) for c in cases(replace(START, pace=pace))])
        return len(choose(of_one, START)[0].parameters)

    assert [chosen(pace) for pace in (0.75, 0.95, 1.05)] == [1, 0, 0]


def test_nothing_fitted_is_what_an_estimate_has_and_may_be_chosen() -> None:
    other = replace(START, memory=0.5)
    found, tried = choose(cases(START, noise=0.02), other, usual=START)
    assert tried["nothing"].mean < 0.05
    assert not found.parameters and found.knobs.memory == START.memory


def test_the_next_step_is_the_one_that_brute_force_finds() -> None:
    import numpy as np

    seen = cases(TRUTH, sizes=(16384, 65536))
    others = [
        *cases(TRUTH, sizes=(1, 8, 512)),
        *cases(TRUTH, sizes=(1, 4096), execution="compiled"),
    ]
    others = [replace(c, name=f"{i} {c.name}") for i, c in enumerate(others)]
    found = next_step(seen, others, TRUTH)
    assert found is not None
    space = Space(TRUTH, ("compute", "memory", "launch", "dispatch"), CHIP)
    slopes = slopes_of(space, Stack([*seen, *others], TRUTH))

    def spread(rows: list[int]) -> float:
        """Root mean variance of all predictions by the cases of these rows."""
        information = sum(np.outer(slopes[i], slopes[i]) / 0.1**2 for i in rows)
        covariance = np.linalg.inv(information + np.diag(1 / np.array(space.priors) ** 2))
        return math.sqrt(np.mean([g @ covariance @ g for g in slopes]))

    base = list(range(len(seen)))
    by_force = {other.name: spread([*base, len(seen) + i]) for i, other in enumerate(others)}
    assert found.before == pytest.approx(spread(base))
    assert found.after == pytest.approx(min(by_force.values()))
    assert by_force[found.name] == pytest.approx(found.after) and found.after < found.before
    assert next_step(seen, [], TRUTH) is None
