"""What became of a fleet: its folder, its failures, and the rows as one frame."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftrace._reading import FileKind, json_of, record_of, text_of
from rooftrace._writing import put_bytes
from rooftrace.errors import RequestError
from rooftrace.reporting.fleets.parts import SUFFIX, joined, need, read_part, releases
from rooftrace.reporting.fleets.tasks import names_a_file

MANIFEST = "_fleet.json"
"""Readers of a folder of parquet files leave out names that begin with an underscore."""
_FORM = 1
_KIND = FileKind("manifest of a fleet", RequestError)


@dataclass(frozen=True)
class FleetFailure:
    """A task that has no rows, and why: the first line of its error."""

    key: str
    title: str
    error: str


@dataclass(frozen=True)
class FleetResult:
    """The tasks of a fleet and where their rows are: `out/KEY.parquet` for each that is done.

    tasks: titles by key, in the order of the call.  ran: how many tasks were run, failed ones
    included; the parts of the others were there.
    """

    out: Path
    tasks: Mapping[str, str]
    failures: tuple[FleetFailure, ...]
    ran: int

    def part(self, key: str) -> Path:
        """The file with the rows of a task."""
        return self.out / f"{key}{SUFFIX}"

    @property
    def waiting(self) -> tuple[str, ...]:
        """Keys of tasks that have neither a file nor a failure, as after a stop."""
        failed = {failure.key for failure in self.failures}
        return tuple(k for k in self.tasks if k not in failed and not self.part(k).exists())

    def frame(self) -> Any:
        """The rows of every task that is done, as one pandas frame, in the order of the tasks.

        The order in which tasks ended makes no difference.  A part that is damaged is left out; the
        next call of `run_fleet` makes it again.
        """
        need("pyarrow")
        tables = (read_part(self.part(key), key) for key in self.tasks)
        return joined(table for table in tables if table is not None)

    def frames(self) -> Iterator[tuple[str, Any]]:
        """The key and the rows of each task that is done, one pandas frame after the other."""
        need("pyarrow")
        for key in self.tasks:
            table = read_part(self.part(key), key)
            if table is not None:
                yield key, joined([table])

    def __str__(self) -> str:
        done = len(self.tasks) - len(self.failures) - len(self.waiting)
        words = f"{done} of {len(self.tasks)} tasks are in {self.out}"
        return f"{words}, {len(self.failures)} failed" if self.failures else words


@dataclass(frozen=True)
class _Manifest:
    """The values of `_fleet.json`."""

    form: int
    releases: dict[str, str]
    tasks: dict[str, str]
    failures: dict[str, str]


def load_fleet(out: str | Path) -> FleetResult:
    """What the last call of `run_fleet` into a folder has made so far, also while it runs.

    Raises RequestError for a folder without a manifest, or with one that cannot be read.
    """
    path = Path(out) / MANIFEST
    if not path.is_file():
        raise RequestError(f"{str(out)!r}: expected the folder of a fleet, which has a {MANIFEST}")
    where = str(path)
    table = record_of(_Manifest, json_of(text_of(path, _KIND), where, _KIND), where, _KIND)
    if table.form != _FORM:
        reason = f"form={table.form}: expected {_FORM}; it is of another release of rooftrace"
        raise _KIND.refused(where, reason)
    for key in (*table.tasks, *table.failures):
        if not names_a_file(key):
            raise _KIND.refused(where, f"tasks: the key {key!r:.60} names no file")
    failures = (
        FleetFailure(key, table.tasks.get(key, key), error) for key, error in table.failures.items()
    )
    return FleetResult(Path(out), table.tasks, tuple(failures), ran=0)


def write_manifest(out: Path, tasks: Mapping[str, str], failures: Iterable[FleetFailure]) -> None:
    """Write which tasks there are and which failed; a reader sees the old file or the new one."""
    table = {
        "form": _FORM,
        "releases": releases(),
        "tasks": dict(tasks),
        "failures": {failure.key: failure.error for failure in failures},
    }
    text = json.dumps(table, indent=1, ensure_ascii=True)
    put_bytes(out / MANIFEST, f"{text}\n".encode())
