"""A launch runs in this process, which is afterwards as it was before."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.launching import ending, environment, keptlibraries
from rooftrace.tracer.launching.distributed import AXIS, Processes
from rooftrace.tracer.launching.landlock import UNGUARDED, guard, refusal
from rooftrace.tracer.launching.overlay import folder_of
from rooftrace.tracer.launching.program import MainModule, prepared
from rooftrace.tracer.launching.records import CommandLine, Ended, HardExit, Ranks, Stopped
from rooftrace.tracer.launching.scratch import redirected
from rooftrace.tracer.launching.starting import OtherProcesses
from rooftrace.tracer.patches import Scope, current_scope

_RUNNING = threading.Lock()


class ProgramRun:
    """A launch whose process is ready: calling it runs the program, once."""

    def __init__(self, program: MainModule, processes: Processes, exits: ending.AtExit) -> None:
        self._program, self._processes, self._exits = program, processes, exits
        self._stopping = ending.Stopping()
        self._assumed: dict[tuple[str, str], None] = {}
        self._started = False

    @property
    def ranks(self) -> Ranks:
        """The rank as which it runs; the program may still say how many there are."""
        return self._processes.ranks

    @property
    def assumed(self) -> tuple[tuple[str, str], ...]:
        """What was assumed up to now of what is not there: pairs of a kind and a text."""
        return (*self._assumed, *([AXIS] if self._processes.axis_assumed else ()))

    @property
    def stops(self) -> int:
        """How often the program was told to stop; it swallows what it goes on after."""
        return self._stopping.asked

    def assume(self, assumption: tuple[str, str]) -> None:
        """Note an assumption, once."""
        self._assumed.setdefault(assumption)

    def stop(self) -> None:
        """End the program: raises Stopped, in a call that the program makes.

        A program that catches it and goes on is told again at the next call.  After three times
        every jump and call of it raises, also those of its handlers.
        """
        self._stopping.stop()

    def __call__(self) -> Ended:
        """ProgramRun the program and what it registered for its exit.

        What it raises is in the result; KeyboardInterrupt of the user is raised.
        """
        if self._started:
            raise RequestError("a program runs once; launch it again for another run")
        self._started = True
        before = set(threading.enumerate())
        reason, code, raised = "end", 0, None
        try:
            self._program.run()
        except Stopped:
            reason = "stopped"
        except HardExit as error:
            reason, code = "exit", error.code
        except SystemExit as error:
            reason, code = "exit", _code(error)
        except Exception as error:
            reason, raised = "error", error
            if refused := refusal(error):
                self.assume(("refused", refused))
            _from_here(error)
        while self.stops > ending.GENTLE:
            try:
                ending.calm()
                break
            except Stopped:
                continue
        threads = ending.threads_of(before)
        self._exits.run()
        with contextlib.suppress(ValueError, OSError, AttributeError):
            sys.stdout.flush()
        swallowed = self.stops - (reason == "stopped")
        made: dict[str, Any] = {"reason": reason, "code": code, "exception": raised}
        return Ended(
            **made,
            swallowed=max(swallowed, 0),
            ranks=self.ranks,
            threads=threads,
            assumed=self.assumed,
        )


@contextlib.contextmanager
def launched(
    launch: CommandLine,
    ranks: Ranks | None = None,
    scratch: str | os.PathLike[str] | None = None,
    real: bool = False,
    own: bool = False,
) -> Iterator[ProgramRun]:
    """Inside, this process is the one that `launch` starts for a rank: `run()` runs the program.

    ranks: which of how many runs (`Ranks.of`).  scratch: a folder in which the program's files
    come to lie, each under its absolute path; it reads them from there, and no other file changes.
    None: it writes where it says.  real: other processes are there, as a launcher has started them,
    and this one keeps its environment.  own: this process ends with the program, so that the kernel
    may guard the scratch folder, which nothing takes back.  Afterwards the state of the process is
    as before, but for modules of installed libraries, which stay imported.  Raises RequestError for
    a program that is not there, and where another one is running in this process.
    """
    ranks = ranks or Ranks.of(launch)
    if not _RUNNING.acquire(blocking=False):
        raise RequestError(
            f"{launch.program}: another program is running in this process; wait for its end"
        )
    try:
        with contextlib.ExitStack() as undo:
            run = _entered(undo, launch, ranks, real)
            if scratch is not None:
                undo.enter_context(redirected(scratch))
                if lacking := guard(folder_of(scratch)) if own else UNGUARDED:
                    run.assume(("scratch", lacking))
            yield run
    finally:
        _RUNNING.release()


def _entered(
    undo: contextlib.ExitStack, launch: CommandLine, ranks: Ranks, real: bool
) -> ProgramRun:
    undo.enter_context(keptlibraries.all_kept())
    if current_scope() is None:
        undo.enter_context(Scope(spans=True).entered())
    os.chdir(launch.folder or os.getcwd())
    undo.enter_context(_told(launch, ranks, real))
    arguments = launch.arguments
    if launch.rank_argument:
        arguments = (f"{launch.rank_argument}={ranks.local_rank}", *arguments)
    program = undo.enter_context(prepared(launch, arguments))
    fixed = launch.processes is not None or ranks.world > 1
    notes: list[Any] = []
    processes = Processes(ranks, fixed, lambda assumption: notes[0].assume(assumption))
    exits = ending.AtExit()
    run = ProgramRun(program, processes, exits)
    notes.append(run)
    run.assume(("environment", environment.OFFLINE_TEXT))
    if not real:
        undo.enter_context(processes.alone())
        undo.enter_context(OtherProcesses(launch, processes).here())
    undo.enter_context(exits.collected())
    return run


@contextlib.contextmanager
def _told(launch: CommandLine, ranks: Ranks, real: bool) -> Iterator[None]:
    """Inside, the environment is that of a rank, without a network."""
    before = dict(os.environ)
    os.environ.update(launch.environment)
    for name, value in environment.OFFLINE.items():
        os.environ.setdefault(name, value)
    if not real:
        os.environ.update(environment.of_ranks(launch, ranks))
    earlier = {
        (id(home), name): (home, home[name])
        for home, name, _ in environment.offline_constants(os.environ)
    }
    for home, name, said in environment.offline_constants(os.environ):
        home[name] = home[name] or said
    try:
        yield
    finally:
        for home, name, said in environment.offline_constants(before):
            home[name] = earlier.get((id(home), name), (home, said))[1]


def _code(error: SystemExit) -> int:
    """The exit code of a process that exits so."""
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0)
    return 1


def _from_here(error: BaseException) -> None:
    """Leave our own frames out of the traceback of an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
