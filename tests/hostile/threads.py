"""Work that does not run in the thread that calls the module."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor, nn

from .harness import Case, pattern
from .training_steps import mlp, mlp_flops
from .wrappers import FORWARD


class Towers(nn.Module):
    """Branches of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(6, n) for n in (10, 3, 5))


TOWERS = 2 * 7 * 6 * (10 + 3 + 5)


@pattern(ordered=False)
def pool_inside_forward() -> Case:
    """Each branch is submitted to a pool that lives as long as the forward."""

    class Pooled(Towers):
        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(2) as pool:
                return torch.cat(list(pool.map(lambda tower: tower(x), self.towers)), -1)

    return Case(Pooled(), (torch.randn(7, 6),), expected=TOWERS)


@pattern(ordered=False)
def pool_outside_of_the_module() -> Case:
    """The pool is a global whose threads exist before; the results come in any order."""
    pool = ThreadPoolExecutor(2)

    class Pooled(Towers):
        def forward(self, x: Tensor) -> Tensor:
            futures = {pool.submit(t, x): i for i, t in enumerate(self.towers)}
            outs = sorted((futures[f], f.result()) for f in as_completed(futures))
            return torch.cat([out for _, out in outs], -1)

    model, x = Pooled(), torch.randn(7, 6)
    case = Case(model, (x,), expected=TOWERS)
    case.real = lambda: [tower(x) for tower in model.towers]
    list(pool.map(len, ["a", "b"]))  # the threads are there
    return case


@pattern(ordered=False)
def threads_that_write_a_list() -> Case:
    """threading.Thread per branch with grad mode passed on; results through a shared list."""

    class Threaded(Towers):
        def forward(self, x: Tensor) -> Tensor:
            outs: list[Any] = [None] * len(self.towers)
            grad = torch.is_grad_enabled()

            def work(index: int, tower: nn.Module) -> None:
                with torch.set_grad_enabled(grad):
                    outs[index] = tower(x)

            workers = [threading.Thread(target=work, args=item) for item in enumerate(self.towers)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return torch.cat(outs, -1)

    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(Threaded(), (torch.randn(7, 6),), options=options, expected=2 * TOWERS)


@pattern
def forked_futures() -> Case:
    """torch.jit.fork and wait in a plain module."""

    class Forked(Towers):
        def forward(self, x: Tensor) -> Tensor:
            futures = [torch.jit.fork(tower, x) for tower in self.towers]
            return torch.cat([torch.jit.wait(f) for f in futures], -1)

    return Case(Forked(), (torch.randn(7, 6),), expected=TOWERS)


@pattern(ordered=False)
def replicas_in_parallel() -> Case:
    """As parallel_apply: each replica in a thread, under a lock, here for the chunks of a batch."""

    class Replicated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: Tensor) -> Tensor:
            parts = [(part,) for part in x.split(4)]
            return torch.cat(apply_in_threads([self.model] * len(parts), parts))

    return Case(Replicated(), (torch.randn(7, 6),), expected=7 * FORWARD)


def apply_in_threads(modules: list[nn.Module], inputs: list[Any]) -> list[Tensor]:
    """What torch's parallel_apply does, which asks for streams that a CPU lacks."""
    results: dict[int, Tensor] = {}
    lock = threading.Lock()

    def worker(i: int, module: nn.Module, args: Any) -> None:
        with torch.autocast("cpu", enabled=False):
            out = module(*args)
        with lock:
            results[i] = out

    threads = [
        threading.Thread(target=worker, args=(i, m, a))
        for i, (m, a) in enumerate(zip(modules, inputs, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(inputs))]


@pattern(ordered=False)
def pipeline_of_queues() -> Case:
    """Stages run in threads of their own and hand microbatches on through queues."""

    class Pipeline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(6, 10), nn.Linear(10, 3)])

        def forward(self, x: Tensor) -> Tensor:
            links: list[queue.Queue[Any]] = [queue.Queue() for _ in range(3)]

            def serve(stage: nn.Module, source: Any, sink: Any) -> None:
                while (item := source.get()) is not None:
                    sink.put(stage(item))
                sink.put(None)

            workers = [
                threading.Thread(target=serve, args=(s, links[i], links[i + 1]), daemon=True)
                for i, s in enumerate(self.stages)
            ]
            for worker in workers:
                worker.start()
            for part in x.split(3):
                links[0].put(part)
            links[0].put(None)
            outs = list(iter(lambda: links[-1].get(timeout=60), None))
            for worker in workers:
                worker.join()
            return torch.cat(outs)

    return Case(Pipeline(), (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern(ordered=False)
def asyncio_to_threads() -> Case:
    """An event loop gathers coroutines, some of which run layers by asyncio.to_thread."""

    class Async(Towers):
        def forward(self, x: Tensor) -> Tensor:
            async def run(tower: nn.Module) -> Tensor:
                return await asyncio.to_thread(tower, x)

            async def direct(tower: nn.Module) -> Tensor:
                await asyncio.sleep(0)
                return tower(x)

            async def all_of_them() -> list[Tensor]:
                first, *rest = self.towers
                return await asyncio.gather(direct(first), *map(run, rest))

            return torch.cat(asyncio.run(all_of_them()), -1)

    return Case(Async(), (torch.randn(7, 6),), expected=TOWERS)


@pattern
def backward_in_a_thread() -> Case:
    """A thread runs forward and backward of an auxiliary loss while the main one does its own."""
    model, extra = mlp(), nn.Linear(6, 9)

    def step(model: nn.Module, extra: nn.Module, x: Tensor) -> Tensor:
        def auxiliary() -> None:
            extra(x).square().mean().backward()

        worker = threading.Thread(target=auxiliary)
        worker.start()
        worker.join()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    total = mlp_flops(7) + 2 * 2 * 7 * 54
    return Case(step, (model, extra, torch.randn(7, 6)), expected=total)


@pattern(ordered=False)
def prefetching_loader() -> Case:
    """A thread prepares the next batch, with a product of its own, behind a bounded queue."""
    model = mlp()

    def step(model: nn.Module, x: Tensor, whiten: Tensor) -> Tensor:
        ready: queue.Queue[Any] = queue.Queue(1)

        def prepare() -> None:
            for part in x.split(3):
                ready.put(part @ whiten)
            ready.put(None)

        worker = threading.Thread(target=prepare, daemon=True)
        worker.start()
        total = torch.zeros(())
        while (part := ready.get(timeout=60)) is not None:
            loss = model(part).square().mean()
            loss.backward()
            total = total + loss.detach()
        worker.join()
        return total

    data = torch.randn(7, 6), torch.randn(6, 6)
    return Case(step, (model, *data), expected=mlp_flops(7) + 2 * 7 * 36)
