"""Meta tensors with known values: writes that change them, and results of ops, computed once.

A value is a CPU tensor, or `Implicit`.  It is kept on the meta tensor itself, under a key of the
capture.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rooftrace.tracer.recording import Call, groups, ops
from rooftrace.tracer.values import implicit, intervals, masks, trees
from rooftrace.tracer.values.implicit import Implicit
from rooftrace.tracer.values.masks import IMPLICIT, KNOWN, REAL_VALUE, Known, LearntValue, small

_NO_TAINT: frozenset[int] = frozenset()
_SERIAL = itertools.count()


class KnownTensors:
    """The tensors of one capture whose value is known.

    results: computed from known values; several tensors may hold one of them.
    """

    def __init__(self, results: ResultMemo) -> None:
        self.results = results
        self.key = f"{KNOWN}_{next(_SERIAL)}"  # of this capture alone; others may run as well
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

        Integers that alone fill their memory are shared by all of them, so that results from them
        are computed once; else `copy` is learnt.
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

        A CPU tensor is its value.
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
        """The value of `tensor`, at any size (see `known`)."""
        entry: LearntValue | None = tensor.__dict__.get(self.key)
        if entry is None:
            if tensor.device.type == "cpu":
                return LearntValue(tensor.detach(), _NO_TAINT, 0)
            return None
        if entry.epoch != self.epoch(tensor):
            return None
        return entry

    def implicit(self, tensor: Tensor) -> Implicit | None:
        """The value of `tensor` as one that is not written out; None where it is unknown."""
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
        """The tensors in the bytes of `tensor` that have a value."""
        return list(self._alive.get(trees.bytes_of(tensor), {}).values())

    def epoch(self, tensor: Tensor) -> int:
        """Number of times that the bytes of `tensor` became unknown."""
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
        self.results.clear()
        for tensor in self.tensors():
            entry = self.held(tensor)
            if keep and entry is not None and not entry.taint:
                is_implicit = isinstance(entry.value, Implicit)
                tensor.__dict__[IMPLICIT if is_implicit else REAL_VALUE] = entry.value
            tensor.__dict__.pop(self.key, None)
        self._alive.clear()

    def to_write(self, tensor: Tensor, entry: Known) -> Known:
        """The value of a tensor that is written to, in memory that only its views share.

        A view whose value is in other memory, where the write would not be seen, becomes unknown.
        """
        memory = trees.bytes_of(entry.value)
        shared = memory in self.results.shared
        storage: Any = entry.value.untyped_storage()
        copied = storage.clone() if shared else None
        for view in self.views(tensor):
            held = self.known(view)
            if held is None:
                continue
            value = held.value
            if trees.bytes_of(value) != memory:
                view.__dict__.pop(self.key, None)
            elif copied is not None:
                at = value.storage_offset(), value.shape, value.stride()
                moved = value.new_empty(0).set_(copied, *at)
                view.__dict__[self.key] = Known(moved, held.taint, held.epoch)
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
        if groups.is_collective(call.func) or ops.is_random(call.func) or not outputs:
            return None
        operands = {
            id(tensor): self.implicit(tensor) or Implicit.unknown(tensor.shape, tensor.dtype)
            for tensor in call.tensors
        }
        if partly and not masks.decides(call, operands.values()):
            return None
        held = implicit.holder(operands)
        entries = map(self.held, call.tensors)
        taint: frozenset[int] = frozenset().union(*(e.taint for e in entries if e))
        made: list[tuple[Tensor, Tensor | Implicit]] = []
        for position, output in enumerate(outputs):
            value: Tensor | Implicit | None = implicit.implied(call, held, output, position)
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
        """Change the values of the other tensors in the bytes of one that is written to."""
        for view in self.views(tensor):
            entry, before = self.held(view), self.implicit(view)
            if view is tensor or entry is None or before is None:
                continue
            outer, inner = implicit.boxed(view, tensor), implicit.boxed(tensor, view)
            if outer is not None:
                self.learn(view, implicit.placed(before, value, outer), entry.taint)
            elif inner is not None:
                box = tuple(slice(s, s + n) for s, n in zip(inner, view.shape, strict=True))
                self.learn(view, value.viewed(partial(_cut, box)), entry.taint)
            else:
                view.__dict__.pop(self.key, None)


def _cut(box: tuple[slice, ...], leaf: Tensor) -> Tensor:
    return leaf[box]


# -- results ---------------------------------------------------------------------------------------
# Results of ops on known values: each computed once on the CPU, and shared between tensors.

Value = TypeVar("Value", Tensor, Implicit)

_CPU = torch.device("cpu")
_SAME = frozenset({"aten.arange"})
"""Ops without inputs that layers ask for over and over."""
MAX_KEPT = 1 << 30
"""Bytes of results that are kept for equal calls; the least recently used go first."""


class ResultMemo:
    """The results of ops on known values, in one capture.

    generator: random integers are drawn from it; None: they are unknown.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self.memo: dict[Any, Any] = {}
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()  # each with its bytes
        self._bytes = 0
        self.shared: set[int] = set()  # storages of values that several tensors hold
        self._writes: Counter[int] = Counter()  # by storage: torch counts none made in a mode

    def clear(self) -> None:
        """Release the results, of which some are large."""
        self.memo.clear()
        self._kept.clear()

    def can_draw(self, func: Any, outputs: Sequence[Tensor]) -> bool:
        """Whether a random op makes integers without inputs, and drawing is on."""
        takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
        integers = not takes and not any(t.dtype.is_floating_point for t in outputs)
        return self._generator is not None and integers

    def once(self, value: Value, name: Any, compute: Callable[[Value], Any]) -> Any:
        """`compute(value)`, done once for each known value and `name` (layers share their mask)."""
        if isinstance(value, Implicit):  # by its contents: the results are small
            contents = ("once", value.signature, name)
            if contents not in self.memo:
                self.memo[contents] = compute(value)
            return self.memo[contents]
        if value.is_inference():
            return compute(value)
        key = ("once", id(value), self._state(value), name)
        kept = self._recalled(key)
        if kept is None or kept[1]() is not value:
            kept = compute(value), weakref.ref(value)  # held, a large one would push out others
            self._keep(key, kept, [])
        return kept[0]

    def of(self, call: Call, values: Mapping[int, Tensor]) -> Any:
        """The result of a call with these values in place of its tensors; None if it fails.

        values: CPU tensors, by the identity of the meta tensors.  Equal calls are computed once:
        layers make the same masks over and over.
        """
        args = [_swapped(item, values) for item in call.args]
        kwargs = {name: _swapped(item, values) for name, item in call.kwargs.items()}
        key = None
        # What inference mode makes has no version by which a change would be seen.
        untracked = torch.is_inference_mode_enabled() or any(
            value.is_inference() for value in values.values()
        )
        repeatable = bool(values) or call.name in _SAME
        if call.info.mutated:
            self._writes.update(trees.bytes_of(values[id(t)]) for t in call.written())
        elif repeatable and not untracked:
            key = (call.func, repr(self._fingerprint((*args, *kwargs.items()))))
            hit = self._recalled(key)
            if hit is not None and all(self._state(t) == state for t, state in hit[1]):
                inputs = {trees.bytes_of(value) for value in values.values()}
                # A view is shared on purpose.
                self.shared.update({trees.bytes_of(t) for t, _ in hit[1]} - inputs)
                return hit[0]
        try:
            result = ops.run_on_cpu(call.name, call.func, args, kwargs, self._generator)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return None  # a value that cannot be computed is an unknown value
        if key is not None:
            # The inputs are kept so that their ids stay theirs.
            made = trees.listed(result)
            kept = result, [(t, self._state(t)) for t in made], values
            self._keep(key, kept, [*made, *values.values()])
        return result

    def _recalled(self, key: Any) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def _keep(self, key: Any, item: Any, held: Sequence[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in held)
        self._bytes += size - self._kept.pop(key, (None, 0))[1]
        self._kept[key] = item, size
        while self._bytes > MAX_KEPT:
            self._bytes -= self._kept.popitem(last=False)[1][1]

    def _state(self, value: Tensor) -> tuple[int, int]:
        """Changes when something is written to a value, or to another view of its bytes."""
        return value._version, self._writes[trees.bytes_of(value)]

    def _fingerprint(self, items: Sequence[Any]) -> list[Any]:
        """A form of the arguments whose repr is equal only for equal calls."""
        return [
            ("tensor", id(item), self._state(item))
            if isinstance(item, Tensor)
            else self._fingerprint(item)
            if isinstance(item, (list, tuple))
            else item
            for item in items
        ]


def _swapped(item: Any, values: Mapping[int, Tensor]) -> Any:
    """An argument with these values in place of its tensors."""
    if isinstance(item, Tensor):
        return values[id(item)]
    if isinstance(item, (list, tuple)):
        return [_swapped(x, values) for x in item]
    return _CPU if isinstance(item, torch.device) else item
