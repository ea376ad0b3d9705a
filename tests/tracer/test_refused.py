"""What a module may hold or be wrapped in: it is traced, or refused with the reason."""

import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.tracer.phases.attempts import LIMIT_OF_C_IS_FIXED

X = torch.ones(2, 8)


class Holds(nn.Module):
    def __init__(self, item: Any) -> None:
        super().__init__()
        self.lin, self.item = nn.Linear(8, 8), item

    def forward(self, x: Tensor) -> Any:
        with self.item if hasattr(self.item, "acquire") else torch.no_grad():
            return self.lin(x)


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        inner: nn.Module = nn.Linear(8, 8)
        for _ in range(depth - 1):
            outer = Deep.__new__(Deep)
            nn.Module.__init__(outer)
            outer.inner, inner = inner, outer
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize(
    "make", [threading.Lock, threading.RLock, threading.Event, lambda: ThreadPoolExecutor(1)]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_that_holds_a_lock_or_a_pool_traces(make: Any, device: str) -> None:
    item = make()
    graph = rt.trace(Holds(item).to(device), X)
    assert [op.name for op in graph.ops][-1] == "aten.addmm"
    assert not hasattr(item, "acquire") or item.acquire(blocking=False)  # it was let go


def generator() -> Iterator[float]:
    yield 1.0


@pytest.mark.parametrize("kind", ["generator", "TextIOWrapper"])
def test_a_module_that_holds_a_generator_or_a_file_says_so(kind: str, tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    with (tmp_path / "open").open() as file:
        item = generator() if kind == "generator" else file
        with pytest.raises(
            rt.types.TraceError, match=f"Holds cannot be copied.*{kind}.*device..meta"
        ):
            rt.trace(Holds(item), X)
        with pytest.raises(rt.types.TraceError, match=f"step step .*cannot be copied.*{kind}"):
            rt.trace(step, Holds(item), X)
        assert rt.trace(Holds(item).to("meta"), X).ops  # traced itself, and not a copy


def step(module: nn.Module, x: Tensor) -> None:
    module(x)


def test_under_an_active_fake_mode() -> None:
    module, on_meta = nn.Linear(8, 8), nn.Linear(8, 8, device="meta")
    expected = rt.trace(module, X)
    with FakeTensorMode():
        fake, fake_x = nn.Linear(8, 8), torch.ones(2, 8)
        assert rt.trace(module, X) == expected
        with pytest.raises(RequestError, match="FakeTensorMode is active"):
            rt.capture(on_meta).__enter__()
        for run in (lambda: rt.trace(fake, X), lambda: rt.trace(step, fake, X)):
            with pytest.raises(RequestError, match="Linear has tensors of a FakeTensorMode"):
                run()
    with pytest.raises(RequestError, match=r"an input \[2, 8\] is a tensor of a FakeTensorMode"):
        rt.trace(module, fake_x)
    with pytest.raises(RequestError, match="Linear has tensors of a FakeTensorMode"):
        rt.capture(fake)


@pytest.mark.parametrize("depth", [100, 300, 1000])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_chain_of_modules_traces_or_says_how_deep_it_is(depth: int, device: str) -> None:
    with torch.device(device):
        module = Deep(depth)
    runs = [lambda: rt.trace(module, X), lambda: rt.trace(step, module, X)]
    if device == "meta":
        runs.append(lambda: captured(module))
    for run in runs:
        try:
            graph = run()
        except RequestError as error:
            advice = "use another release" if LIMIT_OF_C_IS_FIXED else r"setrecursionlimit\(\d"
            limit = rf"Deep has modules inside modules, {depth + 1:,} deep.*{advice}"
            assert depth > 100 and re.match(limit, str(error)) and len(str(error)) < 300
        else:  # how deep is too deep depends on the release of Python
            assert depth < 1000 and graph.ops[-1].name == "aten.addmm"


def captured(module: nn.Module) -> Any:
    with rt.capture(module) as made:
        module(torch.empty(2, 8, device="meta"))
    return made.graph


@pytest.mark.skipif(LIMIT_OF_C_IS_FIXED, reason="Python 3.12 cannot be told")
def test_as_deep_as_python_is_told_to_go() -> None:
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(20_020)  # as the error for this depth says
        assert rt.trace(Deep(1000), X).ops[-1].name == "aten.addmm"
    finally:
        sys.setrecursionlimit(limit)


def test_code_that_calls_itself_for_ever_is_no_deep_module() -> None:
    class Endless(Holds):
        def forward(self, x: Tensor) -> Any:
            return self.forward(x)

    with pytest.raises(rt.types.TraceError, match="RecursionError"):
        rt.trace(Endless(None), X)


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of two, of which only this process is there."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    yield distributed.device_mesh.init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def test_real_weights_that_fsdp2_has_sharded_say_to_build_them_on_meta(group: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    fully_shard(module[0], mesh=group)
    for run in (rt.trace, lambda *given: rt.trace(step, *given), lambda *_: rt.capture(module)):
        with pytest.raises(RequestError, match=r"real weights that fully_shard.*device\('meta'\)"):
            run(module, X)


def test_a_module_without_parameters_is_not_trained_unless_asked() -> None:
    class Softmax(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x.T, -1)

    assert rt.report(Softmax(), torch.zeros(8, 8), chip="l4").phases == ("forward",)
    with pytest.raises(rt.types.RequestError, match="no parameter requires a gradient"):
        rt.report(Softmax(), torch.zeros(8, 8), chip="l4", phase="training")
