"""The kernels of a compiled step and their ops, inferred from the names of the kernels.

This is for a trace without notes of the compiler.  A kernel stays without ops where neither names
nor the flow of tensors tell them.
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
    calls_outside,
    is_generated,
    merged,
    op_words,
    plain_name,
    stored_gradients,
)
from rooftrace.measured.profiles import Trace, TraceStep

_PRODUCTS = frozenset({"aten.mm", "aten.bmm"})
"""Products that a library may fuse with a sum: "aten::addmm"."""
_NEAR = 64
"""Ops of one name, on either side of a kernel, that it may compute a part of."""
_LATER = frozenset({"backward", "recompute", "optimizer"})
"""Parts of a graph that run after its forward."""


def times_by_names(trace: Trace, detected: Plan) -> tuple[KernelTime, ...]:
    """The calls of a step of `trace` in order, with seconds and their ops in the plan's graph.

    detected: the graph of the step as the execution model `compiled` runs it.  The step is the one
    of median time.  Raises ProfileError where no call has an op of the graph.
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
    home = {op: inside[kernel] for op, kernel in placing.home.items()}
    outside, parts = calls_outside(listed, left, wanted)
    parts |= stored_gradients(listed, outside, graph)
    for op, reader in merged(graph, home, frozenset(outside.values())):
        home[op] = home[reader]
    ops: list[list[int]] = [[] for _ in listed]
    for op, number in (*home.items(), *((op, number) for number, op in outside.items())):
        ops[number].append(op)
    parts |= {
        inside[kernel]: op for kernel, op in _partial(placing, called) if not ops[inside[kernel]]
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
            ops=tuple(sorted(computed)),
            targets=tuple(graph.ops[op].target for op in sorted(computed)),
            parts=(parts[number],) if number in parts else (),
            compiled=_is_inside(call),
        )
        for number, (call, computed) in enumerate(zip(listed, ops, strict=True))
    )


def is_compiled(trace: Trace) -> bool:
    """Whether a trace has kernels that Inductor wrote."""
    names = (*trace.ops.names.items, *trace.kernels.names.items)
    return any(map(is_generated, names))


def _reduces(target: str) -> bool:
    """Whether no reader of an op can compute it again."""
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
    """The kernels of ops among these calls."""
    graph = detected.graph
    vocabulary = Vocabulary(graph.ops)
    kernels = [_named(call, vocabulary) for call in called]
    library = [kernel.library for kernel in kernels]
    mates = {op: frozenset(group.ops) - {op} for group in detected.groups for op in group.ops}
    begin, last = _first_of_backward(called, kernels), len(called) - 1
    forward = later = (0, last)
    if 0 < begin <= last:
        forward, later = (0, begin - 1), (begin, last)
    ops: dict[int, PlacedOp] = {}
    for number in flow.ops:
        op = graph.ops[number]
        ops[number] = PlacedOp(
            words=op_words(op.name),
            limits=later if op.part in _LATER else forward,
            mates=mates.get(number, frozenset()),
            sizes=frozenset(math.prod(graph.values[value].shape) for value in op.outputs),
            reduces=_reduces(op.target),
        )
    placing = Placing(flow, kernels, ops)
    for kernel, number in _anchored(called, library, flow, graph, begin):
        placing.put(number, kernel)
        if graph.ops[number].name in _PRODUCTS and "add" in called[kernel].name:
            sums = (op for op in flow.readers[number] if graph.ops[op].name == "aten.add")
            joined = min(sums, default=None)  # the library adds the product to an operand
            if joined is not None and joined not in placing.home:
                placing.put(joined, kernel)
    placing.run()
    # A cheap op that only the backward reads is computed in the backward alone.
    placing.ops = {n: replace(op, limits=(op.limits[0], last)) for n, op in ops.items()}
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
    begin: int,
) -> Iterator[tuple[int, int]]:
    """(kernel, op) of calls into libraries.

    begin: the first kernel of the backward; if there is one, it is matched apart from the forward.
    """
    shown, split = any(call.shapes for call in called), 0 < begin < len(called)
    for backward in (False, True) if split else (False,):
        have = [
            (kernel, _key(call) if shown else (compiled.kernel_family(call.name), ()))
            for kernel, call in enumerate(called)
            if library[kernel]
            and (split and kernel >= begin) == backward
            and not _continues(called, kernel)
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


def _continues(called: Sequence[StepCall], number: int) -> bool:
    """Whether a kernel that no op of the host names belongs to the call of the one before it."""
    call, before = called[number], called[number - 1] if number else None
    if before is None or not (call.bare and before.bare) or is_generated(before.name):
        return False
    family = compiled.kernel_family(call.name)
    if family == "convolution_backward" and call.name != before.name:
        return compiled.kernel_family(before.name) == family and not _continues(called, number - 1)
    return not family


def _first_of_backward(called: Sequence[StepCall], kernels: Sequence[NamedKernel]) -> int:
    """The number of the first kernel of the backward; that after the last without a backward.

    If the trace does not mark it, the numbers in names of kernels begin again there.
    """
    marked = next((number for number, call in enumerate(called) if call.backward), None)
    if marked is not None:
        return marked
    seen: set[str] = set()
    highest, begin = -1, len(called)
    for number, (call, kernel) in enumerate(zip(called, kernels, strict=True)):
        if kernel.words.number is None or call.name in seen:
            continue
        seen.add(call.name)
        if kernel.words.number <= highest:
            begin, highest = number, -1
        highest = max(highest, kernel.words.number)
    return begin


def _partial(placing: Placing, called: Sequence[StepCall]) -> Iterator[tuple[int, int]]:
    """(kernel, op) of kernels that compute a part of an op for another one, or again.

    Its name lists the op, and it runs after the makers of its operands; of several ops it is the
    one whose kernel is nearest.  A library kernel may also continue the call of the one before.
    """
    windows, home = placing.windows(), placing.home
    op_of = {kernel: op for op, kernel in home.items()}
    listing: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for op, number in sorted(home.items(), key=lambda pair: pair[1]):
        for word in placing.ops[op].words:
            listing[word].append((number, op))
    for number, kernel in enumerate(placing.kernels):
        if number in op_of:
            continue
        if kernel.library and _continues(called, number) and number - 1 in op_of:
            op_of[number] = op_of[number - 1]
            yield number, op_of[number]
            continue
        near: list[tuple[int, int]] = []
        for word in kernel.words.words:
            at = bisect_left(listing[word], (number, 0))
            for other, op in listing[word][max(0, at - _NEAR) : at + _NEAR]:
                if all(windows.first[maker] <= number for maker in placing.flow.makers[op]):
                    near.append((abs(other - number), op))
        if near:
            yield number, min(near)[1]


# -- placing ---------------------------------------------------------------------------------------
# Calls into libraries are placed first.  An op that only one kernel between its makers and its
# readers lists in its name is in that kernel; each placed op narrows the windows of its neighbours.
# Where several kernels list it, the best fit takes it, surest first.


_MOST = 128
"""Kernels that are weighed for one op, from the first on."""
_MARGINS = (2.0, 1.0, 0.5, 0.0)
"""Margins over the second best fit, one round for each."""
_NEW, _NEIGHBOUR, _INLINED, _KIN, _MATE, _SIZE, _APPLIES = 2.0, 1.0, 1.0, 0.5, 0.5, 0.75, 1.0
"""Points for a kernel: a word of its name has no op yet; it has a maker or a reader of the op; it
has all its readers; another reader of its inputs; an op that we would fuse with it; a tensor of the
size of its result; it is pointwise and the op ends a reduction."""


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """A kernel of a step, by its name and its trace."""

    words: KernelWords
    library: bool = False  # a call into a library, which computes one op
    applies: bool = False  # of one element at a time, on a device: it may end a reduction
    sizes: frozenset[int] = frozenset()  # elements of its arguments, where the trace has them


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """Facts of an op that decide its kernel."""

    words: frozenset[str]  # under which it may stand in the name of a kernel
    limits: tuple[int, int]  # the first and the last kernel that it can be in
    mates: frozenset[int] = frozenset()  # ops that we would fuse with it
    sizes: frozenset[int] = frozenset()  # elements of its outputs
    reduces: bool = False  # whether no kernel that reads it computes it again


class Placing:
    """The kernels of ops that are placed so far.

    kernels: in launch order.  ops: of the flow, by id.
    """

    def __init__(
        self, flow: Dataflow, kernels: Sequence[NamedKernel], ops: Mapping[int, PlacedOp]
    ) -> None:
        self.flow, self.kernels, self.ops = flow, kernels, ops
        self.home: dict[int, int] = {}
        self.library = [kernel.library for kernel in kernels]
        self.used: dict[int, set[str]] = defaultdict(set)  # words of a kernel that have an op
        self.listing: dict[str, list[int]] = defaultdict(list)
        self.cut = [number for number, kernel in enumerate(kernels) if kernel.words.start]
        for number, kernel in enumerate(kernels):
            if not kernel.library:
                for word in kernel.words.words:
                    self.listing[word].append(number)

    def put(self, op: int, kernel: int) -> None:
        """Place an op in a kernel."""
        self.home[op] = kernel
        self.used[kernel].update(self.ops[op].words & self.kernels[kernel].words.words)

    def run(self) -> None:
        """Place all ops that names can place."""
        for margin in _MARGINS:
            while self._forced() or self._weighed(margin):
                pass
        self._begun_early()

    def windows(self) -> Windows:
        """The windows of all ops, by the ops placed so far."""
        limits = {number: op.limits for number, op in self.ops.items()}
        return Windows.of(self.flow, self.home, self.library, limits)

    def candidates(self, op: int, begin: int, end: int) -> list[int]:
        """The kernels in a window whose names list an op."""
        numbers: set[int] = set()
        for word in self.ops[op].words:
            listed = self.listing.get(word, ())
            at = bisect_left(listed, begin)
            while at < len(listed) and listed[at] <= end and len(numbers) <= _MOST:
                numbers.add(listed[at])
                at += 1
        for number in self.cut:
            if begin <= number <= end and self.kernels[number].words.names(self.ops[op].words):
                numbers.add(number)
        return sorted(numbers)

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
            kernels = self.candidates(op, max([begin, *made]), min([end, *read]))
            if kernels:
                yield op, kernels

    def _forced(self) -> bool:
        """Place ops with one candidate."""
        before = len(self.home)
        for op, kernels in self._open():
            if len(kernels) == 1:
                self.put(op, kernels[0])
        return len(self.home) > before

    def _weighed(self, margin: float) -> bool:
        """Place ops whose best fit leads by this margin; at margin 0, in the first of equals."""
        before = len(self.home)
        for op, kernels in self._open():
            fits = sorted((-self._fit(op, kernel), kernel) for kernel in kernels)
            if len(fits) == 1 or fits[1][0] - fits[0][0] >= margin:
                self.put(op, fits[0][1])
        return len(self.home) > before

    def _begun_early(self) -> None:
        """Place ops in kernels that run before the last operand: each kernel of an operand of a
        `cat` writes its part of the result."""
        windows = self.windows()
        for op in self.flow.ops:
            if op not in self.home and self.flow.makers[op]:
                begin = min(windows.first[maker] for maker in self.flow.makers[op])
                kernels = [
                    kernel
                    for kernel in self.candidates(op, begin, windows.last[op])
                    if self._is_new(op, kernel)
                ]
                if kernels:
                    self.put(op, kernels[-1])

    def _is_new(self, op: int, kernel: int) -> bool:
        """Whether a kernel lists an op by a word that no placed op has."""
        return bool(self.ops[op].words & self.kernels[kernel].words.words - self.used[kernel])

    def _is_listed(self, op: int) -> bool:
        """Whether the compiler wrote a kernel whose name lists an op, anywhere in the step."""
        return not self.listing.keys().isdisjoint(self.ops[op].words)

    def _fit(self, op: int, number: int) -> float:
        """The points of a kernel for an op."""
        home, placed, kernel = self.home.get, self.ops[op], self.kernels[number]
        readers, makers = self.flow.readers[op], self.flow.makers[op]
        kin, mates = self.flow.kin[op], placed.mates
        applies = placed.reduces and bool(readers) and kernel.applies
        if applies:
            makers = frozenset()
        elif placed.reduces:
            if all(reader not in self.home and not self._is_listed(reader) for reader in readers):
                makers = mates = kin = frozenset()  # gradients of weights are in order
            readers = frozenset()
        elif kernel.applies and any(self.ops[reader].reduces for reader in readers):
            readers, mates = frozenset(), frozenset()  # the op runs before the reduction ends
        return (
            _NEW * self._is_new(op, number)
            + _NEIGHBOUR * any(home(near) == number for near in (*makers, *readers))
            + _INLINED * (bool(readers) and all(home(reader) == number for reader in readers))
            + _KIN * any(home(near) == number for near in kin)
            + _MATE * any(home(mate) == number for mate in mates)
            + _APPLIES * applies
            + _SIZE * bool(kernel.sizes & placed.sizes)
        )
