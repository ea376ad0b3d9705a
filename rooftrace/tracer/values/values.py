"""Small values that are known while tracing on meta, and what is assumed where they are not.

Positions, masks, lengths and indices are computed beside the meta tensors on the CPU, so that
`.item()`, `.tolist()`, boolean indexing and `nonzero` on them are exact.  A value that depends on
weights or activations is chosen by a named policy, which records an `Assumption`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.ops import Call, groups, traits
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import masks
from rooftrace.tracer.values.assumptions import Assumptions, says_who
from rooftrace.tracer.values.choices import EXPECTED, chosen, in_order
from rooftrace.tracer.values.known import KnownTensors
from rooftrace.tracer.values.marks import (
    MAX_ASSUMED,
    MAX_CHOSEN,
    MAX_INTEGERS,
    Known,
    fits_chosen,
    small,
)
from rooftrace.tracer.values.results import ResultMemo

_NO_TAINT: frozenset[int] = frozenset()


class UnknownValueError(RuntimeError):
    """The code asked for a value that is unknown and too large to assume."""


class Values(Assumptions, KnownTensors):
    """Known values of the meta tensors of one capture, and assumptions about unknown ones.

    draws: random integers are drawn with a fixed seed (while a user's function makes inputs)
    instead of being unknown.
    """

    def __init__(
        self,
        branches: Mapping[int, bool] | None = None,
        assume: Mapping[str, Any] | None = None,
        draws: bool = False,
        number: int = 1,
        turned: Collection[str] = (),
    ) -> None:
        Assumptions.__init__(self, branches=branches, assume=assume, number=number, turned=turned)
        drawing = torch.Generator().manual_seed(0) if draws else None
        KnownTensors.__init__(self, ResultMemo(drawing))
        self.computed = 0  # how many values were computed from real data
        self.routed: dict[int, set[tuple[int, ...]]] = {}  # shapes of weights read by a choice
        self.compute: Callable[[Tensor], Tensor | None] = lambda tensor: None
        """Gives the value of a tensor from the real tensors of the caller, where it can."""
        self.finite: Callable[[Tensor], bool | None] = lambda tensor: None
        """Gives what a test for inf and nan says of finite numbers; None for what is no such."""
        self._uniform: dict[int, tuple[int, Tensor]] = {}  # by bytes: what they were drawn among

    # -- knowing -----------------------------------------------------------------------------------

    def learn_draw(self, tensor: Tensor, classes: int) -> None:
        """Remember that `tensor` holds draws among so many classes, all equally likely."""
        self._uniform[trees.bytes_of(tensor)] = classes, tensor

    def drawn_among(self, tensor: Tensor) -> int | None:
        """Among how many classes the numbers of a tensor were drawn; None where they were not.

        Views of what was drawn count as drawn, until something is written to them.
        """
        place = trees.bytes_of(tensor)
        classes, _ = self._uniform.get(place, (None, None))
        return None if self._epochs.get(place) else classes

    # -- asking ------------------------------------------------------------------------------------

    def exact(self, tensor: Tensor) -> Known | None:
        """The value of `tensor` where it is known, or computed from real data; else None."""
        return self.known(tensor) or self.from_data(tensor)

    def value_of(self, tensor: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        """The value of `tensor`: exact where known, otherwise by policy.

        Raises UnknownValueError for an unknown tensor too large to assume.
        """
        entry = self.exact(tensor)
        if entry is not None:
            return entry.value, entry.taint
        shape = tuple(tensor.shape)
        single = tensor.dtype == torch.bool and tensor.numel() == 1
        if tensor.dtype == torch.bool and not (single and self.by_number):
            finite = self.finite(tensor)
            if finite is not None and self.decision("branch" if single else "density") is None:
                text = f"{why}: unknown numbers are taken as finite"
                return torch.full(shape, finite), frozenset([self.assume("finite", text, finite)])
        if single:
            return self.branch(shape, why)
        if tensor.numel() > MAX_ASSUMED:
            raise UnknownValueError(
                f"{why} needs the value of a {trees.label_of(tensor)} tensor, "
                "which depends on weights or activations"
            )
        if tensor.dtype == torch.bool:
            value, taint = self.mask(shape, why)
            if small(tensor) and tensor.device.type == "meta":
                self.learn(tensor, value, taint)  # what counts its elements says the same
            return value, taint
        return self.ones(tensor, why)

    def from_data(self, tensor: Tensor) -> Known | None:
        """The value of an unknown tensor, computed from the caller's real tensors.

        None if they do not determine it, or if the user decided the value.
        """
        single = tensor.dtype == torch.bool and tensor.numel() == 1
        kind = "branch" if single else "density" if tensor.dtype == torch.bool else "value"
        if self.decision(kind) is not None or (single and self.by_number):
            return None
        value = self.compute(tensor)
        if value is None:
            return None
        self.computed += 1
        if tensor.device.type == "meta":
            self.learn(tensor, value)
        return Known(value, _NO_TAINT, 0)

    def route(
        self, name: str, source: Tensor, index: Tensor, dimension: int, sorts: bool = False
    ) -> int | None:
        """Give the index output of topk, argmax, sort ... on unknown floats values, by a policy.

        The policy is `expected` unless the user decided; a full sort keeps the order (sorts: the op
        is a sort).  Returns the id of the assumption.
        """
        if not index.numel():
            return None
        classes = max(source.shape[dimension] if source.dim() else 1, 1)
        shape = tuple(index.shape)
        full = shape == tuple(source.shape) and sorts
        if index.numel() > (MAX_INTEGERS if full else MAX_CHOSEN):
            return self.assume("value", f"{name} makes {index.numel():,} choices: not followed")
        decided = None if full else self.decision(asked.ROUTING)
        key = ("route", full, repr(decided), shape, classes, index.dtype, dimension)
        kept = self.results.memo.get(key)
        if kept is None:
            if full:
                choices = in_order(shape, classes, dimension)
            else:
                policy = EXPECTED if decided is None else asked.policy_of(decided)
                along = dimension if index.dim() == source.dim() else None  # argmax may drop it
                choices = chosen(policy, shape, classes, along)
            kept = self.results.memo[key] = choices, choices.indices.to(index.dtype)
            self.results.shared.add(trees.bytes_of(kept[1]))
        choices, value = kept
        text = says_who(f"{name} {choices.text}", decided)
        taint = self.assume(asked.ROUTING, text, classes, choices.facts)
        if choices.facts:
            self.routed.setdefault(taint, set())
        self.learn(index, value, frozenset([taint]))
        return taint

    def decide(self, name: str, tensors: Sequence[Tensor], output: Tensor) -> frozenset[int] | None:
        """Learn the result of `&` or `|` if one known side decides it; None if neither does."""
        deciding = traits.DECIDING[name]
        for tensor in tensors:
            entry = self.known(tensor)
            if entry is None or tensor.dtype != torch.bool or not small(output):
                continue
            if bool((entry.value == deciding).all()):
                value = torch.full(tuple(output.shape), deciding, dtype=torch.bool)
                self.learn(output, value, entry.taint)
                return entry.taint
        return None

    # -- propagating -------------------------------------------------------------------------------

    def propagate(self, call: Call, outputs: Sequence[Tensor]) -> frozenset[int] | None:
        """Compute a call on known values too, and learn its outputs.

        Returns the assumptions that they rest on; None if they are unknown.
        """
        written = call.written()
        entries = None if self.in_implicit(written) else self._followed(call, outputs)
        if entries is None:
            return self.imply(call, outputs)
        for tensor in written:
            entries[id(tensor)] = self.to_write(tensor, entries[id(tensor)])
        by_id = {key: entry.value for key, entry in entries.items()}
        result = self.results.of(call, by_id)
        if result is None:
            for tensor in written:
                self.forget(tensor)
            return None
        taint: frozenset[int] = frozenset().union(*(entry.taint for entry in entries.values()))
        for output, value in zip(outputs, trees.listed(result), strict=False):
            self.learn(output, value, taint)
        return taint

    def _followed(self, call: Call, outputs: Sequence[Tensor]) -> dict[int, Known] | None:
        """The values of the tensors of a call by identity; None where it cannot be computed."""
        func = call.func
        if groups.is_collective(func):  # the other processes have a say
            return None
        if traits.is_random(func) and not self.results.can_draw(func, outputs):
            return None
        entries: dict[int, Known] = {}
        for tensor in call.tensors:
            entry = self.known(tensor)
            if entry is None:
                return None
            entries[id(tensor)] = entry
        rests_on = frozenset().union(*(entry.taint for entry in entries.values()))
        chosen = any("policy" in self.assumptions[number].facts for number in rests_on)
        carried = fits_chosen if chosen else small
        return entries if all(map(carried, (*call.tensors, *outputs))) else None

    def mask_facts(
        self, mask: Tensor, rows: int, columns: int, scores: bool = False
    ) -> tuple[dict[str, Any] | None, frozenset[int]]:
        """What a mask of attention says (see `masks.facts_of`), and what that rests on.

        scores: it is masked numbers, which are no scores of attention unless something known hides
        some of them (a router's have an unknown mask).
        """
        entry, value = self.held(mask), self.implicit(mask)
        facts = None
        if value is not None:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                facts = self.results.once(
                    value, ("mask", rows, columns), lambda mask: masks.facts_of(mask, rows, columns)
                )
        taint = _NO_TAINT if entry is None else entry.taint
        if value is None or facts is None:
            unsure = value is not None or mask.dtype == torch.bool
        else:
            unsure = masks.unsure(value)
        if scores and unsure and (facts is None or facts["mask"] == "none"):
            return None, _NO_TAINT
        if unsure:
            taint |= {self.assume("mask", masks.UNSURE)}
        return facts, taint
