"""What a GPU sustains of its products: the same ones for a quarter of a minute, with its power.

    python benchmarks/sustained.py sustained.jsonl [mixed]

Products are 8192 x 8192 x 8192 on normally distributed numbers; then come the layers of
manychips/layers.py.  The first line of the file is the machine.  Each other has a name and, for
every two seconds, seconds since the start, milliseconds of a step, TFLOP/s, and what nvidia-smi
says: watts, MHz, degrees and the limit in watts.  With `mixed` it has products in turns with
additions of 2 GiB instead, so many milliseconds of these for each of products: the TFLOP/s of the
products alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "manychips"), str(HERE / "kernels")]
import layers  # noqa: E402
from measure import machine  # noqa: E402

SIZE, TIMES, LASTS = 8192, 40, 16.0
LAYERS = 112.2e12
"""FLOP of a step of the layers, attention counted causal."""


def product(kind: str) -> Callable[[], Any]:
    """A product in bf16, or in fp8 with a scale of 1."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if kind == "bf16":
        return lambda: a @ b
    narrow, one = torch.float8_e4m3fn, torch.ones((), device="cuda")
    left, right = a.to(narrow), b.to(narrow).t()
    return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def sustained(name: str, step: Callable[[], Any], flop: float) -> dict[str, Any]:
    """A row for every two seconds."""
    query = "--query-gpu=power.draw,clocks.sm,temperature.gpu,power.limit"
    asked = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    rows, start = [], time.perf_counter()
    while time.perf_counter() - start < LASTS:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < 2.0:
            step()
            count += 1
            torch.cuda.synchronize()
        each = (time.perf_counter() - began) / count
        told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        since = round(time.perf_counter() - start, 1)
        rows.append([since, round(each * 1e3, 3), round(flop / each / 1e12, 1), told])
    return {"name": name, "rows": rows}


def mixed(kind: str, products: int, additions: int) -> dict[str, Any]:
    """So many products in turns with so many additions: the rate of the former."""
    call, x = product(kind), torch.randn(2**29, device="cuda")
    asked = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    rows, began = [], time.perf_counter()
    told: subprocess.Popen[str] | None = None
    while time.perf_counter() - began < 5.0:
        if told is None and time.perf_counter() - began > 3.0:
            told = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        for _ in range(products):
            call()
        events[1].record()
        for _ in range(additions):
            x.add_(1.0)
        events[2].record()
        torch.cuda.synchronize()
        rows.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
    late = rows[len(rows) // 2 :]
    first, second = (sum(row[i] for row in late) / len(late) for i in (0, 1))
    rate = products * 2.0 * SIZE**3 / first / 1e9
    said = "" if told is None else told.communicate()[0].strip()
    return {
        "name": f"mm {kind}", "products ms": round(first, 3), "additions ms": round(second, 3),
        "tflops": round(rate, 1), "power": said,
    }  # fmt: skip


def main(path: Path, *, turns: bool = False) -> None:
    """Write a line for each."""
    if turns:
        pairs = (
            (16, 0), (16, 4), (16, 8), (12, 8), (8, 8), (8, 12), (8, 16), (4, 16), (64, 64)
        )  # fmt: skip
        rows = [machine(), *(mixed("bf16", *pair) for pair in pairs)]
        rows += [mixed("fp8", *pair) for pair in ((32, 0), (32, 8), (16, 8))]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return
    lines = [machine()]
    for kind in ("bf16", "fp8"):
        call = product(kind)
        flop = TIMES * 2.0 * SIZE**3
        lines.append(
            sustained(f"mm {kind}", lambda call=call: [call() for _ in range(TIMES)], flop)
        )
    for case in layers.CASES[:2]:
        torch._dynamo.reset()
        model, (ids, places) = layers.body(case, "cuda"), layers.inputs(case, "cuda")
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        with layers.kernels(case["kernel"]):
            step = lambda: layers.step(model, ids, places)  # noqa: B023, E731
            lines.append(sustained(f"layers {case}", step, LAYERS))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), turns="mixed" in sys.argv[2:])
