"""Matrix products that others measured, predicted by tiles and waves.

    python benchmarks/accuracy/gemm.py FOLDER        # every gemm-*.csv.gz in it

Rows are m, n, k, a number format and a latency in ms.  For each GPU and format 200 rows are fitted
to and the rest predicted, for five seeds.  Fitted are seven numbers: what the chip sustains of its
arithmetic and of its bandwidth, the launch, and four about tiles (`Tiling`).  In fp8 rows the
activations come in bf16, and a kernel before the product finds the largest of each row and scales
it: it reads them twice and writes them once.
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

import rooftrace as rt
from rooftrace.costmodels.kernels.tables import table
from rooftrace.costmodels.knobs.knobs import Knobs, Tiling
from rooftrace.hardware.chip import Chip
from rooftrace.measured.fit.cases import Case, Errors, errors, predict
from rooftrace.measured.fit.fitting import fit

FITTED, SEEDS = 200, 5
CHIPS = {"a100": "a100-sxm-80", "h100": "h100-sxm", "h200": "h200-sxm"}
FORMATS = {"bfloat16": ("bf16", 2), "fp8": ("fp8", 1)}
WIDE = 2
"""Bytes of an element of activations and of results."""
START = Knobs("products", 0.95, 0.85, 4.0, 2.6e-6, tiling=Tiling(250.0, 2e-6, 1.0, 1.3))
FREE = (
    "compute", "memory", "launch",
    "tiling.prologue", "tiling.split", "tiling.feed", "tiling.busy",
)  # fmt: skip


def cases(path: Path, chip: Chip) -> dict[str, list[Case]]:
    """Measured products by number format, those of formats that this knows."""
    found: dict[str, list[Case]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["gemm_dtype"] not in FORMATS:
                continue
            precision, size = FORMATS[row["gemm_dtype"]]
            m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
            moved = size * (m * k + n * k) + WIDE * m * n
            rate = chip.peak("matrix", precision)
            kinds = ["mm"]
            rows = [(1, moved, 0, moved, 0, 0, 2 * m * n * k, rate, m, n, k, 1, size, size, 1)]
            if size < WIDE:
                before = (2 * WIDE + size) * m * k
                kinds.append("cast")
                rows.append((1, before, 0, before, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0))
            one = Case(
                name=f"{m}x{n}x{k}",
                table=table(chip, kinds, rows),
                seconds=float(row["latency"]) * 1e-3,
            )
            found.setdefault(precision, []).append(one)
    return found


def score(chosen: list[Case], seed: int) -> tuple[Errors, list[Point]]:
    """The errors on rows that were not fitted, and these rows."""
    order = random.Random(seed).sample(range(len(chosen)), len(chosen))
    inside = [chosen[i] for i in order[:FITTED]]
    outside = [chosen[i] for i in order[FITTED:]]
    knobs = fit(inside, START, FREE, check=False).knobs
    names, seconds = [case.name for case in outside], [case.seconds for case in outside]
    predicted = predict(outside, knobs)
    return errors(names, predicted, seconds), list(
        map(Point, names, predicted, seconds, [""] * len(outside))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=Path, help="write predictions of one seed there, as CSV")
    given = parser.parse_args()
    files = sorted(given.folder.glob("gemm-*.csv.gz"))
    points: list[Point] = []
    if not files:
        raise SystemExit("no gemm-*.csv.gz in that folder")
    print("| GPU | format | rows | mean | median | p90 |\n|---|---|---:|---:|---:|---:|")
    for path in files:
        name = next((chip for key, chip in CHIPS.items() if key in path.name), None)
        if name is None:
            raise SystemExit(f"{path.name}: no chip that rooftrace has is in its name")
        for precision, chosen in cases(path, rt.load_chip(name)).items():
            runs = [score(chosen, seed) for seed in range(SEEDS)]
            mean, median, p90 = (
                statistics.fmean(getattr(found, number) for found, _ in runs)
                for number in ("mean", "median", "p90")
            )
            points += [replace(point, group=f"{name} {precision}") for point in runs[0][1]]
            print(
                f"| {name} | {precision} | {len(chosen)} | {mean:.1%} | {median:.1%} | {p90:.1%} |"
            )
    if given.points:
        write_points(given.points, points)


if __name__ == "__main__":
    main()
