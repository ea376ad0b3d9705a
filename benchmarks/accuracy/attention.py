"""Attention kernels that others measured, predicted by blocks, steps and bytes.

    python benchmarks/accuracy/attention.py FOLDER   # every attention-*-*.csv.gz in it

Files are attention-context-GPU (a prompt) and attention-generation-GPU (one query on a cache).
Rows are sizes and a latency in ms, of FlashAttention in vLLM.  For each GPU, 200 rows of each file
are fitted to and the rest predicted, for five seeds: nine numbers for both phases together
(`AttentionKnobs`), eight where nothing is fp8.  Rows of another kernel (FlashAttention 4, which
serves heads of width 512) are left out unless --all is given.  The last column is the mean error
with the numbers that come along (`HOPPER`, `AMPERE`), over all rows.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import rooftrace as rt
from rooftrace.costmodels.attention_time import (
    AMPERE,
    FLASH2,
    FLASH3,
    HOPPER,
    AttentionEngine,
    AttentionKernel,
    AttentionKnobs,
    attention_engine,
    attention_seconds,
)

FITTED, SEEDS = 200, 5
PHASES = ("context", "generation")
GPUS = {
    "a100": ("a100-sxm-80", "vllm_flash_attn", FLASH2, AMPERE),
    "h100": ("h100-sxm", "vllm_flash_attn_fa3", FLASH3, HOPPER),
    "h200": ("h200-sxm", "vllm_flash_attn_fa3", FLASH3, HOPPER),
}
START = AttentionKnobs(0.8, 0.6, 0.8, 5.0, 8e-6, 1e-6, 3e-6, 1e-8, 2e-6)
SHARES = ("compute", "memory")
"""Numbers that are at most 1."""


@dataclass(frozen=True)
class Cases:
    """Measured cases: arrays of sizes by name, and seconds."""

    sizes: dict[str, np.ndarray]
    seconds: np.ndarray

    def take(self, rows: list[int]) -> Cases:
        return Cases({name: a[rows] for name, a in self.sizes.items()}, self.seconds[rows])


@dataclass(frozen=True)
class Model:
    """What is the same for all cases of a GPU."""

    on: AttentionEngine
    kernel: AttentionKernel

    def seconds(self, cases: Cases, knobs: AttentionKnobs) -> np.ndarray:
        return attention_seconds(cases.sizes, self.on, self.kernel, knobs)

    def errors(self, cases: Cases, knobs: AttentionKnobs) -> np.ndarray:
        return np.abs(self.seconds(cases, knobs) / cases.seconds - 1)


def read(path: Path, kernel: str | None) -> Cases:
    """The rows of a file, those of one kernel or all."""
    sizes, seconds = [], []
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if kernel is None or row["kernel_source"] == kernel:
                sizes.append(sizes_of(row, "-context-" in path.name))
                seconds.append(float(row["latency"]) * 1e-3)
    arrays = {name: np.array([float(one[name]) for one in sizes]) for name in sizes[0]}
    return Cases(arrays, np.array(seconds))


def sizes_of(row: dict[str, str], prompt: bool) -> dict[str, float]:
    """Sizes as `attention_seconds` takes them; both phases store what they are given."""
    heads, width = int(row["num_heads"]), int(row["head_dim"])
    queries = int(row["isl"]) if prompt else 1
    keys = queries if prompt else int(row["step"]) + 1
    return {
        "batch": int(row["batch_size"]),
        "queries": queries,
        "keys": keys,
        "visible": queries * (queries + 1) / 2 if prompt else keys,
        "heads": heads,
        "kv_heads": int(row["num_key_value_heads"]) or heads,
        "width": width,
        "value_width": width,
        "kv_size": 1 if "fp8" in row["kv_cache_dtype"] else 2,
        "stored": queries,
    }


def fit(model: Model, given: list[Cases], free: list[str]) -> AttentionKnobs:
    """Robust least squares on the logarithm of predicted over measured seconds."""

    def knobs(logs: np.ndarray) -> AttentionKnobs:
        return replace(START, **dict(zip(free, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: np.ndarray) -> np.ndarray:
        found = knobs(logs)
        return np.concatenate([np.log(model.seconds(c, found) / c.seconds) for c in given])

    start = np.log([getattr(START, name) for name in free])
    high = [0.0 if name in SHARES else start[i] + 10 for i, name in enumerate(free)]
    bounds = (start - 10, high)
    return knobs(least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def split(cases: Cases, seed: int) -> tuple[Cases, Cases]:
    """Rows to fit to, and the rest."""
    count = len(cases.seconds)
    order = random.Random(seed).sample(range(count), count)
    return cases.take(order[:FITTED]), cases.take(order[FITTED:])


def study(gpu: str, folder: Path, every: bool) -> tuple[list[str], list[AttentionKnobs]]:
    """Prints a line for each phase of a GPU; the names of what is fitted, the fits by seed."""
    chip, source, kernel, typical = GPUS[gpu]
    on = attention_engine(rt.load_chip(chip))
    assert on is not None
    model = Model(on, kernel)
    files = [folder / f"attention-{phase}-{gpu}_sxm.csv.gz" for phase in PHASES]
    given = [read(path, None if every else source) for path in files]
    free = list(AttentionKnobs.__dataclass_fields__)
    if all((cases.sizes["kv_size"] == 2).all() for cases in given):
        free.remove("convert")
    found, errors = [], []
    for seed in range(SEEDS):
        parts = [split(cases, seed) for cases in given]
        found.append(fit(model, [inside for inside, _ in parts], free))
        errors.append([model.errors(outside, found[-1]) for _, outside in parts])
    for phase, cases, runs in zip(PHASES, given, zip(*errors, strict=True), strict=True):
        mean, median, p90 = (
            statistics.fmean(float(what(run)) for run in runs)
            for what in (np.mean, np.median, lambda run: np.quantile(run, 0.9))
        )
        plain = model.errors(cases, typical).mean()
        print(
            f"| {chip} | {phase} | {len(cases.seconds)} "
            f"| {mean:.1%} | {median:.1%} | {p90:.1%} | {plain:.1%} |"
        )
    return free, found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="keep the rows of other kernels")
    given = parser.parse_args()
    files = [path.name for path in given.folder.glob("attention-*-*.csv.gz")]
    gpus = [gpu for gpu in GPUS if all(f"attention-{p}-{gpu}_sxm.csv.gz" in files for p in PHASES)]
    if not gpus:
        raise SystemExit("no attention-context-GPU and attention-generation-GPU in that folder")
    print("| GPU | phase | rows | mean | median | p90 | typical |")
    print("|---|---|---:|---:|---:|---:|---:|")
    fitted = {gpu: study(gpu, given.folder, given.all) for gpu in gpus}
    print("\nFitted (median of the seeds):")
    for gpu, (free, runs) in fitted.items():
        numbers = {name: statistics.median(getattr(run, name) for run in runs) for name in free}
        print(gpu, ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
