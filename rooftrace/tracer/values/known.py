"""Which meta tensors of one capture hold a value that is known, and what writing to them changes.

A value is a CPU tensor, or `Implicit`.  It is kept on the meta tensor itself, under a key of the
capture.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.ops import Call, groups, traits
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import implying, intervals, masks
from rooftrace.tracer.values.implicit import Implicit
from rooftrace.tracer.values.marks import IMPLICIT, KNOWN, REAL_VALUE, Known, LearntValue, small
from rooftrace.tracer.values.results import ResultMemo

_NO_TAINT: frozenset[int] = frozenset()
_SERIAL = itertools.count()


class KnownTensors:
    """The tensors of one capture whose value is known.

    results: what was computed from known values; some of it is held by several tensors.
    """

    def __init__(self, results: ResultMemo) -> None:
        self.results = results
        self.key = f"{KNOWN}_{next(_SERIAL)}"  # of this capture alone; others may run beside it
        self._epochs: dict[int, int] = {}  # how often bytes became unknown
        # By bytes: the tensors whose value is known.
        self._alive: defaultdict[int, weakref.WeakValueDictionary[int, Tensor]]
        self._alive = defaultdict(weakref.WeakValueDictionary)

    def learn(
        self, tensor: Tensor, value: Tensor | Implicit, taint: frozenset[int] = frozenset()
    ) -> None:
        """Remember that `tensor` holds `value` (of its shape; a tensor is one of the CPU)."""
        tensor.__dict__[self.key] = LearntValue(value, taint, self.epoch(tensor))
        self._alive[trees.bytes_of(tensor)][id(tensor)] = tensor

    def learn_shared(
        self,
        tensor: Tensor,
        kept: Sequence[tuple[Tensor | Implicit, frozenset[int]] | None],
        copy: Tensor | Implicit,
        place: int,
        taint: frozenset[int],
    ) -> None:
        """Remember that `tensor` holds one of the values that a call made, as equal calls do.

        Whole numbers in memory of their own are shared by all of them, so that what follows from
        them is computed once; else `copy` is learnt.
        """
        entry = kept[place]
        others = [entry[0] for entry in kept if entry is not None]
        memory = Counter(trees.bytes_of(value) for value in others if isinstance(value, Tensor))
        value = copy if entry is None else entry[0]
        if isinstance(value, Implicit):
            return self.learn(tensor, value, taint)
        alone = memory[trees.bytes_of(value)] == 1 and not value.is_inference()
        if value.dtype in (torch.int32, torch.int64) and alone:
            self.results.shared.add(trees.bytes_of(value))
            copy = value
        self.learn(tensor, copy, taint)

    def tensors(self) -> list[Tensor]:
        """The meta tensors with a known value."""
        held = (ref() for views in self._alive.values() for ref in views.valuerefs())
        return [tensor for tensor in held if tensor is not None]

    def known(self, tensor: Tensor) -> Known | None:
        """The value of `tensor`, written out, if it is known and its storage was not overwritten
        since.

        A CPU tensor is its own value.
        """
        entry = self.held(tensor)
        if entry is None:
            return None
        value = entry.value
        if isinstance(value, Implicit):
            if not (small(tensor) and value.certain):
                return None
            value = intervals.written_out(value)
            self.learn(tensor, value, entry.taint)
        return Known(value, entry.taint, entry.epoch)

    def held(self, tensor: Tensor) -> LearntValue | None:
        """What is known of the value of `tensor`, at any size (see `known`)."""
        entry: LearntValue | None = tensor.__dict__.get(self.key)
        if entry is None:
            if tensor.device.type == "cpu":
                return LearntValue(tensor.detach(), _NO_TAINT, 0)
            return None
        if entry.epoch != self.epoch(tensor):
            return None
        return entry

    def implicit(self, tensor: Tensor) -> Implicit | None:
        """What is known of `tensor`, as a value that is not written out."""
        entry = self.held(tensor)
        if entry is None:
            return None
        if isinstance(entry.value, Implicit):
            return entry.value
        if entry.value.layout is not torch.strided:
            return None
        self.results.shared.add(trees.bytes_of(entry.value))  # nothing writes to a leaf
        return Implicit.of(entry.value)

    def views(self, tensor: Tensor) -> list[Tensor]:
        """The tensors in the bytes of `tensor` of which something is known."""
        return list(self._alive.get(trees.bytes_of(tensor), {}).values())

    def epoch(self, tensor: Tensor) -> int:
        """How often the bytes of `tensor` became unknown."""
        return self._epochs.get(trees.bytes_of(tensor), 0)

    def forget(self, tensor: Tensor) -> None:
        """`tensor` was overwritten with something unknown: it and its views are unknown now."""
        tensor.__dict__.pop(self.key, None)
        key = trees.bytes_of(tensor)
        self._epochs[key] = self._epochs.get(key, 0) + 1

    def close(self, keep: bool = False) -> None:
        """Remove the known values from tensors that outlive this capture.

        keep: values that rest on no assumption stay as `REAL_VALUE`, for a later capture.
        """
        for tensor in self.tensors():
            entry = self.held(tensor)
            if keep and entry is not None and not entry.taint:
                implicit = isinstance(entry.value, Implicit)
                tensor.__dict__[IMPLICIT if implicit else REAL_VALUE] = entry.value
            tensor.__dict__.pop(self.key, None)
        self._alive.clear()

    def to_write(self, tensor: Tensor, entry: Known) -> Known:
        """What a tensor that is written to holds, in memory of its own and of its views.

        A view whose value is in other memory, where the write would not be seen, becomes unknown.
        """
        memory = trees.bytes_of(entry.value)
        shared = memory in self.results.shared
        storage: Any = entry.value.untyped_storage()
        copied = storage.clone() if shared else None
        for view in self.views(tensor):
            known = self.known(view)
            if known is None:
                continue
            value = known.value
            if trees.bytes_of(value) != memory:
                view.__dict__.pop(self.key, None)
            elif copied is not None:
                at = value.storage_offset(), value.shape, value.stride()
                own = value.new_empty(0).set_(copied, *at)
                view.__dict__[self.key] = Known(own, known.taint, known.epoch)
        changed = self.known(tensor)
        return entry if changed is None else changed

    # -- values that are not written out ----------------------------------------------------------

    def imply(self, call: Call, outputs: Sequence[Tensor]) -> frozenset[int] | None:
        """Learn the outputs of a call as `Implicit` values, where it is an elementwise op on such.

        Operands may be unknown if another says which positions are masked.  Returns the assumptions
        that the outputs rest on; None if they are unknown.
        """
        written = call.written()
        taint = self._implied(call, written or outputs)
        if taint is None:
            for tensor in written:
                self.forget(tensor)
        return taint

    def _implied(self, call: Call, outputs: Sequence[Tensor]) -> frozenset[int] | None:
        partly = any(self.held(tensor) is None for tensor in call.tensors)
        if partly and not masks.may_decide(call):
            return None
        if groups.is_collective(call.func) or traits.is_random(call.func) or not outputs:
            return None
        operands = {
            id(tensor): self.implicit(tensor) or Implicit.unknown(tensor.shape, tensor.dtype)
            for tensor in call.tensors
        }
        if partly and not masks.decides(call, operands.values()):
            return None
        held = implying.holder(operands)
        entries = map(self.held, call.tensors)
        taint: frozenset[int] = frozenset().union(*(e.taint for e in entries if e))
        made: list[tuple[Tensor, Tensor | Implicit]] = []
        for position, output in enumerate(outputs):
            value: Tensor | Implicit | None = implying.implied(call, held, output, position)
            value = masks.reduced(call, held, output) if value is None else value
            if value is None:
                return None
            made.append((output, value))
        for output, learnt in made:
            if call.info.mutated and isinstance(learnt, Implicit):
                self._overwrite(output, learnt)
            self.learn(output, learnt, taint)
        return taint

    def in_implicit(self, written: Sequence[Tensor]) -> bool:
        """Whether a tensor that is written to has views that are not written out."""
        views = (self.held(view) for tensor in written for view in self.views(tensor))
        return any(entry is not None and isinstance(entry.value, Implicit) for entry in views)

    def _overwrite(self, tensor: Tensor, value: Implicit) -> None:
        """Change what is known of the other tensors in the bytes of one that is written to."""
        for view in self.views(tensor):
            entry, before = self.held(view), self.implicit(view)
            if view is tensor or entry is None or before is None:
                continue
            outer, inner = implying.boxed(view, tensor), implying.boxed(tensor, view)
            if outer is not None:
                self.learn(view, implying.placed(before, value, outer), entry.taint)
            elif inner is not None:
                box = tuple(slice(s, s + n) for s, n in zip(inner, view.shape, strict=True))
                self.learn(view, value.viewed(partial(_cut, box)), entry.taint)
            else:
                view.__dict__.pop(self.key, None)


def _cut(box: tuple[slice, ...], leaf: Tensor) -> Tensor:
    return leaf[box]
