"""Weights that are whole for a while: storages that are freed, and allocated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.sharded import streams
from rooftrace.tracer.tape import META_KEY, Recorded, Tape, records


class Storages:
    """What happens to storages beside the ops: freed, allocated, filled with whole weights."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._before: list[tuple[Tensor, str]] = []  # whole weights, and their names

    def resized(self, storage: Any, size: int) -> None:
        """The bytes of a storage are freed (size 0) or allocated again; tensors stay."""
        tape = self._tape
        entered = tape.entries.first_of(storage._cdata)
        tag = tape.tags.owner(storage._cdata) or (entered is not None and tape.tags.of(entered))
        if not tag or not tape.recording:
            return
        op: Any = torch.ops.rooftrace.resize_storage.default
        held = records.picked_in(tape.graph, tag)
        made = tape.graph.create_node("call_function", op, (held, size))
        origin = tape.origins.origin(op.name(), tape.rolling.label)
        made.meta[META_KEY] = Recorded((), origin, stream=streams.current_stream())
        tape.tags.last = made

    def brought(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that enter now come from the host now, and were not there before."""
        tape = self._tape
        tags = [tag for tag in map(tape.tags.of, tensors) if tag is not None]
        if not tape.recording or tape.tags.last is None or not tags:
            return
        op: Any = torch.ops.rooftrace.bring_storages.default
        nodes = [records.picked_in(tape.graph, tag) for tag in tags]
        made = tape.graph.create_node("call_function", op, (nodes,))
        origin = tape.origins.origin(op.name(), tape.rolling.label)
        made.meta[META_KEY] = Recorded((), origin, stream=streams.current_stream())
        tape.tags.last = made

    def gathered(self, whole: Tensor, shard: Tensor) -> None:
        """A tensor holds a whole weight while its module runs, and `shard` a part of it."""
        name, storage = self._tape.name_of(shard), self._tape.storage_of(whole)
        if storage is not None:
            self._tape.shards.whole[storage] = name
        elif not self._tape.recording:
            self._before.append((whole, name))

    def enter_gathered(self) -> None:
        """Whole weights that were gathered before the step become values that no op made."""
        for whole, name in self._before:
            self._tape.enter(whole, "parameter", name)
        self._before.clear()
