"""Records of budgets and of locked costs, and the conversion of estimates into them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import ROUND_HALF_EVEN, Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.estimates.rows import BreakdownRow, sums_by
from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.kernels import Knobs
from rooftrace.diffs import Limit
from rooftrace.diffs.changes import TOTALS, amount_of
from rooftrace.errors import hint
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.hardware import Chip, units
from rooftrace.reporting.commands.calls import Kept

# -- budgets ---------------------------------------------------------------------------------------
# A budget is a line of [tool.rooftrace.budgets] in pyproject.toml:
#
#     time = "5%"                          # the step, in every phase: 5 % more than the lock
#     "training.memory" = "1 GiB"          # one phase: at most 1 GiB more than the lock
#     "decode.time" = "<= 20 ms"           # a limit, whatever the lock says
#     "model.layers.*.mlp flops" = 0       # a module, or all that differ only in numbers
#     "*.attention training.time" = ["2%", "<= 5 ms"]

BudgetValue: TypeAlias = str | int | float | list[str | int | float]
"""The value of a key in a table of budgets."""


class BudgetError(ValueError):
    """A budget that cannot be read, or whose module is not there."""


SAME = Limit("0", 0.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a metric, of the step or of modules, in all phases or in one."""

    key: str  # as the user wrote it
    metric: str
    limits: tuple[Limit, ...]
    phase: str = ""  # "": all of them
    module: str = ""  # a starred path or a pattern of paths; "": the step


DEFAULT = tuple(Budget(metric, metric, (SAME,)) for metric in TOTALS)
"""The budgets of a repository that names none: no total may grow."""

_KEY = re.compile(r"(?:(?P<module>\S+)\s+)?(?:(?P<phase>[^\s.]+)\.)?(?P<metric>\w+)")


def read_budgets(table: Mapping[str, BudgetValue], where: str) -> tuple[Budget, ...]:
    """The budgets of a table.  Raises BudgetError, which quotes the line."""
    return tuple(_budget(key, value, where) for key, value in table.items())


def _budget(key: str, value: BudgetValue, where: str) -> Budget:
    match = _KEY.fullmatch(key.strip())
    metric = match["metric"] if match else ""
    if match is None or metric not in TOTALS:
        raise BudgetError(
            f"{where}: {key!r:.80}: expected [MODULE ][PHASE.]METRIC with METRIC one of "
            f'{", ".join(TOTALS)}{hint(metric, tuple(TOTALS))}; for example "time", '
            '"training.memory" or "model.layers.*.mlp flops"'
        )
    if match["module"] and metric not in BY_MODULE:
        raise BudgetError(
            f"{where}: {key!r:.80}: {metric} is known of the whole step only; of a module "
            f"{', '.join(BY_MODULE)}"
        )
    each = value if isinstance(value, list) else [value]
    limits = tuple(read_limit(metric, limit, f"{where}: {key!r:.80}") for limit in each)
    return Budget(key.strip(), metric, limits, match["phase"] or "", match["module"] or "")


def read_limit(metric: str, value: str | int | float, where: str) -> Limit:
    """A limit: of growth ("5%", "1 GiB", 0) or an upper one ("<= 20 ms").  Raises BudgetError."""
    text = str(value).strip()
    ceiling = text.startswith("<=")
    amount = text.removeprefix("<=").strip()
    try:
        if isinstance(value, bool):
            raise ValueError("a truth value")
        number, relative = amount_of(amount, TOTALS[metric])
        if math.isfinite(number) and number >= 0 and not (relative and ceiling):
            return Limit(text, number, relative, ceiling, metric)
    except ValueError:
        pass
    example = _EXAMPLES[metric]
    raise BudgetError(
        f'{where} = {value!r:.60}: expected how much it may grow, as "5%", "{example}" or 0, or '
        f'the most that it may be, as "<= {example}"'
    )


def in_full(metric: str, value: float) -> str:
    """ "65,536 (65.5 kFLOP)": a large count also with all of its digits."""
    short = TOTALS[metric].write(value)
    return f"{value:,} ({short})" if isinstance(value, int) and value >= 1000 else short


def most(metric: str, value: str | int | float, where: str) -> Limit:
    """The most that a metric may be: "<= 20 ms", or a number in SI units.  Raises BudgetError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return Limit(f"<= {in_full(metric, value)}", value, ceiling=True, metric=metric)
    limit = read_limit(metric, value, where)
    if not limit.ceiling:
        raise BudgetError(
            f'{where} = {value!r:.60}: there is no lock to grow from; expected "<= {value}"'
        )
    return limit


_EXAMPLES = {
    "time": "2 ms",
    "flops": "1 GFLOP",
    "bytes": "100 MB",
    "memory": "1 GiB",
    "params": "2 M",
    "kernels": "10",
}


# -- modules ---------------------------------------------------------------------------------------


def module_value(costs: LockedCosts, path: str, metric: str) -> float:
    """A metric of a module and all inside it; "" is the step."""
    if not path:
        return costs.value(metric)
    inside = f"{path}."
    return sum(
        module.value(metric)
        for name, module in costs.modules.items()
        if name == path or name.startswith(inside)
    )


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The modules that a pattern names, among locked paths and the modules around them.

    "*" stands for any one name, and for the numbers of layers.
    """
    names = pattern.split(".")
    modules: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        if len(parts) >= len(names) and all(
            fnmatchcase(part, name) for part, name in zip(parts, names, strict=False)
        ):
            modules[".".join(parts[: len(names)])] = None
    modules.pop(WAITING, None)
    return list(modules)


def chosen(budgets: Sequence[Budget], phase: str) -> list[Budget]:
    """The budgets of a phase.  One that names the phase holds in place of one for all phases;
    a later one in place of an earlier one."""
    kept: dict[tuple[str, str], Budget] = {}
    for specific in (False, True):
        for budget in budgets:
            if budget.phase in ((phase,) if specific else ("",)):
                kept[budget.module, budget.metric] = budget
    return list(kept.values())


# -- records ---------------------------------------------------------------------------------------
# Their fields are the keys of the file.  Counts are integers; seconds are decimal text with a
# unit ("738.1235 us"), with the digits that every machine agrees on.

FORMAT = "rooftrace.lock/1"
DEPTH = 3
"""Names of modules down to which costs are locked, numbers of layers not counted."""
ROOT = "(root)"
"""The module itself, among its modules."""
WAITING = "(waiting for the host)"
"""Seconds of the step that are no kernel's."""
BY_MODULE = ("time", "flops", "bytes", "kernels")
"""Metrics by module; their sums over modules are the totals."""
DIGITS = 7
"""Digits of a time.  Sums of floats differ in the 16th digit between processors and releases of
numpy, so that one time in a hundred million may be rounded the other way; a change of the model
that is smaller moves no budget."""

_SCALES = (("s", 0), ("ms", -3), ("us", -6), ("ns", -9))


class LockError(ValueError):
    """A lock that cannot be read, or that does not fit the request."""


@dataclass(frozen=True, slots=True)
class _LockedNumbers:
    """Locked costs: a time as text, and integers."""

    time: str

    def __post_init__(self) -> None:
        """Raise LockError for a number that no cost can have."""
        units.parse(self.time, "second")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and value < 0:
                raise LockError(f"{item.name}={value}: expected a whole number of at least 0")

    def value(self, metric: str) -> float:
        """A metric, in SI units."""
        value: float = getattr(self, metric)
        return units.parse(self.time, "second") if metric == "time" else value


@dataclass(frozen=True, slots=True)
class LockedModule(_LockedNumbers):
    """The costs of a module, or of all modules whose paths differ only in numbers: BY_MODULE."""

    flops: int = 0
    bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCosts(_LockedNumbers):
    """The totals of a step on a chip under an execution model, and its modules."""

    flops: int
    bytes: int  # through HBM
    memory: int  # at the peak
    params: int
    kernels: int
    modules: Mapping[str, LockedModule] = field(default_factory=dict)  # by starred path


Ops = dict[str, dict[str, int]]
"""Counts of ops by module (a starred path) and op: {"h.*.mlp": {"mm bf16": 24}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPhase:
    """A phase of a target: its ops, and its costs by chip and execution model."""

    ops: Ops = field(default_factory=dict)
    costs: dict[str, dict[str, LockedCosts]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTarget:
    """The request of a target, the digests of its source files, and its phases."""

    asked: dict[str, Kept]  # `target`, and values of ASKED
    sources: dict[str, str] = field(default_factory=dict)  # by path, relative to the lock
    phases: dict[str, LockedPhase] = field(default_factory=dict)

    @property
    def executions(self) -> tuple[str, ...]:
        """The executions of its costs."""
        by_chip = (costs for step in self.phases.values() for costs in step.costs.values())
        return tuple(dict.fromkeys(name for costs in by_chip for name in costs))


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """The sources of a lock: versions, and digests of facts."""

    rooftrace: str
    torch: str
    libraries: dict[str, str] = field(default_factory=dict)  # versions of those with models
    depth: int = DEPTH
    chips: dict[str, str] = field(default_factory=dict)  # digests of their numbers
    constants: dict[str, str] = field(default_factory=dict)  # digests of knobs, by their title
    rules: dict[str, str] = field(default_factory=dict)  # digests of the files of `pricing`
    pricing: dict[str, Kept] = field(default_factory=dict)  # how every target is priced


class StepKey(NamedTuple):
    """The step that costs belong to."""

    target: str
    phase: str
    chip: str
    execution: str

    def __str__(self) -> str:
        return f"{self.target}, {self.phase} on {self.chip}, {self.execution}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The costs of targets, and their sources."""

    made_from: MadeFrom
    targets: dict[str, LockedTarget] = field(default_factory=dict)
    format: str = FORMAT

    def places(self) -> dict[StepKey, LockedCosts]:
        """All costs by step."""
        return {
            StepKey(target, phase, chip, execution): costs
            for target, locked in self.targets.items()
            for phase, step in locked.phases.items()
            for chip, by_execution in step.costs.items()
            for execution, costs in by_execution.items()
        }


# -- seconds as decimals ---------------------------------------------------------------------------


class TimeScale:
    """Writes the times of one step in one unit, to the same decimal."""

    def __init__(self, total: float) -> None:
        exact = Decimal(total)
        self.unit, self.power = next(
            (scale for scale in _SCALES if exact >= Decimal(10) ** scale[1]), _SCALES[-1]
        )
        first = exact.adjusted() if exact else -9
        self.step = Decimal(10) ** (first - DIGITS + 1)

    def rounded(self, seconds: float) -> Decimal:
        """Seconds, rounded to DIGITS digits of the total."""
        return Decimal(seconds).quantize(self.step, ROUND_HALF_EVEN)

    def written(self, seconds: Decimal) -> str:
        """Rounded seconds as text: "738.1235 us"."""
        number = seconds.scaleb(-self.power)
        return f"{number:f} {self.unit}"


# -- entries ---------------------------------------------------------------------------------------

_SLACK = 1e-9
"""Share of a step below which time between kernels is the rounding of sums."""


def cut(path: str, depth: int) -> str:
    """A module path after `depth` names, its numbers starred: "h.3.mlp.up" -> "h.*.mlp"."""
    kept: list[str] = []
    left = depth
    for name in pattern_of(path).split("."):
        left -= name != "*"
        if left < 0:
            break
        kept.append(name)
    return ".".join(kept) or ROOT


def locked_costs(estimate: Estimate, depth: int) -> LockedCosts:
    """The totals of an estimate, and its modules down to a depth, whose sums are the totals."""
    clock = TimeScale(estimate.t_est)
    total = clock.rounded(estimate.t_est)
    totals: dict[str, Any] = {**estimate.totals, "time": clock.written(total)}
    return LockedCosts(
        **totals,
        modules=_modules(estimate, clock, total, depth),
    )


def _modules(
    estimate: Estimate, clock: TimeScale, total: Decimal, depth: int
) -> dict[str, LockedModule]:
    """FLOP in the module of each op; bytes, kernels and time in that of the kernel's main op."""
    flops: Counter[str] = Counter()
    graph = estimate.graph
    for op, cost in zip(graph.ops, estimate.plan.op_costs, strict=True):
        if cost.work:
            for path, times in _calls(graph, op).items():
                flops[cut(path, depth)] += times * cost.flops()
    kernels = sums_by(estimate.rows, lambda row: [cut(path, depth) for path in row.modules], 0.0)
    sums = {path: BreakdownRow(key=path) for path in flops} | {row.key: row for row in kernels}
    seconds = _times(estimate, clock, total, {path: row.t_device for path, row in sums.items()})
    modules = {
        path: LockedModule(clock.written(seconds[path]), flops[path], row.bytes, row.calls)
        for path, row in sums.items()
    }
    if seconds[WAITING]:
        modules[WAITING] = LockedModule(clock.written(seconds[WAITING]))
    return dict(sorted(modules.items()))


def _times(
    estimate: Estimate, clock: TimeScale, total: Decimal, seconds: dict[str, float]
) -> dict[str, Decimal]:
    """Rounded seconds by module and of waiting; the longest gets the remainder of rounding."""
    waiting = estimate.t_est - sum(seconds.values())
    if waiting <= _SLACK * estimate.t_est:
        waiting = 0.0
    times = {path: clock.rounded(each) for path, each in {**seconds, WAITING: waiting}.items()}
    longest = max(times, key=lambda path: (times[path], path))
    times[longest] += total - sum(times.values())
    return times


def locked_ops(graph: OpGraph, depth: int) -> Ops:
    """Counts of ops by module and by name and precision, of a traced graph."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for op in graph.kernels():
        name = op.name.removeprefix("aten.")
        dtype = graph.values[op.outputs[0]].dtype if op.outputs else ""
        for path, times in _calls(graph, op).items():
            counts[cut(path, depth)][f"{name} {dtype}".rstrip()] += times
    return {path: dict(sorted(ops.items())) for path, ops in sorted(counts.items())}


def _calls(graph: OpGraph, op: Op) -> dict[str, int]:
    """The calls of an op by module."""
    paths = runs.kernel_modules(graph, (op.id,), op)
    return dict.fromkeys(paths, graph.times(op) // len(paths))


def chip_digest(chip: Chip) -> str:
    """A digest of the numbers of a chip that times are computed from; words may change."""
    facts = [(name, fact.value) for name, fact in chip.facts()]
    return digest([fact for fact in facts if not fact[0].startswith("measured ")])


def knobs_digest(knobs: Knobs) -> str:
    """A digest of constants, without their source."""
    return digest({name: value for name, value in knobs.to_dict().items() if name != "source"})


def file_digest(path: Path) -> str:
    """A digest of the contents of a file."""
    return shortened(hashlib.sha256(path.read_bytes()).hexdigest())


def digest(data: Any) -> str:
    """A digest of plain values."""
    return shortened(hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest())


def shortened(sha256: str) -> str:
    """The part of a SHA-256 that a lock keeps: 64 bits, enough to tell that a file changed."""
    return sha256[:16]
