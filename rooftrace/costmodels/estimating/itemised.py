"""What an estimate consists of, item by item, and whose constants it has."""

from __future__ import annotations

from rooftrace.costmodels.estimating.rows import Row
from rooftrace.costmodels.itemising import Census, NodeTable, census, node_table
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.timings import StepTimes
from rooftrace.hardware import Chip


class Itemised:
    """The tables of an estimate whose rows add up to it, and whose constants its times have."""

    plan: Plan
    chip: Chip
    rows: tuple[Row, ...]
    times: StepTimes
    knobs: Knobs | None
    peak: float

    @property
    def borrowed(self) -> str:
        """That these times have constants of other chips, which are named; "" where they do not."""
        return self.plan.execution.borrowed_on(self.chip)

    def by_node(self) -> NodeTable:
        """Every kernel with the bytes of weights and of all else that it reads, and that it writes.

        Equal kernels of equal modules stand once; nodes add up to `flops` and `bytes_hbm`.
        """
        return node_table(self.plan, self.chip.name, self.rows, expected=self.knobs is not None)

    def census(self, align: int = 16) -> Census:
        """Every matrix product by M, N, K and precision, with its tiles and odd sizes.

        Rows and the attention kernels add up to `flops_matrix`.  align: bytes; sizes are odd whose
        rows in memory are no whole number of them.
        """
        return census(
            self.plan,
            self.chip,
            self.rows,
            knobs=self.knobs,
            headline=self.peak,
            t_serial=self.times.t_serial,
            align=align,
        )
