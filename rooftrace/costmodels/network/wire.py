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

from rooftrace.hardware.systems.records import COLLECTIVES

TWICE = frozenset({"all_reduce", "barrier"})
"""A reduce-scatter, then an all-gather."""
SPREAD = frozenset({"all_gather", "reduce_scatter"})
WHOLE = frozenset({"broadcast", "reduce"})
ROOTED = frozenset({"gather", "scatter"})
PAIR = frozenset({"send", "recv"})
BARRIER_BYTES = 4
"""A barrier is an all_reduce of one number."""


def check_kind(kind: str) -> None:
    """Raise ValueError for a word that is no collective."""
    if kind not in COLLECTIVES:
        raise ValueError(f"collective {kind!r}: expected one of {', '.join(COLLECTIVES)}")


def per_rank_link_bytes(kind: str, nbytes: float, ranks: int | Sequence[int]) -> float:
    """Bytes that the busiest rank of a group sends or receives over its links, as in a ring.

    ranks: how many they are, or their numbers.
    """
    check_kind(kind)
    size = ranks if isinstance(ranks, int) else len(ranks)
    return _share(kind, size, 1) * (BARRIER_BYTES if kind == "barrier" else nbytes)


def _share(kind: str, units: int, inside: int) -> float:
    """Bytes that cross a rank's own way out of a unit, as a share of the buffer.

    units: how many units of `inside` ranks each take part.
    """
    if units <= 1:
        return 0.0
    others = (units - 1) / units
    if kind in TWICE:
        return 2 * others / inside
    if kind in SPREAD:
        return others / inside
    if kind in WHOLE:
        return 1 / inside
    if kind in PAIR:
        return 1.0
    return others  # all_to_all, gather, scatter


def level_bytes(kind: str, nbytes: Any, counts: Sequence[int], *, ring: bool = False) -> list[Any]:
    """Bytes that each rank sends over each level, from the inside out.

    counts: the ranks, then how many units of each level they stand in: (16, 2, 1).  ring: how NCCL
    does it, with rings of all ranks through all nodes; else the least that any algorithm sends.
    """
    shares = []
    ranks = counts[0]
    for below, above in pairwise(counts):
        units = _ceil(below, above)  # units inside that this level joins
        inside = _ceil(ranks, below)  # ranks in each of them
        if kind in PAIR:
            share = 1.0 if units > 1 and above == 1 else 0.0
        elif kind == "all_to_all" or kind in ROOTED:
            # Peers behind this level, but not behind the next one.
            share = (_ceil(ranks, above) - inside) / ranks
        elif ring and units > 1 and kind in TWICE | SPREAD:
            share = _share(kind, ranks // above, 1) / inside
        else:
            share = _share(kind, units, inside)
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
    if kind in TWICE:
        around, tree = 2 * (units - 1), 2 * (units - 1).bit_length()
        return min(around, tree) if outermost else around
    if kind in PAIR or kind in ROOTED or kind == "all_to_all":
        return 1
    return units - 1
