"""Quantised modules: torch.ao's packed weights and fake quantisation, torchao, bitsandbytes."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt

quantization = pytest.importorskip("torch.ao.quantization")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.quick,
]


def counted(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model(x)
    return int(counter.get_total_flops())


class Net(nn.Module):
    """A convolution with norm and ReLU, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv = nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.relu = nn.BatchNorm2d(16), nn.ReLU()
        self.linear = nn.Linear(16 * 7 * 7, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(self.quant(x))))
        result: Tensor = self.dequant(self.linear(x.flatten(1)))
        return result


def image() -> Tensor:
    return torch.randn(2, 8, 16, 16)


def converted() -> nn.Module:
    model = Net().eval()
    model.qconfig = quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.fuse_modules(model, [["conv", "norm", "relu"]], inplace=True)
    quantization.prepare(model, inplace=True)
    model(image())
    made: nn.Module = quantization.convert(model)
    return made


def test_packed_weights_are_int8_and_products_keep_their_shapes() -> None:
    model, x = converted(), image()
    graph = rt.trace(model, x)
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert estimate.flops_matrix == counted(Net().eval(), x)
    weights = 16 * 8 * 9 + 16 * 7 * 7 * 32  # a byte each
    biases = 4 * (16 + 32)
    assert estimate.bytes.weights == weights + biases
    assert [graph.values[i].shape for i in graph.outputs] == [tuple(model(x).shape)]
    made = {op.name: graph.values[op.outputs[0]] for op in graph.ops if op.outputs}
    assert made["quantized.conv2d_relu"].shape == (2, 16, 7, 7)
    assert made["quantized.conv2d_relu"].dtype == "uint8"
    assert not estimate.unsupported_ops() and not graph.assumptions


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv1d(8, 16, 5, stride=2, padding=1, groups=2), (2, 8, 33)),
        (lambda: nn.Conv3d(4, 8, 3, dilation=2), (1, 4, 9, 9, 9)),
        (lambda: nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1), (2, 8, 5, 5)),
    ],
)
def test_other_convolutions(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    own, x = layer(), torch.randn(shape)
    model = nn.Sequential(quantization.QuantStub(), own, quantization.DeQuantStub()).eval()
    model.qconfig = quantization.get_default_qconfig("qnnpack")  # type: ignore[assignment]
    prepared = quantization.prepare(model)
    prepared(x)
    model = quantization.convert(prepared)
    graph = rt.trace(model, x)
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert estimate.flops_matrix == counted(own, x)
    assert [graph.values[i].shape for i in graph.outputs] == [tuple(own(x).shape)]
    assert not estimate.unsupported_ops()


def test_dynamic_linear_layers_read_int8() -> None:
    floats = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    x = torch.randn(4, 64)
    model = quantization.quantize_dynamic(floats, {nn.Linear}, dtype=torch.qint8)
    estimate = rt.estimate(rt.trace(model, x), "h100-sxm", "eager")
    assert estimate.flops_matrix == counted(floats, x)
    assert estimate.bytes.weights == 2 * 64 * 128 + 4 * (64 + 128)  # int8 weights, fp32 biases


def test_a_quantised_table_reads_the_rows_of_its_bags() -> None:
    model = nn.Sequential(nn.EmbeddingBag(100, 64))
    model[0].qconfig = quantization.float_qparams_weight_only_qconfig  # type: ignore[assignment]
    quantization.prepare(model, inplace=True)
    quantization.convert(model, inplace=True)
    x = torch.randint(0, 100, (4, 8))
    graph = rt.trace(model, x)
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert [graph.values[i].shape for i in graph.outputs] == [tuple(model(x).shape)] == [(4, 64)]
    assert 0 < estimate.bytes.weights <= 32 * (64 + 8)  # bytes, a scale and a zero point in fp32
    assert not estimate.unsupported_ops()


def test_arithmetic_on_integers() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ops = torch.ao.nn.quantized.QFunctional()

        def forward(self, x: Tensor) -> Tensor:
            x = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
            x = self.ops.cat([self.ops.add(x, x), self.ops.mul(x, x)], 1)
            return self.ops.add_relu(x, x).dequantize()

    graph = rt.trace(Sums(), torch.randn(4, 8))
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert not estimate.unsupported_ops() and estimate.flops > 0
    assert [graph.values[i].shape for i in graph.outputs] == [(4, 16)]


def trained() -> nn.Module:
    model = Net().train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.fuse_modules_qat(model, [["conv", "norm", "relu"]], inplace=True)
    made: nn.Module = quantization.prepare_qat(model)
    return made


def test_training_that_sees_quantisation_is_priced_throughout() -> None:
    model, x = trained(), image()
    graph = rt.trace(model, x, phase="training", loss=lambda out: out.sum(), optimizer="none")
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert estimate.flops_matrix == counter.get_total_flops()
    assert not estimate.unsupported_ops()
    # x, two weights, and what the convolution and the linear layer give
    assert Counter(op.name for op in graph.ops)["aten._fused_moving_avg_obs_fq_helper"] == 5


@pytest.mark.parametrize("channels", [False, True])
def test_learnt_scales_have_rules(channels: bool) -> None:
    learnable = pytest.importorskip("torch.ao.quantization._learnable_fake_quantize")
    fake = learnable._LearnableFakeQuantize
    observer = (
        quantization.MovingAveragePerChannelMinMaxObserver
        if channels
        else quantization.MovingAverageMinMaxObserver
    )
    more: dict[str, Any] = {"channel_len": 16} if channels else {}
    scheme = torch.per_channel_affine if channels else torch.per_tensor_affine
    learnt = fake(observer, qscheme=scheme, dtype=torch.quint8, **more)
    learnt.toggle_qparam_learning(True).toggle_fake_quant(True).toggle_observer_update(False)
    model = nn.Sequential(nn.Linear(16, 16), learnt) if not channels else nn.Sequential(learnt)
    x = torch.randn(16, 16, requires_grad=channels)
    graph = rt.trace(model, x, phase="training", loss=lambda out: out.sum(), optimizer="none")
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert not estimate.unsupported_ops()
    assert any("learnable" in op.name and "backward" in op.name for op in graph.ops)


# -- torchao and bitsandbytes ----------------------------------------------------------------------

WIDTH, HIDDEN, ROWS = 256, 512, 4
PRODUCTS = 2 * 2 * ROWS * WIDTH * HIDDEN
BIASES = 2 * (WIDTH + HIDDEN)


def block() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    return layers.to(torch.bfloat16)


def inside(tensor: Tensor) -> int:
    """Bytes of the plain tensors that a tensor is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.element_size()
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return sum(inside(part) for part in parts if isinstance(part, Tensor))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("config", "product"),
    [
        ("Int8WeightOnlyConfig", "aten.mm"),
        ("Float8WeightOnlyConfig", "aten.mm"),
        ("Int8DynamicActivationInt8WeightConfig", "aten._int_mm"),
        ("IntxWeightOnlyConfig", "aten.addmm"),
        ("Int8DynamicActivationIntxWeightConfig", "aten.addmm"),
    ],
)
def test_torchao_weights_are_what_they_store(config: str, product: str, on_meta: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.quantization")
    model = block().to("meta") if on_meta else block()
    torchao.quantize_(model, getattr(torchao, config)())
    stored = sum(inside(parameter) for parameter in model.parameters())
    graph = rt.trace(model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert estimate.flops_matrix == PRODUCTS
    assert [op.name for op in graph.ops if op.name.endswith("mm")] == [product] * 2
    assert graph.model["bytes_parameters"] == stored < 2 * 2 * WIDTH * HIDDEN
    assert graph.model["params"] == 2 * WIDTH * HIDDEN + WIDTH + HIDDEN
    zeros = stored - estimate.bytes.weights  # zero points that are all zero are not read
    assert 0 <= zeros <= WIDTH + HIDDEN
    assert not estimate.unsupported_ops() and not graph.assumptions


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_layers_keep_their_state(bits: int, warm: bool) -> None:
    library = pytest.importorskip("bitsandbytes")
    if bits == 4:
        layer = library.nn.Linear4bit(
            WIDTH, HIDDEN, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layer.weight = layer.weight._quantize("cpu")
    else:
        layer = library.nn.Linear8bitLt(WIDTH, HIDDEN, bias=False, has_fp16_weights=False)
        layer.weight = layer.weight._quantize("cpu")
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    model = nn.Sequential(layer)
    if warm:
        model(x)
    graph = rt.trace(model, x)
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert not graph.assumptions
    assert estimate.flops_matrix == 2 * ROWS * WIDTH * HIDDEN
    packed = WIDTH * HIDDEN * bits // 8
    assert packed < estimate.bytes.weights < 1.1 * packed  # and scales
    assert not estimate.unsupported_ops()


def test_a_mean_of_quantised_values() -> None:
    class Pooled(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.conv(self.quant(x)))
            return self.dequant(x.mean((2, 3)))  # type: ignore[no-any-return]

    model = Pooled().eval()
    x, model.qconfig = torch.randn(2, 8, 16, 16), quantization.default_qconfig
    dense = counted(model, x)
    quantization.prepare(model, inplace=True)
    model(x)
    quantization.convert(model, inplace=True)
    graph = rt.trace(model, x)
    assert rt.estimate(graph, chip="h100-sxm").flops_matrix == dense > 0
    assert graph.values[graph.outputs[0]].shape == (2, 16)
