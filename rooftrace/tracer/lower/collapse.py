"""Writes one iteration for all of a repeat, once it is known which values correspond.

Nothing is rolled that `expand` would not restore, value for value and op for op; what ops hold is
that of the iteration that stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from msgspec.structs import replace

from rooftrace.tracer.arguments import Argument, Neighbour, Ref, in_order, refs
from rooftrace.tracer.graph import Op, OpGraph, Repeat, Tensor
from rooftrace.tracer.lower.blocks import Blocks, NotAlikeError


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
        """The short graph, once `copy`, `home` and `steps` are known."""
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
        """What an iteration holds; of the iterations before that what the one beside it made."""
        for ref in holds:
            place = self.blocks.place.get(ref.id)
            if self._known(ref) and (place is None or abs(place[1] - label) <= 1):
                with contextlib.suppress(NotAlikeError):
                    yield self._argument(ref, label)

    def _held_outside(self, holds: Sequence[Ref], label: int | None) -> Iterator[Ref]:
        """What an op outside holds; of the values of an iteration those of all, or of the last."""
        whole = self._held_by_all({ref.id for ref in holds})
        for ref in holds:
            if ref.id in whole:
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
        there = {values[i].storage for i in self.source.external if values[i].role != "kv"}
        return frozenset(there | {values[i].storage for i in self.source.outputs})

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
        """A value as the iteration that stands reads it, and what the others read beside them."""
        place = self.blocks.place.get(value)
        if place is None:
            return self._owned_from_inside(value, label)
        if place[1] == label or abs(place[1] - label) > 1:
            return self.short[value], None
        run, made_in, offset = place
        shift = made_in - label
        runs = self.blocks.runs[run]
        edge = value if shift < 0 else runs[self.lasts[label] + 1].made[offset]
        beside = self.short[runs[label].made[offset]]
        return self.short[edge], Neighbour(self.repeats[label].id, beside, shift)

    def _owned_from_inside(self, value: int, label: int) -> tuple[int, Neighbour | None]:
        """A value that no iteration made, as `_from_inside` gives one that was made."""
        owner = self.blocks.owner.get(value)
        if owner is None or owner == label or abs(owner - label) > 1:
            return self.short[value], None
        shift = owner - label
        edge = value if shift < 0 else self.blocks.beside(value, self.lasts[label] + 1)
        beside = self.short[self.blocks.beside(value, label)]
        return self.short[edge], Neighbour(self.repeats[label].id, beside, shift)

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
            self.copy[v] != (mine[place % size][0], place // size) for place, v in enumerate(values)
        ):
            raise NotAlikeError
        return list(values[:size])


def _either(old: Neighbour | None, new: Neighbour | None) -> Neighbour | None:
    """Two repeats at once cannot both read from beside."""
    if old is not None and new is not None:
        raise NotAlikeError
    return old or new
