"""What every step costs, side by side, and on every chip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.costmodels.execution import SUMMARIES
from rooftrace.reporting.sections.memory import fit_cell
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.costmodels.execution import ExecutionModel
    from rooftrace.reporting.sections.results import Results

FIGURES = ("roofline.png", "time.png", "bytes.png")


def _least(value: float, estimate: Estimate) -> view.Cell:
    return view.Cell(value, before="≥ " if estimate.lower_bound else "")


def _time(estimate: Estimate) -> view.Cell:
    """The time of a step, with a mark where it is a bound."""
    bound = estimate.lower_bound or not estimate.expected
    return view.Cell(estimate.t_est, "strong", before="≥ " if bound else "")


def _times(estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    """The columns of times: the expected one first, or bounds that grow."""
    bound = view.Column("t_bound", units.SECOND, "Bound", short="bound", drop=2)
    if not any(estimate.expected for estimate in estimates):
        return (
            bound,
            view.Column(
                "t_serial",
                units.SECOND,
                "Bound, in turn",
                short="in turn",
                drop=4,
                of=lambda e: e.times.t_serial,
            ),
            view.Column("t_est", units.SECOND, "Bound, with host", short="with host", of=_time),
        )
    head = words.time_word(estimates)
    return (
        view.Column("t_est", units.SECOND, head.capitalize(), short=head, of=_time),
        view.Column(
            "t_interval",
            units.WORDS,
            "90 % within",
            short="90 % within",
            drop=3,
            of=lambda e: words.interval_words(e.t_interval),
        ),
        bound,
    )


def _regime(estimate: Estimate) -> view.Cell:
    return view.Cell(words.regime_words(estimate.times), estimate.times.regime)


PHASE = view.Column("phase", units.TEXT, "Phase")
EXECUTION = view.Column(
    "execution", units.TEXT, "Execution", short="", of=lambda e: e.execution.name
)
INTENSITY = view.Column("ai_hbm", units.INTENSITY, "FLOP/byte", short="FLOP/B", drop=4)
WORK = (
    PHASE,
    EXECUTION,
    view.Column("flops", units.FLOP, "FLOP"),
    view.Column(
        "bytes_hbm",
        units.BYTE,
        "HBM",
        of=lambda e: view.Cell(e.bytes_hbm, after=" (below the floor)" if e.below_floor else ""),
    ),
    INTENSITY,
    view.Column("kernels", units.COUNT, "Kernels"),
    view.Column("t_comp", units.SECOND, "t_comp", of=lambda e: e.times.t_comp),
    view.Column("t_hbm", units.SECOND, "t_hbm", of=lambda e: e.times.t_hbm),
)
"""On a page, what a step does; a row is an estimate."""


def _rates(item: str, estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    """How long it takes, what limits it, and how much it gets done."""
    return (
        *_times(estimates),
        view.Column("regime", units.LIMITS, "Limited by", short="limited by", of=_regime),
        view.Column("mfu", units.SHARE, "MFU", drop=1),
        view.Column("hfu", units.SHARE, "HFU", on="page"),
        view.Column("items_per_s", units.RATE, "Items/s", short=f"{item}s/s", drop=1),
    )


def _on_screen(item: str, estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    """Some of both; lower bounds are marked."""
    return (
        EXECUTION,
        view.Column("flops_least", units.FLOP, "FLOP", of=lambda e: _least(e.flops, e)),
        view.Column("bytes_least", units.BYTE, "HBM", of=lambda e: _least(e.bytes_hbm, e)),
        INTENSITY,
        *_rates(item, estimates),
    )


def item_of(results: Results) -> str:
    """What all steps process: token or sample; "item" where they differ."""
    items = {estimate.item for _, _, estimate in results.of_first_chip()}
    return items.pop() if len(items) == 1 else "item"


def _changed(model: ExecutionModel) -> str:
    """ ", with weight_residency.moe=2": what is not as its preset has it."""
    changed = [f"{name}={value}" for name, value in model.factors_changed.items()]
    return f", with {', '.join(changed)}" if changed else ""


def steps(results: Results) -> view.Section:
    """A line per phase and execution, on a page for every chip."""
    shown = [estimate for _, _, estimate in results.of_first_chip()]
    item = item_of(results)
    columns = _on_screen(item, shown)
    parts: list[view.Part] = [
        view.Table(columns=columns, rows=shown, group=lambda e: e.step, on="screen")
    ]
    models = {asked: estimate.execution for _, asked, estimate in results.of_first_chip()}
    told = [f"{name}{text}" for name, model in models.items() if (text := _changed(model))]
    if told:
        parts.append(view.Note("; ".join(told), on="screen"))
    for chip in results.chips:
        rows = [
            results.estimate(phase, execution, chip.name)
            for phase in results.phases
            for execution in results.executions
        ]
        parts.append(view.Note(f"On {chip.title}:", on="page"))
        rates = (PHASE, EXECUTION, *_rates(item, shown))
        parts.append(view.Table(columns=rates, rows=rows, on="page"))
        parts.append(view.Table(columns=WORK, rows=rows, on="page"))
    items = words.listed([f"{item}s" for item in sorted({e.item for e in shown})])
    about = [
        f"{name}: {SUMMARIES[name]}{_changed(models[name])}."
        for name in results.executions
        if name in SUMMARIES
    ]
    parts.append(view.Note(f"Items are {items}. {' '.join(about)}", on="page"))
    notes = dict.fromkeys(note for estimate in shown for note in estimate.notes)
    parts += [view.Note(note, on="page", bullet=1) for note in notes]
    parts += [view.Image(name) for name in FIGURES]
    return view.Section(title="What a step costs", place=2, parts=parts)


def chips_beside(results: Results) -> view.Section:
    """Each phase on each chip under the execution that is broken down, and whether it fits there.

    times: how often the time on the first chip.
    """
    head = words.time_word(
        results.estimate(phase, chip=chip.name)
        for phase in results.phases
        for chip in results.chips
    )
    columns = [
        view.Column("chip", units.TEXT, f"chips, {results.main}"),
        view.Column("t_est", units.SECOND, head, mark="strong"),
        view.Column("t_bound", units.SECOND, "bound", drop=2),
        view.Column("times", units.WORDS, "times", drop=3),
        view.Column("regime", units.LIMITS, "limited by", clipped=9),
        view.Column("mfu", units.SHARE, "MFU", drop=1),
        view.Column("items_per_s", units.RATE, f"{item_of(results)}s/s", drop=1),
        view.Column("memory", units.SHARE, "memory"),
        view.Column("fits", units.TEXT, "fits"),
    ]
    if results.largest:
        columns.append(view.Column("largest", units.WORDS, "largest batch", drop=1))
    rows = []
    for phase in results.phases if len(results.chips) > 1 else ():
        first, need = results.estimate(phase).t_est, results.memory[phase]
        for chip in results.chips:
            estimate = results.estimate(phase, chip=chip.name)
            batch = results.largest.get(phase, {}).get(chip.name)
            row = {n: getattr(estimate, n) for n in ("t_est", "t_bound", "mfu", "items_per_s")}
            row |= {
                "phase": phase,
                "chip": chip.name,
                "times": f"{estimate.t_est / first:.2f}" if first else None,
                "regime": _regime(estimate),
                "memory": need.peak / chip.memory_capacity.value,
                "fits": fit_cell(need, chip),
                "largest": words.batch_words(batch) if batch is not None else "",
            }
            rows.append(row)
    table = view.Table(columns=columns, rows=rows, group=lambda row: row["phase"], on="screen")
    return view.Section(place=4, parts=[table])
