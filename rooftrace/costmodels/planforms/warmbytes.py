"""How many bytes of each kernel a last-level cache still holds, for any sizes of a plan.

Which touches of a storage follow each other is the same within one structure; only their distances
in bytes change with the sizes.  So a plan is walked once, with vectors of coefficients in place of
bytes, and the vectors are evaluated at points.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.costs import Access
from rooftrace.costmodels.kernels.reuse import WarmPart, warm_columns, warm_parts
from rooftrace.costmodels.planforms.points import Array, Points
from rooftrace.costmodels.planning import Plan

if TYPE_CHECKING:
    from rooftrace.costmodels.planforms.kernelforms import KernelForm, Traffic


class WarmForm:
    """The bytes of each kernel group that a cache may hold, as sums of terms of the sizes.

    kernels: in the order of the groups of `planned`, a plan of the same structure.  over: numbers
    of an access at points.
    """

    def __init__(
        self,
        kernels: Sequence[KernelForm],
        planned: Plan,
        over: Callable[[Traffic, Points], Array],
    ) -> None:
        self._over = over
        self._terms: dict[Hashable, int] = {}
        self._wholes: list[Traffic | None] = []  # of each term the access it is; None: a monomial
        vectors: dict[tuple[int, Access], dict[int, float]] = {}
        for group, kernel in enumerate(kernels):
            accesses = planned.costs[group].traffic
            for access, traffic in zip(accesses, kernel.traffic, strict=True):
                vectors[group, access] = self._vector(traffic)
        dense = {key: np.zeros(len(self._terms)) for key in vectors}
        for key, entries in vectors.items():
            for place, value in entries.items():
                dense[key][place] = value
        self.parts: list[list[WarmPart]] = warm_parts(
            planned, lambda group, access: dense[group, access]
        )

    def _vector(self, traffic: Traffic) -> dict[int, float]:
        """The coefficients of an access, by the places of their terms."""
        amount = traffic.amount
        linear = amount.draw is None and amount.constant is None and traffic.access.factor == 1
        if not linear:
            return {self._place(traffic, traffic): 1.0}
        factors = amount.formula.coefficients().items()
        return {self._place(powers, None): float(value) for powers, value in factors}

    def _place(self, key: Any, whole: Traffic | None) -> int:
        place = self._terms.setdefault(key, len(self._terms))
        if place == len(self._wholes):
            self._wholes.append(whole)
        return place

    def over(self, points: Points, capacity: float) -> list[Array | float]:
        """Bytes of each group that a cache of `capacity` bytes holds: an array [P], or a number."""
        columns = np.stack(
            [self._column(key, whole, points) for key, whole in zip(
                self._terms, self._wholes, strict=True)]
        )  # fmt: skip
        return [warm_columns(parts, capacity, lambda v: v @ columns) for parts in self.parts]

    def _column(self, key: Any, whole: Traffic | None, points: Points) -> Array:
        if whole is not None:
            return self._over(whole, points).astype(float)
        column = np.ones(len(points))
        for place, power in enumerate(key):
            if power:
                column = column * points.columns[place].astype(float) ** power
        return column
