"""Kinds of bytes that a run can tell apart, and factors of measured over counted bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from rooftrace.costmodels.ops.cost import Access, Cost
from rooftrace.graph import OpGraph

# -- kinds -----------------------------------------------------------------------------------------
# Kinds of bytes: roles, with weights by the family that reads them.
#
# The bytes of an optimizer's kernels are one kind: they always move states, weights and gradients
# in the same proportions, so no measurement tells these apart.

WEIGHTS = {name: f"{name} weights" for name in ("attention", "dense", "moe")}
"""The kinds of weights by family; families other than attention and moe are dense."""
BYTE_KINDS = (
    *WEIGHTS.values(), "activations", "temporary", "kv", "gradients", "optimizer", "constants"
)  # fmt: skip
"""Every kind, in the order in which reports list them."""


def kinds_of(
    graph: OpGraph, ops: Sequence[int], op_costs: Sequence[Cost]
) -> Callable[[Access], str]:
    """The kind of each access of a kernel that has these ops.

    Its family is that of the op that moves most.
    """
    lead = graph.ops[max(ops, key=lambda op: op_costs[op].bytes())]
    if lead.part == "optimizer":
        return lambda access: "optimizer"
    weights = WEIGHTS.get(lead.family, WEIGHTS["dense"])

    def kind(access: Access) -> str:
        role = graph.values[access.storage].role
        return weights if role == "weights" else role

    return kind


def bytes_by_kind(
    amounts: Mapping[Access, float], kind: Callable[[Access], str]
) -> dict[str, float]:
    """HBM bytes by kind; a kind of which there are none is left out."""
    sums: dict[str, float] = {}
    for access, size in amounts.items():
        if access.wire == "hbm" and size:
            name = kind(access)
            sums[name] = sums.get(name, 0.0) + size
    return sums


# -- factors ---------------------------------------------------------------------------------------
# Measured bytes over bytes by rule, kind by kind, and the causes of a difference.

FUSIONS = ("none", "detected")
SOURCES = ("counters", "seconds")
_LARGEST = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFactor:
    """How many bytes of one kind a run moved for each byte that rules count.

    rows, experts, precision and cache are causes of a difference, each the bytes without it over
    the bytes with it.  The first three are in bytes by rule already; `cache` is in `unfused`.
    Raises ValueError for a number that is none, negative or infinite.
    """

    factor: float = 1.0  # measured bytes over those by rule, in the kernels that ran
    error: float = 0.0  # standard error of `factor`; 0 where it is not identified
    kernels: int = 0  # how many measured kernels it rests on
    by: str = "seconds"  # or "counters": where the measured bytes are from
    why: str = ""  # why the measurements do not identify `factor`, which is 1 then
    grouping: float = 1.0  # bytes by rule in the kernels that ran, over those we detect
    unfused: float = 1.0  # measured bytes over those by rule with a kernel for each op
    rows: float = 1.0  # entire tables over the rows that were looked up
    experts: float = 1.0  # all experts over those with tokens
    precision: float = 1.0  # weights as wide as the other operand, over as stored
    cache: float = 1.0  # bytes read over those that miss a cache of the chip's size

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "why":
                continue
            if item.name == "by":
                if value not in SOURCES:
                    raise ValueError(f"by={value!r:.60}: expected {' or '.join(SOURCES)}")
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0 <= value <= _LARGEST:
                raise ValueError(
                    f"{item.name}={value!r:.60}: expected a number of at least 0, "
                    f"{_LARGEST:g} at most"
                )

    @property
    def identified(self) -> bool:
        """Whether the measurements tell `factor`."""
        return not self.why

    @property
    def applied(self) -> float:
        """The factor on bytes by rule, kernel by kernel.

        A kernel that took longer than its bytes may have moved more of them, or moved them at a
        lower rate; seconds do not tell.  So a factor by seconds above 1 is left to the rates.
        """
        return min(self.factor, 1.0) if self.by == "seconds" else self.factor

    @property
    def residency(self) -> float:
        """The seed's weight residency factor (WRF): bytes as used over bytes as read.

        As used are entire matrices and tables, with all experts, as wide as the other operand, once
        for each op that uses them.
        """
        causes = self.rows * self.experts * self.precision
        return causes / self.unfused if self.unfused else math.inf

    @property
    def residency_error(self) -> float:
        """The standard error of `residency`."""
        return self.residency * self.error / self.factor if self.factor else math.inf

    @property
    def unfused_error(self) -> float:
        """The standard error of `unfused`."""
        return self.unfused * self.error / self.factor if self.factor else self.error

    @property
    def unexplained(self) -> float:
        """The part of `residency` without a cause; 1 where the causes account for all."""
        return 1 / (self.unfused * self.cache) if self.unfused * self.cache else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteFactors:
    """Factors by kind of bytes, from runs on one device."""

    fusion: str = "detected"  # of the executions that they are for
    measured: str = ""  # the device and date: "L4, 2026-11-20"
    factors: Mapping[str, ByteFactor] = field(default_factory=dict, hash=False)  # by kind

    def __post_init__(self) -> None:
        if self.fusion not in FUSIONS:
            raise ValueError(f"fusion={self.fusion!r:.60}: expected {' or '.join(FUSIONS)}")
        for kind in self.factors:
            if kind not in BYTE_KINDS:
                raise ValueError(f"kind {kind!r:.60}: expected one of {', '.join(BYTE_KINDS)}")

    def scale(self, kind: str) -> float:
        """The factor on the bytes of a kind; 1 where none was measured."""
        factor = self.factors.get(kind)
        return factor.applied * factor.grouping if factor else 1.0

    @property
    def identified(self) -> Mapping[str, ByteFactor]:
        """The factors that the measurements identify."""
        return {kind: factor for kind, factor in self.factors.items() if factor.identified}

    @property
    def unknown(self) -> Mapping[str, str]:
        """Why a factor is not identified, by kind of bytes."""
        return {kind: factor.why for kind, factor in self.factors.items() if factor.why}

    def unfused(self, kind: str) -> float:
        """Bytes of a kind, as applied, over those with a kernel for each op; 1 by default."""
        factor = self.factors.get(kind)
        if factor is None or not factor.factor:
            return 1.0
        return factor.unfused * factor.applied / factor.factor
