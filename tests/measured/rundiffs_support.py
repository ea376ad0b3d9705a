"""Made-up traces of a GPU for comparisons: modules, several streams, and steps of any make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.measured.profiles_support import GpuTrace

WEIGHT = [(8, 64), (64, 64)]
CUTLASS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_{}_64x6_tn_align8>(X)"
)
XMMA = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute"
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(X)>(int)"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(X)>(int)"


class LayeredTrace(GpuTrace):
    """Calls in modules, and kernels on any stream."""

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """A call of a module, as with_stack=True records it."""
        start = self.clock
        yield
        self.event("python_function", f"nn.Module: {name}", start, self.clock - start)

    def at(self, name: str, start: float, duration: float, stream: int = 7) -> None:
        """A kernel that begins at a time of its own, launched just before."""
        self.number += 1
        shared = {"correlation": self.number}
        self.event("cuda_runtime", "cudaLaunchKernel", start - 1, 0.8, **shared)
        place = {"grid": [1, 1, 1], "block": [1, 1, 1], "device": 0, "stream": stream}
        self.event("kernel", name, start, duration, tid=stream, **shared, **place)


Step = Callable[[LayeredTrace], None]


def layered(
    layers: int = 4,
    *,
    gemm: tuple[str, float] = (CUTLASS.format("64x64"), 30.0),
    gelu: float = 8.0,
    copy: bool = False,
    shapes: Sequence[tuple[int, ...]] = WEIGHT,
    first: bool = False,
    modules: bool = True,
) -> Step:
    """A step of equal layers: a linear and a GELU.

    copy: each layer copies before its GELU.  first: the first layer has one more linear.
    """

    def step(trace: LayeredTrace) -> None:
        numbers = iter(range(100))
        for layer in range(layers):
            with trace.module(f"Layer_{layer}") if modules else _nothing():
                for _ in range(2 if first and not layer else 1):
                    with trace.module(f"Linear_{next(numbers)}") if modules else _nothing():
                        trace.op("aten::addmm", shapes, [gemm], "aten::linear")
                if copy:
                    trace.op("aten::copy_", shapes[:1], [(COPY, 5.0)], "aten::contiguous")
                trace.op("aten::gelu", shapes[:1], [(GELU, gelu)])

    return step


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def written(path: Path, step: Step, steps: int = 3, jitter: Sequence[float] = ()) -> Path:
    """A trace of `steps` equal steps; jitter: by how much each step's kernels are longer."""
    trace = LayeredTrace()
    for number in range(steps):
        begin = len(trace.events)
        trace.clock = max(trace.clock, trace.free)

        def work() -> None:
            with trace.module("Net_0"):
                step(trace)
            trace.clock = max(trace.clock, trace.free)  # the host waits at the end

        trace.step(work)
        if jitter:
            for event in trace.events[begin:]:
                if event.get("cat") == "kernel":
                    event["dur"] *= jitter[number]
    return trace.write(path)


def rewritten(path: Path, change: Callable[[list[dict[str, object]]], None], to: Path) -> Path:
    """A trace with other events."""
    contents = json.loads(path.read_text())
    change(contents["traceEvents"])
    to.write_text(json.dumps(contents))
    return to
