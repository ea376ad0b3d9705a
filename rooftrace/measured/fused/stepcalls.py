"""The calls of a compiled step in a trace: kernels of compiled graphs, and ops beside them."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.measured.alignment import calls, keys
from rooftrace.measured.fused.matching import is_launched
from rooftrace.measured.fused.words import plain_name
from rooftrace.measured.traces import Trace, TraceStep, records
from rooftrace.tracer.graph import Op, OpGraph

_REGION = re.compile(r"CompiledFunction(Backward)?$|Torch-Compiled Region")
"""Calls of the profiler around what was compiled."""
_STORES = "AccumulateGrad"
"""In the name of the call by which autograd stores the gradient of a weight."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call in the trace: of a kernel in a compiled graph, or of an op beside it."""

    name: str
    seconds: float
    inside: bool  # of a compiled graph
    key: keys.Key
    start: float  # s
    bare: bool = False  # a kernel that no op of the host names
    gradient: records.Shape | None = None  # the shape of the gradient that autograd stores by it
    shapes: tuple[records.Shape, ...] = ()  # of its tensors, where the trace has them
    backward: bool = False  # whether it is in the backward of a compiled graph


class StepWalk:
    """Walks the calls of a trace down to kernels of compiled graphs, and to ops beside them."""

    def __init__(self, trace: Trace, names: frozenset[str], ops: frozenset[keys.Key]) -> None:
        self.trace, self.names = trace, names
        self.tree = calls.CallTree(trace, ops)
        self.holds_region: dict[int, bool] = {}

    def of(self, step: TraceStep) -> list[StepCall]:
        """The calls of a step in order."""
        listed = [call for op in self.tree.roots(step) for call in self._below(op)]
        listed += [self._bare(kernel, True) for kernel in self.tree.unnamed(step)]
        return sorted(listed, key=lambda call: call.start)

    def _below(self, op: int) -> Iterator[StepCall]:
        region = self._is_region(op)
        if region or self._has_region(op):
            backward = self.tree.name(op).endswith("Backward")
            for called in self.trace.calls.get(op, ()):
                yield from self._inside(called, backward) if region else self._below(called)
            yield from self._own(op, region, backward)
            return
        for call in self.tree.below(op):
            if not call.host or call.key in self.tree.keys:
                yield self._call(call, False)

    def _inside(self, op: int, backward: bool) -> Iterator[StepCall]:
        name, called = plain_name(self.tree.name(op)), self.trace.calls.get(op, ())
        if not self._has_region(op) and (name in self.names or "::" in name):
            if name in self.names or not calls.on_host(name):
                call = replace(self.tree.whole(op, (name, ())), name=name)
                yield self._call(call, True, backward)
            return
        for inner in called:
            yield from (
                self._below(inner) if self._is_region(inner) else self._inside(inner, backward)
            )
        yield from self._own(op, True, backward)

    def _own(self, op: int, inside: bool, backward: bool) -> Iterator[StepCall]:
        """Kernels that a call around others launched itself."""
        for kernel in self.trace.launches.get(op, ()):
            yield self._bare(kernel, inside, backward)

    def _bare(self, kernel: int, inside: bool, backward: bool = False) -> StepCall:
        return replace(self._call(self.tree.bare(kernel), inside, backward), bare=True)

    def _call(self, call: calls.OpCall, inside: bool, backward: bool = False) -> StepCall:
        """Begun with the first of its kernels, or else on the host: one clock orders both."""
        begun, kernels = self.trace.ops.start, self.trace.kernels.start
        stores = not inside and call.op != records.NONE and _STORES in call.name
        return StepCall(
            name=call.name,
            seconds=call.seconds,
            inside=inside,
            key=call.key,
            start=min(kernels[k] for k in call.kernels) if call.kernels else begun[call.op],
            gradient=self._shape(call.op) if stores else None,
            shapes=self.tree.key(call.op)[1] if call.op != records.NONE else (),
            backward=backward,
        )

    def _is_region(self, op: int) -> bool:
        return _REGION.match(self.tree.name(op)) is not None

    def _has_region(self, op: int) -> bool:
        if op not in self.holds_region:
            self.holds_region[op] = self._is_region(op) or any(
                self._has_region(called) for called in self.trace.calls.get(op, ())
            )
        return self.holds_region[op]

    def _shape(self, op: int) -> records.Shape | None:
        """The shape of the first tensor in a call."""
        shapes = (shape for shape in self.tree.key(op)[1] if shape)
        below = (self._shape(called) for called in self.trace.calls.get(op, ()))
        return next(shapes, None) or next(filter(None, below), None)


def calls_beside(
    listed: Sequence[StepCall], ops: Sequence[Op], wanted: Sequence[keys.Key]
) -> tuple[dict[int, int], dict[int, int]]:
    """The op of each call outside of compiled graphs, by its number in the list; and the same of
    calls that are a part of an op.

    In order by name and shapes, and by name alone between two pairs: lists of tensors differ.
    What is left between two pairs is of the op that stands there, if it is one that we keep whole
    and a device may take apart (the backward of a recurrent network on a CPU).
    """
    alone = [number for number, call in enumerate(listed) if not call.inside]
    have = [listed[number].key for number in alone]
    pairs, _ = keys.paired(have, wanted)
    more = keys.between(pairs, [key[0] for key in have], [key[0] for key in wanted])
    op_of = {alone[a]: ops[b].id for a, b in (*pairs, *more)}
    pieces: dict[int, int] = {}
    for mine, other in keys.gaps(sorted((*pairs, *more)), len(have), len(wanted)):
        whole = [ops[j].id for j in other if ops[j].target.startswith("rooftrace.")]
        if len(whole) == 1:
            left = [alone[i] for i in mine]
            longest = max(left, key=lambda number: listed[number].seconds)
            op_of[longest] = whole[0]
            pieces.update((number, whole[0]) for number in left if number != longest)
    return op_of, pieces


def stored_gradients(
    listed: Sequence[StepCall], beside: Collection[int], graph: OpGraph
) -> dict[int, int]:
    """The op that made a gradient, by the number of the call in which autograd stores it.

    It copies what a compiler has laid out otherwise than the weight.  Of gradients of one shape
    each stands for one.
    """
    makers: dict[records.Shape, deque[int]] = defaultdict(deque)
    for op in graph.ops:
        for value in map(graph.values.__getitem__, op.outputs):
            if op.part == "backward" and value.role == "gradients" and is_launched(op):
                makers[value.shape].append(op.id)
    return {
        number: makers[call.gradient].popleft()
        for number, call in enumerate(listed)
        if call.gradient is not None and number not in beside and makers[call.gradient]
    }


def merged(
    graph: OpGraph, home: Mapping[int, object], beside: Collection[int]
) -> Iterator[tuple[int, int]]:
    """(op, the op that reads it): ops that the compiler has no node of, and has for their reader.

    It merged them with what reads them, by a pattern, or with an equal op.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        for value in op.inputs:
            readers[graph.values[value].storage].append(op.id)
    parts = {graph.ops[op].part for op in home}
    for op in reversed(graph.ops):
        if op.id in home or op.id in beside or not is_launched(op) or op.part not in parts:
            continue
        later = (
            reader
            for value in op.outputs
            for reader in readers[graph.values[value].storage]
            if reader > op.id and reader in home
        )
        reader = min(later, default=None)
        if reader is not None:
            yield op.id, reader
