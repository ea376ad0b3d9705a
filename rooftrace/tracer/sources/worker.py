"""The processes that `apart` starts: they trace targets and answer on stdout in lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rooftrace._progress import telling
from rooftrace.errors import is_ours
from rooftrace.tracer.graphfiles import save_graphs
from rooftrace.tracer.sources.apart import job_told
from rooftrace.tracer.sources.tracing import traced_target

_COST_MODELS = "rooftrace.costmodels.registry.lookup"


def work(told: Mapping[str, Any]) -> None:
    """Do the job that was told, and end this process."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the target are no answers

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    answer(**_done(told, lambda text: answer(progress=text)))
    answers.close()
    _end(0)


def fork_each(told: Mapping[str, Any]) -> None:
    """Do each of the jobs that were told in a fork of this process, and end it.

    Exit codes by the number of a job are the answer.  What a fork answers is in a file: lines of
    several processes in one pipe would mix.
    """
    _warm_up()
    answers = os.dup(1)
    os.dup2(2, 1)
    waiting = list(enumerate(told["jobs"]))
    running: dict[int, int] = {}
    codes: dict[str, int] = {}

    def stop(*_: Any) -> None:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while waiting or running:
        while waiting and len(running) < told["forks"]:
            place, job = waiting.pop(0)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _work_in_fork(job, answers)
            running[pid] = place
        pid, status = os.wait()
        if pid in running:
            codes[str(running.pop(pid))] = os.waitstatus_to_exitcode(status)
    os.write(answers, json.dumps(codes).encode() + b"\n")
    _end(0)


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


def _work_in_fork(told: Mapping[str, Any], answers: int) -> None:
    """Do a job, write its answer, and end this fork."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:

        def progress(text: str) -> None:
            os.write(answers, json.dumps({"progress": text[:_LONGEST]}).encode() + b"\n")

        said = _done(told, progress)
        Path(f"{told['out']}.answer").write_text(json.dumps(said), encoding="utf-8")
        _end(0)
    except KeyboardInterrupt:
        _end(130)
    except BaseException:  # whatever it is: this fork must not go on as the process above
        traceback.print_exc()
        _end(1)


def _done(told: Mapping[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Trace the target of a job and save its graphs; what is answered."""
    try:
        with telling(progress):
            traced = traced_target(job_told(told))
        save_graphs(traced.graphs, told["out"])
        return {"files": dict(traced.files), "rules": _COST_MODELS in sys.modules}
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        if not (is_ours(error) or isinstance(error, OSError)):
            raise
        return {"error": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking down a large model object by object takes seconds
