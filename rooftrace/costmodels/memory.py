"""How many bytes are alive at once, from the graph: who allocates when, and who reads last.

Weights, inputs, caches, gradients, optimizer states and results stay to the end of the step;
everything else lives from the op that makes it to the last one that touches it.  The peak is a
lower bound of what an allocator reserves: fragmentation, workspaces, Python variables that outlive
their use, and the framework's own context come on top.

Of many equal iterations a few are gone through.  What an iteration leaves behind or takes away is
the same for all in the middle, so bytes grow or fall in a straight line there, and the most is at
one of its ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product
from typing import Any

from rooftrace.costmodels.runs import segments
from rooftrace.costmodels.traffic import storage_sizes
from rooftrace.hardware.chip import Chip
from rooftrace.tracer.expand import REVERSED
from rooftrace.tracer.graph import ROLES, Neighbour, Op, OpGraph, Tensor, references

_LISTED = ("weights", "kv", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive over a step.

    weights, kv, gradients, optimizer: the most that is alive of each.  activations_peak: the most
    of everything else (activations, inputs, temporaries, constants).  peak: the most of all
    together, which is not their sum where they do not peak at the same time.  at_peak: by role at
    that moment.  where: index of the op at which the peak is (-1: before the first).
    """

    weights: int
    kv: int
    gradients: int
    optimizer: int
    activations_peak: int
    peak: int
    at_peak: Mapping[str, int]
    where: int

    def fits(self, chip: Chip) -> bool:
        """Whether the peak is within the chip's memory."""
        return self.peak <= chip.memory_capacity.value

    def chips_needed(self, chip: Chip) -> int:
        """How many of these chips hold the peak if it could be split evenly."""
        return max(1, math.ceil(self.peak / chip.memory_capacity.value))

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for the report."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations_peak": self.activations_peak,
            "peak": self.peak,
            "at_peak": dict(self.at_peak),
            "where": self.where,
        }


def memory(graph: OpGraph) -> Memory:
    """Liveness of `graph` in its captured order (eager, attention as one kernel)."""
    steps = _Steps(graph)
    sizes = storage_sizes(graph)
    births, deaths = _lifetimes(steps)
    alive: Counter[str] = Counter()
    for storage, times in births.get(-1, ()):
        alive[graph.values[storage].role] += times * sizes[storage]
    # Weights that this step does not read (experts without tokens) are there all the same.
    stored = int(graph.model.get("bytes_parameters", 0)) + int(graph.model.get("bytes_buffers", 0))
    alive["weights"] = max(alive["weights"], stored)
    tally = _Tally(alive)
    before: list[Counter[str]] = []
    for moment, step in enumerate(steps.steps):
        if step.begins:
            before += [Counter(tally.alive)] * step.begins
        for storage, times in births.get(moment, ()):
            tally.change(graph.values[storage].role, times * sizes[storage])
        tally.look(step.op.id)
        for storage, times in deaths.get(moment, ()):
            tally.change(graph.values[storage].role, -times * sizes[storage])
        for left_out in step.ends:
            tally.again(before.pop(), left_out)
    return tally.result()


class _Tally:
    """Bytes alive now, and the most that was alive at once."""

    def __init__(self, alive: Counter[str]) -> None:
        self.alive = alive
        self.total = sum(alive.values())
        self.others = sum(size for role, size in alive.items() if role not in _LISTED)
        self.most, self.most_others = Counter(alive), self.others
        self.peak, self.where, self.at_peak = self.total, -1, Counter(alive)

    def change(self, role: str, size: int) -> None:
        """`size` bytes of this role come, or go if it is negative."""
        self.alive[role] += size
        self.total += size
        if role in _LISTED:
            self.most[role] = max(self.most[role], self.alive[role])
        else:
            self.others += size

    def again(self, before: Mapping[str, int], times: int) -> None:
        """What has changed since `before` changes as much another `times`."""
        for role in ROLES:
            self.change(role, times * (self.alive[role] - before[role]))

    def look(self, op: int) -> None:
        """Remember this moment if it is the fullest so far."""
        self.most_others = max(self.most_others, self.others)
        if self.total > self.peak:
            self.peak, self.where, self.at_peak = self.total, op, Counter(self.alive)

    def result(self) -> Memory:
        """The record for the report."""
        most = self.most
        return Memory(
            most["weights"],
            most["kv"],
            most["gradients"],
            most["optimizer"],
            self.most_others,
            self.peak,
            {role: self.at_peak[role] for role in ROLES},
            self.where,
        )


_At = Mapping[int, int]
"""Which iteration of each repeat."""


@dataclass(slots=True)
class _Step:
    """An op in one of the iterations that are gone through.

    begins: how many iterations that stand for others begin here.  ends: for those that end here,
    how many others they stand for.
    """

    op: Op
    at: _At
    begins: int = 0
    ends: tuple[int, ...] = ()


_EDGE = 3
"""Iterations at either end of a repeat that are gone through: an iteration reads what the one
beside it made, which may be a view of what the one beside that made."""


_VARIES = -1


class _Steps:
    """The ops in order, of repeats the first and last iterations and one for all between.

    Storages have a number for each of these iterations.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.counts = [min(repeat.count, 2 * _EDGE + 1) for repeat in graph.repeats]
        self.left_out = [
            repeat.count - count for repeat, count in zip(graph.repeats, self.counts, strict=True)
        ]
        copies = (math.prod(self.counts[r] for r in tensor.repeats) for tensor in graph.values)
        self.first = list(accumulate(copies, initial=0))
        # Most values have one storage, wherever they are used.
        self.alone = [
            _VARIES if tensor.repeats or self._varies(tensor) else self.first[tensor.storage]
            for tensor in graph.values
        ]
        self.varying = {op.id for op in graph.ops if self._any_varies(op)}
        self.places = [op.repeats for op in graph.ops]
        self.steps: list[_Step] = []
        self._write(range(len(graph.ops)), 0, {})

    def _varies(self, tensor: Tensor) -> bool:
        return tensor.then is not None or bool(self.graph.values[tensor.storage].repeats)

    def _any_varies(self, op: Op) -> bool:
        if not self.graph.repeats:
            return False
        return any(self.alone[i] == _VARIES for i in (*op.inputs, *op.outputs)) or any(
            ref.then is not None for ref in references(op.arguments)
        )

    def _write(self, part: range, depth: int, at: _At) -> None:
        ops = self.graph.ops
        for repeat, inside in segments(self.places, part, depth):
            if repeat is None:
                self.steps += [_Step(op, at) for op in ops[inside.start : inside.stop]]
                continue
            order = range(self.counts[repeat])
            for iteration in reversed(order) if ops[inside.start].part in REVERSED else order:
                first = len(self.steps)
                self._write(inside, depth + 1, {**at, repeat: iteration})
                if iteration == _EDGE and self.left_out[repeat]:
                    self.steps[first].begins += 1
                    self.steps[-1].ends += (self.left_out[repeat],)

    # -- storages ----------------------------------------------------------------------------------

    def touched(self, step: _Step) -> list[int]:
        """Numbers of the storages that an op reads or writes there."""
        op = step.op
        if op.id not in self.varying:
            return [self.alone[value] for value in (*op.inputs, *op.outputs)]
        found: list[int] = []
        for ref in references(op.arguments):
            if ref.every:
                found += self.copies(ref.id, step.at)
            else:
                found.append(self._number(ref.id, ref.then, step.at))
        return found + self.made(step)

    def made(self, step: _Step) -> list[int]:
        """Numbers of the storages of its outputs."""
        op = step.op
        if op.id not in self.varying:
            return [self.alone[value] for value in op.outputs]
        return [number for value in op.outputs for number in self.copies(value, step.at)]

    def copies(self, value: int, at: _At) -> Iterator[int]:
        """Numbers of the storages of a value in all iterations of what `at` does not say."""
        repeats = [r for r in self.graph.values[value].repeats if r not in at]
        for place in product(*(range(self.counts[r]) for r in repeats)):
            yield self._number(value, None, {**at, **dict(zip(repeats, place, strict=True))})

    def _number(self, value: int, then: Neighbour | None, at: _At) -> int:
        beside = self._beside(then, at)
        if then is not None and beside is not None:
            value, at = then.value, beside
        tensor = self.graph.values[value]
        outside = [r for r in tensor.repeats if r not in at]
        if outside:
            at = {**at, **{r: self._ran_last(value, r) for r in outside}}
        beside = self._beside(tensor.then, at)
        if tensor.then is not None and beside is not None:
            return self._place(tensor.then.value, beside)
        return self._place(tensor.storage, at)

    def _beside(self, then: Neighbour | None, at: _At) -> _At | None:
        """The iteration that a Neighbour is in, None where there is no such iteration."""
        if then is None or then.repeat not in at:
            return None
        iteration = at[then.repeat] + then.shift
        if not 0 <= iteration < self.counts[then.repeat]:
            return None
        return {**at, then.repeat: iteration}

    def _place(self, storage: int, at: _At) -> int:
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
        """Whose number this is."""
        return bisect_right(self.first, number) - 1 if self.graph.repeats else number

    def times(self, number: int, storage: int, at: _At) -> int:
        """How many copies come or go together with this one, in this iteration."""
        repeats = self.graph.values[storage].repeats
        if not repeats:
            return 1
        offset, times = number - self.first[storage], 1
        for repeat in reversed(repeats):
            offset, iteration = divmod(offset, self.counts[repeat])
            # Others go in their own iterations, unless it is far away that this one goes.
            far = repeat not in at or abs(at[repeat] - _EDGE) == _EDGE
            if iteration == _EDGE and far:
                times *= 1 + self.left_out[repeat]
        return times


Lives = Mapping[int, Sequence[tuple[int, int]]]
"""(storage, how many) by step."""


def _lifetimes(steps: _Steps) -> tuple[Lives, Lives]:
    """Storages by the step that makes them (-1: from outside), and by the one that ends their life.

    What an autograd node receives (saved tensors, gradients) lives until the node has ended.
    """
    graph = steps.graph
    values = graph.values
    touched = [steps.touched(step) for step in steps.steps]
    kept = {number for value in graph.outputs for number in steps.copies(value, {})}
    given = {number for value in graph.inputs for number in steps.copies(value, {})}
    used = {steps.storage(number) for number in kept | given | set(chain.from_iterable(touched))}
    outside = {values[i].storage for i in graph.external} & used
    born = {number: -1 for s in sorted(outside) for number in steps.copies(s, {})}
    last: dict[int, int] = {}
    for first, end in _nodes(graph, steps.steps):
        for moment in range(first, end):
            for number in steps.made(steps.steps[moment]):
                born.setdefault(number, moment)
            for number in touched[moment]:
                last[number] = end - 1 if born.get(number, -1) < first else moment
    replaced = _replaced_caches(graph)
    births: dict[int, list[tuple[int, int]]] = defaultdict(list)
    deaths: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, moment in born.items():
        storage = steps.storage(number)
        at = steps.steps[moment].at if moment >= 0 else {}
        births[moment].append((storage, steps.times(number, storage, at)))
        stays = number in kept or (storage in outside and storage not in replaced)
        if not stays and values[storage].role != "gradients":
            moment = last.get(number, moment)
            at = steps.steps[moment].at if moment >= 0 else {}
            deaths[moment].append((storage, steps.times(number, storage, at)))
    return births, deaths


def _nodes(graph: OpGraph, steps: Sequence[_Step]) -> Iterator[tuple[int, int]]:
    """Ranges of steps that are one autograd node; outside backward every op is one of its own."""
    first = 0
    previous: tuple[Any, ...] | None = None
    for moment, step in enumerate(steps):
        op = step.op
        node: tuple[Any, ...] | None = None
        if op.part == "backward":
            layers = [step.at[r] for r in op.repeats if graph.repeats[r].container is not None]
            node = (op.function, op.module, op.call, *layers)
        if moment > first and (node is None or node != previous):
            yield first, moment
            first = moment
        previous = node
    if steps:
        yield first, len(steps)


def _replaced_caches(graph: OpGraph) -> set[int]:
    """Caches that a `cat` replaces: the old one goes, though it came from outside."""
    values = graph.values
    return {
        values[i].storage
        for op in graph.ops
        if op.name == "aten.cat" and op.outputs and values[op.outputs[0]].role == "kv"
        for i in op.inputs
        if values[i].role == "kv"
    }
