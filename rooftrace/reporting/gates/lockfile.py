"""Lock files, settings of the cost gate in pyproject.toml, and the user's project."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, cast

from rooftrace._escapes import to_toml, toml_key
from rooftrace._reading import FileKind, check_name, record_of, text_of, toml_of
from rooftrace._writing import write_bytes
from rooftrace.costmodels.fusion import usual_execution
from rooftrace.diffs.changes import TOTALS
from rooftrace.errors import RequestError
from rooftrace.reporting.commands.calls import PRICED, Kept, PricedTable, TargetTable, stored
from rooftrace.reporting.gates.lock import (
    BY_MODULE,
    DEFAULT,
    DEPTH,
    FORMAT,
    Budget,
    BudgetValue,
    Lock,
    LockedCosts,
    LockedPhase,
    LockedTarget,
    LockError,
    MadeFrom,
    read_budgets,
)
from rooftrace.scripts.launch import understood
from rooftrace.tracer import names

# -- lock files ------------------------------------------------------------------------------------
# TOML that a person reviews: sorted, a line for each fact, equal bytes on every machine.

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
    """Read a lock.  Raises LockError for another file, and for one that is cut or edited."""
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
        text = f"format {made!r:.60}" if "format" in data else "it does not say its format"
        raise _KIND.refused(where, f"{text}: this release reads {FORMAT!r}")
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
    """The lock with its options checked: names and types."""

    def read(table: type, values: Mapping[str, Any], place: str) -> dict[str, Kept]:
        return stored(vars(record_of(table, values, where, _KIND, place)))

    made = lock.made_from
    targets = {
        name: replace(each, asked=read(TargetTable, each.asked, f"targets.{name}.asked"))
        for name, each in lock.targets.items()
    }
    pricing = read(PricedTable, made.pricing, "made_from.pricing")
    return replace(lock, targets=targets, made_from=replace(made, pricing=pricing))


def _sums_differ(costs: LockedCosts) -> str:
    """An error where the modules of some costs do not add up to the totals; "" where they do."""
    for metric in BY_MODULE:
        total = costs.value(metric)
        modules = sum(module.value(metric) for module in costs.modules.values())
        if abs(modules - total) > 1e-9 * total:
            show = TOTALS[metric].write
            return f"{metric} of its modules add up to {show(modules)}, the total is {show(total)}"
    return ""


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock, atomically.  Raises LockError for one that is too long to review."""
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
    for name in ("libraries", "chips", "constants", "rules", "pricing"):
        yield from _table(f"made_from.{name}", getattr(made, name))


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
        comment = f"  # {TOTALS[metric].write(number)}" if number >= 1000 else ""
        yield f"{metric} = {number}{comment}"
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


# -- settings --------------------------------------------------------------------------------------

SECTION = "tool.rooftrace"
TOLD, FAILS = "told", "fail"


_SETTING_KIND = FileKind("pyproject.toml", RequestError)


TargetSettings = make_dataclass(
    "TargetSettings",
    [("budgets", dict[str, BudgetValue], field(default_factory=dict))],
    bases=(TargetTable,),
    frozen=True,
    kw_only=True,
)
"""A table of [tool.rooftrace.targets]: a target, its sizes, and its budgets."""


@dataclass(frozen=True, kw_only=True)
class ToolTable:
    """The keys of [tool.rooftrace]."""

    targets: list[str] | dict[str, str | dict[str, Any]] = field(default_factory=list)
    lock: str = NAME
    chips: list[str] | None = None  # None: the chip of `knobs`, else h200-sxm
    executions: list[str] | None = None  # None: the usual one of each target
    phases: list[str] | None = None  # of every target that names none; None: those that fit
    depth: int = DEPTH
    budgets: dict[str, BudgetValue] = field(default_factory=dict)
    improvements: str = TOLD  # or "fail": a cost that shrank asks for --update

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 99:
            raise RequestError(f"depth={self.depth}: expected 1 to 99 names of modules")
        if self.improvements not in (TOLD, FAILS):
            raise RequestError(
                f"improvements={self.improvements!r:.60}: expected {TOLD!r} or {FAILS!r}"
            )
        for name in ("chips", "executions"):
            if getattr(self, name) == []:
                raise RequestError(f"{name}=[]: expected at least one")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a gate.  Paths in it are relative to its folder."""

    folder: Path
    root: Path  # of the project: files outside of it are not run, read as a lock or written
    # By name, as `stored` keeps them; empty: those of the lock.
    targets: Mapping[str, dict[str, Kept]] = field(default_factory=dict)
    lock: str = NAME
    chips: tuple[str, ...] | None = None  # None: the chip of the knobs, else h200-sxm
    executions: tuple[str, ...] | None = None  # None: `locked`, else the usual one of a target
    locked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by target, as in a lock
    depth: int = DEPTH
    pricing: Mapping[str, Kept] = field(default_factory=dict)  # as `stored` keeps it
    budgets: Mapping[str, tuple[Budget, ...]] = field(default_factory=dict)  # by target
    usual: tuple[Budget, ...] = DEFAULT  # of targets without budgets
    improvements: str = TOLD

    @property
    def path(self) -> Path:
        """The lock."""
        return self.folder / self.lock

    def check_place(self) -> None:
        """Raise RequestError for a lock outside of the project, also where a link leads out."""
        inside(self.root, self.path, f"lock {os.path.relpath(self.path)!r}")

    def code(self, former: Lock | None = None) -> list[tuple[str, str]]:
        """(code that is run, setting that names it), with the code of a former lock.

        Raises RequestError where it lies outside of the project.
        """
        old = {} if former is None else {n: each.asked for n, each in former.targets.items()}
        rows = [
            row
            for targets in (self.targets, old)
            for row in code_of(self.root, self.folder, targets, self.rules)
        ]
        return list(dict.fromkeys(rows))

    @property
    def rules(self) -> list[str]:
        """Files of the user with rules."""
        return cast(list[str], self.pricing.get("rules", []))

    def executions_of(self, target: str) -> tuple[str, ...]:
        """The executions of a target, by its name."""
        named = self.executions or self.locked.get(target)
        return named or (usual_execution(self.targets[target]["target"]),)

    def budgets_of(self, target: str) -> tuple[Budget, ...]:
        """The budgets of a target, by its name."""
        return self.budgets.get(target, self.usual)

    def as_locked(self, lock: Lock) -> Settings:
        """These settings with the requests of a lock, where they name no targets themselves."""
        if self.targets:
            return self
        made = lock.made_from
        priced = [step.costs for t in lock.targets.values() for step in t.phases.values()]
        chips = tuple(dict.fromkeys(chip for by_chip in priced for chip in by_chip))
        return replace(
            self,
            targets={name: target.asked for name, target in lock.targets.items()},
            chips=None if "system" in made.pricing else chips,
            executions=None,
            locked={name: target.executions for name, target in lock.targets.items()},
            depth=made.depth,
            pricing=made.pricing,
        )


def load_settings(start: Path) -> Settings:
    """The settings in the pyproject.toml of a folder's project; else the defaults, in this folder.

    Raises RequestError and BudgetError.
    """
    root = project_of(start)
    path = root / FILE
    if path.is_file():
        tool = toml_of(text_of(path, _SETTING_KIND), str(path), _SETTING_KIND).get("tool", {})
        if isinstance(tool, dict) and "rooftrace" in tool:
            return read_settings(tool["rooftrace"], root)
    return Settings(folder=start.resolve(), root=root)


def read_settings(data: Any, folder: Path) -> Settings:
    """The settings in the table [tool.rooftrace] of a folder's pyproject.toml."""
    where = str(folder / FILE)
    if not isinstance(data, dict):
        raise RequestError(f"{where}: {SECTION}={data!r:.60}: expected a table")
    table = make_dataclass("PricedToolTable", [], bases=(ToolTable, PricedTable), frozen=True)
    section: ToolTable = record_of(table, data, where, _SETTING_KIND, SECTION)
    inside(folder, folder / section.lock, f"{where}: {SECTION}.lock = {section.lock!r}")
    named = section.targets
    listed = named if isinstance(named, dict) else {name: name for name in named}
    place = f"{where}: {SECTION}"
    targets: dict[str, Any] = {
        name: record_of(
            TargetSettings,
            {"target": target} if isinstance(target, str) else target,
            where,
            _SETTING_KIND,
            f"{SECTION}.targets.{name}",
        )
        for name, target in listed.items()
    }
    usual = read_budgets(section.budgets, f"{place}.budgets")
    budgets = {
        name: (*usual, *read_budgets(each.budgets, f"{place}.targets.{name}.budgets"))
        for name, each in targets.items()
        if each.budgets
    }
    phases = section.phases
    return Settings(
        folder=folder,
        root=folder,
        targets={
            name: stored({**vars(each), "phases": each.phases or phases, "budgets": None})
            for name, each in targets.items()
        },
        lock=section.lock,
        chips=None if section.chips is None else tuple(section.chips),
        executions=None if section.executions is None else tuple(section.executions),
        depth=section.depth,
        pricing=stored({name: getattr(section, name) for name in PRICED}),
        budgets=budgets,
        usual=usual or DEFAULT,
        improvements=section.improvements,
    )


# -- projects --------------------------------------------------------------------------------------


FILE = "pyproject.toml"
_MARKS = (FILE, ".git")


def project_of(folder: Path) -> Path:
    """The nearest folder with a pyproject.toml or .git, this one or one above it; else this one.

    Raises RequestError for one above that does not belong to the user this folder belongs to: in a
    shared folder anyone could put such a file over the folders of others.
    """
    folder = folder.resolve()
    for root in (folder, *folder.parents):
        for mark in (root / name for name in _MARKS):
            if not os.path.lexists(mark):
                continue
            owners = {path.lstat().st_uid for path in (folder, root, mark)}
            if root != folder and len(owners) > 1:
                raise RequestError(
                    f"{mark}: it does not belong to the user to whom {folder} belongs, so its "
                    f"project is not taken for yours; stand in {root} to use it, or put a {FILE} "
                    "into your own folder"
                )
            return root
    return folder


def inside(root: Path, path: Path, named: str) -> Path:
    """The place of a path, links followed.  Raises RequestError where that is not in a project.

    named: the setting that names the path, for the message.
    """
    check_name(path)
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(root):
        raise RequestError(
            f"{named}: {place} lies outside of the project {root}, and what its files name is run, "
            "read as a lock or written only inside of it; stand in the other project, or copy the "
            "file into this one"
        )
    return place


def code_of(
    root: Path, folder: Path, targets: Mapping[str, Mapping[str, Kept]], rules: Sequence[str]
) -> list[tuple[str, str]]:
    """(code of targets and rules, setting that names it).

    Raises RequestError for a file outside of the project.  A dotted name is imported as Python
    does: from the project, else from the installed packages.
    """
    code = [(path, "rules") for path in rules]
    for path in rules:
        inside(root, folder / path, f"rules {path!r}")
    for name, asked in targets.items():
        by = f"target {name}"
        for path in _files_of(asked, folder):
            inside(root, folder / path, f"{by} = {asked['target']!r}")
        target, trusted = str(asked["target"]), "trust_remote_code" in asked
        if names.names_code(target) or trusted:
            code.append((target, f"{by}{', with code of its repository' * trusted}"))
    return code


def _files_of(asked: Mapping[str, Kept], folder: Path) -> Iterator[str]:
    """Files of the project whose code a target runs, as far as its name tells."""
    target = str(asked["target"])
    if names.is_script(target):
        launch = understood(names.ScriptCommand.of(target).words, folder)
        yield from _module(launch.program, folder) if launch.module else [launch.program]
    elif names.names_code(target):
        where = names.where_of(target)
        yield from [where] if where.endswith(".py") else _module(where, folder)
    elif "trust_remote_code" in asked and not target.startswith("hf:"):
        yield target


def _module(name: str, folder: Path) -> Iterator[str]:
    path = name.replace(".", "/")
    for file in (path.partition("/")[0], f"{path}.py", path, f"{path}/__init__.py"):
        if (folder / file).exists():
            yield file
