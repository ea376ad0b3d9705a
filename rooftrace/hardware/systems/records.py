"""The records of a system: levels of links that join its chips, and constants of collectives.

Levels go from the inside out: chips of one node, then nodes.  Ranks fill one node after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from rooftrace._shown import Shown, short
from rooftrace.hardware import units
from rooftrace.hardware.chip import Chip, Fact, FactKind
from rooftrace.hardware.systems.collectives import (
    COLLECTIVES as COLLECTIVES,
    Pattern as Pattern,
    collective_kind as collective_kind,
    torch_ops as torch_ops,
)

LevelKind = Literal["nvswitch", "nvlink", "pcie-shared", "fabric", "link"]
Library = Literal["nccl", "custom", "vllm", "sglang", "trtllm", "gloo"]
ExchangeMode = Literal["normal", "low-latency"]
ExchangeWay = Literal["dispatch", "combine"]

LEVEL_KINDS: tuple[LevelKind, ...] = get_args(LevelKind)
LIBRARIES: tuple[Library, ...] = get_args(Library)
EXCHANGE_MODES: tuple[ExchangeMode, ...] = get_args(ExchangeMode)
EXCHANGE_WAYS: tuple[ExchangeWay, ...] = get_args(ExchangeWay)


class SystemSizeError(ValueError):
    """Ranks that a system has no chips for."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links between the units of the level inside: between chips of a node, or between nodes."""

    name: str  # "nvlink", "network"
    kind: LevelKind
    size: int  # units of the level inside that it joins; 0: any number
    bandwidth: Fact  # byte/s per direction: of one chip; of one NIC where there are `nics`
    latency: Fact  # second
    nics: Fact | None = None  # network cards of each unit inside; None: one link for each chip
    rails: bool = False  # whether cards are dedicated to chips, as far as they go round
    oversubscription: Fact | None = None  # how often the uplinks are shared; None: once

    def facts(self) -> Iterator[tuple[str, Fact]]:
        """Every fact with the name of its place."""
        for name in ("bandwidth", "latency", "nics", "oversubscription"):
            fact = getattr(self, name)
            if fact is not None:
                yield f"{self.name} {name}", fact

    def rate_of(self, chips: int, chips_inside: int) -> float:
        """byte/s and direction out of a unit inside that `chips` of its `chips_inside` share.

        The other chips of the unit are busy with other groups, as in a step that all run.
        """
        if self.nics is None:
            rate = self.bandwidth.value * chips
        elif self.rails:
            rate = self.bandwidth.value * self.nics.value * min(1.0, chips / chips_inside)
        else:
            rate = self.bandwidth.value * min(self.nics.value, chips)
        return rate / (self.oversubscription.value if self.oversubscription else 1.0)


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """Constants of one collective op of one library, on one level of a system.

    seconds = ((alpha + step * steps)^p + (wire bytes / (efficiency of n * bandwidth))^p)^(1/p),
    where the efficiency of n ranks is efficiency * (2/n)^fall.  All-reduces of serving libraries
    have a second way, for small buffers: each rank reads what all others have (`direct`).  The
    shorter way is taken; the ring then costs `turn` more.
    """

    library: Library
    op: str  # one of COLLECTIVES; "send" is for recv too
    level: str  # the name of the level it was fitted on
    alpha: float  # second
    step: float  # second for each step of the ring
    efficiency: float  # the share of the datasheet's bandwidth that two ranks reach
    p: float
    fall: float = 0.0
    direct: float = 0.0  # the share of the bandwidth of reading from all others; 0: never done
    turn: float = 0.0  # second; fixed time of the ring where there is another way
    ranks: int  # measured up to
    nbytes: float  # measured up to; byte
    kind: FactKind
    source: str
    version: str = ""  # of the library
    note: str = ""

    def efficiency_of(self, ranks: int) -> float:
        """The share of the bandwidth that so many ranks reach.

        If it grows with them, then up to the most ranks that were measured.
        """
        ranks = min(ranks, self.ranks) if self.fall < 0 else ranks
        return min(1.0, self.efficiency * float((2 / max(2, ranks)) ** self.fall))


@dataclass(frozen=True, kw_only=True)
class ExchangeFit:
    """Constants of sending tokens to experts, or back: the library DeepEP, in one of its modes."""

    mode: ExchangeMode
    way: ExchangeWay
    alpha: float  # second
    step: float  # second for each doubling of the nodes
    efficiency: float  # the share of the bandwidth within a node
    p: float
    outer: float = 0.0  # the share of the bandwidth between nodes; 0: not measured
    each: float = 0.0  # second for each expert of the model
    size: float = 0.0  # second for each byte of a token
    turn: float = 0.0  # second for each token that one group of cores sends
    ranks: int  # measured up to
    tokens: int  # of one rank, measured up to
    kind: FactKind
    source: str
    version: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class System(Shown):
    """Many chips of one kind, as data."""

    name: str  # "dgx-h100", the name of its file
    title: str
    chip: Chip
    levels: tuple[Level, ...]  # from the inside out
    collectives: tuple[CollectiveFit, ...] = ()
    exchanges: tuple[ExchangeFit, ...] = ()
    aliases: tuple[str, ...] = field(default=())
    power: Fact | None = None  # watt at most, of the chips of the innermost level and all with them
    bare: bool = False  # made of the links of a chip: nothing was fitted

    def __repr__(self) -> str:
        return short(self, f"{self.name}: {self.headline()}")

    def __hash__(self) -> int:
        return hash((self.name, self.chip.name, len(self.collectives), self.bare))

    @classmethod
    def of_chip(cls, chip: Chip) -> System:
        """Any number of one chip on its link; no collective was measured."""
        link = chip.link("intra") or chip.link("inter")
        levels: tuple[Level, ...] = ()
        if link is not None:
            latency = link.latency or Fact.of(
                "5 us", "second", "usual time of a small message between chips", "guess"
            )
            bandwidth = link.bandwidth
            levels = (
                Level(name=link.name, kind="link", size=0, bandwidth=bandwidth, latency=latency),
            )
        return cls(name=chip.name, title=chip.title, chip=chip, levels=levels, bare=True)

    @property
    def per_node(self) -> int:
        """Chips of the innermost level; 0: any number."""
        return self.levels[0].size if self.levels else 1

    @property
    def chips(self) -> int:
        """The most chips that the system can have; 0: any number."""
        return self.size_of(len(self.levels) - 1)

    def size_of(self, level: int) -> int:
        """Chips within one unit of the level with this number; 0: any number."""
        return math.prod(inner.size for inner in self.levels[: level + 1])

    def units_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The number of units of each level that these ranks are in, from the inside out.

        Raises `SystemSizeError` for ranks that the system has no chip for.
        """
        last = max(ranks, default=0)
        if (self.chips and last >= self.chips) or (not self.levels and last > 0):
            has = units.plural(self.chips, "chip") if self.levels else "no link between chips"
            raise SystemSizeError(
                f"rank {last}: {self.name} has {has}; expected ranks below {max(1, self.chips)}, "
                "or another system (rooftrace systems list)"
            )
        counts = []
        for level in range(len(self.levels)):
            size = self.size_of(level)
            counts.append(len({rank // size for rank in ranks}) if size else 1)
        return tuple(counts)

    def fit_of(self, library: str, op: str, level: str) -> CollectiveFit | None:
        """The constants of a collective on a level; None where there are none."""
        wanted = (library, op, level)
        return next((f for f in self.collectives if (f.library, f.op, f.level) == wanted), None)

    def exchange_of(self, mode: str, way: str) -> ExchangeFit | None:
        """The constants of sending tokens to experts; None where there are none."""
        return next((f for f in self.exchanges if (f.mode, f.way) == (mode, way)), None)

    def facts(self) -> Iterator[tuple[str, Fact]]:
        """Every fact of the node and of the levels with the name of its place."""
        if self.power is not None:
            yield f"power of {units.plural(self.per_node, 'chip')}", self.power
        for level in self.levels:
            yield from level.facts()

    def origins(self, chips: int) -> Iterator[str]:
        """Whether times of exchanges were measured, for each level that so many chips use."""
        for number, level in enumerate(self.levels):
            if number and chips <= self.size_of(number - 1):
                return
            parts = []
            for measured in (True, False):
                fits = [fit for fit in self.collectives if fit.level == level.name]
                fits = [fit for fit in fits if (fit.kind == "measured") == measured]
                if not fits:
                    continue
                ops = ", ".join(dict.fromkeys(fit.op for fit in fits))
                most = max(fit.ranks for fit in fits)
                sources = ", ".join(dict.fromkeys(fit.source for fit in fits))
                derived = f"not measured, derived ({sources})"
                how = f"measured, up to {most} ranks" if measured else derived
                parts.append(f"{ops} {how}")
            alone = f"not measured, bandwidth alone ({level.bandwidth.source})"
            yield f"{level.name} of {self.name}: {'; '.join(parts) or alone}"

    @property
    def joined_chip(self) -> Chip:
        """The chip of the system, which knows how it is joined to the others."""
        return replace(self.chip, system=self)

    def with_chip(self, chip: Chip) -> System:
        """The system with another chip in each place."""
        return replace(self, chip=chip)

    def headline(self) -> str:
        """One line: the units and the rate of each level."""
        parts: list[str] = []
        for level in self.levels:
            many = f"{level.size} x " if level.size else "any number of "
            unit = self.chip.name if not parts else "nodes"
            rate = units.format_bandwidth(level.bandwidth.value)
            nics = f" x {level.nics.value:g} NICs" if level.nics else ""
            parts.append(f"{many}{unit} over {level.name} ({rate}{nics})")
        return ", then ".join(parts) or f"one {self.chip.name}"
