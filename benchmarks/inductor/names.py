"""How well names tell what Inductor fused: `python benchmarks/inductor/names.py [MODEL ...]`.

Each model runs through torch.compile, forward and training, and one step is recorded.  The ops of
its kernels are read twice from the same trace: by what Inductor notes, and by the names of kernels
alone, as for a trace from elsewhere.  A line has the share of the time in kernels with ops, by
either; the share of ops that names put into the noted kernel, and their share of the time (the time
of a kernel divided among its ops); F1 of pairs of ops in one kernel that Inductor wrote, by names
and for the kernels that we detect.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measured
import torch

import rooftrace as rt
from rooftrace.costmodels.fusion import plan
from rooftrace.measured.alignment import FusedStep, KernelTime, kernel_times
from rooftrace.measured.alignment.compiled_steps import Agreement
from rooftrace.measured.bench import Bench, models
from rooftrace.measured.bench.replay import Compilations
from rooftrace.measured.bench.steps import profiler, real_inputs, real_step
from rooftrace.measured.profiles import read_trace

WARMUPS = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per model and phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(measured.NAMES)}; default: all")
    parser.add_argument("--scale", default="small", choices=models.SCALES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    print(
        f"{'model':12} {'phase':9} {'calls':>5} {'noted':>6} {'named':>6} {'ops':>6} {'time':>6} "
        f"{'F1':>5} {'detected':>8}"
    )
    for name in options.model or measured.NAMES:
        for phase, build in measured.cases(name, options.scale, options.device):
            module, inputs = build()
            noted, step = twice(module, inputs, phase, options.device)
            print(f"{name:12} {phase:9} {_line(noted, step)}", flush=True)


def twice(
    module: Any, inputs: dict[str, Any], phase: str, device: str
) -> tuple[tuple[KernelTime, ...], FusedStep]:
    """The kernels of one recorded step by what Inductor notes, and by names."""
    torch._dynamo.reset()
    noted, bench = Compilations(), Bench(torch.device(device), 1.0, lambda line: None)
    graph = rt.trace(module, phase=phase, **inputs)
    prepared = real_inputs(module, (), inputs)
    step = real_step(module, prepared, phase, compiled=True, options=noted.options)
    for _ in range(WARMUPS):
        step()
    with profiler(bench.device):  # the first use of it takes time of its own
        step()
    state = step.ready()
    with profiler(bench.device) as recorded:
        bench.wall(lambda: step.run(state))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        recorded.export_chrome_trace(str(path))
        trace = read_trace(path)
    compiled = plan(graph.expand(), "compiled").graph
    return kernel_times(trace, noted.graphs(), compiled), rt.tools.fused(trace, graph)


def _line(noted: Sequence[KernelTime], step: FusedStep) -> str:
    seconds = sum(kernel.seconds for kernel in noted)
    covered = sum(kernel.seconds for kernel in noted if kernel.ops or kernel.parts)
    truth = {op: place for place, kernel in enumerate(noted) for op in kernel.ops}
    named = {op: place for place, kernel in enumerate(step.kernels) for op in kernel.ops}
    share = {op: noted[place].seconds / len(noted[place].ops) for op, place in truth.items()}
    right = [op for op, place in truth.items() if named.get(op) == place]
    written = {op: place for op, place in truth.items() if noted[place].generated}
    detected = {op: at for at, group in enumerate(step.detected.groups) for op in group.ops}
    by_name, by_us = (
        Agreement.of({op: kernels.get(op, -1 - op) for op in written}, written).f1
        for kernels in (named, detected)
    )
    return (
        f"{len(noted):5} {covered / seconds:6.1%} {step.coverage:6.1%} "
        f"{len(right) / len(truth):6.1%} "
        f"{sum(share[op] for op in right) / sum(share.values()):6.1%} {by_name:5.2f} {by_us:8.2f}"
    )


if __name__ == "__main__":
    main()
