"""Report sections on steps: the longest kernels, costs side by side, and useful what-ifs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.fusion import SUMMARIES, waits_at
from rooftrace.costmodels.rewrites import UNCHANGED
from rooftrace.graph import pattern_of
from rooftrace.graph.assumptions import FALLBACK
from rooftrace.hardware.units import format_capacity, format_share, format_time, listed
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.sections.memory import fit_cell
from rooftrace.reporting.sections.results import ratio, tally

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.costmodels.fusion import ExecutionModel
    from rooftrace.reporting.sections.results import Results
    from rooftrace.studies.advice import Guidance, WhatIf

ON_A_PAGE = 15  # kernels of each phase
KERNELS_ON_A_SCREEN = 9  # over all phases: a report of three phases fits one screen
LEAST_WAITING = 0.005  # of t_est: less time in which the device waits has no row

NAME = view.Column("kernel", units.KERNEL, "Kernel")
LIMIT = view.Column("limit", units.TEXT, "Limited by", short="limit")
MODULE = view.Column("module", units.MODULE, "Module", short="module", flexible=True)
WORK_OF_KERNELS = (
    view.Column("calls", units.COUNT, "Calls", short="calls", drop=1),
    view.Column("flops", units.FLOP, "FLOP", drop=2),
    view.Column("bytes", units.BYTE, "HBM"),
    view.Column("intensity", units.INTENSITY, "FLOP/byte", short="FLOP/B", drop=3),
)


def _seconds_of_kernels(estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    head = words.time_word(estimates)
    return (
        view.Column("seconds", units.SECOND, head.capitalize(), short=head),
        view.Column("share", units.SHARE, "Share of step", short="share"),
    )


def kernels_on_screen(results: Results) -> view.Section:
    """The few kernels of each phase that take most time, and waiting for the host."""
    lines = max(3, KERNELS_ON_A_SCREEN // len(results.phases))
    rows: list[dict[str, Any]] = []
    for estimate in results.broken_down():
        kernels, rest = _rows(estimate, lines, spare=1)
        if rest:
            kernels.append({key: rest[key] for key in ("kernel", "calls", "seconds", "share")})
        waiting = estimate.times.t_launch
        if waiting > LEAST_WAITING * estimate.t_est:
            kernels.append(
                {
                    "kernel": view.Cell("waiting for the host", "plain"),
                    "limit": view.Cell(words.LIMITS["launch"], "launch"),
                    "calls": waits_at(estimate.plan.graph).total() or None,
                    "seconds": waiting,
                    "share": ratio(waiting, estimate.t_est),
                }
            )
        rows += [{"phase": estimate.step, **row} for row in kernels]
    name = replace(NAME, short=f"kernels, {results.main}")
    table = view.Table(
        columns=(
            name,
            LIMIT,
            *_seconds_of_kernels(results.broken_down()),
            *WORK_OF_KERNELS,
            MODULE,
        ),
        rows=rows,
        group=lambda row: row["phase"],
        on="screen",
    )
    return view.Section(place=5, parts=[table])


def kernels_of(estimate: Estimate) -> view.Section:
    """The kernels of one phase, most time first; the others are summed up in the last row."""
    rows, rest = _rows(estimate, ON_A_PAGE)
    table = view.Table(
        columns=(NAME, LIMIT, MODULE, *WORK_OF_KERNELS, *_seconds_of_kernels([estimate])),
        rows=[*rows, rest] if rest else rows,
    )
    return view.Section(title=f"Kernels, {estimate.execution.name}", parts=[table])


def _rows(
    estimate: Estimate, most: int, spare: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Kernels by name, module pattern and regime (an operator that is compute-bound here and
    memory-bound there has two rows), and the sums of those beyond `most`.

    spare: so many more are shown in place of a row that sums them up.
    """
    keys = tally(estimate.rows, lambda row: (row.name, row.timing.regime, pattern_of(row.module)))
    shown = keys[:most] if len(keys) > most + spare else keys
    rows = [
        {
            "kernel": entry.key[0],
            "limit": view.Cell(words.LIMITS[entry.key[1]], entry.key[1]),
            "module": entry.key[2],
            "calls": entry.calls,
            "flops": entry.flops,
            "bytes": entry.bytes,
            "intensity": entry.intensity,
            "seconds": entry.seconds,
            "share": ratio(entry.seconds, estimate.t_est),
        }
        for entry in shown
    ]
    rest = keys[len(shown) :]
    if not rest:
        return rows, None
    seconds = sum(entry.seconds for entry in rest)
    return rows, {
        "kernel": view.Cell(f"{len(rest):,} more", "plain"),
        "calls": sum(entry.calls for entry in rest),
        "flops": sum(entry.flops for entry in rest),
        "bytes": sum(entry.bytes for entry in rest),
        "seconds": seconds,
        "share": ratio(seconds, estimate.t_est),
    }


# -- steps -----------------------------------------------------------------------------------------

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
"""Work of a step, on a page; a row is an estimate."""


def _rates(item: str, estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    """Time, limit, utilization and rate."""
    return (
        *_times(estimates),
        view.Column("regime", units.LIMITS, "Limited by", short="limited by", of=_regime),
        view.Column("mfu", units.SHARE, "MFU", drop=1),
        view.Column("hfu", units.SHARE, "HFU", on="page"),
        view.Column("items_per_s", units.RATE, "Items/s", short=f"{item}s/s", drop=1),
    )


def _on_screen(item: str, estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    """Columns of work and rates for a screen; lower bounds are marked."""
    return (
        EXECUTION,
        view.Column("flops_least", units.FLOP, "FLOP", of=lambda e: _least(e.flops, e)),
        view.Column("bytes_least", units.BYTE, "HBM", of=lambda e: _least(e.bytes_hbm, e)),
        INTENSITY,
        *_rates(item, estimates),
    )


def item_of(results: Results) -> str:
    """The item of all steps: token or sample; "item" where they differ."""
    items = {estimate.item for _, _, estimate in results.of_first_chip()}
    return items.pop() if len(items) == 1 else "item"


def _changed(model: ExecutionModel) -> str:
    """ ", with weight_residency.moe=2": the changes to a preset."""
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
    models = {name: estimate.execution for _, name, estimate in results.of_first_chip()}
    changed = [f"{name}{text}" for name, model in models.items() if (text := _changed(model))]
    if changed:
        parts.append(view.Note("; ".join(changed), on="screen"))
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
    parts += [
        view.Note(note, on="both" if UNCHANGED in note else "page", bullet=1) for note in notes
    ]
    parts += [view.Image(name) for name in FIGURES]
    return view.Section(title="What a step costs", place=2, parts=parts)


def chips_beside(results: Results) -> view.Section:
    """Each phase on each chip under the main execution, and its fit there.

    times: over the time on the first chip.
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


# -- suggestions -----------------------------------------------------------------------------------

ON_A_SCREEN, LEAST, MOST = 9, 2, 4  # lines over all phases; of a phase
NOTHING = "no modelled change saves 1 % or more"
EACH_ALONE = (
    "Each is one change alone, priced by an estimate of its own; gains do not add up. What saves "
    "less than 1 % of the step is left out."
)


def helping(results: Results) -> view.Section:
    """A numbered list of priced what-ifs for each phase: the action, its gain, its grounds."""
    parts: list[view.Part] = [view.Note(EACH_ALONE)]
    for phase, guidance in results.guidance.items():
        parts += _phase(phase, guidance)
    return view.Section(title="What would help, in order", parts=parts)


def _phase(phase: str, guidance: Guidance) -> list[view.Part]:
    step = guidance.step
    head = f"**{phase.capitalize()}** ({step.execution.name}, {format_time(step.t_est)})"
    notes = [view.Note(f"{head}:" if guidance.options else f"{head}: {NOTHING}.")]
    for number, what_if in enumerate(guidance.options, 1):
        notes.append(view.Note(_line(what_if), number=number))
    if guidance.together is not None:
        notes.append(view.Note(_line(guidance.together)))
    if phase == "training":  # named rewrites, which price them, have no backward
        missing = [a.text for a in step.graph.assumptions if a.kind == FALLBACK]
        rests = [n for n in step.resting_notes if n.endswith(tuple(missing))]
        notes += [view.Note(f"Not priced: {note}", "warn") for note in rests]
    if guidance.fitting:
        notes.append(view.Note(f"To make it fit one {step.chip.name}, least loss first:"))
    for number, what_if in enumerate(guidance.fitting, 1):
        notes.append(view.Note(_line(what_if), number=number))
    return [*notes]


def _line(what_if: WhatIf) -> str:
    """The action and its line, its gain, the limit it acts on, its needs, and its option."""
    most = "at most " if what_if.at_most else ""
    where = f" at {units.CODE.page(what_if.source)}" if what_if.source else ""
    parts = [
        f"**{what_if.action}**{where}: {most}{format_time(abs(what_if.gain))} "
        f"{'less' if what_if.gain >= 0 else 'more'} "
        f"({format_share(abs(what_if.share))}), {format_time(what_if.t_before)} -> "
        f"{format_time(what_if.t_after)}.",
        *([f"Acts on {words.LIMITS[what_if.acts_on]}: {what_if.rests_on}."] * (what_if.gain > 0)),
        f"Needs {what_if.needs}.",
    ]
    if text := fit_words(what_if):
        parts.append(text)
    if what_if.option:
        parts.append(f"Priced as {units.CODE.page(what_if.option)}.")
    return " ".join(parts)


def fit_words(what_if: WhatIf) -> str:
    """A sentence where the change decides whether the step fits its chip; else nothing."""
    chip, chips = what_if.after.chip, what_if.after.graph.processes
    fitted = what_if.before.memory.fits(chip)
    if fitted == what_if.fits:
        return ""
    peak, where = format_capacity(what_if.peak), f"each of {chips}" if chips > 1 else "one"
    if what_if.fits:
        return f"The step then fits {where} {chip.name}, with {peak}."
    return f"**It does not fit {where} {chip.name} then**: its peak is {peak}."


def helping_on_screen(results: Results) -> view.Section:
    """The first few of each phase, and all together; nothing for an estimate without a report."""
    guides = results.guidance.values() if results.memory else ()
    if not any(guide.options or guide.fitting for guide in guides):
        return view.Section()
    most = min(MOST, max(LEAST, ON_A_SCREEN // len(results.phases)))
    rows: list[dict[str, Any]] = []
    for phase, guidance in results.guidance.items():
        lines = list(_whatif_rows(guidance, most)) or [{"action": NOTHING}]
        fit = enumerate(guidance.fitting[:most], 1)
        lines += [_row(way, f"to fit {number}. {way.action}") for number, way in fit]
        rows += [{"phase": "" if place else phase, **line} for place, line in enumerate(lines)]
    columns = (
        view.Column("phase", units.TEXT, "suggestion"),
        view.Column("action", units.TEXT, f"what to do, {results.main}", clipped=30),
        view.Column("source", units.TEXT, "line", flexible=True, clipped=12, drop=3),
        view.Column("limit", units.TEXT, "limit", drop=1),
        view.Column("after", units.SECOND, "step then"),
        view.Column("gain", units.SECOND, "saves", mark="strong"),
        view.Column("share", units.SHARE, "of step", drop=2),
    )
    table = view.Table(columns=columns, rows=rows, on="screen")
    return view.Section(place=3, parts=[table])


def _whatif_rows(guidance: Guidance, most: int) -> Iterator[dict[str, Any]]:
    """The first what-ifs, and last those that go together."""
    alone = guidance.options[: most - (guidance.together is not None)]
    for number, what_if in enumerate(alone, 1):
        yield _row(what_if, f"{number}. {what_if.action}")
    if guidance.together is not None:
        told = [str(number) for number in guidance.ranks if number <= len(alone)]
        more = len(guidance.ranks) - len(told)
        told += ["another" if more == 1 else f"{more} others"] if more else []
        yield _row(guidance.together, f"{listed(told)} together")


def _row(what_if: WhatIf, action: str) -> dict[str, Any]:
    """The cells of a what-if on a screen."""
    unfit = what_if.before.memory.fits(what_if.before.chip) and not what_if.fits
    return {
        "action": view.Cell(f"{action} (no longer fits)", "bad") if unfit else action,
        "source": what_if.source.rpartition("/")[2],
        "limit": view.Cell(words.LIMITS[what_if.acts_on], what_if.acts_on)
        if what_if.gain > 0
        else view.BLANK,
        "after": what_if.t_after,
        "gain": view.Cell(what_if.gain, before="≤ " if what_if.at_most else ""),
        "share": what_if.share,
    }
