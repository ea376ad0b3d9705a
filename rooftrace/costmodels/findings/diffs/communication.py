"""What changed in what processes exchange: the mesh, the groups, the bytes, what is hidden."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.findings.diffs.edits import Edit, pairs_of
from rooftrace.costmodels.findings.diffs.sides import ExchangeFacts, Sides
from rooftrace.hardware.units import format_traffic

_SHOWN = 4
"""Ranks of a group that a sentence names."""


def mesh_words(first: Mapping[str, int], second: Mapping[str, int]) -> str:
    """A mesh: "mesh dp=8 instead of dp=4"; "" where both have the same."""
    if list(first.items()) == list(second.items()):
        return ""
    before, after = (
        ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "none"
        for mesh in (first, second)
    )
    return f"mesh {after} instead of {before}"


def exchange_words(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """How exchanges differ: in kind, axis, group, and else in bytes."""
    kinds: dict[str, dict[str, None]] = defaultdict(dict)
    moved: dict[tuple[str, str], list[int]] = {}
    for edit, op, partner in pairs_of(edits):
        first, second = sides[0].exchange(op), sides[1].exchange(partner)
        if first is None or second is None or first == second:
            continue
        text = _group(first, second)
        if text:
            kinds[text][second.kind] = None
        elif first.bytes != second.bytes:
            sums = moved.setdefault((second.kind, second.axis), [0, 0])
            sums[0] += edit.times * first.bytes
            sums[1] += edit.times * second.bytes
        else:
            kinds[f"over {second.axis}: waited for, cut or cast otherwise"][second.kind] = None
    for text, names in kinds.items():
        yield f"{', '.join(names)} {text}"
    for (kind, axis), (before, after) in moved.items():
        yield f"{kind} over {axis}: {format_traffic(after)} instead of {format_traffic(before)}"


def _group(first: ExchangeFacts, second: ExchangeFacts) -> str:
    """How two exchanges differ in what they are, and with whom; "" where they do not."""
    if first.kind != second.kind:
        return f"over {second.axis} instead of {first.kind} over {first.axis}"
    if first.size != second.size:
        other = "" if first.axis == second.axis else f" over {first.axis}"
        return f"over {second.axis}: group of {second.size} instead of {first.size}{other}"
    if first.axis != second.axis:
        return f"over {second.axis} instead of {first.axis}"
    if first.places != second.places:
        places = (f"{_ranks(exchange.places)}" for exchange in (second, first))
        return f"over {second.axis}: ranks {' instead of '.join(places)} of the group's first"
    return ""


def _ranks(places: Sequence[int]) -> str:
    shown = ", ".join(f"+{place}" for place in places[:_SHOWN])
    return f"{shown} ..." if len(places) > _SHOWN else shown


def hidden(estimate: Estimate) -> float:
    """Seconds of exchanges that run while the main stream computes."""
    totals = network_totals(estimate)
    return totals["communication"] - totals["exposed"]


def network_totals(estimate: Estimate) -> dict[str, float]:
    """Seconds of all exchanges of a step, and of those that computing waits for."""
    return {
        "communication": sum(each.calls * each.seconds for each in estimate.exchanges),
        "exposed": sum(each.exposed for each in estimate.exchanges),
    }
