"""Report sections on memory: the fit of each phase and its peak; and on exchange between chips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from rooftrace._plain import Plain, Positive
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.estimates.rows import Exchanged
from rooftrace.hardware.units import format_capacity, format_count
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.sections.results import ratio

if TYPE_CHECKING:
    from rooftrace.costmodels.memory import Memory
    from rooftrace.hardware import Chip
    from rooftrace.reporting.sections.results import Results

SHOWN = 10  # modules, and kinds of tensors, at a peak


SHORT = {"optimizer temporaries": "opt. temp"}
"""Heads on a screen."""


def fit_cell(need: Memory, chip: Chip, yes: str = "yes") -> view.Cell:
    """ "yes", or "no: 98 chips", marked as bad: whether a chip holds it, else how many would."""
    fits = need.fits(chip)
    return view.Cell(yes) if fits else view.Cell(f"no: {need.chips_needed(chip):,} chips", "bad")


def fit(results: Results) -> view.Section:
    """The memory alive at the peak of each phase, its fit on each chip, and the largest batch."""
    if not results.memory:
        return view.Section()
    parts: list[view.Part] = [
        _on_screen(results),
        *_of_stages(results),
        *_allocated(results),
        *_on_page(results),
        view.Note(
            f"Alive at the peak of the step as {results.main} runs it. Saved: activations that "
            "forward makes and backward reads. Optimizer temporaries: what an optimizer makes and "
            "drops within its step. Temporaries: all else, inputs included. A chip fits what its "
            "memory holds beside the context of a GPU's process. The number of chips is capacity "
            "alone: the peak over what one holds, without what parallelism adds.",
            on="page",
        ),
    ]
    if results.largest:
        names = [chip.name for chip in results.chips]
        columns = [view.Column("phase", units.TEXT, "Largest batch")]
        columns += [view.Column(f"on {name}", units.WORDS, f"on one {name}") for name in names]
        rows = [
            {"phase": phase, **{f"on {name}": words.batch_words(batches[name]) for name in names}}
            for phase, batches in results.largest.items()
        ]
        note = "Found by tracing: this batch fits, and one more does not."
        batches = [f"{row['phase']} {row[f'on {names[0]}']}" for row in rows]
        parts.insert(1, view.Note(f"largest batch: {', '.join(batches)}", on="screen"))
        parts += [view.Table(columns=columns, rows=rows, on="page"), view.Note(note, on="page")]
    return view.Section(title="Does it fit", place=6, parts=[*parts, view.Image("memory.png")])


ALLOCATED = (
    view.Column("phase", units.TEXT, "Phase"),
    view.Column("tensors", units.CAPACITY, "Tensors"),
    view.Column("workspaces", units.TEXT, "Workspaces"),
    view.Column("allocated", units.CAPACITY, "Allocated"),
    view.Column("reserved", units.CAPACITY, "Reserved", mark="strong"),
    view.Column("fragmentation", units.SHARE, "Fragmentation"),
    view.Column("reserved_expandable", units.CAPACITY, "Reserved, expandable segments"),
    view.Column("context", units.CAPACITY, "Context"),
)


def _allocated(results: Results) -> list[view.Part]:
    """The memory of each phase by PyTorch's allocator on the first chip; nothing for a CPU."""
    chip = results.chips[0]
    handed_out = {
        phase: held
        for phase in results.memory
        if (held := results.reserved(phase, chip)) is not None
    }
    if not handed_out:
        return []
    rows = [
        {
            **held.to_dict(),
            "phase": phase,
            "fragmentation": held.fragmentation,
            "workspaces": ", ".join(
                f"{kind} {format_capacity(size)}" for kind, size in held.workspaces.items()
            )
            or "none",
        }
        for phase, held in handed_out.items()
    ]
    sizes = (
        f"{phase} {format_capacity(held.allocated)} allocated, {format_capacity(held.reserved)} "
        "reserved"
        for phase, held in handed_out.items()
    )
    context = format_capacity(next(iter(handed_out.values())).context)
    unsure = [phase for phase, held in handed_out.items() if held.allocated_least < held.allocated]
    note = (
        f"On {chip.name}, by the rules of PyTorch's caching allocator, run over some steps: sizes "
        "in blocks, workspaces of libraries, segments that it keeps. Fragmentation is the share of "
        "what is reserved that no tensor has at the fullest moment. The context is of a process "
        "and outside of the allocator: a guess. Collective libraries take more, not counted."
    )
    if unsure:
        note += (
            f" Convolutions may take less than that workspace ({', '.join(unsure)}): which "
            "algorithm runs is the library's choice."
        )
    return [
        view.Note(f"allocator: {'; '.join(sizes)}; {context} of context beside", on="screen"),
        view.Table(columns=ALLOCATED, rows=rows, on="page", leading=1),
        view.Note(note, on="page"),
    ]


def _of_stages(results: Results) -> list[view.Part]:
    """A note on a pipeline, whose peaks are those of single microbatches."""
    if all("stages" not in graph.workload for graph in results.graphs.values()):
        return []
    text = "stages hold one microbatch here; peaks with all that are alive stand with the pipeline"
    return [view.Note(text)]


def _on_page(results: Results) -> tuple[view.Table, view.Table]:
    """Peaks with their fit on each chip; peaks by kind of memory."""
    kinds = list(words.alive(next(iter(results.memory.values()))))
    columns = [
        view.Column("phase", units.TEXT, "Phase"),
        view.Column("peak", units.CAPACITY, "Peak", mark="strong"),
    ]
    fits = list(columns)
    columns += [view.Column(kind, units.CAPACITY, kind[0].upper() + kind[1:]) for kind in kinds]
    for chip in results.chips:
        size = format_capacity(chip.memory_capacity.value)
        fits.append(view.Column(f"on {chip.name}", units.WORDS, f"{chip.name} ({size})"))
    rows = [
        {
            "phase": phase,
            **words.alive(need),
            "peak": need.peak,
            **{f"on {c.name}": fit_cell(need, c, "fits") for c in results.chips},
        }
        for phase, need in results.memory.items()
    ]
    return (
        view.Table(columns=fits, rows=rows, on="page", leading=2),
        view.Table(columns=columns, rows=rows, on="page", leading=2),
    )


def _on_screen(results: Results) -> view.Table:
    """The first chip alone; kinds of which no phase holds any have no column."""
    chip = results.chips[0]
    capacity = chip.memory_capacity.value
    sizes = {phase: words.alive(need) for phase, need in results.memory.items()}
    listed = max(sizes.values(), key=len)  # no phase, or all, may gather weights
    kinds = [kind for kind in listed if any(size.get(kind) for size in sizes.values())]
    columns = [
        view.Column("phase", units.TEXT, "memory"),
        *(view.Column(kind, units.CAPACITY, SHORT.get(kind, kind), drop=2) for kind in kinds),
        view.Column("peak", units.CAPACITY, "= peak"),
        view.Column("share", units.SHARE, f"of {format_capacity(capacity)}"),
        view.Column("chips", units.COUNT, "chips", drop=1),
    ]
    rows = []
    for phase, need in results.memory.items():
        row = {
            "phase": f"  {phase}",
            **sizes[phase],
            "peak": need.peak,
            "share": need.peak / capacity,
            "chips": need.chips_needed(chip),
        }
        mark = "" if need.fits(chip) else "bad"
        rows.append({key: view.Cell(value, mark) for key, value in row.items()})
    return view.Table(columns=columns, rows=rows, on="screen")


def memory_at_peak(need: Memory) -> view.Section:
    """The peak of a phase by module, and its largest tensors."""
    if not need.tensors:
        return view.Section()
    groups, held = need.by_block(), need.tensors
    size = view.Column("bytes", units.CAPACITY, "Bytes")
    share = view.Column("share", units.SHARE, "Share of the peak")
    count = view.Column("tensors", units.COUNT, "Tensors")
    module = view.Column("module", units.MODULE, "Module")
    modules = [
        {
            **group,
            "roles": ", ".join(f"{r} {format_capacity(s)}" for r, s in group["roles"].items()),
            "share": ratio(group["bytes"], need.peak),
        }
        for group in groups[:SHOWN]
    ]
    tensors: list[dict[str, Any]] = [
        {
            "made_by": words.held_words(tensor),
            "role": "saved for backward" if tensor.saved else tensor.role,
            "module": tensor.module,
            "each": f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]" if tensor.dtype else "",
            "tensors": tensor.count,
            "bytes": tensor.bytes,
            "share": ratio(tensor.bytes, need.peak),
        }
        for tensor in held[:SHOWN]
    ]
    of_which = view.Column("roles", units.TEXT, "Of which")
    each = (
        view.Column("made_by", units.CODE, "Made by"),
        view.Column("role", units.TEXT, "Role"),
        module,
        view.Column("each", units.TEXT, "Each"),
    )
    return view.Section(
        title="Memory at the peak",
        parts=[
            view.Table(columns=(module, of_which, count, size, share), rows=modules),
            *_rest("module", [group["bytes"] for group in groups]),
            view.Table(columns=(*each, count, size, share), rows=tensors),
            *_rest("kind", [tensor.bytes for tensor in held]),
        ],
    )


def _rest(noun: str, sizes: Sequence[int]) -> list[view.Part]:
    """A note on the rows that the table before it leaves out."""
    rest = sizes[SHOWN:]
    if not rest:
        return []
    more = words.plural(len(rest), f"more {noun}")
    return [view.Note(f"{more}: {format_capacity(sum(rest))}.")]


# -- network ---------------------------------------------------------------------------------------


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
    """Rates of all processes of a step together, and the time of their exchanges."""

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
    """Rates of all processes together, and the share of the step in exchanges."""
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
    """Rates of the processes of a mesh together, and the exchanges along each axis."""
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
    changes = {name: v for e in estimates for name, v in e.execution.disturbances.asked.items()}
    if changes:
        text = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in changes.items())
        parts.append(view.Note(f"what if: {text}"))
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
