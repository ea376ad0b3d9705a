"""Ops of ours that stand in a graph for orders of the host to the device that are no work.

A stream is a queue of the device.  `record_event` makes an event, a value without bytes, when
everything before it on its stream is done; `wait_event` holds its stream back until then.
`resize_storage` frees the bytes of a tensor that stays alive, or allocates them again.
`free_storages` is where the code lets go of tensors that would else last to the end of a step, and
`bring_storages` where tensors come from the host that would else be there from its beginning.
`graph_break` ends a compiled graph: the next ops are another one or, with the fact `eager`, code
that Python runs op by op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from rooftrace.graph.graph import OpGraph
    from rooftrace.graph.records import Op

RECORD_EVENT = "rooftrace.record_event"
WAIT_EVENT = "rooftrace.wait_event"
RESIZE_STORAGE = "rooftrace.resize_storage"
FREE_STORAGES = "rooftrace.free_storages"
BRING_STORAGES = "rooftrace.bring_storages"
GRAPH_BREAK = "rooftrace.graph_break"
STREAM_MARKS = frozenset({RECORD_EVENT, WAIT_EVENT})
"""Marks of the order of work on streams."""
BOUNDARIES = STREAM_MARKS | {GRAPH_BREAK}
"""Marks that no kernel begins before and ends after."""
MEMORY_MARKS = frozenset({FREE_STORAGES, BRING_STORAGES})
"""Marks of acts of code on tensors, which any code that runs the graph does itself."""
MARKS = BOUNDARIES | MEMORY_MARKS | {RESIZE_STORAGE}
"""Ops without work, which no pass may leave out."""

COMPILED, ENTERS = "compiled", "enters"
"""Facts of an op: in which callable of torch.compile it runs, and whether a call begins with it."""


def is_eager(op: Op) -> bool:
    """Whether a graph break is followed by code that Python runs op by op."""
    return op.name == GRAPH_BREAK and bool(op.facts.get("eager"))


def eager_ops(ops: Sequence[Op]) -> frozenset[int]:
    """Ops that stand between compiled graphs, which Python runs one by one."""
    eager, numbers = False, list[int]()
    for op in ops:
        if op.name == GRAPH_BREAK:
            eager = is_eager(op)
        elif eager:
            numbers.append(op.id)
    return frozenset(numbers)


def with_breaks(graph: OpGraph, cuts: Mapping[int, bool]) -> OpGraph:
    """The graph with a break in front of these ops.  cuts: whether the ops behind it are eager."""
    if not cuts:
        return graph
    ops: list[Op] = []
    for op in graph.ops:
        if op.id in cuts:
            facts = {"eager": True} if cuts[op.id] else {}
            ops.append(replace(_like(op), target=f"{GRAPH_BREAK}.default", facts=facts))
        ops.append(op)
    return graph.with_ops(ops)


def _like(op: Op) -> Op:
    """An op without work at the place of another one."""
    return replace(
        op,
        kind="view",
        arguments={},
        inputs=(),
        outputs=(),
        family="other",
        function="",
        flops_torch=None,
        assumptions=(),
        steps={},
        holds=(),
        stream="",
        collective=None,
    )


def compiled_cuts(ops: Sequence[Op]) -> dict[int, bool]:
    """In front of which ops compiled code of the script begins or ends, as its facts tell.

    A view, or an op on a side stream, counts as inside where the kernels around it are.
    """
    inside = [COMPILED in op.facts for op in ops]
    after: Op | None = None
    for place in range(len(ops) - 1, -1, -1):
        op = ops[place]
        if inside[place] or (op.kind != "view" and not op.stream):
            after = op
        elif after is not None and place and COMPILED in after.facts and ENTERS not in after.facts:
            inside[place] = True
    cuts: dict[int, bool] = {}
    for place, op in enumerate(ops):
        before = [inside[place - 1]] if place else [True]
        before += [inside[last] for last in _ends_of_iterations(ops, place)]
        if set(before) != {inside[place]} or (place and ENTERS in op.facts):
            cuts[op.id] = not inside[place]
    return cuts


def without_variables(graph: OpGraph) -> OpGraph:
    """The graph, in which values of compiled code live for what reads them alone.

    Python's variables, nodes of autograd and caches of checkpoints hold a value longer.  Compiled
    code has none of these: its forward hands on what its backward reads (AOTAutograd's partitioner,
    torch/_functorch/partitioners.py).  A value that is let go of between two ops of one compiled
    call was held by such code.
    """
    ops = list(graph.ops)
    for op, after in pairwise(graph.ops):
        if not op.holds or COMPILED not in op.facts or not _goes_on(after):
            continue
        makers = [graph.producers.get(graph.values[ref.id].storage) for ref in op.holds]
        ops[op.id] = replace(
            op,
            holds=tuple(
                ref
                for ref, maker in zip(op.holds, makers, strict=True)
                if maker is None or COMPILED not in graph.ops[maker].facts
            ),
        )
    return graph.with_ops(ops)


def _goes_on(op: Op) -> bool:
    return COMPILED in op.facts and ENTERS not in op.facts


def _ends_of_iterations(ops: Sequence[Op], place: int) -> list[int]:
    """The last op of an iteration of each repeat whose iterations this op begins."""
    around = ops[place - 1].repeats if place else ()
    ends = []
    for repeat in ops[place].repeats:
        if repeat not in around:
            end = place
            while end + 1 < len(ops) and repeat in ops[end + 1].repeats:
                end += 1
            ends.append(end)
    return ends
