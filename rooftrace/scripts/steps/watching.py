"""Watches a script's calls and batches, its open turn, and calls that differ in length only."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import nn

from rooftrace.graph import OpGraph
from rooftrace.graph.formulas import FormulaError, GraphForm, RecordForm, StructureError
from rooftrace.hardware.units import plural
from rooftrace.scripts.steps.book import Book
from rooftrace.scripts.steps.calls import Look, ModuleCall, Result
from rooftrace.scripts.steps.records import Derived, TurnPiece, Turns, graph_form, without_varying
from rooftrace.tracer import torch_private
from rooftrace.tracer.phases import stepping
from rooftrace.tracer.recording import original_of, put

# -- lengths ---------------------------------------------------------------------------------------
# Calls that differ from others in one length only: their results and costs follow from those.
#
# A call is recorded at several lengths.  Where all that it did is a formula of the length, the next
# one is answered by the formulas.  They are checked at lengths that grow by an eighth; where a
# check fails, the module is run aside, at lengths between, to find the first at which it runs
# otherwise.

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
    """A recorded turn: one call, and the ops after it."""

    look: Look
    ops: Ops  # of the call
    after: Ops  # that followed
    result: Result
    place: int  # of its graph
    graph: OpGraph
    stretch: Turns


@dataclass
class LengthForm:
    """Calls of one kind at any length within bounds.

    column: the place of the length among the sizes of a call.  bounds: the smallest and the largest
    length at which it was checked.  ends: lengths at which calls ran otherwise.
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
        """The length of a call, if its other sizes are those at that length."""
        length = look.sizes[self.column]
        return length if _at(self.sizes, length) == look.sizes else None

    def holds(self, length: int) -> bool:
        """Whether the formulas are taken to hold at a length."""
        low, high = self.bounds
        near = low - low // _BEYOND <= length <= high + high // _BEYOND
        return near and self.reaches(length)

    def reaches(self, length: int) -> bool:
        """Whether no call up to this length has run otherwise."""
        low, high = self.bounds
        return not any(min(low, length) <= end <= max(high, length) for end in self.ends)

    def gives(self, length: int, seen: Seen) -> bool:
        """Whether the formulas give the recorded sizes; then they are checked up to here."""
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
        """A call at this length ran otherwise: the counted lengths that do so, too."""
        up = length > self.bounds[1]
        near = sorted((n for n in self.pending if (n > self.bounds[1]) == up), reverse=not up)
        first, last = 0, len(near)
        ops: Ops | None = None
        while first < last:
            middle = (first + last) // 2
            seen = probe(self.pending[near[middle]])
            if seen is not None and seen == _at(self.ops, near[middle]):
                first = middle + 1
            else:
                last, ops = middle, seen
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
        """Remarks on inexact parts."""
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
        """The result of its call."""
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
        """Check the formulas at the length counted last."""
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
            lengths_known = [length for length in lengths if length is not None]
            if len(lengths_known) < len(lengths) or lost.ops != _at(form.ops, lengths_known[0]):
                continue
            for old, length in zip(lost.sizes, lengths_known, strict=True):
                number = lost.form.derived.places.pop(old, None)
                if number is not None:
                    form.derived.places[length] = number
                    self._book.graphs[number] = form.graphs.at((length,))
            form.widen(list(form.derived.places))
            self._lost.remove(lost)

    def said(self) -> dict[str, str]:
        """Remarks on inexact parts."""
        reports = {f"lengths {number}": lost.said() for number, lost in enumerate(self._lost)}
        if self._otherwise:
            reports["after lengths"] = (
                f"after the call of {plural(self._otherwise, 'turn')} that formulas of a length "
                "stand for, other ops ran than after recorded ones: counted are the latter"
            )
        return reports


def _fitted(seen: Sequence[Seen]) -> LengthForm | None:
    """The form of the last few of these turns, as few as suffice."""
    for count in range(_FEWEST, len(seen) + 1):
        with contextlib.suppress(StructureError):
            return LengthForm.fitted(seen[-count:])
    return None


def _alike(graph: OpGraph) -> OpGraph:
    """A graph in which earlier tensors are so many bytes: a view may stand for its base."""
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


# -- turns -----------------------------------------------------------------------------------------


@dataclass
class LoadedBatches:
    """Work of data loaders for a turn."""

    seconds: float = 0.0
    batches: int = 0

    def add(self, seconds: float) -> None:
        """One more batch, after so many seconds."""
        self.seconds += seconds
        self.batches += 1


@dataclass
class OpenTurn:
    """The turn that is open."""

    kind: str
    label: str
    shape: tuple[int, ...] = ()  # of the first tensor of its first call
    light: bool = False  # no call had weights so far
    learnt: stepping.Learnt = field(default_factory=stepping.Learnt)
    recorded: bool = True  # False: it is taken to be like one that was
    calls: list[Look] = field(default_factory=list)
    by_form: LengthTurn | None = None  # the turn that stands for it, if calls of other lengths do
    ops: Ops | None = None  # of its first call, where that changed nothing that its module holds
    after: list[Any] = field(default_factory=list)  # ops that followed it
    pieces: list[TurnPiece] = field(default_factory=list)
    backwards: int = 0  # how many of the calls were followed by a backward
    followed: int = 0  # calls up to the last one of these
    repeating: bool = False  # ops are taken to be like the last piece
    loaded: LoadedBatches = field(default_factory=LoadedBatches)
    brought: int = 0
    taken: int = 0
    began: float = 0.0  # seconds of this machine's clock, for one that really runs
    helps: set[int] | None = field(default_factory=set)  # models, until one has gradients
    modules: set[int] = field(default_factory=set)  # that were called
    methods: frozenset[int] = frozenset()  # of modules, that made the first of these calls
    had: int = 0  # bytes that the host had brought when the last call began
    reached: dict[Any, float] = field(default_factory=dict)  # seconds up to the last time read

    @property
    def is_accumulated(self) -> bool:
        """Whether all calls look alike, each with a backward after it."""
        alike = all(look.key == self.calls[0].key for look in self.calls)
        return alike and self.backwards >= len(self.calls) - 1

    def repeat(self) -> None:
        """The last piece ran once more."""
        last = self.pieces[-1]
        self.pieces[-1] = TurnPiece(last.graph, last.times + 1)


@dataclass
class SteadyTurns:
    """The last turns of one kind, which were equal."""

    pieces: tuple[TurnPiece, ...] = ()
    calls: tuple[Any, ...] = ()
    alike: int = 0
    results: list[Result] = field(default_factory=list)
    stretch: Turns | None = None
    reached: dict[Any, float] = field(default_factory=dict)  # as of an open turn

    def answer(self, number: int, look: Look) -> Result | None:
        """The result of the call at this place of a turn; None if that call looked different."""
        if number < len(self.calls) and self.calls[number] == look.key:
            return self.results[number]
        return None


@dataclass
class Variety:
    """The kinds of turns of which one began like those before it and went on otherwise.

    From then on every turn of such a kind is recorded.  said: reports of uncounted turns, by kind.
    """

    kinds: set[str] = field(default_factory=set)
    said: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, before: int) -> None:
        """A turn of this kind, after so many, has begun alike and goes on otherwise."""
        self.kinds.add(kind)
        self.said[f"{kind} turns that differ"] = (
            f"{kind} turn {before + 1} began as the ones before it and went on otherwise: its "
            "first calls were not run and are not counted in it"
        )


# -- watching --------------------------------------------------------------------------------------

STEP = "step"
"""The mark that a profiler's `step()` is."""


class Watcher(Protocol):
    """An observer of a script's calls and batches."""

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module inside of another, or in a thread that does not lead."""

    def call(self, made: ModuleCall) -> Any:
        """A module is called from outside of any, and of any backward."""

    def leading(self, module: nn.Module | None = None) -> AbstractContextManager[bool]:
        """Whether calls of the running thread, as one of `module`, are seen; inside of it no other
        thread's are."""

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch."""


class _Depth(threading.local):
    inside = 0  # how many calls of modules this thread is in
    begun: CodeType | None = None  # of a forward that was called by its name, and not seen to begin


def watch(finder: Watcher) -> None:
    """From here on a finder receives calls and batches.

    `model.forward(x)` is a call as well.  What runs in it tells so the first time; from then on
    the forward of that class does.
    """
    depth = _Depth()
    loaders: Any = torch_private.LoaderIterator
    next_ = original_of(loaders, "__next__")

    def is_inside() -> bool:  # of a call, or of a backward that computes again
        return depth.inside > 0 or torch_private.current_autograd_node() is not None

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(finder.run, module, args, kwargs)
        inside = is_inside() or (depth.begun is not None and _runs(depth.begun))
        depth.inside += 1
        try:
            if inside:
                return run()
            with finder.leading(module) as leads:
                around = _forward_around(module) if leads else None
                depth.begun = None if around is None else around.f_code
                if around is not None:
                    outermost, *arguments = _arguments(around)
                    put(*called_by_name(type(outermost)))
                    return finder.call(ModuleCall(outermost, arguments, {}, run, begun=True))
                if leads:
                    return finder.call(ModuleCall(module, args, kwargs, run))
            return run()
        finally:
            depth.inside -= 1

    def called_by_name(kind: type[nn.Module]) -> tuple[type, dict[str, Any]]:
        home = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = original_of(home, "forward")

        def reported(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_inside() or module._forward_pre_hooks or module._forward_hooks:
                return forward(module, *args, **kwargs)
            return call(module, *args, **kwargs)

        return home, {"forward": reported}

    def batch(loader: Any) -> Any:
        began = perf_counter()
        loaded = next_(loader)
        finder.loaded(perf_counter() - began)
        return loaded

    put(nn.Module, {"__call__": call})
    put(loaders, {"__next__": batch})


def _running() -> Iterator[FrameType]:
    """The functions that run now, the innermost first."""
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        yield at
        at = at.f_back


def _runs(function: CodeType) -> bool:
    """Whether a function runs around this one."""
    return any(at.f_code is function for at in _running())


def _forward_around(part: nn.Module) -> FrameType | None:
    """The outermost running forward of a module that `part` belongs to; None without one."""
    outermost = None
    for at in _running():
        if at.f_code.co_name == "forward" and at.f_code.co_argcount:
            module = _arguments(at)[0]
            if isinstance(module, nn.Module) and module is not part:
                outermost = at if any(part is m for m in module.modules()) else outermost
    return outermost


def methods_around() -> frozenset[int]:
    """The running methods of the script's modules."""
    return frozenset(
        id(at)
        for at in _running()
        if at.f_code.co_varnames[:1] == ("self",) and _is_method(at.f_code, at.f_globals)
    )


_METHODS: dict[CodeType, bool] = {}  # code of functions with a `self`: whether it is a module's


def _is_method(code: CodeType, names: dict[str, Any]) -> bool:
    """Whether a function is a method of a module's class, which stands among these names."""
    if code not in _METHODS:
        kinds = [kind for kind in list(names.values()) if isinstance(kind, type)]
        methods = [
            inspect.unwrap(vars(kind)[code.co_name])
            for kind in kinds
            if issubclass(kind, nn.Module) and kind is not nn.Module and code.co_name in vars(kind)
        ]
        _METHODS[code] = any(getattr(method, "__code__", None) is code for method in methods)
    return _METHODS[code]


def _arguments(function: FrameType) -> list[Any]:
    """The arguments of a running function that have names."""
    code = function.f_code
    return [function.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]


def watch_marks(marked: Callable[[str], None]) -> None:
    """From here on `marked` receives marks: names of ranges that begin in torch.profiler or NVTX,
    and "step" for the steps of a profiler."""

    def tell(home: Any, method: str, name_of: Callable[..., Any]) -> None:
        original = original_of(home, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            marked(str(name_of(*args, **kwargs)))
            return original(*args, **kwargs)

        put(home, {method: wrapped})

    nvtx: Any = torch.cuda.nvtx
    tell(torch.autograd.profiler.record_function, "__enter__", lambda region: region.name)
    tell(torch.profiler.profile, "step", lambda profiler: STEP)
    for name in ("range_push", "range_start", "mark"):
        tell(nvtx, name, lambda msg, *rest: msg)
