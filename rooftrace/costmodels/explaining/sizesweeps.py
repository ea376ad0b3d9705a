"""A step over the values of one size, the others as they are: rows of totals and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.sweeping import Form, evaluated, points_of
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.hardware import Chip


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One value on one chip: FLOP, byte, seconds; items are tokens or samples of the step."""

    chip: str
    value: int
    items: int
    flops: int
    bytes: int
    t_comp: float
    t_hbm: float
    t_net: float
    t_est: float
    regime: str
    regime_share: float

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def rate(self) -> float:
        """FLOP/s over the whole step."""
        return self.flops / self.t_est if self.t_est else 0.0

    @property
    def item_rate(self) -> float:
        """Tokens or samples per second."""
        return self.items / self.t_est if self.t_est else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSweep:
    """Rows in rising order of the values, chip by chip.

    name: of the size.  others: the sizes that stay.  marked: a value that has a meaning of its own,
    such as the least batch that computing limits; None where there is none.
    """

    title: str
    phase: str
    name: str
    others: Mapping[str, int]
    execution: str
    rows: tuple[SweepRow, ...]
    peaks: Mapping[str, float]  # FLOP/s of each chip, of the engine with most matrix FLOPs
    marked: int | None = None

    def is_marked(self, row: SweepRow) -> bool:
        """Whether a row is that of the marked value on the first chip, for which it holds."""
        return row.value == self.marked and row.chip == self.rows[0].chip


def size_sweep(
    form: Form,
    name: str,
    values: Sequence[int],
    others: Mapping[str, int],
    chips: Sequence[Chip],
    conditions: Conditions,
    marked: int | None = None,
) -> SizeSweep:
    """A sweep over some values of one size; `marked` is one of them, too.

    Raises what `evaluated` raises.
    """
    chosen = sorted({*values, *([] if marked is None else [marked])})
    levels = {n: [others[n]] if n != name else chosen for n in form.names}
    table = evaluated(form, points_of(form.names, levels), chips, conditions)
    columns = ("chip", name, "items", "flops", "bytes_hbm", "t_comp", "t_hbm", "t_net", "t_est",
               "regime", "regime_share")  # fmt: skip
    lines = zip(*(table[column].tolist() for column in columns), strict=True)
    rows = tuple(
        SweepRow(*(chips[chip].name, *numbers, REGIMES[regime], share))
        for chip, *numbers, regime, share in lines
    )
    peaks: dict[str, float] = {}
    for row, peak in zip(rows, table["peak"].tolist(), strict=True):
        peaks[row.chip] = max(peaks.get(row.chip, 0.0), peak)
    return SizeSweep(
        title=form.title,
        phase=form.phase,
        name=name,
        others={n: size for n, size in others.items() if n != name},
        execution=conditions.execution.name,
        rows=rows,
        peaks=peaks,
        marked=marked,
    )
