"""The kernels of a step as a page shows them: sums of those that are alike, as columns of numbers.

Kernels are alike where name, module pattern, family, part, precision and fusion agree.  A page
holds so many of them at most; those with less time are summed up by module, family and part, so
that every total stays whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooftrace.costmodels.estimating import Estimate, Row
from rooftrace.costmodels.estimating.rows import lead_op
from rooftrace.costmodels.registry import find_rule
from rooftrace.reporting.view import words
from rooftrace.tracer.graph import Op, OpGraph
from rooftrace.tracer.paths import pattern_of

MOST_GROUPS = 1500
OTHERS_DEPTH, MOST_OTHERS = 3, 500
"""Names of a module path by which kernels beyond the most are summed up: fewer, where that leaves
more sums than these."""
LONGEST_FORMULA = 240
INPUTS_SHOWN, OPS_SHOWN = 4, 12


@dataclass(slots=True)
class Interned:
    """Texts of a page, each of which it holds once."""

    texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def place(self, text: str) -> int:
        """Where a text stands among `texts`."""
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


@dataclass(slots=True)
class _Sums:
    """Sums of kernels that are alike; `largest` is the one with most time, by which they look."""

    largest: Row
    calls: int = 0
    flops: int = 0
    useful: int = 0
    bytes: int = 0
    net: int = 0
    seconds: list[float] = field(default_factory=list)  # by chip
    limits: list[dict[str, float]] = field(default_factory=list)  # by chip: seconds by limiter


def columns_of(estimates: Sequence[Estimate], interned: Interned) -> dict[str, Any]:
    """The kernels of one step, most time on the first chip first, as columns of equal length.

    estimates: of one plan, on each chip.  Numbers are FLOP, byte and second; texts are places in
    `interned`.
    """
    first = estimates[0]
    sums = _summed(estimates)
    ranked = sorted(sums.items(), key=lambda entry: (-entry[1].seconds[0], entry[0]))
    looks = [_look(first, entry, key) for key, entry in ranked]
    texts: Mapping[str, list[int]] = {
        name: [interned.place(look[name]) for look in looks]
        for name in ("name", "module", "family", "part", "precision", "shapes", "formula", "ops")
    }
    entries = [entry for _, entry in ranked]
    return {
        **texts,
        "joins": [interned.place(look["joins"]) for look in looks],
        "source": [interned.place(look["source"]) for look in looks],
        "calls": [entry.calls for entry in entries],
        "flops": [entry.flops for entry in entries],
        "useful": [entry.useful for entry in entries],
        "bytes": [entry.bytes for entry in entries],
        "net": [entry.net for entry in entries],
        "seconds": [[entry.seconds[chip] for entry in entries] for chip in range(len(estimates))],
        "limit": [
            [interned.place(max(e.limits[chip], key=e.limits[chip].__getitem__)) for e in entries]
            for chip in range(len(estimates))
        ],
    }


def _summed(estimates: Sequence[Estimate]) -> dict[tuple[str, ...], _Sums]:
    rows = estimates[0].rows
    keys = [_key(estimates[0], row) for row in rows]
    kept = _kept(rows, keys)
    rest = (
        []
        if kept is None
        else [row for row, key in zip(rows, keys, strict=True) if key not in kept]
    )
    depth = _depth(rest)
    sums: dict[tuple[str, ...], _Sums] = {}
    for index, row in enumerate(rows):
        key = keys[index] if kept is None or keys[index] in kept else _rest(row, depth)
        entry = sums.get(key)
        if entry is None:
            entry = sums[key] = _Sums(row, seconds=[0.0] * len(estimates))
            entry.limits = [defaultdict(float) for _ in estimates]
        if row.timing.t_device > entry.largest.timing.t_device:
            entry.largest = row
        entry.calls += row.count
        entry.flops += row.flops
        entry.useful += row.flops_causal
        entry.bytes += row.bytes
        entry.net += row.bytes_net
        for chip, estimate in enumerate(estimates):
            timing = estimate.rows[index].timing
            entry.seconds[chip] += timing.t_device
            entry.limits[chip][timing.regime] += timing.t_device
    return sums


def _key(estimate: Estimate, row: Row) -> tuple[str, ...]:
    joins = estimate.plan.groups[row.index].joins
    module = pattern_of(row.module)
    return (row.name, module, row.family, row.part, row.precision, "; ".join(joins))


def _kept(rows: Sequence[Row], keys: Sequence[tuple[str, ...]]) -> set[tuple[str, ...]] | None:
    """The keys with most time, where there are more than a page holds; None: all are kept."""
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for row, key in zip(rows, keys, strict=True):
        seconds[key] += row.timing.t_device
    if len(seconds) <= MOST_GROUPS:
        return None
    ranked = sorted(seconds, key=lambda key: (-seconds[key], key))
    return set(ranked[:MOST_GROUPS])


def _depth(rest: Sequence[Row]) -> int:
    """By how many names of their paths kernels are summed up, so that few enough sums are left."""
    return next(
        depth
        for depth in range(OTHERS_DEPTH, -1, -1)
        if not depth or len({_rest(row, depth) for row in rest}) <= MOST_OTHERS
    )


def _rest(row: Row, depth: int) -> tuple[str, ...]:
    """The key of a kernel that is summed up with others of its module, family and part."""
    module = ".".join(pattern_of(row.module).split(".")[:depth])
    return ("", module, row.family, row.part, "", "")


def _look(estimate: Estimate, entry: _Sums, key: tuple[str, ...]) -> dict[str, str]:
    """The texts of a group: what it is, its shapes, the formula of its rule, why it is fused."""
    row, graph = entry.largest, estimate.graph
    if not key[0]:  # the sum of smaller ones
        look = dict.fromkeys(("precision", "shapes", "formula", "ops", "joins", "source"), "")
        return {"name": "smaller kernels", "module": key[1], "family": row.family,
                "part": row.part, **look}  # fmt: skip
    lead = lead_op(estimate.plan, estimate.plan.groups[row.index])
    ops = [words.op_name(graph.ops[i].target) for i in row.ops] if len(row.ops) > 1 else []
    more = f" and {len(ops) - OPS_SHOWN} more" if len(ops) > OPS_SHOWN else ""
    return {
        "name": words.kernel_name(row.name),
        "module": pattern_of(row.module),
        "family": row.family,
        "part": row.part,
        "precision": row.precision,
        "shapes": shapes_of(graph, lead),
        "formula": formula_of(lead),
        "ops": f"{', '.join(ops[:OPS_SHOWN])}{more}",
        "joins": "; ".join(dict.fromkeys(estimate.plan.groups[row.index].joins)),
        "source": lead.source or "",
    }


def shapes_of(graph: OpGraph, op: Op) -> str:
    """ "bf16[8, 64], bf16[64, 32] -> bf16[8, 32]": inputs and outputs of an op."""
    inputs = [str(graph.values[index]) for index in op.inputs]
    outputs = [str(graph.values[index]) for index in op.outputs]
    left = len(inputs) - INPUTS_SHOWN
    shown = inputs[:INPUTS_SHOWN] + ([f"{left} more"] if left > 0 else [])
    return f"{', '.join(shown)} -> {', '.join(outputs[:INPUTS_SHOWN]) or 'nothing'}"


def formula_of(op: Op) -> str:
    """What the rule of an op says that it computes: the first sentences of its docstring."""
    rule = find_rule(op.target)
    text = (rule.price.__doc__ or "") if rule is not None else ""
    first = " ".join(text.strip().partition("\n\n")[0].split())
    return first if len(first) <= LONGEST_FORMULA else f"{first[: LONGEST_FORMULA - 1]}…"
