"""Which rule prices an op, of this package, of third-party packages and of users.

`@rule("aten.mm")` registers a rule by op name without overload (all overloads) or with it
("aten.add.Tensor"); the more specific one wins.  `ns::op` is accepted for `ns.op`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator

from rooftrace import _extensions
from rooftrace.costmodels.registry.kinds import FusionClass
from rooftrace.costmodels.registry.rulebook import RULES, Rule, RuleFunction, register

_loaded = False


def rule(
    *names: str,
    fusion: FusionClass = "opaque",
    kind: str | None = None,
    family: str | None = None,
    label: str | None = None,
    fused: str | None = None,
    traits: Collection[str] = (),
    source: str = "user",
    override: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function `price(op: OpView) -> Cost` for these ops.

    kind, family: what the op is; by default its cost tells.  label: what reports call its kernel.
    fused: what they call a kernel of several ops that it leads, by default the label.  A second
    rule for one op raises DuplicateRuleError naming both owners, unless override=True or it is the
    same function defined again (a file or a notebook cell that ran twice); a name without a
    namespace, and an unknown fusion class, kind, family or trait raise ValueError.
    """
    registered = register(
        *names,
        fusion=fusion,
        kind=kind,
        family=family,
        label=label,
        fused=fused,
        traits=traits,
        source=source,
        override=override,
    )

    def after_ours(function: RuleFunction) -> RuleFunction:
        _load_ours()
        return registered(function)

    return after_ours


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


def _load_ours() -> None:
    """Import the rules of this package, once; they register themselves."""
    global _loaded
    if not _loaded:
        _loaded = True
        importlib.import_module("rooftrace.costmodels.rules")


def _load() -> None:
    """Import the rules of this package and of third-party packages, once."""
    _load_ours()
    _extensions.load("rooftrace.rules")
