"""Parts that views share: folded tables, totals before and after, and measured byte factors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from rooftrace.diffs import Change
from rooftrace.hardware.units import format_share
from rooftrace.reporting.renderers import units, view

if TYPE_CHECKING:
    from rooftrace.costmodels.ops import ByteFactor, ByteFactors


# -- folding ---------------------------------------------------------------------------------------

_WHOLE = 12
"""Tables of so many rows are not folded."""
_MOST = 20
"""Rows of a folded table, without the row of each kind that sums up all others."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Folding:
    """Folds rows that differ in sizes into one, with the range of each number.

    Rows have a `kind` and `called`, the code that was called.  columns: of the table; a folded row
    is a mapping by their keys.  name: the sizes of a row; those that differ in numbers only are of
    one class.  seconds: of all that a row stands for.  merged: cells of a folded row that are no
    range, by key.  few: a class of at most so many rows is not folded; a larger one becomes so
    many `parts`.
    """

    columns: Sequence[view.Column]
    name: tuple[str, Callable[[Any], str]]  # the key of its column, and its text
    seconds: Callable[[Any], float]
    merged: Mapping[str, Callable[[Sequence[Any]], Any]]
    few: int
    parts: int

    def of(self, rows: Sequence[Any]) -> list[Any]:
        """The rows, or fewer that stand for them."""
        if len(rows) <= _WHOLE:
            return list(rows)
        classes: dict[Any, list[Any]] = {}
        for row in rows:
            name = _NUMBER.sub("#", self.name[1](row))
            classes.setdefault((row.kind, row.called, name), []).append(row)
        lines = [part for rows in classes.values() for part in self._parts(rows, len(classes))]
        lines.sort(key=lambda line: -sum(map(self.seconds, line)))
        others: dict[str, list[Any]] = {}
        for line in lines[_MOST:]:
            others.setdefault(line[0].kind, []).extend(line)
        places = {id(row): place for place, row in enumerate(rows)}
        kept = sorted(lines[:_MOST], key=lambda line: places[id(line[0])])
        return [
            *(line[0] if len(line) == 1 else self._row(line) for line in kept),
            *(self._row(line, f"{len(line)} others") for line in others.values()),
        ]

    def _parts(self, rows: Sequence[Any], classes: int) -> list[list[Any]]:
        parts = max(min(self.parts, _MOST // classes), 1)
        size = 1 if len(rows) <= self.few else ceil(len(rows) / parts)
        return [list(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _row(self, rows: Sequence[Any], name: str = "") -> dict[str, Any]:
        key, text = self.name
        cells = {column.key: self._cell(column, rows) for column in self.columns}
        return {**cells, key: name or _ranged([text(row) for row in rows])}

    def _cell(self, column: view.Column, rows: Sequence[Any]) -> Any:
        if column.key in self.merged:
            return self.merged[column.key](rows)
        values = [value for value in map(column.read, rows) if value is not None]
        if any(isinstance(value, str) for value in values):
            words = [word for word, _ in Counter(values).most_common()]
            return ", ".join(words if len(words) < 3 else (words[0], f"{len(words) - 1} more"))
        ends = (min(values), max(values)) if values else (None, None)
        return span(*(column.unit.written(value, page=False) for value in ends))


def span(low: str, high: str) -> str:
    """The text of a range: "1..128", "827.0..875.0 us"; one of two texts if they are equal."""
    if low.partition(" ")[2] == high.partition(" ")[2]:
        low = low.partition(" ")[0] if low != high else low
    return low if low == high else f"{low}..{high}"


def _ranged(texts: Sequence[str]) -> str:
    """Texts that differ in numbers only, as one: "G([1, 1..128])"."""
    numbers = [[int(n) for n in _NUMBER.findall(text)] for text in texts]
    words = _NUMBER.split(texts[0])
    spans = (span(str(min(c)), str(max(c))) for c in zip(*numbers, strict=True))
    return words[0] + "".join(a + b for a, b in zip(spans, words[1:], strict=True))


# -- changed ---------------------------------------------------------------------------------------

LONGEST_NAME = 20
"""Letters of a name over a column."""


def heads(names: tuple[str, str]) -> tuple[str, str]:
    """The heads of two columns: two names, or before and after where one is too long for that."""
    if max(map(len, names)) > LONGEST_NAME or names[0] == names[1]:
        return "before", "after"
    return names


def delta(
    key: str, unit: units.Unit, head: str, *, marked: bool = False, **more: Any
) -> view.Column:
    """The column of the differences of one quantity of rows, by the name of their `Change`."""

    def read(row: Any) -> view.Cell:
        change = getattr(row, key)
        if change is None:
            return view.BLANK
        return view.Cell(change.delta, change.mark if marked else "")

    return view.Column(key, units.signed(unit), head, of=read, **more)


def totals(
    changes: Mapping[str, Change],
    units_of: Callable[[str], units.Unit],
    label: Callable[[str], str],
    names: tuple[str, str],
    more: Mapping[view.Column, Callable[[str], Any]] | None = None,
) -> view.Table:
    """Quantities before and after, a row each.  more: further columns, and their cells."""
    more = more or {}
    first, second = heads(names)
    columns = (
        view.Column("metric", units.TEXT, ""),
        view.Column("before", units.COUNT, first),
        view.Column("after", units.COUNT, second),
        view.Column("change", units.COUNT, "change"),
        view.Column("relative", units.WORDS, ""),
        *more,
    )
    rows = [
        {
            "metric": label(name),
            "before": view.Cell(change.before, unit=units_of(name)),
            "after": view.Cell(change.after, unit=units_of(name)),
            "change": view.Cell(change.delta, change.mark, unit=units.signed(units_of(name))),
            "relative": view.Cell(change.percent, change.mark),
            **{column.key: cell(name) for column, cell in more.items()},
        }
        for name, change in changes.items()
    ]
    return view.Table(columns=columns, rows=rows, padded=False)


def entry(mapping: str, name: str) -> Callable[[Any], Any]:
    """Reads the value of a name in a mapping of a row; None where it has no such name."""
    return lambda row: getattr(row, mapping).get(name)


def times(path: str, count: int) -> str:
    """ "layers.*.mlp x4": a module, or how many there are of a pattern."""
    return f"{path or '(root)'} x{count}" if count > 1 else path or "(root)"


def first_rows(
    columns: Sequence[view.Column],
    rows: Sequence[Any],
    most: int,
    output: view.Output,
    more: str = "more",
    *,
    padded: bool = True,
) -> Iterator[view.Part]:
    """A table: all rows on a page, the first on a screen, with a note on how many more there are.

    The columns fit all rows; `cut` has tables for both outputs at once.
    """
    shown = rows if output == "page" else rows[:most]
    yield view.Table(columns=columns, rows=shown, padded=padded)
    if len(shown) < len(rows):
        yield view.Note(f"and {len(rows) - len(shown):,} {more}", "faint")


def cut(columns: Sequence[view.Column], rows: Sequence[Any], most: int) -> list[view.Part]:
    """Two tables: all rows on a page, the first rows on a screen."""
    return [
        view.Table(columns=columns, rows=rows[:most], on="screen"),
        view.Table(columns=columns, rows=rows, padded=False, on="page"),
    ]


def left_out(count: int, of: str = "more") -> Iterator[view.Note]:
    """A note on the rows that a screen does not show, where there are any."""
    if count > 0:
        yield view.Note(f"... and {count:,} {of} (--format json has all)", "faint", on="screen")


def labelled(label: str, text: str, mark: str = "", width: int = 12) -> Iterator[view.Note]:
    """A sentence after a word: in a column of words on a screen, an item of a list on a page."""
    yield view.Note(text, mark, on="screen", label=f"{label:<{width}}")
    yield view.Note(f"{label}: {text}", on="page", bullet=1)


def statement(text: str, mark: str = "", bullet: int = 0) -> list[view.Note]:
    """Words on a screen, which are a sentence on a page; with a bullet, an item of a list."""
    indent = "  " if bullet else ""
    return [
        view.Note(f"{indent}{text}", mark, on="screen"),
        view.Note(f"{text[0].upper()}{text[1:]}.", on="page", bullet=bullet),
    ]


def sentence(text: str, mark: str = "", *, label: str = "", bullet: int = 0) -> list[view.Note]:
    """Words on a screen, after a label; on a page a sentence with a full stop."""
    return [
        view.Note(text, mark, on="screen", label=label),
        view.Note(f"{text}.", on="page", bullet=bullet),
    ]


def grounds(rests: Iterable[str], left_out: Iterable[str], place: int) -> view.Section:
    """The grounds of an answer, and the candidates that were left out with the reasons."""
    texts = [*rests, *(f"left out: {reason}" for reason in left_out)]
    notes = [view.Note(text, "faint", bullet=1) for text in texts]
    return view.Section(title="What it rests on", parts=notes, place=place)


# -- byte factors ----------------------------------------------------------------------------------

_WEIGHTS = " weights"
_FUSION = {"activations": "fusion", "temporary": "elementwise"}
_FACTOR = units.Unit("", "number", lambda value: f"{value:.2f}")
factor_columns = (
    view.Column("kind", units.TEXT, "Bytes of", short="bytes of"),
    view.Column("factor", _FACTOR, "Measured over rules", short="factor"),
    view.Column("error", _FACTOR, "Std. error", short="+-"),
    view.Column("kernels", units.COUNT, "Kernels", short="kernels"),
    view.Column("by", units.TEXT, "By", short="by"),
    view.Column("grouping", _FACTOR, "Ran over detected", short="ran/det.", drop=1),
    view.Column("unfused", _FACTOR, "Over unfused", short="/unfused"),
    view.Column("residency", _FACTOR, "WRF", short="WRF"),
    view.Column("causes", units.TEXT, "Causes", short="causes", folded=True),
)


def factor_sentence(traffic: ByteFactors) -> str:
    """The measured factors: "calibrated on L4, 2026-11-20: WRF dense 1.02 +- 0.03; ..."."""
    parts = [_words(kind, factor) for kind, factor in traffic.identified.items()]
    where = f"calibrated on {traffic.measured}" if traffic.measured else "calibrated bytes"
    missing = ", ".join(_plain(kind) for kind in traffic.unknown)
    parts += [f"not identified: {missing}"] if missing else []
    return f"{where}: {'; '.join(parts) or 'no factor was measured'}"


def factor_rows(factors: Mapping[str, ByteFactor]) -> list[dict[str, Any]]:
    """A row for each kind of bytes, by `factor_columns`; one not identified says why."""
    return [_row(kind, factor) for kind, factor in factors.items()]


def _words(kind: str, factor: ByteFactor) -> str:
    if kind.endswith(_WEIGHTS):
        name, value, error = "WRF " + _plain(kind), factor.residency, factor.residency_error
    elif kind in _FUSION:
        name, value, error = _FUSION[kind], factor.unfused, factor.unfused_error
    else:
        name, value, error = kind, factor.factor, factor.error
    derived = ["by seconds"] if factor.by == "seconds" else []
    left = ["left to the rates"] if factor.applied != factor.factor else []
    causes = ", ".join((*derived, *_causes(kind, factor), *left))
    return f"{name} {value:.2f} +- {error:.2f}{f' ({causes})' if causes else ''}"


def _plain(kind: str) -> str:
    """ "dense" of "dense weights"; others stay."""
    return kind.removesuffix(_WEIGHTS)


def _causes(kind: str, factor: ByteFactor) -> Iterator[str]:
    """The causes of a weight residency that is not 1."""
    if not kind.endswith(_WEIGHTS):
        return
    if _differs(factor.experts):
        yield f"{format_share(1 / factor.experts)} of experts touched"
    if _differs(factor.rows):
        yield f"{format_share(1 / factor.rows)} of rows looked up"
    if _differs(factor.precision):
        yield f"stored {factor.precision:.3g} times as narrow as used"
    if _differs(factor.cache):
        yield f"{format_share(1 - 1 / factor.cache)} held by the last cache"
    if factor.identified and _differs(factor.unexplained, 2 * factor.error / (factor.factor or 1)):
        yield f"x{factor.unexplained:.2f} unexplained"


def _differs(value: float, least: float = 0.0) -> bool:
    return abs(value - 1) > max(least, 0.005)


def _row(kind: str, factor: ByteFactor) -> dict[str, Any]:
    causes = [*_causes(kind, factor)]
    if factor.applied != factor.factor:
        causes.append("slower than the sustained rate, or more bytes: left to the rates")
    row: dict[str, Any] = {
        "kind": kind,
        "grouping": factor.grouping,
        "unfused": factor.unfused,
        "causes": "; ".join(causes),
    }
    if not factor.identified:
        return row | {
            "factor": view.Cell("–", unit=units.TEXT),
            "causes": "; ".join((f"not identified: {factor.why}", *_causes(kind, factor))),
        }
    row |= {name: getattr(factor, name) for name in ("factor", "error", "kernels", "by")}
    if kind.endswith(_WEIGHTS):
        row["residency"] = factor.residency
    return row
