"""Values of a recording that no op made: weights, inputs, constants, and tensors from before."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from rooftrace.graph import UNRECORDED, marks
from rooftrace.tracer.recording.taperecords import (
    KEPT,
    META_KEY,
    Entry,
    Origin,
    Recorded,
    Spec,
    Tag,
    Tags,
    ThreadPosition,
    no_storage,
    picked_in,
)
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.torch_private import DisableTorchFunction, disable_current_modes
from rooftrace.tracer.values import Values, masks, own_tensors, tensors_in, trees

# -- standing --------------------------------------------------------------------------------------
# Tensors that stand from before a recording: they take memory until the code lets go of them.
#
# No recording keeps them alive.  One that an op reads becomes a value as any other; the others are
# values that nothing reads, freed where they went.

_FREE: Any = getattr(torch.ops.rooftrace, marks.FREE_STORAGES.partition(".")[2]).default


@dataclass(eq=False)
class Stand:
    """A storage from before: its node, the reference to it, and where it went."""

    node: fx.Node
    entry: Entry
    reference: Any = None
    gone: bool = False
    last: fx.Node | None = None  # the last op before it went; None: it went before the first


class Standing:
    """The storages of one recording that stand from before it, and that no op has read."""

    def __init__(self, graph: fx.Graph, tags: Tags) -> None:
        self._graph, self._tags = graph, tags
        self._there: dict[int, Stand] = {}  # by the place of the bytes
        self._stands: list[Stand] = []

    def add(self, tensor: Tensor, kind: str, name: str) -> None:
        """A tensor stands from before."""
        spec = Spec.of(tensor, self._tags.new_storage())
        self.add_storage(tensor.untyped_storage(), Entry(kind, name, spec))

    def add_storage(self, storage: Any, entry: Entry) -> None:
        """The bytes of such a tensor, or of one that only autograd holds."""
        node = self._graph.create_node("get_attr", entry.name, name=entry.name.replace(".", "_"))
        node.meta[META_KEY] = entry
        stand = Stand(node, entry)
        stand.reference = weakref.ref(storage, functools.partial(self._went, stand))
        self._there[storage._cdata] = stand
        self._stands.append(stand)

    def _went(self, stand: Stand, _: Any) -> None:
        if not stand.gone:
            stand.gone, stand.last = True, self._tags.last

    def of(self, tensor: Tensor) -> Stand | None:
        """The Stand of a tensor from before; None: it is another tensor, or already a value."""
        if not self._there or tensor.layout is not torch.strided:
            return None
        key = trees.bytes_of(tensor)
        stand = self._there.get(key)
        storage = None if stand is None else stand.reference()
        return stand if storage is not None and storage._cdata == key else None

    def has(self, storage: Any) -> bool:
        """Whether these bytes stand from before."""
        stand = self._there.get(storage._cdata)
        return stand is not None and stand.reference() is not None

    def taken(self, tensor: Tensor) -> int | None:
        """The storage of a tensor that becomes a value now, where it has stood from before."""
        stand = self.of(tensor)
        if stand is None:
            return None
        del self._there[trees.bytes_of(tensor)]
        self._stands.remove(stand)
        self._graph.erase_node(stand.node)
        return stand.entry.spec.storage

    def settle(self, gradients: Collection[int], blocks: Iterable[Sequence[fx.Node]] = ()) -> None:
        """The recording is over: ops in the graph free what went while it ran.

        gradients: storages of gradients, which otherwise last to the end.  blocks: the nodes of
        each block that calls do not repeat; nothing is put inside of one.
        """
        called = [getattr(node.meta.get(META_KEY), "block", None) for node in self._graph.nodes]
        inside = [*blocks, *(block.nodes for block in called if block is not None)]
        ends = {node: nodes[-1] for nodes in inside for node in nodes}
        freed: dict[fx.Node, list[Any]] = {}
        for stand in self._stands:
            if stand.gone and stand.last is None:
                self._graph.erase_node(stand.node)
            elif stand.last is not None:
                freed.setdefault(stand.last, []).append(stand.node)
        for number in gradients:
            last, tag = self._tags.last_held.get(number), self._tags.first(number)
            if last is not None and tag is not None and number not in self._tags.survivors:
                freed.setdefault(last, []).append(tag)
        for last, items in freed.items():
            while ends.get(last, last) is not last:
                last = ends[last]
            self._free(last, items)
        self._stands.clear()
        self._there.clear()

    def _free(self, last: fx.Node, items: Iterable[Any]) -> None:
        with self._graph.inserting_before(last.next):
            nodes = [x if isinstance(x, fx.Node) else picked_in(self._graph, x) for x in items]
            node = self._graph.create_node("call_function", _FREE, (nodes,))
        noted = last.meta.get(META_KEY)
        part = noted.origin.part if isinstance(noted, Recorded) else "forward"
        node.meta[META_KEY] = Recorded((), Origin(part=part), stream=fsdp.current_stream())


# -- entries ---------------------------------------------------------------------------------------
# Values that no op made: parameters, buffers, inputs, states and constants enter the graph.
#
# A tensor that an op reads, and that the graph does not know, is a weight that the code has just
# put into a module, an input of a step, or a constant.  If its origin is unknown, an assumption
# says so.

_INDICES = frozenset({torch.int64, torch.int32, torch.bool})
"""Precisions of tensors that torch makes from Python's numbers without a recorded op, and that no
matrix product returns."""
_SPARSE = (
    "a sparse tensor of which nobody knows how much it stores, or that an op reads for which there "
    "is no count of what is stored, is recorded as a dense one of its shape"
)
_MAX_BROUGHT = 10**9
"""The most bytes of host tensors that are held as data of weights until the recording ends."""


class Entries:
    """The values of one recording that no op made, and the tensors that stand for them."""

    def __init__(self, graph: fx.Graph, values: Values, tags: Tags, here: ThreadPosition) -> None:
        self._graph, self._values, self._tags, self._here = graph, values, tags, here
        self.weakly = False  # the code, and not this, keeps tensors alive
        self.own_step = False  # a user's step: ops tell its parts, unmade values are inputs
        self.numpy_read = False  # floats of the step were handed to numpy
        self.unread = False  # the recording becomes no graph
        self.leaves, self.real_of = Leaves(), _marked  # the latter: by its meta tensor
        self.standing = Standing(graph, tags)
        self.inputs: list[Tensor] = []  # of a user's step
        self.constants: dict[str, Tensor] = {}  # values of constants, by name
        self._tensors: list[Any] = []  # references to tensors with a tag
        self._parameters: dict[int, str] = {}  # names, by identity
        self._attached: dict[int, tuple[str, str]] = {}  # kind and name of scales of weights
        self.storages: dict[int, tuple[int, Any]] = {}  # bytes of weights and inputs, while alive
        self._first: dict[int, Any] = {}  # references to the tensors that entered first, by bytes
        self._named: dict[str, tuple[Tag, tuple[int, ...], torch.dtype]] = {}  # the weights
        self._spans = Spans()  # of weights and states
        self._numbers = itertools.count()
        self._brought = 0  # bytes of the host that weights were filled with

    # -- names -------------------------------------------------------------------------------------

    def name_tensors(self, module: nn.Module, prefix: str, recording: bool) -> None:
        """Enter the tensors of a module, under its path and a dot."""
        tensors, transient = own_tensors(module), getattr(module, "_non_persistent_buffers_set", ())
        if any(type(tensor) not in trees.ORDINARY for tensor in tensors):
            for of, part in trees.held_tensors(module):  # the state of a quantised layer
                self._attached.setdefault(id(part), ("parameter", f"{prefix}{of}"))
        names = _names_in(module) if tensors else {}
        for tensor in tensors:
            name = names[id(tensor)]
            if name in module._parameters:
                kind = "parameter"
                self._parameters.setdefault(id(tensor), prefix + name)
            elif name in module._buffers:
                kind = "table" if name in transient else "buffer"
            else:
                kind = "constant"
            if recording:
                self.enter(tensor, kind, prefix + name)
            if kind != "constant" and type(tensor) in trees.ORDINARY:
                for of, item in trees.attributes_of(tensor).items():
                    for part in _scales_in(tensor, item):
                        self._attached.setdefault(id(part), (kind, f"{prefix}{name}.{of}"))

    def name_of(self, parameter: Tensor) -> str:
        """The dotted name of a parameter ("" for a tensor that is none)."""
        return self._parameters.get(id(parameter), "")

    # -- entering ----------------------------------------------------------------------------------

    def enter(self, tensor: Tensor, kind: str, name: str) -> None:
        """Make `tensor`, or the tensors inside it, a value of the graph that no op made (once)."""
        if isinstance(tensor, trees.LAZY):
            return  # it has no sizes yet
        storages: dict[int, int] = {}
        for part, suffix in trees.parts_of(tensor):
            tag = self._tags.of(part)
            if tag is None and (part.device.type != "cpu" or self._tags.on_host(part)):
                tag = self._entered(part, kind, name + suffix, storages.get(trees.bytes_of(part)))
            if tag is not None:
                storages.setdefault(trees.bytes_of(part), tag.storage)

    def constant(self, tensor: Tensor) -> Tag:
        """Enter `tensor` as a constant of the graph."""
        return self._entered(tensor, "constant", f"constant_{next(self._numbers)}")

    def _entered(self, tensor: Tensor, kind: str, name: str, storage: int | None = None) -> Tag:
        """The tag of a tensor that becomes a value of this kind and name.

        storage: the number of its bytes, where they have one.
        """
        if storage is None:
            storage = self.standing.taken(tensor)
        if kind == "input":
            node = self._graph.placeholder(_identifier(name))
        else:
            node = self._graph.create_node("get_attr", name, name=_identifier(name))
        if kind == "constant":
            kind, name = self._attached.get(id(tensor), (kind, name))
            before = self.storage_of(tensor)
            storage = storage if before is None else before
        if storage is None:
            storage = self._spans.number(tensor, kind, self._tags.new_storage)
        if kind != "constant" and self.storage_of(tensor) is None:
            self.storages[trees.bytes_of(tensor)] = storage, _reference(tensor)
        if tensor.layout is not torch.strided:
            self.say_sparse()
        host = trees.bytes_of(tensor) in self._tags.hosts
        node.meta[META_KEY] = Entry(kind, name, Spec.of(tensor, storage, host=host))
        tag = Tag(node, None, storage, host)
        self._tag(tensor, tag)
        self._tags.remember(tensor, tag, _held(tensor, self.weakly))
        if kind in ("parameter", "buffer", "table"):
            self._named[name] = tag, tuple(tensor.shape), tensor.dtype
        self._note_value(tensor, tag.node, kind, name)
        return tag

    def _note_value(self, tensor: Tensor, node: fx.Node, kind: str, name: str) -> None:
        entry = self._values.known(tensor)
        if (real := self.real_of(tensor)) is not None:
            self.leaves.enter(node, real)
        elif entry is not None and not entry.taint and tensor.layout is torch.strided:
            self.leaves.enter(node, entry.value)
        if tensor.device.type == "cpu":
            self.constants[name] = tensor.detach()
        elif kind == "constant" and entry is not None:
            self.constants[name] = entry.value

    def say_sparse(self) -> int:
        """The assumption under which a sparse tensor is recorded."""
        return self._values.assume("sparse", _SPARSE)

    def _tag(self, tensor: Tensor, tag: Tag) -> None:
        self._tags.mark(tensor, tag)
        reference = _held(tensor, self.weakly)
        self._tensors.append(reference)
        if self.first_of(key := trees.bytes_of(tensor)) is None:
            self._first[key] = reference

    def storage_of(self, tensor: Tensor) -> int | None:
        """The storage number of the weight or input that a tensor is another view of."""
        key = trees.bytes_of(tensor)
        storage, reference = self.storages.get(key, (None, no_storage))
        bytes_there = reference()  # another storage may lie where a freed one was
        return storage if bytes_there is not None and bytes_there._cdata == key else None

    # -- reading -----------------------------------------------------------------------------------

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The fx node of `tensor`; an unknown tensor enters the graph."""
        self._tags.recognise([tensor])
        tag = self._tags.of(tensor) or self._stranger(tensor)
        item = picked_in(self._graph, tag)
        if item is not tag.node:
            self._tags.mark(tensor, Tag(item, None, tag.storage, tag.host))
        return item

    def first_of(self, key: int) -> Tensor | None:
        """The tensor that entered first with these bytes, while it still has them."""
        first = self._first.get(key, no_storage)()
        return first if first is not None and trees.bytes_of(first) == key else None

    def _stranger(self, tensor: Tensor) -> Tag:
        """Enter an unknown tensor into the graph; an assumption records one of unknown value.

        A tensor that the code put into a running module is a weight of that module.
        """
        kind, name = self.place_of(tensor)
        if name and self.storage_of(tensor) is None:  # else it is a view of a value
            return self._put_in_place(tensor, kind, name)
        stand = self.standing.of(tensor)
        if stand is not None and stand.entry.kind != KEPT:
            return self._entered(tensor, stand.entry.kind, stand.entry.name)
        if (same := self._same_value(tensor)) is not None:
            self._tag(tensor, same)
            return same
        if id(tensor) in self._attached or self.storage_of(tensor) is not None:
            return self.constant(tensor)
        is_known = self.unread or self._values.known(tensor) is not None
        if self.own_step and not is_known and (tensor.grad_fn is None or stand is not None):
            if tensor.grad_fn is not None and stand is not None:  # another piece made it
                return self._entered(tensor, "input", stand.entry.name)
            self.inputs.append(tensor)
            return self._entered(tensor, "input", f"input_{len(self.inputs)}")
        reader = f"{self._values.op} reads" if self._values.op else "the step returns"
        text = f"{reader} a {trees.label_of(tensor)} that"
        if not is_known and tensor.device.type != "cpu" and tensor.dtype not in _INDICES:
            self.unrecorded(f"{text} no recorded op made")
        elif self.numpy_read and _made_by_numpy(tensor):
            self.unrecorded(f"{text} was computed with numpy")
        return self.constant(tensor)

    def unrecorded(self, text: str) -> int:
        """Record an assumption that something ran unseen, so that totals are a lower bound."""
        return self._values.assume(UNRECORDED, f"{text}: what that costs is not counted")

    def _same_value(self, tensor: Tensor) -> Tag | None:
        """The tag of the first tensor that entered with the bytes and the look of `tensor`.

        It was written in place since (`Tags.recognise` handles all others).  The value of another
        object with these bytes is the value of `tensor` too.
        """
        if tensor.layout is not torch.strided:
            return None
        key, look = trees.bytes_of(tensor), trees.look_of(tensor)
        if (first := self.first_of(key)) is not None:
            return self._tags.of(first) if trees.look_of(first) == look else None
        _learn_of_alike(self._values, tensor)
        return None

    def place_of(self, tensor: Tensor) -> tuple[str, str]:
        """Kind and name of a weight of the running modules, or of any parameter; ("", "")."""
        name = self.name_of(tensor)
        return self._here.place_of(tensor) or (("parameter", name) if name else ("", ""))

    def _put_in_place(self, tensor: Tensor, kind: str, name: str) -> Tag:
        """The tag of a weight that replaces the weight of this name."""
        before = self._named.get(name)
        if before is None:
            return self._entered(tensor, kind, name)
        self._values.assume(
            "host-copy",
            "weights that are put in place while the step runs are taken to be on the device: "
            "moving them there is not counted",
        )
        tag, *look = before
        if look != [tuple(tensor.shape), tensor.dtype]:
            return self._entered(tensor, kind, name)
        real = tensor.__dict__.get(masks.REAL)
        self.leaves.replace(tag.node, tensor if real is None else real.tensor)
        self._tag(tensor, tag)
        return tag

    # -- data that is replaced ---------------------------------------------------------------------

    def brought(self, data: Tensor, empty: Tensor) -> Tensor:
        """`empty`, a meta tensor, as the stand-in for a host tensor that fills a weight.

        Its values are known, or computed where code needs them, as for any weight.
        """
        self._tags.same_as(empty, data)
        self._brought += data.numel() * data.element_size()
        if masks.small(data):
            self._values.learn(empty, data.detach().clone())
        elif self._brought <= _MAX_BROUGHT:
            empty.__dict__[masks.REAL] = masks.Real(data.detach())
        return empty

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, as the graph knows it."""
        entry = self.entry_of(tensor)
        return entry is not None and entry.kind in ("parameter", "buffer")

    def entry_of(self, tensor: Tensor) -> Entry | None:
        """The Entry of a tensor; None if an op made it."""
        tag = self._tags.of(tensor)
        entry = None if tag is None else tag.node.meta.get(META_KEY)
        return entry if isinstance(entry, Entry) else None

    def close(self) -> None:
        """Take the tags off tensors that outlive the recording."""
        for tensor in (reference() for reference in self._tensors):
            if tensor is not None:
                self._tags.mark(tensor, None)
        self._tensors.clear()
        self._first.clear()


def _names_in(module: nn.Module) -> dict[int, str]:
    """The names of the tensors that a module holds itself, by their identities."""
    return {
        id(t): name
        for group in (vars(module), module._buffers, module._parameters)
        for name, t in group.items()
        if isinstance(t, Tensor)
    }


def _scales_in(weight: Tensor, item: Any) -> list[Tensor]:
    """Tensors that belong to a weight and hang on it, as scales of a packed one.

    A tensor of the shape of a trained weight is a trainer's: its gradient, an average.
    """
    trained = weight.requires_grad
    return [part for part in tensors_in(item) if not trained or part.shape != weight.shape]


def _learn_of_alike(values: Values, tensor: Tensor) -> None:
    """Learn the value of another tensor of these bytes and this shape for `tensor`, too."""
    for other in values.views(tensor):
        if other.shape == tensor.shape:
            entry = values.held(other)
            if entry is not None and other is not tensor:
                values.learn(tensor, entry.value, entry.taint)


def _marked(tensor: Tensor) -> Tensor | None:
    real: masks.Real | None = tensor.__dict__.get(masks.REAL)
    return None if real is None else real.tensor


def _held(tensor: Tensor, weakly: bool) -> Any:
    """A reference to a tensor, which keeps it alive unless it is a weak one."""
    return weakref.ref(tensor) if weakly else lambda: tensor


def _made_by_numpy(tensor: Tensor) -> bool:
    """Whether a CPU tensor of floats lies in memory that torch did not allocate."""
    return tensor.is_floating_point() and not tensor.untyped_storage().resizable()


def _reference(tensor: Tensor) -> Any:
    """A weak reference to the storage of a tensor; for a sparse tensor it returns nothing."""
    if tensor.layout is not torch.strided:
        return no_storage
    return weakref.ref(tensor.untyped_storage())


def _identifier(name: str) -> str:
    return name.replace(".", "_") or "value"


# -- real tensors behind values that no op made ----------------------------------------------------


class Leaves:
    """Real tensors by node, and the values computed from them (see recording/realdata)."""

    def __init__(self) -> None:
        self.tensors: dict[fx.Node, tuple[Tensor, int]] = {}  # and the version that counts
        self.computed: dict[fx.Node, Any] = {}

    def enter(self, node: fx.Node, tensor: Tensor) -> None:
        """Remember the real tensor of a node."""
        version = 0 if tensor.is_inference() else tensor._version
        self.tensors[node] = tensor, version

    def replace(self, node: fx.Node, tensor: Tensor) -> None:
        """Another weight replaces the one of a node; both are one value of the graph.

        If they differ and the first was read, no values are computed from either any more.
        """
        if node not in self.tensors or tensor.device.type != "cpu":
            self.tensors.pop(node, None)
        elif node.users:
            before = self.tensors[node][0]
            with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
                same = before.shape == tensor.shape and torch.equal(before, tensor)
            if same:
                return
            self.tensors.pop(node)
        else:
            self.enter(node, tensor.detach())
        self.computed.pop(node, None)

    def forget(self) -> None:
        """Release the tensors."""
        self.tensors.clear()
        self.computed.clear()


# -- parts of one buffer: bytes that are there once count once -------------------------------------

_HELD = ("parameter", "buffer", "optimizer")
"""Kinds of values that exist before a step and after it."""


class Spans:
    """Byte ranges of buffers that have a storage number, by the tensors that entered."""

    def __init__(self) -> None:
        # By buffer: a reference to it, and (start, end, number) of the tensors that entered.
        self._spans: dict[int, tuple[Any, list[tuple[int, int, int]]]] = {}

    def number(self, tensor: Tensor, kind: str, new: Callable[[], int]) -> int:
        """The storage number of a tensor of this kind that enters: of bytes that have one, or new.

        A trainer that keeps all weights in one flat buffer steps on parts of that buffer.
        """
        if kind not in _HELD or tensor.layout is not torch.strided:
            return new()
        covered = self._covered(tensor)
        number = new() if covered is None else covered
        self._add(tensor, number)
        return number

    def _covered(self, tensor: Tensor) -> int | None:
        """The number of the first bytes of a tensor, if all of its bytes have one; else None."""
        start, end = _span(tensor)
        first: int | None = None
        for begins, ends, number in sorted(self._of(tensor)):
            if begins > start or start >= end:
                break
            if ends > start:
                first = number if first is None else first
                start = ends
        return first if start >= end else None

    def _add(self, tensor: Tensor, number: int) -> None:
        """The bytes of a tensor have this number."""
        spans = self._of(tensor)
        spans.append((*_span(tensor), number))
        reference = weakref.ref(tensor.untyped_storage())
        self._spans[trees.bytes_of(tensor)] = reference, spans

    def _of(self, tensor: Tensor) -> list[tuple[int, int, int]]:
        """The spans of the buffer of a tensor, not of a freed one at the same address."""
        key = trees.bytes_of(tensor)
        reference, spans = self._spans.get(key, (no_storage, []))
        buffer = reference()
        return spans if buffer is not None and buffer._cdata == key else []


def _span(tensor: Tensor) -> tuple[int, int]:
    """Begin and end of a tensor in its buffer [byte]."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * size
