"""Norms of eager PyTorch: which kernels run, and their time beside measured calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftrace as rt
from tests.costmodels.rules_support import Calls

pytestmark = pytest.mark.quick


def kernels(function: Callable[..., object], *args: Tensor, how: str = "eager") -> dict[str, float]:
    """Microseconds of each kernel on H200 by its name, launches left out."""
    rows = rt.estimate(rt.trace(Calls(function), *args), "h200-sxm", execution=how).rows
    return {row.name: 1e6 * (row.timing.t_device - row.timing.gap) for row in rows}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def group_norm(groups: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: F.group_norm(x, groups, w, w)


@pytest.mark.parametrize(
    ("shape", "groups", "moments", "result"),
    [  # RowwiseMomentsCUDAKernel and elementwise_kernel on H200 in bf16, in us
        ((1, 512, 256, 256), 32, 840.1, 84.2),
        ((2, 640, 128, 128), 32, 268.0, 51.9),
        ((2, 1280, 32, 32), 32, 20.9, 7.6),
        ((64, 64, 56, 56), 32, 33.2, 32.2),
        ((16, 512, 64, 64), 32, 62.8, 84.3),
        ((2, 320, 64, 64), 8, 76.3, 7.6),
    ],
)
def test_group_norms_take_as_long_as_their_few_blocks_walk(
    shape: tuple[int, ...], groups: int, moments: float, result: float
) -> None:
    found = kernels(group_norm(groups), meta(*shape), meta(shape[1]))
    assert list(found) == ["moments", "aten.mul", "aten.native_group_norm"]
    assert found["moments"] == pytest.approx(moments, rel=0.12)
    assert found["aten.native_group_norm"] == pytest.approx(result, rel=0.15)


def test_a_group_norm_that_is_compiled_is_one_kernel() -> None:
    found = kernels(group_norm(32), meta(1, 512, 256, 256), meta(512), how="compiled")
    assert len(found) == 1 and sum(found.values()) < 200


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "layer", "rms"),
    [  # vectorized_layer_norm_kernel on H200, in us
        (131072, 64, torch.bfloat16, 145.5, 81.4),
        (131072, 256, torch.bfloat16, 173.3, 95.8),
        (8192, 4096, torch.bfloat16, 54.0, 41.6),
        (131072, 256, torch.float32, 229.7, 128.1),
        (8192, 4096, torch.float32, 93.2, 84.3),
    ],
)
def test_norms_of_rows_take_their_instructions(
    rows: int, columns: int, dtype: torch.dtype, layer: float, rms: float
) -> None:
    x, w = meta(rows, columns, dtype=dtype), meta(columns, dtype=dtype)
    for measured, function in (
        (layer, lambda x, w: F.layer_norm(x, w.shape, w, w)),
        (rms, lambda x, w: F.rms_norm(x, w.shape, w)),
    ):
        found = kernels(function, x, w)
        assert len(found) == 1
        assert sum(found.values()) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "measured"),
    [  # softmax_warp_forward, cunn_SoftMaxForwardReg, -Smem and cunn_SoftMaxForward on H200, in us
        (65536, 512, torch.bfloat16, 52.3),
        (32768, 1024, torch.bfloat16, 55.1),
        (8192, 4096, torch.bfloat16, 107.7),
        (4096, 8192, torch.float32, 142.5),
        (2048, 16384, torch.bfloat16, 70.5),
        (8192, 50257, torch.float32, 1511.7),
    ],
)
def test_softmaxes_take_as_long_as_the_kernel_for_their_rows(
    rows: int, columns: int, dtype: torch.dtype, measured: float
) -> None:
    found = kernels(lambda x: x.softmax(-1), meta(rows, columns, dtype=dtype))
    assert sum(found.values()) == pytest.approx(measured, rel=0.2)


def test_rows_that_are_no_whole_vectors_take_two_kernels() -> None:
    """RowwiseMomentsCUDAKernel 109.0 us and LayerNormForwardCUDAKernel 39.2 on H200."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, w.shape, w, w)

    assert list(kernels(norm, meta(16384, 1024), meta(1024))) == ["aten.native_layer_norm"]
    odd = kernels(norm, meta(16384, 1025), meta(1025))
    assert odd == pytest.approx({"moments": 109.0, "aten.native_layer_norm": 39.2}, rel=0.1)


def test_kernels_of_a_norm_share_its_flop() -> None:
    x, w = meta(4, 64, 8, 8), meta(64)
    graph = rt.trace(Calls(group_norm(8)), x, w)
    eager, compiled = (rt.estimate(graph, "h200-sxm", execution=e) for e in ("eager", "compiled"))
    made = 4 * 64  # scales and shifts of each channel of a sample, twice, in a kernel of their own
    assert eager.flops - compiled.flops == 2 * made


def test_gradients_of_a_group_norm_are_three_kernels() -> None:
    """On H200 in bf16: 58.4 us, 45.5 of samples one by one (64 of them), and 116.0."""

    def gradients(wants: list[bool]) -> Callable[..., object]:
        return lambda g, x, m, w: torch.ops.aten.native_group_norm_backward(
            g, x, m, m, w, *x.shape[:2], x.shape[2] * x.shape[3], 32, wants
        )

    def of(shape: tuple[int, ...], wants: list[bool]) -> dict[str, float]:
        x = meta(*shape)
        return kernels(gradients(wants), x, x, meta(shape[0], 32), meta(shape[1]))

    every = of((1, 512, 256, 256), [True, True, True])
    assert list(every) == [
        "group norm sums", "group norm weights", "aten.native_group_norm_backward",
    ]  # fmt: skip
    assert every["group norm sums"] == pytest.approx(58.4, rel=0.1)
    assert every["aten.native_group_norm_backward"] == pytest.approx(116.0, rel=0.2)
    many = of((64, 64, 56, 56), [True, True, True])
    assert many["group norm weights"] == pytest.approx(33, rel=0.4)  # 45.5 in bf16, 20.0 in fp32
    assert "group norm weights" not in of((64, 64, 56, 56), [True, False, False])


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [  # native_batch_norm and its backward in steps of ResNet-50 in fp16 on H200, in us
        ((64, 64, 112, 112), 763.1, 1392.9),
        ((64, 256, 56, 56), 318.8, 433.2),
        ((64, 512, 28, 28), 135.3, 150.5),
        ((64, 1024, 14, 14), 76.8, 80.0),
    ],
)
def test_batch_norms_that_cudnn_does_not_have_walk_channel_by_channel(
    shape: tuple[int, ...], forward: float, backward: float
) -> None:
    model = nn.BatchNorm2d(shape[1]).to("meta", torch.float16)
    x = meta(*shape, dtype=torch.float16).requires_grad_()
    graph = rt.trace(model, x, phase="training", optimizer="none")
    found = rt.estimate(graph, "h200-sxm", execution="eager").rows
    took = {row.name: 1e6 * (row.timing.t_device - row.timing.gap) for row in found}
    result = took["moments"] + took["aten.native_batch_norm"]
    assert result == pytest.approx(forward, rel=0.15)
    assert took["aten.native_batch_norm_backward"] == pytest.approx(backward, rel=0.15)


def test_batch_norms_with_weights_in_fp32_are_one_kernel_of_cudnn() -> None:
    model = nn.BatchNorm2d(64).to("meta")
    for dtype, names in ((torch.float16, 1), (torch.bfloat16, 2)):
        x = meta(8, 64, 56, 56, dtype=dtype)
        graph = rt.trace(
            Calls(lambda x: F.batch_norm(x, None, None, model.weight, model.bias, True)), x
        )
        rows = [r.name for r in rt.estimate(graph, "h200-sxm", execution="eager").rows]
        assert len(rows) == names
