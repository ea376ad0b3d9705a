"""Tensors that stand from before a recording: they take memory until the code lets go of them.

No recording keeps them alive.  One that an op reads becomes a value as any other; the others are
values that nothing reads, freed where they went.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from rooftrace.tracer.collectives import marks
from rooftrace.tracer.sharded import streams
from rooftrace.tracer.tape.records import META_KEY, Entry, Origin, Recorded, Spec, picked_in
from rooftrace.tracer.tape.tags import Tags
from rooftrace.tracer.tensors import trees

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
        """What a tensor is that stands from before; None: it does not, or is known otherwise."""
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
        each block beside those that calls repeat; nothing is put inside of one.
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
        node.meta[META_KEY] = Recorded((), Origin(part=part), stream=streams.current_stream())
