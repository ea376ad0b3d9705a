"""The two-track queue of host and device, and the seconds of collectives and expert exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rooftrace._amounts import larger, np, smaller
from rooftrace.costmodels.fusion import ExecutionModel, Launch, Plan, runs
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.timing.collectives import (
    CollectiveTime,
    collective_seconds,
    expert_exchange_seconds,
    link_seconds,
    per_rank_link_bytes,
)
from rooftrace.graph import Group, OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.systems import System
from rooftrace.hardware.systems.records import EXCHANGE_WAYS

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Places

# -- queue -----------------------------------------------------------------------------------------
# The two-track queue: the host enqueues launches in order, the device runs them in order.


def schedule(
    durations: Sequence[Any],
    launches: Sequence[Launch],
    host: HostSeconds,
    counts: Sequence[Any] = (),
    waits: bool = False,
) -> tuple[list[Any], Any]:
    """Start of each group on the device (the first time), and when the step ends.

    durations, counts: numbers, or arrays over points: then so are the results.

    The host takes the seconds of each launch (see `HostSeconds`); the device starts a group when
    it is enqueued and the one before has ended, and is busy for its duration; at a sync the host
    goes on when the device is idle and a value has come back (`HostSeconds.read_back`).
    counts: how many iterations each repeat has.  waits: whether the host waits after every launch
    (see `Chip.host_waits`).
    """
    queue = Queue(durations, launches, host, counts, waits)
    ends = queue.run(range(len(launches)), 0, (0.0, 0.0))
    return queue.starts, larger(*ends)


def leading_seconds(launches: Sequence[Launch], host: HostSeconds, waits: bool) -> float | None:
    """Seconds of the host before the first kernel, if nothing keeps the device waiting later.

    Then a step takes these and the seconds of its kernels.  None where that is not so.
    """
    if waits or any(launch.sync for launch in launches):
        return None
    first = next((i for i, launch in enumerate(launches) if launch.on_device), None)
    if first is None:
        return None
    leading, after = launches[: first + 1], launches[first + 1 :]
    seconds = sum(host.of(launch) for launch in leading)
    again = any(launch.repeats and host.of(launch) for launch in leading)
    return None if again or any(host.of(launch) for launch in after) else seconds


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Seconds of the host for one action of each kind."""

    dispatch: float  # to enqueue an op, a kernel or a graph
    view: float = 0.0  # to make a view
    call: float = 0.0  # to call a module, its ops aside
    chip: Chip | None = None  # of compiled code: for seconds at its breaks
    pace: float = 1.0  # of entries
    library: float = 0.0  # of a plain op's worth of work in CUDA's libraries
    read_back: float = 0.0  # from the device's end of work until the host has a value of it

    def of(self, launch: Launch) -> float:
        """Seconds of a launch."""
        seconds = (
            launch.dispatches * self.dispatch
            + launch.views * self.view
            + launch.calls * self.call
            + launch.library * self.library
        )
        if self.chip is not None and (launch.entries or launch.singles or launch.views):
            seconds += self._between(launch, self.chip)
        return seconds

    def _between(self, launch: Launch, chip: Chip) -> float:
        """Seconds between compiled graphs: of entering one, and of ops, views and modules there."""
        return (
            launch.entries * chip.graph_entry.value / self.pace
            + launch.singles * chip.dispatch_eager.value
            + launch.views * chip.dispatch_view.value
            + launch.calls * chip.module_call.value
        )


class _TimedLaunch(Struct, frozen=True):
    """A launch in seconds: of the host, and of the device (None where it has nothing to do)."""

    host: float
    device: Amount | None
    read_back: float | None  # of the host, after the device; None: the host goes on at once


Clocks = tuple[Any, Any]
"""Seconds at which the host and the device are done with all launches so far."""
Shift = tuple[Any, Any, Any, Any]
"""An iteration maps the clocks (h, d) to (max(h + a, d + b), max(h + c, d + e))."""
NEVER = -math.inf
NO_SHIFT: Shift = (0.0, NEVER, NEVER, 0.0)


class Queue:
    """The two tracks.  Launches shift and join two clocks, and so do all iterations of a repeat.

    Durations and counts are numbers, or arrays over points; so are the clocks.
    """

    def __init__(
        self,
        durations: Sequence[Any],
        launches: Sequence[Launch],
        host: HostSeconds,
        counts: Sequence[Any] = (),
        waits: bool = False,
    ) -> None:
        placed = sum(launch.on_device for launch in launches)
        if placed != len(durations):
            raise ValueError(f"{len(durations)} durations for {placed} groups on the device")
        times = iter(durations)
        self.steps = [
            _TimedLaunch(
                host.of(launch),
                next(times) if launch.on_device else None,
                host.read_back if launch.sync else 0.0 if waits else None,
            )
            for launch in launches
        ]
        self.repeats = [launch.repeats for launch in launches]
        self.counts = counts
        self.starts: list[Any] = []

    def run(self, part: range, depth: int, clocks: Clocks) -> Clocks:
        """Run these launches once, first iterations one by one; remember when groups start."""
        for repeat, inside in runs.segments(self.repeats, part, depth):
            if repeat is None:
                host, device = clocks
                for step in self.steps[inside.start : inside.stop]:
                    host = host + step.host
                    if step.device is not None:
                        start = larger(host, device)
                        self.starts.append(start)
                        device = start + step.device
                    if step.read_back is not None:
                        host = larger(host, device) + step.read_back
                clocks = host, device
            else:
                clocks = self.run(inside, depth + 1, clocks)
                clocks = self.turned(inside, depth + 1, self.counts[repeat] - 1, clocks)
        return clocks

    def turned(self, part: range, depth: int, count: int | Places, clocks: Clocks) -> Clocks:
        """The clocks when these launches have run `count` times more, whatever the count."""
        host, device = clocks
        a, b, c, e = self.power(self._shift(part, depth), count)
        return larger(host + a, device + b), larger(host + c, device + e)

    def _shift(self, part: range, depth: int) -> Shift:
        """The shift of the clocks that these launches make."""
        total = NO_SHIFT
        for repeat, inside in runs.segments(self.repeats, part, depth):
            if repeat is not None:
                inner = self._shift(inside, depth + 1)
                total = self.after(total, self.power(inner, self.counts[repeat]))
                continue
            for step in self.steps[inside.start : inside.stop]:
                busy = step.device
                shift: Shift = (step.host, NEVER, NEVER, 0.0)
                if busy is not None:
                    shift = (step.host, NEVER, step.host + busy, busy)
                if (back := step.read_back) is not None:
                    shift = (larger(shift[0], shift[2]) + back, shift[3] + back, *shift[2:])
                total = self.after(total, shift)
        return total

    # -- shifts: matrices whose sum is max and whose product is + ----------------------------------

    @staticmethod
    def after(first: Shift, then: Shift) -> Shift:
        """One shift after the other: the product of both matrices."""
        a, b, c, e = first
        p, q, r, s = then
        return _joined(p, a, q, c), _joined(p, b, q, e), _joined(r, a, s, c), _joined(r, b, s, e)

    def power(self, shift: Shift, count: int | Places) -> Shift:
        """A shift that stands for `count` equal ones, one after the other, at every point."""
        result = NO_SHIFT
        while count if isinstance(count, int) else count.any():
            after, odd = self.after(result, shift), count & 1
            if isinstance(odd, int):
                result = after if odd else result
            else:
                pairs = zip(after, result, strict=True)
                a, b, c, e = (_chosen(odd > 0, then, before) for then, before in pairs)
                result = a, b, c, e
            shift, count = self.after(shift, shift), count >> 1
        return result


def _never(term: Any) -> bool:
    """Whether a term of a shift is minus infinity at all points."""
    return isinstance(term, float) and term == NEVER


def _joined(a: Any, b: Any, c: Any, d: Any) -> Any:
    """max(a + b, c + d); terms that never count cost nothing."""
    if _never(a) or _never(b):
        return NEVER if _never(c) or _never(d) else c + d
    return a + b if _never(c) or _never(d) else larger(a + b, c + d)


def _chosen(odd: Any, then: Any, before: Any) -> Any:
    if _never(then) and _never(before):
        return NEVER
    return np.where(odd, then, before)


def host_seconds(execution: ExecutionModel, chip: Chip) -> HostSeconds:
    """Host seconds per dispatch, view and module call: from the knobs, else from the chip.

    Ops on a CPU go through no library of CUDA, and their values are the host's.
    """
    knobs = execution.knobs_on(chip)
    pace = 1.0 if knobs is None else knobs.pace
    back = 0.0 if chip.host_waits else chip.read_back.value
    if execution.dispatch == "graph":
        launch = chip.graph_launch.value / pace
        return HostSeconds(launch, chip=chip, pace=pace, read_back=back)
    plain = chip.dispatch_eager.value
    if execution.dispatch == "eager" and knobs is not None and knobs.dispatch is not None:
        plain = knobs.dispatch
    library = 0.0 if chip.host_waits else plain / pace
    if execution.dispatch in ("compiled", "mixed"):
        launch = chip.dispatch_compiled.value / pace
        return HostSeconds(launch, chip=chip, pace=pace, library=library, read_back=back)
    view, call = chip.dispatch_view.value, chip.module_call.value
    if knobs is not None:
        view = view if knobs.view is None else knobs.view
        call = call if knobs.call is None else knobs.call
    return HostSeconds(plain / pace, view / pace, call / pace, library=library, read_back=back)


def host_time(launches: Sequence[Launch], host: HostSeconds, counts: Sequence[Any] = ()) -> Any:
    """Seconds after which the host is done where the device takes none: no step is faster.

    counts: of each repeat, numbers or arrays over points: then so is the result.
    """
    return sum(
        host.of(launch) * math.prod(counts[repeat] for repeat in launch.repeats)
        for launch in launches
    )


# -- expert exchanges ------------------------------------------------------------------------------
# An all_to_all of counts rests on an assumption with the rows of each process (`Assumption.facts`).
# The all_to_alls of rows that follow in that module and group dispatch rows to experts and combine
# them, in turns; so do those of backward.

MODES: Mapping[str, str] = {"deepep": "normal", "deepep-low-latency": "low-latency"}
"""The modes of DeepEP's kernels by `ExecutionModel.exchange`."""
COUNTS = "counts"


class ExpertExchange(Struct, frozen=True):
    """An exchange of one op with the experts of other processes; amounts may be arrays.

    way: one of EXCHANGE_WAYS; COUNTS: the numbers of rows.  rows: of all processes, a token once
    for each of its experts.  chosen: experts of a token.  classes: experts of one process.
    """

    way: str
    rows: Any
    processes: int
    chosen: int
    classes: int
    nbytes: Any

    @property
    def tokens(self) -> Any:
        """Tokens of this process."""
        return self.rows / self.processes

    @property
    def experts(self) -> int:
        """Experts of all processes."""
        return self.classes * self.processes

    @property
    def row_bytes(self) -> Any:
        """Bytes of a token as it is sent."""
        return self.nbytes / larger(self.tokens * self.chosen, 1)

    def seconds(self, system: System, ranks: Sequence[int], mode: str) -> CollectiveTime:
        """Seconds by the kernels of DeepEP, which bring the counts with the rows."""
        if self.way == COUNTS:
            return CollectiveTime(0.0, "")
        sizes = self.tokens, self.row_bytes, self.chosen, ranks
        return expert_exchange_seconds(system, *sizes, mode, self.way, self.experts)


def expert_exchanges(graph: OpGraph) -> dict[int, ExpertExchange]:
    """The exchanges with experts of a graph by the id of their op."""
    exchanges: dict[int, ExpertExchange] = {}
    turns: dict[tuple[str, str], tuple[Mapping[str, Any], int]] = {}  # by module and group
    for op in graph.ops:
        together = op.collective
        if together is None or together.kind != "all_to_all":
            continue
        key, size = (op.module, together.group), graph.groups[together.group].size
        facts = [graph.assumptions[number].facts for number in op.assumptions]
        counted = next((f for f in facts if f.get("processes") == size), None)
        way, nbytes = COUNTS, 0
        if counted is not None:
            turns[key] = counted, 0
        elif key in turns:
            counted, turn = turns[key]
            turns[key] = counted, turn + 1
            way, nbytes = EXCHANGE_WAYS[turn % 2], together.bytes
        else:
            continue
        exchanges[op.id] = ExpertExchange(
            way=way,
            rows=counted["rows"],
            processes=counted["processes"],
            chosen=counted["chosen_each"],
            classes=counted["classes"],
            nbytes=nbytes,
        )
    return exchanges


def computes_experts(planned: Plan, kernel: int) -> bool:
    """Whether a kernel of a plan is work of experts."""
    return any(planned.graph.ops[op].family == "moe" for op in planned.groups[kernel].ops)


def runs_aside(planned: Plan, kernel: int) -> bool:
    """Whether a kernel of a plan runs on another stream than the main one, or asynchronously."""
    ops = [planned.graph.ops[number] for number in planned.groups[kernel].ops]
    talks = any(op.collective is not None and not op.collective.waits for op in ops)
    return talks or bool(ops[0].stream)


def spread_kind(planned: Plan, kernel: int, kind: str) -> str:
    """The class whose spread holds for a kernel of this class: that without a compiler's layout."""
    if not planned.lays_out(kernel):
        return kind
    ops = planned.groups[kernel].ops
    return group_class(planned.graph, ops, costs=planned.op_costs)


# -- exchanges -------------------------------------------------------------------------------------


_OF_EXPERTS = ("all_to_all", *EXCHANGE_WAYS)
_COLLECTIVES_OF = {"torch": "nccl"}
"""Libraries of collectives by `ExecutionModel.library`, where the names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One kernel of a plan that talks to other processes."""

    kernel: int  # its place in `Plan.groups`
    kind: str
    group: str  # a key of `OpGraph.groups`
    axis: str  # of the mesh; without a mesh the name of the group
    ranks: int
    calls: int  # kernels that it stands for
    nbytes: int  # of the full buffer of one call
    seconds: float  # of one call
    least: float  # seconds of one call at the datasheet's bandwidth
    level: str  # the outermost level of links that it uses
    beyond: str  # a phrase on what exceeds the measurements, "" for nothing
    sent: float  # bytes that a process sends in one call
    exposed: float = 0.0  # seconds of all calls for which computing waits
    splits: bool = False  # whether processes get different amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelExchange:
    """The exchange of one kernel with other processes; amounts may be arrays over sizes."""

    kind: str
    group: str  # a key of `OpGraph.groups`
    members: Group
    nbytes: Any  # of the full buffer of one call
    splits: bool = False  # whether processes get different amounts
    experts: ExpertExchange | None = None  # by the kernels of DeepEP

    def seconds(self, system: System, execution: ExecutionModel) -> ExchangeSeconds:
        """Seconds of one call over the links of a system, by the kernels of the execution's
        library where they were measured, else by NCCL.

        Raises MissingPeakError for a chip without a link, and SystemSizeError for ranks that a
        system has no chips for.
        """
        if self.members.size > 1 and not system.levels:
            raise MissingPeakError(
                f"{system.name} has no link, and {self.members.size} processes exchange tensors: "
                "add a [[link]] to its TOML file, or name a system (`rooftrace systems list`)"
            )
        ranks = self.members.ranks
        least = link_seconds(system, self.kind, self.nbytes, ranks)
        library = _COLLECTIVES_OF.get(execution.library, execution.library)
        taken = collective_seconds(system, self.kind, self.nbytes, ranks, library)
        if self.experts is None:
            return ExchangeSeconds(self.kind, taken, least)
        by_experts = self.experts.seconds(system, ranks, MODES[execution.exchange])
        taken = replace(by_experts, level=taken.level)
        kind = f"{self.experts.way} (DeepEP {MODES[execution.exchange]})"
        return ExchangeSeconds(kind, taken, smaller(least, taken.seconds))


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeSeconds:
    """Seconds of one call of an exchange, and the least at the datasheet's bandwidth."""

    kind: str
    taken: CollectiveTime
    least: Any

    def unevenly(self, factor: float) -> ExchangeSeconds:
        """An exchange with experts as the busiest process sees it: all others wait for it.

        factor: its tokens over the mean of all.
        """
        if factor == 1 or not any(word in self.kind for word in _OF_EXPERTS):
            return self
        return replace(self, taken=replace(self.taken, seconds=factor * self.taken.seconds))


def exchanges_of(planned: Plan) -> dict[int, KernelExchange]:
    """The collectives of a plan by their kernel."""
    communicating = {}
    graph = planned.graph
    experts = expert_exchanges(graph) if planned.execution.exchange in MODES else {}
    for number, group in enumerate(planned.groups):
        talking = [op for op in group.ops if graph.ops[op].collective is not None]
        if not talking:
            continue
        together = graph.ops[talking[0]].collective
        assert together is not None
        communicating[number] = KernelExchange(
            kind=together.kind,
            group=together.group,
            members=graph.groups[together.group],
            nbytes=together.bytes,
            splits=bool(together.splits),
            experts=experts.get(talking[0]),
        )
    return communicating


def communication_of(
    kernel: int, calls: int, exchange: KernelExchange, timed: ExchangeSeconds, exposed: float
) -> Communication:
    """The record of one kernel of a plan that exchanges."""
    members = exchange.members
    return Communication(
        kernel=kernel,
        kind=timed.kind,
        group=exchange.group,
        axis=members.axis or exchange.group,
        ranks=members.size,
        calls=calls,
        nbytes=exchange.nbytes,
        seconds=timed.taken.seconds,
        least=timed.least,
        level=timed.taken.level,
        beyond=timed.taken.beyond,
        sent=per_rank_link_bytes(exchange.kind, exchange.nbytes, members.size),
        exposed=exposed,
        splits=exchange.splits,
    )
