"""Records of a comparison of two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.hardware.units import format_share, plural
from rooftrace.tracer.changes import Change, relative
from rooftrace.tracer.changes.limits import Limited
from rooftrace.tracer.changes.metrics import NUMBER, SHARE, Metrics
from rooftrace.tracer.inventory import SIZES, ParameterDiff

STATUSES = ("drifted", "frozen", "renamed", "dtype", "shape", "added", "removed")
"""What can be said of a tensor; the first that fits, from the right."""
METRICS: Metrics = {
    "drift": SHARE,
    **SIZES,
    **dict.fromkeys(("nonfinite", "changed", "added", "removed"), NUMBER),
}
"""What may be held to a limit: "drift>1%", "nonfinite>0"."""


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
    """What changed from one checkpoint to another."""

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
