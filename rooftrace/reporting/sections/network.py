"""Many chips: what a step exchanges with other processes, and what all of them reach together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from rooftrace._plain import Plain, Positive
from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.estimating.communication import Exchanged
from rooftrace.hardware.units import format_count
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.reporting.sections.results import Results


def meshed(results: Results) -> list[Estimate]:
    """The estimates of steps of several processes: main execution, every chip."""
    return [
        estimate
        for phase in results.phases
        for chip in results.chips
        for estimate in [results.estimate(phase, None, chip.name)]
        if estimate.processes > 1
    ]


def is_whole(estimate: Estimate) -> bool:
    """Whether a step is more than one stage of a pipeline."""
    return "stages" not in estimate.graph.workload


def mesh_words(estimate: Estimate) -> str:
    """ "dp=32, tp=8: 256 x h100-sxm"."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in estimate.graph.mesh.items())
    chips = f"{estimate.processes:,} x {estimate.chip.name}"
    return f"{mesh}: {chips}" if mesh else chips


class Reached(TypedDict):
    """What all processes of a step reach together, and how much of it is exchange."""

    phase: str
    mesh: str  # sizes of the axes, and the chips
    processes: Positive  # that run the step together, a chip each
    replicas: Positive | None  # batches that they work on at a time
    system: str | None  # how chips are joined; null: by the chip's own link
    t_est: float
    items_per_s: float | None  # of all processes
    items_per_s_per_chip: float | None
    mfu: float | None
    t_communication: float  # s of all exchanges, hidden ones too
    t_exposed: float  # s for which computing waits
    exposed_share: float  # of t_est
    limited_by: str  # the largest share of the step; of a network, the axis


def reached(estimate: Estimate) -> Reached:
    """What all processes reach together, and how much of the step is exchange."""
    times = estimate.times
    total = sum(row.seconds for row in estimate.communication)
    per_chip = estimate.items_per_s_per_chip
    return {
        "phase": estimate.step,
        "mesh": mesh_words(estimate),
        "processes": estimate.processes,
        "replicas": estimate.replicas,
        "system": estimate.chip.system.name if estimate.chip.system else None,
        "t_est": estimate.t_est,
        "items_per_s": None if per_chip is None else per_chip * estimate.processes,
        "items_per_s_per_chip": per_chip,
        "mfu": estimate.mfu,
        "t_communication": total,
        "t_exposed": times.t_exposed,
        "exposed_share": times.t_exposed / estimate.t_est if estimate.t_est else 0.0,
        "limited_by": limit_words(estimate),
    }


def limit_words(estimate: Estimate) -> str:
    """ "network (tp)": the largest share of the step, and of a network the axis."""
    regime = estimate.times.regime
    axis = f" ({estimate.exposed_axis})" if regime == "network" and estimate.exposed_axis else ""
    return f"{words.LIMITS[regime]}{axis}"


@dataclass(frozen=True)
class PhaseExchange(Plain):
    """Equal exchanges of a phase on a chip, added up."""

    phase: str
    chip: str
    exchange: Exchanged

    KEYS = "phase chip **exchange"


def exchanged(results: Results) -> Iterator[PhaseExchange]:
    """The exchanges of every phase, by axis and kind."""
    for estimate in meshed(results):
        for row in estimate.communication:
            yield PhaseExchange(estimate.step, estimate.chip.name, row)


REACHED = (
    view.Column("phase", units.TEXT, "Phase", short="many chips"),
    view.Column("mesh", units.WORDS, "Mesh", short="mesh"),
    view.Column("t_est", units.SECOND, "Step", short="step", drop=2),
    view.Column("items_per_s_per_chip", units.RATE, "Items/s per chip", short="items/s/chip"),
    view.Column("items_per_s", units.RATE, "Items/s, all", short="all", drop=1),
    view.Column("mfu", units.SHARE, "MFU", drop=3),
    view.Column("t_exposed", units.SECOND, "Exposed communication", short="exposed"),
    view.Column("exposed_share", units.SHARE, "Share", short="share"),
    view.Column("limited_by", units.WORDS, "Limited by", short="limited by"),
)
EXCHANGED = (
    view.Column("phase", units.TEXT, "Phase", short="communication"),
    view.Column("axis", units.TEXT, "Axis", short="axis"),
    view.Column("kind", units.TEXT, "Collective", short="collective"),
    view.Column("ranks", units.COUNT, "Ranks", short="ranks"),
    view.Column("level", units.TEXT, "Over", short="over", drop=3),
    view.Column("calls", units.COUNT, "Calls", short="calls"),
    view.Column("bytes", units.BYTE, "Bytes", short="bytes"),
    view.Column("seconds", units.SECOND, "Time", short="time"),
    view.Column("exposed", units.SECOND, "Exposed", short="exposed"),
)


def network(results: Results) -> view.Section:
    """What the processes of a mesh reach together, and what each exchanges along each axis."""
    estimates = meshed(results)
    if not estimates:
        return view.Section()
    rows = [row.to_dict() for row in exchanged(results)]
    parts: list[view.Part] = [
        view.Table(
            columns=REACHED, rows=[reached(e) for e in estimates if is_whole(e)], key="reached"
        ),
        view.Table(columns=EXCHANGED, rows=rows, key="exchanged"),
    ]
    beyond = dict.fromkeys(
        f"{row['axis']} {row['kind']} ({row['beyond']})" for row in rows if row["beyond"]
    )
    if beyond:
        text = f"outside of measurements: {', '.join(beyond)}"
        parts.append(view.Note(text))
    if any(estimate.chip.system is None for estimate in estimates):
        text = "no system was named: collectives take the link of the chip, not fitted (--system)"
        parts.append(view.Note(text))
    asked = {name: v for e in estimates for name, v in e.execution.disturbances.asked.items()}
    if asked:
        told = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in asked.items())
        parts.append(view.Note(f"what if: {told}"))
    parts.append(
        view.Note(
            "Bytes are whole buffers, as nccl-tests counts them, of one process. Exposed: seconds "
            "for which computing waits; the rest runs beside it, so that shares of kernels may "
            "add up to more than the step. Items/s per chip count the "
            f"batches of all replicas ({_replicas(estimates)}).",
            on="page",
        )
    )
    return view.Section(title="Many chips", parts=parts)


def _replicas(estimates: list[Estimate]) -> str:
    counts = dict.fromkeys(
        "not known: name axes of data dp, of models tp, cp, ep or pp"
        if estimate.replicas is None
        else format_count(estimate.replicas)
        for estimate in estimates
    )
    return ", ".join(counts)
