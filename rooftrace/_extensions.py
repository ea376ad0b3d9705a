"""Extensions by users and other packages: rules, joins, chips, sections, sources, phases.

A package names a module of its own in the entry points of a group:

    [project.entry-points."rooftrace.rules"]
    acme = "acme_ops.rooftrace"        # a module with @rooftrace.extend.rule functions

Groups are `rooftrace.rules`, `rooftrace.joins` (modules with @rooftrace.extend.fusion functions),
`rooftrace.sections` (@rooftrace.extend.section), `rooftrace.sources` (@rooftrace.extend.source),
`rooftrace.phases` (@rooftrace.extend.phase) and `rooftrace.chips` (packages whose folder holds chip
files).  A group is loaded once, when it is first needed.  An entry that cannot be loaded is left
out, and `failures` has the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from rooftrace.errors import RequestError

CHIPS = "rooftrace.chips"
MODULES = tuple(f"rooftrace.{kind}" for kind in ("rules", "joins", "sections", "sources", "phases"))
"""Groups whose entry points name modules, which register what they define."""

Registry = TypeVar("Registry", dict[Any, Any], list[Any])

_REGISTRIES: list[dict[Any, Any] | list[Any]] = []
_FAILURES: dict[str, list[str]] = {group: [] for group in (*MODULES, CHIPS)}


def owner(function: Callable[..., Any]) -> str:
    """The place of a function: "mylib.rules.rope:12", or "rope in my_rules.py:12"."""
    code = getattr(function, "__code__", None)
    where = f":{code.co_firstlineno}" if code else ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = function.__module__ or "<none>"
    if code and module.startswith("<"):  # a file that is no module
        return f"{name} in {code.co_filename}{where}"
    return f"{module}.{name}{where}"


def same_definition(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """Whether two functions are the same one, defined again (a file or notebook cell ran twice)."""
    names = [(f.__module__, getattr(f, "__qualname__", "")) for f in (old, new)]
    return names[0] == names[1] and "<lambda>" not in names[0][1]


def refuse_second(
    there: str,
    old: Callable[..., Any] | None,
    new: Callable[..., Any],
    *,
    override: bool,
) -> None:
    """Raise RequestError if `new` would replace `old` without override=True, and name both owners.

    there: the beginning of the message, for example "'mylib.rope' already has a rule".  The same
    function defined again may replace itself.
    """
    if old is not None and not override and not same_definition(old, new):
        raise RequestError(
            f"{there}, {owner(old)}; {owner(new)} would be a second one: pass override=True to "
            "replace it"
        )


def track(registry: Registry) -> Registry:
    """A registry, which `only_here` restores."""
    _REGISTRIES.append(registry)
    return registry


RUN: list[str] = track([])
"""Files that were run for what they register (`--rules`)."""


@contextlib.contextmanager
def only_here() -> Iterator[None]:
    """Undo at the end of the `with` block its registrations and replacements."""
    for group in MODULES:
        load(group)  # registrations of packages stay
    before = [registry.copy() for registry in _REGISTRIES]
    try:
        yield
    finally:
        for registry in _REGISTRIES:
            registry.clear()
        for registry, content in zip(_REGISTRIES, before, strict=False):
            if isinstance(registry, dict):
                registry.update(content)
            else:
                registry.extend(content)


def registered() -> list[Any]:
    """Copies of the registries that have something now."""
    return [registry.copy() for registry in _REGISTRIES if registry]


@cache
def load(group: str) -> tuple[tuple[str, Any], ...]:
    """(name of the package, object that its entry point names) of a group, loaded once.

    An entry point that raises is left out; `failures` names it.
    """
    from importlib.metadata import entry_points

    loaded = []
    for point in entry_points(group=group):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            loaded.append((package, point.load()))
        except Exception as error:  # whatever the code of another package may raise
            reason = f"{type(error).__name__}: {error}"
            _FAILURES[group].append(
                f'package {package}: entry point "{point.name}" of {group} ({point.value}) cannot '
                f"be loaded, so nothing of it is used: {reason}"
            )
    return tuple(loaded)


def failures(*groups: str) -> tuple[str, ...]:
    """A sentence for each entry point of these groups that could not be loaded so far."""
    return tuple(sentence for group in groups for sentence in _FAILURES[group])
