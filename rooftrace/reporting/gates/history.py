"""Why costs moved since a lock was written: the revision that wrote it is built from git."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from rooftrace.costmodels.findings.diffs import Diff, changes
from rooftrace.errors import is_ours
from rooftrace.hardware.units import plural
from rooftrace.reporting import diff
from rooftrace.reporting.gates.making import chips_of, inside, model_of
from rooftrace.reporting.locks import records, settings as gate
from rooftrace.reporting.locks.checking import Shift
from rooftrace.tracer.revisions import RevisionError, repositories
from rooftrace.tracer.revisions.repositories import Commit

_MOST = 2
"""Causes of a phase that are told."""


def causes_since(
    settings: gate.Settings, lock: records.Lock
) -> Callable[[Shift], Sequence[str]] | None:
    """A function that says in sentences what moved a cost since `lock` was committed.

    None where that cannot be known: outside of git, or where the lock is not committed as it is.
    The former code is traced when the function is asked, once for each target and way of running.
    """
    try:
        repository = repositories.repository_at(str(settings.folder))
        path = os.path.relpath(os.path.realpath(settings.path), repository.root)
        if repository.uncommitted([path]):
            return None
        commit = repository.last_change(path)
    except RevisionError:
        return None
    return None if commit is None else _History(settings, lock, commit).causes


class _History:
    """Diffs of targets between the commit of a lock and now, each made once."""

    def __init__(self, settings: gate.Settings, lock: records.Lock, commit: Commit) -> None:
        self.settings, self.lock, self.commit = settings, lock, commit
        self._known: dict[tuple[str, str, str], Diff | str] = {}

    def causes(self, shift: Shift) -> Sequence[str]:
        """Sentences on the phase of a shift, the largest cause first."""
        made = self._diff(shift.place)
        if isinstance(made, str):
            return [made]
        rows = [row for p in made.phases if p.phase == shift.place.phase for row in p.rows]
        sentences = [self._sentence(made, row) for row in rows[:_MOST]]
        if len(rows) > _MOST:
            sentences.append(f"and {plural(len(rows) - _MOST, 'more cause')}")
        return sentences

    def _sentence(self, made: Diff, row: changes.DiffRow) -> str:
        lines = () if made.origins is None else made.origins.lines
        who = next((str(line) for line in lines if line.source == row.line), row.lines)
        return "; ".join(filter(None, (row.cause, f"in {row.where}" if row.where else "", who)))

    def _diff(self, place: records.StepKey) -> Diff | str:
        """The diff of a target, or why there is none."""
        key = place.target, place.chip, place.execution
        if key not in self._known:
            asked = self.lock.targets[place.target].asked
            options: dict[str, Any] = {n: v for n, v in asked.items() if n != "target"}
            try:
                with inside(self.settings.folder):
                    chips = {chip.name: chip for chip in chips_of(self.settings)}
                    options["chip"] = chips[place.chip]
                    options["execution"] = model_of(place.execution, self.settings)
                    made = diff(str(asked["target"]), git=self.commit.hash, **options)
                assert isinstance(made, Diff)  # a target has a step
                self._known[key] = made
            except (ValueError, LookupError, RuntimeError) as error:
                if not is_ours(error):
                    raise
                reason = str(error).splitlines()[0]
                self._known[key] = f"no cause is known from {self.commit}: {reason}"
        return self._known[key]
