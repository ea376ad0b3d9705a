"""Runs a fleet: tasks into one folder, a part for each as it ends, parts that are there left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

from rooftrace._outputs import check_output
from rooftrace._progress import Listener, tell, telling
from rooftrace._writing import put_bytes
from rooftrace.errors import RequestError, UnusedError
from rooftrace.reporting.fleets.clusters import (
    at_once,
    check_address,
    check_answers,
    collected,
    connected,
)
from rooftrace.reporting.fleets.outcomes import TaskOutcome, outcome_of
from rooftrace.reporting.fleets.parts import SUFFIX, is_part, need, read_part
from rooftrace.reporting.fleets.results import (
    MANIFEST,
    FleetFailure,
    FleetResult,
    load_fleet,
    write_manifest,
)
from rooftrace.reporting.fleets.tasks import FleetError, Task

HERE = "none"
"""The scheduler that is none: tasks run in this process, one after the other."""


class FleetStopped(KeyboardInterrupt):
    """A fleet that Ctrl-C stopped: says what is done and how to go on."""


def run_fleet(
    tasks: Iterable[Task],
    out: str | Path,
    scheduler: str | None = None,
    workers: int | None = None,
    retries: int = 2,
    progress: Listener | None = None,
    earlier: str = "",
) -> FleetResult:
    """Run tasks on the workers of Dask; the rows of each land in `out/KEY.parquet` when it ends.

    A task whose file is there is not run: the same call goes on after a stop, and a longer list of
    tasks runs the new ones.  A file that is damaged, or of other releases of rooftrace or torch, is
    made again.  `out/_fleet.json` says which tasks there are and which failed.

    earlier: the name of a folder in `out` where parts of other tasks wait; they stay, if left out.
    scheduler: the address of a Dask scheduler, "tcp://HOST:PORT"; "none": this process, one task
    after the other; None: a cluster of this machine on the loopback, or this process where a single
    task is left.  workers: processes of that cluster; as many as processors, if left out.

    A task that raises has failed: it is recorded, not tried again in this call, and stops no other.
    A task whose worker died runs again on another one, `retries` times (on a scheduler of one's
    own, as often as its setting `allowed-failures` says), then once more alone.

    Raises RequestError for a request that makes no sense and a scheduler that does not answer,
    FleetError where workers do not start or the scheduler goes away, FleetStopped (a
    KeyboardInterrupt) for Ctrl-C, and OSError where a part cannot be written.  What is done stays.
    """
    asked = _checked(tasks, scheduler, workers, retries)
    need("pyarrow")
    with telling(progress):
        if scheduler is not None and scheduler != HERE:
            check_answers(scheduler)
        folder = _opened(out)
        if earlier:
            _sort_parts(folder, folder / earlier, {task.key for task in asked})
        left = [
            task for task in asked if read_part(folder / f"{task.key}.parquet", task.key) is None
        ]
        _check_places(folder, left)
        landing = _Landing(folder, asked, left)
        if scheduler is None and len(left) <= 1 and workers is None:
            scheduler = HERE
        try:
            landing.take(_outcomes(left, scheduler, workers or at_once(), retries))
        except KeyboardInterrupt:
            raise FleetStopped(landing.rest("stopped")) from None
        except FleetError as error:
            raise FleetError(f"{error}; {landing.rest('it ended')}") from None
    return landing.result()


def _checked(
    tasks: Iterable[Task], scheduler: str | None, workers: int | None, retries: int
) -> list[Task]:
    """The tasks of a request that makes sense.  Raises RequestError."""
    asked = list(tasks)
    if not asked:
        raise RequestError("run_fleet(tasks=[]): expected at least one Task")
    titles: dict[str, str] = {}
    for task in asked:
        if not isinstance(task, Task):
            raise RequestError(f"tasks: {task!r:.60}: expected each to be a Task")
        if task.key in titles:
            raise RequestError(
                f"tasks {titles[task.key]!r} and {task.title!r} have one key, {task.key}: they are "
                "the same work, or were given the same key="
            )
        titles[task.key] = task.title
    if scheduler is not None and scheduler != HERE:
        check_address(scheduler)
    for name, value, least in (("workers", workers, 1), ("retries", retries, 0)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if value is not None and not whole:
            raise RequestError(f"{name}={value!r:.60}: expected a whole number from {least} on")
    if workers is not None and scheduler is not None:
        reason = f"scheduler={scheduler!r} has its own; it is for a cluster of this machine"
        raise UnusedError("workers", str(workers), reason)
    return asked


def _opened(out: str | Path) -> Path:
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"out={str(out)!r}: expected a folder, and this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_places(folder: Path, tasks: Sequence[Task]) -> None:
    """Raise OutputError where the part of a task would replace what is no part of a fleet."""
    known: Mapping[str, str] = {}
    if (folder / MANIFEST).is_file():
        with contextlib.suppress(RequestError):  # damaged: it is written again
            known = load_fleet(folder).tasks
    check_output(folder / MANIFEST, own_name=True, known=True)
    for task in tasks:
        check_output(folder / f"{task.key}{SUFFIX}", own_name=True, known=task.key in known)


def _sort_parts(out: Path, earlier: Path, keys: set[str]) -> None:
    """Keep only parts of these keys in a folder; others wait in `earlier`.

    A file that no fleet wrote stays where it is.  Raises RequestError where `earlier` is a link.
    """
    if earlier.is_symlink():
        raise RequestError(f"{earlier}: a link; parts would leave {out}: remove it")
    for part in out.glob(f"*{SUFFIX}"):
        if part.stem not in keys and is_part(part):
            earlier.mkdir(exist_ok=True)
            os.replace(part, earlier / part.name)
    for part in earlier.glob(f"*{SUFFIX}"):
        if part.stem in keys and is_part(part) and not (out / part.name).exists():
            os.replace(part, out / part.name)


def _outcomes(
    tasks: Sequence[Task], scheduler: str | None, workers: int, retries: int
) -> Generator[TaskOutcome, None, None]:
    """The outcome of each task when it ends."""
    if scheduler == HERE or not tasks:
        yield from map(outcome_of, tasks)
        return
    with connected(scheduler, min(workers, len(tasks)), retries) as client:
        tell(f"running {len(tasks)} tasks")
        yield from collected(client, tasks)


class _Landing:
    """Puts outcomes into the folder, one by one, and keeps its manifest."""

    def __init__(self, folder: Path, asked: Sequence[Task], left: Sequence[Task]) -> None:
        self.folder = folder
        self.titles = {task.key: task.title for task in asked}
        self.there = len(asked) - len(left)
        self.ran = 0
        self.failures: dict[str, FleetFailure] = {}

    def take(self, outcomes: Generator[TaskOutcome, None, None]) -> None:
        """Write what comes, until nothing more does; whatever ends it, the manifest is written."""
        write_manifest(self.folder, self.titles, ())
        if self.there:
            tell(f"{self.there} of {len(self.titles)} are there")
        try:
            with contextlib.closing(outcomes):
                for outcome in outcomes:
                    self._land(outcome)
        finally:
            write_manifest(self.folder, self.titles, self._failures())

    def _land(self, outcome: TaskOutcome) -> None:
        self.ran += 1
        words = f"{self.there + self.ran} of {len(self.titles)}: {outcome.title}"
        if outcome.error:
            failure = FleetFailure(outcome.key, outcome.title, outcome.error)
            self.failures[outcome.key] = failure
            write_manifest(self.folder, self.titles, self._failures())
            tell(f"{words} failed")
            return
        put_bytes(self.folder / f"{outcome.key}{SUFFIX}", outcome.part)
        tell(words)

    def _failures(self) -> tuple[FleetFailure, ...]:
        return tuple(self.failures[key] for key in self.titles if key in self.failures)

    def rest(self, how: str) -> str:
        """What is done and how to go on, after a fleet that did not reach its end."""
        done = self.there + self.ran - len(self.failures)
        return (
            f"{how} with {done} of {len(self.titles)} tasks done, all kept in {self.folder}; "
            "the same call goes on from there"
        )

    def result(self) -> FleetResult:
        """The fleet as it stands in the folder."""
        return FleetResult(self.folder, self.titles, self._failures(), ran=self.ran)
