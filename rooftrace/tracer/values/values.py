"""Small values that are known while tracing on meta, and assumptions about unknown ones.

Positions, masks, lengths and indices are also computed on the CPU, so that
`.item()`, `.tolist()`, boolean indexing and `nonzero` on them are exact.  A value that depends on
weights or activations is chosen by a named policy, which records an `Assumption`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rooftrace.graph import Assumption, assumptions
from rooftrace.tracer import deciding_line, source, torch_private
from rooftrace.tracer.recording import Call, groups, ops
from rooftrace.tracer.values import masks, trees
from rooftrace.tracer.values.choices import EXPECTED, UniformDraws, chosen, in_order
from rooftrace.tracer.values.known import KnownTensors, ResultMemo
from rooftrace.tracer.values.masks import (
    MAX_ASSUMED,
    MAX_CHOSEN,
    MAX_INTEGERS,
    Known,
    fits_chosen,
    small,
)

# -- assumptions -----------------------------------------------------------------------------------
# Assumptions about unknown values: by policy, or as the user decided.


MAX_SAME_BRANCH = 256
"""The most equal answers in a row to one unknown condition in a step: after them it flips, so that
loops end."""

_ANY = {"density": "SHARE", "value": "NUMBER"}
DENSITY = 0.5
"""The share of an unknown mask that is taken as true."""
DECIDED = frozenset({"branch", "density", "value"})
"""Kinds of assumptions that a user can decide."""


class Assumptions:
    """The assumptions of one capture, each on record once."""

    def __init__(
        self,
        where: Callable[[], str] = lambda: "",  # the path of the running module
        branches: Mapping[int, bool] | None = None,  # answers to unknown conditions, by number
        assume: Mapping[str, Any] | None = None,  # the user's choices, by kind and module
        number: int = 1,  # the value of an unknown number
        turned: Collection[str] = (),  # source lines whose unknown conditions go the other way
    ) -> None:
        self.where = where
        self.op = ""  # the one that is being run
        self.branches = dict(branches or {})
        self.choices = dict(assume or {})
        self.number = number
        self.turned = frozenset(turned)
        self.by_number = False  # the user's branches count conditions: none is computed
        self.last_line = ""  # where the last unknown condition was needed
        self.choosing: dict[tuple[str, str], tuple[str, Any]] = {}  # by kind and line
        self.assumptions: list[Assumption] = []
        self.asides = range(0)  # ids of the assumptions made while nothing was recorded
        self.decisions = 0  # how many unknown conditions were decided
        self.decided = False  # the last of these decisions was the user's
        self._same_branch: Counter[tuple[str, str, str]] = Counter()
        self._index: dict[tuple[Any, ...], int] = {}

    def assume(
        self,
        kind: str,
        text: str,
        value: Any = None,
        facts: Mapping[str, Any] | None = None,
        where: str | None = None,  # a module path; that of the running module
    ) -> int:
        """Record an assumption (once per kind, module and text) and return its id."""
        place, op = (self.where(), self.op) if where is None else (where, "")
        return self._assume(kind, place, text, value, op, facts or {})

    def assume_again(self, number: int, path: str, other: str) -> int:
        """The id of an assumption made below one module path, for the module at another."""
        old = self.assumptions[number]
        inside = old.where == path or old.where.startswith(f"{path}.")
        where = other + old.where[len(path) :] if inside else old.where
        return self._assume(old.kind, where, old.text, old.value, old.op, old.facts)

    def _assume(
        self, kind: str, where: str, text: str, value: Any, op: str, facts: Mapping[str, Any]
    ) -> int:
        key = (kind, where, text, repr(value))
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.assumptions)
            self.assumptions.append(
                Assumption(
                    id=index, kind=kind, where=where, text=text, value=value, op=op, facts=facts
                )
            )
        return index

    def decision(self, kind: str) -> Any:
        """The user's value for this kind of assumption in the running module, or at the line that
        asks; None without one."""
        if not self.choices:
            return None
        line = source.asking_line(2) if assumptions.of_lines(self.choices) else ""
        return assumptions.decided(self.choices, kind, self.where(), line)

    def chosen(self, kind: str, text: str, value: Any, decided: Any = None) -> frozenset[int]:
        """Record a choice that the user can make (`decided`: as it was), for the line that asks."""
        key = kind, source.asking_line(2)
        self.choosing.pop(key, None)
        self.choosing[key] = says_who(text, decided), value
        return frozenset([self.assume(kind, *self.choosing[key])])

    def otherwise(self, most: int = 3) -> list[str]:
        """Advice on how a user changes the last choices: the latest first."""
        shown = []
        for (kind, asking), (text, value) in list(self.choosing.items())[: -most - 1 : -1]:
            line = source.relative_line(asking)
            other = str(not value).lower() if kind == "branch" else _ANY[kind]
            shown.append(f"Before, at {line}, {text}; --assume {kind}@{line}={other} changes that.")
        return shown

    def mask(self, shape: tuple[int, ...], why: str) -> tuple[Tensor, frozenset[int]]:
        """A value for an unknown mask: the first elements of each row are true, at least one in
        all unless the user sets 0."""
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        true, taint = self.true_in(shape, why)
        each, over = divmod(true, max(rows, 1))
        mask = torch.arange(columns) < each + (torch.arange(rows) < over).long()[:, None]
        return mask.reshape(shape), taint

    def true_in(self, shape: tuple[int, ...], why: str) -> tuple[int, frozenset[int]]:
        """How many elements of an unknown mask are taken as true."""
        decided = self.decision("density")
        density = DENSITY if decided is None else float(decided)
        text = f"{why}: {100 * density:.3g}% of an unknown mask {list(shape)} is taken as true"
        true = max(1 if density else 0, math.ceil(math.prod(shape) * density))
        return true, self.chosen("density", text, density, decided)

    def ones(self, tensor: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        """A value for unknown numbers: 1, unless the user sets another or the code fails with 1, as
        far as that can be seen where it asks."""
        decided = self.decision("value")
        value = self.number if decided is None else decided
        shown = str(value) if decided is not None else "ones" if value else "zeros"
        if decided is None and tensor.numel() == 1:
            needed = source.needed_number(2, value, not tensor.is_floating_point())
            if needed is not None:
                value = needed
                shown = f"{value}, without which {source.relative_line(deciding_line(2))} fails"
        text = f"{why}: an unknown {trees.label_of(tensor)} tensor is taken as {shown}"
        taint = self.chosen("value", text, value, decided)
        return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype), taint

    def begin_step(self) -> None:
        """A step begins: equal answers are counted anew."""
        self._same_branch.clear()

    def branch(self, shape: tuple[int, ...], why: str) -> tuple[Tensor, frozenset[int]]:
        """A value for an unknown condition: False, unless the user sets it, or a loop needs True or
        the code fails with False."""
        index, self.decisions = self.decisions, self.decisions + 1
        decided = self.decision("branch")
        self.last_line, needed = deciding_line(2), source.needed_answer(2)
        place = (self.where(), why, self.last_line)
        if decided is not None:
            usual = bool(decided)
        else:  # the tested value is false; under a `not` in the code, the condition is true
            usual = source.asked_under_not(2) if needed is None else needed
            usual = usual != (self.last_line in self.turned)
        endless = self._same_branch[place] >= MAX_SAME_BRANCH and not source.goes_on_either_way(2)
        taken = self.branches.get(index, usual != endless)
        self.decided = index in self.branches or decided is not None
        self._same_branch[place] = self._same_branch[place] + 1 if taken == usual else 0
        text = f"{why} of an unknown condition is taken as {taken}"
        if endless:
            text += f" after {MAX_SAME_BRANCH} times"
        elif taken is needed and decided is None:
            text += f", without which {source.relative_line(self.last_line)} fails"
        return torch.full(shape, taken), self.chosen("branch", text, taken, decided)


def says_who(text: str, decided: Any) -> str:
    """The text, with ", as given" if the user decided."""
    return text if decided is None else text + assumptions.GIVEN


# -- values ----------------------------------------------------------------------------------------


_NO_TAINT: frozenset[int] = frozenset()


class UnknownValueError(RuntimeError):
    """The code needs a value that is unknown and too large to assume."""


class ChoiceNeededError(RuntimeError):
    """Code needs choices that were left out."""


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
        """The answer of a test for inf and nan on finite numbers; None for any other tensor."""
        self.uniform = UniformDraws(self)
        self.follows_all = False  # also choices of calls that only fill a cache
        self._follows, self._left = True, False

    @contextmanager
    def unchosen(self) -> Iterator[None]:
        """Inside, indices that unknown scores choose stay unknown: a cache is filled without them.

        Raises ChoiceNeededError where the code asks for one, or fails: then it needs `follows_all`.
        """
        before, self._follows = len(self.assumptions), self.follows_all
        try:
            yield
        except Exception as error:
            if self._left:
                raise ChoiceNeededError from error
            raise
        finally:
            self._follows = True
        if self._left and any(each.kind in DECIDED for each in self.assumptions[before:]):
            raise ChoiceNeededError

    def check_chosen(self, kept: Iterable[Tensor]) -> None:
        """Raise ChoiceNeededError where what is kept may have choices that were left out."""
        if self._left and any(
            not tensor.is_floating_point() and self.known(tensor) is None for tensor in kept
        ):
            raise ChoiceNeededError

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
                self.learn(tensor, value, taint)  # a later count of its elements agrees
            return value, taint
        return self.ones(tensor, why)

    def is_vast(self, mask: Tensor) -> bool:
        """Whether a mask is unknown and too large to be written out: it is counted alone."""
        large = mask.dtype == torch.bool and mask.numel() > MAX_ASSUMED
        return large and self.exact(mask) is None and self.finite(mask) is None

    def places(self, mask: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        """Indices [true, dimensions] of the true elements of a mask; on meta where it is vast."""
        if self.is_vast(mask):
            true, taint = self.true_in(tuple(mask.shape), why)
            return torch.empty(true, mask.dim(), dtype=torch.int64, device="meta"), taint
        value, taint = self.value_of(mask, why)
        return value.nonzero(), taint

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
        if not self._follows:
            self._left = True
            return None
        classes = max(source.shape[dimension] if source.dim() else 1, 1)
        shape = tuple(index.shape)
        full = shape == tuple(source.shape) and sorts
        if index.numel() > (MAX_INTEGERS if full else MAX_CHOSEN):
            return self.assume("value", f"{name} makes {index.numel():,} choices: not followed")
        decided = None if full else self.decision(assumptions.ROUTING)
        key = ("route", full, repr(decided), shape, classes, index.dtype, dimension)
        kept = self.results.memo.get(key)
        if kept is None:
            if full:
                choices = in_order(shape, classes, dimension)
            else:
                policy = EXPECTED if decided is None else assumptions.policy_of(decided)
                along = dimension if index.dim() == source.dim() else None  # argmax may drop it
                choices = chosen(policy, shape, classes, along)
            kept = self.results.memo[key] = choices, choices.indices.to(index.dtype)
            self.results.shared.add(trees.bytes_of(kept[1]))
        choices, value = kept
        text = says_who(f"{name} {choices.text}", decided)
        taint = self.assume(assumptions.ROUTING, text, classes, choices.facts)
        if choices.facts:
            self.routed.setdefault(taint, set())
        self.learn(index, value, frozenset([taint]))
        return taint

    def decide(self, name: str, tensors: Sequence[Tensor], output: Tensor) -> frozenset[int] | None:
        """Learn the result of `&` or `|` if one known side decides it; None if neither does."""
        deciding = ops.DECIDING[name]
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
        if ops.is_random(func) and not self.results.can_draw(func, outputs):
            return None
        entries: dict[int, Known] = {}
        for tensor in call.tensors:
            entry = self.known(tensor)
            if entry is None:
                return None
            entries[id(tensor)] = entry
        rests_on = frozenset().union(*(entry.taint for entry in entries.values()))
        # The numbers of rows are read by an order of choices, to undo it.
        numbered = bool(self.routed) and call.info.name == "aten.arange"
        chosen = numbered or any("policy" in self.assumptions[n].facts for n in rests_on)
        carried = fits_chosen if chosen else small
        return entries if all(map(carried, (*call.tensors, *outputs))) else None

    def mask_facts(
        self, mask: Tensor, rows: int, columns: int, scores: bool = False
    ) -> tuple[dict[str, Any] | None, frozenset[int]]:
        """Facts of a mask of attention (see `masks.facts_of`), and the assumptions they rest on.

        scores: it is masked numbers, which are scores of attention only if a known mask hides
        some of them (a router's have an unknown mask).
        """
        entry, value = self.held(mask), self.implicit(mask)
        facts = None
        if value is not None:
            with torch_private.DisableTorchFunction(), torch_private.disable_current_modes():
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
