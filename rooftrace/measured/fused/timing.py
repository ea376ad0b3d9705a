"""How long each kernel of a compiled step ran, and the ops behind it, by a trace of the step."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.errors import ProfileError
from rooftrace.measured.alignment import calls, keys
from rooftrace.measured.fused.compiled import CompiledGraph, CompiledKernel
from rooftrace.measured.fused.kerneltimes import KernelTime
from rooftrace.measured.fused.matching import is_launched, matched
from rooftrace.measured.traces import Trace, TraceStep, records
from rooftrace.tracer.graph import Op, OpGraph

_REGION = re.compile(r"CompiledFunction(Backward)?$|Torch-Compiled Region")
"""Calls of the profiler around what was compiled."""
_Place = tuple[int, int]
"""A kernel that the compiler wrote down: the number of its graph, and its place there."""
_STORES = "AccumulateGrad"
"""In the name of the call by which autograd stores the gradient of a weight."""
_GRAPH = re.compile(r"^graph_\d+_")
"""What Inductor writes before the name of a kernel in the profiler's range on a CPU."""


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
    walk = _Walk(trace, frozenset(kernel.name for kernel in expected.values()), frozenset(wanted))
    listed = walk.of(step)
    called = _in_order(listed, expected)
    beside, pieces = _beside(listed, outside, wanted)
    pieces |= _gradients(listed, beside, graph)
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


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in the trace: of a kernel in a compiled graph, or of an op beside it."""

    name: str
    seconds: float
    inside: bool  # of a compiled graph
    key: keys.Key
    start: float  # s
    bare: bool = False  # a kernel that no op of the host names
    gradient: records.Shape | None = None  # the shape of the gradient that autograd stores by it


def _in_order(
    listed: Sequence[_Call], expected: Mapping[_Place, CompiledKernel]
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


def _beside(
    listed: Sequence[_Call], ops: Sequence[Op], wanted: Sequence[keys.Key]
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


def _gradients(listed: Sequence[_Call], beside: Collection[int], graph: OpGraph) -> dict[int, int]:
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
    for op, reader in _merged(graph, home, beside):
        home[op] = home[reader]
        owned[home[reader]].append(op)
    return {
        at: (tuple(sorted(owned[at])), tuple(sorted(ops - set(owned[at]))))
        for at, ops in touched.items()
    }


def _merged(
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


class _Walk:
    """Walks the calls of a trace down to kernels of compiled graphs, and to ops beside them."""

    def __init__(self, trace: Trace, names: frozenset[str], ops: frozenset[keys.Key]) -> None:
        self.trace, self.names = trace, names
        self.tree = calls.CallTree(trace, ops)
        self.holds_region: dict[int, bool] = {}

    def of(self, step: TraceStep) -> list[_Call]:
        """The calls of a step in order."""
        listed = [call for op in self.tree.roots(step) for call in self._below(op)]
        listed += [self._bare(kernel, True) for kernel in self.tree.unnamed(step)]
        return sorted(listed, key=lambda call: call.start)

    def _below(self, op: int) -> Iterator[_Call]:
        region = self._is_region(op)
        if region or self._has_region(op):
            for called in self.trace.calls.get(op, ()):
                yield from self._inside(called) if region else self._below(called)
            yield from self._own(op, region)
            return
        for call in self.tree.below(op):
            if not call.host or call.key in self.tree.keys:
                yield self._call(call, False)

    def _inside(self, op: int) -> Iterator[_Call]:
        name, called = _GRAPH.sub("", self.tree.name(op)), self.trace.calls.get(op, ())
        if not self._has_region(op) and (name in self.names or "::" in name):
            if name in self.names or not calls.on_host(name):
                yield self._call(replace(self.tree.whole(op, (name, ())), name=name), True)
            return
        for inner in called:
            yield from self._below(inner) if self._is_region(inner) else self._inside(inner)
        yield from self._own(op, True)

    def _own(self, op: int, inside: bool) -> Iterator[_Call]:
        """Kernels that a call around others launched itself."""
        for kernel in self.trace.launches.get(op, ()):
            yield self._bare(kernel, inside)

    def _bare(self, kernel: int, inside: bool) -> _Call:
        return replace(self._call(self.tree.bare(kernel), inside), bare=True)

    def _call(self, call: calls.OpCall, inside: bool) -> _Call:
        """Begun with the first of its kernels, or else on the host: one clock orders both."""
        begun, kernels = self.trace.ops.start, self.trace.kernels.start
        stores = not inside and call.op != records.NONE and _STORES in call.name
        return _Call(
            name=call.name,
            seconds=call.seconds,
            inside=inside,
            key=call.key,
            start=min(kernels[k] for k in call.kernels) if call.kernels else begun[call.op],
            gradient=self._shape(call.op) if stores else None,
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
