"""The records that a graph consists of: tensors, ops, assumptions, repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field

from rooftrace.hardware.precisions import storage_bytes
from rooftrace.tracer.arguments import Argument, Neighbour, Ref, references
from rooftrace.tracer.collectives import Collective
from rooftrace.tracer.paths import below, split


class GraphError(ValueError):
    """An operator graph that breaks its own rules, or a file that is not one."""


class Tensor(Struct, frozen=True):
    """One value.  `storage` is the id of the value that owns the bytes: its own unless a view.

    repeats: ids of the repeats in which every iteration has its own, outermost first.  then: the
    storage in iterations that view what the one beside them made.  stored: the precision in which
    the checkpoint declares this weight, "" where it says nothing.
    """

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    role: str
    storage: int
    name: str = ""
    repeats: tuple[int, ...] = ()
    then: Neighbour | None = None
    stored: str = ""

    def __str__(self) -> str:
        """Precision and shape: "bf16[8, 128]"."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

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

    @staticmethod
    def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a contiguous tensor."""
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return tuple(reversed(stride))

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct elements at the storage precision."""
        return storage_bytes(self.dtype, self.unique_elements)


class Op(Struct, frozen=True, dict=True):
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
    were still there as it ran: a variable names them, or a running autograd node has them.  An
    output of the graph that an op holds was let go of then; the others last to the end.
    stream: the queue of the device that it was put on, "" for the main one.  collective: what it
    exchanges with other processes, None for an op that works alone.
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
    stream: str = ""
    collective: Collective | None = None

    @property
    def name(self) -> str:
        """The target without its overload: "aten.mm"."""
        return self.target.rsplit(".", 1)[0]

    @cached_property
    def reads(self) -> tuple[Ref, ...]:
        """The tensors among its arguments, in order."""
        return tuple(references(self.arguments))


class Assumption(Struct, frozen=True):
    """Something the trace could not know and took for granted.

    kind: what it is about (routing, branch, density, value, shape, loss, optimizer ...).
    where: module path.  text: one sentence for the reader.  value: what was taken.  op: the op that
    needed it, "" where none did.  The ops that rest on it name it in `Op.assumptions`.
    facts: numbers of an assumption on routing: `policy`; how many `rows` (tokens) choose `chosen`
    of `classes` (experts) each; how many `distinct` classes that is expected to reach; and how many
    are `drawn`, in the indices that the code got.  Of an exchange with other processes: those of
    all `processes` together among the classes of one; a row itself chooses `chosen_each` of all.
    """

    id: int
    kind: str
    where: str
    text: str
    value: Any = None
    op: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Repeat(Struct, frozen=True):
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
        place = None if self.container is None else split(path, self.container)
        if place is None or not iteration:
            return path
        return below(self.container or "", f"{place[0] + iteration * self.step}{place[1]}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of the (first) module of each iteration; nothing for a loop."""
        if self.container is None:
            return ()
        first = below(self.container, str(self.first))
        return tuple(self.path(first, iteration) for iteration in range(self.count))
