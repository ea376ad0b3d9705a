"""Calls that differ from others in one length only: what they give and cost follows from those.

A call is recorded at several lengths.  Where all that it did is a formula of the length, the next
one is answered by the formulas.  They are checked at lengths that grow by an eighth; where a check
fails, the module is run aside, at lengths between, to find the first at which it runs otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from rooftrace.hardware.units import plural
from rooftrace.tracer.formulas import FormulaError
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphforms import GraphForm, RecordForm, StructureError
from rooftrace.tracer.scripts.book import Book
from rooftrace.tracer.scripts.calls import Look, Result
from rooftrace.tracer.scripts.records import Derived, TurnPiece, Turns, graph_form, without_varying

Ops = Sequence[Any]
"""The ops of a call, each with the shapes that it made."""
Probe = Callable[[Sequence[int]], "Ops | None"]
"""Runs the module aside on tensors of these sizes; None where it cannot."""

_FEWEST, _MOST = 4, 7
"""Formulas are fitted to so many lengths: to more where fewer do not suffice."""
_BEYOND = 8
"""A length may be an eighth larger, or smaller, than those at which the formulas were checked."""


@dataclass(frozen=True)
class Seen:
    """A turn that was recorded: one call, and what followed."""

    look: Look
    ops: Ops  # of the call
    after: Ops  # that followed
    result: Result
    place: int  # of its graph
    graph: OpGraph
    stretch: Turns


@dataclass
class LengthForm:
    """What calls of one kind are at any length within bounds.

    column: the place of the length among the sizes of a call.  bounds: the smallest and the largest
    length at which it was checked.  ends: lengths at which calls are known to run otherwise.
    pending: those beyond the bounds that were counted, with their sizes.
    """

    column: int
    sizes: RecordForm
    ops: RecordForm
    after: RecordForm
    leaves: RecordForm
    graphs: GraphForm
    sample: Seen
    derived: Derived
    bounds: tuple[int, int]
    ends: list[int] = field(default_factory=list)
    pending: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def fitted(cls, seen: Sequence[Seen]) -> LengthForm | None:
        """The form of turns whose first different size has another value in each.

        Raises StructureError where they differ in more than numbers, or a number has no formula.
        """
        columns = list(zip(*(each.look.sizes for each in seen), strict=True))
        column = next((i for i, values in enumerate(columns) if len(set(values)) > 1), -1)
        if column < 0 or len(set(columns[column])) < len(seen):
            return None
        by_length = dict(zip(columns[column], seen, strict=True))

        def form(of: Callable[[Seen], Any]) -> RecordForm:
            records: dict[tuple[int, ...], Any] = {
                (length,): of(each) for length, each in by_length.items()
            }
            return RecordForm.fitted(("length",), records)

        return cls(
            column=column,
            sizes=form(lambda each: each.look.sizes),
            ops=form(lambda each: each.ops),
            after=form(lambda each: each.after),
            leaves=form(lambda each: each.result.leaves),
            graphs=graph_form({length: each.graph for length, each in by_length.items()}),
            sample=seen[-1],
            derived=Derived({length: each.place for length, each in by_length.items()}),
            bounds=(min(by_length), max(by_length)),
        )

    def length(self, look: Look) -> int | None:
        """The length of a call, if its other sizes are what they are at that length."""
        length = look.sizes[self.column]
        return length if _at(self.sizes, length) == look.sizes else None

    def holds(self, length: int) -> bool:
        """Whether the formulas are taken to hold at a length."""
        low, high = self.bounds
        near = low - low // _BEYOND <= length <= high + high // _BEYOND
        return near and self.reaches(length)

    def reaches(self, length: int) -> bool:
        """Whether no length is known, up to this one, at which calls run otherwise."""
        low, high = self.bounds
        return not any(min(low, length) <= end <= max(high, length) for end in self.ends)

    def gives(self, length: int, seen: Seen) -> bool:
        """Whether the formulas give what was recorded; then they are checked up to here."""
        graph = _at(self.graphs, length)
        if graph is None or _alike(graph) != _alike(without_varying(seen.graph, [graph])):
            return False
        if _at(self.ops, length) != seen.ops or _at(self.leaves, length) != seen.result.leaves:
            return False
        self.widen([length])
        return True

    def widen(self, lengths: Sequence[int]) -> None:
        """The formulas were checked at these lengths, too."""
        low, high = self.bounds = min(self.bounds[0], *lengths), max(self.bounds[1], *lengths)
        self.pending = {n: s for n, s in self.pending.items() if not low <= n <= high}

    def cut(self, length: int, probe: Probe) -> Lost | None:
        """A call at this length ran otherwise: what was counted and does so, too."""
        up = length > self.bounds[1]
        near = sorted((n for n in self.pending if (n > self.bounds[1]) == up), reverse=not up)
        first, last = 0, len(near)
        ops: Ops | None = None
        while first < last:
            middle = (first + last) // 2
            there = probe(self.pending[near[middle]])
            if there is not None and there == _at(self.ops, near[middle]):
                first = middle + 1
            else:
                last, ops = middle, there
        self.ends.append([*near, length][first])
        if first:
            self.widen(near[:first])
        sizes = {n: self.pending.pop(n) for n in near[first:]}
        return Lost(self, sizes, ops) if sizes else None


@dataclass
class Lost:
    """Turns that were counted by a form that does not hold there, with their sizes by length.

    ops: of the first of them; None where it could not be run aside.
    """

    form: LengthForm
    sizes: dict[int, tuple[int, ...]]
    ops: Ops | None

    def said(self) -> str:
        """What is not exact."""
        low, high = min(self.sizes), max(self.sizes)
        return (
            f"{plural(len(self.sizes), 'turn')} like {self.form.sample.stretch.label} with lengths "
            f"of {low} to {high} are counted as at other lengths, and run otherwise"
        )


@dataclass(frozen=True)
class LengthTurn:
    """A turn that a form stands for."""

    form: LengthForm
    length: int

    @property
    def result(self) -> Result:
        """What its call returns."""
        return self.form.sample.result.of(self.form.leaves.at((self.length,)))

    def stretch(self, book: Book) -> Turns:
        """The turn, with its graph in the book."""
        places = {**self.form.derived.samples, **self.form.derived.places}
        place = places.get(self.length)
        if place is None:
            place = book.derive(self.form.graphs.at((self.length,)))
            self.form.derived.places[self.length] = place
        return replace(self.form.sample.stretch, pieces=(TurnPiece(place),))


class LengthForms:
    """The forms of a run, and the turns of which there may be one.  book: has the graphs."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._forms: dict[Any, list[LengthForm]] = {}  # by the kind of the look
        self._seen: dict[Any, dict[tuple[int, ...], Seen]] = {}  # by that and the ops
        self._lost: list[Lost] = []
        self._probes: dict[Any, Probe] = {}  # by the kind of the look
        self._otherwise = 0  # turns that went on otherwise after the call

    def find(self, look: Look) -> LengthTurn | None:
        """The form that stands for a turn whose call looks so; None: it has to run."""
        for form, length in self._like(look):
            if form.holds(length):
                if not form.bounds[0] <= length <= form.bounds[1]:
                    form.pending[length] = look.sizes
                return LengthTurn(form, length)
        return None

    def _like(self, look: Look) -> Iterator[tuple[LengthForm, int]]:
        for form in self._forms.get(look.kind, ()):
            length = form.length(look)
            if length is not None:
                yield form, length

    def followed(self, turn: LengthTurn, after: Ops) -> None:
        """A turn that a form stands for has ended; after its call these ops ran."""
        self._otherwise += after != _at(turn.form.after, turn.length)

    def check(self, look: Look, ops: Ops, probe: Probe) -> None:
        """A call ran, in which these ops did: forms that say otherwise end before it."""
        self._probes[look.kind] = probe
        for form, length in self._like(look):
            if form.reaches(length) and ops != _at(form.ops, length):
                lost = form.cut(length, probe)
                self._lost += [lost] if lost is not None else []

    def prove(self) -> None:
        """Check the formulas at what was counted last."""
        for kind, forms in self._forms.items():
            for form in forms:
                lengths = (max(form.pending, default=0), min(form.pending, default=0))
                lost = [form.cut(n, self._probes[kind]) for n in lengths if n in form.pending]
                self._lost += filter(None, lost)

    def learn(self, seen: Seen) -> None:
        """A turn was recorded."""
        if any(form.gives(length, seen) for form, length in self._like(seen.look)):
            return
        kind = seen.look.kind
        key = kind, tuple(op[0] for op in seen.ops)
        alike = self._seen.setdefault(key, {})
        alike.pop(seen.look.sizes, None)
        alike[seen.look.sizes] = seen
        if len(alike) > _MOST:
            del alike[next(iter(alike))]
        form = _fitted(tuple(alike.values()))
        if form is not None:
            del self._seen[key]
            self._forms.setdefault(kind, []).append(form)
            self._book.derived.append(form.derived)
            self._adopt(form, kind)

    def _adopt(self, form: LengthForm, kind: Any) -> None:
        """Turns that another form does not hold for may be those of a new one."""
        for lost in list(self._lost):
            if lost.form.sample.look.kind != kind:
                continue
            lengths = [form.length(Look(kind, True, sizes)) for sizes in lost.sizes.values()]
            known = [length for length in lengths if length is not None]
            if len(known) < len(lengths) or lost.ops != _at(form.ops, known[0]):
                continue
            for old, length in zip(lost.sizes, known, strict=True):
                place = lost.form.derived.places.pop(old, None)
                if place is not None:
                    form.derived.places[length] = place
                    self._book.graphs[place] = form.graphs.at((length,))
            form.widen(list(form.derived.places))
            self._lost.remove(lost)

    def said(self) -> dict[str, str]:
        """What is not exact."""
        said = {f"lengths {number}": lost.said() for number, lost in enumerate(self._lost)}
        if self._otherwise:
            said["after lengths"] = (
                f"after the call of {plural(self._otherwise, 'turn')} that formulas of a length "
                "stand for, other ops ran than after recorded ones: counted are the latter"
            )
        return said


def _fitted(seen: Sequence[Seen]) -> LengthForm | None:
    """The form of the last few of these turns, as few as suffice."""
    for count in range(_FEWEST, len(seen) + 1):
        with contextlib.suppress(StructureError):
            return LengthForm.fitted(seen[-count:])
    return None


def _alike(graph: OpGraph) -> OpGraph:
    """A graph in which what stands from before is so many bytes: a view may stand for its base."""
    values = tuple(
        replace(value, shape=(value.nbytes,), stride=(1,), dtype="uint8")
        if value.name.startswith("kept_")
        else value
        for value in graph.values
    )
    return graph.replace(values=values)


def _at(form: RecordForm, length: int) -> Any:
    try:
        return form.at((length,))
    except FormulaError:
        return None
