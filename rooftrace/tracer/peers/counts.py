"""The count of one counter for one call, by module and op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PeerCount:
    """What one counter says of one call."""

    peer: str  # its name
    version: str = ""
    device: str = ""  # where it ran: "meta", "cpu"; "" where it could not
    # FLOP, a multiply-add as 2, by module path and the peer's own name of the op; a module's own,
    # without its children.
    flops: Mapping[tuple[str, str], int] = field(default_factory=dict)
    scale: int = 1  # FLOP per unit that the peer reports; 2 where a multiply-add is one
    # Calls for which the counter has no formula, by module path and op.
    uncounted: Mapping[tuple[str, str], int] = field(default_factory=dict)
    note: str = ""  # what else to know
    error: str = ""  # why there is no count

    @property
    def total(self) -> int:
        """FLOP of all modules."""
        return sum(self.flops.values())


class CannotCountError(Exception):
    """The peer cannot count this kind of call at all."""


def exclusive(inclusive: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    """Counts of a module's own ops from counts that include those of its children."""
    own: Counter[tuple[str, str]] = Counter()
    for path, counts in inclusive.items():
        above = path
        while above:
            above = above.rpartition(".")[0]
            if above in inclusive:
                break
        for op, count in counts.items():
            own[path, op] += count
            if path:
                own[above, op] -= count
    return {key: count for key, count in own.items() if count}
