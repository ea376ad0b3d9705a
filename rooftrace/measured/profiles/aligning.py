"""Which op of a graph each measured second of a profile belongs to.

Two ways.  A run that wrapped every op in `record_function("op 17")` says so itself.  Any other
trace is matched in order: the calls of each step and the ops of the graph are two sequences of
(name, input shapes), and the longest common subsequence pairs them.  Calls are taken at the level
of the graph: of `linear` that calls `addmm`, the one that the graph has.

Equal shapes pair first.  What is left between two pairs may pair with its sizes written otherwise:
without dimensions of 1, with the leading ones as one, with a weight transposed.

A trace without marks around its steps is cut where the ops of the graph come again (`periods`).
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from rooftrace.costmodels.fusion import runs
from rooftrace.hardware.units import format_share
from rooftrace.measured.profiles.periods import Period, periods
from rooftrace.measured.profiles.records import (
    NONE,
    Annotation,
    Cut,
    Profile,
    ProfileError,
    Shape,
    Step,
)
from rooftrace.tracer.graph import Op, OpGraph

Key = tuple[str, tuple[Shape, ...]]
"""What a call and an op are compared by: a name, and the shapes of tensors with dimensions."""

_OP = re.compile(r"op (\d+)")
_WINDOW = 40_000
"""So many calls and ops are matched at once: their table has a bit for every pair (200 MB)."""

# One op has other names by backend, and by whether somebody looked into it.
_SAME: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"aten::_?(scaled_dot_product|flash|efficient|cudnn)\w*attention\w*_backward",
         "attention_backward"),
        (r"aten::_?scaled_dot_product\w*attention\w*", "attention"),
        (r"rooftrace::(flex_)?attention_backward", "attention_backward"),
        (r"rooftrace::(flex_)?attention", "attention"),
        (r"aten::(lstm|gru|rnn_tanh|rnn_relu|_cudnn_rnn|miopen_rnn)|rooftrace::rnn", "rnn"),
        (r"aten::(_cudnn|miopen)_rnn_backward|rooftrace::rnn_backward", "rnn_backward"),
        (r"aten::(cudnn_|miopen_|_?native_)?batch_norm(_legit\w*|_impl_index|_with_update\w*)?"
         r"|aten::_batch_norm\w*(?<!backward)", "batch_norm"),
        (r"aten::(cudnn_|miopen_|native_)?batch_norm_backward", "batch_norm_backward"),
        (r"aten::(_fused_)?rms_norm|rooftrace::rms_norm", "rms_norm"),
        (r"aten::_fused_rms_norm_backward|rooftrace::rms_norm_backward", "rms_norm_backward"),
        (r"aten::(native_)?dropout", "aten::native_dropout"),
    )
)  # fmt: skip
_BY_FIRST_SHAPE = frozenset(
    {"attention", "batch_norm", "batch_norm_backward", "rms_norm", "rms_norm_backward"}
)
_BY_NAME = frozenset({"attention_backward", "rnn", "rnn_backward"})

# What the host does alone: metadata and allocations, whether or not the graph shows them.
_VIEWS = """
alias as_strided chunk detach empty empty_like empty_strided expand flatten lift_fresh narrow
permute resize resolve_conj resolve_neg reshape select slice split squeeze t transpose unbind
unflatten unfold unsqueeze view view_as _reshape_alias _unsafe_view
"""
_HOST = frozenset(f"aten::{name}" for name in _VIEWS.split())


@dataclass(frozen=True, slots=True)
class Stray:
    """Calls of the trace that the graph has not: totals of one step."""

    name: str
    shapes: tuple[Shape, ...]
    count: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured for one op of the graph: medians over the steps, one for each iteration.

    seconds: device seconds of each iteration that the op stands for (host seconds in a trace
    without kernels).  kernels: how many kernels an iteration launched (0 without any in the
    trace).  start: when the first of them began, after the beginning of the step.
    """

    op: int
    seconds: tuple[float, ...]
    kernels: float = 0.0
    start: float | None = None

    @property
    def total(self) -> float:
        """Seconds of all iterations."""
        return sum(self.seconds)


@dataclass(frozen=True)
class Alignment:
    """A profile beside a graph.

    how: "annotations" or "order".  measured: by op id of the graph, those that were found.
    coverage: share of the measured seconds that belong to an op.  only_in_trace: calls that the
    graph has not, most seconds first.  only_in_graph: ids of kernels that the trace has not (in
    none of their iterations).  step: the step of median length, for pictures.  places: (op id,
    iteration) by the index of the call.  first_difference: where the two part, in words.
    reshaped: calls that pair with their sizes written otherwise.  outside: share of the measured
    seconds that is in no step, where steps were cut by their period; else None.
    """

    profile: Profile
    graph: OpGraph
    how: str
    measured: Mapping[int, Measured]
    coverage: float
    only_in_trace: tuple[Stray, ...]
    only_in_graph: tuple[int, ...]
    step: Step
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict, repr=False)
    first_difference: str = ""
    reshaped: int = 0
    outside: float | None = None

    @property
    def seconds(self) -> dict[int, float]:
        """Measured seconds of a step by op id, all iterations together."""
        return {op: one.total for op, one in self.measured.items()}

    @cached_property
    def owners(self) -> Mapping[int, tuple[int, int]]:
        """(op id, iteration) that each call of `step`, or the one around it, was matched to."""
        parents = self.profile.ops.parent
        owner: dict[int, tuple[int, int]] = {}
        for op in self.step.ops:
            above = op
            while above != NONE and above not in self.places:
                above = parents[above]
            if above != NONE:
                owner[op] = self.places[above]
        return owner

    @property
    def ops_matched_share(self) -> float:
        """Share of the graph's kernels that were found, every iteration counted."""
        graph = self.graph
        kernels = sum(graph.times(op) for op in graph.ops if op.kind == "kernel")
        found = sum(len(one.seconds) for one in self.measured.values())
        return found / kernels if kernels else 1.0


def align(profile: Profile, graph: OpGraph, minimum: float = 0.5) -> Alignment:
    """Match the calls of a profile to the ops of `graph`, step by step.

    Raises ProfileError for a trace without shapes (unless its ops are annotated), and where less
    than `minimum` of its seconds, or of the graph's kernels, find their counterpart: a trace of
    another model, or of other sizes.
    """
    marks = _marks(profile)
    if marks:
        return _checked(_by_annotation(profile, graph, marks), minimum)
    if not profile.has_shapes:
        raise ProfileError(
            f"{profile.source}: no input shapes in the trace, so its ops cannot be told apart: "
            "profile with record_shapes=True"
        )
    return _checked(_by_order(profile, graph), minimum)


# -- keys ----------------------------------------------------------------------------------------


def key_of_op(graph: OpGraph, op: Op) -> Key:
    """The key of an op of a graph."""
    shapes = [graph.values[value].shape for value in op.inputs]
    return _key(op.name.replace(".", "::", 1), shapes)


def key_of_call(name: str, shapes: Sequence[Shape]) -> Key:
    """The key of a call in a trace."""
    return _key(name, list(_flat(shapes)))


def _key(name: str, shapes: Sequence[Shape]) -> Key:
    for pattern, same in _SAME:
        if pattern.fullmatch(name):
            name = same
            break
    else:
        name = name.removesuffix("_")  # add_ is what add is
    found = tuple(shape for shape in shapes if shape)
    if name in _BY_FIRST_SHAPE:
        found = found[:1]
    elif name in _BY_NAME:
        found = ()
    return name, found


_UNBATCHED = {"aten::bmm": "aten::mm", "aten::baddbmm": "aten::addmm"}
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"})
_LOOSER = 3
"""Ways to write the same sizes, each looser than the one before."""


def looser(key: Key, way: int) -> Key:
    """A key in which some harmless differences of shapes are gone.

    way 1: no leading dimensions of 1.  way 2: no dimensions of 1 at all.  way 3: all dimensions but
    the last as one, and of a matrix product the weight as if it lay either way.
    """
    name, shapes = key
    if way == 1:
        if name in _UNBATCHED and all(s[0] == 1 for s in shapes if len(s) == 3):
            name = _UNBATCHED[name]
        return name, tuple(filter(None, map(_without_leading, shapes)))
    name, shapes = looser(key, 1)
    found = [tuple(size for size in shape if size != 1) for shape in shapes]
    if way == 3:
        found = [(math.prod(s[:-1]), s[-1]) if len(s) > 1 else s for s in found]
        if name in _PRODUCTS:
            weights = [i for i, s in enumerate(found) if len(s) == 2][1:]
            for i in weights[-1:]:
                found[i] = tuple(sorted(found[i]))
    return name, tuple(filter(None, found))


def _without_leading(shape: Shape) -> Shape:
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _flat(shapes: Sequence[Shape]) -> Iterator[Shape]:
    """Shapes, those in lists of tensors one by one."""
    for shape in shapes:
        if shape and isinstance(shape[0], tuple):
            yield from _flat(shape)
        else:
            yield shape


def written_out(graph: OpGraph) -> list[tuple[int, int]]:
    """(op id, iteration) in the order of `graph.expand()`, iterations numbered as they run."""
    places = [op.repeats for op in graph.ops]

    def walk(part: range, depth: int, turn: int) -> Iterator[tuple[int, int]]:
        for repeat, inside in runs.segments(places, part, depth):
            if repeat is None:
                yield from ((index, turn) for index in inside)
                continue
            count = graph.repeats[repeat].count
            for iteration in range(count):
                yield from walk(inside, depth + 1, turn * count + iteration)

    return list(walk(range(len(places)), 0, 0))


# -- calls at the level of the graph -------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A call in a trace: its key, the seconds of what it did, and its kernels."""

    op: int
    key: Key
    name: str
    seconds: float
    kernels: tuple[int, ...]
    host: bool = False


class _Level:
    """Cuts the call trees of a trace where they meet the ops of the graph."""

    def __init__(self, profile: Profile, keys: frozenset[Key]) -> None:
        self.profile, self.keys = profile, keys
        self.loose = frozenset(looser(key, way) for key in keys for way in range(1, _LOOSER + 1))
        self.names = frozenset(name for name, _ in keys)
        self.calls, self.launches = profile.calls, profile.launches
        self._keys: dict[tuple[int, int], Key] = {}
        self._nearly: dict[Key, bool] = {}

    def nearly(self, key: Key) -> bool:
        """Whether the graph has this key with its sizes written otherwise."""
        if key not in self._nearly:
            ways = range(1, _LOOSER + 1)
            self._nearly[key] = any(looser(key, way) in self.loose for way in ways)
        return self._nearly[key]

    def of(self, step: Step) -> list[_Call]:
        """The calls of a step, and what it launched outside of any op."""
        parents = self.profile.ops.parent
        inside = set(step.ops)
        found: list[_Call] = []
        for op in step.ops:
            if parents[op] == NONE or parents[op] not in inside:
                found += self._cut(op)
        kernels = self.profile.kernels
        for kernel in step.kernels:
            if kernels.op[kernel] == NONE:
                name = kernels.names.items[kernels.name[kernel]]
                seconds = kernels.duration[kernel]
                found.append(_Call(NONE, (name, ()), name, seconds, (kernel,)))
        return found

    def key(self, op: int) -> Key:
        """The key of a call."""
        ops = self.profile.ops
        number = (ops.name[op], ops.inputs[op])
        if number not in self._keys:
            inputs = ops.inputs_known.items[number[1]] if number[1] != NONE else None
            shapes = inputs.shapes if inputs else ()
            self._keys[number] = key_of_call(ops.names.items[number[0]], shapes)
        return self._keys[number]

    def _cut(self, op: int) -> list[_Call]:
        key = self.key(op)
        if key in self.keys:
            return [self._whole(op, key)]
        below = [call for called in self.calls.get(op, ()) for call in self._cut(called)]
        known = any(call.key in self.keys for call in below)
        if not known and self.nearly(key):
            return [self._whole(op, key)]
        known = known or any(self.nearly(call.key) for call in below)
        # Nothing matches, but an op of the graph in other sizes is the better name for it.
        same = key[0] not in self.names and any(call.key[0] in self.names for call in below)
        return [*below, *self._own(op, key)] if known or same else [self._whole(op, key)]

    def _own(self, op: int, key: Key) -> list[_Call]:
        """What a call did itself, beside those that it made."""
        kernels = self.launches.get(op, ())
        if not kernels:
            return []
        seconds = sum(self.profile.kernels.duration[k] for k in kernels)
        return [_Call(op, key, self._name(op), seconds, kernels)]

    def _whole(self, op: int, key: Key) -> _Call:
        """A call with everything below it."""
        name = self._name(op)
        if not self.profile.on_device:
            return _Call(op, key, name, self.profile.ops.duration[op], (), self._on_host(op))
        kernels = tuple(k for below in self._below(op) for k in self.launches.get(below, ()))
        seconds = sum(self.profile.kernels.duration[k] for k in kernels)
        return _Call(op, key, name, seconds, kernels, not kernels)

    def _below(self, op: int) -> Iterator[int]:
        yield op
        for called in self.calls.get(op, ()):
            yield from self._below(called)

    def _on_host(self, op: int) -> bool:
        """Whether nothing in this call is work: views, allocations, wrappers of them."""
        name = self._name(op)
        if name in _HOST or name.startswith("aten::"):
            return name in _HOST
        return all(self._on_host(called) for called in self.calls.get(op, ()))

    def _name(self, op: int) -> str:
        return str(self.profile.ops.names.items[self.profile.ops.name[op]])


# -- by order ------------------------------------------------------------------------------------


def _by_order(profile: Profile, graph: OpGraph) -> Alignment:
    """Steps as the trace marks them; without the profiler's own marks also all of it as one step,
    and cut by its period: what matches best."""
    order = _Order(profile, graph)
    best = order.matched(profile)
    if profile.cut is None or profile.marked_by == PROFILER_STEP or _score(best) > _ENOUGH:
        return best
    whole = profile.cut.all()
    if profile.marked_by:
        found = order.matched(replace(profile, steps=(whole,)))
        best = found if _score(found) > _score(best) else best
    calls = order.of_the_graph(whole)
    for period in periods([call.key for call in calls], order.wanted):
        steps = order.steps_of(period, calls, profile.cut)
        if len(steps) < 2:
            continue
        found = order.matched(replace(profile, steps=steps))
        # What comes twice inside of a step is at most half of the graph.
        if found.ops_matched_share > 0.5 and _score(found) > _score(best):
            best = replace(found, outside=order.outside(whole, steps))
    return best


_ENOUGH = 0.75
"""A trace of two equal steps, taken as one, matches by half."""
PROFILER_STEP = "ProfilerStep"


def _score(found: Alignment) -> float:
    return min(found.coverage, found.ops_matched_share)


class _Order:
    """Matches steps of a trace to a graph, both in order."""

    def __init__(self, profile: Profile, graph: OpGraph) -> None:
        self.profile, self.graph = profile, graph
        self.kernels = [
            (op, turn) for op, turn in written_out(graph) if graph.ops[op].kind == "kernel"
        ]
        keys = {op.id: key_of_op(graph, op) for op in graph.ops if op.kind == "kernel"}
        self.wanted = [keys[op] for op, _ in self.kernels]
        self.level = _Level(profile, frozenset(self.wanted))
        self.known: dict[tuple[Key, ...], tuple[list[tuple[int, int]], int]] = {}

    def matched(self, profile: Profile) -> Alignment:
        """The steps of `profile` beside the graph."""
        sums = _Sums(profile, self.graph)
        differing: tuple[list[_Call], list[tuple[int, int]]] | None = None
        reshaped = 0
        for step in profile.steps:
            calls = self._calls(step)
            have = tuple(call.key for call in calls)
            if have not in self.known:
                self.known[have] = paired(have, self.wanted)
            pairs, loosely = self.known[have]
            reshaped += loosely
            differing = differing or (calls, pairs)
            partner = dict(pairs)
            for place, call in enumerate(calls):
                sums.add(step, call, self.kernels[partner[place]] if place in partner else None)
            sums.end()
        first = ""
        if differing:
            first = _first_difference(self.graph, *differing, self.kernels, self.wanted)
        return replace(sums.alignment("order", first), reshaped=reshaped)

    def _calls(self, step: Step) -> list[_Call]:
        level = self.level
        return [call for call in level.of(step) if not call.host or call.key in level.keys]

    # -- steps without marks -----------------------------------------------------------------------

    def of_the_graph(self, whole: Step) -> list[_Call]:
        """The calls of a trace that the graph has, too."""
        level = self.level
        return [
            call
            for call in self._calls(whole)
            if call.op != NONE and (call.key in level.keys or level.nearly(call.key))
        ]

    def steps_of(self, period: Period, calls: Sequence[_Call], cut: Cut) -> tuple[Step, ...]:
        """From the first call of each period to that of the next; the last is as long as others."""
        found: list[Step] = []
        for first, count in period.runs:
            places = [first + turn * period.length for turn in range(count)]
            starts = [self._start(calls[place].op) for place in places]
            last = calls[places[-1] + period.length - 1].op
            end = self._end(last)
            if starts != sorted(set(starts)):
                return ()  # one call is around several of them
            if len(starts) > 1:
                lengths = [b - a for a, b in pairwise(starts)]
                after = places[-1] + period.length
                until = self._start(calls[after].op) if after < len(calls) else math.inf
                end = max(end, min(starts[-1] + statistics.median(lengths), until))
            for start, stop in zip(starts, [*starts[1:], end], strict=True):
                found.append(cut(f"step {len(found)}", start, stop))
        return tuple(found)

    def _outermost(self, op: int) -> int:
        parents = self.profile.ops.parent
        while parents[op] != NONE:
            op = parents[op]
        return op

    def _start(self, op: int) -> float:
        return self.profile.ops.start[self._outermost(op)]

    def _end(self, op: int) -> float:
        ops, op = self.profile.ops, self._outermost(op)
        return ops.start[op] + ops.duration[op]

    def outside(self, whole: Step, steps: Sequence[Step]) -> float:
        """Share of the measured seconds that is in none of the steps."""
        total = sum(call.seconds for call in self._calls(whole))
        inside = sum(call.seconds for step in steps for call in self._calls(step))
        return max(0.0, 1 - inside / total) if total else 0.0


def paired(have: Sequence[Key], wanted: Sequence[Key]) -> tuple[list[tuple[int, int]], int]:
    """Pairs of positions, both rising, and how many of them only pair by `looser` keys.

    Between two pairs of one way to write sizes the next looser one is tried.
    """
    pairs = common(have, wanted)
    exact = len(pairs)
    for way in range(1, _LOOSER + 1):
        if len(pairs) == min(len(have), len(wanted)):
            break
        found: list[tuple[int, int]] = []
        i = j = 0
        for a, b in [*pairs, (len(have), len(wanted))]:
            if i < a and j < b:
                left = [looser(key, way) for key in have[i:a]]
                right = [looser(key, way) for key in wanted[j:b]]
                found += [(i + x, j + y) for x, y in common(left, right)]
            if a < len(have):
                found.append((a, b))
            i, j = a + 1, b + 1
        pairs = found
    return pairs, len(pairs) - exact


def common(have: Sequence[Key], wanted: Sequence[Key]) -> list[tuple[int, int]]:
    """Pairs of positions of a longest common subsequence, both rising."""
    from rapidfuzz.distance import LCSseq

    numbers: dict[Key, int] = {}
    a = [numbers.setdefault(key, len(numbers)) for key in have]
    b = [numbers.setdefault(key, len(numbers)) for key in wanted]
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        last = len(a) - i <= _WINDOW and len(b) - j <= _WINDOW
        found = [
            (i + block.src_start + k, j + block.dest_start + k)
            for block in LCSseq.opcodes(a[i : i + _WINDOW], b[j : j + _WINDOW])
            if block.tag == "equal"
            for k in range(block.src_end - block.src_start)
        ]
        if not last:  # what is near the end of a window may have its partner behind it
            found = found[: max(1, len(found) * 3 // 4)]
        pairs += found
        if last or not found:
            break
        i, j = found[-1][0] + 1, found[-1][1] + 1
    return pairs


def _first_difference(
    graph: OpGraph,
    calls: Sequence[_Call],
    pairs: Sequence[tuple[int, int]],
    kernels: Sequence[tuple[int, int]],
    wanted: Sequence[Key],
) -> str:
    """Where trace and graph part, in words."""
    paired = dict(pairs)
    place = next((i for i in range(len(calls)) if paired.get(i) != i), len(calls))
    other = min(place, len(wanted))
    here = _words(calls[place].key) if place < len(calls) else "its end"
    if other >= len(wanted):
        return f"after {place} equal ops the trace has {here}, the graph its end"
    op = graph.ops[kernels[other][0]]
    where = f" in {op.module}" if op.module else ""
    return (
        f"after {place} equal ops the trace has {here}, "
        f"the graph {_words(wanted[other])} (op {op.id}{where})"
    )


def _words(key: Key) -> str:
    """ "aten::mm [[8, 64], [64, 64]]"."""
    shapes = ", ".join(str(list(shape)) for shape in key[1][:4])
    return f"{key[0]} [{shapes}{', ...' if len(key[1]) > 4 else ''}]"


# -- by annotation -------------------------------------------------------------------------------


def _marks(profile: Profile) -> list[tuple[int, Annotation]]:
    """(op id, range) of each `record_function("op 17")`, by start."""
    found = ((_OP.fullmatch(one.name), one) for one in profile.annotations)
    return [(int(match[1]), one) for match, one in found if match]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A range around an op: which op and iteration it is, in which pass over the graph."""

    range: Annotation
    target: tuple[int, int]
    run: int


def _by_annotation(
    profile: Profile, graph: OpGraph, marks: Sequence[tuple[int, Annotation]]
) -> Alignment:
    """Ids are those of `graph.expand()`; or of the graph, where one stands for all iterations."""
    order = written_out(graph)
    last = max(number for number, _ in marks)
    if last >= len(order):
        raise ProfileError(
            f'{profile.source}: the trace has "op {last}", the graph {len(order):,} ops: '
            "it is a run of another graph"
        )
    short = last < len(graph.ops)
    level = _Level(profile, frozenset())
    sums = _Sums(profile, graph)
    for step in profile.steps:
        end = step.start + step.duration
        inside = [(number, one) for number, one in marks if step.start <= one.start <= end]
        _add_marked(level, sums, step, _passes(graph, inside, order, short))
    return sums.alignment("annotations")


def _passes(
    graph: OpGraph,
    marks: Sequence[tuple[int, Annotation]],
    order: Sequence[tuple[int, int]],
    short: bool,
) -> list[_Marked]:
    """What each range stands for.  A pass is over when an op comes once more than it runs."""
    found: list[_Marked] = []
    seen: Counter[int] = Counter()
    run = 0
    for number, one in marks:
        if seen[number] == (graph.times(graph.ops[number]) if short else 1):
            seen.clear()
            run += 1
        found.append(_Marked(one, (number, seen[number]) if short else order[number], run))
        seen[number] += 1
    return found


def _add_marked(level: _Level, sums: _Sums, step: Step, marked: Sequence[_Marked]) -> None:
    """The calls of a step go to the range that they begin in, and kernels to that of their call."""
    starts = [one.range.start for one in marked]
    ops, kernels = level.profile.ops, level.profile.kernels
    runs: dict[int, list[tuple[_Call, tuple[int, int] | None]]] = defaultdict(list)
    for call in level.of(step):
        known = call.op != NONE
        start = ops.start[call.op] if known else kernels.launched[call.kernels[0]]
        place = bisect_right(starts, start) - 1
        one = marked[place] if place >= 0 else None
        inside = one is not None and start <= one.range.end
        if one is not None and known:
            inside = inside and ops.thread[call.op] == one.range.thread
        target = one.target if one is not None and inside else None
        if target is not None or not call.host:
            runs[one.run if one is not None else 0].append((call, target))
    for _, calls in sorted(runs.items()):
        for call, target in calls:
            sums.add(step, call, target)
        sums.end()


# -- sums ----------------------------------------------------------------------------------------


class _Sums:
    """Adds up what is found, step by step."""

    def __init__(self, profile: Profile, graph: OpGraph) -> None:
        self.profile, self.graph = profile, graph
        self.steps = 0
        self.matched = self.total = 0.0
        self.seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.kernels: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.starts: dict[int, list[float]] = defaultdict(list)
        self.strays: dict[tuple[str, Key], list[float]] = {}
        self.places: dict[int, tuple[int, int]] = {}
        self._step: dict[tuple[int, int], list[Any]] = {}

    def add(self, step: Step, call: _Call, target: tuple[int, int] | None) -> None:
        """One call, and the (op, iteration) that it is."""
        self.total += call.seconds
        if target is None:
            entry = self.strays.setdefault((call.name, call.key), [0, 0.0])
            entry[0] += 1
            entry[1] += call.seconds
            return
        self.matched += call.seconds
        now = self._step.setdefault(target, [0.0, 0, None])
        now[0] += call.seconds
        now[1] += len(call.kernels)
        if call.op != NONE:
            self.places[call.op] = target
        if now[2] is None:
            table = self.profile.kernels if call.kernels else self.profile.ops
            first = min(call.kernels, key=table.start.__getitem__) if call.kernels else call.op
            now[2] = table.start[first] - step.start

    def end(self) -> None:
        """The step is over."""
        self.steps += 1
        for target, (seconds, kernels, start) in self._step.items():
            self.seconds[target].append(seconds)
            self.kernels[target].append(kernels)
            self.starts[target[0]].append(start)
        self._step = {}

    def alignment(self, how: str, first: str = "") -> Alignment:
        """What all steps say."""
        turns: dict[int, list[int]] = defaultdict(list)
        for op, turn in sorted(self.seconds):
            turns[op].append(turn)
        median = statistics.median
        measured = {
            op: Measured(
                op,
                tuple(median(self.seconds[op, turn]) for turn in found),
                statistics.fmean(median(self.kernels[op, turn]) for turn in found),
                min(self.starts[op]),
            )
            for op, found in turns.items()
        }
        strays = [
            Stray(name, key[1], count / self.steps, seconds / self.steps)
            for (name, key), (count, seconds) in self.strays.items()
            if seconds > 0
        ]
        steps = sorted(self.profile.steps, key=lambda step: step.seconds)
        return Alignment(
            self.profile,
            self.graph,
            how,
            measured,
            self.matched / self.total if self.total else 0.0,
            tuple(sorted(strays, key=lambda one: (-one.seconds, one.name))),
            tuple(op.id for op in self.graph.ops if op.kind == "kernel" and op.id not in measured),
            steps[(len(steps) - 1) // 2],
            self.places,
            first,
        )


def _checked(found: Alignment, minimum: float) -> Alignment:
    """`found`, or a ProfileError where trace and graph are not of the same step."""
    if found.coverage >= minimum and found.ops_matched_share >= minimum:
        return found
    first = found.first_difference
    advice = "trace the model, the sizes and the phase that were run"
    sizes = _other_sizes(found)
    if sizes:
        advice = f"the names agree and the sizes do not ({sizes}): trace the sizes that were run"
    elif not found.profile.marked_by and found.ops_matched_share >= minimum:
        advice = (
            "the trace holds the graph and more, and says not where a step begins: it has no "
            "range ProfilerStep#N and none named step, and no sequence of the graph's ops that "
            "comes twice without a difference; mark the steps with "
            "profile(..., schedule=...) and prof.step(), or with record_function('step')"
        )
    raise ProfileError(
        f"{found.profile.source}: not a run of this graph: "
        f"{format_share(found.coverage)} of its measured time and "
        f"{format_share(found.ops_matched_share)} of the graph's kernels find a counterpart"
        f"{'; ' + first if first else ''}; {advice}"
    )


def _other_sizes(found: Alignment) -> str:
    """An op that both have, in other sizes; "" where the names differ too."""
    graph = found.graph
    theirs: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    keys: dict[str, Key] = {}
    for one in found.only_in_trace:
        theirs[key_of_call(one.name, one.shapes)[0]] += round(one.count)
    for index in found.only_in_graph:
        key = key_of_op(graph, graph.ops[index])
        ours[key[0]] += graph.times(graph.ops[index])
        keys.setdefault(key[0], key)
    if 5 * (ours & theirs).total() < 4 * ours.total():
        return ""
    for one in found.only_in_trace:
        name = key_of_call(one.name, one.shapes)[0]
        if name in keys and one.shapes:
            return f"trace {_words((one.name, one.shapes))}, graph {_words(keys[name])}"
    return ""
