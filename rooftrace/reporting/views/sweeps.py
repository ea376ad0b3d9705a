"""Views of sweeps over sizes, of forms, and of fleets that sweep many targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.hardware.units import MISSING, format_time, plural
from rooftrace.reporting.commands import SweepFleet
from rooftrace.reporting.renderers import units, view, words
from rooftrace.studies.sweeps import Form, Sweep

# -- sweeps ----------------------------------------------------------------------------------------

Array = np.ndarray[Any, np.dtype[Any]]
MOST_LINES = 24
"""Lines of a table that a screen shows in full."""
_CROSSINGS, _CLIFFS = 12, 8
BEST = "Most items per second, of what fits"


def form_view(result: Form, output: view.Output) -> view.View:
    """Where a form is proven, and from which traces."""
    rows = [
        {
            "where": where,
            "fitted": len(regime.form.samples),
            "proven": len(regime.proven),
            "numbers": len(regime.form.slots),
            "formulas": len(regime.form.formulas) + len(regime.form.draws),
        }
        for where, regime in zip(result.where(), result.regimes, strict=True)
    ]
    columns = (
        view.Column("where", units.TEXT, "sizes", folded=True),
        view.Column("fitted", units.COUNT, "traces fitted"),
        view.Column("proven", units.COUNT, "proven on others", short="proven on"),
        view.Column("numbers", units.COUNT, "numbers that change", short="numbers"),
        view.Column("formulas", units.COUNT, "formulas"),
    )
    title = f"{result.title}, {result.phase} over {', '.join(result.names)}"
    return view.View(
        (view.Section(parts=[view.Note(title, "strong"), view.Table(columns=columns, rows=rows)]),),
        title,
    )


def sweep_view(result: Sweep, output: view.Output) -> view.View:
    """The table where it is short, else its best lines; crossings, cliffs, proofs."""
    form = result.cases[0].form
    title = f"{form.title}, {form.phase} over {', '.join(result.names)}"
    head = f"{title}: {plural(len(result), 'line')} from {plural(_traces(result), 'trace')}"
    assumed = words.of_weights(
        a for case in result.cases if case.form.regimes for a in case.form.example.assumptions
    )
    notes = [view.Note(head, "strong"), *(view.Note(line, "warn") for line in assumed)]
    sections = [view.Section(parts=notes, place=1)]
    labels = [name for name in result.cases[0].labels if name != "phase"]
    if len(result) <= MOST_LINES or output == "page":
        shown, name = result.records(slice(500)), "Lines"
    else:
        c, chips = result.columns, len(result.chips)
        best = best_lines({**c, **result.derived()}, c["case"] * chips + c["chip"])
        shown, name = result.records(best), BEST
    table = lines_table(shown, labels, result.names)
    sections.append(view.Section(title=name, parts=[table], place=2))
    if len(result) > 1:
        sections.append(view.Section(title="Limiters", parts=list(_crossings(result)), place=3))
        sections.append(view.Section(title="Cliffs", parts=list(_cliffs(result)), place=4))
    sections.append(view.Section(title="Proven", parts=list(_proven(result)), place=5))
    return view.View(tuple(s for s in sections if s.parts), title)


def _traces(result: Sweep) -> int:
    forms = {id(case.form): case.form for case in result.cases}.values()
    return sum(
        len(regime.form.samples) + len(regime.proven) for form in forms for regime in form.regimes
    )


def best_lines(columns: Mapping[str, Any], kinds: Array) -> Array:
    """The places of the lines with the most items per second of those that fit, for each kind.

    Where none fits: the one that needs least memory.
    """
    needed = columns["peak_memory"].astype(float)
    score = np.where(columns["fits"], columns["items_per_s"], -needed)
    order = np.argsort(-score, kind="stable")
    _, first = np.unique(kinds[order], return_index=True)
    best: Array = order[np.sort(first)]
    return best


def lines_table(
    lines: Sequence[Mapping[str, Any]], labels: Sequence[str], names: Sequence[str]
) -> view.Table:
    """Lines of a sweep.  names: its sizes; a label that is everywhere equal is left out."""
    labels = [name for name in labels if len({line[name] for line in lines}) > 1]
    columns = [
        *(view.Column(name, units.TEXT, name) for name in labels),
        view.Column("chip", units.TEXT, "chip"),
        *(view.Column(name, units.EXACT, name) for name in names),
        view.Column("t_est", units.SECOND, "expected"),
        view.Column("t_low", units.SECOND, "from", drop=1),
        view.Column("t_high", units.SECOND, "to", drop=1),
        view.Column("t_bound", units.SECOND, "bound"),
        view.Column("items_per_s", units.RATE, "items/s"),
        view.Column("flops", units.FLOP, "FLOP", on="page"),
        view.Column("bytes_hbm", units.BYTE, "HBM", on="page"),
        view.Column("regime", units.LIMITS, "limited by"),
        view.Column("regime_share", units.SHARE, "share", drop=2),
        view.Column("peak_memory", units.CAPACITY, "memory", drop=2),
        view.Column("fits", units.TEXT, "fits"),
    ]
    rows = [_row(line) for line in lines]
    axes = len(labels) + 1 + len(names)
    return view.Table(columns=columns, rows=rows, padded=False, axes=axes)


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: MISSING if isinstance(value, float) and value != value else value
        for name, value in line.items()
    }
    for name in ("t_low", "t_high"):
        if row[name] is MISSING:
            row[name] = view.BLANK
    return {**row, "fits": "yes" if line["fits"] else "no", "regime": str(line["regime"])}


def _crossings(result: Sweep) -> Iterator[view.Note]:
    changes = result.crossings()
    if not changes:
        places = np.unique(result.columns["regime"])
        regimes = " or ".join(sorted(words.limit(REGIMES[place]) for place in places))
        yield view.Note(f"no change along {result.names[0]}: limited by {regimes}", bullet=1)
    for crossing in changes[:_CROSSINGS]:
        yield view.Note(
            f"{crossing.name} {crossing.size:,}: {words.limit(str(crossing.before))} -> "
            f"{words.limit(str(crossing.after))}, "
            f"{format_time(crossing.t_est)}; {crossing.where(result.cases)}",
            bullet=1,
        )
    if len(changes) > _CROSSINGS:
        yield view.Note(
            f"and {len(changes) - _CROSSINGS:,} more, in crossings()", "faint", bullet=1
        )


def _cliffs(result: Sweep) -> Iterator[view.Note]:
    cliffs = result.cliffs()
    for cliff in cliffs[:_CLIFFS]:
        yield view.Note(
            f"{cliff.name} {cliff.size:,} -> {cliff.size + 1:,}: {cliff.jump:+.1%}, "
            f"{format_time(cliff.before)} -> {format_time(cliff.after)}; "
            f"{cliff.where(result.cases)}",
            bullet=1,
        )
    if len(cliffs) > _CLIFFS:
        yield view.Note(f"and {len(cliffs) - _CLIFFS:,} more, in cliffs()", "faint", bullet=1)


def _proven(result: Sweep) -> Iterator[view.Note]:
    forms = {id(case.form): case for case in result.cases}.values()
    alone = 0  # traces that are a point each
    for case in forms:
        settings = ", ".join(f"{name} {value}" for name, value in case.settings.items())
        before = f"{settings}: " if settings else ""
        for where, regime in zip(case.form.where(), case.form.regimes, strict=True):
            if len(regime.form.samples) == 1 and not regime.proven:
                alone += 1
                continue
            yield view.Note(
                f"{before}{where}: fitted on {plural(len(regime.form.samples), 'trace')}, "
                f"checked on {len(regime.proven)}",
                "faint",
                bullet=1,
            )
    if alone:
        yield view.Note(
            f"{plural(alone, 'point')} of a trace each, by no formula", "faint", bullet=1
        )
    models = [case.conditions.execution for case in result.cases]
    for text in dict.fromkeys(m.borrowed_on(chip) for m in models for chip in result.chips):
        if text:
            yield view.Note(text, "warn", bullet=1)
    if not result.whole:
        yield view.Note(
            f"{result.wanted - len(result):,} of {result.wanted:,} lines are not there yet", "warn"
        )


# -- fleets ----------------------------------------------------------------------------------------

_SHOWN = {"screen": 60, "page": 500}
"""Lines of the table on an output."""


def fleet_view(result: SweepFleet, output: view.Output) -> view.View:
    """The number of lines, the best lines of each target, and the failures with their errors.

    Reads one target after the other: all lines together may not fit in memory.
    """
    count, every, best = 0, [], []
    for _, frame in result.fleet.frames():
        count += len(frame)
        if count <= MOST_LINES:
            every.append(frame)
        labels = [name for name in result.labels if name in frame]
        kinds = frame.groupby([*labels, "chip"], observed=True, sort=False, dropna=False).ngroup()
        best.append(frame.iloc[best_lines(frame, kinds.to_numpy())])
    done = len(best)
    title = f"{plural(len(result.fleet.tasks), 'task')} over {', '.join(result.names)}"
    head = f"{title}, {done} done: {plural(count, 'line')} in {result.out}"
    there = len(result.fleet.tasks) - result.ran
    parts: list[view.Part] = [view.Note(head, "strong")]
    if there:
        parts.append(view.Note(f"{result.ran} ran now, {there} lay there already", "faint"))
    sections = [view.Section(parts=parts, place=1)]
    if best:
        frames, name = (every, "Lines") if count <= MOST_LINES else (best, BEST)
        table = list(_table(result, frames, _SHOWN.get(output, _SHOWN["screen"])))
        sections.append(view.Section(title=name, parts=table, place=2))
    if result.failures:
        failed = [
            view.Note(f"{each.title} failed: {each.error}", "warn", bullet=1)
            for each in result.failures
        ]
        sections.append(view.Section(title="Failed", parts=failed, place=3))
    return view.View(tuple(sections), title)


def _table(result: SweepFleet, frames: list[Any], most: int) -> Iterator[view.Part]:
    import pandas

    lines = pandas.concat(frames, ignore_index=True)
    labels = [name for name in result.labels if name in lines]
    yield lines_table(lines.head(most).to_dict("records"), labels, result.names)
    if len(lines) > most:
        yield view.Note(f"and {len(lines) - most:,} more lines, in frame()", "faint")
