"""The cases of a fit: measured times, each with the kernels that took it.

A whole step is one case.  A kernel of a step, or an operation alone, is a case with its own row of
the table only, so that a fit sees the speed of each class.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.seconds import KernelTable, kernel_table
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan, plan
from rooftrace.costmodels.timing.queue import HostSeconds, host_seconds
from rooftrace.hardware import Chip
from rooftrace.measured.alignment import keys
from rooftrace.measured.factors import SHORTEST
from rooftrace.measured.runs import OpTime
from rooftrace.tracer.graph import OpGraph

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

MAPPED = 32 * 2**20
"""Bytes: glibc maps a larger block anew at every call (the highest M_MMAP_THRESHOLD), and its first
use is a page fault every 4 KiB."""


class CalibrationError(ValueError):
    """Measurements do not suffice for a fit: the message says what there is and what is needed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured time, and the kernels that took it."""

    name: str
    table: KernelTable  # the kernels
    seconds: float  # s, of a whole step, or of these kernels alone
    dispatches: int = 0  # what the host enqueued for it; 0 where the host does not matter
    layouts: bool = False  # whether hidden layout copies count; see `KernelTable.seconds`
    group: str = ""  # cases of one group are left out together when a fit is checked
    dispatch: float | None = None  # s of each dispatch; None: the knob of this name
    host: float = 0.0  # s of the host beside them: views, calls of modules


@dataclass(frozen=True, kw_only=True)
class Errors(Plain):
    """Relative errors of predictions: (predicted - measured) / measured."""

    count: int  # predictions
    bias: float  # mean, with its sign
    mean: float  # mean size
    median: float  # median size
    p90: float  # size that 90 % are below
    worst: float  # the largest, with its sign
    worst_case: str  # its name


# -- from measurements ----------------------------------------------------------------------------


def step_case(
    name: str,
    graph: OpGraph | Plan,
    chip: Chip,
    execution: str | ExecutionModel,
    seconds: float,
    group: str = "",
) -> Case:
    """The case of a whole measured step.  Raises CalibrationError for a time of 0 or below."""
    if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
        raise CalibrationError(f"{name}: {seconds!r} seconds: expected a time above 0")
    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    table, _ = kernel_table(planned, chip)
    model = planned.execution
    each, dispatches, beside = _host(model, chip), 0, 0.0
    for launch in planned.launches:
        times = math.prod(planned.graph.repeats[r].count for r in launch.repeats)
        dispatches += times * launch.dispatches
        beside += times * (launch.views * each.view + launch.calls * each.call)
    return Case(
        name=name,
        table=table,
        seconds=seconds,
        dispatches=dispatches,
        layouts=planned.copies_layouts,
        group=group,
        dispatch=None if model.dispatch == "eager" else each.dispatch,
        host=beside,
    )


def _host(model: ExecutionModel, chip: Chip) -> HostSeconds:
    """What the host takes at a pace of 1: predictions have a pace of their own."""
    knobs = model.knobs_on(chip)
    if knobs is not None and knobs.pace != 1:
        model = replace(model, knobs=replace(knobs, pace=1.0))
    return host_seconds(model, chip)


def alone_case(
    name: str, planned: Plan, chip: Chip, seconds: float, group: str = ""
) -> Case | None:
    """The case of an operation that was timed alone, on caches that hold none of its data.

    None if its time tells little about its kernel: it is too short, or its result is mapped anew.
    """
    values, waits = planned.graph.values, chip.host_waits
    largest = max((values[i].nbytes for op in planned.graph.ops for i in op.outputs), default=0)
    if seconds < SHORTEST or (waits and largest >= MAPPED):
        return None
    table, _ = kernel_table(planned, chip, cold=True)
    count = len(planned.graph.ops) if waits else 0
    return Case(
        name=name,
        table=table,
        seconds=seconds,
        dispatches=count,
        group=group,
        dispatch=_host(planned.execution, chip).dispatch,
    )


def kernel_cases(
    planned: Plan, chip: Chip, seconds: Sequence[float | None], name: str, group: str = ""
) -> list[Case]:
    """A case for each kernel that was measured.

    seconds: of each group of the plan, all iterations together; None where it is not known.
    """
    table, place = kernel_table(planned, chip)
    made = _Cases(planned, chip, table, name, group)
    for index, known in enumerate(seconds):
        if known is not None:
            made.add([index], place, known)
    return made.cases


def profiled_cases(
    planned: Plan, chip: Chip, ops: Sequence[OpTime], name: str, group: str = ""
) -> list[Case]:
    """A case for all equal kernels of one op, if the profile has as many calls as the graph.

    Calls and ops are compared by name and input shapes.  Other counts give no case: the profile may
    hide the inner calls of an op, or another step ran in between.
    """
    calls: dict[keys.Key, list[float]] = defaultdict(lambda: [0, 0.0])
    for op in ops:
        entry = calls[keys.key_of_call(op.target, op.shapes)]
        entry[0] += op.count
        entry[1] += op.inclusive
    alike: dict[keys.Key, list[int]] = defaultdict(list)
    for index, kernel in enumerate(planned.groups):
        if len(kernel.ops) == 1:
            alike[keys.key_of_op(planned.graph, planned.graph.ops[kernel.ops[0]])].append(index)
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
        self.layouts = planned.copies_layouts
        self.cases: list[Case] = []

    def add(self, groups: Sequence[int], place: Sequence[int], seconds: float) -> None:
        """Add a case: these kernels together took so long."""
        import numpy as np

        waits = self.chip.host_waits
        count = sum(self.planned.groups[index].times for index in groups)
        if seconds <= 0 or (waits and seconds < count * SHORTEST):
            return
        rows = [place[index] for index in groups]
        data = {name: column[rows] for name, column in self.table.data.items()}
        data["count"] = np.array([float(self.planned.groups[i].times) for i in groups])
        lead = self.planned.graph.ops[self.planned.groups[groups[0]].ops[0]]
        self.cases.append(
            Case(
                name=f"{self.name}: {lead.name.removeprefix('aten.')} of {lead.module or '(root)'}",
                table=KernelTable(self.chip, self.table.kind[rows], data),
                seconds=seconds,
                dispatches=count if waits else 0,
                layouts=self.layouts,
                group=self.group,
                dispatch=_host(self.planned.execution, self.chip).dispatch,
            )
        )


# -- predictions of cases --------------------------------------------------------------------------


def predict(cases: Sequence[Case], knobs: Knobs) -> list[float]:
    """Seconds of each case with these knobs."""
    return [float(t) for t in Stack(cases, knobs).predict(knobs)]


def errors(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """How far predictions are off.  Raises CalibrationError without any."""
    import numpy as np

    if not names:
        raise CalibrationError("no predictions to compare with measurements")
    off = np.array(predicted) / np.array(measured) - 1
    size = np.abs(off)
    worst = int(size.argmax())
    return Errors(
        count=len(names),
        bias=float(off.mean()),
        mean=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        worst=float(off[worst]),
        worst_case=names[worst],
    )


class Stack:
    """Many cases as one table, so that a prediction of all is a few operations on arrays."""

    def __init__(self, cases: Sequence[Case], knobs: Knobs) -> None:
        import numpy as np

        self.measured = np.array([case.seconds for case in cases])
        self.dispatches = np.array([case.dispatches for case in cases], dtype=float)
        self.dispatch = np.array([math.nan if c.dispatch is None else c.dispatch for c in cases])
        self.host = np.array([case.host for case in cases])
        self.serial = np.array([case.table.chip.host_waits for case in cases])
        self.parts: list[tuple[bool, KernelTable, Any]] = []
        for layouts in (False, True):
            chosen = [(i, case.table) for i, case in enumerate(cases) if case.layouts is layouts]
            if chosen:
                owner = np.concatenate([np.full(len(t), i) for i, t in chosen])
                self.parts.append((layouts, _joined([t for _, t in chosen]), owner))
        self._tiling = knobs.tiling
        self._terms = [t.tiles(knobs) for _, t, _ in self.parts]
        self._last: tuple[Knobs, Array] | None = None

    def predict(self, knobs: Knobs) -> Array:
        """Seconds of every case."""
        plain = replace(knobs, pace=1.0)
        if self._last is None or self._last[0] != plain:
            self._last = plain, self._at_full_pace(plain)
        return self._last[1] / knobs.pace

    def _at_full_pace(self, knobs: Knobs) -> Array:
        import numpy as np

        total = np.zeros(len(self.measured))
        for (layouts, table, owner), known in zip(self.parts, self._terms, strict=True):
            terms = known if knobs.tiling == self._tiling else table.tiles(knobs)
            device = table.seconds(knobs, layouts, terms).device
            device = device + knobs.launch_on(table.chip)
            total += np.bincount(owner, table.data["count"] * device, len(total))
        dispatch = knobs.dispatch
        if dispatch is None and self.parts:
            dispatch = self.parts[0][1].chip.dispatch_eager.value
        each = np.where(np.isnan(self.dispatch), dispatch or 0.0, self.dispatch)
        host = self.dispatches * each + self.host
        # A CPU runs an op when it is called; a GPU while the host goes on.
        seconds: Array = np.where(self.serial, total + host, np.maximum(total, host))
        return seconds


def _joined(tables: Sequence[KernelTable]) -> KernelTable:
    import numpy as np

    data = {name: np.concatenate([t.data[name] for t in tables]) for name in tables[0].data}
    return KernelTable(tables[0].chip, np.concatenate([t.kind for t in tables]), data)
