"""Which ops are one kernel on CUDA, by operands and by the release of PyTorch that runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.tracer.job import Job
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.phases.apart import ProcessPlace, _json_of, job_from_json
from rooftrace.tracer.recording.releases import Release, installed_release, read_release

pytestmark = pytest.mark.quick

B, H, S, E = 2, 4, 16, 32
HALF, SINGLE = torch.float16, torch.float32


class Sdpa(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options)


def operand(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(*(shape or (B, H, S, E)), dtype=dtype, device="meta")


def is_one(*args: Tensor, torch: str | None = None, **options: Any) -> bool:
    """Whether an attention is one op; if it is none, the softmax says why."""
    graph = rt.trace(Sdpa(**options), *args, torch=torch)
    whole = any(op.name == "rooftrace.attention" for op in graph.ops)
    reasons = [op.facts["unfused_attention"] for op in graph.ops if "unfused_attention" in op.facts]
    assert len(reasons) == (0 if whole else 1)
    return whole


class Log(TorchDispatchMode):
    """The ops that PyTorch itself takes an op apart into."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func.namespace}.{func._opname}")
        return func(*args, **(kwargs or {}))


def every(graph: rt.types.OpGraph) -> list[str]:
    return [op.name for op in graph.ops]


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "whole"),
    [((B, H, S, E), True), ((2, B, H, S, E), False), ((H, S, E), False), ((S, E), False)],
)
def test_kernels_take_four_dimensions(shape: tuple[int, ...], whole: bool) -> None:
    x = operand(*shape)
    assert is_one(x, x, x) is whole


def test_kernels_take_halves_and_fp32_and_no_other_number() -> None:
    for dtype, whole in ((HALF, True), (torch.bfloat16, True), (SINGLE, True)):
        x = operand(dtype=dtype)
        assert is_one(x, x, x) is whole
    double = operand(dtype=torch.float64)
    assert not is_one(double, double, double)


def test_flash_takes_any_width_up_to_its_widest_and_the_other_kernel_whole_loads() -> None:
    mask = operand(S, S)
    for width, plain, masked in ((36, True, False), (40, True, True), (264, True, True)):
        x = operand(B, H, S, width)
        assert is_one(x, x, x) is plain
        assert is_one(x, x, x, mask) is masked
    x = operand(B, H, S, 260)  # too wide for flash, and no multiple of 8
    assert not is_one(x, x, x)
    single = operand(B, H, S, 36, dtype=SINGLE)  # a load of 16 bytes is four numbers
    assert is_one(single, single, single, operand(S, S, dtype=SINGLE))


def test_the_width_is_innermost_in_memory_and_so_are_the_keys_of_a_mask() -> None:
    x, turned = operand(), operand(B, H, E, S).transpose(-1, -2)
    assert not is_one(turned, x, x)
    assert is_one(x, x, x, operand(B, 1, 1, S))

    class OfRows(nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, rows.expand(B, 1, S, S))

    graph = rt.trace(OfRows(), x, operand(B, 1, S, 1))
    assert "rooftrace.attention" not in every(graph)


def test_batches_and_heads_do_not_broadcast() -> None:
    x, one = operand(), operand(1, H, S, E)
    assert not is_one(x, one, one)
    shared = operand(B, 1, S, E)
    assert not is_one(x, shared, shared)
    assert is_one(x, shared, shared, enable_gqa=True)


def test_grouped_heads_with_a_mask_have_no_kernel_where_cudnn_is_not_first() -> None:
    x, shared, mask = operand(), operand(B, 2, S, E), operand(S, S)
    assert is_one(x, shared, shared, mask, enable_gqa=True, torch="2.9")
    assert not is_one(x, shared, shared, mask, enable_gqa=True, torch="2.8")
    assert is_one(x, shared, shared, enable_gqa=True, torch="2.8")


def test_old_releases_take_less() -> None:
    x, mask, wide = operand(), operand(S, S), operand(B, H, S, 160)
    assert not is_one(x, x, x, mask, torch="2.0") and is_one(x, x, x, mask, torch="2.1")
    assert is_one(wide, wide, wide, torch="2.1")  # by the memory-efficient kernel
    odd = operand(B, H, S, 150)
    assert not is_one(odd, odd, odd, torch="2.1") and is_one(odd, odd, odd, torch="2.2")


def test_a_region_that_asks_for_the_products_gets_them() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = operand()
    with sdpa_kernel(SDPBackend.MATH):
        assert not is_one(x, x, x)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert is_one(x, x, x)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_it_is_taken_apart_as_torch_does(dtype: torch.dtype, options: dict[str, Any]) -> None:
    x = operand(2, B, H, S, E, dtype=dtype)
    graph = rt.trace(Sdpa(**options), x, x, x)
    with Log() as log:
        torch.ops.aten._scaled_dot_product_attention_math(
            x, x, x, None, options.get("dropout_p", 0.0), options.get("is_causal", False)
        )
    views = {"aten.detach", "aten.alias"}
    aside = {"aten.empty_like", "aten.bernoulli_", "aten.div_", "aten.native_dropout", "aten.mul"}
    assert [n for n in every(graph) if n not in views | aside] == [
        n for n in log.seen if n not in views | aside
    ]


@pytest.mark.parametrize("release", [None, "2.4"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_taken_apart_gives_the_numbers_of_attention(
    release: str | None, masked: bool
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, B, H, S, E).unbind()
    given = [q, k, v, torch.ones(S, S, dtype=torch.bool).tril()] if masked else [q, k, v]
    graph = rt.trace(Sdpa(), *given, torch=release)
    assert "rooftrace.attention" not in every(graph)
    torch.testing.assert_close(to_fx(graph)(*given)[0], Sdpa()(*given))


def test_halves_are_computed_in_fp32_from_2_5_on() -> None:
    x = operand(2, B, H, S, E)
    for release, dtype in (("2.4", "fp16"), ("2.5", "fp32")):
        graph = rt.trace(Sdpa(), x, x, x, torch=release)
        products = [op for op in graph.ops if op.name == "aten.bmm"]
        assert {graph.values[op.outputs[0]].dtype for op in products} == {dtype}


def test_its_backward_is_products_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            y = self.proj(x)
            return F.scaled_dot_product_attention(y, y, y).sum()

    x = operand(2, B, H, S, E, dtype=SINGLE)
    graph = rt.trace(Net().to("meta"), x, phase="training", optimizer="none")
    parts = {"forward": 0, "backward": 0}
    for op in graph.ops:
        if op.name == "aten.bmm":
            parts[op.part] += 1
    assert parts == {"forward": 2, "backward": 4}  # of two products, two gradients each


@pytest.mark.parametrize("execution", ["eager", "compiled", "efficient"])
def test_no_execution_makes_a_kernel_of_it_again_and_each_says_why(execution: str) -> None:
    x = operand(2, B, H, S, E)
    estimate = rt.estimate(rt.trace(Sdpa(), x, x, x), chip="l4", execution=execution)
    assert not any("attention" in row.name for row in estimate.rows)
    (why,) = (note for note in estimate.plan.notes if "attention" in note)
    assert why.startswith(
        "1 attention without a kernel of its own on CUDA, as operands have 5 dimensions, not 4"
    )


def test_attention_of_pytorch_1_has_no_kernel_of_its_own() -> None:
    x = operand()
    estimate = rt.estimate(rt.trace(Sdpa(), x, x, x, torch="1.13"), chip="l4", execution="eager")
    assert [row.name for row in estimate.rows].count("aten.bmm") == 2
    assert estimate.plan.notes[-1].startswith(
        "1 attention without a kernel of its own on CUDA, as torch 1.13 has none"
    )


def test_fp32_and_masks_of_numbers_run_on_the_memory_efficient_kernel() -> None:
    single, half = operand(dtype=SINGLE), operand()
    named = {
        "flash attention": (half, half, half),
        "memory-efficient attention": (half, half, half, operand(S, S)),
    }
    for name, args in named.items():
        (row,) = rt.estimate(rt.trace(Sdpa(), *args), chip="l4", execution="eager").rows
        assert row.name == name
    graph = rt.trace(Sdpa(), single, single, single)
    names = [
        rt.estimate(graph, chip="l4", execution="eager", **options).rows[0].name
        for options in ({}, {"dtype": "bf16"})
    ]
    assert names == ["memory-efficient attention", "flash attention"]


# -- norms -----------------------------------------------------------------------------------------


def test_rms_norm_is_spelled_out_before_2_9_as_torch_spells_it() -> None:
    x = torch.empty(8, 64, device="meta")
    norm = nn.RMSNorm(64, device="meta")
    spelled = rt.trace(norm, x, torch="2.8")
    with Log() as log, torch.no_grad():
        norm(x)
    kernels = [op.name for op in spelled.ops if op.kind == "kernel"]
    assert kernels == [name for name in log.seen if name not in ("aten.detach", "aten.view")]
    assert len(kernels) == 6
    for release in ("2.9", "2.11", None):
        assert every(rt.trace(norm, x, torch=release)) == ["rooftrace.rms_norm"]


def test_a_norm_spelled_out_moves_the_bytes_of_each_of_its_kernels() -> None:
    rows, width = 8, 64
    graph = rt.trace(nn.RMSNorm(width), torch.empty(rows, width), torch="2.8")
    moved = {row.name: row.bytes for row in rt.estimate(graph, chip="l4", execution="eager").rows}
    whole, each, gain = 4 * rows * width, 4 * rows, 4 * width
    assert moved["aten.pow"] == 2 * whole
    assert moved["aten.mean"] == whole + each
    assert moved["aten.rsqrt"] == 2 * each
    total = sum(row.bytes for row in rt.estimate(graph, chip="l4", execution="eager").rows)
    products = (2 * whole + each) + (2 * whole + gain)
    assert total == 2 * whole + (whole + each) + 2 * each + 2 * each + products


# -- the release -----------------------------------------------------------------------------------


def test_a_release_is_read_and_ordered() -> None:
    assert read_release("2.8") == Release(8) > read_release("2.8.1") > read_release("2.5.0")
    assert Release(0) > read_release("2.0.1") > read_release("1.13") > read_release("1.9.1")
    texts = ["2.8", "2.10.0", "2.0.1", "1.13", "1.8.2"]
    assert [str(read_release(text)) for text in texts] == texts
    assert str(installed_release()) == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(
    "text", ["1.7", "1.14", "1.80", "2", "2.x", "2.8.0.1", "28", "", "2.100", "torch2.8"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"expected a release of PyTorch from 1\.8 on, for"):
        rt.trace(nn.Linear(4, 4), torch.empty(2, 4), torch=text)


def test_a_number_is_no_release() -> None:
    with pytest.raises(RequestError, match=r"--torch 2\.8: expected a release"):
        rt.trace(nn.Linear(4, 4), torch.empty(2, 4), torch=2.8)  # type: ignore[arg-type]


def test_cudnn_comes_first_in_these_releases() -> None:
    first = [text for text in ("2.4", "2.5.0", "2.5.1", "2.5", "2.8", "2.9.1", "2.10", "2.11")
             if read_release(text).prefers_cudnn]  # fmt: skip
    assert first == ["2.5.0", "2.9.1", "2.11"]


def test_a_graph_keeps_a_release_that_is_asked_for(tmp_path: Any) -> None:
    x = torch.empty(8, 64)
    asked, plain = rt.trace(nn.RMSNorm(64), x, torch="2.8"), rt.trace(nn.RMSNorm(64), x)
    assert (asked.workload["torch"], "torch" in plain.workload) == ("2.8", False)
    rt.save(asked, tmp_path / "graph.json")
    assert rt.load(tmp_path / "graph.json").workload["torch"] == "2.8"
    assert "as torch 2.8 runs it" in str(rt.report(asked, chip="l4"))
    assert "runs it" not in str(rt.report(plain, chip="l4"))


def test_another_process_is_told_the_release() -> None:
    job = Job.of(rt.trace, "model.py:build", (), {}, torch="2.8")
    assert job_from_json(_json_of(job, ProcessPlace())).options.torch == "2.8"


def test_a_saved_graph_has_its_release() -> None:
    graph = rt.trace(nn.Linear(4, 4), torch.empty(2, 4))
    with pytest.raises(RequestError, match="a graph is traced already"):
        rt.report(graph, chip="l4", torch="2.8")
