"""ONNX files: the same FLOPs as the module, sizes by name, nothing read beside the file."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.tracer.targets.programs import read_onnx
from tests.tracer.test_programs import Net

pytestmark = pytest.mark.quick

onnx = pytest.importorskip("onnx")
helper, kinds = onnx.helper, onnx.TensorProto


def saved(
    nodes: list[Any], inputs: list[Any], weights: dict[str, Any], path: Path, opset: int = 17
) -> Path:
    held = [onnx.numpy_helper.from_array(numpy.asarray(v), n) for n, v in weights.items()]
    outputs = [helper.make_tensor_value_info("out", kinds.FLOAT, None)]
    graph = helper.make_graph(nodes, "made", inputs, outputs, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    path.write_bytes(model.SerializeToString())
    return path


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}


def cnn(path: Path) -> tuple[nn.Module, Path]:
    model = Net().eval()
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], pads=[1, 1, 1, 1]),
        node(
            "BatchNormalization",
            ["a", *(f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var"))],
            ["b"],
        ),
        node("Relu", ["b"], ["c"]),
        node("MaxPool", ["c"], ["d"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["d"], ["e"]),
        node("Gemm", ["e", "head.weight", "head.bias"], ["f"], transB=1),
        node("Mul", ["f", "scale"], ["out"]),
    ]
    x = helper.make_tensor_value_info("x", kinds.FLOAT, ["batch", 3, 8, 8])
    return model, saved(nodes, [x], weights_of(model), path / "cnn.onnx")


class Block(nn.Module):
    """A transformer's block with attention as products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).reshape(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        x = x + self.o((scores @ v).transpose(1, 2).reshape(x.shape[0], x.shape[1], 32))
        return x + self.down(torch.relu(self.up(x)))


def block(path: Path) -> tuple[nn.Module, Path]:
    model = Block().eval()
    node = helper.make_node
    held: dict[str, Any] = {
        name: value.T.copy() if value.ndim == 2 else value
        for name, value in weights_of(model).items()
    }
    held |= {
        **{"zero": numpy.asarray([0]), "two": numpy.asarray([2]), "half": numpy.float32(0.5)},
        **{"heads": numpy.asarray([4, 8]), "width": numpy.asarray([32])},
    }
    nodes = [
        node("LayerNormalization", ["x", "norm.weight", "norm.bias"], ["y"]),
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "zero", "two"], ["rows"]),
        node("Concat", ["rows", "heads"], ["apart"], axis=0),
        node("Concat", ["rows", "width"], ["joined"], axis=0),
    ]
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("MatMul", ["y", f"{name}.weight"], [f"{name}1"]),
            node("Reshape", [f"{name}1", "apart"], [f"{name}2"]),
            node("Transpose", [f"{name}2"], [f"{name}3"], perm=order),
        ]
    nodes += [
        node("MatMul", ["q3", "k3"], ["s1"]),
        node("Mul", ["s1", "half"], ["s2"]),
        node("Softmax", ["s2"], ["s3"], axis=-1),
        node("MatMul", ["s3", "v3"], ["a1"]),
        node("Transpose", ["a1"], ["a2"], perm=[0, 2, 1, 3]),
        node("Reshape", ["a2", "joined"], ["a3"]),
        node("MatMul", ["a3", "o.weight"], ["a4"]),
        node("Add", ["x", "a4"], ["r"]),
        node("MatMul", ["r", "up.weight"], ["u1"]),
        node("Relu", ["u1"], ["u2"]),
        node("MatMul", ["u2", "down.weight"], ["d"]),
        node("Add", ["r", "d"], ["out"]),
    ]
    x = helper.make_tensor_value_info("x", kinds.FLOAT, ["batch", "seq", 32])
    return model, saved(nodes, [x], held, path / "block.onnx")


def test_a_convolutional_network_costs_what_its_module_costs(tmp_path: Path) -> None:
    model, path = cnn(tmp_path)
    ours = rt.estimate(model, torch.zeros(4, 3, 8, 8), phase="forward", chip="l4")
    there = rt.estimate(path, batch=4, phase="forward", chip="l4")
    assert (there.flops, there.bytes.weights) == (ours.flops, ours.bytes.weights)
    assert there.flops > 0


def test_a_transformer_costs_what_its_module_costs(tmp_path: Path) -> None:
    model, path = block(tmp_path)
    ours = rt.estimate(model, torch.zeros(4, 24, 32), phase="forward", chip="l4")
    there = rt.estimate(path, batch=4, seq=24, phase="forward", chip="l4")
    assert there.flops == ours.flops > 0
    named = rt.estimate(path, inputs={"x": "4,24,32"}, phase="forward", chip="l4")
    assert named.flops == ours.flops


@pytest.mark.parametrize("made", [cnn, block])
def test_the_module_computes_what_the_graph_says(made: Any, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    model, path = made(tmp_path)
    shape = (2, 3, 8, 8) if made is cnn else (2, 5, 32)
    x = torch.randn(shape)
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    assert torch.allclose(model(x), torch.tensor(expected), atol=1e-4)  # the file is the module's
    module, _, _ = read_onnx(path)
    module.to_empty(device="cpu")
    held = onnx.load(path).graph.initializer
    for tensor in held:
        if tensor.name in module.weights:
            part = getattr(module, module.weights[tensor.name])
            part.data = torch.tensor(onnx.numpy_helper.to_array(tensor))
    with torch.no_grad():
        assert torch.allclose(module(x), torch.tensor(expected), atol=1e-4)


CASES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    # ops, one after the other: shape of x, weights, attributes
    "ConvTranspose": ([1, 3, 7, 6], {"w": numpy.ones([3, 4, 3, 3])}, {"pads": [1, 0, 0, 1]}),
    "ConvTranspose 2": (
        [1, 4, 5], {"w": numpy.ones([4, 3, 3]), "b": numpy.ones(3)},
        {"strides": [2], "dilations": [2], "output_padding": [1], "pads": [1, 1]},
    ),
    "ConvTranspose 3": (
        [1, 3, 6, 6], {"w": numpy.ones([3, 4, 3, 3])}, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}
    ),
    "LRN": ([6, 6, 4, 4], {}, {"size": 3, "alpha": 0.5}),
    "Resize": (
        [1, 3, 4, 6], {"roi": [], "s": [1, 1, 2, 0.5]},
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    ),
    "Resize 2": (
        [1, 3, 4, 6], {"roi": [], "s": [], "sizes": numpy.asarray([1, 3, 8, 12])},
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    "RNN": (
        [5, 2, 8], {"w": numpy.ones([1, 16, 8]) / 9, "r": numpy.ones([1, 16, 16]) / 9},
        {"hidden_size": 16},
    ),
    "QuantizeLinear": ([2, 3, 4], {"s": [0.1, 0.2, 0.3], "z": numpy.int8([1, 2, 3])}, {"axis": 1}),
    "QuantizeLinear 2": ([4], {"s": 0.1}, {}),
    "QuantizeLinear DequantizeLinear": ([4, 3], {"s": [0.1, 0.2, 0.3]}, {"axis": -1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_op_computes_what_the_reference_does(name: str, tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    shape, held, attributes = CASES[name]
    made = {n: numpy.asarray(v) for n, v in held.items()}
    made = {n: v.astype(numpy.float32) if v.dtype == "f8" else v for n, v in made.items()}
    ops = re.findall(r"[A-Za-z]+", name)
    between = ["x", *ops[1:], "out"]
    nodes = [
        helper.make_node(op, [source, *made], [target], **attributes)
        for op, (source, target) in zip(ops, pairwise(between), strict=True)
    ]
    x = helper.make_tensor_value_info("x", kinds.FLOAT, shape)
    path = saved(nodes, [x], made, tmp_path / "op.onnx", opset=19)
    values = torch.randn(shape)
    expected, *_ = ReferenceEvaluator(str(path)).run(None, {"x": values.numpy()})
    module, _, _ = read_onnx(path)
    module.to_empty(device="cpu")
    for number, weight in module.weights.items():
        getattr(module, weight).data = torch.tensor(made[number])
    with torch.no_grad():
        ours = module(values)
    ours = ours[0] if isinstance(ours, tuple) else ours
    assert ours.numpy().dtype == expected.dtype
    assert torch.allclose(ours.double(), torch.tensor(expected).double(), atol=1e-4)


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_a_recurrent_layer_multiplies_as_often_as_its_sizes_say(
    op: str, gates: int, tmp_path: Path
) -> None:
    held = {"w": numpy.zeros([2, gates * 16, 8]), "r": numpy.zeros([2, gates * 16, 16])}
    held = {name: value.astype(numpy.float32) for name, value in held.items()}
    node = helper.make_node(
        op, ["x", "w", "r"], ["out", "h"], hidden_size=16, direction="bidirectional"
    )
    x = helper.make_tensor_value_info("x", kinds.FLOAT, [5, 3, 8])
    path = saved([node], [x], held, tmp_path / "op.onnx")
    step = rt.estimate(path, phase="forward", chip="l4")
    # 2 directions, 5 steps, 3 rows, of 8 inputs and 16 states each
    assert step.macs == 2 * 5 * 3 * gates * 16 * (8 + 16)
    assert step.graph.values[step.graph.outputs[0]].shape == (5, 2, 3, 16)


def test_constants_of_an_attribute_and_of_the_file_are_multiplied(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("Constant", [], ["two"], value_float=2.0),
        node("Mul", ["two", "three"], ["six"]),
        node("Mul", ["x", "six"], ["out"]),
    ]
    x = helper.make_tensor_value_info("x", kinds.FLOAT, [4])
    three = {"three": numpy.float32(3)}
    module, *_ = read_onnx(saved(nodes, [x], three, tmp_path / "constants.onnx"))
    assert module(torch.ones(4)).tolist() == [6.0] * 4


def test_a_dimension_without_a_size_is_named(tmp_path: Path) -> None:
    _, path = block(tmp_path)
    with pytest.raises(rt.types.RequestError, match=r"how large batch of x\[batch, seq, 32\] is"):
        rt.trace(path, phase="forward")
    with pytest.raises(rt.types.RequestError, match="numbers are fixed"):
        rt.trace(path, inputs={"x": "4,24,33"}, phase="forward")


def test_ops_that_are_not_read_are_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Frobnicate", ["x"], ["a"], domain="mine"),
        helper.make_node("NonMaxSuppression", ["a"], ["out"]),
    ]
    x = helper.make_tensor_value_info("x", kinds.FLOAT, [2])
    path = saved(nodes, [x], {}, tmp_path / "odd.onnx")
    with pytest.raises(rt.types.TargetError, match="NonMaxSuppression x1, mine::Frobnicate x1"):
        rt.trace(path, phase="forward")


def test_data_beside_the_file_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    model, path = cnn(tmp_path / "in")
    there = onnx.load(path)
    for tensor in there.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = kinds.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "../../../../../../etc/passwd"
    path.write_bytes(there.SerializeToString())
    opened: list[str] = []
    import sys

    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    estimate = rt.estimate(path, batch=4, phase="forward", chip="l4")
    ours = rt.estimate(model, torch.zeros(4, 3, 8, 8), phase="forward", chip="l4")
    assert estimate.flops == ours.flops
    assert not [name for name in opened if "passwd" in name]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "it has no graph"),
        (b"\x80\x04pickle", "not a readable ONNX model"),
        (b"\x0a" * 1000, "not a readable ONNX model"),
    ],
)
def test_another_file_is_refused(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(raw)
    with pytest.raises(rt.types.TargetError, match=words):
        rt.trace(path, phase="forward")


def test_giant_sizes_allocate_nothing(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["big"]),
        helper.make_node("Expand", ["x", "shape"], ["wide"]),
        helper.make_node("Add", ["big", "wide"], ["out"]),
    ]
    x = helper.make_tensor_value_info("x", kinds.FLOAT, [1])
    shape = {"shape": numpy.asarray([10**6, 10**6])}
    path = saved(nodes, [x], shape, tmp_path / "big.onnx")
    assert rt.trace(path, phase="forward").ops


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    path = cnn(tmp_path)[1]
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(rt.types.TargetError, match=r"pip install 'rooftrace\[onnx\]'"):
        rt.trace(path, batch=2, phase="forward")
