"""How well names tell what Inductor fuses for a GPU: `python benchmarks/inductor/gpunames.py`.

No GPU is needed, and none is measured: Inductor's schedule for an H100 (see inductor.py) has the
kernels with their names and with ops of our graph.  They are written as a trace of torch.profiler,
and the ops of kernels are inferred by names.  Of the ops in kernels that Inductor would write a
line has the share that is put into the kernel which writes their result, the same by bytes through
HBM, and F1 of pairs of ops in one kernel, by names and for the kernels that we detect.
--replayed: as in a CUDA graph, no call on the host names a kernel, or knows its shapes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import inductor
import models
from agreement import compiled_graph

import rooftrace as rt
from rooftrace.measured.alignment.compiled import is_launched
from rooftrace.measured.alignment.compiled_steps import Agreement

# What a profiler calls kernels of libraries in a replay: (a part of the op's name, its kernels).
OWN_NAMES = (
    ("convolution_backward", ("sm80_xmma_dgrad_implicit_gemm", "sm80_xmma_wgrad_implicit_gemm")),
    ("convolution", ("sm80_xmma_fprop_implicit_gemm",)),
    ("attention_backward", ("flash_bwd_kernel",)),
    ("attention", ("flash_fwd_kernel",)),
    ("mm", ("nvjet_tst_128x64",)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(models.MODELS)}; default: all")
    parser.add_argument("--phase", default="forward", choices=("forward", "training"))
    parser.add_argument("--replayed", action="store_true", help="as in a CUDA graph")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    inductor.pretend_cuda()
    print(f"{'model':13} {'kernels':>7} {'ops':>6} {'bytes':>6} {'F1':>5} {'detected':>8}")
    for name in options.model or models.MODELS:
        try:
            graph = compiled_graph(models.MODELS[name](), options.phase)
        except ImportError as error:
            print(f"{name:13} left out: {error}")
            continue
        kernels = [kernel for kernel in inductor.kernels_of(graph) if kernel.name]
        print(f"{name:13} {_line(graph, kernels, options.replayed)}", flush=True)


def _line(graph: rt.types.OpGraph, kernels: Sequence[inductor.Kernel], replayed: bool) -> str:
    launched = [(number, name) for number, k in enumerate(kernels) for name in _names(k, replayed)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        path.write_text(json.dumps({"traceEvents": list(_events(kernels, launched, replayed))}))
        step = rt.tools.fused(path, graph)
    order = [number for number, _ in launched] if replayed else range(len(kernels))
    truth = {
        op: number
        for number, kernel in enumerate(kernels)
        for op in kernel.home
        if is_launched(graph.ops[op])
    }
    named = {
        op: number for number, kernel in zip(order, step.kernels, strict=True) for op in kernel.ops
    }
    detected = {op: at for at, group in enumerate(step.detected.groups) for op in group.ops}
    together = Counter(truth.values())
    bytes_of = {op: kernels[at].bytes / together[at] for op, at in truth.items()}
    right = [op for op, number in truth.items() if named.get(op) == number]
    by_name, by_us = (
        Agreement.of({op: made.get(op, -1 - op) for op in truth}, truth).f1
        for made in (named, detected)
    )
    return (
        f"{len(kernels):7} {len(right) / max(len(truth), 1):6.1%} "
        f"{sum(bytes_of[op] for op in right) / max(sum(bytes_of.values()), 1):6.1%} "
        f"{by_name:5.2f} {by_us:8.2f}"
    )


def _names(kernel: inductor.Kernel, replayed: bool) -> tuple[str, ...]:
    """Under which names a device shows what one kernel of the schedule launches."""
    if not kernel.extern or not replayed:
        return (kernel.name,)
    return next((own for part, own in OWN_NAMES if part in kernel.name), (kernel.name[6:],))


def _events(
    kernels: Sequence[inductor.Kernel], launched: Sequence[tuple[int, str]], replayed: bool
) -> Iterator[dict[str, Any]]:
    """A compiled region of 10 us for each kernel on the host, and the kernels behind it."""
    host = {"ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op"}
    region = {"External id": 1, "Input Dims": [], "Input type": []}
    length = 10 * len(launched) + 10
    yield {**host, "name": "Torch-Compiled Region: 0/0", "ts": 0, "dur": length, "args": region}
    for place, (number, name) in enumerate(launched, 1):
        start, external = 10 * place, 1 if replayed else place + 1
        if not replayed:
            called = name.replace("rooftrace::", "aten::_scaled_dot_product_flash_")
            shapes = [list(shape) for shape in kernels[number].shapes]
            known = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
            facts = {"External id": external, **known}
            yield {**host, "name": called, "ts": start, "dur": 8, "args": facts}
        ids = {"correlation": place, "External id": external}
        runtime = {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel"}
        yield {**runtime, "ts": start + 1, "dur": 1, "args": ids}
        device = {"ph": "X", "pid": 0, "tid": 7, "cat": "kernel", "name": name}
        facts = {**ids, "device": 0, "stream": 7, "grid": [1, 1, 1], "block": [128, 1, 1]}
        yield {**device, "ts": length + start, "dur": 9, "args": facts}


if __name__ == "__main__":
    main()
