"""How many bytes a collective sends over each level, and in how many steps one after another.

`nbytes` is the whole buffer, counted like nccl-tests do: all_gather, gather: what is there in the
end; reduce_scatter, scatter: what one rank has in the beginning; all_to_all: what one rank sends,
the part that it keeps included; broadcast, reduce, all_reduce, send, recv: the tensor.

A group of n ranks stands in N units of a level (nodes), with m = n / N ranks in each.  Inside a
unit the m ranks work together; then each of them has 1 / m of the unit's bytes to send on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rooftrace.hardware.systems.records import Pattern, collective_kind


def per_rank_link_bytes(kind: str, nbytes: float, ranks: int | Sequence[int]) -> float:
    """Bytes that the busiest rank of a group sends or receives over its links, as in a ring.

    ranks: how many they are, or their numbers.
    """
    size = ranks if isinstance(ranks, int) else len(ranks)
    return _share(collective_kind(kind).pattern, size, 1) * payload(kind, nbytes)


def payload(kind: str, nbytes: float) -> float:
    """Bytes of the buffer that a collective sends: a barrier has none of its own."""
    own = collective_kind(kind).payload
    return nbytes if own is None else own


def _share(pattern: Pattern, units: int, inside: int) -> float:
    """Bytes that cross a rank's own way out of a unit, as a share of the buffer.

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


def _ceil(whole: int, part: int) -> int:
    return -(-whole // part)


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
