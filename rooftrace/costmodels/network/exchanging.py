"""Seconds of sending tokens to the experts of a mixture, and of bringing them back (DeepEP).

Each rank has tokens; each token goes to `chosen` experts, spread evenly over the ranks.  A rank is
sent a token once, however many of its experts want it; in the mode "low-latency" once for each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rooftrace._amounts import larger
from rooftrace.costmodels.network.timing import CollectiveTime, p_norm
from rooftrace.hardware.systems import System
from rooftrace.hardware.systems.records import (
    EXCHANGE_MODES,
    EXCHANGE_WAYS,
    ExchangeFit,
    ExchangeMode,
    ExchangeWay,
)

if TYPE_CHECKING:
    from rooftrace._amounts import Amount

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
    return (_single if single else _seconds)(system, routed, tuple(ranks), (mode, which))


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The tokens of one rank that go to experts; numbers, or arrays for many sizes."""

    tokens: Any
    hidden_bytes: Any
    chosen: int
    experts: int


def exchange_bytes(routed: RoutedTokens, ranks: int, nodes: int, mode: str) -> tuple[Any, Any]:
    """Bytes that a rank sends to other ranks, and those of them that leave its node."""
    whole = routed.tokens * routed.hidden_bytes
    to_ranks = to_nodes = float(routed.chosen)
    if mode == "normal":
        to_ranks, to_nodes = distinct(ranks, routed.chosen), distinct(nodes, routed.chosen)
    return whole * to_ranks * (ranks - 1) / ranks, whole * to_nodes * (nodes - 1) / nodes


def distinct(parts: int, chosen: int) -> float:
    """How many of `parts` equal parts a token goes to, on average, with `chosen` even draws."""
    return parts * (1 - (1 - 1 / parts) ** chosen)


@functools.lru_cache(maxsize=8192)
def _single(
    system: System, routed: RoutedTokens, ranks: tuple[int, ...], how: tuple[str, str]
) -> CollectiveTime:
    """The seconds of one size, which a plan asks for again and again."""
    return _seconds(system, routed, ranks, how)


def _seconds(
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
        beyond=_beyond(system, fit, len(ranks), routed.tokens, how),
    )


def _by_datasheet(system: System, mode: str, way: str) -> ExchangeFit:
    """Constants that are the datasheet's, where nothing was fitted."""
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


def _beyond(
    system: System, fit: ExchangeFit, ranks: int, tokens: Amount, how: tuple[str, str]
) -> str:
    """What lies outside of measurements; "" where nothing does."""
    if fit.source == DATASHEET:
        return f"{' '.join(how)} of experts not fitted on {system.name}: its datasheet"
    if fit.kind != "measured":
        return f"{' '.join(how)} of experts not measured on {system.name}"
    if ranks > fit.ranks:
        return f"{ranks} ranks; measured up to {fit.ranks}"
    if isinstance(tokens, float | int) and tokens > fit.tokens:
        return f"{tokens:g} tokens of a rank; measured up to {fit.tokens}"
    return ""
