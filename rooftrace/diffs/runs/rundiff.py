"""Records of a comparison of two measured runs: kernel names, metrics, sides and changes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.ops import Cost, find_rule
from rooftrace.diffs import Change
from rooftrace.diffs.changes import CAPACITY, COUNT, SECONDS, Limited, Metrics
from rooftrace.diffs.costs import Diff
from rooftrace.hardware.units import format_time
from rooftrace.measured.alignment import keys

# -- kernel names ----------------------------------------------------------------------------------
# Two devices, and two releases of a library, name the same kernel differently.  The name of a
# kernel from a template is in its arguments
# ("elementwise_kernel<..., direct_copy_kernel_cuda, ...>").

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?!\w|::)")
"""A word of a name, and not a namespace."""
_SIZES = re.compile(
    r"\d+(x\d+)*|sm\d+|tilesize\w*|warpgroupsize\w*|align\d+|stages?\d*|[0-9a-f]{12,}|\d+x\w*|v\d+"
    r"|(MT|MI|WG|TT|LBSPP\w*|GRVW\w*|SVW|VW\w*|NEPBS|WSGRA|WSGRB)\d+(x\d+)*|(?:h|s|i)?16816"
)
"""Parts of a name, between underscores, that say sizes, a chip, or a hash."""
_WITH_SIZES = re.compile(r"^[a-z]?\d{4,}(?=[a-z])")
""" "s16816gemm" is "gemm" by an instruction of 16 x 8 x 16."""
_GENERIC = re.compile(
    r"(vectorized_|unrolled_|index_|legacy_)?elementwise_kernel\w*|gpu_kernel_impl\w*|reduce_kernel"
    r"|[Kk]ernel2?|void|const|float\d?|double\d?|(unsigned|int|bool|char|long|short)\d*(_t)?|true"
    r"|false|Half|(__nv_)?bfloat16|BFloat16|__half2?|half|std|array|lambda|operator|at|native|c10"
    r"|TensorInfo|\w*OffsetCalculator|(Load|Store)With\w+|ReduceOp|func_wrapper_t|Params|traits\w*"
    r"|\w+_(traits|config|Params)|Array|TensorIterator\w*|ul|nv_bfloat16|\w*(bfloat16|half)_t"
    r"|OpaqueType|Scalar|\w+Args\w*"
)
"""Words that hundreds of kernels have."""
_TENSILE = re.compile(r"(Cijk_[A-Z][a-z]+_[A-Z][a-z]+(_[A-Z]+)?)\w*")
_WORDS = 2
_COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|msccl|nvshmem|deep_?ep\b|cross_device_reduce|all_?reduce|all_?gather"
    r"|reduce_?scatter|all_?to_?all|gloo|ptop|peer to peer|c10d::",
    re.IGNORECASE,
)
_FAMILIES = tuple(
    (re.compile(pattern, re.IGNORECASE), family)
    for pattern, family in (
        (r"^triton_tem\w*_(add|badd|b|int_|scaled_)?(bmm|mm)(_|$)|^triton_(b?mm)\b", "dense"),
        (r"^triton_tem\w*flex_attention|^_(attn_)?(fwd|bwd)(_kernel|_d\w+)?$", "attention"),
        (r"^triton_(poi|for)_", "elementwise"),
        (r"^triton_(per|red|mix)_(?!\w*(norm|loss|cross_entropy))", "other"),
        (r"flash|fmha|attention|\b_?attn|\bpa_(fwd|decode)|mla_(a8w8|decode|fwd)", "attention"),
        (
            r"conv|implicit_gemm|igemm_|fprop|dgrad|wgrad|winograd|nchwToNhwc|nhwcToNchw|miopen",
            "convolution",
        ),
        (r"gemm|gemv|cutlass|xmma|cublas|Cijk_|nvjet|matmul|flatmm|splitK", "dense"),
        (r"lstm|gru_cell|rnn", "rnn"),
        (r"adam|sgd|multi_tensor_apply|optimizer", "optimizer"),
        (r"norm(?!al)", "norm"),
        (r"embedding", "embedding"),
        (r"nll_loss|cross_entropy", "loss"),
        (r"elementwise_kernel", "elementwise"),
    )
)
"""Families of the tracer, for kernels that no op launched."""


@cache
def kernel_key(name: str) -> str:
    """The name of a kernel without sizes, types, hashes and namespaces."""
    tensile = _TENSILE.match(name)
    if tensile:
        return tensile[1]
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", name)
    # The arguments of the function, not those of its template.
    name = re.sub(r"\([^()<>]*\)$", "", name)
    words: dict[str, None] = {}
    for word in _IDENTIFIER.findall(name):
        parts = [part for part in word.split("_") if not _SIZES.fullmatch(part)]
        plain = "_".join(_WITH_SIZES.sub("", part) for part in parts).strip("_")
        if plain and not _GENERIC.fullmatch(plain):
            words[plain] = None
        if len(words) == _WORDS:
            break
    return " ".join(words) or keys.base_name(name)


@cache
def is_communication(name: str) -> bool:
    """Whether a kernel, a copy or an op moves data between devices."""
    return _COMMUNICATION.search(name) is not None


@cache
def family_of_op(name: str) -> str:
    """The family of an op by its rule; "" without a rule."""
    rule = find_rule(f"{name.replace('::', '.', 1)}.default") if "::" in name else find_rule(name)
    return "" if rule is None else rule.family_of(Cost())


@cache
def family_of_kernel(name: str, kind: str) -> str:
    """The family of a kernel by its name alone; "copies" for copies and fills."""
    if is_communication(name):
        return "communication"
    if kind in ("memcpy", "memset"):
        return "copies"
    return next((family for pattern, family in _FAMILIES if pattern.search(name)), "other")


# -- metrics ---------------------------------------------------------------------------------------

METRICS: Metrics = {
    "time": SECONDS,
    "device": SECONDS,
    "computing": SECONDS,
    "exposed": SECONDS,
    "copying": SECONDS,
    "idle": SECONDS,
    "waiting": SECONDS,
    "queued": SECONDS,
    "outside": SECONDS,
    "communication": SECONDS,
    "hidden": SECONDS,
    "work": SECONDS,
    "kernels": COUNT,
    "copies": COUNT,
    "memory": CAPACITY,
}
"""Metrics of a step.

time: wall.  device: while any kernel or copy runs, = computing + exposed + copying.  exposed:
communication that no kernel hides; copying: copies under neither.  idle: time - device, = waiting
(the host has not launched the next kernel) + queued (it has) + outside (before, after and between
its kernels).  communication = hidden + exposed.  work: the sum over all kernels and copies.
On a host device is while any op runs.  memory: at the peak, of a run.
"""
PARTS = ("computing", "exposed", "copying", "waiting", "queued", "outside")
"""Metrics that exclude each other and add up to the time of a step of a GPU's trace."""


# -- sides -----------------------------------------------------------------------------------------
# Every number is kept for each measured step, for its spread.  Sums over the calls are the totals
# of the side, exactly.


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernel:
    """One kernel, copy or fill of a call; on a host the call itself."""

    name: str
    kind: str  # kernel, memcpy, memset; op: a call on the host
    count: float  # launches in a step
    seconds: tuple[float, ...]  # s of all of them, in each measured step
    family: str = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """One call of an op by the code of the model, and its kernels."""

    name: str  # "aten::linear"; "" for kernels that no op launched
    sizes: str = ""  # of its tensors, with their types; "": unknown
    module: str = ""  # path of the module; "": unknown
    pattern: str = ""  # that path with the numbers of repeated blocks starred
    part: str = ""  # "backward", or "" for other parts
    family: str = "other"  # of all its kernels; "other" where these are of several
    kernels: tuple[MeasuredKernel, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its kernels."""
        return tuple(kernel.name for kernel in self.kernels)


@dataclass(frozen=True, kw_only=True)
class MeasuredSide:
    """One measured step of one run."""

    device: str  # its name; "": unknown
    on_device: bool  # whether seconds are of kernels; else of calls on the host
    figures: Mapping[str, tuple[float, ...]]  # by name in METRICS, for each measured step
    middle: str  # of the steps: mean or median
    calls: tuple[MeasuredCall, ...]  # in order
    in_order: bool = True  # whether the order of `calls` is that of the step
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """The number of measured steps."""
        return len(self.figures["time"])

    @property
    def timed(self) -> int:
        """The number of steps with timed kernels; a run times them once, apart from its steps."""
        return self.steps if self.middle == "mean" else 1


def equal_as_one(side: MeasuredSide) -> MeasuredSide:
    """A side with equal calls of several layers merged, as a run has them.

    Then a merged layer of the other side has its counterpart.
    """
    alike: dict[object, list[MeasuredCall]] = {}
    for call in side.calls:
        names = tuple((kernel.name, kernel.kind) for kernel in call.kernels)
        alike.setdefault((call.name, call.sizes, call.pattern, call.part, names), []).append(call)
    return replace(side, calls=tuple(map(_together, alike.values())))


def _together(calls: Sequence[MeasuredCall]) -> MeasuredCall:
    kernels = tuple(
        replace(
            equal[0],
            count=sum(kernel.count for kernel in equal),
            seconds=tuple(map(sum, zip(*(kernel.seconds for kernel in equal), strict=True))),
        )
        for equal in zip(*(call.kernels for call in calls), strict=True)
    )
    return replace(calls[0], module=calls[0].pattern, kernels=kernels)


def middle_of(values: Sequence[float], how: str) -> float:
    """The mean or the median of a metric over the measured steps."""
    return statistics.median(values) if how == "median" else statistics.fmean(values)


# -- differences -----------------------------------------------------------------------------------

_UNITS = {"second": "s", "byte": "byte", "count": "launches"}
"""Units of metrics in JSON."""
NO_MODULE = "(no module)"
"""The name of the group of kernels of unknown module."""
_NEGLIGIBLE = 1e-3
"""Share of a prediction: ratios to a smaller difference are left out."""


@dataclass(frozen=True, slots=True)
class MeasuredChange(Change):
    """One measured quantity of a step before and after (SI units)."""

    rounding: ClassVar[float] = 1e-9
    """Seconds of a trace are differences of large times, as floats."""

    noise: float | None = None  # half the 95 % interval of the difference; None: unknown

    KEYS = "before after delta relative noise within_noise"

    @property
    def within_noise(self) -> bool | None:
        """Whether the spread of the steps explains the difference; None: unknown."""
        return None if self.noise is None else abs(self.delta) <= self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange(Plain):
    """A kernel of a call, or equal ones of several layers, before and after."""

    # slower, faster, same, new, gone; replaced: by another kernel; resized: in the same time;
    # unclear: within noise
    status: str
    call: tuple[str, str]  # that launched it, before and after; "": unknown
    module: str  # with the numbers of repeated blocks starred; "": unknown
    part: str  # "backward" or ""
    family: str
    kind: str  # kernel, memcpy, memset; op: a call on the host
    sizes: tuple[str, str]  # of the call's tensors
    kernels: tuple[tuple[str, ...], tuple[str, ...]]  # names before and after
    count: MeasuredChange  # launches in a step
    time: MeasuredChange  # s in a step
    places: int  # calls of the sequence that it stands for, one in each layer

    @property
    def short_kernels(self) -> tuple[str, str]:
        """The first kernel before and after, without tiles, types and namespaces."""
        first, second = (kernel_key(names[0]) if names else "" for names in self.kernels)
        return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange(Plain):
    """All kernels of a module, or of a family, before and after."""

    name: str
    time: MeasuredChange  # s in a step
    count: MeasuredChange  # launches in a step
    predicted: MeasuredChange | None = None  # s of its kernels; None: nothing was predicted

    KEYS = "* ratio"

    @property
    def ratio(self) -> float | None:
        """Measured difference over the predicted one; None without a prediction, or one of 0."""
        return ratio_of(self.time, self.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Plain):
    """The prediction for a step, before and after."""

    diff: Diff  # of its cost
    totals: Mapping[str, MeasuredChange]  # by name in METRICS, of metrics with a prediction
    notes: tuple[str, ...] = ()  # disagreements of prediction and measurement

    KEYS = "chips=diff.chips executions=diff.executions time_is=diff.time_is totals notes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiff(Plain):
    """One measured step before and after."""

    label: str  # the key of its row; "step" of a trace
    steps: tuple[int, int]  # numbers of measured steps
    devices: tuple[str, str]
    on_device: bool  # whether seconds are of kernels; else of calls on the host
    timed_inside: bool  # whether rows were timed in the step itself, so that parts add up to it
    totals: Mapping[str, MeasuredChange]  # by name in METRICS
    rows: tuple[KernelChange, ...]  # the largest difference first; their times add up to `work`
    modules: tuple[GroupChange, ...]  # empty without known modules
    families: tuple[GroupChange, ...]
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None

    KEYS = (
        "label steps devices seconds_of timed_inside totals rows modules families prediction notes"
    )

    @property
    def seconds_of(self) -> str:
        """The subject of the seconds of the rows."""
        return "kernels" if self.on_device else "host calls"

    @property
    def changes(self) -> tuple[KernelChange, ...]:
        """The rows in which something differs."""
        return tuple(row for row in self.rows if row.status != "same")

    @property
    def unchanged(self) -> bool:
        """Whether no row and no total differs at all."""
        return not self.changes and not any(change.delta for change in self.totals.values())

    def ratio(self, metric: str) -> float | None:
        """Measured difference over the predicted one; None without a prediction, or one of 0."""
        predicted = None if self.prediction is None else self.prediction.totals.get(metric)
        return ratio_of(self.totals[metric], predicted)


@dataclass(frozen=True, kw_only=True)
class RunDiff(Plain, Shown, Limited):
    """The difference of two measured runs, step by step."""

    names: tuple[str, str]
    kinds: tuple[str, str]  # "trace" or "run"
    steps: tuple[StepDiff, ...]
    only_before: tuple[str, ...] = ()  # rows that only one side has
    only_after: tuple[str, ...] = ()
    operations: Mapping[str, MeasuredChange] | None = None  # s of operations alone, of two runs

    METRICS = METRICS
    COMPARED = "measured runs"
    EXAMPLE = "idle>1 ms"
    schema = "rooftrace.rundiff/1"
    KEYS = (
        "schema before=names.0 after=names.1 kinds metrics=_metrics only_before only_after steps "
        "operations"
    )

    @property
    def alone(self) -> bool:
        """Whether it is one run beside itself, of which only its own time is told."""
        return self.names[0] == self.names[1] and self.unchanged

    @property
    def _metrics(self) -> dict[str, str]:
        return {name: _UNITS[metric.unit] for name, metric in METRICS.items()}

    @property
    def unchanged(self) -> bool:
        """Whether nothing differs at all."""
        return (
            not self.only_before
            and not self.only_after
            and all(step.unchanged for step in self.steps)
            and not any(change.delta for change in (self.operations or {}).values())
        )

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The totals of each step."""
        return [(f"{step.label}: measured ", step.totals) for step in self.steps]

    def __repr__(self) -> str:
        if self.alone:
            steps = (f"{s.label} {format_time(s.totals['time'].after)}" for s in self.steps)
            return short(self, f"{self.names[0]} alone: {some(list(steps))}")
        changes = [
            f"{step.label} {format_time(step.totals['time'].before)} -> "
            f"{format_time(step.totals['time'].after)}"
            for step in self.steps
        ]
        return short(self, f"{self.names[0]} -> {self.names[1]}: {some(changes)}")


def ratio_of(measured: MeasuredChange, predicted: MeasuredChange | None) -> float | None:
    """Measured difference over the predicted one; None for a negligible prediction, or none."""
    if predicted is None:
        return None
    if abs(predicted.delta) <= _NEGLIGIBLE * max(predicted.before, predicted.after):
        return None
    return measured.delta / predicted.delta
