"""Makes a lock of costs, and finds the causes of changes since."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

from rooftrace._processes import processors
from rooftrace._progress import tell
from rooftrace.costmodels.estimates import estimate
from rooftrace.costmodels.fusion import ExecutionModel, plan, usual_execution
from rooftrace.costmodels.ops import own_rules
from rooftrace.costmodels.rewrites import check_precisions
from rooftrace.diffs.costs import Diff, changes
from rooftrace.diffs.git import RevisionError, repositories
from rooftrace.diffs.git.repositories import Commit
from rooftrace.errors import RequestError, UnusedError, is_ours, naming
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.units import plural
from rooftrace.reporting.commands import diff, in_precisions, priced
from rooftrace.reporting.commands.calls import Kept
from rooftrace.reporting.commands.pricing import PricingOptions, check_groups
from rooftrace.reporting.gates import lock as records, lockfile
from rooftrace.reporting.gates.checking import CodeCause, Shift
from rooftrace.tracer import Job, names
from rooftrace.tracer.phases.apart import Traced, trace_each_apart

# -- causes ----------------------------------------------------------------------------------------

_MOST = 3
"""Causes of a cost that are named."""
_PART = 0.05
"""The least share of a change of which a cause is named."""


def causes_since(
    settings: lockfile.Settings, lock: records.Lock
) -> Callable[[Shift], Sequence[CodeCause]] | None:
    """A function that gives the causes of a shift since `lock` was committed.

    It builds the code of that commit from git, once for each target, chip and execution.  None
    outside of git, or where the lock is not committed as it is.
    """
    try:
        repository = repositories.repository_at(str(settings.folder))
        path = os.path.relpath(os.path.realpath(settings.path), repository.root)
        if repository.uncommitted([path]):
            return None
        commit = repository.last_change(path)
    except RevisionError:
        return None
    return None if commit is None else _History(settings, lock, commit).causes


class _History:
    """Diffs of targets between the commit of a lock and now, each made once."""

    def __init__(self, settings: lockfile.Settings, lock: records.Lock, commit: Commit) -> None:
        self.settings, self.lock, self.commit = settings, lock, commit
        self._made: dict[tuple[str, str, str], Diff | str] = {}

    def causes(self, shift: Shift) -> Sequence[CodeCause]:
        """The changes of the code behind a shift, the largest first."""
        made = self._diff(shift.place)
        if isinstance(made, str):
            return [CodeCause(made)]
        behind = [_behind(p, shift) for p in made.phases if p.phase == shift.place.phase]
        first = [row for rows in behind for row in rows][:_MOST]
        return [CodeCause(self._sentence(made, row), row.place) for row in first]

    def _sentence(self, made: Diff, row: changes.DiffRow) -> str:
        lines = () if made.origins is None else made.origins.lines
        who = next((str(line) for line in lines if row.line in (line.of, line.source)), row.lines)
        return "; ".join(filter(None, (row.cause, f"in {row.where}" if row.where else "", who)))

    def _diff(self, place: records.StepKey) -> Diff | str:
        """The diff of a target, or a sentence on why there is none."""
        key = place.target, place.chip, place.execution
        if key not in self._made:
            request = self.lock.targets[place.target].asked
            options: dict[str, Any] = {n: v for n, v in request.items() if n != "target"}
            try:
                with inside(self.settings.folder):
                    chips = {chip.name: chip for chip in chips_of(self.settings)}
                    options["chip"] = chips[place.chip]
                    options["execution"] = model_of(place.execution, self.settings)
                    made = diff(str(request["target"]), git=self.commit.hash, **options)
                assert isinstance(made, Diff)  # a target has a step
                self._made[key] = made
            except (ValueError, LookupError, RuntimeError) as error:
                if not is_ours(error):
                    raise
                reason = str(error).splitlines()[0]
                self._made[key] = f"no cause is known from {self.commit}: {reason}"
        return self._made[key]


# -- making ----------------------------------------------------------------------------------------

_MODEL_LIBRARIES = ("diffusers", "peft", "timm", "torchaudio", "torchvision", "transformers")
"""Libraries that bring modules: a model that imports one has other costs with another release."""
_MEMORY = 2 << 30
"""Bytes that tracing a target may take."""
_IMPORTED = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)


def locked(settings: lockfile.Settings) -> records.Lock:
    """The costs of the targets of some settings now, each traced once and priced for every chip.

    Each target runs in a separate process, as many at once as processors and memory allow.
    Raises RequestError without targets, and the errors of tracing and pricing.
    """
    if not settings.targets:
        raise RequestError(
            "there is nothing to lock: name a target (rooftrace lock TARGET...), or name those of "
            'the repository in pyproject.toml: [tool.rooftrace] with targets = ["models.py:build"]'
        )
    with inside(settings.folder):
        builder = _LockBuilder(settings, chips_of(settings))
        jobs = {name: _job(name, request) for name, request in settings.targets.items()}
        traces = _traced(list(jobs.values()))
        for (name, job), made in zip(jobs.items(), traces, strict=True):
            with own_rules(), naming(name):  # rules in the code of one hold for no other
                tell(f"pricing {name}")
                builder.add(name, in_precisions(job, made) if made else priced(job))
        return builder.lock()


def chips_of(settings: lockfile.Settings) -> list[Chip]:
    """The chips of settings; where they name none, that of their knobs, else h200-sxm."""
    options = _options(settings, execution=usual_execution())
    return options.chips(options.executions())


def former(settings: lockfile.Settings, *, update: bool = False) -> records.Lock | None:
    """The lock that settings name; None for an unreadable one that is to be written anew.

    Raises LockError where its costs or its targets are needed.
    """
    try:
        return lockfile.load_lock(settings.path)
    except records.LockError:
        if update and settings.targets:
            return None
        raise


def _behind(phase: changes.PhaseDiff, shift: Shift) -> list[changes.DiffRow]:
    """The rows of a phase behind a shift: those that moved its metric, the largest first.

    Of memory and parameters: those in the modules of what is held at the peak.  All rows where
    none did.
    """
    inside = [
        row
        for row in phase.rows
        if not shift.module or any(f"{m}.".startswith(f"{shift.module}.") for m in row.modules)
    ]
    total = shift.after - (shift.before or 0)
    if shift.metric in records.BY_MODULE:
        shares = [(getattr(row, shift.metric).delta / total if total else 0, row) for row in inside]
    else:
        by_module = Counter[str]()
        for each in phase.held:
            if each.held.role == "weights" or shift.metric == "memory":
                by_module[each.held.module] += int(each.bytes.delta)
        shares = [(sum(by_module[m] for m in row.modules), row) for row in inside]
        most = sum(by_module.values()) or math.inf
        shares = [(share / most, row) for share, row in shares]
    moved = [(share, row) for share, row in shares if share >= _PART]
    return [row for _, row in sorted(moved, key=lambda each: -each[0])] or inside or [*phase.rows]


def size_words(lock: records.Lock) -> str:
    """ "2 targets, 6 steps"."""
    return f"{plural(len(lock.targets), 'target')}, {plural(len(lock.places()), 'step')}"


def model_of(name: str, settings: lockfile.Settings) -> ExecutionModel:
    """An execution model, with the changes of the settings."""
    (model,) = _options(settings, execution=name).executions()
    return model


def _options(settings: lockfile.Settings, **how: Any) -> PricingOptions:
    """The pricing options of settings."""
    options = {name: value for name, value in settings.pricing.items() if name != "rules"}
    return PricingOptions(chip=settings.chips, **{**options, **how})


def _job(name: str, request: Mapping[str, Kept]) -> Job:
    """The job that traces a target."""
    arguments = {key: value for key, value in request.items() if key != "target"}
    try:
        with naming(name):
            job = Job.of(locked, request["target"], (), arguments)
            check_precisions(*job.precisions)
    except UnusedError as error:
        reason = f"{error.reason} (target {name!r})"
        raise UnusedError(error.name, error.shown, reason) from None
    return job


def _traced(jobs: Sequence[Job]) -> list[Traced | None]:
    """The graphs of each job; None for one that is traced in this process.

    Cost rules that the code of a target brings stay in the process that ran it, so this one has to
    run it too.
    """
    made = trace_each_apart(jobs, _at_once())
    return [None if each is None or each.rules else each for each in made]


def _at_once() -> int:
    """The number of targets that are traced at the same time."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return processors()
    return max(1, min(processors(), free // _MEMORY))


class _LockBuilder:
    """Puts the costs of targets together, one target after another."""

    def __init__(self, settings: lockfile.Settings, chips: Sequence[Chip]) -> None:
        self.settings, self.chips = settings, chips
        self.targets: dict[str, records.LockedTarget] = {}
        self.constants: dict[str, str] = {}
        self.libraries: set[str] = set()
        self.many: list[OpGraph] = []  # of several processes

    def add(self, name: str, made: Traced) -> None:
        """Price the graphs of a target."""
        request = self.settings.targets[name]
        models = [model_of(each, self.settings) for each in self.settings.executions_of(name)]
        self.many += [graph for graph in made.graphs.values() if graph.groups][:1]
        self.libraries |= _libraries(str(request["target"]), made.files)
        self.targets[name] = records.LockedTarget(
            asked=request,
            sources=_relative(made.files, self.settings.folder),
            phases={phase: self._phase(graph, models) for phase, graph in made.graphs.items()},
        )

    def _phase(self, graph: OpGraph, models: Sequence[ExecutionModel]) -> records.LockedPhase:
        depth = self.settings.depth
        costs: dict[str, dict[str, records.LockedCosts]] = {chip.name: {} for chip in self.chips}
        for model in models:
            planned = plan(graph, model)
            for chip in self.chips:
                step = estimate(planned, chip)
                if step.knobs is not None:
                    self.constants[step.knobs.title] = records.knobs_digest(step.knobs)
                costs[chip.name][model.name] = records.locked_costs(step, depth)
        return records.LockedPhase(ops=records.locked_ops(graph, depth), costs=costs)

    def lock(self) -> records.Lock:
        """The lock of all targets that were added."""
        check_groups(lambda: self.many, [model_of(usual_execution(), self.settings)])
        return records.Lock(
            made_from=records.MadeFrom(
                rooftrace=metadata.version("rooftrace"),
                # 2.13.0+cpu and 2.13.0+cu128 run the same code on the meta device.
                torch=metadata.version("torch").partition("+")[0],
                libraries={name: metadata.version(name) for name in sorted(self.libraries)},
                depth=self.settings.depth,
                chips={chip.name: records.chip_digest(chip) for chip in self.chips},
                constants=self.constants,
                rules={path: records.file_digest(Path(path)) for path in self.settings.rules},
                pricing=dict(self.settings.pricing),
            ),
            targets=self.targets,
        )


def _relative(digests: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Digests by paths below a folder, the same on every machine.

    Of a file elsewhere, as of another checkout, the last two names of its path are kept.
    """
    root = os.path.realpath(folder)
    short: dict[str, str] = {}
    for path, sha256 in sorted(digests.items()):
        pure = PurePath(path)
        inside = pure.is_relative_to(root)
        name = pure.relative_to(root) if inside else PurePath("...", *pure.parts[-2:])
        short[name.as_posix()] = records.shortened(sha256)
    return short


def _libraries(target: str, sources: Mapping[str, str]) -> set[str]:
    """The libraries of models that a target uses, by the imports in its files."""
    imported = {"transformers"} if target.startswith("hf:") or names.is_config(target) else set()
    for path in sources:
        with contextlib.suppress(OSError):
            imported |= {name.decode() for name in _IMPORTED.findall(Path(path).read_bytes())}
    return {name for name in imported & set(_MODEL_LIBRARIES) if _is_installed(name)}


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The folder of settings as the working folder: their paths are relative to it."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
