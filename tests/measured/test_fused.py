"""Compiled steps: which ops share a kernel, by what Inductor says and what the profiler saw."""

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.costmodels.fusion import plan
from rooftrace.errors import ProfileError
from rooftrace.measured.alignment import FusedStep, KernelTime, kernel_times
from rooftrace.measured.alignment.compiled import (
    CompiledGraph,
    CompiledKernel,
    ProgramOp,
    call_name,
    is_launched,
    matched,
)
from rooftrace.measured.alignment.compiled_steps import Agreement, tangles
from rooftrace.measured.bench.replay import Compilations, _CompiledNode, _module, _NotedGraph
from rooftrace.measured.profiles import read_trace

from .profiles_support import GpuTrace

PARTITIONS = st.dictionaries(st.integers(0, 12), st.tuples(st.integers(0, 4), st.integers(0, 4)))


def pairs(kernels: Mapping[int, int]) -> set[tuple[int, int]]:
    both = itertools.combinations(sorted(kernels), 2)
    return {(a, b) for a, b in both if kernels[a] == kernels[b]}


@given(PARTITIONS)
def test_agreement_counts_pairs_of_ops(numbers: dict[int, tuple[int, int]]) -> None:
    ours = {op: a for op, (a, _) in numbers.items()}
    theirs = {op: b for op, (_, b) in numbers.items()}
    mine, yours = pairs(ours), pairs(theirs)
    score = Agreement.of(ours, theirs)
    assert score.ops == len(theirs)
    assert score.precision == (len(mine & yours) / len(mine) if mine else 1)
    assert score.recall == (len(mine & yours) / len(yours) if yours else 1)
    assert score.rand == pytest.approx(Agreement.of(theirs, ours).rand)
    assert Agreement.of(theirs, theirs).rand == Agreement.of(theirs, theirs).f1 == 1
    renamed = {op: 99 - kernel for op, kernel in ours.items()}
    assert Agreement.of(renamed, theirs) == score


def test_the_adjusted_rand_index_is_the_published_one() -> None:
    """The example of Hubert and Arabie's contingency table as Wikipedia and scikit-learn have it:
    labels 0 0 1 2 against 0 0 1 1 give 0.571."""
    score = Agreement.of(dict(enumerate([0, 0, 1, 2])), dict(enumerate([0, 0, 1, 1])))
    assert score.rand == pytest.approx(0.5714, abs=1e-4)


@given(PARTITIONS)
def test_tangles_are_what_hangs_together(numbers: dict[int, tuple[int, int]]) -> None:
    ours = {op: a for op, (a, _) in numbers.items()}
    theirs = {op: b for op, (_, b) in numbers.items()}
    listed = list(tangles(ours, theirs))
    assert sorted(k for left, _ in listed for k in left) == sorted(set(ours.values()))
    assert sorted(k for _, right in listed for k in right) == sorted(set(theirs.values()))
    for left, right in listed:
        assert {op for op in ours if ours[op] in left} == {op for op in ours if theirs[op] in right}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("extern_kernels.addmm:3", "aten::addmm"),
        ("torch.ops.mkldnn._linear_pointwise.default:1", "mkldnn::_linear_pointwise"),
        ("aten.randint.low_out:6", "aten::randint"),
        ("aten.native_layer_norm.default", "aten::native_layer_norm"),
        ("cpp_fused_gelu_view_1:4", "cpp_fused_gelu_view_1"),
        ("triton_poi_fused_add_mul_3", "triton_poi_fused_add_mul_3"),
    ],
)
def test_names_of_calls_are_those_of_the_profiler(written: str, shown: str) -> None:
    assert call_name(written) == shown


@pytest.mark.parametrize(
    "path",
    [
        "L['self'].layers.0.norm",
        "L['fn'].layers[0].norm",
        "L['self']._modules['layers']._modules['0'].norm",
        "getattr(getattr(L['self'], 'layers'), '0').norm",
    ],
)
def test_paths_of_modules_are_ours(path: str) -> None:
    assert _module(path) == "layers.0.norm"


def test_the_root_has_no_path() -> None:
    assert _module("L['self']") == _module("L['fn']") == ""


def test_an_op_is_in_the_first_kernel_with_most_of_it_and_in_a_librarys_before_all() -> None:
    ops = tuple(ProgramOp(f"aten::{name}") for name in ("native_layer_norm", "add", "mm"))
    kernels = (
        CompiledKernel("cpp_fused_0", {0: 2, 1: 1}),
        CompiledKernel("cpp_fused_1", {0: 5, 1: 1, 2: 3}),  # it also makes room for the product
        CompiledKernel("aten::mm", {2: 1}),
    )
    assert CompiledGraph(ops, kernels).homes() == {0: 1, 1: 0, 2: 2}


# -- whose op it is --------------------------------------------------------------------------------


class Block(nn.Module):
    """A norm, a product and an activation, twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


def program_ops(graph: rt.types.OpGraph) -> list[ProgramOp]:
    """The ops of a graph as a compiler would have been given them."""
    return [
        ProgramOp(op.name.replace(".", "::", 1), op.module, op.part == "backward")
        for op in graph.ops
    ]


def test_each_op_finds_itself_also_among_moved_and_missing_ones() -> None:
    module = nn.Sequential(Block(), Block())
    graph = rt.trace(module, torch.ones(4, 16), phase="training", optimizer="none").expand()
    ops = program_ops(graph)
    kept = [i for i, op in enumerate(graph.ops) if is_launched(op)]
    forward = [i for i in kept if not ops[i].backward]
    backward = [i for i in kept if ops[i].backward]
    graphs = [CompiledGraph(tuple(ops[i] for i in part), ()) for part in (forward, backward)]
    assert matched(graphs, graph) == [dict(enumerate(forward)), dict(enumerate(backward))]
    fewer = forward[:3] + forward[4:]  # merged with another one
    graphs[0] = CompiledGraph(tuple(ops[i] for i in fewer), ())
    assert matched(graphs, graph)[0] == dict(enumerate(fewer))


class Checkpointed(nn.Module):
    """A block that runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


def test_what_runs_again_in_backward_is_told_from_its_first_run() -> None:
    graph = rt.trace(Checkpointed(), torch.ones(4, 16), phase="training", optimizer="none").expand()
    ops, kept = program_ops(graph), [op for op in graph.ops if is_launched(op)]
    forward = [op.id for op in kept if op.part == "forward"]
    backward = [op.id for op in kept if op.part in ("recompute", "backward")]
    assert {graph.ops[i].part for i in backward} == {"recompute", "backward"}
    graphs = [CompiledGraph(tuple(ops[i] for i in part), ()) for part in (forward, backward)]
    assert matched(graphs, graph) == [dict(enumerate(forward)), dict(enumerate(backward))]


def test_the_parts_of_an_op_belong_to_it() -> None:
    """RMS norm is one op here, and five in a compiler."""
    graph = rt.trace(nn.Sequential(Block(), Block()), torch.ones(4, 16))
    graph = graph.expand()
    names = [op.name for op in graph.ops]
    if "rooftrace.rms_norm" not in names:
        pytest.skip("this release of torch has no kernel for it")
    theirs: list[ProgramOp] = []
    for op in program_ops(graph):
        if op.name == "rooftrace::rms_norm":
            parts = ("pow", "mean", "add", "rsqrt", "mul", "mul")
            theirs += [ProgramOp(f"aten::{part}", op.module) for part in parts]
        else:
            theirs.append(op)
    (partner,) = matched([CompiledGraph(tuple(theirs), ())], graph)
    for place, op in enumerate(theirs):
        if op.module.endswith("norm"):
            whole = graph.ops[partner[place]]
            assert (whole.name, whole.module) == ("rooftrace.rms_norm", op.module)


def test_what_another_release_does_otherwise_ends_no_measurement() -> None:
    noted = Compilations()
    scheduled = [object()]
    noted._note(scheduled)
    assert noted._note(scheduled) is scheduled and "AttributeError" in noted.trouble


def test_a_call_of_a_library_is_of_the_op_of_its_name() -> None:
    """Inductor also notes what prepares its operands, in any order."""

    def node(name: str, original: str) -> _CompiledNode:
        return _CompiledNode(name, original, original, "", False, "", (name,))

    name = "_scaled_dot_product_flash_attention_for_cpu"
    nodes = [node("cat", "aten.cat.default"), node("mix", f"aten.{name}.default")]
    nodes.append(node("late", "aten.cat.default"))
    written = {f"torch.ops.aten.{name}.default:1": ["mix", "late", "cat"]}
    (kernel,) = _NotedGraph(nodes, written, 0, {}).graph().kernels
    assert kernel == CompiledKernel(f"aten::{name}", {1: 1})


# -- beside a graph --------------------------------------------------------------------------------


class Row:
    """A measured step with these kernels."""

    key, note = "a step", ""

    def __init__(self, *kernels: KernelTime) -> None:
        self.kernels = kernels


def row_of(graph: rt.types.OpGraph, *kernels: tuple[str, tuple[int, ...], float]) -> Row:
    return Row(
        *(
            KernelTime(
                name=name,
                seconds=seconds,
                ops=ops,
                targets=tuple(graph.ops[op].target for op in ops),
                compiled=True,
            )
            for name, ops, seconds in kernels
        )
    )


def chain(x: Tensor) -> Tensor:
    return ((x + 1.0).relu() * 2.0).tanh() @ x


def test_kernels_are_priced_as_they_were_measured_and_differences_are_told() -> None:
    x = torch.ones(64, 64)
    graph = rt.trace(chain, x)
    compiled = plan(graph.expand(), "compiled").graph
    add, relu, mul, tanh, mm = (op.id for op in compiled.ops if is_launched(op))
    row = row_of(
        compiled,
        ("triton_poi_fused_add_relu_0", (add, relu), 2e-6),
        ("triton_poi_fused_mul_tanh_1", (mul, tanh), 3e-6),
        ("aten::mm", (mm,), 5e-6),
    )
    step = rt.tools.fused(row, graph)
    size = 64 * 64 * 4
    assert step.detected.bytes.total == 2 * size + 3 * size  # one kernel of four ops, one product
    assert step.measured.bytes.total == 2 * 2 * size + 3 * size
    assert step.unfused.bytes.total == 4 * 2 * size + 3 * size
    (difference,) = step.differences
    assert (difference.kind, difference.detected, difference.measured) == ("less", 1, 2)
    assert difference.bytes_measured - difference.bytes_detected == 2 * size
    assert difference.seconds == pytest.approx(5e-6)
    assert step.agreement.precision == pytest.approx(2 / 6) and step.agreement.recall == 1
    assert step.coverage == 1 and not step.unplaced
    assert rt.estimate(step.measured, "h100-sxm").plan.execution.name == "measured"
    assert "fused less: 4 ops in 2 kernels, not 1" in str(step)
    # What was fused moves as much as it has to, and nothing else changes.
    assert step.measured.total.flops() == step.unfused.total.flops() == step.detected.total.flops()


def test_what_is_in_no_kernel_is_told_and_stands_alone() -> None:
    graph = rt.trace(chain, torch.ones(64, 64))
    compiled = plan(graph.expand(), "compiled").graph
    launched = [op.id for op in compiled.ops if is_launched(op)]
    step = rt.tools.fused(
        row_of(compiled, ("cpp_fused_0", tuple(launched[:2]), 1e-6), ("aten::item", (), 1e-6)),
        graph,
    )
    assert step.unplaced == tuple(launched[2:])
    assert step.coverage == pytest.approx(0.5)
    assert {op for group in step.measured.groups for op in group.ops} == set(launched)


def test_a_row_of_another_step_is_refused() -> None:
    graph = rt.trace(chain, torch.ones(64, 64))
    other = rt.trace(lambda x: x.exp().cos(), torch.ones(64, 64))
    row = row_of(plan(graph.expand(), "compiled").graph, ("cpp_fused_0", (0, 1), 1e-6))
    with pytest.raises(ProfileError, match=r"op 0 is aten.add.Tensor in the run and aten.exp"):
        rt.tools.fused(row, other)
    with pytest.raises(ProfileError, match="no kernels were measured"):
        rt.tools.fused(Row(), graph)


# -- traces of a GPU ------------------------------------------------------------------------------


def compiled_chain(graph: rt.types.OpGraph) -> CompiledGraph:
    """`chain` as a compiler that fuses two and two would have made it."""
    names = [call_name(op.target) for op in graph.ops if is_launched(op)]
    kernels = (
        CompiledKernel("triton_poi_fused_add_relu_0", {0: 1, 1: 1}),
        CompiledKernel("triton_poi_fused_mul_tanh_1", {2: 1, 3: 1}),
        CompiledKernel("aten::mm", {4: 1}),
    )
    return CompiledGraph(tuple(map(ProgramOp, names)), kernels)


@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "CUDA graph"])
def test_kernels_on_a_device_have_their_ops(replayed: bool, tmp_path: Path) -> None:
    """Generated kernels are launched by the compiled region itself; in a CUDA graph all are."""
    graph = plan(rt.trace(chain, torch.ones(64, 64)).expand(), "compiled").graph
    add, relu, mul, tanh, mm = (op.id for op in graph.ops if is_launched(op))
    trace = GpuTrace()

    def work() -> None:
        region = trace.op_event("Torch-Compiled Region: 0/0", [], trace.clock, 100.0)
        trace.launch("triton_poi_fused_add_relu_0", 4.0, trace.clock + 1, region)
        trace.launch("triton_poi_fused_mul_tanh_1", 6.0, trace.clock + 3, region)
        trace.clock += 10
        pieces = [("sm90_gemm_split", 7.0), ("splitKreduce", 2.0)]
        if replayed:
            for place, (name, duration) in enumerate(pieces):
                trace.launch(name, duration, trace.clock + place, region)
        else:
            trace.op("aten::mm", [(64, 64), (64, 64)], pieces)
        trace.clock += 80

    trace.step(work)
    trace.clock += 1
    times = kernel_times(
        read_trace(trace.write(tmp_path / "t.json")), [compiled_chain(graph)], graph
    )
    assert sum(kernel.seconds for kernel in times) == pytest.approx(19e-6)
    by_op = {op: kernel for kernel in times for op in kernel.ops}
    assert by_op[add] is by_op[relu] and by_op[add].seconds == pytest.approx(4e-6)
    assert by_op[mul] is by_op[tanh] and by_op[mul].seconds == pytest.approx(6e-6)
    of_product = [kernel for kernel in times if mm in (*kernel.ops, *kernel.parts)]
    assert sum(kernel.seconds for kernel in of_product) == pytest.approx(9e-6)
    assert all(kernel.ops or kernel.parts for kernel in times)


def test_a_gradient_that_autograd_copies_is_a_part_of_the_op_that_made_it(tmp_path: Path) -> None:
    """A compiler lays it out otherwise than the weight; our graph has no op for that."""
    module = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))
    graph = rt.trace(module, torch.ones(4, 64), phase="training", optimizer="none").expand()
    trace = GpuTrace()
    wrapper = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    trace.step(lambda: trace.op("aten::clone", [(16, 32)], [("copy_kernel", 3.0)], wrapper))
    trace.clock += 1
    (kernel,) = kernel_times(read_trace(trace.write(tmp_path / "t.json")), [], graph)
    (maker,) = kernel.parts
    made = graph.values[graph.ops[maker].outputs[0]]
    assert not kernel.ops and (made.shape, made.role) == ((16, 32), "gradients")
    assert kernel.seconds == pytest.approx(3e-6)


# -- Inductor itself -------------------------------------------------------------------------------


class Layer(nn.Module):
    """What a layer of a transformer has."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x).unflatten(-1, (4, 16)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        return x + F.dropout(self.down(F.gelu(self.up(self.after(x)))), 0.1, self.training)


@pytest.fixture(scope="module")
def measured() -> tuple[rt.types.Run, FusedStep]:
    """A training step through Inductor, on this CPU."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    if Compilations().trouble:
        pytest.skip(Compilations().trouble)
    torch._dynamo.reset()
    module = nn.Sequential(Layer(), Layer())
    x = torch.randn(32, 64, 64)
    run = rt.measure(module, x, phase="training", compiled=True, budget_s=0.2)
    return run, rt.tools.fused(run.models[0], rt.trace(module, x, phase="training"))


@pytest.mark.slow
def test_every_second_of_a_compiled_step_belongs_to_its_ops(
    measured: tuple[rt.types.Run, FusedStep],
) -> None:
    _, step = measured
    assert step.coverage >= 0.97, [k for k in step.kernels if not k.ops and not k.parts]
    assert not step.unplaced
    placed = [op for kernel in step.kernels for op in kernel.ops]
    assert len(placed) == len(set(placed))
    parts = {op.part for op in step.detected.graph.ops if op.id in placed}
    assert parts == {"forward", "backward", "optimizer"}
    assert all(kernel.seconds > 0 for kernel in step.kernels)


@pytest.mark.slow
def test_a_kernels_own_name_lists_its_ops(measured: tuple[rt.types.Run, FusedStep]) -> None:
    """Inductor writes the ops of a kernel into its name; we read them elsewhere."""
    _, step = measured
    ops, seen = step.detected.graph.ops, 0
    for kernel in step.kernels:
        for op in kernel.ops:
            name = ops[op].name.partition(".")[2].strip("_")
            if kernel.generated and not ops[op].name.startswith("rooftrace."):
                assert name in kernel.name, (kernel, ops[op].name)
                seen += 1
            elif kernel.compiled and "_norm" not in name and "attention" not in name:
                assert name in kernel.name, (kernel, ops[op].name)
    assert seen >= 20


@pytest.mark.slow
def test_measured_kernels_move_less_than_ops_alone_and_more_than_has_to_be(
    measured: tuple[rt.types.Run, FusedStep],
) -> None:
    _, step = measured
    assert step.detected.compulsory <= step.measured.bytes.total <= step.unfused.bytes.total
    assert 0 < step.activation_fusion < 1 and 0 < step.elementwise <= 1
    assert step.measured.total.flops() == step.unfused.total.flops()


@pytest.mark.slow
def test_a_run_keeps_its_kernels(measured: tuple[rt.types.Run, FusedStep], tmp_path: Path) -> None:
    run, step = measured
    again = rt.types.Run.load(run.save(tmp_path / "run.json.gz"))
    assert again.models[0].kernels == run.models[0].kernels == step.kernels
