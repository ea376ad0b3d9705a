"""Blocks of a graph's ops by iteration, and one iteration written in place of a repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from rooftrace.graph import (
    REVERSED,
    Argument,
    Neighbour,
    Op,
    OpGraph,
    Ref,
    Repeat,
    Tensor,
    in_order,
    refs,
    split,
)

# -- blocks ----------------------------------------------------------------------------------------
# Iterations of a graph, and whether they are alike: the blocks of ops that belong together.
#
# Every op of an iteration bears its label, a number.  A pass goes through the labels one by one, up
# in forward and down in backward; the ops of one label in one pass are a block.  Two iterations are
# alike if their blocks are, pass by pass: the same ops on the same sizes, wired alike - to values
# of this iteration, of its neighbour, or shared by all.

_INDICES = {
    "aten.select": ("index",),
    "aten.slice": ("start", "end"),
    "aten.select_backward": ("index",),
    "aten.slice_backward": ("start", "end"),
    "aten.select_scatter": ("index",),
    "aten.slice_scatter": ("start", "end"),
}
"""Arguments that may grow from one iteration to the next: they move a view, not its size."""


class NotAlikeError(Exception):
    """Iterations, or calls, that have to be written out: something treats them differently."""


@dataclass(slots=True)
class Block:
    """One iteration in one run: a range of ops, and the values that they make, in order."""

    start: int
    stop: int
    made: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Iteration:
    """Values of one iteration alone, in order of first use, and the indices that it writes."""

    externals: dict[int, int] = field(default_factory=dict)
    assumed: dict[int, int] = field(default_factory=dict)
    indices: dict[tuple[int, int, str], int] = field(default_factory=dict)


class Blocks:
    """The iterations in a graph: their places, and the ways in which they are alike.

    labels: the number of the iteration of each op, of those inside of one; of modules `period` side
    by side, from number `phase` on, make one.  container: their path, None for a loop.  runs: the
    passes, each its blocks by label.  place: (run, label, offset) of a value that a block made.
    owner[value]: the iteration of an external value (a weight), by its only user or by its name;
    neighbours may read it too (a prefetch of weights).
    """

    def __init__(
        self,
        graph: OpGraph,
        labels: Sequence[int | None],
        container: str | None = None,
        period: int = 1,
        phase: int = 0,
    ) -> None:
        self.graph, self.container, self.period, self.phase = graph, container, period, phase
        self.runs = _passes(
            [
                None if x is None else ((x - phase) // period, op.part in REVERSED)
                for op, x in zip(graph.ops, labels, strict=True)
            ]
        )
        self.place: dict[int, tuple[int, int, int]] = {}
        self.label_of_op: dict[int, int] = {}
        for number, run in enumerate(self.runs):
            for label, block in run.items():
                for op in graph.ops[block.start : block.stop]:
                    self.label_of_op[op.id] = label
                    for value in op.outputs:
                        self.place[value] = (number, label, len(block.made))
                        block.made.append(value)
        self.owner = self._owners()
        self._number = self._numbers()
        self._seen: dict[int, _Iteration] = {}

    def _owners(self) -> dict[int, int]:
        users: dict[int, set[int]] = {}
        for op in self.graph.ops:
            label = self.label_of_op.get(op.id)
            if label is not None:
                for value in op.inputs:
                    if value not in self.place:
                        users.setdefault(value, set()).add(label)
        owners = {value: label for value, (label, *more) in users.items() if not more}
        for index in self.graph.external if self.container is not None else ():
            label = self._named(index)
            some = users.get(index, set())
            near = label is not None and all(abs(user - label) <= 1 for user in some)
            if label is not None and near and (label in some or not some):
                owners[index] = label
        return owners

    def _named(self, value: int) -> int | None:
        """The iteration whose weight a value is, or is a view of, by its name."""
        tensor = self.graph.values[value]
        label = self.label_of(tensor.name)
        return self.label_of(self.graph.values[tensor.storage].name) if label is None else label

    def _numbers(self) -> dict[int, int]:
        """Numbers of the values that an iteration owns and its neighbour reads too."""
        counts: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for op in self.graph.ops:
            label = self.label_of_op.get(op.id)
            if label is None:
                continue
            for value in op.inputs:
                if value not in numbers and self.owner.get(value) == label:
                    numbers[value] = counts[label] = counts.get(label, -1) + 1
        return numbers

    def label_of(self, name: str) -> int | None:
        """The iteration that a module path or a dotted name belongs to."""
        place = None if self.container is None else split(name, self.container)
        return None if place is None else (place[0] - self.phase) // self.period

    def relative(self, path: str, label: int) -> Any:
        """A path or name as the iteration sees it: the container's number counts from it."""
        place = None if self.container is None else split(path, self.container)
        return path if place is None else (place[0] - label * self.period, place[1])

    def externals(self, label: int) -> list[int]:
        """Values that only this iteration uses and none makes, in order of first use."""
        return list(self._seen[label].externals)

    def assumptions(self, label: int) -> list[int]:
        """Assumptions made in this iteration, in order."""
        return list(self._seen[label].assumed)

    def counterpart(self, value: int, label: int) -> int:
        """The value of iteration `label` that corresponds to a value of another iteration."""
        number = self._number[value]
        return next(other for other in self.externals(label) if self._number.get(other) == number)

    def indices(self, label: int) -> dict[tuple[int, int, str], int]:
        """Indices that may grow, by run, place of the op in the block, and argument."""
        return self._seen[label].indices

    # -- likeness ----------------------------------------------------------------------------------

    def interval(self, shortest: int) -> tuple[int, int] | None:
        """The longest interval of iterations that are alike, if it has as many as `shortest`."""
        present = sorted(set().union(*self.runs)) if self.runs else []
        keys = {label: self.key(label) for label in present}
        best = (0, 0, 0)
        start = None
        for label in present:
            same = keys[label] == keys.get(label + 1)
            if same and start is None:
                start = label
            if not same and start is not None:
                best = max(best, (label - start + 1, start, label))
                start = None
        return best[1:] if best[0] >= shortest else None

    def key(self, label: int) -> int:
        """Equal for iterations that are alike."""
        seen = self._seen[label] = _Iteration()
        parts: list[Any] = []
        for number, run in enumerate(self.runs):
            block = run.get(label)
            if block is not None:
                parts.append(number)
                for op in self.graph.ops[block.start : block.stop]:
                    parts.append(self._op(op, label, seen, (number, op.id - block.start)))
        return hash(tuple(parts))

    def _op(self, op: Op, label: int, seen: _Iteration, place: tuple[int, int]) -> Any:
        arguments = dict(op.arguments)
        for name in _INDICES.get(op.name, ()):
            index = arguments.get(name)
            if type(index) is int:
                seen.indices[(*place, name)] = index
                arguments[name] = None
        return (
            op.target,
            tuple([(k, self._argument(v, label, seen)) for k, v in arguments.items()]),
            tuple([self._value(v, label, seen) for v in op.outputs]),
            self.relative(op.module, label),
            op.call,
            op.part,
            op.kind,
            op.family,
            op.function,
            op.source,
            op.flops_torch,
            _plain(op.facts),
            tuple([self._assumption(a, label, seen) for a in op.assumptions]),
            op.repeats,
            _plain(op.steps),
        )

    def _argument(self, item: Argument, label: int, seen: _Iteration) -> Any:
        if type(item) is Ref:
            value = self._value_seen(item.id, label, seen)
            return value, item.every, self._neighbour(item.then, label, seen)
        if type(item) is tuple:
            return tuple([self._argument(x, label, seen) for x in item])
        return type(item), item

    def _value(self, value: int, label: int, seen: _Iteration) -> Any:
        tensor = self.graph.values[value]
        return (
            tensor.shape,
            tensor.dtype,
            tensor.stored,
            tensor.stride,
            tensor.role,
            self.relative(tensor.name, label) if self.label_of(tensor.name) is not None else "",
            self._value_seen(tensor.storage, label, seen),
            tensor.repeats,
            self._neighbour(tensor.then, label, seen),
        )

    def _neighbour(self, then: Neighbour | None, label: int, seen: _Iteration) -> Any:
        return then and (then.repeat, then.shift, self._value_seen(then.value, label, seen))

    def _value_seen(self, value: int, label: int, seen: _Iteration) -> Any:
        """A value as an iteration sees it: made by it or a neighbour, external, or shared."""
        place = self.place.get(value)
        if place is not None:
            run, made_in, offset = place
            return (run, made_in - label, offset) if abs(made_in - label) <= 1 else value
        owner = self.owner.get(value)
        if owner is None or abs(owner - label) > 1:
            return value
        if owner != label:
            return "neighbour", owner - label, self._number.get(value, value)
        number = seen.externals.get(value)
        if number is not None:
            return "external", number
        number = seen.externals[value] = len(seen.externals)
        return "external", number, self._value(value, label, seen)

    def _assumption(self, number: int, label: int, seen: _Iteration) -> Any:
        assumption = self.graph.assumptions[number]
        if self.label_of(assumption.where) is None:
            return number
        position = seen.assumed.setdefault(number, len(seen.assumed))
        return (
            position,
            assumption.kind,
            self.relative(assumption.where, label),
            repr(assumption.value),
            _plain(assumption.facts),
        )


def _plain(mapping: Mapping[str, Any]) -> Any:
    return repr(mapping) if mapping else None


def _passes(marks: Sequence[tuple[int, bool] | None]) -> list[dict[int, Block]]:
    """Passes through the iterations: blocks whose labels go up, or down, one by one.

    marks: the label of each op, and whether it belongs to a part that goes in reverse.
    """
    starts: list[tuple[tuple[int, bool], int]] = []
    last = 0
    for index, mark in enumerate(marks):
        if mark is not None:
            last = index + 1
            if not starts or starts[-1][0] != mark:
                starts.append((mark, index))
    stops = [start for _, start in starts[1:]] + [last] * min(len(starts), 1)
    runs: list[dict[int, Block]] = []
    before: tuple[int, bool] | None = None
    for (mark, start), stop in zip(starts, stops, strict=True):
        label, back = mark
        if before is None or before != (label + (1 if back else -1), back):
            runs.append({})
        runs[-1][label] = Block(start, stop)
        before = mark
    for run in runs:
        _trim(run)
    return runs


def _trim(run: Mapping[int, Block]) -> None:
    """Cut the ops after the last iteration of a pass that belong to no iteration."""
    blocks = list(run.values())
    if len(blocks) > 1:
        size = blocks[-2].stop - blocks[-2].start
        blocks[-1].stop = min(blocks[-1].stop, blocks[-1].start + size)


# -- collapse --------------------------------------------------------------------------------------
# Writes one iteration for all of a repeat, once the corresponding values are found.
#
# Nothing is rolled that `expand` would not restore, value for value and op for op; values held
# are those of the kept iteration.


class Collapse:
    """The graph in which one iteration stands for `count`, in one repeat or several.

    repeats: by the label of the iteration that stands for others.  lasts: the last label of those.
    copy: of a value that each of these iterations has for itself, the one that stays, and the
    number of the iteration; home: the label of one that stays.  steps: by how much arguments grow
    with every iteration, by label, run, place of the op in its block, and name; indices: arguments
    of ops outside that were recorded otherwise.
    Raises NotAlikeError where the short graph would not say the same.
    """

    def __init__(
        self, blocks: Blocks, repeats: Mapping[int, Repeat], lasts: Mapping[int, int]
    ) -> None:
        self.blocks, self.repeats, self.lasts = blocks, repeats, lasts
        self.source = blocks.graph
        self.copy: dict[int, tuple[int, int]] = {}
        self.home: dict[int, int] = {}
        self.steps: dict[tuple[int, int, int, str], int] = {}
        self.indices: dict[int, dict[str, int]] = {}
        self.short: dict[int, int] = {}
        self._runs_by_start = {
            block.start: number
            for number, run in enumerate(blocks.runs)
            for label, block in run.items()
            if label in repeats
        }

    def _write(self, repeats: tuple[Repeat, ...]) -> OpGraph:
        """The short graph, once `copy`, `home` and `steps` are filled."""
        kept = [v for v in range(len(self.source.values)) if self._stays(v)]
        self.short = {value: index for index, value in enumerate(kept)}
        ops: list[Op] = []
        start = run = -1
        for op in self.source.ops:
            if op.id in self._runs_by_start:
                start, run = op.id, self._runs_by_start[op.id]
            if self._runs(op):
                ops.append(self._op(op, len(ops), (run, op.id - start)))
        return self.source.replace(
            values=tuple(self._tensor(v) for v in kept),
            ops=tuple(ops),
            inputs=tuple(self._together(self.source.inputs)),
            outputs=tuple(self._together(self.source.outputs)),
            repeats=tuple(
                replace(r, names={self.short[v]: copies for v, copies in r.names.items()})
                for r in repeats
            ),
        )

    def _stays(self, value: int) -> bool:
        return self.copy.get(value, (value, 0))[1] == 0

    def _runs(self, op: Op) -> bool:
        """Whether the op stands in the short graph."""
        return True

    def _tensor(self, value: int) -> Tensor:
        tensor = self.source.values[value]
        if value not in self.copy:
            place = self.blocks.place.get(value)
            label = None if place is None else place[1]
            storage = self._from_outside(tensor.storage, label)
            return replace(tensor, storage=storage, then=self._moved(tensor.then))
        label = self.home[value]
        storage, then = self._from_inside(tensor.storage, label)
        return replace(
            tensor,
            storage=storage,
            repeats=(self.repeats[label].id, *tensor.repeats),
            then=_either(self._moved(tensor.then), then),
        )

    def _moved(self, then: Neighbour | None) -> Neighbour | None:
        """The Neighbour of an inner repeat."""
        return then and replace(then, value=self.short[then.value])

    def _op(self, op: Op, index: int, place: tuple[int, int]) -> Op:
        label = self.blocks.label_of_op.get(op.id)
        repeat = None if label is None else self.repeats.get(label)
        arguments = {k: self._argument(v, label) for k, v in op.arguments.items()}
        arguments |= self.indices.get(op.id, {})
        if repeat is None or label is None:
            return replace(
                op,
                id=index,
                arguments=arguments,
                inputs=tuple(refs(arguments)),
                outputs=tuple(self._together(op.outputs)),
                holds=in_order(self._held_outside(op.holds, label)),
            )
        steps = {
            name: self.steps[(label, *place, name)]
            for name in op.arguments
            if self.steps.get((label, *place, name))
        }
        if steps and op.repeats:
            raise NotAlikeError
        return replace(
            op,
            id=index,
            arguments=arguments,
            inputs=tuple(refs(arguments)),
            outputs=tuple([self.short[v] for v in op.outputs]),
            repeats=(repeat.id, *op.repeats),
            steps=steps or op.steps,
            holds=in_order(self._held_inside(op.holds, label)),
        )

    def _held_inside(self, holds: Sequence[Ref], label: int) -> Iterator[Ref]:
        """Values that an iteration holds; of earlier iterations, those that its neighbour made."""
        for ref in holds:
            place = self.blocks.place.get(ref.id)
            if self._known(ref) and (place is None or abs(place[1] - label) <= 1):
                with contextlib.suppress(NotAlikeError):
                    yield self._argument(ref, label)

    def _held_outside(self, holds: Sequence[Ref], label: int | None) -> Iterator[Ref]:
        """Values that an op outside holds; of an iteration's values all, or the last ones."""
        everywhere = self._held_by_all({ref.id for ref in holds})
        for ref in holds:
            if ref.id in everywhere:
                if self._stays(ref.id):
                    yield Ref(self.short[ref.id], every=True)
            elif self._known(ref):
                with contextlib.suppress(NotAlikeError):
                    yield self._argument(ref, label)

    def _lives_on(self, value: int, op: int) -> bool:
        """Whether the bytes of a value are there after an op, whoever holds them."""
        storage = self.source.values[value].storage
        return storage in self._kept or self._last_use.get(storage, -1) > op

    @cached_property
    def _kept(self) -> frozenset[int]:
        """Storages that stay to the end of the step."""
        values = self.source.values
        storages = {values[i].storage for i in self.source.external if values[i].role != "kv"}
        return frozenset(storages | {values[i].storage for i in self.source.outputs})

    @cached_property
    def _last_use(self) -> dict[int, int]:
        """By storage, the last op that reads or writes it."""
        values = self.source.values
        return {
            values[value].storage: op.id
            for op in self.source.ops
            for value in (*op.inputs, *op.outputs)
        }

    def _known(self, ref: Ref) -> bool:
        """Whether a value stands in the short graph, itself or as a copy."""
        return self.copy.get(ref.id, (ref.id, 0))[0] in self.short

    def _held_by_all(self, held: Collection[int]) -> Collection[int]:
        """Those of the held values of an iteration that are held of every iteration."""
        raise NotImplementedError

    def _argument(self, item: Argument, label: int | None) -> Argument:
        inside = label in self.repeats
        if type(item) is tuple:
            if inside:
                return tuple([self._argument(x, label) for x in item])
            return tuple(self._list(item, label))
        if type(item) is not Ref:
            return item
        if not inside or label is None:
            return Ref(self._from_outside(item.id, label), self._moved(item.then), item.every)
        value, then = self._from_inside(item.id, label)
        return Ref(value, _either(self._moved(item.then), then), item.every)

    def _from_inside(self, value: int, label: int) -> tuple[int, Neighbour | None]:
        """A value as the kept iteration reads it, and the neighbours' values of the others."""
        place = self.blocks.place.get(value)
        if place is None:
            return self._owned_from_inside(value, label)
        if place[1] == label or abs(place[1] - label) > 1:
            return self.short[value], None
        run, made_in, offset = place
        shift = made_in - label
        runs = self.blocks.runs[run]
        edge = value if shift < 0 else runs[self.lasts[label] + 1].made[offset]
        neighbour = self.short[runs[label].made[offset]]
        return self.short[edge], Neighbour(self.repeats[label].id, neighbour, shift)

    def _owned_from_inside(self, value: int, label: int) -> tuple[int, Neighbour | None]:
        """A value that no iteration made, as `_from_inside` gives one that was made."""
        owner = self.blocks.owner.get(value)
        if owner is None or owner == label or abs(owner - label) > 1:
            return self.short[value], None
        shift = owner - label
        edge = value if shift < 0 else self.blocks.counterpart(value, self.lasts[label] + 1)
        neighbour = self.short[self.blocks.counterpart(value, label)]
        return self.short[edge], Neighbour(self.repeats[label].id, neighbour, shift)

    def _from_outside(self, value: int, label: int | None) -> int:
        """A value as an op outside reads it: of an iteration's, only the one that ran last."""
        place = self.copy.get(value)
        if place is None:
            return self.short[value]
        if not self._ran_last(value, place[1], label):
            raise NotAlikeError
        return self.short[place[0]]

    def _ran_last(self, value: int, iteration: int, label: int | None) -> bool:
        raise NotImplementedError

    def _home_of(self, value: int) -> int | None:
        place = self.copy.get(value)
        return None if place is None else self.home[place[0]]

    def _list(self, items: Sequence[Argument], label: int | None) -> Iterator[Argument]:
        """The items of a list outside, with those of all iterations as one."""
        homes = [self._home_of(item.id) if type(item) is Ref else None for item in items]
        listed: dict[int, list[int]] = {}
        for home, item in zip(homes, items, strict=True):
            if home is not None:
                listed.setdefault(home, []).append(item.id)
        spread = {home for home, values in listed.items() if self._of_all(values, home)}
        for home, group in groupby(zip(homes, items, strict=True), key=lambda pair: pair[0]):
            some = [item for _, item in group]
            if home is None or home not in spread:
                yield from (self._argument(item, label) for item in some)
            else:
                for value in self._once([item.id for item in some], self.repeats[home].count):
                    yield Ref(self.short[value], every=True)

    def _of_all(self, values: Sequence[int], home: int) -> bool:
        """Whether these values in a list are of all iterations."""
        return len({self.copy[value][1] for value in values}) == self.repeats[home].count

    def _together(self, values: Sequence[int]) -> Iterator[int]:
        """Values outside, with those of all iterations as one."""
        for home, group in groupby(values, key=self._home_of):
            some = list(group)
            for v in some if home is None else self._once(some, self.repeats[home].count):
                yield self.short[v]

    def _once(self, values: Sequence[int], count: int) -> list[int]:
        """Those of the first iteration, of values that go through the iterations one by one."""
        size, rest = divmod(len(values), count)
        mine = [self.copy[v] for v in values[:size]]
        if rest or any(
            self.copy[v] != (mine[position % size][0], position // size)
            for position, v in enumerate(values)
        ):
            raise NotAlikeError
        return list(values[:size])


def _either(old: Neighbour | None, new: Neighbour | None) -> Neighbour | None:
    """Two repeats at once cannot both read from a neighbour."""
    if old is not None and new is not None:
        raise NotAlikeError
    return old or new
