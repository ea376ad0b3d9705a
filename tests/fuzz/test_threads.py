"""Attackers of one process by many threads: traces beside code that must not notice them.

`python tests/fuzz/test_threads.py REGIONS TRACERS` runs the autocast attacker alone, at any size.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt

SECONDS = 1.0


class Block(nn.Module):
    """Attention or a recurrent layer, in a region of autocast or in none; equal blocks repeat."""

    def __init__(self, number: int, kind: int) -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.lin, self.rnn = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.kind % 2 == 0):
            y = self.lin(x)
        if self.kind < 2:
            q = y.float().view(2, 4, 2, 4).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 4, 8)
        h: Tensor = self.rnn(y.float())[0]
        for _ in range(10):
            h = torch.tanh(h + x)
        return h * random.random()


def model(kind: int) -> nn.Module:
    return nn.Sequential(*(Block(i, kind) for i in range(3)))


X = torch.ones(2, 4, 8)


def graph_of(kind: int, phase: str) -> Any:
    return rt.trace(model(kind), X, phase=phase, optimizer="none" if phase == "training" else None)


def failing(kind: int) -> None:
    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("as planned")

    with pytest.raises(rt.types.TraceError, match="as planned"):
        rt.trace(Failing(0, kind), X)


# -- what other threads do meanwhile; each says whether all is as without a trace ------------------


def a_region() -> bool:
    x = torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = (x @ x).dtype is torch.bfloat16 and torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            inside &= (x @ x).dtype is torch.float32
    return inside and (x @ x).dtype is torch.float32


def attention_on_meta() -> bool:
    q = torch.empty(1, 2, 4, 4, device="meta", requires_grad=True)
    out = F.scaled_dot_product_attention(q, q, q)
    return "Attention" not in type(out.grad_fn).__name__ and out.is_meta


def a_step() -> bool:
    module = nn.Linear(2, 2)
    module.weight.data.fill_(1.0)
    module.bias.data.zero_()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return module.weight.tolist() == [[0.5, 0.5]] * 2 and module.weight.device.type == "cpu"


def a_device() -> bool:
    if torch.cuda.is_available():
        return True
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError):
        return True
    return False


def a_thread() -> bool:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1).device.type))
    thread.start()
    thread.join()
    return seen == ["cpu"]


WATCHED: tuple[Callable[[], bool], ...] = (a_region, attention_on_meta, a_step, a_device, a_thread)


def attacked(seed: int, seconds: float) -> Counter[str]:
    """Trace in four threads while two look on; how often each thing was wrong."""
    phases = ("forward", "training")
    expected = {(k, p): graph_of(k, p) for k in range(4) for p in phases}
    wrong: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def tracer(number: int) -> None:
        draw = random.Random(seed * 100 + number)
        for turn in range(1_000_000):
            if turn > 1 and time.monotonic() > end:
                return
            kind, phase = draw.randrange(4), draw.choice(phases)
            if draw.random() < 0.2:
                failing(kind)
            elif graph_of(kind, phase) != expected[kind, phase]:
                wrong[f"graph {kind} {phase}"] += 1

    def watcher(number: int) -> None:
        draw = random.Random(seed * 100 + number)
        while not done.is_set():
            look = draw.choice(WATCHED)
            if not look():
                wrong[look.__name__] += 1

    done = threading.Event()
    with ThreadPoolExecutor(6) as pool:
        watching = [pool.submit(watcher, number) for number in (90, 91)]
        try:
            for future in [pool.submit(tracer, number) for number in range(4)]:
                future.result()
        finally:
            done.set()
        for future in watching:
            future.result()
    wrong.update(look.__name__ for look in WATCHED if not look())  # and afterwards
    return wrong


def test_traces_beside_each_other_and_beside_others(request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds", default=None) or SECONDS
    assert not attacked(seed=13, seconds=float(seconds))


def regions(count: int, tracers: int) -> Counter[str]:
    """`count` autocast regions of one thread while others trace; how many were wrong."""
    done, result = threading.Event(), Counter[str]()

    def tracer(number: int) -> None:
        while not done.is_set():
            graph_of(number % 4, "forward")
            result["traces"] += 1

    with ThreadPoolExecutor(tracers) as pool:
        tracing = [pool.submit(tracer, number) for number in range(tracers)]
        for _ in range(count):
            result["wrong"] += not a_region()
            result["regions"] += 1
            time.sleep(0.001)  # the others go on
        done.set()
        for future in tracing:
            future.result()
    return result


if __name__ == "__main__":
    print(dict(regions(int(sys.argv[1]), int(sys.argv[2]))))
