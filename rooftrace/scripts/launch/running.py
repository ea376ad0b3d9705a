"""Runs a program in this process as `__main__`, and ends it as Python would."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from rooftrace.errors import RequestError
from rooftrace.scripts.launch import records
from rooftrace.scripts.launch.distributed import AXIS, OtherProcesses, Processes
from rooftrace.scripts.launch.overlay import folder_of
from rooftrace.scripts.launch.records import (
    SUFFIX,
    CommandLine,
    Ended,
    HardExit,
    NotebookCells,
    Ranks,
    Stopped,
)
from rooftrace.scripts.launch.scratch import guard, redirect, refusal
from rooftrace.tracer.phases.ownprocess import leave_with
from rooftrace.tracer.recording import original_of, put

# -- preparing -------------------------------------------------------------------------------------
# A program runs as `__main__`, as if Python had been started with it.


def prepared(
    launch: CommandLine, arguments: tuple[str, ...]
) -> tuple[Callable[[], None], Sequence[str]]:
    """Make `__main__`, `sys.argv` and `sys.path` of this process those of a program.

    Returns the function that runs it, and a notebook's skipped lines.  Raises RequestError for a
    module that is not there, and for a file that is no program of Python.
    """
    program = Path(launch.program)
    if launch.module:
        first = launch.folder
    else:
        first = str(program if program.is_dir() else program.resolve().parent)
    sys.path.insert(0, os.path.realpath(first))
    module = ModuleType("__main__")
    names = vars(module)
    left_out: Sequence[str] = ()
    names["__builtins__"] = builtins
    if launch.module or program.is_dir():
        spec, code = _of_module(launch.program if launch.module else "")
        codes = [code]
        origin = str(spec.origin)
        names.update(
            __spec__=spec,
            __loader__=spec.loader,
            __package__=spec.parent,
            __file__=origin,
            __cached__=spec.cached,
        )
        shown = origin if launch.module else launch.written
    elif program.suffix == SUFFIX:
        shown, notebook = launch.written or launch.program, NotebookCells(launch.program)
        codes, left_out = notebook.cells, notebook.left_out
        names["display"] = print
    else:
        shown = launch.written or launch.program
        loader = SourceFileLoader("__main__", launch.program)
        codes = [_compiled(program)]
        names.update(__file__=launch.program, __loader__=loader, __cached__=None)
    sys.argv = [shown, *arguments]
    sys.modules["__main__"] = module

    def run() -> None:
        if names.get("__package__"):  # code of the program, too
            importlib.import_module(names["__package__"])
        for code in codes:  # of a notebook, that of each cell
            exec(code, names)

    return run, left_out


def _compiled(path: Path) -> CodeType:
    try:
        with io.open_code(str(path)) as file:
            return compile(file.read(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{path}: no program of Python: {error}") from error
    except OSError as error:
        raise RequestError(f"{path}: it cannot be read: {error.strerror}") from error


def _of_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and the code of a module that is run; of a package it is `__main__`."""
    wanted = name or "__main__"
    try:
        if name:
            spec = _found(name)
        else:  # that of the folder which comes first; `__main__` in sys.modules is another
            spec = importlib.machinery.PathFinder.find_spec("__main__", sys.path[:1])
    except (ModuleNotFoundError, ValueError) as error:
        raise RequestError(f"-m {name}: {error}") from error
    if spec is not None and spec.submodule_search_locations is not None:
        wanted = f"{name}.__main__"
        spec = _found(wanted)
    if spec is None:
        raise RequestError(
            f"-m {name}: no module {wanted} in the working directory or among those installed"
        )
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise RequestError(f"-m {name}: {spec.origin} has no code of Python")
    return spec, code


def _found(name: str) -> ModuleSpec | None:
    """The spec of a module; the packages that hold it are not imported for it if that can be."""
    first, *parts = name.split(".")
    spec = importlib.util.find_spec(first)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        inner = f"{spec.name}.{part}"
        loaded = sys.modules.get(spec.name)
        folders = getattr(loaded, "__path__", spec.submodule_search_locations)
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(inner, folders) for find in finders if find is not None)
        spec = next((where for where in specs if where is not None), None)
        if spec is None:  # a package may say when it is imported where its modules are
            return importlib.util.find_spec(name)
    return spec


# -- ending ----------------------------------------------------------------------------------------

GENTLE = 3
"""How often a program that goes on is asked to stop, before its process ends where it stands."""
_PATIENCE = 5.0
"""Seconds in which threads of a program may end after it."""
_REPLACING = ("execv", "execve", "execl", "execle", "execlp", "execlpe", "execvp", "execvpe")


def raise_exits() -> None:
    """From here on `os._exit` raises HardExit, and the program becomes no other one."""
    pid = os.getpid()

    def leave(status: int) -> None:
        if os.getpid() != pid:  # a process that the program forked
            original_of(os, "_exit")(status)
        raise HardExit(status)

    def become(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != pid:
                return original_of(os, name)(*args, **kwargs)
            raise RequestError(
                f"os.{name}: the program would become another one, of which nothing is recorded; "
                "run that program itself"
            )

        return refuse

    names = [name for name in _REPLACING if hasattr(os, name)]
    put(os, {"_exit": leave} | {name: become(name) for name in names})


class Stopping:
    """Ends a program that runs, by `stop` in one of its calls.

    It is made in the main thread, where it may run a handler of a signal.  give_up: ends the
    process at once, as if the program had ended where it stands; for one that goes on after it was
    told to stop several times.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        self._asked, self._give_up = 0, give_up
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._stop_here)

    def stop(self) -> None:
        """Raise Stopped in the running call, and in the main thread, which may wait for it."""
        self._asked += 1
        main = threading.main_thread()
        if threading.current_thread() is main:
            self._stop_here()
        if _SIGNAL is not None and signal.getsignal(_SIGNAL) == self._stop_here:
            signal.pthread_kill(main.ident or 0, _SIGNAL)
        raise Stopped

    def _stop_here(self, *signalled: Any) -> None:
        if self._asked > GENTLE:
            self._give_up()
        raise Stopped


_SIGNAL: Any = getattr(signal, "SIGUSR2", None)


class LostErrors:
    """Errors that end a thread of the program, and those of tasks whose result nobody reads."""

    def __init__(self) -> None:
        self._of_threads: list[tuple[str, BaseException]] = []
        self._of_tasks: dict[int, tuple[str, BaseException]] = {}  # by the identity of the future
        self._futures: list[Future[Any]] = []  # that keeps their identities

    def watch(self) -> None:
        """From here on errors are noted, in every thread."""
        said, failed = threading.excepthook, Future.set_exception

        def ended(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, Stopped | HardExit):
                name = args.thread.name if args.thread is not None else "a thread"
                self._of_threads.append((name, args.exc_value))
                said(args)

        def set_exception(future: Future[Any], error: BaseException | None) -> None:
            if error is not None and not isinstance(error, Stopped | HardExit):
                self._futures.append(future)
                self._of_tasks[id(future)] = threading.current_thread().name, error
            failed(future, error)

        def asking(name: str) -> Callable[..., Any]:
            original = getattr(Future, name)

            def submitted(future: Future[Any], *args: Any, **kwargs: Any) -> Any:
                self._of_tasks.pop(id(future), None)
                try:
                    return original(future, *args, **kwargs)
                finally:
                    self._of_tasks.pop(id(future), None)

            return submitted

        threading.excepthook = ended
        setattr(Future, "set_exception", set_exception)  # noqa: B010  # mypy allows no assignment
        for name in ("result", "exception", "add_done_callback"):
            setattr(Future, name, asking(name))

    def first(self) -> tuple[str, BaseException] | None:
        """The name of a thread and its error; None where there was none."""
        return next(iter((*self._of_threads, *self._of_tasks.values())), None)


def shut_down(before: set[threading.Thread], waiting: bool) -> None:
    """End a program as Python does: end its pools, wait for its threads, call its
    exit functions.

    before: threads that are not the program's.  waiting: False, where the program was stopped:
    its threads have some seconds.
    """
    threads = [thread for thread in threading.enumerate() if thread not in before]

    def end_threads() -> None:
        for function in reversed(vars(threading).get("_threading_atexits", ())):
            function()
        for thread in threads:
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()

    ending = threading.Thread(target=end_threads, daemon=True)
    ending.start()
    ending.join(None if waiting else _PATIENCE)
    atexit._run_exitfuncs()  # they print their errors
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sys.stdout.flush()


def leave(code: int, error: BaseException | None) -> NoReturn:
    """End this process at once, as Python ends one: an error is printed."""
    if error is not None:
        traceback.print_exception(error)
        code = 1
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sys.stderr.flush()
    original_of(os, "_exit")(code)
    raise AssertionError


# -- running ---------------------------------------------------------------------------------------
# A launch has this process for itself: afterwards the process is of no other use.

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
        self._stopping, self._lost = Stopping(self._give_up), LostErrors()
        self._assumed: dict[tuple[str, str], None] = {}
        if left_out:
            names = ", ".join(dict.fromkeys(left_out))
            text = f"magics and shell lines of the notebook are left out: {names}"
            self._assumed["notebook", text] = None
        self._process = os.getpid()
        self._before = set(threading.enumerate())  # threads that are not the program's
        self._then: Callable[[Ended], bytes] | None = None  # None: it has ended, or not begun
        self.at_end: Callable[[], None] = lambda: None  # is called before its exit functions

    @property
    def ranks(self) -> Ranks:
        """The rank as which it runs; the program may still say how many there are."""
        return self._processes.ranks

    @property
    def assumed(self) -> tuple[tuple[str, str], ...]:
        """Assumptions so far about missing parts: pairs of a kind and a text."""
        return (*self._assumed, *([AXIS] if self._processes.axis_assumed else ()))

    def assume(self, assumption: tuple[str, str]) -> None:
        """Note an assumption, once."""
        self._assumed.setdefault(assumption)

    def stop(self) -> None:
        """End the program: raises Stopped, in a call that the program makes.

        A program that catches it and goes on gets it again at the next call.  After three times its
        process ends there.
        """
        self._stopping.stop()

    def __call__(self, then: Callable[[Ended], bytes]) -> bytes:
        """Run the program and its exit functions, and return the value of `then`.

        then: the result for the caller of this process, by how the program ended.  It may be
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
        """How the program ended, once its exit functions have run."""
        thread = ""
        try:
            shut_down(self._before, waiting=reason != "stopped")
        except Stopped:  # by a thread that it waits for
            reason = "stopped"
            shut_down(self._before, waiting=False)
        if os.getpid() != self._process:  # one that the program has forked, which ends here
            leave(code, raised)
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
    run.assume(("environment", records.OFFLINE_TEXT))
    if not real:
        processes.stand_alone()
        OtherProcesses(launch, processes).stay_away()
    raise_exits()
    if scratch is not None:
        redirect(scratch)
        if lacking := guard(folder_of(scratch)):
            run.assume(("scratch", lacking))
    return run


def _tell(launch: CommandLine, ranks: Ranks, real: bool) -> None:
    """Make the environment that of a rank, without a network."""
    os.environ.update(launch.environment)
    for name, value in records.OFFLINE.items():
        os.environ.setdefault(name, value)
    if not real:
        os.environ.update(records.of_ranks(launch, ranks))


def _code(error: SystemExit) -> int:
    """The exit code of a process that exits so."""
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0)
    return 1


def _from_here(error: BaseException) -> None:
    """Leave our frames out of the traceback of an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
