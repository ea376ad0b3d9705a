"""Compiled traces of which nobody noted what the compiler made: ops by the names of kernels."""

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion import plan
from rooftrace.errors import ProfileError, RequestError
from rooftrace.measured.alignment import FusedStep, KernelTime, kernel_times
from rooftrace.measured.alignment.compiled import family, is_launched, kernel_family, operands
from rooftrace.measured.alignment.compiled_steps import Agreement
from rooftrace.measured.alignment.stepcalls import Vocabulary, is_generated
from rooftrace.measured.bench import Bench
from rooftrace.measured.bench.replay import Compilations
from rooftrace.measured.bench.steps import profiler, real_inputs, real_step
from rooftrace.measured.profiles import read_trace
from tests.conftest import in_turn

from .profiles_support import GpuTrace

# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("triton_poi_fused_add_mul_3", {"add", "mul"}),
        ("triton_red_fused__softmax__to_copy_0", {"softmax", "to_copy"}),
        ("graph_5_cpp_fused__unsafe_view_gelu_12", {"unsafe_view", "gelu"}),
        ("cpp_fused_add_copy__relu_4", {"add", "copy", "relu"}),
        (
            "triton_per_fused_native_layer_norm_native_layer_norm_backward_7",
            {"native_layer_norm", "native_layer_norm_backward"},
        ),
        ("cpp_fused__scaled_dot_product_flash_attention_for_cpu_view_1", {"attention", "view"}),
        ("triton_tem_fused_addmm_gelu_9", {"addmm", "gelu"}),
        ("triton_poi_fused_0", set()),
        ("aten::addmm", {"addmm"}),
    ],
)
def test_the_words_of_a_kernels_name_are_its_ops(name: str, words: set[str]) -> None:
    assert Vocabulary([]).words(name).words == words


def test_of_two_readings_the_one_with_ops_of_the_graph_is_taken() -> None:
    def picked(x: Tensor, index: Tensor) -> Tensor:
        return x[0][index] + 1.0

    graph = rt.trace(picked, torch.ones(4, 8), torch.zeros(3, dtype=torch.long))
    assert Vocabulary(graph.ops).words("cpp_fused_index_select_0").words == {"index", "select"}
    assert Vocabulary([]).words("cpp_fused_index_select_0").words == {"index_select"}


def test_a_name_that_is_cut_ends_in_the_start_of_an_op() -> None:
    words = Vocabulary([]).words("triton_poi_fused_add_native_layer_no")
    assert words.words == {"add"} and words.start == "native_layer_no"
    assert words.names(frozenset({"native_layer_norm"})) and not words.names(frozenset({"relu"}))


@pytest.mark.parametrize(
    ("name", "generated"),
    [
        ("triton_poi_fused_add_0", True),
        ("graph_0_cpp_fused_gelu_1", True),
        ("my_model_triton_red_fused_sum_2", True),
        ("triton_poi_fused_0", True),
        ("aten::mm", False),
        ("_my_triton_kernel_0", False),
        ("sm90_xmma_gemm_bf16", False),
    ],
)
def test_kernels_that_inductor_wrote_are_told_by_their_names(name: str, generated: bool) -> None:
    assert is_generated(name) == generated


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("attn_fwd", "attention"),
        ("bwd_kernel_dk_dv", "attention_backward"),
        ("void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<...> >", "attention"),
        ("void ck_tile::FmhaBwdDQDKDVKernel<int>", "attention_backward"),
        ("void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16>(...)", "attention"),
        ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1", "product"),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<...>", "product"),
        ("void wvSplitK_hf_sml_<__hip_bfloat16, 64, 2>(...)", "product"),
        ("_ZN5aiter24bf16gemm_bf16_tn_256x256E", "product"),
        ("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt64x64x16", "convolution"),
        ("igemm_wrw_gtcx3_nhwc_bf16", "convolution_backward"),
        ("batched_transpose_256x4_half", "convolution"),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bE", ""),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add>(int)", ""),
    ],
)
def test_kernels_of_rocm_have_a_family(name: str, family: str) -> None:
    assert kernel_family(name) == family


def test_calls_of_a_library_are_told_apart_by_their_operands() -> None:
    sizes = ((64, 8), (8, 32))
    assert operands("aten::mm", sizes) == operands("aten::addmm", ((32,), *sizes))
    assert operands("aten::bmm", ((1, 64, 8), (1, 8, 32))) == operands("aten::mm", sizes)
    assert operands("mkldnn::_linear_pointwise", ((2, 32, 8), (32, 8))) == operands(
        "aten::mm", sizes
    )
    assert operands("aten::mm", sizes) != operands("aten::mm", ((64, 8), (8, 16)))
    assert family("mkldnn::_convolution_pointwise") == family("aten::convolution")
    assert kernel_family("sm80_xmma_dgrad_implicit_gemm_f32") == "convolution_backward"
    assert kernel_family("flash_fwd_kernel<64, 128>") == "attention"
    assert kernel_family("nvjet_tst_128x64") == "product" and not kernel_family("splitKreduce")


# -- traces of a GPU -------------------------------------------------------------------------------

Kernels = Sequence[str | tuple[str, Sequence[tuple[int, ...]]]]
PIECES = {"aten::mm": ("sm90_gemm_f32", "splitKreduce")}


def recorded(path: Path, kernels: Kernels, replayed: bool = False) -> Path:
    """The trace of one compiled step with these kernels of 1, 2, 3 ... us; a library's call has
    shapes."""
    trace = GpuTrace()

    def work() -> None:
        region = trace.op_event("Torch-Compiled Region: 0/0", [], trace.clock, 20.0 * len(kernels))
        for number, kernel in enumerate(kernels, 1):
            name, shapes = (kernel, ()) if isinstance(kernel, str) else kernel
            pieces = [(piece, float(number)) for piece in PIECES.get(name, (name,))]
            if shapes and not replayed:
                trace.op(name, shapes, pieces)
                continue
            for place, (piece, duration) in enumerate(pieces):
                trace.launch(piece, duration, trace.clock + 1 + place, region)
            trace.clock += 4

    trace.step(work)
    trace.clock += 1
    return trace.write(path / "step.json")


def chain(x: Tensor) -> Tensor:
    return ((x + 1.0).relu() * 2.0).tanh() @ x


MM = ("aten::mm", [(64, 64), (64, 64)])


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    return rt.trace(chain, torch.ones(64, 64))


def names_of(step: FusedStep) -> list[list[str]]:
    """The ops of each kernel, by name."""
    ops = step.detected.graph.ops
    return [[ops[op].name.partition(".")[2] for op in kernel.ops] for kernel in step.kernels]


@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "CUDA graph"])
def test_names_decide_what_was_fused(
    replayed: bool, graph: rt.types.OpGraph, tmp_path: Path
) -> None:
    """Less than we detect here: one kernel of four ops."""
    kernels = ["triton_poi_fused_add_relu_0", "triton_poi_fused_mul_tanh_1", MM]
    path = recorded(tmp_path, kernels, replayed)
    step = rt.tools.fused(path, graph)
    assert names_of(step)[:3] == [["add", "relu"], ["mul", "tanh"], ["mm"]]
    assert step.coverage == 1 and not step.unplaced
    assert step.by == "names" and "inferred by the names of kernels" in str(step)
    assert [d.kind for d in step.differences] == ["less"]
    assert rt.tools.fused(read_trace(path), graph) == step
    assert rt.tools.fused(str(path), graph) == step


def test_what_was_fused_more_comes_out(tmp_path: Path) -> None:
    def rows(x: Tensor) -> Tensor:
        return F.layer_norm(x, (64,)).cumsum(0).relu()

    graph = rt.trace(rows, torch.ones(64, 64))
    step = rt.tools.fused(
        recorded(tmp_path, ["triton_spl_fused_cumsum_native_layer_norm_relu_0"]), graph
    )
    assert names_of(step) == [["native_layer_norm", "cumsum", "relu"]]
    assert len(step.detected.groups) > 1


def test_an_op_that_the_graph_does_not_have_stays_without_ops(
    graph: rt.types.OpGraph, tmp_path: Path
) -> None:
    kernels = ["triton_poi_fused_cos_sin_0", "triton_poi_fused_add_mul_relu_tanh_1", MM]
    step = rt.tools.fused(recorded(tmp_path, kernels), graph)
    first = step.kernels[0]
    assert not first.ops and not first.parts and first.compiled
    assert names_of(step)[1:] == [["add", "relu", "mul", "tanh"], ["mm"]]
    assert step.coverage == pytest.approx(1 - first.seconds / step.seconds)


def test_ops_whose_names_stand_nowhere_are_not_in_a_kernel(tmp_path: Path) -> None:
    def ends(x: Tensor) -> Tensor:
        return (x + 1.0).exp().sin()

    graph = rt.trace(ends, torch.ones(64, 64))
    step = rt.tools.fused(recorded(tmp_path, ["triton_poi_fused_add_0"]), graph)
    assert names_of(step) == [["add"]]
    names = [step.detected.graph.ops[op].name for op in step.unplaced]
    assert names == ["aten.exp", "aten.sin"]


def test_a_kernel_whose_name_is_cut_has_its_ops(graph: rt.types.OpGraph, tmp_path: Path) -> None:
    step = rt.tools.fused(recorded(tmp_path, ["triton_poi_fused_add_mul_relu_tan", MM]), graph)
    assert names_of(step) == [["add", "relu", "mul", "tanh"], ["mm"]]


def test_kernels_in_another_order_than_the_program(tmp_path: Path) -> None:
    one, other = [(64, 32), (32, 64)], [(32, 64), (64, 32)]

    def joined(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x + 1.0).relu() @ y, (y * 2.0).tanh() @ x

    graph = rt.trace(joined, torch.ones(64, 32), torch.ones(32, 64))
    kernels: Kernels = [
        "triton_poi_fused_mul_tanh_0",
        ("aten::mm", other),
        "triton_poi_fused_add_relu_1",
        ("aten::mm", one),
    ]
    step = rt.tools.fused(recorded(tmp_path, kernels), graph)
    assert names_of(step) == [["mul", "tanh"], ["mm"], ["add", "relu"], ["mm"]]
    first, second = (step.kernels[place].ops[0] for place in (1, 3))
    assert first > second  # each product is the one of its sizes


def test_a_norm_of_two_kernels_is_in_the_one_that_applies_it(tmp_path: Path) -> None:
    def normed(x: Tensor) -> Tensor:
        return F.layer_norm(x + 1.0, (64,)).relu() @ x

    graph = rt.trace(normed, torch.ones(64, 64))
    kernels: Kernels = [
        "triton_red_fused_add_native_layer_norm_0",
        "triton_poi_fused_add_native_layer_norm_relu_1",
        MM,
    ]
    step = rt.tools.fused(recorded(tmp_path, kernels), graph)
    assert names_of(step) == [["add"], ["native_layer_norm", "relu"], ["mm"]]


def test_a_kernel_that_repeats_a_part_of_an_op_names_it(tmp_path: Path) -> None:
    def normed(x: Tensor) -> Tensor:
        return F.layer_norm(x, (64,)) @ x

    graph = rt.trace(normed, torch.ones(64, 64))
    kernels: Kernels = [
        "triton_red_fused_native_layer_norm_0",
        "triton_poi_fused_native_layer_norm_1",
        MM,
    ]
    step = rt.tools.fused(recorded(tmp_path, kernels), graph)
    assert step.kernels[0].parts == step.kernels[1].ops != ()
    assert step.coverage == 1


def test_a_library_that_adds_has_the_sum_of_the_program(tmp_path: Path) -> None:
    def added(x: Tensor, y: Tensor) -> Tensor:
        return x @ x + y

    graph = rt.trace(added, torch.ones(64, 64), torch.ones(64, 64))
    sizes = [(64, 64), (64, 64), (64, 64)]
    step = rt.tools.fused(recorded(tmp_path, [("aten::addmm", sizes)]), graph)
    assert names_of(step) == [["mm", "add"]]


def test_equal_kernels_of_two_layers_each_have_their_own(tmp_path: Path) -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.gelu(x @ x) + x
        return x

    graph = rt.trace(layers, torch.ones(64, 64))
    step = rt.tools.fused(recorded(tmp_path, [MM, "triton_poi_fused_add_gelu_0"] * 3), graph)
    assert names_of(step) == [["mm"], ["gelu", "add"]] * 3
    assert [op for kernel in step.kernels for op in kernel.ops] == sorted(
        op for kernel in step.kernels for op in kernel.ops
    )


def test_the_backward_begins_where_numbers_do(tmp_path: Path) -> None:
    """In a CUDA graph nothing else says so."""
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid())
    graph = rt.trace(module, torch.ones(64, 64), phase="training", optimizer="none")
    kernels: Kernels = [
        MM,
        "triton_poi_fused_sigmoid_0",
        "triton_poi_fused_sigmoid_backward_0",
        MM,
    ]
    step = rt.tools.fused(recorded(tmp_path, kernels, replayed=True), graph)
    ops = step.detected.graph.ops
    parts = [{ops[op].part for op in kernel.ops} for kernel in step.kernels if kernel.ops]
    assert parts == [{"forward"}, {"forward"}, {"backward"}, {"backward"}]


def test_a_trace_of_something_else_is_refused(graph: rt.types.OpGraph, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no call of step ProfilerStep#0 is of an op of"):
        rt.tools.fused(recorded(tmp_path, ["triton_poi_fused_cos_sin_0"]), graph)


WORDS = ("add", "relu", "mul", "tanh", "mm", "cos", "native_layer_norm", "view")
NAMES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5, unique=True)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(NAMES, st.just("library")), min_size=1, max_size=8))
def test_whatever_is_named_no_op_is_in_two_kernels(
    graph: rt.types.OpGraph, tmp_path: Path, listed: list[list[str] | str]
) -> None:
    kernels: list[str | tuple[str, Sequence[tuple[int, ...]]]] = [
        MM if isinstance(words, str) else f"triton_poi_fused_{'_'.join(sorted(words))}_{number}"
        for number, words in enumerate(listed)
    ]
    try:
        step = rt.tools.fused(recorded(tmp_path, kernels), graph)
    except ProfileError:
        assert not any({"add", "relu", "mul", "tanh", "mm"} & set(words) for words in listed)
        assert "library" not in listed
        return
    placed = [op for kernel in step.kernels for op in kernel.ops]
    assert len(placed) == len(set(placed))
    assert all(list(kernel.ops) == sorted(kernel.ops) for kernel in step.kernels)
    assert {op for group in step.measured.groups for op in group.ops} == {
        op.id for op in step.detected.graph.ops if is_launched(op)
    }
    assert sum(kernel.seconds for kernel in step.kernels) == pytest.approx(step.seconds)


# -- Inductor itself -------------------------------------------------------------------------------


class Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x).unflatten(-1, (4, 16)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        x = x + self.project(mixed)
        y: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return y


class Convolutions(nn.Module):
    """Two convolutions with norms, and a sum around them."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm, self.after = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.after(self.second(y)) + x)


def twice(
    module: nn.Module, x: Tensor, phase: str, path: Path
) -> tuple[tuple[KernelTime, ...], FusedStep]:
    """The kernels of one compiled step by what Inductor notes, and by names alone."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    noted = Compilations()
    if noted.trouble:
        pytest.skip(noted.trouble)
    torch._dynamo.reset()
    bench = Bench(torch.device("cpu"), 0.1, lambda line: None)
    inputs = real_inputs(module, (x,), {})
    step = real_step(module, inputs, phase, compiled=True, options=noted.options)
    step()
    step()
    with profiler(bench.device) as profile:
        step()
    profile.export_chrome_trace(str(path / "step.json"))
    graph = rt.trace(module, x, phase=phase)
    compiled = plan(graph.expand(), "compiled").graph
    times = kernel_times(read_trace(path / "step.json"), noted.graphs(), compiled)
    return times, rt.tools.fused(path / "step.json", graph)


MODULES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "attention": lambda: (nn.Sequential(Attention(), Attention()), torch.randn(8, 32, 64)),
    "convolutions": lambda: (
        nn.Sequential(Convolutions(), Convolutions()),
        torch.randn(2, 16, 32, 32),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "phase"), in_turn(MODULES, ["forward", "training"]))
def test_names_tell_what_the_compiler_notes(name: str, phase: str, tmp_path: Path) -> None:
    module, x = MODULES[name]()
    noted, step = twice(module if phase == "training" else module.eval(), x, phase, tmp_path)
    assert [kernel.name for kernel in step.kernels] == [kernel.name for kernel in noted]
    truth = {op: place for place, kernel in enumerate(noted) for op in kernel.ops}
    inferred = {op: place for place, kernel in enumerate(step.kernels) for op in kernel.ops}
    assert truth.keys() <= inferred.keys()
    wrong = {op: (inferred[op], place) for op, place in truth.items() if inferred[op] != place}
    assert len(wrong) <= 0.05 * len(truth), wrong
    # Of the last norm the notes have one op in the forward, and one in a call of a library.
    assert Agreement.of(inferred, truth).f1 >= 0.85
    covered = sum(kernel.seconds for kernel in noted if kernel.ops or kernel.parts)
    assert step.coverage >= 0.99 * covered / step.seconds
    assert any(re.match("cpp_fused", kernel.name) and kernel.ops for kernel in step.kernels)


# -- steps of the user's own -----------------------------------------------------------------------


def test_a_row_says_why_its_kernels_are_not_known(graph: rt.types.OpGraph) -> None:
    x = torch.ones(64, 64)

    def note(**settings: object) -> str:
        with rt.measuring(device="cpu", compiled=True, **settings) as steps:  # type: ignore[arg-type]
            for _ in range(4):
                with steps.step():
                    chain(x)
        (row,) = steps.run.models
        with pytest.raises(ProfileError, match="kernels are not known"):
            rt.tools.fused(row, graph)
        return row.note

    assert "compile the module inside the block, with steps.compile(module)" in note()
    assert "steps.compile(module)" in note(graph=graph)
    assert "no step was profiled" in note(graph=graph, profile=False)


def test_what_only_a_compiled_step_has_is_refused_for_another(graph: rt.types.OpGraph) -> None:
    with (
        pytest.raises(RequestError, match="expected compiled=True with it"),
        rt.measuring(device="cpu", graph=graph),
    ):
        pass
    with (
        pytest.raises(RequestError, match="compiled=True"),
        rt.measuring(device="cpu") as steps,
    ):
        steps.compile(chain)
    with (
        pytest.raises(RequestError, match=r"list_mode_options\('max-autotune'\)"),
        rt.measuring(device="cpu", compiled=True) as steps,
    ):
        steps.compile(chain, mode="max-autotune")


@pytest.mark.slow
def test_a_step_of_the_users_own_has_its_kernels(graph: rt.types.OpGraph) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    if Compilations().trouble:
        pytest.skip(Compilations().trouble)
    torch._dynamo.reset()
    x = torch.ones(64, 64)

    def rows(graph: rt.types.OpGraph | None) -> rt.types.Run:
        with rt.measuring("mine", device="cpu", compiled=True, graph=graph) as steps:
            called = steps.compile(chain)
            for _ in range(4):
                with steps.step():
                    called(x)
        return steps.run

    (row,) = rows(graph).models
    step = rt.tools.fused(row, graph)
    assert step.by == "provenance" and step.coverage == 1 and not step.unplaced and not row.note
    assert names_of(step) == [["add", "relu", "mul", "tanh"], ["mm"]]
    torch._dynamo.reset()
    (row,) = rows(None).models
    assert "measuring(..., graph=rooftrace.trace(...))" in row.note and not row.kernels
