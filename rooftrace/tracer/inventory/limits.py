"""Conditions on what may grow: "drift>1%", "params>0"; read, and held against two numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import NamedTuple

from rooftrace.errors import RequestError, hint
from rooftrace.hardware.units import UnitError, format_share, parse

SHARES = ("drift",)
"""Metrics that are shares themselves: "%" is their unit."""
_GROWING = ("params", "bytes")
"""Metrics that may be said as a share of what was before."""
_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*([0-9.eE+-]+)\s*(.*?)\s*")


class Limit(NamedTuple):
    """A condition: what may not grow beyond which number."""

    metric: str
    most: float
    relative: bool  # to what was before
    text: str

    def grown(self, before: float, after: float) -> str:
        """A sentence where the growth passes the limit; else nothing."""
        growth = after - before
        if self.relative:
            growth = growth / before if before else (math.inf if after else 0.0)
        if not growth > self.most:
            return ""
        share = self.relative or self.metric in SHARES
        amount = format_share(growth) if share else f"{growth:,.0f}"
        return f"{self.metric} grew by {amount}, more than {self.text!r} allows"


def parse_limit(text: str, metrics: Collection[str], of: str) -> Limit:
    """The limit that a condition says.  Raises RequestError for a metric that is not there.

    of: what is compared, in words.
    """
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in metrics:
        close = hint(match[1], metrics) if match else ""
        raise RequestError(
            f"--fail-on {text!r}: of {of} expected METRIC>LIMIT with METRIC one of "
            f'{", ".join(metrics)}, for example "params>1%"{close}'
        )
    metric, number, unit = match.groups()
    try:
        if unit == "%" and metric in (*SHARES, *_GROWING):
            return Limit(metric, float(number) / 100, metric in _GROWING, text)
        if metric == "bytes":
            return Limit(metric, parse(f"{number} {unit}", "byte"), False, text)
        if unit:
            raise ValueError(f"{metric} is a number without a unit, got {unit!r:.20}")
        return Limit(metric, float(number), False, text)
    except (UnitError, ValueError) as error:
        raise RequestError(f"--fail-on {text!r}: {error}") from None
