"""Compares a lock with the costs of its targets now: exceeded budgets, savings, stale entries."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.diffs import Change, Limit
from rooftrace.diffs.changes import TOTALS, union
from rooftrace.hardware.units import format_capacity, plural
from rooftrace.reporting.gates.lock import (
    BY_MODULE,
    ROOT,
    SAME,
    Budget,
    BudgetError,
    Lock,
    LockedCosts,
    StepKey,
    chosen,
    matching,
    module_value,
)
from rooftrace.reporting.gates.lockfile import FAILS, Settings


@dataclass(frozen=True, slots=True)
class ModuleShift:
    """A module whose cost moved, and by how many ops of each kind ({"_to_copy fp32": 2})."""

    path: str
    before: float | None
    after: float | None
    ops: Mapping[str, int] = field(default_factory=dict)  # those removed are below 0


@dataclass(frozen=True, slots=True)
class CodeCause:
    """A change of the code that moved a cost, in a sentence.

    place: its modules and line, by which it is the same cause in other steps; "" if unknown.
    """

    text: str
    place: str = ""


class _LockedChange(Change):
    """A cost of a lock before and after."""

    rounding = 1e-6
    """Times of a lock are rounded to the seventh digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift(Plain):
    """A cost that moved beyond its limit, or that moved without a budget."""

    place: StepKey
    metric: str
    before: float | None  # None: the lock has no such module
    after: float
    module: str = ""  # "": the step
    limit: Limit = SAME
    budget: str = ""  # its key in [tool.rooftrace.budgets]; "": none
    modules: tuple[ModuleShift, ...] = ()  # that moved, most first
    causes: tuple[CodeCause, ...] = ()

    KEYS = (
        "**place._asdict metric module before after relative budget limit=_limit modules "
        "causes=_causes"
    )

    @property
    def _causes(self) -> list[str]:
        return [cause.text for cause in self.causes]

    @property
    def _limit(self) -> str | None:
        return self.limit.text if self.budget else None

    @property
    def cost(self) -> str:
        """ "flops" of the step, "h.*.mlp flops" of a module."""
        return f"{self.module} {self.metric}".lstrip()

    @property
    def relative(self) -> float | None:
        """Growth over the locked cost; None where that is nothing."""
        if not self.before:
            return None
        return (self.after - self.before) / self.before

    @property
    def exceeded(self) -> bool:
        """Whether the cost is over the limit."""
        if self.limit.ceiling:
            return self.after > self.limit.most
        if self.before is None:
            return False
        return self.limit.exceeded(_LockedChange(self.before, self.after))

    @property
    def saved(self) -> bool:
        """Whether the cost shrank by more than it may grow, so that the lock should be renewed."""
        if self.limit.ceiling or self.before is None:
            return False
        return self.limit.exceeded(_LockedChange(self.after, self.before))

    def sentence(self) -> str:
        """ "gpt, training on h200-sxm, efficient: flops 1.20 GFLOP -> 2.40 GFLOP (+100.0 %)"."""
        show = TOTALS[self.metric].write
        before = "nothing" if self.before is None else show(self.before)
        text = f"{self.place}: {self.cost} {before} -> {show(self.after)}"
        if before == show(self.after):  # too close to tell apart in four digits
            text = f"{self.place}: {self.cost} {self.before:,} -> {self.after:,}"
        if self.relative is not None:
            text += f" ({self.relative:+.1%})".replace("%", " %")
        if self.budget:
            exact = self.limit.ceiling or self.limit.text.endswith("%")
            text += f"; allowed is {self.limit.text}{'' if exact else ' more'}"
        return text


Cause: TypeAlias = Callable[[Shift], Sequence[CodeCause]]
"""The changes of the code that moved a cost, from its former revision; may be none."""


@dataclass(frozen=True, kw_only=True)
class GateOutcome(Plain, Shown):
    """The result of a check.  `failed` is its verdict."""

    lock: str  # name of the file
    before: Lock
    after: Lock
    over: tuple[Shift, ...] = ()  # exceeded budgets
    under: tuple[Shift, ...] = ()  # costs that shrank by more than a budget
    other: tuple[Shift, ...] = ()  # totals that moved otherwise
    stale: tuple[str, ...] = ()  # sentences on entries of the lock or the repository alone
    versions: tuple[str, ...] = ()  # "torch 2.8.0 -> 2.13.0": differences besides the models
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # files, by target
    strict: bool = False  # whether the lock must be equal to a new one
    improvements: str = ""
    rooms: Mapping[str, float] = field(default_factory=dict)  # bytes for a step, by chip

    @property
    def unfit(self) -> list[str]:
        """Sentences on steps that fitted their chip, and do not any more."""
        locked, texts = self.before.places(), dict[str, None]()
        for place, costs in self.after.places().items():
            room = self.rooms.get(place.chip, math.inf)
            if place in locked and locked[place].memory <= room < costs.memory:
                peak, unit = format_capacity(costs.memory).split(" ")
                most = format_capacity(room)
                peak += "" if most.endswith(f" {unit}") else f" {unit}"
                step = f"{place.target}, {place.phase} on {place.chip}"
                texts[f"{step} no longer fits: {peak} of {most}"] = None
        return list(texts)

    @property
    def same(self) -> bool:
        """Whether a new lock would hold the same costs."""
        return not (self.over or self.under or self.other or self.stale)

    @property
    def failed(self) -> bool:
        """Whether the check fails: a budget is exceeded, or the lock is stale."""
        if self.over or self.stale or (self.under and self.improvements == FAILS):
            return True
        return self.strict and self.before != self.after

    def verdict(self) -> str:
        """One sentence."""
        steps = plural(len(self.after.places()), "step")
        if self.over:
            places = {shift.place for shift in self.over}
            text = f"{plural(len(self.over), 'budget')} exceeded in {len(places)} of {steps}"
            return f"{text}; where that is meant: rooftrace check --update"
        if self.stale:
            return f"{self.lock} is stale: rooftrace check --update writes it anew"
        if self.under:
            more = f"{plural(len(self.under), 'cost')} lower than in {self.lock}"
            return f"no budget is exceeded, {more}: rooftrace check --update keeps that"
        if self.failed:
            return f"{self.lock} is not what a new one would be: rooftrace check --update"
        same = "costs are as locked" if self.same else "no budget is exceeded"
        return f"{steps}: {same}"

    def __repr__(self) -> str:
        return short(self, self.verdict())

    @property
    def _steps(self) -> list[dict[str, Any]]:
        return [
            {**place._asdict(), **{metric: costs.value(metric) for metric in TOTALS}}
            for place, costs in self.after.places().items()
        ]

    schema = "rooftrace.check/1"
    KEYS = "schema lock failed verdict over under other stale unfit versions sources steps=_steps"


def compare_locks(
    before: Lock,
    after: Lock,
    settings: Settings,
    *,
    strict: bool = False,
    cause: Cause | None = None,
    rooms: Mapping[str, float] | None = None,
) -> GateOutcome:
    """Compare the lock `before` with the costs now.

    cause: gives the causes of each exceeded budget.  rooms: bytes for a step, by chip.  Raises
    BudgetError for a budget of a module or a phase that neither of the two has.
    """
    _check_budgets(before, after, settings)
    locked, now = before.places(), after.places()
    over: list[Shift] = []
    under: list[Shift] = []
    other: list[Shift] = []
    for place, costs in now.items():
        if place in locked:
            _compare(place, locked[place], costs, settings, (over, under, other))
    over.sort(key=lambda shift: -math.inf if shift.relative is None else -shift.relative)
    explained = [replace(s, modules=module_shifts(before, after, s)) for s in over]
    if cause is not None:
        explained = [replace(shift, causes=tuple(cause(shift))) for shift in explained]
    return GateOutcome(
        lock=settings.lock,
        before=before,
        after=after,
        over=tuple(explained),
        under=tuple(under),
        other=tuple(other),
        stale=tuple(_stale(before, after)),
        versions=tuple(_versions(before, after)),
        sources=_sources(before, after),
        strict=strict,
        improvements=settings.improvements,
        rooms=rooms or {},
    )


def _compare(
    place: StepKey,
    before: LockedCosts,
    after: LockedCosts,
    settings: Settings,
    lists: tuple[list[Shift], list[Shift], list[Shift]],
) -> None:
    """Put the shifts of a step into the lists of those over, under, and neither."""
    over, under, other = lists
    held: set[str] = set()
    for budget in chosen(settings.budgets_of(place.target), place.phase):
        paths = _modules(budget, before, after)
        for path in paths:
            first, second = (_value(costs, path, budget.metric) for costs in (before, after))
            for limit in budget.limits:
                shift = Shift(
                    place=place,
                    metric=budget.metric,
                    before=first,
                    after=second or 0,
                    module=path,
                    limit=limit,
                    budget=budget.key,
                )
                if shift.exceeded:
                    over.append(shift)
                elif shift.saved:
                    under.append(shift)
                else:
                    continue
                held |= {budget.metric} if not path else set()
    for metric in TOTALS:
        first, second = before.value(metric), after.value(metric)
        shift = Shift(place=place, metric=metric, before=first, after=second)
        if metric not in held and (shift.exceeded or shift.saved):
            other.append(shift)


def _modules(budget: Budget, *sides: LockedCosts) -> list[str]:
    """The modules of a budget; [""] is the step."""
    if not budget.module:
        return [""]
    return matching(budget.module, dict.fromkeys(path for costs in sides for path in costs.modules))


def _value(costs: LockedCosts, path: str, metric: str) -> float | None:
    """A metric of a module, None where it is not there; of the step for ""."""
    if path and not matching(path, costs.modules):
        return None
    return module_value(costs, path, metric)


def module_shifts(before: Lock, after: Lock, shift: Shift) -> tuple[ModuleShift, ...]:
    """The modules behind a shift: those that moved the same way, and by enough.

    Those that run other ops come first, then those that moved most.  Of a metric that is not known
    by module: those that run other ops.
    """
    target, phase, chip, execution = shift.place
    steps = [lock.targets[target].phases[phase] for lock in (before, after)]
    first, second = (step.costs[chip][execution].modules for step in steps)
    by_module = shift.metric in BY_MODULE
    total = shift.after - (shift.before or 0)
    sign = 1 if total > 0 else -1
    inside = [
        path
        for path in dict.fromkeys([*first, *second])
        if not shift.module or path == shift.module or path.startswith(f"{shift.module}.")
    ]
    shifts = []
    for path in inside:
        ops = _op_changes(*(step.ops.get(path, {}) for step in steps))
        values = [
            side[path].value(shift.metric) if by_module and path in side else None
            for side in (first, second)
        ]
        if not by_module:
            moved = bool(ops)
        else:
            moved = ((values[1] or 0) - (values[0] or 0)) * sign > _PART * abs(total)
        if moved:
            shifts.append(ModuleShift(path, values[0], values[1], ops))

    def order(shift: ModuleShift) -> tuple[bool, float, str]:
        return not shift.ops, sign * ((shift.before or 0) - (shift.after or 0)), shift.path

    return tuple(sorted(shifts, key=order))


_PART = 0.01
"""The least share of a shift for which a module is named."""


def _op_changes(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    counts = sorted(union(before, after, 0))
    return {name: there - here for name, here, there in counts if there != here}


# -- stale locks -----------------------------------------------------------------------------------


def _stale(before: Lock, after: Lock) -> Iterator[str]:
    """Sentences on entries of one of the two alone, and on different requests."""
    for name in before.targets.keys() - after.targets.keys():
        yield f"{name!r} is locked, and is no target any more"
    for name in after.targets.keys() - before.targets.keys():
        yield f"{name!r} is a target, and not locked yet"
    shared = before.targets.keys() & after.targets.keys()
    for name in sorted(shared):
        first, second = (lock.targets[name].asked for lock in (before, after))
        yield from (f"{name!r}: {text}" for text in _asked_otherwise(first, second))
    if before.made_from.depth != after.made_from.depth:
        now, locked = after.made_from.depth, before.made_from.depth
        yield f"modules are asked to a depth of {now}, locked is {locked}"
    pricing = [lock.made_from.pricing for lock in (before, after)]
    yield from _asked_otherwise(*pricing)
    places = [
        {place for place in lock.places() if place.target in shared} for lock in (before, after)
    ]
    for place in sorted(places[0] - places[1]):
        yield f"{place}: locked, and not there any more"
    for place in sorted(places[1] - places[0]):
        yield f"{place}: not locked yet"


def _asked_otherwise(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key, old, new in sorted(union(before, after, None), key=lambda row: row[0]):
        if old != new:
            now, locked = ("not said" if value is None else repr(value) for value in (new, old))
            yield f"{key} is {now}, locked is {locked}"


def _versions(before: Lock, after: Lock) -> Iterator[str]:
    """The differences of two locks besides the code of the models: versions, facts, rules."""
    first, second = before.made_from, after.made_from
    for name in ("rooftrace", "torch"):
        old, new = getattr(first, name), getattr(second, name)
        if old != new:
            yield f"{name} {old} -> {new}"
    for name, old, new in sorted(union(first.libraries, second.libraries, "none")):
        if old != new:
            yield f"{name} {old} -> {new}"
    texts = {"chips": "numbers of chip", "constants": "numbers of constants", "rules": "rules of"}
    for table, text in texts.items():
        old, new = getattr(first, table), getattr(second, table)
        yield from (f"the {text} {n}" for n in sorted(old.keys() & new.keys()) if old[n] != new[n])


def _sources(before: Lock, after: Lock) -> dict[str, tuple[str, ...]]:
    """The source files that differ, by target."""
    differing = {}
    for name in sorted(before.targets.keys() & after.targets.keys()):
        first, second = (lock.targets[name].sources for lock in (before, after))
        files = sorted(file for file, old, new in union(first, second, None) if old != new)
        if files:
            differing[name] = tuple(files)
    return differing


# -- budgets of nothing ----------------------------------------------------------------------------


def _check_budgets(before: Lock, after: Lock, settings: Settings) -> None:
    """Raise BudgetError for a budget that applies to no step."""
    steps = [*before.places().items(), *after.places().items()]
    groups = {id(settings.budgets_of(place.target)): place.target for place, _ in steps}
    for target in groups.values():
        budgets = settings.budgets_of(target)
        budgeted = [s for s in steps if settings.budgets_of(s[0].target) is budgets]
        for budget in budgets:
            _check_used(budget, budgeted)


def _check_used(budget: Budget, steps: Sequence[tuple[StepKey, LockedCosts]]) -> None:
    phases = sorted({place.phase for place, _ in steps})
    if budget.phase and budget.phase not in phases:
        raise BudgetError(
            f"budget {budget.key!r}: no target has the phase {budget.phase!r}; there "
            f"{'is' if len(phases) == 1 else 'are'} {', '.join(phases)}"
        )
    costs = [each for place, each in steps if budget.phase in ("", place.phase)]
    if not budget.module or any(_modules(budget, each) for each in costs):
        return
    names = dict.fromkeys(
        ".".join(path.split(".")[: length + 1])
        for each in costs
        for path in each.modules
        for length in range(path.count(".") + 1)
    )
    close = difflib.get_close_matches(budget.module, names, n=3, cutoff=0.4)
    nearest = f"; the closest are {', '.join(close)}" if close else ""
    raise BudgetError(
        f"budget {budget.key!r}: no module {budget.module!r} is locked{nearest}; modules are "
        f"locked down to `depth` names, and {ROOT} is the model itself"
    )
