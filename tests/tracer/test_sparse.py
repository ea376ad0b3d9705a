"""Sparse gradients: bytes, memory and FLOPs beside real tensors and PyTorch's allocator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.ops import price_ops
from rooftrace.tracer.lowering import to_fx
from tests.tracer.sparse_programs import (
    DENSE_BAGS,
    IDS,
    PROGRAMS,
    ROWS,
    WIDTH,
    ByFunction,
    Program,
    _table,
    ids,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

VALUES = 4 * IDS * WIDTH
"""Bytes of the values of a gradient that has a row for each id."""
EXACT = {"sgd", "padding", "max_norm", "read_twice", "by_function", "accumulated", "emptied",
         "zeroed_first"}  # fmt: skip
"""Programs that are fullest in backward, where a CPU makes the same tensors as a GPU."""


def bytes_of(tensor: Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def standing(args: tuple[Any, ...]) -> int:
    """Bytes of weights, states and inputs."""
    found: dict[int, int] = {}
    for item in args:
        held: list[Any] = [item]
        if isinstance(item, nn.Module):
            held = list(item.parameters())
        elif isinstance(item, torch.optim.Optimizer):
            held = [value for state in item.state.values() for value in state.values()]
        found |= {id(t): bytes_of(t) for t in held if isinstance(t, Tensor)}
    return sum(found.values())


def really_allocated(step: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """The most bytes that PyTorch's allocator gives out in a step, beside what stands."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        step(*args)
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in sizes:
        now += size
        most = max(most, now)
    return most


def warm(name: str) -> Program:
    """A program after its first step, without gradients."""
    torch.manual_seed(0)
    step, args = (PROGRAMS | DENSE_BAGS)[name]()
    step(*args)
    args[0].zero_grad()
    return step, args


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    step, args = warm(name)
    real = standing(args) + really_allocated(step, args)
    graph = rt.trace(*(lambda step, args: (step, *args))(*warm(name)))
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    assert not graph.assumptions
    if name in EXACT:
        assert peak == real
    else:
        # On a CPU what is coalesced lies in memory for all rows.  On a GPU alone the values of a
        # gradient that is not coalesced are scaled in a copy.
        assert 0.9995 * real <= peak <= real + VALUES


@pytest.mark.parametrize("mode", DENSE_BAGS)
def test_a_dense_gradient_of_bags_has_all_rows(mode: str) -> None:
    step, args = warm(mode)
    real = standing(args) + really_allocated(step, args)
    graph = rt.trace(step, *args)
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    assert peak == pytest.approx(real, rel=0.006)  # a CPU's kernels sort in memory of their own


class _Arithmetic(TorchDispatchMode):
    """Counts flop of an optimizer on real tensors: of a sparse one, of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stored = args[0]._nnz() if args and isinstance(args[0], Tensor) and args[0].is_sparse else 0
        made = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        others = [a for a in args[1:] if isinstance(a, Tensor)]
        scaled = 1 + (kwargs.get("alpha", 1) != 1)
        if name == "add" and others and others[0].is_sparse:
            self.flops += scaled * others[0]._values().numel()
        elif name == "_coalesce":
            self.flops += (stored - made._nnz()) * WIDTH
        elif name in ("mul", "div", "add", "sub", "pow", "sqrt", "sparse_mask"):
            whole = made._values() if made.is_sparse else made
            self.flops += whole.numel() * (scaled if name in ("add", "sub") else 1)
        return made


JOINED = {"momentum": WIDTH * IDS * (1 + 2 * 2), "read_twice": WIDTH * IDS * 2 * 2}
"""Flop where two gradients are joined: a CPU merges the rows that it finds equal on its way, a GPU
puts one behind the other.  Momentum scales the buffer, then adds twice as many rows."""


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"recommender"}))
def test_an_optimizer_computes_with_the_rows_of_its_gradient(name: str) -> None:
    count = _Arithmetic()
    step, args = warm(name)
    plain = args[1].step

    def counted(*others: Any) -> None:
        with count:
            plain(*others)

    args[1].step = counted
    step(*args)
    step, args = warm(name)
    graph = rt.trace(step, *args)
    costs = zip(graph.ops, price_ops(graph)[0], strict=True)
    flops = sum(cost.flops() for op, cost in costs if op.part == "optimizer")
    assert flops == JOINED.get(name, count.flops) > 0


def test_products_of_a_recommender_are_those_of_the_counter() -> None:
    step, args = warm("recommender")
    with FlopCounterMode(display=False) as theirs:
        step(*args)
    graph = rt.trace(*(lambda step, args: (step, *args))(*warm("recommender")))
    assert rt.estimate(graph, chip="l4").flops_matrix == theirs.get_total_flops()


def test_a_step_touches_the_rows_and_not_the_table() -> None:
    step, args = warm("sgd")
    graph = rt.trace(step, *args)
    update = [op for op in graph.ops if op.part == "optimizer" and op.kind == "kernel"]
    costs = dict(zip((op.id for op in graph.ops), price_ops(graph)[0], strict=True))
    rows = len(ids().unique()) * WIDTH * 4
    assert [op.name for op in update] == ["aten.mul", "aten.index_add_"]
    assert costs[update[0].id].bytes() == 2 * VALUES  # times the rate, into a copy
    assert costs[update[1].id].bytes() == IDS * 8 + VALUES + 2 * rows  # read, added, written
    (read,) = (op for op in graph.ops if op.name == "aten.embedding")
    assert costs[read.id].bytes() == IDS * 8 + VALUES + rows


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_read_each_row_once(mode: str) -> None:
    bag = nn.EmbeddingBag(ROWS, WIDTH, mode=mode)
    index = torch.arange(40).repeat(4)
    graph = rt.trace(bag, index, torch.arange(0, 160, 8))
    costs = zip(graph.ops, price_ops(graph)[0], strict=True)
    (table,) = (graph.values.index(v) for v in graph.values if v.name == "weight")
    read = sum(
        size
        for op, cost in costs
        for access, size in cost.traffic.items()
        if "_embedding_bag" in op.name and access.storage == table
    )
    assert read == 40 * WIDTH * 4


def test_what_repeats_is_added_where_it_is_known_and_kept_where_it_is_not() -> None:
    def step(model: nn.Module, optimizer: Any, index: Tensor) -> None:
        train(model, optimizer, index)

    model = _table()
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    known = rt.trace(step, model, optimizer, torch.arange(64).repeat(8))
    (merge,) = (op for op in known.ops if op.name == "rooftrace.coalesce")
    assert [known.values[value].shape for value in merge.outputs] == [(1, 64), (64, WIDTH)]
    assert not known.assumptions
    with torch.device("meta"):
        model = _table()
        optimizer = torch.optim.SparseAdam(list(model.parameters()))
        index = torch.empty(IDS, dtype=torch.int64)
    unknown = rt.trace(step, model, optimizer, index)
    (merge,) = (op for op in unknown.ops if op.name == "rooftrace.coalesce")
    assert unknown.values[merge.outputs[1]].shape == (IDS, WIDTH)
    assert "how many of the 512 rows" in unknown.assumptions[0].text


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparseadam"])
def test_the_phase_training_steps_with_sparse_gradients(optimizer: str) -> None:
    graph = rt.trace(ByFunction(), ids(), phase="training", optimizer=optimizer)
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    tables = {"sgd": 1, "adagrad": 2, "sparseadam": 3}[optimizer]
    table = 4 * ROWS * WIDTH
    assert tables * table < peak < tables * table + 9 * VALUES
    assert {a.kind for a in graph.assumptions} == {"loss"}


def test_a_graph_with_a_sparse_step_runs_on_real_tensors() -> None:
    step, args = warm("sparse_adam")
    graph = rt.trace(step, *args)
    table = args[0].weight.detach().clone()
    moments = {f"weight.{n}": t.clone() for n, t in args[1].state[args[0].weight].items()
               if isinstance(t, Tensor)}  # fmt: skip
    to_fx(graph, {"weight": table, **moments})(args[2])
    changed = (table != args[0].weight).any(1).nonzero().flatten()
    assert torch.equal(changed, ids().unique())
    step(*args)
    torch.testing.assert_close(table, args[0].weight.detach())


def test_a_product_with_a_sparse_matrix_and_its_backward_count_what_is_stored() -> None:
    stored = torch.eye(64).to_sparse()

    class Propagated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", stored)
            self.lin = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, self.lin(x))

    graph = rt.trace(Propagated(), torch.ones(64, 16), phase="training", optimizer="none")
    products = [op.facts["stored"] for op in graph.ops if "stored" in op.facts]
    assert products == [64, 64]
    assert {a.kind for a in graph.assumptions} == {"loss"}
    weights = sum(v.nbytes for i, v in enumerate(graph.values)
                  if v.role == "weights" and v.storage == i)  # fmt: skip
    assert weights == 4 * 16 * 16 + 64 * (2 * 8 + 4)  # the matrix as its indices and values


def clipped(model: nn.Module, optimizer: Any, index: Tensor) -> None:
    model(index).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def decayed(model: nn.Module, optimizer: Any, index: Tensor) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1
    train(model, optimizer, index)


@pytest.mark.parametrize(
    ("step", "message"),
    [(clipped, "linalg_vector_norm"), (decayed, r"add\(sparse, dense\) is not supported")],
)
def test_what_pytorch_refuses_is_refused(step: Callable[..., Any], message: str) -> None:
    model = _table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((NotImplementedError, RuntimeError), match=message):
        step(model, optimizer, ids())
    with pytest.raises(rt.types.TraceError, match=message):
        rt.trace(step, model, optimizer, ids())


def made_dense(model: Any, optimizer: Any, index: Tensor) -> None:
    model(index).square().mean().backward()
    model.weight.grad = model.weight.grad.to_dense()
    optimizer.step()
    optimizer.zero_grad()


def kept(model: Any, optimizer: Any, index: Tensor) -> tuple[Tensor, Tensor]:
    model(index).square().mean().backward()
    gradient = model.weight.grad
    optimizer.step()
    optimizer.zero_grad()
    return gradient.clone(), gradient.detach()


def measured(model: Any, optimizer: Any, index: Tensor) -> None:
    model(index).square().mean().backward()
    model.weight.grad.coalesce().norm()
    model.weight.grad.mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("step", [made_dense, kept, measured])
def test_other_uses_of_a_sparse_gradient_take_the_memory_that_they_do(
    step: Callable[..., Any],
) -> None:
    _, args = warm("sgd")
    real = standing(args) + really_allocated(step, args)
    graph = rt.trace(step, *warm("sgd")[1])
    assert rt.estimate(graph, chip="l4", execution="eager").memory.peak == real
    assert not graph.assumptions


def test_tables_that_are_alike_count_as_if_each_were_run() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(12)
            )

        def forward(self, index: Tensor) -> Any:
            return sum(table(index, torch.arange(0, IDS, 8)) for table in self.tables)

    short = rt.trace(Tables(), ids(), phase="training", optimizer="adagrad")
    full = rt.trace(Tables(), ids(), phase="training", optimizer="adagrad", repeats=False)
    ours, flat = (rt.estimate(graph, chip="l4", execution="eager") for graph in (short, full))
    assert (ours.flops, ours.bytes_hbm) == (flat.flops, flat.bytes_hbm)
    assert ours.memory.peak == flat.memory.peak


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_takes_the_bytes_of_its_pieces(layout: str) -> None:
    dense = torch.eye(64)
    stored = dense.to_sparse() if layout == "coo" else dense.to_sparse_csr()

    class Propagated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", stored)

        def forward(self, x: Tensor) -> Tensor:
            return self.edges @ x

    graph = rt.trace(Propagated(), torch.ones(64, 16))
    indices = 2 * 64 if layout == "coo" else 64 + 65
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    assert peak == 64 * 4 + indices * 8 + 2 * 4 * 64 * 16
    assert not graph.assumptions


def test_a_sweep_counts_what_each_size_does() -> None:
    model, phase = ByFunction(), {"phase": "training", "optimizer": "adagrad"}
    swept = rt.sweep(model, ids(64), over={"0.0": [64, 96, 128]}, chip="l4", execution="eager",
                     **phase)  # fmt: skip
    rows = swept.frame().set_index("0.0")
    for size in (64, 96, 128):
        index = torch.empty(size, dtype=torch.int64, device="meta")
        single = rt.estimate(rt.trace(model, index, **phase), chip="l4", execution="eager")
        assert rows.loc[size, "bytes_hbm"] == single.bytes_hbm
        assert rows.loc[size, "flops"] == single.flops
