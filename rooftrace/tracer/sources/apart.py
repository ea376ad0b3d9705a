"""Traces a target in a new process, in which nothing was imported or patched before.

The job goes in as JSON; graphs come back through a graph file, progress and errors as lines of
JSON.  What the target prints goes to stderr.  No object is pickled.  `worker` is the other side.
Many jobs take one process that imports torch, and forks for each.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rooftrace._progress import tell
from rooftrace.errors import NoCacheError, RequestError, TargetError, naming
from rooftrace.tracer.asking import Job, Options, Request, names
from rooftrace.tracer.graph import GraphError, OpGraph
from rooftrace.tracer.graphfiles import GraphFileError, load_graphs

_START = (
    "import json, sys; told = json.loads(sys.stdin.read()); sys.path[:] = told['path']; "
    "from rooftrace.tracer.sources import worker; worker.{}(told)"
)
CAN_FORK = sys.platform == "linux"
"""Elsewhere a process that has loaded torch may not be able to go on as two."""
PROCESSES = True
"""Whether processes may be started; tests set it to False, to trace in their own process."""


@dataclass(frozen=True, slots=True)
class Traced:
    """Graphs by phase, and the source files that they were traced from."""

    graphs: Mapping[str, OpGraph]
    files: Mapping[str, str] = field(default_factory=dict)  # digests by path; empty for no code
    # Whether the target's code brought cost rules, which stay in the process that ran it.
    rules: bool = False


def can_go_apart(job: Job) -> bool:
    """Whether a job can be sent to another process: functions of the user's own cannot."""
    own = any(map(names.is_own, job.phases or ()))
    return PROCESSES and job.options.loss is None and not own


def trace_each_apart(jobs: Sequence[Job], *, forks: int | None = None) -> list[Traced | None]:
    """Trace jobs on targets that are code, each in a process of its own, all at the same time.

    No job sees imports or patches of another, or of this process.  None in the list is a job that
    cannot be sent to another process.  Raises the error of the first job that fails.
    forks: at most so many run at a time, as forks of one process that has imported torch.
    """
    if not all(map(can_go_apart, jobs)):
        return [None] * len(jobs)
    if forks is not None and CAN_FORK:
        return list(_trace_forked(jobs, forks))
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        running = [pool.submit(copy_context().run, trace_apart, job) for job in jobs]
        return [future.result() for future in running]


def trace_apart(job: Job) -> Traced:
    """Trace a job on a target in a process of its own.

    Raises the errors of tracing it here, and TargetError if the process ends without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
        out = Path(folder) / "graphs.json"
        told = {**_told(job), "path": sys.path, "out": str(out)}
        return _received(job, out, *_answers(told, "work"))


def _trace_forked(jobs: Sequence[Job], forks: int) -> Iterator[Traced]:
    """Trace jobs in forks of one process."""
    with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
        outs = [Path(folder) / f"{number}.json" for number in range(len(jobs))]
        told = [{**_told(job), "out": str(out)} for job, out in zip(jobs, outs, strict=True)]
        codes, code = _answers({"path": sys.path, "jobs": told, "forks": forks}, "fork_each")
        for number, (job, out) in enumerate(zip(jobs, outs, strict=True)):
            answer = Path(f"{out}.answer")
            said = json.loads(answer.read_bytes()) if answer.is_file() else {}
            yield _received(job, out, said, codes.get(str(number), code))


def _received(job: Job, out: Path, answers: Mapping[str, Any], code: int) -> Traced:
    """What came back of a job, by its answers and the exit code of its process."""
    if "error" in answers:
        with naming(job.name):
            raise _error(answers["error"], answers["message"])
    if code or "files" not in answers:
        raise TargetError(f"target {job.name!r}: the process that traced it ended with {code}")
    return Traced(load_graphs(out), answers["files"], answers["rules"])


def _answers(told: Mapping[str, Any], function: str) -> tuple[dict[str, Any], int]:
    """The answer of the other process, and its exit code; its progress is passed on."""
    child = subprocess.Popen(
        [sys.executable, "-c", _START.format(function)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert child.stdin is not None and child.stdout is not None
    answers: dict[str, Any] = {}
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(told))
            child.stdin.close()
        for line in child.stdout:
            said = json.loads(line)
            if "progress" in said:
                tell(said["progress"])
            answers |= said
        return answers, child.wait()
    finally:
        if child.poll() is None:
            child.terminate() if function == "fork_each" else child.kill()  # it ends its forks
            child.wait()
        child.stdout.close()


def _told(job: Job) -> dict[str, Any]:
    """A job as JSON; `job_told` is the way back."""
    options = job.options
    return {
        "source": job.name,
        "phases": job.phases,
        "request": {**asdict(job.request), "inputs": dict(job.request.inputs)},
        "optimizer": options.optimizer,
        "dtype": options.dtype,
        "branches": list(options.branches.items()),
        "assume": dict(options.assume),
        "repeats": options.repeats,
    }


def job_told(told: Mapping[str, Any]) -> Job:
    """The job that `_told` wrote as JSON."""
    return Job(
        source=told["source"],
        phases=None if told["phases"] is None else tuple(told["phases"]),
        request=Request(**told["request"]),
        options=Options(
            optimizer=told["optimizer"],
            dtype=told["dtype"],
            branches={int(number): bool(way) for number, way in told["branches"]},
            assume=told["assume"],
            repeats=told["repeats"],
        ),
    )


def _error(names: Iterable[str], message: str) -> Exception:
    """The other process's error, as our nearest class that takes a message alone."""
    from rooftrace.tracer.source import TraceError

    kinds = (NoCacheError, RequestError, TargetError, GraphFileError, GraphError, TraceError)
    kind = next((kind for name in names for kind in kinds if kind.__name__ == name), TargetError)
    return kind(message)
