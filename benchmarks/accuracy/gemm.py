"""Matrix products that others measured, predicted by tiles and waves.

    python benchmarks/accuracy/gemm.py FOLDER        # every gemm-*.csv.gz in it and in kernels/

Rows are m, n, k, a number format and a latency in ms.  For each GPU and format the typical numbers
of the chip predict all rows (of a product alone, which no limit on power slows), and a fit to 200
rows the rest, for five seeds.  Fitted are: what the chip sustains of its arithmetic, its bandwidth
and that of its cache, the launch, and four about tiles (`Tiling`).

How rows were measured is read off the collector's source (ai-dynamo/aiconfigurator,
collector/vllm/collect_gemm.py): six linear layers in turn under a CUDA graph, all on one input.  So
the input is in the cache unless a layer fills it, and weights are where all six of them fit.  In
fp8 rows activations come in bf16, and a kernel before the product scales them, with a block for
each row; what a block takes was chosen with these rows in sight.  The product is one of CUTLASS,
whose tiles go by the number of rows and which does not split K (`Tiling.pick`).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import statistics
from dataclasses import replace
from pathlib import Path

from points import Point, write_points
from rows import table

import rooftrace as rt
from rooftrace.costmodels.kernels.engines import unit_of
from rooftrace.costmodels.kernels.knobs import Knobs, Tiling
from rooftrace.hardware.chip import Chip
from rooftrace.measured.fit.cases import Case, Errors, errors, predict
from rooftrace.measured.fit.fitting import fit

FITTED, SEEDS = 200, 5
CHIPS = {"a100": "a100-sxm-80", "h100": "h100-sxm", "h200": "h200-sxm", "l40s": "l40s"}
FORMATS = {"bfloat16": ("bf16", 2), "fp8": ("fp8", 1)}
WIDE = 2
"""Bytes of an element of activations and of results."""
LAYERS = 6
"""Layers that are measured in turn."""
BLOCK = 1e-6
"""Seconds of an SM for each row of activations that is scaled to fp8."""
CACHED = Knobs("products", 0.95, 0.85, 4.0, 2.6e-6, cache=3.0, tiling=Tiling(250.0, 2e-6, 1.0, 1.3))
"""Where fits of chips begin for which no numbers of products come along."""
FREE = (
    "compute", "memory", "launch",
    "tiling.prologue", "tiling.split", "tiling.feed", "tiling.busy",
)  # fmt: skip
OF_CACHE, OF_FP8 = ("cache",), ("cast.compute", "cast.memory")


def cases(path: Path, chip: Chip) -> dict[str, list[Case]]:
    """Measured products by number format, those of formats that this knows."""
    found: dict[str, list[Case]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["gemm_dtype"] in FORMATS:
                precision, size = FORMATS[row["gemm_dtype"]]
                sizes = int(row["m"]), int(row["n"]), int(row["k"])
                one = case_of(sizes, precision, size, float(row["latency"]) * 1e-3, chip)
                found.setdefault(precision, []).append(one)
    return found


def case_of(
    sizes: tuple[int, int, int], precision: str, size: int, seconds: float, chip: Chip
) -> Case:
    """A product, and in fp8 the kernel that scales its activations before."""
    assert chip.l2_capacity is not None and chip.sm_count is not None
    m, n, k = sizes
    room, scaled = chip.l2_capacity.value, size < WIDE
    a, b, c = size * m * k, size * n * k, WIDE * m * n
    given = WIDE * m * k if scaled else 0  # what is scaled
    warm = a if a + b + c + given <= room else 0
    if LAYERS * (b + c) + a + given <= room:
        warm = a + b + c
    rate, unit = chip.peak("matrix", precision), unit_of("matrix", precision)
    moved = a + b + c
    product = (moved, warm, moved, 0, 0, 2 * m * n * k, rate, m, n, k, 1, size, size, 1, unit, 0)
    kinds, rows = ["mm"], [(1, *product)]
    if scaled:
        both = given + a
        held = both if a + b + c + given <= room else 0
        blocks = m * BLOCK / chip.sm_count.value
        kinds.append("cast")
        rows.append((1, both, held, both, blocks, 0, 0, 1, *[0] * 9))
    return Case(name=f"{m}x{n}x{k}", table=table(chip, kinds, rows), seconds=seconds)


def typical(chip: Chip, precision: str) -> Knobs:
    """What comes along, with CUTLASS's tiles for fp8.

    On data-center GPUs as fast as a product alone runs: no limit on power holds it back.
    """
    knobs = Knobs.typical(chip, compiled=False, sustained=Knobs.generation(chip) is None)
    pick = "rows" if precision == "fp8" else "best"
    return replace(knobs, tiling=replace(knobs.tiling, pick=pick))


def begun(chip: Chip, precision: str) -> tuple[Knobs, tuple[str, ...]]:
    """Where a fit begins, and which numbers are free."""
    start, free = typical(chip, precision), FREE
    if Knobs.generation(chip) is None:
        start, free = (
            replace(CACHED, tiling=replace(CACHED.tiling, pick=start.tiling.pick)),
            (
                *FREE,
                *OF_CACHE,
            ),
        )
    return start, (*free, *OF_FP8) if precision == "fp8" else free


def score(chosen: list[Case], chip: Chip, precision: str, seed: int) -> tuple[Errors, list[Point]]:
    """The errors on rows that were not fitted, and these rows."""
    order = random.Random(seed).sample(range(len(chosen)), len(chosen))
    inside = [chosen[i] for i in order[:FITTED]]
    outside = [chosen[i] for i in order[FITTED:]]
    start, free = begun(chip, precision)
    knobs = fit(inside, start, free, check=False).knobs
    return against(outside, knobs), points_of(outside, knobs)


def against(chosen: list[Case], knobs: Knobs) -> Errors:
    """How far the knobs are off."""
    names, seconds = [case.name for case in chosen], [case.seconds for case in chosen]
    return errors(names, predict(chosen, knobs), seconds)


def points_of(chosen: list[Case], knobs: Knobs) -> list[Point]:
    """The cases with what the knobs predict."""
    return [
        Point(case.name, predicted, case.seconds, "")
        for case, predicted in zip(chosen, predict(chosen, knobs), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=Path, help="write predictions of one seed there, as CSV")
    given = parser.parse_args()
    files = sorted(given.folder.glob("gemm-*.csv.gz"))
    files += sorted(given.folder.glob("kernels/gemm-*.csv.gz"))
    points: list[Point] = []
    if not files:
        raise SystemExit("no gemm-*.csv.gz in that folder")
    print("| GPU | format | rows | no fit | bias | mean | median | p90 | bias |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for path in files:
        name = next((chip for key, chip in CHIPS.items() if key in path.name), None)
        if name is None:
            raise SystemExit(f"{path.name}: no chip that rooftrace has is in its name")
        chip = rt.load_chip(name)
        for precision, chosen in cases(path, chip).items():
            plain = against(chosen, typical(chip, precision))
            runs = [score(chosen, chip, precision, seed) for seed in range(SEEDS)]
            mean, median, p90, bias = (
                statistics.fmean(getattr(found, number) for found, _ in runs)
                for number in ("mean", "median", "p90", "bias")
            )
            points += [replace(point, group=f"{name} {precision}") for point in runs[0][1]]
            print(
                f"| {name} | {precision} | {len(chosen)} | {plain.mean:.1%} | {plain.bias:+.1%} "
                f"| {mean:.1%} | {median:.1%} | {p90:.1%} | {bias:+.1%} |"
            )
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
