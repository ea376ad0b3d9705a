"""What one op of eager PyTorch launches on CUDA: bytes and kernels by hand, as in ATen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import ExecutionError
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.rewrites.eager_kernels import EAGER_FORMS, is_in_order
from rooftrace.graph.records import Tensor as Value
from tests.costmodels.rules_support import Calls

pytestmark = pytest.mark.quick

FP32 = 4  # bytes
N, C, S = 2, 8, 6
IMAGE = N * C * S * S  # elements
KERNEL = torch.ones(C, 1, 3, 3, device="meta")


def image() -> Tensor:
    return torch.empty(N, C, S, S, device="meta")


def estimated(
    function: Callable[..., Tensor], *args: Tensor, how: str = "eager", **options: str
) -> rt.types.Estimate:
    return rt.estimate(rt.trace(Calls(function), *args, **options), chip="l4", execution=how)


class Trained(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.loss, self.image = loss, nn.Parameter(image())

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.image) + x


def trained(loss: Callable[[Tensor], Tensor]) -> rt.types.OpGraph:
    """The graph of a loss of an image that is trained."""
    x = torch.zeros((), device="meta")
    options = {"phase": "training", "optimizer": "none"}
    return rt.trace(Trained(loss), x, loss=lambda out: out, **options)


def kernels(estimate: rt.types.Estimate) -> list[str]:
    return [row.name.removeprefix("aten.") for row in estimate.rows]


def last(x: Tensor) -> Tensor:
    """The channels of an image as its last dimension, where the bytes stay."""
    return x.permute(0, 2, 3, 1)


# -- copies in order -------------------------------------------------------------------------------


def test_layer_norm_over_the_channels_of_an_image_copies_it_first() -> None:
    norm = estimated(lambda x: F.layer_norm(last(x), (C,)), image())
    assert kernels(norm) == ["clone", "native_layer_norm"]
    assert [row.bytes for row in norm.rows] == [
        2 * IMAGE * FP32,  # read in one order, written in the other
        2 * IMAGE * FP32 + 2 * N * S * S * FP32,  # read, written; mean and rstd
    ]
    assert "1 kernel reads a copy in order of an input that is not contiguous" in norm.plan.notes


def test_the_copy_takes_memory_as_long_as_the_kernel_runs() -> None:
    plain = estimated(lambda x: F.layer_norm(x, (C,)), last(image()).contiguous())
    moved = estimated(lambda x: F.layer_norm(last(x), (C,)), image())
    assert moved.memory.peak - plain.memory.peak == IMAGE * FP32


def test_a_norm_of_contiguous_rows_and_a_compiled_one_copy_nothing() -> None:
    rows = torch.empty(N, S, C, device="meta")
    assert kernels(estimated(lambda x: F.layer_norm(x, (C,)), rows)) == ["native_layer_norm"]
    compiled = estimated(lambda x: F.layer_norm(last(x), (C,)), image(), how="compiled")
    assert len(compiled.rows) == 1
    assert not any("copy" in note for note in compiled.plan.notes)


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x: torch.softmax(last(x), -1), 1),
        (lambda x: torch.log_softmax(last(x), 1), 1),
        (lambda x: F.rms_norm(last(x), (C,)), 1),
        (lambda x: last(x).cumsum(1), 1),
        (lambda x: last(x).topk(2)[0], 1),
        (lambda x: last(x).roll(1, 1), 1),
        (lambda x: last(x).exp(), 0),  # an elementwise kernel takes any strides
        (lambda x: last(x).sum(1), 0),  # and so does a reduction
        (lambda x: torch.softmax(x[:, :, 1:], -1), 1),  # a part of each channel
        (lambda x: torch.softmax(x[1:], -1), 0),  # whole images lie in order
        (lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2), 0),
        (lambda x: F.max_pool2d(x[:, 1:], 2), 1),
        (lambda x: F.max_pool2d(last(x), 2), 1),
        (lambda x: F.conv2d(x[:, 1:5], torch.ones(C, 4, 1, 1, device="meta")), 1),
        (lambda x: F.conv2d(x, torch.ones(C, C, 1, 1, device="meta")), 0),
    ],
)
def test_only_kernels_that_read_in_order_copy(
    function: Callable[[Tensor], Tensor], copies: int
) -> None:
    graph = rt.trace(Calls(function), image())
    eager = rt.estimate(graph, chip="l4", execution="eager").plan.graph
    added = [op for op in eager.ops if "beside" in op.facts]
    assert [op.name for op in added] == ["aten.clone"] * copies
    assert all(is_in_order(eager.values[op.outputs[0]]) for op in added)


def test_order_is_that_of_torch() -> None:
    views = [
        torch.empty(3, 4, 5),
        torch.empty(3, 4, 5).transpose(0, 1),
        torch.empty(3, 4, 5)[:, :2],
        torch.empty(3, 4, 5)[1:],
        torch.empty(1, 4, 5).transpose(0, 1),
        torch.empty(4, 1).expand(4, 3),
        torch.empty(0, 4).t(),
        torch.empty(()),
    ]
    for view in views:
        value = Value(tuple(view.shape), "fp32", view.stride(), "activations", 0)
        assert is_in_order(value) is view.is_contiguous()


def test_a_backward_copies_gradients_and_inputs_that_are_not_in_order() -> None:
    def loss(x: Tensor) -> Tensor:
        return (F.layer_norm(last(x), (C,)).permute(0, 3, 1, 2) * x).sum()

    graph = trained(loss)
    eager = rt.estimate(graph, chip="l4", execution="eager").plan.graph
    copies = [op.part for op in eager.ops if op.name == "aten.clone" and "beside" in op.facts]
    assert copies == ["forward", "backward", "backward"]  # x; its gradient's, and x again


# -- several kernels -------------------------------------------------------------------------------


def test_a_roll_over_two_dimensions_is_two_kernels() -> None:
    assert kernels(estimated(lambda x: x.roll((1, 2), (2, 3)), image())) == ["roll", "roll"]
    both = estimated(lambda x: x.roll((1, 2), (2, 3)), image())
    assert sum(row.bytes for row in both.rows) == 2 * 2 * IMAGE * FP32
    assert kernels(estimated(lambda x: x.roll(1), image())) == ["roll"]  # of all elements in a row


def test_a_convolution_adds_its_bias_in_a_kernel_that_reads_and_writes_the_result() -> None:
    weight, bias = (torch.ones(*shape, device="meta") for shape in ((C, C, 1, 1), (C,)))
    biased = estimated(F.conv2d, image(), weight, bias)
    plain = estimated(F.conv2d, image(), weight)
    assert kernels(biased) == ["convolution", "add_"]
    assert biased.rows[0].bytes == plain.rows[0].bytes
    assert biased.rows[1].bytes == (IMAGE + C + IMAGE) * FP32
    assert biased.flops == plain.flops + IMAGE
    assert biased.memory.peak - plain.memory.peak == C * FP32  # in place


def test_the_depthwise_kernel_of_channels_first_adds_its_bias_itself() -> None:
    def depthwise(x: Tensor) -> Tensor:
        return F.conv2d(x, KERNEL, torch.ones(C, device="meta"), groups=C)

    first, other = image(), image().contiguous(memory_format=torch.channels_last)
    assert "add_" not in kernels(estimated(depthwise, first))
    assert "add_" in kernels(estimated(depthwise, other))


@pytest.mark.parametrize(
    ("shape", "release", "apart"),
    [
        ((6, 8), "1.8", False), ((2, 3, 8), "1.11", True), ((2, 3, 8), "1.12", False),
        ((1, 2, 3, 8), "2.0", True), ((1, 2, 3, 8), "2.1", False), ((6, 8, 1, 1), "1.8", False),
    ],
)  # fmt: skip
def test_a_linear_of_many_dimensions_added_its_bias_apart(
    shape: tuple[int, ...], release: str, apart: bool
) -> None:
    weight, bias, x = (torch.ones(*s, device="meta") for s in ((16, 8), (16,), shape))
    pooled = shape[-1] == 1

    def head(x: Tensor) -> Tensor:
        return F.linear(x.flatten(1) if pooled else x, weight, bias)

    estimate = estimated(head, x, torch=release)
    read, out = (6 * 8 + 16 * 8) * FP32, 6 * 16 * FP32
    expected = [read + out, 2 * out + 16 * FP32] if apart else [read + out + 16 * FP32]
    assert kernels(estimate) == (["mm", "add_"] if apart else ["addmm"])
    assert [row.bytes for row in estimate.rows] == expected


def test_the_gradients_of_a_convolution_are_a_kernel_each() -> None:
    weight, bias = (torch.ones(*shape, device="meta") for shape in ((C, C, 1, 1), (C,)))
    graph = trained(lambda x: F.conv2d(x, weight, bias).exp().sum())
    estimate = rt.estimate(graph, chip="l4", execution="eager")
    backward = [row for row in estimate.rows if row.name == "aten.convolution_backward"]
    gradient = IMAGE * FP32
    assert [row.bytes for row in backward] == [gradient + C * C * FP32 + gradient]  # no weight's

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).exp().sum()

    graph = rt.trace(Net().to("meta"), image(), phase="training", optimizer="none")
    estimate = rt.estimate(graph, chip="l4", execution="eager")
    backward = [row for row in estimate.rows if row.name == "aten.convolution_backward"]
    # Of the last layer image and weight, of the first the weight; the image has no gradient.
    reads = [gradient + C * C * FP32, 2 * gradient, 2 * gradient]
    writes = [gradient, C * C * FP32, C * C * FP32]
    assert [row.bytes for row in backward] == [a + b for a, b in zip(reads, writes, strict=True)]
    product = 2 * N * S * S * C * C
    assert [row.flops for row in backward] == [product] * 3
    sums = [op for op in estimate.plan.graph.ops if op.name == "aten.sum" and "beside" in op.facts]
    assert len(sums) == 2


def test_the_gradient_of_softmax_makes_a_product_first() -> None:
    graph = trained(lambda x: torch.softmax(x, -1).exp().sum())
    rows = rt.estimate(graph, chip="l4", execution="eager").rows
    backward = [row for row in rows if row.part == "backward"][-2:]
    assert [row.name for row in backward] == ["aten.mul", "aten._softmax_backward_data"]
    assert [row.bytes for row in backward] == [3 * IMAGE * FP32] * 2


def test_a_sum_of_bits_and_a_wider_scan_copy_their_input_first() -> None:
    bits = torch.empty(N, C, S, S, dtype=torch.bool, device="meta")
    half = image().to(torch.bfloat16)
    counted = estimated(lambda x: x.sum(-1), bits)
    assert kernels(counted) == ["_to_copy", "sum"]
    assert [row.bytes for row in counted.rows] == [IMAGE * (1 + 8), IMAGE * 8 + IMAGE // S * 8]
    assert counted.memory.peak == IMAGE * (1 + 8) + IMAGE // S * 8  # the bits are there still
    wide = {"dtype": torch.float32}
    assert kernels(estimated(lambda x: x.cumsum(-1, **wide), half)) == ["_to_copy", "cumsum"]
    assert kernels(estimated(lambda x: x.sum(-1, **wide), half)) == ["sum"]  # it reads halves
    assert kernels(estimated(lambda x: x.any(-1), half)) == ["any"]
    assert kernels(estimated(lambda x: x.cumsum(-1), half)) == ["cumsum"]


def test_a_loss_writes_all_its_terms_and_mean_squares_keep_them() -> None:
    def loss(name: str, **options: str) -> rt.types.Estimate:
        function = getattr(F, name)
        return estimated(lambda x, t: function(x, t, **options), image(), image())

    terms, inputs = IMAGE * FP32, 2 * IMAGE * FP32
    for name in ("mse_loss", "smooth_l1_loss"):
        found = loss(name)
        assert kernels(found) == [name, "mean"]
        assert [row.bytes for row in found.rows] == [inputs + terms, terms + FP32]
        assert found.memory.peak == inputs + 2 * terms  # those that are reduced, and the result's
    assert kernels(loss("mse_loss", reduction="sum")) == ["mse_loss", "sum"]
    assert kernels(loss("mse_loss", reduction="none")) == ["mse_loss"]
    assert loss("binary_cross_entropy").memory.peak == inputs + terms
    assert loss("huber_loss").memory.peak == inputs + terms + FP32

    kept = estimated(lambda x, t: F.mse_loss(x, t) + x.exp().sum(), image(), image())
    dropped = estimated(lambda x, t: F.huber_loss(x, t) + x.exp().sum(), image(), image())
    assert kept.memory.peak - dropped.memory.peak == terms - FP32  # the loss is there as exp runs
    fused = estimated(lambda x, t: F.mse_loss(x, t), image(), image(), how="compiled")
    assert len(kernels(fused)) == 1


TOKENS, WIDTH, HEADS = (16, 559), 1024, 16  # of Qwen1.5-0.5B, as it was traced on H100
ROWS = torch.empty(*TOKENS, WIDTH, dtype=torch.bfloat16, device="meta")
TABLE = ROWS[:1, :, None, :64].transpose(1, 2).contiguous()  # cosines of rotary positions
GAIN = ROWS[0, 0].clone()


def heads(x: Tensor) -> Tensor:
    return x.view(*TOKENS, HEADS, -1).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    first, last = heads(x).chunk(2, dim=-1)
    return torch.cat((-last, first), dim=-1)


@pytest.mark.parametrize(
    ("function", "kernel", "measured"),
    [
        (lambda x: x + x * 2.0, "aten.add", 17.9e-6),  # in memory order
        (lambda x: x * GAIN, "aten.mul", 25.0e-6),
        (lambda x: heads(x) * TABLE, "aten.mul", 32.0e-6),
        (rotated, "aten.neg", 12.2e-6),
        (rotated, "aten.cat", 41.9e-6),
        (lambda x: heads(x) * TABLE + rotated(x), "aten.add", 34.8e-6),
        (lambda x: heads(x).contiguous(), "aten.clone", 29.2e-6),
    ],
)
def test_strided_operands_are_taken_apart_as_a_trace_of_h100_shows(
    function: Callable[[Tensor], Tensor], kernel: str, measured: float
) -> None:
    graph = rt.trace(Calls(function), ROWS)
    rows = rt.estimate(graph, chip="h100-sxm", execution="eager").rows
    times = [row.timing.t_device for row in rows if row.name == kernel]
    assert times == [pytest.approx(measured, rel=0.18)]


MATRIX = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
HEADS_OF = torch.empty(16, 4096, 32, 128, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("function", "x", "bf16", "fp32"),
    [
        (lambda x: x + x[0], MATRIX, 166.0, 199.1),
        (lambda x: x * x[0, 0], MATRIX, 151.6, 188.7),  # a tensor of one element
        (lambda x: x.t().contiguous(), MATRIX, 427.9, 459.6),
        (lambda x: x.transpose(1, 2).contiguous(), HEADS_OF, 723.2, 859.8),
        (lambda x: x[..., :64].contiguous(), HEADS_OF, 315.4, 392.6),
        (lambda x: x.permute(0, 2, 3, 1).contiguous(), HEADS_OF, 1730.6, 1934.7),
        (lambda x: x.to(torch.float32 if x.dtype.itemsize == 2 else torch.bfloat16),
         MATRIX, 192.0, 92.2),
        (lambda x: x + x.float(), MATRIX, 260.8, 127.3),
        (lambda x: x.clone(), MATRIX, 62.8, None),
    ],
)  # fmt: skip
def test_a_kernel_takes_what_it_took_on_h200(
    function: Callable[[Tensor], Tensor], x: Tensor, bf16: float, fp32: float | None
) -> None:
    """Kernels of torch 2.11, in microseconds: each element apart, lines apart, and casts."""
    for each, measured in ((x, bf16), (x.float(), fp32)):
        if measured is not None:
            graph = rt.trace(Calls(function), each)
            rows = rt.estimate(graph, chip="h200-sxm", execution="eager").rows
            assert rows[-1].timing.t_device == pytest.approx(measured * 1e-6, rel=0.1)


def test_lines_that_threads_share_are_looked_up_once() -> None:
    """A warp that reads three channels apart has the next pixels on the lines of the first."""

    def seconds(channels: int, pixels: int) -> float:
        x = torch.empty(64, channels, pixels, dtype=torch.bfloat16, device="meta")
        graph = rt.trace(Calls(lambda x: x.transpose(1, 2).contiguous()), x)
        (row,) = rt.estimate(graph, chip="h200-sxm", execution="eager").rows
        return row.timing.t_device

    assert seconds(4, 2**18) < 0.6 * seconds(2**10, 2**10)
    assert seconds(2**10, 2**10) == pytest.approx(seconds(2**11, 2**9), rel=0.01)


def strided_over_plain(function: Callable[[Tensor], Tensor], x: Tensor, **how: str) -> float:
    """Device seconds of an op on the transpose of a matrix, over those on the matrix."""
    both = [rt.estimate(rt.trace(Calls(function), each), **how) for each in (x.t(), x)]
    strided, plain = (sum(row.timing.t_device for row in each.rows) for each in both)
    return strided / plain


def test_only_operands_in_another_order_than_the_result_are_taken_apart() -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    eager = {"chip": "h100-sxm", "execution": "eager"}
    assert strided_over_plain(torch.relu, x, **eager) == 1  # both in the same order
    assert strided_over_plain(lambda t: t.new_empty(t.shape).copy_(t), x, **eager) > 1.5
    compiled = {**eager, "execution": "compiled"}
    assert strided_over_plain(lambda t: t.new_empty(t.shape).copy_(t), x, **compiled) == 1


def test_short_rows_of_a_layer_norm_take_as_long_as_longer_ones() -> None:
    """A block of 128 threads has a row.  ViT and BERT on H100 (traces): 788 rows of 768 numbers
    take 1.4 us longer than 141 rows of 512, of which memory explains 0.6 us."""

    def seconds(rows: int, length: int, how: str) -> float:
        x = torch.empty(rows, length, dtype=torch.bfloat16, device="meta")
        graph = rt.trace(Calls(lambda x: F.layer_norm(x, (length,))), x)
        (row,) = rt.estimate(graph, chip="h100-sxm", execution=how).rows
        return row.timing.t_device

    assert seconds(2**20, 24, "eager") == pytest.approx(seconds(2**20, 48, "eager"), rel=0.05)
    assert seconds(2**14, 8192, "eager") == pytest.approx(
        2 * seconds(2**14, 4096, "eager"), rel=0.1
    )
    assert seconds(2**20, 24, "compiled") < 0.7 * seconds(2**20, 48, "compiled")
    more = seconds(788, 768, "eager") - seconds(141, 512, "eager")
    assert 0.7e-6 < more < 1.7e-6


def test_index_arithmetic_is_as_fast_as_a_clock_above_the_datasheet() -> None:
    graph = rt.trace(Calls(lambda x: heads(x) * TABLE), ROWS)

    def seconds(compute: float) -> float:
        knobs = Knobs("clock", compute=compute, memory=2.0, launch=0.0)
        how = rt.tools.execution_model("eager", knobs=knobs)
        (row,) = rt.estimate(graph, chip="h100-sxm", execution=how).rows
        return row.timing.t_device

    assert seconds(1.25) == pytest.approx(seconds(1.0) / 1.25, rel=0.01)
    assert seconds(0.9) == pytest.approx(seconds(1.0), rel=0.01)


def test_what_an_op_was_given_is_there_until_its_last_kernel_is_done() -> None:
    def rolled(x: Tensor) -> Tensor:
        return x.exp().roll((1, 2, 3), (1, 2, 3))

    peak = estimated(rolled, image()).memory.peak
    assert peak == (1 + 1 + 3) * IMAGE * FP32  # the image, exp's result, and each of three turns
    graph = trained(lambda x: torch.softmax(x, -1).exp().sum())
    eager = rt.estimate(graph, chip="l4", execution="eager").plan.graph
    last = next(op for op in eager.ops if op.name == "aten._softmax_backward_data")
    product = next(op for op in eager.ops if op.outputs[0] == last.inputs[0])
    assert {ref.id for ref in last.holds} >= {product.inputs[0]}  # the gradient


def test_a_safe_softmax_is_the_kernels_that_torch_runs() -> None:
    """Kernels as PyTorch's own composite of the op dispatches them, without the scalar's view."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    graph = rt.trace(Calls(lambda x: torch.ops.aten._safe_softmax(x, -1)), image())
    rows = rt.estimate(graph, chip="l4", execution="eager").rows
    x = image()
    with Log():
        torch.ops.aten._safe_softmax.default._op_dk(
            torch._C.DispatchKey.CompositeExplicitAutograd, x, -1
        )
    assert [row.name.removeprefix("aten.") for row in rows] == seen


def test_what_was_measured_op_by_op_is_set_beside_the_ops_of_the_graph() -> None:
    graph = rt.trace(Calls(lambda x: F.layer_norm(last(x), (C,))), image())
    called = rt.tools.execution_model("eager").as_called
    ops = rt.estimate(graph, chip="l4", execution=called).plan.graph.ops
    assert [op.target for op in ops] == [op.target for op in graph.ops]
    with pytest.raises(ExecutionError, match="beside='no': expected true or false"):
        rt.tools.execution_model("eager", beside="no")


def test_every_form_is_said_and_counted_in_one_sentence() -> None:
    for form in EAGER_FORMS:
        assert form.rest and form.noun and form.names
