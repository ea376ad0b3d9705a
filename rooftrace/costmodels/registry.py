"""Which function prices which op.

`@rule("aten.mm")` registers a rule by op name without overload (all overloads) or with it
("aten.add.Tensor"); the more specific one wins.  `ns::op` is accepted for `ns.op`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rooftrace.costmodels.cost import Cost, OpView

RuleFunction = Callable[[OpView], Cost]
FusionClass = Literal["opaque", "pointwise", "reduction", "gather", "free"]
"""How a compiler may fuse the op.

opaque: its own kernel (matrix products, sorts, scatters).  pointwise: output[i] needs inputs[i]
(after broadcasting), copies and casts included.  reduction: reads rows, may write rows back (norms,
softmax).  gather: pointwise with indirect reads (embedding, index).  free: no kernel at all.
"""


class DuplicateRuleError(ValueError):
    """Two rules for one op."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one op is priced: the function, how it may fuse, and who says so."""

    name: str
    price: RuleFunction
    fusion: FusionClass
    source: str = "rooftrace"


_RULES: dict[str, Rule] = {}
_loaded = False


def rule(
    *names: str, fusion: FusionClass = "opaque", source: str = "user", override: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function `price(op: OpView) -> Cost` for these ops.

    A second rule for one op raises DuplicateRuleError naming both owners, unless override=True or
    it is the same function defined again (a file or a notebook cell that ran twice); a name without
    a namespace raises ValueError.
    """

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
            _RULES[key] = Rule(key, function, fusion, source)
        return function

    return register


def builtin(*names: str, fusion: FusionClass = "opaque") -> Callable[[RuleFunction], RuleFunction]:
    """`rule` for this package's own rules."""
    return rule(*names, fusion=fusion, source="rooftrace")


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
