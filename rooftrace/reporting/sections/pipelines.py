"""Pipelines: the step that the stages of a phase make together, and what each process holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from rooftrace._plain import Positive
from rooftrace.costmodels.pipelining import Pipe, StageCost
from rooftrace.reporting.sections.network import is_whole
from rooftrace.reporting.view import model as view, units

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.costmodels.memory import Memory
    from rooftrace.reporting.sections.results import Results


def piped(results: Results) -> list[Pipe]:
    """The pipelines of a report: main execution, every chip."""
    pipes: list[Pipe] = []
    for chip in results.chips:
        stages: dict[int, Estimate] = {}
        for phase in results.phases:
            estimate = results.estimate(phase, None, chip.name)
            for stage in estimate.graph.workload.get("stages", ()):
                stages[int(stage)] = estimate
        if stages:
            pipes.append(Pipe.of(stages))
    return pipes


def held(results: Results) -> dict[str, Memory]:
    """What each phase takes at its peak on the first chip, by phase.

    Of a pipeline that is the fullest process, with all microbatches that are alive there.
    """
    needs = {
        phase: need for phase, need in results.memory.items() if is_whole(results.estimate(phase))
    }
    for pipe in piped(results)[:1] if len(needs) < len(results.memory) else ():
        stages = [need for phase, need in results.memory.items() if phase not in needs]
        fullest = max(stages, key=lambda need: need.peak)
        needs[pipe.phase] = replace(fullest, peak=max(pipe.made.peaks))
    return needs


class Piped(TypedDict):
    """The step of a pipeline."""

    phase: str
    chip: str
    schedule: str
    stages: Positive
    microbatches: Positive
    seconds: float  # of the step
    bubble: float  # share of the step, in which processes wait for each other
    imbalance: float  # of the busiest process over the mean one, less 1
    transfer: float  # s of one transfer between stages
    items_per_s_per_chip: float | None
    mfu: float | None
    peak: int  # byte, of the process that holds most
    fits: bool  # whether each chip holds its process


def rows_of(results: Results) -> Iterator[Piped]:
    """A row for each pipeline."""
    for pipe in piped(results):
        made = pipe.made
        yield {
            "phase": pipe.phase,
            "chip": pipe.first.chip.name,
            "schedule": made.schedule,
            "stages": made.stages,
            "microbatches": made.microbatches,
            "seconds": made.seconds,
            "bubble": made.bubble,
            "imbalance": made.times.imbalance,
            "transfer": made.transfer,
            "items_per_s_per_chip": pipe.items_per_s_per_chip,
            "mfu": pipe.mfu,
            "peak": max(made.peaks),
            "fits": max(made.peaks) <= pipe.first.chip.room(),
        }


def processes_of(results: Results) -> Iterator[dict[str, Any]]:
    """A row for each process of a pipeline."""
    for pipe in piped(results):
        capacity = pipe.first.chip.memory_capacity.value
        for rank, alive in sorted(pipe.made.live.items()):
            costs = [StageCost.of(pipe.stages[stage]) for stage in alive]
            yield {
                "rank": rank,
                "stages": ", ".join(str(stage + 1) for stage in sorted(alive)),
                "forward": sum(cost.forward for cost in costs),
                "backward": sum(cost.backward for cost in costs),
                "busy": pipe.made.times.busy[rank],
                "live": sum(alive.values()),
                "peak": pipe.made.peaks[rank],
                "share": pipe.made.peaks[rank] / capacity,
            }


PIPES = (
    view.Column("schedule", units.TEXT, "Schedule", short="pipeline"),
    view.Column("stages", units.COUNT, "Stages", short="stages"),
    view.Column("microbatches", units.COUNT, "Microbatches", short="microbatches"),
    view.Column("seconds", units.SECOND, "Step", short="step"),
    view.Column("bubble", units.SHARE, "Bubble", short="bubble"),
    view.Column("imbalance", units.SHARE, "Imbalance", short="imbalance", drop=2),
    view.Column("items_per_s_per_chip", units.RATE, "Items/s per chip", short="items/s/chip"),
    view.Column("mfu", units.SHARE, "MFU"),
    view.Column("peak", units.CAPACITY, "Peak", short="peak"),
)
PROCESSES = (
    view.Column("rank", units.INDEX, "Process", short="process"),
    view.Column("stages", units.WORDS, "Stages", short="stages"),
    view.Column("forward", units.SECOND, "Forward", short="forward"),
    view.Column("backward", units.SECOND, "Backward", short="backward"),
    view.Column("busy", units.SECOND, "Busy", short="busy"),
    view.Column("live", units.NUMBER, "Live microbatches", short="live"),
    view.Column("peak", units.CAPACITY, "Peak", short="peak"),
    view.Column("share", units.SHARE, "Of its memory", short="of memory"),
)


def pipelines(results: Results) -> view.Section:
    """The step of a pipeline, its bubble, and the peak of each process."""
    rows = list(rows_of(results))
    if not rows:
        return view.Section()
    note = (
        "Each distinct stage is traced once with one microbatch; the actions of the schedule are "
        "walked with its seconds. Bubble: the share of the step in which processes wait for each "
        "other. Imbalance: the busiest process over the mean one. Peaks hold the activations of "
        "all microbatches that are alive."
    )
    return view.Section(
        title="Pipeline",
        parts=[
            view.Table(columns=PIPES, rows=rows, key="pipelines"),
            view.Table(columns=PROCESSES, rows=list(processes_of(results)), key="processes"),
            view.Note(note, on="page"),
        ],
    )
