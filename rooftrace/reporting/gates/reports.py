"""Reports of locks and checks: views, a comment on a change, code quality for GitLab, and JUnit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from rooftrace._escapes import toml_key, visible
from rooftrace.hardware.units import listed, plural
from rooftrace.reporting.gates.lock import WAITING
from rooftrace.reporting.renderers import as_page, units, view

if TYPE_CHECKING:
    from rooftrace.reporting.gates.checking import GateOutcome, ModuleShift, Shift

_MODULES = 4
"""Modules that are named for an exceeded budget."""
_OPS = 4
_SHOWN = 12
"""Rows of a list on a screen."""
_BAR = 10
"""Blocks of the longest bar."""


def gate_view(result: GateOutcome, output: view.Output = "both") -> view.View:
    """The verdict, exceeded budgets with their causes, and other costs that moved."""
    mark = "bad" if result.failed else "good"
    head: list[view.Part] = [view.Note(result.verdict(), mark, label="check  ")]
    head += [_item(line, "warn") for line in (*result.unfit, *result.stale)]
    sections = [view.Section(parts=head, place=1)]
    if result.over:
        parts = _table(result.over, output)
        sections.append(view.Section(title="Budgets exceeded", parts=parts, place=2))
        causes = list(cause_notes(result.over, output))
        sections.append(view.Section(title="Causes", parts=causes, place=3))
    for title, shifts in (("Lower than locked", result.under), ("Also moved", result.other)):
        if shifts:
            parts = [view.Note(title, "strong", on="screen"), *_table(shifts, output)]
            sections.append(view.Section(title=title, parts=parts, place=4))
    notes = why_notes(result)
    sections += [view.Section(parts=notes, place=8)] if notes else []
    return view.View(tuple(sections), "Costs")


def _item(text: str, mark: str = "") -> view.Note:
    return view.Note(text, mark, bullet=1, label="  ")


def _table(shifts: Sequence[Shift], output: view.Output) -> list[view.Part]:
    shown = shifts[: _SHOWN if output == "screen" else None]
    parts: list[view.Part] = [shift_table(shown)]
    if len(shown) < len(shifts):
        more = f"... and {len(shifts) - len(shown)} more (--format json has all)"
        parts.append(view.Note(more, "faint"))
    return parts


_COLUMNS = (
    view.Column("step", units.TEXT, "step", folded=True),
    view.Column("what", units.CODE, "cost", folded=True),
    view.Column("before", units.COUNT, "locked"),
    view.Column("after", units.COUNT, "now"),
    view.Column("change", units.WORDS, "change"),
    view.Column("bar", units.TEXT, "", on="page"),
    view.Column("limit", units.WORDS, "allowed"),
)


def shift_table(shifts: Sequence[Shift], alike: Sequence[int] = ()) -> view.Table:
    """Costs before and after, one a line, with bars on a page.

    alike: how many steps each stands for; default 1.
    """
    longest = max((abs(shift.relative or 0) for shift in shifts), default=0) or 1
    allowed = any(shift.budget for shift in shifts)
    columns = _COLUMNS if allowed else _COLUMNS[:-1]
    rows = [_row(shift, longest) for shift in shifts]
    for row, steps in zip(rows, alike, strict=False):
        row["step"] += f" and {steps - 1} more" if steps > 1 else ""
    return view.Table(columns=columns, rows=rows, padded=False)


def _row(shift: Shift, longest: float) -> dict[str, Any]:
    unit = replace(
        units.TOTALS[shift.metric], page=lambda n: _unbroken(units.TOTALS[shift.metric].page(n))
    )
    mark = "worse" if shift.after > (shift.before or 0) else "good"
    share = abs(shift.relative) / longest if shift.relative is not None else 1.0
    return {
        "step": str(shift.place),
        "what": shift.cost,
        "before": view.Cell(shift.before, unit=unit),
        "after": view.Cell(shift.after, unit=unit),
        "change": view.Cell(_unbroken(change_words(shift)), mark),
        "bar": "█" * round(_BAR * share) or "▏",
        "limit": _unbroken(_allowed(shift)),
    }


def _unbroken(text: str) -> str:
    """A quantity that stays on one line."""
    return text.replace(" ", "\u00a0")


def _allowed(shift: Shift) -> str:
    if not shift.budget:
        return ""
    text = shift.limit.text
    return text if shift.limit.ceiling or text in ("0", "0%") else f"+{text}"


def change_words(shift: Shift) -> str:
    """ "+5.0 %"; "new" where the lock has none."""
    if shift.relative is None:
        return "new" if shift.after else "0 %"
    if abs(shift.relative) < 1e-6:
        return "0 %"
    small = abs(shift.relative) < 0.0005
    text = f"{shift.relative:+.3%}" if small else f"{shift.relative:+.1%}"
    return text.replace("%", " %")


def cause_notes(
    shifts: Sequence[Shift], output: view.Output, most: int | None = None
) -> Iterator[view.Part]:
    """The causes of shifts: each change of the code once, then the modules of each phase.

    On another chip the same modules moved.  most: causes of each of the two; modules then stand
    only for shifts without a change of the code.
    """
    code: dict[tuple[str, str], tuple[str, dict[str, dict[str, None]]]] = {}
    first: dict[tuple[str, ...], Shift] = {}
    for shift in shifts:
        cost = shift.cost if output == "screen" else units.CODE.page(shift.cost)
        for cause in shift.causes:
            key = shift.place.target, cause.place or cause.text
            phases = code.setdefault(key, (cause.text, {}))[1]
            phases.setdefault(shift.place.phase, {})[cost] = None
        key_ = (shift.place.target, shift.place.phase, shift.metric, shift.module)
        if shift.modules and not (most and shift.causes):
            first.setdefault(key_, shift)
    heads: dict[str, None] = {}
    for (target, _), (text, phases) in list(code.items())[:most]:
        if target not in heads:
            heads[target] = None
            yield view.Note(f"Cause in the code of {target}:", "strong")
        costs = [f"{listed(list(names))} in {phase}" for phase, names in phases.items()]
        yield _item(f"{text} ({'; '.join(costs)})")
    for shift in list(first.values())[:most]:
        cost = shift.cost if output == "screen" else units.CODE.page(shift.cost)
        yield view.Note(f"Cause of {cost} in {shift.place}:", "strong")
        yield from map(_item, module_lines(shift, output))
    if most is not None and (more := max(len(code) - most, 0) + max(len(first) - most, 0)):
        yield view.Note(f"and {plural(more, 'more cause')}")


def cause_lines(shift: Shift) -> list[str]:
    """The causes of a shift: sentences on the code that changed, then the modules."""
    return [*(cause.text for cause in shift.causes), *module_lines(shift, "screen")]


def module_lines(shift: Shift, output: view.Output) -> list[str]:
    """The modules behind a shift, one a line."""
    modules = [module_words(module, shift.metric, output) for module in shift.modules[:_MODULES]]
    if len(shift.modules) > _MODULES:
        modules.append(f"and {plural(len(shift.modules) - _MODULES, 'more module')}")
    return modules


def module_words(module: ModuleShift, metric: str, output: view.Output) -> str:
    """ "h.*.mlp: 1.20 GFLOP -> 2.40 GFLOP; +2 _to_copy fp32"."""
    parts = []
    sides = (module.before, module.after)
    if sides != (None, None):
        written = ("nothing" if side is None else units.TOTALS[metric].page(side) for side in sides)
        parts.append(" -> ".join(written))
    ops = [f"{number:+} {name}" for name, number in module.ops.items()]
    if ops:
        parts.append(", ".join(ops[:_OPS]) + (" ..." if len(ops) > _OPS else ""))
    elif module.path != WAITING:
        parts.append("the same ops, of other sizes or in other kernels")
    path = module.path if output == "screen" else units.CODE.page(module.path)
    return f"{path}: {'; '.join(parts)}"


def why_notes(result: GateOutcome) -> list[view.Part]:
    """Notes on other versions, and on files that differ."""
    notes: list[view.Part] = []
    if result.versions:
        versions = "; ".join(result.versions)
        cause = "" if result.same else ": a likely cause"
        notes.append(view.Note(f"made from other versions: {versions}{cause}", "warn"))
    moved = {shift.place.target for shift in (*result.over, *result.under, *result.other)}
    targets: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for target, files in result.sources.items():
        targets.setdefault((files, target in moved), []).append(target)
    for (files, has_moved), names in targets.items():
        shown = ", ".join(files[:4]) + (" ..." if len(files) > 4 else "")
        text = f"{shown} {'differs' if len(files) == 1 else 'differ'}"
        cost = f", and no cost of {listed(names)}" if not has_moved else f": {listed(names)}"
        notes.append(view.Note(text + cost, "faint"))
    return notes


# -- reports ---------------------------------------------------------------------------------------
# A comment is Markdown as GitHub and GitLab show it.  Neither shows SVG in a comment, so its
# figures are bars of letters, and a chart in Mermaid.

MARKER = "<!-- rooftrace check -->"
"""The first line of a comment, by which it is found again."""
MOST = 60_000
"""Letters of a comment; GitHub takes 65,536."""
_ROWS = 8
_CAUSES = 4
_LINES = 40
"""Lines of a comment before what is folded away."""
_CHART = 8


def comment(result: GateOutcome) -> str:
    """A comment: the verdict, a table with bars, the causes; the figure and all steps folded."""
    sign = "❌" if result.failed else "✅"
    parts: list[view.Part] = [view.Note(f"{sign} {result.verdict()}", "strong")]
    parts += [view.Note(line, bullet=1) for line in (*result.unfit, *result.stale)]
    shifts = result.over or result.under or result.other
    if shifts:
        alike: dict[tuple[object, ...], list[Shift]] = {}
        for shift in shifts:
            key = (*shift.place[:2], shift.cost, shift.limit, shift.before, shift.after)
            alike.setdefault(key, []).append(shift)
        groups = list(alike.values())[:_ROWS]
        parts.append(shift_table([group[0] for group in groups], [*map(len, groups)]))
        if len(alike) > _ROWS:
            parts.append(view.Note(f"and {len(alike) - _ROWS} more"))
    said = [*cause_notes(result.over, "page", _CAUSES)]
    parts += [*said, *why_notes(result)]
    text = f"{MARKER}\n{as_page(view.View((view.Section(parts=parts),), 'Costs', level=3))}"
    lines = text.splitlines()
    text = "\n".join(lines[:_LINES]) + "\n"
    folded = [("Figure", _chart(shifts)), ("All steps", _all_steps(result))]
    folded.insert(0, ("More", "\n".join(lines[_LINES:])))
    if result.over:
        folded.insert(2, ("What else moved", _rest(result, said, len(groups) == len(result.over))))
    for title, body in folded:
        block = f"\n<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"
        if body.strip() and len(text) + len(block) < MOST:
            text += block
    return text[:MOST]


# -- folded away -----------------------------------------------------------------------------------


def _rest(result: GateOutcome, said: Sequence[view.Part], is_whole: bool) -> str:
    """All that moved, but for causes that are said; is_whole: and but for exceeded budgets."""
    causes = [note for note in cause_notes(result.over, "page") if note not in said]
    sections = [
        replace(section, parts=causes if section.title == "Causes" else section.parts)
        for section in gate_view(result, "page").sections
        if section.title and not (section.title == "Budgets exceeded" and is_whole)
    ]
    return as_page(view.View(tuple(section for section in sections if section.parts)))


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
    """The largest changes as bars, in percent of the locked costs."""
    moved = [shift for shift in shifts if shift.relative is not None]
    largest = sorted(moved, key=lambda shift: -abs(shift.relative or 0))[:_CHART]
    if not largest:
        return ""
    labels = [f"{shift.place}: {shift.cost} {change_words(shift)}" for shift in largest]
    lines = "\n".join(f"{n}. {label}" for n, label in enumerate(labels, start=1))
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
            issues.append(
                {
                    "description": visible("; ".join([text, *causes])),
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
    from rooftrace.reporting.gates import lockfile

    lines = lockfile.lock_text(result.before).split("\n")
    return lines.index(head) + 1 if head in lines else 1


def junit(result: GateOutcome) -> str:
    """JUnit: a case for each step, which fails with its exceeded budgets."""
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
