"""Tensors of a capture whose value is `Implicit`: what ops make of it, and what writing changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from rooftrace.tracer.ops import Call, groups, traits
from rooftrace.tracer.values import implying, masks
from rooftrace.tracer.values.implicit import Implicit
from rooftrace.tracer.values.known import KnownTensors

_NO_TAINT: frozenset[int] = frozenset()


class ImpliedTensors(KnownTensors):
    """The tensors of one capture whose value is known, written out or not."""

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
