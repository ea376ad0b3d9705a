"""Tags on tensors: which value of the graph each stands for, and how long its bytes live.

A tag is an attribute of the tensor, under a name that only one recording uses.  PyTorch keeps the
attributes of a tensor as long as its bytes are referred to, also by autograd.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, fx

from rooftrace.tracer.tape.records import Spec, Tag
from rooftrace.tracer.tensors import owners, trees
from rooftrace.tracer.values import Values

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
        self._left: dict[int, Any] = {}  # those that were alive when the recording ended
        self.storages = 0  # how many storages have a number
        self.last: fx.Node | None = None  # the node that was recorded last
        self.last_held: dict[int, fx.Node] = {}  # the node after which a storage was freed
        self.survivors: frozenset[int] = frozenset()  # storages that something holds at the end

    def of(self, tensor: Tensor) -> Tag | None:
        """The tag of a tensor; None for a tensor that the graph does not know."""
        return tensor.__dict__.get(self._key)

    def has(self, tensor: Tensor) -> bool:
        """Whether the graph knows a tensor."""
        return self._key in tensor.__dict__

    def mark(self, tensor: Tensor, tag: Tag | None) -> None:
        """From here on `tensor` stands for this value; None: for no value that the graph knows."""
        if tag is None:
            tensor.__dict__.pop(self._key, None)
        else:
            tensor.__dict__[self._key] = tag

    def same_as(self, tensor: Tensor, other: Tensor) -> None:
        """From here on `tensor` stands for the same value as `other`, if the graph knows that."""
        tag = self.of(other)
        if tag is not None:
            self.mark(tensor, tag)

    def made_by(self, tensor: Tensor) -> tuple[fx.Node, int | None, Spec] | None:
        """The node that made a tensor, which of its outputs it is, and how it looks."""
        tag = self.of(tensor)
        return None if tag is None else (tag.node, tag.index, Spec.of(tensor, tag.storage))

    # -- other objects of the same bytes -----------------------------------------------------------

    def remember(self, tensor: Tensor, tag: Tag, entered: Any = None) -> None:
        """Let other Python objects of the same bytes be recognised.

        entered: a reference to a tensor that no op made.
        """
        if tensor.layout is torch.strided and not isinstance(tensor, owners.LAZY):
            self._places[_bytes_read(tensor)] = tag, entered
            self._owners.setdefault(tag.storage, tag)

    def recognise(self, tensors: list[Tensor]) -> None:
        """Tag tensors without a tag whose bytes belong to a known tensor.

        `as_subclass` makes such objects where no mode sees it, also for every result of a function
        that a subclass handles; so does `.data`.
        """
        for tensor in tensors:
            if self._key in tensor.__dict__ or tensor.layout is not torch.strided:
                continue
            if isinstance(tensor, owners.LAZY):
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
        """Note at which node the bytes of a new storage are freed, as those of a real run are."""
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
        """The recording has ended: what is alive now survives it."""
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
