"""The process that `apart` starts: traces targets and answers on stdout in lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftrace._progress import telling
from rooftrace.errors import is_ours
from rooftrace.tracer.graphfiles import save_graphs
from rooftrace.tracer.source import lines
from rooftrace.tracer.sources.apart import job_told
from rooftrace.tracer.sources.tracing import traced

_COST_MODELS = "rooftrace.costmodels.registry.lookup"


def work(told: Mapping[str, Any], read: Iterable[str]) -> None:
    """Do the job that was told, or each of several in a fork, and end this process.

    read: paths of files it opens, as it goes
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the target are no answers

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    if "jobs" in told:
        answer(**_fork_each(told["jobs"], told["at_once"], answers.fileno()))
    else:
        lines.shown_below(told["root"])
        answer(**_done(told, lambda text: answer(progress=text)))
        answer(reads=_reads(list(read), told))
    answers.close()
    _end(0)


def _done(told: Mapping[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Trace the target of a job and save its graphs; what is answered."""
    try:
        with telling(progress):
            made = traced(job_told(told))
        save_graphs(made.graphs, told["out"])
        return {"files": dict(made.files), "rules": _COST_MODELS in sys.modules}
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        if not (is_ours(error) or isinstance(error, OSError)):
            raise
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds, "message": str(error), "traceback": traceback.format_exc()}


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking down a large model object by object takes seconds


# -- forks -----------------------------------------------------------------------------------------


def _fork_each(jobs: Sequence[Mapping[str, Any]], at_once: int, pipe: int) -> dict[str, int]:
    """Do each job in a fork of this process; their exit codes, by the number of the job.

    What a fork answers is in a file: lines of several processes in one pipe would mix.
    """
    _warm_up()
    waiting = list(enumerate(jobs))
    running: dict[int, int] = {}
    codes: dict[str, int] = {}

    def stop(*_: Any) -> None:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    while waiting or running:
        while waiting and len(running) < at_once:
            place, job = waiting.pop(0)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _work_in_fork(job, pipe)
            running[pid] = place
        pid, status = os.wait()
        if pid in running:
            codes[str(running.pop(pid))] = os.waitstatus_to_exitcode(status)
    return codes


def _warm_up() -> None:
    """Trace a forward, which loads once what every fork needs.

    No backward: autograd cannot go on in a fork of a process that has run one.
    """
    import torch

    from rooftrace.tracer import trace

    with torch.device("meta"):
        trace(torch.nn.Linear(1, 1), torch.empty(1, 1))


_LONGEST = 400
"""Letters of a line of progress: short enough to be written to a pipe at once."""


def _work_in_fork(told: Mapping[str, Any], pipe: int) -> None:
    """Do a job, write its answer, and end this fork."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:

        def progress(text: str) -> None:
            os.write(pipe, json.dumps({"progress": text[:_LONGEST]}).encode() + b"\n")

        said = _done(told, progress)
        Path(f"{told['out']}.answer").write_text(json.dumps(said), encoding="utf-8")
        _end(0)
    except BaseException:  # whatever it is: this fork must not go on as the process above
        traceback.print_exc()
        _end(1)


# -- which files were read -------------------------------------------------------------------------


def _reads(read: Sequence[str], told: Mapping[str, Any]) -> list[Any]:
    """The fields of a `Reads`: files by their paths below the root, or the repository."""
    if not told["root"]:
        return []
    paths = [os.path.realpath(path) for path in read]
    apart = [path for path in paths if not path.startswith(told["root"] + os.sep)]
    outside = _below(apart, told["moves"][0]) if told["moves"] else []
    inside = _below(paths, told["root"])
    return [inside, outside, _modules()]


def _below(paths: Sequence[str], root: str) -> list[str]:
    """Those of the paths that are below a root and in no environment, relative to it."""
    environments = {os.path.realpath(p) + os.sep for p in (sys.prefix, sys.base_prefix)}
    environments = {place for place in environments if not (root + os.sep).startswith(place)}
    inside = (p for p in paths if p.startswith(root + os.sep))
    below = {
        os.path.relpath(path, root): None
        for path in inside
        if not path.startswith(tuple(environments)) and os.path.isfile(path)
    }
    return [path for path in below if not _NOT_FILES & set(path.split(os.sep))]


_NOT_FILES = {"site-packages", "dist-packages", ".git", "__pycache__"}


def _modules() -> dict[str, str]:
    """The files of the top-level modules that are neither Python's nor ours."""
    return {
        name: os.path.realpath(file)
        for name, module in list(sys.modules.items())
        if "." not in name
        and name not in sys.stdlib_module_names
        and name not in ("__main__", "rooftrace")
        and isinstance(file := getattr(module, "__file__", None), str)
    }
