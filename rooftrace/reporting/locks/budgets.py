"""Budgets: what may grow by how much, and what must stay below a limit.

A budget is a line of [tool.rooftrace.budgets] in pyproject.toml:

    time = "5%"                            # the whole step, in every phase: 5 % more than the lock
    "training.memory" = "1 GiB"            # one phase: at most 1 GiB more than the lock
    "decode.time" = "<= 20 ms"             # a limit, whatever the lock says
    "model.layers.*.mlp flops" = 0         # a module, or all that differ only in numbers
    "*.attention training.time" = ["2%", "<= 5 ms"]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from rooftrace.errors import hint
from rooftrace.reporting.locks.records import BY_MODULE, WAITING, LockedCosts
from rooftrace.tracer.changes import Limit
from rooftrace.tracer.changes.limits import amount_of
from rooftrace.tracer.changes.metrics import TOTALS

Said: TypeAlias = str | int | float | list[str | int | float]
"""What stands behind a key of a table of budgets."""


class BudgetError(ValueError):
    """A budget that cannot be read, or whose module is not there."""


SAME = Limit("0", 0.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a metric, of the whole step or of modules, in all phases or in one."""

    key: str  # as the user wrote it
    metric: str
    limits: tuple[Limit, ...]
    phase: str = ""  # "": all of them
    module: str = ""  # a starred path or a pattern of paths; "": the whole step


DEFAULT = tuple(Budget(metric, metric, (SAME,)) for metric in TOTALS)
"""The budgets of a repository that names none: no total may grow."""

_KEY = re.compile(r"(?:(?P<module>\S+)\s+)?(?:(?P<phase>[^\s.]+)\.)?(?P<metric>\w+)")


def read_budgets(table: Mapping[str, Said], where: str) -> tuple[Budget, ...]:
    """The budgets of a table.  Raises BudgetError, which quotes the line."""
    return tuple(_budget(key, said, where) for key, said in table.items())


def _budget(key: str, said: Said, where: str) -> Budget:
    match = _KEY.fullmatch(key.strip())
    metric = match["metric"] if match else ""
    if match is None or metric not in TOTALS:
        raise BudgetError(
            f"{where}: {key!r:.80}: expected [MODULE ][PHASE.]METRIC with METRIC one of "
            f'{", ".join(TOTALS)}{hint(metric, tuple(TOTALS))}; for example "time", '
            '"training.memory" or "model.layers.*.mlp flops"'
        )
    if match["module"] and metric not in BY_MODULE:
        raise BudgetError(
            f"{where}: {key!r:.80}: {metric} is known of the whole step only; of a module "
            f"{', '.join(BY_MODULE)}"
        )
    each = said if isinstance(said, list) else [said]
    limits = tuple(read_limit(metric, limit, f"{where}: {key!r:.80}") for limit in each)
    return Budget(key.strip(), metric, limits, match["phase"] or "", match["module"] or "")


def read_limit(metric: str, said: str | int | float, where: str) -> Limit:
    """ "5%", "1 GiB" and 0 are how much a metric may grow; "<= 20 ms" is the most that it may be.

    Raises BudgetError.
    """
    text = str(said).strip()
    ceiling = text.startswith("<=")
    amount = text.removeprefix("<=").strip()
    try:
        if isinstance(said, bool):
            raise ValueError("a truth value")
        number, relative = amount_of(amount, TOTALS[metric])
        if math.isfinite(number) and number >= 0 and not (relative and ceiling):
            return Limit(text, number, relative, ceiling, metric)
    except ValueError:
        pass
    example = _EXAMPLES[metric]
    raise BudgetError(
        f'{where} = {said!r:.60}: expected how much it may grow, as "5%", "{example}" or 0, or '
        f'the most that it may be, as "<= {example}"'
    )


def in_full(metric: str, value: float) -> str:
    """ "65,536 (65.5 kFLOP)": a count also as it is, so that two can be told apart."""
    short = TOTALS[metric].write(value)
    return f"{value:,} ({short})" if isinstance(value, int) and value >= 1000 else short


def most(metric: str, said: str | int | float, where: str) -> Limit:
    """The most that a metric may be: "<= 20 ms", or a number in SI units.  Raises BudgetError."""
    if isinstance(said, (int, float)) and not isinstance(said, bool) and 0 <= said < math.inf:
        return Limit(f"<= {in_full(metric, said)}", said, ceiling=True, metric=metric)
    limit = read_limit(metric, said, where)
    if not limit.ceiling:
        raise BudgetError(
            f'{where} = {said!r:.60}: there is no lock to grow from; expected "<= {said}"'
        )
    return limit


_EXAMPLES = {
    "time": "2 ms",
    "flops": "1 GFLOP",
    "bytes": "100 MB",
    "memory": "1 GiB",
    "params": "2 M",
    "kernels": "10",
}


# -- modules ---------------------------------------------------------------------------------------


def module_value(costs: LockedCosts, path: str, metric: str) -> float:
    """A metric of a module and all inside it; "" is the whole step."""
    if not path:
        return costs.value(metric)
    inside = f"{path}."
    return sum(
        module.value(metric)
        for name, module in costs.modules.items()
        if name == path or name.startswith(inside)
    )


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The modules that a pattern names, among locked paths and the modules around them.

    "*" stands for any one name, and for the numbers of layers.
    """
    names = pattern.split(".")
    modules: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        if len(parts) >= len(names) and all(
            fnmatchcase(part, name) for part, name in zip(parts, names, strict=False)
        ):
            modules[".".join(parts[: len(names)])] = None
    modules.pop(WAITING, None)
    return list(modules)


def chosen(budgets: Sequence[Budget], phase: str) -> list[Budget]:
    """The budgets of a phase.  One that names the phase holds in place of one for all phases;
    a later one in place of an earlier one."""
    kept: dict[tuple[str, str], Budget] = {}
    for specific in (False, True):
        for budget in budgets:
            if budget.phase in ((phase,) if specific else ("",)):
                kept[budget.module, budget.metric] = budget
    return list(kept.values())
