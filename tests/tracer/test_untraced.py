"""Work that a dispatch mode does not see by itself: it is followed, or it is said.

The counts to compare with are those of torch's FlopCounterMode on the real module, where that sees
the work; else arithmetic on the sizes.
"""

import asyncio
import dataclasses
import io
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.tracer.recording.recorder import Recorder
from rooftrace.tracer.values.trees import bytes_of

pytestmark = pytest.mark.quick

Made = Callable[..., nn.Module]

X = torch.randn(4, 8)
ONE = 2 * 4 * 8 * 8  # FLOP of one linear layer, 8 wide, on four rows


def flops(module: nn.Module, *args: Any, execution: str = "efficient") -> int:
    graph = rt.trace(module, *args)
    return rt.estimate(graph, chip="h100-sxm", execution=execution).flops_matrix


def kinds(module: nn.Module, *args: Any) -> set[str]:
    return {item.kind for item in rt.trace(module, *args).assumptions}


# -- threads ---------------------------------------------------------------------------------------

POOL = ThreadPoolExecutor(2)
POOL.submit(int).result()  # one of its threads is there before anything is traced


def in_a_pool_of_its_own(self: Any, x: Tensor) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(self.lin, x).result()


def in_a_pool_that_was_there(self: Any, x: Tensor) -> Any:
    return sum(POOL.map(self.lin, x.chunk(2))) + POOL.submit(self.lin, x[:0]).result().sum()


def in_a_thread(self: Any, x: Tensor) -> Any:
    found: list[Tensor] = []
    thread = threading.Thread(
        target=lambda: found.append(nn.functional.linear(x, self.lin.weight) + torch.ones(8))
    )
    thread.start()
    thread.join()
    return found[0]


class _Worker(threading.Thread):
    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.what = run

    def run(self) -> None:
        self.made = self.what()


def in_a_thread_of_a_thread(self: Any, x: Tensor) -> Any:
    inner = _Worker(lambda: self.lin(x))
    outer = _Worker(lambda: (inner.start(), inner.join()))
    outer.start()
    outer.join()
    return inner.made


def in_asyncio(self: Any, x: Tensor) -> Any:
    async def run() -> Any:
        return await asyncio.to_thread(self.lin, x)

    return asyncio.run(run())


def in_a_fork(self: Any, x: Tensor) -> Any:
    return torch.jit.wait(torch.jit.fork(self.lin, x))  # type: ignore[no-untyped-call]


def in_a_callback(self: Any, x: Tensor) -> Any:
    first: Any = torch.futures.Future()
    second = first.then(lambda done: self.lin(done.value()))
    thread = threading.Thread(target=lambda: first.set_result(x))
    thread.start()
    return second.wait()


@pytest.mark.parametrize(
    "forward",
    [
        in_a_pool_of_its_own,
        in_a_pool_that_was_there,
        in_a_thread,
        in_a_thread_of_a_thread,
        in_asyncio,
        in_a_fork,
        in_a_callback,
    ],
)
def test_work_in_threads_is_recorded(forward: Any, module: Made) -> None:
    made = module(forward)
    assert flops(made, X) == flops(made, X, execution="eager") == ONE
    assert not kinds(made, X)


def test_ops_in_threads_name_their_module_and_line(module: Made) -> None:
    graph = rt.trace(nn.Sequential(module(in_a_pool_of_its_own)), X)
    product = next(op for op in graph.ops if op.name == "aten.addmm")
    assert product.module == "0.lin"
    assert product.source.startswith("tests/tracer/test_untraced.py:")


def test_a_module_that_an_older_thread_runs_is_recorded(module: Made) -> None:
    asked: queue.Queue[Any] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        for call in iter(asked.get, None):
            answers.put(call())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()

    def forward(self: Any, x: Tensor) -> Any:
        asked.put(lambda: self.lin(x))
        return answers.get()

    assert flops(module(forward), X) == ONE
    asked.put(lambda: torch.ones(3).device)  # and afterwards it is as it was
    assert answers.get() == torch.device("cpu")
    asked.put(None)
    thread.join()


def test_threads_of_others_are_neither_recorded_nor_changed(module: Made) -> None:
    go, done = threading.Event(), threading.Event()
    seen: list[Tensor] = []
    other = nn.Linear(8, 8)

    def beside() -> None:
        go.wait()
        seen.append(other(X) @ torch.ones(8, 8))
        done.set()

    thread = threading.Thread(target=beside)
    thread.start()

    def forward(self: Any, x: Tensor) -> Any:
        go.set()
        done.wait()
        return self.lin(x)

    graph = rt.trace(module(forward), X)
    thread.join()
    assert [op.module for op in graph.ops if op.name == "aten.addmm"] == ["lin"]
    assert "<Linear>" not in graph.modules
    assert torch.equal(seen[0], other(X) @ torch.ones(8, 8))


def test_nothing_stays_behind_in_threads_and_pools(module: Made) -> None:
    before = threading.Thread.start, ThreadPoolExecutor.submit
    rt.trace(module(in_a_pool_that_was_there), X)
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == before
    device = POOL.submit(lambda: (torch.ones(2) @ torch.ones(2)).device).result()
    assert device == torch.device("cpu")


def test_training_follows_threads(module: Made) -> None:
    graph = rt.trace(module(in_a_pool_of_its_own), X, phase="training", optimizer="none")
    assert rt.estimate(graph, chip="h100-sxm").flops_matrix == 2 * ONE  # and that of the weight


def test_a_pause_of_one_thread_is_no_pause_of_another() -> None:
    inside, done = threading.Event(), threading.Event()
    layer, x = nn.Linear(8, 8, device="meta"), torch.empty(4, 8, device="meta")
    recorder = Recorder()
    recorder.name_modules(layer)

    def work() -> None:
        inside.wait()
        layer(x)
        done.set()

    with recorder:
        thread = threading.Thread(target=work)
        thread.start()
        with recorder.paused():
            inside.set()
            done.wait()
            later = threading.Thread(target=layer, args=(x,))  # a pause is handed on
            later.start()
            later.join()
        thread.join()
    products = [n for n in recorder.graph.nodes if n.target is torch.ops.aten.addmm.default]
    recorder.close()
    assert len(products) == 1


def test_bytes_that_were_given_up_are_nobodys() -> None:
    """A new tensor often lies where a weight lay that was given other data."""
    layer = nn.Linear(8, 8, device="meta")
    recorder = Recorder()
    with recorder:
        recorder.name_modules(layer)
        places = {bytes_of(p) for p in layer.parameters()}
        for p in layer.parameters():
            p.data = torch.empty_like(p)
        made = [torch.empty_like(p) for p in layer.parameters() for _ in range(64)]
        with _disable_current_modes():
            made += [torch.empty(8, 8, device="meta") for _ in range(64)]
        stale = [t for t in made if bytes_of(t) in places]
        assert all(recorder.entries.storage_of(t) is None for t in stale)
    recorder.close()


def test_backward_in_two_threads_at_once_leaves_autograd_as_it_was(module: Made) -> None:
    first, second = threading.Barrier(2), threading.Barrier(2)
    before = torch.autograd._engine_run_backward

    def step(model: nn.Module, other: nn.Module, x: Tensor) -> None:
        def work(layer: nn.Module, wait: threading.Barrier) -> None:
            out = layer(x).sum()
            out.register_hook(lambda grad: ((first.wait(), wait.wait())[:0] and grad) or None)
            out.backward()

        threads = [threading.Thread(target=work, args=(m, second)) for m in (model, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    graph = rt.trace(step, nn.Linear(8, 8), nn.Linear(8, 3), X)
    assert torch.autograd._engine_run_backward is before
    total = 2 * (ONE + 2 * 4 * 8 * 3)
    assert rt.estimate(graph, chip="h100-sxm", execution="eager").flops_matrix == total


@pytest.mark.parametrize("joined", [True, False])
def test_a_thread_that_waits_for_more_is_said_at_once(module: Made, joined: bool) -> None:
    asked: queue.Queue[Any] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()

    def forward(self: Any, x: Tensor) -> Any:
        def serve() -> None:
            for item in iter(asked.get, None):
                answers.put(self.lin(item))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        asked.put(x)
        found = answers.get()
        if joined:
            asked.put(None)
        return found

    graph = rt.trace(module(forward), X)
    texts = [a.text for a in graph.assumptions if "still running" in a.text]
    assert len(texts) == (not joined)
    assert rt.estimate(graph, chip="h100-sxm").flops_matrix == ONE
    asked.put(None)


def test_a_progress_bar_in_a_step_leaves_nothing_out(
    module: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread watches bars to the end of the process, and computes nothing."""
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)  # as in a process without a bar yet

    def forward(self: Any, x: Tensor) -> Any:
        for _ in tqdm.tqdm(range(3), file=io.StringIO()):
            x = self.lin(x)
        return x

    graph = rt.trace(module(forward), X)
    assert tqdm.tqdm.monitor.is_alive()
    assert not graph.unrecorded
    assert rt.estimate(graph, chip="h100-sxm").flops_matrix == 3 * ONE


# -- real tensors, hooks, the host -----------------------------------------------------------------

OTHER = torch.randn(8, 8)


class Offloaded(nn.Module):
    """A layer whose weights are put in place when it is called, as offloading hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.kept = {name: p.detach().clone() for name, p in self.lin.named_parameters()}
        self.lin.to("meta")
        self.lin.register_forward_pre_hook(self.bring)
        self.lin.register_forward_hook(self.take)

    def bring(self, layer: Any, args: Any) -> Any:
        for name, value in self.kept.items():
            layer._parameters[name] = nn.Parameter(value.to("cpu"))
        return tuple(item.to("cpu") for item in args)

    def take(self, layer: Any, args: Any, output: Any) -> None:
        layer.to("meta")

    def forward(self, x: Tensor) -> Any:
        return self.lin(x)


def test_a_weight_that_a_hook_puts_in_place_is_that_weight() -> None:
    module = Offloaded()
    with FlopCounterMode(display=False) as counter:
        module(X)
    assert flops(module, X) == counter.get_total_flops() == ONE
    graph = rt.trace(module, X)
    product = next(op for op in graph.ops if op.name == "aten.addmm")
    read = [graph.values[i] for i in product.inputs if graph.values[i].role == "weights"]
    assert [value.shape for value in read] == [(8,), (8, 8)]
    assert {a.kind for a in graph.assumptions} == {"host-copy"}


def loaded(self: Any, x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(OTHER, file)
    file.seek(0)
    return x @ torch.load(file)


def made_into_a_storage(self: Any, x: Tensor) -> Any:
    empty = torch.empty(0)
    empty.set_(self.lin(x).untyped_storage(), 0, (4, 8), (8, 1))
    return self.lin(empty)


def with_other_data(self: Any, x: Tensor) -> Any:
    self.lin.weight.data = self.lin.weight.data @ OTHER
    return self.lin(x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (OTHER @ OTHER).sum() + self.lin(x),
        lambda self, x: self.lin(x.cpu()),
        lambda self, x: nn.functional.linear(x.cpu(), self.lin.weight.cpu()),
        lambda self, x: self.lin(x).to("cpu") @ OTHER,
        lambda self, x: self.lin(torch.tensor(x.tolist())),
        lambda self, x: self.lin(x) * torch.tensor(self.lin(x).sum().item()),
        lambda self, x: nn.functional.linear(x.data, self.lin.weight.data),
        lambda self, x: nn.functional.linear(x, nn.Parameter(self.lin.weight @ OTHER)),
        loaded,
        made_into_a_storage,
        with_other_data,
    ],
)
def test_real_tensors_and_the_host_lose_nothing(forward: Any, module: Made) -> None:
    made = module(forward)
    counted = flops(made, X), flops(made, X, execution="eager")
    with FlopCounterMode(display=False) as counter:
        made(X)
    assert counted == (counter.get_total_flops(),) * 2
    assert "unrecorded" not in kinds(module(forward), X)


def test_a_frozen_script_traces() -> None:
    script: Any = torch.jit
    frozen = script.freeze(script.script(nn.Sequential(nn.Linear(8, 8)).eval()))
    assert flops(frozen, X) == ONE


# -- what cannot be followed is said ---------------------------------------------------------------


def out_of_sight(self: Any, x: Tensor) -> Any:
    with _disable_current_modes():
        return self.lin(x)


def half_out_of_sight(self: Any, x: Tensor) -> Any:
    with _disable_current_modes():
        y = self.lin(x)
    return self.lin(y)


def in_numpy(self: Any, x: Tensor) -> Any:
    return self.lin(torch.from_numpy(x.numpy() @ self.lin.weight.detach().numpy()))


@pytest.mark.parametrize("forward", [out_of_sight, half_out_of_sight, in_numpy])
def test_a_result_that_nothing_recorded_made_is_said(forward: Any, module: Made) -> None:
    graph = rt.trace(module(forward), X)
    assert graph.unrecorded
    estimate = rt.estimate(graph, chip="h100-sxm")
    assert estimate.lower_bound
    shown = str(estimate)
    assert "lower bound" in shown and "100 %" not in shown
    assert "≥" in shown


def test_a_report_says_that_its_totals_are_a_lower_bound(module: Made) -> None:
    from rooftrace.reporting.sections import document
    from rooftrace.reporting.views.results import as_markdown

    report = rt.report(module(out_of_sight), X, chip="h100-sxm")
    assert document(report)["coverage"]["lower_bound"] is True
    assert "**Not everything was recorded: all totals are a lower bound.**" in as_markdown(report)


def test_a_step_that_runs_its_products_elsewhere_is_no_zero(module: Made) -> None:
    class Hidden:
        def __init__(self, tensor: Tensor) -> None:
            self.give = lambda: tensor

    def forward(self: Any, x: Tensor) -> Any:
        with _disable_current_modes():
            return Hidden(self.lin(x))

    graph = rt.trace(module(forward), X)
    assert "no recorded op reads any parameter of Written" in graph.unrecorded[0].text


def test_what_runs_nothing_and_returns_its_input_is_complete(module: Made) -> None:
    assert not rt.trace(module(lambda self, x: x), X).assumptions


# -- roads by which a result leaves ----------------------------------------------------------------


@dataclasses.dataclass
class Out:
    value: Any


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self._inside = [{"deep": (tensor,)}]

    def __call__(self) -> Any:
        return self._inside


HELD: list[Tensor] = []


def into_a_list(self: Any, x: Tensor) -> Any:
    HELD.append(self.lin(x))
    return x + 1


def into_an_attribute(self: Any, x: Tensor) -> Any:
    self.last = self.lin(x)
    return x + 1


def generated(self: Any, x: Tensor) -> Iterator[Tensor]:
    yield self.lin(x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: Out(self.lin(x)),
        lambda self, x: Box(self.lin(x)),
        lambda self, x: [[[[[[[[[self.lin(x)]]]]]]]]],
        lambda self, x: (lambda y: lambda: y)(self.lin(x)),
        lambda self, x: self.lin(x).sum().item(),
        lambda self, x: str(self.lin(x)),
        into_a_list,
        into_an_attribute,
        generated,
    ],
)
def test_what_leaves_by_any_road_is_no_dead_code(forward: Any, module: Made) -> None:
    assert flops(module(forward), X) == ONE
    HELD.clear()


def test_what_nothing_holds_is_dead_code(module: Made) -> None:
    assert flops(module(lambda self, x: (self.lin(x), x + 1)[1]), X) == 0


def test_layers_that_leave_something_behind_are_all_run() -> None:
    kept: list[Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.lin(x))
            return x * 2

    assert flops(nn.Sequential(*(Layer() for _ in range(5))).eval(), X) == 5 * ONE
    assert len(kept) == 5


# -- what modules hold beside tensors --------------------------------------------------------------


class WithHandles(nn.Module):
    """Runs a layer in a pool of its own, under a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.pool, self.locks = nn.Linear(8, 8), ThreadPoolExecutor(2), [threading.Lock()]

    def forward(self, x: Tensor) -> Tensor:
        with self.locks[0]:
            return self.pool.submit(self.lin, x).result()  # type: ignore[no-any-return]


def test_a_module_may_hold_a_pool_and_a_lock() -> None:
    model = WithHandles()
    assert flops(model, X) == ONE
    assert not model.pool._threads  # the user's own has run nothing

    def step(model: nn.Module, x: Tensor) -> None:
        model(x).sum().backward()

    assert flops_of_step(step, model, X) == 2 * ONE


def flops_of_step(step: Any, *args: Any) -> int:
    return rt.estimate(rt.trace(step, *args), chip="h100-sxm").flops_matrix


class Loads(Mapping[str, Tensor]):
    """A mapping that loads what it is asked for, and is asked for by one name only."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"{name}.there"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def test_a_mapping_that_loads_is_not_read_out() -> None:
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.bias = nn.Linear(8, 8, bias=False), nn.Parameter(torch.ones(8))
            self.weights = Loads({"weight.there": self.lin.weight.data})

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weights["weight"]) + self.bias

    assert flops(Offloaded(), X) == ONE


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.new_tensor(0.5),
        lambda x: x.new_tensor(data=[1.0, 2.0, 3.0, 4.0]),
        lambda x: x.new([1.0, 2.0, 3.0, 4.0]),
        lambda x: x.new(4).zero_(),
        lambda x: x.new_tensor(x),
        lambda x: torch.as_tensor(np.ones(4, "float32"), device=x.device),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_that_become_a_tensor_are_no_gap(
    make: Callable[[Tensor], Tensor], device: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            made = make(x)
            assert made.dtype == x.dtype
            y: Tensor = self.lin(x) * made
            return y

    with torch.device(device):
        graph = rt.trace(Model(), torch.ones(4))
    assert not graph.unrecorded
