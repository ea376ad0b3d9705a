"""Why another counter's number differs from ours: every difference by module and op.

Both sides are added up by module (without its children).  Only matrix products and convolutions
are compared: other counters leave vector work out, or count it by other conventions.  The
differences add up to the difference of the totals.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain, plain_record
from rooftrace._shown import short
from rooftrace.costmodels.fusion import Plan, execution_model, plan, runs
from rooftrace.costmodels.ops import COMPUTED, MATRIX, Cost
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.hardware.units import format_flops

if TYPE_CHECKING:
    from rooftrace.tracer.phases import PeerCount

AS_CALLED = execution_model("eager").as_called
"""A kernel for each op of the graph, as counters see them."""
EVERYWHERE = "(all modules)"
"""Stands for a module that the peer does not know: backward runs outside of its hooks."""

_VECTOR = ("norm", "pool", "upsample", "grid_sampler")
"""Parts of op names: a counter has formulas for these ops, but they are no matrix work.  A counter
tells nothing of an op but its name."""
_MATRIX_WORDS = ("mm", "matmul", "linear", "conv", "attention", "lstm", "gru", "rnn", "einsum")
"""Parts of the names of ops that may hold matrix work."""

# By name: a stand-in of rooftrace, and the only op whose backward autograd runs in part.
_RNN_BACKWARD = "rooftrace.rnn_backward"
_BEYOND = ("computes the scores a second time", "makes gradients that nothing reads")
"""Work of a fused kernel beyond its ops: for attention, for a recurrent network."""

_Counts = Counter[tuple[str, str]]
"""FLOP (or calls) by module path and op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Plain):
    """Modules in which two counts of matrix FLOPs differ."""

    module: str  # path of the modules, with stars if there are several
    instances: int
    ours: Mapping[str, int]  # FLOP by op, of all instances, without ops on which both agree
    theirs: Mapping[str, int]
    reason: str  # why they differ, "" if the two runs do not show it

    KEYS = "module instances delta ours theirs reason"

    @property
    def delta(self) -> int:
        """FLOP that we count more."""
        return sum(self.ours.values()) - sum(self.theirs.values())


@dataclass(frozen=True, kw_only=True)
class Comparison(Plain):
    """Our count of a step compared with a peer's; the optimizer is left out."""

    peer: str
    version: str
    phase: str
    device: str
    flops_matrix: int  # ours in products and convolutions, attention dense, with recomputation
    flops_vector: int  # our other FLOPs
    peer_matrix: int = 0  # the peer's, a multiply-add as 2
    peer_vector: int = 0
    peer_unit: str = "FLOP"  # "MAC" where the peer counts a multiply-add as 1
    differences: tuple[Difference, ...] = ()  # largest first; they sum to ours - the peer's
    note: str = ""  # on the peer's count
    error: str = ""  # why the peer has none

    def __repr__(self) -> str:
        count = self.error or (
            f"{format_flops(self.peer_matrix)} of {format_flops(self.flops_matrix)} in products, "
            f"{len(self.differences):,} differences"
        )
        return short(self, f"{self.peer} {self.version}, {self.phase}: {count}")

    @property
    def ratio(self) -> float | None:
        """The peer's matrix FLOPs over ours; None where there is no count, or nothing to count."""
        return None if self.error or not self.flops_matrix else self.peer_matrix / self.flops_matrix

    @property
    def unexplained(self) -> int:
        """FLOP of the differences without a reason, signs left out."""
        return sum(abs(d.delta) for d in self.differences if not d.reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON; with an error nothing was counted by the other."""
        counted = "peer_matrix peer_vector peer_unit ratio note differences"
        rest = "error" if self.error else counted
        return plain_record(self, f"peer version phase device flops_matrix flops_vector {rest}")


def compare(graph: OpGraph, peer: PeerCount) -> Comparison:
    """Compare our count of `graph` with the peer's of the same step (without its optimizer)."""
    ours, again, vector = _ours(plan(graph, AS_CALLED))
    made = Comparison(
        peer=peer.peer,
        version=peer.version,
        phase=graph.phase,
        device="",
        flops_matrix=ours.total(),
        flops_vector=vector,
        error=peer.error,
    )
    if peer.error:
        return made
    theirs: _Counts = Counter(
        {key: flop for key, flop in peer.flops.items() if not any(w in key[1] for w in _VECTOR)}
    )
    return replace(
        made,
        device=peer.device,
        peer_matrix=theirs.total(),
        peer_vector=peer.total - theirs.total(),
        peer_unit="FLOP" if peer.scale == 1 else "MAC",
        differences=_differences(graph.phase == "training", ours, again, theirs, peer),
        note=peer.note,
    )


def _ours(planned: Plan) -> tuple[_Counts, _Counts, int]:
    """Matrix FLOP by module and op, the part of it that only fused kernels do, and all vector FLOP.

    The optimizer is left out.
    """
    graph = planned.graph
    counts: _Counts = Counter()
    again: _Counts = Counter()
    vector = 0
    for op, cost in zip(graph.ops, planned.op_costs, strict=True):
        if op.part == "optimizer" or not cost.work:
            continue
        times = graph.times(op)
        vector += times * cost.flops(("vector",), COMPUTED)
        matrix, extra = _dense(cost)
        if not matrix:
            continue
        if op.part == "recompute":
            extra = 0
        if op.name == _RNN_BACKWARD:
            extra += unread_gradients(graph, op)
        modules = runs.kernel_modules(graph, (op.id,), op)
        for module in modules:
            counts[module, op.name] += times * matrix // len(modules)
            again[module, op.name] += times * extra // len(modules)
    return counts, again, vector


def flop_counts(graph: OpGraph) -> dict[tuple[str, str], int]:
    """Matrix FLOP of all that ran, by module path and op, as FlopCounterMode counts them.

    Attention is dense, a multiply-add is 2, recomputation and the optimizer are in it.  As on CUDA,
    attention's backward computes all scores a second time: its FLOP are 2.5 times its forward's.
    """
    planned = plan(graph, AS_CALLED)
    graph = planned.graph
    counts: Counter[tuple[str, str]] = Counter()
    for op, cost in zip(graph.ops, planned.op_costs, strict=True):
        matrix, _ = _dense(cost)
        if matrix:
            modules = runs.kernel_modules(graph, (op.id,), op)
            for module in modules:
                counts[module, op.name] += graph.times(op) * matrix // len(modules)
    return dict(counts)


def _dense(cost: Cost) -> tuple[int, int]:
    """Matrix FLOP with every pair of attention, also those that its mask hides; and how many of
    them a fused kernel computes a second time."""
    products = cost.flops(MATRIX, ("useful", "masked_executed"))
    every = products + cost.flops(MATRIX, ("masked",))
    again = cost.flops(MATRIX, ("recompute",)) * every // max(products, 1)
    return every + again, again


def unread_gradients(graph: OpGraph, op: Op) -> int:
    """FLOP of gradients that only a fused recurrent backward makes; autograd leaves them out.

    Each layer and direction makes the gradient of its first hidden state, 2 B (G H) H, which is
    never needed here, and the gradient of its input, 2 T B (G H) I, which counts if nothing reads
    it.
    """
    values = graph.values
    params = [values[ref.id] for ref in op.arguments["params"]]
    state, sequence = values[op.arguments["hx"][0].id], values[op.arguments["input"].id]
    directions = 2 if op.arguments.get("bidirectional") else 1
    layers = int(op.arguments["num_layers"]) * directions
    group = len(params) // layers
    batch = math.prod(state.shape[1:-1])
    flops: int = sum(2 * batch * params[layer * group + 1].elements for layer in range(layers))
    used = {i for other in graph.ops for i in other.inputs} | set(graph.outputs)
    if op.outputs[0] not in used:
        rows = sequence.elements // sequence.shape[-1]
        flops += sum(2 * rows * params[way * group].elements for way in range(directions))
    return flops


def _differences(
    training: bool, ours: _Counts, again: _Counts, theirs: _Counts, peer: PeerCount
) -> tuple[Difference, ...]:
    missed: _Counts = Counter()
    for (module, op), calls in peer.uncounted.items():
        missed[module, _short(op)] += calls
    result: list[Difference] = []
    if training:
        unknown = {op for _, op in ours} & {op for _, op in missed} - {op for _, op in theirs}
        alone: _Counts = Counter({key: n for key, n in ours.items() if key[1] in unknown})
        result += _by_module(alone, again, Counter(), missed)
        ours = ours - alone
        ours, again, theirs, missed = map(_everywhere, (ours, again, theirs, missed))
    result += _by_module(ours, again, theirs, missed)
    return tuple(sorted(result, key=lambda d: (-abs(d.delta), d.module)))


def _everywhere(counts: _Counts) -> _Counts:
    """Counts by op, with all modules as one."""
    result: _Counts = Counter()
    for (_, op), n in counts.items():
        result[EVERYWHERE, op] += n
    return result


def _by_module(
    ours: _Counts, again: _Counts, theirs: _Counts, missed: _Counts
) -> Iterator[Difference]:
    """The differences: one for all modules of a pattern that differ in the same ops."""
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    ours_in, theirs_in, again_in, missed_in = map(_nested, (ours, theirs, again, missed))
    for module in dict.fromkeys((*ours_in, *theirs_in)):
        mine, other = ours_in.get(module, {}), theirs_in.get(module, {})
        if sum(mine.values()) == sum(other.values()):
            continue
        both = {op for op in mine if mine[op] == other.get(op)}
        key = tuple(
            tuple(sorted((op, n) for op, n in side.items() if op not in both))
            for side in (mine, other)
        )
        alike[pattern_of(module), key].append(module)
    for (pattern, (mine, other)), members in alike.items():
        n, first = len(members), members[0]
        yield Difference(
            module=pattern if n > 1 else first,
            instances=n,
            ours={op: n * flop for op, flop in mine},
            theirs={op: n * flop for op, flop in other},
            reason=_reason(
                dict(mine), dict(other), again_in.get(first, {}), missed_in.get(first, {})
            ),
        )


def _nested(counts: _Counts) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = defaultdict(dict)
    for (module, op), n in counts.items():
        nested[module][op] = n
    return nested


def _reason(
    ours: Mapping[str, int],
    theirs: Mapping[str, int],
    again: Mapping[str, int],
    missed: Mapping[str, int],
) -> str:
    """Why the counts differ: ops without a formula at the peer, or work that its run did not do."""
    delta = sum(ours.values()) - sum(theirs.values())
    if delta == sum(again.get(op, 0) for op in ours) > 0:
        kernels = [f"{op} {_BEYOND[op == _RNN_BACKWARD]}" for op in ours if again.get(op)]
        return f"{', '.join(kernels)}; the ops run there did not"
    names = [op for op in missed if any(word in op for word in _MATRIX_WORDS) or _is_foreign(op)]
    if not names or delta < 0:
        return ""
    return f"no formula for {', '.join(names[:4])}"


def _is_foreign(op: str) -> bool:
    """Whether an op is from outside of torch, so that it may do anything."""
    namespace, dot, _ = op.partition(".")
    return bool(dot) and namespace not in ("aten", "prim", "prims")


def _short(op: str) -> str:
    """The name of an op without its overload."""
    parts = op.split(".")
    return ".".join(parts[:-1]) if len(parts) > 2 else op
