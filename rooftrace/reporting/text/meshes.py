"""Meshes beside each other, and how a step scales, in words and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rooftrace.costmodels.meshing import MeshAnswer, MeshRow, ScalingAnswer, mesh_words
from rooftrace.hardware.units import MISSING, format_capacity, format_time, plural
from rooftrace.reporting.view import model as view, units

_ROWS = 10

ROWS = (
    view.Column("mesh", units.WORDS, "Mesh", short="mesh"),
    view.Column("chips", units.COUNT, "Chips", short="chips"),
    view.Column("batch", units.COUNT, "Batch of a replica", short="batch"),
    view.Column("checkpoint", units.TEXT, "Checkpoint", short="checkpoint", drop=2),
    view.Column("seconds", units.SECOND, "Step", short="step"),
    view.Column("per_chip", units.RATE, "Items/s per chip", short="items/s/chip"),
    view.Column("mfu", units.SHARE, "MFU", drop=3),
    view.Column("exposed", units.SHARE, "Exposed communication", short="exposed"),
    view.Column("bubble", units.SHARE, "Bubble", short="bubble", drop=1),
    view.Column("peak", units.BYTE, "Memory of a chip", short="peak"),
    view.Column("used", units.SHARE, "Of the memory", short="of memory"),
    view.Column("limited_by", units.WORDS, "Limited by", short="limited by"),
)
SCALED = (
    view.Column("chips", units.COUNT, "Chips", short="chips"),
    view.Column("mesh", units.WORDS, "Mesh", short="mesh"),
    view.Column("seconds", units.SECOND, "Step, weak", short="weak step"),
    view.Column("per_chip", units.RATE, "Items/s per chip, weak", short="items/s/chip"),
    view.Column("weak", units.SHARE, "Efficiency, weak", short="weak"),
    view.Column("microbatches", units.COUNT, "Microbatches, strong", short="microbatches", drop=2),
    view.Column("strong_seconds", units.SECOND, "Step, strong", short="strong step"),
    view.Column("strong", units.SHARE, "Efficiency, strong", short="strong"),
    view.Column("exposed", units.SHARE, "Exposed communication", short="exposed", drop=1),
    view.Column("peak", units.BYTE, "Memory of a chip", short="peak"),
    view.Column("fits", units.WORDS, "Fits", short="fits"),
)


def mesh_view(result: MeshAnswer, output: view.Output) -> view.View:
    """The best mesh, the others that hold the limits, and those that do not."""
    question = f"{result.question[:1].upper()}{result.question[1:]}"
    sections = [
        view.Section(parts=[view.Note(result.title, "strong"), view.Note(question)], place=1),
        view.Section(title="Answer", parts=list(_answer(result)), place=2),
    ]
    for title, rows, place in (
        ("Within the limits", result.rows, 3),
        ("Outside of a limit", result.others, 4),
    ):
        if rows:
            shown = rows if output == "page" else rows[:_ROWS]
            parts: list[view.Part] = [view.Table(columns=ROWS, rows=_rows(shown), key=f"at{place}")]
            if len(shown) < len(rows):
                parts.append(view.Note(f"and {len(rows) - len(shown)} more", "faint"))
            sections.append(view.Section(title=title, parts=parts, place=place))
    sections.append(_grounds(result.rests, result.left_out, 5))
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
                f"each chip, which holds {format_capacity(nearest.capacity)}",
                bullet=1,
            )
        if result.needed is not None:
            text = f"by capacity alone at least {result.needed:,} chips hold it: --chips"
            yield view.Note(f"{text} {_next_power(result.needed):,}", bullet=1)
        return
    yield view.Note(f"{mesh_words(best.mesh)} on {best.chips:,} chips", "strong")
    again = "" if best.checkpoint == "none" else f", checkpoint {best.checkpoint}"
    yield view.Note(
        f"step {format_time(best.seconds)}{again}: {best.items_per_s_per_chip:,.4g} "
        f"{result.item}s/s of a chip, {best.items_per_s:,.4g} of all; limited by "
        f"{best.limited_by}",
        bullet=1,
    )
    free = 1 - best.peak / best.capacity
    yield view.Note(f"{format_capacity(best.peak)} of each chip: {free:.1%} left", bullet=1)
    if best.dollars is not None:
        yield view.Note(f"${best.dollars:,.4g} for a million {result.item}s", bullet=1)
    if len(result.rows) > 1:
        second = result.rows[1]
        less = 1 - second.items_per_s_per_chip / best.items_per_s_per_chip
        words = f"second best: {mesh_words(second.mesh)}, {less:.1%} slower"
        yield view.Note(words, bullet=1)


def _next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _rows(rows: Iterable[MeshRow]) -> list[dict[str, Any]]:
    return [
        {
            **row.to_dict(),
            "mesh": mesh_words(row.mesh),
            "per_chip": row.items_per_s_per_chip,
            "used": row.peak / row.capacity,
            "bubble": MISSING if row.bubble is None else row.bubble,
        }
        for row in rows
    ]


def scaling_view(result: ScalingAnswer, output: view.Output) -> view.View:
    """The step on each number of chips, with both efficiencies."""
    rows = [
        {
            **told,
            "weak": result.weak(row),
            "microbatches": round(result.microbatches(row)),
            "strong_seconds": result.strong_seconds(row),
            "strong": result.strong(row),
            "fits": "yes" if row.fits else "no",
        }
        for row, told in zip(result.rows, _rows(result.rows), strict=True)
    ]
    note = (
        "Weak: each replica keeps its batch. Strong: all do together what the most chips do in "
        "one step. Efficiency: work of a chip per second, over that on the fewest."
    )
    table: list[view.Part] = [view.Table(columns=SCALED, rows=rows, key="scaled"), view.Note(note)]
    title = f"{result.title}, on {result.system}"
    return view.View(
        (
            view.Section(parts=[view.Note(title, "strong")], place=1),
            view.Section(title="Scaling", parts=table, place=2),
            _grounds(result.rests, result.left_out, 3),
        ),
        title,
    )


def _grounds(rests: Sequence[str], left_out: Sequence[str], place: int) -> view.Section:
    parts = [view.Note(ground, "faint", bullet=1) for ground in rests]
    parts += [view.Note(f"left out: {reason}", "faint", bullet=1) for reason in left_out[:_ROWS]]
    return view.Section(title="What it rests on", parts=parts, place=place)
