"""Several reports beside each other: the table of their steps, one roofline, what failed."""

from __future__ import annotations

from rooftrace.reporting import manyreports
from rooftrace.reporting.text.dispatch import view_of
from rooftrace.reporting.text.rooflines import rooflines_view
from rooftrace.reporting.view import model as view


def register() -> None:
    """Let `view_of` know them."""
    view_of.register(manyreports.Reports, lambda result, output: reports_view(result))


def reports_view(result: manyreports.Reports) -> view.View:
    """The steps in one table, where each report stands, and which targets have none."""
    sections: list[view.Section] = []
    title = "No report"
    if result.roofline is not None:
        table = rooflines_view(result.roofline)
        title = f"Reports: {', '.join(result.roofline.models)}"
        image = view.Image(f"{manyreports.FIGURE}.png", "all steps on one roofline")
        sections.append(view.Section(parts=[*table.sections[0].parts, image]))
    if result.failures:
        notes = [
            view.Note(f"{target}: {why}", "bad", bullet=1)
            for target, why in result.failures.items()
        ]
        head = view.Note("Failed:", "bad", on="screen")
        sections.append(view.Section(title="Failed", parts=[head, *notes]))
    return view.View(tuple(sections), title)
