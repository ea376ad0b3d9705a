"""Modules and tensors inside wrappers: what runs on one device is recorded, the rest is said."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rooftrace as rt
from rooftrace.costmodels.ops.price import price_ops

pytestmark = pytest.mark.quick

DEVICES = 4


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of four that talks to nobody."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=DEVICES)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_a_tensor_parallel_module_is_one_devices_share(group: None) -> None:
    with torch.device("meta"):
        module = net()
    halves = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (DEVICES,)), halves)
    x = torch.empty(8, 64, device="meta")
    graph = rt.trace(module, x)
    products = [op for op in graph.ops if op.name == "aten.addmm"]
    assert [graph.values[op.outputs[0]].shape for op in products] == [(8, 64 // DEVICES), (8, 64)]
    weights = {t.name: t.shape for t in graph.values if t.role == "weights" and t.name}
    assert weights == {
        "0.weight": (64 // DEVICES, 64),
        "0.bias": (64 // DEVICES,),
        "2.weight": (64, 64 // DEVICES),
        "2.bias": (64,),
    }
    assert [op.name for op in graph.ops if "all_reduce" in op.name] == [
        "_c10d_functional.all_reduce"
    ]
    training = rt.trace(module, x, phase="training")
    gradients = {t.name: t.elements for t in training.values if t.name.endswith(".grad")}
    assert gradients == {f"{name}.grad": math.prod(shape) for name, shape in weights.items()}


class Talking(nn.Module):
    """Says what it does to the others, in place as DDP's hooks and Megatron do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        dist.all_reduce(y)
        swapped = torch.empty_like(y)
        dist.all_to_all_single(swapped, y)
        dist.broadcast(swapped, 0)
        return swapped


def test_collectives_in_place_know_the_size_of_their_group(group: None) -> None:
    graph = rt.trace(Talking(), torch.ones(16, 64))
    talk = [op for op in graph.ops if op.name.startswith("c10d.")]
    assert [op.name for op in talk] == ["c10d.allreduce_", "c10d.alltoall_base_", "c10d.broadcast_"]
    assert all(op.facts["group_size"] == DEVICES for op in talk)
    assert graph.producers[graph.outputs[0]] == talk[-1].id  # what is received is what goes on
    estimate = rt.estimate(graph, execution="eager")
    assert estimate.unsupported_ops() == ()
    sizes = [4 * 16 * 64 * part // DEVICES for part in (2 * 3, 3, 3)]  # 2 (n-1)/n, (n-1)/n, (n-1)/n
    assert [row.bytes_net for row in estimate.rows if row.family == "communication"] == sizes
    assert not any("unknown size" in note for note in estimate.notes)
    unknown = graph.replace(ops=tuple(structs.replace(op, facts={}) for op in graph.ops))
    (note,) = rt.estimate(unknown, execution="eager").notes
    assert note == (
        "collectives of a group of unknown size, counted as of a large one: "
        "c10d.allreduce_ x1, c10d.alltoall_base_ x1, c10d.broadcast_ x1"
    )


def test_data_parallel_wrappers_add_what_they_exchange_and_nothing_else(group: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(net())
    x = torch.ones(8, 64)
    for phase in ("forward", "training"):
        graph, bare = (rt.trace(m, x, phase=phase) for m in (wrapped, net()))
        own = Counter((op.target, op.module) for op in bare.ops)
        added = Counter((op.target, op.module) for op in graph.ops) - own
        assert not own - Counter((op.target, op.module) for op in graph.ops)
        sent = [op.collective for op in graph.ops if op.collective]
        if phase == "forward":
            assert not added
            assert not sent
        else:
            assert sum(c.bytes for c in sent) == sum(4 * p.numel() for p in net().parameters())
            assert {c.kind for c in sent} == {"all_reduce"}
            assert {target.split(".")[1] for target, _ in added} <= {
                *("allreduce_", "mul", "copy_", "zeros", "empty", "record_event", "wait_event"),
            }


def test_a_sparse_tensor_is_its_indices_and_its_values(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor, places: Tensor) -> Tensor:
        ones = torch.ones(places.shape[1], device=x.device)
        return torch.sparse.mm(torch.sparse_coo_tensor(places, ones, (4, 8)), self.lin(x))

    graph = rt.trace(module(forward), torch.ones(8, 8), torch.arange(4).expand(2, 4))
    assert graph.values[graph.outputs[0]].shape == (4, 8)
    assert not graph.assumptions
    (whole,) = (op for op in graph.ops if op.name == "aten._sparse_coo_tensor_unsafe")
    assert [graph.values[value].shape for value in whole.inputs] == [(2, 4), (4,)]
    owners = {graph.values[value].storage for value in whole.outputs}
    assert [graph.values[owner].nbytes for owner in owners] == [4 * 4]  # that of the values


def test_waiting_for_a_gpu_is_no_error(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        torch.cuda.nvtx.range_push("layer")
        y = self.lin(x)
        torch.cuda.nvtx.range_pop()
        with torch.cuda.device(torch.cuda.current_device()), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        torch.cuda.synchronize()
        return y  # type: ignore[no-any-return]

    if torch.cuda.is_available():
        pytest.skip("there is a GPU to wait for")
    before = torch.cuda.synchronize
    graph = rt.trace(module(forward), torch.ones(2, 8))
    assert [op.name for op in graph.kernels()] == ["aten.addmm"]
    assert torch.cuda.synchronize is before


def doubled_sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) * 2


def test_a_custom_op_that_does_not_know_its_shapes_is_run_on_zeros(
    module: Callable[..., nn.Module],
) -> None:
    op = torch.library.custom_op("rooftrace_tests::unshaped", doubled_sum, mutates_args=())
    graph = rt.trace(module(lambda self, x: op(self.lin(x))), torch.ones(2, 8))
    assert graph.values[graph.outputs[0]].shape == (2, 1)
    assert [(a.kind, a.text) for a in graph.assumptions] == [
        (
            "shape",
            "rooftrace_tests.unshaped has no meta kernel: its output shape is that of a run on "
            "zeros",
        )
    ]
    assert [u.target for u in rt.plan(graph, "eager").coverage.unsupported] == [
        "rooftrace_tests.unshaped.default"
    ]


def test_a_sum_and_a_product_in_a_type_of_their_own_run_where_torchs_meta_kernels_fail(
    module: Callable[..., nn.Module],
) -> None:
    wide = {"out_dtype": torch.float32}

    def forward(self: Any, x: Tensor, added: Tensor) -> Any:
        product = torch.addmm(added, x, x.t(), alpha=2.0, **wide)
        return product, torch.baddbmm(added[None], x[None], x.t()[None], **wide)

    x = torch.ones(2, 8, dtype=torch.bfloat16)
    graph = rt.trace(module(forward), x, torch.ones(2, 2))
    assert not graph.assumptions and not rt.plan(graph, "eager").coverage.unsupported
    assert [op.name for op in graph.kernels()] == ["aten.addmm", "aten.baddbmm"]
    made = [graph.values[i] for i in graph.outputs]
    assert [(value.dtype, value.shape) for value in made] == [("fp32", (2, 2)), ("fp32", (1, 2, 2))]
    assert rt.plan(graph, "eager").total.flops(("matmul",)) == 2 * (2 * 2 * 2 * 8)


def test_a_while_loop_goes_round_as_often_as_its_known_condition_says(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor, turns: int | None) -> Any:
        start = torch.tensor(0, device=x.device) if turns is not None else x.sum().long()
        last = 3 if turns is None else turns
        loop: Any = torch._higher_order_ops.while_loop
        return loop(lambda i, y: i < last, lambda i, y: (i + 1, self.lin(y)), (start, x))

    for turns in (0, 3):
        graph = rt.trace(module(forward), torch.ones(2, 8), turns)
        assert sum(op.name == "aten.addmm" for op in graph.ops) == turns
        assert not graph.assumptions
    graph = rt.trace(module(forward), torch.empty(2, 8, device="meta"), None)
    assert sum(op.name == "aten.addmm" for op in graph.ops) == 1
    assert [a.kind for a in graph.assumptions] == ["branch"]


def test_a_scan_records_what_its_function_runs(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        scan: Any = torch._higher_order_ops.scan
        return scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)

    graph = rt.trace(module(forward), torch.empty(5, 8, device="meta"))
    assert sum(op.name == "aten.add" for op in graph.ops) >= 5


def test_a_deep_copy_inside_forward_is_the_same_value(module: Callable[..., nn.Module]) -> None:
    graph = rt.trace(module(lambda self, x: self.lin(copy.deepcopy(x))), torch.ones(2, 8))
    product = next(op for op in graph.ops if op.name == "aten.addmm")
    assert graph.inputs[0] in product.inputs


class Gate(nn.Module):
    """Control flow that TorchScript keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            x = torch.relu(self.lin(x))
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_scripted_module_runs_op_by_op(phase: str, inside: bool) -> None:
    plain: nn.Module = Gate()
    scripted: nn.Module = torch.jit.script(plain)
    if inside:
        plain, scripted = (
            nn.Sequential(nn.Linear(8, 8), plain),
            nn.Sequential(nn.Linear(8, 8), scripted),
        )
    x = torch.randn(4, 8)
    mine, theirs = (rt.trace(module, x, phase=phase) for module in (scripted, plain))
    assert mine.flops_torch == theirs.flops_torch
    names = {t.name for t in theirs.values if t.role == "weights"} - {""}
    assert {t.name for t in mine.values if t.role == "weights"} - {""} == names
    kernels = Counter(op.target for op in theirs.kernels())
    assert Counter(op.target for op in mine.kernels()) == kernels
    assert mine.modules["1" if inside else ""] == "Gate"
    assert all(p.device.type == "cpu" for p in scripted.parameters())


@pytest.mark.parametrize("size", [None, (3, 6, 8)])
def test_a_jagged_tensor_that_is_padded_trains(size: Any, module: Any) -> None:
    def forward(self: Any, values: Tensor, offsets: Tensor) -> Any:
        jagged = torch.nested.nested_tensor_from_jagged(
            self.lin(values), offsets, min_seqlen=2, max_seqlen=5
        )
        padded = torch.nested.to_padded_tensor(jagged, 0.0, size)
        return nn.functional.linear(padded, self.lin.weight)

    values, offsets = torch.randn(10, 8), torch.tensor([0, 2, 7, 10])
    graph = rt.trace(module(forward), values, offsets, phase="training", optimizer="none")
    rows = 3 * (5 if size is None else size[1])
    layer = 2 * 8 * 8  # FLOP for one row
    assert rt.estimate(graph).flops_matrix == layer * (2 * 10 + 3 * rows)


SPARSE = {
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "coo": Tensor.to_sparse,
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("where", ["parameter", "buffer", "attribute", "argument"])
@pytest.mark.parametrize("layout", SPARSE)
def test_products_of_sparse_weights_count_what_is_stored(layout: str, where: str) -> None:
    dense = torch.eye(8)
    dense[0, 3] = 2.0
    sparse = SPARSE[layout](dense)

    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            if where == "parameter":
                self.stored = nn.Parameter(sparse, requires_grad=False)
            elif where == "buffer":
                self.register_buffer("stored", sparse)
            else:
                self.stored = sparse

        def forward(self, x: Tensor, weight: Any = None) -> Tensor:
            return (self.stored if weight is None else weight) @ self.lin(x).T

    graph = rt.trace(Pruned(), torch.randn(5, 8), *([sparse] if where == "argument" else []))
    assert not graph.assumptions
    assert not rt.estimate(graph).unsupported_ops()
    places = int((sparse.values() if layout != "coo" else sparse._values()).numel())
    (product,) = (op for op in graph.ops if op.name == "aten.mm")
    assert product.facts["stored"] == places < dense.numel()
    cost = price_ops(graph)[0][graph.ops.index(product)]
    assert cost.flops() == 2 * places * 5
