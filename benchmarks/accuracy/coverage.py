"""Intervals by where a step is: made from points of all scripts, and counted on sources left out.

    python benchmarks/accuracy/coverage.py POINTS [--write FILE]

POINTS is a folder of files that scripts write by --points (page.py --points makes them all); rows
without a source say nothing here.  Printed is a line for each group of steps: the errors without a
fit, how many are inside of their 90 % interval when nothing of their source made it and when it is
among the others (`source seen`), and the upper end over the lower one, the median.  --write makes
the table that comes along, rooftrace/costmodels/kernels/fitted/intervals.toml.

Cells are a hierarchy: steps that agree in the first fields of `ORDER`.  The mean of a cell is drawn
to that of the cells around it, as if these were `DRAWN` sources, and so is the scale: the 90th
percentile of how far a source is from what all others say of its cell.  Every source counts the
same in a cell, however many steps it has, but for what the host bounds (see `Behind`), and as far
as scales go for the first of its steps.  Ends are order statistics of left-out sources in scales.
`ORDER` is that of the orders of fields which is best for left-out sources, but for noise, by the
score of intervals (Gneiting and Raftery, "Strictly proper scoring rules", 2007).

After a fit of one factor, errors are those within a source: each family against the others.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from points import Point, read_points

from rooftrace.costmodels import kernels
from rooftrace.costmodels.kernels.intervals import (
    FITTED,
    LEVEL,
    LEVELS,
    NO_FIT,
    OF_SCALE,
    ONE_FACTOR,
    Behind,
    CellSteps,
    IntervalTable,
    Residuals,
    StepCell,
)
from rooftrace.hardware import load_host
from rooftrace.hardware.chipfile import toml_sections

ORDER = ("kind", "phase", "generation", "work", "precision", "execution", "limit")
DRAWN = 1.0
"""Sources that the mean of the cells around counts for."""
WIDTHS_DRAWN = 2.0
"""Sources that the scale of the cells around counts for."""
MOST = 200
"""Steps of a source in a cell that are kept: evenly spaced quantiles stand for more."""
SHARE = 0.9
"""The share of left-out steps that a scale holds."""
HOSTS = load_host("typical").spread.value
FEWEST = 6
"""Families of a source on which a fit is tried."""

SHIPPED = Path(kernels.__file__).parent / "fitted" / "intervals.toml"


def _is(**wanted: str | Sequence[str]) -> Callable[[Point], bool]:
    def holds(point: Point) -> bool:
        return all(
            getattr(point, name) in ((value,) if isinstance(value, str) else value)
            for name, value in wanted.items()
        )

    return holds


AMD, STEPS = ("cdna3", "cdna4"), ("forward", "decode", "training")
GROUPS: Mapping[str, Callable[[Point], bool]] = {
    "AMD": _is(generation=AMD),
    "host-bound steps": lambda point: behind(point).share > 0,
    "MoE": _is(work="moe", phase="kernel"),
    "MLA": _is(work="mla", phase="kernel"),
    "attention": _is(work="attention", phase="kernel"),
    "fp8 and fp4 products": _is(work="product", phase="kernel", precision=("fp8", "fp4", "int4")),
    "bf16 products": _is(work="product", phase="kernel"),
    "image steps": lambda point: point.source.startswith("timm "),
    "LLM training, H100": lambda point: point.phase == "training" and point.generation == "hopper",
    "LLM training, A100": lambda point: point.phase == "training" and point.generation == "ampere",
    "LLM inference": lambda point: (
        point.phase in ("forward", "decode")
        and point.source.startswith(("NeuSight", "serving", "NVIDIA/FasterTransformer"))
    ),
    "other published steps": lambda point: "/" in point.source,
    "CPU": _is(generation="cpu"),
    "other kernels": _is(phase="kernel"),
    "other steps": lambda point: True,
}
"""A step is in the first group that holds it."""


# -- order statistics ------------------------------------------------------------------------------

Array = np.ndarray


def quantile(values: Array, weights: Array, share: float) -> float:
    """A weighted quantile, between the middles of the two nearest values."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(np.interp(share * total[-1], total - weights[order] / 2, values[order]))


@dataclass(frozen=True)
class Held:
    """Errors of the steps of one source in one cell: some of them, and how many there are."""

    off: Array  # log(measured / predicted), at most MOST of them
    share: Array  # how much of each is of its kernels, and not of the host
    count: int

    @cached_property
    def mean(self) -> float:
        return float(np.average(self.off, weights=self.share))

    @cached_property
    def weight(self) -> float:
        """Of as many steps."""
        return float(self.share.mean() * self.count)


def _thinned(points: Sequence[Point]) -> Held:
    chosen = sorted(points, key=error)
    if len(chosen) > MOST:
        chosen = [chosen[int((n + 0.5) * len(chosen) / MOST)] for n in range(MOST)]
    share = [max(1e-6, behind(point).before()) for point in chosen]
    return Held(np.array([error(point) for point in chosen]), np.array(share), len(points))


# -- the hierarchy ---------------------------------------------------------------------------------

Path_ = tuple[str, ...]
Key = tuple[str, Path_]


class Hierarchy:
    """Errors by source and cell, and what they say of a cell without one of the sources."""

    def __init__(self, points: Iterable[Point], order: Sequence[str] = ORDER) -> None:
        self.order = tuple(order)
        here: dict[Key, list[Point]] = defaultdict(list)
        for point in points:
            here[point.source, self.path(point.cell)].append(point)
        self.held = {key: _thinned(values) for key, values in here.items()}
        self.inside: dict[Path_, dict[str, list[Path_]]] = defaultdict(lambda: defaultdict(list))
        for source, path in self.held:
            for depth in range(len(path) + 1):
                self.inside[path[:depth]][source].append(path)
        self._means = {
            node: {source: self._mean_of(source, paths) for source, paths in sources.items()}
            for node, sources in self.inside.items()
        }
        self._scales: dict[tuple[Path_, str | None], tuple[float, float]] = {}
        self.left = {
            (source, path): held.off - self.mean(path, source)[0]
            for (source, path), held in self.held.items()
        }

    def path(self, cell: StepCell) -> Path_:
        """The values of a cell in order."""
        return cell.values(self.order)

    def _mean_of(self, source: str, paths: Sequence[Path_]) -> tuple[float, float]:
        """The mean of a source, and how much of its steps is of their kernels."""
        held = [self.held[source, path] for path in paths]
        weights = [h.weight for h in held]
        mean = float(np.average([h.mean for h in held], weights=weights))
        return mean, sum(weights) / sum(h.count for h in held)

    @property
    def sources(self) -> list[str]:
        return sorted({source for source, _ in self.held})

    def mean(self, path: Path_, without: str | None = None) -> tuple[float, int]:
        """The mean of a cell, and how many of its fields some other source shares."""
        mean, known = 0.0, 0
        for depth in range(len(path) + 1):
            means = self._means.get(path[:depth], {})
            others = [value for source, value in means.items() if source != without]
            if not others:
                break
            total = sum(off * share for off, share in others) + DRAWN * mean
            mean = total / (sum(share for _, share in others) + DRAWN)
            known = depth
        return mean, known

    def scale(self, path: Path_, without: str | None = None) -> float:
        """The scale of a cell, as deep as sources share it."""
        scale = 0.0
        for depth in range(len(path) + 1):
            alone, sources = self._scale_of(path[:depth], without)
            drawn = WIDTHS_DRAWN if depth else 0.0
            if sources + drawn:
                scale = (sources * math.log(alone) + drawn * scale) / (sources + drawn)
        return math.exp(scale)

    def _scale_of(self, node: Path_, without: str | None) -> tuple[float, float]:
        """The scale of a node by itself, and the sources that say it.

        Of n steps of a source n - 1 say how they scatter: one step says nothing.
        """
        sources = self.inside.get(node, {})
        key = (node, without if without in sources else None)
        if key not in self._scales:
            values, weights, known = [], [], 0.0
            for source, paths in sources.items():
                if source == without:
                    continue
                total = sum(self.held[source, path].count for path in paths)
                known += self._means[node][source][1] * (1 - 1 / total)
                for path in paths:
                    held = self.held[source, path]
                    values.append(np.abs(self.left[source, path]))
                    weights.append(held.share * held.count / total / len(held.share))
            found = 1.0
            if values:
                found = quantile(np.concatenate(values), np.concatenate(weights), SHARE)
            self._scales[key] = max(found, 1e-3), known
        return self._scales[key]

    @cached_property
    def scatter(self) -> tuple[float, ...]:
        """How far means of cells are from those around them, by depth: root mean squares.

        Of GPUs: CPUs have few cells, and each lies far from the others.
        """
        squares: dict[int, list[float]] = {depth: [0.0] for depth in range(len(self.order))}
        children: dict[Path_, list[Path_]] = defaultdict(list)
        for node in self._means:
            if node:
                children[node[:-1]].append(node)
        for around, nodes in children.items():
            if len(nodes) > 1 and "cpu" not in around:
                middle = self.mean(around)[0]
                squares[len(around)] += [(self.mean(node)[0] - middle) ** 2 for node in nodes]
        return tuple(
            math.sqrt(sum(values) / max(1, len(values) - 1)) for values in squares.values()
        )

    def wide(self, path: Path_, known: int, without: str | None = None) -> float:
        """The scale at a cell of which some fields are not measured."""
        scale = self.scale(path, without)
        return math.hypot(scale, OF_SCALE * max(self.scatter[known:], default=0.0))

    def ends(self) -> tuple[list[float], list[float]]:
        """Ends of each level in scales: order statistics of left-out sources of equal weight.

        Without the usual correction for how many there are: each was predicted from fewer sources
        than the table has, which makes its errors larger already.
        """
        values, weights = [], []
        for source in self.sources:
            keys = [key for key in self.held if key[0] == source]
            total = sum(self.held[key].count for key in keys)
            for key in keys:
                scale = self.wide(key[1], self.mean(key[1], source)[1], source)
                values.append(self.left[key] / scale)
                held = self.held[key]
                weights.append(held.share * held.count / total / len(held.share))
        off, share = np.concatenate(values), np.concatenate(weights)
        low, high = [], []
        for level in LEVELS:
            side = (1 + level) / 2
            low.append(min(0.0, quantile(off, share, 1 - side)))
            high.append(max(0.0, quantile(off, share, side)))
        return low, high

    def table(self, uses: Mapping[str, Residuals]) -> IntervalTable:
        """All of it."""
        low, high = self.ends()
        cells = {}
        for node in sorted(self.inside):
            sources = self.inside[node]
            steps = sum(self.held[s, path].count for s, paths in sources.items() for path in paths)
            cells[", ".join(node)] = CellSteps(
                round(self.mean(node)[0], 4), round(self.scale(node), 4), len(sources), steps
            )
        return IntervalTable(
            title=f"{sum(h.count for h in self.held.values()):,} steps and kernels of "
            f"{len(self.sources)} sources, without a fit",
            order=self.order,
            levels=LEVELS,
            low=tuple(round(end, 4) for end in low),
            high=tuple(round(end, 4) for end in high),
            scatter=tuple(round(value, 4) for value in self.scatter),
            cells=cells,
            uses=uses,
        )


def error(point: Point) -> float:
    return math.log(point.measured / point.predicted)


def behind(point: Point) -> Behind:
    """Where the host of a point is, which nobody measured; on a CPU nowhere."""
    return Behind(point.behind, HOSTS) if point.cell.kind != "cpu" else Behind()


# -- after a fit -----------------------------------------------------------------------------------


def family(point: Point) -> str:
    """Steps that are left out of a fit together: the first word of a label."""
    return re.split(r"[ _]", point.label)[0]


def one_factor(points: Sequence[Point]) -> list[float]:
    """The errors of the steps of a source after a fit of one factor to all other families."""
    off, families = [error(p) for p in points], [family(p) for p in points]
    sums: dict[str, list[float]] = defaultdict(list)
    for value, name in zip(off, families, strict=True):
        sums[name].append(value)
    total, count = sum(off), len(off)
    return [
        value - (total - sum(sums[name])) / (count - len(sums[name]))
        for value, name in zip(off, families, strict=True)
    ]


def by_source(points: Iterable[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        found[point.source].append(point)
    return found


def fitted_steps(points: Sequence[Point]) -> Residuals | None:
    """Residuals after a fit of one factor, of the steps of sources with enough families."""
    values, groups, spreads = [], [], []
    for source, chosen in by_source(points).items():
        steps = [p for p in chosen if p.phase != "kernel"]
        if len({family(p) for p in steps}) < FEWEST:
            continue
        left = one_factor(steps)
        spread = 1.4826 * statistics.median(map(abs, left))
        values += [value / spread for value in left]
        groups += [f"{source}: {family(p)}" for p in steps]
        spreads.append(spread)
    if not values:
        return None
    spread = math.sqrt(statistics.fmean(each**2 for each in spreads))
    made = Residuals.of_steps(
        values, groups, of=f"steps of {len(spreads)} sources, one factor each"
    )
    return replace(made, spread=float(f"{spread:.4g}"))


def uses_of(points: Sequence[Point], hierarchy: Hierarchy) -> dict[str, Residuals]:
    """Residuals by use, wherever steps are."""
    low, high = hierarchy.ends()
    found = {
        NO_FIT: Residuals(
            levels=LEVELS,
            low=tuple(float(f"{OF_SCALE * end:.4g}") for end in low),
            high=tuple(float(f"{OF_SCALE * end:.4g}") for end in high),
            spread=float(f"{hierarchy.scale(()) / OF_SCALE:.4g}"),
            count=sum(h.count for h in hierarchy.held.values()),
            groups=len(hierarchy.sources),
            of="steps and kernels of all sources",
        )
    }
    after = fitted_steps(points)
    if after is not None:
        found |= {ONE_FACTOR: after, FITTED: after}
    return found


# -- coverage --------------------------------------------------------------------------------------


class LeftOut:
    """Intervals of points by a hierarchy of all, without their sources or with them."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.hierarchy = Hierarchy(points)
        low, high = self.hierarchy.ends()
        self._kept: dict[tuple[Path_, str | None], tuple[float, float]] = {}
        self.ends = low[LEVELS.index(LEVEL)], high[LEVELS.index(LEVEL)]

    def interval(self, point: Point, without: str | None) -> tuple[float, float]:
        """The ends of log(measured / predicted) where a point is."""
        path = self.hierarchy.path(point.cell)
        if (path, without) not in self._kept:
            mean, known = self.hierarchy.mean(path, without)
            self._kept[path, without] = mean, self.hierarchy.wide(path, known, without)
        mean, scale = behind(point).later(*self._kept[path, without])
        low, high = self.ends
        return min(0.0, mean + low * scale), max(0.0, mean + high * scale)

    def line(self, name: str, points: Sequence[Point]) -> str:
        """A line of a table with `HEAD`."""
        off = np.array([point.predicted / point.measured - 1 for point in points])
        ends = [self.interval(point, point.source) for point in points]
        seen = [self.interval(point, None) for point in points]
        errors = [error(point) for point in points]
        inside, inside_seen = (
            statistics.fmean(low <= e <= high for (low, high), e in zip(by, errors, strict=True))
            for by in (ends, seen)
        )
        ratio = statistics.median(math.exp(high - low) for low, high in ends)
        size = np.abs(off)
        return (
            f"| {name} | {len(points):,} | {len({p.source for p in points})} | {size.mean():.1%} "
            f"| {np.median(size):.1%} | {np.quantile(size, 0.9):.1%} | {off.mean():+.1%} "
            f"| {inside:.0%} | {inside_seen:.0%} | {ratio:.2f} |"
        )

    def table(self, points: Sequence[Point], group: Callable[[Point], str]) -> str:
        """A line for each group of these points, in their order, and for all."""
        by_group: dict[str, list[Point]] = defaultdict(list)
        for point in points:
            by_group[group(point)].append(point)
        names = [name for name in GROUPS if name in by_group]
        names += [name for name in by_group if name not in GROUPS]
        lines = [self.line(name, by_group[name]) for name in names]
        return "\n".join([HEAD, *lines, *([self.line("all", points)] if len(names) > 1 else [])])


HEAD = (
    "| no fit | n | sources | mean | median | p90 | bias | inside | source seen | high/low |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def group_of(point: Point) -> str:
    """The group of `GROUPS` that a point is in."""
    return next(name for name, holds in GROUPS.items() if holds(point))


# -- the file --------------------------------------------------------------------------------------


def text_of(table: IntervalTable) -> str:
    """The TOML text of a table."""
    head = {name: getattr(table, name) for name in
            ("title", "order", "levels", "low", "high", "scatter")}  # fmt: skip
    head = {name: list(v) if isinstance(v, tuple) else v for name, v in head.items()}
    cells = {
        name: {f: getattr(steps, f) for f in ("mean", "scale", "sources", "steps")}
        for name, steps in table.cells.items()
    }
    sections = [("", head)]
    sections += [(f'[uses."{name}"]', ends.to_dict()) for name, ends in table.uses.items()]
    return toml_sections([*sections, ("[cells]", cells)])


def sourced(folder: Path) -> list[Point]:
    """The points of all files in a folder that say where they are from."""
    return [
        point
        for path in sorted(folder.glob("*.csv"))
        for point in read_points(path)
        if point.source and point.predicted > 0 and point.measured > 0
    ]


def write(points: Sequence[Point], path: Path) -> None:
    """Write the table of these points."""
    hierarchy = Hierarchy(points)
    text = text_of(hierarchy.table(uses_of(points, hierarchy)))
    path.write_text(f"# Written by benchmarks/accuracy/coverage.py, never by hand.\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("points", type=Path, help="a folder of CSV files")
    parser.add_argument("--write", type=Path, help="write the table there, as TOML")
    given = parser.parse_args()
    points = sourced(given.points)
    if not points:
        raise SystemExit(f"{given.points}: no points with a source in *.csv")
    print(LeftOut(points).table(points, group_of))
    if given.write:
        write(points, given.write)


if __name__ == "__main__":
    main()
