"""A pipeline as it is priced: the costs of its stages, the walk of its actions, and its peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.costmodels.timing.collectives import collective_seconds
from rooftrace.hardware.systems import System
from rooftrace.tracer.sharding import Action, table_of


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipeline on one chip, with the estimates of its stages."""

    phase: str
    made: Pipelined
    stages: Mapping[int, Estimate]  # by number; alike ones share an estimate

    @staticmethod
    def of(stages: Mapping[int, Estimate]) -> Pipe:
        """The pipeline of these stages, as their graphs say that it is run."""
        facts = stages[0].graph.workload
        chip, mesh = stages[0].chip, stages[0].graph.mesh
        axes = list(mesh)
        apart = 1
        for axis in axes[axes.index("pp") + 1 :] if "pp" in axes else ():
            apart *= mesh[axis]
        made = pipelined(
            {number: StageCost.of(estimate) for number, estimate in sorted(stages.items())},
            str(facts["schedule"]),
            int(facts["microbatches"]),
            int(facts["handed"]),
            chip.system or System.of_chip(chip),
            apart,
            len(stages) // mesh["pp"],
        )
        return Pipe(stages[0].phase, made, stages)

    @property
    def first(self) -> Estimate:
        """The first stage."""
        return self.stages[0]

    @property
    def items_per_s_per_chip(self) -> float | None:
        """Items of all microbatches and replicas per second and chip."""
        estimate = self.first
        if estimate.replicas is None:
            return None
        items = estimate.items * self.made.microbatches * estimate.replicas
        return items / (self.made.seconds * estimate.processes)

    @property
    def mfu(self) -> float | None:
        """The mean of the MFU of stages, by the share of the step in which they work."""
        flops = sum((e.mfu or 0.0) * e.t_est * e.peak for e in self.stages.values())
        total = flops * self.made.microbatches
        ranks = self.made.ranks
        return total / (ranks * self.made.seconds * self.first.peak) if self.made.seconds else None


# -- walking ---------------------------------------------------------------------------------------
# A process does its actions in order.  A forward needs the previous stage, a backward the next
# one; their tensors arrive after a transfer, which overlaps with computing.

Table = Mapping[int, Sequence[Action]]


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action, and when it runs."""

    rank: int
    action: Action
    start: float  # seconds
    end: float


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Working times of the processes of a pipeline, in seconds."""

    seconds: float  # of the table
    busy: tuple[float, ...]  # by rank
    runs: tuple[TimedAction, ...]  # in the order of their starts

    @property
    def bubble(self) -> float:
        """Share of the time in which processes wait, over all of them."""
        if not self.seconds:
            return 0.0
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)

    @property
    def imbalance(self) -> float:
        """Working time of the busiest process over the mean one, less 1."""
        mean = sum(self.busy) / len(self.busy) if self.busy else 0.0
        return max(self.busy) / mean - 1 if mean else 0.0


def walk_table(
    table: Table, seconds: Callable[[Action], float], transfer: float = 0.0
) -> PipelineTimes:
    """Walk the actions of all processes.

    seconds: of an action.  transfer: seconds until a tensor arrives at
    another process.  Actions that run together take the time of both: they share the engines of
    one chip, and hide each other's communication only.
    Raises ValueError for a table in which nobody can go on.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    last = max(home, default=0)
    ends: dict[tuple[int, str, int], float] = {}
    clocks = dict.fromkeys(table, 0.0)
    busy = dict.fromkeys(table, 0.0)
    done = dict.fromkeys(table, 0)
    runs: list[TimedAction] = []
    left = sum(map(len, table.values()))

    def arrived(source: int, kind: str, action: Action) -> float | None:
        """Seconds at which tensors of another stage's action reach the process of this one."""
        end = ends.get((source, kind, action.microbatch))
        return end if end is None or home[source] == home[action.stage] else end + transfer

    while left:
        before = left
        for rank, actions in table.items():
            while done[rank] < len(actions):
                group = _together(actions, done[rank])
                ready = [_ready(action, last, arrived) for action in group]
                if any(time is None for time in ready):
                    break
                start = max(clocks[rank], *(time or 0.0 for time in ready))
                took = sum(map(seconds, group))
                for action in group:
                    ends[action.stage, action.kind, action.microbatch] = start + took
                    runs.append(TimedAction(rank, action, start, start + took))
                clocks[rank], busy[rank] = start + took, busy[rank] + took
                done[rank] += len(group)
                left -= len(group)
        if left == before:
            rank = next(r for r, actions in table.items() if done[r] < len(actions))
            action = table[rank][done[rank]]
            raise ValueError(f"the pipeline cannot go on: process {rank} waits with {action}")
    runs.sort(key=lambda run: (run.start, run.rank))
    return PipelineTimes(max(clocks.values(), default=0.0), tuple(busy.values()), tuple(runs))


def _together(actions: Sequence[Action], place: int) -> Sequence[Action]:
    """The actions that run at the same time, from this place on."""
    end = place
    while actions[end].together and end + 1 < len(actions):
        end += 1
    return actions[place : end + 1]


def _ready(
    action: Action, last: int, arrived: Callable[[int, str, Action], float | None]
) -> float | None:
    """Seconds at which the inputs of an action are there; None: not yet determined."""
    stage = action.stage
    if action.kind == "forward":
        return 0.0 if stage == 0 else arrived(stage - 1, "forward", action)
    forward = arrived(stage, "forward", action)
    if forward is None:
        return None
    if action.kind == "backward_weight":
        return arrived(stage, "backward_input", action)
    if stage == last:
        return forward
    for kind in ("backward", "backward_input"):
        gradient = arrived(stage + 1, kind, action)
        if gradient is not None:
            return max(forward, gradient)
    return None


FREED = {"backward": 1.0, "backward_input": 0.5, "backward_weight": 0.5}
"""The share of a microbatch's activations that each action lets go."""


def live_microbatches(times: PipelineTimes) -> dict[int, dict[int, float]]:
    """By rank and stage, the most microbatches whose activations are alive at once.

    A forward makes them, and the backward frees them; where that has two parts, each frees half.
    """
    most: dict[int, dict[int, float]] = {}
    for rank, stages in moments(times):
        seen = most.setdefault(rank, {})
        for stage, count in stages.items():
            seen[stage] = max(seen.get(stage, 0.0), count)
    return most


def moments(times: PipelineTimes) -> Iterator[tuple[int, dict[int, float]]]:
    """The processes as they do their actions: the microbatches alive in each stage meanwhile."""
    alive: dict[int, dict[int, float]] = {}
    for run in times.runs:
        stages = alive.setdefault(run.rank, {})
        stage = run.action.stage
        if run.action.kind == "forward":
            stages[stage] = stages.get(stage, 0.0) + 1
        yield run.rank, stages
        if run.action.kind != "forward":
            stages[stage] -= FREED[run.action.kind]


# -- stages ----------------------------------------------------------------------------------------

SAVED = "saved"
"""The kind of memory that forward makes and backward reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage with one microbatch: seconds and bytes.

    Shared weights (FSDP2) are whole after a backward, and sharded again by each forward: a forward
    behind another gathers them, and so does a backward behind a forward.
    """

    forward: float
    backward: float  # with recomputation
    weights: float  # of the backward, kernels for gradients of weights alone
    once: float  # once a step: reduction of gradients, the optimizer
    saved: int  # bytes of a microbatch that forward makes and backward reads
    peak: int  # bytes with one microbatch
    whole: int = 0  # bytes of the peak that stay from the first backward on: gradients, weights
    after: int = 0  # bytes at most once all microbatches are through
    gathers: float = 0.0  # seconds by which a forward is longer that gathers weights
    awaited: float = 0.0  # seconds of backward in which it waits for weights

    @staticmethod
    def of(estimate: Estimate) -> StageCost:
        """The cost of a stage, from the estimate of a training step of it."""
        parts = dict.fromkeys(("forward", "backward", "recompute", "optimizer"), 0.0)
        exchanges = {exchange.kernel: exchange for exchange in estimate.exchanges}
        gathers, count, awaited, reduced = 0.0, 0, 0.0, 0.0
        for row in estimate.rows:
            exchange = exchanges.get(row.index)
            aside = bool(estimate.graph.ops[row.ops[0]].stream)
            if not (aside or row.bytes_net):
                parts[row.part] += row.timing.t_device
            elif exchange and row.part == "optimizer":
                reduced += exchange.exposed
            elif exchange and aside and exchange.kind == "all_gather" and row.part != "forward":
                gathers += exchange.calls * exchange.seconds
                count, awaited = count + exchange.calls, awaited + exchange.exposed
        weights = sum(row.timing.t_device for row in rows_for_weights(estimate))
        alone = sum(parts.values())
        # Other exposed communication belongs to all parts.
        scale = (estimate.t_est - awaited - reduced) / alone if alone else 0.0
        forward = scale * parts["forward"]
        moments = estimate.memory.timeline.moments
        peaks = [
            max((m.total for m in moments if (m.part == "optimizer") is late), default=0)
            for late in (False, True)
        ]
        begins, ends = (m.by_kind for m in (moments[0], moments[-1])) if moments else ({}, {})
        whole = begins.get("gradients", 0)
        if whole:
            whole += max(0, begins["weights"] - ends["weights"])
        return StageCost(
            forward=forward,
            backward=scale * (parts["backward"] + parts["recompute"]) + awaited,
            weights=scale * weights,
            once=scale * parts["optimizer"] + reduced,
            saved=max((moment.by_kind[SAVED] for moment in moments), default=0),
            peak=peaks[0],
            whole=whole,
            after=peaks[1],
            # The first gather is waited for; each other one runs during the layer before.
            gathers=gathers / count + max(0.0, gathers - forward) * (count - 1) / count
            if count
            else 0.0,
            awaited=awaited,
        )

    def seconds(self, kind: str, behind: str) -> float:
        """Seconds of an action of this kind, behind another of the stage ("": behind none)."""
        sharded = behind in ("", "forward")
        backward = self.backward if sharded else self.backward - self.awaited
        return {
            "forward": self.forward + (self.gathers if sharded else 0.0),
            "backward": backward,
            "backward_input": backward - self.weights,
            "backward_weight": self.weights,
        }[kind]

    def held(self, alive: float, begun: bool) -> float:
        """Bytes while so many microbatches are alive.  begun: a backward is through."""
        return self.peak + (alive - 1) * self.saved - (0 if begun else self.whole)


def rows_for_weights(estimate: Estimate) -> list[Row]:
    """The kernels of backward that only gradients of weights need: products that read no weight
    and make something of the shape of one.

    A kernel that makes the gradients of its input as well (a convolution's) is none of them.
    """
    graph = estimate.graph
    shapes = {
        tuple(sorted(value.shape))
        for value in graph.values
        if value.role == "weights" and len(value.shape) > 1
    }
    made = {
        row.index: {
            tuple(sorted(graph.values[value].shape))
            for op in row.ops
            for value in graph.ops[op].outputs
        }
        for row in estimate.rows
        if row.part == "backward" and row.flops and not row.bytes_by_role.get("weights")
    }
    return [row for row in estimate.rows if shapes & made.get(row.index, set())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A step of a pipeline."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    times: PipelineTimes
    once: float  # seconds of the optimizer, of the slowest process
    transfer: float  # seconds of one transfer between stages
    live: Mapping[int, Mapping[int, float]]  # microbatches alive at most, by rank and stage
    peaks: tuple[int, ...]  # bytes of each process at its peak

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.times.seconds + self.once

    @property
    def bubble(self) -> float:
        """Share of the step in which processes wait for each other."""
        return self.times.bubble


def pipelined(
    stages: Mapping[int, StageCost],
    schedule: str,
    microbatches: int,
    handed: int,
    system: System,
    apart: int = 1,
    interleave: int = 1,
) -> Pipelined:
    """The pipeline of these stages, by their number.

    handed: bytes of one microbatch that a stage hands to the next.  apart: how far the ranks of
    neighbouring processes are from each other.  interleave: stages of each process.  Raises
    RequestError for a schedule that there is not, or that refuses so many of these or of
    microbatches.
    """
    ranks = len(stages) // interleave
    table = table_of(schedule, ranks, microbatches, interleave)
    transfer = 0.0
    if ranks > 1:
        transfer = collective_seconds(system, "send", handed, (0, apart)).seconds
    took = {}
    for actions in table.values():
        behind: dict[int, str] = {}
        for action in actions:
            took[action] = stages[action.stage].seconds(action.kind, behind.get(action.stage, ""))
            behind[action.stage] = action.kind
    times = walk_table(table, took.__getitem__, transfer)
    stages_of = {rank: sorted({a.stage for a in actions}) for rank, actions in table.items()}
    return Pipelined(
        schedule=schedule,
        ranks=ranks,
        stages=len(stages),
        microbatches=microbatches,
        times=times,
        once=max(sum(stages[s].once for s in some) for some in stages_of.values()),
        transfer=transfer,
        live=live_microbatches(times),
        peaks=_peaks(times, stages, stages_of),
    )


def _peaks(
    times: PipelineTimes, stages: Mapping[int, StageCost], stages_of: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """Bytes of each process at its peak: of a step of one microbatch, and saved ones of others.

    In the first backward of a stage gradients come as activations go.
    """
    most = {rank: float(sum(stages[s].after for s in some)) for rank, some in stages_of.items()}
    begun: set[int] = set()
    for run, (rank, alive) in zip(times.runs, moments(times), strict=True):
        stage = run.action.stage
        resting = sum(
            stages[s].held(alive.get(s, 0.0), s in begun) for s in stages_of[rank] if s != stage
        )
        held = stages[stage].held(alive[stage], stage in begun)
        if run.action.kind != "forward" and stage not in begun:
            held = max(held, stages[stage].held(alive[stage] - 1, True))
            begun.add(stage)
        most[rank] = max(most[rank], resting + held)
    return tuple(map(round, most.values()))
