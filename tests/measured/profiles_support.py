"""Traces as torch.profiler writes them: real ones of this machine's CPU, made ones of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from rooftrace.graph.graph import OpGraph
from rooftrace.measured.alignment.keys import written_out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Equal blocks and a head."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def run_on_cpu(step: Callable[[], Any], path: Path, steps: int = 2, **options: Any) -> Path:
    """The trace of some steps, after one that warms up."""
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    options = {"record_shapes": True, **options}
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, **options) as profiler:
        for _ in range(steps + 1):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


class GpuTrace:
    """Events of a host thread that launches kernels; times in us.

    The host takes 10 us for each op; a kernel starts 5 us after its launch, or when the one before
    has ended.
    """

    HOST, DELAY = 10.0, 5.0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "ts": 0, "args": {"name": "python"}}
        ]
        self.clock, self.free, self.number = 1000.0, 0.0, 1
        self.steps = 0

    def event(
        self, category: str, name: str, start: float, duration: float, tid: int = 1, **facts: Any
    ) -> None:
        pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else 1
        self.events.append(
            {
                "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
                "ts": start, "dur": duration, "args": facts,
            }
        )  # fmt: skip

    def op(
        self,
        name: str,
        shapes: Sequence[Any],
        kernels: Sequence[tuple[str, float]] = (),
        wrapper: str = "",
        mark: str = "",
    ) -> None:
        """One call of an op, inside of `wrapper`, and the kernels (name, us) that it launches."""
        start = self.clock
        if mark:
            self.event("user_annotation", mark, start - 1, self.HOST, **{"External id": 0})
        if wrapper:
            self.op_event(wrapper, shapes, start, self.HOST - 1)
        external = self.op_event(name, shapes, start + 1, self.HOST - 3)
        for offset, (kernel, duration) in enumerate(kernels):
            self.launch(kernel, duration, start + 2 + offset, external)
        self.clock += self.HOST

    def op_event(self, name: str, shapes: Sequence[Any], start: float, duration: float) -> int:
        self.number += 1
        facts = {
            "External id": self.number,
            "Sequence number": self.number,
            "Fwd thread id": 0,
            "Input Dims": [list(shape) for shape in shapes],
            "Input type": ["c10::BFloat16"] * len(shapes),
        }
        self.event("cpu_op", name, start, duration, **facts)
        return self.number

    def launch(self, kernel: str, duration: float, start: float, external: int | None) -> None:
        self.number += 1
        shared = {"correlation": self.number}
        if external is not None:
            shared["External id"] = external
        call = {"ph": "s", "id": self.number, "pid": 1, "tid": 1, "ts": start}
        self.event("cuda_runtime", "cudaLaunchKernel", start, 0.8, **shared)
        self.events.append({**call, "cat": "ac2g", "name": "ac2g"})
        begin = max(start + self.DELAY, self.free)
        shape = {"grid": [132, 1, 1], "block": [128, 1, 1], "device": 0, "stream": 7}
        self.event("kernel", kernel, begin, duration, tid=7, **shared, **shape)
        self.free = begin + duration
        end = {"ph": "f", "id": self.number, "pid": 0, "tid": 7, "ts": begin, "bp": "e"}
        self.events.append({**end, "cat": "ac2g", "name": "ac2g"})

    def step(self, work: Callable[[], None]) -> None:
        """A step of the profiler's schedule around `work`."""
        start = self.clock
        self.clock += 2
        work()
        self.event("user_annotation", f"ProfilerStep#{self.steps}", start, self.clock - start)
        self.steps += 1

    def run(
        self,
        graph: OpGraph,
        duration: Callable[[int], float] = lambda op: 20.0,
        marks: bool = False,
    ) -> None:
        """One step of `graph`, written out; each kernel op launches one kernel of so many us."""

        def work() -> None:
            for place, (index, _) in enumerate(written_out(graph)):
                op = graph.ops[index]
                shapes = [graph.values[value].shape for value in op.inputs]
                kernels = [(f"{op.name}_kernel", duration(index))] if op.kind == "kernel" else []
                name = op.name.replace(".", "::", 1)
                mark = f"op {place}" if marks else ""
                self.op(name, shapes, kernels, "" if marks else "aten::linear", mark)

        self.step(work)

    def write(self, path: Path) -> Path:
        properties = [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096}]
        contents = {"schemaVersion": 1, "deviceProperties": properties, "traceEvents": self.events}
        path.write_text(json.dumps(contents), encoding="utf-8")
        return path
