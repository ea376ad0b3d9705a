"""What people wait for, beside what it is held against, in turns: CPU seconds of one run.

    python benchmarks/peers/floors.py [--rounds 5] [TEXT ...]

Commands are whole processes with their imports and an empty cache; a bare one imports, builds the
module on meta and runs each phase of the report once.  A second command comes after the first,
which it is held against.
The package is compiled before, as an installed one is, even where PYTHONDONTWRITEBYTECODE is set.
Points and crossings are parts of one process, held against the trace and the estimate of a point,
and against the sweep.  TEXT: only lines whose names have it.  Prints medians as Markdown.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BARE = """
import json, sys, torch, tasks, peers
with torch.device("meta"):
    if sys.argv[1] == "gpt2":
        module, kwargs = tasks.gpt2()
    else:
        config = json.load(open(f"../../examples/configs/{sys.argv[1]}.json"))
        config.pop("use_cache", None)
        module, kwargs = tasks.causal(config.pop("model_type"), **config)
    optimizer = torch.optim.AdamW(module.parameters())
    peers.step(module.train(), kwargs, training=True)
    optimizer.step()
    if sys.argv[1] == "gpt2":
        peers.step(module.eval(), kwargs, training=False)
        sys.exit()
    with torch.no_grad():
        cache = module.eval()(**kwargs, use_cache=True).past_key_values
        length = cache.get_seq_length()
        module(
            kwargs["input_ids"][:, :1],
            position_ids=torch.full((1, 1), length),
            attention_mask=torch.ones(1, 1, 1, length + 1, dtype=torch.bool),
            past_key_values=cache,
            use_cache=True,
        )
"""
POINTS = """
import sys, time, numpy, rooftrace as rt
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import evaluated
target, phase = sys.argv[1:]
over = {"batch": range(2, 257), "kv" if phase == "decode" else "seq": range(256, 16_385)}
chips = [rt.load_chip(name) for name in ("h200-sxm", "h100-sxm", "a100-sxm-80", "l4")]
form = rt.tools.form(target, phase=phase, over=over)
start = time.process_time()
rt.estimate(rt.trace(target, phase=phase, **{name: at[99] for name, at in over.items()}))
one = time.process_time() - start
draw = numpy.random.default_rng(0)
places = Points({name: draw.integers(at[0], at[-1] + 1, 250_000) for name, at in over.items()})
start = time.process_time()
table = evaluated(form, places, chips, Conditions.of("efficient"))
assert len(table["t_est"]) == 1_000_000
print(time.process_time() - start, one)
"""
CROSSINGS = """
import time, rooftrace as rt
over, start = {"batch": range(1, 1025), "kv": range(64, 848, 8)}, time.process_time()
swept = rt.sweep("llama-3.1-8b", phase="decode", over=over, chip=["h200-sxm", "l4"])
end = time.process_time()
assert swept.crossings()
print(time.process_time() - end, end - start)
"""
OWN = "report tasks.py:gpt2 --chip h200-sxm"
DEMO = "report deepseek-v3 --batch 8 --seq 255 --kv 255 --dtype fp8 --chip h200-sxm"
SWEEP = "--phase decode --over batch=1..64 --over kv=4096 --chip h200-sxm"
SOLVE = "--tpot 30ms --kv 4096 --chip h200-sxm"
EXPLORE = (
    "solve deepseek-v3 --find critical-batch --dtype fp8 --over devices=1,8 --over kv=2048,8192"
)
MESH = "--phase training --seq 8192 --mesh dp=32,tp=8 --checkpoint full --system dgx-h100"
FLOORS = {
    "own module, all files": (1.25, f"{OWN} --out OUT", "gpt2"),
    "own module, JSON": (1.0, f"{OWN} --format json", "gpt2"),
    "DeepSeek-V3, all files": (1.25, f"{DEMO} --out OUT", "deepseek-v3"),
    "DeepSeek-V3, JSON": (1.0, f"{DEMO} --format json", "deepseek-v3"),
    "DeepSeek-V3, JSON, second": (0.6, f"{DEMO} --format json", "first"),
    "crossings of 200,704 points": (1.0, CROSSINGS, ""),
    "10^6 points: llama-3.1-8b decode": ("5 s", POINTS, ""),
    "10^6 points: deepseek-v3 decode": ("10 s", POINTS, ""),
    "10^6 points: mixtral-8x22b prefill": ("20 s", POINTS, ""),
    "critical batch, DeepSeek-V3": ("10 s", EXPLORE, "deepseek-v3"),
    "sweep, Llama 3.1 8B": ("6 s", f"sweep llama-3.1-8b {SWEEP}", "llama-3.1-8b"),
    "sweep, DeepSeek-V3": ("15 s", f"sweep deepseek-v3 {SWEEP}", "deepseek-v3"),
    "sweep, DeepSeek-V3, second": ("2 s", f"sweep deepseek-v3 {SWEEP}", "first"),
    "solve, Llama 3.1 8B": ("6 s", f"solve llama-3.1-8b {SOLVE}", "llama-3.1-8b"),
    "solve, Llama 3.1 8B, second": ("2 s", f"solve llama-3.1-8b {SOLVE}", "first"),
    "solve, DeepSeek-V3": ("15 s", f"solve deepseek-v3 {SOLVE} --dtype fp8", "deepseek-v3"),
    "solve, DeepSeek-V3, second": ("2 s", f"solve deepseek-v3 {SOLVE} --dtype fp8", "first"),
    "training of 70B on dp=32,tp=8": ("7 s", f"report llama-3.1-70b {MESH}", "llama-3.1-70b"),
}
"""By name: the largest ratio, or the most seconds; the command; what it is held against."""


def run(words: list[str], cache: str) -> tuple[float, float, str]:
    """CPU seconds, peak bytes and output of a process."""
    environment = {**os.environ, "ROOFTRACE_CACHE": f"{cache}/kept"}
    command = [sys.executable, *(f"{cache}/out" if word == "OUT" else word for word in words)]
    with subprocess.Popen(
        command, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        told = process.stdout.read() if process.stdout else b""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024.0, told.decode()


def measured(name: str, command: str, against: str) -> tuple[float, float, float]:
    """CPU seconds of a command and of what it is held against; peak bytes."""
    with tempfile.TemporaryDirectory() as cache:
        if command in (POINTS, CROSSINGS):
            _, peak, told = run(["-c", command, *name.split(": ")[-1].split()], cache)
            seconds, other = map(float, told.split())
            return seconds, other, peak
        words = ["-m", "rooftrace", *command.split()]
        other = run(words if against == "first" else ["-c", BARE, against], cache)[0]
        seconds, peak, _ = run(words, cache)
        return seconds, other, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    package = importlib.util.find_spec("rooftrace")
    for folder in package.submodule_search_locations or () if package else ():
        compileall.compile_dir(folder, quiet=1)
    print("| What | Floor | CPU s | Held against, s | Ratio | Peak, MiB | |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for name, (floor, command, against) in FLOORS.items():
        if args.text and not any(text in name for text in args.text):
            continue
        runs = [measured(name, command, against) for _ in range(args.rounds)]
        seconds, other, peak = (statistics.median(part) for part in zip(*runs, strict=True))
        ratio = statistics.median(run[0] / run[1] for run in runs)
        held = seconds <= float(floor[:-2]) if isinstance(floor, str) else ratio <= floor
        shown = f"{seconds:.2f} | {other:.2f} | {ratio:.2f} | {peak / 2**20:.0f}"
        print(f"| {name} | {floor} | {shown} | {'met' if held else 'missed'} |", flush=True)


if __name__ == "__main__":
    main()
