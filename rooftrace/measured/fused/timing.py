"""How long each kernel of a compiled step ran, and the ops behind it, by a trace of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from rooftrace.errors import ProfileError
from rooftrace.measured.alignment import keys
from rooftrace.measured.fused.compiled import CompiledGraph, CompiledKernel
from rooftrace.measured.fused.kerneltimes import KernelTime
from rooftrace.measured.fused.matching import is_launched, matched
from rooftrace.measured.fused.stepcalls import (
    StepCall,
    StepWalk,
    calls_beside,
    merged,
    stored_gradients,
)
from rooftrace.measured.traces import Trace
from rooftrace.tracer.graph import OpGraph

_Place = tuple[int, int]
"""A kernel that the compiler wrote down: the number of its graph, and its place there."""


def kernel_times(
    trace: Trace, compiled: Sequence[CompiledGraph], graph: OpGraph
) -> tuple[KernelTime, ...]:
    """The calls of the first step of `trace`, in order: what they took, and their ops in `graph`.

    compiled: what the compiler made, in the order of its graphs.  graph: written out, as the
    execution model `compiled` runs it.  A call without ops belongs to nothing in the graph.
    Raises ProfileError for a trace without steps.
    """
    if not trace.steps:
        raise ProfileError(f"{trace.source}: no step in the trace")
    step = trace.steps[0]
    expected = {
        (number, place): kernel
        for number, made in enumerate(compiled)
        for place, kernel in enumerate(made.kernels)
    }
    partners = matched(compiled, graph)
    known = {op for each in partners for op in each.values()}
    outside = [op for op in graph.ops if is_launched(op) and op.id not in known]
    wanted = [keys.key_of_op(graph, op) for op in outside]
    walk = StepWalk(
        trace, frozenset(kernel.name for kernel in expected.values()), frozenset(wanted)
    )
    listed = walk.of(step)
    called = _in_order(listed, expected)
    beside, pieces = calls_beside(listed, outside, wanted)
    pieces |= stored_gradients(listed, beside, graph)
    seconds: dict[_Place, float] = defaultdict(float)
    for call, at in zip(listed, called, strict=True):
        if at is not None:
            seconds[at] += call.seconds
    owned = _owned(compiled, partners, seconds, graph, frozenset(beside.values()))
    times: list[KernelTime] = []
    begun: set[_Place] = set()
    for number, (call, at) in enumerate(zip(listed, called, strict=True)):
        ops, parts = owned[at] if at is not None else ((), ())
        if at in begun:  # one call of a library is several kernels
            ops, parts = (), tuple(sorted((*ops, *parts)))
        elif at is not None:
            begun.add(at)
        if number in beside:
            ops = (beside[number],)
        elif number in pieces:
            parts = (pieces[number],)
        times.append(
            KernelTime(
                name=call.name,
                seconds=call.seconds,
                ops=ops,
                targets=tuple(graph.ops[op].target for op in ops),
                parts=parts,
                compiled=call.inside,
            )
        )
    return tuple(times)


def _in_order(
    listed: Sequence[StepCall], expected: Mapping[_Place, CompiledKernel]
) -> list[_Place | None]:
    """The expected kernel of each call inside of compiled graphs, matched in order by name.

    In a replay of a CUDA graph nobody names the call of a library: its kernels have names of their
    own.  Between two that match they are paired if there are as many, and if only one call of a
    library is expected there, all are of it.
    """
    inside = [number for number, call in enumerate(listed) if call.inside]
    have, places = [(listed[number].name, ()) for number in inside], list(expected)
    pairs = keys.common(have, [(kernel.name, ()) for kernel in expected.values()])
    result: list[_Place | None] = [None] * len(listed)
    for a, b in pairs:
        result[inside[a]] = places[b]
    for mine, other in keys.gaps(pairs, len(inside), len(places)):
        bare = [inside[i] for i in mine if listed[inside[i]].bare]
        wanted = [places[j] for j in other if expected[places[j]].is_library]
        if len(wanted) == 1:
            wanted *= len(bare)
        if len(wanted) == len(bare):
            for number, at in zip(bare, wanted, strict=True):
                result[number] = at
    return result


def _owned(
    compiled: Sequence[CompiledGraph],
    partners: Sequence[Mapping[int, int]],
    seconds: Mapping[_Place, float],
    graph: OpGraph,
    beside: Collection[int],
) -> dict[_Place, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By kernel (graph, place): the ops that it computes, and those of which it computes a part.

    An op that was taken apart into several kernels belongs to the one that took most time.
    beside: ops that ran outside of compiled graphs.
    """
    shares: dict[int, list[_Place]] = defaultdict(list)
    touched: dict[_Place, set[int]] = {}
    for number, (made, partner) in enumerate(zip(compiled, partners, strict=True)):
        homes = made.homes()
        for place, kernel in enumerate(made.kernels):
            touched[number, place] = {partner[op] for op in kernel.parts if op in partner}
        for op, place in homes.items():
            if op in partner:
                shares[partner[op]].append((number, place))
    home = {op: max(places, key=lambda at: seconds.get(at, 0.0)) for op, places in shares.items()}
    owned: dict[_Place, list[int]] = defaultdict(list)
    for op, at in sorted(home.items()):
        owned[at].append(op)
    for op, reader in merged(graph, home, beside):
        home[op] = home[reader]
        owned[home[reader]].append(op)
    return {
        at: (tuple(sorted(owned[at])), tuple(sorted(ops - set(owned[at]))))
        for at, ops in touched.items()
    }
