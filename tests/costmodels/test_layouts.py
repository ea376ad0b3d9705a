"""Layouts of images, and what Inductor stores in place of a result, as its rules have it."""

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import Plan, plan
from rooftrace.costmodels.fusion.traffic import keeps_channels_last
from rooftrace.costmodels.kernels.engines import op_class
from rooftrace.costmodels.kernels.knobs import CLASSES, FEW, LAST, NATIVE, load_knobs
from rooftrace.costmodels.kernels.seconds import kernel_table
from rooftrace.costmodels.rewrites.fused_products import under_autocast
from rooftrace.costmodels.rewrites.layouts import with_channels_last
from rooftrace.hardware.chipfile import load_chip

pytestmark = pytest.mark.quick

IMAGE = 4 * 64 * 32 * 32  # elements
HALF, SINGLE = 2, 4  # bytes


def traced(
    model: nn.Module, channels: int = 64, dtype: torch.dtype = torch.float16, **options: str
) -> rt.types.OpGraph:
    x = torch.empty(4, channels, 32, 32, device="meta", dtype=dtype)
    return rt.trace(model.to(device="meta", dtype=dtype).eval(), x, **options)


def kernel_of(planned: Plan, name: str) -> int:
    """Bytes of the kernel with an op of this name."""
    ops = planned.graph.ops
    (found,) = (
        cost.bytes()
        for group, cost in zip(planned.groups, planned.costs, strict=True)
        if any(ops[i].name == f"aten.{name}" for i in group.ops)
    )
    return found


def test_few_channels_and_plain_convolutions_go_last_and_groups_stay_first() -> None:
    plain, depthwise = nn.Conv2d(64, 128, 3), nn.Conv2d(64, 64, 3, groups=64)
    grouped = nn.Conv2d(64, 64, 3, groups=4)
    assert keeps_channels_last(traced(plain))
    assert keeps_channels_last(traced(depthwise))
    assert not keeps_channels_last(traced(grouped))
    # A quarter of the FLOPs at 1.358 is less than what three quarters save at 0.823.
    assert keeps_channels_last(traced(nn.Sequential(plain, nn.Conv2d(128, 128, 3, groups=4))))
    assert not keeps_channels_last(traced(nn.Flatten()))


def test_inductor_before_2_1_leaves_channels_first() -> None:
    model = nn.Conv2d(64, 128, 3, device="meta")
    x = torch.empty(4, 64, 32, 32, device="meta")
    old, new = (rt.trace(model, x, torch=release) for release in ("2.0", "2.1"))
    assert (keeps_channels_last(old), keeps_channels_last(new)) == (False, True)


def test_a_plan_has_channels_last_only_where_it_is_compiled() -> None:
    graph = traced(nn.Conv2d(64, 128, 3))
    assert plan(graph, "compiled").channels_last
    assert not plan(graph, "eager").channels_last


@pytest.mark.parametrize(
    ("convolution", "first", "last"),
    [
        (nn.Conv2d(64, 64, 5, groups=64), "depthwise conv", "depthwise conv, channels last"),
        (
            nn.Conv2d(64, 64, 7, groups=64),
            "depthwise conv, large",
            "depthwise conv, channels last",
        ),
        (nn.Conv2d(64, 64, 9, groups=64), "depthwise conv, large", "depthwise conv, general"),
        (nn.Conv2d(64, 128, 7, groups=64), "depthwise conv, large", "depthwise conv, general"),
        (nn.Conv2d(64, 83, 3), "conv", "conv, odd channels"),
        (nn.Conv2d(64, 96, 3), "conv", "conv"),
    ],
)
def test_classes_go_by_the_layout(convolution: nn.Module, first: str, last: str) -> None:
    graph = traced(convolution)
    (op,) = (op for op in graph.ops if op.kind == "kernel")
    assert (op_class(op, graph), op_class(op, graph, channels_last=True)) == (first, last)


def test_a_compiler_lays_out_no_sequence_with_channels_last() -> None:
    """Inductor's convolution does so `if V.graph.layout_opt and ndim == 2`."""
    with torch.device("meta"):
        layer = nn.Conv1d(64, 64, 15, groups=64, bias=False, dtype=torch.bfloat16)
        graph = rt.trace(layer, torch.empty(8, 64, 128, dtype=torch.bfloat16))
    assert {op_class(op, graph, channels_last=True) for op in graph.ops} == {NATIVE}


@pytest.mark.parametrize(
    ("dtype", "native"), [(torch.bfloat16, True), (torch.float32, True), (torch.float16, False)]
)
def test_cudnn_takes_depthwise_convolutions_of_one_dimension_in_fp16(
    dtype: torch.dtype, native: bool
) -> None:
    x = torch.empty(4, 64, 32, device="meta", dtype=dtype)
    for window in (3, 15):
        graph = rt.trace(nn.Conv1d(64, 64, window, groups=64).to("meta", dtype), x)
        assert [op_class(op, graph) == NATIVE for op in graph.ops] == [native]


class Convolved(nn.Module):
    """A depthwise convolution, or with a gradient of its result those of image and filters."""

    def forward(self, x: torch.Tensor, filters: torch.Tensor, *grad: torch.Tensor) -> object:
        n = x.dim() - 2
        how = ([1] * n, [k // 2 for k in filters.shape[2:]], [1] * n, False, [0] * n, x.shape[1])
        if not grad:
            return torch.ops.aten.convolution(x, filters, None, *how)
        wanted = [True, True, False]
        return torch.ops.aten.convolution_backward(*grad, x, filters, None, *how, wanted)


@pytest.mark.parametrize(
    ("shape", "window", "forward", "backward"),
    [  # calls on H200, in us (benchmarks/kernels/h200-2026-11-27.jsonl.gz)
        ((8, 512, 2048), (3,), 86.8, 118.1),
        ((8, 512, 2048), (31,), 162.6, 583.6),
        ((64, 192, 56, 56), (3, 3), 363.7, 1182.8),
        ((64, 384, 14, 14), (7, 7), 175.4, 675.2),
        ((64, 192, 56, 56), (13, 13), 3196.7, 13154.9),
    ],
)
def test_native_depthwise_convolutions_take_the_time_of_their_instructions(
    shape: tuple[int, ...], window: tuple[int, ...], forward: float, backward: float
) -> None:
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    filters = torch.empty(shape[1], 1, *window, device="meta", dtype=torch.bfloat16)
    chip, knobs = load_chip("h200-sxm"), load_knobs("typical-eager")
    for measured, grad in ((forward, ()), (backward, (x,))):
        table, _ = kernel_table(plan(rt.trace(Convolved(), x, filters, *grad), "eager"), chip)
        seconds = float(table.seconds(knobs, layouts=True).device.sum())
        assert seconds == pytest.approx(measured * 1e-6, rel=0.12)


def test_groups_that_no_kernel_suits_take_the_time_of_wide_ones() -> None:
    chip, knobs = load_chip("rtx-4090"), load_knobs("typical-compiled")

    def seconds(width: int) -> float:
        x = torch.empty(256, 16 * width, 28, 28, device="meta", dtype=torch.float16)
        convolution = nn.Conv2d(16 * width, 16 * width, 3, groups=16).to("meta", torch.float16)
        table, _ = kernel_table(plan(rt.trace(convolution, x), "compiled"), chip)
        return float(table.seconds(knobs, layouts=False).device.max())

    # Per channel; published steps of models with such groups say as much.
    each = {width: seconds(width) / width for width in (16, 24, 32, 56, 64, 120, 128)}
    for width in (24, 56, 120):
        assert each[width] == pytest.approx(each[128], rel=0.2)
    assert each[24] > 3 * max(each[16], each[32])
    assert each[64] < 0.7 * each[56]


@pytest.mark.parametrize(
    ("sizes", "shape", "first", "last"),
    [  # calls on H200 in bf16, in us, channels first and last (h200-2026-11-27.jsonl.gz)
        ((256, 256, 3), (64, 256, 56, 56), 474.9, 301.3),
        ((512, 512, 3), (64, 512, 14, 14), 120.3, 80.9),
        ((256, 256, 1), (64, 256, 56, 56), 66.1, 65.0),
    ],
)
def test_operands_of_convolutions_are_copied_before_and_after(
    sizes: tuple[int, int, int], shape: tuple[int, ...], first: float, last: float
) -> None:
    took = []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Conv2d(*sizes, padding=sizes[2] // 2, bias=False)
        x = torch.empty(shape, device="meta", dtype=torch.bfloat16).to(memory_format=layout)
        graph = rt.trace(model.to("meta", torch.bfloat16, memory_format=layout), x)
        rows = rt.estimate(graph, chip="h200-sxm", execution="eager").rows
        took.append(1e6 * sum(row.timing.t_device - row.timing.gap for row in rows))
    assert took[0] - took[1] == pytest.approx(first - last, rel=0.45, abs=6)


def test_the_channels_of_an_rgb_image_are_not_odd() -> None:
    graph = traced(nn.Conv2d(3, 64, 7), 3)
    assert op_class(graph.ops[-1], graph, channels_last=True) == f"conv{FEW}"


def test_images_and_groups_take_the_measured_time_on_hopper() -> None:
    """Calls on H200 in bf16, channels last, in us (benchmarks/kernels/h200-2026-11-27.jsonl.gz)."""
    chip, knobs = load_chip("h200-sxm"), execution_model("eager").knobs_on(load_chip("h200-sxm"))
    assert knobs is not None
    for sizes, shape, groups, measured in (
        ((3, 768, 16, 16), (64, 3, 224, 224), 1, 446.9),
        ((3, 1024, 14, 14), (64, 3, 224, 224), 1, 508.5),
        ((384, 384, 3, 1), (64, 384, 28, 28), 96, 74.2),
        ((384, 384, 3, 1), (64, 384, 28, 28), 24, 53.7),
        ((384, 384, 3, 1), (64, 384, 28, 28), 6, 59.5),
        ((192, 192, 7, 1), (64, 192, 56, 56), 192, 266.0),
        ((192, 192, 13, 1), (64, 192, 56, 56), 192, 24364.5),
    ):
        window, stride = sizes[2:]
        padding = window // 2 if stride == 1 else 0
        model = nn.Conv2d(*sizes, padding, groups=groups, bias=False)
        x = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last)
        graph = rt.trace(model.to("meta", torch.bfloat16), x)
        table, _ = kernel_table(plan(graph, "eager"), chip)
        seconds = float(table.seconds(knobs, layouts=True).device.sum())
        assert seconds == pytest.approx(measured * 1e-6, rel=0.3)


class Excite(nn.Module):
    """A squeeze-and-excite block."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.activation, self.gate = activation, nn.Conv2d(64, 64, 1)

    def forward(self, x):
        x = self.activation(self.norm(self.conv(x)))
        return x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()


def test_an_activation_that_uses_its_input_twice_leaves_it_in_single_precision() -> None:
    wide, narrow = (plan(traced(Excite(kind())), "compiled") for kind in (nn.SiLU, nn.ReLU))
    # The convolution's result is read, the norm's written; the last product reads that.
    assert kernel_of(wide, "silu") - kernel_of(narrow, "relu") == (SINGLE - HALF) * IMAGE
    assert kernel_of(wide, "mul") - kernel_of(narrow, "mul") == (SINGLE - HALF) * IMAGE
    eager = plan(traced(Excite(nn.SiLU())), "eager")
    assert kernel_of(eager, "mean") == HALF * IMAGE + HALF * 4 * 64


@pytest.mark.parametrize("stored", [False, True])
def test_an_activation_of_a_product_is_computed_in_each_kernel_that_reads_it(stored: bool) -> None:
    linear = nn.Linear(64, 64, bias=False)

    class Response(nn.Module):
        """A norm over positions, as of convnextv2; stored: a product reads the activation too."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x):
            x = nn.functional.gelu(self.linear(x.flatten(2).mT))
            scaled = x * x.sum(1, keepdim=True)
            return (scaled, self.linear(x)) if stored else scaled

    planned = plan(traced(Response()), "compiled")
    sums = HALF * 4 * 64
    # Inductor's kernels are a sum that reads the product, and a scaling that does, too.
    assert kernel_of(planned, "gelu") == HALF * IMAGE * (2 if stored else 1) + sums * (not stored)
    assert kernel_of(planned, "mul") == 2 * HALF * IMAGE + sums


def test_a_mean_of_channels_reads_the_image_again_where_loops_keep_their_order() -> None:
    old, new = (plan(traced(Excite(nn.SiLU()), torch=t), "compiled") for t in ("2.4", "2.13"))
    result = HALF * 4 * 64
    assert kernel_of(old, "mean") == SINGLE * IMAGE + result
    assert kernel_of(new, "mean") == kernel_of(new, "silu") == kernel_of(old, "silu") + result


def test_indices_that_nobody_reads_are_not_written_by_generated_code() -> None:
    graph = traced(nn.MaxPool2d(2))
    pooled = HALF * IMAGE + HALF * IMAGE // 4
    assert kernel_of(plan(graph, "compiled"), "max_pool2d_with_indices") == pooled
    indices = 8 * IMAGE // 4
    assert kernel_of(plan(graph, "eager"), "max_pool2d_with_indices") == pooled + indices


@pytest.mark.parametrize(
    ("release", "tokens", "masks"), [("2.6", 64, 8), ("2.6", 49, 1), ("2.7", 64, 1)]
)
def test_releases_before_2_7_write_a_mask_for_each_batch(
    release: str, tokens: int, masks: int
) -> None:
    """One for each of 8 batches, as https://github.com/pytorch/pytorch/pull/146054 describes."""

    def attend(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=table + table)

    x = torch.empty(8, 4, tokens, 32, device="meta", dtype=torch.float16)
    table = torch.empty(4, tokens, tokens, device="meta", dtype=torch.float16)
    planned = plan(rt.trace(attend, x, table, torch=release), "compiled")
    mask = 4 * tokens * tokens * HALF
    assert kernel_of(planned, "add") == mask + masks * mask


class Dense(nn.Module):
    """Puts all features so far together."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x):
        return torch.cat([x + i for i in range(self.count)], 1).relu()


@pytest.mark.parametrize(("count", "kernels"), [(8, 1), (9, 2)])
def test_a_cat_of_many_is_written_before_it_is_used(count: int, kernels: int) -> None:
    planned = plan(traced(Dense(count)), "compiled")
    assert len(planned.groups) == kernels


def test_convolutions_on_channels_last_have_shares_of_their_own_and_copy_nothing():
    net = nn.Sequential(
        nn.Conv2d(16, 32, 3, bias=False),
        nn.Conv2d(32, 32, 1, bias=False),
        nn.Conv2d(32, 32, 3, groups=4, bias=False),
    )
    x = torch.empty(8, 16, 20, 20, device="meta")
    chip = load_chip("rtx-4090")
    first = rt.trace(net.to("meta"), x)
    last = rt.trace(
        net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    )
    (a, _), (b, _) = (kernel_table(plan(graph, "eager"), chip) for graph in (first, last))
    assert [CLASSES[k] for k in a.kind] == ["conv", "conv 1x1", "grouped conv"]
    assert [CLASSES[k] for k in b.kind] == [f"{CLASSES[k]}{LAST}" for k in a.kind]
    assert (a.data["turned"] > 0).all() and not b.data["turned"].any()
    eager, compiled = load_knobs("typical-eager"), load_knobs("typical-compiled")
    assert eager.share(f"conv{LAST}").compute > eager.share("conv").compute
    assert compiled.share(f"conv{LAST}") == compiled.share("conv")


class Images(nn.Module):
    """Convolutions, norms of groups and of channels, attention over pixels, joined and flat."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.group = nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64)
        self.wide, self.layer = nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Conv2d(64, 192, 1), nn.Conv2d(64, 64, 1)
        self.last, self.head = nn.Conv2d(128, 8, 3, stride=2), nn.Linear(8 * 15 * 15, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.group(self.first(x)))
        x = x + self.layer(self.wide(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        parts = self.qkv(x).reshape(4, 3, 2, 32, -1).transpose(-1, -2).unbind(1)
        found = nn.functional.scaled_dot_product_attention(*parts)
        y = self.out(found.transpose(-1, -2).reshape(x.shape))
        return self.head(self.last(torch.cat([x, y], 1)).flatten(1))


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_images_with_channels_last_lie_as_in_a_trace_of_them(phase: str) -> None:
    def graph(layout: torch.memory_format) -> rt.types.OpGraph:
        net = Images().to(device="meta", dtype=torch.float16, memory_format=layout)
        x = torch.empty(4, 3, 32, 32, device="meta", dtype=torch.float16)
        return rt.trace(net, x.to(memory_format=layout), phase=phase)

    def kernels(of: rt.types.OpGraph) -> list[tuple[object, ...]]:
        def lies(value: int) -> list[tuple[int, int]]:
            tensor = of.values[value]
            return [(n, s) for n, s in zip(tensor.shape, tensor.stride, strict=True) if n > 1]

        ops = [op for op in of.ops if op.kind == "kernel"]
        return [(op.part, op.name, *map(lies, (*op.inputs, *op.outputs))) for op in ops]

    first = graph(torch.contiguous_format)
    by_hand, ours = kernels(graph(torch.channels_last)), kernels(with_channels_last(first))
    assert sorted(map(str, ours)) == sorted(map(str, by_hand))
    assert len(by_hand) < len(kernels(first))


class Tokens(nn.Module):
    """A convolution, and two residual products on its pixels as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 4, 1)
        self.a = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
        self.b = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.first(x)
        tokens = image.flatten(2).transpose(1, 2)
        tokens = tokens + self.a(tokens)
        tokens = tokens + self.b(tokens)
        return self.last(tokens.transpose(1, 2).reshape(image.shape))


def test_channels_last_after_autocast_is_autocast_after_channels_last() -> None:
    """Autocast leaves views of copies unread, and channels last needs those copies no more."""
    graph = traced(Tokens(), 32, torch.float32, phase="training")
    after = with_channels_last(under_autocast(graph, "bf16"))
    before = under_autocast(with_channels_last(graph), "bf16")
    kernels = [
        sorted((op.part, op.name) for op in of.ops if op.kind == "kernel") for of in (after, before)
    ]
    assert kernels[0] == kernels[1]
