"""Lives of storages over the ops of a step: the op that allocates each, and its last reader.

Weights, inputs, caches, gradients, optimizer states and results stay to the end of the step;
everything else lives from the op that makes it to the last one that touches or holds it.  The trace
records the holders: variables that outlive their use, and tensors of a running autograd node.

Of equal iterations a few are visited: those in the middle all make and free equally much.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product

from rooftrace.costmodels.fusion import runs
from rooftrace.graph import REVERSED, Neighbour, Op, OpGraph, Ref, Tensor, marks


def _values(op: Op) -> Iterator[int]:
    """The values that an op reads, makes, and holds."""
    return chain(op.inputs, op.outputs, (ref.id for ref in op.holds))


def _references(op: Op) -> Iterator[Ref]:
    return chain(op.reads, op.holds)


_Iterations = Mapping[int, int]
"""Number of the current iteration by repeat."""


@dataclass(slots=True)
class Visit:
    """An op in one of the iterations that are visited."""

    op: Op
    at: _Iterations
    begins: int = 0  # representative iterations that begin here: each stands for skipped ones
    ends: tuple[int, ...] = ()  # skipped iterations of each representative that ends here


EDGE = 3
"""Least iterations visited at either end of a repeat: an iteration reads its neighbour's values,
which may be views of values of the neighbour's neighbour."""


_VARIES = -1


class Visits:
    """The ops in order: of a repeat its first and last iterations, and one for all between.

    Storages have a number for each of these iterations.  edge: how many iterations are visited at
    either end, at least `EDGE`.
    """

    def __init__(self, graph: OpGraph, edge: int = EDGE) -> None:
        self.graph, self.edge = graph, edge
        self.counts = [min(repeat.count, 2 * edge + 1) for repeat in graph.repeats]
        self.left_out = [
            repeat.count - count for repeat, count in zip(graph.repeats, self.counts, strict=True)
        ]
        copies = [math.prod(self.counts[r] for r in tensor.repeats) for tensor in graph.values]
        self.first = list(accumulate(copies, initial=0))
        self._owners = [value for value, count in enumerate(copies) for _ in range(count)]
        # Most values have one storage, wherever they are used.
        self.alone = [
            _VARIES if tensor.repeats or self._varies(tensor) else self.first[tensor.storage]
            for tensor in graph.values
        ]
        self.varying = {op.id for op in graph.ops if self._any_varies(op)}
        self.repeats = [op.repeats for op in graph.ops]
        self.order: list[Visit] = []
        self._write(range(len(graph.ops)), 0, {})

    def _varies(self, tensor: Tensor) -> bool:
        return tensor.then is not None or bool(self.graph.values[tensor.storage].repeats)

    def _any_varies(self, op: Op) -> bool:
        if not self.graph.repeats:
            return False
        return any(self.alone[i] == _VARIES for i in _values(op)) or any(
            ref.then is not None or ref.every for ref in _references(op)
        )

    def _write(self, part: range, depth: int, at: _Iterations) -> None:
        ops = self.graph.ops
        for repeat, inside in runs.segments(self.repeats, part, depth):
            if repeat is None:
                self.order += [Visit(op, at) for op in ops[inside.start : inside.stop]]
                continue
            order = range(self.counts[repeat])
            for iteration in reversed(order) if ops[inside.start].part in REVERSED else order:
                first = len(self.order)
                self._write(inside, depth + 1, {**at, repeat: iteration})
                if iteration == self.edge and self.left_out[repeat]:
                    self.order[first].begins += 1
                    self.order[-1].ends += (self.left_out[repeat],)

    # -- storages ----------------------------------------------------------------------------------

    def touched(self, visit: Visit) -> list[int]:
        """Numbers of the storages that an op reads or writes there."""
        op = visit.op
        if op.id not in self.varying:
            return [self.alone[value] for value in _values(op)]
        return self._numbers(_references(op), visit) + self.made(visit)

    def named(self, visit: Visit) -> list[int]:
        """Numbers of the storages that the arguments of an op name there."""
        op = visit.op
        if op.id not in self.varying:
            return [self.alone[value] for value in op.inputs]
        return self._numbers(op.reads, visit)

    def held(self, visit: Visit) -> list[int]:
        """Numbers of the storages that an op holds there."""
        return self._numbers(visit.op.holds, visit) if visit.op.holds else []

    def _numbers(self, references: Iterable[Ref], visit: Visit) -> list[int]:
        result: list[int] = []
        for ref in references:
            if ref.every:
                result += self.copies(ref.id, visit.at)
            else:
                result.append(self._number(ref.id, ref.then, visit.at))
        return result

    def bound(self, visit: Visit) -> list[tuple[int, int]]:
        """(storage as the cost of the op names it, its number there) of each input and output."""
        op, values = visit.op, self.graph.values
        if op.id not in self.varying:
            ids = chain(op.inputs, op.outputs)
            return [(values[value].storage, self.alone[value]) for value in ids]
        pairs = [(ref.id, number) for ref in op.reads for number in self._numbers([ref], visit)]
        pairs += [(value, n) for value in op.outputs for n in self.copies(value, visit.at)]
        return [(values[value].storage, number) for value, number in pairs]

    def standing(self, at: _Iterations) -> int:
        """Number of iterations that the one at `at` represents."""
        return math.prod(
            1 + self.left_out[repeat] for repeat, iteration in at.items() if iteration == self.edge
        )

    def made(self, visit: Visit) -> list[int]:
        """Numbers of the storages of an op's outputs."""
        op = visit.op
        if op.id not in self.varying:
            return [self.alone[value] for value in op.outputs]
        return [number for value in op.outputs for number in self.copies(value, visit.at)]

    def copies(self, value: int, at: _Iterations) -> list[int]:
        """Numbers of a value's storages in all iterations of the repeats that `at` leaves open."""
        repeats = [r for r in self.graph.values[value].repeats if r not in at]
        if not repeats:
            return [self._number(value, None, at)]
        return [
            self._number(value, None, {**at, **dict(zip(repeats, place, strict=True))})
            for place in product(*(range(self.counts[r]) for r in repeats))
        ]

    def _number(self, value: int, then: Neighbour | None, at: _Iterations) -> int:
        there = self._neighbour(then, at)
        if then is not None and there is not None:
            value, at = then.value, there
        tensor = self.graph.values[value]
        outside = [r for r in tensor.repeats if r not in at]
        if outside:
            at = {**at, **{r: self._ran_last(value, r) for r in outside}}
        there = self._neighbour(tensor.then, at)
        if tensor.then is not None and there is not None:
            return self._place(tensor.then.value, there)
        return self._place(tensor.storage, at)

    def _neighbour(self, then: Neighbour | None, at: _Iterations) -> _Iterations | None:
        """The iteration of a Neighbour; None beyond the ends of its repeat."""
        if then is None or then.repeat not in at:
            return None
        iteration = at[then.repeat] + then.shift
        if not 0 <= iteration < self.counts[then.repeat]:
            return None
        return {**at, then.repeat: iteration}

    def _place(self, storage: int, at: _Iterations) -> int:
        offset = 0
        for repeat in self.graph.values[storage].repeats:
            iteration = at[repeat] if repeat in at else self._ran_last(storage, repeat)
            offset = offset * self.counts[repeat] + iteration
        return self.first[storage] + offset

    def _ran_last(self, value: int, repeat: int) -> int:
        maker = self.graph.producers.get(value)
        back = maker is not None and self.graph.ops[maker].part in REVERSED
        return 0 if back else self.counts[repeat] - 1

    def storage(self, number: int) -> int:
        """The storage that has this number."""
        return self._owners[number]

    def times(self, number: int, storage: int, at: _Iterations) -> int:
        """Number of copies of a storage that are made or freed together in this iteration."""
        repeats = self.graph.values[storage].repeats
        if not repeats:
            return 1
        offset, times = number - self.first[storage], 1
        for repeat in reversed(repeats):
            offset, iteration = divmod(offset, self.counts[repeat])
            # The skipped copies go in their iterations, unless this one goes far from there.
            far = repeat not in at or abs(at[repeat] - self.edge) == self.edge
            if iteration == self.edge and far:
                times *= 1 + self.left_out[repeat]
        return times


def bytes_of_weights(graph: OpGraph) -> int:
    """Bytes of all parameters and buffers of the device, also of those that a step does not read
    (experts without tokens)."""
    everywhere: int = sum(graph.model.get(f"bytes_{kind}", 0) for kind in ("parameters", "buffers"))
    weights = (graph.values[number] for number in graph.external)
    return everywhere - sum(t.nbytes for t in weights if t.host and t.role == "weights")


@dataclass(frozen=True, slots=True)
class Lives:
    """Births and deaths of storages: by visit, (number of a storage, count of equal ones).

    Visit -1: storages from before the step.
    """

    births: Mapping[int, list[tuple[int, int]]]  # made as the op runs
    deaths: Mapping[int, list[tuple[int, int]]]  # gone after it
    replaced: Mapping[int, list[tuple[int, int]]]  # gone before its outputs are made
    saved: frozenset[int]  # numbers that forward makes and backward reads or holds


def lifetimes(visits: Visits) -> Lives:
    """Lives of storages: from the visit that makes each to the last that reads or holds it."""
    graph = visits.graph
    values = graph.values
    touched = [visits.touched(visit) for visit in visits.order]
    kept = {number for value in graph.outputs for number in visits.copies(value, {})}
    kept.difference_update(*map(visits.held, visits.order))  # let go of before the end
    inputs = {number for value in graph.inputs for number in visits.copies(value, {})}
    used = {visits.storage(number) for number in kept | inputs | set(chain.from_iterable(touched))}
    # States of an optimizer are there also in a part of a step that does not read them.
    used |= {values[i].storage for i in graph.external if values[i].role == "optimizer"}
    outside = {values[i].storage for i in graph.external} & used
    born = {number: -1 for s in sorted(outside) for number in visits.copies(s, {})}
    last: dict[int, int] = {}
    for moment, visit in enumerate(visits.order):
        for number in visits.made(visit):
            born.setdefault(number, moment)
        for number in touched[moment]:
            last[number] = moment
    caches = _replaced_caches(graph)
    in_place = _sums_in_place(graph) | _filled_in_place(graph)
    saved = _saved(visits, touched) - {number for number, moment in born.items() if moment < 0}
    resized = _resized(visits)
    result = Lives(defaultdict(list), defaultdict(list), defaultdict(list), saved)
    for number, moment in born.items():
        storage = visits.storage(number)
        at = visits.order[moment].at if moment >= 0 else {}
        changes = resized.get(number, ())
        if not changes or not changes[0][1]:  # else it has no bytes yet
            result.births[moment].append((number, visits.times(number, storage, at)))
        if changes and not _followed(visits, result, number, changes):
            continue
        stays = number in kept or (storage in outside and storage not in caches)
        if not stays and values[storage].role != "gradients":
            end = last.get(number, moment)
            times = visits.times(number, storage, visits.order[end].at if end >= 0 else {})
            taken = end >= 0 and visits.order[end].op.id in in_place and touched[end][0] == number
            (result.replaced if taken else result.deaths)[end].append((number, times))
    return result


def _resized(visits: Visits) -> Mapping[int, list[tuple[int, bool]]]:
    """By storage, the visits that free, allocate or mark its bytes, and whether it has bytes
    afterwards."""
    changes: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for moment, visit in enumerate(visits.order):
        if visit.op.name == marks.RESIZE_STORAGE:
            for number in visits.named(visit):
                changes[number].append((moment, bool(visit.op.arguments["size"])))
        elif visit.op.name in marks.MEMORY_MARKS:
            for number in visits.named(visit):
                changes[number].append((moment, visit.op.name == marks.BRING_STORAGES))
    return changes


def _followed(
    visits: Visits, lives: Lives, number: int, changes: Sequence[tuple[int, bool]]
) -> bool:
    """Record each free and allocation of a storage; return whether it has bytes at the end."""
    alive, storage = not changes[0][1], visits.storage(number)
    for moment, grows in changes:
        if grows != alive:
            times = visits.times(number, storage, visits.order[moment].at)
            (lives.births if grows else lives.deaths)[moment].append((number, times))
        alive = grows
    return alive


def _saved(visits: Visits, touched: Sequence[Sequence[int]]) -> frozenset[int]:
    """Storages that forward makes and backward reads, or holds: kernels keep tensors that no op
    of the graph names."""
    made: set[int] = set()
    read: set[int] = set()
    for visit, numbers in zip(visits.order, touched, strict=True):
        if visit.op.part == "forward":
            made.update(visits.made(visit))
        elif visit.op.part in ("backward", "recompute"):
            read.update(numbers)
    return frozenset(made & read)


def _sums_in_place(graph: OpGraph) -> set[int]:
    """Sums of two gradients that autograd accumulates into the first one.

    It does so where that one shares its bytes with no other tensor (`can_accumulate_inplace`,
    input_buffer.cpp).  A trace records a new tensor: under a dispatch mode autograd never
    accumulates in place.
    """
    return {
        op.id
        for op in graph.ops
        if op.target == "aten.add.Tensor"  # the op that autograd itself runs, and no other
        and op.part == "backward"
        and [*op.arguments] == ["self", "other"]
        and len(op.inputs) == 2
        and _takes_the_sum(graph, op)
    }


def _takes_the_sum(graph: OpGraph, op: Op) -> bool:
    place, result = op.inputs[0], graph.values[op.outputs[0]]
    first = graph.values[place]
    dense = first.storage == place and first.then is None and 0 not in first.stride
    return dense and (first.shape, first.dtype) == (result.shape, result.dtype)


_ZEROS = {"aten.new_zeros", "aten.zeros", "aten.zeros_like"}
_FILLED = {"aten.scatter", "aten.scatter_add", "aten.index_put", "aten.index_add", "aten.put"}


def _filled_in_place(graph: OpGraph) -> set[int]:
    """Ops of autograd that fill in place zeros which the same node has just made.

    So do gather, index, index_select, sort, take, topk and others (FunctionsManual.cpp).  A trace
    records a new tensor: under a mode, and for tensor subclasses, autograd takes the out-of-place
    form (`areAnyTensorSubclassLike`).
    """
    makers = ((op, graph.producers.get(op.inputs[0])) for op in graph.ops if _fills(op))
    return {
        op.id
        for op, maker in makers
        if maker is not None
        and graph.ops[maker].name in _ZEROS
        and graph.ops[maker].function == op.function
    }


def _fills(op: Op) -> bool:
    return op.name in _FILLED and op.part == "backward" and len(op.inputs) > 1


def _replaced_caches(graph: OpGraph) -> set[int]:
    """Caches that a `cat` replaces: the old cache is freed, though it came from outside.

    By name, not by a rule: `cat` is how caches grow that are no buffers.
    """
    values = graph.values
    return {
        values[i].storage
        for op in graph.ops
        if op.name == "aten.cat" and op.outputs and values[op.outputs[0]].role == "kv"
        for i in op.inputs
        if values[i].role == "kv"
    }
