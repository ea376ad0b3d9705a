"""The operator graph: plain records of what a step runs, with sizes; no torch, no costs, no chips.

A captured step is an :class:`OpGraph`: values (tensors) by id, and ops in execution order that
read and write them.  Everything later (costs, fusion, memory, reports) is a pure function of these
records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rooftrace.hardware.precision import storage_bytes

ROLES = ("weights", "activations", "kv", "gradients", "optimizer", "temporary", "constants")
"""Whose bytes a tensor is.

weights: parameters and persistent buffers.  activations: inputs and what forward makes of them.
kv: state that one call hands to the next (key/value cache, recurrent state).  gradients: gradients
of parameters.  optimizer: optimizer states and master weights.  temporary: gradients of
activations, materialised attention scores and other values that no later step needs.  constants:
values that depend on neither weights nor floating inputs (positions, masks, tables).
"""

PARTS = ("forward", "backward", "recompute", "optimizer")
KINDS = ("kernel", "view", "sync")
"""kernel: the device works.  view: metadata or an allocation, host only.  sync: the host waits."""


class GraphError(ValueError):
    """An operator graph that breaks its own rules, or a file that is not one."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A value used as an argument: ``Ref(7)`` is the value with id 7."""

    id: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value.  `storage` is the id of the value that owns the bytes: its own unless a view."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    role: str
    storage: int
    name: str = ""

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
    only while tracing (rows_touched, groups_touched, mask ...).  assumptions: ids of the
    assumptions it rests on.
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

    @property
    def name(self) -> str:
        """The target without its overload: "aten.mm"."""
        return self.target.rsplit(".", 1)[0]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the trace could not know and took for granted.

    kind: name of the policy (balanced-routing, branch, density, value, shape, loss, optimizer ...).
    where: module path.  text: one sentence for the reader.  value: what was taken.
    """

    id: int
    kind: str
    where: str
    text: str
    value: Any = None


@dataclass(frozen=True)
class OpGraph:
    """A captured step: values by id, ops in execution order, inputs and outputs by value id.

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
    constants: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    # -- reading ---------------------------------------------------------------------------------

    def kernels(self) -> Iterator[Op]:
        """The ops that run on the device, in order."""
        return (op for op in self.ops if op.kind == "kernel")

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
    def flops_torch(self) -> int:
        """Sum of torch's own FLOP counts over the ops that it has formulas for."""
        return sum(op.flops_torch or 0 for op in self.ops)

    def replace(self, **changes: Any) -> OpGraph:
        """A copy with some fields changed."""
        return replace(self, **changes)

    # -- checking --------------------------------------------------------------------------------

    def verify(self) -> OpGraph:
        """Return self if every id exists, is made once and before use, and names are known.

        Raises GraphError naming the first op or value that breaks a rule.
        """
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

    def _verify_op(self, name: str, op: Op, made: set[int]) -> None:
        count = len(self.values)
        if op.part not in PARTS or op.kind not in KINDS:
            raise GraphError(f"{name} has part {op.part!r}, kind {op.kind!r}")
        for value in op.inputs:
            if not 0 <= value < count:
                raise GraphError(f"{name} reads value {value}, which is not there")
            if value in self.producers and value not in made:
                raise GraphError(f"{name} reads value {value} before it is made")
        if tuple(refs(op.arguments)) != op.inputs:
            raise GraphError(f"{name}: inputs differ from its arguments")
        for value in op.outputs:
            if not 0 <= value < count or value in made:
                raise GraphError(f"{name} makes value {value} twice or not at all")


def refs(argument: Argument) -> Iterator[int]:
    """The value ids in an argument (or in a mapping of arguments), in order."""
    if type(argument) is Ref:
        yield argument.id
    elif type(argument) is tuple:
        for item in argument:
            yield from refs(item)
    elif isinstance(argument, Mapping):
        for item in argument.values():
            yield from refs(item)


_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(path: str) -> str:
    """A module path with its indices starred: "layers.3.mlp" -> "layers.*.mlp"."""
    return _INDEX.sub("*", path)
