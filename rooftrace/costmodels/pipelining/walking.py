"""The table of a pipeline walked: when each action runs, what is idle, what is alive.

A process does its actions in order.  A forward needs the stage before, a backward the stage behind;
what they hand over arrives after a transfer, which computing does not wait for otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.tracer.pipelines import Action

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
    """When the processes of a pipeline work, in seconds."""

    seconds: float  # of the whole table
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
        """How much longer the busiest process works than the mean one, as a share of the latter."""
        mean = sum(self.busy) / len(self.busy) if self.busy else 0.0
        return max(self.busy) / mean - 1 if mean else 0.0


def walk_table(
    table: Table, seconds: Callable[[int, str], float], transfer: float = 0.0
) -> PipelineTimes:
    """Walk the actions of all processes.

    seconds: what an action of a stage and a kind takes.  transfer: what is handed to another
    process arrives so many seconds later.  Actions that run together take the time of both: they
    share the engines of one chip, and hide each other's communication only.
    Raises ValueError for a table in which nobody can go on.
    """
    home = {action.stage: rank for rank, actions in table.items() for action in actions}
    last = max(home, default=0)
    ends: dict[tuple[int, str, int], float] = {}
    clocks = dict.fromkeys(table, 0.0)
    busy = dict.fromkeys(table, 0.0)
    places = dict.fromkeys(table, 0)
    runs: list[TimedAction] = []
    left = sum(map(len, table.values()))
    while left:
        before = left
        for rank, actions in table.items():
            while places[rank] < len(actions):
                group = _together(actions, places[rank])
                ready = [_ready(action, ends, home, last, transfer) for action in group]
                if any(time is None for time in ready):
                    break
                start = max(clocks[rank], *(time or 0.0 for time in ready))
                took = sum(seconds(action.stage, action.kind) for action in group)
                for action in group:
                    ends[action.stage, action.kind, action.microbatch] = start + took
                    runs.append(TimedAction(rank, action, start, start + took))
                clocks[rank], busy[rank] = start + took, busy[rank] + took
                places[rank] += len(group)
                left -= len(group)
        if left == before:
            rank = next(r for r, actions in table.items() if places[r] < len(actions))
            action = table[rank][places[rank]]
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
    action: Action,
    ends: Mapping[tuple[int, str, int], float],
    home: Mapping[int, int],
    last: int,
    transfer: float,
) -> float | None:
    """When what an action needs is there; None: not yet known."""
    stage, number = action.stage, action.microbatch
    if action.kind == "forward":
        if stage == 0:
            return 0.0
        return _arrives(ends, home, stage, stage - 1, action.kind, number, transfer)
    own = ends.get((stage, "forward", number))
    if own is None:
        return None
    if action.kind == "backward_weight":
        return ends.get((stage, "backward_input", number))
    if stage == last:
        return own
    for kind in ("backward", "backward_input"):
        arrived = _arrives(ends, home, stage, stage + 1, kind, number, transfer)
        if arrived is not None:
            return max(own, arrived)
    return None


def _arrives(
    ends: Mapping[tuple[int, str, int], float],
    home: Mapping[int, int],
    stage: int,
    source: int,
    kind: str,
    number: int,
    transfer: float,
) -> float | None:
    end = ends.get((source, kind, number))
    if end is None:
        return None
    return end + (transfer if home[source] != home[stage] else 0.0)


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
