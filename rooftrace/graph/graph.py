"""The operator graph: plain records of the ops of a step, with sizes; no torch, no costs, no chips.

A captured step is an `OpGraph`: values (tensors) by id, and ops in execution order that
read and write them.  Everything later (costs, fusion, memory, reports) is a pure function of these
records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from msgspec import structs

from rooftrace._shown import Shown, short
from rooftrace.errors import RequestError
from rooftrace.graph.expand import last_written_out, made_in_reverse, numbered
from rooftrace.graph.records import (
    KINDS,
    LOWER_BOUND,
    PARTS,
    ROLES,
    Assumption,
    Collective,
    GraphError,
    Group,
    Neighbour,
    Op,
    Repeat,
    Tensor,
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
            graph = graph.replace(**last_written_out(graph))
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
        return replace(self, **changes)

    def with_ops(self, ops: Iterable[Op], **changes: Any) -> OpGraph:
        """A copy with other ops, numbered as they stand, and with some fields changed."""
        ids = (
            op if op.id == place else structs.replace(op, id=place) for place, op in enumerate(ops)
        )
        return replace(self, ops=tuple(ids), **changes)

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
            self._verify_op(f"op {index} ({op.target})", op, made)
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
        self._verify_neighbour(f"value {index}", tensor.then)

    def _verify_collective(self, name: str, collective: Collective) -> None:
        if collective.kind not in COLLECTIVES or collective.bytes < 0:
            raise GraphError(f"{name} has collective {collective.kind!r}, {collective.bytes} bytes")
        if collective.group not in self.groups:
            raise GraphError(
                f"{name} names group {collective.group!r}; groups are "
                f"{', '.join(map(repr, self.groups)) or 'none'}"
            )

    def _verify_neighbour(self, name: str, then: Neighbour | None) -> None:
        if then is None:
            return
        if not 0 <= then.value < len(self.values) or not 0 <= then.repeat < len(self.repeats):
            raise GraphError(f"{name} has a neighbour that is not there: {then}")
        if then.repeat not in self.values[then.value].repeats or then.shift not in (1, -1):
            raise GraphError(f"{name} has a neighbour outside of its repeat: {then}")

    def _verify_op(self, name: str, op: Op, made: set[int]) -> None:
        count = len(self.values)
        if op.part not in PARTS or op.kind not in KINDS:
            raise GraphError(f"{name} has part {op.part!r}, kind {op.kind!r}")
        if op.collective is not None:
            self._verify_collective(name, op.collective)
        for value in op.inputs:
            if not 0 <= value < count:
                raise GraphError(f"{name} reads value {value}, which is not there")
            if value in self.producers and value not in made:
                raise GraphError(f"{name} reads value {value} before it is made")
        if not set(op.repeats) <= set(range(len(self.repeats))):
            raise GraphError(f"{name} is in repeats {op.repeats}, which are not there")
        read = op.reads
        if tuple(ref.id for ref in read) != op.inputs:
            raise GraphError(f"{name}: inputs differ from its arguments")
        for ref in read:
            self._verify_neighbour(name, ref.then)
        for ref in op.holds:
            if not 0 <= ref.id < count:
                raise GraphError(f"{name} holds value {ref.id}, which is not there")
            self._verify_neighbour(name, ref.then)
        for value in op.outputs:
            if not 0 <= value < count or value in made:
                raise GraphError(f"{name} makes value {value} twice or not at all")
