"""Forward and backward of four layers of Llama 3.1 8B on one GPU: timed there, priced anywhere.

    python benchmarks/manychips/layers.py measure layers-h100.jsonl   # on the GPU
    python benchmarks/manychips/layers.py compare layers-h100.jsonl h100-sxm

Weights are bf16 and layers are compiled each.  A line of the file is a case with the median seconds
of ten steps and what its kernels took by the profiler; the first line is the machine.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from llama import llama
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS = 4
CASES = [
    {"fp8": fp8, "seq": seq, "batch": batch, "full": full, "kernel": kernel}
    for seq, batch, full, kernel in (
        (8192, 2, False, "flash"),
        (32768, 1, True, "flash"),
        (32768, 1, True, "cudnn"),
        (2048, 8, False, "cudnn"),
    )
    for fp8 in (False, True)
]


def body(case: dict[str, Any], device: str) -> nn.Module:
    """The model without its head."""
    model: Any = llama("8b", fp8=case["fp8"], layers=LAYERS).to(torch.bfloat16)
    if device != "meta":
        model.to_empty(device=device)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    if case["full"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.layers = nn.ModuleList(map(torch.compile, model.model.layers))
    made: nn.Module = model.model
    return made


def step(model: Any, ids: Any, places: Any) -> None:
    """Forward and backward; what runs before the first layer is small."""
    hidden = model(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state
    hidden.float().square().mean().backward()


def inputs(case: dict[str, Any], device: str) -> tuple[Any, Any]:
    shape, words = (case["batch"], case["seq"]), 0 if device == "meta" else 128256
    ids = (
        torch.randint(words, shape, device=device)
        if words
        else torch.zeros(shape, dtype=torch.long, device=device)
    )
    places = torch.arange(case["seq"])[
        None
    ]  # numbers that a mask is made of are known on meta, too
    return ids, places if device == "meta" else places.to(device)


def kernels(backend: str) -> Any:
    """The attention that a case takes."""
    chosen = SDPBackend.FLASH_ATTENTION if backend == "flash" else SDPBackend.CUDNN_ATTENTION
    return sdpa_kernel(chosen)


# -- on the GPU ------------------------------------------------------------------------------------


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of ten steps, and what kernels took in one."""
    from torch.profiler import ProfilerActivity, profile

    model, (ids, places) = body(case, "cuda"), inputs(case, "cuda")
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    spent = []
    with kernels(case["kernel"]):
        for _ in range(3):
            step(model, ids, places)
        for _ in range(10):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(model, ids, places)
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - began)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step(model, ids, places)
            torch.cuda.synchronize()
    often: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            often[event.name[:90]] += 1
            took[event.name[:90]] += event.time_range.elapsed_us()
    return {
        "seconds": statistics.median(spent),
        "low": min(spent),
        "high": max(spent),
        "kernels": [[name, often[name], round(us, 1)] for name, us in took.most_common(40)],
    }


def measure(path: Path) -> None:
    """Write a line for each case."""
    sys.path.append(str(Path(__file__).parents[1] / "kernels"))
    from measure import machine

    with path.open("a") as file:
        file.write(json.dumps(machine()) + "\n")
    for case in CASES:
        torch._dynamo.reset()
        row = dict(case)
        with contextlib.suppress(torch.OutOfMemoryError):
            row |= measured(case)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({**row, "kernels": row.get("kernels", [])[:3]}, flush=True)
        torch.cuda.empty_cache()


# -- priced ----------------------------------------------------------------------------------------


def compare(path: Path, chip: str) -> None:
    """Print measured and expected milliseconds of each case."""
    import rooftrace as rt

    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "seconds" not in row:
            continue
        case = {name: row[name] for name in CASES[0]}
        model = body(case, "meta")
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        ids, places = inputs(case, "meta")
        with kernels(case["kernel"]):
            graph = rt.trace(step, model, ids, places)
        library = {"flash": "flash2"}.get(case["kernel"], case["kernel"])
        execution = rt.tools.execution_model("mixed", attention_library=library)
        made = rt.estimate(graph, chip=chip, execution=execution)
        off = made.t_est / row["seconds"] - 1
        device = sum(us for _, _, us in row["kernels"]) / 1e3
        print(
            f"{case}: measured {row['seconds'] * 1e3:.1f} ms (kernels {device:.1f}), expected "
            f"{made.t_est * 1e3:.1f}: {off:+.1%}"
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    verb, file = sys.argv[1], Path(sys.argv[2])
    measure(file) if verb == "measure" else compare(file, sys.argv[3])
