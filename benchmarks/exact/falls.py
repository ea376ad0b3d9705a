"""Does any step take less for more?  Chains of growing sizes, on many chips.

Each row is one model in one phase.  Its form gives all numbers at sizes drawn at random, with one
of them (batch, or a length) growing step by step.  A fall is a time, an end of its interval or a
peak of memory that is smaller by more than 0.1 % than at some smaller size of its chain.  Exits 1
where there is one.

    python benchmarks/exact/falls.py --chains 20 --only llama-3.1-8b
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping

import numpy as np
from exact import Row, asked_of, rows_of

import rooftrace as rt
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import Form, evaluated

CHIPS = ("h100-sxm", "h200-sxm", "a100-sxm-80", "b200-sxm", "mi300x", "t4", "l4", "rtx-4090")
EXECUTIONS = ("eager", "compiled", "efficient", "serving")
COLUMNS = ("t_est", "t_low", "t_high", "t_bound", "peak_memory")
LEAST = 0.001
"""The share of a number from which on that it is smaller is a fall."""
EVERY = 128
"""So many of the smallest sizes stand in a chain, and as many pairs of the others."""

Sizes = Mapping[str, int]


def main() -> int:
    """Print a line for each row and size; 1 where there is a fall."""
    asked = asked_of(__doc__, "--chains", 20, "for each row and size")
    print("| model | phase | execution | larger | steps | falls | deepest | at |")
    print("|---|---|---|---|---:|---:|---:|---|", flush=True)
    total = 0
    for row in rows_of(asked):
        for line, falls in lines_of(row, asked.count, asked.seed):
            total += falls
            print(line, flush=True)
    return 1 if total else 0


def lines_of(row: Row, count: int, seed: int) -> Iterator[tuple[str, int]]:
    """A line for each size and execution of a row, with how many falls it tells of."""
    args, named = row.source()
    form = rt.tools.form(*args, over=dict(row.over), **named)
    draw = random.Random(f"{row.title} {row.phase} {seed}")
    chips = [chip for chip in map(rt.load_chip, CHIPS) if _computes(form, chip)]
    for name in row.over:
        chains = [_chain(draw, row.over, name) for _ in range(count)]
        for execution in EXECUTIONS:
            steps, falls, (deepest, where) = 0, 0, (0.0, "")
            for chain in chains:
                table = _table(form, chain, chips, execution)
                for column in COLUMNS:
                    by_chip = table[column].reshape(len(chips), len(chain))
                    change = by_chip[:, 1:] / np.maximum.accumulate(by_chip, axis=1)[:, :-1] - 1
                    steps, falls = steps + change.size, falls + int(np.sum(change < -LEAST))
                    chip, at = np.unravel_index(np.nanargmin(change), change.shape)
                    if change[chip, at] < min(deepest, -LEAST):
                        deepest = float(change[chip, at])
                        sizes = ", ".join(f"{key} {size:,}" for key, size in chain[at + 1].items())
                        where = f"{column}, {chips[chip].name}, {sizes}"
            yield (
                (
                    f"| {row.title} | {row.phase} | {execution} | {name} | {steps:,} | {falls} | "
                    f"{deepest:.1%} | {where} |"
                ),
                falls,
            )


def _chain(draw: random.Random, over: Mapping[str, range], name: str) -> list[Sizes]:
    """Sizes of which the named one grows: all small ones, and pairs of neighbours of the large."""
    sizes = {key: _drawn(draw, values) for key, values in over.items()}
    every = over[name]
    few = {*every[:EVERY], *(_drawn(draw, every[EVERY:]) for _ in range(EVERY) if every[EVERY:])}
    return [{**sizes, name: n} for n in sorted({*few, *(n + 1 for n in few)}) if n in every]


def _drawn(draw: random.Random, values: range) -> int:
    """A size, small ones as often as large ones."""
    return round(values[0] * (values[-1] / values[0]) ** draw.random())


def _table(
    form: Form, sizes: list[Sizes], chips: list[rt.types.Chip], execution: str
) -> Mapping[str, np.ndarray]:
    points = Points({name: np.array([one[name] for one in sizes]) for name in sizes[0]})
    return evaluated(form, points, chips, Conditions.of(execution))


def _computes(form: Form, chip: rt.types.Chip) -> bool:
    """Whether the chip has a rate for what the step computes in."""
    try:
        rt.estimate(form.example, chip=chip)
    except MissingPeakError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
