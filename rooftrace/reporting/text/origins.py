"""Where the sides of a diff come from, in words: revisions, versions, commits, a bisection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftrace.reporting.view import model as view

if TYPE_CHECKING:
    from rooftrace.tracer.revisions.origins import DiffOrigins


def origin_notes(origins: DiffOrigins | None) -> list[view.Note]:
    """A line for each thing that a reader of a diff has to know of its sides."""
    if origins is None:
        return []
    notes = []
    sides = (("before", origins.before), ("after", origins.after))
    for which, side in sides:
        if str(side):
            notes += _said(which, str(side))
    if origins.versions():
        notes += _said("versions", ", ".join(origins.versions()), "warn")
    for which, side in sides:
        for text in side.notes:
            notes += _said(which, text, "warn")
    if origins.bisection is not None:
        for text in origins.bisection.sentences():
            notes += _said("bisect", text)
    for line in origins.lines:
        notes += _said(line.phase, str(line))
    if not origins.lines and origins.touched():
        notes += _said("commits", origins.touched())
    return notes


def _said(label: str, text: str, mark: str = "") -> list[view.Note]:
    """A note for a screen, under a label, and the item of a list on a page."""
    return [
        view.Note(text, mark, on="screen", label=f"{label:<9}"),
        view.Note(f"{label}: {text}", on="page", bullet=1),
    ]
