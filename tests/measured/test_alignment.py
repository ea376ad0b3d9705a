"""Which op of a graph a measured second belongs to."""

from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import ProfileError
from rooftrace.graph.graph import OpGraph
from rooftrace.measured.alignment import keys as module
from rooftrace.measured.alignment.aligning import align
from rooftrace.measured.alignment.keys import common, key_of_call, written_out
from rooftrace.measured.profiles.kineto import read_trace
from tests.measured.profiles_support import GpuTrace, Stack, run_on_cpu

pytestmark = pytest.mark.quick

US = 1e-6


@pytest.fixture(scope="module")
def stack() -> OpGraph:
    return rt.trace(Stack(), torch.empty(4, 32))


def test_written_out_is_the_order_of_expand(stack: OpGraph) -> None:
    training = rt.trace(Stack(), torch.empty(4, 32), phase="training")
    assert stack.repeats and training.repeats
    for graph in (stack, training):
        order = written_out(graph)
        assert [graph.ops[i].target for i, _ in order] == [op.target for op in graph.expand().ops]
        counts = {op.id: sum(i == op.id for i, _ in order) for op in graph.ops}
        assert counts == {op.id: graph.times(op) for op in graph.ops}


# -- by order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_a_run_on_the_cpu_finds_its_ops(tmp_path: Path, phase: str) -> None:
    model, x = Stack(), torch.randn(4, 32)

    def step() -> None:
        y = model(x)
        if phase == "training":
            y.backward(torch.ones_like(y))
            model.zero_grad()

    profile = read_trace(run_on_cpu(step, tmp_path / "cpu.json"))
    options = {"optimizer": "none"} if phase == "training" else {}
    found = align(profile, graph := rt.trace(model, x, phase=phase, **options))
    assert found.how == "order"
    assert found.coverage > 0.9 and found.ops_matched_share > 0.9
    product = next(op for op in graph.ops if op.name == "aten.addmm" and op.repeats)
    assert len(found.measured[product.id].seconds) == graph.times(product)


def test_kernels_of_every_iteration_are_found(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(3):
        trace.run(stack, duration=lambda op: 20.0 + op)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert found.coverage == pytest.approx(1) and not found.only_in_graph
    for op in stack.kernels():
        one = found.measured[op.id]
        assert one.seconds == pytest.approx([(20 + op.id) * US] * stack.times(op))
        assert one.kernels == 1
    assert found.seconds == {op: one.total for op, one in found.measured.items()}


def test_what_only_the_trace_has_is_listed_and_lowers_the_coverage(
    stack: OpGraph, tmp_path: Path
) -> None:
    trace = GpuTrace()
    trace.run(stack)
    kernels = sum(stack.times(op) for op in stack.kernels())
    trace.clock -= 1
    trace.op("mylib::extra", [(4, 32)], [("extra", 20.0)])
    trace.events[-1]["ts"] = trace.clock
    step = next(e for e in trace.events if e["name"] == "ProfilerStep#0")
    step["dur"] += GpuTrace.HOST
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert [(s.name, s.count) for s in found.only_in_trace] == [("mylib::extra", 1)]
    assert found.coverage == pytest.approx(kernels / (kernels + 1))


def test_what_only_the_graph_has_is_listed(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.run(stack)
    gelus = tuple(op.id for op in stack.ops if op.name == "aten.gelu")
    trace.events = [e for e in trace.events if "gelu" not in e["name"]]
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert found.only_in_graph == gelus


def test_a_trace_of_another_model_names_the_first_difference(
    stack: OpGraph, tmp_path: Path
) -> None:
    trace = GpuTrace()
    trace.run(rt.trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.empty(1, 3, 8, 8)))
    with pytest.raises(ProfileError, match="not a run of this graph") as caught:
        align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    text = str(caught.value)
    assert "the trace has aten::linear [[1, 3, 8, 8]" in text
    assert "aten::native_layer_norm [[4, 32]" in text and "blocks.0.norm" in text
    assert "0 % of its measured time" in text


def test_a_trace_of_other_sizes_says_so(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.run(rt.trace(Stack(), torch.empty(16, 32)))
    with pytest.raises(ProfileError, match="the names agree and the sizes do not"):
        align(read_trace(trace.write(tmp_path / "gpu.json")), stack)


def test_a_trace_without_shapes_says_how_to_record_them(stack: OpGraph, tmp_path: Path) -> None:
    model, x = Stack(), torch.randn(4, 32)
    path = run_on_cpu(lambda: model(x), tmp_path / "cpu.json", record_shapes=False)
    with pytest.raises(ProfileError, match="record_shapes=True"):
        align(read_trace(path), stack)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("rooftrace::attention", "aten::_scaled_dot_product_flash_attention"),
        ("rooftrace::attention", "aten::scaled_dot_product_attention"),
        ("rooftrace::attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward"),
        ("rooftrace::attention_backward", "aten::_efficient_attention_backward"),
        ("aten::native_batch_norm", "aten::cudnn_batch_norm"),
        ("aten::native_batch_norm_backward", "aten::cudnn_batch_norm_backward"),
        ("rooftrace::rnn", "aten::_cudnn_rnn"),
        ("aten::native_dropout", "aten::dropout"),
        ("aten::add", "aten::add_"),
    ],
)
def test_names_by_backend_are_one(ours: str, theirs: str) -> None:
    shapes = ((2, 8, 16, 64), (2, 8, 16, 64))
    assert key_of_call(ours, shapes) == key_of_call(theirs, (*shapes, (), ()))


def test_other_names_and_lists_of_tensors_stay_apart() -> None:
    assert key_of_call("aten::mm", ((2, 3),)) != key_of_call("aten::bmm", ((2, 3),))
    assert key_of_call("aten::cat", (((2, 3), (4, 3)), ())) == ("aten::cat", ((2, 3), (4, 3)))


def test_long_sequences_are_matched_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [(f"op{i % 7}", ()) for i in range(1000)]
    have = [key for i, key in enumerate(wanted) if i % 50 != 49]  # every fiftieth is missing
    exact = common(have, wanted)
    monkeypatch.setattr(module, "_WINDOW", 64)
    pieces = common(have, wanted)
    assert len(exact) == len(have)
    assert len(pieces) >= 0.98 * len(have)
    assert pieces == sorted(pieces)
    assert all(have[i] == wanted[j] for i, j in pieces)


# -- by annotation -------------------------------------------------------------------------------


def test_marks_say_which_op_it_is(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.run(stack, duration=lambda op: 20.0 + op, marks=True)
    for event in trace.events:  # shapes are not needed
        event.get("args", {}).pop("Input Dims", None)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert found.how == "annotations" and found.coverage == pytest.approx(1)
    for op in stack.kernels():
        assert found.measured[op.id].total == pytest.approx((20 + op.id) * US * stack.times(op))


def test_marks_of_another_graph_are_refused(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.step(lambda: trace.op("aten::mm", [(2, 2)], [("gemm", 1.0)], mark="op 4000"))
    with pytest.raises(ProfileError, match='the trace has "op 4000"'):
        align(read_trace(trace.write(tmp_path / "gpu.json")), stack)


def test_passes_without_steps_are_told_apart(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(3):
        trace.run(stack, duration=lambda op: 20.0 + op, marks=True)
    trace.events = [e for e in trace.events if not e["name"].startswith("ProfilerStep")]
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    for op in stack.kernels():
        assert found.measured[op.id].total == pytest.approx((20 + op.id) * US * stack.times(op))


def test_marks_may_number_the_ops_of_the_short_graph(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(2):
        trace.run(stack, duration=lambda op: 20.0 + op, marks=True)
    order = iter([op for op, _ in written_out(stack)] * 2)
    for event in trace.events:
        if event["name"].startswith("op "):
            event["name"] = f"op {next(order)}"
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    for op in stack.kernels():
        assert found.measured[op.id].seconds == pytest.approx([(20 + op.id) * US] * stack.times(op))
