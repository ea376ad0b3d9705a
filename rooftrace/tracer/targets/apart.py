"""Traces a target in a process of its own: nothing that was imported or patched before is there.

The job goes in as JSON; graphs come back through a graph file, progress and errors as lines of
JSON.  What the target prints goes to stderr.  No object is pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rooftrace.tracer.asking import Options, Request, RequestError, TargetError
from rooftrace.tracer.graph import GraphError, GraphFileError, OpGraph, load_graphs, save_graphs

_START = (
    "import json, sys; job = json.loads(sys.stdin.read()); sys.path[:] = job['path']; "
    "from rooftrace.tracer.targets.apart import work; work(job)"
)
PROCESSES = True
"""Whether processes may be started: tests set it to False, to do the same in their own."""
_COST_MODELS = "rooftrace.costmodels.registry.lookup"


@dataclass(frozen=True)
class Traced:
    """Graphs by phase, and the source files that they were traced from.

    files: digests by path; empty for what is no code.  rules: whether the target's code brought
    cost rules (it imported the cost models), which stay in the process that ran it.
    """

    graphs: Mapping[str, OpGraph]
    files: Mapping[str, str] = field(default_factory=dict)
    rules: bool = False


def can_go_apart(options: Options | None) -> bool:
    """Whether a job can be told to another process: a loss function cannot."""
    return PROCESSES and (options is None or options.loss is None)


def trace_apart(
    target: str,
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Traced:
    """`trace_target` in a process of its own.  Raises what that raises, and TargetError where the
    process ends without an answer."""
    request, options = request or Request(), options or Options()
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
        out = Path(folder) / "graphs.json"
        job = {
            "path": sys.path,
            "target": target,
            "phases": None if phases is None else list(phases),
            "request": {**asdict(request), "inputs": dict(request.inputs)},
            "optimizer": options.optimizer,
            "dtype": options.dtype,
            "branches": list(options.branches.items()),
            "assume": dict(options.assume),
            "repeats": options.repeats,
            "out": str(out),
        }
        child = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(job))
                child.stdin.close()
            for line in child.stdout:
                said = json.loads(line)
                if progress and "progress" in said:
                    progress(said["progress"])
                told |= said
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
        if "error" in told:
            with naming(target):
                raise _error(told["error"], told["message"])
        if code or "files" not in told:
            raise TargetError(f"target {target!r}: the process that traced it ended with {code}")
        return Traced(load_graphs(out), told["files"], told["rules"])


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of ours that are raised inside say which of two sources they are about."""
    try:
        yield
    except (ValueError, LookupError, RuntimeError) as error:
        kind, text = type(error), str(error)
        said = f"{name}: " in text or repr(name) in text
        if said or not kind.__module__.startswith("rooftrace."):
            raise
        try:
            named = kind(f"{name}: {text}")
        except TypeError:  # it is made of more than its text
            raise error from None
        raise named from error


def _error(names: Sequence[str], message: str) -> Exception:
    """The error of the other process, as the nearest class of ours."""
    known = {
        "RequestError": RequestError,
        "TargetError": TargetError,
        "GraphFileError": GraphFileError,
        "GraphError": GraphError,
    }
    for name in names:
        if name == "TraceError":
            from rooftrace.tracer.source import TraceError

            return TraceError(message)
        if name in known:
            return known[name](message)
    return TargetError(message)


def work(job: Mapping[str, Any]) -> None:
    """What the other process does.  `job` is what `trace_apart` wrote."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the target are no answers

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    from rooftrace.tracer import trace_sources

    try:
        options = Options(
            optimizer=job["optimizer"],
            dtype=job["dtype"],
            branches={int(number): bool(way) for number, way in job["branches"]},
            assume=job["assume"],
            repeats=job["repeats"],
        )
        traced = trace_sources(
            job["target"],
            job["phases"],
            Request(**job["request"]),
            options,
            lambda text: answer(progress=text),
        )
        save_graphs(traced.graphs, job["out"])
        answer(files=dict(traced.files), rules=_COST_MODELS in sys.modules)
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        ours = [kind for kind in type(error).__mro__ if kind.__module__.startswith("rooftrace.")]
        if not ours and not isinstance(error, OSError):
            raise
        answer(error=[kind.__name__ for kind in ours], message=str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    answers.close()
    os._exit(0)  # taking down a large model object by object takes seconds
