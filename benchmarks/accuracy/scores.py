"""Predictions of measured steps without a fit, with one number, and with two: lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rooftrace.costmodels.kernels import Knobs
from rooftrace.measured.fit.cases import Case, errors
from rooftrace.measured.fit.fitting import FEW, fit

HEAD = (
    "| rows | fitted | n | mean | median | p90 | bias | worst |\n"
    "|---|---|---:|---:|---:|---:|---:|---|"
)


def line(
    rows: str, fitted: str, names: Sequence[str], found: Sequence[float], measured: Sequence[float]
) -> str:
    """A line of a table with `HEAD`."""
    e = errors(names, found, measured)
    return (
        f"| {rows} | {fitted} | {e.count} | {e.mean:.1%} | {e.median:.1%} | {e.p90:.1%} "
        f"| {e.bias:+.1%} | {e.worst_case} {e.worst:+.0%} |"
    )


def left_out(
    cases: Sequence[Case], start: Knobs, groups: Iterable[str], free: Sequence[str] = FEW
) -> dict[str, tuple[float, ...]]:
    """By group: what the `free` numbers are in a fit to the cases of all other groups."""
    found = {}
    for group in dict.fromkeys(groups):
        others = [case for case in cases if case.group != group]
        knobs = fit(others, start, free, check=False).knobs
        found[group] = tuple(getattr(knobs, name) for name in free)
    return found


def with_numbers(start: Knobs, free: Sequence[str], values: Sequence[float]) -> Knobs:
    return replace(start, **dict(zip(free, values, strict=True)))


def one_factor(
    found: Sequence[float], measured: Sequence[float], groups: Sequence[str], kept: Sequence[bool]
) -> list[float]:
    """Predictions times the factor that suits the kept rows of all other groups best.

    That is the geometric mean of measured over predicted.
    """
    import numpy as np

    ratio = np.log(np.array(measured) / np.array(found))
    usable = np.array(kept)
    scaled = []
    for value, group in zip(found, groups, strict=True):
        others = usable & (np.array(groups) != group)
        scaled.append(float(value * np.exp(ratio[others].mean())))
    return scaled
