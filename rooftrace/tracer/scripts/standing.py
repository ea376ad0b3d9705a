"""The tensors of the device over the whole run of a script, whichever recorder was on."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from rooftrace.tracer.scripts.hostcopies import HostCopies
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.tape import Entry, Tape, records


class DeviceTensors:
    """The storages of the device that are alive; `shapes` is what is on meta for the script too."""

    def __init__(self) -> None:
        self.copies, self.shapes = HostCopies(), Shapes()
        self._alive: dict[int, tuple[Any, records.Spec]] = {}  # by the place of the bytes
        self._own, self._elsewhere = os.getpid(), mmap.mmap(-1, 1)  # shared with what is forked

    @property
    def forked(self) -> bool:
        """Whether a process that the script has forked made a tensor of the device."""
        return self._elsewhere[0] != 0

    def meet(self, tensors: Iterable[Any]) -> None:
        """Results of an op, or what a recorder knows of."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            if tensor.is_meta and type(tensor) in (Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                self._note(storage, records.Spec.of(tensor, 0))

    def _note(self, storage: Any, spec: records.Spec) -> None:
        key = storage._cdata
        known = self._alive.get(key)
        if known is None or known[0]() is None:
            self._alive.pop(key, None)  # of bytes that were at this place before
            if os.getpid() != self._own:
                self._elsewhere[0] = 1
            self._alive[key] = weakref.ref(storage), spec

    def meet_results(self, tape: Tape) -> None:
        """What ops of a recording have made, and what stood before it, as far as it is alive."""
        for reference in tape.tags.references():
            storage = reference()
            if storage is not None:
                self._note(storage, records.Spec((storage.nbytes(),), torch.uint8, (1,), 0))

    def there(self) -> list[tuple[Any, records.Spec]]:
        """The storages that are alive, in the order in which they were made."""
        there = []
        for key, (reference, spec) in list(self._alive.items()):
            storage = reference()
            if storage is None or storage._cdata != key:
                del self._alive[key]
            elif not self.shapes.has(key):
                there.append((storage, spec))
        return there

    def stand_in(self, tape: Tape) -> None:
        """What is alive and a recording does not know stands from before it."""
        number = 0
        for storage, spec in self.there():
            if not knows(tape, storage):
                number += 1
                own = replace(spec, storage=tape.tags.new_storage())
                tape.entries.standing.add_storage(
                    storage, Entry(records.KEPT, f"kept_{number}", own)
                )


def knows(tape: Tape, storage: Any) -> bool:
    """Whether bytes are those of a weight, of an input, or of what stands from before."""
    _, reference = tape.entries.storages.get(storage._cdata, (0, None))
    there = None if reference is None else reference()
    return there is not None or tape.entries.standing.has(storage)
