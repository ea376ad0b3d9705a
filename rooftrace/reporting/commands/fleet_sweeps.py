"""Sweeps of many targets on many processes: a task for each, their tables in one folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooftrace import _extensions
from rooftrace._shown import Shown, short
from rooftrace.costmodels.ops import own_rules
from rooftrace.errors import RequestError, TargetError
from rooftrace.graph import GraphFileError
from rooftrace.hardware import Chip
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.fleet_tasks import FleetResult, Task
from rooftrace.reporting.commands.fleets import run_fleet
from rooftrace.reporting.commands.pricing import PricingOptions
from rooftrace.reporting.commands.sweeps import (
    FORMATS,
    level_values,
    levels_of,
    sweep,
    sweep_request,
    variants_of,
)
from rooftrace.tracer.names import config_file, names_code

EARLIER = "_earlier"
"""The folder for parts of earlier calls; those of the last call lie next to it."""
_RULES = threading.Lock()
"""Held while a task adds rules: all threads of a worker share one list of rules."""


@dataclass(frozen=True, eq=False)
class SweepFleet(Shown):
    """The sweeps of many targets: `.frame()` has a line for each target, chip, condition and point.

    names: the sizes.  labels: the other columns that tell lines apart.  fleet: the tasks, the
    folder of their rows, and the failures.
    """

    names: tuple[str, ...]
    labels: tuple[str, ...]
    chips: tuple[Chip, ...]
    fleet: FleetResult

    @property
    def out(self) -> Path:
        """The folder of the parts."""
        return self.fleet.out

    @property
    def ran(self) -> int:
        """The number of tasks that this call ran; the others were there."""
        return self.fleet.ran

    @property
    def failures(self) -> tuple[Any, ...]:
        """The tasks without rows: for each its `title` and the first line of its `error`."""
        return self.fleet.failures

    def frame(self) -> Any:
        """All lines as one pandas frame, in the order of the targets: those of `Sweep.frame()`
        with a column `target` before them."""
        return self.fleet.frame()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: all lines, and the failures."""
        frame = self.frame()
        kept = frame.astype(object).mask(frame.isna(), None)
        return {
            "out": str(self.out),
            "tasks": list(self.fleet.tasks.values()),
            "lines": kept.to_dict("records"),
            "failures": [{"title": each.title, "error": each.error} for each in self.failures],
        }

    def __repr__(self) -> str:
        return short(self, f"over {', '.join(self.names)}: {self.fleet}")


def sweep_fleet(
    targets: Iterable[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    over: Mapping[str, Any] | Sequence[str],
    vary: Mapping[str, Sequence[Any]] | None = None,
    rules: Sequence[str | os.PathLike[str]] = (),
    scheduler: str | None = None,
    workers: int | None = None,
    retries: int = 2,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> SweepFleet:
    """Sweep many targets on the workers of Dask; the table of each lands in a folder when it ends.

    targets: names of targets, or files of forms; each with each combination of `vary` is a task.
    out: the folder, with a parquet file for each task.  A task whose file is there is not run, so
    the same call goes on after a stop; where the files of a target, the request or a release have
    changed, it is run.  Files of other requests move to `out/_earlier`, and back when asked for.
    over, vary and other options: those of `sweep`.  rules: Python files whose rules workers
    use, too.

    scheduler: the address of a Dask scheduler, "tcp://HOST:PORT"; "none": this process, one after
    the other; None: processes of this machine, where there is more than one task.  workers: how
    many of them.  retries: how often a task runs again whose worker died.

    A target that fails stops no other: see `.failures` of the result.  Raises RequestError for a
    request that makes no sense, and what `run_fleet` raises: FleetError where the scheduler goes
    away, FleetStopped (a KeyboardInterrupt) for Ctrl-C.  What is done stays.
    """
    names = _names_of(targets)
    place = Path(out)
    if place.suffix in FORMATS and not place.is_dir():
        raise RequestError(
            f"out={str(out)!r}: several targets write a folder, with a file for each; name a folder"
        )
    _, chips = conditions_of(sweep, PricingOptions.parted(options)[0], *names)
    options = {**options, "chip": chips}
    for name in ("system", "host"):  # the chips have them
        options.pop(name, None)
    _check(names, {**options, "over": over, "vary": vary})
    options["over"] = {name: _plain(name, values) for name, values in _named(over).items()}
    texts = {str(path): _text_of(path) for path in rules}
    variants = list(variants_of(vary or {}))
    far = scheduler not in (None, "none")
    tasks = [
        _task(FleetSource.of(name), settings, options, texts, far)
        for name in names
        for settings in variants
    ]
    fleet = run_fleet(tasks, place, scheduler, workers, retries, progress, EARLIER)
    stored = (name for name in ("weights_dtype", "kv_dtype") if options.get(name))
    labels = ("target", *(vary or {}), "execution", "dtype", *stored)
    return SweepFleet(tuple(options["over"]), labels, options["chip"], fleet)


def _names_of(targets: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Names of targets, each once.  Raises RequestError."""
    if isinstance(targets, (str, os.PathLike)):
        targets = [targets]
    names: list[str] = []
    for target in targets:
        if not isinstance(target, (str, os.PathLike)):
            raise RequestError(
                f"targets: {target!r:.80} ({type(target).__name__}): a worker builds its model by "
                'itself; expected the name of a target, as "model.py:build" or "config.json"'
            )
        if os.fspath(target) in names:
            raise RequestError(f"target {os.fspath(target)!r} stands twice; name it once")
        names.append(os.fspath(target))
    if not names:
        raise RequestError("targets=[]: expected at least one target")
    return names


def _check(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raise RequestError for options that a target does not take; nothing is traced.

    The worker of a file that cannot be read reports it; others go on.
    """
    from rooftrace.tracer.phases import SizedSource

    for name in names:
        with contextlib.suppress(OSError, GraphFileError):
            request = sweep_request(name, **options)
            request.check()
            if request.form is None:
                SizedSource(request.job, tuple(request.levels))


def _named(over: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    return over if isinstance(over, Mapping) else dict.fromkeys(levels_of(over))


def _plain(name: str, values: Any) -> Any:
    """The values of a size as a text or a list, the same for equal values.

    None stays: the usual values, as far as the model takes them.
    """
    if values is None:
        return None
    levels = level_values(name, values)
    if isinstance(levels, range):
        return f"{levels[0]}..{levels[-1]}:{levels.step}"
    steps = {after - before for before, after in itertools.pairwise(levels)}
    return f"{levels[0]}..{levels[-1]}:{steps.pop()}" if len(steps) == 1 else list(levels)


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"rules: {os.fspath(path)!r}: it cannot be read: {problem}") from None


def _task(
    source: FleetSource,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    rules: Mapping[str, str],
    far: bool,
) -> Task:
    """The task of one target.  Its key is of the request and of the target's files."""
    title = ", ".join([source.name, *(f"{name} {value}" for name, value in settings.items())])
    identity = {"target": (source.name, source.digest), "vary": settings, "rules": rules, **options}
    letters = re.sub(r"[^A-Za-z0-9]+", "-", Path(source.name).name.partition(".json")[0]).strip("-")
    key = f"{letters[:40] or 'target'}-{Task(title, swept_rows, identity).key}"
    arguments = {
        "source": source.carried() if far else source,
        "settings": dict(settings),
        "options": dict(options),
        "rules": dict(rules),
    }
    return Task(title, swept_rows, arguments, key)


def swept_rows(
    source: FleetSource,
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    rules: Mapping[str, str],
) -> Any:
    """The frame of one sweep, with a column for its target: the function of a worker."""
    vary = {name: [value] for name, value in settings.items()}
    with source.there() as target, _with_rules(rules):
        frame = sweep(target, vary=vary, **options).frame()
    frame.insert(0, "target", source.name)
    return frame


@contextlib.contextmanager
def _with_rules(rules: Mapping[str, str]) -> Iterator[None]:
    """Rules of these files, until the end of the block."""
    if not rules:
        yield
        return
    with _RULES, own_rules():
        _extensions.RUN += rules
        for path, text in rules.items():
            exec(compile(text, path, "exec"), {"__name__": "<run_path>", "__file__": path})
        yield


# -- sources ---------------------------------------------------------------------------------------


_CARRIED = 16 << 20
"""Bytes of a file that is sent along, at most."""


@dataclass(frozen=True)
class FleetSource:
    """A target by its name, and the digest of the files that it names; "" where it names none."""

    name: str
    place: str = ""  # the same with an absolute path
    digest: str = ""
    content: bytes = b""  # of a file that stands alone, where it is sent along

    @staticmethod
    def of(target: str | os.PathLike[str]) -> FleetSource:
        """A target with the digest of its files now; "" where they are missing."""
        name = os.fspath(target)
        return FleetSource(name, _absolute(name), _digest(name))

    def carried(self) -> FleetSource:
        """This source with the content of its file, for workers that do not see the same disk.

        Code and folders stay where they are.
        """
        path = Path(self.place)
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size <= _CARRIED:
                return replace(self, content=path.read_bytes())
        return self

    @contextlib.contextmanager
    def there(self) -> Iterator[str]:
        """The name of the target in this process, with equal files.

        Raises TargetError where it has none.
        """
        same = [name for name in (self.name, self.place) if _digest(name) == self.digest]
        if same:
            yield same[0]
        elif self.content:
            with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
                path = Path(folder) / Path(self.place).name  # the name is the title of its model
                path.write_bytes(self.content)
                yield str(path)
        else:
            raise TargetError(
                f"{self.name}: this worker does not have the files that the caller has: share the "
                "disk, or name a package that is installed on both"
            )


def _absolute(name: str) -> str:
    path, colon, attribute = name.rpartition(":") if names_code(name) else (name, "", "")
    return f"{os.path.abspath(path)}{colon}{attribute}" if os.path.exists(path) else name


def _digest(name: str) -> str:
    """The SHA-256 of the files that a target names.

    Of code: all Python files in its folder and in the packages below; other imports are not read.
    Of a folder with a config.json: that file, and the code in its folder.
    """
    if names_code(name):
        where = name.rpartition(":")[0]
        folder = Path(where).absolute().parent if os.path.isfile(where) else _package(where)
        return _of_files(sorted(_python_files(folder))) if folder else ""
    path = Path(name)
    if path.is_file():
        return _of_files([path])
    config = config_file(name) if path.is_dir() else None
    return _of_files([config, *sorted(filter(Path.is_file, path.glob("*.py")))]) if config else ""


def _package(module: str) -> Path | None:
    """The folder of the package of a module; None for an installed one, and for a file."""
    top = module.partition(".")[0]
    for entry in sys.path:
        folder = Path(entry or ".").absolute() / top
        if top and folder.is_dir():
            return None if "site-packages" in folder.parts else folder
    return None


def _python_files(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Python files of a folder and of packages below; links that lead in a circle end."""
    above |= {os.path.realpath(folder)}
    for entry in os.scandir(folder):
        if entry.name.endswith(".py") and entry.is_file():
            yield Path(entry.path)
            continue
        package = os.path.isfile(os.path.join(entry.path, "__init__.py"))
        if package and os.path.realpath(entry.path) not in above:
            yield from _python_files(Path(entry.path), above)


def _of_files(paths: list[Path]) -> str:
    """One digest of files by their names and contents; "" where one cannot be read."""
    digest = hashlib.sha256()
    above = os.path.commonpath([path.absolute().parent for path in paths])
    try:
        for path in paths:
            content = path.read_bytes()
            digest.update(f"{path.absolute().relative_to(above)} {len(content)}\n".encode())
            digest.update(content)
    except OSError:
        return ""
    return digest.hexdigest()
