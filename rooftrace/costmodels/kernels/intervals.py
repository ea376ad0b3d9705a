"""Intervals of steps, from how far measured steps were from their predictions, and where they are.

A residual is log(measured / predicted) of a step that no fit had seen.  Ends of intervals are order
statistics of residuals, with the correction for how many there are, so that they hold their share
whatever the distribution is, as long as the next one is drawn like the others (Vovk, Gammerman and
Shafer, "Algorithmic Learning in a Random World", 2005).  What was measured together is alike, so a
family of models, or a source, counts as one and its members share its weight (Lee, Barber and
Willett, "Distribution-free inference with hierarchical data", 2023).

After a fit, residuals are those of its left-out steps, in standard deviations of a step
(`Knobs.spread` and those of classes, by its time).  Without one, `IntervalTable` has the mean and
the scale of residuals of kernels by where a step is, its `StepCell`, and the scale of those of
hosts.  A step takes the longer of both times (`Behind`), so it has each as far as it waits for it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import larger, smaller
from rooftrace._plain import Plain
from rooftrace._reading import FileKind, record_of, text_of, toml_of
from rooftrace.hardware.precisions import compute_family
from rooftrace.hardware.units import listed, plural

if TYPE_CHECKING:
    from rooftrace.hardware import Chip

# -- cells -----------------------------------------------------------------------------------------

GENERATIONS = ("ampere", "hopper", "blackwell", "geforce", "cdna3", "cdna4", "older", "cpu")
"""Kinds of chips.  geforce: the multiprocessors of sm_86, sm_89 and sm_120, also of L4 and L40S."""
PRECISIONS = ("fp32", "tf32", "half", "fp8", "fp4", "int4")
"""Of most of the matrix FLOPs.  int4: weights alone are narrow."""
WIDE = ("fp32", "tf32", "half")
"""Precisions of products whose weights may alone be narrow."""
PHASES = ("kernel", "forward", "decode", "training")
"""kernel: one kernel, or one layer, by itself."""
EXECUTIONS = ("eager", "compiled", "graph")
WORKS = ("product", "attention", "moe", "mla", "convolution", "other")
"""The kinds of kernels that may take most of the time."""
LIMITS = ("compute", "memory", "launch", "network")

UNKNOWN = "-"
"""The text of a field that is unknown."""
_ARCHITECTURES = {
    "sm_80": "ampere", "sm_90": "hopper", "sm_100": "blackwell", "sm_103": "blackwell",
    "sm_86": "geforce", "sm_87": "geforce", "sm_89": "geforce", "sm_120": "geforce",
    "sm_121": "geforce", "gfx942": "cdna3", "gfx950": "cdna4",
}  # fmt: skip
_FAMILIES = {"bf16": "half", "fp16": "half", "int8": "fp8"}
_OF_REGIME = {"hbm": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCell(Plain):
    """Where a step, or a kernel, is; "" of what is unknown."""

    generation: str = ""  # one of GENERATIONS
    precision: str = ""  # one of PRECISIONS
    phase: str = ""  # one of PHASES
    execution: str = ""  # one of EXECUTIONS
    work: str = ""  # one of WORKS
    limit: str = ""  # one of LIMITS

    KEYS = "generation precision phase execution work limit"

    def __str__(self) -> str:
        return ", ".join(self.values([f.name for f in fields(self)]))

    def values(self, names: Iterable[str]) -> tuple[str, ...]:
        """The texts of some fields."""
        return tuple(getattr(self, name) or UNKNOWN for name in names)

    @staticmethod
    def of(text: str) -> StepCell:
        """The cell that `str` wrote.  Raises ResidualsError for another number of words."""
        words = ["" if word == UNKNOWN else word for word in text.split(", ")]
        names = [f.name for f in fields(StepCell)]
        if len(words) != len(names):
            raise ResidualsError(f"cell {text!r:.60}: expected {', '.join(names)}")
        return StepCell(**dict(zip(names, words, strict=True)))

    @property
    def kind(self) -> str:
        """The kind of chip: what a CPU does says little of a GPU."""
        return "cpu" if self.generation == "cpu" else "gpu"

    @property
    def of_kernel(self) -> StepCell:
        """The cell of the kernels that it has most of, each by itself."""
        return replace(self, phase="kernel", execution="")

    @staticmethod
    def generation_of(chip: Chip) -> str:
        """The generation of a chip; "" where its file does not name the architecture."""
        if chip.kind == "cpu":
            return "cpu"
        architecture = chip.architecture.partition(":")[0]
        return _ARCHITECTURES.get(architecture, "older") if architecture else ""

    @staticmethod
    def precision_of(name: str) -> str:
        """The precision of a cell for a number format that products compute in."""
        family = compute_family(name)
        return _FAMILIES.get(family, family)

    @staticmethod
    def at(chip: Chip, phase: str, fusion: str, dispatch: str) -> StepCell:
        """The part of a cell that a chip, the phase of a graph and an execution model say."""
        return StepCell(
            generation=StepCell.generation_of(chip),
            phase=phase if phase in PHASES else "forward",
            execution="graph"
            if dispatch == "graph"
            else "eager"
            if fusion == "none"
            else "compiled",
        )

    @staticmethod
    def limit_of(regime: str) -> str:
        """The limit of a cell for the regime of a step."""
        return _OF_REGIME.get(regime, regime)

    @staticmethod
    def work_of(kind: str, of_experts: bool = False, latent: bool = False) -> str:
        """The work of a cell for a class of kernels.

        of_experts: whether it computes experts; latent: whether attention runs on latents.
        """
        if of_experts or kind == "grouped mm":
            return "moe"
        if kind == "attention":
            return "mla" if latent else "attention"
        if "conv" in kind:
            return "convolution"
        return "product" if kind.endswith("mm") else "other"


# -- residuals -------------------------------------------------------------------------------------

LEVEL = 0.9
"""The share of steps that an interval holds, by default."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""The shares that files have ends for; between them ends are interpolated."""
NO_FIT, ONE_FACTOR, FITTED = "no fit", "one factor", "fitted"
USES = (NO_FIT, ONE_FACTOR, FITTED)
"""Fitted to the chip of a step: nothing, one factor on all, or more than that."""
FEW = 10
"""Below so many families an interval is a guess made wider, and says so."""
_PRIOR_WEIGHT = 4.0
"""Families that the usual spread counts for, added to the measured ones."""


class ResidualsError(ValueError):
    """Ends of intervals that contradict each other, or a share of steps that has none."""


@dataclass(frozen=True, slots=True)
class Residuals(Plain):
    """The ends of intervals at some levels, and the steps that they come from."""

    levels: tuple[float, ...]  # shares of steps, rising
    low: tuple[float, ...]  # of each level, in standard deviations; at most 0
    high: tuple[float, ...]  # at least 0
    spread: float = 0.0  # the standard deviation of a step: `Knobs.spread` in this use
    count: int = 0  # steps
    groups: int = 0  # families of models that were left out together
    of: str = ""  # which steps
    cells: tuple[str, ...] = ()  # where they are, as texts of `StepCell`

    KEYS = "levels low high spread count groups of cells?"

    def __post_init__(self) -> None:
        sizes = {len(self.levels), len(self.low), len(self.high)}
        if sizes != {len(self.levels)} or not self.levels:
            raise ResidualsError(
                "levels, low and high: expected as many ends as levels, and one level"
            )
        for name, values, least, most in (
            ("levels", self.levels, 0.0, 1.0),
            ("low", self.low, -_FARTHEST, 0.0),
            ("high", self.high, 0.0, _FARTHEST),
        ):
            if not all(least <= value <= most for value in values):
                raise ResidualsError(
                    f"{name}={values!r:.60}: expected numbers of {least:g} to {most:g}"
                )
            if list(values) != sorted(values, reverse=name == "low"):
                raise ResidualsError(
                    f"{name}={values!r:.60}: expected wider ends for higher levels"
                )
        if not 0 <= self.spread <= _FARTHEST or self.count < 0 or self.groups < 0:
            raise ResidualsError(
                f"spread={self.spread!r}, count={self.count!r}, groups={self.groups!r}: "
                "expected numbers of at least 0"
            )

    @property
    def few(self) -> bool:
        """Whether they are too few for an interval that holds its stated share."""
        return self.groups < FEW

    @property
    def basis(self) -> str:
        """Number of steps and families, and whether few of them make an interval wider."""
        steps = f"{self.count:,} steps of {self.groups:,} families that no fit had seen"
        return f"{steps}: so few that it is made wider" if self.few else steps

    def ends(self, level: float = LEVEL) -> tuple[float, float]:
        """Ends of an interval for this share of steps, in standard deviations.

        Raises ResidualsError outside of `levels`.
        """
        _check_level(level, self.levels)
        return _between(level, self.levels, self.low), _between(level, self.levels, self.high)

    @staticmethod
    def of_steps(
        values: Sequence[float],
        groups: Sequence[str],
        usual: float = 1.0,
        of: str = "",
        cells: Iterable[StepCell] = (),
    ) -> Residuals:
        """The residuals of left-out steps.

        values: log(measured / predicted) over the standard deviation of each step.  groups: the
        family of each.  usual: the prior standard deviation of such values, for few families.
        """
        sizes = Counter(groups)
        weights = [1 / (len(sizes) * sizes[group]) for group in groups]
        ends = [_ends(level, values, weights, len(sizes), usual) for level in LEVELS]
        low, high = ([_rounded(end[side]) for end in ends] for side in (0, 1))
        for number in range(1, len(LEVELS)):  # a rule for fewer families may be the narrower one
            low[number] = min(low[number], low[number - 1])
            high[number] = max(high[number], high[number - 1])
        return Residuals(
            levels=LEVELS, low=tuple(low), high=tuple(high), count=len(values),
            groups=len(sizes), of=of, cells=tuple(sorted({str(c) for c in cells if c.phase})),
        )  # fmt: skip


_FARTHEST = 1000.0
"""The largest standard deviations, and ends in them, that are accepted."""


def normal_ends(level: float = LEVEL) -> tuple[float, float]:
    """Ends of a normal distribution in standard deviations, for knobs without residuals."""
    _check_level(level, LEVELS)
    end = NormalDist().inv_cdf((1 + level) / 2)
    return -end, end


def _check_level(level: float, levels: Sequence[float]) -> None:
    number = isinstance(level, (int, float)) and not isinstance(level, bool)
    if not number or not levels[0] <= level <= levels[-1]:
        raise ResidualsError(
            f"level={level!r:.60}: expected a share of steps from {levels[0]:g} to {levels[-1]:g}"
        )


def _between(level: float, levels: Sequence[float], ends: Sequence[float]) -> float:
    """An end between those of two levels, by -log(1 - level), in which tails are about straight."""
    for (before, first), (after, second) in pairwise(zip(levels, ends, strict=True)):
        if before <= level <= after:
            span = math.log((1 - before) / (1 - after))
            return first + (second - first) * math.log((1 - before) / (1 - level)) / span
    return ends[0]  # there is one level only


# -- order statistics ------------------------------------------------------------------------------


def _ends(
    level: float, values: Sequence[float], weights: Sequence[float], groups: int, usual: float
) -> tuple[float, float]:
    """The ends of one level: a quantile at each side, where there are enough families.

    With fewer the quantile of absolute residuals, with yet fewer that of a wide distribution.
    """
    correction = (groups + 1) / groups if groups else math.inf
    side = (1 + level) / 2
    if side * correction <= 1:
        low = _quantile([-value for value in values], weights, side * correction)
        return min(0.0, -low), max(0.0, _quantile(values, weights, side * correction))
    if level * correction <= 1:
        size = _quantile([abs(value) for value in values], weights, level * correction)
        return -size, size
    size = _wide(side, values, weights, groups, usual)
    return -size, size


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The weighted quantile at `share`, interpolated between two of `values`."""
    total, before = 0.0, None
    for value, weight in sorted(zip(values, weights, strict=True)):
        if total + weight >= share - 1e-9:
            part = min(1.0, max(0.0, (share - total) / weight))
            return value if before is None else before + part * (value - before)
        total, before = total + weight, value
    return max(values)


def _wide(
    side: float, values: Sequence[float], weights: Sequence[float], groups: int, usual: float
) -> float:
    """Half of an interval from few residuals and the usual spread: a quantile of Student's t."""
    squares = sum(weight * value**2 for value, weight in zip(values, weights, strict=True))
    freedom = _PRIOR_WEIGHT + groups
    scale = math.sqrt((_PRIOR_WEIGHT * usual**2 + groups * squares) / freedom)
    # A prediction is off by its deviation, and by that of the mean of the measured ones.
    return student(side, freedom) * scale * math.sqrt(1 + 1 / freedom)


def student(share: float, freedom: float) -> float:
    """The quantile of Student's t by Hill's expansion (Communications of the ACM 13, 1970)."""
    z = NormalDist().inv_cdf(share)
    return z * (
        1
        + (z**2 + 1) / (4 * freedom)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * freedom**3)
    )


def _rounded(value: float) -> float:
    """An end with four digits, rounded away from 0."""
    if not value:
        return 0.0
    digits = 3 - math.floor(math.log10(abs(value)))
    step = 10.0**-digits
    return math.copysign(
        min(_FARTHEST, round(math.ceil(abs(value) / step - 1e-9) * step, digits)), value
    )


# -- where errors lie ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class StepErrors:
    """Where log(measured / predicted) of a step lies: ends by level, numbers or arrays of them."""

    levels: tuple[float, ...]  # rising
    low: tuple[Any, ...]
    high: tuple[Any, ...]

    def within(self, level: float = LEVEL) -> tuple[Any, Any]:
        """The ends of this share of steps, with the prediction inside.

        Raises ResidualsError outside of `levels`.
        """
        _check_level(level, self.levels)
        low, high = (_between(level, self.levels, ends) for ends in (self.low, self.high))
        return smaller(low, 0.0), larger(high, 0.0)

    def chance(self, most: float) -> float:
        """The share of steps of which the logarithm is at most this; of numbers, not of arrays.

        Within the lowest level and between two levels ends are interpolated, beyond the highest
        extrapolated.
        """
        lowest, first = self.levels[0], (self.low[0], self.high[0])
        if first[0] <= most <= first[1] and first[0] < first[1]:
            return float(0.5 + lowest * ((most - first[0]) / (first[1] - first[0]) - 0.5))
        above = most > first[1]
        ends = [abs(end - first[above]) for end in (self.high if above else self.low)]
        far = _share_between(abs(most - first[above]), self.levels, ends)
        return (1 + far) / 2 if above else (1 - far) / 2


def _share_between(end: float, levels: Sequence[float], ends: Sequence[float]) -> float:
    """The level whose end is this: the inverse of `_between`, with its last slope beyond."""
    tails = [-math.log(1 - level) for level in levels]
    for (before, first), (after, second) in pairwise(zip(tails, ends, strict=True)):
        if end <= second or after == tails[-1]:
            if second > first:
                return 1 - math.exp(-before - (after - before) * (end - first) / (second - first))
            if end <= second:
                return 1 - math.exp(-after)
    return 1.0 if end > ends[-1] else levels[-1]


@dataclass(frozen=True, slots=True)
class Behind:
    """How far the end of the host is behind that of the device; numbers, or arrays over points.

    share: of the time of the step; below 0 where the device is done later, -1 of a kernel by
    itself.  spread: between such hosts, relative standard deviation.
    """

    share: Any = -1.0
    spread: float = 0.0

    @classmethod
    def of(cls, host: Any, device: Any, step: Any, spread: float) -> Behind:
        """From the seconds of the host, of the device and of the step."""
        return cls((host - device) / step, spread)

    def ends(self) -> tuple[Any, Any]:
        """Logarithms of the ends of device and host over that of the step; the later has 0."""
        import numpy as np

        later = smaller(larger(self.share, _NO_HOST - 1), 1 - _NO_HOST)
        log: Any = math.log1p if isinstance(later, float) else np.log1p
        return log(-larger(later, 0.0)), log(smaller(later, 0.0))

    def before(self, hosts: float) -> Any:
        """How likely the device is done later, as far as errors of hosts say it; see `later`."""
        device, host = self.ends()
        return _share_below((device - host) / max(self.deviation(hosts), _NO_HOST))

    def deviation(self, hosts: float) -> float:
        """The standard deviation of the logarithm of the host's seconds.

        As far as steps of one run lie apart, whose host was measured, or as such hosts do, if that
        is farther: how far these are apart was told by steps, too.
        """
        return max(hosts / OF_SCALE, math.sqrt(math.log1p(self.spread**2)))

    def grounds(self, cell: StepCell, hosts: float) -> str:
        """A phrase on what an interval of one point assumes of the host; "" where it is early."""
        if cell.kind == "cpu" or self.before(hosts) > 0.95:
            return ""
        return f"; hosts lie {self.spread:.0%} apart" if self.spread else "; the host was measured"

    def later(self, mean: Any, scale: Any, hosts: float) -> tuple[Any, Any]:
        """The mean and the scale of errors of a step whose kernels have these.

        A step takes the longer of two times, each with errors of its own: the moments of the
        greater of two normal variables (Clark, Operations Research 9, 1961).  hosts: the scale of
        errors of hosts within a run.
        """
        first, second = self.ends()
        first, own, host = first + mean, scale / OF_SCALE, self.deviation(hosts)
        apart = (own**2 + host**2) ** 0.5
        gap = (first - second) / apart
        share, density = _share_below(gap), apart * math.e ** (-(gap**2) / 2) / math.tau**0.5
        middle = first * share + second * (1 - share) + density
        squares = (first**2 + own**2) * share + (second**2 + host**2) * (1 - share)
        return middle, OF_SCALE * (squares + (first + second) * density - middle**2) ** 0.5


_NO_HOST = 1e-9
"""Of a step, what is as good as nothing: logarithms of it are far from those of all else."""


def _share_below(end: Any) -> Any:
    """The share of a standard normal distribution below an end, or an array of them."""
    import numpy as np

    ends = np.asarray(end, float) / math.sqrt(2)
    parts = np.fromiter(map(math.erf, ends.ravel().tolist()), float, ends.size)
    below = 0.5 * (1.0 + parts.reshape(ends.shape))
    return below if np.ndim(end) else float(below)


@dataclass(frozen=True, slots=True)
class CellSteps:
    """The residuals of a cell, or of all cells that agree in some fields."""

    mean: float  # of log(measured / predicted), drawn to that of the cells around
    scale: float  # the 90th percentile of how far sources that are left out are from it
    sources: int
    steps: int

    def mixed(self, other: CellSteps, share: Any) -> tuple[Any, Any]:
        """The mean and the scale of errors of which this share is the other's."""
        mean = (1 - share) * self.mean + share * other.mean
        return mean, ((1 - share) * self.scale**2 + share * other.scale**2) ** 0.5


@dataclass(frozen=True, eq=False)
class IntervalTable:
    """Residuals of steps by where they are, a hierarchy of cells.

    order: fields of a `StepCell`, the first is dropped last.  cells: by the values of the first of
    these, joined by ", "; "" is all steps.  levels, low, high: ends in scales.  scatter: how far
    means of cells are from those around them, by the number of fields that both share.  hosts: the
    scale of steps that wait for their host, each from the others of its run.  uses: of steps after
    a fit, wherever they are.

    The benchmark script coverage.py writes it.
    """

    title: str
    order: tuple[str, ...]
    levels: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    scatter: tuple[float, ...]
    hosts: float
    cells: Mapping[str, CellSteps]
    uses: Mapping[str, Residuals] = field(default_factory=dict)

    @staticmethod
    @functools.cache
    def shipped() -> IntervalTable:
        """The table that comes along."""
        return IntervalTable.load(_TABLE)

    @staticmethod
    def load(path: Path) -> IntervalTable:
        """Read a table.  Raises ResidualsError, which names the file and the key."""
        data = toml_of(text_of(path, _KIND), str(path), _KIND)
        return record_of(IntervalTable, data, str(path), _KIND)

    def measured(self, cell: StepCell) -> tuple[int, CellSteps]:
        """How many fields of a cell, in their order, some measured steps share; and these steps."""
        values = cell.values(self.order)
        for depth in range(len(values), 0, -1):
            steps = self.cells.get(", ".join(values[:depth]))
            if steps is not None:
                return depth, steps
        return 0, self.cells[""]

    def steps_at(self, cell: StepCell) -> CellSteps:
        """The residuals at a cell: measured there, or of the cells around it and wider."""
        depth, steps = self.measured(cell)
        apart = max(self.scatter[depth:], default=0.0)  # of fields inside, a scale has the scatter
        return replace(steps, scale=math.hypot(steps.scale, OF_SCALE * apart))

    def errors(self, cell: StepCell, alone: Any, behind: Behind | None = None) -> StepErrors:
        """Where errors of a step lie.

        alone: the share of the variance that its kernels have as if each were measured by itself;
        1 of a kernel, and less the more of them there are (see `StepTimes.alone`).  behind: where
        the host is; on a CPU, which runs an op when it is called, errors of both are in the table.
        """
        mean, scale = self.steps_at(cell).mixed(self.steps_at(cell.of_kernel), alone)
        if behind is not None and cell.kind != "cpu":
            mean, scale = behind.later(mean, scale, self.hosts)
        low, high = (tuple(mean + end * scale for end in ends) for ends in (self.low, self.high))
        return StepErrors(self.levels, low, high)

    def apart(self, cells: Iterable[str], cell: StepCell) -> float:
        """The variance between a cell and the nearest of others; 0 in one of them, and of none."""
        values = cell.values(self.order)

        def variance(other: StepCell) -> float:
            pairs = zip(self.order, values, self.scatter, strict=True)
            differs, total = False, 0.0
            for name, value, scatter in pairs:
                differs = differs or (getattr(other, name) or UNKNOWN) != value
                total += 2 * scatter**2 * differs  # both scatter around what they share
            return total

        return min((variance(StepCell.of(text)) for text in cells), default=0.0)

    def grounds(self, cell: StepCell, alone: float = 0.0, behind: Behind | None = None) -> str:
        """A sentence on what an interval rests on: measured steps, and the host; see `errors`."""
        told = self._grounds(cell.of_kernel if alone > 0.5 else cell)
        return told if behind is None else told + behind.grounds(cell, self.hosts)

    def _grounds(self, cell: StepCell) -> str:
        depth, steps = self.measured(cell)
        kind = "kernel" if cell.phase == "kernel" else "step"
        of = f"{plural(steps.steps, f'measured {kind}')} of {plural(steps.sources, 'source')}"
        if depth == len(self.order):
            return f"interval by {of} like it ({cell})"
        nearest = self._nearest(cell)
        pairs = zip(nearest.values(self.order), cell.values(self.order), strict=True)
        differs = [
            f"{there} (here {here})" for there, here in pairs if UNKNOWN != there != here != UNKNOWN
        ]
        return f"interval extrapolated from {of}, and wider: the nearest is {listed(differs)}"

    def _nearest(self, cell: StepCell) -> StepCell:
        """The measured cell that shares most fields, the first ones first."""
        values = cell.values(self.order)

        def shared(words: list[str]) -> tuple[int, int]:
            same = [word == value for word, value in zip(words, values, strict=True)]
            return ([*same, False].index(False), sum(same))

        every = [key.split(", ") for key in self.cells if key.count(", ") + 1 == len(values)]
        nearest = max(every, key=shared)
        named = zip(self.order, nearest, strict=True)
        kept = {name: word.replace(UNKNOWN, "") for name, word in named if name != "kind"}
        return StepCell(**kept)


_TABLE = Path(__file__).parent / "fitted" / "intervals.toml"
_KIND = FileKind("interval table", ResidualsError)
OF_SCALE = NormalDist().inv_cdf(0.95)
"""A scale over a standard deviation."""
