"""A captured graph, run op by op on real tensors, computes what the model computes."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rooftrace as rt
from rooftrace.graph.records import GraphError
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.values.trees import tensors_in
from tests.conftest import in_turn

IN_EVAL = (
    "gpt2",
    "llama",
    "bert",
    "t5",
    "mamba",
    "mamba2",
    "unet",
    "vit",
    "vit_example",
    "resnet",
    "lstm",
    "control_flow",
    "transformer",
    "perceptron",
)
TRAINED = (
    "perceptron",
    "gpt2",
    "llama",
    "bert",
    "t5",
    "resnet",
    "vit_example",
    "lstm",
    "packed",
    "unet",
)
EXPERTS = ("eager", "batched_mm", "grouped_mm")


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of everything that a graph reads by name."""
    named = {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters(remove_duplicate=False)),
    }
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def unit_gradients(module: nn.Module, case: Any) -> Mapping[str, Tensor | None]:
    """The gradients by name after a unit gradient into every output but the cache."""
    output = module.train()(*case.args, **case.kwargs)
    if isinstance(output, Mapping):
        taken = inspect.signature(module.forward).parameters
        output = {name: item for name, item in output.items() if name not in taken}
    losses = [t for t in tensors_in(output) if t.requires_grad]
    torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.fixture
def no_fast_path() -> Any:
    """nn.Transformer's fused CPU path rounds otherwise than the ops that a GPU runs."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, ()) for name in IN_EVAL),
        *in_turn(("mixtral", "deepseek"), [(experts,) for experts in EXPERTS]),
        *(("packed", (kind,)) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    ],
)
def test_a_forward_graph_reproduces_the_model_bit_for_bit(
    name: str, settings: tuple[Any, ...], model: Callable[..., Any], no_fast_path: None
) -> None:
    case = model(name, *settings)
    graph = rt.trace(case.module, *case.args, **case.kwargs)
    replay = to_fx(graph, state_of(case.module))
    with torch.no_grad():
        expected = tensors_in(case.module(*case.args, **case.kwargs))
        found = replay(*tensors_in((case.args, dict(case.kwargs))))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_graph_reproduces_the_gradients(name: str, model: Callable[..., Any]) -> None:
    case = model(name)
    graph = rt.trace(case.module, *case.args, phase="training", optimizer="none", **case.kwargs)
    # In-place accumulation makes several values of one storage: the last is the gradient.
    last = {t.storage: i for i, t in enumerate(graph.values) if t.role == "gradients"}
    names = [graph.values[storage].name.removesuffix(".grad") for storage in last]
    replay = to_fx(graph.replace(outputs=tuple(last.values())), state_of(case.module))
    with torch.no_grad():
        found = dict(zip(names, replay(*tensors_in((case.args, dict(case.kwargs)))), strict=True))
    expected = unit_gradients(case.module, case)
    assert set(found) == {name for name, gradient in expected.items() if gradient is not None}
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=1e-5)


class Counting(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["perceptron", "resnet", "control_flow"])
def test_a_training_graph_has_the_ops_of_a_real_run(name: str, model: Callable[..., Any]) -> None:
    case = model(name)
    graph = rt.trace(case.module, *case.args, phase="training", optimizer="none", **case.kwargs)
    real = Counting()
    with real:
        unit_gradients(case.module, case)
    for unrecorded in ("detach", "alias", "lift_fresh"):  # another name for the same bytes
        real.calls.pop(f"aten.{unrecorded}.default", None)
    assert Counter(op.target for op in graph.ops) == real.calls


def test_a_rebuilt_graph_knows_the_constants_that_the_code_wrote_down(
    module: Callable[..., nn.Module],
) -> None:
    written = module(lambda self, x: self.lin(x) + torch.tensor([1.0, 2.0] * 4))
    x = torch.randn(2, 8)
    replay = to_fx(rt.trace(written, x), state_of(written))
    assert torch.equal(replay(x)[0], written(x))


def test_a_boolean_mask_that_is_known_keeps_its_place_in_the_graph(
    module: Callable[..., nn.Module],
) -> None:
    masked = module(lambda self, x, mask: self.lin(x[mask]))
    x, mask = torch.randn(4, 8), torch.tensor([True, False, True, True])
    graph = rt.trace(masked, x, mask)
    assert graph.values[graph.outputs[0]].shape == (3, 8)
    assert torch.equal(to_fx(graph, state_of(masked))(x, mask)[0], masked(x, mask))


def test_in_place_ops_write_the_bytes_that_they_wrote(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.lin(x).add_(1)
        y[:, 0] = 0
        y.view(-1).mul_(2)
        return y.relu_()

    written = module(forward)
    x = torch.randn(4, 8)
    replay = to_fx(rt.trace(written, x), state_of(written))
    with torch.no_grad():
        assert torch.equal(replay(x)[0], written(x))


def test_a_precision_that_torch_has_not_cannot_be_run(model: Callable[..., Any]) -> None:
    graph = rt.trace(model("perceptron").module, torch.randn(3, 8))
    priced = rt.tools.reprice(graph, weights_dtype="nvfp4")
    with pytest.raises(GraphError, match="'nvfp4' has no torch dtype; these have: bf16"):
        to_fx(priced)
