"""Predictions beside measurements as rows of a CSV, from which the page draws its figures."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """Seconds of one case.  group: what it is coloured by."""

    label: str
    predicted: float
    measured: float
    group: str


def write_points(path: Path, points: Iterable[Point]) -> None:
    """One row each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Point)])
        writer.writerows(astuple(point) for point in points)


def read_points(path: Path) -> list[Point]:
    """What `write_points` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Point(row["label"], float(row["predicted"]), float(row["measured"]), row["group"])
            for row in csv.DictReader(file)
        ]
