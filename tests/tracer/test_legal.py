"""Programs that mix precisions, devices or shapes: what torch refuses is refused, others trace.

The oracle is torch: every program runs on real CPU tensors first.  Where CUDA's kernels accept less
than the CPU's, the priced chip decides; these programs stand apart (`CUDA_ONLY`).
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.errors import TraceError

HALF, FULL, DOUBLE, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16


def t(*shape: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).reshape(shape).to(dtype)


def longs(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


class Towers(nn.Module):
    """Two towers of which only one is in half precision."""

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self.first, self.second, self.cast = nn.Linear(8, 8).half(), nn.Linear(8, 4), cast

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.first(x.half()))
        return self.second(y.float() if self.cast else y)


class Biased(nn.Module):
    """A product in bf16 whose bias is kept in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(t(8, 8, dtype=BF16))
        self.bias = nn.Parameter(t(8))

    def forward(self, x: Tensor) -> Any:
        return torch.addmm(self.bias, x, self.weight)


class Apart(nn.Module):
    """The same, with the bias added by an op that promotes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(t(8, 8, dtype=BF16))
        self.bias = nn.Parameter(t(8))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight + self.bias


class Recurrent(nn.Module):
    def __init__(self, state: torch.dtype) -> None:
        super().__init__()
        self.net, self.state = nn.GRU(8, 16, batch_first=True).bfloat16(), state

    def forward(self, x: Tensor) -> Any:
        return self.net(x, torch.zeros(1, x.shape[0], 16, dtype=self.state))[0]


class Of(nn.Module):
    """One function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def _put(into: Tensor, at: Tensor, values: Tensor) -> Tensor:
    out = into.clone()
    out[at] = values
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, *more, **options)


qkv = (2, 3, 5, 8)
Program = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]

LEGAL: dict[str, Program] = {
    "fp16 weights on fp16 inputs": (lambda: nn.Linear(64, 64).half(), (t(2, 64, dtype=HALF),)),
    "towers of two precisions with a cast between": (lambda: Towers(True), (t(3, 8),)),
    "a promoted bias": (Apart, (t(4, 8, dtype=BF16),)),
    "a state of the network's precision": (lambda: Recurrent(BF16), (t(2, 5, 8, dtype=BF16),)),
    "statistics in fp32 of a half input": (
        lambda: nn.BatchNorm2d(4).float(),
        (t(2, 4, 3, 3, dtype=HALF),),
    ),
    "rms_norm promotes": (lambda: nn.RMSNorm(8), (t(2, 8, dtype=BF16),)),
    "cat promotes": (
        lambda: Of(lambda a, b: torch.cat([a, b]) @ t(4, 4)),
        (t(2, 4), t(3, 4, dtype=HALF)),
    ),
    "an in-place sum of two precisions": (
        lambda: Of(lambda a, b: a.clone().add_(b)),
        (t(4, dtype=HALF), t(4)),
    ),
    "an fp32 mask on fp16 attention": (lambda: Of(_attend), (*(t(*qkv, dtype=HALF),) * 3, t(5, 5))),
    "a bool mask": (lambda: Of(_attend), (*(t(*qkv),) * 3, t(5, 5) > 0)),
    "grouped heads": (
        lambda: Of(lambda q, k, v: _attend(q, k, v, enable_gqa=True)),
        (t(2, 6, 5, 8), t(2, 3, 5, 8), t(2, 3, 5, 8)),
    ),
    "32 bit indices": (
        lambda: Of(lambda x, i: x.index_select(0, i)),
        (t(4, 4), longs(3, dtype=torch.int32)),
    ),
    "values of the target's precision": (lambda: Of(_put), (t(4, 4), longs(2), t(2, 4))),
    "an input of another precision, cast by autocast": (
        lambda: Of(_autocast),
        (t(4, 8), t(8, 8, dtype=BF16)),
    ),
    "probabilities as targets": (lambda: Of(F.cross_entropy), (t(4, 8), t(4, 8).softmax(-1))),
    "a 0-dim number of another precision": (
        lambda: Of(lambda x, s: (x * s) @ x),
        (t(4, 4, dtype=HALF), torch.tensor(2.0, dtype=DOUBLE)),
    ),
    "a batch that broadcasts": (lambda: Of(_attend), (t(2, 3, 5, 8), t(1, 3, 7, 8), t(1, 3, 7, 8))),
}


def _autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return x @ w


REFUSED: dict[str, Program] = {
    "fp16 weights on fp32 inputs": (lambda: nn.Linear(64, 64).half(), (t(2, 64),)),
    "without a bias": (lambda: nn.Linear(64, 64, bias=False).half(), (t(2, 64),)),
    "a batch of rows": (lambda: nn.Linear(8, 8).double(), (t(2, 3, 8),)),
    "towers of two precisions": (lambda: Towers(False), (t(3, 8),)),
    "an fp32 bias of a bf16 product": (Biased, (t(4, 8, dtype=BF16),)),
    "a state of another precision": (lambda: Recurrent(FULL), (t(2, 5, 8, dtype=BF16),)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3).half(), (t(1, 3, 8, 8),)),
    "conv1d with a bias of another precision": (
        lambda: Of(F.conv1d),
        (t(1, 3, 8, dtype=BF16), t(4, 3, 3, dtype=BF16), t(4)),
    ),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 4, 3).bfloat16(), (t(1, 3, 8, 8),)),
    "bmm": (lambda: Of(torch.bmm), (t(2, 3, 4), t(2, 4, 5, dtype=DOUBLE))),
    "baddbmm": (lambda: Of(torch.baddbmm), (t(2, 3, 5, dtype=HALF), t(2, 3, 4), t(2, 4, 5))),
    "addbmm": (lambda: Of(torch.addbmm), (t(3, 5), t(2, 3, 4, dtype=HALF), t(2, 4, 5))),
    "einsum": (
        lambda: Of(lambda a, b: torch.einsum("bij,bjk->ik", a, b)),
        (t(2, 3, 4), t(2, 4, 5, dtype=BF16)),
    ),
    "a matrix and a vector": (lambda: Of(torch.mv), (t(3, 4), t(4, dtype=HALF))),
    "dot": (lambda: Of(torch.dot), (t(4), t(4, dtype=HALF))),
    "whole numbers times floats": (lambda: Of(torch.matmul), (longs(3, 4), t(4, 5))),
    "half weights of a norm of fp32": (lambda: nn.LayerNorm(8).half(), (t(2, 8),)),
    "fp64 weights of a norm": (lambda: nn.LayerNorm(8).double(), (t(2, 8),)),
    "group_norm": (lambda: nn.GroupNorm(2, 4).half(), (t(2, 4, 3),)),
    "batch_norm": (lambda: nn.BatchNorm1d(4).half(), (t(2, 4, 3),)),
    "instance_norm": (lambda: nn.InstanceNorm1d(4, affine=True).double(), (t(2, 4, 3),)),
    "attention of two precisions": (lambda: Of(_attend), (t(*qkv), t(*qkv, dtype=HALF), t(*qkv))),
    "a mask of a wider precision": (lambda: Of(_attend), (*(t(*qkv),) * 3, t(5, 5, dtype=DOUBLE))),
    "queries and keys of two widths": (
        lambda: Of(_attend),
        (t(2, 3, 5, 8), t(2, 3, 5, 4), t(2, 3, 5, 8)),
    ),
    "a mask of another length": (lambda: Of(_attend), (*(t(*qkv),) * 3, t(5, 4))),
    "heads that do not group": (lambda: Of(_attend), (t(2, 6, 5, 8), t(2, 3, 5, 8), t(2, 3, 5, 8))),
    "batches that do not broadcast": (
        lambda: Of(_attend),
        (t(2, 3, 5, 8), t(4, 3, 5, 8), t(4, 3, 5, 8)),
    ),
    "values put of another precision": (lambda: Of(_put), (t(4, 4), longs(2), t(2, 4, dtype=HALF))),
    "16 bit indices": (lambda: Of(_put), (t(4, 4), longs(2, dtype=torch.int16), t(2, 4))),
    "index_add": (
        lambda: Of(lambda x, i, s: x.index_add(0, i, s)),
        (t(4, 4), longs(2), t(2, 4, dtype=BF16)),
    ),
    "index_copy": (
        lambda: Of(lambda x, i, s: x.index_copy(0, i, s)),
        (t(4, 4), longs(2), t(2, 4, dtype=DOUBLE)),
    ),
    "scatter": (
        lambda: Of(lambda x, i, s: x.scatter(0, i, s)),
        (t(4, 4), longs(2, 4), t(2, 4, dtype=HALF)),
    ),
    "weights of an embedding bag": (
        lambda: Of(lambda i, w, p: F.embedding_bag(i, w, per_sample_weights=p, mode="sum")),
        (longs(2, 3), t(8, 4, dtype=HALF), t(2, 3)),
    ),
    "32 bit targets": (lambda: Of(F.cross_entropy), (t(4, 8), longs(4, dtype=torch.int32))),
    "weights of classes": (
        lambda: Of(lambda x, y, w: F.cross_entropy(x, y, w)),
        (t(4, 8), longs(4), t(8, dtype=DOUBLE)),
    ),
    "binary cross entropy": (
        lambda: Of(F.binary_cross_entropy),
        (t(4).sigmoid(), t(4, dtype=DOUBLE).sigmoid()),
    ),
    "grid_sample": (
        lambda: Of(lambda x, g: F.grid_sample(x, g, align_corners=False)),
        (t(1, 3, 4, 4), t(1, 5, 5, 2, dtype=HALF)),
    ),
    "grouped products": (
        lambda: Of(lambda a, b, o: torch._grouped_mm(a, b, offs=o)),
        (t(16, 16, dtype=BF16), t(2, 16, 16, dtype=HALF), longs(2, dtype=torch.int32) + 8),
    ),
    "channels of a transposed convolution": (lambda: nn.ConvTranspose1d(3, 4, 3), (t(1, 5, 8),)),
    "a bias that is too long": (lambda: Of(F.conv1d), (t(1, 3, 8), t(4, 3, 3), t(5))),
    "a summand that does not broadcast": (lambda: Of(torch.addmm), (t(3), t(2, 4), t(4, 5))),
    "more values than places": (lambda: Of(_put), (t(4, 4), longs(2), t(3, 4))),
    "a slice of another size": (
        lambda: Of(lambda x, s: x.slice_scatter(s, 0, 1, 3)),
        (t(4, 4), t(3, 4)),
    ),
    "labels of another size": (lambda: Of(F.cross_entropy), (t(2, 5, 4, 4), longs(2, 4, 3))),
    "cdist": (lambda: Of(torch.cdist), (t(3, 4), t(5, 4, dtype=DOUBLE))),
}


CUDA_ONLY: dict[str, Program] = {
    "fp32 weights of a norm of halves": (lambda: nn.LayerNorm(8), (t(2, 8, dtype=HALF),)),
    "fp32 weights of norms of groups": (lambda: nn.GroupNorm(2, 4), (t(2, 4, 3, dtype=BF16),)),
}


def ran(program: Program) -> Exception | None:
    """The error of a program on real CPU tensors."""
    make, inputs = program
    try:
        with torch.no_grad():
            make()(*(x.clone() for x in inputs))
    except Exception as error:  # whatever torch raises
        return error
    return None


def traced(program: Program, phase: str = "forward") -> Exception | None:
    """The error of a trace."""
    make, inputs = program
    try:
        rt.trace(make(), *inputs, phase=phase)
    except TraceError as error:
        return error
    return None


@pytest.mark.parametrize("name", LEGAL)
def test_what_torch_runs_is_traced(name: str) -> None:
    assert ran(LEGAL[name]) is None
    assert traced(LEGAL[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name: str) -> None:
    assert ran(REFUSED[name]) is not None
    assert traced(REFUSED[name]) is not None


@pytest.mark.parametrize("name", CUDA_ONLY)
def test_what_only_the_cpu_runs_is_refused(name: str) -> None:
    """LayerNormKernelImpl and GroupNormKernelImpl of CUDA read weights as what the input is."""
    assert ran(CUDA_ONLY[name]) is None
    assert "expected scalar type" in str(traced(CUDA_ONLY[name]))


def test_the_error_has_torchs_words_the_module_and_the_line() -> None:
    error = str(traced(REFUSED["towers of two precisions"]))
    assert str(ran(REFUSED["towers of two precisions"])) in error
    assert "module 'second' (Linear) at aten.addmm" in error
    assert "test_legal.py" in error and "self.second(" in error


def test_a_refused_program_has_no_price() -> None:
    """Neither alone, nor beside one that runs."""
    half, x = nn.Linear(64, 64).half(), torch.zeros(2, 64)
    with pytest.raises(TraceError, match="mat1 and mat2 must have the same dtype"):
        rt.estimate(half, x, chip="h200-sxm")
    with pytest.raises(TraceError, match="mat1 and mat2 must have the same dtype"):
        rt.diff(nn.Linear(64, 64), half, x)
    assert rt.estimate(half, x.half(), chip="h200-sxm").t_est > 0


def test_a_step_under_autocast_trains() -> None:
    """Forward in bf16, weights and gradients in fp32: ops have the operands that autocast made."""

    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        with torch.autocast("cuda", dtype=BF16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(48, 5))
    assert rt.trace(step, model, t(2, 4, 8), longs(2)).ops


SCRIPT = """
import torch
from torch import nn
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table, at = torch.arange(8.0), torch.tensor([0, 1])
for _ in range(3):
    x = torch.randn(2, 8)
    model({x}).add({table})[at].mul(torch.tensor(2.0)).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers for itself")
@pytest.mark.parametrize(
    ("x", "table", "runs"),
    [
        ("x.cuda()", "table.cuda()", True),  # numbers and indices may be on the host
        ("x", "table.cuda()", False),
        ("x.cuda()", "table", False),
    ],
)
def test_a_script_with_operands_on_two_devices(
    tmp_path: Path, x: str, table: str, runs: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(x=x, table=table))
    expected = pytest.raises(TraceError, match=r"same device, .* cuda:0 and cpu")
    with contextlib.nullcontext() if runs else expected:
        assert rt.run([str(path)], chip="h100-sxm", steps=2)
