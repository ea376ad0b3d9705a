"""Opening sections of a report: the model and its chips, the verdict, pipelines of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from rooftrace._plain import Positive
from rooftrace.costmodels.timing import Pipe, StageCost
from rooftrace.graph import pattern_of
from rooftrace.hardware.units import (
    format_count,
    format_flops,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.sections.memory import is_whole
from rooftrace.reporting.sections.results import tally

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.costmodels.memory import Memory
    from rooftrace.reporting.sections.results import Results


# -- pipelines -------------------------------------------------------------------------------------


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


def memory_by_phase(results: Results) -> dict[str, Memory]:
    """The memory of each phase at its peak on the first chip, by phase.

    Of a pipeline it is that of the fullest process, with all microbatches that are alive there.
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
        "other. Weights that processes share are gathered once more than there are microbatches, "
        "and gradients reduced once. Imbalance: the busiest process over the mean one. Peaks hold "
        "the activations of all microbatches that are alive."
    )
    return view.Section(
        title="Pipeline",
        parts=[
            view.Table(columns=PIPES, rows=rows, key="pipelines"),
            view.Table(columns=PROCESSES, rows=list(processes_of(results)), key="processes"),
            view.Note(note, on="page"),
        ],
    )


# -- heads -----------------------------------------------------------------------------------------


def head(results: Results) -> view.Section:
    """Model, chip and workload; before all else, phases that do not fit."""
    workloads = {
        graph.phase: words.workload_words(graph.phase, graph.workload)
        for graph in results.graphs.values()
    }
    page = [f"On {line}.  " for line in _headlines(results)]
    page += [f"{phase.capitalize()}: {text}.  " for phase, text in workloads.items()]
    screen = [*_headlines(results, first=True)]
    screen.append("; ".join(f"{phase} {text}".rstrip() for phase, text in workloads.items()))
    fits, sentence = _fit(results)
    parts = [
        view.Note(title(results), "strong", on="screen"),
        view.Note("\n".join(screen), on="screen", lines=True),
    ]
    if sentence:
        note = view.Note(sentence, "" if fits else "worst", on="screen")
        parts.insert(2 if fits else 0, note)
    return view.Section(place=1, parts=[*parts, view.Note("\n".join(page), on="page", lines=True)])


def title(results: Results) -> str:
    """The model, its parameters and its precision."""
    first = results.estimate(results.phases[0])
    processes = 1 if "stages" in first.graph.workload else first.processes
    return words.model_words(results.model, first.graph.workload, processes)


def _fit(results: Results) -> tuple[bool, str]:
    """Whether every phase fits on the chips that run it together, and a sentence on that."""
    processes = max(results.estimate(phase).processes for phase in results.phases)
    return words.fit_words(memory_by_phase(results), results.chips[0], processes)


def _headlines(results: Results, first: bool = False) -> list[str]:
    """A line for each chip, one more where a phase computes in another precision."""
    if first:
        return list(dict.fromkeys(words.chip_words(e) for _, _, e in results.of_first_chip()))
    chips = [chip.name for chip in results.chips]
    estimates = [results.estimate(phase, None, c) for c in chips for phase in results.phases]
    return list(dict.fromkeys(words.chip_words(estimate) for estimate in estimates))


def verdict(results: Results) -> view.Section:
    """A sentence on fit, one on a pipeline; then a line each on phases, executions and trust."""
    fits, sentence = _fit(results)
    notes = [view.Note(sentence, "" if fits else "bad")] if sentence else []
    notes += [view.Note(_piped(pipe)) for pipe in piped(results)[:1]]
    lines = [_phase_sentence(results.estimate(phase)) for phase in results.phases]
    if len(results.executions) > 1:
        lines.append(_speed_sentence(results))
    lines.append(_trust_sentence(results))
    lines += [
        f"{s[0].upper()}{s[1:]}." for s in words.of_weights(a for _, a in results.assumptions)
    ]
    below = [
        f"{phase}, {execution}" for phase, execution, e in results.of_first_chip() if e.below_floor
    ]
    if below:
        lines.append(
            f"**Below the compulsory floor: {words.listed(below)}**: the knobs promise "
            "fewer bytes than the step has to move at least."
        )
    notes += [view.Note(line, bullet=1) for line in lines]
    return view.Section(title="Verdict", parts=notes)


def _piped(pipe: Pipe) -> str:
    """ "Training in 4 stages (1f1b, 16 microbatches) is expected to take 1.2 s, of which ..."."""
    made = pipe.made
    takes = "is expected to take" if pipe.first.expected else "takes at least"
    return (
        f"{pipe.phase.capitalize()} in {words.plural(made.stages, 'stage')} ({made.schedule}, "
        f"{made.microbatches:,} microbatches) {takes} {format_time(made.seconds)}, of which "
        f"{format_share(made.bubble)} is waiting of processes for each other. "
        "Below, a stage with one microbatch:"
    )


def _longest(estimate: Estimate) -> str:
    """The kernel with most time, and the time of the step over its bound."""
    text = ""
    computing = [row for row in estimate.rows if not row.bytes_net]
    kernels = tally(computing, lambda row: (row.name, pattern_of(row.module)))
    if kernels and estimate.t_est:
        name, module = kernels[0].key
        of = f" of {units.MODULE.page(module)}" if module else ""
        share = format_share(kernels[0].seconds / estimate.t_est)
        text = f" Of kernels, {units.KERNEL.page(name)}{of} takes most, {share}."
    if estimate.t_bound and estimate.t_est > estimate.t_bound:
        text += f" The step takes {estimate.t_est / estimate.t_bound:.3g} times its bound."
    return text


def _phase_sentence(estimate: Estimate) -> str:
    rate = estimate.items_per_s
    speed = f", {format_count(rate)} {estimate.item}s/s" if rate else ""
    computing = [row for row in estimate.rows if not row.bytes_net]
    families = tally(computing, lambda row: row.family)
    most = (
        f" Most time goes to {families[0].key}, "
        f"{format_share(families[0].seconds / estimate.t_est)}."
        if families and estimate.t_est
        else ""
    )
    if estimate.communication:
        spent = sum(row.seconds for row in estimate.communication)
        exposed = estimate.times.t_exposed
        most += (
            f" Communication takes {format_time(spent)}; computing waits for "
            f"{format_time(exposed)} of it."
        )
    largest = ""
    if estimate.bytes_hbm:
        role, size = Counter(estimate.bytes.to_dict()).most_common(1)[0]
        largest = f", {format_share(size / estimate.bytes_hbm)} of it {role}"
    many = "one" if estimate.processes == 1 else f"each of {estimate.processes:,}"
    return (
        f"**{estimate.step.capitalize()}** ({estimate.execution.name}): "
        f"{_time_words(estimate)} on {many} {estimate.chip.title}{speed}; "
        f"limited by {words.regime_words(estimate.times)}; "
        f"{format_flops(estimate.flops)} and {format_traffic(estimate.bytes_hbm)} of HBM traffic"
        f"{largest}.{most}{_longest(estimate)}"
    )


def _time_words(estimate: Estimate) -> str:
    bound = format_time(estimate.t_bound)
    if not estimate.expected:
        return f"at least {format_time(estimate.t_est)} (with perfect overlap {bound})"
    interval = words.interval_words(estimate.t_interval)
    return f"expected {format_time(estimate.t_est)} (90 % within {interval}; bound {bound})"


def _speed_sentence(results: Results) -> str:
    other = next(name for name in results.executions if name != results.main)
    ratios = []
    for phase in results.phases:
        slow, fast = results.estimate(phase, other).t_est, results.estimate(phase).t_est
        if fast:
            ratios.append(f"{phase} {slow / fast:.2f}x")
    kinds = [e for _, _, e in results.of_first_chip()]
    head = {"expected": "Expected time", "bound": "Bound"}.get(words.time_word(kinds), "Time")
    return f"{head} of {other} over {results.main}: {', '.join(ratios)}."


def _trust_sentence(results: Results) -> str:
    gaps = results.unrecorded
    coverage = words.coverage_words((e.coverage for e in results.broken_down()), gaps)[1]
    assumed = words.assumption_words(assumption for _, assumption in results.assumptions)
    return (
        f"Coverage: {f'**{coverage}**' if gaps else coverage}. Assumptions: {assumed}. "
        f"Chip facts that are guesses: {words.guess_words(results.chips[0])}."
    )
