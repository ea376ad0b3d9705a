"""Seconds of one collective: its steps and its bytes over the levels that its ranks stand in.

In: a system, a collective, its buffer, the numbers of its ranks.  Out: seconds, the outermost level
used, and what lies outside of measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import larger, smaller
from rooftrace.costmodels.network.wire import level_bytes, payload, steps_of
from rooftrace.hardware import units
from rooftrace.hardware.systems import System
from rooftrace.hardware.systems.records import (
    COLLECTIVES,
    LIBRARIES,
    CollectiveFit,
    Level,
    collective_kind,
)

if TYPE_CHECKING:
    from rooftrace._amounts import Amount

_TINY = 1e-300
"""Seconds; what takes none is divided by this."""
OTHERS = {"custom": ("vllm", "sglang", "trtllm")}
"""Whose constants stand for a serving library that is not named."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """What one collective takes; seconds are an array where its bytes are."""

    seconds: Any
    level: str  # the outermost level that its ranks use; "" for a group of one
    beyond: str = ""  # what lies outside of measurements, in one phrase


@dataclass(frozen=True, slots=True)
class _Way:
    """One level that a group uses: what is sent there, how fast, in how many steps."""

    level: Level
    nbytes: Any  # that each rank sends
    bandwidth: float  # byte/s of one rank
    steps: int
    units: int  # that it joins


def collective_seconds(
    system: System, kind: str, nbytes: Amount, ranks: Iterable[int], library: str = "nccl"
) -> CollectiveTime:
    """Seconds of a collective of `ranks`, given by their numbers in the system.

    nbytes: the whole buffer, counted like nccl-tests do (see `wire`); an array for many sizes, of
    which nothing is said that lies outside of measurements.  library: whose kernels run;
    "custom" is the all-reduce of a serving library within one node.  A group of one takes no time.
    Raises ValueError for another word, and SystemSizeError for ranks that have no chip.
    """
    collective_kind(kind)
    if library not in LIBRARIES:
        raise ValueError(f"library {library!r}: expected one of {', '.join(LIBRARIES)}")
    if isinstance(nbytes, float | int):
        return _single(system, kind, float(nbytes), tuple(ranks), library)
    return _seconds(system, kind, nbytes, tuple(ranks), library)


def link_seconds(system: System, kind: str, nbytes: Any, ranks: Iterable[int]) -> Any:
    """The least that a collective can take: its bytes over the slowest level, by datasheets."""
    ways = _ways(system, kind, nbytes, tuple(ranks), ring=False)
    return reduce(larger, (way.nbytes / way.bandwidth for way in ways), 0.0)


@functools.lru_cache(maxsize=4096)
def _counts(system: System, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return (len(ranks), *system.units_of(ranks))


def _ways(
    system: System, kind: str, nbytes: Any, ranks: tuple[int, ...], *, ring: bool
) -> list[_Way]:
    """The levels that a group uses, from the inside out."""
    if len(ranks) <= 1:
        return []
    counts = _counts(system, ranks)
    sent = level_bytes(kind, payload(kind, nbytes), counts, ring=ring)
    ways = []
    for number, level in enumerate(system.levels):
        below, above = counts[number], counts[number + 1]
        joined = -(-below // above)
        if joined <= 1:
            continue
        inside = -(-len(ranks) // below)
        chips = system.size_of(number - 1) if number else 1
        bandwidth = level.rate_of(inside, chips) / inside
        steps = steps_of(kind, joined, outermost=number > 0)
        way = _Way(level, sent[number], bandwidth, steps, joined)
        ways.append(way)
    return ways


@functools.lru_cache(maxsize=65536)
def _single(
    system: System, kind: str, nbytes: float, ranks: tuple[int, ...], library: str
) -> CollectiveTime:
    """The seconds of one size, which a plan asks for again and again."""
    return _seconds(system, kind, nbytes, ranks, library)


def _seconds(
    system: System, kind: str, nbytes: Amount, ranks: tuple[int, ...], library: str
) -> CollectiveTime:
    ways = _ways(system, kind, nbytes, ranks, ring=True)
    if not ways:
        return CollectiveTime(0.0, "")
    fits = [_fit(system, kind, library, way.level) for way in ways]
    innermost = system.levels[0]
    start = _fit(system, kind, library, innermost) if ways[0].level is not innermost else None
    fixed = start.alpha if start is not None else 0.0
    seconds: Any = 0.0
    for way, fit in zip(ways, fits, strict=True):
        latency = way.level.latency.value
        more = latency * (1 + way.steps) if fit is None else fit.alpha + fit.step * way.steps
        fixed += more
        wire = _wire_seconds(kind, way, fit)
        # What is inside takes its time; then the way out is waited for, or limits everything.
        seconds = larger(seconds + more, p_norm(fixed, wire, 1.0 if fit is None else fit.p))
    return CollectiveTime(
        seconds=seconds,
        level=ways[-1].level.name,
        beyond=_beyond(system, kind, nbytes, len(ranks), ways, fits),
    )


def _wire_seconds(kind: str, way: _Way, fit: CollectiveFit | None) -> Any:
    """Seconds of the bytes over one level: around the ring, or read from all others at once."""
    full = way.nbytes / way.bandwidth
    if fit is None:
        return full
    reached = fit.efficiency_of(way.units)
    if COLLECTIVES[kind].pattern == "tensor":  # the bytes of each rank do not grow with the ranks
        reached = min(reached, fit.efficiency_of(2))
    ring = full / reached
    if not fit.direct:
        return ring
    return smaller(full * max(1.0, way.units / 2) / min(1.0, fit.direct), fit.turn + ring)


def p_norm(fixed: Any, wire: Any, p: float) -> Any:
    """(fixed^p + wire^p)^(1/p), never less than the larger of both."""
    low, high = smaller(fixed, wire), larger(fixed, wire)
    return high * (1 + (low / larger(high, _TINY)) ** p) ** (1 / p)


def _fit(system: System, kind: str, library: str, level: Level) -> CollectiveFit | None:
    """The constants for an op on a level: its own, its relative's, those of NCCL."""
    for name in (library, *OTHERS.get(library, ()), "nccl"):
        for op in (kind, COLLECTIVES[kind].like):
            fit = system.fit_of(name, op, level.name)
            if fit is not None:
                return fit
    return None


def _beyond(
    system: System,
    kind: str,
    nbytes: Amount,
    ranks: int,
    ways: Sequence[_Way],
    fits: Sequence[CollectiveFit | None],
) -> str:
    """What lies outside of measurements; "" where nothing does."""
    if system.bare:
        return "not fitted: the datasheet's bandwidth and latency of a link"
    for way, fit in zip(reversed(ways), reversed(fits), strict=True):
        if fit is None:
            return f"{kind} not fitted over {way.level.name}: its datasheet"
        if fit.kind != "measured":
            return f"{kind} over {way.level.name} not measured on {system.name}"
        if fit.op != kind and not COLLECTIVES[kind].as_measured:
            return f"{kind} not measured: constants of {fit.op}"
        if ranks > fit.ranks and COLLECTIVES[kind].pattern != "pair":
            return f"{ranks} ranks; measured up to {fit.ranks}"
        if isinstance(nbytes, float) and nbytes > fit.nbytes:
            most = units.format_capacity(fit.nbytes)
            return f"{units.format_capacity(nbytes)}; measured up to {most}"
    return ""
