"""What comes of one task, wherever it runs: the bytes of its part, or the line of its error."""

from __future__ import annotations

from dataclasses import dataclass

from rooftrace.errors import worded
from rooftrace.reporting.fleets.parts import part_bytes, releases
from rooftrace.reporting.fleets.tasks import Task

_LONGEST = 500
"""Characters of an error's first line that are kept."""


@dataclass(frozen=True)
class Outcome:
    """A task that ran: its part as bytes, or its error; one of the two is empty."""

    key: str
    title: str
    part: bytes = b""
    rows: int = 0
    error: str = ""


def outcome_of(task: Task) -> Outcome:
    """Run a task here.  An error of its function, or rows that are no table, are its outcome.

    Raises KeyboardInterrupt only.
    """
    try:
        part, rows = part_bytes(task.function(**task.arguments), task.key)
    except (Exception, SystemExit) as error:  # whatever a user's model raises
        return failed(task, error)
    return Outcome(task.key, task.title, part=part, rows=rows)


def failed(task: Task, error: BaseException) -> Outcome:
    """The outcome of a task that raised."""
    lines = [line.strip() for line in worded(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return Outcome(task.key, task.title, error=first[:_LONGEST])


def unpacked_outcome(pickled: bytes, key: str, title: str, expected: dict[str, str]) -> Outcome:
    """Run a task that came to a worker as bytes.

    Whatever keeps it from running there is its outcome: code that the worker has not, or other
    releases than the caller has, which would give other rows.
    """
    import cloudpickle

    here = releases()
    if here != expected:
        there, ours = (", ".join(map(" ".join, each.items())) for each in (here, expected))
        error = f"the worker has {there}, the caller {ours}: install the same releases there"
        return Outcome(key, title, error=error)
    try:
        task = cloudpickle.loads(pickled)
    except Exception as problem:
        return Outcome(key, title, error=f"the worker cannot load it: {worded(problem)}"[:_LONGEST])
    return outcome_of(task)
