"""Options as files keep them: what a lock and a project say of targets and of prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any, TypeAlias

from rooftrace.reporting.requests import options
from rooftrace.reporting.requests.options import options_of
from rooftrace.reporting.requests.pricing import PLAIN, ExecutionOptions
from rooftrace.reporting.requests.workload import PrecisionOptions, Workload

Kept: TypeAlias = options.Plain | list[str] | dict[str, options.Plain]
"""The value of an option in a file."""
_OF_STEPS = ("chip", "execution")
"""Options of prices that stand with the costs of each step."""
PRICED = {
    **{o.name: o.kept for o in options_of(ExecutionOptions) if o.name not in _OF_STEPS},
    "factors": dict[str, options.Plain],  # fields of every execution model
    "rules": list[str],  # files of the user with rules
}
"""How every target is priced: the type of each value by its name."""
ASKED = {o.name: o.kept for o in (*options_of(Workload), *options_of(PrecisionOptions))}
"""How a target is run: the type of each value by its name."""
# As locks say them: an optimizer that is named stands there, the usual one too.
_USUAL = {**vars(PLAIN), **vars(Workload()), "tf32": False, "optimizer": None}
PricedTable = make_dataclass(
    "PricedTable", [(*each, None) for each in PRICED.items()], frozen=True, kw_only=True
)
TargetTable = make_dataclass(
    "TargetTable",
    [("target", str), *((*each, None) for each in ASKED.items())],
    frozen=True,
    kw_only=True,
)


def said(values: Mapping[str, Any]) -> dict[str, Kept]:
    """Values of options as a lock keeps them, without those that hold where nothing is asked."""
    plain = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
    return {n: v for n, v in plain.items() if v not in (None, [], {}, _USUAL.get(n))}
