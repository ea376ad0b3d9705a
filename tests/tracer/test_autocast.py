"""Autocast regions cast on meta what they cast on a GPU, and leave a capture as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.tracer.recording.recorder import Recorder

pytestmark = pytest.mark.quick

Make = Callable[..., Tensor]


def half(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float16)


def full(*shape: int) -> Tensor:
    return torch.empty(*shape)


def classes() -> Tensor:
    return torch.zeros(4, dtype=torch.long)


CALLS: dict[str, Callable[[], Tensor]] = {
    "matmul": lambda: full(4, 4) @ full(4, 4),
    "mv": lambda: torch.mv(full(4, 4), full(4)),
    "addmm": lambda: torch.addmm(full(4), full(4, 4), full(4, 4)),
    "linear": lambda: F.linear(full(4, 4), full(4, 4), full(4)),
    "einsum": lambda: torch.einsum("ij,jk->ik", full(4, 4), full(4, 4)),
    "multi_dot": lambda: torch.linalg.multi_dot([full(4, 4)] * 3),
    "conv2d": lambda: F.conv2d(full(1, 3, 8, 8), full(4, 3, 3, 3), full(4)),
    "attention": lambda: F.scaled_dot_product_attention(
        full(1, 2, 8, 16), full(1, 2, 8, 16), full(1, 2, 8, 16)
    ),
    "fp64 stays": lambda: full(4, 4).double() @ full(4, 4).double(),
    "exp": lambda: half(4).exp(),
    "rsqrt": lambda: half(4).rsqrt(),
    "tanh is not listed": lambda: half(4).tanh(),
    "pow": lambda: half(4) ** 2,
    "layer_norm": lambda: F.layer_norm(half(4, 4), (4,), half(4), half(4)),
    "rms_norm": lambda: F.rms_norm(half(4, 4), (4,), half(4)),
    "mse_loss": lambda: F.mse_loss(half(4), half(4)),
    "cross_entropy": lambda: F.cross_entropy(half(4, 4), classes()),
    "interpolate": lambda: F.interpolate(half(1, 3, 8, 8), scale_factor=2),
    "softmax": lambda: half(4, 4).softmax(-1),
    "softmax of a dtype": lambda: half(4, 4).softmax(-1, dtype=torch.float16),
    "sum": lambda: half(4, 4).sum(1),
    "a sum of integers": lambda: classes().sum(),
    "mean is not listed": lambda: half(4, 4).mean(),
    "vector_norm": lambda: torch.linalg.vector_norm(half(4)),
    "norm": lambda: half(4, 4).norm(),
    "norm of a dimension": lambda: half(4, 4).norm(2, 1),
    "addcmul": lambda: torch.addcmul(half(4), full(4), half(4)),
    "addcmul of halves": lambda: torch.addcmul(half(4), half(4), half(4)),
    "index_put": lambda: half(4).index_put((classes(),), full(4)),
    "cat": lambda: torch.cat([half(4), full(4)]),
    "embedding": lambda: F.embedding(classes(), full(4, 4)),
}


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, torch.dtype]:
    """What autocast of CUDA makes of each call: fake tensors of a GPU run its real kernels."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            return {name: call().dtype for name, call in CALLS.items()}
    except RuntimeError as error:
        if "CUDA driver" not in str(error):
            raise
        pytest.skip("a build of torch for a GPU asks its driver, also for fake tensors")
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("name", list(CALLS))
def test_the_precision_of_a_result_is_that_on_a_gpu(
    name: str, on_cuda: dict[str, torch.dtype]
) -> None:
    with torch.device("meta"), Recorder(), torch.autocast("cuda"):
        assert CALLS[name]().dtype is on_cuda[name]
    assert not torch.is_autocast_enabled("cuda")


def casts(graph: rt.types.OpGraph, part: str = "forward") -> list[tuple[str, str]]:
    """(from, to) of each change of precision."""
    made = [op for op in graph.ops if op.name == "aten._to_copy" and op.part == part]
    return [
        (graph.values[op.inputs[0]].dtype, graph.values[op.outputs[0]].dtype)
        for op in made
        if graph.values[op.inputs[0]].dtype != graph.values[op.outputs[0]].dtype
    ]


def products(graph: rt.types.OpGraph, part: str) -> list[str]:
    """The precision of each product's result."""
    made = [op for op in graph.ops if op.part == part and op.name in ("aten.addmm", "aten.mm")]
    return [graph.values[op.outputs[0]].dtype for op in made]


class Net(nn.Module):
    """Two products of the same weights in a region, with an island of full precision."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.device = device
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            x = self.see(self.lin(x))
            x = self.see(self.lin(F.gelu(x)))
            with torch.autocast(self.device, enabled=False):
                x = self.see(x.float() @ self.lin.weight)
            x = self.see(x + 1)
            x = self.see(x @ x.mT)
        return self.see(x.float() @ x.mT.float())

    def see(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_a_module_has_the_precisions_of_a_real_run(phase: str) -> None:
    real, traced = Net(), Net()
    with torch.set_grad_enabled(phase == "training"):
        real(torch.ones(4, 8))
    graph = rt.trace(traced, torch.ones(4, 8), phase=phase)
    found = products(graph, "forward")
    shown = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    assert found == [shown[d] for d in (real.seen[i] for i in (0, 1, 2, 4, 5))]
    assert "autocast" not in {a.kind for a in graph.assumptions}


def test_a_weight_is_cast_once_in_a_region() -> None:
    graph = rt.trace(Net(), torch.ones(4, 8))
    weights = [
        op
        for op in graph.ops
        if op.name == "aten._to_copy" and graph.values[op.inputs[0]].role == "weights"
    ]
    assert len(weights) == 2  # the weight and the bias, though two products read them


def test_gradients_of_cast_weights_are_cast_back() -> None:
    training = rt.trace(Net(), torch.ones(4, 8), phase="training", optimizer="none")
    assert {t.dtype for t in training.values if t.name.endswith(".grad")} == {"fp32"}
    assert ("bf16", "fp32") in casts(training, "backward")


@pytest.mark.parametrize("device", ["cuda", "cpu", "meta"])
def test_every_device_means_the_one_that_is_traced(
    device: str, module: Callable[..., nn.Module]
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.is_autocast_enabled(x.device.type)
            assert torch.get_autocast_dtype(x.device.type) is torch.bfloat16
            return self.lin(x)  # type: ignore[no-any-return]

    graph = rt.trace(module(forward), torch.ones(1, 8))
    assert graph.values[graph.outputs[0]].dtype == "bf16"


def test_a_decorator_that_is_older_than_the_capture(module: Callable[..., nn.Module]) -> None:
    region: Any = torch.autocast("cpu", dtype=torch.bfloat16)
    graph = rt.trace(module(region(lambda self, x: self.lin(x))), torch.ones(1, 8))
    assert graph.values[graph.outputs[0]].dtype == "bf16"
    assert region.device == "cpu"


def test_a_region_around_the_capture(module: Callable[..., nn.Module]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = rt.trace(module(lambda self, x: self.lin(x)), torch.ones(1, 8))
    assert graph.values[graph.outputs[0]].dtype == "bf16"


def test_what_a_checkpoint_runs_again_is_cast_again(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return checkpoint(lambda x: F.gelu(self.lin(x)), x, use_reentrant=False)

    graph = rt.trace(module(forward), torch.ones(4, 8, requires_grad=True), phase="training")
    assert products(graph, "recompute") == ["bf16"]


def test_after_a_capture_autocast_is_what_it_was(module: Callable[..., nn.Module]) -> None:
    before = (torch.autocast.__init__, torch.is_autocast_enabled, torch.clear_autocast_cache)
    rt.trace(Net("cuda"), torch.ones(4, 8))
    assert (torch.autocast.__init__, torch.is_autocast_enabled, torch.clear_autocast_cache) == (
        before
    )
    key = "AutocastCUDA"
    assert not torch._C._dispatch_tls_is_dispatch_key_included(key)
    x = torch.empty(4, 4, device="meta")
    with torch.autocast("cpu"):
        assert (x @ x).dtype is torch.float32


class Doubled(torch.autograd.Function):
    """Runs in fp32, whatever the region's precision."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cuda")
        return x @ x.mT

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_a_function_that_says_its_own_precision(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cuda"):
            return Doubled.apply(self.lin(x))

    graph = rt.trace(module(forward), torch.ones(8, 8), phase="training")
    assert products(graph, "forward") == ["fp16", "fp32"]


def test_a_recurrent_network_runs_in_the_regions_precision(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.autocast("cuda"):
            return self.rnn(x)[0]

    graph = rt.trace(module(forward, rnn=nn.LSTM(8, 8)), torch.ones(3, 2, 8))
    assert graph.values[graph.outputs[0]].dtype == "fp16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scaled_step_is_not_skipped(device: str, module: Callable[..., nn.Module]) -> None:
    model = module(lambda self, x: self.lin(x))

    def step(model: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler(device)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    graph = rt.trace(step, model, torch.ones(2, 8))
    names = {op.name for op in graph.ops}
    assert "aten._amp_foreach_non_finite_check_and_unscale_" in names
    assert "aten._foreach_add_" in names  # what SGD does to the weights
    assert [a.kind for a in graph.assumptions] == ["value"]


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("half", "casts"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_a_softmax_with_results_in_fp32_reads_fp16_as_it_is(
    name: str, half: torch.dtype, casts: int
) -> None:
    function = getattr(torch.nn.functional, name)
    x = torch.empty(64, 512, dtype=half, device="meta")
    graph = rt.trace(lambda x: function(x, -1, dtype=torch.float32), x)
    assert [op.name for op in graph.kernels()] == ["aten._to_copy"] * casts + [f"aten._{name}"]
    assert graph.values[graph.outputs[0]].dtype == "fp32"
