"""Traces kept on disk, by what they depend on: the source's files, its sizes, the versions.

They lie in ROOFTRACE_CACHE, by default `rooftrace` in the user's folder for caches; "off" keeps
none.  A trace of code is used again only while all files that it came from are as they were.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooftrace._writing import write_bytes
from rooftrace.tracer.asking import Job, names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import load_graphs, save_graphs
from rooftrace.tracer.sources import apart

VARIABLE = "ROOFTRACE_CACHE"
_MOST = 2 << 30
"""Bytes; older traces go when there are more."""


class TraceCache:
    """The traces of one folder; None keeps none."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @staticmethod
    def usual() -> TraceCache:
        """That of the environment."""
        place = os.environ.get(VARIABLE, "")
        if place == "off":
            return TraceCache(None)
        if place:
            return TraceCache(Path(place))
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return TraceCache(Path(base) / "rooftrace" / "traces")

    def get(self, job: Job) -> Mapping[str, OpGraph] | None:
        """The graphs of a job on a target, if they were kept and still hold."""
        place = self._place(job)
        if place is None:
            return None
        try:
            files = json.loads(place.with_suffix(".files").read_bytes())
            if any(_digest(path) != digest for path, digest in files.items()):
                return None
            graphs = load_graphs(place)
            os.utime(place)
        except (OSError, ValueError, AttributeError, TypeError, RecursionError):  # damaged
            return None
        return graphs

    def put(self, job: Job, made: apart.Traced) -> None:
        """Keep the graphs of a job, unless its rules or a folder speak against it."""
        place = self._place(job)
        if place is None or made.rules or (job.is_code and not made.files):
            return
        with contextlib.suppress(OSError):  # a full disk or a read-only home keeps nothing
            save_graphs(made.graphs, place)
            files = {**made.files, str(place): _digest(str(place))}  # of this trace, not another's
            write_bytes(place.with_suffix(".files"), json.dumps(files).encode())
            self._shrink()

    def _place(self, job: Job) -> Path | None:
        """The file of a job; None for one that is not kept."""
        if self.folder is None or not job.is_named or job.options.loss is not None:
            return None
        if any(map(names.is_own, job.phases or ())) or job.name.startswith("hf:"):
            return None
        if job.is_script:  # which files it read nobody knows
            return None
        told: dict[str, Any] = {
            "source": _place_of(job),
            "phases": job.phases,
            "request": asdict(job.request),
            "options": {**asdict(job.options), "loss": None},
            "environment": _environment(),
        }
        config = names.config_file(job.name)
        if config is not None:
            told["config"] = {str(file): _digest(str(file)) for file in (config, *_beside(config))}
        text = json.dumps(told, sort_keys=True, default=str)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"

    def _shrink(self) -> None:
        """Remove the oldest traces where all together are too large."""
        assert self.folder is not None
        kept = sorted(self._sizes(self.folder), reverse=True)
        total = 0
        for _, size, path in kept:
            total += size
            if total > _MOST:
                for file in (path, path.with_suffix(".files")):
                    file.unlink(missing_ok=True)

    @staticmethod
    def _sizes(folder: Path) -> Iterator[tuple[float, int, Path]]:
        for path in folder.glob("*.json"):
            with contextlib.suppress(OSError):
                state = path.stat()
                yield state.st_mtime, state.st_size, path


def _place_of(job: Job) -> list[str]:
    """What a target's name leads to: the same name in another folder is another model."""
    if not job.is_code:
        return [os.path.realpath(job.name) if os.path.exists(job.name) else job.name]
    path, _, attribute = job.name.rpartition(":")
    where = os.path.realpath(path) if os.path.exists(path) else path
    return [where, attribute, os.getcwd(), os.environ.get("PYTHONPATH", "")]


def _beside(config: Path) -> list[Path]:
    """Files that say more of the model of a config: formats and tensors of its checkpoint."""
    return sorted(
        path
        for path in (config.parent.iterdir() if config.name == "config.json" else ())
        if path.suffix in (".json", ".safetensors", ".bin") and path != config
    )


_LARGE = 1 << 26
"""Bytes of a file of weights, which is told by its size and time."""


def _digest(path: str) -> str:
    try:
        state = Path(path).stat()
        if state.st_size > _LARGE:
            return f"{state.st_size} {state.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache
def _environment() -> list[Any]:
    """What a trace depends on besides its source: Python, packages, and rooftrace's own files."""
    from importlib.metadata import distributions

    packages = sorted(
        {(str(made.name), str(made.version)) for made in distributions() if made.name}
    )
    own = Path(__file__).resolve().parents[2]
    files = hashlib.sha256()
    for path in sorted(own.rglob("*.py")):
        files.update(path.read_bytes())
    return [sys.version, packages, files.hexdigest()]
