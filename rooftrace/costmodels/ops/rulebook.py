"""The registry of pricing rules, and the lookup of the rule that prices an op.

Files of rules import this one; it loads them when first needed.

`@rule("aten.mm")` registers a rule by op name without overload (all overloads) or with it
("aten.add.Tensor"); the more specific one wins.  `ns::op` is accepted for `ns.op`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from rooftrace import _extensions
from rooftrace._extensions import owner, refuse_second, track
from rooftrace.costmodels.ops.cost import (
    FAMILIES,
    FUSION_CLASSES,
    KINDS,
    TRAITS,
    Cost,
    FusionClass,
    check,
    family_of,
    kind_of,
)
from rooftrace.costmodels.ops.opview import OpView
from rooftrace.errors import worded
from rooftrace.hardware.precisions import compute_family

RuleFunction = Callable[[OpView], Cost]


OURS = "rooftrace"
"""The source of this package's rules."""


class DuplicateRuleError(ValueError):
    """Two rules for one op."""


class RuleError(ValueError):
    """A user's rule that raises an error, or that returns no cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The price of one op, and its kind, family and traits."""

    name: str  # of the op, with or without overload
    price: RuleFunction
    fusion: FusionClass  # how a compiler may fuse it
    source: str = OURS
    kind: str | None = None  # None: its cost tells
    family: str | None = None  # None: its cost tells
    label: str | None = None  # of its kernel in reports; None: the op's name
    fused: str | None = None  # label of a kernel of several ops; None: the other ops decide it
    traits: frozenset[str] = frozenset()  # see `kinds`

    @property
    def is_own(self) -> bool:
        """Whether a user or a third-party package registered it."""
        return self.source != OURS

    def cost_of(self, op: OpView, schema: tuple[str, ...] | None = None) -> Cost:
        """The cost of an op.  schema: the names of all its arguments, None where unknown.

        An exception in a user's rule becomes a RuleError, which names the rule, its file and the
        op.  Only such a rule is held to the schema: a rule of this package is for many ops, and
        looks for names that some of them do not have.
        """
        if not self.is_own:
            return self.price(op)
        about = f'rule "{self.name}" ({owner(self.price)}) for {op}: '
        try:
            cost: object = self.price(replace(op, schema=schema))
            for work in cost.work if isinstance(cost, Cost) else ():
                compute_family(work.precision)
        except Exception as error:  # of a user's code
            raise RuleError(f"{about}{worded(error)}") from error
        if not isinstance(cost, Cost):
            raise RuleError(f"{about}it returned {cost!r:.60}; expected a rooftrace.extend.Cost")
        return cost

    def kind_of(self, cost: Cost) -> str:
        """Its kind, for an op of this cost."""
        return self.kind or kind_of(cost, self.fusion)

    def family_of(self, cost: Cost) -> str:
        """Its family, for an op of this cost."""
        return self.family or family_of(cost, self.kind_of(cost))


RULES: dict[str, Rule] = track({})
"""By op."""


_loaded = False


def load_ours() -> None:
    """Import the rules of this package, once; they register themselves."""
    global _loaded
    if not _loaded:
        _loaded = True
        importlib.import_module("rooftrace.costmodels.rules")


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

    kind, family: of the op; by default its cost tells.  label: of its kernel in reports.  fused:
    the label of a kernel of several ops that it leads, by default the same.  A second rule for one
    op raises DuplicateRuleError naming both owners, unless override=True or it is the
    same function defined again (a file or a notebook cell that ran twice); a name without a
    namespace, and an unknown fusion class, kind, family or trait raise ValueError.
    """
    if not names:
        raise ValueError('rule(): expected the name of an op, for example "mylib::fast_gemm"')
    of = f"rule({', '.join(map(repr, names[:1]))}): "
    check(f"{of}fusion", fusion, FUSION_CLASSES)
    check(f"{of}kind", kind, KINDS)
    check(f"{of}family", family, FAMILIES)
    for trait in traits:
        check(f"{of}trait", trait, TRAITS)

    def add(function: RuleFunction) -> RuleFunction:
        if source != OURS:
            load_ours()  # which a user's rule may be for
        for name in names:
            key = name.replace("::", ".")
            if "." not in key:
                raise ValueError(f'rule({name!r}): expected "namespace::{name}"')
            old = RULES.get(key)
            refuse_second(
                f"{name!r} already has a rule",
                old.price if old is not None else None,
                function,
                override=override,
                error=DuplicateRuleError,
            )
            RULES[key] = Rule(
                name=key,
                price=function,
                fusion=fusion,
                source=source,
                kind=kind,
                family=family,
                label=label,
                fused=fused or label,
                traits=frozenset(traits),
            )
        return function

    return add


builtin = partial(rule, source=OURS)
"""`rule` for this package's rules: `@builtin("aten.mm")`."""


# -- lookup ----------------------------------------------------------------------------------------
# The rule of an op, of this package, of third-party packages or of users.


def find_rule(target: str) -> Rule | None:
    """The rule for a full target ("aten.mm.default"), or None."""
    _load()
    return RULES.get(target) or RULES.get(target.rsplit(".", 1)[0])


def all_rules() -> Iterator[Rule]:
    """Every registered rule, by name."""
    _load()
    return iter(sorted(RULES.values(), key=lambda r: r.name))


def users_rules() -> tuple[Rule, ...]:
    """The rules of neither this package nor a third-party package, by name."""
    modules = (module for _, module in _extensions.load("rooftrace.rules"))
    brought = {module.__name__.partition(".")[0] for module in modules}
    others = sorted((rule for rule in RULES.values() if rule.is_own), key=lambda r: r.name)
    return tuple(r for r in others if (r.price.__module__ or "").partition(".")[0] not in brought)


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Undo the registrations of a `with` block at its end: rules, joins, sections and the like."""
    _load()
    with _extensions.only_here():
        yield


def _load() -> None:
    """Import the rules of this package and of third-party packages, once."""
    load_ours()
    _extensions.load("rooftrace.rules")
