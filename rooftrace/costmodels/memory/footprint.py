"""Peak memory of a step: bytes alive over time, the tensors alive at the peak, and buffers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, TypedDict

from rooftrace._plain import Plain, Positive
from rooftrace._shown import short, some
from rooftrace.costmodels.fusion import storage_sizes
from rooftrace.costmodels.memory.lives import Lives, Visit, Visits, bytes_of_weights, lifetimes
from rooftrace.graph import PARTS, ROLES, Op, OpGraph, Tensor, pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_capacity

if TYPE_CHECKING:
    import pandas


# -- footprint -------------------------------------------------------------------------------------
# The peak is that of the tensors of an eager run (attention as one kernel); workspaces and the
# allocator come on top (`allocator`).  Bytes grow or fall linearly over the middle iterations of a
# repeat, so their maximum is at one end of these.

_LISTED = ("weights", "kv", "gradients", "optimizer")
SAVED = "saved"
OPTIMIZERS = "optimizer temporaries"
KINDS = (*_LISTED, SAVED, "activations", "temporary", "constants", OPTIMIZERS)
"""The roles, with two more kinds: activations that forward makes and backward reads, and values
that an optimizer makes and drops within its step."""

_IN_JSON = 10
"""Tensors and modules of a peak in report.json: those with most bytes."""
_WRITTEN_OUT = 2048
"""The most moments drawn for the middle of a repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Plain):
    """Equal tensors that are alive at the peak."""

    role: str
    module: str  # whose weight it is, or which made it; indices starred
    op: str  # the operator that made it, "" for values from before the step
    part: str
    name: str  # of a weight, a state or an input; indices starred
    shape: tuple[int, ...]
    dtype: str
    saved: bool  # whether forward made it and backward reads it
    count: Positive = 1
    bytes: int = 0  # of all `count` together


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes alive as an op runs."""

    time: int  # how many ops have run before, every iteration counted
    op: int  # index in the graph
    part: str
    sizes: tuple[int, ...]  # bytes by kind, in the order of KINDS
    total: int  # of every kind

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by name in KINDS."""
        return dict(zip(KINDS, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes alive over a step; between two moments they change in a straight line.

    Of many equal iterations some in the middle are left out.
    """

    moments: tuple[Moment, ...] = ()

    def __repr__(self) -> str:
        peak = max((moment.total for moment in self.moments), default=0)
        return short(self, f"{len(self.moments):,} moments, at most {format_capacity(peak)}")

    def coarse(self, count: int) -> Timeline:
        """At most `count` moments: the fullest of each of as many equal spans of the step."""
        if len(self.moments) <= count:
            return self
        end = self.moments[-1].time + 1
        spans: dict[int, Moment] = {}
        for moment in self.moments:
            span = moment.time * count // end
            if span not in spans or moment.total > spans[span].total:
                spans[span] = moment
        return Timeline(tuple(spans.values()))

    def parts(self) -> list[tuple[str, int, int]]:
        """Forward, backward, optimizer in order, each with the times at which it begins and ends.

        Recomputation is part of backward, and so is all that runs between two ops of it.
        """
        starts: dict[str, int] = {}
        for moment in self.moments:
            starts.setdefault("backward" if moment.part == PARTS[2] else moment.part, moment.time)
        bounds = [*starts.values(), self.moments[-1].time + 1 if self.moments else 0]
        return list(zip(starts, bounds, bounds[1:], strict=False))

    def to_frame(self) -> pandas.DataFrame:
        """One row for each moment: time, op, part, bytes of each kind, total."""
        import pandas

        records = [
            {
                "time": moment.time,
                "op": moment.op,
                "part": moment.part,
                **moment.by_kind,
                "total": moment.total,
            }
            for moment in self.moments
        ]
        return pandas.DataFrame.from_records(records)


class HeldInBlock(TypedDict):
    """Bytes of a part of a layer at the peak."""

    module: str
    bytes: int
    tensors: Positive
    roles: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Plain):
    """Bytes alive over a step.

    The peaks of the single roles need not add up to the peak of all: they may be at other moments.
    """

    weights: int  # the most that is alive of each role
    kv: int
    gradients: int
    optimizer: int
    activations_peak: int  # the most of all else: activations, inputs, temporaries, constants
    peak: int  # the most of everything together
    at_peak: Mapping[str, int]  # bytes by role at that moment
    where: Annotated[int, ("minimum", -1)]  # the op at the peak; -1: before the first
    saved: int = 0  # of the activations at the peak, those saved for backward
    optimizer_temporaries: int = 0  # at the peak, dropped within its step
    gathered: int = 0  # of the weights at the peak, those all-gathered from shards
    buffers: int = 0  # of the temporaries at the peak, send and receive buffers
    processes: int = 1  # that run the step together, each with as much
    tensors: tuple[Held, ...] = ()  # alive at the peak, most bytes first
    timeline: Timeline = field(default_factory=Timeline)

    KEYS = (
        "weights kv gradients optimizer activations_peak peak at_peak saved_at_peak=saved "
        "optimizer_temporaries_at_peak=optimizer_temporaries gathered_at_peak=gathered "
        "buffers_at_peak=buffers where tensors=_largest modules=_blocks"
    )

    def __repr__(self) -> str:
        roles = (f"{role} {format_capacity(size)}" for role, size in self.at_peak.items() if size)
        return short(self, f"peak {format_capacity(self.peak)}: {some(roles, 8)}")

    def fits(self, chip: Chip) -> bool:
        """Whether the peak is within the chip's memory, less the context of a GPU's process."""
        return self.peak <= chip.room()

    def chips_needed(self, chip: Chip) -> int:
        """Number of these chips that hold all processes, if their peaks could be split evenly."""
        return chip.count_holding(self.peak * self.processes)

    def by_module(self) -> list[HeldInBlock]:
        """Bytes and number of tensors at the peak by module path (indices starred), most first."""
        return _grouped(self.tensors, lambda held: held.module)

    def by_block(self) -> list[HeldInBlock]:
        """Bytes and tensors at the peak by part of a layer: "model.layers.*.mlp" and all inside."""
        return _grouped(self.tensors, lambda held: _block(held.module))

    def to_frame(self) -> pandas.DataFrame:
        """The tensors at the peak: one row for equal ones, most bytes first."""
        import pandas

        return pandas.DataFrame.from_records([held.to_dict() for held in self.tensors])

    @property
    def _largest(self) -> tuple[Held, ...]:
        return self.tensors[:_IN_JSON]

    @property
    def _blocks(self) -> list[HeldInBlock]:
        return self.by_block()[:_IN_JSON]


def memory(graph: OpGraph, unmade: Collection[int] = ()) -> Memory:
    """Liveness of `graph` in its captured order (attention as one kernel).

    unmade: storages that never are in memory, because they live inside of a kernel; none in eager.
    """
    OpGraph.check(graph, "memory")
    visits = Visits(graph)
    lives = lifetimes(visits)
    stored = _Stored(graph, visits, lives, unmade)
    tally = _Tally(_from_outside(graph, lives, stored))
    for number, visit in enumerate(visits.order):
        tally.begin(visit.begins)
        for storage, times in lives.replaced.get(number, ()):
            tally.change(stored.kind(storage), -times * stored.size(storage))
        for storage, times in lives.births.get(number, ()):
            tally.change(stored.kind(storage), times * stored.size(storage))
        tally.look(number, visit.op)
        for storage, times in lives.deaths.get(number, ()):
            tally.change(stored.kind(storage), -times * stored.size(storage))
        tally.end(visit.ends)
    there = _alive(visits.order, lives, tally.step, stored)
    unread = tally.at_peak["weights"] - sum(
        count * stored.sizes[storage]
        for (storage, _), count in there.items()
        if graph.values[storage].role == "weights"
    )
    result = tally.result(_held(graph, there, stored.sizes, unread))
    gathered, buffers = _exchanged(graph, there, stored.sizes) if graph.groups else (0, 0)
    return replace(result, processes=graph.processes, gathered=gathered, buffers=buffers)


class _Stored:
    """Looks up the size, the kind and the owner of a storage by its number."""

    def __init__(
        self, graph: OpGraph, visits: Visits, lives: Lives, unmade: Collection[int]
    ) -> None:
        self.sizes = storage_sizes(graph, unmade)
        self._optimizers = _made_by_optimizer(graph)
        self._values, self._visits, self._saved = graph.values, visits, lives.saved

    def storage(self, number: int) -> int:
        """The value that owns the bytes of a storage."""
        return self._visits.storage(number)

    def size(self, number: int) -> int:
        """Bytes of a storage."""
        return self.sizes[self._visits.storage(number)]

    def saved(self, number: int) -> bool:
        """Whether the storage is an activation of this iteration that backward reads."""
        role = self._values[self._visits.storage(number)].role
        return number in self._saved and role == "activations"

    def kind(self, number: int) -> str:
        """The role of a storage, `SAVED` or `OPTIMIZERS`."""
        if self.saved(number):
            return SAVED
        storage = self._visits.storage(number)
        return OPTIMIZERS if storage in self._optimizers else self._values[storage].role


def _made_by_optimizer(graph: OpGraph) -> frozenset[int]:
    """Storages that an optimizer makes in its step, and that no state of it keeps."""
    optimizer = {i for op in graph.ops if op.part == PARTS[3] for i in op.outputs}
    # Others it writes in place only: gradients, by those that are fused.
    return frozenset(i for i in optimizer if graph.values[i].storage == i)


def _from_outside(graph: OpGraph, lives: Lives, stored: _Stored) -> Counter[str]:
    """Bytes by kind before the first op."""
    alive: Counter[str] = Counter()
    for number, times in lives.births.get(-1, ()):
        alive[stored.kind(number)] += times * stored.size(number)
    alive["weights"] = max(alive["weights"], bytes_of_weights(graph))
    return alive


class _Tally:
    """Bytes alive now, the most that was alive at once, and all moments."""

    def __init__(self, alive: Counter[str]) -> None:
        self.alive = alive
        self.total = sum(alive.values())
        self.others = sum(size for kind, size in alive.items() if kind not in _LISTED)
        self.most, self.most_others = Counter(alive), self.others
        self.peak, self.where, self.step, self.at_peak = self.total, -1, -1, Counter(alive)
        self.time = 0
        self.moments: list[Moment] = []
        self._before: list[tuple[Counter[str], int, int, int]] = []

    def change(self, kind: str, size: int) -> None:
        """Add `size` bytes of this kind, or take them away if it is negative."""
        self.alive[kind] += size
        self.total += size
        if kind in _LISTED:
            self.most[kind] = max(self.most[kind], self.alive[kind])
        else:
            self.others += size

    def look(self, step: int, op: Op) -> None:
        """Remember this moment, and whether it is the fullest so far."""
        alive = self.alive
        sizes = tuple([alive[kind] for kind in KINDS])
        self.moments.append(Moment(self.time, op.id, op.part, sizes, self.total))
        self.time += 1
        self.most_others = max(self.most_others, self.others)
        if self.total > self.peak:
            self.peak, self.where, self.step = self.total, op.id, step
            self.at_peak = Counter(alive)

    def begin(self, iterations: int) -> None:
        """Remember the state where iterations begin that stand for left-out ones."""
        now = Counter(self.alive), self.total, self.time, len(self.moments)
        self._before += [now] * iterations

    def end(self, left_out: Iterable[int]) -> None:
        """Add the changes of left-out iterations; left_out: their number by ending iteration."""
        for times in left_out:
            before, total, time, first = self._before.pop()
            grown = [self.alive[kind] - before[kind] for kind in KINDS]
            more = self.total - total
            length, pattern = self.time - time, self.moments[first:]
            shown = max(1, min(times, _WRITTEN_OUT // len(pattern)))
            for place in range(shown):
                turn = 1 + place * times // shown
                self.moments += [_later(m, turn * length, grown, more, turn) for m in pattern]
            self.time += times * length
            for kind, size in zip(KINDS, grown, strict=True):
                self.change(kind, times * size)

    def result(self, tensors: tuple[Held, ...]) -> Memory:
        """The record for the report."""
        most, at_peak = self.most, Counter(self.at_peak)
        saved = at_peak.pop(SAVED, 0)
        at_peak["activations"] += saved
        dropped = at_peak.pop(OPTIMIZERS, 0)
        at_peak["temporary"] += dropped
        return Memory(
            weights=most["weights"],
            kv=most["kv"],
            gradients=most["gradients"],
            optimizer=most["optimizer"],
            activations_peak=self.most_others,
            peak=self.peak,
            at_peak={role: at_peak[role] for role in ROLES},
            where=self.where,
            saved=saved,
            optimizer_temporaries=dropped,
            tensors=tensors,
            timeline=Timeline(tuple(self.moments)),
        )


def _later(moment: Moment, time: int, grown: Sequence[int], more: int, times: int) -> Moment:
    """The moment of this op in a later iteration; grown: of one, by kind, and `more` in all."""
    sizes, total = moment.sizes, moment.total
    if any(grown):
        sizes = tuple([a + times * b for a, b in zip(sizes, grown, strict=True)])
        total += times * more
    return Moment(moment.time + time, moment.op, moment.part, sizes, total)


# -- tensors at the peak ---------------------------------------------------------------------------


_Key = tuple[int, bool]
"""A storage, and whether backward reads it."""


def _alive(visits: Sequence[Visit], lives: Lives, last: int, stored: _Stored) -> Counter[_Key]:
    """Number of alive tensors of each storage as visit `last` runs (-1: before the first)."""
    alive: Counter[_Key] = Counter()
    before: list[Counter[_Key]] = []

    def change(lived: Iterable[tuple[int, int]], sign: int) -> None:
        for number, times in lived:
            alive[stored.storage(number), stored.saved(number)] += sign * times

    change(lives.births.get(-1, ()), 1)
    for number, visit in enumerate(visits[: last + 1]):
        if visit.begins:
            before += [Counter(alive)] * visit.begins
        change(lives.replaced.get(number, ()), -1)
        change(lives.births.get(number, ()), 1)
        if number == last:
            break
        change(lives.deaths.get(number, ()), -1)
        for left_out in visit.ends:
            was = before.pop()
            alive.update({key: left_out * (count - was[key]) for key, count in alive.items()})
    return Counter({key: count for key, count in alive.items() if count > 0})


def _exchanged(graph: OpGraph, alive: Mapping[_Key, int], sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes of weights gathered from shards, and of temporaries that are sent or received."""
    exchanged = {
        graph.values[value].storage
        for op in graph.ops
        if op.collective is not None
        for value in (*op.inputs, *op.outputs)
    }
    gathered = buffers = 0
    for (storage, _), count in alive.items():
        role = graph.values[storage].role
        if role == "weights" and storage in graph.producers:
            gathered += count * sizes[storage]
        elif role == "temporary" and storage in exchanged:
            buffers += count * sizes[storage]
    return gathered, buffers


UNREAD = "(not read in this step)"


def _held(
    graph: OpGraph, alive: Mapping[_Key, int], sizes: Sequence[int], unread: int
) -> tuple[Held, ...]:
    """The alive tensors, equal ones as one, and weights that the step does not read."""
    counts: Counter[Held] = Counter()
    total: Counter[Held] = Counter()
    for (storage, saved), count in alive.items():
        key = _alone(graph, storage, saved)
        counts[key] += count
        total[key] += count * sizes[storage]
    if unread > 0:
        key = Held(
            role="weights", module="", op="", part="", name=UNREAD, shape=(), dtype="", saved=False
        )
        counts[key], total[key] = 1, unread
    tensors = [replace(key, count=counts[key], bytes=size) for key, size in total.items() if size]
    return tuple(
        sorted(tensors, key=lambda held: (-held.bytes, *map(str, held.to_dict().values())))
    )


def _alone(graph: OpGraph, storage: int, saved: bool) -> Held:
    """The record of one tensor of a storage, without its bytes."""
    tensor = graph.values[storage]
    maker = graph.producers.get(storage)
    if maker is None or tensor.name:
        module = _owner(tensor)
    else:
        module = graph.ops[maker].module
    op = graph.ops[maker] if maker is not None else None
    return Held(
        role=tensor.role,
        module=pattern_of(module),
        op=op.name if op else "",
        part=op.part if op else "",
        name=pattern_of(tensor.name),
        shape=tensor.shape,
        dtype=tensor.dtype,
        saved=saved,
    )


_SUFFIXES = {"weights": 1, "gradients": 2, "optimizer": 2}
"""Steps of a name behind the module's path: "layers.0.fc.weight", "layers.0.fc.weight.grad"."""


def _owner(tensor: Tensor) -> str:
    """The path of the module that a weight, its gradient or its state belongs to."""
    steps = tensor.name.removesuffix(".master.grad").split(".")
    behind = 1 if tensor.name.endswith(".master.grad") else _SUFFIXES.get(tensor.role, len(steps))
    return ".".join(steps[:-behind])


def _block(path: str) -> str:
    """A path up to the step behind its first index."""
    steps = path.split(".")
    return ".".join(steps[: steps.index("*") + 2]) if "*" in steps else path


def _grouped(tensors: Iterable[Held], key: Callable[[Held], str]) -> list[HeldInBlock]:
    bytes_of: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    roles: dict[str, Counter[str]] = defaultdict(Counter)
    for held in tensors:
        name = key(held)
        bytes_of[name] += held.bytes
        counts[name] += held.count
        roles[name][held.role] += held.bytes
    return [
        {
            "module": name,
            "bytes": size,
            "tensors": counts[name],
            "roles": {role: roles[name][role] for role in ROLES if roles[name][role]},
        }
        for name, size in sorted(bytes_of.items(), key=lambda item: (-item[1], item[0]))
    ]
