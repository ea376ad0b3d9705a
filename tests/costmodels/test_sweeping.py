"""Sweeps beside loops over single estimates of graphs: totals equal, times to 1e-9."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.ops import own_rules
from rooftrace.errors import RequestError
from rooftrace.graph.formulas import RecordForm, StructureError
from rooftrace.hardware import units
from rooftrace.studies.forms import Conditions, PlanForms, Points, pricing
from rooftrace.studies.sweeps import SweepCase, evaluated
from tests.costmodels.conftest import TEXT, example

transformers = pytest.importorskip("transformers")
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(**TEXT, num_key_value_heads=2)),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(**TEXT, num_key_value_heads=2, num_local_experts=8),
    ),
}


@cache
def form_of(folder: Path, family: str, phase: str) -> rt.types.Form:
    kind, architecture, settings = FAMILIES[family]
    length = "kv" if phase == "decode" else "seq"
    config = getattr(transformers, kind)(
        **settings, architectures=[architecture], dtype="bfloat16", max_position_embeddings=4096
    )
    config.to_json_file(folder / f"{family}.json", use_diff=False)
    over = {"batch": range(1, 65), length: range(1, 301)}
    return rt.tools.form(str(folder / f"{family}.json"), phase=phase, over=over)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest, folder: Path) -> rt.types.Form:
    return form_of(folder, *request.param)


def scattered(form: rt.types.Form, count: int) -> list[tuple[int, int]]:
    """Sizes of all magnitudes: few rows and many take different ways."""
    draw = random.Random(0)
    some = [
        (draw.randint(1, draw.choice([4, 64])), draw.randint(1, draw.choice([8, 40, 300])))
        for _ in range(count)
    ]
    return list(dict.fromkeys(some))


def assert_equals_estimates(
    form: rt.types.Form, places: Sequence[tuple[int, ...]], execution: str
) -> None:
    points = Points({n: [p[i] for p in places] for i, n in enumerate(form.names)})
    table = evaluated(form, points, [rt.load_chip("h200-sxm")], Conditions.of(execution))
    for place, numbers in enumerate(places):
        graph = form.graph(**dict(zip(form.names, numbers, strict=True)))
        single = rt.estimate(graph, "h200-sxm", execution)
        told = {name: int(table[name][place]) for name in ("flops", "bytes_hbm", "peak_memory")}
        assert told == {
            "flops": single.flops,
            "bytes_hbm": single.bytes.total,
            "peak_memory": single.memory.peak,
        }, numbers
        assert table["t_est"][place] == pytest.approx(single.t_est, rel=1e-9)
        assert table["t_bound"][place] == pytest.approx(single.t_bound, rel=1e-9)
        interval = single.t_interval
        if interval is not None:
            told_interval = (table["t_low"][place], table["t_high"][place])
            assert told_interval == pytest.approx(interval, rel=1e-9)


@pytest.mark.parametrize(
    ("form", "execution"),
    [
        (("mixtral", "decode"), "serving"),
        pytest.param(("llama", "decode"), "serving", marks=pytest.mark.heavy),
        pytest.param(("mixtral", "prefill"), "naive", marks=pytest.mark.heavy),
    ],
    indirect=["form"],
)
def test_totals_and_times_are_those_of_estimates(form: rt.types.Form, execution: str) -> None:
    assert_equals_estimates(form, scattered(form, 12), execution)


def test_plans_of_one_listed_length_say_nothing_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the lengths that are proven no plan is made that would show how bytes grow."""
    monkeypatch.setattr(pricing, "_TRIED", 40)  # too few draws to hit the other length
    whole = form_of(folder, "mixtral", "decode")
    few = ((), (64, 256))
    regimes = tuple(replace(each, levels=few) for each in whole.regimes if each.high[1] > 256)
    form = rt.types.Form(whole.title, whole.phase, whole.names, regimes)
    short = Points({"batch": range(2, 65), "kv": [64] * 63})
    assert len(list(form.plans(short, Conditions.of("serving")))) < 20
    assert_equals_estimates(form, [(32, 256), (2, 64)], "serving")


@pytest.mark.slow
def test_a_table_that_is_zeroed_and_added_to_parts_no_sizes(tmp_path: Path) -> None:
    settings = {**TEXT, "num_hidden_layers": 2, "vocab_size": 50_000}
    config = transformers.LlamaConfig(**settings, architectures=["LlamaForCausalLM"])
    config.to_json_file(tmp_path / "table.json", use_diff=False)
    target, batches = str(tmp_path / "table.json"), range(8, 65)
    form = rt.tools.form(target, phase="training", seq=64, over={"batch": batches})
    plans = list(form.plans(Points({"batch": batches}), Conditions.of("efficient")))
    assert len(plans) < 6  # rows of the table that tokens reach differ in all of the 57 steps
    assert_equals_estimates(form, [(8,), (33,), (64,)], "efficient")


def test_an_image_network() -> None:
    with torch.device("meta"):
        module, image = example("resnet").ResNet((1, 1, 5, 1)), torch.empty(2, 3, 64, 64)
    form = rt.tools.form(module, image, over={"batch": range(1, 33), "0.3": range(32, 225, 32)})
    places = [(1, 32), (2, 224), (17, 96), (32, 160)]
    assert_equals_estimates(form, places, "efficient")


def test_few_points_that_are_asked_for_once_are_priced_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No form of plans is fitted for them, and none stays that would have no sizes in it."""
    monkeypatch.setenv("ROOFTRACE_CACHE", "off")  # a form that an earlier step left is taken
    module, x = wide_step()
    form = rt.tools.form(module, x, over={"0.0": range(1, 1025)})
    how, points = Conditions.of("efficient"), Points({"0.0": [8, 640]})
    once = [plan for plan, _ in form.plans(points, how, once=True)]
    assert [plan.form.samples for plan in once] == [((8,),), ((640,),)]
    assert not any(plan.form.slots for plan in once)
    chips = [form.estimate("h200-sxm", "efficient", **{"0.0": 8}).chip]
    table = evaluated(form, points, chips, how, once=True)
    for row, numbers in enumerate(points.columns[0].tolist()):
        right = form.estimate("h200-sxm", "efficient", **{"0.0": numbers})
        assert table["flops"][row] == right.flops
        assert table["t_est"][row] == pytest.approx(right.t_est, rel=1e-9)
    ((fitted, _),) = form.plans(Points({"0.0": [8]}), how)
    assert fitted.form.slots


@pytest.mark.parametrize("kept", [None, 1], ids=["refused", "lost"])
def test_numbers_that_are_not_tracked_are_fitted(
    kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that says `0.5 * size` gets a plain number from Python: plans elsewhere show that."""
    monkeypatch.setenv("ROOFTRACE_CACHE", "off")
    real = RecordForm.of_tracked

    def losing(sizes: Any, record: Any, numbers: Any) -> RecordForm:
        if kept is None:
            raise StructureError("no slot has it")
        form = real(sizes, record, numbers)
        return replace(form, slots=form.slots[:kept])

    monkeypatch.setattr(RecordForm, "of_tracked", staticmethod(losing))
    form = rt.tools.form(*wide_step(), over={"0.0": range(1, 1025)})
    assert_equals_estimates(form, [(1,), (97,), (1000,)], "efficient")
    plans = list(form.plans(Points({"0.0": range(1, 1025)}), Conditions.of("efficient")))
    assert len(plans) < 20 and any(len(plan.form.samples) > 1 for plan, _ in plans)


@pytest.mark.slow
def test_a_number_that_steps_with_a_size_is_no_constant_of_few_samples() -> None:
    """Copies of a convolution are in full tiles of 32 positions: no formula has them.  Samples of
    one tile looked like one, and a third of the lines had another's copies."""
    module, x = nn.Conv1d(192, 192, 7, padding=3, groups=48), torch.empty(4, 192, 64)
    form = rt.tools.form(module, x, over={"0.0": range(1, 129), "0.2": range(16, 513)})
    grid = [(rows, length) for rows in range(1, 129, 5) for length in range(16, 513, 17)]
    points = Points({name: [at[i] for at in grid] for i, name in enumerate(form.names)})
    table = evaluated(form, points, [rt.load_chip("l4")], Conditions.of("efficient"))
    for place in range(0, len(grid), 41):
        sizes = dict(zip(form.names, grid[place], strict=True))
        single = form.estimate("l4", "efficient", **sizes)
        assert table["t_est"][place] == pytest.approx(single.t_est, rel=1e-9), sizes


# -- what a sweep shows ----------------------------------------------------------------------------


def wide_step() -> tuple[nn.Module, torch.Tensor]:
    """A product that is limited by weights with few rows, and by computing with many."""
    with torch.device("meta"):
        return nn.Linear(4096, 4096).bfloat16(), torch.empty(8, 4096, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def swept() -> rt.types.Sweep:
    module, x = wide_step()
    return rt.sweep(module, x, over={"0.0": range(1, 1025)}, chip=["h200-sxm", "b200-sxm"])


@cache
def step(rows: int, chip: str = "h200-sxm") -> rt.types.Estimate:
    module, x = wide_step()
    return rt.estimate(module, x.new_empty(rows, 4096), chip=chip)


def test_crossings_are_those_of_a_loop(swept: rt.types.Sweep) -> None:
    table = swept.frame()
    assert {change.chip for change in swept.crossings()} == {"h200-sxm", "b200-sxm"}
    for chip in ("h200-sxm", "b200-sxm"):
        own = table[table["chip"] == chip].sort_values("0.0")
        regimes, rows = own["regime"].tolist(), own["0.0"].tolist()
        expected = [
            (rows[i + 1], regimes[i], regimes[i + 1])
            for i in range(len(rows) - 1)
            if regimes[i] != regimes[i + 1]
        ]
        told = [(c.size, c.before, c.after) for c in swept.crossings() if c.chip == chip]
        assert told == expected
    for change in swept.crossings():
        assert change.t_est == pytest.approx(step(change.size, change.chip).t_est, rel=1e-9)


def test_crossings_between_levels_are_exact(swept: rt.types.Sweep) -> None:
    module, x = wide_step()
    sparse = rt.sweep(module, x, over={"0.0": "1..1024:x2"}, chip=["h200-sxm", "b200-sxm"])
    every = {(c.chip, c.size, c.before, c.after) for c in swept.crossings()}
    told = {(c.chip, c.size, c.before, c.after) for c in sparse.crossings()}
    assert told <= every and bool(told) == bool(every)


def test_cliffs_are_those_of_a_loop(swept: rt.types.Sweep) -> None:
    times = {rows: step(rows).t_est for rows in range(250, 266)}
    expected = {
        rows for rows in range(250, 265) if times[rows + 1] > times[rows] * 1.05
    }  # one more row
    told = {c.size for c in swept.cliffs() if c.chip == "h200-sxm" and 250 <= c.size < 265}
    assert told == expected == {256}
    for cliff in swept.cliffs():
        assert cliff.jump > 0.05 and cliff.after / cliff.before - 1 == cliff.jump


def test_the_best_line_is_that_of_a_loop(swept: rt.types.Sweep) -> None:
    limit = step(700).t_est
    best = swept.best("items_per_s", 1, t_est=limit).iloc[0]
    rates = {
        (chip, rows): rows
        for chip in ("h200-sxm", "b200-sxm")
        for rows in (1, 256, 512, 640, 700)
        if step(rows, chip).t_est <= limit
    }
    for chip, rows in rates:
        single = step(rows, chip)
        assert best["items_per_s"] >= best["items"] / best["t_est"] * (1 - 1e-12)
        assert (
            best["items_per_s"] >= (single.graph.workload.get("items") or 1) / single.t_est - 1e-6
        )
    assert swept.best("t_est", 1).iloc[0]["t_est"] == swept.frame()["t_est"].min()
    with pytest.raises(RequestError, match="the least that there is: t_est"):
        swept.best(t_est=1e-12)
    with pytest.raises(RequestError, match=r"'t_esd'.*t_est"):
        swept.best("t_esd")


def test_labels_say_what_tells_cases_apart() -> None:
    module, x = wide_step()
    form = rt.tools.form(module, x, over={"0.0": range(1, 9)})
    case = SweepCase(form, Conditions.of("eager", "fp8", None, "fp8"), {"width": 8})
    assert case.labels == {
        "width": 8, "phase": "forward", "execution": "eager", "dtype": "fp8", "kv_dtype": "fp8"
    }  # fmt: skip


def test_cases_and_chips_multiply_the_lines() -> None:
    module, x = wide_step()
    result = rt.sweep(
        module, x, over={"0.0": [1, 4, 4, 9]}, chip=["h200-sxm", "b200-sxm"],
        execution=["eager", "efficient"], dtype=[None, "fp8"],
    )  # fmt: skip
    assert len(result) == 3 * 2 * 2 * 2 == len(result.frame()) and result.whole
    alone = rt.sweep(module, x, over={"0.0": 9}, chip="b200-sxm", execution="eager", dtype="fp8")
    frame = result.frame()
    line = frame[
        (frame["0.0"] == 9)
        & (frame["chip"] == "b200-sxm")
        & (frame["execution"] == "eager")
        & (frame["dtype"] == "fp8")
    ]
    assert line["t_est"].tolist() == alone.frame()["t_est"].tolist()
    with pytest.raises(RequestError, match="size 'y'"):
        result.crossings("y")
    assert {"lines", "crossings", "cliffs"} <= set(result.to_dict())


def test_the_first_step_is_told_before_the_rest_is_priced() -> None:
    told: list[str] = []
    rt.sweep(*wide_step(), over={"0.0": range(1, 65)}, progress=told.append)
    (early,) = [line for line in told if line.startswith("first step, ")]
    rows = int(early.removeprefix("first step, 0.0 ").partition(":")[0])
    assert units.format_time(step(rows).t_est) in early
    assert step(rows).times.regime in early
    assert told.index(early) < next(i for i, line in enumerate(told) if line.startswith("pricing"))


@pytest.mark.parametrize("name", ["chip", "execution", "dtype", "kv_dtype"])
def test_none_of_several_is_an_error(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: expected at least one, got none"):
        rt.sweep(*wide_step(), over={"0.0": range(1, 65)}, **{name: []})


@pytest.mark.parametrize("name", ["weights_dtype", "kv_dtype"])
def test_a_form_is_priced_in_other_precisions_later(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}='fp8': a form has the model's own precisions"):
        rt.tools.form(*wide_step(), over={"0.0": range(1, 65)}, **{name: "fp8"})


@pytest.mark.parametrize("form", [("mixtral", "decode")], indirect=True)
def test_expected_numbers_and_notes_part_no_sizes(
    form: rt.types.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few plans are made: a guard with a number of one place in it would hold around it only."""
    plans: list[int] = []
    plan = Conditions.plan

    def counted(self: Conditions, graph: rt.types.OpGraph, savings: bool = True) -> Any:
        plans.append(len(graph.ops))
        return plan(self, graph, savings)

    monkeypatch.setenv("ROOFTRACE_CACHE", "off")
    monkeypatch.setattr(Conditions, "plan", counted)
    over = {"batch": range(1, 65), "kv": range(1, 301)}
    assert len(rt.sweep(form, over=over, execution="serving").frame()) == 64 * 300
    assert len(plans) <= 30


@pytest.mark.parametrize("form", [("mixtral", "decode")], indirect=True)
def test_experts_that_all_samples_reach_are_no_constant_elsewhere(form: rt.types.Form) -> None:
    """Forms that batches have shown which reach all experts hold for those that do not."""
    (regime,) = form.regimes
    how = Conditions.of("serving")
    plans = PlanForms(regime, how)
    many, few = Points({"batch": range(52, 65), "kv": range(90, 103)}), [(9, 100), (8, 123)]
    for points in (many, Points(dict(zip(many.names, zip(*few, strict=True), strict=True)))):
        for plan, places in plans.at(points):
            for place in places.tolist():
                numbers = tuple(int(column[place]) for column in points.columns)
                assert plan.form.at(numbers) == how.numbers(regime.form.at(numbers))
    assert len(plans._cells) < 5


@pytest.mark.parametrize("form", [("mixtral", "decode")], indirect=True)
def test_plans_of_a_form_are_kept_for_the_next_command(
    form: rt.types.Form, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later process plans nothing and has the same table; what is damaged is planned again."""

    def swept(folder: str) -> Any:
        monkeypatch.setenv("ROOFTRACE_CACHE", folder)
        fresh = rt.types.Form(form.title, form.phase, form.names, form.regimes)
        sizes = Points({"batch": range(1, 65), "kv": range(100, 164)})
        return evaluated(fresh, sizes, [rt.load_chip("h200-sxm")], Conditions.of("serving"))

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan is made")

    without = swept("off")
    first = swept(str(tmp_path))
    (file,) = tmp_path.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(PlanForms, "_tracked", refused)
        second = swept(str(tmp_path))
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(AssertionError, match="a plan is made"):
            swept(str(tmp_path))
        with own_rules(), pytest.raises(AssertionError, match="a plan is made"):
            rt.extend.rule("mylib.op")(lambda op: None)
            swept(str(tmp_path))
    assert list(without) == list(first) == list(second)
    for name, column in without.items():
        assert (column.tobytes(), column.tobytes()) == (
            first[name].tobytes(),
            second[name].tobytes(),
        )
