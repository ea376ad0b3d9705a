"""Writing repeats out: from a graph in which equal iterations stand once to the flat one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from rooftrace.graph.records import (
    REVERSED,
    Argument,
    Neighbour,
    Op,
    Ref,
    Repeat,
    Tensor,
    in_order,
    refs,
)


class Rolled(Protocol):
    """The fields of a graph with repeats."""

    @property
    def values(self) -> tuple[Tensor, ...]: ...

    @property
    def ops(self) -> tuple[Op, ...]: ...

    @property
    def inputs(self) -> tuple[int, ...]: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...

    @property
    def repeats(self) -> tuple[Repeat, ...]: ...


def last_written_out(graph: Rolled) -> dict[str, Any]:
    """The fields of a graph that change when its last repeat is written out, with their values."""
    return _FlatRepeat(graph, graph.repeats[-1]).fields()


class _FlatRepeat:
    """One repeat written out.  `ids`: the new ids of each value, one for each iteration."""

    def __init__(self, graph: Rolled, repeat: Repeat) -> None:
        self.source, self.repeat = graph, repeat
        self.reversed = made_in_reverse(graph.ops, repeat.id)
        self.ids, self.count = numbered(graph.values, repeat, self.reversed)

    def fields(self) -> dict[str, Any]:
        """The fields of the graph without this repeat, its last one."""
        values: list[Tensor | None] = [None] * self.count
        for index, tensor in enumerate(self.source.values):
            for iteration, new in enumerate(self.ids[index]):
                values[new] = self._tensor(index, tensor, iteration)
        ops: list[Op] = []
        for run, inside in _runs_of(self.source.ops, self.repeat.id):
            order: Iterable[int] = (0,)
            if inside:
                order = range(self.repeat.count)
                order = reversed(order) if run[0].part in REVERSED else order
            for iteration in order:
                for op in run:
                    ops.append(self._op(op, iteration if inside else None, len(ops)))
        return {
            "values": tuple(v for v in values if v is not None),
            "ops": tuple(ops),
            "inputs": tuple(self._spread(self.source.inputs)),
            "outputs": tuple(self._spread(self.source.outputs)),
            "repeats": tuple(self._renamed(other) for other in self.source.repeats[:-1]),
        }

    def _renamed(self, other: Repeat) -> Repeat:
        """Another repeat, with the new ids of the values that it names."""
        names = {new: copies for value, copies in other.names.items() for new in self.ids[value]}
        return replace(other, names=names)

    def _tensor(self, index: int, tensor: Tensor, iteration: int) -> Tensor:
        repeat, inside = self.repeat, self.repeat.id in tensor.repeats
        storage = self._one(tensor.storage, tensor.then, iteration if inside else None)
        names = repeat.names.get(index)
        return replace(
            tensor,
            storage=storage,
            name=names[iteration] if names else repeat.path(tensor.name, iteration),
            repeats=tuple(r for r in tensor.repeats if r != repeat.id),
            then=self._neighbour(tensor.then, iteration),
        )

    def _neighbour(self, then: Neighbour | None, iteration: int | None) -> Neighbour | None:
        """A Neighbour of another repeat, with its new id; None for one of this repeat."""
        if then is None or then.repeat == self.repeat.id:
            return None
        return replace(then, value=self._one(then.value, None, iteration))

    def _one(self, value: int, then: Neighbour | None, iteration: int | None) -> int:
        """The new id of a value as `iteration` sees it; as the outside does for None."""
        if iteration is None:
            copies = self.ids[value]
            return copies[0 if value in self.reversed else -1]
        if then is not None and then.repeat == self.repeat.id:
            neighbour = iteration + then.shift
            if 0 <= neighbour < self.repeat.count:
                return self.ids[then.value][neighbour]
        copies = self.ids[value]
        return copies[iteration] if len(copies) > 1 else copies[0]

    def _op(self, op: Op, iteration: int | None, index: int) -> Op:
        arguments = {k: self._argument(v, iteration) for k, v in op.arguments.items()}
        inside = iteration is not None
        if iteration and op.repeats[-1] == self.repeat.id:
            for name, step in op.steps.items():
                arguments[name] += step * iteration
        outputs = (
            (self._one(value, None, iteration) for value in op.outputs)
            if inside
            else self._spread(op.outputs)
        )
        repeats = tuple(r for r in op.repeats if r != self.repeat.id)
        return replace(
            op,
            id=index,
            arguments=arguments,
            inputs=tuple(refs(arguments)),
            outputs=tuple(outputs),
            module=self.repeat.path(op.module, iteration) if iteration else op.module,
            assumptions=self._assumptions(op.assumptions, iteration or 0),
            repeats=repeats,
            steps={} if inside and op.repeats[-1] == self.repeat.id else op.steps,
            holds=in_order(self._argument(op.holds, iteration)),
        )

    def _assumptions(self, assumptions: tuple[int, ...], iteration: int) -> tuple[int, ...]:
        listed = self.repeat.assumptions
        return tuple(listed[a][iteration] if a in listed else a for a in assumptions)

    def _argument(self, item: Argument, iteration: int | None) -> Argument:
        if type(item) is Ref:
            then = self._neighbour(item.then, iteration)
            return Ref(self._one(item.id, item.then, iteration), then, item.every)
        if type(item) is not tuple:
            return item
        if iteration is not None:
            return tuple(self._argument(x, iteration) for x in item)
        result: list[Argument] = []
        for group, spread in grouped(item, self._is_every):
            if not spread:
                result += (self._argument(x, None) for x in group)
                continue
            for q in range(self.repeat.count):
                for ref in group:
                    left = set(self.source.values[ref.id].repeats) - {self.repeat.id}
                    result.append(Ref(self.ids[ref.id][q], every=bool(left)))
        return tuple(result)

    def _is_every(self, item: Argument) -> bool:
        return (
            type(item) is Ref
            and item.every
            and self.repeat.id in self.source.values[item.id].repeats
        )

    def _spread(self, values: Sequence[int]) -> Iterator[int]:
        """Values of all iterations, iteration by iteration where several stand side by side."""
        varies = [self.repeat.id in self.source.values[v].repeats for v in values]
        marked = list(zip(values, varies, strict=True))
        for group, spread in grouped(marked, lambda pair: pair[1]):
            for q in range(self.repeat.count if spread else 1):
                for value, _ in group:
                    yield self.ids[value][q]


def numbered(
    values: Sequence[Tensor], repeat: Repeat, in_reverse: frozenset[int]
) -> tuple[list[tuple[int, ...]], int]:
    """The ids that values get when `repeat` is written out, and how many there are then.

    Values are numbered as they are made: side by side in the graph, iteration by iteration.
    """
    ids: list[tuple[int, ...]] = []
    start = 0
    marked = [(index, repeat.id in tensor.repeats) for index, tensor in enumerate(values)]
    for group, varies in grouped(marked, lambda pair: pair[1]):
        size, count = len(group), repeat.count if varies else 1
        back = varies and any(index in in_reverse for index, _ in group)
        for offset in range(size):
            numbers = range(start + offset, start + offset + size * count, size)
            ids.append(tuple(reversed(numbers)) if back else tuple(numbers))
        start += size * count
    return ids, start


def made_in_reverse(ops: Sequence[Op], repeat: int) -> frozenset[int]:
    return frozenset(
        value for op in ops if repeat in op.repeats and op.part in REVERSED for value in op.outputs
    )


def _runs_of(ops: Sequence[Op], repeat: int) -> Iterator[tuple[list[Op], bool]]:
    """Ops inside of the repeat, and ops outside, in turns."""
    return grouped(ops, lambda op: repeat in op.repeats)


def grouped(items: Sequence[Any], test: Callable[[Any], bool]) -> Iterator[tuple[list[Any], bool]]:
    """Runs of items for which `test` says the same, each with the answer."""
    group: list[Any] = []
    kind = False
    for item in items:
        answer = test(item)
        if group and answer != kind:
            yield group, kind
            group = []
        kind = answer
        group.append(item)
    if group:
        yield group, kind
