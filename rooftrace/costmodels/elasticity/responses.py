"""What a change of one number does to a step: records, ranked by how much it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.elasticity.slopes import Slope
from rooftrace.errors import RequestError, hint

QUANTITIES = ("flops", "bytes", "peak_memory")
"""What elasticities by sizes are exact of."""


@dataclass(frozen=True, slots=True)
class FiniteStep:
    """A change of a number, and times and bytes after it over those before.

    change: in words, "+1", "x1.1".  value: what the number then is.  t_est, t_bound, bytes: ratios;
    None where there is no such step, and `note` says why.
    """

    change: str
    value: float
    t_est: float | None = None
    t_bound: float | None = None
    bytes: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """How a step answers to one number: d ln(cost) / d ln(number).

    name: "batch", "chip.memory_bandwidth", "knobs.share.mm.compute".  kind: "size", "chip" or
    "knob".  value: of the number, in SI units (`unit`).  flops, bytes, peak_memory: exact by sizes;
    None where the number is not in them.  t_est, t_bound: of the smallest change in both
    directions, or of the smallest step that there is; None where no step could be made.
    note: why nothing changes, where nothing does.
    """

    name: str
    kind: str
    value: float
    unit: str
    flops: Slope | None = None
    bytes: Slope | None = None
    peak_memory: Slope | None = None
    t_est: float | None = None
    t_bound: float | None = None
    steps: tuple[FiniteStep, ...] = ()
    note: str = ""

    @property
    def effect(self) -> float:
        """What rows are ranked by: the size of the elasticity of the expected time."""
        return abs(self.t_est or 0.0)

    @property
    def is_zero(self) -> bool:
        """Whether no step changes any time, FLOPs or bytes."""
        ratios = [step.t_est for step in self.steps] + [step.t_bound for step in self.steps]
        slopes = (self.flops, self.bytes, self.peak_memory)
        return all(ratio in (None, 1.0) for ratio in ratios) and not any(
            slope and slope.value for slope in slopes
        )

    @property
    def cliff(self) -> float:
        """How much longer a step takes for one more of this size; 0 of other numbers."""
        jumps = [step.t_est - 1 for step in self.steps if step.change == "+1" and step.t_est]
        return jumps[0] if jumps and self.kind == "size" else 0.0

    def step(self, change: str) -> FiniteStep | None:
        """The step of a change; None where there is none."""
        return next((step for step in self.steps if step.change == change), None)

    def to_row(self) -> dict[str, Any]:
        """A row of a CSV file: elasticities, and ratios of t_est by change."""
        names = ("name", "kind", "value", "unit", "t_est", "t_bound")
        row: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in QUANTITIES:
            slope: Slope | None = getattr(self, name)
            row[name] = None if slope is None else slope.value
            row[f"{name}_exact"] = str(slope.exact) if slope and slope.exact is not None else ""
        for change in CHANGES:
            step = self.step(change)
            row[f"t_est {change}"] = None if step is None else step.t_est
        return {**row, "note": self.note}


CHANGES = ("+1", "-1 %", "+1 %", "x1.1", "x2", "x0.5")
"""All changes: of sizes and counts +1 in place of 1 %."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Elasticities(Plain, Shown):
    """How a step answers to its sizes, to the facts of a chip and to knobs; rows are ranked.

    sizes: where.  flops: FLOP; bytes: through HBM; peak_memory: byte; t_est, t_bound: seconds.
    """

    title: str
    phase: str
    sizes: Mapping[str, int]
    chip: str
    execution: str
    knobs: str  # title; "" for peaks
    flops: int
    bytes: int
    peak_memory: int
    t_est: float
    t_bound: float
    rows: tuple[Elasticity, ...]

    KEYS = "title phase chip execution knobs flops bytes peak_memory t_est t_bound sizes rows"

    def __repr__(self) -> str:
        first = ", ".join(f"{row.name} {row.t_est or 0:+.2f}" for row in self.rows[:3])
        return short(self, f"{self.title}, {self.phase} on {self.chip}: {first}")

    def of(self, name: str) -> Elasticity:
        """The row of a number.  Raises RequestError for a name that is none."""
        for row in self.rows:
            if row.name == name:
                return row
        names = [row.name for row in self.rows]
        raise RequestError(f"{name!r}: no number has this name{hint(name, names)}")

    def kind(self, kind: str) -> Iterator[Elasticity]:
        """The rows of sizes, of chip facts, or of knobs."""
        return (row for row in self.rows if row.kind == kind)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each number, ranked, as a CSV file takes them."""
        return [row.to_row() for row in self.rows]
