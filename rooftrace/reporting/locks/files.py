"""The file of a lock: TOML that a person reviews, sorted, a line for each fact.

The same costs are the same bytes on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooftrace._escapes import to_toml, toml_key
from rooftrace._reading import FileKind, record_of, text_of, toml_of
from rooftrace._writing import write_bytes
from rooftrace.reporting.locks.records import (
    BY_MODULE,
    FORMAT,
    Lock,
    LockedCosts,
    LockedPhase,
    LockedTarget,
    LockError,
    MadeFrom,
)
from rooftrace.reporting.requests.kept import Kept, PricedTable, TargetTable, said
from rooftrace.tracer.changes.metrics import TOTALS

NAME = "costs.lock"
_AGAIN = "`rooftrace lock` writes it anew"
_KIND = FileKind("lock", LockError, _AGAIN)
_MOST = 1 << 20
"""Bytes of a lock: no person reviews more, and TOML is slow to read."""
_HEAD = """\
# What the models of this repository cost, as rooftrace counts it.  Made by `rooftrace lock`.
# A change that is meant: `rooftrace check --update`, then review the difference.
"""
_CONFLICT = re.compile(rb"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)


def load_lock(path: Path) -> Lock:
    """Read a lock.  Raises LockError for a file that is none, is cut off, or contradicts itself."""
    where = str(path)
    try:
        raw = text_of(path, _KIND)
    except FileNotFoundError:
        raise LockError(
            f"{where}: there is no such file; `rooftrace lock` writes it, for the targets of "
            "[tool.rooftrace] in pyproject.toml, or for those that are named: "
            "`rooftrace lock TARGET...`"
        ) from None
    if _CONFLICT.search(raw):
        raise LockError(f"{where}: it has marks of a merge; take either side, then {_AGAIN}")
    data = toml_of(raw, where, _KIND)
    made = data.get("format")
    if made != FORMAT:
        said = f"format {made!r:.60}" if "format" in data else "it does not say its format"
        raise _KIND.refused(where, f"{said}: this release reads {FORMAT!r}")
    count = data.pop("steps", None)
    lock = record_of(Lock, data, where, _KIND)
    lock = _checked(lock, where)
    places = lock.places()
    if count != len(places):
        reason = f"it says steps = {count!r:.60} and holds {len(places)}: it was cut off or edited"
        raise _KIND.refused(where, reason)
    for place, costs in places.items():
        problem = _sums_differ(costs)
        if problem:
            raise _KIND.refused(where, f"{place}: {problem}: it was cut off or edited")
    return lock


def _checked(lock: Lock, where: str) -> Lock:
    """A lock whose options are those that there are, each of its type."""

    def read(table: type, values: Mapping[str, Any], place: str) -> dict[str, Kept]:
        return said(vars(record_of(table, values, where, _KIND, place)))

    made = lock.made_from
    targets = {
        name: replace(each, asked=read(TargetTable, each.asked, f"targets.{name}.asked"))
        for name, each in lock.targets.items()
    }
    pricing = read(PricedTable, made.pricing, "made_from.pricing")
    return replace(lock, targets=targets, made_from=replace(made, pricing=pricing))


def _sums_differ(costs: LockedCosts) -> str:
    """How the modules of some costs do not add up to the totals; "" where they do."""
    for metric in BY_MODULE:
        total = costs.value(metric)
        modules = sum(module.value(metric) for module in costs.modules.values())
        if abs(modules - total) > 1e-9 * total:
            show = TOTALS[metric].write
            return f"{metric} of its modules add up to {show(modules)}, the total is {show(total)}"
    return ""


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock, whole or not at all.  Raises LockError for one that is too long to review."""
    text = lock_text(lock).encode()
    if len(text) > _MOST:
        raise LockError(
            f"{path}: the lock has {len(text):,} bytes, and {_MOST:,} are allowed; lock fewer "
            f"targets in it, or a smaller depth than {lock.made_from.depth}"
        )
    write_bytes(path, text)


def lock_text(lock: Lock) -> str:
    """A lock as text."""
    lines = [_HEAD, f"format = {to_toml(lock.format)}", f"steps = {len(lock.places())}", ""]
    lines += _made_from(lock.made_from)
    for name, target in sorted(lock.targets.items()):
        lines += _target(f"targets.{toml_key(name)}", target)
    return "\n".join(lines).rstrip("\n") + "\n"


def _made_from(made: MadeFrom) -> Iterator[str]:
    yield "[made_from]"
    yield f"rooftrace = {to_toml(made.rooftrace)}"
    yield f"torch = {to_toml(made.torch)}"
    yield f"depth = {made.depth}  # names of modules, numbers of layers not counted"
    yield ""
    tables: dict[str, Mapping[str, Any]] = {
        "libraries": made.libraries,
        "chips": made.chips,
        "constants": made.constants,
        "rules": made.rules,
        "pricing": made.pricing,
    }
    for name, table in tables.items():
        yield from _table(f"made_from.{name}", table)


def _target(where: str, target: LockedTarget) -> Iterator[str]:
    yield from _table(f"{where}.asked", target.asked)
    yield from _table(f"{where}.sources", target.sources)
    for name, phase in sorted(target.phases.items()):
        yield from _phase(f"{where}.phases.{toml_key(name)}", phase)


def _phase(where: str, phase: LockedPhase) -> Iterator[str]:
    yield from _table(f"{where}.ops", phase.ops)
    for chip, by_execution in sorted(phase.costs.items()):
        for execution, costs in sorted(by_execution.items()):
            yield from _costs(f"{where}.costs.{toml_key(chip)}.{toml_key(execution)}", costs)


def _costs(where: str, costs: LockedCosts) -> Iterator[str]:
    yield f"[{where}]"
    yield f"time = {to_toml(costs.time)}"
    for metric in ("flops", "bytes", "memory", "params", "kernels"):
        number = costs.value(metric)
        said = f"  # {TOTALS[metric].write(number)}" if number >= 1000 else ""
        yield f"{metric} = {number}{said}"
    yield ""
    modules = {
        path: {metric: getattr(module, metric) for metric in BY_MODULE}
        for path, module in costs.modules.items()
    }
    yield from _table(f"{where}.modules", modules)


def _table(where: str, table: Mapping[str, Any]) -> Iterator[str]:
    """A table with a line for each key, sorted; nothing for an empty one."""
    if not table:
        return
    yield f"[{where}]"
    for name, value in sorted(table.items()):
        yield f"{toml_key(name)} = {to_toml(value)}"
    yield ""
