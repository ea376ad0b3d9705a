"""Why another counter's number differs from ours: every difference by module and op.

Both sides are added up by module (its own ops, without its children).  Only matrix products and
convolutions are set side by side: other counters leave vector work out, or count some of it by
conventions of their own.  The differences add up to the difference of the totals.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimating import Plan, plan
from rooftrace.costmodels.fusion import kernel_modules
from rooftrace.costmodels.pricing import COMPUTED, MATRIX
from rooftrace.tracer.graph import Op, OpGraph, pattern_of

if TYPE_CHECKING:
    from rooftrace.tracer.peers import PeerCount

EVERYWHERE = "(all modules)"
"""Stands for the module where a peer does not know it: backward runs outside of its hooks."""

_VECTOR = ("norm", "pool", "upsample", "grid_sampler")
"""In names of ops that a counter has formulas for and that are no matrix work."""
_MATRIX_WORDS = ("mm", "matmul", "linear", "conv", "attention", "lstm", "gru", "rnn", "einsum")
"""In names of ops that may hold matrix work."""

_RNN_BACKWARD = "rooftrace.rnn_backward"
_BEYOND = ("computes the scores a second time", "makes gradients that nothing reads")
"""What kernels for many ops do beyond them: of attention, and of a recurrent network."""

_Counts = Counter[tuple[str, str]]
"""FLOP (or calls) by module path and op."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Modules in which two counts of matrix FLOPs differ.

    module: their path, with stars where there are several; instances: how many.  ours, theirs: FLOP
    by op, of all instances, without ops that both count alike.  reason: why, as far as the two runs
    show; "" where they do not.
    """

    module: str
    instances: int
    ours: Mapping[str, int]
    theirs: Mapping[str, int]
    reason: str

    @property
    def delta(self) -> int:
        """FLOP that we count more."""
        return sum(self.ours.values()) - sum(self.theirs.values())


@dataclass(frozen=True)
class Comparison:
    """Our count of a step beside a peer's.

    flops_matrix: ours in matrix products and convolutions, attention dense, recomputation included,
    the optimizer left out.  flops_vector: our other FLOPs.  peer_matrix, peer_vector: the peer's, a
    multiply-add as 2.  peer_unit: "FLOP", or "MAC" where the peer's own figures count a
    multiply-add as 1.  differences: largest first; they add up to flops_matrix - peer_matrix.
    note: what else to know of the peer's count.  error: why the peer has none.
    """

    peer: str
    version: str
    phase: str
    device: str
    flops_matrix: int
    flops_vector: int
    peer_matrix: int = 0
    peer_vector: int = 0
    peer_unit: str = "FLOP"
    differences: tuple[Difference, ...] = ()
    note: str = ""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """The peer's matrix FLOPs over ours; None where there is no count, or nothing to count."""
        return None if self.error or not self.flops_matrix else self.peer_matrix / self.flops_matrix

    @property
    def unexplained(self) -> int:
        """FLOP of the differences without a reason, signs left out."""
        return sum(abs(d.delta) for d in self.differences if not d.reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        names = ("peer", "version", "phase", "device", "flops_matrix", "flops_vector")
        result = {name: getattr(self, name) for name in names}
        if self.error:
            return {**result, "error": self.error}
        return {
            **result,
            "peer_matrix": self.peer_matrix,
            "peer_vector": self.peer_vector,
            "peer_unit": self.peer_unit,
            "ratio": self.ratio,
            "note": self.note,
            "differences": [
                {
                    "module": d.module,
                    "instances": d.instances,
                    "delta": d.delta,
                    "ours": dict(d.ours),
                    "theirs": dict(d.theirs),
                    "reason": d.reason,
                }
                for d in self.differences
            ],
        }


def compare(graph: OpGraph, peer: PeerCount) -> Comparison:
    """Our count of `graph` beside what `peer` counted of the same step (without its optimizer)."""
    ours, again, vector = _ours(plan(graph, "eager"))
    matrix = ours.total()
    if peer.error:
        return Comparison(
            peer.peer, peer.version, graph.phase, "", matrix, vector, error=peer.error
        )
    theirs: _Counts = Counter(
        {key: flop for key, flop in peer.flops.items() if not any(w in key[1] for w in _VECTOR)}
    )
    return Comparison(
        peer.peer,
        peer.version,
        graph.phase,
        peer.device,
        matrix,
        vector,
        theirs.total(),
        peer.total - theirs.total(),
        "FLOP" if peer.scale == 1 else "MAC",
        _differences(graph.phase == "training", ours, again, theirs, peer),
        peer.note,
    )


def _ours(planned: Plan) -> tuple[_Counts, _Counts, int]:
    """FLOP of matrix work by module and op; what of it a kernel does beyond what its ops would one
    by one; all vector work.  Without the optimizer."""
    graph = planned.graph
    found: _Counts = Counter()
    again: _Counts = Counter()
    vector = 0
    for op, cost in zip(graph.ops, planned.op_costs, strict=True):
        if op.part == "optimizer" or not cost.work:
            continue
        times = graph.times(op)
        vector += times * cost.flops(("vector",), COMPUTED)
        matrix = cost.flops(MATRIX, (*COMPUTED, "masked"))
        if not matrix:
            continue
        extra = cost.flops(MATRIX, ("recompute",)) if op.part != "recompute" else 0
        if op.name == _RNN_BACKWARD:
            extra += unread_gradients(graph, op)
        modules = kernel_modules(graph, (op.id,), op)
        for module in modules:
            found[module, op.name] += times * matrix // len(modules)
            again[module, op.name] += times * extra // len(modules)
    return found, again, vector


def unread_gradients(graph: OpGraph, op: Op) -> int:
    """FLOP of gradients that the backward of a whole network makes, and autograd leaves out.

    By layer and direction the gradient of the first hidden state, 2 B (G H) H, which never needs
    one here; and that of the input, 2 T B (G H) I, where nothing takes it.
    """
    values = graph.values
    params = [values[ref.id] for ref in op.arguments["params"]]
    state, given = values[op.arguments["hx"][0].id], values[op.arguments["input"].id]
    directions = 2 if op.arguments.get("bidirectional") else 1
    layers = int(op.arguments["num_layers"]) * directions
    group = len(params) // layers
    batch = math.prod(state.shape[1:-1])
    flops: int = sum(2 * batch * params[layer * group + 1].elements for layer in range(layers))
    used = {i for other in graph.ops for i in other.inputs} | set(graph.outputs)
    if op.outputs[0] not in used:
        rows = given.elements // given.shape[-1]
        flops += sum(2 * rows * params[way * group].elements for way in range(directions))
    return flops


def _differences(
    training: bool, ours: _Counts, again: _Counts, theirs: _Counts, peer: PeerCount
) -> tuple[Difference, ...]:
    missed: _Counts = Counter()
    for (module, op), calls in peer.uncounted.items():
        missed[module, _short(op)] += calls
    found: list[Difference] = []
    if training:
        unknown = {op for _, op in ours} & {op for _, op in missed} - {op for _, op in theirs}
        alone: _Counts = Counter({key: n for key, n in ours.items() if key[1] in unknown})
        found += _by_module(alone, again, Counter(), missed)
        ours = ours - alone
        ours, again, theirs, missed = map(_everywhere, (ours, again, theirs, missed))
    found += _by_module(ours, again, theirs, missed)
    return tuple(sorted(found, key=lambda d: (-abs(d.delta), d.module)))


def _everywhere(counts: _Counts) -> _Counts:
    """The same with all modules as one."""
    found: _Counts = Counter()
    for (_, op), n in counts.items():
        found[EVERYWHERE, op] += n
    return found


def _by_module(
    ours: _Counts, again: _Counts, theirs: _Counts, missed: _Counts
) -> Iterator[Difference]:
    """One for all modules of a pattern that differ in the same ops."""
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
            pattern if n > 1 else first,
            n,
            {op: n * flop for op, flop in mine},
            {op: n * flop for op, flop in other},
            _reason(dict(mine), dict(other), again_in.get(first, {}), missed_in.get(first, {})),
        )


def _nested(counts: _Counts) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for (module, op), n in counts.items():
        found[module][op] = n
    return found


def _reason(
    ours: Mapping[str, int],
    theirs: Mapping[str, int],
    again: Mapping[str, int],
    missed: Mapping[str, int],
) -> str:
    """What the peer saw in the module and has no formula for, or what its run did not do."""
    delta = sum(ours.values()) - sum(theirs.values())
    if delta == sum(again.get(op, 0) for op in ours) > 0:
        kernels = [f"{op} {_BEYOND[op == _RNN_BACKWARD]}" for op in ours if again.get(op)]
        return f"{', '.join(kernels)}; the ops run there did not"
    names = [op for op in missed if any(word in op for word in _MATRIX_WORDS) or _is_foreign(op)]
    if not names or delta < 0:
        return ""
    return f"no formula for {', '.join(names[:4])}"


def _is_foreign(op: str) -> bool:
    """Whether an op of the dispatcher is none of torch's, so that it may hold anything."""
    namespace, dot, _ = op.partition(".")
    return bool(dot) and namespace not in ("aten", "prim", "prims")


def _short(op: str) -> str:
    """An op without its overload."""
    parts = op.split(".")
    return ".".join(parts[:-1]) if len(parts) > 2 else op
