"""The record of one chip: its rates, sizes and host costs, each with its source.

Everything is SI: FLOP/s, byte, byte/s, second, watt, hertz. Rates are dense with fp32 accumulation;
a quoted rate that counts on 2:4 sparsity is kept beside the dense one and never used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.hardware import units
from rooftrace.hardware.precisions import compute_family

FactKind = Literal["datasheet", "measured", "derived", "guess"]
Engine = Literal["matrix", "vector"]
LinkName = Literal["intra", "inter"]
ChipKind = Literal["gpu", "cpu"]

USUAL = "h200-sxm"
"""The chip where none is named, and no knobs are of one."""
KINDS: tuple[FactKind, ...] = get_args(FactKind)
ENGINES: tuple[Engine, ...] = get_args(Engine)


class MissingPeakError(LookupError):
    """A chip has no rate for an engine and precision. Nothing falls back to another rate."""


@dataclass(frozen=True)
class Fact(Plain):
    """A number in SI units, as it was written, and its source."""

    value: float
    text: str  # "3.35 TB/s"
    source: str  # a sentence that names the document or the measurement
    kind: FactKind
    note: str = ""

    KEYS = "value text source kind note?"

    @classmethod
    def of(cls, text: str, unit: str, source: str, kind: FactKind, note: str = "") -> Fact:
        """The fact written as `text`, a quantity in `unit`."""
        return cls(units.parse(text, unit), text, source, kind, note)


@dataclass(frozen=True)
class Peak:
    """The dense rate of one engine in one precision."""

    engine: Engine
    precision: str  # the compute family, see `compute_family`
    rate: Fact  # FLOP/s; OP/s for integers
    quoted: Fact | None = None  # the datasheet's headline, where that counts on 2:4 sparsity


@dataclass(frozen=True)
class Link:
    """A way out of the chip."""

    name: LinkName
    bandwidth: Fact  # byte/s, per direction and chip
    latency: Fact | None = None  # second


BLAS_WORKSPACE = Fact.of(
    "8320 KiB",
    "byte",
    "PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp",
    "derived",
    "two of 4 MiB and eight of 16 KiB: NVIDIA's GPUs before Hopper",
)
CONTEXT = Fact.of(
    "0.5 GiB",
    "byte",
    "nvidia-smi beside torch.cuda.memory_reserved after a first op, as users report it",
    "guess",
    "0.3 to 0.7 GiB with kernels loaded as they are needed (CUDA 11.7 on), up to 1.3 GiB before",
)


# The facts that stand alone in a chip, with their units, in the order of files and reports.
FACT_UNITS: Mapping[str, str] = {
    "memory_capacity": "byte",
    "memory_bandwidth": "byte/s",
    "memory_bus": "count",
    "memory_pin": "byte/s",
    "l2_capacity": "byte",
    "sm_count": "count",
    "clock": "hertz",
    "power": "watt",
    "sustained_compute": "share",
    "sustained_memory": "share",
    "price": "dollar/hour",
    "kernel_gap": "second",
    "dispatch_eager": "second",
    "dispatch_view": "second",
    "module_call": "second",
    "dispatch_compiled": "second",
    "graph_launch": "second",
    "graph_entry": "second",
    "read_back": "second",
    "blas_workspace": "byte",
    "context": "byte",
}
HOST_FACTS = (
    "dispatch_eager", "dispatch_view", "module_call", "dispatch_compiled", "graph_launch",
    "graph_entry", "read_back",
)  # fmt: skip
"""The facts that are of a chip's host."""


HOST_LINKS = {
    **dict.fromkeys(("sm_70", "sm_75"), 16e9),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950"), 64e9),
}
"""Bytes a second and direction between a chip and its host, by the datasheets of each architecture:
PCIe 3.0 and 5.0 of 16 lanes.  Grace hosts have more (NVLink-C2C)."""
HOST_LINK = 32e9
"""The same by PCIe 4.0, of sm_80, sm_86, sm_89, and of chips that are not known."""
COPIED = 0.87
"""Share of it that copies of pinned memory reach: 55.63 of 64 GB/s, in the example of NVIDIA's post
on nvbandwidth as a tutorial quotes it (https://dev.smart-guide.co.kr/en/tutorial/); 12.36 of 16 in
the README of nvbandwidth, on an older host."""


@dataclass(frozen=True, kw_only=True)
class Chip(Plain, Shown):
    """One accelerator, or one CPU machine, as data. None: unknown."""

    name: str  # "h200-sxm", the name of its file
    title: str  # "NVIDIA H200 SXM"
    vendor: str
    kind: ChipKind
    peaks: tuple[Peak, ...]
    memory_capacity: Fact  # byte
    memory_bandwidth: Fact  # byte/s
    kernel_gap: Fact  # device seconds that a kernel costs in addition to its work, in one stream
    # Of its host, in seconds; a chip file without them has those of the typical host.
    dispatch_eager: Fact  # a plain op in eager PyTorch
    dispatch_compiled: Fact  # a kernel launched by compiled code
    graph_launch: Fact  # one captured graph, whatever its kernels
    dispatch_view: Fact  # a view in eager PyTorch: launches nothing
    module_call: Fact  # Python per call of a module, its ops aside
    graph_entry: Fact  # from one compiled graph into another: guards
    read_back: Fact  # from the end of its work until the host has a value of it, as by item()
    host_spread: Fact | None = None  # of a host that was named; see `host_spread_of`
    blas_workspace: Fact = BLAS_WORKSPACE  # byte, of each thread and stream with products
    context: Fact = CONTEXT  # byte of a process outside of the allocator: context, loaded kernels
    aliases: tuple[str, ...] = ()
    architecture: str = ""  # that kernels are compiled for: "sm_90", "gfx942"; "": unknown
    l2_capacity: Fact | None = None  # byte
    links: tuple[Link, ...] = ()
    sm_count: Fact | None = None
    clock: Fact | None = None  # hertz
    power: Fact | None = None  # watt
    # Rates that large products and copies sustain under this chip's power limit, as a share of
    # those of its generation (see `Knobs.typical`); None: 1.
    sustained_compute: Fact | None = None
    sustained_memory: Fact | None = None
    price: Fact | None = None  # dollar/hour
    memory_bus: Fact | None = None  # bits, for the datasheet's own arithmetic
    memory_pin: Fact | None = None  # byte/s of one pin, for the same
    # Measured on real ones, in addition to the datasheet. For reading; nothing computes with it.
    measured: Mapping[str, Fact] = field(default_factory=dict, hash=False)
    system: Any = None  # the System that joins it to others; None: its own link does

    KEYS = (
        f"name title vendor kind architecture aliases peaks links {' '.join(FACT_UNITS)} measured"
    )

    def __repr__(self) -> str:
        return short(self, f"{self.name}: {self.headline()}")

    @property
    def host_waits(self) -> bool:
        """Whether an op has run when its call returns: a CPU computes in the thread that calls."""
        return self.kind == "cpu"

    @property
    def host_link(self) -> float:
        """Bytes a second in each direction that copies from and to pinned memory of the host reach;
        infinite for a CPU, whose memory it is."""
        peak = HOST_LINKS.get(self.architecture, HOST_LINK)
        return math.inf if self.kind == "cpu" else COPIED * peak

    @property
    def drawn(self) -> Fact | None:
        """Watts of the chip and its share of all else in its node or rack, where the system that
        joins it says them; else of the chip alone.  None: unknown."""
        node: Fact | None = None if self.system is None else self.system.power
        if node is None:
            return self.power
        count = self.system.per_node
        return replace(node, value=node.value / count, text=f"{node.text} / {count}")

    def find_peak(self, engine: str, precision: str) -> Peak | None:
        """The rate of `engine` in the compute family of `precision`, with its sources."""
        family = compute_family(precision)
        for peak in self.peaks:
            if peak.engine == engine and peak.precision == family:
                return peak
        return None

    def has_peak(self, engine: str, precision: str) -> bool:
        """Whether the chip has a rate for this engine and precision."""
        return self.find_peak(engine, precision) is not None

    def peak(self, engine: str, precision: str) -> float:
        """FLOP/s, dense. Raises `MissingPeakError` where the chip has no such rate."""
        peak = self.find_peak(engine, precision)
        if peak is None:
            raise MissingPeakError(_no_rate(self, engine, precision))
        return peak.rate.value

    def ridge(self, engine: str, precision: str) -> float:
        """FLOP per byte of memory traffic at which compute and memory take equally long."""
        return self.peak(engine, precision) / self.memory_bandwidth.value

    def link(self, name: str) -> Link | None:
        """The link called "intra" or "inter", None where the chip has none."""
        return next((link for link in self.links if link.name == name), None)

    def facts(self) -> Iterable[tuple[str, Fact]]:
        """Every fact with the name of its place, for reports and checks."""
        for peak in self.peaks:
            yield f"{peak.engine} {peak.precision}", peak.rate
            if peak.quoted is not None:
                yield f"{peak.engine} {peak.precision} quoted", peak.quoted
        for name in FACT_UNITS:
            fact = getattr(self, name)
            if fact is not None:
                yield name, fact
        for link in self.links:
            yield f"link {link.name} bandwidth", link.bandwidth
            if link.latency is not None:
                yield f"link {link.name} latency", link.latency
        for name, fact in self.measured.items():
            yield f"measured {name}", fact

    def room(self, kept_free: float = 0.0) -> float:
        """Bytes of the memory that tensors and their allocator may have.

        On a GPU the context of the process takes the rest, unless that is all: for a memory so
        small the guess says nothing.  kept_free: the share of the memory that stays free; the
        context is part of it.
        """
        capacity = self.memory_capacity.value
        context = self.context.value if self.kind == "gpu" else 0.0
        return capacity - max(context if context < capacity else 0.0, kept_free * capacity)

    def count_holding(self, needed: float, kept_free: float = 0.0) -> int:
        """How many of these chips hold `needed` bytes if they could be split evenly.

        kept_free: the share of each chip's memory that stays free, see `room`.
        """
        return max(1, math.ceil(needed / self.room(kept_free)))

    def facts_by_name(self) -> dict[str, Fact]:
        """The facts that times and sizes are computed from, by dotted names.

        "matrix.bf16", "memory_bandwidth", "link.intra.latency"; unknown ones are left out.
        """
        return {
            name.replace(" ", "."): fact
            for name, fact in self.facts()
            if not name.startswith("measured ") and not name.endswith(" quoted")
        }

    def with_facts(self, values: Mapping[str, float | Fact]) -> Chip:
        """The chip with other values [SI] of some facts, by their names in `facts_by_name`."""
        facts = self.facts_by_name()
        changed = {
            name: value
            if isinstance(value, Fact)
            else replace(
                facts[name],
                value=value,
                kind="derived",
                text=f"{value:g}",
                note=f"changed from {facts[name].text}",
            )
            for name, value in values.items()
        }
        peaks = tuple(
            replace(peak, rate=changed.get(f"{peak.engine}.{peak.precision}", peak.rate))
            for peak in self.peaks
        )
        links = tuple(
            replace(
                link,
                bandwidth=changed.get(f"link.{link.name}.bandwidth", link.bandwidth),
                latency=changed.get(f"link.{link.name}.latency", link.latency),
            )
            for link in self.links
        )
        single: dict[str, Any] = {n: fact for n, fact in changed.items() if n in FACT_UNITS}
        return replace(self, peaks=peaks, links=links, **single)

    def headline(self) -> str:
        """One line: the chip's name, its main matrix rate, bandwidth, capacity and ridge."""
        parts = [self.title]
        main = next((name for name in ("bf16", "fp16") if self.has_peak("matrix", name)), None)
        engine = "matrix" if main else "vector"
        family = main or "fp32"
        if self.has_peak(engine, family):
            parts.append(f"{units.format_flop_rate(self.peak(engine, family))} {family} dense")
        parts.append(units.format_bandwidth(self.memory_bandwidth.value))
        parts.append(units.format_capacity(self.memory_capacity.value))
        if self.has_peak(engine, family):
            parts.append(f"ridge {units.format_intensity(self.ridge(engine, family))}")
        return ", ".join(parts)


def _no_rate(chip: Chip, engine: str, precision: str) -> str:
    family = compute_family(precision)
    wanted = family if family == precision else f"{family} (asked as {precision})"
    rows = {name: [peak for peak in chip.peaks if peak.engine == name] for name in ENGINES}
    has = "; ".join(
        f"{name}: {', '.join(peak.precision for peak in peaks)}"
        for name, peaks in rows.items()
        if peaks
    )
    if engine not in ENGINES:
        return f"{chip.name}: engine {engine!r}: expected matrix or vector; it has: {has or 'none'}"
    names = [peak.precision for peak in rows[engine]]
    example = next((name for name in ("bf16", "fp16", "fp32") if name in names), "")
    dtype = f"choose another dtype, for example {example}, or " if example else ""
    return (
        f"{chip.name} has no ({engine}, {wanted}) rate; it has: {has or 'none'}. "
        f"To go on, {dtype}pass a chip TOML with a [[peak]] for it, and its source"
    )
