"""Differences of two revisions: where, why, how many times, and what --fail-on makes of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.diffs import Change, Limit
from rooftrace.diffs.changes import TOTALS
from rooftrace.diffs.costs.changes import Diff
from rooftrace.diffs.costs.differences import diff_estimates
from rooftrace.errors import RequestError

WIDTH, ROWS = 32, 64


class Norm(nn.Module):
    """RMS norm by hand; `upcast` is the change under test."""

    def __init__(self, upcast: bool) -> None:
        super().__init__()
        self.weight, self.upcast = nn.Parameter(torch.ones(WIDTH)), upcast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() if self.upcast else x
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Layer(nn.Module):
    def __init__(self, upcast: bool, gate: bool) -> None:
        super().__init__()
        self.norm, self.fc = Norm(upcast), nn.Linear(WIDTH, WIDTH)
        if gate:
            self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(self.norm(x))
        return y * self.gate(x) if hasattr(self, "gate") else y


class Model(nn.Module):
    def __init__(self, upcast: bool = False, gate: bool = False, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(upcast, gate) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def priced(*, phases=("forward",), execution="eager", chip="h200-sxm", **options):
    model = Model(**options).to(torch.bfloat16)
    x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
    return {
        phase: rt.estimate(rt.trace(model, x, phase=phase), chip, execution) for phase in phases
    }


def compared(before=None, after=None) -> Diff:
    return diff_estimates(priced(**(before or {})), priced(**(after or {})))


# -- modules ---------------------------------------------------------------------------------------


def test_an_upcast_in_a_norm_shows_there_with_its_cause_once_for_all_layers():
    (phase,) = compared(after={"upcast": True}).phases
    (norm,) = phase.modules
    assert (norm.path, norm.count, norm.kind) == ("layers.*.norm", 3, "Norm")
    assert norm.status == "changed"
    assert norm.ops_added == {"aten._to_copy": 2} and norm.ops_removed == {}
    assert "aten.pow" in norm.resized  # it is done on fp32 now
    # Per layer: up and down casts, and six tensors of fp32 instead of bf16 among those between.
    assert norm.bytes.delta == phase.totals["bytes"].delta > 0
    assert norm.bytes.delta % 3 == 0
    assert phase.totals["kernels"] == Change(before=3 * 7, after=3 * 9)


def test_a_module_that_is_new_and_one_that_is_gone():
    (phase,) = compared(after={"gate": True}).phases
    found = {m.path: m for m in phase.modules}
    gate, layer = found["layers.*.gate"], found["layers.*"]
    assert (gate.status, gate.count, gate.kind) == ("added", 3, "Linear")
    assert gate.ops_added == {"aten.addmm": 1}
    # A product, and the adds of its bias.
    flop = 3 * (2 * ROWS * WIDTH * WIDTH + ROWS * WIDTH)
    assert gate.flops == Change(0, flop)
    assert layer.ops_added == {"aten.mul": 1}
    (phase,) = compared(before={"gate": True}).phases
    gone = {m.path: m for m in phase.modules}["layers.*.gate"]
    assert (gone.status, gone.kind, gone.flops) == ("removed", "Linear", Change(flop, 0))


def test_one_more_layer_is_not_three():
    (phase,) = compared(after={"layers": 4}).phases
    assert {m.path for m in phase.modules} == {"layers.3.norm", "layers.3.fc"}
    assert all(m.count == 1 and m.status == "added" for m in phase.modules)
    assert phase.totals["params"].delta == WIDTH + WIDTH * WIDTH + WIDTH


def test_totals_are_those_of_the_estimates():
    before, after = priced(), priced(upcast=True)
    (phase,) = diff_estimates(before, after).phases
    one, two = before["forward"], after["forward"]
    assert phase.totals["time"] == Change(one.t_est, two.t_est)
    assert phase.totals["bytes"] == Change(one.bytes_hbm, two.bytes_hbm)
    assert phase.totals["flops"].delta == two.flops - one.flops
    assert phase.totals["memory"].before == rt.memory(one.plan.source).peak


def test_the_same_twice_is_unchanged():
    same = compared()
    assert same.unchanged and same.phases[0].modules == ()
    assert not compared(after={"upcast": True}).unchanged


def test_seconds_below_the_rounding_of_the_step_are_no_change_of_a_kernel():
    before = priced()["forward"]
    most = before.t_est

    def longer(seconds):
        row, *rest = before.rows
        timing = replace(row.timing, more=row.timing.more + seconds)
        made = replace(before, rows=(replace(row, timing=timing), *rest))
        (phase,) = diff_estimates({"forward": before}, {"forward": made}).phases
        return phase

    assert not longer(0.5e-9 * most).rows and not longer(0.5e-9 * most).modules
    told = longer(3e-9 * most)
    assert told.rows[0].time.delta == pytest.approx(3e-9 * most, rel=1e-5)
    assert told.modules[0].time.delta == pytest.approx(3e-9 * most, rel=1e-5)


def test_phases_of_one_side_are_listed():
    found = compared({"phases": ("forward",)}, {"phases": ("forward", "training")})
    assert [p.phase for p in found.phases] == ["forward"]
    assert (found.only_before, found.only_after) == ((), ("training",))
    assert not found.unchanged
    apart = compared({"phases": ("forward",)}, {"phases": ("training",)})
    assert apart.phases == () and not apart.unchanged


def test_two_execution_models_or_chips_are_named():
    by_execution = compared(after={"execution": "naive"})
    assert by_execution.executions == ("eager", "naive")
    assert by_execution.execution == "eager -> naive" and by_execution.chip == "h200-sxm"
    by_chip = compared(after={"chip": "a100-sxm-80"})
    assert by_chip.chip == "h200-sxm -> a100-sxm-80"
    (phase,) = by_chip.phases
    assert phase.totals["time"].delta > 0 and phase.totals["flops"].delta == 0
    assert sum(row.time.delta for row in phase.rows) == pytest.approx(phase.totals["time"].delta)


def test_one_side_has_one_chip_and_one_execution_model():
    both = {**priced(), "training": priced(phases=("training",), execution="naive")["training"]}
    with pytest.raises(ValueError, match="eager on h200-sxm, naive on h200-sxm"):
        diff_estimates(both, both)
    with pytest.raises(ValueError, match="no estimates"):
        diff_estimates({}, {})


def test_as_data():
    data = compared(after={"upcast": True}).to_dict()
    assert data["schema"] == "rooftrace.diff/1"
    (norm,) = data["phases"]["forward"]["modules"]
    assert norm["ops_added"] == {"aten._to_copy": 2}
    change = data["phases"]["forward"]["totals"]["bytes"]
    assert change["delta"] == change["after"] - change["before"]
    assert change["relative"] == change["delta"] / change["before"]


# -- --fail-on -------------------------------------------------------------------------------------


def test_relative_changes():
    assert Change(100, 150).relative == 0.5
    assert Change(0, 0).relative == 0
    assert Change(0, 1).relative is None


@pytest.mark.parametrize(
    "text, metric, limit, relative",
    [
        ("time>5%", "time", 0.05, True),
        (" bytes > 0 % ", "bytes", 0.0, True),
        ("memory>1 GiB", "memory", 2**30, False),
        ("time>1.5ms", "time", 1.5e-3, False),
        ("kernels>10", "kernels", 10, False),
        ("flops>1e9", "flops", 1e9, False),
        ("flops>1 GFLOP", "flops", 1e9, False),
        ("params>2 M", "params", 2e6, False),
    ],
)
def test_conditions(text, metric, limit, relative):
    read = Limit.parse(text, TOTALS)
    assert (read.metric, read.relative, read.text) == (metric, relative, text)
    assert read.most == pytest.approx(limit)


@pytest.mark.parametrize(
    "text, message",
    [
        ("speed>5%", "METRIC one of time, flops"),
        ("tme>5%", "did you mean 'time'?"),
        ("time<5%", "expected METRIC>LIMIT"),
        ("time>", "expected METRIC>LIMIT"),
        ("time>5", "time>5"),
        ("memory>5 ms", "memory>5 ms"),
        ("time>1e%", "time>1e%"),
        ("time>.%", "time>.%"),
        ("bytes>--5%", "bytes>--5%"),
    ],
)
def test_conditions_that_cannot_be_read(text, message):
    with pytest.raises(RequestError) as caught:
        Limit.parse(text, TOTALS)
    assert message in str(caught.value) and text in str(caught.value)


def test_violations_say_by_how_much():
    found = compared(after={"gate": True})
    growth = found.phases[0].totals["flops"].relative
    assert found.violations(["flops>1%", "kernels>1000"]) == [
        f"forward: flops grew by {growth:+.2%}, more than 'flops>1%' allows"
    ]
    assert found.violations(["kernels>5"]) == [
        "forward: kernels grew by +6, more than 'kernels>5' allows"
    ]
    assert found.violations(["kernels>6", "time>10 s"]) == []
    assert compared().violations(["time>0%", "bytes>0%", "memory>0%"]) == []
