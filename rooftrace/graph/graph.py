"""The operator graph, flat or with repeats: plain records of a step; no torch, no costs, no chips.

A captured step is an `OpGraph`: values (tensors) by id, and ops in execution order that
read and write them.  Everything later (costs, fusion, memory, reports) is a pure function of these
records.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, Protocol

from msgspec.structs import replace

from rooftrace._shown import Shown, short
from rooftrace.errors import RequestError
from rooftrace.graph.records import (
    KINDS,
    LOWER_BOUND,
    PARTS,
    REVERSED,
    ROLES,
    Argument,
    Assumption,
    Collective,
    GraphError,
    Group,
    Neighbour,
    Op,
    Ref,
    Repeat,
    Tensor,
    in_order,
    refs,
)
from rooftrace.hardware.systems.records import COLLECTIVES

_LISTED = 40
"""Kernels that `print(graph)` shows."""
_WRITTEN_OUT = 10_000_000
"""The most ops, or values, of a step whose repeats are written out: each takes about 1 kB."""


@dataclass(frozen=True, repr=False)
class OpGraph(Shown):
    """A captured step: values by id, ops in execution order, inputs and outputs by value id.

    Equal iterations stand once: see `repeats`; `expand()` writes them all out.

    modules maps each module path to its class name; calls maps a path (indices starred) to the line
    of the first call of such a module.  constants: the bytes (as hexadecimal text) of
    small values that the module's code wrote down, by name.  schemas: the names of all arguments
    that an op can take, by target; a graph that was made by hand may have none.  model, workload
    and provenance are plain dicts for the report: name and parameter counts; batch, sequence and so
    on; versions.  groups: the processes that collectives name.  mesh: how many processes there are
    along each axis of the device mesh, outermost first; the step is that of one of them.
    """

    phase: str
    values: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    constants: Mapping[str, str] = field(default_factory=dict)
    schemas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)

    # -- reading ---------------------------------------------------------------------------------

    @staticmethod
    def check(value: Any, function: str) -> None:
        """Raise RequestError for a model where one of our functions takes its graph."""
        if not isinstance(value, OpGraph):
            raise RequestError(
                f"{function}: expected an OpGraph, got {type(value).__name__}; trace it first, for "
                f"example {function}(rooftrace.trace(model, x))"
            )

    @property
    def processes(self) -> int:
        """Number of processes that run the step together: of the mesh, or of its groups."""
        highest = max((max(group.ranks) + 1 for group in self.groups.values()), default=1)
        return max(highest, math.prod(self.mesh.values()))

    def kernels(self) -> Iterator[Op]:
        """The ops that run on the device, in order."""
        return (op for op in self.ops if op.kind == "kernel")

    def times(self, item: Op | Tensor) -> int:
        """Number of ops or values that `item` stands for: 1 outside of repeats."""
        return math.prod(self.repeats[r].count for r in item.repeats) if item.repeats else 1

    def expand(self) -> OpGraph:
        """The flat graph of this step: every iteration of every repeat is written out.

        Raises GraphError where that is too long (see `check_length`).
        """
        self.check_length()
        graph = self
        while graph.repeats:
            graph = graph.replace(**_FlatRepeat(graph, graph.repeats[-1]).fields())
        return graph

    def check_length(self) -> None:
        """Raise GraphError for a step of more ops or values than can be listed one by one."""
        length = max(sum(map(self.times, items)) for items in (self.ops, self.values))
        if length > _WRITTEN_OUT:
            raise GraphError(
                f"written out, the step has {length:,} ops or values; they can be listed up to "
                f"{_WRITTEN_OUT:,}"
            )

    def ids_written_out(self, repeat: Repeat) -> list[tuple[int, ...]]:
        """By value, the ids of its copies, one for each iteration, once `repeat` is written out."""
        return numbered(self.values, repeat, made_in_reverse(self.ops, repeat.id))[0]

    def owner(self, value: int) -> Tensor:
        """The tensor that owns the bytes of `value`."""
        return self.values[self.values[value].storage]

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """Value id -> index in `ops` of the op that made it."""
        return {value: index for index, op in enumerate(self.ops) for value in op.outputs}

    @cached_property
    def external(self) -> tuple[int, ...]:
        """Ids of values that no op makes: inputs, weights, constants, states, views of these."""
        made = self.producers
        return tuple(
            i for i, t in enumerate(self.values) if i not in made and t.storage not in made
        )

    @cached_property
    def unrecorded(self) -> tuple[Assumption, ...]:
        """Work that ran out of sight: with any of these all totals are a lower bound."""
        return tuple(item for item in self.assumptions if item.kind in LOWER_BOUND)

    @cached_property
    def flops_torch(self) -> int:
        """Sum of torch's FLOP counts over the ops that it has formulas for."""
        return sum((op.flops_torch or 0) * self.times(op) for op in self.ops)

    def replace(self, **changes: Any) -> OpGraph:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_ops(self, ops: Iterable[Op], **changes: Any) -> OpGraph:
        """A copy with other ops, numbered as they stand, and with some fields changed."""
        numbered = tuple(op.numbered(place) for place, op in enumerate(ops))
        return dataclasses.replace(self, ops=numbered, **changes)

    @property
    def step(self) -> str:
        """The phase, and of a pipeline the stages: "training stages 2-3 of 4"."""
        numbers = [stage + 1 for stage in self.workload.get("stages", ())]
        if not numbers:
            return self.phase
        first, last = numbers[0], numbers[-1]
        which = (
            f"{first}-{last}" if last - first == len(numbers) - 1 else ", ".join(map(str, numbers))
        )
        which = f"stage {first}" if first == last else f"stages {which}"
        return f"{self.phase} {which} of {self.workload['stage_count']}"

    @property
    def title(self) -> str:
        """The name of the model, and the step: "gpt2, decode"."""
        return f"{self.model.get('name') or 'model'}, {self.step}"

    def __repr__(self) -> str:
        total = sum(map(self.times, self.ops))
        once = "" if total == len(self.ops) else f", {len(self.ops):,} of them stand here"
        return short(self, f"{self.title}: {total:,} ops{once}; {len(self.values):,} values")

    def __str__(self) -> str:
        """Sizes of the graph, and its first kernels: count, module and shapes of each."""
        kernels = [op for op in self.ops if op.kind != "view"]
        total, launched = (sum(map(self.times, ops)) for ops in (self.ops, kernels))
        lines = [
            f"{self.phase}: {total:,} ops, {launched:,} without views; equal iterations stand "
            f"once, in {len(self.ops):,} ops"
        ]
        shown = kernels[:_LISTED]
        target = max((len(op.target) for op in shown), default=0)
        module = max((len(op.module) for op in shown), default=0)
        for op in shown:
            times = f"{op.id:6} {self.times(op):6,} x"
            read = ", ".join(str(self.values[value]) for value in op.inputs)
            lines.append(f"{times} {op.target:{target}}  {op.module:{module}}  {read}".rstrip())
        left = len(kernels) - len(shown)
        return "\n".join([*lines, f"... and {left:,} more, in graph.ops"] if left else lines)

    # -- checking --------------------------------------------------------------------------------

    def verify(self) -> OpGraph:
        """Return self if every id exists, is made once and before use, and names exist.

        Raises GraphError naming the first op or value that breaks a rule.
        """
        for index, repeat in enumerate(self.repeats):
            if repeat.id != index or repeat.count < 2:
                raise GraphError(f"repeat at position {index} has id {repeat.id}: {repeat}")
        for index, tensor in enumerate(self.values):
            self._verify_value(index, tensor)
        made: set[int] = set()
        for index, op in enumerate(self.ops):
            if op.id != index:
                raise GraphError(f"op at position {index} has id {op.id}")
            self._verify_op(op, made)
            made.update(op.outputs)
        for value in (*self.inputs, *self.outputs):
            if not 0 <= value < len(self.values):
                raise GraphError(f"graph input or output {value} is not there")
        return self

    def _verify_value(self, index: int, tensor: Tensor) -> None:
        if tensor.role not in ROLES:
            raise GraphError(
                f"value {index} has role {tensor.role!r}; roles are {', '.join(ROLES)}"
            )
        if not 0 <= tensor.storage < len(self.values):
            raise GraphError(
                f"value {index} says storage {tensor.storage}; there are {len(self.values)} values"
            )
        if self.values[tensor.storage].storage != tensor.storage:
            raise GraphError(f"value {index} says storage {tensor.storage}, which is itself a view")
        if len(tensor.stride) != len(tensor.shape):
            raise GraphError(
                f"value {index}: stride {tensor.stride} does not fit shape {tensor.shape}"
            )

        if tensor.repeats and not set(tensor.repeats) <= set(range(len(self.repeats))):
            raise GraphError(f"value {index} is in repeats {tensor.repeats}, which are not there")
        if tensor.then is not None:
            self._verify_neighbour(f"value {index}", tensor.then)

    def _verify_collective(self, name: str, collective: Collective) -> None:
        if collective.kind not in COLLECTIVES or collective.bytes < 0:
            raise GraphError(f"{name} has collective {collective.kind!r}, {collective.bytes} bytes")
        if collective.group not in self.groups:
            raise GraphError(
                f"{name} names group {collective.group!r}; groups are "
                f"{', '.join(map(repr, self.groups)) or 'none'}"
            )

    def _verify_neighbour(self, name: str, then: Neighbour) -> None:
        if not 0 <= then.value < len(self.values) or not 0 <= then.repeat < len(self.repeats):
            raise GraphError(f"{name} has a neighbour that is not there: {then}")
        if then.repeat not in self.values[then.value].repeats or then.shift not in (1, -1):
            raise GraphError(f"{name} has a neighbour outside of its repeat: {then}")

    def _verify_op(self, op: Op, made: set[int]) -> None:
        count = len(self.values)

        def refuse(reason: str) -> NoReturn:
            raise GraphError(f"{_named(op)} {reason}")

        if op.part not in PARTS or op.kind not in KINDS:
            refuse(f"has part {op.part!r}, kind {op.kind!r}")
        if op.collective is not None:
            self._verify_collective(_named(op), op.collective)
        for value in op.inputs:
            if not 0 <= value < count:
                refuse(f"reads value {value}, which is not there")
            if value in self.producers and value not in made:
                refuse(f"reads value {value} before it is made")
        if op.repeats and not set(op.repeats) <= set(range(len(self.repeats))):
            refuse(f"is in repeats {op.repeats}, which are not there")
        if tuple([ref.id for ref in op.reads]) != op.inputs:
            raise GraphError(f"{_named(op)}: inputs differ from its arguments")
        for ref in (*op.reads, *op.holds):
            if not 0 <= ref.id < count:
                refuse(f"holds value {ref.id}, which is not there")
            if ref.then is not None:
                self._verify_neighbour(_named(op), ref.then)
        for value in op.outputs:
            if not 0 <= value < count or value in made:
                refuse(f"makes value {value} twice or not at all")


def _named(op: Op) -> str:
    return f"op {op.id} ({op.target})"


# -- Writing repeats out: from a graph in which equal iterations stand once to the flat one --------


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
