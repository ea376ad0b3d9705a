"""Where the sides of a diff come from, in words: revisions, versions, commits, a bisection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rooftrace.reporting.text.changed import labelled
from rooftrace.reporting.view import model as view

if TYPE_CHECKING:
    from rooftrace.tracer.revisions.origins import DiffOrigins


def origin_notes(origins: DiffOrigins | None) -> list[view.Note]:
    """A line for each thing that a reader of a diff has to know of its sides."""
    if origins is None:
        return []
    notes: list[view.Note] = []
    say = partial(labelled, width=9)
    sides = (("before", origins.before), ("after", origins.after))
    for which, side in sides:
        if str(side):
            notes += say(which, str(side))
    if origins.versions():
        notes += say("versions", ", ".join(origins.versions()), "warn")
    for which, side in sides:
        for text in side.notes:
            notes += say(which, text, "warn")
    if origins.bisection is not None:
        for text in origins.bisection.sentences():
            notes += say("bisect", text)
    for line in origins.lines:
        notes += say(line.phase, str(line))
    if not origins.lines and origins.touched():
        notes += say("commits", origins.touched())
    return notes
