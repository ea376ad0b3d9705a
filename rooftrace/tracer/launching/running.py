"""A launch runs in this process, which is its own: afterwards the process is of no other use."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rooftrace.tracer.launching import ending, environment
from rooftrace.tracer.launching.distributed import AXIS, Processes
from rooftrace.tracer.launching.landlock import guard, refusal
from rooftrace.tracer.launching.overlay import folder_of
from rooftrace.tracer.launching.ownprocess import leave_with
from rooftrace.tracer.launching.program import prepared
from rooftrace.tracer.launching.records import CommandLine, Ended, HardExit, Ranks, Stopped
from rooftrace.tracer.launching.scratch import redirect
from rooftrace.tracer.launching.starting import OtherProcesses

_MULTIRUN = {"--multirun", "-m"}
_FIRST_JOB = (
    "jobs",
    "hydra --multirun: these are steps of the first job, or of the first few; for another, give "
    "its overrides without --multirun",
)


class ProgramRun:
    """A launch whose process is ready: calling it runs the program, once."""

    def __init__(
        self, program: Callable[[], None], left_out: Sequence[str], processes: Processes
    ) -> None:
        self._program, self._processes = program, processes
        self._stopping, self._lost = ending.Stopping(self._give_up), ending.LostErrors()
        self._assumed: dict[tuple[str, str], None] = {}
        if left_out:
            names = ", ".join(dict.fromkeys(left_out))
            text = f"magics and shell lines of the notebook are left out: {names}"
            self._assumed["notebook", text] = None
        self._process = os.getpid()
        self._before = set(threading.enumerate())  # threads that are not the program's
        self._then: Callable[[Ended], bytes] | None = None  # None: it has ended, or not begun
        self.at_end: Callable[[], None] = lambda: None  # is called before what it registered

    @property
    def ranks(self) -> Ranks:
        """The rank as which it runs; the program may still say how many there are."""
        return self._processes.ranks

    @property
    def assumed(self) -> tuple[tuple[str, str], ...]:
        """What was assumed up to now of what is not there: pairs of a kind and a text."""
        return (*self._assumed, *([AXIS] if self._processes.axis_assumed else ()))

    def assume(self, assumption: tuple[str, str]) -> None:
        """Note an assumption, once."""
        self._assumed.setdefault(assumption)

    def stop(self) -> None:
        """End the program: raises Stopped, in a call that the program makes.

        A program that catches it and goes on is told again at the next call.  After three times its
        process ends there.
        """
        self._stopping.stop()

    def __call__(self, then: Callable[[Ended], bytes]) -> bytes:
        """Run the program and what it registered for its exit, and return what `then` gives.

        then: what this process returns to who has called it, by how the program ended.  It may be
        called in the middle of a call of the program's, which does not go on.  KeyboardInterrupt of
        the user is raised.
        """
        self._then = then
        raised: BaseException | None = None
        reason, code = "end", 0
        self._lost.watch()
        try:
            self._program()
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
        self._then = None
        if raised is None and os.getpid() == self._process:
            self.at_end()
        return then(self._ended(reason, code, raised))

    def _give_up(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            leave_with(then(self._ended("stopped", 0, None)))

    def _ended(self, reason: str, code: int, raised: BaseException | None) -> Ended:
        """How the program ended, once what it registered for its exit has run."""
        thread = ""
        try:
            ending.shut_down(self._before, waiting=reason != "stopped")
        except Stopped:  # by a thread that it waits for
            reason = "stopped"
            ending.shut_down(self._before, waiting=False)
        if os.getpid() != self._process:  # one that the program has forked, which ends here
            ending.leave(code, raised)
        if reason == "stopped" and "hydra" in sys.modules and _MULTIRUN & {*sys.argv[1:]}:
            self.assume(_FIRST_JOB)
        lost = self._lost.first()
        if lost is not None and not code and reason in ("end", "exit"):
            reason, (thread, raised) = "error", lost
        made: dict[str, Any] = {"reason": reason, "code": code, "exception": raised}
        return Ended(**made, thread=thread, ranks=self.ranks, assumed=self.assumed)


def launched(
    launch: CommandLine,
    ranks: Ranks | None = None,
    scratch: str | os.PathLike[str] | None = None,
    real: bool = False,
) -> ProgramRun:
    """Make this process the one that `launch` starts for a rank; the result runs the program.

    ranks: which of how many runs (`Ranks.of`).  scratch: a folder in which the program's files
    come to lie, each under its absolute path; it reads them from there, and no other file changes.
    None: it writes where it says.  real: other processes are there, as a launcher has started them,
    and this one keeps its environment.  What the program changes in the process stays changed, and
    it can write nowhere but in the scratch folder any more, where the kernel can see to that.
    Raises RequestError for a program that is not there.
    """
    ranks = ranks or Ranks.of(launch)
    os.chdir(launch.folder or os.getcwd())
    _tell(launch, ranks, real)
    arguments = launch.arguments
    if launch.rank_argument:
        arguments = (f"{launch.rank_argument}={ranks.local_rank}", *arguments)
    program, left_out = prepared(launch, arguments)
    notes: list[Any] = []
    processes = Processes(ranks, ranks.said, lambda assumption: notes[0].assume(assumption))
    run = ProgramRun(program, left_out, processes)
    notes.append(run)
    run.assume(("environment", environment.OFFLINE_TEXT))
    if not real:
        processes.stand_alone()
        OtherProcesses(launch, processes).stay_away()
    ending.raise_exits()
    if scratch is not None:
        redirect(scratch)
        if lacking := guard(folder_of(scratch)):
            run.assume(("scratch", lacking))
    return run


def _tell(launch: CommandLine, ranks: Ranks, real: bool) -> None:
    """Make the environment that of a rank, without a network."""
    os.environ.update(launch.environment)
    for name, value in environment.OFFLINE.items():
        os.environ.setdefault(name, value)
    if not real:
        os.environ.update(environment.of_ranks(launch, ranks))


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
