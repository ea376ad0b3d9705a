"""Ops of ours that stand in a graph for what the host tells the device beside its work.

A stream is a queue of the device.  `record_event` makes an event, a value without bytes, when
everything before it on its stream is done; `wait_event` holds back its own stream until then.
`resize_storage` frees the bytes of a tensor that stays alive, or allocates them again.
`free_storages` is where the code lets go of tensors that would else last to the end of a step, and
`bring_storages` where tensors come from the host that would else be there from its beginning.
`graph_break` ends a compiled graph: what follows is another one or, with the fact `eager`, code
that Python runs op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooftrace.tracer.graph import Op

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
"""Marks of what code does with tensors, which any code that runs the graph does itself."""
MARKS = BOUNDARIES | MEMORY_MARKS | {RESIZE_STORAGE}
"""Ops without work of their own, which no pass may leave out."""


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
