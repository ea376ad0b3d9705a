"""Records of the tensors of models and checkpoints: statistics, sums, and what two differ in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rooftrace._plain import Plain, plain_record
from rooftrace._shown import Shown, short
from rooftrace.diffs.changes import (
    CAPACITY,
    EXACT,
    NUMBER,
    SHARE,
    Change,
    Limited,
    Metrics,
    relative,
    union,
)
from rooftrace.graph import pattern_of
from rooftrace.hardware.units import format_capacity, format_share, plural

# -- statistics ------------------------------------------------------------------------------------
# What the values of a tensor are, in a few numbers; knows no tensor.

BINS = 50
"""Of a histogram, between the smallest and the largest finite value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStatistics(Plain):
    """Statistics of the values of a tensor.  Mean, deviation and range are of the finite ones.

    The real and the imaginary part of a complex number count as two values.
    """

    count: int  # of finite values
    mean: float  # nan where there is no value
    squares: float  # the sum of (value - mean)^2
    min: float
    max: float
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    histogram: tuple[int, ...] = ()  # values in BINS equal steps from min to max

    KEYS = "mean std min max count zeros nans infs histogram"

    @property
    def std(self) -> float:
        """The standard deviation as torch.std gives it, over count - 1; nan below two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan

    def with_(self, other: WeightStatistics) -> WeightStatistics:
        """The statistics of both sets of values together, without a histogram."""
        count = self.count + other.count
        if not (self.count and other.count):
            mean = self.mean if self.count else other.mean
            squares = self.squares + other.squares
        else:
            step = other.mean - self.mean
            mean = self.mean + step * other.count / count
            between = step * step * self.count * other.count / count
            squares = self.squares + other.squares + between
        return WeightStatistics(
            count=count,
            mean=mean,
            squares=squares,
            min=min(_finite(self.min, other.min), default=math.nan),
            max=max(_finite(self.max, other.max), default=math.nan),
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
        )


NO_VALUES = WeightStatistics(count=0, mean=math.nan, squares=0.0, min=math.nan, max=math.nan)


def _finite(*values: float) -> Iterator[float]:
    return (value for value in values if not math.isnan(value))


def merged(parts: Iterable[WeightStatistics]) -> WeightStatistics:
    """The statistics of all values of these parts."""
    return reduce(WeightStatistics.with_, parts, NO_VALUES)


# -- records ---------------------------------------------------------------------------------------
# Records of an inventory: the tensors of a module or a checkpoint, and their sums.

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A plain tensor that holds bytes of a wrapper: packed values, scales."""

    name: str  # of the part, as ".scale"; "" for the only one
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo(Plain):
    """One tensor of a module or a checkpoint, with the names that a state_dict has."""

    name: str
    role: str  # "parameter", "buffer", or "attribute": a tensor beside these
    module: str = ""  # path of the module that owns it
    kind: str = ""  # name of that module's class; "" where only a file is known
    shape: tuple[int, ...] | None = None  # None: it has none before the first call (nn.LazyLinear)
    dtype: str = ""
    num_params: int = 0  # elements
    bytes: int = 0  # that store it; of several names for the same bytes the first has them
    requires_grad: bool | None = None  # None: a file does not say
    shared: tuple[str, ...] = ()  # other names of the same tensor, or of the same bytes
    stored: tuple[StoredPart, ...] = ()  # of a wrapper: what holds its bytes
    statistics: WeightStatistics | None = None
    note: str = ""  # why there are no statistics, or what they are of

    @property
    def memory(self) -> float:
        """`bytes` in MiB, as `total_memory_mb`."""
        return self.bytes / MIB

    @property
    def mean(self) -> float:
        """Of its finite values; nan without weights."""
        return self.statistics.mean if self.statistics else math.nan

    @property
    def std(self) -> float:
        """Of its finite values, over n - 1; nan without weights."""
        return self.statistics.std if self.statistics else math.nan

    @property
    def min(self) -> float:
        """The smallest finite value; nan without weights."""
        return self.statistics.min if self.statistics else math.nan

    @property
    def max(self) -> float:
        """The largest finite value; nan without weights."""
        return self.statistics.max if self.statistics else math.nan

    KEYS = (
        "name role module class=kind shape dtype params=num_params bytes requires_grad shared "
        "stored statistics note"
    )

    def to_dict(self) -> dict[str, Any]:
        """Plain data in SI units; a tensor without a shape has no number of parameters."""
        made = plain_record(self, self.KEYS)
        unshaped = {} if self.shape is not None else {"params": None}
        return {**made, "class": self.kind or None, **unshaped}


@dataclass(frozen=True, kw_only=True)
class ModelInfo(Plain, Shown):
    """The parts of a module or a checkpoint.  Sums are over parameters, each counted once."""

    name: str
    kind: str  # the class of the module; "safetensors" or "torch" for files
    layers: tuple[LayerInfo, ...]  # parameters; of a checkpoint all tensors
    buffers: tuple[LayerInfo, ...] = ()  # and tensors that a module holds beside both
    modules: int | None = None  # modules without modules inside; None for a checkpoint
    notes: tuple[str, ...] = ()

    schema = "rooftrace.inventory/1"
    KEYS = (
        "schema name class=kind params=total_params params_trainable=trainable_params "
        "params_frozen=non_trainable_params params_shared=shared_params "
        "uninitialized=_without_shape bytes_parameters bytes_buffers modules notes tensors"
    )

    @property
    def num_layers(self) -> int:
        """Tensors in `layers`.  A Linear with a bias is two of them."""
        return len(self.layers)

    @property
    def total_params(self) -> int:
        """Elements of all parameters; those without a shape yet are not in it."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def trainable_params(self) -> int | None:
        """Elements that ask for a gradient; None for a checkpoint, which does not say."""
        return self._asking(True)

    @property
    def non_trainable_params(self) -> int | None:
        """Elements that ask for no gradient; None for a checkpoint, which does not say."""
        return self._asking(False)

    @property
    def shared_params(self) -> int:
        """Elements that stand under more than one name; they are counted once."""
        return sum(layer.num_params for layer in self.layers if layer.shared)

    @property
    def bytes_parameters(self) -> int:
        """Bytes that store the parameters."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def bytes_buffers(self) -> int:
        """Bytes of buffers and of tensors beside them."""
        return sum(layer.bytes for layer in self.buffers)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return self.bytes_parameters + self.bytes_buffers

    @property
    def total_memory_mb(self) -> float:
        """Bytes of the parameters in MiB."""
        return self.bytes_parameters / MIB

    @property
    def uninitialized(self) -> tuple[LayerInfo, ...]:
        """Tensors that have no shape before the first call."""
        return tuple(layer for layer in self.tensors if layer.shape is None)

    @property
    def _without_shape(self) -> list[str]:
        return [layer.name for layer in self.uninitialized]

    @property
    def tensors(self) -> tuple[LayerInfo, ...]:
        """Parameters, then buffers and the others."""
        return (*self.layers, *self.buffers)

    def _asking(self, gradient: bool) -> int | None:
        if any(layer.requires_grad is None for layer in self.layers):
            return None
        return total(layer for layer in self.layers if layer.requires_grad is gradient)

    def __repr__(self) -> str:
        more = " at least" if self.uninitialized else ""
        return short(
            self,
            f"{self.name}: {self.total_params:,} parameters{more} in "
            f"{plural(self.num_layers, 'tensor')}, {format_capacity(self.bytes_parameters)}",
        )


def total(layers: Iterable[LayerInfo]) -> int:
    """Elements of these tensors."""
    return sum(layer.num_params for layer in layers)


# -- comparing -------------------------------------------------------------------------------------
# Parameters of two models beside each other, module by module.

SIZES: Metrics = {"params": EXACT, "bytes": CAPACITY}


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """Modules whose paths differ only in indices: how many there are, and their parameters."""

    path: str  # with indices starred
    modules: tuple[int, int]  # before, after
    params: tuple[int, int]
    shapes: tuple[tuple[str, ...], tuple[str, ...]]  # of one kind of tensor each: "weight [8, 4]"

    @property
    def delta(self) -> int:
        """Parameters after, less those before."""
        return self.params[1] - self.params[0]


@dataclass(frozen=True, kw_only=True)
class ParameterDiff(Plain, Shown, Limited):
    """Changes of the parameters from one model to another."""

    names: tuple[str, str]
    params: tuple[int, int]
    bytes: tuple[int, int]
    modules: tuple[ModuleParameters, ...]  # those that differ, largest change first
    unchanged: int  # paths that have the same parameters on both sides

    schema = "rooftrace.parameters/1"
    KEYS = "schema before=names.0 after=names.1 params bytes unchanged_paths=unchanged modules"

    METRICS = SIZES
    COMPARED = "parameters"

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The parameters of all modules, and their bytes."""
        return [("", {"params": Change(*self.params), "bytes": Change(*self.bytes)})]

    def __repr__(self) -> str:
        (before, after), names = self.params, " -> ".join(self.names)
        return short(self, f"{names}: {before:,} -> {after:,} parameters ({after - before:+,})")


def compare_parameters(
    before: ModelInfo, after: ModelInfo, names: tuple[str, str] | None = None
) -> ParameterDiff:
    """The parameters of two models by module; a shared one counts where it stands first."""
    nothing: list[LayerInfo] = []
    compared = [
        ModuleParameters(
            path,
            (_modules(first), _modules(second)),
            (total(first), total(second)),
            (_shapes(first), _shapes(second)),
        )
        for path, first, second in union(_by_path(before.layers), _by_path(after.layers), nothing)
    ]
    rows = [row for row in compared if row.delta or row.shapes[0] != row.shapes[1]]
    return ParameterDiff(
        names=names or (before.name, after.name),
        params=(before.total_params, after.total_params),
        bytes=(before.bytes_parameters, after.bytes_parameters),
        modules=tuple(sorted(rows, key=lambda row: -abs(row.delta))),
        unchanged=len(compared) - len(rows),
    )


def _by_path(layers: Iterable[LayerInfo]) -> dict[str, list[LayerInfo]]:
    rows: dict[str, list[LayerInfo]] = {}
    for layer in layers:
        rows.setdefault(pattern_of(layer.module), []).append(layer)
    return rows


def _modules(layers: Iterable[LayerInfo]) -> int:
    return len({layer.module for layer in layers})


def _shapes(layers: Iterable[LayerInfo]) -> tuple[str, ...]:
    """Tensors of the modules in words, equal ones once: "weight [8, 4]"."""
    words = [f"{layer.name.rpartition('.')[2]} {_sizes(layer.shape)}" for layer in layers]
    return tuple(dict.fromkeys(words))


def _sizes(shape: tuple[int, ...] | None) -> str:
    return "of no shape yet" if shape is None else str(list(shape))


# -- records ---------------------------------------------------------------------------------------
# Records of a comparison of two checkpoints.

STATUSES = ("drifted", "frozen", "renamed", "dtype", "shape", "added", "removed")
"""Statuses of a tensor; the first that fits, from the right."""
METRICS: Metrics = {
    "drift": SHARE,
    **SIZES,
    **dict.fromkeys(("nonfinite", "changed", "added", "removed"), NUMBER),
}
"""Metrics that a limit may name: "drift>1%", "nonfinite>0"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(Plain):
    """Norms over the elements that are finite on both sides, in double precision.

    The real and the imaginary part of a complex number count as two elements.
    """

    equal: bool  # the same dtype and the same bytes
    norm_before: float
    norm_after: float
    norm_difference: float
    cosine: float | None  # of the angle between the two; None where one has no length
    largest: float  # absolute difference of an element
    left_out: int = 0  # elements that are not finite on one side at least

    KEYS = "equal norm_before norm_after norm_difference relative cosine largest left_out"

    @property
    def relative(self) -> float | None:
        """The norm of the difference over the norm before; None where that is 0, and it changed."""
        return relative(self.norm_difference, self.norm_before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLook(Plain):
    """A tensor of one side, without its values."""

    dtype: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    nans: int = 0
    infs: int = 0

    KEYS = "dtype shape params=elements bytes nans infs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff(Plain):
    """One tensor before and after."""

    name: str  # after; that of a removed one is before
    status: str  # of STATUSES
    before: TensorLook | None  # None: it was added
    after: TensorLook | None  # None: it was removed
    renamed_from: str | None = None  # its name before, where that was another
    renamed_by: str | None = None  # how that is known: by "bytes", or guessed by "shape and name"
    drift: Drift | None = None  # None: its values cannot be compared
    note: str = ""  # why not

    @property
    def moved(self) -> float:
        """The drift relative to the norm before: infinite where that is 0, 0 if there is none."""
        if self.drift is None:
            return 0.0
        return math.inf if self.drift.relative is None else self.drift.relative

    @property
    def not_finite(self) -> tuple[int, int]:
        """Values that are NaN or infinite, before and after."""
        sides = [0 if look is None else look.nans + look.infs for look in (self.before, self.after)]
        return sides[0], sides[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDiff(Plain):
    """The fields of two config.json that differ, and what they do to the parameters."""

    fields: tuple[tuple[str, str, str], ...]  # path of the key, JSON before, JSON after
    parameters: ParameterDiff | None  # of the models of both, built on meta
    note: str = ""  # why there are none

    KEYS = "fields=_fields parameters note"

    @property
    def _fields(self) -> list[dict[str, str]]:
        return [dict(zip(("key", "before", "after"), each, strict=True)) for each in self.fields]


@dataclass(frozen=True, kw_only=True)
class CheckpointDiff(Plain, Shown, Limited):
    """Changes from one checkpoint to another."""

    names: tuple[str, str]
    tensors: tuple[TensorDiff, ...]
    params: tuple[int, int]  # elements of all tensors, before and after
    bytes: tuple[int, int]
    config: ConfigDiff | None = None  # None: there is no config.json beside both, or they are equal
    notes: tuple[str, ...] = ()

    def of(self, status: str) -> tuple[TensorDiff, ...]:
        """The tensors of a status, in the order of the checkpoint."""
        return tuple(tensor for tensor in self.tensors if tensor.status == status)

    @property
    def unchanged(self) -> bool:
        """Whether every tensor is there under its name, with the same bytes."""
        return all(tensor.status == "frozen" for tensor in self.tensors)

    @property
    def relative(self) -> float | None:
        """The norm of all differences over the norm before, of the tensors with values on both."""
        drifts = [tensor.drift for tensor in self.tensors if tensor.drift is not None]
        difference = math.hypot(*(drift.norm_difference for drift in drifts))
        return relative(difference, math.hypot(*(drift.norm_before for drift in drifts)))

    @property
    def not_finite(self) -> tuple[TensorDiff, ...]:
        """Tensors with NaN or infinities on a side."""
        return tuple(tensor for tensor in self.tensors if any(tensor.not_finite))

    METRICS = METRICS
    COMPARED = "two checkpoints"

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The drift of the tensor that moved most, relative to its norm before, and the totals."""
        worst = max(self.tensors, key=lambda tensor: tensor.moved, default=None)
        bad = zip(*(tensor.not_finite for tensor in self.not_finite), strict=True)
        counts = {status: len(self.of(status)) for status in STATUSES}
        grown = {
            "params": Change(*self.params),
            "bytes": Change(*self.bytes),
            "nonfinite": Change(*(map(sum, bad) if self.not_finite else (0, 0))),
            "changed": Change(0, len(self.tensors) - counts["frozen"]),
            "added": Change(0, counts["added"]),
            "removed": Change(0, counts["removed"]),
        }
        drift = {"drift": Change(0, worst.moved if worst else 0)}
        return [(f"{worst.name}: " if worst else "", drift), ("", grown)]

    def __repr__(self) -> str:
        counts = [f"{len(self.of(s)):,} {s}" for s in STATUSES if self.of(s)]
        text = f"{' -> '.join(self.names)}: {', '.join(counts) or plural(0, 'tensor')}"
        return short(self, f"{text}; drift {format_share(self.relative)}")

    @property
    def _counts(self) -> dict[str, int]:
        return {status: len(self.of(status)) for status in STATUSES}

    schema = "rooftrace.checkpoints/1"
    KEYS = (
        "schema before=names.0 after=names.1 params bytes relative counts=_counts notes config "
        "tensors"
    )
