"""Attention kernels that others measured, predicted by blocks, steps and bytes.

    python benchmarks/accuracy/attention.py FOLDER   # every attention-*-*.csv.gz in it

Files are attention-context-GPU (a prompt) and attention-generation-GPU (one query on a cache).
Rows are sizes and a latency in ms, of FlashAttention in vLLM: of attention and of the kernel that
stores new entries in the cache, which is a row of class "gather" here.  For each GPU, 200 rows of
each file are fitted to and the rest predicted, for five seeds: nine numbers for both phases
together (`FREE`).  Rows of another kernel (FlashAttention 4, which serves heads of width 512) are
left out unless --all is given.  The last column is the mean error over all rows with the numbers
that come along (`HOPPER`, `AMPERE`), and with a launch and a store that are the same for all GPUs.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import statistics
from pathlib import Path

from points import Point, write_points

import rooftrace as rt
from rooftrace.costmodels.costs.cost import AttentionSizes
from rooftrace.costmodels.kernels.attention_rows import NO_ATTENTION, columns
from rooftrace.costmodels.kernels.tables import table
from rooftrace.costmodels.knobs.knobs import Knobs, Share
from rooftrace.hardware.chip import Chip
from rooftrace.measured.fit.cases import Case, errors, predict
from rooftrace.measured.fit.fitting import fit

FITTED, SEEDS = 200, 5
PHASES = ("context", "generation")
GPUS = {
    "a100": ("a100-sxm-80", "vllm_flash_attn"),
    "h100": ("h100-sxm", "vllm_flash_attn_fa3"),
    "h200": ("h200-sxm", "vllm_flash_attn_fa3"),
}
START = Knobs("attention", launch=4.4e-6, shares={"gather": Share(memory=0.35)}, attention="usual")
FREE = (
    "launch", "gather.memory",
    *(f"attention.{name}" for name in
      ("products", "convert", "stream", "start", "combine", "prepare", "request")),
)  # fmt: skip
WIDE = 2
"""Bytes of an element of query and output, and of new entries before they are stored."""


def cases(path: Path, chip: Chip, kernel: str | None) -> list[Case]:
    """The rows of a file, those of one kernel or all."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [
            case_of(row, chip, "-context-" in path.name)
            for row in csv.DictReader(file)
            if kernel is None or row["kernel_source"] == kernel
        ]


def case_of(row: dict[str, str], chip: Chip, prompt: bool) -> Case:
    """An attention and a store; both phases store what they are given."""
    batch, heads, width = (int(row[name]) for name in ("batch_size", "num_heads", "head_dim"))
    kv_heads = int(row["num_key_value_heads"]) or heads
    queries = int(row["isl"]) if prompt else 1
    keys = queries if prompt else int(row["step"]) + 1
    visible = queries * (queries + 1) // 2 if prompt else keys
    precision, size = ("fp8", 1) if "fp8" in row["kv_cache_dtype"] else ("bf16", 2)
    sizes = AttentionSizes(
        batch, queries, keys, visible, heads, kv_heads, width, width, size, paged=True
    )
    rate = chip.peak("matrix", precision if chip.has_peak("matrix", precision) else "bf16")
    read = 2 * batch * (queries * heads * width * WIDE + keys * kv_heads * width * size)
    stored = 2 * batch * queries * kv_heads * width * (WIDE + size)
    rows = [(1, moved, 0, moved, 0, 0, 0, 1, *[0] * 9) for moved in (read, stored)]
    attention = [columns(sizes, 1, size, rate), NO_ATTENTION]
    name = f"{batch}x{queries}x{keys} {heads}/{kv_heads} of {width} {precision}"
    both = table(chip, ["attention", "gather"], rows, attention)
    return Case(name=name, table=both, seconds=float(row["latency"]) * 1e-3)


def off(chosen: list[Case], knobs: Knobs) -> tuple[float, float, float]:
    """Mean, median and 90th percentile of the errors."""
    seconds = [case.seconds for case in chosen]
    found = errors([case.name for case in chosen], predict(chosen, knobs), seconds)
    return found.mean, found.median, found.p90


def study(gpu: str, folder: Path, every: bool, points: list[Point]) -> list[dict[str, float]]:
    """Prints a line for each phase of a GPU; the numbers of the fits, by seed.  What the first one
    predicts is added to `points`."""
    name, source = GPUS[gpu]
    chip = rt.load_chip(name)
    files = [folder / f"attention-{phase}-{gpu}_sxm.csv.gz" for phase in PHASES]
    given = [cases(path, chip, None if every else source) for path in files]
    fitted, runs = [], []
    for seed in range(SEEDS):
        order = [random.Random(seed).sample(range(len(one)), len(one)) for one in given]
        parts = [[one[i] for i in rows] for one, rows in zip(given, order, strict=True)]
        found = fit([case for part in parts for case in part[:FITTED]], START, FREE, check=False)
        fitted.append({p.name: p.value for p in found.parameters if p.identified})
        runs.append([off(part[FITTED:], found.knobs) for part in parts])
        for phase, part in zip(PHASES, parts, strict=True) if not seed else ():
            predicted = predict(part[FITTED:], found.knobs)
            points += [
                Point(case.name, seconds, case.seconds, f"{name} {phase}")
                for case, seconds in zip(part[FITTED:], predicted, strict=True)
            ]
    for phase, one, results in zip(PHASES, given, zip(*runs, strict=True), strict=True):
        mean, median, p90 = (statistics.fmean(column) for column in zip(*results, strict=True))
        plain = off(one, START)[0]
        print(
            f"| {name} | {phase} | {len(one)} "
            f"| {mean:.1%} | {median:.1%} | {p90:.1%} | {plain:.1%} |"
        )
    return fitted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=Path, help="write predictions of one seed there, as CSV")
    parser.add_argument("--all", action="store_true", help="keep the rows of other kernels")
    given = parser.parse_args()
    files = [path.name for path in given.folder.glob("attention-*-*.csv.gz")]
    gpus = [gpu for gpu in GPUS if all(f"attention-{p}-{gpu}_sxm.csv.gz" in files for p in PHASES)]
    if not gpus:
        raise SystemExit("no attention-context-GPU and attention-generation-GPU in that folder")
    print("| GPU | phase | rows | mean | median | p90 | typical |")
    print("|---|---|---:|---:|---:|---:|---:|")
    points: list[Point] = []
    fitted = {gpu: study(gpu, given.folder, given.all, points) for gpu in gpus}
    print("\nFitted (median of the seeds):")
    for gpu, runs in fitted.items():
        values = {name: [run[name] for run in runs if name in run] for name in FREE}
        known = {name: statistics.median(found) for name, found in values.items() if found}
        print(f"{gpu} {', '.join(f'{name} {value:.3g}' for name, value in known.items())}")
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
