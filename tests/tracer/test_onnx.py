"""ONNX files: the same FLOPs as the module, sizes by name, nothing read beside the file."""

from __future__ import annotations

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


def saved(nodes: list[Any], inputs: list[Any], weights: dict[str, Any], path: Path) -> Path:
    held = [onnx.numpy_helper.from_array(numpy.asarray(v), n) for n, v in weights.items()]
    outputs = [helper.make_tensor_value_info("out", kinds.FLOAT, None)]
    graph = helper.make_graph(nodes, "made", inputs, outputs, held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
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
