"""Sizes at many points, and the different ones among those that some of the sizes make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Places = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Points:
    """P points, each with a whole number for every size.

    columns: an integer array of length P for each name.  apart: whether each point counts as
    different from all others.
    """

    def __init__(
        self, columns: Mapping[str, Sequence[int] | Array], *, apart: bool = False
    ) -> None:
        self.names = tuple(columns)
        self.columns = [np.asarray(column, dtype=np.int64) for column in columns.values()]
        self._apart = apart
        self._parts: dict[frozenset[int], tuple[list[Array], Places | None]] = {}

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 1

    def part(self, sizes: frozenset[int]) -> tuple[list[Array], Places | None]:
        """The different points of some of the sizes, by their places, and where each point is.

        Columns of other sizes hold one number.  The second is None where all points differ, or all
        are equal.
        """
        if self._apart:
            return self.columns, None
        if sizes not in self._parts:
            self._parts[sizes] = self._different(sizes)
        return self._parts[sizes]

    def _different(self, sizes: frozenset[int]) -> tuple[list[Array], Places | None]:
        keys, span = np.zeros(len(self), dtype=np.int64), 1
        for place in sorted(sizes):
            values, inverse = np.unique(self.columns[place], return_inverse=True)
            if span * len(values) > 1 << 62:
                return self.columns, None
            keys = keys * len(values) + inverse
            span *= len(values)
        _, first, at = np.unique(keys, return_index=True, return_inverse=True)
        if len(first) == len(self):
            return self.columns, None
        columns = [
            column[first] if place in sizes else column[first[:1]]
            for place, column in enumerate(self.columns)
        ]
        return columns, at.astype(np.int32) if len(first) > 1 else None

    def apart(self) -> Points:
        """These points, each of which counts as different from all others."""
        return Points(dict(zip(self.names, self.columns, strict=True)), apart=True)

    def where(self, chosen: Places) -> Points:
        """Some of the points."""
        return Points({name: c[chosen] for name, c in zip(self.names, self.columns, strict=True)})
