"""Regimes of forms of a graph: boxes of sizes, each proven by traces that were not fitted.

A box is fitted from a few traces, and then tried at its corners and at sizes inside.  Where the
form gives another graph than the trace, the box is cut there: one size after the other is moved
from where it holds to where it does not, and the change is found by halving.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace._progress import tell
from rooftrace.graph.formulas.forms import GraphForm, RecordForm, UnfitError
from rooftrace.graph.formulas.leaves import Draw, Numbers, StructureError, differences
from rooftrace.graph.formulas.polynomials import SPARE, FormulaError

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

RecordsAt = Callable[[Sequence[Numbers]], Sequence[Any]]
"""Gives the records, such as traced graphs, at several sizes."""
Levels = tuple[Sequence[int], ...]
"""For each size its values in rising order."""
_INSIDE = 3
"""Sizes inside a box at which a form is tried, in addition to the corners."""
_FEW = 6
"""Boxes of so few points are traced point by point."""
_MOST = 14
"""The most traces that one form is fitted to."""


@dataclass(frozen=True)
class Regime:
    """A form and the sizes for which it is proven: from `low` to `high`, both included.

    proven: the sizes of the traces that it was not fitted to, and equals.  levels: for each size
    the only values that it is proven for; empty for every integer.
    """

    form: Any  # a GraphForm; of other records than graphs, a RecordForm
    low: Numbers
    high: Numbers
    proven: tuple[Numbers, ...] = ()
    levels: Levels = ()

    def holds(self, numbers: Sequence[int]) -> bool:
        """Whether these sizes are inside."""
        bounds = zip(self.low, numbers, self.high, strict=True)
        listed = zip(numbers, self.levels, strict=False)
        return all(low <= number <= high for low, number, high in bounds) and all(
            not levels or number in levels for number, levels in listed
        )

    def inside(self, columns: Sequence[Array]) -> Array:
        """Whether each of many sizes, a column for each, is inside."""
        held = np.ones(len(columns[0]) if columns else 1, dtype=bool)
        for column, low, high in zip(columns, self.low, self.high, strict=True):
            held &= (column >= low) & (column <= high)
        for column, levels in zip(columns, self.levels, strict=False):
            if levels:
                held &= np.isin(column, np.asarray(levels))
        return held


@dataclass
class Survey:
    """Finds the regimes of a source in a range of sizes.

    names: of the sizes.  levels: for each the requested values; between them nothing is
    tried.  trace: gives the records.  most: of records; boxes unproven by then are no regimes.
    form: the kind of form, fitted with `draws`.  word: what a record is called.  asked: for each
    size the only levels that anyone asks for, empty for all: few of them are traced one by one.
    """

    names: tuple[str, ...]
    levels: Levels
    trace: RecordsAt
    most: int = 120
    form: type[RecordForm] = GraphForm
    draws: Sequence[Draw] = ()
    word: str = "traces"
    asked: Levels = ()
    traces: int = 0  # made so far
    _records: dict[Numbers, Any] = field(default_factory=dict)

    def regimes(self) -> Iterator[Regime]:
        """Regimes as they are proven, which together cover all levels if the traces suffice.

        The box with most points comes first, so that few points are left when the traces run out.
        """
        boxes = [tuple((0, len(values) - 1) for values in self.levels)]
        while boxes:
            box = max(reversed(boxes), key=_points)
            boxes.remove(box)
            yield from self._regimes_of(box, boxes)
            # Many graphs take much room: those stay that lie in a box which is still to be proven.
            rest = [Regime(None, *self._ends(box)) for box in boxes]
            kept = (n for n in self._records if any(part.holds(n) for part in rest))
            self._records = {numbers: self._records[numbers] for numbers in kept}

    def graph(self, numbers: Numbers) -> Any:
        """The record at these sizes, made once."""
        return self._graphs([numbers])[0]

    def _graphs(self, wanted: Sequence[Numbers]) -> list[Any]:
        missing = list(dict.fromkeys(n for n in wanted if n not in self._records))
        self.traces += len(missing)
        if missing:
            self._records.update(zip(missing, self.trace(missing), strict=True))
        return [self._records[numbers] for numbers in wanted]

    # -- one box -----------------------------------------------------------------------------------

    def _regimes_of(self, box: _Box, left: list[_Box]) -> Iterator[Regime]:
        """The regimes found in a box; boxes still to be looked at go to `left`."""
        if self.traces > self.most:
            return
        wanted = list(itertools.islice(self._wanted(box), _FEW + 1))
        if len(wanted) <= _FEW:
            yield from map(self._single, map(self._at, wanted))
            return
        samples = _scattered(box, 2 ** sum(low < high for low, high in box) + SPARE)
        far, near = tuple(high for _, high in box), [samples]
        # The far corner has to be traced for the proof; where it has no form with others, they do.
        samples = near.pop() if far in samples else (*samples[:-1], far)
        tell(f"fitting {self._named(box)}: {len(samples)} {self.word}")
        form = None
        while form is None:
            try:
                form = self._fitted(samples)
            except StructureError as error:
                more = [p for p in _scattered(box, len(samples) + 1) if p not in samples]
                if near:
                    samples = near.pop()
                elif not isinstance(error, UnfitError):
                    left += self._cut_by_structure(box, samples)
                    return
                elif not more or len(samples) >= _MOST:
                    left += _halves(box)
                    return
                else:
                    samples = (*samples, *more)
        yield from self._proven(box, form, samples, left)

    def _fitted(self, samples: Sequence[_Place]) -> RecordForm:
        """The form of the records at these places.  Raises StructureError without one."""
        numbers = list(map(self._at, samples))
        records = dict(zip(numbers, self._graphs(numbers), strict=True))
        return self.form.fitted(self.names, records, self.draws)

    def _wanted(self, box: _Box) -> Iterator[_Place]:
        """The places in a box that are asked for."""
        asked = self.asked or ((),) * len(box)
        return itertools.product(
            *(
                [i for i in range(low, high + 1) if not only or levels[i] in only]
                for (low, high), levels, only in zip(box, self.levels, asked, strict=True)
            )
        )

    def _single(self, numbers: Numbers) -> Regime:
        form = self.form.fitted(self.names, {numbers: self.graph(numbers)}, self.draws)
        return Regime(form, numbers, numbers)

    def _proven(
        self, box: _Box, form: RecordForm, samples: Sequence[_Place], left: list[_Box]
    ) -> Iterator[Regime]:
        """The regime of a form, as large as traces show it; the rest of the box goes to `left`.

        Where a form gives another graph than a trace, it is fitted anew with it: numbers of few
        samples may look like a line.
        """
        first = len(samples)
        while True:
            checks = [p for p in _checks(box, len(samples) - first) if p not in samples]
            tell(f"proving {self._named(box)}: {len(checks)} {self.word}")
            wrong = next((p for p in checks if not self._equal(form, p)), None)
            if wrong is None:
                numbers = tuple(self._at(p) for p in checks)
                yield Regime(form, *self._ends(box), numbers, self._gaps(box, form))
                return
            if len(samples) < _MOST:
                with suppress(StructureError):
                    form, samples = self._fitted((*samples, wrong)), (*samples, wrong)
                    continue
            near = min(samples, key=lambda sample: _differing(sample, wrong))
            size, edge, rising = self._edge(near, wrong, partial(self._equal, form))
            kept, rest = _cut(box, size, edge, rising)
            left.append(rest)
            if not all(_inside(kept, sample) for sample in samples):
                left.append(kept)  # some of its samples lie in the other part
                return
            box = kept

    def _gaps(self, box: _Box, form: RecordForm) -> Levels:
        """For each size its values in a box, empty where the form holds between them, too."""
        levels = []
        for size, values in enumerate(self.levels):
            low, high = box[size]
            inside = values[low : high + 1]
            full = inside[-1] - inside[0] + 1 == len(inside)
            levels.append(() if full or self._holds_between(box, form, size) else inside)
        return tuple(levels) if any(levels) else ()

    def _holds_between(self, box: _Box, form: RecordForm, size: int) -> bool:
        """Whether a form holds between the values of one size, too, as some traces there show."""
        (low, high), values = box[size], self.levels[size]
        draw = random.Random(repr((box, size)))
        for step in (1, -1, 1):
            numbers = list(self._at(tuple(draw.randint(*ends) for ends in box)))
            at = draw.randint(low, high - 1) if step > 0 else draw.randint(low + 1, high)
            gap = abs(values[at + step] - values[at])
            numbers[size] = values[at] + step * min(gap - 1, 1) if gap > 1 else values[at]
            try:
                if not self._equal_at(form, tuple(numbers)):
                    return False
            except (ValueError, RuntimeError):  # the source takes no such size
                return False
        return True

    def _equal(self, form: RecordForm, place: _Place) -> bool:
        return self._equal_at(form, self._at(place))

    def _equal_at(self, form: RecordForm, numbers: Numbers) -> bool:
        try:
            return bool(form.at(numbers) == self.graph(numbers))
        except FormulaError:
            return False

    def _cut_by_structure(self, box: _Box, samples: Sequence[_Place]) -> list[_Box]:
        """Two parts of a box, where graphs of one structure end."""
        first = samples[0]

        def alike(place: _Place) -> bool:
            try:
                for _ in differences([self.graph(self._at(first)), self.graph(self._at(place))]):
                    pass
            except StructureError:
                return False
            return True

        other = next((place for place in samples if not alike(place)), None)
        if other is None:  # words that differ in a text: no number tells where
            return list(_halves(box))
        size, edge, rising = self._edge(first, other, alike)
        return list(_cut(box, size, edge, rising))

    def _edge(
        self, good: _Place, bad: _Place, holds: Callable[[_Place], bool]
    ) -> tuple[int, int, bool]:
        """The size that, moved from `good` to `bad`, ends `holds`; its last level; if it rises."""
        here = list(good)
        for size, (start, end) in enumerate(zip(good, bad, strict=True)):
            if start == end:
                continue
            there = [*here[:size], end, *here[size + 1 :]]
            if holds(tuple(there)):
                here = there
                continue
            step = 1 if end > start else -1
            last, fails = start, end
            near = end - step  # often only the very end differs, as a batch of 1
            if near != start and holds((*here[:size], near, *here[size + 1 :])):
                last = near
            while abs(fails - last) > 1:
                middle = (last + fails) // 2
                if holds((*here[:size], middle, *here[size + 1 :])):
                    last = middle
                else:
                    fails = middle
            return size, last, step > 0
        raise StructureError(f"{self.names}: a trace differs from an equal trace")

    def _ends(self, box: _Box) -> tuple[Numbers, Numbers]:
        """The sizes at the low and at the high end of a box."""
        low, high = map(self._at, zip(*box, strict=True))
        return low, high

    def _at(self, place: _Place) -> Numbers:
        return tuple(values[i] for values, i in zip(self.levels, place, strict=True))

    def _named(self, box: _Box) -> str:
        spans = zip(self.names, self.levels, box, strict=True)
        return ", ".join(
            f"{name} {values[low]:,}" + (f" to {values[high]:,}" if high > low else "")
            for name, values, (low, high) in spans
        )


# -- boxes: indices among the levels of each size --------------------------------------------------

_Place = tuple[int, ...]
_Box = tuple[tuple[int, int], ...]


def _points(box: _Box) -> int:
    count = 1
    for low, high in box:
        count *= high - low + 1
    return count


def _inside(box: _Box, place: _Place) -> bool:
    return all(low <= i <= high for (low, high), i in zip(box, place, strict=True))


def _scattered(box: _Box, count: int) -> tuple[_Place, ...]:
    """Different points near the lower end of a box, which differ in all their numbers."""
    draw = random.Random(repr(box))
    reachable = tuple((min(low + (high - low > 2), high), high) for low, high in box)
    wanted = min(count, _points(reachable))
    chosen: dict[_Place, None] = {}
    reach = 8
    while len(chosen) < wanted:
        for _ in range(40):
            place = tuple(
                draw.randint(first, min(high, low + 1 + reach)) if high > low else low
                for (low, high), (first, _) in zip(box, reachable, strict=True)
            )
            chosen.setdefault(place)
            if len(chosen) == wanted:
                break
        reach *= 2
    return tuple(chosen)


def _checks(box: _Box, more: int = 0) -> list[_Place]:
    """The corners of a box, and some points inside: so many more than usual.

    First come corners that differ from the far one, which was fitted, in one size: where one of
    them fails, it is that size.
    """
    far = tuple(high for _, high in box)
    corners = sorted(itertools.product(*({low, high} for low, high in box)))
    corners.sort(key=lambda corner: _differing(corner, far))
    draw = random.Random(repr(box) + "checks")
    inside = [tuple(draw.randint(low, high) for low, high in box) for _ in range(_INSIDE + more)]
    return list(dict.fromkeys([*corners, *inside]))


def _differing(place: _Place, other: _Place) -> int:
    """In how many sizes two places differ."""
    return sum(here != there for here, there in zip(place, other, strict=True))


def _cut(box: _Box, size: int, edge: int, rising: bool) -> tuple[_Box, _Box]:
    """A box cut behind a place of one size: the part where it holds first."""
    low, high = box[size]
    parts = ((low, edge), (edge + 1, high)) if rising else ((edge, high), (low, edge - 1))
    kept, rest = ((*box[:size], part, *box[size + 1 :]) for part in parts)
    return kept, rest


def _halves(box: _Box) -> tuple[_Box, _Box]:
    """The two halves of a box along its longest side."""
    size = max(range(len(box)), key=lambda i: box[i][1] - box[i][0])
    low, high = box[size]
    return _cut(box, size, (low + high) // 2, True)
