"""Views of elasticities, effects, device meshes, and the scaling of a step over chips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rooftrace.hardware.units import (
    format_bandwidth,
    format_capacity,
    format_count,
    format_flop_rate,
    format_flops,
    format_time,
    format_traffic,
    plural,
)
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.answers import question_section
from rooftrace.reporting.views.folding import first_rows, grounds
from rooftrace.studies.sensitivity import Elasticities, Elasticity, Interaction, MainEffect
from rooftrace.studies.solving import MeshAnswer, MeshRow, ScalingAnswer, TrainingRun, mesh_words
from rooftrace.studies.sweeps import grids

ON_SCREEN = 20
"""Facts and knobs on a screen; a page has all that change anything."""
_PAIRS = 10
_LONGEST = 11
"""Letters of a fraction that is shown."""
CLIFF = 0.05
"""One more of a size that costs at least so much is a cliff."""


def _signed(number: float) -> str:
    return "0" if number == 0 else f"{number:+.3f}"


def _change(ratio: float) -> str:
    return "0" if ratio == 1 else f"{ratio - 1:+.1%}"


_ELASTICITY = units.Unit("", "number", _signed)
_CHANGE = units.Unit("", "number", _change)
_WRITTEN: dict[str, Callable[[float], str]] = {
    "FLOP/s": format_flop_rate,
    "byte/s": format_bandwidth,
    "byte": format_capacity,
    "second": format_time,
    "hertz": lambda number: f"{number / 1e9:g} GHz",
    "count": lambda number: f"{number:,.0f}",
}


def written(row: Elasticity) -> str:
    """The value of a number with its unit."""
    write = _WRITTEN.get(row.unit)
    return f"{row.value:g}" if write is None else write(row.value)


# -- elasticities ----------------------------------------------------------------------------------


def elasticities_view(result: Elasticities, output: view.Output) -> view.View:
    """Sizes, then facts and knobs by their effect, then numbers that change nothing."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in result.sizes.items())
    knobs = result.knobs or "peaks of the datasheet"
    head = f"{result.title}, {result.phase}, {sizes}; {result.chip}, {result.execution}; {knobs}"
    now = (
        f"expected {format_time(result.t_est)}, bound {format_time(result.t_bound)}, "
        f"{format_flops(result.flops)}, {format_traffic(result.bytes)} through HBM, "
        f"{format_capacity(result.peak_memory)} in memory"
    )
    meaning = "an elasticity of 0.5: 1 % more of it, 0.5 % more of that"
    numbers = [row for row in result.rows if row.kind != "size" and not row.is_zero]
    more = "more with less effect, in --format csv"
    parts = list(first_rows(_NUMBERS, numbers, ON_SCREEN, output, more, padded=False))
    sections = [
        view.Section(
            parts=[view.Note(head, "strong"), view.Note(now), view.Note(meaning, "faint")], place=1
        ),
        view.Section(title="Sizes", parts=list(_sizes(result)), place=2),
        view.Section(title="Facts of the chip and knobs", parts=parts, place=3),
        view.Section(title="Exactly 0", parts=list(_zeros(result)), place=4),
    ]
    title = f"Sensitivity: {result.title}, {result.phase}"
    return view.View(tuple(s for s in sections if s.parts), title)


def _step(change: str) -> Callable[[Elasticity], Any]:
    """Read the time after a change over the time before it."""

    def read(row: Elasticity) -> Any:
        step = row.step(change)
        return view.BLANK if step is None else step.t_est

    return read


def _slope(name: str) -> Callable[[Elasticity], Any]:
    """Read an elasticity of a total, as a fraction where that is short."""

    def read(row: Elasticity) -> Any:
        slope = getattr(row, name)
        if slope is None:
            return None
        exact = str(slope.exact) if slope.exact is not None and slope.exact.denominator > 1 else ""
        note = f" = {exact}" if 0 < len(exact) <= _LONGEST else ""
        if slope.finite:
            note = " (step)"
        return view.Cell(slope.value, after=note)

    return read


_SIZES = (
    view.Column("name", units.TEXT, "size"),
    view.Column("value", units.COUNT, "now"),
    view.Column("flops", _ELASTICITY, "FLOP", of=_slope("flops")),
    view.Column("bytes", _ELASTICITY, "HBM", of=_slope("bytes")),
    view.Column("peak_memory", _ELASTICITY, "memory", of=_slope("peak_memory"), drop=2),
    view.Column("t_est", _ELASTICITY, "time"),
    view.Column("t_bound", _ELASTICITY, "bound", drop=2),
    view.Column("more", _CHANGE, "+1", of=_step("+1")),
    view.Column("tenth", _CHANGE, "x1.1", of=_step("x1.1"), drop=1),
    view.Column("double", _CHANGE, "x2", of=_step("x2")),
    view.Column("half", _CHANGE, "x0.5", of=_step("x0.5")),
)
_NUMBERS = (
    view.Column("name", units.TEXT, "fact or knob"),
    view.Column("value", units.WORDS, "now", of=written),
    view.Column("t_est", _ELASTICITY, "time"),
    view.Column("t_bound", _ELASTICITY, "bound"),
    view.Column("bytes", _ELASTICITY, "HBM", of=_slope("bytes"), drop=2),
    view.Column("tenth", _CHANGE, "x1.1", of=_step("x1.1"), drop=1),
    view.Column("double", _CHANGE, "x2", of=_step("x2")),
    view.Column("half", _CHANGE, "x0.5", of=_step("x0.5")),
)


def _sizes(result: Elasticities) -> Iterator[view.Part]:
    rows = list(result.kind("size"))
    if not rows:
        return
    yield view.Table(columns=_SIZES, rows=rows, padded=False)
    for row in rows:
        if row.cliff >= CLIFF:
            yield view.Note(
                f"cliff: {row.name} {row.value:,.0f} -> {row.value + 1:,.0f} takes "
                f"{row.cliff:.1%} longer",
                "warn",
                bullet=1,
            )
        functions = sorted(
            {f for s in (row.flops, row.bytes, row.peak_memory) if s for f in s.functions}
        )
        if functions:
            yield view.Note(
                f"{row.name}: not rational, for the formula has {', '.join(functions)}; "
                "its derivative is analytic",
                "faint",
                bullet=1,
            )
        for step in row.steps:
            if step.note:
                yield view.Note(f"{row.name} {step.change}: {step.note}", "faint", bullet=1)


def _zeros(result: Elasticities) -> Iterator[view.Note]:
    """Numbers that change nothing, by the reason; shares of a class of kernels by the class."""
    by_note: dict[str, dict[str, None]] = {}
    for row in result.rows:
        if row.kind == "size" or not row.is_zero:
            continue
        share = row.name.removeprefix("knobs.share.")
        name = row.name if share == row.name else f"share of {share.rpartition('.')[0]}"
        if row.name.endswith(".spread"):
            name = "knobs.share.*.spread"
        by_note.setdefault(row.note, {})[name] = None
    for note, names in by_note.items():
        yield view.Note(f"{note}: {', '.join(names)}", "faint", bullet=1)


# -- grids -----------------------------------------------------------------------------------------


def grid_view(result: grids.GridEffects, output: view.Output) -> view.View:
    """Main effects, then interactions, by their share of the variance."""
    cells = result.columns[result.response]
    factors = " x ".join(f"{name} ({len(labels)})" for name, labels in result.levels.items())
    head = (
        f"{result.title}, {result.phase}; {result.chip}, {result.execution}: "
        f"{plural(len(result), 'point')}, {factors}"
    )
    least, most = (result.written(float(end)) for end in (cells.min(), cells.max()))
    span = f"{result.response}: {least} to {most}"
    kind = "effects in factors (of the logarithm)" if result.log else "effects in sums"
    pairs = [pair for pair in result.effects.interactions if pair.share > 0]
    sections = [
        view.Section(parts=[view.Note(head, "strong"), view.Note(f"{span}; {kind}")], place=1),
        view.Section(
            title="Main effects",
            parts=[
                view.Table(
                    columns=_mains(result.written_mean), rows=result.effects.main, padded=False
                )
            ],
            place=2,
        ),
        view.Section(title="Interactions", parts=_pairs(result, pairs), place=3),
    ]
    title = f"Effects: {result.title}, {result.phase}"
    return view.View(tuple(s for s in sections if s.parts), title)


def _mains(write: Callable[[float], str]) -> Sequence[view.Column]:
    def end(which: str) -> Callable[[MainEffect], str]:
        def read(effect: MainEffect) -> str:
            level, mean = getattr(effect, which)
            return f"{level}: {write(mean)}"

        return read

    return (
        view.Column("factor", units.TEXT, "factor", folded=True),
        view.Column("share", units.SHARE, "share of variance", short="share"),
        view.Column("spread", units.SHARE, "spread of medians", short="spread", drop=1),
        view.Column("low", units.TEXT, "lowest mean", of=end("low")),
        view.Column("high", units.TEXT, "highest mean", of=end("high")),
    )


_PAIR = (
    view.Column(
        "factors", units.TEXT, "factors", of=lambda pair: " x ".join(pair.factors), folded=True
    ),
    view.Column("share", units.SHARE, "share of variance", short="share"),
)


def _pairs(result: grids.GridEffects, pairs: Sequence[Interaction]) -> list[view.Part]:
    if len(result.levels) < 2:
        return []
    parts: list[view.Part] = []
    if pairs:
        parts.append(view.Table(columns=_PAIR, rows=pairs[:_PAIRS], padded=False))
    else:
        parts.append(view.Note("none"))
    if len(result.levels) > 2:
        left = units.SHARE.written(result.effects.share_left, page=True)
        parts.append(view.Note(f"three factors and more: {left}", "faint"))
    return parts


# -- meshes ----------------------------------------------------------------------------------------

_ROWS = 10

_MESH = view.Column("mesh", units.WORDS, "Mesh", short="mesh", of=lambda row: mesh_words(row.mesh))
ROWS = (
    _MESH,
    view.Column("chips", units.COUNT, "Chips", short="chips"),
    view.Column("global_batch", units.COUNT, "Batch of all", short="global batch"),
    view.Column("batch", units.COUNT, "Batch of a replica", short="batch"),
    view.Column("microbatches", units.COUNT, "Microbatches", short="microbatches", drop=2),
    view.Column("checkpoint", units.TEXT, "Checkpoint", short="checkpoint", drop=2),
    view.Column("seconds", units.SECOND, "Step", short="step"),
    view.Column("items_per_s_per_chip", units.RATE, "Items/s per chip", short="items/s/chip"),
    view.Column("mfu", units.SHARE, "MFU", drop=3),
    view.Column("exposed", units.SHARE, "Exposed communication", short="exposed"),
    view.Column("bubble", units.SHARE, "Bubble", short="bubble", drop=1),
    view.Column("peak", units.BYTE, "Memory of a chip", short="peak"),
    view.Column(
        "used", units.SHARE, "Of the memory", short="of memory", of=lambda r: r.peak / r.capacity
    ),
    view.Column("limited_by", units.LIMITS, "Limited by", short="limited by"),
)


def mesh_view(result: MeshAnswer, output: view.Output) -> view.View:
    """The best mesh, the others that hold the limits, and those that do not."""
    sections = [
        question_section(result.title, result.question),
        view.Section(title="Answer", parts=list(_answer(result)), place=2),
    ]
    for title, rows, place in (
        ("Within the limits", result.rows, 3),
        ("Outside of a limit", result.others, 4),
    ):
        if rows:
            head = view.Note(f"{title.lower()}:", on="screen")
            parts = [head, *first_rows(ROWS, rows, _ROWS, output)]
            sections.append(view.Section(title=title, parts=parts, place=place))
    sections.append(grounds(result.rests, result.left_out[:_ROWS], 5))
    return view.View(tuple(sections), result.title)


def _answer(result: MeshAnswer) -> Iterator[view.Note]:
    best = result.best
    count = len(result.rows) + len(result.others)
    if best is None:
        yield view.Note(f"no mesh does: {plural(count, 'candidate')} traced", "bad")
        nearest = result.others[0]
        if not nearest.fits:
            yield view.Note(
                f"nearest: {mesh_words(nearest.mesh)} takes {format_capacity(nearest.peak)} of "
                f"each chip, {format_capacity(nearest.fixed)} with no activations; it holds "
                f"{format_capacity(nearest.capacity)}",
                bullet=1,
            )
        if result.needed is not None:
            text = f"by capacity alone at least {result.needed:,} chips hold it: --chips"
            power = 1 << (result.needed - 1).bit_length()
            yield view.Note(f"{text} {power:,}", bullet=1)
        return
    yield view.Note(f"{mesh_words(best.mesh)} on {best.chips:,} chips", "strong")
    again = "" if best.checkpoint == "none" else f", checkpoint {best.checkpoint}"
    yield view.Note(
        f"step {format_time(best.seconds)}{again}: {format_count(best.items_per_s_per_chip)} "
        f"{result.item}s/s of a chip, {format_count(best.items_per_s)} of all; limited by "
        f"{words.limit(best.limited_by)}",
        bullet=1,
    )
    free = 1 - best.peak / best.capacity
    yield view.Note(f"{format_capacity(best.peak)} of each chip: {free:.1%} left", bullet=1)
    if best.dollars is not None:
        yield view.Note(f"${best.dollars:,.4g} for a million {result.item}s", bullet=1)
    if len(result.rows) > 1:
        second = result.rows[1]
        less = 1 - second.items_per_s_per_chip / best.items_per_s_per_chip
        yield view.Note(f"second best: {mesh_words(second.mesh)}, {less:.1%} slower", bullet=1)
    for edge in result.edges:
        yield view.Note(f"at the edge of what was tried: {edge}", bullet=1)


def training_view(result: TrainingRun, output: view.Output) -> view.View:
    """Days, dollars and energy of a training, its interruptions, and the facts of both."""
    row, item = result.row, result.row.item
    question = f"a training on {format_count(result.tokens)} {item}s"
    where = f"{mesh_words(row.mesh)} on {plural(row.chips, 'chip')} of {result.system}"
    again = "" if row.checkpoint == "none" else f", checkpoint {row.checkpoint}"
    notes = [
        view.Note(f"{result.days:,.4g} days, {where}", "strong"),
        view.Note(f"{format_count(result.chip_hours)} chip-hours", bullet=1),
        view.Note(
            f"{result.undisturbed / 86400:,.4g} days without interruptions: step "
            f"{format_time(row.seconds)}, global batch {row.global_batch:,}, batch {row.batch:,}"
            f"{again}, {format_count(row.items_per_s_per_chip)} {item}s/s of a chip",
            bullet=1,
        ),
        view.Note(
            f"goodput {result.goodput:.1%}: an interruption each {_long(result.mtbf)}, "
            f"{result.interruptions:,.3g} in all; a checkpoint of {format_capacity(row.saved)} in "
            f"{_long(result.save)} each {_long(result.interval)}; {_long(result.restart.value)} to "
            "restart",
            bullet=1,
        ),
    ]
    if result.dollars is not None and result.price is not None:
        notes.append(view.Note(f"${result.dollars:,.4g} at {result.price.text}", bullet=1))
    if result.joules is not None and result.power is not None:
        energy = (
            f"at most {result.joules / 3.6e9:,.4g} MWh at {result.power.value:,.4g} W of a chip"
        )
        notes.append(view.Note(energy, bullet=1))
    sections = (
        question_section(result.title, question),
        view.Section(title="Answer", parts=notes, place=2),
        grounds(result.rests, (), 3),
    )
    return view.View(sections, result.title)


def _long(seconds: float) -> str:
    """Seconds in hours, minutes or less."""
    for word, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.3g} {word}"
    return str(format_time(seconds))


def _scaled(result: ScalingAnswer) -> tuple[view.Column, ...]:
    """The columns of rows of `result`."""

    def microbatches(row: MeshRow) -> int:
        return round(result.microbatches(row))

    def fits(row: MeshRow) -> str:
        return "yes" if row.fits else "no"

    strong = result.strong_seconds
    return (
        view.Column("chips", units.COUNT, "Chips", short="chips"),
        _MESH,
        view.Column("seconds", units.SECOND, "Step, weak", short="weak step"),
        view.Column(
            "items_per_s_per_chip", units.RATE, "Items/s per chip, weak", short="items/s/chip"
        ),
        view.Column("weak", units.SHARE, "Efficiency, weak", short="weak", of=result.weak),
        view.Column(
            "microbatches", units.COUNT, "Microbatches, strong", short="microbatches", drop=2,
            of=microbatches,
        ),
        view.Column("strong_seconds", units.SECOND, "Step, strong", short="strong step", of=strong),
        view.Column("strong", units.SHARE, "Efficiency, strong", short="strong", of=result.strong),
        view.Column("exposed", units.SHARE, "Exposed communication", short="exposed", drop=1),
        view.Column("peak", units.BYTE, "Memory of a chip", short="peak"),
        view.Column("fits", units.WORDS, "Fits", short="fits", of=fits),
    )  # fmt: skip


def scaling_view(result: ScalingAnswer, output: view.Output) -> view.View:
    """The step on each number of chips, with both efficiencies."""
    note = (
        "Weak: each replica keeps its batch. Strong: all do together what the most chips do in "
        "one step. Efficiency: work of a chip per second, over that on the fewest."
    )
    table = view.Table(columns=_scaled(result), rows=result.rows)
    title = f"{result.title}, on {result.system}"
    return view.View(
        (
            view.Section(parts=[view.Note(title, "strong")], place=1),
            view.Section(title="Scaling", parts=[table, view.Note(note)], place=2),
            grounds(result.rests, result.left_out[:_ROWS], 3),
        ),
        title,
    )
