"""From what was measured to the cases of a fit: kernels of a step one by one, or one alone.

A kernel's case holds its own row of the table only, so that a fit sees which class was how fast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rooftrace.costmodels.calibrate import Case
from rooftrace.costmodels.estimate import dispatch_seconds
from rooftrace.costmodels.kernels import KernelTable, copies_layouts, kernel_table
from rooftrace.costmodels.plan import Plan
from rooftrace.costmodels.profiles.align import Key, key_of_call, key_of_op
from rooftrace.costmodels.timing import host_waits
from rooftrace.hardware.chip import Chip
from rooftrace.tracer.runfile import OpTime

SHORTEST = 20e-6
"""Seconds: a call below this is mostly its launch, and on a CPU the profiler's own time."""
MAPPED = 32 * 2**20
"""Bytes: glibc maps a larger block anew at every call (the highest M_MMAP_THRESHOLD), and its first
use is a page fault every 4 KiB."""


def alone_case(
    name: str, planned: Plan, chip: Chip, seconds: float, group: str = ""
) -> Case | None:
    """The case of an operation that was timed alone, on caches that hold none of its data.

    None for one that tells little of its kernel: too short, or with a result that is mapped anew.
    """
    values, waits = planned.graph.values, host_waits(chip)
    largest = max((values[i].nbytes for op in planned.graph.ops for i in op.outputs), default=0)
    if seconds < SHORTEST or (waits and largest >= MAPPED):
        return None
    table, _ = kernel_table(planned, chip, cold=True)
    count = len(planned.graph.ops) if waits else 0
    return Case(name, table, seconds, count, group=group,
                dispatch=dispatch_seconds(planned.execution, chip))  # fmt: skip


def kernel_cases(
    planned: Plan, chip: Chip, seconds: Mapping[int, float], name: str, group: str = ""
) -> list[Case]:
    """A case for each kernel all of whose ops were measured.

    seconds: of a step, by op id of the plan's graph, all iterations together (a replay op by op, or
    an alignment's `seconds`).
    """
    table, place = kernel_table(planned, chip)
    made = _Cases(planned, chip, table, name, group)
    for index, one in enumerate(planned.groups):
        known = [seconds[op] for op in one.ops if op in seconds]
        if len(known) == len(one.ops):
            made.add([index], place, sum(known))
    return made.cases


def profiled_cases(
    planned: Plan, chip: Chip, ops: Sequence[OpTime], name: str, group: str = ""
) -> list[Case]:
    """A case for alike kernels of one op, which the profile has as often as the graph.

    Calls and ops are compared by name and input shapes.  An op that the profile has in other
    numbers (as it hides what it is made of, or another step ran in between) gives no case.
    """
    calls: dict[Key, list[float]] = defaultdict(lambda: [0, 0.0])
    for op in ops:
        entry = calls[key_of_call(op.target, op.shapes)]
        entry[0] += op.count
        entry[1] += op.inclusive
    alike: dict[Key, list[int]] = defaultdict(list)
    for index, one in enumerate(planned.groups):
        if len(one.ops) == 1:
            alike[key_of_op(planned.graph, planned.graph.ops[one.ops[0]])].append(index)
    table, place = kernel_table(planned, chip)
    made = _Cases(planned, chip, table, name, group)
    for key, groups in alike.items():
        count, seconds = calls.get(key, (0, 0.0))
        if count == sum(planned.groups[i].times for i in groups):
            made.add(groups, place, seconds)
    return made.cases


class _Cases:
    """Cases of kernels of one step."""

    def __init__(
        self, planned: Plan, chip: Chip, table: KernelTable, name: str, group: str
    ) -> None:
        self.planned, self.chip, self.table = planned, chip, table
        self.name, self.group = name, group
        self.layouts = copies_layouts(planned)
        self.cases: list[Case] = []

    def add(self, groups: Sequence[int], place: Sequence[int], seconds: float) -> None:
        """One more: these kernels together took so long."""
        import numpy as np

        waits = host_waits(self.chip)
        count = sum(self.planned.groups[index].times for index in groups)
        if seconds <= 0 or (waits and seconds < count * SHORTEST):
            return
        rows = [place[index] for index in groups]
        data = {name: column[rows] for name, column in self.table.data.items()}
        data["count"] = np.array([float(self.planned.groups[i].times) for i in groups])
        lead = self.planned.graph.ops[self.planned.groups[groups[0]].ops[0]]
        self.cases.append(
            Case(
                f"{self.name}: {lead.name.removeprefix('aten.')} of {lead.module or '(root)'}",
                KernelTable(self.chip, self.table.kind[rows], data),
                seconds,
                count if waits else 0,
                self.layouts,
                self.group,
                dispatch_seconds(self.planned.execution, self.chip),
            )
        )
