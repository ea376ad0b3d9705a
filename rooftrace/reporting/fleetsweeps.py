"""Sweeps of many targets on many processes: a task for each, their tables in one folder."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftrace._shown import Shown, short
from rooftrace.costmodels.registry import own_rules
from rooftrace.costmodels.sweeping import lines_of
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.reporting.fleets import FleetResult, Task, run_fleet
from rooftrace.reporting.fleetsources import FleetSource
from rooftrace.reporting.requests.calls import conditions_of
from rooftrace.reporting.requests.pricing import PricingOptions
from rooftrace.reporting.stepforms import level_values, levels_of
from rooftrace.reporting.sweeps import FORMATS, sweep, sweep_request, variants_of
from rooftrace.tracer.graphfiles import GraphFileError

EARLIER = "_earlier"
"""The folder, beside the parts of the last call, for those of calls before it."""
_RULES = threading.Lock()
"""Held while a task has rules of its own: a worker with many threads has one list of rules."""


@dataclass(frozen=True, eq=False)
class SweepFleet(Shown):
    """The sweeps of many targets: `.frame()` has a line for each target, chip, condition and point.

    names: the sizes.  labels: the other columns that tell lines apart.  fleet: which tasks there
    are, where their rows lie, and which failed.
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
        """How many tasks this call ran; the others were there."""
        return self.fleet.ran

    @property
    def failures(self) -> tuple[Any, ...]:
        """What has no rows: for each its `title` and the first line of its `error`."""
        return self.fleet.failures

    def frame(self) -> Any:
        """All lines as one pandas frame, in the order of the targets: those of `Sweep.frame()`
        with a column `target` before them."""
        return self.fleet.frame()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: all lines, and the failures."""
        return {
            "out": str(self.out),
            "tasks": list(self.fleet.tasks.values()),
            "lines": lines_of(self.frame()),
            "failures": [{"title": each.title, "error": each.error} for each in self.failures],
        }

    def __repr__(self) -> str:
        return short(self, f"over {', '.join(self.names)}: {self.fleet}")


def sweep_fleet(
    targets: Iterable[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    over: Mapping[str, Any] | Sequence[str],
    chip: str | Chip | Sequence[str | Chip] | None = None,
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
    over, chip, vary and other options: those of `sweep`.  rules: Python files whose rules workers
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
    pricing, _ = PricingOptions.parted({**options, "chip": chip})
    _, chips = conditions_of(sweep, pricing, *names)
    options = {**options, "chip": chips}
    options.pop("system", None)  # its chip is among them
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
    """Raise RequestError for what one of the targets cannot be asked; nothing is traced.

    A file that cannot be read is for its worker to tell: others go on.
    """
    from rooftrace.tracer.sizing import SizedSource

    ours = inspect.signature(sweep_request).parameters
    own = {name: value for name, value in options.items() if name in ours}
    others = {name: value for name, value in options.items() if name not in ours}
    for name in names:
        with contextlib.suppress(OSError, GraphFileError):
            request = sweep_request(name, (), others, **own)
            request.check()
            if request.form is None:
                SizedSource(request.job, tuple(request.levels))


def _named(over: Mapping[str, Any] | Sequence[str]) -> Mapping[str, Any]:
    return over if isinstance(over, Mapping) else dict.fromkeys(levels_of(over))


def _plain(name: str, values: Any) -> Any:
    """The values of a size as a text or a list; equal ones are the same, however they were said.

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
    """The task of one target.  Its key is of the request and of what the target's files hold."""
    told = ", ".join(f"{name} {value}" for name, value in settings.items())
    title = f"{source.name}, {told}" if told else source.name
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
    """The frame of one sweep, with a column for its target; this is what a worker runs."""
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
        for path, text in rules.items():
            exec(compile(text, path, "exec"), {"__name__": "<run_path>", "__file__": path})
        yield
