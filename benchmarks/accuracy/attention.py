"""Attention kernels that others measured, predicted by blocks, steps and bytes.

    python benchmarks/accuracy/attention.py FOLDER   # attention-*.csv.gz in it and in kernels/

Files are attention-context-GPU (a prompt) and attention-generation-GPU (one query on a cache).
Rows are sizes and a latency in ms, of a library's kernels in vLLM: of attention and of the kernel
that stores new entries in the cache, which is a row of class "gather" here.  For each GPU and
library, 200 rows of each file are fitted to and the rest predicted, for five seeds: nine numbers
for both phases together (`FREE`).  Rows of another kernel (FlashAttention 4, which serves heads of
width 512) are left out.  The last column is the mean error over all rows with the numbers that come
along (`attention_rows`), and with a launch and a store that are the same for all GPUs.

The cache of L40S is so large that it holds what most rows touch, over and over: such rows are warm
there, and how much faster the cache is than the memory is a tenth number.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from points import Point, write_points
from rows import NO_ATTENTION, columns, table

import rooftrace as rt
from rooftrace.costmodels.kernels.attention import attention_knobs, products_of
from rooftrace.costmodels.kernels.knobs import Knobs, Share
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.hardware.chip import Chip
from rooftrace.measured.fit.cases import Case, errors, predict
from rooftrace.measured.fit.fitting import fit

FITTED, SEEDS = 200, 5
PHASES = ("context", "generation")
LAUNCH, STORE = 4.4e-6, Share(memory=0.35)
"""Of all GPUs: seconds of the launches of a row, and what the kernel that stores reaches."""
LARGE = 64 * 2**20
"""Bytes of a last cache that holds what most of the rows touch."""
FREE = (
    "launch", "gather.memory",
    *(f"attention.{name}" for name in
      ("products", "convert", "stream", "start", "combine", "prepare", "request")),
)  # fmt: skip
WIDE = 2
"""Bytes of an element of query and output, and of new entries before they are stored."""


@dataclass(frozen=True)
class Measured:
    """Rows of one library on one GPU: the words of its files, the kernels of each phase."""

    gpu: str
    chip: str
    library: str
    context: str
    generation: str

    def kernel(self, phase: str) -> str:
        """The name of the kernels that ran in a phase, as the rows have it."""
        return self.context if phase == "context" else self.generation


SETS = (
    Measured("a100_sxm", "a100-sxm-80", "flash2", "vllm_flash_attn", "vllm_flash_attn"),
    Measured("h100_sxm", "h100-sxm", "flash3", "vllm_flash_attn_fa3", "vllm_flash_attn_fa3"),
    Measured("h200_sxm", "h200-sxm", "flash3", "vllm_flash_attn_fa3", "vllm_flash_attn_fa3"),
    Measured("l40s", "l40s", "flash2", "vllm_flash_attn_fa2", "vllm_flash_attn_fa2"),
    Measured("l40s", "l40s", "flashinfer", "vllm_flashinfer_fiprefill", "vllm_flashinfer_fidecode"),
    Measured("l40s", "l40s", "triton", "vllm_triton_attn", "vllm_triton_attn"),
)


def cases(path: Path, chip: Chip, kernel: str, library: str) -> list[Case]:
    """The rows of a file that are of one kernel."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [
            case_of(row, chip, "-context-" in path.name, library)
            for row in csv.DictReader(file)
            if row["kernel_source"] == kernel
        ]


def case_of(row: dict[str, str], chip: Chip, prompt: bool, library: str) -> Case:
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
    known = precision if chip.has_peak("matrix", precision) else "bf16"
    read = 2 * batch * (queries * heads * width * WIDE + keys * kv_heads * width * size)
    stored = 2 * batch * queries * kv_heads * width * (WIDE + size)
    assert chip.l2_capacity is not None
    room = chip.l2_capacity.value if chip.l2_capacity.value >= LARGE else 0.0
    warm = read + stored <= room
    rows = [(1, moved, moved * warm, moved, 0, 0, 0, 1, *[0] * 9) for moved in (read, stored)]
    made = columns(sizes, 1, *products_of("matrix", known, chip, library))
    name = f"{batch}x{queries}x{keys} {heads}/{kv_heads} of {width} {precision}"
    both = table(chip, ["attention", "gather"], rows, [made, NO_ATTENTION])
    return Case(name=name, table=both, seconds=float(row["latency"]) * 1e-3)


def begun(chip: Chip) -> Knobs:
    """What comes along for a chip, as fast as a kernel alone runs."""
    knobs = Knobs.typical(chip, compiled=False, sustained=False)
    return replace(knobs, launch=LAUNCH).with_shares(memory={"gather": STORE.memory})


def off(chosen: list[Case], knobs: Knobs) -> tuple[float, float, float]:
    """Mean, median and 90th percentile of the errors."""
    seconds = [case.seconds for case in chosen]
    found = errors([case.name for case in chosen], predict(chosen, knobs), seconds)
    return found.mean, found.median, found.p90


def study(rows: Measured, folder: Path, points: list[Point]) -> list[dict[str, float]]:
    """Prints a line for each phase of a library on a GPU; the numbers of the fits, by seed.

    What the first one predicts is added to `points`.
    """
    chip = rt.load_chip(rows.chip)
    given = [
        cases(file_of(folder, rows, phase), chip, rows.kernel(phase), rows.library)
        for phase in PHASES
    ]
    start, free = begun(chip), FREE
    assert chip.l2_capacity is not None
    if chip.l2_capacity.value >= LARGE:
        start, free = (
            replace(start, cache=3.0).with_shares(memory={"gather": 1.5}),
            (*FREE, "cache"),
        )
    fitted, runs = [], []
    for seed in range(SEEDS):
        order = [random.Random(seed).sample(range(len(one)), len(one)) for one in given]
        parts = [[one[i] for i in order] for one, order in zip(given, order, strict=True)]
        inside = [case for part in parts for case in part[:FITTED]]
        found = fit(inside, with_library(start, chip, rows.library), free, check=False)
        fitted.append({p.name: p.value for p in found.parameters if p.identified})
        runs.append([off(part[FITTED:], found.knobs) for part in parts])
        for phase, part in zip(PHASES, parts, strict=True) if not seed else ():
            predicted = predict(part[FITTED:], found.knobs)
            points += [
                Point(case.name, seconds, case.seconds, f"{rows.chip} {rows.library} {phase}")
                for case, seconds in zip(part[FITTED:], predicted, strict=True)
            ]
    for phase, one, results in zip(PHASES, given, zip(*runs, strict=True), strict=True):
        mean, median, p90 = (statistics.fmean(column) for column in zip(*results, strict=True))
        print(
            f"| {rows.chip} | {rows.library} | {phase} | {len(one)} "
            f"| {mean:.1%} | {median:.1%} | {p90:.1%} | {off(one, start)[0]:.1%} |"
        )
    return fitted


def with_library(knobs: Knobs, chip: Chip, library: str) -> Knobs:
    """Knobs with the numbers that come along for a library, so that a fit begins there."""
    return replace(knobs, attention=attention_knobs(knobs.attention, chip, library))


def file_of(folder: Path, rows: Measured, phase: str) -> Path:
    """The file of a phase, in the folder or in the one of kernels inside of it."""
    name = f"attention-{phase}-{rows.gpu}.csv.gz"
    return next(
        (p for p in (folder / name, folder / "kernels" / name) if p.exists()), folder / name
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=Path, help="write predictions of one seed there, as CSV")
    given = parser.parse_args()
    sets = [s for s in SETS if all(file_of(given.folder, s, phase).exists() for phase in PHASES)]
    if not sets:
        raise SystemExit("no attention-context-GPU and attention-generation-GPU in that folder")
    print("| GPU | library | phase | rows | mean | median | p90 | typical |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    points: list[Point] = []
    fitted = {f"{s.chip} {s.library}": study(s, given.folder, points) for s in sets}
    print("\nFitted (median of the seeds):")
    for name, runs in fitted.items():
        values = {free: [run[free] for run in runs if free in run] for free in (*FREE, "cache")}
        known = {free: statistics.median(found) for free, found in values.items() if found}
        print(f"{name}: {', '.join(f'{free} {value:.3g}' for free, value in known.items())}")
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
