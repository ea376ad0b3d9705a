"""A check as other programs take it: a comment, GitLab's code quality, JUnit.

A comment is Markdown as GitHub and GitLab show it.  Neither shows SVG that stands in a comment, so
its figures are bars of letters, and a chart in mermaid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from rooftrace._escapes import toml_key, visible
from rooftrace.reporting.gates.words import (
    cause_lines,
    cause_notes,
    change_words,
    gate_view,
    shift_table,
    why_notes,
)
from rooftrace.reporting.view import as_page, model as view, units

if TYPE_CHECKING:
    from rooftrace.reporting.locks.checking import GateOutcome, Shift

MARKER = "<!-- rooftrace check -->"
"""The first line of a comment, by which it is known again."""
MOST = 60_000
"""Letters of a comment; GitHub takes 65,536."""
_ROWS = 10
_CAUSES = 5
_CHART = 8


def comment(result: GateOutcome) -> str:
    """A comment: the verdict, a table with bars, the causes, and all steps folded away."""
    sign = "❌" if result.failed else "✅"
    parts: list[view.Part] = [view.Note(f"{sign} {result.verdict()}", "strong")]
    parts += [view.Note(line, bullet=1) for line in result.stale]
    shifts = result.over or result.under or result.other
    if shifts:
        parts.append(shift_table(shifts[:_ROWS]))
        if len(shifts) > _ROWS:
            parts.append(view.Note(f"and {len(shifts) - _ROWS} more"))
    parts += cause_notes(result.over, "page", _CAUSES)
    parts += why_notes(result)
    short = as_page(view.View((view.Section(parts=parts),), "Costs", level=3))
    folded = [("Figure", _chart(shifts)), ("All steps", _all_steps(result))]
    if result.over and (result.under or result.other or len(result.over) > _ROWS):
        folded.insert(1, ("All that moved", as_page(replace(gate_view(result, "page"), title=""))))
    text = f"{MARKER}\n{short}"
    for title, body in folded:
        block = f"\n<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"
        if body and len(text) + len(block) < MOST:
            text += block
    return text[:MOST]


# -- folded away -----------------------------------------------------------------------------------

_TOTALS = tuple(
    view.Column(metric, unit, metric if metric != "flops" else "FLOPs")
    for metric, unit in units.TOTALS.items()
)


def _all_steps(result: GateOutcome) -> str:
    """The totals of every step, each with its change where the lock has another number."""
    locked = result.before.places()
    rows = []
    for place, costs in result.after.places().items():
        row: dict[str, object] = {"step": str(place)}
        for metric in units.TOTALS:
            value = costs.value(metric)
            former = locked[place].value(metric) if place in locked else None
            moved = former not in (None, 0, value) and f"{value / (former or 1) - 1:+.1%}"
            after = f" ({moved.replace('%', ' %')})" if moved else ""
            row[metric] = view.Cell(value, after=after, unit=units.TOTALS[metric])
        rows.append(row)
    table = view.Table(
        columns=[view.Column("step", units.TEXT, "step"), *_TOTALS], rows=rows, padded=False
    )
    return _page(table)


def _page(part: view.Part) -> str:
    return as_page(view.View((view.Section(parts=[part]),)))


def _chart(shifts: Sequence[Shift]) -> str:
    """The largest changes as bars, in percent of what is locked."""
    moved = [shift for shift in shifts if shift.relative is not None]
    largest = sorted(moved, key=lambda shift: -abs(shift.relative or 0))[:_CHART]
    if not largest:
        return ""
    lines = "\n".join(f"{n}. {_label(shift)}" for n, shift in enumerate(largest, start=1))
    values = [round(100 * (shift.relative or 0), 3) for shift in largest]
    low, high = min(0.0, *values), max(0.0, *values)
    chart = [
        "```mermaid",
        "xychart-beta",
        '  title "Change against the lock"',
        f"  x-axis [{', '.join(str(n) for n in range(1, len(largest) + 1))}]",
        f'  y-axis "percent" {low:g} --> {high:g}',
        f"  bar [{', '.join(f'{value:g}' for value in values)}]",
        "```",
    ]
    return "\n".join(chart) + "\n\n" + _page(view.Note(lines, lines=True))


def _label(shift: Shift) -> str:
    what = f"{shift.module} {shift.metric}".strip()
    return f"{shift.place}: {what} {change_words(shift)}"


# -- other programs --------------------------------------------------------------------------------


def code_quality(result: GateOutcome) -> str:
    """GitLab's code quality report: a list of issues, each at a line of the lock."""
    issues = []
    for check, severity, texts in (
        ("budget", "major", [(_where(s), s.sentence(), cause_lines(s)) for s in result.over]),
        ("stale", "major", [("", line, []) for line in result.stale]),
        ("lower", "info", [(_where(s), s.sentence(), []) for s in result.under]),
    ):
        for where, text, causes in texts:
            said = visible("; ".join([text, *causes]))
            issues.append(
                {
                    "description": said,
                    "check_name": f"rooftrace-{check}",
                    "fingerprint": hashlib.sha256(
                        visible(f"{check} {where} {text}").encode()
                    ).hexdigest(),
                    "severity": severity,
                    "location": {"path": result.lock, "lines": {"begin": _line(result, where)}},
                }
            )
    return json.dumps(issues, indent=1) + "\n"


def _where(shift: Shift) -> str:
    """The head of the table of a step in the lock."""
    target, phase, chip, execution = map(toml_key, shift.place)
    return f"[targets.{target}.phases.{phase}.costs.{chip}.{execution}]"


def _line(result: GateOutcome, head: str) -> int:
    """The line of a table in the lock, 1 where it has none."""
    from rooftrace.reporting.locks import files

    lines = files.lock_text(result.before).split("\n")
    return lines.index(head) + 1 if head in lines else 1


def junit(result: GateOutcome) -> str:
    """JUnit: a case for each step, which fails with the budgets that it passes."""
    places = result.after.places()
    suite = ElementTree.Element("testsuite", name="rooftrace check", tests=str(len(places) + 1))
    failures = 0
    by_place: dict[object, list[Shift]] = {}
    for shift in result.over:
        by_place.setdefault(shift.place, []).append(shift)
    cases: list[tuple[str, str, list[str]]] = [("lock", result.lock, list(result.stale))]
    if result.failed and not result.over and not result.stale:
        cases[0][2].append(result.verdict())
    for place in places:
        lines = [
            line
            for shift in by_place.get(place, [])
            for line in (shift.sentence(), *(f"  {cause}" for cause in cause_lines(shift)))
        ]
        cases.append((place.target, f"{place.phase} on {place.chip}, {place.execution}", lines))
    for owner, name, lines in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=visible(owner))
        case.set("name", visible(name))
        if lines:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=visible(lines[0]))
            failure.text = visible("\n".join(lines), lines=True)
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode") + "\n"
