"""Runs a fleet: tasks into one folder, a part for each as it ends; existing parts are kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._outputs import check_output
from rooftrace._processes import processors, safe_path
from rooftrace._progress import Listener, tell, telling
from rooftrace._writing import put_bytes
from rooftrace.errors import RequestError, UnusedError
from rooftrace.reporting.commands.fleet_tasks import (
    MANIFEST,
    SUFFIX,
    FleetError,
    FleetFailure,
    FleetResult,
    Task,
    TaskOutcome,
    failed,
    is_part,
    load_fleet,
    need,
    outcome_of,
    read_part,
    releases,
    unpacked_outcome,
    write_manifest,
)

if TYPE_CHECKING:
    from distributed import Client, Future

HERE = "none"
"""The scheduler that is none: tasks run in this process, one after the other."""


class FleetStopped(KeyboardInterrupt):
    """A fleet that Ctrl-C stopped, with the progress and how to go on."""


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
    every = _checked(tasks, scheduler, workers, retries)
    need("pyarrow")
    with telling(progress):
        if scheduler is not None and scheduler != HERE:
            check_answers(scheduler)
        folder = _opened(out)
        if earlier:
            _sort_parts(folder, folder / earlier, {task.key for task in every})
        left = [
            task for task in every if read_part(folder / f"{task.key}.parquet", task.key) is None
        ]
        _check_places(folder, left)
        landing = _Landing(folder, every, left)
        if scheduler is None and len(left) <= 1 and workers is None:
            scheduler = HERE
        try:
            landing.take(_outcomes(left, scheduler, workers or processors(), retries))
        except KeyboardInterrupt:
            raise FleetStopped(landing.rest("stopped")) from None
        except FleetError as error:
            raise FleetError(f"{error}; {landing.rest('it ended')}") from None
    return landing.result()


def _checked(
    tasks: Iterable[Task], scheduler: str | None, workers: int | None, retries: int
) -> list[Task]:
    """The tasks of a request that makes sense.  Raises RequestError."""
    every = list(tasks)
    if not every:
        raise RequestError("run_fleet(tasks=[]): expected at least one Task")
    titles: dict[str, str] = {}
    for task in every:
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
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if value is not None and not valid:
            raise RequestError(f"{name}={value!r:.60}: expected a whole number from {least} on")
    if workers is not None and scheduler is not None:
        reason = f"scheduler={scheduler!r} has its own; it is for a cluster of this machine"
        raise UnusedError("workers", str(workers), reason)
    return every


def _opened(out: str | Path) -> Path:
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"out={str(out)!r}: expected a folder, and this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_places(folder: Path, tasks: Sequence[Task]) -> None:
    """Raise RequestError where the part of a task would replace a file that is no part."""
    listed: Mapping[str, str] = {}
    if (folder / MANIFEST).is_file():
        with contextlib.suppress(RequestError):  # damaged: it is written again
            listed = load_fleet(folder).tasks
    check_output(folder / MANIFEST, own_name=True, known=True)
    for task in tasks:
        check_output(folder / f"{task.key}{SUFFIX}", own_name=True, known=task.key in listed)


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

    def __init__(self, folder: Path, tasks: Sequence[Task], left: Sequence[Task]) -> None:
        self.folder = folder
        self.titles = {task.key: task.title for task in tasks}
        self.there = len(tasks) - len(left)
        self.ran = 0
        self.failures: dict[str, FleetFailure] = {}

    def take(self, outcomes: Generator[TaskOutcome, None, None]) -> None:
        """Write each outcome as it comes; at the end, or at an error, write the manifest."""
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
        """A sentence on the progress of a fleet that did not reach its end, and how to go on."""
        done = self.there + self.ran - len(self.failures)
        return (
            f"{how} with {done} of {len(self.titles)} tasks done, all kept in {self.folder}; "
            "the same call goes on from there"
        )

    def result(self) -> FleetResult:
        """The fleet as the folder has it."""
        return FleetResult(self.folder, self.titles, self._failures(), ran=self.ran)


# -- clusters --------------------------------------------------------------------------------------


_ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.%]+\]|[\w.-]+):(\d{1,5})")
_ANSWERS = 5.0  # s
_CONFIG = {
    # A worker that holds much memory for good would be paused for good: it is ended and replaced.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    # Ctrl-C reaches every process of a terminal: this one ends the workers.
    "distributed.worker.preload": ["import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"],
    "distributed.worker.preload-argv": [[]],
}


def check_address(scheduler: str) -> None:
    """Raise RequestError for a text that is no address of a scheduler."""
    match = _ADDRESS.fullmatch(scheduler) if isinstance(scheduler, str) else None
    if match is None or not 0 < int(match[3]) < 65536:
        raise RequestError(
            f'scheduler={scheduler!r:.200}: expected the address of a Dask scheduler as "tcp://'
            'HOST:PORT", "none" to run everything in this process, or nothing for a cluster of '
            "this machine"
        )


@contextlib.contextmanager
def connected(scheduler: str | None, workers: int, retries: int) -> Iterator[Client]:
    """A client of the scheduler at an address, or of a cluster of this machine that ends with it.

    workers, retries: for the cluster of this machine only.  Raises FleetError where workers do not
    start, OSError where the scheduler no longer answers.
    """
    need("distributed")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_without_logs())
        if scheduler is None:
            yield stack.enter_context(_of_this_machine(workers, retries))
        else:
            yield stack.enter_context(_at(scheduler))


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """No logs of Dask: it logs tracebacks for errors that are raised as ours, or run again."""
    import distributed  # sets the levels of its loggers

    names = [distributed.__name__, *logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name) for name in names if name.startswith("distributed")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _of_this_machine(workers: int, retries: int) -> Iterator[Client]:
    import dask.config
    from distributed import Client, LocalCluster

    config = {**_CONFIG, "distributed.scheduler.allowed-failures": retries}
    with _same_environment(), safe_path():
        with dask.config.set(config):
            tell(f"starting {workers} workers")
            try:
                cluster = LocalCluster(
                    n_workers=workers,
                    threads_per_worker=1,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",  # None takes a fixed port
                    silence_logs=logging.CRITICAL,
                )
            except (RuntimeError, OSError) as problem:
                raise FleetError(
                    f"the workers did not start ({problem}); a script that runs a fleet calls it "
                    'below if __name__ == "__main__":, as each worker imports the script'
                ) from None
        with cluster, Client(cluster, set_as_default=False) as client:
            yield client


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    """Restore the environment: Dask sets variables for its workers in this process."""
    import dask.config

    of_workers = dask.config.get("distributed.nanny.pre-spawn-environ", {})
    names = [*of_workers, "PYTHONHASHSEED", "__DASK_PARENT_PID"]
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _at(scheduler: str) -> Iterator[Client]:
    from distributed import Client

    with Client(scheduler, timeout=_ANSWERS, set_as_default=False) as client:
        if not client.scheduler_info().get("workers"):
            tell(f"waiting for workers: start one with dask worker {scheduler}")
        yield client


def check_answers(scheduler: str) -> None:
    """Raise RequestError where no Dask scheduler answers at an address.

    Dask itself waits without end for the first words of a server that is none of its own.
    """
    need("distributed")
    tell(f"connecting to {scheduler}")
    with ThreadPoolExecutor(1) as executor:  # a notebook has a loop in this thread already
        try:
            executor.submit(asyncio.run, _greeted(scheduler)).result()
        except Exception as problem:  # whatever Dask raises for the words of a stranger
            raise RequestError(
                f"scheduler={scheduler!r}: no Dask scheduler answers there within {_ANSWERS:g} s "
                f"({_first_line(problem)}); start one with `dask scheduler`, and workers with "
                f"`dask worker {scheduler}`"
            ) from None


async def _greeted(scheduler: str) -> None:
    """Say hello to a scheduler and wait for its answer."""
    from distributed import Security
    from distributed.comm import connect

    how = Security().get_connection_args("client")
    # connect() has a limit of its own, for all that comes before the answer.
    comm = await asyncio.wait_for(connect(scheduler, timeout=_ANSWERS, **how), _ANSWERS + 0.5)
    await comm.close()


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:200]


def collected(client: Client, tasks: Sequence[Task]) -> Generator[TaskOutcome, None, None]:
    """The outcome of each task, in the order in which they end.

    The scheduler runs the tasks of a dead worker again, on another one.  A task whose workers died
    too often is run once more, alone: another task may have ended its workers.  Raises FleetError
    where the scheduler goes away; RequestError for a task that cannot be sent.
    """
    from distributed import as_completed

    suspects: list[Task] = []
    waiting = _submitted(client, tasks)
    try:
        for future in as_completed(list(waiting), loop=client.loop):
            task = waiting.pop(future)
            outcome = _outcome(future, task)
            future.release()
            if outcome is None:
                suspects.append(task)
            else:
                yield outcome
        for task in suspects:
            tell(f"{task.title}: its workers died; once more, alone")
            waiting = _submitted(client, [task])
            (future,) = waiting
            yield _outcome(future, task) or TaskOutcome(task.key, task.title, error=_DIED)
    finally:
        with contextlib.suppress(Exception):  # the scheduler may be gone
            client.cancel(list(waiting))


_DIED = (
    "every worker that ran it died: it crashes Python, or takes more memory than a worker may have"
)


def _submitted(client: Client, tasks: Sequence[Task]) -> dict[Future, Task]:
    """Give tasks to the scheduler, under names of this call."""
    call = uuid.uuid4().hex[:8]
    columns: list[list[Any]] = [
        [_pickled(task) for task in tasks],
        [task.key for task in tasks],
        [task.title for task in tasks],
    ]
    names = [f"rooftrace-{task.key}-{call}" for task in tasks]
    futures = client.map(
        unpacked_outcome, *columns, expected=releases(), key=names, pure=False, retries=0
    )
    return dict(zip(futures, tasks, strict=True))


def _pickled(task: Task) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(task)
    except Exception as problem:  # pickling can raise any error
        raise RequestError(
            f"task {task.title!r}: it cannot be sent to a worker ({_first_line(problem)}): "
            'expected a function and arguments that can be pickled, or scheduler="none"'
        ) from None
    return pickled


def _outcome(future: Future, task: Task) -> TaskOutcome | None:
    """The outcome of a task; None where its workers died too often."""
    from concurrent.futures import CancelledError

    from distributed import KilledWorker

    try:
        outcome: TaskOutcome = future.result()
    except KilledWorker:
        return None
    except CancelledError:
        raise FleetError(
            f"the scheduler gave up {task.title!r}: it went away, or somebody cancelled its work"
        ) from None
    except Exception as problem:  # of Dask, or of a worker without rooftrace
        return failed(task, problem)
    return outcome
