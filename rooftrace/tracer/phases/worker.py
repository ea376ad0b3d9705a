"""The process that `apart` starts: traces a target and answers in JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rooftrace._progress import telling
from rooftrace.errors import is_ours
from rooftrace.graph import save_graphs
from rooftrace.tracer import source
from rooftrace.tracer.phases.apart import job_from_json
from rooftrace.tracer.phases.tracing import traced


def work(message: Mapping[str, Any], read: Iterable[str]) -> None:
    """Do the job of a message, answer on stdout in lines of JSON, and end this process.

    read: paths of files it opens, as it goes
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the target are no answers

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    source.shown_below(message["root"])
    with telling(lambda text: answer(progress=text)):
        answer(**_done(message))
    answer(reads=_reads(list(read), message))
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking down a large model object by object takes seconds


def work_in_fork(ask: Any, message: str) -> bytes:
    """Do the job of a message, in a process that is forked for it; the answer."""
    sys.dont_write_bytecode = True
    return json.dumps(_done(json.loads(message))).encode()


def _done(message: Mapping[str, Any]) -> dict[str, Any]:
    """Trace the target of a job and save its graphs; the answer."""
    try:
        made = traced(job_from_json(message))
        save_graphs(made.graphs, message["out"])
        return {"files": dict(made.files), "opened": made.opened, "rules": made.rules}
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        if not (is_ours(error) or isinstance(error, OSError)):
            raise
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds, "message": str(error), "traceback": traceback.format_exc()}


# -- which files were read -------------------------------------------------------------------------


def _reads(read: Sequence[str], message: Mapping[str, Any]) -> list[Any]:
    """The fields of a `Reads`: files by their paths below the root, or the repository."""
    if not message["root"]:
        return []
    paths = [os.path.realpath(path) for path in read]
    apart = [path for path in paths if not path.startswith(message["root"] + os.sep)]
    outside = _below(apart, message["moves"][0]) if message["moves"] else []
    inside = _below(paths, message["root"])
    return [inside, outside, _modules()]


def _below(paths: Sequence[str], root: str) -> list[str]:
    """Those of the paths that are below a root and in no environment, relative to it."""
    environments = {os.path.realpath(p) + os.sep for p in (sys.prefix, sys.base_prefix)}
    environments = {folder for folder in environments if not (root + os.sep).startswith(folder)}
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
