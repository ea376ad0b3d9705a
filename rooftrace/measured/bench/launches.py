"""Host costs of a launch.  Each function gives a sampler: a call of it measures once [s]."""

from __future__ import annotations

import time
from collections.abc import Callable

from rooftrace.measured.bench.clock import SPIN, Bench

OPS = 300
"""Ops in a row for a launch cost: few enough for the queue of a GPU, which holds 1024; the host
waits at a full one."""


def host_seconds(bench: Bench, run: Callable[[], object], calls: int) -> Callable[[], float]:
    """Host seconds per call in one `run` that makes `calls` of them; the device may lag behind."""

    def once() -> float:
        bench.synchronize()
        start = time.perf_counter()
        run()
        seconds = (time.perf_counter() - start) / calls
        bench.synchronize()
        return seconds

    return once


def eager_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per op of a deep stack of tiny linear, relu and layer norm functions.

    Their kernels take next to no time.
    """
    import torch
    from torch.nn import functional

    width = 8
    weight = torch.ones(width, width, device=bench.device)
    bias, example = weight[0].clone(), weight.clone()

    def run() -> None:
        x = example
        for _ in range(OPS // 3):
            x = functional.relu(functional.linear(x, weight, bias))
            x = functional.layer_norm(x, (width,), bias, bias)

    return host_seconds(bench, run, OPS)


def view_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per view of a tiny tensor."""
    import torch

    cell = torch.zeros(8, device=bench.device)

    def run() -> None:
        x = cell
        for _ in range(OPS // 2):
            x = x.view(2, 4).view(8)

    return host_seconds(bench, run, OPS)


def module_call(bench: Bench) -> Callable[[], float]:
    """Seconds per call of a module that hands its input on."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Identity() for _ in range(OPS)))
    cell = torch.zeros(8, device=bench.device)
    return host_seconds(bench, lambda: model(cell), OPS)


def direct_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per op called without modules and into a ready output, as generated code calls it."""
    import torch

    left = torch.ones(8, 8, device=bench.device)
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(OPS):
            torch.mm(left, left, out=out)

    return host_seconds(bench, run, OPS)


def stream_of_tiny_kernels(bench: Bench) -> Callable[[], float]:
    """Device seconds per tiny kernel of a queue that the host filled in time."""
    import torch

    cell = torch.zeros(8, device=bench.device)

    def run() -> None:
        for _ in range(OPS):
            cell.add_(1)

    def once() -> float:
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(50 * SPIN)  # type: ignore[no-untyped-call]  # the host's head start
        return bench.once(run) / OPS

    return once


def graph_of_tiny_kernels(bench: Bench) -> tuple[Callable[[], float], Callable[[], float]]:
    """Device seconds per tiny kernel, and host seconds per launch, of one captured CUDA graph."""
    import torch

    cell = torch.zeros(8, device=bench.device)
    cell.add_(1)  # loads the kernel before the capture
    bench.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(OPS):
            cell.add_(1)
    graph.replay()
    return lambda: bench.once(graph.replay) / OPS, host_seconds(bench, graph.replay, 1)
