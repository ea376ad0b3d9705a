"""The sweeps of many targets in words: the best lines of each, and what failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooftrace.hardware.units import plural
from rooftrace.reporting import SweepFleet
from rooftrace.reporting.text.sweeps import BEST, MOST_LINES, best_lines, lines_table
from rooftrace.reporting.view import model as view

_SHOWN = {"screen": 60, "page": 500}
"""Lines of the table on an output."""


def fleet_view(result: SweepFleet, output: view.Output) -> view.View:
    """How much is there, the best lines of each target, and what failed with its error.

    One target is read after the other: all lines together may not fit in memory.
    """
    count, whole, best = 0, [], []
    for _, frame in result.fleet.frames():
        count += len(frame)
        if count <= MOST_LINES:
            whole.append(frame)
        best.append(best_lines(frame, [name for name in result.labels if name in frame]))
    done = len(best)
    title = f"{plural(len(result.fleet.tasks), 'task')} over {', '.join(result.names)}"
    head = f"{title}, {done} done: {plural(count, 'line')} in {result.out}"
    there = len(result.fleet.tasks) - result.ran
    parts: list[view.Part] = [view.Note(head, "strong")]
    if there:
        parts.append(view.Note(f"{result.ran} ran now, {there} lay there already", "faint"))
    sections = [view.Section(parts=parts, place=1)]
    if best:
        frames, name = (whole, "Lines") if count <= MOST_LINES else (best, BEST)
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
    yield lines_table(lines.head(most), labels, result.names)
    if len(lines) > most:
        yield view.Note(f"and {len(lines) - most:,} more lines, in frame()", "faint")
