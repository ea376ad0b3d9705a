"""Tensors of classes of their own: weights stored as nothing dense, and what runs on them."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nested._internal import nested_tensor
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from tests.tracer.subclasses import GROUP, WAYS, Flattened, Hollow, Packed, layers, quantized

pytestmark = pytest.mark.quick

WIDTH, LAYERS, ROWS = 256, 3, 4
STORED = LAYERS * WIDTH * (WIDTH // 2 + 2 * WIDTH // GROUP)
"""Bytes: half of one for each weight, and bf16 scales."""


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_what_is_stored_and_dequantised_where_it_happens(
    way: str, repeats: bool
) -> None:
    model = layers(way, WIDTH, LAYERS)
    before = {name: tensor for name, tensor in vars(model[0]).items()}
    with FlopCounterMode(display=False) as counted:
        expected = model(rows())
    graph = rt.trace(model, rows(), repeats=repeats)
    assert {name: tensor for name, tensor in vars(model[0]).items()} == before
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    assert estimate.flops_matrix == counted.get_total_flops() == LAYERS * 2 * ROWS * WIDTH**2
    # One kernel takes the low halves of all bytes, another the high ones; a compiler fuses them.
    twice = LAYERS * WIDTH * WIDTH // 2
    assert estimate.bytes.weights == STORED + twice
    assert rt.estimate(graph, "h100-sxm", "compiled").bytes.weights == STORED
    flat = graph.expand()
    weights = [flat.values[i] for i in flat.external if flat.values[i].role == "weights"]
    assert sum(tensor.nbytes for tensor in weights) == STORED
    names = [op.name for op in flat.ops]
    assert names.count("aten.bitwise_and") == names.count("aten.sub") == LAYERS
    stored = sum(graph.model[name] for name in ("bytes_parameters", "bytes_buffers"))
    assert stored == (STORED if way != "attribute" else LAYERS * WIDTH * WIDTH // 2)
    assert [flat.values[i].shape for i in flat.outputs] == [tuple(expected.shape)]
    assert not estimate.unsupported_ops() and not graph.assumptions


@pytest.mark.parametrize("way", ["flattened", "hollow"])
def test_a_logical_weight_counts_its_elements(way: str) -> None:
    graph = rt.trace(layers(way, WIDTH, LAYERS), rows())
    assert graph.model["params"] == LAYERS * WIDTH**2


@pytest.mark.parametrize("way", WAYS)
def test_training_of_what_lies_before_packed_weights(way: str) -> None:
    """The gradient of an input that goes through three frozen layers, and of a trained one."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), *layers(way, WIDTH, LAYERS)
    )
    x = rows()
    with FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    graph = rt.trace(model, x, phase="training", loss=lambda out: out.sum(), optimizer="none")
    assert rt.estimate(graph, "h100-sxm", "eager").flops_matrix == counted.get_total_flops()


def test_a_step_of_ones_own_keeps_the_classes() -> None:
    model = layers("flattened", WIDTH, LAYERS)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        assert all(type(weight) is Flattened for weight in model.parameters())
        result: Tensor = model(x)
        return result

    graph = rt.trace(step, model, rows())
    assert rt.estimate(graph, "h100-sxm", "compiled").bytes.weights == STORED


def test_a_module_on_meta_keeps_what_it_has() -> None:
    with torch.device("meta"):
        packed = torch.empty(WIDTH, WIDTH // 2, dtype=torch.uint8)
        scale = torch.empty(WIDTH, WIDTH // GROUP, dtype=torch.bfloat16)
        model = nn.Sequential(*(WAYS["hollow"](packed, scale) for _ in range(2)))
    graph = rt.trace(model, rows())
    # Both layers read the same bytes.
    assert graph.model["bytes_parameters"] == 2 * STORED // LAYERS
    assert rt.estimate(graph, "h100-sxm", "eager").flops_matrix == 2 * 2 * ROWS * WIDTH**2


def test_views_of_one_storage_stay_views_beside_a_weight() -> None:
    """A library keeps the same bytes as the parameter and in the state of the layer."""

    class State:
        def __init__(self, packed: Tensor) -> None:
            self.packed = packed

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            packed, self.scale = quantized(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.state = State(self.weight.data)

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.state.packed.sum() + self.weight.sum())

    model = Layer()
    graph = rt.trace(model, rows())
    # the weight twice, by two sums
    assert rt.estimate(graph, "h100-sxm", "eager").bytes.weights == 2 * WIDTH * WIDTH // 2
    held = {t.storage for t in graph.values if t.shape == (WIDTH, WIDTH // 2)}
    assert len(held) == 1


class Logged(Tensor):
    """Sees every function, and is what comes out of it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_input_of_a_class_of_its_own_is_followed() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(8, 64).as_subclass(Logged)
    graph = rt.trace(model, x)
    plain = rt.trace(model, torch.randn(8, 64))
    assert [op.name for op in graph.kernels()] == [op.name for op in plain.kernels()]
    assert rt.estimate(graph, "h100-sxm").bytes_hbm == rt.estimate(plain, "h100-sxm").bytes_hbm
    assert len(graph.inputs) == len(graph.outputs) == 1
    assert "linear" in Logged.seen


def test_a_subclass_made_inside_of_forward_and_given_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weight = Flattened(*quantized(self.weight))
            return torch.nn.functional.linear(x, weight), weight

    model, x = Model().requires_grad_(False), rows()
    with FlopCounterMode(display=False) as counted:
        model(x)
    graph = rt.trace(model, x)
    assert rt.estimate(graph, "h100-sxm").flops_matrix == counted.get_total_flops()
    assert [graph.values[i].shape for i in graph.outputs] == [
        (ROWS, WIDTH),
        (WIDTH, WIDTH // 2),
        (WIDTH, WIDTH // GROUP),
    ]


@pytest.mark.parametrize("kind", [Flattened, Hollow, Packed.of])
def test_an_argument_may_be_a_packed_weight(kind: Any) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, weight)

    weight = kind(*quantized(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)))
    graph = rt.trace(Product(), rows(), weight)
    assert rt.estimate(graph, "h100-sxm").flops_matrix == 2 * ROWS * WIDTH**2
    inputs = sum(graph.values[i].nbytes for i in graph.inputs)
    assert inputs == STORED // LAYERS + 2 * ROWS * WIDTH


class Stubborn(Hollow):
    """Cannot be made of meta tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        raise NotImplementedError("only on a device")


def test_what_cannot_move_is_one_error_that_names_it() -> None:
    model = layers("flattened", WIDTH, LAYERS)
    stubborn = Stubborn(*quantized(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)))
    model[1].weight = nn.Parameter(stubborn, requires_grad=False)
    expected = r"1\.weight is a .*Stubborn.*only on a device"
    with pytest.raises(rt.types.TraceError, match=expected) as error:
        rt.trace(model, rows())
    assert "__tensor_unflatten__" in str(error.value)


def test_the_first_nested_tensor_of_a_process_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ragged(nn.Module):
        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(values, offsets).values()

    monkeypatch.setattr(nested_tensor, "_dummy_instance", None)  # as in a process of its own
    inputs = torch.randn(5, WIDTH), torch.tensor([0, 2, 5])
    first, second = (rt.trace(Ragged(), *inputs) for _ in range(2))
    assert [op.target for op in first.ops] == [op.target for op in second.ops]


def test_an_attribute_that_cannot_be_copied_is_shared() -> None:
    model = layers("torch function", WIDTH, LAYERS)
    for layer in model:
        layer.weight.lock = threading.Lock()
    graph = rt.trace(model, rows())
    assert rt.estimate(graph, "h100-sxm", "compiled").bytes.weights == STORED
