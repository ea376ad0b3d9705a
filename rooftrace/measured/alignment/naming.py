"""The kernels of a compiled step and their ops, by the names of the kernels alone.

This is for a trace of which nobody noted what the compiler made.  What names and the flow of
tensors cannot tell stays without ops.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.ops import find_rule
from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.measured.alignment import compiled, keys
from rooftrace.measured.alignment.compiled import Dataflow, KernelTime, Windows
from rooftrace.measured.alignment.stepcalls import (
    KernelWords,
    StepCall,
    StepWalk,
    Vocabulary,
    calls_beside,
    is_generated,
    merged,
    plain_name,
    stored_gradients,
    words_of,
)
from rooftrace.measured.profiles import Trace, TraceStep

_PRODUCTS = frozenset({"aten.mm", "aten.bmm"})
"""Products that a library also makes with a sum: "aten::addmm"."""
_NEAR = 64
"""As many ops of one name, on either side, may a kernel compute a part of."""
_LATER = frozenset({"backward", "recompute", "optimizer"})
"""Parts of a graph that run after its forward."""


def times_by_names(trace: Trace, detected: Plan) -> tuple[KernelTime, ...]:
    """The calls of a step of `trace`, in order: what they took, and their ops in the plan's graph.

    detected: the graph of the step as the execution model `compiled` runs it.  Of several steps it
    is the one of median time.  Raises ProfileError where no call has an op of the graph.
    """
    graph, step = detected.graph, _typical(trace)
    written = frozenset(
        plain_name(name)
        for names in (trace.ops.names, trace.kernels.names)
        for name in names.items
        if is_generated(name)
    )
    called = [call for call in StepWalk(trace, written, frozenset()).of(step) if _is_inside(call)]
    placing = _placed(called, Dataflow.of(graph), detected)
    left = [graph.ops[op] for op in placing.flow.ops if op not in placing.home]
    wanted = [keys.key_of_op(graph, op) for op in left]
    listed = StepWalk(trace, written, frozenset(wanted)).of(step)
    inside = [number for number, call in enumerate(listed) if _is_inside(call)]
    home = {op: inside[place] for op, place in placing.home.items()}
    beside, pieces = calls_beside(listed, left, wanted)
    pieces |= stored_gradients(listed, beside, graph)
    for op, reader in merged(graph, home, frozenset(beside.values())):
        home[op] = home[reader]
    ops: list[list[int]] = [[] for _ in listed]
    for op, number in (*home.items(), *((op, number) for number, op in beside.items())):
        ops[number].append(op)
    pieces |= {
        inside[place]: op for place, op in _partial(placing, called) if not ops[inside[place]]
    }
    if not any(ops):
        raise ProfileError(
            f"{trace.source}: no call of step {step.name} is of an op of {graph.title}; trace the "
            "module, the sizes and the phase of this step; on a CPU compile it with "
            'torch.compile(..., options={"cpp.enable_kernel_profile": True})'
        )
    return tuple(
        KernelTime(
            name=plain_name(call.name),
            seconds=call.seconds,
            ops=tuple(sorted(own)),
            targets=tuple(graph.ops[op].target for op in sorted(own)),
            parts=(pieces[number],) if number in pieces else (),
            compiled=_is_inside(call),
        )
        for number, (call, own) in enumerate(zip(listed, ops, strict=True))
    )


def is_compiled(trace: Trace) -> bool:
    """Whether a trace has kernels that Inductor wrote."""
    names = (*trace.ops.names.items, *trace.kernels.names.items)
    return any(map(is_generated, names))


def _reduces(target: str) -> bool:
    """Whether nothing that reads an op can compute it again by itself."""
    rule = find_rule(target)
    return rule is None or rule.fusion not in ("pointwise", "gather")


def _is_inside(call: StepCall) -> bool:
    return call.inside or is_generated(call.name)


def _typical(trace: Trace) -> TraceStep:
    """The step of median time."""
    if not trace.steps:
        raise ProfileError(f"{trace.source}: no step in the trace")
    middle = statistics.median_low(step.seconds for step in trace.steps)
    return next(step for step in trace.steps if step.seconds == middle)


def _placed(called: Sequence[StepCall], flow: Dataflow, detected: Plan) -> Placing:
    """The kernels of ops among these calls, by their places."""
    graph = detected.graph
    vocabulary = Vocabulary(graph.ops)
    kernels = [_named(call, vocabulary) for call in called]
    library = [kernel.library for kernel in kernels]
    mates = {op: frozenset(group.ops) - {op} for group in detected.groups for op in group.ops}
    turn, last = _first_of_backward(called, kernels), len(called) - 1
    forward, later = ((0, turn - 1), (turn, last)) if 0 < turn <= last else ((0, last), (0, last))
    ops: dict[int, PlacedOp] = {}
    for number in flow.ops:
        op = graph.ops[number]
        ops[number] = PlacedOp(
            words=words_of(op),
            limits=later if op.part in _LATER else forward,
            mates=mates.get(number, frozenset()),
            sizes=frozenset(math.prod(graph.values[value].shape) for value in op.outputs),
            reduces=_reduces(op.target),
        )
    placing = Placing(flow, kernels, ops)
    for place, number in _anchored(called, library, flow, graph, turn):
        placing.put(number, place)
        if graph.ops[number].name in _PRODUCTS and "add" in called[place].name:
            sums = (op for op in flow.readers[number] if graph.ops[op].name == "aten.add")
            joined = min(sums, default=None)  # the library adds the product to what is there
            if joined is not None and joined not in placing.home:
                placing.put(joined, place)
    placing.run()
    # What is cheap is computed in the backward alone, where only the backward reads it.
    placing.ops = {op: replace(own, limits=(own.limits[0], last)) for op, own in ops.items()}
    placing.run()
    return placing


def _named(call: StepCall, vocabulary: Vocabulary) -> NamedKernel:
    generated = is_generated(call.name)
    return NamedKernel(
        vocabulary.words(call.name),
        library=not generated,
        applies="_poi_fused" in call.name,
        sizes=frozenset(map(math.prod, call.shapes)) if generated else frozenset(),
    )


def _anchored(
    called: Sequence[StepCall],
    library: Sequence[bool],
    flow: Dataflow,
    graph: OpGraph,
    turn: int,
) -> Iterator[tuple[int, int]]:
    """(place, op) of calls into libraries.

    turn: where the backward begins; where that is known it is matched by itself.
    """
    shown, split = any(call.shapes for call in called), 0 < turn < len(called)
    for backward in (False, True) if split else (False,):
        have = [
            (place, _key(call) if shown else (compiled.kernel_family(call.name), ()))
            for place, call in enumerate(called)
            if library[place]
            and (split and place >= turn) == backward
            and not _continues(called, place)
        ]
        wanted: list[tuple[int, keys.Key]] = []
        for number in flow.ops:
            op = graph.ops[number]
            if (split and op.part in _LATER) == backward:
                name = op.name.replace(".", "::", 1)
                key = compiled.operands(name, keys.key_of_op(graph, op)[1])
                wanted.append((number, key if shown else (key[0], ())))
        yield from compiled.paired(have, wanted).items()


def _key(call: StepCall) -> keys.Key:
    if call.bare:
        return compiled.kernel_family(call.name), ()
    return compiled.operands(call.name, call.shapes)


def _continues(called: Sequence[StepCall], place: int) -> bool:
    """Whether a kernel that no op of the host names belongs to the call of the one before it."""
    call, before = called[place], called[place - 1] if place else None
    if before is None or not (call.bare and before.bare) or is_generated(before.name):
        return False
    family = compiled.kernel_family(call.name)
    if family == "convolution_backward" and call.name != before.name:
        return compiled.kernel_family(before.name) == family and not _continues(called, place - 1)
    return not family


def _first_of_backward(called: Sequence[StepCall], kernels: Sequence[NamedKernel]) -> int:
    """The place of the first kernel of the backward; behind the last where there is none.

    Where the trace does not say, the numbers of kernels begin again there.
    """
    marked = next((place for place, call in enumerate(called) if call.backward), None)
    if marked is not None:
        return marked
    seen: set[str] = set()
    highest, turn = -1, len(called)
    for place, (call, kernel) in enumerate(zip(called, kernels, strict=True)):
        if kernel.words.number is None or call.name in seen:
            continue
        seen.add(call.name)
        if kernel.words.number <= highest:
            turn, highest = place, -1
        highest = max(highest, kernel.words.number)
    return turn


def _partial(placing: Placing, called: Sequence[StepCall]) -> Iterator[tuple[int, int]]:
    """(place, op) of kernels that compute a part of an op for another one, or again.

    Its name lists the op, and it runs after what makes the operands of the op; of several it is the
    one whose kernel is nearest.  A library's kernel may also go on with what the one before began.
    """
    windows, home = placing.windows(), placing.home
    op_of = {place: op for op, place in home.items()}
    listing: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op, place in sorted(home.items(), key=lambda pair: pair[1]):
        for word in placing.ops[op].words:
            listing[word].append((place, op))
    for place, kernel in enumerate(placing.kernels):
        if place in op_of:
            continue
        if kernel.library and _continues(called, place) and place - 1 in op_of:
            op_of[place] = op_of[place - 1]
            yield place, op_of[place]
            continue
        near: list[tuple[int, int]] = []
        for word in kernel.words.words:
            at = bisect_left(listing[word], (place, 0))
            for other, op in listing[word][max(0, at - _NEAR) : at + _NEAR]:
                if all(windows.first[maker] <= place for maker in placing.flow.makers[op]):
                    near.append((abs(other - place), op))
        if near:
            yield place, min(near)[1]


# -- placing ---------------------------------------------------------------------------------------
# Which kernel of a step each op runs in, by the words in kernels' names and the flow of tensors.
#
# Known first are calls into libraries.  An op whose name only one kernel between its makers and its
# readers lists is in that kernel; each that is placed narrows the windows of its neighbours.  Where
# several kernels list it, the one that it fits best takes it, surest first.


_MOST = 128
"""As many kernels are weighed for one op, from the first on."""
_MARGINS = (2.0, 1.0, 0.5, 0.0)
"""By how much a kernel has to fit an op better than any other, one after another."""
_NEW, _NEIGHBOUR, _INLINED, _KIN, _MATE, _SIZE, _APPLIES = 2.0, 1.0, 1.0, 0.5, 0.5, 0.75, 1.0
"""What speaks for a kernel: no op so far stands for a word of its name; it has an op that this one
reads or that reads it; it has all that read it; one that reads the same; one that we would fuse
with it; a tensor of the size of its result; it applies what another kernel has reduced."""


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """A kernel of a step, as its name and its trace describe it."""

    words: KernelWords
    library: bool = False  # a call into a library, which computes one op
    applies: bool = False  # of one element at a time, on a device: it may end a reduction
    sizes: frozenset[int] = frozenset()  # elements of its arguments, where the trace has them


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """What decides where an op can be."""

    words: frozenset[str]  # under which it may stand in the name of a kernel
    limits: tuple[int, int]  # the first and the last kernel that it can be in by itself
    mates: frozenset[int] = frozenset()  # ops that we would put into one kernel with it
    sizes: frozenset[int] = frozenset()  # elements of what it writes
    reduces: bool = False  # whether no kernel that reads it computes it again


class Placing:
    """The kernels of ops, as they become known."""

    def __init__(
        self, flow: Dataflow, kernels: Sequence[NamedKernel], ops: Mapping[int, PlacedOp]
    ) -> None:
        """kernels: in launch order.  ops: those of the flow by id."""
        self.flow, self.kernels, self.ops = flow, kernels, ops
        self.home: dict[int, int] = {}
        self.library = [kernel.library for kernel in kernels]
        self.told: dict[int, set[str]] = defaultdict(set)  # words of a kernel with an op
        self.listing: dict[str, list[int]] = defaultdict(list)
        self.cut = [place for place, kernel in enumerate(kernels) if kernel.words.start]
        for place, kernel in enumerate(kernels):
            if not kernel.library:
                for word in kernel.words.words:
                    self.listing[word].append(place)

    def put(self, op: int, place: int) -> None:
        """Say that a kernel computes an op."""
        self.home[op] = place
        self.told[place].update(self.ops[op].words & self.kernels[place].words.words)

    def run(self) -> None:
        """Place all ops that names can place."""
        for margin in _MARGINS:
            while self._forced() or self._weighed(margin):
                pass
        self._begun_early()

    def windows(self) -> Windows:
        """The windows of all ops by what is known."""
        limits = {number: op.limits for number, op in self.ops.items()}
        return Windows.of(self.flow, self.home, self.library, limits)

    def candidates(self, op: int, begin: int, end: int) -> list[int]:
        """The kernels in a window whose names list an op."""
        places: set[int] = set()
        for word in self.ops[op].words:
            listed = self.listing.get(word, ())
            at = bisect_left(listed, begin)
            while at < len(listed) and listed[at] <= end and len(places) <= _MOST:
                places.add(listed[at])
                at += 1
        for place in self.cut:
            if begin <= place <= end and self.kernels[place].words.names(self.ops[op].words):
                places.add(place)
        return sorted(places)

    def _open(self) -> Iterator[tuple[int, list[int]]]:
        """Ops without a kernel, and the kernels that each can be in."""
        windows = self.windows()
        for op in self.flow.ops:
            if op in self.home:
                continue
            begin, end = windows.around(op)
            # Some may have been placed since the windows were made.
            made = [self.home[maker] for maker in self.flow.makers[op] if maker in self.home]
            read = [self.home[reader] for reader in self.flow.readers[op] if reader in self.home]
            places = self.candidates(op, max([begin, *made]), min([end, *read]))
            if places:
                yield op, places

    def _forced(self) -> bool:
        """Place what has one kernel only."""
        before = len(self.home)
        for op, places in self._open():
            if len(places) == 1:
                self.put(op, places[0])
        return len(self.home) > before

    def _weighed(self, margin: float) -> bool:
        """Place what fits one kernel better than any other by this margin, or the first of equal
        ones."""
        before = len(self.home)
        for op, places in self._open():
            fits = sorted((-self._fit(op, place), place) for place in places)
            if len(fits) == 1 or fits[1][0] - fits[0][0] >= margin:
                self.put(op, fits[0][1])
        return len(self.home) > before

    def _begun_early(self) -> None:
        """Place what a kernel lists that runs before all of its operands are there: each kernel of
        an operand writes its own part of a `cat`."""
        windows = self.windows()
        for op in self.flow.ops:
            if op not in self.home and self.flow.makers[op]:
                begin = min(windows.first[maker] for maker in self.flow.makers[op])
                places = [
                    place
                    for place in self.candidates(op, begin, windows.last[op])
                    if self._is_new(op, place)
                ]
                if places:
                    self.put(op, places[-1])

    def _is_new(self, op: int, place: int) -> bool:
        """Whether a kernel lists an op, and no op so far stands for that."""
        return bool(self.ops[op].words & self.kernels[place].words.words - self.told[place])

    def _is_listed(self, op: int) -> bool:
        """Whether the compiler wrote a kernel whose name lists an op, anywhere in the step."""
        return not self.listing.keys().isdisjoint(self.ops[op].words)

    def _fit(self, op: int, place: int) -> float:
        """How well an op fits into a kernel."""
        home, own = self.home.get, self.ops[op]
        readers, makers = self.flow.readers[op], self.flow.makers[op]
        kin, mates = self.flow.kin[op], own.mates
        applies = own.reduces and bool(readers) and self.kernels[place].applies
        if applies:
            makers = frozenset()
        elif own.reduces:
            if all(reader not in self.home and not self._is_listed(reader) for reader in readers):
                makers = mates = kin = frozenset()  # gradients of weights are in order
            readers = frozenset()
        elif self.kernels[place].applies and any(self.ops[reader].reduces for reader in readers):
            readers, mates = frozenset(), frozenset()  # it is there before the reduction is applied
        return (
            _NEW * self._is_new(op, place)
            + _NEIGHBOUR * any(home(near) == place for near in (*makers, *readers))
            + _INLINED * (bool(readers) and all(home(reader) == place for reader in readers))
            + _KIN * any(home(near) == place for near in kin)
            + _MATE * any(home(mate) == place for mate in mates)
            + _APPLIES * applies
            + _SIZE * bool(self.kernels[place].sizes & own.sizes)
        )
