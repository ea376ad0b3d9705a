"""Estimates: what holds for every model and chip, presets, coverage, and small steps on paper."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from msgspec import structs
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import PRESETS, ExecutionModel, Utilization
from rooftrace.costmodels.fusion.kernels import THROUGH_LIBRARIES
from rooftrace.costmodels.fusion.plans import COUNTED, waits_at
from rooftrace.costmodels.ops.cost import Cost
from rooftrace.costmodels.ops.opview import own_rules
from rooftrace.graph.file import load_graphs, save_graphs
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op, Ref, Tensor
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.chipfile import load_chip
from tests.conftest import in_turn
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs

H200 = load_chip("h200-sxm")
IDEAL = ExecutionModel(utilization=Utilization(tiles=False))
"""Eager, every product at the peak."""
BF16, FP32 = 2, 4  # bytes
STEPS = [
    ("gpt2", "training"), ("llama", "forward"), ("llama", "decode"), ("deepseek", "training"),
    ("deepseek", "prefill"), ("resnet", "training"), ("lstm", "training"),
]  # fmt: skip


# -- what always holds -----------------------------------------------------------------------------


def check(est: rt.types.Estimate) -> None:
    times = est.times
    assert times.t_bound <= times.t_serial <= times.t_est
    assert times.t_launch >= 0
    assert sum(times.regime_shares.values()) == pytest.approx(1 if times.t_est else 0)
    assert sum(times.regime_seconds.values()) == pytest.approx(times.t_est)
    assert est.bytes.total == est.bytes_hbm == sum(row.bytes for row in est.rows)
    assert est.flops == sum(row.flops for row in est.rows) >= est.flops_causal
    assert est.flops_matrix <= est.flops and est.macs == est.flops_matrix // 2
    if times.t_est:
        assert 0 <= est.mfu <= est.hfu <= 1
    for breakdown in (est.by_operator(), est.by_module(1), est.by_pattern()):
        assert sum(row.flops for row in breakdown.values()) == est.flops
        assert sum(row.bytes for row in breakdown.values()) == est.bytes_hbm
        assert sum(row.calls for row in breakdown.values()) == est.kernels
    starts = [row.timing.start for row in est.rows]
    ends = [row.timing.start + row.timing.t_device for row in est.rows]
    assert all(end <= start * (1 + 1e-12) for end, start in zip(ends, starts[1:], strict=False))
    assert not ends or ends[-1] <= times.t_est * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(programs())
def test_random_programs(program):
    graph, _ = program
    for execution in ("naive", "eager", "compiled", "efficient"):
        check(rt.estimate(graph, "h200-sxm", execution))


@pytest.mark.parametrize("step, chip", in_turn(map("-".join, STEPS), ["h200-sxm", "a100-sxm-80"]))
def test_real_models(traced, step, chip):
    model, phase = step.split("-")
    found = {name: rt.estimate(traced(model, phase), chip, name) for name in PRESETS}
    for est in found.values():
        check(est)
    assert found["efficient"].times.t_serial <= found["eager"].times.t_serial
    # A graph is launched at once, which takes longer than the first of many launches.
    launched = found["efficient"].chip.graph_launch.value
    assert found["efficient"].t_est <= found["compiled"].t_est + launched
    # The wrapper of compiled code takes longer for a kernel than a plain op does: tiny steps wait.
    assert found["compiled"].times.t_serial <= found["eager"].times.t_serial
    assert found["efficient"].flops_matrix == found["naive"].flops_matrix


@pytest.mark.parametrize("model, phase", STEPS)
def test_a_saved_graph_gives_the_same_estimate(traced, model, phase, tmp_path):
    graph = traced(model, phase)
    loaded = load_graphs(save_graphs({phase: graph}, tmp_path / "graph.json.gz"))[phase]
    for execution in ("naive", "efficient"):
        before, after = (rt.estimate(one, "h200-sxm", execution) for one in (graph, loaded))
        assert before.rows == after.rows and before.times == after.times
        assert before.notes == after.notes and before.coverage == after.coverage


def test_a_plan_goes_on_any_chip(traced):
    planned = rt.plan(traced("llama", "forward"), "eager")
    for chip in ("h200-sxm", "a100-sxm-80"):
        assert rt.estimate(planned, chip).times == rt.estimate(planned.source, chip, "eager").times


# -- on paper --------------------------------------------------------------------------------------


def product(rows: int, width: int, dtype: str = "bf16", **fields: object) -> rt.types.OpGraph:
    b = Builder(dtype)
    y = b.mm(b.input(rows, width), b.weight(width, width), **fields)
    return b.graph(y, workload={"items": rows, "item": "token"})


def test_one_product_on_paper():
    n = 4096
    est = rt.estimate(product(n, n), H200, rt.tools.execution_model("efficient", knobs=None))
    flop, moved = 2 * n**3, 3 * BF16 * n * n
    work = flop / H200.peak("matrix", "bf16")
    gap = H200.kernel_gap.value
    assert (est.flops, est.bytes_hbm, est.kernels) == (flop, moved, 1)
    # 16 x 32 tiles of 256 x 128 are 3.9 waves on 132 SMs: the fourth is not full.
    waves = work * 4 * 132 / (16 * 32)
    assert est.times.t_comp == pytest.approx(waves)
    assert est.times.t_hbm == moved / H200.memory_bandwidth.value
    assert est.times.t_serial == pytest.approx(waves + gap)
    assert est.t_est == pytest.approx(H200.graph_launch.value + waves + gap)
    assert est.mfu == pytest.approx(work / est.t_est)
    assert est.flops_realizable == pytest.approx(flop * waves / work)
    assert est.ai_hbm == est.ai_total == flop / moved
    assert est.ridge == H200.ridge("matrix", "bf16")
    assert (est.times.regime, est.items_per_s) == ("compute", n / est.t_est)


def test_a_small_eager_step_is_as_long_as_its_dispatches():
    b = Builder()
    x = b.input(8, 8)
    for _ in range(10):
        x = b.view(b.unary("exp", x), b.places[x])
    est = rt.estimate(b.graph(x), H200, "eager")
    # Ten kernels are dispatched and ten views made, the last a view, while the last kernel runs.
    host = 10 * (H200.dispatch_eager.value + H200.dispatch_view.value)
    last = est.rows[-1].timing.t_device / est.rows[-1].count
    assert est.t_est == pytest.approx(host - H200.dispatch_view.value + last)
    assert est.times.regime == "launch" and est.times.regime_shares["launch"] > 0.99


def test_dispatch_of_kernels_and_of_one_graph():
    b = Builder()
    x, w = b.input(8, 8), b.weight(8, 8)
    for _ in range(10):
        x = b.mm(x, w)
    graph = b.graph(x)
    compiled, efficient = (rt.estimate(graph, H200, name) for name in ("compiled", "efficient"))
    last = compiled.rows[-1].timing.t_device
    host = H200.dispatch_compiled.value + THROUGH_LIBRARIES["mm"] * H200.dispatch_eager.value
    assert compiled.t_est == pytest.approx(H200.graph_entry.value + 10 * host + last)
    assert efficient.t_est == pytest.approx(H200.graph_launch.value + efficient.times.t_serial)


def test_every_wait_splits_a_graph_in_two_launches():
    """The value is copied by PyTorch, while the device works here, and comes back after that."""
    b = Builder()
    x, w = b.input(8, 8), b.weight(8, 8)
    for _ in range(3):
        x = b.mm(x, w)
        b.item(x)
    y = b.mm(x, w)
    chip = dataclasses.replace(
        H200, dispatch_eager=dataclasses.replace(H200.dispatch_eager, value=1e-12)
    )
    est = rt.estimate(b.graph(y), chip, "efficient")
    waits = 4 * H200.graph_launch.value + 3 * H200.read_back.value
    assert est.t_est == pytest.approx(waits + est.times.t_serial)


def test_the_host_waits_for_sizes_that_depend_on_values():
    """By PyTorch's tag; one_hot is no kernel, and an index does so where a mask is in it."""
    aten = torch.ops.aten
    ours = {name.removeprefix("aten.") for name in COUNTED if name.startswith("aten.")}
    overloads = [
        getattr(getattr(aten, name), overload)
        for name in {*dir(aten), *ours}  # dir has those that were asked for
        for overload in getattr(getattr(aten, name), "overloads", list)()
    ]
    tag = torch.Tag.dynamic_output_shape
    tagged = {str(each).rpartition(".")[0] for each in overloads if tag in each.tags}
    others = {"aten.one_hot", "aten.index", "aten.argwhere"}  # argwhere calls nonzero
    assert {f"aten.{name}" for name in ours} == tagged - others


@pytest.mark.parametrize("count, work", [
    (1, lambda x, n: x[x > 0]), (0, lambda x, n: x[n]), (1, lambda x, n: x.nonzero()),
    (1, lambda x, n: torch.repeat_interleave(x, n)),
    (0, lambda x, n: torch.repeat_interleave(x, n, output_size=4)),
    (0, lambda x, n: torch.where(x > 0, x, 0)), (1, lambda x, n: x.index_put_((x > 0,), x)),
])  # fmt: skip
def test_a_gpu_waits_where_the_size_of_a_result_is_a_value(count, work):
    """A CPU has the value when the op is done."""
    graph = rt.trace(work, torch.ones(4), torch.ones(4, dtype=torch.int64))
    assert waits_at(graph).total() == count
    slow = dataclasses.replace(H200.read_back, value=1.0)
    gpu = rt.estimate(graph, dataclasses.replace(H200, read_back=slow), "eager")
    assert int(gpu.t_est) == count
    cpu = rt.estimate(graph, dataclasses.replace(H200, read_back=slow, kind="cpu"), "eager")
    assert cpu.t_est < 1


def test_an_empty_step():
    est = rt.estimate(Builder().graph(), H200)
    assert (est.kernels, est.flops, est.bytes_hbm, est.t_est) == (0, 0, 0, 0)
    assert est.mfu is est.hfu is est.ai_hbm is est.items_per_s is None
    assert not est.by_operator() and est.coverage.bytes_with_rule_share == 1


def test_recomputation_is_in_hfu_and_in_time_but_not_in_the_models_flops():
    b = Builder()
    x, w = b.input(512, 512), b.weight(512, 512)
    y = b.mm(x, w)
    again = b.mm(x, w, part="recompute")
    est = rt.estimate(b.graph(y, again), H200, IDEAL)
    flop = 2 * 512**3
    assert (est.flops, est.flops_matrix, est.flops_recompute) == (flop, flop, flop)
    assert est.hfu == 2 * est.mfu
    assert est.times.t_comp == 2 * flop / H200.peak("matrix", "bf16")
    assert [row.flops_recompute for row in est.rows] == [0, flop]
    parts = est.by_part()
    assert (parts["forward"]["flops"], parts["recompute"]["flops"]) == (flop, 0)
    assert parts["recompute"]["flops_recompute"] == flop


def test_checkpointing_recomputes_forward():
    class Checkpointed(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
            self.again = again

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.again:
                return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
            return self.body(x)

    once, twice = (
        rt.estimate(rt.trace(Checkpointed(again), torch.empty(8, 16), phase="training"))
        for again in (False, True)
    )
    assert once.flops_matrix == twice.flops_matrix and once.flops_recompute == 0
    # Backward needs what went into the last linear, not what came out of it.
    assert twice.plan.total.flops(("matmul",), ("recompute",)) >= 2 * 8 * 16 * 64
    assert twice.hfu > twice.mfu and once.hfu == once.mfu


# -- precisions and engines ------------------------------------------------------------------------


class Fp32(nn.Module):
    """A convolution and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean((2, 3)))


def test_fp32_convolutions_run_on_tf32_and_fp32_products_on_the_vector_engine():
    graph = rt.trace(Fp32(), torch.empty(2, 8, 16, 16))
    conv = 2 * 2 * 8 * 8 * 9 * 16 * 16
    fc = 2 * 2 * 8 * 8
    vector, tf32 = H200.peak("vector", "fp32"), H200.peak("matrix", "tf32")
    default = rt.estimate(graph, H200, IDEAL)
    other = default.flops - conv - fc
    assert default.times.t_comp == pytest.approx(conv / tf32 + (fc + other) / vector)
    assert default.peak == tf32
    with_tf32 = rt.estimate(graph, H200, dataclasses.replace(IDEAL, tf32=True))
    assert with_tf32.times.t_comp == pytest.approx((conv + fc) / tf32 + other / vector)


def test_the_headline_of_an_fp32_product_is_the_vector_peak():
    est = rt.estimate(product(512, 512, "fp32"), H200)
    assert est.peak == H200.peak("vector", "fp32") and est.mfu <= 1


def test_a_chip_without_a_rate_says_what_it_has():
    graph = rt.tools.reprice(product(64, 64).replace(model={"dtype": "bf16"}), dtype="fp8")
    with pytest.raises(MissingPeakError, match=r"\(matrix, fp8\).* has: .*bf16"):
        rt.estimate(graph, "a100-sxm-80")
    assert rt.estimate(graph, "h200-sxm").rows[0].precision == "fp8"


# -- the seed's presets ----------------------------------------------------------------------------


def test_the_seeds_residency_divides_weights_by_family_and_goes_below_the_floor():
    b = Builder()
    x = b.input(64, 64)
    for family in ("attention", "moe", "dense"):
        x = b.mm(x, b.weight(64, 64), family=family)
    graph = b.graph(x)
    seed = rt.estimate(graph, H200, "seed-efficient")
    whole = BF16 * 64 * 64
    weights = [row.bytes_by_role["weights"] for row in seed.rows]
    assert weights == [whole // 4, whole // 2, whole // 4]
    assert [row.bytes_by_role["activations"] for row in seed.rows] == [2 * whole // 2] * 3
    assert seed.below_floor and seed.bytes_compulsory == 5 * whole  # x, three weights, y
    assert not any(rt.estimate(graph, H200, name).below_floor for name in ("naive", "efficient"))


def test_the_seeds_vector_work_runs_at_a_share_of_the_headline():
    b = Builder()
    x = b.input(64, 64)
    y = b.binary("mul", b.mm(x, b.weight(64, 64)), x)
    est = rt.estimate(b.graph(y), H200, "seed-naive")
    peak = H200.peak("matrix", "bf16")
    assert [row.timing.t_comp for row in est.rows] == [
        2 * 64**3 / peak, 64 * 64 / (0.35 * peak)
    ]  # fmt: skip


# -- coverage --------------------------------------------------------------------------------------

rope = torch.library.Library("estimate_tests", "DEF")
rope.define("rope(Tensor x, Tensor table) -> Tensor")
rope.impl("rope", lambda x, table: torch.empty_like(x), "Meta")


class Custom(nn.Module):
    """Two layers, each with an operator that nobody has a rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.estimate_tests.rope(self.fc(x), self.table)


def test_an_op_without_a_rule_is_listed_and_its_bytes_are_counted():
    graph = rt.trace(Custom(), torch.empty(8, 16))
    est = rt.estimate(graph, H200, "eager")
    (unknown,) = est.unsupported_ops()
    each = FP32 * (8 * 16 + 16 + 8 * 16)
    assert (unknown.target, unknown.count) == ("estimate_tests.rope.default", 2)
    assert (unknown.bytes, unknown.modules) == (2 * each, ("layers.*",))
    assert unknown.shapes == "fp32[8, 16], fp32[16]"
    assert '@rooftrace.extend.rule("estimate_tests.rope")' in unknown.stub
    assert est.coverage.ops == 4 and est.coverage.ops_with_rule == 2
    linear = FP32 * (8 * 16 + 16 * 16 + 16 + 8 * 16)
    assert est.coverage.bytes_with_rule_share == pytest.approx(linear / (linear + each))
    assert [row.known for row in est.rows] == [True, False, True, False]


@own_rules()
def test_a_users_rule_makes_coverage_complete():
    graph = rt.trace(Custom(), torch.empty(8, 16))
    before = rt.estimate(graph, H200, "eager")

    @rt.extend.rule("estimate_tests::rope", fusion="pointwise")
    def rotate(op: rt.extend.OpView) -> Cost:
        return Cost.of(vector=6 * op.outputs[0].elements) + op.streamed()

    after = rt.estimate(graph, H200, "eager")
    assert after.unsupported_ops() == () and after.coverage.bytes_with_rule_share == 1
    assert after.flops == before.flops + 2 * 6 * 8 * 16
    assert after.bytes_hbm == before.bytes_hbm


@own_rules()
def test_the_stub_is_a_rule_that_runs():
    graph = rt.trace(Custom(), torch.empty(8, 16))
    (unknown,) = rt.estimate(graph, H200).unsupported_ops()
    exec(unknown.stub.replace("...", "1"), {"rooftrace": rt})
    assert rt.estimate(graph, H200).unsupported_ops() == ()


# -- breakdowns ------------------------------------------------------------------------------------


def test_a_group_is_named_after_the_op_that_computes_most():
    b = Builder()
    x, w, bias = b.input(64, 64), b.weight(64), b.weight(64)
    y = b.layer_norm(x, w, bias)
    z = b.unary("exp", y, module="other")
    b.ops[0] = structs.replace(b.ops[0], module="norm", family="norm")
    (row,) = rt.estimate(b.graph(z), H200).rows
    assert (row.module, row.family, row.name) == ("norm", "norm", "layer norm (fused)")
    assert (row.precision, row.ops) == ("fp32", (0, 1))


def test_breakdowns_by_depth_pattern_part_and_family(traced):
    est = rt.estimate(traced("llama", "training"), H200)
    patterns = est.by_pattern()
    mlp = patterns["model.layers.*.mlp.down_proj"]
    assert mlp["instances"] == 2 and mlp["calls"] >= 2 * 3  # forward and two products of backward
    assert set(est.by_part()) == {"forward", "backward", "optimizer"}
    assert {"attention", "dense", "norm", "optimizer"} <= set(est.by_family())
    assert set(est.by_module(1)) <= {"", "model", "lm_head"}
    for entries in (est.by_operator(), est.by_pattern()):
        shares = [row.share for row in entries.values()]
        assert sum(shares) == pytest.approx(1)
        assert all(a >= b for a, b in itertools.pairwise(shares))


def test_a_frame_has_a_line_per_kernel(traced):
    est = rt.estimate(traced("llama", "forward"), H200)
    frame = est.to_frame()
    assert len(frame) == est.kernels
    assert frame["bytes"].sum() == est.bytes_hbm and frame["flops"].sum() == est.flops
    roles = [name for name in frame.columns if name.startswith("bytes_") and name != "bytes_net"]
    assert (frame[roles].sum(axis=1) == frame["bytes"]).all()


def test_printing_shows_a_table(traced):
    text = str(rt.estimate(traced("llama", "forward"), H200))
    assert "forward" in text and "FLOP" in text


def test_factor_and_detection_together_are_refused(traced):
    with pytest.raises(ValueError, match="same effect"):
        rt.plan(traced("llama", "forward"), ExecutionModel(fusion="detected", elementwise=0.5))


def test_bytes_over_a_link_that_the_chip_lacks_are_refused_not_free():
    reduce = Op(0, "_c10d_functional.all_reduce.default", {"input": Ref(0)}, (0,), (1,))
    values = tuple(Tensor((1024,), "fp32", (1,), "activations", i) for i in range(2))
    graph = OpGraph("forward", values, (reduce,), (0,), (1,))
    chip = load_chip("h200-sxm")
    assert rt.estimate(graph, chip).times.t_net > 0
    with pytest.raises(MissingPeakError, match="h200-sxm has no link"):
        rt.estimate(graph, dataclasses.replace(chip, links=()))
