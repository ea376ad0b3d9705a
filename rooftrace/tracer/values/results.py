"""Results of ops on known values: each computed once on the CPU, and shared between tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rooftrace.tracer.ops import Call, traits
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values.implicit import Implicit

Value = TypeVar("Value", Tensor, Implicit)

_CPU = torch.device("cpu")
_SAME = frozenset({"aten.arange"})
"""Ops without inputs that layers ask for over and over."""
MAX_KEPT = 1 << 30
"""Bytes of results that are kept for equal calls; those that were asked for longest ago go."""


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

    def can_draw(self, func: Any, outputs: Sequence[Tensor]) -> bool:
        """Whether a random op makes whole numbers without inputs, and drawing is on."""
        takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
        whole = not takes and not any(t.dtype.is_floating_point for t in outputs)
        return self._generator is not None and whole

    def once(self, value: Value, what: Any, compute: Callable[[Value], Any]) -> Any:
        """`compute(value)`, done once for each known value and `what` (layers share their mask)."""
        if isinstance(value, Implicit):  # told by its contents: what is computed is small
            told = ("once", value.signature, what)
            if told not in self.memo:
                self.memo[told] = compute(value)
            return self.memo[told]
        if value.is_inference():
            return compute(value)
        key = ("once", id(value), self._state(value), what)
        kept = self._recalled(key)
        if kept is None:
            kept = compute(value), value
            self._keep(key, kept, [value])
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
                own = {trees.bytes_of(value) for value in values.values()}
                # A view is shared on purpose.
                self.shared.update({trees.bytes_of(t) for t, _ in hit[1]} - own)
                return hit[0]
        try:
            result = traits.run_on_cpu(call.name, call.func, args, kwargs, self._generator)
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
