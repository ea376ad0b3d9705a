"""Assumptions about unknown values: by policy, or as the user decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.graph import Assumption
from rooftrace.tracer.source import deciding_line, lines
from rooftrace.tracer.tensors import trees

MAX_SAME_BRANCH = 256
"""The most equal answers in a row to one unknown condition in a step: after them it flips, so that
loops end."""

_ANY = {"density": "SHARE", "value": "NUMBER"}
DENSITY = 0.5
"""The share of an unknown mask that is taken as true."""


class Assumptions:
    """The assumptions of one capture, each on record once."""

    def __init__(
        self,
        where: Callable[[], str] = lambda: "",  # the path of the running module
        branches: Mapping[int, bool] | None = None,  # answers to unknown conditions, by number
        assume: Mapping[str, Any] | None = None,  # the user's choices, by kind and module
        number: int = 1,  # what an unknown number is taken as
        turned: Collection[str] = (),  # source lines whose unknown conditions go the other way
    ) -> None:
        self.where = where
        self.op = ""  # the one that is being run
        self.branches = dict(branches or {})
        self.choices = dict(assume or {})
        self.number = number
        self.turned = frozenset(turned)
        self.by_number = False  # the user's branches count conditions: none is computed
        self.last_line = ""  # the line that asked for the last unknown condition
        self.choosing: dict[tuple[str, str], tuple[str, Any]] = {}  # by kind and line
        self.assumptions: list[Assumption] = []
        self.asides = range(0)  # those made while nothing was recorded
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
        line = lines.asking_line(2) if asked.of_lines(self.choices) else ""
        return asked.decided(self.choices, kind, self.where(), line)

    def chosen(self, kind: str, text: str, value: Any, decided: Any = None) -> frozenset[int]:
        """Record a choice that the user can make (`decided`: as it was), for the line that asks."""
        key = kind, lines.asking_line(2)
        self.choosing.pop(key, None)
        self.choosing[key] = says_who(text, decided), value
        return frozenset([self.assume(kind, *self.choosing[key])])

    def otherwise(self, most: int = 3) -> list[str]:
        """How the last choices are made otherwise, by the user: the latest first."""
        shown = []
        for (kind, asking), (text, value) in list(self.choosing.items())[: -most - 1 : -1]:
            line = lines.relative_line(asking)
            other = str(not value).lower() if kind == "branch" else _ANY[kind]
            shown.append(f"Before, at {line}, {text}; --assume {kind}@{line}={other} changes that.")
        return shown

    def mask(self, shape: tuple[int, ...], why: str) -> tuple[Tensor, frozenset[int]]:
        """A value for an unknown mask: the first elements of each row are true, at least one in
        all unless the user sets 0."""
        decided = self.decision("density")
        density = DENSITY if decided is None else float(decided)
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        true = max(1 if density else 0, math.ceil(rows * columns * density))
        whole, over = divmod(true, max(rows, 1))
        mask = torch.arange(columns) < whole + (torch.arange(rows) < over).long()[:, None]
        text = f"{why}: {100 * density:.3g}% of an unknown mask {list(shape)} is taken as true"
        return mask.reshape(shape), self.chosen("density", text, density, decided)

    def ones(self, tensor: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        """A value for unknown numbers: 1, unless the user sets another or the code fails with 1, as
        far as that can be seen where it asks."""
        decided = self.decision("value")
        value = self.number if decided is None else decided
        shown = str(value) if decided is not None else "ones" if value else "zeros"
        if decided is None and tensor.numel() == 1:
            needed = lines.needed_number(2, value, not tensor.is_floating_point())
            if needed is not None:
                value = needed
                shown = f"{value}, without which {lines.relative_line(deciding_line(2))} fails"
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
        self.last_line, needed = deciding_line(2), lines.needed_answer(2)
        place = (self.where(), why, self.last_line)
        if decided is not None:
            usual = bool(decided)
        else:  # what is tested is false; so where the code takes `not` of it, the condition is true
            usual = lines.asked_under_not(2) if needed is None else needed
            usual = usual != (self.last_line in self.turned)
        endless = self._same_branch[place] >= MAX_SAME_BRANCH and not lines.goes_on_either_way(2)
        taken = self.branches.get(index, usual != endless)
        self.decided = index in self.branches or decided is not None
        self._same_branch[place] = self._same_branch[place] + 1 if taken == usual else 0
        text = f"{why} of an unknown condition is taken as {taken}"
        if endless:
            text += f" after {MAX_SAME_BRANCH} times"
        elif taken is needed and decided is None:
            text += f", without which {lines.relative_line(self.last_line)} fails"
        return torch.full(shape, taken), self.chosen("branch", text, taken, decided)


def says_who(text: str, decided: Any) -> str:
    """The text, with ", as given" if the user decided."""
    return text if decided is None else f"{text}, as given"
