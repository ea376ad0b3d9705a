"""Results of ops on known values: each computed once on the CPU, and shared between tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.ops import Call, traits
from rooftrace.tracer.tensors import trees

_CPU = torch.device("cpu")


class ResultMemo:
    """The results of ops on known values, in one capture.

    generator: random integers are drawn from it; None: they are unknown.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self.memo: dict[Any, Any] = {}
        self.shared: set[int] = set()  # storages of values that several tensors hold

    def can_draw(self, func: Any, outputs: Sequence[Tensor]) -> bool:
        """Whether a random op makes whole numbers without inputs, and drawing is on."""
        takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
        whole = not takes and not any(t.dtype.is_floating_point for t in outputs)
        return self._generator is not None and whole

    def once(self, value: Tensor, what: Any, compute: Callable[[Tensor], Any]) -> Any:
        """`compute(value)`, done once for each known value and `what` (layers share their mask)."""
        if value.is_inference():
            return compute(value)
        key = ("once", id(value), value._version, what)
        kept = self.memo.get(key)
        if kept is None:
            kept = self.memo[key] = (compute(value), value)
        return kept[0]

    def of(self, call: Call, values: Mapping[int, Tensor]) -> Any:
        """The result of a call with these values in place of its tensors; None if it fails.

        values: CPU tensors, by the identity of the meta tensors.  Equal calls are computed once:
        layers make the same masks over and over.
        """

        def swap(item: Any) -> Any:
            if isinstance(item, Tensor):
                return values[id(item)]
            if isinstance(item, (list, tuple)):
                return [swap(x) for x in item]
            return _CPU if isinstance(item, torch.device) else item

        args = [swap(item) for item in call.args]
        kwargs = {name: swap(item) for name, item in call.kwargs.items()}
        key = None
        # What inference mode makes has no version by which a change would be seen.
        untracked = torch.is_inference_mode_enabled() or any(
            value.is_inference() for value in values.values()
        )
        if not call.info.mutated and values and not untracked:
            key = (call.func, repr(_fingerprint((*args, *kwargs.items()))))
            hit = self.memo.get(key)
            if hit is not None and all(t._version == version for t, version in hit[1]):
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
            self.memo[key] = (result, [(t, t._version) for t in trees.listed(result)], values)
        return result


def _fingerprint(items: Sequence[Any]) -> list[Any]:
    """A form of the arguments whose repr is equal only for equal calls."""
    return [
        ("tensor", id(item), item._version)
        if isinstance(item, Tensor)
        else _fingerprint(item)
        if isinstance(item, (list, tuple))
        else item
        for item in items
    ]
