"""Traces a target in a new process, with the interpreter, folder and files of that process."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rooftrace._progress import tell
from rooftrace.errors import RequestError, TargetError, naming
from rooftrace.graph import GraphError, GraphFileError, OpGraph, load_graphs
from rooftrace.tracer import Job, Options, Request, names
from rooftrace.tracer.phases import ownprocess
from rooftrace.tracer.phases.starting import Moves

# -- places ----------------------------------------------------------------------------------------
# Where a process that traces a target runs: its interpreter, its folder, its files.

_OURS = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class ProcessPlace:
    """The surroundings of a process; by default those of this one.

    Paths are real ones.  A checkout of the repository stands for it in every path.
    """

    python: str = sys.executable
    root: str = ""  # of the files that are watched, and that source lines are relative to
    repository: str = ""  # the root of the repository, where `root` is a checkout of it
    ignored: tuple[str, ...] = ()  # paths that git ignores there

    @cached_property
    def _moves(self) -> Moves | None:
        return Moves(self.repository, self.root, self.ignored) if self.repository else None

    @property
    def folder(self) -> str:
        """The working folder of the process; "" for that of this one.

        It is made in a checkout that has no such folder.
        """
        new = self._moves.new(os.getcwd()) if self._moves else None
        if new is None:
            return ""
        os.makedirs(new, exist_ok=True)
        return new

    def target(self, name: str) -> str:
        """The name of a target there: an absolute path leads into the checkout."""
        if self._moves is None:
            return name
        if names.is_script(name):
            return self._command(name)
        if not os.path.isabs(name):
            return name
        path, colon, attribute = name.rpartition(":")
        if not colon:
            path = name
        return f"{self._moves.new(path) or path}{colon}{attribute if colon else ''}"

    def _command(self, name: str) -> str:
        """A script's command there: absolute paths among its words lead into the checkout."""
        assert self._moves is not None
        before, words = names.ScriptCommand.parted(name)
        moved = [(os.path.isabs(word) and self._moves.new(word)) or word for word in words]
        return f"{before}{shlex.join(moved)}"

    def value(self, value: Any) -> Any:
        """The value of an assumption there: a file that it names stays the one of this folder."""
        policy, colon, path = value.partition(":") if isinstance(value, str) else (value, "", "")
        if policy != "histogram" or not self.folder:
            return value
        return f"{policy}{colon}{os.path.abspath(path)}"

    def here(self, message: str) -> str:
        """A message of the process with paths of the repository in place of the checkout's."""
        if not self.repository:
            return message
        return message.replace(self.root + os.sep, "").replace(self.root, self.repository)

    def environment(self) -> dict[str, str]:
        """Variables of the process.  It writes no bytecode next to the user's files."""
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        if not self._is_ours:
            env.pop("PYTHONHOME", None)
        if self._moves and env.get("PYTHONPATH"):
            entries = self._moves.path(env["PYTHONPATH"].split(os.pathsep))
            env["PYTHONPATH"] = os.pathsep.join(entries)
        return env

    def fields(self) -> dict[str, Any]:
        """The message to `starting` and `worker`."""
        return {
            "path": sys.path if self._is_ours else _users_path(),
            "full_path": self._is_ours,
            "root": self.root,
            "moves": [self.repository, self.root, self.ignored] if self.repository else None,
            "rooftrace": _OURS,
            "worker": f"{__package__}.worker",
        }

    @property
    def _is_ours(self) -> bool:
        return self.python == sys.executable


def _users_path() -> list[str]:
    """Entries of the import path that are neither Python's, an environment's, nor rooftrace's."""
    not_users = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return [
        entry
        for entry in sys.path
        if not any(os.path.realpath(entry).startswith(os.path.realpath(p)) for p in not_users)
        and os.path.realpath(entry) != os.path.dirname(_OURS)
        and os.path.realpath(entry) != os.getcwd()
        and "site-packages" not in Path(entry).parts
    ]


# -- apart -----------------------------------------------------------------------------------------
# Traces a target in a new process, in which nothing was imported or patched before.
#
# The job goes in as JSON; graphs come back through a graph file, progress and errors as JSON.
# What the target prints goes to stderr.  The process is forked from one that has torch (see
# `launching`); that of a checkout, or of another interpreter, begins with `starting`.  `worker`
# is the other side.

_START = Path(__file__).with_name("starting.py")
PROCESSES = True
"""Whether processes may be started; tests set it to False, to trace in this process."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Which files a process read, where that was watched: below the root of its place."""

    inside: tuple[str, ...] = ()  # paths below the root
    outside: tuple[str, ...] = ()  # paths below the repository, read there and not in the checkout
    # Top-level modules outside the standard library, and the file of each.
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Traced:
    """Graphs by phase, and the source files that they were traced from.

    files: digests by path; empty for no code.  opened: files of the user's that a target opened, or
    looked for.  rules: whether its code brought cost rules, which stay in the process that ran it.
    """

    graphs: Mapping[str, OpGraph]
    files: Mapping[str, str] = field(default_factory=dict)
    opened: Sequence[str] = ()
    rules: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job in a separate process: the traced graphs, or the error."""

    traced: Traced | None
    error: Exception | None = None
    reads: Reads = field(default_factory=Reads)

    def graphs(self) -> Traced:
        """The traced graphs.  Raises the error if there is one."""
        if self.traced is None:
            assert self.error is not None
            raise self.error
        return self.traced


def can_go_apart(job: Job) -> bool:
    """Whether a job can be sent to another process: functions of the user cannot."""
    has_functions = any(map(names.is_own, job.phases or ()))
    return PROCESSES and job.options.loss is None and not has_functions


def trace_each_apart(jobs: Sequence[Job], at_once: int | None = None) -> list[Traced | None]:
    """Trace jobs on targets that are code, each in a separate process, `at_once` at a time.

    No job sees imports or patches of another, or of this process.  None in the list is a job that
    cannot be sent to another process.  Raises the error of the first job that fails.
    """
    if not all(map(can_go_apart, jobs)):
        return [None] * len(jobs)
    outcomes = run_apart(jobs, [ProcessPlace()] * len(jobs), at_once)
    return [outcome.graphs() for outcome in outcomes]


def run_apart(
    jobs: Sequence[Job], places: Sequence[ProcessPlace], at_once: int | None = None
) -> list[Outcome]:
    """Run jobs on targets, each at its place in a separate process, `at_once` at a time.

    at_once: None for all.
    """
    with ThreadPoolExecutor(at_once or max(1, len(jobs))) as pool:
        running = [
            pool.submit(copy_context().run, _outcome, job, place)
            for job, place in zip(jobs, places, strict=True)
        ]
        try:
            return [future.result() for future in running]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            ownprocess.end_processes()
            raise


def trace_apart(job: Job) -> Traced:
    """Trace a job on a target in a separate process.

    Raises the errors of tracing it here, and TargetError if the process ends without an answer.
    """
    return _outcome(job, ProcessPlace()).graphs()


def _outcome(job: Job, place: ProcessPlace) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
        out = Path(folder) / "graphs.json"
        message = {**_json_of(job, place), **place.fields(), "out": str(out)}
        forks = place == ProcessPlace() and hasattr(os, "fork")
        answers, code = _forked(message) if forks else _answers(message, place)
        reads = Reads(*answers.get("reads", ()))
        if "error" in answers:
            error = _error(answers["error"], place.here(answers["message"]))
            if "traceback" in answers:
                text = f"in the process that traced it:\n{answers['traceback']}"
                error.__cause__ = RuntimeError(text)
            return Outcome(None, _named(error, job.name), reads)
        if code or "files" not in answers:
            ended = f"target {job.name!r}: the process that traced it ended with {code}"
            return Outcome(None, TargetError(ended), reads)
        made = Traced(load_graphs(out), answers["files"], answers["opened"], answers["rules"])
        return Outcome(made, reads=reads)


def _forked(message: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The answer of a process that is forked from one with torch, and its exit code."""
    try:
        answer = ownprocess.call_apart(
            f"{message['worker']}:work_in_fork", json.dumps(message), stdout=sys.stderr
        )
    except ownprocess.ProcessEndedError as error:
        return {}, error.code
    reply: dict[str, Any] = json.loads(answer)
    return reply, 0


def _answers(message: Mapping[str, Any], place: ProcessPlace) -> tuple[dict[str, Any], int]:
    """The answer of the other process, and its exit code; its progress is passed on."""
    try:
        child = subprocess.Popen(
            [place.python, str(_START)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=place.folder or None,
            env=place.environment(),
            text=True,
            encoding="utf-8",
        )
    except OSError as error:
        raise RequestError(
            f"python {place.python!r}: it cannot be started ({error.strerror or error})"
        ) from None
    assert child.stdin is not None and child.stdout is not None
    answers: dict[str, Any] = {}
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(message))
            child.stdin.close()
        for line in child.stdout:
            reply = _said(line, place.python)
            if "progress" in reply:
                tell(reply["progress"])
            answers |= reply
        return answers, child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()


def _said(line: str, python: str) -> dict[str, Any]:
    """One line of the other process, parsed.  Raises RequestError for no interpreter of ours."""
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise RequestError(f"python {python!r}: it is no Python; it said {line.strip()!r:.60}")
    return reply


def _named(error: Exception, name: str) -> Exception:
    """An error that says which target it is about."""
    try:
        with naming(name):
            raise error
    except (ValueError, LookupError, RuntimeError) as named:
        return named


def _json_of(job: Job, place: ProcessPlace) -> dict[str, Any]:
    """A job as JSON; `job_from_json` is the way back."""
    options = {f.name: getattr(job.options, f.name) for f in fields(Options) if f.name != "loss"}
    options["branches"] = list(job.options.branches.items())
    options["assume"] = {name: place.value(value) for name, value in job.options.assume.items()}
    return {
        "source": place.target(job.name),
        "phases": job.phases,
        "request": {**asdict(job.request), "inputs": dict(job.request.inputs)},
        "options": options,
    }


def job_from_json(message: Mapping[str, Any]) -> Job:
    """The job that `_json_of` wrote as JSON."""
    branches = {int(number): bool(taken) for number, taken in message["options"]["branches"]}
    return Job(
        source=message["source"],
        phases=None if message["phases"] is None else tuple(message["phases"]),
        request=Request(**message["request"]),
        options=Options(**{**message["options"], "branches": branches}),
    )


def _error(names: Iterable[str], message: str) -> Exception:
    """The other process's error, as our nearest class that takes a message alone."""
    from rooftrace.errors import TraceError

    kinds = (RequestError, TargetError, GraphFileError, GraphError, TraceError)
    kind = next((kind for name in names for kind in kinds if kind.__name__ == name), TargetError)
    return kind(message)
