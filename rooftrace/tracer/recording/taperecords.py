"""Records of a recorded graph: nodes, tags on tensors, recomputed ops, and thread positions."""

from __future__ import annotations

import functools
import itertools
import operator
import queue
import selectors
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, fx, nn
from torch.autograd import grad_mode

from rooftrace.graph import Collective, Group, Tensor as Value
from rooftrace.tracer.recording.ops import Call
from rooftrace.tracer.torch_private import current_autograd_node
from rooftrace.tracer.values import Values, trees

# -- loops -----------------------------------------------------------------------------------------
# The interface of a watcher of the code's loops; this default does nothing.


class LoopWatch:
    """Watches the ops of loops, so that a few turns run instead of all (see rolling/loops)."""

    @property
    def label(self) -> tuple[int, int] | None:
        """The loop that is running, by its serial number, and which of its turns."""
        return None

    def depends(self) -> None:
        """Something ran that may depend on a value: the running loop is not cut short."""

    def saw(self, call: Call, outputs: Sequence[Tensor]) -> bool:
        """Look at an op that has run; False for one that is not to be recorded."""
        return True

    def is_short(self, serial: int) -> bool:
        """Whether the loop of this number was not run in full."""
        return False


# -- records ---------------------------------------------------------------------------------------
# Records of the nodes of a recorded graph, and of the tensors that they stand for.

META_KEY = "rooftrace"
"""The one key of fx `node.meta` that is ours: there is a Recorded, an Entry or a RepeatedCall."""

KEPT = "kept"
"""The kind of entries of unknown origin: they only take memory."""

NO_TAINT: frozenset[int] = frozenset()
"""The assumptions that a fact rests on: none."""


class Spec(Struct, frozen=True):
    """The look of one recorded tensor (shape, strides, precision), and its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]  # in elements; of a sparse tensor as if it were dense, or see `of`
    storage: int  # a number for each storage of the recording
    host: bool = False  # in the memory of the host

    @classmethod
    def of(cls, tensor: Tensor, storage: int, joined: bool = False, host: bool = False) -> Spec:
        """The Spec of `tensor`, whose bytes have this storage number.

        joined: it is a sparse tensor that other tensors of the graph store, as large as a number.
        """
        shape = tuple(tensor.shape)
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided else Value.contiguous(shape)
        return cls(shape, tensor.dtype, (0,) * len(shape) if joined else stride, storage, host)


class Entry(Struct, frozen=True):
    """A value that no op made."""

    kind: str  # parameter, buffer, table, input, gradient, optimizer, kv, constant or kept
    name: str  # a dotted name, as "layers.0.weight"
    spec: Spec


class CompiledCall:
    """One call of a callable of torch.compile, which is another one than any equal call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name  # of the callable: "Block", "AdamW.step"


LEFT_OUT = CompiledCall("")
"""Stands for code that torch.compiler.disable takes out, wherever it is called."""


class _Compiling(threading.local):
    call: CompiledCall | None = None  # the outermost that this thread is in, or LEFT_OUT


compiling = _Compiling()
"""The compiled call that the running thread is in, as Dynamo would have it."""


class Origin(Struct, frozen=True):
    """The code that an op came from."""

    module: str = ""  # the dotted path of the module that ran
    call: int = 0  # how often that module had been called before
    part: str = "forward"  # forward, backward, recompute or optimizer
    function: str = ""  # the torch-level function, in backward the autograd node
    source: str = ""  # "file.py:12", a line of the user's
    loop: tuple[int, int] | None = None  # number of a loop, and of its turn, while it may be cut
    compiled: CompiledCall | None = None  # in which it, or the op that it differentiates, ran


class Recorded(Struct, frozen=True):
    """The record of one op, in the meta of its fx node."""

    specs: tuple[Spec, ...]  # of its outputs
    origin: Origin
    view: bool = False  # it moves no bytes
    sync: bool = False  # the host waits for it
    facts: Mapping[str, Any] = field(default_factory=dict)  # counts that its cost rule needs
    taint: frozenset[int] = NO_TAINT  # ids of the assumptions that it rests on
    stream: str = ""  # of the device; "" is the main one
    collective: Collective | None = None  # its exchange with other processes


class Tag(Struct, frozen=True):
    """The value of the graph that a tensor stands for."""

    node: fx.Node
    index: int | None  # which of the outputs; None: the only one
    storage: int
    host: bool = False  # its bytes lie in the memory of the host, where the tensor is on meta

    def __deepcopy__(self, memo: Any) -> Tag:
        return self  # a tensor that the code copies deeply stands for the same value


def picked(node: fx.Node, index: int | None = None) -> tuple[fx.Node, int | None]:
    """The node that made a value, and which of its outputs; None: the only one."""
    if node.target is not operator.getitem:
        return node, index
    base, place = node.args
    assert isinstance(base, fx.Node) and isinstance(place, int)
    return base, place


def picked_in(graph: fx.Graph, tag: Tag) -> fx.Node:
    """The node of one value in a graph: of an op with several results, that of the one."""
    if tag.index is None:
        return tag.node
    of = (tag.node, tag.index)  # fx would work out the name
    return graph.create_node("call_function", operator.getitem, of, name="getitem")


# -- other processes -------------------------------------------------------------------------------


class Shards:
    """The groups, the mesh and the unsharded weights of one recording."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}  # of the collectives so far, by name
        self.mesh: dict[str, int] = {}  # processes along each axis, outermost first
        self.unsharded: dict[int, str] = {}  # names of unsharded weights, by storage

    def exchanged(self, together: tuple[Collective, Group] | None) -> Collective | None:
        """Note the group of a collective; returns the collective."""
        if together is None:
            return None
        collective, group = together
        self.groups[collective.group] = group
        return collective


# -- tags ------------------------------------------------------------------------------------------
# Tags on tensors: which value of the graph each stands for, and how long its bytes live.
#
# A tag is an attribute of the tensor, under a name that only one recording uses.  PyTorch keeps
# the attributes of a tensor as long as its bytes are referred to, also by autograd.

_SERIAL = itertools.count()


class Tags:
    """The tags and the storages of one recording."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._key = f"_rooftrace_tag_{next(_SERIAL)}"
        self._places: dict[Any, tuple[Tag, Any]] = {}  # by the bytes that are read
        self.alive: dict[int, Any] = {}  # references to storages that ops made, by number
        self._owners: dict[int, Tag] = {}  # of the first value of each storage, by number
        self._numbers: dict[int, int] = {}  # of storages that ops made, by the place of the bytes
        self._left: dict[int, Any] = {}  # the ones alive when the recording ended
        self.storages = 0  # how many storages have a number
        self.last: fx.Node | None = None  # the node that was recorded last
        self.last_held: dict[int, fx.Node] = {}  # the node after which a storage was freed
        self.survivors: frozenset[int] = frozenset()  # storages that something holds at the end
        self.hosts: set[int] = set()  # bytes of weights and states in the memory of the host
        self._away = False  # whether a tensor lies there

    def of(self, tensor: Tensor) -> Tag | None:
        """The tag of a tensor; None for a tensor that the graph does not know."""
        return tensor.__dict__.get(self._key)

    def has(self, tensor: Tensor) -> bool:
        """Whether the graph knows a tensor."""
        return self._key in tensor.__dict__

    def mark(self, tensor: Tensor, tag: Tag | None) -> None:
        """Let `tensor` stand for this value; None: for no value of the graph."""
        if tag is None:
            tensor.__dict__.pop(self._key, None)
        else:
            tensor.__dict__[self._key] = tag
            self._away |= tag.host

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor on meta stands for one in the memory of the host."""
        tag = self.of(tensor)
        if tag is not None:
            return tag.host
        return bool(self.hosts) and trees.bytes_of(tensor) in self.hosts

    def all_on_host(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors stand for some in the memory of the host, or are constants there."""
        away = (self._away or bool(self.hosts)) and any(map(self.on_host, tensors))
        return away and all(t.device.type == "cpu" or self.on_host(t) for t in tensors)

    def same_as(self, tensor: Tensor, other: Tensor) -> None:
        """Let `tensor` stand for the same value as `other`, if that is in the graph."""
        tag = self.of(other)
        if tag is not None:
            self.mark(tensor, tag)

    def made_by(self, tensor: Tensor) -> tuple[fx.Node, int | None, Spec] | None:
        """The node that made a tensor, which of its outputs it is, and how it looks."""
        tag = self.of(tensor)
        return (
            None
            if tag is None
            else (
                tag.node,
                tag.index,
                Spec.of(tensor, tag.storage, host=tag.host),
            )
        )

    # -- other objects of the same bytes -----------------------------------------------------------

    def remember(self, tensor: Tensor, tag: Tag, entered: Any = None) -> None:
        """Let other Python objects of the same bytes be recognised.

        entered: a reference to a tensor that no op made.
        """
        if tensor.layout is torch.strided and not isinstance(tensor, trees.LAZY):
            self._places[_bytes_read(tensor)] = tag, entered
            self._owners.setdefault(tag.storage, tag)

    def recognise(self, tensors: list[Tensor]) -> None:
        """Tag tensors without a tag whose bytes belong to a tensor with one.

        `as_subclass` makes such objects where no mode sees it, also for every result of a function
        that a subclass handles; so does `.data`.
        """
        for tensor in tensors:
            if self._key in tensor.__dict__ or tensor.layout is not torch.strided:
                continue
            if isinstance(tensor, trees.LAZY):
                continue
            tag, reference = self._places.get(_bytes_read(tensor), (None, None))
            if tag is None:
                continue
            entered = None if reference is None else reference()
            if reference is None:
                storage = (self.alive or self._left).get(tag.storage, no_storage)()
                if storage is None or storage._cdata != trees.bytes_of(tensor):
                    continue  # of bytes that were freed
            else:
                if entered is None or trees.bytes_of(entered) != trees.bytes_of(tensor):
                    continue  # it has other bytes now
                entry = self._values.held(entered)
                if entry is not None and self._values.key not in tensor.__dict__:
                    self._values.learn(tensor, entry.value, entry.taint)
            self.mark(tensor, tag)

    # -- storages ----------------------------------------------------------------------------------

    def new_storage(self) -> int:
        """The number for a new storage."""
        self.storages += 1
        return self.storages

    def watch(self, tensor: Tensor, storage: int) -> None:
        """Note at which node the bytes of a new storage are freed, as in a real run."""
        if tensor.layout is torch.strided:
            gone = functools.partial(self._gone, storage)
            place = tensor.untyped_storage()
            self._numbers[place._cdata] = storage
            self.alive[storage] = weakref.ref(place, gone)

    def owner(self, key: int) -> Tag | None:
        """The tag of the value that an op made first with these bytes, while they are alive."""
        number = self._numbers.get(key)
        storage = None if number is None else self.alive.get(number, no_storage)()
        if number is None or storage is None or storage._cdata != key:
            return None
        return self._owners.get(number)

    def references(self) -> list[Any]:
        """References to the storages that ops made and that were alive when last looked."""
        return list((self.alive or self._left).values())

    def first(self, number: int) -> Tag | None:
        """The tag of the first value of a storage, by its number."""
        return self._owners.get(number)

    def _gone(self, storage: int, _: Any = None) -> None:
        if self.last is not None and self.alive.pop(storage, None) is not None:
            self.last_held[storage] = self.last

    def end(self) -> None:
        """The recording has ended: live storages survive it."""
        if not self.alive:  # it had ended before, or made nothing that lasts
            return
        self._left = dict(self.alive)
        self.survivors = frozenset(self.alive)
        for storage in self._left:
            self._gone(storage)

    def forget_places(self) -> None:
        """Recognise no more tensors."""
        self._places.clear()
        self._left.clear()


def no_storage() -> None:
    """A reference to a freed storage: returns None."""
    return None


def _bytes_read(tensor: Tensor) -> Any:
    """The bytes that a tensor reads, their order and their precision."""
    where = trees.bytes_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return *where, tensor.dtype


# -- recompute -------------------------------------------------------------------------------------
# Which ops of a backward run a forward again: recomputation by checkpoints or custom backwards.
#
# The autograd engine sets the grad mode of all code that it calls.  If such code turns gradients
# on itself, it builds a new graph: it runs a forward again.  That holds for checkpoints of
# either kind, for reversible blocks and for any custom backward, also where the engine's mode
# is on (gradients of gradients).  What runs inside, with gradients off too (the forward of an
# `autograd.Function`, a `no_grad` block), belongs to it.

_FILE = grad_mode.__file__
_LEAVING = ("__exit__", "__call__")
"""Methods of torch's grad-mode contexts that set the mode back."""
_FAR = 12
"""The most frames of other function modes between a change of the grad mode and our handler."""

Node = tuple[str, int]
"""An autograd node: its name and its number, which no other node of a thread has."""


def running_node() -> Node | None:
    """The autograd node whose backward runs now; None outside of the engine."""
    node: Any = current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


@dataclass(frozen=True, slots=True)
class _Switch:
    """One change of the grad mode by code that the engine called.

    owner: the context that made it; a dead reference means a plain statement, which holds until
    the next change.
    """

    node: Node
    on: bool
    changed: bool
    owner: weakref.ref[Any]


class Recomputation:
    """Follows where code that the autograd engine runs turns gradients on."""

    def __init__(self) -> None:
        self._switches: list[_Switch] = []

    def switched(self, on: bool) -> None:
        """The grad mode is about to be set: called by the handler of that call."""
        owner, method = _owner(sys._getframe(1))
        if owner is None:
            return
        if method in _LEAVING:
            self._switches = [s for s in self._switches if s.owner() is not owner]
            return
        node = running_node()
        if node is None:
            self._switches.clear()
        elif not any(s.owner() is owner for s in self._switches):
            changed = on != torch.is_grad_enabled()
            self._switches.append(_Switch(node, on, changed, weakref.ref(owner)))

    def active(self, node: Node | None) -> bool:
        """Whether code called for this running node has turned gradients on for itself."""
        plain = False
        for switch in self._switches:
            if switch.node == node:
                if switch.owner() is None:
                    plain = switch.on and switch.changed
                elif switch.on:
                    return True
        return plain


def _owner(frame: FrameType | None) -> tuple[Any, str]:
    """The grad-mode context that a change of the mode comes from, and which method of it."""
    for _ in range(_FAR):
        if frame is None or frame.f_code.co_filename == _FILE:
            break
        frame = frame.f_back
    owner: Any = None
    method = ""
    while frame is not None and frame.f_code.co_filename == _FILE:  # no_grad is made of another
        owner, method = frame.f_locals.get("self"), frame.f_code.co_name
        frame = frame.f_back
    return owner, method


# -- here ------------------------------------------------------------------------------------------
# The position of each thread in the recorded code, and which threads are recorded.


class ThreadPosition(threading.local):
    """The position of one thread in the recorded code."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []  # the running modules: path and number of the call
        self.modules: list[nn.Module] = []  # these modules
        self.called_for: list[Any] = []  # the autograd node that ran when each module was called
        self.part = "forward"  # of the step
        self.function = ""  # the torch-level function that runs now
        self.after_backward = False  # a backward of the user's has run, and no module since
        self.wants_gradients = False  # a backward failed, as gradients are off
        self.inside = 0  # how many ops that the recorder takes apart are being run
        self.paused = False  # ops do not enter the graph
        self.devices: tuple[Any, ...] = ()  # the modes that chose a device as a module was called
        self.functions: tuple[Any, ...] = ()  # the function modes under which autograd runs
        self.source = ""  # the line that handed this thread its work
        self.device: torch.device | None = None  # where another thread makes tensors
        self.submitting = False  # the thread hands work to a pool
        self.leave: Callable[[], None] | None = None  # undoes `enter_here`

    def restart(self) -> None:
        """This thread begins a step: earlier ops belong to another one."""
        self.stack, self.modules, self.called_for = [], [], []
        self.part, self.function, self.source = "forward", "", ""
        self.after_backward = self.wants_gradients = False

    def call(self, module: nn.Module, path: str, number: int) -> None:
        """A module begins to run: the one at `path`, for the `number`-th time."""
        self.after_backward = False
        self.stack.append((path, number))
        self.called_for.append(running_node())
        self.modules.append(module)

    def end_call(self) -> None:
        """The innermost module has ended."""
        for running in (self.stack, self.modules, self.called_for):
            running.pop()

    def place_of(self, tensor: Tensor) -> tuple[str, str] | None:
        """Kind and name of a parameter or buffer of the running modules; None for other tensors."""
        for (path, _), module in zip(reversed(self.stack), reversed(self.modules), strict=True):
            inside = module.named_modules() if isinstance(tensor, nn.Parameter) else [("", module)]
            for place, part in inside:
                for kind, group in (("parameter", part._parameters), ("buffer", part._buffers)):
                    for name, item in group.items():
                        if item is tensor:
                            steps = (step for step in (path, place, name) if step)
                            return kind, trees.shown_path(".".join(steps))
        return None

    @property
    def path(self) -> str:
        """The path of the running module; "" outside of any."""
        return self.stack[-1][0] if self.stack else ""


_WAITING = frozenset({threading.__file__, queue.__file__, selectors.__file__})
"""Files of the standard library in which a thread stands that waits for others."""
_WAYS = frozenset({"acquire", "get", "join", "put", "select", "wait", "_wait_for_tstate_lock"})
"""Functions of these files in which it does."""


class RecordedThreads:
    """The threads that one recorder follows, each with the thread whose work it does.

    leader: the thread whose work is recorded: that which entered the recorder, unless another one
    has taken the lead.
    """

    def __init__(self) -> None:
        self.leader = 0
        self.idents: dict[int, int] = {}
        self.entered = 0  # how often another thread began to be recorded

    @staticmethod
    def awaits_others(ident: int) -> bool:
        """Whether a thread waits for others, or has ended."""
        frame = sys._current_frames().get(ident)
        if frame is None:
            return True
        return frame.f_code.co_filename in _WAITING and frame.f_code.co_name in _WAYS

    @property
    def running(self) -> bool:
        """Whether another thread than the recorder's is recorded now."""
        return len(self.idents) > 1

    def here(self) -> bool:
        """Whether the running thread is recorded."""
        return threading.get_ident() in self.idents

    def led(self) -> bool:
        """Whether the running thread does the work of the one that leads."""
        return self.idents.get(threading.get_ident()) == self.leader

    def own(self) -> bool:
        """Whether only the thread that leads is recorded, and runs."""
        return self.led() and list(self.idents.values()).count(self.leader) == 1
