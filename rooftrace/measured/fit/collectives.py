"""Reads measured collectives, fits the constants of each op, and builds a system with them.

Inputs: the text that nccl-tests print, or a CSV with a row for each point and the columns op,
ranks, bytes, seconds and, if needed, dtype and library.  Bytes are of the buffer, like the size of
nccl-tests.  The hosts of the ranks tell the level of links: of several hosts it is the network.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from rooftrace.costmodels.timing import (
    collective_seconds,
    level_bytes,
    per_rank_link_bytes,
    steps_of,
)
from rooftrace.errors import ProfileError, one_of
from rooftrace.hardware.systems import System
from rooftrace.hardware.systems.records import COLLECTIVES, LIBRARIES, CollectiveFit
from rooftrace.hardware.units import listed, plural
from rooftrace.measured.fit.cases import Errors, errors
from rooftrace.measured.profiles import tables

SPELLINGS = {text: kind.name for kind in COLLECTIVES.values() for text in kind.spellings}
COLUMNS = ("op", "dtype", "ranks", "bytes", "seconds", "library", "hosts")
NEEDED = ("op", "ranks", "bytes", "seconds")
_PROGRAM = re.compile(r"\b(\w+)_perf(?:_mpi)?\b")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:\s+Group\s+(\d+))?(?:.*?\bon\s+(\S+)\s+device\s+(\d+))?")
_PREFIX = re.compile(
    r"^.{0,40}?(\[[\w,.:-]+\])<std\w+>:? ?|^\s*(\d+):\s|^(\[[\w-]*\d+\]):\s?|^([\w.-]+)\s*\|\s"
)
"""Marks of launchers: mpirun --tag-output, srun --label, torchrun, and containers."""
_THREADS = re.compile(r"^#\s+nThread\s+(\d+)\s+nGpus\s+(\d+)")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(\w+)\s+(.*)$")


def read_collectives(path: str | os.PathLike[str]) -> tuple[TimedCollective, ...]:
    """The measured collectives of a file of either format.

    Raises OSError, or ProfileError for a file that holds none.
    """
    path = Path(path)
    rows = list(tables.texts(path))
    if not rows:
        raise ProfileError(f"{path}: the file is empty; {EXPECTED}")
    first = [cell.strip().lower() for cell in rows[0][1].split(",")]
    if len(first) > 1 and "op" in first:
        points = tuple(_csv_points(path))
    else:
        points = tuple(_printed_points(path, rows))
    if not points:
        raise ProfileError(f"{path}: no measured collective in it; {EXPECTED}")
    return points


EXPECTED = (
    "expected what all_reduce_perf and its like of nccl-tests print, or a CSV with the columns "
    f"{','.join(NEEDED)}"
)


def _op(path: Path, line: int, text: str) -> str:
    name = SPELLINGS.get(text.lower(), text.lower())
    if name not in COLLECTIVES:
        raise ProfileError(f"{path}: line {line}: op {text!r:.60}: {one_of(name, COLLECTIVES)}")
    return name


def _csv_points(path: Path) -> Iterator[TimedCollective]:
    table = tables.lines(path)
    number, header = next(table)
    header = [name.strip().lower() for name in header]
    tables.check_header(path, number, header)
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise ProfileError(f"{path}: line {number}: no column {', '.join(missing)}; {EXPECTED}")
    for line, row in table:
        cells = tables.cells(path, line, header, row)
        ranks = cells["ranks"].exact()
        if ranks < 2:
            raise ProfileError(f"{path}: line {line}: {ranks} ranks: expected 2 or more")
        dtype, library = (
            cells[name].text if name in cells else "" for name in ("dtype", "library")
        )
        library = library or "nccl"
        hosts = (cells["hosts"].whole_number() if "hosts" in cells else None) or 0
        if library not in LIBRARIES:
            raise ProfileError(
                f"{path}: line {line}: library {library!r:.60}: {one_of(library, LIBRARIES)}"
            )
        yield TimedCollective(
            op=_op(path, line, cells["op"].text),
            ranks=ranks,
            nbytes=cells["bytes"].number(most=tables.MOST_SIZE),
            seconds=cells["seconds"].number(),
            dtype=dtype,
            library=library,
            hosts=tuple(f"host {number}" for number in range(hosts)),
        )


@dataclass
class _Output:
    """The lines of one process, up to its table."""

    op: str = ""
    ranks: int = 0  # by the options of the command
    # (rank, group, host, device) of each listed rank.
    listed: list[tuple[int, str, str, str]] = field(default_factory=list)

    def add(self, rank: re.Match[str]) -> None:
        """A line of a rank; the list of a run begins with the lowest."""
        number = int(rank[1])
        if self.listed and number <= self.listed[0][0]:
            self.listed = []
        self.listed.append((number, rank[2] or "", rank[3] or "", rank[4] or ""))

    def group(self) -> tuple[int, tuple[str, ...]]:
        """The ranks of the first group, and their hosts: none where these are not told.

        A device that is listed several times is of several hosts of one name.
        """
        if not self.listed:
            return self.ranks, ()
        places = [place for _, group, *place in self.listed if group == self.listed[0][1]]
        if not all(host for host, _ in places):
            return len(places), ()
        times: dict[str, int] = {}
        for (host, _), count in Counter(map(tuple, places)).items():
            times[host] = max(times.get(host, 0), count)
        hosts = (f"{h} ({n + 1})" if n else h for h, count in times.items() for n in range(count))
        return len(places), tuple(hosts)


def _printed_points(path: Path, rows: list[tuple[int, str]]) -> Iterator[TimedCollective]:
    """The rows of tables that nccl-tests print; one file may hold several runs and processes."""
    op, outputs = "", defaultdict[str, _Output](_Output)
    for line, text in rows:
        mark = _PREFIX.match(text)
        output = outputs[next(filter(None, mark.groups())) if mark else ""]
        text = text[mark.end() :] if mark else text
        program, rank, threads = _PROGRAM.search(text), _RANK.match(text), _THREADS.match(text)
        if program is not None:
            op = output.op = _op(path, line, program[1])
        if threads is not None:
            output.ranks, output.listed = int(threads[1]) * int(threads[2]), []
        if rank is not None:
            output.add(rank)
        row = _ROW.match(text)
        if row is None or int(row[1]) == 0:  # sizes too small to be shared out
            continue
        yield _printed_point(
            path, line, output.op or op or _op_of_name(path, line), output.group(), row
        )


def _op_of_name(path: Path, line: int) -> str:
    """The op by the file's name, for an output that names none."""
    for name in (*COLLECTIVES, *SPELLINGS):
        if path.stem.lower().startswith(name):
            return SPELLINGS.get(name, name)
    raise ProfileError(
        f"{path}: line {line}: it does not say which collective ran; keep the line with the "
        "command, or call the file all_reduce.txt or its like"
    )


def _printed_point(
    path: Path, line: int, op: str, group: tuple[int, tuple[str, ...]], row: re.Match[str]
) -> TimedCollective:
    """One row: size, count, type, redop, perhaps root, then time, algbw, busbw out of place."""
    ranks, hosts = group
    if ranks < 2:
        raise ProfileError(
            f"{path}: line {line}: {ranks} ranks: expected the lines '#  Rank  0 ...' or "
            "'# nThread 1 nGpus 8' of nccl-tests above the table, with 2 ranks or more"
        )
    numbers = row[5].split()
    if len(numbers) % 4 == 1:  # the root stands first, which old releases do not print
        numbers = numbers[1:]
    if not numbers:
        raise ProfileError(f"{path}: line {line}: no time in the row {row[0].strip()[:60]!r}")
    return TimedCollective(
        op=op,
        ranks=ranks,
        nbytes=tables.CsvCell(path, line, "size", row[1]).number(most=tables.MOST_SIZE),
        seconds=tables.CsvCell(path, line, "time", numbers[0]).number(unit=1e-6),
        dtype=row[3],
        library="nccl",
        hosts=hosts,
    )


# -- fitting ---------------------------------------------------------------------------------------
# The constants have the least mean error of the logarithm, which a few slow outliers hardly move.


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """One measured collective."""

    op: str
    ranks: int
    nbytes: float  # of the buffer, as nccl-tests count it
    seconds: float
    dtype: str = ""
    library: str = "nccl"
    hosts: tuple[str, ...] = ()  # of its ranks; none: unknown

    def nodes(self, system: System) -> int:
        """The number of nodes of a system that its ranks fill or share evenly.

        An innermost level of more chips than a host has joins several hosts.
        """
        if not system.per_node:
            return 1
        least = -(-self.ranks // system.per_node)
        return max(least, len(self.hosts)) if system.per_node <= _MOST_OF_HOST else least


_MOST_OF_HOST = 16
"""GPUs of a host at most: NVLink within a rack joins hosts of 4 or 8."""
_FASTER = 1.05
"""Measured over possible rate from which on the points are of another network."""

LOW = (-17.0, -19.0, -7.0, -1.0, -0.3, -5.0, -16.0)
HIGH = (-5.0, -7.0, 0.0, 2.0, 3.0, 0.0, -7.0)
"""Bounds of the logarithms of alpha, step, efficiency and p; of fall; of log direct and turn."""
STARTS = (
    (-12.0, -14.0, -0.4, 0.5, 0.0, -0.5, -10.5),
    (-11.0, -13.0, -1.0, 0.0, 0.5, -1.2, -10.0),
    (-11.5, -15.0, -0.7, 0.2, 1.5, -1.2, -11.5),
    (-10.0, -12.0, -0.2, 0.8, -0.2, -0.7, -11.0),
)


def seconds_of(constants: Sequence[float] | Any, steps: Any, wire: Any, ranks: Any) -> Any:
    """Seconds by (alpha, step, efficiency, p, fall[, direct, turn]), for arrays.

    steps: of the ring.  wire: seconds of its bytes by the datasheet.
    """
    alpha, step, efficiency, p, fall, *second_way = constants
    fixed = alpha + step * steps
    sent = wire / np.minimum(1.0, efficiency * (2 / ranks) ** fall)
    if second_way:
        direct, turn = second_way
        sent = np.minimum(wire * ranks / 2 / direct, turn + sent)
    high, low = np.maximum(fixed, sent), np.minimum(fixed, sent)
    return high * (1 + (low / high) ** p) ** (1 / p)


def fit_constants(
    steps: Any, wire: Any, ranks: Any, seconds: Any, *, direct: bool = False, weights: Any = None
) -> tuple[float, ...]:
    """The constants that fit measured seconds best; see `seconds_of`.

    direct: whether the op has a second way for small buffers.  weights: of the points.
    """
    weights = np.ones(len(seconds)) if weights is None else weights
    weights = weights / weights.sum()
    spread = len(np.unique(ranks)) > 1
    size = 7 if direct else 5

    def read(q: Any) -> tuple[float, ...]:
        return (*np.exp(q[:4]), q[4] if spread else 0.0, *np.exp(q[5:size]))

    def loss(q: Any) -> float:
        predicted = seconds_of(read(q), steps, wire, ranks)
        unlikely = 0.002 * ((q[3] - 0.4) ** 2 + q[4] ** 2)
        return float((weights * np.abs(np.log(predicted / seconds))).sum() + unlikely)

    best = least(loss, [start[:size] for start in STARTS], LOW[:size], HIGH[:size])
    alpha, step, *others = (float(x) for x in read(best))
    if len(np.unique(steps)) == 1:  # nothing tells both apart
        alpha, step = alpha + step * float(np.ravel(steps)[0]), 0.0
    return (alpha, step, *others)


def least(
    loss: Callable[[Any], float],
    starts: Sequence[Sequence[float]],
    low: Sequence[float],
    high: Sequence[float],
) -> Any:
    """The argument of the least loss within bounds, by Nelder and Mead from several starts."""
    from scipy.optimize import minimize

    options = {"maxiter": 4000, "maxfev": 4000, "xatol": 1e-4, "fatol": 1e-7}
    bounds = list(zip(low, high, strict=True))
    ends = [
        minimize(loss, np.array(start), method="Nelder-Mead", bounds=bounds, options=options)
        for start in starts
    ]
    again = min(ends, key=lambda end: float(end.fun))
    final = minimize(loss, again.x, method="Nelder-Mead", bounds=bounds, options=options)
    return min((again, final), key=lambda end: float(end.fun)).x


def as_fit(constants: Sequence[float], **facts: Any) -> CollectiveFit:
    """The record of constants, rounded to what a file holds."""
    alpha, step, efficiency, p, fall, *second_way = constants
    direct, turn = second_way or (0.0, 0.0)
    return CollectiveFit(
        alpha=rounded(alpha) if alpha > 1e-7 else 0.0,
        step=rounded(step) if step > 1e-8 else 0.0,
        efficiency=rounded(efficiency),
        p=round(p, 3),
        fall=round(fall, 3),
        direct=rounded(direct),
        turn=rounded(turn),
        **facts,
    )


def rounded(value: float) -> float:
    """A number with the four digits of a file."""
    return float(f"{value:.4g}")


# -- calibrating -----------------------------------------------------------------------------------

LEAST_POINTS = 4


@dataclass(frozen=True, slots=True)
class FittedCollective:
    """Constants of one op, and their errors on the points they were fitted to."""

    fit: CollectiveFit
    errors: Errors

    def __str__(self) -> str:
        fit, off = self.fit, self.errors
        return (
            f"{fit.library} {fit.op}: alpha {fit.alpha * 1e6:.3g} us, step {fit.step * 1e6:.3g} "
            f"us, efficiency {fit.efficiency:.3g}, p {fit.p:.3g}, fall {fit.fall:.3g}, up to "
            f"{fit.ranks} ranks over {fit.level}; mean {off.mean:.1%}, p90 {off.p90:.1%} of "
            f"{off.count}"
        )


@dataclass(frozen=True, slots=True)
class CollectiveCalibration:
    """A system with fitted constants."""

    system: System
    fitted: tuple[FittedCollective, ...]
    notes: tuple[str, ...]  # points that were left out, and why


def calibrate_collectives(path: str | os.PathLike[str], system: System) -> CollectiveCalibration:
    """The system with constants fitted to a file of collectives.

    Those within a node tell its innermost level, and those of ranks on several hosts the next one.
    Raises OSError, or ProfileError for a file from which nothing can be fitted.
    """
    points = read_collectives(path)
    source = f"fitted by rooftrace calibrate to {os.path.basename(os.fspath(path))}"
    groups: dict[tuple[bool, str, str], list[TimedCollective]] = {}
    for point in points:
        groups.setdefault((point.nodes(system) > 1, point.library, point.op), []).append(point)
    fitted, notes = [], list[str]()
    for (outside, library, op), measured in sorted(groups.items()):
        why = _no_network(system, measured) if outside else ""
        if not why and len({p.nbytes for p in measured}) < LEAST_POINTS:
            why = f"not fitted: expected {LEAST_POINTS} sizes or more"
        if why:
            notes.append(f"{library} {op}: {why}")
            continue
        each = (
            _fitted_outside(system, measured, source)
            if outside
            else _fitted(system, measured, source)
        )
        fitted.append(each)
        fit = each.fit
        key = (fit.library, fit.op, fit.level)
        kept = [f for f in system.collectives if (f.library, f.op, f.level) != key]
        system = replace(system, collectives=(*kept, fit))
    if not fitted:
        raise ProfileError(f"{path}: nothing can be fitted: {listed(notes)}")
    return CollectiveCalibration(system, tuple(fitted), tuple(notes))


def _no_network(system: System, points: Sequence[TimedCollective]) -> str:
    """A sentence that points of several nodes cannot be fitted; "" where they can."""
    hosts = next((p.hosts for p in points if len(p.hosts) > 1), ())
    where = f"ranks on {listed(hosts)}" if hosts else "more ranks than a node"
    out = f"{plural(len(points), 'point')} left out: {where}"
    if len(system.levels) < 2:
        return f"{out}, and {system.name} joins the chips of one node only"
    nodes = max(p.nodes(system) for p in points)
    if nodes > (system.levels[1].size or nodes):
        return f"{out}, and {system.name} has {plural(system.levels[1].size, 'node')}"
    if any(p.ranks % p.nodes(system) for p in points):
        return f"{out}, not evenly; expected as many ranks on each host"
    terms = [_outer_terms(system, p) for p in points]
    fastest = max(t.wire / p.seconds for t, p in zip(terms, points, strict=True))
    if fastest > _FASTER:
        return (
            f"{out}, {fastest:.2f} times as fast as the {system.levels[1].name} of {system.name} "
            "can be; name the system that was measured"
        )
    return ""


@dataclass(frozen=True)
class _OuterTerms:
    """Terms of the seconds of a collective between nodes; numbers, or arrays of many."""

    within: Any  # s, of its part within a node
    fixed: Any  # s of that, for a buffer without bytes
    wire: Any  # s of its bytes between nodes, by datasheets
    steps: Any  # messages between nodes that wait for each other

    def seconds(self, alpha: float, step: float, efficiency: float, p: float) -> Any:
        """max(within + more, ((fixed + more)^p + (wire / efficiency)^p)^(1/p)), as in
        `collective_seconds`, with more = alpha + step * steps."""
        more = alpha + step * self.steps
        fixed, sent = self.fixed + more, self.wire / efficiency
        high, low = np.maximum(fixed, sent), np.minimum(fixed, sent)
        return np.maximum(self.within + more, high * (1 + (low / high) ** p) ** (1 / p))


def _outer_terms(system: System, point: TimedCollective) -> _OuterTerms:
    """The terms of one point: all chips of its hosts take part in it, or in others of its kind."""
    op, level, nodes = point.op, system.levels[1], point.nodes(system)
    inside = point.ranks // nodes
    sent = level_bytes(op, point.nbytes, (point.ranks, nodes, 1), ring=True)[1]
    within, fixed = (
        collective_seconds(system, op, size, range(inside), point.library).seconds
        for size in (point.nbytes, 1.0)
    )
    rate = level.rate_of(inside, max(inside, system.per_node)) / inside
    return _OuterTerms(within, fixed, sent / rate, steps_of(op, nodes, outermost=True))


def _fitted_outside(
    system: System, points: Sequence[TimedCollective], source: str
) -> FittedCollective:
    """Constants of points of one op between nodes, with those within a node as they are."""
    columns = [_outer_terms(system, p) for p in points]
    terms = _OuterTerms(
        *(np.array([getattr(t, f.name) for t in columns]) for f in fields(_OuterTerms))
    )
    seconds = np.array([p.seconds for p in points])
    several = len(np.unique(terms.steps)) > 1

    def read(q: Any) -> tuple[float, ...]:
        alpha, step, efficiency, p = (float(x) for x in np.exp(q))
        return alpha, step if several else 0.0, efficiency, p

    def loss(q: Any) -> float:
        off = np.abs(np.log(terms.seconds(*read(q)) / seconds)).mean()
        return float(off + 0.002 * (q[3] - 0.4) ** 2)

    constants = read(least(loss, [start[:4] for start in STARTS], LOW[:4], HIGH[:4]))
    fit = as_fit(
        (*constants, 0.0),
        library=points[0].library,
        op=points[0].op,
        level=system.levels[1].name,
        ranks=max(p.ranks for p in points),
        nbytes=float(max(p.nbytes for p in points)),
        kind="measured",
        source=source,
    )
    return FittedCollective(fit, _errors_of(points, terms.seconds(*constants)))


def _errors_of(points: Sequence[TimedCollective], predicted: Any) -> Errors:
    names = [f"{p.ranks} ranks, {p.nbytes:g} bytes" for p in points]
    return errors(names, predicted.tolist(), [p.seconds for p in points])


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
    return FittedCollective(fit, _errors_of(points, seconds_of(constants, steps, wire, ranks)))
