"""Threads and contexts: a trace is alone in its threads, and others do not notice it."""

import asyncio
import contextlib
import contextvars
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace import _processes
from rooftrace.errors import RequestError
from rooftrace.tracer.phases.counters import _ForwardTracker
from rooftrace.tracer.recording import kept_whole, recurrent
from rooftrace.tracer.recording.recorder import Recorder

from .. import process_state

HERE = sys.modules[__name__]
PATIENCE = 60  # seconds; only a test that fails waits so long


class Layer(nn.Module):
    """A layer with a number of its own, an attention, and a region of autocast."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.scale = number, 1.0 + number
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            q = self.lin(x).view(2, 4, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 4, 8)
        return x + F.dropout(y.float(), 0.1, self.training)


class Stack(nn.Module):
    """Equal layers, a loop that can be rolled, draws of random numbers, a place to wait at."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in range(4))
        self.cell = nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.wait = wait

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.wait()
        h = self.rnn(x)[0][:, 0]
        for _ in range(12):
            h = torch.tanh(self.cell(h))
        for layer in self.layers:
            if random.random() + np.random.rand() + float(torch.rand(1, device="cpu")) < 1.5:
                x = layer(x)
        return x + h[:, None]


X = torch.ones(2, 4, 8)


def traced(module: nn.Module | None = None, phase: str = "forward") -> Any:
    return rt.trace(Stack() if module is None else module, X, phase=phase)


@cache
def alone_traced(phase: str = "forward") -> Any:
    """The graph of a trace with no other at its side."""
    return traced(phase=phase)


class Halfway:
    """A place in a forward at which the trace waits until a test lets it go on."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.there.set()
        assert self.go.wait(PATIENCE)

    def __deepcopy__(self, memo: Any) -> "Halfway":
        return self


@contextlib.contextmanager
def tracing(phase: str = "forward") -> Iterator[Any]:
    """Inside, another thread stands in the middle of a trace; the result gets its graph."""
    place = Halfway()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(traced, Stack(place), phase)
        try:
            while not place.there.wait(0.01):
                assert not future.done(), future.result()
            yield future
        finally:
            place.go.set()
    future.result()


# -- other threads do not notice -------------------------------------------------------------------


def region() -> torch.dtype:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
        return (torch.ones(4, 4) @ torch.ones(4, 4)).dtype


def test_a_region_of_another_thread_keeps_its_precision() -> None:
    with tracing():
        assert region() is torch.bfloat16
        entered: Any = torch.autocast("cpu", dtype=torch.bfloat16)
        entered.__enter__()  # begins while the trace runs, and ends after it
    assert (torch.ones(4, 4) @ torch.ones(4, 4)).dtype is torch.bfloat16
    entered.__exit__(None, None, None)
    assert not torch.is_autocast_enabled("cpu") and entered.device == "cpu"


def test_meta_tensors_of_another_thread_are_as_torch_has_them() -> None:
    def names() -> list[str]:
        seen: list[str] = []

        class Log(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        q = torch.empty(2, 2, 4, 4, device="meta", requires_grad=True)
        rnn, x = nn.LSTM(4, 4, device="meta"), torch.empty(3, 2, 4, device="meta")
        with Log():  # type: ignore[no-untyped-call]
            F.dropout(F.scaled_dot_product_attention(q, q, q), 0.5).sum().backward()
            rnn(x)
        return seen

    expected = names()
    with tracing():
        assert names() == expected
    assert not any("rooftrace" in name for name in expected)


def test_calls_of_a_device_fail_in_another_thread_as_ever() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU answers for itself")
    with tracing():
        for call in (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.Stream):
            with pytest.raises((RuntimeError, AssertionError)):
                call()


def test_what_another_thread_draws_is_its_own() -> None:
    def drawn() -> list[float]:
        return [random.random(), random.uniform(0, 1), np.random.rand(), float(torch.rand(1))]

    def seeded() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seeded()
    expected = [drawn(), drawn(), drawn()]
    with tracing():
        seeded()
        got = [drawn(), drawn()]
    got.append(drawn())
    assert got == expected


def test_compiled_code_of_another_thread_is_compiled() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    compiled: Any = torch.compile(lambda x: x + 1, backend=backend)
    with tracing():
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert len(calls) == 1


def test_warnings_of_another_thread_are_shown() -> None:
    text = "Sparse CSR tensor support is in beta state"
    with warnings.catch_warnings(record=True) as shown, tracing():
        warnings.simplefilter("always")
        warnings.warn(text, stacklevel=1)
        assert [str(w.message) for w in shown] == [text]


def test_modules_pools_and_optimizers_of_another_thread_run_as_ever() -> None:
    with tracing("training") as future:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        module(torch.ones(1, 2)).sum().backward()
        before = module.bias.detach().clone()
        optimizer.step()
        assert torch.equal(module.bias, before - 1)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: torch.ones(3).device.type).result() == "cpu"
        assert torch.ones(1).device.type == "cpu" and list(map(int, HERE.__dict__["range"](3)))
    assert {op.part for op in future.result().ops} >= {"forward", "backward"}


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_meanwhile_another_thread_is_as_it_was(phase: str) -> None:
    before = process_state.of_this_thread()
    with tracing(phase):
        during = process_state.of_this_thread()
    assert not process_state.changed(before, during)


def call_apart(code: str) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of code in a process of its own, which it may end."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stdout, done.stderr


_ON_THEIR_WAY = """
import sys, threading, time
import torch
from torch.nn import functional as F
from rooftrace.tracer.recording import kept_whole

sys.setswitchinterval(1e-6)  # seconds: a thread waits for the interpreter wherever it can
x = torch.empty(1, 2, 4, 4, device="meta", requires_grad=True)
end, calls = threading.Event(), []

def call():
    while True:
        calls.append(F.scaled_dot_product_attention(x, x, x).shape == F.dropout(x).shape)
        if end.is_set():
            return

threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(300):
    with kept_whole():
        time.sleep(2e-4)
end.set()
for thread in threads:
    thread.join()
print(len(calls) >= 3 and all(calls))
"""


_COLLECTED = """
import gc, threading
from rooftrace import _processes as shared

class Held:
    pass

for turn in range(3000):
    held = Held()
    held.local, held.itself = threading.local(), held  # its end waits for a lock of the interpreter
    held.local.x = 1
    gc.set_threshold(3 + turn % 40)
    assert shared.alone()
print("done")
"""


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_thread_finds_its_kernel_and_to_count_threads_collects_nothing() -> None:
    """A thread on its way into a kernel finds it, also when the recording ends that has put the
    kernel there; else the process dies.  Until Python 3.12 a collection in the count of threads
    could wait for itself."""
    assert call_apart(_ON_THEIR_WAY) == (0, "True\n", "")
    assert call_apart(_COLLECTED) == (0, "done\n", "")


def test_a_kernel_that_cannot_be_held_stays_while_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Older releases of torch have nothing to hold a kernel with."""
    monkeypatch.setattr(recurrent, "_kernel_of", None)
    for others in (False, True, True, False):
        monkeypatch.setattr(_processes, "alone", lambda others=others: not others)
        with kept_whole():
            assert _has_attention()
        assert _has_attention() is others


def _has_attention() -> bool:
    name = "aten::scaled_dot_product_attention"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutogradMeta")


# -- afterwards all is as it was -------------------------------------------------------------------


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    process, thread = process_state.of_the_process(HERE), process_state.of_this_thread()
    yield
    left = process_state.changed(process, process_state.of_the_process(HERE))
    assert not left + process_state.changed(thread, process_state.of_this_thread())


@pytest.fixture(params=[True, False], ids=["alone", "beside"])
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both ways of drawing random numbers: in a process of one thread, and of several."""
    monkeypatch.setattr(_processes, "alone", lambda: request.param)
    alone_traced()  # what is loaded at first use is loaded
    yield


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_a_trace_leaves_nothing(phase: str, alone: None) -> None:
    module = Stack()
    with nothing_left():
        traced(module, phase)


def test_a_trace_that_fails_leaves_nothing(alone: None) -> None:
    def fail() -> None:
        raise KeyError("no such thing")

    failing, module = Stack(fail), nn.Linear(8, 8, device="meta")
    with nothing_left():
        with pytest.raises(rt.types.TraceError, match="no such thing"):
            traced(failing)
        with pytest.raises(KeyboardInterrupt), rt.capture(module):
            raise KeyboardInterrupt


def test_a_recorder_that_cannot_begin_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    with nothing_left():
        recorder = Recorder(record=False)
        with monkeypatch.context() as patch:
            patch.setattr(recorder._followers, "followed", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                recorder.__enter__()


def test_traces_that_overlap_and_end_in_the_other_order_leave_nothing() -> None:
    expected = alone_traced()
    first, second = Halfway(), Halfway()
    one, other = Stack(first), Stack(second)
    with nothing_left(), ThreadPoolExecutor(2) as pool:
        early = pool.submit(traced, one)
        assert first.there.wait(PATIENCE)
        late = pool.submit(traced, other)
        assert second.there.wait(PATIENCE)
        first.go.set()
        assert early.result(PATIENCE) == expected
        second.go.set()
        assert late.result(PATIENCE) == expected


def test_somebody_elses_patch_made_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = torch.clear_autocast_cache
    with tracing():
        theirs = torch.clear_autocast_cache
        monkeypatch.setattr(torch, "clear_autocast_cache", patched := lambda: theirs())
    assert torch.clear_autocast_cache is patched
    traced()
    assert torch.clear_autocast_cache is patched
    patched()
    monkeypatch.undo()
    torch.clear_autocast_cache = ours


# -- the graphs are those of a single trace --------------------------------------------------------


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_two_threads_give_the_graph_of_one(phase: str) -> None:
    expected = alone_traced(phase)
    with tracing(phase) as future:
        assert traced(phase=phase) == expected
    assert future.result() == expected


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_module_in_many_threads_at_once(device: str) -> None:
    module, count = Stack().to(device), 4
    expected = traced(module)
    start = threading.Barrier(count)

    def run(_: int) -> Any:
        start.wait(PATIENCE)
        return traced(module)

    with ThreadPoolExecutor(count) as pool:
        assert all(graph == expected for graph in pool.map(run, range(count)))


def test_through_asyncio() -> None:
    expected = alone_traced()

    async def both() -> Any:
        mine = asyncio.to_thread(traced)
        return await asyncio.gather(mine, asyncio.to_thread(traced))

    assert asyncio.run(both()) == [expected, expected]


def test_a_copied_context_is_no_trace() -> None:
    module = nn.Linear(8, 8, device="meta")
    with rt.capture(module) as captured:
        context = contextvars.copy_context()
    seen: list[Any] = []
    thread = threading.Thread(target=context.run, args=(lambda: seen.append(region()),))
    thread.start()
    thread.join()
    assert seen == [torch.bfloat16] and not captured.graph.ops


# -- a trace inside of something else --------------------------------------------------------------


def test_a_trace_inside_a_capture_does_not_leak_into_it() -> None:
    module, x = nn.Linear(8, 8, device="meta"), torch.empty(2, 8, device="meta")
    with rt.capture(module) as plain:
        module(module(x))
    expected, stack, ones = alone_traced(), Stack(), torch.ones(2, 8)
    with rt.capture(module) as captured:
        y = module(x)
        inner = traced(stack)
        again = rt.trace(module, ones)
        module(y)
    assert inner == expected
    assert again == rt.trace(module, torch.ones(2, 8))
    names = [(op.name, op.module, op.inputs, op.outputs) for op in plain.graph.ops]
    assert [(op.name, op.module, op.inputs, op.outputs) for op in captured.graph.ops] == names
    assert captured.graph.values == plain.graph.values


def test_modes_around_a_trace_see_none_of_it() -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError(f"{func} was seen")

    expected = alone_traced()
    module = Stack()
    with FlopCounterMode(display=False) as counter, Functions():
        graph = rt.trace(module, X)
    assert graph == expected and counter.get_total_flops() == 0


def test_a_default_device_around_a_trace_stays() -> None:
    expected, module = alone_traced(), Stack()
    try:
        torch.set_default_device("cpu")
        with nothing_left(), torch.device("meta"):
            assert traced(module) == expected
            assert torch.ones(1).is_meta
        assert torch.ones(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert not torch.ones(1).is_meta
    assert not process_state.of_this_thread()["modes"][1]


def test_a_capture_inside_of_a_capture_is_refused() -> None:
    module, x = nn.Linear(8, 8, device="meta"), torch.empty(2, 8, device="meta")
    with nothing_left(), rt.capture(module) as first:
        second = rt.capture(module)
        with pytest.raises(RequestError, match="inside of another recording"):
            second.__enter__()
        module(x)
    assert [op.name for op in first.graph.ops if op.name == "aten.addmm"]


def test_a_capture_ends_in_the_thread_in_which_it_began() -> None:
    module = nn.Linear(8, 8, device="meta")
    with nothing_left():
        captured = rt.capture(module)
        captured.__enter__()
        failed: list[Any] = []

        def leave() -> None:
            try:
                captured.__exit__(None, None, None)
            except RequestError as error:
                failed.append(str(error))

        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert failed and "thread" in failed[0]
        captured.__exit__(None, None, None)


def test_a_counter_beside_ours_follows_the_calls_of_its_own_thread() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    seen: list[set[str]] = []
    module[0].register_forward_pre_hook(lambda *_: seen.append(set(tracker.parents)))
    other = threading.Thread(target=module, args=(torch.ones(1, 4),))
    with _ForwardTracker(module) as tracker:
        other.start()
        other.join()
        module(torch.ones(1, 4))
    assert seen == [{"Global"}, {"Global", "Sequential", "Sequential.0"}]
