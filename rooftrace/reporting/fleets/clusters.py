"""Tasks on the workers of Dask: a cluster of this machine, or a scheduler somewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import uuid
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rooftrace._processes import safe_path
from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.reporting.fleets.outcomes import TaskOutcome, failed, unpacked_outcome
from rooftrace.reporting.fleets.parts import need, releases
from rooftrace.reporting.fleets.tasks import FleetError, Task

if TYPE_CHECKING:
    from distributed import Client, Future

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
    """Raise RequestError for what is no address of a scheduler."""
    match = _ADDRESS.fullmatch(scheduler) if isinstance(scheduler, str) else None
    if match is None or not 0 < int(match[3]) < 65536:
        raise RequestError(
            f'scheduler={scheduler!r:.200}: expected the address of a Dask scheduler as "tcp://'
            'HOST:PORT", "none" to run everything in this process, or nothing for a cluster of '
            "this machine"
        )


def at_once() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    """Dask logs tracebacks of its own for what becomes one of our errors, or is run again."""
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
    """Dask sets variables for its workers in this process, and would leave them there."""
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
    with ThreadPoolExecutor(1) as apart:  # a notebook has a loop in this thread already
        try:
            apart.submit(asyncio.run, _greeted(scheduler)).result()
        except Exception as problem:  # whatever Dask makes of what a stranger says
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

    The scheduler runs the work of a worker that died again, somewhere else.  A task whose workers
    died too often is run once more, alone: until then it may only have waited where another task
    ended the worker.  Raises FleetError where the scheduler goes away; RequestError for a task that
    cannot be sent.
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
    """Give tasks to the scheduler.  A name of this call keeps them apart from an earlier one's."""
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
    except Exception as problem:  # whatever an object's own pickling raises
        raise RequestError(
            f"task {task.title!r}: it cannot be sent to a worker ({_first_line(problem)}): "
            'expected a function and arguments that can be pickled, or scheduler="none"'
        ) from None
    return pickled


def _outcome(future: Future, task: Task) -> TaskOutcome | None:
    """What came of a task; None where its workers died too often."""
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
