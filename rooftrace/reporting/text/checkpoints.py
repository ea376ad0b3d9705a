"""Two checkpoints beside each other in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import MISSING, format_share, listed, plural
from rooftrace.reporting.text.changed import cut, labelled, left_out
from rooftrace.reporting.text.inventories import VALUE, change_words, parameter_parts
from rooftrace.reporting.view import model as view, units
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.tracer.checkpoints import CheckpointDiff, ConfigDiff, TensorDiff, TensorLook

SHOWN = 15
"""Rows of each table on a screen."""

_NAME = view.Column("name", units.MODULE, "tensor", folded=True)
_COSINE = units.Unit("", "number", lambda c: f"{c:.6f}")
_DRIFT = (
    view.Column("relative", units.full(units.SHARE), "of norm before", of=lambda t: _relative(t)),
    view.Column(
        "difference", VALUE, "difference", of=lambda t: t.drift and t.drift.norm_difference
    ),
    view.Column("cosine", _COSINE, "cosine", of=lambda t: t.drift and t.drift.cosine),
    view.Column("largest", VALUE, "largest", of=lambda t: t.drift and t.drift.largest),
)


def _sides(said: Callable[[TensorLook | None], str]) -> tuple[view.Column, ...]:
    """What is said of a tensor on either side."""
    return (
        view.Column("before", units.TEXT, "before", folded=True, of=lambda t: said(t.before)),
        view.Column("after", units.TEXT, "after", folded=True, of=lambda t: said(t.after)),
    )


def _relative(tensor: TensorDiff) -> float | str | None:
    if tensor.drift is None:
        return None
    return "from 0" if tensor.drift.relative is None else tensor.drift.relative


def look(side: TensorLook | None) -> str:
    """The dtype and shape of a tensor: "bf16[8, 4]"."""
    return MISSING if side is None else f"{side.dtype}{list(side.shape)}"


def _special(side: TensorLook | None) -> str:
    return MISSING if side is None else f"{side.nans:,} NaN, {side.infs:,} infinite"


_LOOKS = _sides(look)


def checkpoints_view(result: CheckpointDiff, output: view.Output) -> view.View:
    """What changed: in sum, in values, in names, shapes and dtypes, and in the config."""
    known_by = view.Column("by", units.TEXT, "known by")
    share = _DRIFT[0]
    drifted = sorted(result.of("drifted"), key=lambda tensor: tensor.moved, reverse=True)
    changed = (*result.of("shape"), *result.of("dtype"))
    sections = [
        view.Section(parts=list(_head(result)), place=1),
        _section("Drifted", drifted, (_NAME, *_DRIFT), 2),
        _section("Changed in dtype or shape", changed, (_NAME, *_LOOKS, share), 3),
        _section("Renamed", _renamed(result), (*_LOOKS, known_by, share), 4),
        _section("Added", _folded(result.of("added")), (_NAME, _LOOKS[1]), 5),
        _section("Removed", _folded(result.of("removed")), (_NAME, _LOOKS[0]), 6),
        _section("Frozen", _folded(result.of("frozen")), (_NAME, _LOOKS[1]), 7),
        _section("Not finite", result.not_finite, (_NAME, *_sides(_special)), 8),
        *_config(result.config),
    ]
    title = f"Checkpoints {result.names[0]} and {result.names[1]}"
    return view.View(tuple(section for section in sections if section.parts), title)


def _head(result: CheckpointDiff) -> Iterator[view.Note]:
    yield view.Note(f"{result.names[0]} -> {result.names[1]}", "strong", on="screen")
    words = {
        "drifted": "drifted",
        "frozen": "frozen (the same bytes)",
        "renamed": "renamed",
        "dtype": "of another dtype",
        "shape": "of another shape",
        "added": "added",
        "removed": "removed",
    }
    counts = [f"{len(result.of(s)):,} {text}" for s, text in words.items() if result.of(s)]
    yield from labelled("tensors", listed(counts) or "none on either side")
    yield from labelled("parameters", change_words(result.params))
    yield from labelled("bytes", change_words(result.bytes, capacity=True))
    if result.unchanged:
        yield view.Note("every tensor has the same bytes", "good", bullet=1)
    else:
        text = f"{format_share(result.relative)} of the norm before, over the tensors in both"
        yield from labelled("drift", text)
    bad = result.not_finite
    if bad:
        text = f"NaN or infinite values in {plural(len(bad), 'tensor')}; drift leaves them out"
        yield view.Note(text, "bad", bullet=1)
    closed: dict[str, int] = {}
    for tensor in result.tensors:
        if tensor.note and tensor.status != "shape":
            closed[tensor.note] = closed.get(tensor.note, 0) + 1
    for note, count in closed.items():
        yield view.Note(f"{plural(count, 'tensor')}: {note}", "warn", bullet=1)
    for note in result.notes:
        yield view.Note(note, "warn", bullet=1)


def _section(
    title: str, rows: Sequence[Any], columns: Sequence[view.Column], place: int
) -> view.Section:
    """A table under a title, cut on a screen; no parts where there are no rows."""
    if not rows:
        return view.Section()
    head = view.Note(title.lower(), "strong", on="screen")
    parts = [head, *cut(columns, rows, SHOWN), *left_out(len(rows) - SHOWN)]
    return view.Section(title=title, parts=parts, place=place)


def _renamed(result: CheckpointDiff) -> list[dict[str, Any]]:
    """Renamed tensors; those that were renamed alike stand in one row, with the largest drift."""
    groups: dict[tuple[str, str, str | None], list[TensorDiff]] = {}
    for tensor in result.tensors:
        if tensor.renamed_from:
            patterns = pattern_of(tensor.renamed_from), pattern_of(tensor.name)
            groups.setdefault((*patterns, tensor.renamed_by), []).append(tensor)
    rows = []
    for (old, new, by), tensors in groups.items():
        first, *others = tensors
        names = (old, f"{new} x{len(tensors)}") if others else (first.renamed_from, first.name)
        moved = max(tensors, key=lambda tensor: tensor.moved)
        share = {"relative": _relative(moved)}
        rows.append({"before": names[0], "after": names[1], "by": by, **share})
    return rows


def _folded(tensors: Sequence[TensorDiff]) -> list[dict[str, Any]]:
    """Tensors whose names differ in indices alone, and that look alike, in one row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for tensor in tensors:
        key = (pattern_of(tensor.name), look(tensor.before), look(tensor.after))
        groups.setdefault(key, []).append(tensor.name)
    return [
        {
            "name": f"{pattern} x{len(names)}" if len(names) > 1 else names[0],
            "before": before,
            "after": after,
        }
        for (pattern, before, after), names in groups.items()
    ]


def _config(config: ConfigDiff | None) -> Iterator[view.Section]:
    """The fields of the config that changed, and the parameters of the models of both."""
    if config is None:
        return
    columns = (view.Column("key", units.CODE, "field"), *_LOOKS)
    rows = [{"key": k, "before": before, "after": after} for k, before, after in config.fields]
    yield _section("Fields of config.json", rows, columns, 9)
    parts: list[view.Part] = []
    if config.parameters is not None:
        parts = list(parameter_parts(config.parameters))
    elif config.note:
        parts = [view.Note(f"parameters of the two configs: {config.note}", "warn", bullet=1)]
    yield view.Section(title="Models of the two configs", parts=parts, place=10)
