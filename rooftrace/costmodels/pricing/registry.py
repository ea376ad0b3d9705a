"""Which function prices which op.

`@rule("aten.mm")` registers a rule by op name without overload (all overloads) or with it
("aten.add.Tensor"); the more specific one wins.  `ns::op` is accepted for `ns.op`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from rooftrace.costmodels.pricing.cost import Cost, OpView
from rooftrace.costmodels.pricing.kinds import (
    FAMILIES,
    FUSION_CLASSES,
    KINDS,
    TRAITS,
    FusionClass,
    check,
    family_of,
    kind_of,
)

RuleFunction = Callable[[OpView], Cost]


class DuplicateRuleError(ValueError):
    """Two rules for one op."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one op is priced, and what it is.

    name: of the op.  price: its cost.  fusion: how a compiler may fuse it.  source: who says so.
    kind, family: None where its cost tells.  label: what reports call its kernel; None: the op's
    name.  fused: what they call a kernel of several ops that this one leads; None: what the other
    ops say.  traits: see `kinds`.
    """

    name: str
    price: RuleFunction
    fusion: FusionClass
    source: str = "rooftrace"
    kind: str | None = None
    family: str | None = None
    label: str | None = None
    fused: str | None = None
    traits: frozenset[str] = frozenset()

    def kind_of(self, cost: Cost) -> str:
        """Its kind, for an op of this cost."""
        return self.kind or kind_of(cost, self.fusion)

    def family_of(self, cost: Cost) -> str:
        """Its family, for an op of this cost."""
        return self.family or family_of(cost, self.kind_of(cost))


_RULES: dict[str, Rule] = {}
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
    if not names:
        raise ValueError('rule(): expected the name of an op, for example "mylib::fast_gemm"')
    of = f"rule({', '.join(map(repr, names[:1]))}): "
    check(f"{of}fusion", fusion, FUSION_CLASSES)
    check(f"{of}kind", kind, KINDS)
    check(f"{of}family", family, FAMILIES)
    for trait in traits:
        check(f"{of}trait", trait, TRAITS)

    def register(function: RuleFunction) -> RuleFunction:
        if source == "user":
            _load()
        for name in names:
            key = name.replace("::", ".")
            if "." not in key:
                raise ValueError(f'rule({name!r}): expected "namespace::{name}"')
            old = _RULES.get(key)
            if old is not None and not override and not _again(old.price, function):
                raise DuplicateRuleError(
                    f"{name!r} already has a rule, {_owner(old.price)}; {_owner(function)} would "
                    "be a second one: pass override=True to replace it"
                )
            _RULES[key] = Rule(
                key,
                function,
                fusion,
                source,
                kind=kind,
                family=family,
                label=label,
                fused=fused or label,
                traits=frozenset(traits),
            )
        return function

    return register


def builtin(
    *names: str,
    fusion: FusionClass = "opaque",
    kind: str | None = None,
    family: str | None = None,
    label: str | None = None,
    fused: str | None = None,
    traits: Collection[str] = (),
) -> Callable[[RuleFunction], RuleFunction]:
    """`rule` for this package's own rules."""
    return rule(
        *names,
        fusion=fusion,
        kind=kind,
        family=family,
        label=label,
        fused=fused,
        traits=traits,
        source="rooftrace",
    )


def find_rule(target: str) -> Rule | None:
    """The rule for a full target ("aten.mm.default"), or None."""
    _load()
    return _RULES.get(target) or _RULES.get(target.rsplit(".", 1)[0])


def all_rules() -> Iterator[Rule]:
    """Every registered rule, by name."""
    _load()
    return iter(sorted(_RULES.values(), key=lambda r: r.name))


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Rules that are registered inside are gone afterwards, and replaced ones are back."""
    _load()
    before = dict(_RULES)
    try:
        yield
    finally:
        _RULES.clear()
        _RULES.update(before)


def _again(old: RuleFunction, new: RuleFunction) -> bool:
    """Whether two functions are one, defined twice."""
    names = [(f.__module__, getattr(f, "__qualname__", "")) for f in (old, new)]
    return names[0] == names[1] and "<lambda>" not in names[0][1]


def _owner(function: RuleFunction) -> str:
    code = getattr(function, "__code__", None)
    where = f":{code.co_firstlineno}" if code else ""
    return f"{function.__module__}.{function.__qualname__}{where}"


def _load() -> None:
    global _loaded
    if not _loaded:
        _loaded = True
        importlib.import_module("rooftrace.costmodels.rules")
