"""From measured collectives to a system whose constants fit them.

In: points of any number of ops, and a system.  Out: the system with the constants of each (library,
op) that was measured within one node, and how well they fit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooftrace.costmodels.network import per_rank_link_bytes, steps_of
from rooftrace.errors import ProfileError
from rooftrace.hardware.systems import System
from rooftrace.hardware.systems.records import CollectiveFit
from rooftrace.hardware.units import listed, plural
from rooftrace.measured.collectives.fitting import (
    FitScore,
    TimedCollective,
    as_fit,
    fit_constants,
    score_of,
    seconds_of,
)
from rooftrace.measured.collectives.reading import read_collectives

LEAST_POINTS = 4


@dataclass(frozen=True, slots=True)
class FittedCollective:
    """Constants of one op, and how far they are from the points they were fitted to."""

    fit: CollectiveFit
    score: FitScore

    def __str__(self) -> str:
        fit = self.fit
        return (
            f"{fit.library} {fit.op}: alpha {fit.alpha * 1e6:.3g} us, step {fit.step * 1e6:.3g} "
            f"us, efficiency {fit.efficiency:.3g}, p {fit.p:.3g}, fall {fit.fall:.3g}, up to "
            f"{fit.ranks} ranks; {self.score}"
        )


@dataclass(frozen=True, slots=True)
class CollectiveCalibration:
    """A system with fitted constants."""

    system: System
    fitted: tuple[FittedCollective, ...]
    notes: tuple[str, ...]  # what was left out, and why


def calibrate_collectives(path: str | os.PathLike[str], system: System) -> CollectiveCalibration:
    """The system with constants fitted to a file of measured collectives.

    Raises OSError, or ProfileError for a file from which nothing can be fitted.
    """
    points = read_collectives(path)
    source = f"fitted by rooftrace calibrate to {os.path.basename(os.fspath(path))}"
    groups: dict[tuple[str, str], list[TimedCollective]] = {}
    notes = []
    for point in points:
        groups.setdefault((point.library, point.op), []).append(point)
    fitted = []
    for (library, op), measured in groups.items():
        within = [p for p in measured if not system.per_node or p.ranks <= system.per_node]
        if len(within) < len(measured):
            left = plural(len(measured) - len(within), "point")
            notes.append(
                f"{library} {op}: {left} left out: more ranks than a node of {system.name}"
            )
        if len({p.nbytes for p in within}) < LEAST_POINTS:
            notes.append(f"{library} {op}: not fitted: expected {LEAST_POINTS} sizes or more")
            continue
        fitted.append(_fitted(system, within, source))
    if not fitted:
        raise ProfileError(f"{path}: nothing can be fitted: {listed(notes)}")
    keys = {(one_op.fit.library, one_op.fit.op, one_op.fit.level) for one_op in fitted}
    kept = [f for f in system.collectives if (f.library, f.op, f.level) not in keys]
    fits = (*kept, *(one_op.fit for one_op in fitted))
    return CollectiveCalibration(replace(system, collectives=fits), tuple(fitted), tuple(notes))


def _fitted(system: System, points: Sequence[TimedCollective], source: str) -> FittedCollective:
    """Constants of points of one op within a node."""
    op, level = points[0].op, system.levels[0]
    ranks = np.array([float(p.ranks) for p in points])
    steps = np.array([steps_of(op, p.ranks, outermost=False) for p in points])
    sent = np.array([per_rank_link_bytes(op, p.nbytes, p.ranks) for p in points])
    seconds = np.array([p.seconds for p in points])
    wire = sent / level.bandwidth.value
    fit = as_fit(
        fit_constants(steps, wire, ranks, seconds),
        library=points[0].library,
        op=op,
        level=level.name,
        ranks=int(ranks.max()),
        nbytes=float(max(p.nbytes for p in points)),
        kind="measured",
        source=source,
    )
    constants = (fit.alpha, fit.step, fit.efficiency, fit.p, fit.fall)
    return FittedCollective(fit, score_of(seconds_of(constants, steps, wire, ranks), seconds))
