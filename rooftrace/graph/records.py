"""Records of a graph: tensors, ops, repeats, assumptions, operands, exchanges and module paths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from rooftrace.hardware.precisions import storage_bytes

# -- words -----------------------------------------------------------------------------------------
# The words that the records of a graph use, each for one thing.

ROLES = ("weights", "activations", "kv", "gradients", "optimizer", "temporary", "constants")
"""Whose bytes a tensor is.

weights: parameters and persistent buffers.  activations: inputs and results of forward.
kv: state that one call hands to the next (key/value cache, recurrent state).  gradients: gradients
of parameters.  optimizer: optimizer states and master weights.  temporary: gradients of
activations, materialised attention scores and other values that no later step needs.  constants:
values that depend on neither weights nor floating inputs (positions, masks, tables).
"""

PARTS = ("forward", "backward", "recompute", "optimizer")
REVERSED = frozenset({"backward", "recompute"})
"""Parts of a step that go through the iterations in reverse order."""

KINDS = ("kernel", "view", "sync")
"""kernel: the device works.  view: metadata or an allocation, host only.  sync: the host waits."""

UNRECORDED = "unrecorded"
"""Kind of the assumptions that say that something ran out of sight of the trace."""
LOWER_BOUND = frozenset({UNRECORDED, "higher-order"})
"""Kinds of assumptions with which the totals of a graph are a lower bound."""


# -- modulepaths -----------------------------------------------------------------------------------
# Paths of modules, and the numbers in them.

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(path: str) -> str:
    """A module path with its indices starred: "layers.3.mlp" -> "layers.*.mlp"."""
    return _INDEX.sub("*", path)


def split(path: str, container: str) -> tuple[int, str] | None:
    """(3, ".mlp") for "layers.3.mlp" in "layers"; None for a path outside the container."""
    prefix = below(container, "")
    if not path.startswith(prefix):
        return None
    index, dot, rest = path[len(prefix) :].partition(".")
    return (int(index), dot + rest) if index.isdigit() else None


def below(container: str, name: str) -> str:
    """The path of `name` in a container, "" being the root."""
    return f"{container}.{name}" if container else name


# -- records ---------------------------------------------------------------------------------------
# Records of what an op exchanges with other processes.


class Group(Struct, frozen=True):
    """Processes that communicate with each other, by their ranks in the job.

    axis: the axis of the device mesh along which they lie ("dp"), several joined by "+" ("dp+cp");
    "" without a mesh.
    """

    ranks: tuple[int, ...]
    axis: str = ""

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)


class Collective(Struct, frozen=True):
    """The exchange of one op with other processes.

    kind: one of `COLLECTIVES` of systems.  group: a key of `OpGraph.groups`.  bytes: of the full
    buffer, by the convention of nccl-tests: the result of an all_gather, the input of a
    reduce_scatter, the send buffer of an all_to_all (with the part that stays), and the tensor
    itself for all others.  dtype: its precision.  waits: whether the stream that issued it goes on
    only when it is done; else it runs asynchronously, until an op reads its result.  splits: bytes
    to each process, where they differ.  peer: the other rank of send and recv.
    """

    kind: str
    group: str
    bytes: int
    dtype: str
    waits: bool = False
    splits: tuple[int, ...] = ()
    peer: int | None = None


def axis_of(ranks: Sequence[int], mesh: Mapping[str, int]) -> str:
    """The axes of a mesh along which these ranks lie, joined by "+"; "" where they lie otherwise.

    mesh: sizes by axis, outermost first; rank 0 is at the origin and the innermost axis runs
    fastest.  A group along an axis has all processes of the mesh that differ in that axis only.
    """
    coordinates = [mesh_coordinates(rank, mesh) for rank in ranks]
    varying = [axis for axis in mesh if len({place[axis] for place in coordinates}) > 1]
    expected = 1
    for axis in varying:
        expected *= mesh[axis]
    return "+".join(varying) if expected == len(set(ranks)) else ""


def mesh_coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """The coordinates of a rank by axis; the innermost axis runs fastest."""
    place: dict[str, int] = {}
    for axis in reversed(list(mesh)):
        rank, place[axis] = divmod(rank, mesh[axis])
    return place


_OF_DATA = frozenset(
    {
        "dp",
        "ddp",
        "fsdp",
        "hsdp",
        "data",
        "batch",
        "replica",
        "replicas",
        "replicate",
        "shard",
        "dp_replicate",
        "dp_shard",
        "dp_cp",
        "dp_mod_ep",
    }
)
_OF_MODELS = frozenset({"tp", "sp", "cp", "ep", "pp", "etp", "tensor", "model", "expert", "pipe"})


def replicas_of(mesh: Mapping[str, int]) -> int | None:
    """Number of batches that a mesh works on at a time: the product of its axes of data.

    None where an axis has a name that says neither data nor model parallelism.
    """
    replicas = 1
    for axis, size in mesh.items():
        if axis in _OF_DATA:
            replicas *= size
        elif axis not in _OF_MODELS and size > 1:
            return None
    return replicas


# -- records ---------------------------------------------------------------------------------------
# The records that a graph consists of: tensors, ops, assumptions, repeats.


class GraphError(ValueError):
    """An operator graph that is inconsistent, or a file that is none."""


class Tensor(Struct, frozen=True):
    """One value.  `storage` is the id of the value that owns the bytes: itself unless a view.

    repeats: ids of the repeats in which every iteration has a copy, outermost first.  then: the
    storage in iterations that view a value of their neighbour.  stored: the precision in which
    the checkpoint declares this weight, "" where it says nothing.  host: its bytes lie in the
    memory of the host.
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
    host: bool = False

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
    the count of torch's FLOP registry, None where it has no formula.  facts: small facts from
    tracing (rows_touched, groups_touched, mask, random ...).  assumptions: ids of
    the assumptions it rests on.  repeats: ids of the repeats that it is in, outermost first: it
    runs once in every iteration.  steps: integer arguments that grow by so much from one
    iteration of the innermost repeat to the next.  holds: values that no later op reads and that
    were still there as it ran: a variable names them, or a running autograd node has them.  An
    output of the graph that an op holds was let go of then; the others last to the end.
    stream: the queue of the device that it was put on, "" for the main one.  collective: its
    exchange with other processes, None for an op that works alone.
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

    def numbered(self, place: int) -> Op:
        """The op at another place."""
        return self if self.id == place else self.relabelled(id=place)

    def relabelled(self, **fields: Any) -> Op:
        """The op with other fields but for its target and arguments, with its cached properties."""
        op = replace(self, **fields)
        op.__dict__.update(self.__dict__)  # in half the time of vars()
        return op

    @cached_property
    def name(self) -> str:
        """The target without its overload: "aten.mm"."""
        return self.target.rsplit(".", 1)[0]

    @cached_property
    def reads(self) -> tuple[Ref, ...]:
        """The tensors among its arguments, in order."""
        return tuple(references(self.arguments))


class Assumption(Struct, frozen=True):
    """Something the trace could not know and took for granted.

    kind: its subject (routing, branch, density, value, shape, loss, optimizer ...).
    where: module path.  text: one sentence for the reader.  value: the assumed one.  op: the op
    that needed it, "" where none did.  The ops that rest on it name it in `Op.assumptions`.
    facts: numbers of an assumption on routing: `policy`; how many `rows` (tokens) choose `chosen`
    of `classes` (experts) each; how many `distinct` classes that is expected to reach; and how many
    are `drawn`, in the indices that the code got.  Of an exchange with other processes: the rows
    of all `processes` together among the classes of one; a row itself chooses `chosen_each` of all.
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

    A repeat may have several runs of ops: forward, backward.  Backward and recomputation
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


# -- operands --------------------------------------------------------------------------------------
# Arguments of ops: numbers and words as they are, tensors as `Ref`.


class Neighbour(Struct, frozen=True):
    """A value that an iteration reads from its neighbour.

    Iteration i of `repeat` reads iteration ``i + shift`` of `value`.  The id next to
    a Neighbour in the graph is read by the iteration at the edge, which has no such neighbour.
    """

    repeat: int
    value: int
    shift: int

    def renumbered(self, ids: Mapping[int, int]) -> Neighbour:
        """The Neighbour where its value has another id."""
        return replace(self, value=ids[self.value])


class Ref(Struct, frozen=True):
    """A value used as an argument: ``Ref(7)`` is the value with id 7.

    In a repeat, iteration i reads iteration i of a value that has iterations too; `then` says
    otherwise.  Outside of the repeat it is the value of the iteration that ran last, or, where
    `every` is set, one item of a list for each iteration.
    """

    id: int
    then: Neighbour | None = None
    every: bool = False


Argument = Any
"""Ref, None, bool, int, float, complex, str, or a tuple of arguments."""


def references(argument: Argument) -> Iterator[Ref]:
    """The Refs in an argument (or in a mapping of arguments), in order."""
    collected: list[Ref] = []
    _collect(argument, collected)
    return iter(collected)


_PLAIN = frozenset({int, bool, float, str, type(None)})


def _collect(argument: Argument, collected: list[Ref]) -> None:
    kind = type(argument)
    if kind is Ref:
        collected.append(argument)
    elif kind is tuple:
        for item in argument:
            _collect(item, collected)
    elif kind not in _PLAIN and isinstance(argument, Mapping):
        for item in argument.values():
            _collect(item, collected)


def refs(argument: Argument) -> Iterator[int]:
    """The value ids in an argument (or in a mapping of arguments), in order."""
    return (ref.id for ref in references(argument))


def one_nan(item: Any) -> Any:
    """A NaN as always the same object, so that containers of it are equal."""
    return math.nan if isinstance(item, float) and math.isnan(item) else item


def in_order(holds: Iterable[Ref]) -> tuple[Ref, ...]:
    """The held values of an op, each once, by id."""
    return tuple(sorted(dict.fromkeys(holds), key=lambda ref: ref.id))
