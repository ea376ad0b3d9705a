"""Records of the nodes of a recorded graph, and of the tensors that they stand for."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor, fx

from rooftrace.tracer.collectives import Collective, Group
from rooftrace.tracer.graph import Tensor as Value

META_KEY = "rooftrace"
"""The one key of fx `node.meta` that is ours: there is a Recorded, an Entry or a RepeatedCall."""

KEPT = "kept"
"""The kind of entries of which nothing is known but that they are there."""

NO_TAINT: frozenset[int] = frozenset()
"""The assumptions that a fact rests on: none."""


class Spec(Struct, frozen=True):
    """The look of one recorded tensor (shape, strides, precision), and its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]  # in elements; of a sparse tensor as if it were dense, or see `of`
    storage: int  # a number of its own for each storage of the recording

    @classmethod
    def of(cls, tensor: Tensor, storage: int, joined: bool = False) -> Spec:
        """The Spec of `tensor`, whose bytes have this storage number.

        joined: it is a sparse tensor that other tensors of the graph store, as large as a number.
        """
        shape = tuple(tensor.shape)
        strided = tensor.layout is torch.strided
        stride = tensor.stride() if strided else Value.contiguous(shape)
        return cls(shape, tensor.dtype, (0,) * len(shape) if joined else stride, storage)


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
"""Where the running thread stands, as Dynamo would have it."""


class Origin(Struct, frozen=True):
    """The code that an op came from."""

    module: str = ""  # the dotted path of the module that ran
    call: int = 0  # how often that module had been called before
    part: str = "forward"  # forward, backward, recompute or optimizer
    function: str = ""  # the torch-level function, in backward the autograd node
    source: str = ""  # "file.py:12", a line of the user's
    loop: tuple[int, int] | None = None  # number of a loop, and of its turn, while it may be cut
    compiled: CompiledCall | None = None  # in which it ran, or what it differentiates did


class Recorded(Struct, frozen=True):
    """The record of one op beside its fx node."""

    specs: tuple[Spec, ...]  # of its outputs
    origin: Origin
    view: bool = False  # it moves no bytes
    sync: bool = False  # the host waits for it
    facts: Mapping[str, Any] = field(default_factory=dict)  # counts that its cost rule needs
    taint: frozenset[int] = NO_TAINT  # ids of the assumptions that it rests on
    stream: str = ""  # of the device; "" is the main one
    collective: Collective | None = None  # what it exchanges with other processes


class Tag(Struct, frozen=True):
    """The value of the graph that a tensor stands for."""

    node: fx.Node
    index: int | None  # which of the outputs; None: the only one
    storage: int

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
    return graph.call_function(operator.getitem, (tag.node, tag.index))


# -- other processes -------------------------------------------------------------------------------


class Shards:
    """The groups, the mesh and the whole weights of one recording."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}  # of the collectives so far, by name
        self.mesh: dict[str, int] = {}  # processes along each axis, outermost first
        self.whole: dict[int, str] = {}  # names of whole weights, by storage

    def exchanged(self, together: tuple[Collective, Group] | None) -> Collective | None:
        """Note the group of a collective; returns what is exchanged."""
        if together is None:
            return None
        collective, group = together
        self.groups[collective.group] = group
        return collective
