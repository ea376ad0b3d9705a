"""Times attention, scans, delta rules, convolutions and grouped products on the GPU at hand.

    pip install torch triton einops flash-linear-attention
    MAMBA_KEEP_CUDA_BUILD=TRUE pip install --no-build-isolation mamba-ssm causal-conv1d
    # FlashAttention 3: python setup.py install in hopper/ of Dao-AILab/flash-attention
    python benchmarks/kernels/measure.py --out h100.jsonl --budget 300

A package that is missing costs its cases only.  The first line of the file is of the machine, each
other line of a case: `ms` is the median of at least 20 calls, the last cache emptied before each;
`how` is "graph" where a call was replayed as a CUDA graph, so that no host is in it, and "events"
where it was launched (calls of over 3 ms).  `kernels` is what one call launched, by the profiler:
name, how often, microseconds.  Each group of cases runs in a process of its own.

`--warm` only compiles, as many processes at once as there are cores: a later run finds it in the
caches of Triton and Inductor.  Triton's tuner times each candidate for 10 ms, in place of 100.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import Case, cases

FLUSHED = 2**28
"""Bytes that are written before each call: several times the last cache."""
LEAST, MOST, SECONDS = 20, 60, 0.25
LONG = 3.0
"""Milliseconds from which a call is launched, not replayed."""
GROUPS = (
    "baseline", "sdpa", "decode", "varlen", "fa3", "flex", "fla", "mamba", "cuda", "experts",
    "conv", "gradients", "rows", "operators",
)  # fmt: skip
PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d")
WAITS = ("nonzero", "embedding_backward", "index_put", "lstm_training", "gru_training")
"""Kernels whose call waits for the device, or runs autograd."""
TAKES = 60.0
"""Seconds of one case after which its process is ended and the next is begun."""


def call_of(case: Case, device: str) -> Callable[[], Any]:
    """What is timed."""
    if case.group in ("sdpa", "decode", "varlen", "fa3", "flex"):
        from attention import attention_call

        return attention_call(case.kernel, case.sizes, device)
    if case.group in ("conv", "gradients"):
        from convolutions import convolution_call, gradient_call

        call = convolution_call if case.group == "conv" else gradient_call
        return call(case.kernel, case.sizes, device)
    if case.group in ("rows", "operators"):
        from operators import operator_of
        from row_kernels import function_of

        of = function_of if case.group == "rows" else operator_of
        function, given = of(case.kernel, case.sizes, device)
        return lambda: function(*given)
    from recurrent import recurrent_call

    return recurrent_call(case.kernel, case.sizes, device)


# -- time ------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], flush: Any, waits: bool = False) -> dict[str, Any]:
    """Median milliseconds of a call, and the tenths of them at both ends; no graph of one that
    `waits` for the device."""
    import torch

    for _ in range(3):
        call()
    first = _events(call, flush, 3)
    run, how = call, "events"
    if statistics.median(first) < LONG and not waits:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            run, how = graph.replay, "graph"
            run()
        except RuntimeError:
            torch.cuda.synchronize()
    often = int(SECONDS * 1e3 / (statistics.median(first) + 0.1))
    spent = sorted(_events(run, flush, min(MOST, max(LEAST, often))))
    tenth = len(spent) // 10
    return {
        "ms": round(statistics.median(spent), 5),
        "low": round(spent[tenth], 5),
        "high": round(spent[-1 - tenth], 5),
        "calls": len(spent),
        "how": how,
    }


def _events(call: Callable[[], Any], flush: Any, often: int) -> list[float]:
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(often)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def launched(call: Callable[[], Any]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Kernels of one call: name, how often, microseconds of all; and of the longest of each name
    microseconds, blocks, threads, registers and bytes of shared memory."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    count: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    longest: dict[str, list[Any]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            name, us = event["name"].replace("void ", "")[:70], float(event["dur"])
            count[name] += 1
            spent[name] += us
            how = event.get("args", {})
            held = [how.get(word) for word in ("registers per thread", "shared memory")]
            shape = [math.prod(how.get(word) or [1]) for word in ("grid", "block")]
            if us >= longest.get(name, [0.0])[0]:
                longest[name] = [us, *shape, *held]
    first = [name for name, _ in spent.most_common(12)]
    return [[n, count[n], round(spent[n], 1)] for n in first], [longest[n] for n in first]


def quick_tuning() -> None:
    """Triton's tuner decides after 10 ms of each candidate."""
    from triton.testing import do_bench

    def short(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        return do_bench(call, warmup=2, rep=10, quantiles=quantiles)

    try:
        from triton.runtime import driver

        driver.active.get_benchmarker = lambda: short
    except (AttributeError, ImportError) as error:
        print(f"usual tuning: {error}", file=sys.stderr)


# -- one process -----------------------------------------------------------------------------------


def measure(chosen: list[Case], out: Path, until: float, warm: bool) -> None:
    """Times cases one after another and writes a line for each."""
    import torch

    torch.manual_seed(0)
    if any(case.kernel == "flex" for case in chosen):
        torch._dynamo.config.recompile_limit = 10_000
        torch._dynamo.config.accumulated_recompile_limit = 10_000
    quick_tuning()
    flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    for case in chosen:
        if time.time() > until:
            return
        row: dict[str, Any] = {"group": case.group, "kernel": case.kernel, **case.sizes}
        began = time.time()
        try:
            with torch.no_grad():
                call = call_of(case, "cuda")
                call()
                torch.cuda.synchronize()
                if not warm:
                    row |= timed(call, flush, case.kernel in WAITS)
                    row["kernels"], row["grids"] = launched(call)
            call = None
        except Exception as error:  # a case that fails costs no other
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["took"] = round(time.time() - began, 2)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['took']:6.2f} s {row.get('ms', row.get('error', ''))} {case}", flush=True)
        torch.cuda.empty_cache()


def machine() -> dict[str, Any]:
    """The device, its driver, versions and the day."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    given = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": given.name,
        "sms": given.multi_processor_count,
        "driver": driver,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
    }


# -- all processes ---------------------------------------------------------------------------------


def warm_parts(groups: list[str]) -> list[tuple[str, int, int]]:
    """(group, part, of how many) of the processes that compile."""
    many = {"flex": 7, "fla": 8, "mamba": 2, "cuda": 1}
    return [
        (name, part, many[name]) for name in groups if name in many for part in range(many[name])
    ]


def part_of(group: str, part: int, of: int, warm: bool) -> list[Case]:
    """The cases of one process; of those that only compile, one for each kernel of Triton."""
    chosen = [case for case in cases() if case.group == group]
    if warm and group != "flex":
        kinds = ("heads", "channels", "state", "gated", "held", "channels_last")
        first: dict[Any, Case] = {}
        for case in chosen:
            first.setdefault((case.kernel, *(case.sizes.get(kind) for kind in kinds)), case)
        chosen = list(first.values())
    return chosen[part::of]


def start(group: str, out: Path, until: float, *more: str) -> subprocess.Popen[bytes]:
    """One process for a group, or for a part of it."""
    command = [sys.executable, __file__, "--group", group, "--out", str(out), *more]
    return subprocess.Popen([*command, "--until", str(until)])


def finish(process: subprocess.Popen[bytes], until: float) -> None:
    """Waits, and ends a process that takes too long."""
    try:
        process.wait(max(1.0, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=300, help="seconds of all groups")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--warm", action="store_true", help="compile only")
    parser.add_argument("--group", help="of one process")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--until", type=float, default=0)
    given = parser.parse_args()
    if given.group:
        part, of = (int(number) for number in given.part.split("/"))
        chosen = part_of(given.group, part, of, given.warm)
        measure(chosen, given.out, given.until or time.time() + given.budget, given.warm)
        return
    groups = given.groups.split(",")
    until = time.time() + given.budget
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if given.warm:
        os.environ["FLA_CACHE_RESULTS"] = "0"  # tuned again when the device is quiet
        running = [
            start(group, given.out, until, "--warm", "--part", f"{part}/{of}")
            for group, part, of in warm_parts(groups)
        ]
        for process in running:
            finish(process, until)
        return
    with given.out.open("a") as file:
        file.write(json.dumps(machine()) + "\n")
    for group in groups:
        if time.time() < until:
            finish(start(group, given.out, until), until + TAKES)


if __name__ == "__main__":
    main()
