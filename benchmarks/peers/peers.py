"""A trace and its estimate beside a plain call on meta and other counters, and FLOP beside truth.

    pip install fvcore calflops torchinfo    # what is not installed is left out
    python benchmarks/peers/peers.py [--rounds 5] [TASK ...]

Each task has a warm process of its own, in which all take turns: medians of CPU seconds, and of
their ratios to the plain call (the module's forward, or forward and backward, on meta tensors).
FLOP are of matrix products, convolutions and attention, as FlopCounterMode counts them; of a
mixture of experts it counts them with experts in a loop on CPU tensors.  Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tasks import TASKS, Task, moe
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def step(module: nn.Module, kwargs: dict[str, Any], training: bool) -> None:
    """The plain call: forward, or forward and backward of the sum of the output."""
    with contextlib.nullcontext() if training else torch.no_grad():
        out = module(**kwargs)
        if training:
            (out if isinstance(out, torch.Tensor) else out.logits).sum().backward()


def ours(module: nn.Module, kwargs: dict[str, Any], training: bool) -> float:
    import rooftrace as rt

    phase = "training" if training else "forward"
    return rt.estimate(rt.trace(module, phase=phase, optimizer="none", **kwargs)).flops_matrix


def flop_counter(module: nn.Module, kwargs: dict[str, Any], training: bool) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step(module, kwargs, training)
    return counter.get_total_flops()


def by_fvcore(module: nn.Module, kwargs: dict[str, Any], training: bool) -> float:
    from fvcore.nn import FlopCountAnalysis

    counted = FlopCountAnalysis(module, tuple(kwargs.values()))
    return 2 * counted.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


def by_calflops(module: nn.Module, kwargs: dict[str, Any], training: bool) -> float:
    from calflops import calculate_flops

    told = {"print_results": False, "output_as_string": False, "include_backPropagation": training}
    return calculate_flops(module, kwargs=kwargs, **told)[0]


def by_torchinfo(module: nn.Module, kwargs: dict[str, Any], training: bool) -> float:
    from torchinfo import summary

    return 2 * summary(module, input_data=kwargs, verbose=0, device="meta").total_mult_adds


def by_make_fx(module: nn.Module, kwargs: dict[str, Any], training: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda: step(module, kwargs, training))()


def export(module: nn.Module, kwargs: dict[str, Any], training: bool) -> None:
    torch.export.export(module, (), kwargs, strict=False)


Counter = Callable[[nn.Module, dict[str, Any], bool], float | None]
"""Name, function, the package it needs, whether it takes a backward pass."""
COUNTERS: dict[str, tuple[Counter, str, bool]] = {
    "plain": (step, "torch", True),
    "rooftrace": (ours, "rooftrace", True),
    "FlopCounterMode": (flop_counter, "torch", True),
    "fvcore": (by_fvcore, "fvcore", False),
    "calflops": (by_calflops, "calflops", True),
    "torchinfo": (by_torchinfo, "torchinfo", False),
    "make_fx": (by_make_fx, "torch", True),
    "torch.export": (export, "torch", False),
}
ONCE = ("make_fx", "torch.export")
"""They count nothing, and take long: one round."""


def truth(build: Callable[[], Task], training: bool) -> float | None:
    """FLOP by FlopCounterMode; of a mixture with experts in a loop on CPU tensors."""
    if build is not moe:
        with torch.device("meta"):
            return flop_counter(*build(), training)
    module, kwargs = build()
    module.set_experts_implementation("eager")
    with sdpa_kernel(SDPBackend.MATH):  # the only attention on a CPU that it counts
        return flop_counter(module, kwargs, training)


def measured(name: str, rounds: int) -> dict[str, Any]:
    """By counter: seconds, ratio to the plain call and FLOP over truth, or the error."""
    build, training = TASKS[name]
    with torch.device("meta"):  # one for each: a counter that fails may leave its hooks
        built = {counter: build() for counter in COUNTERS}
    right, told, seconds = truth(build, training), {}, {}
    for turn in range(rounds + 1):  # the first warms up
        for counter, (function, package, backward) in COUNTERS.items():
            if not importlib.util.find_spec(package) or (training and not backward):
                continue
            if "error" in told.setdefault(counter, {}) or (turn > 1 and counter in ONCE):
                continue
            module, kwargs = built[counter]
            given = copy.deepcopy(kwargs)  # a cache grows
            gc.collect()
            start = time.process_time()
            try:
                with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(None):
                    flop = function(module, given, training)
            except Exception as error:
                told[counter] = {"error": f"{type(error).__name__}: {error}"}
                continue
            if turn:
                seconds.setdefault(counter, []).append(time.process_time() - start)
            if flop is not None:
                told[counter]["flop"] = flop / right
    for counter, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["plain"], strict=False)]
        told[counter] |= {"s": statistics.median(values), "ratio": statistics.median(ratios)}
    return told


def cell(found: dict[str, Any] | None) -> str:
    """The ratio of seconds, and FLOP over truth: "0.87 (1.00)"."""
    if found is None or "error" in found:
        return "" if found is None else "fails"
    return f"{found['ratio']:.2f}" + (f" ({found['flop']:.2f})" if "flop" in found else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tasks", nargs="*", help="text of their names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.tasks[0], args.rounds)))
        return
    here = {name for name, (_, package, _) in COUNTERS.items() if importlib.util.find_spec(package)}
    names, errors = [name for name in COUNTERS if name in here and name != "plain"], []
    print("| Task | Plain call, s |", " | ".join(names), "|")
    print("|---|" + "--:|" * (len(names) + 1))
    for task in TASKS:
        if args.tasks and not any(text in task for text in args.tasks):
            continue
        command = [sys.executable, __file__, task, "--one", "--rounds", str(args.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
        cells = " | ".join(cell(told.get(name)) for name in names)
        print(f"| {task} | {told['plain']['s']:.3f} | {cells} |", flush=True)
        errors += [f"{n}, {task}: {told[n]['error'][:150]}" for n in told if "error" in told[n]]
    missing = [name for name in COUNTERS if name not in here]
    print(f"\nNot installed: {', '.join(missing) or 'none'}.")
    print("\n".join(f"- {' '.join(error.split())}" for error in errors))


if __name__ == "__main__":
    main()
