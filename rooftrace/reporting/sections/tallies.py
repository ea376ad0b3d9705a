"""Sums over the kernels of an estimate by any key; knows sums, knows no layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rooftrace.costmodels.estimating import Row

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Tally(Generic[Key]):
    """Kernels with one key: how many, FLOP (dense and computed), HBM bytes, device seconds."""

    key: Key
    calls: int = 0
    flops: int = 0
    flops_causal: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def intensity(self) -> float | None:
        """Computed FLOP per HBM byte."""
        return self.flops_causal / self.bytes if self.bytes else None

    @property
    def rate(self) -> float | None:
        """Computed FLOP per device second."""
        return self.flops_causal / self.seconds if self.seconds else None


def tally(rows: Iterable[Row], key: Callable[[Row], Key]) -> list[Tally[Key]]:
    """One Tally per key, most seconds first; ties by key, so that the order never changes."""
    sums: dict[Key, list[float]] = {}
    for row in rows:
        entry = sums.setdefault(key(row), [0, 0, 0, 0, 0.0])
        entry[0] += row.count
        entry[1] += row.flops
        entry[2] += row.flops_causal
        entry[3] += row.bytes
        entry[4] += row.timing.t_device
    tallies = [
        Tally(name, int(n), int(flops), int(causal), int(size), seconds)
        for name, (n, flops, causal, size, seconds) in sums.items()
    ]
    return sorted(tallies, key=lambda entry: (-entry.seconds, str(entry.key)))


def ratio(part: float, whole: float) -> float | None:
    """A part of a whole; None where there is no whole."""
    return part / whole if whole else None
