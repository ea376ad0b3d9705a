"""Traces of one source at many sizes, and the cache on disk that keeps them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rooftrace._extensions import RUN
from rooftrace._processes import ONE_TASK
from rooftrace._progress import tell
from rooftrace._reading import digest_of
from rooftrace._writing import put_bytes
from rooftrace.errors import RequestError, hint
from rooftrace.graph import OpGraph, graphs_bytes, load_graphs
from rooftrace.tracer import Job, names
from rooftrace.tracer.phases.apart import Traced
from rooftrace.tracer.phases.tracing import ModuleSource, traced

# -- cache -----------------------------------------------------------------------------------------
# Traces kept on disk, by their inputs: the source's files, its sizes, the versions.
#
# They lie in ROOFTRACE_CACHE, by default `rooftrace` in the user's folder for caches; "off" keeps
# none.  With them lie parts of incomplete sweeps, and plans of forms.  Nothing is read from, or
# written to, a folder in which another user can write.  A trace of code is used again only while
# all files that it came from are as they were.

VARIABLE = "ROOFTRACE_CACHE"
_DAMAGED = (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
_MOST = 2 << 30
"""Bytes; older traces go when there are more."""


class _Kept(NamedTuple):
    """A file of what was made, the digests of all files that it follows from, those of code."""

    file: Path
    digests: dict[str, str]
    sources: list[str]


class TraceCache:
    """The traces of one folder; None keeps none.

    traces: how many were made, because there was none that holds.  digests: of the files that all
    that it gave follow from.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.traces, self.digests = folder, 0, dict[str, str]()
        self._variables = _variables()  # before the code of a target can change them

    @staticmethod
    def usual() -> TraceCache:
        """That of the environment."""
        folder = os.environ.get(VARIABLE, "")
        if folder == "off":
            return TraceCache(None)
        if folder:
            return TraceCache(Path(folder))
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        if not os.path.isabs(base):  # nobody's home: it would be a folder of the working one
            return TraceCache(None)
        return TraceCache(Path(base) / "rooftrace" / "traces")

    def private(self) -> Path | None:
        """The folder, which is made; None where nothing is kept, or where others can write."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self.folder.stat()
            mine = not hasattr(os, "geteuid") or state.st_uid == os.geteuid()
            if mine and not state.st_mode & stat.S_IWOTH:
                return self.folder
        return None

    def traced(self, job: Job) -> Traced:
        """`tracing.traced`, unless its graphs were kept and still hold."""
        kept = self.look_up(job)
        if kept is not None:
            with contextlib.suppress(*_DAMAGED):  # it is traced again
                files = {path: digest_of(path, whole=True) for path in kept.sources}
                made = Traced(load_graphs(kept.file), files, [*kept.digests])
                self.digests = {**kept.digests, **self.digests}
                return made
        self.traces, began = self.traces + 1, time.time()
        made = traced(job)
        if self.private() is not None:
            paths = (*made.files, *made.opened)
            digests = {path: _digest_before(path, began) for path in paths}
            self.digests = {**digests, **self.digests}  # as the first trace found them
            if not made.rules and _UNKNOWN not in digests.values():
                self.keep(graphs_bytes(made.graphs), digests, job, sources=[*made.files])
        return made

    def look_up(self, job: Job, *made: Any) -> _Kept | None:
        """The file of what was made of a job, by default its graphs; None unless it holds."""
        file = self._place(job, *made)
        if file is None:
            return None
        try:
            record = json.loads(file.with_suffix(".files").read_bytes())
            digests, sources = record["digests"], record["sources"]
            listed = str(file) in digests  # else they are of another trace
            if not listed or any(digest_of(path) != digest for path, digest in digests.items()):
                return None
            os.utime(file)
        except _DAMAGED:
            return None  # it is made again
        del digests[str(file)]
        return _Kept(file, digests, sources)

    def keep(
        self,
        content: bytes,
        digests: Mapping[str, str],
        job: Job,
        *made: Any,
        sources: Sequence[str] = (),
    ) -> None:
        """Keep what was made of a job, unless a folder speaks against it.

        digests: of all files that it follows from.  sources: those of code.
        """
        file = self._place(job, *made)
        if file is None or (job.is_code and not digests):
            return
        with contextlib.suppress(OSError):  # a full disk or a read-only home keeps nothing
            for path in (file, file.with_suffix(".files")):
                if path.is_symlink():
                    path.unlink()  # it leads to a file that is no trace
            put_bytes(file, content)
            # With the digest of this trace, not of another.
            record = {"digests": {**digests, str(file): digest_of(file)}, "sources": sources}
            put_bytes(file.with_suffix(".files"), json.dumps(record).encode())
            self._shrink()

    def derived(self, *key: bytes) -> Path | None:
        """The file of what follows from these bytes and the environment; None keeps nothing."""
        folder = self.private()
        if folder is None:
            return None
        text = b"\0".join((json.dumps(_environment()).encode(), *key))
        file = folder / f"{hashlib.sha256(text).hexdigest()[:40]}.json"
        return None if file.is_symlink() else file

    def _place(self, job: Job, *made: Any) -> Path | None:
        """The file of what is made of a job; None for one that is not kept."""
        folder = self.private()
        if folder is None or not job.is_named or job.is_graph or job.options.loss is not None:
            return None
        if any(map(names.is_own, job.phases or ())) or job.name.startswith("hf:"):
            return None
        if job.is_script or RUN:  # nobody knows which files it read, or what rules are for
            return None
        key: dict[str, Any] = {
            "source": _place_of(job),
            "phases": job.phases,
            "request": asdict(job.request),
            "options": {**asdict(job.options), "loss": None},
            "environment": _environment(),
            "path": os.environ.get("PYTHONPATH", ""),
            "of commands": bool(ONE_TASK),  # other processes may have changed a library
            "made": made,
        }
        if _runs_code(job):
            key["variables"] = self._variables
        config = names.config_file(job.name)
        if config is not None:
            key["config"] = {str(file): digest_of(file) for file in (config, *_beside(config))}
        text = json.dumps(key, sort_keys=True, default=str)
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.json"

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
        for path in filter(_is_kept, (*folder.glob("*.json"), *folder.glob("*.npz"))):
            with contextlib.suppress(OSError):
                state = path.stat()
                yield state.st_mtime, state.st_size, path


def kept_or_traced(job: Job) -> Traced:
    """`tracing.traced`; of a config or a program, from what was kept where it still holds.

    Only in a process of the command line: one of the user's may have changed the libraries that a
    model is made of.  Code is run each time: what it asks for besides files nobody knows.
    """
    return traced(job) if _runs_code(job) or not ONE_TASK else TraceCache.usual().traced(job)


def _runs_code(job: Job) -> bool:
    """Whether code of the user's makes the model."""
    return job.is_code or job.request.trust_remote_code


_UNKNOWN = "written meanwhile"
"""The digest of a file of which nobody knows in which state it was read: no file has it."""


def _digest_before(path: str, moment: float) -> str:
    """The digest of a file that was not written after a moment."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mtime > moment:
            return _UNKNOWN
    return digest_of(path)


def _is_kept(path: Path) -> bool:
    """Whether a file of the folder has the name of a trace or a part, as others have not."""
    return re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{40}", path.stem) is not None


def _place_of(job: Job) -> list[str]:
    """The place of a target: the same name in another folder is another model."""
    if not job.is_code:
        return [os.path.realpath(job.name) if os.path.exists(job.name) else job.name]
    path, _, attribute = job.name.rpartition(":")
    where = os.path.realpath(path) if os.path.exists(path) else path
    return [where, attribute, os.getcwd()]


def _beside(config: Path) -> list[Path]:
    """Files that say more of the model of a config: formats and tensors of its checkpoint."""
    return sorted(
        path
        for path in (config.parent.iterdir() if config.name == "config.json" else ())
        if path.suffix in (".json", ".safetensors", ".bin") and path != config
    )


@functools.cache
def _environment() -> list[Any]:
    """Dependencies of a trace besides its source: Python, packages, files of rooftrace.

    Packages are told by the names of their metadata, "torch-2.11.0.dist-info", which is quick.
    """
    packages = set[str]()
    for folder in sys.path:
        with contextlib.suppress(OSError):
            packages.update(name for name in os.listdir(folder or ".") if name.endswith(_METADATA))
    package = Path(__file__).resolve().parents[2]
    files = hashlib.sha256()
    for path in sorted((*package.rglob("*.py"), *package.rglob("*.toml"))):
        files.update(path.read_bytes())
    return [sys.version, sorted(packages), files.hexdigest()]


_METADATA = (".dist-info", ".egg-info")


def _variables() -> str:
    """A digest of the variables that code may ask for."""
    asked = {name: value for name, value in os.environ.items() if name not in _UNASKED}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


_UNASKED = ("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST", VARIABLE)
"""Variables that tell the state of a terminal or of a test."""


# -- sizedsource -----------------------------------------------------------------------------------
# One source at many sizes: which names its sizes have, and its trace at any of them.
#
# Sizes are batch, seq and kv; integers of a config ("config.num_hidden_layers") or keyword
# arguments of the function that a target names; names that stand in the shapes of inputs
# ("x=8,3,side,side"); and dimensions of the arguments of a call ("x.1", or "0.1" for the first
# one).

_LENGTHS = ("batch", "seq", "kv")
_WORD = re.compile(r"[A-Za-z_]\w*")


class SizedSource:
    """The graphs of a job at many sizes.

    Raises RequestError for a name that is no size of the source.
    """

    def __init__(self, job: Job, names: Sequence[str]) -> None:
        from rooftrace.tracer.targets import isolation

        self.job, self.names = job, tuple(names)
        self._kept, self._cache = isolation.Kept(), TraceCache.usual()
        self._call = ModuleSource(job) if job.is_called and not job.is_named else None
        self._has_rules = False
        doubled = next((name for name in names if list(names).count(name) > 1), None)
        if doubled:
            raise RequestError(f"size {doubled!r} stands twice; name each size once")
        if job.is_graph:
            raise RequestError(
                f"{job.name}: a graph has its sizes; name the module or the target that it is made "
                "of, or a form (made by `rooftrace sweep ... --save-form FILE`)"
            )
        if job.is_script and names:
            raise RequestError(
                f"size {names[0]!r}: {job.name} is a script, which has its own sizes; give it "
                f"options of its own, or name the module in it ({job.name.split()[0]}:NAME)"
            )
        for name in names:
            self._check(name)

    def job_at(self, numbers: Sequence[int]) -> Job:
        """The job at these sizes."""
        sizes = dict(zip(self.names, numbers, strict=True))
        lengths: dict[str, Any] = {n: size for n, size in sizes.items() if n in _LENGTHS}
        inputs = {
            name: _WORD.sub(lambda m: str(sizes.get(m[0], m[0])), shape) + colon + dtype
            for name, text in self.job.request.inputs.items()
            for shape, colon, dtype in [text.partition(":")]
        }
        settings = {
            name: size
            for name, size in sizes.items()
            if name not in _LENGTHS and not self._is_in_shapes(name)
        }
        request = replace(
            self.job.request,
            **lengths,
            inputs=inputs,
            settings={**self.job.request.settings, **settings},
        )
        return replace(self.job, request=request, explicit=())

    def graphs(self, numbers: Sequence[int]) -> Mapping[str, OpGraph]:
        """The graphs by phase at these sizes.  Raises the errors of tracing."""
        from rooftrace.tracer.targets import isolation

        if self._call is not None:
            sizes = dict(zip(self.names, numbers, strict=True))
            return self._call.each_at(sizes)
        with isolation.keeping(self._kept):
            made = self._cache.traced(self.job_at(numbers))
        self._has_rules = self._has_rules or made.rules
        return made.graphs

    @property
    def traces(self) -> int:
        """How many were made, because there was none in the cache."""
        return self._cache.traces

    def kept_file(self, *made: Any) -> Path | None:
        """The file of what a command made of the traces of this source, if it still holds."""
        kept = self._cache.look_up(self.job, *made)
        return kept and kept.file

    def keep(self, content: bytes, *made: Any) -> None:
        """Keep what was made of the traces, unless there are own rules."""
        if not self._has_rules:
            self._cache.keep(content, self._cache.digests, self.job, *made)

    def standing(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the mesh of a config stays from one trace to the next, with the model over it.

        A pipeline, and a model that trains, are spread anew for each trace.
        """
        job = self.job
        trains = any(names.phase_of(phase).trains for phase in job.phases or ("training",))
        alone = job.is_code or job.request.mesh.get("pp", 1) > 1 or trains
        stands = job.is_named and job.request.mesh and not alone
        return self._kept.standing() if stands else contextlib.nullcontext()

    def _is_in_shapes(self, name: str) -> bool:
        shapes = (text.partition(":")[0] for text in self.job.request.inputs.values())
        return any(name in _WORD.findall(shape) for shape in shapes)

    def _check(self, name: str) -> None:
        """Raise RequestError for a name that is no size."""
        job = self.job
        if self._is_in_shapes(name) or (name in _LENGTHS and self._call is None):
            return
        if self._call is not None:
            if self._call.has_size(name):
                return
            expected = "batch, or a dimension of an argument, as x.1 or 0.1"
        elif job.is_named and not job.is_code:
            if name.startswith("config."):
                return  # the config says if it has such a field
            expected = "batch, seq, kv, or a number of the config, as config.num_hidden_layers"
        elif job.is_named:
            if name.isidentifier():
                return  # the function says if it takes such an argument
            expected = "batch, or a keyword argument of the function"
        else:
            expected = "batch, seq or kv"
        shapes = ", or a name in the shape of an input" if job.is_named else ""
        raise RequestError(f"size {name!r}: expected {expected}{shapes}{hint(name, _LENGTHS)}")


# -- another batch ---------------------------------------------------------------------------------

BatchTrace = Callable[[str, int], OpGraph]
"""Traces a phase at a batch size."""


def at_batches(job: Job) -> tuple[tuple[str, ...], BatchTrace]:
    """The phases of a job, and a function that traces one of them at another batch size.

    Each trace is kept.  Raises RequestError for a graph, whose sizes are fixed, and for a source
    that cannot run at another batch size.
    """
    from rooftrace.tracer.targets import isolation

    if job.is_graph:
        raise RequestError(
            "another batch cannot be traced from a graph, which has its sizes: give the module or "
            "the target that it was made from"
        )
    kept = isolation.Kept()

    def run(phases: tuple[str, ...] | None, batch: int) -> Mapping[str, OpGraph]:
        if not job.is_named:
            return ModuleSource(job).phases_at(phases, {"batch": batch})
        request = replace(job.request, batch=batch)
        # Explicit arguments were checked for all phases, and may be for another phase than this.
        with isolation.keeping(kept):
            return kept_or_traced(replace(job, phases=phases, request=request, explicit=())).graphs

    first = run(job.phases, 1)
    job.check_used(first)
    traces = {(phase, 1): graph for phase, graph in first.items()}

    def trace_at(phase: str, batch: int) -> OpGraph:
        if (phase, batch) not in traces:
            tell(f"{phase} at batch {batch:,}")
            try:
                traces[phase, batch] = run((phase,), batch)[phase]
            except RuntimeError as error:  # a TraceError, or torch's
                raise RequestError(
                    f"{phase} runs with batch 1 and not with {batch}, so the first dimension of "
                    f"its inputs is not their batch: {str(error).splitlines()[0]}"
                ) from error
        return traces[phase, batch]

    return tuple(first), trace_at
