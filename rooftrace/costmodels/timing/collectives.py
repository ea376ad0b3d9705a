"""Bytes, steps and seconds of collectives and expert exchanges over the levels of a system."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from rooftrace._amounts import larger, smaller
from rooftrace.hardware import units
from rooftrace.hardware.systems import System
from rooftrace.hardware.systems.records import (
    COLLECTIVES,
    EXCHANGE_MODES,
    EXCHANGE_WAYS,
    LIBRARIES,
    CollectiveFit,
    ExchangeFit,
    ExchangeMode,
    ExchangeWay,
    Level,
    Pattern,
    collective_kind,
)

if TYPE_CHECKING:
    from rooftrace._amounts import Amount

# -- wire ------------------------------------------------------------------------------------------
# `nbytes` is the full buffer, counted as by nccl-tests: all_gather, gather: the result;
# reduce_scatter, scatter: the input of one rank; all_to_all: the input of one rank, with the part
# that it keeps; broadcast, reduce, all_reduce, send, recv: the tensor.
#
# A group of n ranks stands in N units of a level (nodes), with m = n / N ranks in each.  Inside a
# unit the m ranks work together; then each of them has 1 / m of the unit's bytes to send on.


def per_rank_link_bytes(kind: str, nbytes: float, ranks: int | Sequence[int]) -> float:
    """Bytes that the busiest rank of a group sends or receives over its links, as in a ring.

    ranks: how many they are, or their numbers.
    """
    size = ranks if isinstance(ranks, int) else len(ranks)
    return _share(collective_kind(kind).pattern, size, 1) * payload(kind, nbytes)


def payload(kind: str, nbytes: float) -> float:
    """Bytes of the buffer that a collective sends; a barrier has a fixed one."""
    fixed = collective_kind(kind).payload
    return nbytes if fixed is None else fixed


def _share(pattern: Pattern, units: int, inside: int) -> float:
    """Bytes that a rank sends out of its unit, as a share of the buffer.

    units: how many units of `inside` ranks each take part.
    """
    if units <= 1:
        return 0.0
    others = (units - 1) / units
    if pattern == "twice":
        return 2 * others / inside
    if pattern == "ring":
        return others / inside
    if pattern == "tensor":
        return 1 / inside
    return 1.0 if pattern == "pair" else others


def level_bytes(kind: str, nbytes: Any, counts: Sequence[int], *, ring: bool = False) -> list[Any]:
    """Bytes that each rank sends over each level, from the inside out.

    counts: the ranks, then how many units of each level they stand in: (16, 2, 1).  ring: how NCCL
    does it, with rings of all ranks through all nodes; else the least that any algorithm sends.
    """
    shares = []
    ranks, pattern = counts[0], collective_kind(kind).pattern
    for below, above in pairwise(counts):
        units = _ceil(below, above)  # units inside that this level joins
        inside = _ceil(ranks, below)  # ranks in each of them
        if pattern == "pair":
            share = 1.0 if units > 1 and above == 1 else 0.0
        elif pattern == "apart":
            # Peers behind this level, but not behind the next one.
            share = (_ceil(ranks, above) - inside) / ranks
        elif ring and units > 1 and pattern in ("twice", "ring"):
            share = _share(pattern, ranks // above, 1) / inside
        else:
            share = _share(pattern, units, inside)
        shares.append(share * nbytes)
    return shares


def _ceil(number: int, part: int) -> int:
    return -(-number // part)


def steps_of(kind: str, units: int, *, outermost: bool) -> int:
    """Messages that wait for each other where `units` are joined.

    outermost: between nodes, where an all_reduce goes up and down a tree instead of around a ring.
    """
    if units <= 1:
        return 0
    pattern = collective_kind(kind).pattern
    if pattern == "twice":
        around, tree = 2 * (units - 1), 2 * (units - 1).bit_length()
        return min(around, tree) if outermost else around
    return 1 if pattern in ("pair", "apart") else units - 1


# -- timing ----------------------------------------------------------------------------------------

_TINY = 1e-300
"""Seconds; a divisor in place of 0."""
OTHERS = {"custom": ("vllm", "sglang", "trtllm")}
"""Whose constants stand for a serving library that is not named."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of one collective; an array where its bytes are."""

    seconds: Any
    level: str  # the outermost level that its ranks use; "" for a group of one
    beyond: str = ""  # a phrase on what exceeds the measurements


@dataclass(frozen=True, slots=True)
class _Way:
    """One level that a group uses: its bytes, bandwidth and steps."""

    level: Level
    nbytes: Any  # that each rank sends
    bandwidth: float  # byte/s of one rank
    steps: int
    units: int  # that it joins


def collective_seconds(
    system: System, kind: str, nbytes: Amount, ranks: Iterable[int], library: str = "nccl"
) -> CollectiveTime:
    """Seconds of a collective of `ranks`, given by their numbers in the system.

    nbytes: the full buffer, counted as by nccl-tests (see "wire"); for an array of sizes `beyond`
    does not compare them with the measured ones.  library: whose kernels run; "custom" is the
    all-reduce of a serving library within one node.  A group of one takes no time.
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


_single = functools.lru_cache(maxsize=65536)(_seconds)
"""`_seconds` of one size: plans repeat them."""


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
    """The constants for an op on a level: of the op, of a similar one, or those of NCCL."""
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
    """A phrase on what exceeds the measurements; "" for nothing."""
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


# -- exchanging ------------------------------------------------------------------------------------
# DeepEP: each rank has tokens; each token goes to `chosen` experts, spread evenly over the ranks.
# A rank is sent a token once, however many of its experts take it; in the mode "low-latency" once
# for each.

SENDERS = 128
"""Groups of cores that send in the mode "low-latency": one for each expert, up to these."""
USUAL_EXPERTS = 256


def expert_exchange_seconds(
    system: System,
    tokens: Amount,
    hidden_bytes: Amount,
    chosen: int,
    ranks: Iterable[int],
    mode: str = "normal",
    which: str = "dispatch",
    experts: int = USUAL_EXPERTS,
) -> CollectiveTime:
    """Seconds of one dispatch or combine of `tokens` of each rank.

    hidden_bytes: of one token as it is sent.  chosen: experts of a token, of `experts` in all.  A
    group of one takes no time.  Raises ValueError for another mode or way.
    """
    if mode not in EXCHANGE_MODES:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(EXCHANGE_MODES)}")
    if which not in EXCHANGE_WAYS:
        raise ValueError(f"which {which!r}: expected one of {', '.join(EXCHANGE_WAYS)}")
    single = isinstance(tokens, float | int) and isinstance(hidden_bytes, float | int)
    routed = RoutedTokens(tokens, hidden_bytes, int(chosen), int(experts))
    return (_single_expert if single else _exchange_seconds)(
        system, routed, tuple(ranks), (mode, which)
    )


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The tokens of one rank that go to experts; numbers, or arrays for many sizes."""

    tokens: Any
    hidden_bytes: Any
    chosen: int
    experts: int


def exchange_bytes(routed: RoutedTokens, ranks: int, nodes: int, mode: str) -> tuple[Any, Any]:
    """Bytes that a rank sends to other ranks, and those of them that leave its node."""
    nbytes = routed.tokens * routed.hidden_bytes
    to_ranks = to_nodes = float(routed.chosen)
    if mode == "normal":
        to_ranks, to_nodes = distinct(ranks, routed.chosen), distinct(nodes, routed.chosen)
    return nbytes * to_ranks * (ranks - 1) / ranks, nbytes * to_nodes * (nodes - 1) / nodes


def distinct(parts: int, chosen: int) -> float:
    """Mean number of `parts` equal parts that a token goes to, with `chosen` even draws."""
    return parts * (1 - (1 - 1 / parts) ** chosen)


def _exchange_seconds(
    system: System, routed: RoutedTokens, ranks: tuple[int, ...], how: tuple[str, str]
) -> CollectiveTime:
    mode, way = how
    counts = system.units_of(ranks)
    if len(ranks) <= 1:
        return CollectiveTime(0.0, "")
    nodes = counts[0]
    level = next(lv for lv, count in zip(system.levels, counts, strict=True) if count == 1)
    fit = system.exchange_of(mode, way) or _by_datasheet(system, mode, way)
    near, far = exchange_bytes(routed, len(ranks), nodes, mode)
    wire = near / (system.levels[0].bandwidth.value * min(1.0, fit.efficiency))
    if nodes > 1:
        inside = -(-len(ranks) // nodes)
        rate = system.levels[1].rate_of(inside, system.size_of(0)) / inside
        wire = larger(wire, far / (rate * min(1.0, fit.outer or fit.efficiency)))
    if mode == "normal":
        wire = wire + fit.turn * routed.tokens
    else:
        wire = larger(wire, fit.turn * routed.tokens / min(routed.experts, SENDERS))
    fixed = fit.alpha + fit.step * math.log2(nodes)
    fixed = fixed + (fit.each * routed.experts + fit.size * routed.hidden_bytes)
    return CollectiveTime(
        seconds=p_norm(fixed, wire, fit.p),
        level=level.name,
        beyond=_beyond_experts(system, fit, len(ranks), routed.tokens, how),
    )


_single_expert = functools.lru_cache(maxsize=8192)(_exchange_seconds)
"""`_exchange_seconds` of one size: plans repeat them."""


def _by_datasheet(system: System, mode: str, way: str) -> ExchangeFit:
    """Constants of the datasheet, where nothing was fitted."""
    latency = system.levels[0].latency.value
    return ExchangeFit(
        mode=cast(ExchangeMode, mode),
        way=cast(ExchangeWay, way),
        alpha=latency,
        step=latency,
        efficiency=1.0,
        p=1.0,
        ranks=0,
        tokens=0,
        kind="guess",
        source=DATASHEET,
    )


DATASHEET = "the datasheet"


def _beyond_experts(
    system: System, fit: ExchangeFit, ranks: int, tokens: Amount, how: tuple[str, str]
) -> str:
    """A phrase on what exceeds the measurements; "" for nothing."""
    if fit.source == DATASHEET:
        return f"{' '.join(how)} of experts not fitted on {system.name}: its datasheet"
    if fit.kind != "measured":
        return f"{' '.join(how)} of experts not measured on {system.name}"
    if ranks > fit.ranks:
        return f"{ranks} ranks; measured up to {fit.ranks}"
    if isinstance(tokens, float | int) and tokens > fit.tokens:
        return f"{tokens:g} tokens of a rank; measured up to {fit.tokens}"
    return ""
