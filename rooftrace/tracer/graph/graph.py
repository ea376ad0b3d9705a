"""The operator graph: plain records of what a step runs, with sizes; no torch, no costs, no chips.

A captured step is an :class:`OpGraph`: values (tensors) by id, and ops in execution order that
read and write them.  Everything later (costs, fusion, memory, reports) is a pure function of these
records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rooftrace.hardware.precisions import storage_bytes

ROLES = ("weights", "activations", "kv", "gradients", "optimizer", "temporary", "constants")
"""Whose bytes a tensor is.

weights: parameters and persistent buffers.  activations: inputs and what forward makes of them.
kv: state that one call hands to the next (key/value cache, recurrent state).  gradients: gradients
of parameters.  optimizer: optimizer states and master weights.  temporary: gradients of
activations, materialised attention scores and other values that no later step needs.  constants:
values that depend on neither weights nor floating inputs (positions, masks, tables).
"""

PARTS = ("forward", "backward", "recompute", "optimizer")
UNRECORDED = "unrecorded"
"""Kind of the assumptions that say that something ran out of sight of the trace."""
LOWER_BOUND = frozenset({UNRECORDED, "higher-order"})
"""Kinds of assumptions with which the totals of a graph are a lower bound."""

KINDS = ("kernel", "view", "sync")
"""kernel: the device works.  view: metadata or an allocation, host only.  sync: the host waits."""


class GraphError(ValueError):
    """An operator graph that breaks its own rules, or a file that is not one."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What an iteration reads of the iteration beside it.

    Iteration i of `repeat` reads iteration ``i + shift`` of `value`.  What stands in the graph
    beside a Neighbour is what the iteration at the edge reads, which has no such neighbour.
    """

    repeat: int
    value: int
    shift: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A value used as an argument: ``Ref(7)`` is the value with id 7.

    In a repeat, iteration i reads iteration i of a value that has iterations too; `then` says
    otherwise.  Outside of the repeat it is what the iteration that ran last made, or, where
    `every` is set, one item of a list for each iteration.
    """

    id: int
    then: Neighbour | None = None
    every: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value.  `storage` is the id of the value that owns the bytes: its own unless a view.

    repeats: ids of the repeats in which every iteration has its own, outermost first.  then: the
    storage in iterations that view what the one beside them made.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    role: str
    storage: int
    name: str = ""
    repeats: tuple[int, ...] = ()
    then: Neighbour | None = None

    @property
    def elements(self) -> int:
        """Number of elements, counting broadcast ones as often as they appear."""
        return math.prod(self.shape)

    @property
    def unique_elements(self) -> int:
        """Number of distinct elements: dimensions of stride 0 (expanded) count once."""
        if 0 not in self.stride:
            return math.prod(self.shape)
        return math.prod(
            n if step or n == 0 else 1 for n, step in zip(self.shape, self.stride, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements at the storage precision."""
        return storage_bytes(self.dtype, self.unique_elements)


Argument = Any
"""Ref, None, bool, int, float, complex, str, or a tuple of arguments."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call.

    target: the full aten name ("aten.mm.default").  arguments: by schema name, defaults left out;
    tensors stand as `Ref`.  inputs, outputs: value ids.  module: path of the module whose code
    called it ("" is the root); a backward op has the path of the forward op that it differentiates.
    call: how many times that module had been called before.  function: the torch-level name
    (linear, or the autograd node in backward).  source: "file.py:12" of the caller.  flops_torch:
    what torch's own FLOP registry says, None where it has no formula.  facts: small things known
    only while tracing (rows_touched, groups_touched, mask, flops_given ...).  assumptions: ids of
    the assumptions it rests on.  repeats: ids of the repeats that it is in, outermost first: it
    runs once in every iteration.  steps: whole-number arguments that grow by so much from one
    iteration of the innermost repeat to the next.  holds: values that no later op reads and that
    were still there as it ran: a variable names them, or a running autograd node has them.
    """

    id: int
    target: str
    arguments: Mapping[str, Argument]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str = ""
    call: int = 0
    part: str = "forward"
    kind: str = "kernel"
    family: str = "other"
    function: str = ""
    source: str = ""
    flops_torch: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    holds: tuple[Ref, ...] = ()

    @property
    def name(self) -> str:
        """The target without its overload: "aten.mm"."""
        return self.target.rsplit(".", 1)[0]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the trace could not know and took for granted.

    kind: name of the policy (balanced-routing, branch, density, value, shape, loss, optimizer ...).
    where: module path.  text: one sentence for the reader.  value: what was taken.  op: the op that
    needed it, "" where none did.  The ops that rest on it name it in `Op.assumptions`.
    """

    id: int
    kind: str
    where: str
    text: str
    value: Any = None
    op: str = ""


@dataclass(frozen=True, slots=True)
class Repeat:
    """Equal iterations, of which one stands in the graph: layers of a stack, steps of a loop.

    count: how many iterations it stands for.  container, first, step: iteration q stands for the
    modules "container.(i + q step)", where the graph shows "container.i" with i from `first` on;
    None for a loop, all of whose steps run in the same modules.  source: where a loop stands.
    names: names of values that do not follow from the module path, by value, for each iteration;
    assumptions: ids of the assumptions of each iteration, by the id that the graph shows.

    Ops of one repeat may stand in several places: forward, backward.  Backward and recomputation
    run the iterations in reverse.
    """

    id: int
    count: int
    container: str | None = None
    first: int = 0
    step: int = 1
    source: str = ""
    names: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    assumptions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def path(self, path: str, iteration: int) -> str:
        """The module path (or dotted name) in this iteration, from the one that the graph shows."""
        found = None if self.container is None else split(path, self.container)
        if found is None or not iteration:
            return path
        return _under(self.container or "", f"{found[0] + iteration * self.step}{found[1]}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the (first) module of each iteration; nothing for a loop."""
        if self.container is None:
            return ()
        first = _under(self.container, str(self.first))
        return tuple(self.path(first, iteration) for iteration in range(self.count))


def split(path: str, container: str) -> tuple[int, str] | None:
    """(3, ".mlp") for "layers.3.mlp" in "layers"; None for what is not in the container."""
    prefix = _under(container, "")
    if not path.startswith(prefix):
        return None
    index, dot, rest = path[len(prefix) :].partition(".")
    return (int(index), dot + rest) if index.isdigit() else None


def _under(container: str, name: str) -> str:
    return f"{container}.{name}" if container else name


@dataclass(frozen=True)
class OpGraph:
    """A captured step: values by id, ops in execution order, inputs and outputs by value id.

    Equal iterations stand once: see `repeats`; `expand()` writes them all out.

    modules maps each module path to its class name.  constants: the bytes (as hexadecimal text) of
    small values that the module's code wrote down, by name.  model, workload and provenance are
    plain dicts for the report: name and parameter counts; batch, sequence and so on; versions.
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
    model: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    # -- reading ---------------------------------------------------------------------------------

    def kernels(self) -> Iterator[Op]:
        """The ops that run on the device, in order."""
        return (op for op in self.ops if op.kind == "kernel")

    def times(self, item: Op | Tensor) -> int:
        """How many ops or values `item` stands for: 1 outside of repeats."""
        return math.prod(self.repeats[r].count for r in item.repeats) if item.repeats else 1

    def expand(self) -> OpGraph:
        """The same step with every iteration of every repeat written out."""
        from rooftrace.tracer.graph.expand import expand

        return expand(self)

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
        """What ran out of sight: with any of these all totals are a lower bound."""
        return tuple(item for item in self.assumptions if item.kind in LOWER_BOUND)

    @cached_property
    def flops_torch(self) -> int:
        """Sum of torch's own FLOP counts over the ops that it has formulas for."""
        return sum((op.flops_torch or 0) * self.times(op) for op in self.ops)

    def replace(self, **changes: Any) -> OpGraph:
        """A copy with some fields changed."""
        return replace(self, **changes)

    # -- checking --------------------------------------------------------------------------------

    def verify(self) -> OpGraph:
        """Return self if every id exists, is made once and before use, and names are known.

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

        if not set(tensor.repeats) <= set(range(len(self.repeats))):
            raise GraphError(f"value {index} is in repeats {tensor.repeats}, which are not there")
        self._verify_neighbour(f"value {index}", tensor.then)

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
        for value in op.inputs:
            if not 0 <= value < count:
                raise GraphError(f"{name} reads value {value}, which is not there")
            if value in self.producers and value not in made:
                raise GraphError(f"{name} reads value {value} before it is made")
        if not set(op.repeats) <= set(range(len(self.repeats))):
            raise GraphError(f"{name} is in repeats {op.repeats}, which are not there")
        found = tuple(references(op.arguments))
        if tuple(ref.id for ref in found) != op.inputs:
            raise GraphError(f"{name}: inputs differ from its arguments")
        for ref in found:
            self._verify_neighbour(name, ref.then)
        for ref in op.holds:
            if not 0 <= ref.id < count:
                raise GraphError(f"{name} holds value {ref.id}, which is not there")
            self._verify_neighbour(name, ref.then)
        for value in op.outputs:
            if not 0 <= value < count or value in made:
                raise GraphError(f"{name} makes value {value} twice or not at all")


def references(argument: Argument) -> Iterator[Ref]:
    """The Refs in an argument (or in a mapping of arguments), in order."""
    if type(argument) is Ref:
        yield argument
    elif type(argument) is tuple:
        for item in argument:
            yield from references(item)
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from references(item)


def refs(argument: Argument) -> Iterator[int]:
    """The value ids in an argument (or in a mapping of arguments), in order."""
    return (ref.id for ref in references(argument))


def in_order(holds: Iterable[Ref]) -> tuple[Ref, ...]:
    """What an op holds, each once, by id."""
    return tuple(sorted(dict.fromkeys(holds), key=lambda ref: ref.id))


def renumbered(op: Op, ids: Mapping[int, int]) -> Op:
    """The same op on values that have other ids."""
    arguments = {name: _renumbered(item, ids) for name, item in op.arguments.items()}
    outputs = tuple([ids[value] for value in op.outputs])
    holds = in_order(_renumbered(ref, ids) for ref in op.holds if ref.id in ids)
    inputs = tuple(refs(arguments))
    return replace(op, arguments=arguments, inputs=inputs, outputs=outputs, holds=holds)


def _renumbered(item: Argument, ids: Mapping[int, int]) -> Argument:
    if type(item) is Ref:
        return Ref(ids[item.id], moved(item.then, ids), item.every)
    return tuple([_renumbered(x, ids) for x in item]) if type(item) is tuple else item


def moved(then: Neighbour | None, ids: Mapping[int, int]) -> Neighbour | None:
    """A Neighbour of values that have other ids."""
    return then and replace(then, value=ids[then.value])


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(path: str) -> str:
    """A module path with its indices starred: "layers.3.mlp" -> "layers.*.mlp"."""
    return _INDEX.sub("*", path)
