"""Files of kernels that others measured: their rows, chips, predictions, and lines of a table."""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from points import Point, parser_of, write_points
from rows import NO_ATTENTION, columns, table

import rooftrace as rt
from rooftrace.costmodels.kernels.attention_rows import attention_knobs, products_of
from rooftrace.costmodels.kernels.intervals import StepCell
from rooftrace.costmodels.kernels.knobs import Knobs, Share
from rooftrace.costmodels.kernels.numbers import numbers_of
from rooftrace.costmodels.kernels.seconds import KernelTable
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile.reading import available_chips, chips_called
from rooftrace.measured.fit.cases import Case, Errors, errors
from rooftrace.measured.fit.fitting import fit

HEAD = (
    "| GPU | library | phase | cache | n | mean | median | p90 | bias | one factor "
    "| two numbers |\n|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
)
LAUNCHES = {True: 4.25e-6, False: 2.3e-6}
"""Seconds of each launch of a row, on GPUs with HBM and on others: A100, H100, H200; L40S."""
STORES = Share(memory=0.7)
"""What kernels reach that store entries in a cache."""
TOKEN = {False: 1.6e-6, True: 2.9e-6}
"""Seconds of a block of such a kernel, which stores one token; True: where entries become fp8."""
WIDE = 2
"""Bytes of an element of query and output, and of new entries before they are stored."""
LARGE = 64 * 2**20
"""Bytes of a last cache that holds what most of the rows touch, over and over."""
CACHE = 3.8
"""Rate of such a cache over that of the memory, of L40S: 3.8 suits bf16 products that fit in it
best, 3.4 to 3.9 those of fp8, 3 to 5 attention.  Typical constants have none: what a cache holds is
not known over sizes that change the number of layers."""
FITTED = 200
"""Rows that two numbers are fitted to."""


@dataclass(frozen=True)
class Kernel:
    """A kernel: its class, its bytes, and its attention with the library that runs it."""

    kind: str
    bytes: float
    attention: AttentionSizes | None = None
    precision: str = "bf16"
    library: str = ""
    touched: float = 0.0  # bytes that no other kernel touches, where these are fewer


@dataclass(frozen=True)
class Measured:
    """One row: the kernels that ran, and how long they took."""

    name: str
    source: str  # the file
    phase: str
    cache: str  # number format of the cache
    library: str
    seconds: float
    kernels: tuple[Kernel, ...]


Reader = Callable[[dict[str, str], Chip, str], Measured]


def files(folder: Path, pattern: str) -> list[Path]:
    """Files in the folder, and in the one of kernels inside of it."""
    return sorted({*folder.glob(pattern), *(folder / "kernels").glob(pattern)})


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a file."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def chip_of(device: str) -> Chip | None:
    """The chip that a device's name stands for; None for none."""
    words = set(device.lower().replace("-", " ").split())
    called = chips_called(device) or tuple(
        sorted(
            (name for name in available_chips() if set(name.split("-")) <= words),
            key=len, reverse=True,
        )
    )  # fmt: skip
    return rt.load_chip(called[0]) if called else None


def is_wide(chip: Chip) -> bool:
    """Whether a chip is of a generation of data-center GPUs."""
    return Knobs.generation(chip) not in (None, "ada")


def typical(chip: Chip) -> Knobs:
    """The numbers that come along for a chip, as fast as kernels run alone.

    Cards whose limit on power slows each kernel alone have what they sustain.
    """
    knobs = Knobs.typical(chip, compiled=False, sustained=not is_wide(chip))
    large = chip.l2_capacity is not None and chip.l2_capacity.value >= LARGE
    shares = {**knobs.shares, "gather": STORES}
    launch = LAUNCHES[is_wide(chip)]
    return replace(knobs, launch=launch, cache=CACHE if large else 1.0, shares=shares)


def stored(chip: Chip, tokens: float, entries: float, size: float) -> Kernel:
    """The kernel that stores entries of this many elements for each token, from bf16.

    A block stores one token; its threads bound how many blocks an SM holds (vLLM, up to 512
    in reshape_and_cache_flash_kernel).  What they wait is told as bytes of that time.
    """
    knobs = typical(chip)
    units = 1.0 if chip.sm_count is None else chip.sm_count.value
    blocks = min(32.0, 2048 / min(512.0, max(64.0, entries / 2)))
    waits = tokens / units / blocks * TOKEN[size < WIDE]
    rate = chip.memory_bandwidth.value * knobs.memory * STORES.memory
    new = tokens * entries * WIDE
    return Kernel("gather", new + tokens * entries * size + waits * rate, touched=new)


def kept(size: float) -> float:
    """Share of what is touched over and over that a cache still has, by its size in caches.

    All of it where it fits, none of 1.1 caches: decode on L40S reaches 2 TB/s up to 1 and 0.73 from
    1.15 on.
    """
    return min(1.0, max(0.0, 11 - 10 * size))


class Measurements:
    """Rows of one chip, as one table of kernels."""

    def __init__(self, chip: Chip, rows: Sequence[Measured]) -> None:
        self.chip, self.rows, self.knobs = chip, rows, typical(chip)
        self.seconds = np.array([row.seconds for row in rows])
        self.owner = np.repeat(np.arange(len(rows)), [len(row.kernels) for row in rows])
        self.table = self._table(rows)
        self.predicted, self.limits = self._predicted()

    def _table(self, rows: Sequence[Measured]) -> KernelTable:
        held = 0.0 if self.chip.l2_capacity is None else self.chip.l2_capacity.value
        kinds, amounts, attention = [], [], []
        for row in rows:
            touched = sum(kernel.touched or kernel.bytes for kernel in row.kernels)
            warm = kept(touched / held) if held >= LARGE else 0.0
            for kernel in row.kernels:
                kinds.append(kernel.kind)
                moved = kernel.bytes
                amounts.append((1, moved, moved * warm, 0, 0, 0, 1, *[0] * 9))
                attention.append(self._columns(kernel))
        return table(self.chip, kinds, amounts, attention)

    def _columns(self, kernel: Kernel) -> tuple[float, ...]:
        sizes = kernel.attention
        if sizes is None:
            return NO_ATTENTION
        latent = sizes.kv_heads == 1 and 256 < sizes.value_width < sizes.width
        has = self.chip.has_peak("matrix", kernel.precision)
        product = products_of(
            "matrix", kernel.precision if has else "bf16", self.chip, kernel.library, latent
        )
        return columns(sizes, 1, *product)

    def _predicted(self) -> tuple[np.ndarray, list[str]]:
        made, launch = self.table.seconds(self.knobs, False), self.knobs.launch_on(self.chip)
        sums = {
            name: np.bincount(self.owner, getattr(made, name), len(self.rows))
            for name in ("device", "compute", "memory")
        }
        launches = np.bincount(self.owner, minlength=len(self.rows)) * launch
        three = np.stack([launches, sums["compute"], sums["memory"]])
        names = ("launch", "compute", "memory")
        return sums["device"] + launches, [names[i] for i in three.argmax(axis=0)]

    def cases(self, chosen: Sequence[int]) -> list[Case]:
        """Rows as cases of a fit."""
        return [
            Case(name=row.name, table=self._table([row]), seconds=row.seconds)
            for row in (self.rows[i] for i in chosen)
        ]

    def one_factor(self, chosen: np.ndarray) -> np.ndarray:
        """Predictions of these rows, times the factor that suits the other half of them best."""
        found = self.predicted[chosen].copy()
        ratio = np.log(self.seconds[chosen] / found)
        half = _dealt(len(chosen))
        for side in (False, True):
            found[half == side] *= np.exp(np.median(ratio[half != side]))
        return found

    def two_numbers(self, chosen: np.ndarray) -> np.ndarray:
        """Predictions of these rows with compute and memory fitted to some of the other half."""
        found, half = self.predicted[chosen].copy(), _dealt(len(chosen))
        for side in (False, True):
            others = random.Random(0).sample(
                list(chosen[half != side]), min(FITTED, sum(half != side))
            )
            knobs = fit(self.cases(others), self.knobs, check=False).knobs
            found[half == side] = self.seconds_by(knobs)[chosen[half == side]]
        return found

    def seconds_by(self, knobs: Knobs) -> np.ndarray:
        """Predictions of all rows with these numbers."""
        each = self.table.seconds(knobs, False).device + knobs.launch_on(self.chip)
        return np.bincount(self.owner, each, len(self.rows))


def _dealt(count: int) -> np.ndarray:
    """A half for each of so many rows."""
    order = np.array(random.Random(0).sample(range(count), count))
    return order % 2 == 1


def study(chip: Chip, rows: Sequence[Measured], work: str, fits: bool = True) -> list[Point]:
    """Print a line for each library, phase and cache of a chip's rows; its predictions."""
    all_rows, points = Measurements(chip, rows), []
    for library in sorted({row.library for row in rows}):
        chosen = np.array([i for i, row in enumerate(rows) if row.library == library])
        fit_well = fits and len(chosen) >= 2 * len(("compute", "memory"))
        one = all_rows.one_factor(chosen) if fit_well else all_rows.predicted[chosen]
        two = all_rows.two_numbers(chosen) if fit_well else one
        for phase, cache in sorted({(rows[i].phase, rows[i].cache) for i in chosen}):
            here = [
                n for n, i in enumerate(chosen) if (rows[i].phase, rows[i].cache) == (phase, cache)
            ]
            at = chosen[here]
            plain, scaled, fitted = (
                _errors(rows, all_rows.seconds, at, found)
                for found in (all_rows.predicted[at], one[here], two[here])
            )
            print(
                f"| {chip.name} | {library} | {phase} | {cache} | {plain.count} | {plain.mean:.1%} "
                f"| {plain.median:.1%} | {plain.p90:.1%} | {plain.bias:+.1%} | {scaled.mean:.1%} "
                f"| {fitted.mean:.1%} |"
            )
            points += [point(all_rows, i, work) for i in at]
    return points


def refit(all_rows: Measurements) -> None:
    """Print attention's numbers that suit one half of each library's rows; of those that it has."""
    chip, seconds = all_rows.chip, all_rows.seconds
    kernels = [next(k.library for k in row.kernels if k.attention) for row in all_rows.rows]
    for library in sorted(set(kernels)):
        chosen = np.array([i for i, name in enumerate(kernels) if name == library])
        half = _dealt(len(chosen))
        some = random.Random(0).sample(list(chosen[half]), min(2 * FITTED, sum(half)))
        usual = attention_knobs("usual", chip, library)
        start = replace(all_rows.knobs, attention=usual)
        free = [f"attention.{name}" for name, number in numbers_of(usual).items() if number]
        fitted = fit(all_rows.cases(some), start, free, check=False).knobs
        print(f"\n{chip.name} {library}, {sum(half)} rows")
        for name in free:
            old, new = (numbers_of(knobs)[name] for knobs in (start, fitted))
            print(f"  {name.removeprefix('attention.')}: {old:.3g}, refitted {new:.3g}")
        for phase in sorted({all_rows.rows[i].phase for i in chosen}):
            at = [i for i in chosen[~half] if all_rows.rows[i].phase == phase]
            old, new = (
                np.abs(all_rows.seconds_by(knobs)[at] / seconds[at] - 1).mean()
                for knobs in (start, fitted)
            )
            print(f"  {phase}, {len(at)} other rows: {old:.1%}, refitted {new:.1%}")


def _errors(
    rows: Sequence[Measured], seconds: np.ndarray, at: np.ndarray, found: np.ndarray
) -> Errors:
    return errors([rows[i].name for i in at], [float(s) for s in found], list(seconds[at]))


def asked(words: str | None) -> argparse.Namespace:
    """The arguments of a script of these words."""
    parser = parser_of(words)
    parser.add_argument("--no-fits", action="store_true", help="leave out the fitted columns")
    parser.add_argument(
        "--refit", action="store_true",
        help="print the numbers of each library's attention, refitted to one half of its rows,"
        "\nand the errors of the other before and after, in place of the table",
    )  # fmt: skip
    return parser.parse_args()


def tables(given: argparse.Namespace, pattern: str, measured: Reader, work: str) -> None:
    """Print a table of the files of a pattern, chip by chip, and write its points.

    given: folder, points, no_fits.  measured: reads one row, with its chip and source.
    """
    by_chip: dict[str, list[Measured]] = defaultdict(list)
    chips: dict[str, Chip | None] = {}
    for path in files(given.folder, pattern):
        for row in rows_of(path):
            chip = chips.setdefault(row["device"], chip_of(row["device"]))
            if chip is not None:
                source = row.get("file") or path.name.removesuffix(".csv.gz")
                by_chip[chip.name].append(measured(row, chip, source))
    if not chips:
        raise SystemExit(f"{given.folder}: there is no {pattern} in it or in its kernels/")
    if given.refit:
        for name, rows in sorted(by_chip.items()):
            refit(Measurements(rt.load_chip(name), rows))
        return
    print(HEAD)
    points: list[Point] = []
    for name, rows in sorted(by_chip.items()):
        points += study(rt.load_chip(name), rows, work, not given.no_fits)
    unknown = [device for device, chip in chips.items() if chip is None]
    if unknown:
        print(f"\nNot priced, as no chip file has them: {', '.join(unknown)}")
    if given.points:
        write_points(given.points, points)


def point(all_rows: Measurements, place: int, work: str) -> Point:
    """The prediction of a row without a fit, and the cell of intervals that it is in."""
    row, chip = all_rows.rows[place], all_rows.chip
    fp8 = any(kernel.attention and kernel.precision == "fp8" for kernel in row.kernels)
    return Point(
        row.name, float(all_rows.predicted[place]), row.seconds,
        f"{chip.name} {row.library} {row.phase}",
        source=row.source,
        generation=StepCell.generation_of(chip),
        precision="fp8" if fp8 else "half",
        phase="kernel", execution="graph", work=work, limit=all_rows.limits[place],
    )  # fmt: skip
