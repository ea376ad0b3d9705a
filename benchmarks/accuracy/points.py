"""Predictions beside measurements as rows of a CSV: for the figures of the page, and intervals."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.kernels.intervals import Behind, StepCell
from rooftrace.measured.fit.cases import Case


def parser_of(words: str, cached: bool = False) -> argparse.ArgumentParser:
    """The command line of a script on a folder of measurements.  cached: it keeps traces."""
    parser = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    if cached:
        parser.add_argument(
            "--cache", type=Path, default=Path("out/accuracy"), help="where traces are kept"
        )
    parser.add_argument("--points", type=Path, help="write predictions without a fit, as CSV")
    return parser


@dataclass(frozen=True)
class Point:
    """Seconds of one case.

    predicted: without a fit, where `source` is not "".  group: what it is coloured by.  source:
    what intervals leave out together (one file or publication).  The others say where it is, as
    `StepCell` has them.  behind, hosts: the share and the spread of `Behind`.  kernels: measured
    seconds of its kernels, where these are a point of their own.
    """

    label: str
    predicted: float
    measured: float
    group: str
    source: str = ""
    generation: str = ""
    precision: str = ""
    phase: str = ""
    execution: str = ""
    work: str = ""
    limit: str = ""
    behind: float = -1.0
    hosts: float = 0.0
    kernels: float = 0.0

    @property
    def cell(self) -> StepCell:
        return StepCell(**{field.name: getattr(self, field.name) for field in fields(StepCell)})

    def of(self, source: str, cell: StepCell | Estimate | Case) -> Point:
        """This point with its source and where it is: a cell, or that of a priced step."""
        at = cell.times if isinstance(cell, Estimate) else cell
        host = Behind() if isinstance(at, StepCell) else at.behind
        where = at if isinstance(at, StepCell) else at.cell
        here = {field.name: getattr(where, field.name) for field in fields(StepCell)}
        return replace(self, source=source, behind=host.share, hosts=host.spread, **here)


_NUMBERS = ("predicted", "measured", "behind", "hosts", "kernels")


def write_points(path: Path, points: Iterable[Point]) -> None:
    """One row each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Point)])
        writer.writerows(astuple(point) for point in points)


def read_points(path: Path) -> list[Point]:
    """What `write_points` wrote, also before it had sources."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Point(**{**row, **{name: float(row[name]) for name in _NUMBERS if name in row}})
            for row in csv.DictReader(file)
        ]
