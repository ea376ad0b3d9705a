"""A sweep: a step at many sizes, on many chips, under several conditions; its limits and cliffs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace._shown import Shown, short
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps.evaluating import SECONDS, TOTALS, Columns, Form, evaluated

if TYPE_CHECKING:
    import pandas

Array = np.ndarray[Any, np.dtype[Any]]
LEAST = 0.05
"""How much longer a step must take, for one more of a size, to be a cliff."""
_INSIDE = 63
"""Sizes between two levels that are tried at once to find where the limiter changes."""
_WIDEST = 16_384
"""The most sizes that are looked at one by one for cliffs."""
_LINES = 64
"""Combinations of the other sizes for which cliffs are looked for."""


@dataclass(frozen=True)
class SweepCase:
    """One form under one set of conditions; settings: changes of the source by `vary`."""

    form: Form
    conditions: Conditions
    settings: Mapping[str, Any]

    @property
    def labels(self) -> dict[str, Any]:
        """Settings, phase, execution and precisions of this case."""
        conditions = self.conditions
        return {
            **self.settings,
            "phase": self.form.phase,
            "execution": conditions.execution.name,
            "dtype": conditions.dtype or "as traced",
            **({"weights_dtype": conditions.weights_dtype} if conditions.weights_dtype else {}),
            **({"kv_dtype": conditions.kv_dtype} if conditions.kv_dtype else {}),
        }


@dataclass(frozen=True)
class SizeChange:
    """Where a step becomes another one as one size of it grows.

    labels: of its case.  at: the other sizes.  name: of the one that grows to `size`.
    """

    labels: Mapping[str, Any]
    chip: str
    at: Mapping[str, int]
    name: str
    size: int
    before: str | float
    after: str | float

    def to_row(self) -> dict[str, Any]:
        """The place, and its values before and after."""
        place = {**self.labels, "chip": self.chip, **self.at, self.name: self.size}
        return {**place, "before": self.before, "after": self.after}

    def where(self, cases: Sequence[SweepCase]) -> str:
        """The labels in which cases differ, the other sizes and the chip: "decode, seq 64, l4"."""
        words = [
            str(label)
            for name, label in self.labels.items()
            if len({str(case.labels.get(name)) for case in cases}) > 1
        ]
        return ", ".join([*words, *(f"{n} {size:,}" for n, size in self.at.items()), self.chip])


@dataclass(frozen=True)
class LimiterChange(SizeChange):
    """Where another limiter takes over: `size` is the first with it, the one before has the old."""

    t_est: float  # seconds, at `size`

    def to_row(self) -> dict[str, Any]:
        """The place, both limiters, and the seconds."""
        return {**super().to_row(), "t_est": self.t_est}


@dataclass(frozen=True)
class Cliff(SizeChange):
    """One more of a size that costs much: from `size` to `size + 1`."""

    before: float  # seconds
    after: float

    @property
    def jump(self) -> float:
        """How much longer the step takes: 0.27 is 27 %."""
        return self.after / self.before - 1


@dataclass(frozen=True, eq=False)
class Sweep(Shown):
    """A table with a line for each case, chip and point; `frame()` is it with words and units.

    columns: sizes by name, `case` and `chip` (places), TOTALS, SECONDS, `regime` (place in
    REGIMES), `regime_share`, `peak`.
    """

    names: tuple[str, ...]
    cases: tuple[SweepCase, ...]
    chips: tuple[Chip, ...]
    columns: Columns
    wanted: int = 0  # requested lines; more than there are where it was stopped

    def __len__(self) -> int:
        return len(self.columns["case"])

    def __repr__(self) -> str:
        title = self.cases[0].form.title if self.cases else "nothing"
        return short(
            self,
            f"{title} over {', '.join(self.names)}: {len(self):,} lines, "
            f"{len(self.cases)} cases on {', '.join(chip.name for chip in self.chips)}",
        )

    @property
    def whole(self) -> bool:
        """Whether all lines are there."""
        return len(self) >= self.wanted

    def plot(self, path: str | os.PathLike[str], size: str | None = None) -> None:
        """Draw time over a size to a PNG, SVG or PDF: a line for each case and chip.

        size: default the first.
        Crossings of limiters are dots with names, and bands hold 90 % of measured steps.
        """
        from rooftrace.reporting.figures import draw_sweep

        draw_sweep(self, Path(path), size)

    # -- tables ------------------------------------------------------------------------------------

    def derived(self) -> Columns:
        """Columns that follow from others: items_per_s, ai_hbm (FLOP/byte), mfu, t_launch, fits."""
        c = self.columns
        capacity = np.array([chip.room() for chip in self.chips])
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "items_per_s": c["items"] / c["t_est"],
                "ai_hbm": c["flops_causal"].astype(float) / c["bytes_hbm"].astype(float),
                "mfu": c["flops_matrix"].astype(float) / (c["t_est"] * c["peak"]),
                "t_launch": c["t_est"] - c["t_serial"],
                "fits": c["peak_memory"] <= capacity[c["chip"]],
            }

    def frame(self) -> pandas.DataFrame:
        """A pandas frame: labels, sizes, FLOP, bytes, seconds; regime in words."""
        import pandas

        return pandas.DataFrame(_named_columns(self, _categories))

    def records(self, places: Any = slice(None)) -> list[dict[str, Any]]:
        """Lines of `frame()` as plain records, numbers unrounded; NaN for missing values.

        places: which lines, in their order; default all.
        """
        columns = _named_columns(self, _words)
        values = (column[places].tolist() for column in columns.values())
        return [dict(zip(columns, line, strict=True)) for line in zip(*values, strict=True)]

    def best(
        self, by: str = "items_per_s", count: int = 5, *, fits: bool = True, **limits: float
    ) -> pandas.DataFrame:
        """The lines with the most of a column, within limits: best("items_per_s", t_est=0.03).

        fits: only those that fit the chip's memory.  limits: the largest value of a column.  Of
        columns of seconds and bytes the least are best.  Raises RequestError for a column that
        there is not, and where no line is within the limits.
        """
        frame = self.frame()
        for name in (by, *limits):
            if name not in frame.columns:
                raise RequestError(
                    f"{name!r}: no column has this name{hint(name, list(frame.columns))}"
                )
        kept = frame[frame["fits"]] if fits else frame
        for name, most in limits.items():
            kept = kept[kept[name] <= most]
        if kept.empty:
            least = {name: float(frame[name].min()) for name in limits}
            shown = ", ".join(f"{name} <= {most:g}" for name, most in limits.items())
            reached = ", ".join(f"{name} {value:g}" for name, value in least.items())
            raise RequestError(
                f"no line is within {shown or 'the memory of its chip'}"
                + (f"; the least that there is: {reached}" if least else "")
            )
        rising = by.startswith(("t_", "bytes", "peak", "kv_", "weights_"))
        return kept.sort_values(by, ascending=rising, kind="stable").head(count)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: all lines, crossings, cliffs, and for which sizes each form is proven."""
        return {
            "lines": [
                {name: None if value != value else value for name, value in line.items()}
                for line in self.records()
            ],
            "crossings": [crossing.to_row() for crossing in self.crossings()],
            "cliffs": [cliff.to_row() for cliff in self.cliffs()],
            "proven": [
                {**case.settings, "where": where, "traces": len(regime.form.samples),
                 "equal": len(regime.proven)}
                for case in {id(case.form): case for case in self.cases}.values()
                for where, regime in zip(case.form.where(), case.form.regimes, strict=True)
            ],
        }  # fmt: skip

    # -- crossings and cliffs ----------------------------------------------------------------------

    def crossings(self, size: str | None = None) -> list[LimiterChange]:
        """Where the limiter changes as a size grows (default: the first one), exact to one.

        Between two levels with the same limiter nothing is looked for.  Where nothing between two
        levels can be traced or is proven, the change stands at the second.
        """
        name, c = self._size(size), self.columns
        changes: list[LimiterChange] = []
        for number, case in enumerate(self.cases):
            order, first = self._ordered(number, name)
            here = np.flatnonzero((np.diff(c["regime"][order]) != 0) & ~first[1:])
            low, high = order[here], order[here + 1]
            for chip in np.unique(c["chip"][low]):
                on = c["chip"][low] == chip
                spans = {"row": low[on], "low": c[name][low[on]], "size": c[name][high[on]]}
                spans |= {"before": c["regime"][low[on]], "after": c["regime"][high[on]]}
                spans |= {"span": np.flatnonzero(on), "t_est": c["t_est"][high[on]]}
                changes += self._changes(case, int(chip), name, spans)
        return changes

    def _changes(
        self, case: SweepCase, chip: int, name: str, spans: Columns
    ) -> Iterator[LimiterChange]:
        """The changes within spans of a size, from "low" to "size", in their order."""
        parts = list(self._narrowed(case, chip, name, spans))
        told = {key: np.concatenate([part[key] for part in parts]) for key in spans}
        labels, others = case.labels, [n for n in self.names if n != name]
        for place in np.lexsort((told["size"], told["span"])):
            at = {n: int(self.columns[n][told["row"][place]]) for n in others}
            where = labels, self.chips[chip].name, at, name, int(told["size"][place])
            before, after = (REGIMES[told[key][place]] for key in ("before", "after"))
            yield LimiterChange(*where, before, after, float(told["t_est"][place]))

    def _narrowed(self, case: SweepCase, chip: int, name: str, spans: Columns) -> Iterator[Columns]:
        """Single steps of spans in which the limiter changes, looked for in all spans at once."""
        far = spans["size"] - spans["low"] > 1
        yield _some(spans, ~far)
        wide = _some(spans, far)
        if not (count := len(wide["row"])):
            return
        gaps = (wide["size"] - wide["low"])[:, None]
        sizes = wide["low"][:, None] + gaps * np.arange(_INSIDE + 2) // (_INSIDE + 1)
        new = np.diff(sizes, prepend=-1) > 0
        span, tried = np.nonzero(new)[0], sizes[new]
        try:
            kept, table = self._along(case, chip, name, wide["row"][span], tried, ends=count == 1)
        except (ValueError, RuntimeError):  # of one span: the others are exact all the same
            if count == 1:
                raise
            for place in range(count):
                yield from self._narrowed(case, chip, name, _some(wide, [place]))
            return
        span, tried, regimes = span[kept], tried[kept], table["regime"]
        here = np.flatnonzero((np.diff(regimes) != 0) & (np.diff(span) == 0))
        narrower = {"row": wide["row"][span[here]], "span": wide["span"][span[here]]}
        narrower |= {"low": tried[here], "size": tried[here + 1], "t_est": table["t_est"][here + 1]}
        narrower |= {"before": regimes[here], "after": regimes[here + 1]}
        if len(kept) == 2:  # nothing in between can be traced
            yield narrower
        else:
            yield from self._narrowed(case, chip, name, narrower)

    def cliffs(self, size: str | None = None, least: float = LEAST) -> list[Cliff]:
        """Sizes (default: the first) at which one more costs much more than its neighbours do.

        least: by how much more, as a share of the seconds before.  Sorted by the jump, largest
        first.  Every integer between the smallest and the largest level is tried, 16,384 of them at
        most, for the first 64 combinations of the other sizes.
        """
        name = self._size(size)
        cliffs: list[Cliff] = []
        for number, case in enumerate(self.cases):
            for chip, line in list(self.lines(number, name))[:_LINES]:
                sizes = self.columns[name][line]
                first, last = int(sizes.min()), int(sizes.max())
                every = np.arange(first, min(last, first + _WIDEST) + 1)
                at = {n: int(self.columns[n][line[0]]) for n in self.names if n != name}
                rows = np.full(len(every), line[0])
                kept, table = self._along(case, chip, name, rows, every, ends=True)
                every, seconds = every[kept], table["t_est"]
                steep = _beyond_trend(seconds) > least
                for place in np.flatnonzero(steep & (np.diff(every) == 1)):
                    where = case.labels, self.chips[chip].name, at, name, int(every[place])
                    cliffs.append(Cliff(*where, float(seconds[place]), float(seconds[place + 1])))
        return sorted(cliffs, key=lambda cliff: -cliff.jump)

    def _along(
        self, case: SweepCase, chip: int, name: str, rows: Array, sizes: Array, *, ends: bool
    ) -> tuple[Array, Columns]:
        """Places of sizes, and the table of one case there; the other sizes are those of rows.

        ends: where not all can be traced, those that are proven, and the first and the last, which
        stand in the sweep; else raises as `evaluated` does.
        """
        points = Points({n: sizes if n == name else self.columns[n][rows] for n in case.form.names})
        chips = [self.chips[chip]]
        try:
            return np.arange(len(sizes)), evaluated(case.form, points, chips, case.conditions)
        except (ValueError, RuntimeError):  # the source takes no such size, or there are too many
            if not ends:
                raise
            proven = case.form.proven(points)
            proven[[0, -1]] = True
            some = np.flatnonzero(proven)
            return some, evaluated(case.form, points.where(some), chips, case.conditions)

    def lines(self, case: int, name: str) -> Iterator[tuple[int, Array]]:
        """A chip's place and lines by rising size, for each chip and combination of other sizes."""
        order, first = self._ordered(case, name)
        for line in np.split(order, np.flatnonzero(first)[1:]):
            if len(line) > 1:
                yield int(self.columns["chip"][line[0]]), line

    def _ordered(self, case: int, name: str) -> tuple[Array, Array]:
        """Rows of a case by chip, other sizes and size; which are the first of their line."""
        here = np.flatnonzero(self.columns["case"] == case)
        keys = [self.columns[n][here] for n in ("chip", *self.names) if n != name]
        order = np.lexsort((self.columns[name][here], *keys[::-1]))
        same = [np.diff(key[order], prepend=key[order[:1]] - 1) == 0 for key in keys]
        return here[order], ~np.logical_and.reduce(same)

    def _size(self, name: str | None) -> str:
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"size {name!r}: this sweep is over {', '.join(self.names)}{hint(name, self.names)}"
            )
        return name


def _beyond_trend(seconds: Array) -> Array:
    """The share of the seconds by which each step to the next size exceeds its neighbours."""
    rises = np.diff(seconds)
    before = np.concatenate([rises[1:2], rises[:-1]])
    after = np.concatenate([rises[1:], rises[-2:-1]])
    beyond: Array = (rises - np.maximum(np.maximum(before, after), 0)) / seconds[:-1]
    return beyond if len(rises) > 1 else rises / seconds[:-1]


def _some(columns: Columns, where: Any) -> Columns:
    return {name: column[where] for name, column in columns.items()}


def _named_columns(table: Sweep, words: Callable[[list[str], Array], Any]) -> dict[str, Any]:
    """The columns of `Sweep.frame`.  words: makes one of texts and the place of each line's."""
    numbers, columns = table.columns, {}
    for name in dict.fromkeys(name for case in table.cases for name in case.labels):
        texts = [str(case.labels.get(name, "")) for case in table.cases]
        columns[name] = words(texts, numbers["case"])
    columns["chip"] = words([chip.name for chip in table.chips], numbers["chip"])
    columns |= {name: numbers[name] for name in (*table.names, *TOTALS, *SECONDS)}
    columns["regime"] = words(list(REGIMES), numbers["regime"])
    columns["regime_share"] = numbers["regime_share"]
    return columns | table.derived()


def _words(values: Sequence[str], codes: Array) -> Array:
    return np.array(values, dtype=object)[codes]


def _categories(values: Sequence[str], codes: Array) -> Any:
    import pandas

    if len(set(values)) < len(values):
        return _words(values, codes)
    return pandas.Categorical.from_codes(codes, categories=pandas.Index(values))
