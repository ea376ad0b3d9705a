"""What would help each step, in order: every line is a what-if that was priced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_capacity, format_share, format_time
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.guiding import Guidance, WhatIf
    from rooftrace.reporting.sections.results import Results

ON_A_SCREEN, LEAST, MOST = 9, 2, 4  # lines over all phases; of a phase
NOTHING = "nothing that is modelled would save 1 %"
EACH_ALONE = (
    "Each is one change alone, priced by an estimate of its own; gains do not add up. What saves "
    "less than 1 % of the step is left out."
)


def helping(results: Results) -> view.Section:
    """A numbered list for each phase: what to do, the time it saves, and on what that rests."""
    parts: list[view.Part] = [view.Note(EACH_ALONE)]
    for phase, guidance in results.guidance.items():
        parts += _phase(phase, guidance)
    return view.Section(title="What would help, in order", parts=parts)


def _phase(phase: str, guidance: Guidance) -> list[view.Part]:
    step = guidance.step
    head = f"**{phase.capitalize()}** ({step.execution.name}, {format_time(step.t_est)})"
    if not guidance.options:
        return [view.Note(f"{head}: {NOTHING}.")]
    notes = [view.Note(f"{head}:")]
    for number, what_if in enumerate(guidance.options, 1):
        notes.append(view.Note(_line(what_if), number=number))
    if guidance.together is not None:
        notes.append(view.Note(_line(guidance.together)))
    return [*notes]


def _line(what_if: WhatIf) -> str:
    """What to do, then, the gain, on what it acts, what it needs, and how to ask for the same."""
    most = "at most " if what_if.at_most else ""
    parts = [
        f"**{what_if.action}**: {most}{format_time(what_if.gain)} less "
        f"({format_share(what_if.share)}), {format_time(what_if.t_before)} -> "
        f"{format_time(what_if.t_after)}.",
        f"Acts on {words.LIMITS[what_if.acts_on]}: {what_if.rests_on}.",
        f"Needs {what_if.needs}.",
    ]
    if text := fit_words(what_if):
        parts.append(text)
    if what_if.option:
        parts.append(f"Priced as {units.CODE.page(what_if.option)}.")
    return " ".join(parts)


def fit_words(what_if: WhatIf) -> str:
    """A sentence where the change decides whether the step fits its chip; else nothing."""
    chip = what_if.after.chip
    fitted = what_if.before.memory.fits(chip)
    if fitted == what_if.fits:
        return ""
    peak = format_capacity(what_if.peak)
    if what_if.fits:
        return f"The step then fits one {chip.name}, with {peak}."
    return f"**It does not fit one {chip.name} then**: its peak is {peak}."


def helping_on_screen(results: Results) -> view.Section:
    """The first few of each phase, and all together; nothing for an estimate without a report."""
    if not results.memory or not any(told.options for told in results.guidance.values()):
        return view.Section()
    most = min(MOST, max(LEAST, ON_A_SCREEN // len(results.phases)))
    rows: list[dict[str, Any]] = []
    for phase, guidance in results.guidance.items():
        lines = list(_rows(guidance, most)) or [{"action": NOTHING}]
        rows += [{"phase": "" if place else phase, **line} for place, line in enumerate(lines)]
    columns = (
        view.Column("phase", units.TEXT, "would help"),
        view.Column("action", units.TEXT, f"what to do, {results.main}", clipped=30),
        view.Column("limit", units.TEXT, "acts on", drop=1),
        view.Column("after", units.SECOND, "then"),
        view.Column("gain", units.SECOND, "less", mark="strong"),
        view.Column("share", units.SHARE, "share", drop=2),
    )
    table = view.Table(columns=columns, rows=rows, on="screen")
    return view.Section(place=3, parts=[table])


def _rows(guidance: Guidance, most: int) -> Iterator[dict[str, Any]]:
    """The first what-ifs, and in the last place those that go together."""
    alone = guidance.options[: most - (guidance.together is not None)]
    for number, what_if in enumerate(alone, 1):
        yield _row(what_if, f"{number}. {what_if.action}")
    if guidance.together is not None:
        yield _row(guidance.together, guidance.together.action)


def _row(what_if: WhatIf, action: str) -> dict[str, Any]:
    """The cells of a what-if on a screen."""
    unfit = what_if.before.memory.fits(what_if.before.chip) and not what_if.fits
    return {
        "action": view.Cell(f"{action} (no longer fits)", "bad") if unfit else action,
        "limit": view.Cell(words.LIMITS[what_if.acts_on], what_if.acts_on),
        "after": what_if.t_after,
        "gain": view.Cell(what_if.gain, before="≤ " if what_if.at_most else ""),
        "share": what_if.share,
    }
