"""Meshes of chips for a step, the speed of each, and a whole training on one of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.memory import Memory
from rooftrace.costmodels.timing import Pipe, StageCost
from rooftrace.hardware.chip import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRow(Plain):
    """A step over one mesh."""

    mesh: Mapping[str, int]  # processes along each axis
    chips: int
    checkpoint: str  # which activations are made again
    batch: int  # of one replica, or of one of its microbatches
    microbatches: int  # of a step of a replica
    global_batch: int  # of a step of all replicas
    item: str  # "token", "sample"
    items: int  # of a step of all replicas
    seconds: float  # of a step
    once: float  # of these, once for any number of microbatches
    mfu: float | None
    exposed: float  # share of the step for which computing waits for others
    bubble: float | None  # share of the step for which stages of a pipeline wait; None: no pipeline
    limited_by: str  # "compute", "network (tp)"
    peak: int  # bytes of the process that needs most
    fixed: int  # bytes that it needs whatever the batch: weights, gradients, states
    saved: int  # bytes of weights and states of all processes, copies of dp_replicate once
    capacity: float  # bytes of one chip that may be used
    price: float | None  # dollar/hour of one chip
    beyond: str  # phrases on exchanges that exceed the measurements; "" for none

    copies: tuple[int, ...] = ()  # chips of meshes that are so many independent copies of this one

    KEYS = "* fits items_per_s items_per_s_per_chip dollars_per_million_items=dollars"

    @property
    def fits(self) -> bool:
        """Whether each chip holds its part."""
        return self.peak <= self.capacity

    @property
    def items_per_s(self) -> float:
        """Items per second of all chips."""
        return self.items / self.seconds

    @property
    def items_per_s_per_chip(self) -> float:
        """Items per second of one chip."""
        return self.items_per_s / self.chips

    @property
    def dollars(self) -> float | None:
        """Dollars for a million items; None without a price."""
        if self.price is None:
            return None
        return 1e6 * self.price / 3600 / self.items_per_s_per_chip

    def seconds_of(self, microbatches: float) -> float:
        """Seconds of a step of so many microbatches of a replica, of which gradients add up."""
        repeated = self.seconds - self.once
        return repeated * microbatches / self.microbatches + self.once


def row_of(
    estimates: Mapping[str, Estimate],
    mesh: Mapping[str, int],
    checkpoint: str,
    free: float,
    accumulated: int = 1,
) -> MeshRow:
    """The row of a step: of its estimate, or of those of the stages of a pipeline, by phase.

    mesh: as requested.  free: the share of the memory that is kept free.  accumulated: microbatches
    of a step without a pipeline, one after another, whose gradients add up.
    """
    stages = {
        int(stage): estimate
        for estimate in estimates.values()
        for stage in estimate.graph.workload.get("stages", ())
    }
    first = next(iter(estimates.values()))
    pipe = Pipe.of(stages) if stages else None
    chips = first.processes
    replicas = first.replicas or 1
    microbatches = pipe.made.microbatches if pipe else accumulated
    batch = int(first.graph.workload.get("batch") or 1)
    once = pipe.made.once if pipe else StageCost.of(first).once
    step = pipe.made.seconds if pipe else once + (first.t_est - once) * accumulated
    mfu = pipe.mfu if pipe else first.mfu and first.mfu * accumulated * first.t_est / step
    memories = [estimate.memory for estimate in estimates.values()]
    peak = max(pipe.made.peaks) if pipe else _peak(first.memory, accumulated)
    exposed = sum(e.times.t_exposed for e in estimates.values())
    seconds = sum(e.t_est for e in estimates.values())
    capacity = first.chip.room(free)
    longest = max(estimates.values(), key=lambda estimate: estimate.t_est)
    return MeshRow(
        mesh=dict(mesh),
        chips=chips,
        checkpoint=checkpoint,
        batch=batch,
        microbatches=microbatches,
        global_batch=batch * microbatches * replicas,
        item=str(first.graph.workload.get("item") or "sample"),
        items=first.items * microbatches * replicas,
        seconds=step,
        once=once,
        mfu=mfu,
        exposed=exposed / seconds if seconds else 0.0,
        bubble=pipe.made.bubble if pipe else None,
        limited_by=_limit(longest),
        peak=peak,
        fixed=max(map(_fixed, memories)),
        saved=_saved([e.memory for e in stages.values()] or memories, chips, mesh),
        capacity=capacity,
        price=None if first.chip.price is None else first.chip.price.value,
        beyond="; ".join(
            dict.fromkeys(r.beyond for e in estimates.values() for r in e.communication if r.beyond)
        ),
    )


_SAVED = ("weights", "optimizer")


def _fixed(memory: Memory, kinds: Sequence[str] = (*_SAVED, "gradients")) -> int:
    """Bytes of weights, gradients and states together, which no batch makes smaller."""
    moments = memory.timeline.moments
    ends = [moment for moment in moments if moment.part == "optimizer"] or moments[:1]
    return max((sum(moment.by_kind[kind] for kind in kinds) for moment in ends), default=0)


def _saved(memories: Sequence[Memory], chips: int, mesh: Mapping[str, int]) -> int:
    """Bytes of a checkpoint.  memories: of one process, or of the stages of a pipeline."""
    held = sum(_fixed(memory, _SAVED) for memory in memories)
    return held * chips // (mesh.get("pp", 1) * mesh.get("dp_replicate", 1))


def _peak(memory: Memory, accumulated: int) -> int:
    """The peak of the last of so many microbatches, which meets all gradients of the others; a
    gradient of its own is there beside until it is added."""
    moments = memory.timeline.moments
    if accumulated == 1 or not moments:
        return memory.peak
    made = [moment.by_kind["gradients"] for moment in moments]
    own = max((after - before for before, after in pairwise(made)), default=0)
    working = max(moment.total - size for moment, size in zip(moments, made, strict=True))
    return max(memory.peak, working + memory.gradients + own)


def _limit(estimate: Estimate) -> str:
    regime = estimate.times.regime
    axis = estimate.exposed_axis
    return f"{regime} ({axis})" if regime == "network" and axis else str(regime)


@dataclass(frozen=True, eq=False, kw_only=True)
class MeshAnswer(Plain, Shown):
    """Meshes compared: those that fit and hold the limits first, most items per chip first."""

    title: str
    question: str
    item: str
    system: str
    rows: tuple[MeshRow, ...]  # within all limits, the best first
    others: tuple[MeshRow, ...]  # outside of a limit, the least memory first
    left_out: tuple[str, ...]  # meshes that cannot be, and why
    edges: tuple[str, ...]  # where the best stands at the end of what was tried
    rests: tuple[str, ...]

    KEYS = (
        "title question item system best rows others needed_chips=needed left_out edges "
        "rests_on=rests"
    )

    @property
    def best(self) -> MeshRow | None:
        """The best mesh; None where none is within the limits."""
        return self.rows[0] if self.rows else None

    @property
    def needed(self) -> int | None:
        """How many chips hold the step that takes least of all, by capacity alone: its weights,
        gradients and states where these fill more than a chip has, else its peak.

        None where one fits already, or nothing was traced.
        """
        if any(row.fits for row in (*self.rows, *self.others)) or not self.others:
            return None
        sizes = ((row, row.fixed if row.fixed > row.capacity else row.peak) for row in self.others)
        return min(math.ceil(row.chips * size / row.capacity) for row, size in sizes)

    def __repr__(self) -> str:
        best = self.best
        answer = "no mesh" if best is None else mesh_words(best.mesh)
        return short(self, f"{self.question}: {answer}, of {len(self.rows) + len(self.others)}")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScalingAnswer(Plain, Shown):
    """One step on more and more chips: the batch of a chip kept (weak), or that of all (strong)."""

    title: str
    item: str
    system: str
    rows: tuple[MeshRow, ...]  # fewest chips first; batches of one size for each replica
    left_out: tuple[str, ...]
    rests: tuple[str, ...]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw efficiency and seconds of a step over the number of chips: PNG, SVG or PDF."""
        from rooftrace.reporting.figures import draw_answer

        draw_answer(self, Path(path))

    def weak(self, row: MeshRow) -> float:
        """Items per second of a chip, as a share of those on the fewest chips."""
        return row.items_per_s_per_chip / self.rows[0].items_per_s_per_chip

    def microbatches(self, row: MeshRow) -> float:
        """Microbatches of a replica for as many items in all as the most chips do in one step."""
        last = self.rows[-1]
        return row.microbatches * last.items / row.items

    def strong_seconds(self, row: MeshRow) -> float:
        """Seconds of a step of that many items."""
        return row.seconds_of(self.microbatches(row))

    def strong(self, row: MeshRow) -> float:
        """How much of the added chips is won: speed-up over that of the fewest, by their ratio."""
        first = self.rows[0]
        gain = self.strong_seconds(first) / self.strong_seconds(row)
        return gain * first.chips / row.chips

    def __repr__(self) -> str:
        counts = f"{self.rows[0].chips} to {self.rows[-1].chips:,} chips"
        return short(self, f"{self.title}, {counts}: weak {self.weak(self.rows[-1]):.0%}")

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                **row.to_dict(),
                "weak_efficiency": self.weak(row),
                "strong_microbatches": self.microbatches(row),
                "strong_seconds": self.strong_seconds(row),
                "strong_efficiency": self.strong(row),
            }
            for row in self.rows
        ]

    KEYS = "title item system rows=_rows left_out rests_on=rests"


# -- trainings -------------------------------------------------------------------------------------

INTERRUPTIONS = Fact.of(
    "50676 h", "second",
    "Llama 3 405B (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days of "
    "16,384 H100",
    "derived",
)  # fmt: skip
RESTART = Fact.of(
    "10 min", "second",
    "MegaScale (arXiv:2402.15627): failures are found and diagnosed in less than 10 minutes on "
    "average",
    "derived",
)  # fmt: skip
STORAGE = Fact.of(
    "122 MB/s", "byte/s",
    "Llama 3 405B (arXiv:2407.21783, section 3.3.1): storage of 2 TB/s sustained, over 16,384 "
    "chips",
    "derived",
)  # fmt: skip


def goodput(mtbf: float, save: float, interval: float, restart: float) -> float:
    """The share of the time in which training goes on.  All in seconds.

    mtbf: mean time between interruptions, which come by chance, also in a restart.  save: of a
    checkpoint, for which training stops.  interval: of training between two of them.  From an
    interruption on, the work since the last checkpoint is done again, after `restart`: the
    complete model of Daly, Future Generation Computer Systems 22 (2006).
    """
    try:
        taken = math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) * mtbf
    except OverflowError:
        return 0.0
    return interval / taken


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingRun(Plain, Shown):
    """A whole training on one mesh: days, chip-hours, dollars, energy, with interruptions.

    row: its step.  chip_mtbf, restart, storage (byte/s of one chip), price (of one chip and hour),
    power (of one chip): facts, None where unknown.  asked: seconds of "mtbf" (of all chips), "save"
    and "interval" that a user names.
    """

    title: str
    system: str
    tokens: float  # or samples
    row: MeshRow
    chip_mtbf: Fact = INTERRUPTIONS
    restart: Fact = RESTART
    storage: Fact = STORAGE
    price: Fact | None
    power: Fact | None
    asked: Mapping[str, float] = field(default_factory=dict)
    rests: tuple[str, ...]

    KEYS = (
        "title system tokens row days chip_hours dollars joules goodput undisturbed mtbf save "
        "interval restart=restart.value interruptions chip_mtbf storage price power rests_on=rests"
    )

    def __repr__(self) -> str:
        text = f"{self.days:,.3g} days on {self.row.chips:,} chips, goodput {self.goodput:.1%}"
        return short(self, text)

    @property
    def undisturbed(self) -> float:
        """Seconds without interruptions and checkpoints."""
        return self.tokens / self.row.items_per_s

    @property
    def mtbf(self) -> float:
        """Seconds between interruptions of all chips together."""
        return self.asked.get("mtbf", self.chip_mtbf.value / self.row.chips)

    @property
    def save(self) -> float:
        """Seconds of a checkpoint: its bytes at the bandwidth of the storage."""
        written = self.row.saved / (self.storage.value * self.row.chips)
        return self.asked.get("save", written)

    @property
    def interval(self) -> float:
        """Seconds of training between checkpoints: by default the optimum of Young, CACM 17 (1974).

        It is sqrt(2 * save * mtbf), where a checkpoint is much shorter than the time between
        interruptions.
        """
        return self.asked.get("interval", math.sqrt(2 * self.save * self.mtbf))

    @property
    def goodput(self) -> float:
        """The share of the time in which training goes on."""
        return goodput(self.mtbf, self.save, self.interval, self.restart.value)

    @property
    def seconds(self) -> float:
        """Seconds with interruptions and checkpoints."""
        return self.undisturbed / self.goodput

    @property
    def days(self) -> float:
        """Days of all."""
        return self.seconds / 86400

    @property
    def interruptions(self) -> float:
        """How many are to be expected."""
        return self.seconds / self.mtbf

    @property
    def chip_hours(self) -> float:
        """Hours of one chip."""
        return self.row.chips * self.seconds / 3600

    @property
    def dollars(self) -> float | None:
        """Dollars of all chips; None without a price."""
        return None if self.price is None else self.chip_hours * self.price.value

    @property
    def joules(self) -> float | None:
        """Joules of all at full power, all the time: at most that many.  None without a power."""
        return None if self.power is None else self.power.value * self.row.chips * self.seconds


# -- meshes ----------------------------------------------------------------------------------------


def meshes_of(chips: int, axes: Sequence[str], most: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every way to write `chips` as a product of a size for each axis, in the order of the axes.

    most: the largest size of an axis, where it has one (tensor parallelism within a node).  Axes
    of size 1 are left out, but for the first one of all.
    """
    for sizes in _products(chips, len(axes)):
        mesh = dict(zip(axes, sizes, strict=True))
        if all(size <= most.get(axis, size) for axis, size in mesh.items()):
            yield {axis: size for axis, size in mesh.items() if size > 1} or {axes[0]: 1}


_EXPERTS_OVER = ("dp", "fsdp", "dp_shard", "cp", "tp")


def with_experts(mesh: Mapping[str, int], most: int) -> Iterator[dict[str, int]]:
    """A mesh without and with expert parallelism, which is a view of processes of dp and tp."""
    inside = math.prod(size for axis, size in mesh.items() if axis in _EXPERTS_OVER)
    for size in range(1, min(inside, most) + 1):
        if inside % size == 0:
            yield {**mesh, "ep": size} if size > 1 else dict(mesh)


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """The tuples of `factors` positive integers whose product is `number`."""
    if factors == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _products(number // first, factors - 1):
                yield (first, *rest)


def mesh_words(mesh: Mapping[str, int]) -> str:
    """ "dp=32, tp=8"."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
