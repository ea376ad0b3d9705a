"""Intervals by where a step is: made from points of all scripts, and counted on sources left out.

    python benchmarks/accuracy/coverage.py POINTS [--write FILE]

POINTS is a folder of files that scripts write by --points (page.py --points makes them all); rows
without a source say nothing here.  Printed is a line for each group of steps: the errors without a
fit, how many are inside of their 90 % interval when nothing of their source made it and when it is
among the others (`source seen`), and the upper end over the lower one, the median.  --few counts
the same where one to five sources of a kind of step, chosen at random, made the interval.  --write
makes the table that comes along, rooftrace/costmodels/kernels/fitted/intervals.toml.

Cells are a hierarchy: steps that agree in the first fields of `ORDER`.  The mean of a cell is drawn
to that of the cells around it, as if these were `DRAWN` sources, and so is the scale: the 90th
percentile of how far a source is from what all others say of its cell.  Steps of a source are
alike, so n of them count as n / (n + `HALF`) of a source (random effects: DerSimonian and Laird,
"Meta-analysis in clinical trials", 1986); those that may wait for a host count less (`Behind`), and
where their kernels were timed alone these count instead; of n steps n - 1 say how they scatter.
Ends are order statistics of left-out sources in scales.

Hosts have a scale of their own, by the steps that wait for them: how far one is from the others of
its source.  How far hosts lie apart is a fact of each host (`spread`).

After a fit of one factor, errors are those within a source: each family against the others.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
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

ORDER = ("kind", "phase", "work", "limit", "precision", "execution", "generation")
"""After the kind of chip, the field first across which sources are most apart in how they scatter.

Standard deviations of that logarithm are 0.60 across phases, 0.44 works, 0.38 limits, 0.36 each
precisions and executions, 0.34 generations, and 0.31 in one cell (printed; `Hierarchy.apart`).
"""
HALF = 5.0
"""Steps that say half of what a source can: their variance over that between sources of a cell.

That is 0.106^2 / 0.046^2 of means; of n steps the logarithm varies by 0.6 / n: 0.6 / 0.31^2.
"""
DRAWN = 1.0
"""Sources that the mean of the cells around counts for: their variance over that between cells.

0.046^2 in a cell, twice that across a field, in the mean of fields.
"""
WIDTHS_DRAWN = 2.0
"""Sources that the scale of the cells around counts for: likewise, of fields after the phase."""
MOST = 200
"""Steps of a source in a cell that are kept: evenly spaced quantiles stand for more."""
SHARE = 0.9
"""The share of left-out steps that a scale holds."""
HOSTS = load_host("typical").spread.value
"""How far host times are apart where no step that waits was measured: as hosts are."""
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

    @cached_property
    def scatter(self) -> float:
        """The logarithm of the standard deviation of steps, by their mean distance."""
        size = np.average(np.abs(self.off - self.mean), weights=self.share)
        size *= math.sqrt(math.pi / 2 * self.weight / (self.weight - 1))
        return math.log(max(float(size), 5e-3))

    @cached_property
    def weights(self) -> Array:
        """That of each of those kept."""
        return self.share * self.count / len(self.share)


def part(steps: float) -> float:
    """How much of a source so many of its steps are."""
    return max(0.0, steps) / (max(0.0, steps) + HALF)


def _thinned(points: Sequence[Point], hosts: float) -> Held:
    chosen = sorted(points, key=error)
    if len(chosen) > MOST:
        chosen = [chosen[int((n + 0.5) * len(chosen) / MOST)] for n in range(MOST)]
    share = [max(1e-6, behind(point).before(hosts)) for point in chosen]
    return Held(np.array([error(point) for point in chosen]), np.array(share), len(points))


def within_runs(late: Mapping[str, Array], without: str | None = None) -> float:
    """The scale of errors of hosts, of steps that wait for them by source: each from the others."""
    held = [off for source, off in late.items() if source != without and len(off) > 1]
    if not held:
        return OF_SCALE * HOSTS
    values = [np.abs(off - off.mean()) * len(off) / (len(off) - 1) for off in held]
    weights = [np.full(len(off), part(len(off) - 1) / len(off)) for off in held]
    return quantile(np.concatenate(values), np.concatenate(weights), SHARE)


# -- the hierarchy ---------------------------------------------------------------------------------

Path_ = tuple[str, ...]
Key = tuple[str, Path_]


class Hierarchy:
    """Errors by source and cell, and what they say of a cell without one of the sources."""

    def __init__(self, points: Iterable[Point], order: Sequence[str] = ORDER) -> None:
        self.order = tuple(order)
        here: dict[Key, list[Point]] = defaultdict(list)
        late: dict[str, list[float]] = defaultdict(list)
        for point in points:
            if not point.kernels:  # else these are a point of their own
                here[point.source, self.path(point.cell)].append(point)
            if behind(point).share > 0:
                late[point.source].append(error(point))
        self.late = {source: np.array(off) for source, off in late.items()}
        hosts = within_runs(self.late)
        self.held = {key: _thinned(values, hosts) for key, values in here.items()}
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
        """The mean of a source, and the steps that say it."""
        held = [self.held[source, path] for path in paths]
        weights = [h.weight for h in held]
        return float(np.average([h.mean for h in held], weights=weights)), sum(weights)

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
            total = sum(off * part(steps) for off, steps in others) + DRAWN * mean
            mean = total / (sum(part(steps) for _, steps in others) + DRAWN)
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
        """The scale of a node by itself, and the sources that say it."""
        sources = self.inside.get(node, {})
        key = (node, without if without in sources else None)
        if key not in self._scales:
            values, weights, known = [], [], 0.0
            for source, paths in sources.items():
                if source == without:
                    continue
                steps = self._means[node][source][1]
                known += part(steps - 1)
                for path in paths:
                    values.append(np.abs(self.left[source, path]))
                    weights.append(self.held[source, path].weights * part(steps - 1) / steps)
            found = 1.0
            if known:
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

    def apart(self, of: str) -> dict[str, float]:
        """How far sources are apart in two cells that differ in this one field; "" in none.

        of: the attribute of `Held`.  Standard deviations of one, on GPUs, which outliers hardly
        move (Cressie and Hawkins, "Robust estimation of the variogram", 1980).
        """
        roots: dict[str, list[tuple[float, float]]] = defaultdict(list)
        lost = 1 if of == "scatter" else 0
        known = [(key, held) for key, held in self.held.items() if held.weight > lost + 0.5]
        for ((source, path), one), ((other, there), two) in combinations(known, 2):
            differs = [n for n, a, b in zip(self.order, path, there, strict=True) if a != b]
            if source != other and len(differs) < 2 and "cpu" not in path + there:
                weight = 1 / sum(1 / part(held.weight - lost) for held in (one, two))
                root = abs(getattr(one, of) - getattr(two, of)) ** 0.5
                roots[differs[0] if differs else ""].append((root, weight))
        return {
            name: (sum(r * w for r, w in pairs) / sum(w for _, w in pairs)) ** 2
            / (2 * 0.457) ** 0.5
            for name, pairs in roots.items()
        }

    def wide(self, path: Path_, known: int, without: str | None = None) -> float:
        """The scale at a cell of which some fields are not measured."""
        scale = self.scale(path, without)
        return math.hypot(scale, OF_SCALE * max(self.scatter[known:], default=0.0))

    def ends(self) -> tuple[list[float], list[float]]:
        """Ends of each level in scales: order statistics of left-out sources.

        Without the usual correction for how many there are: each was predicted from fewer sources
        than the table has, which makes its errors larger already.
        """
        values, weights = [], []
        for source in self.sources:
            keys = [key for key in self.held if key[0] == source]
            steps = sum(self.held[key].weight for key in keys)
            for key in keys:
                scale = self.wide(key[1], self.mean(key[1], source)[1], source)
                values.append(self.left[key] / scale)
                weights.append(self.held[key].weights * part(steps) / steps)
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
            hosts=round(within_runs(self.late), 4),
            cells=cells,
            uses=uses,
        )


def error(point: Point) -> float:
    return math.log(point.measured / point.predicted)


def behind(point: Point) -> Behind:
    """Where the host of a point is; on a CPU nowhere."""
    return Behind(point.behind, point.hosts) if point.cell.kind != "cpu" else Behind()


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
    """Residuals after a fit of one factor, of the steps of sources with enough families.

    Those that wait for their host are left out.
    """
    values, groups, spreads = [], [], []
    for source, chosen in by_source(points).items():
        steps = [p for p in chosen if p.phase != "kernel" and behind(p).share <= 0]
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
        self._hosts: dict[str | None, float] = {}
        self.ends = low[LEVELS.index(LEVEL)], high[LEVELS.index(LEVEL)]

    def interval(self, point: Point, without: str | None) -> tuple[float, float]:
        """The ends of log(measured / predicted) where a point is."""
        path = self.hierarchy.path(point.cell)
        if (path, without) not in self._kept:
            mean, known = self.hierarchy.mean(path, without)
            self._kept[path, without] = mean, self.hierarchy.wide(path, known, without)
        if without not in self._hosts:
            self._hosts[without] = within_runs(self.hierarchy.late, without)
        mean, scale = behind(point).later(*self._kept[path, without], self._hosts[without])
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
            f"| {name} | {len(points):,} | {effective(points)} | {size.mean():.1%} "
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
    "| no fit | n | sources (effective) | mean | median | p90 | bias | inside | source seen "
    "| high/low |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def effective(points: Sequence[Point]) -> str:
    """How many sources points have, and how many of equal size would say as much of them."""
    sizes = [len(chosen) for chosen in by_source(points).values()]
    return f"{len(sizes)} ({len(points) ** 2 / sum(size**2 for size in sizes):.1f})"


def kind_of(point: Point) -> str:
    """Steps that a source may measure alone: kernels of a work, or those of a phase."""
    return f"{point.work} kernels" if point.phase == "kernel" else f"{point.phase} steps"


def few(points: Sequence[Point], draws: int = 3) -> str:
    """How many steps of a source are inside, if this many others of their kind were measured."""
    draw, inside = random.Random(0), defaultdict(list)
    gpus = [point for point in points if point.cell.kind == "gpu"]
    thin = [p for _, held in by_source(gpus).items() for p in held[:: -(-len(held) // MOST)]]
    for kind in sorted({kind_of(point) for point in thin}):
        here = by_source(point for point in thin if kind_of(point) == kind)
        for source, left in here.items():
            others = sorted(here.keys() - {source})
            for count in (1, 2, 3, 5):
                for _ in range(draws if len(others) >= count else 0):
                    kept = {*draw.sample(others, count)}
                    by = LeftOut([p for p in thin if p.source != source
                                  and (kind_of(p) != kind or p.source in kept)])  # fmt: skip
                    held = [low <= error(p) <= high for p in left
                            for low, high in [by.interval(p, None)]]  # fmt: skip
                    inside[kind, count].append((statistics.fmean(held), part(len(left))))
    return "\n".join(
        f"{kind} of {count} sources: {sum(i * w for i, w in held) / sum(w for _, w in held):.0%} "
        f"of {len(held)} inside"
        for (kind, count), held in inside.items()
    )


def group_of(point: Point) -> str:
    """The group of `GROUPS` that a point is in."""
    return next(name for name, holds in GROUPS.items() if holds(point))


# -- the file --------------------------------------------------------------------------------------


def text_of(table: IntervalTable) -> str:
    """The TOML text of a table."""
    head = {name: getattr(table, name) for name in
            ("title", "order", "levels", "low", "high", "scatter", "hosts")}  # fmt: skip
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
    parser.add_argument("--few", action="store_true", help="count on few sources of a kind, too")
    given = parser.parse_args()
    points = sourced(given.points)
    if not points:
        raise SystemExit(f"{given.points}: no points with a source in *.csv")
    by = LeftOut(points)
    print(by.table(points, group_of))
    for of in ("mean", "scatter"):
        found = sorted(by.hierarchy.apart(of).items(), key=lambda item: -item[1])
        print(f"\n{of} of sources apart:", *(f"{n or 'in one cell'} {v:.3f}" for n, v in found))
    if given.few:
        print(f"\n{few(points)}")
    if given.write:
        write(points, given.write)


if __name__ == "__main__":
    main()
