"""Do intervals hold what they say?  Nominal 90 % ones are counted on models that were left out.

    python benchmarks/accuracy/coverage.py FOLDER [--every N] [--cache TRACES] [--cases FILE]
    python benchmarks/accuracy/coverage.py FOLDER --other "A100=points.csv" ... --write

FOLDER has files of timm (see timm_steps.py); our own runs are in benchmarks/measurements/.
Three uses:
  no fit       ends of intervals come from the data sets of other GPUs: none of this GPU is seen
  one factor   families of models are dealt into two halves; knobs and ends come from one half, the
               other is counted, both ways
  fitted       the same with two numbers, compute and memory
--other NAME=FILE.csv: predictions without a fit that another script wrote by --points (the steps of
language models): a data set of its own, for the use without a fit.  --cases FILE keeps the traced
and priced steps from one run to the next.  --write prints, in place of the tables, the tables
[residuals] of the typical knob files, from all data sets.
"""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import own
import timm_steps
from points import read_points

from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.kernels.knobs import (
    FITTED,
    LEVEL,
    NO_FIT,
    ONE_FACTOR,
    USES,
    Knobs,
    Residuals,
    dump_knobs,
)
from rooftrace.measured.fit.calibrating import usual_start
from rooftrace.measured.fit.cases import Case, predict
from rooftrace.measured.fit.choosing import ONE
from rooftrace.measured.fit.fitting import FEW, Starts, deviations_of, fitted, group_of

CHIP_WIDTH, CHIP_WEIGHT = 0.2, 4.0
"""How far the pace of GPUs scatters around the typical one (the prior of a fit), and how many data
sets that counts for beside those that are here."""
_GRID = [NormalDist().inv_cdf((i + 0.5) / 21) for i in range(21)]


@dataclass(frozen=True)
class DataSet:
    """Steps of one device and one way to run.

    off: log(measured / predicted) by the typical knobs; kind: gpu or cpu; cases: () where only
    predictions are known.
    """

    name: str
    device: str
    kind: str
    groups: tuple[str, ...]
    off: tuple[float, ...]
    cases: tuple[Case, ...] = ()
    start: Knobs | None = None

    @staticmethod
    def of_cases(name: str, device: str, execution: str, cases: Sequence[Case]) -> DataSet:
        chip = cases[0].table.chip
        start = usual_start(chip, execution_model(execution))
        pairs = zip(cases, predict(cases, start), strict=True)
        off = tuple(math.log(case.seconds / seconds) for case, seconds in pairs)
        groups = tuple(group_of(case) for case in cases)
        return DataSet(name, device, chip.kind, groups, off, tuple(cases), start)


# -- data ------------------------------------------------------------------------------------------


def timm_sets(
    folder: Path, cache: Path, every: int, kept: dict[tuple[str, str], Any], tell: Callable
) -> Iterator[DataSet]:
    for path in sorted(folder.glob("timm-*.csv")):
        how = timm_steps.setting(path)
        if how is None:
            continue
        cases = []
        for row in timm_steps.read(path)[::every]:
            key = (path.stem, row.name)
            if key not in kept:
                one = timm_steps.case_of(row, how, cache)
                if one is None:
                    continue
                kept[key] = one
            cases.append(kept[key])
        tell(f"{path.stem}: {len(cases)} steps")
        if cases:
            name = path.stem.removeprefix("timm-")
            yield DataSet.of_cases(name, how.chip.name, how.execution, cases)


def own_sets(kept: dict[tuple[str, str], Any], tell: Callable) -> Iterator[DataSet]:
    for name, run, chip in own.runs(own.MEASUREMENTS):
        for mode in own.MODES:
            tell(f"{name}: {mode}")
            if (name, mode) not in kept:
                kept[name, mode] = own.cases_of(run, chip, mode)
            cases = kept[name, mode]
            if len({case.group for case in cases}) >= 4:
                yield DataSet.of_cases(f"{name} {mode}", chip.name, mode, cases)


def other_set(given: str) -> DataSet:
    """Predictions of another script; a model's name up to its first blank is its family."""
    name, _, file = given.partition("=")
    points = read_points(Path(file))
    return DataSet(
        name,
        name,
        "gpu",
        tuple(point.label.split()[0] for point in points),
        tuple(math.log(point.measured / point.predicted) for point in points),
    )


# -- ends of intervals -----------------------------------------------------------------------------


def no_fit(sets: Sequence[DataSet]) -> Residuals:
    """Ends for a device that no set is of: residuals within sets, and how far sets are apart.

    Each family of each set counts the same.  Devices are too few for ends that are their own order
    statistics, so how far the next one is off is drawn from a normal distribution: the scatter of
    the sets that are here, and of what is known of others.
    """
    centres = [statistics.median(one.off) for one in sets]
    width = math.sqrt(
        (CHIP_WEIGHT * CHIP_WIDTH**2 + sum(centre**2 for centre in centres))
        / (CHIP_WEIGHT + len(sets))
    )
    values, groups = [], []
    for one, centre in zip(sets, centres, strict=True):
        for off, group in zip(one.off, one.groups, strict=True):
            values += [off - centre + width * step for step in _GRID]
            groups += [f"{one.name}: {group}"] * len(_GRID)
    spread = 1.4826 * statistics.median(map(abs, values))
    found = Residuals.of_steps([value / spread for value in values], groups)
    families = len({group for one in sets for group in one.groups})
    return replace(found, spread=spread, count=len(values) // len(_GRID), groups=families)


def after_fits(sets: Sequence[DataSet], use: str) -> Residuals | None:
    """Ends after a fit of this use: what was left out of each set, in its own spread."""
    values, groups, spreads = [], [], []
    for one in sets:
        knobs, outside = fit_of(one.cases, one.start, use)
        if not outside:
            continue
        spreads.append(knobs.spread)
        deviations = deviations_of(one.cases, knobs)
        for case, seconds, deviation in zip(one.cases, outside, deviations, strict=True):
            values.append(math.log(case.seconds / seconds) / deviation)
            groups.append(f"{one.name}: {group_of(case)}")
    if not values:
        return None
    spread = math.sqrt(statistics.fmean(each**2 for each in spreads))
    families = len({group.partition(": ")[2] for group in groups})
    return replace(Residuals.of_steps(values, groups), spread=spread, groups=families)


def fit_of(cases: Sequence[Case], start: Knobs, use: str) -> tuple[Knobs, tuple[float, ...]]:
    """Knobs by a fit of this use, and what it predicts of the cases that it had not seen."""
    found = fitted(cases, Starts((), start), ONE if use == ONE_FACTOR else FEW, "")
    return found.knobs, found.outside


# -- coverage --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """How many steps were inside of their interval, and its upper end over its lower one."""

    inside: int
    of: int
    ratio: float  # median

    @property
    def words(self) -> str:
        return f"{self.inside / self.of:.0%} | {self.ratio:.2f}" if self.of else " | "


def without_fit(one: DataSet, others: Sequence[DataSet]) -> Counted:
    """Of a data set, by those of other devices of its kind."""
    apart = [o for o in others if o.device != one.device and o.kind == one.kind]
    if not apart:
        return Counted(0, 0, 1.0)
    ends = no_fit(apart)
    low, high = (end * ends.spread for end in ends.ends(LEVEL))
    inside = sum(low <= off <= high for off in one.off)
    return Counted(inside, len(one.off), math.exp(high - low))


def with_fit(one: DataSet, use: str) -> Counted:
    """Of both halves of the families of a data set, each by a fit to the other."""
    families = sorted(set(one.groups))
    inside, ratios = 0, []
    for seen in (set(families[::2]), set(families[1::2])):
        kept = [case for case in one.cases if group_of(case) in seen]
        apart = [case for case in one.cases if group_of(case) not in seen]
        knobs, _ = fit_of(kept, one.start, use)
        low, high = knobs.ends(LEVEL)
        rows = zip(apart, predict(apart, knobs), deviations_of(apart, knobs), strict=True)
        for case, seconds, deviation in rows:
            inside += low * deviation <= math.log(case.seconds / seconds) <= high * deviation
            ratios.append(math.exp((high - low) * deviation))
    return Counted(inside, len(one.cases), statistics.median(ratios))


def table(sets: Sequence[DataSet], tell: Callable) -> str:
    """A line a data set, and the mean of each use: every data set counts the same."""
    lines = [
        "| data set | steps | families | no fit | high/low | one factor | high/low | fitted "
        "| high/low |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found: dict[str, list[Counted]] = {use: [] for use in USES}
    for one in sets:
        tell(f"coverage: {one.name}")
        row = {NO_FIT: without_fit(one, sets)}
        for use in (ONE_FACTOR, FITTED):
            row[use] = with_fit(one, use) if one.cases else Counted(0, 0, 1.0)
        for use, cover in row.items():
            found[use] += [cover] if cover.of else []
        cells = " | ".join(row[use].words for use in USES)
        lines.append(f"| {one.name} | {len(one.off)} | {len(set(one.groups))} | {cells} |")
    means = [
        f"{statistics.fmean(c.inside / c.of for c in found[use]):.0%} | "
        f"{statistics.fmean(c.ratio for c in found[use]):.2f}"
        if found[use]
        else " | "
        for use in USES
    ]
    lines.append(f"| mean of the data sets | | | {' | '.join(means)} |")
    return "\n".join(lines)


def residuals_of(sets: Sequence[DataSet]) -> str:
    """The tables for knob files, for each kind of device."""
    parts = []
    for kind in sorted({one.kind for one in sets}):
        of_kind = [one for one in sets if one.kind == kind]
        told = "; ".join(f"{one.name} ({len(one.off)})" for one in of_kind)
        found = {NO_FIT: replace(no_fit(of_kind), of=told)}
        with_cases = [one for one in of_kind if one.cases]
        told = "; ".join(f"{one.name} ({len(one.off)})" for one in with_cases)
        for use in (ONE_FACTOR, FITTED):
            ends = after_fits(with_cases, use)
            if ends is not None:
                found[use] = replace(ends, of=told)
        text = dump_knobs(Knobs("x", residuals=found))
        parts += [f"# {kind}: spread = {found[NO_FIT].spread:.3g}", text[text.index("[resid") :]]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("out/accuracy"), help="of traces")
    parser.add_argument("--every", type=int, default=1, help="every n-th row only")
    parser.add_argument("--cases", type=Path, help="where priced steps are kept")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FILE.csv")
    parser.add_argument("--write", action="store_true", help="print tables of knob files")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    tell = lambda text: print(text, file=sys.stderr)  # noqa: E731
    given.cache.mkdir(parents=True, exist_ok=True)
    kept: dict[tuple[str, str], Any] = {}
    if given.cases and given.cases.exists():
        kept = pickle.loads(given.cases.read_bytes())
    sets = list(timm_sets(given.folder, given.cache, given.every, kept, tell))
    sets += [other_set(text) for text in given.other]
    for one in own_sets(kept, tell):
        sets.append(one)
        if given.cases:
            given.cases.write_bytes(pickle.dumps(kept))
    if not sets:
        raise SystemExit(f"{given.folder}: no timm-*.csv in it, and no runs of our own")
    print(residuals_of(sets) if given.write else table(sets, tell))


if __name__ == "__main__":
    main()
