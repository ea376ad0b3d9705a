"""Reading a large trace beside `json.load` of it: seconds and peak memory, both in one run.

The trace is generated: steps of training with Python stacks, as with_stack=True writes them.  Its
size is 64 MiB, or what ROOFTRACE_TRACE_MIB says.  Each reader has a process of its own; its peak
memory is what reading adds to that of its imports (Linux only).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest

MIB = int(os.environ.get("ROOFTRACE_TRACE_MIB", "64"))

_COUNT = """
import json, sys, time
{imports}
path = sys.argv[1]
def peak():  # not ru_maxrss: that of a new process begins with what its parent had
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM"))
before = peak()
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
print(json.dumps([seconds, (peak() - before) * 1024]))
"""
READERS = {
    "json.load": ("", "found = json.load(open(path, 'rb'))"),
    "ijson alone": (
        # The least that any reader must do: parse every event, and keep none.
        "import ijson",
        "for event in ijson.items(open(path, 'rb'), 'traceEvents.item', use_float=True): pass",
    ),
    "read_trace": (
        "import numpy, ijson\nfrom rooftrace.measured.profiles.kineto import read_trace",
        "found = read_trace(path)",
    ),
}


def write_trace(file: TextIO, size: int) -> None:
    """A trace of about `size` bytes: steps of layers of modules of ops of launches of kernels."""
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n{"ph": "M", "name": "process_name"}')
    clock, number, step = 1.0e12, 1, 0
    while file.tell() < size:
        begin = clock
        for layer in range(60):
            clock, number = _layer(file, clock, number, layer)
        _event(file, "user_annotation", f"ProfilerStep#{step}", 7, begin, clock - begin, {})
        step += 1
    file.write('\n], "traceName": "generated"}')


def _layer(file: TextIO, clock: float, number: int, layer: int) -> tuple[float, int]:
    begin = clock
    for op in range(20):
        width = 4096 + 64 * (op % 5)
        shapes = {
            "Input Dims": [[8, 255, width], [width, 4096], []],
            "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"],
            "Input Strides": [[255 * width, width, 1], [4096, 1], []],
            "Concrete Inputs": ["", "", "1"],
        }
        facts = {"External id": number, "Sequence number": number, "Fwd thread id": 0, **shapes}
        for depth in range(4):
            stack = {"Python parent id": number, "Python id": number + depth, "Ev Idx": number}
            name = f"transformers/models/llama/modeling_llama.py({100 + depth}): forward"
            _event(file, "python_function", name, 7, clock + depth / 8, 19.0 - depth / 4, stack)
        _event(file, "cpu_op", "aten::linear", 7, clock + 1, 17.0, facts)
        _event(file, "cpu_op", "aten::mm", 7, clock + 2, 15.0, {**facts, "External id": number + 1})
        launch = {"cbid": 211, "correlation": number, "External id": number + 1}
        _event(file, "cuda_runtime", "cudaLaunchKernel", 7, clock + 8, 5.0, launch)
        kernel = {
            "External id": number + 1, "queued": 0, "device": 0, "context": 1, "stream": 7,
            "correlation": number, "registers per thread": 168, "shared memory": 213248,
            "grid": [132, 1, 1], "block": [384, 1, 1], "est. achieved occupancy %": 16,
        }  # fmt: skip
        name = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT"
        _event(file, "kernel", name, 0, clock + 30, 14.0, kernel)
        clock, number = clock + 20, number + 2
    module = {"Python parent id": None, "Python id": number, "Python module id": layer}
    _event(
        file, "python_function", f"nn.Module: LlamaDecoderLayer_{layer}", 7, begin, clock - begin,
        module,
    )  # fmt: skip
    return clock, number


def _event(
    file: TextIO, category: str, name: str, thread: int, start: float, duration: float, facts: Any
) -> None:
    event = {"ph": "X", "cat": category, "name": name, "pid": 0 if not thread else 4242}
    event |= {"tid": thread, "ts": round(start, 3), "dur": round(duration, 3), "args": facts}
    file.write(",\n  " + json.dumps(event, indent=2))


def measured(reader: str, path: Path) -> tuple[float, int]:
    """Seconds and peak bytes of reading `path` in a process of its own."""
    imports, code = READERS[reader]
    done = subprocess.run(
        [sys.executable, "-c", _COUNT.format(imports=imports, code=code), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with path.open("w", encoding="utf-8") as file:
        write_trace(file, MIB << 20)
    return path


@pytest.mark.benchmark(group="trace", min_rounds=1, max_time=1)
@pytest.mark.parametrize("reader", READERS)
def test_read(benchmark: Any, trace: Path, reader: str) -> None:
    """Seconds of the process; what it measured itself stands in `extra_info`, and is printed."""
    seconds, peak = benchmark.pedantic(measured, (reader, trace), rounds=1)
    benchmark.extra_info.update(reader_seconds=seconds, peak_bytes=peak)
    size = trace.stat().st_size
    print(f"\n{reader}: {size / 2**20:.0f} MiB in {seconds:.2f} s, peak {peak / 2**20:.0f} MiB")
