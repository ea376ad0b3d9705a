"""Which rule prices an op, of this package, of third-party packages and of users."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rooftrace import _extensions
from rooftrace.costmodels.registry.rulebook import RULES, Rule, load_ours


def find_rule(target: str) -> Rule | None:
    """The rule for a full target ("aten.mm.default"), or None."""
    _load()
    return RULES.get(target) or RULES.get(target.rsplit(".", 1)[0])


def all_rules() -> Iterator[Rule]:
    """Every registered rule, by name."""
    _load()
    return iter(sorted(RULES.values(), key=lambda r: r.name))


def users_rules() -> tuple[Rule, ...]:
    """The rules that neither this package nor a third-party package brought, by name."""
    modules = (module for _, module in _extensions.load("rooftrace.rules"))
    brought = {module.__name__.partition(".")[0] for module in modules}
    own = sorted((rule for rule in RULES.values() if rule.is_own), key=lambda r: r.name)
    return tuple(r for r in own if (r.price.__module__ or "").partition(".")[0] not in brought)


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Undo at the end of the `with` block whatever it registers or replaces: rules, joins,
    sections and the like."""
    _load()
    with _extensions.only_here():
        yield


def _load() -> None:
    """Import the rules of this package and of third-party packages, once."""
    load_ours()
    _extensions.load("rooftrace.rules")
