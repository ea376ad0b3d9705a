"""Calls of a compiled step in a trace: words in kernel names, the ops behind them, the times."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rooftrace.costmodels.ops import find_rule
from rooftrace.errors import ProfileError
from rooftrace.graph import Op, OpGraph
from rooftrace.measured.alignment import keys
from rooftrace.measured.alignment.compiled import (
    CompiledGraph,
    CompiledKernel,
    KernelTime,
    is_launched,
    matched,
)
from rooftrace.measured.profiles import Trace, TraceStep, records

# -- words -----------------------------------------------------------------------------------------
# Inductor names a kernel after the ops that its nodes were decomposed from: their names without
# namespace and overload, sorted, each once, joined by underscores, with a number behind them.

_GRAPH = re.compile(r"^graph_\d+_")
"""The prefix of the name of a kernel in the profiler's range on a CPU."""
_WRITTEN = re.compile(
    r"^(?:\w+?_)?(?:cpp|mps|(?:triton|pallas|halide|cutedsl)_[a-z]{2,4})_fused(?:_(\w*?))??(?:_(\d+))?$"
)
_LONGEST = 9
"""The most pieces between underscores in the name of an op."""
_ELSEWHERE, _NO_OP, _UNSORTED = 2.2, 4.0, 3.0
"""Costs of reading an op that is not in the graph, a piece that is in no op's name, and an op that
is not in order; an op of the graph costs 1."""
_ALSO: Mapping[str, frozenset[str]] = {
    "batch_norm": frozenset({"native_batch_norm_legit", "native_batch_norm_legit_functional"}),
    "rms_norm": frozenset({"fused_rms_norm", "rsqrt"}),
    "rms_norm_backward": frozenset({"fused_rms_norm_backward", "pow"}),
    "attention": frozenset({"softmax", "safe_softmax", "bmm", "baddbmm"}),
    "attention_backward": frozenset({"softmax_backward_data", "bmm"}),
    "rnn": frozenset({"mkldnn_rnn_layer", "tanh", "sigmoid"}),
    "rnn_backward": frozenset({"mkldnn_rnn_layer_backward", "tanh_backward", "sigmoid_backward"}),
    "select_backward": frozenset({"select_scatter"}),
    "slice_backward": frozenset({"slice_scatter"}),
    "upsample_nearest2d": frozenset({"unsafe_index"}),
    "upsample_nearest2d_backward": frozenset({"unsafe_index_put"}),
}
"""Other names of an op in a compiler, and the ops that it decomposes it into."""


@dataclass(frozen=True, slots=True)
class KernelWords:
    """The ops that the name of a kernel lists."""

    words: frozenset[str]  # without underscores around them: "softmax" of "_softmax"
    start: str = ""  # of one more op, where the name is cut
    number: int | None = None  # of the kernel in its graph

    def names(self, words: frozenset[str]) -> bool:
        """Whether the name has one of these words."""
        return not self.words.isdisjoint(words) or bool(
            self.start and any(word.startswith(self.start) for word in words)
        )


def plain_name(name: str) -> str:
    """The name of a kernel without the number of its graph."""
    return _GRAPH.sub("", name)


def is_generated(name: str) -> bool:
    """Whether a call in a trace is of a kernel that Inductor wrote."""
    return _WRITTEN.match(plain_name(name)) is not None


class Vocabulary:
    """Reads the names of kernels of a step, given the names of the ops in its graph.

    "index_select" may be one op or two: ops of the graph are preferred.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._in_graph = frozenset(op.name.partition(".")[2].strip("_") for op in ops)
        self._read: dict[str, KernelWords] = {}

    def words(self, name: str) -> KernelWords:
        """The ops in the name of a kernel that Inductor wrote, or of a library call."""
        if name not in self._read:
            self._read[name] = self._of(name)
        return self._read[name]

    def _of(self, name: str) -> KernelWords:
        match = _WRITTEN.match(plain_name(name))
        if match is None:
            return KernelWords(frozenset({_common(keys.common_name(name).rpartition("::")[2])}))
        listed, number = match.groups()
        read = self._split((listed or "").split("_"))
        start = ""
        if number is None:
            complete = len(read)
            while complete and self._price(read[complete - 1]) > _ELSEWHERE:
                complete -= 1
            if complete == len(read) and self._price(read[-1]) > 1:  # "tan" may be cut "tanh"
                complete -= 1
            start = "_".join(read[complete:]).lstrip("_")
            read = read[:complete]
        words = frozenset(_common(word) for word in read if word.strip("_"))
        return KernelWords(words, start, None if number is None else int(number))

    def _split(self, pieces: Sequence[str]) -> list[str]:
        """The cheapest reading of the pieces of a name as words: few, and sorted."""
        best: list[dict[str, tuple[float, tuple[str, ...]]]] = [{} for _ in range(len(pieces) + 1)]
        best[0][""] = (0.0, ())
        for begin in range(len(pieces)):
            for last, (cost, before) in best[begin].items():
                for end in range(begin + 1, min(begin + _LONGEST, len(pieces)) + 1):
                    word = "_".join(pieces[begin:end])
                    is_op = _is_op(word)
                    if not is_op and end > begin + 1:
                        continue
                    price = cost + self._price(word) + _UNSORTED * (is_op and word <= last)
                    key = word if is_op else last
                    if key not in best[end] or price < best[end][key][0]:
                        best[end][key] = (price, (*before, word))
        return list(min(best[-1].values())[1])

    def _price(self, word: str) -> float:
        """The cost of reading this word."""
        if word.strip("_") in self._in_graph:
            return 1.0
        return _ELSEWHERE if _is_op(word) else _NO_OP if word else 0.5


def _common(word: str) -> str:
    """The common word of an op: "attention" for "_scaled_dot_product_flash_attention"."""
    return keys.common_name(f"aten::{word}").rpartition("::")[2].strip("_")


@cache
def op_words(op_name: str) -> frozenset[str]:
    """The words of an op in names of kernels: "gelu" for "aten.gelu"."""
    word = op_name.partition(".")[2].strip("_")
    also = _ALSO.get(_common(word), frozenset()) | _ALSO.get(word, frozenset())
    return frozenset(map(_common, {word, *also}))


@cache
def _is_op(word: str) -> bool:
    """Whether there is an op of this name."""
    if not word.strip("_"):
        return False
    if word.strip("_") in _OTHERS:
        return True
    return any(find_rule(f"{space}.{word}.default") is not None for space in ("aten", "prims"))


_OTHERS = frozenset(word for also in _ALSO.values() for word in also) | _ALSO.keys()


# -- calls -----------------------------------------------------------------------------------------

_REGION = re.compile(r"CompiledFunction(Backward)?$|Torch-Compiled Region")
"""Calls of the profiler around compiled code."""
_STORES = "AccumulateGrad"
"""Part of the name of the call by which autograd stores the gradient of a weight."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call in the trace: of a kernel in a compiled graph, or of an op outside of these."""

    name: str
    seconds: float
    inside: bool  # of a compiled graph
    key: keys.Key
    start: float  # s
    bare: bool = False  # a kernel that no op of the host names
    gradient: records.Shape | None = None  # the shape of the gradient that autograd stores by it
    shapes: tuple[records.Shape, ...] = ()  # of its tensors, where the trace has them
    backward: bool = False  # whether it is in the backward of a compiled graph


class StepWalk:
    """Walks the calls of a trace down to kernels of compiled graphs, and to ops outside of them."""

    def __init__(self, trace: Trace, names: frozenset[str], ops: frozenset[keys.Key]) -> None:
        self.trace, self.names = trace, names
        self.tree = keys.CallTree(trace, ops)
        self.holds_region: dict[int, bool] = {}

    def of(self, step: TraceStep) -> list[StepCall]:
        """The calls of a step in order."""
        listed = [call for op in self.tree.roots(step) for call in self._below(op)]
        listed += [self._bare(kernel, True) for kernel in self.tree.unnamed(step)]
        return sorted(listed, key=lambda call: call.start)

    def _below(self, op: int) -> Iterator[StepCall]:
        region = self._is_region(op)
        if region or self._has_region(op):
            backward = self.tree.name(op).endswith("Backward")
            for called in self.trace.calls.get(op, ()):
                yield from self._inside(called, backward) if region else self._below(called)
            yield from self._direct(op, region, backward)
            return
        for call in self.tree.below(op):
            if not call.host or call.key in self.tree.keys:
                yield self._call(call, False)

    def _inside(self, op: int, backward: bool) -> Iterator[StepCall]:
        name, called = plain_name(self.tree.name(op)), self.trace.calls.get(op, ())
        if not self._has_region(op) and (name in self.names or "::" in name):
            if name in self.names or not keys.on_host(name):
                call = replace(self.tree.with_inner(op, (name, ())), name=name)
                yield self._call(call, True, backward)
            return
        for inner in called:
            yield from (
                self._below(inner) if self._is_region(inner) else self._inside(inner, backward)
            )
        yield from self._direct(op, True, backward)

    def _direct(self, op: int, inside: bool, backward: bool) -> Iterator[StepCall]:
        """Kernels that a call launched directly, not through a call inside of it."""
        for kernel in self.trace.launches.get(op, ()):
            yield self._bare(kernel, inside, backward)

    def _bare(self, kernel: int, inside: bool, backward: bool = False) -> StepCall:
        return replace(self._call(self.tree.bare(kernel), inside, backward), bare=True)

    def _call(self, call: keys.OpCall, inside: bool, backward: bool = False) -> StepCall:
        """A call that begins with its first kernel, or else on the host: one clock orders both."""
        begun, kernels = self.trace.ops.start, self.trace.kernels.start
        stores = not inside and call.op != records.NONE and _STORES in call.name
        return StepCall(
            name=call.name,
            seconds=call.seconds,
            inside=inside,
            key=call.key,
            start=min(kernels[k] for k in call.kernels) if call.kernels else begun[call.op],
            gradient=self._shape(call.op) if stores else None,
            shapes=self.tree.key(call.op)[1] if call.op != records.NONE else (),
            backward=backward,
        )

    def _is_region(self, op: int) -> bool:
        return _REGION.match(self.tree.name(op)) is not None

    def _has_region(self, op: int) -> bool:
        if op not in self.holds_region:
            self.holds_region[op] = self._is_region(op) or any(
                self._has_region(called) for called in self.trace.calls.get(op, ())
            )
        return self.holds_region[op]

    def _shape(self, op: int) -> records.Shape | None:
        """The shape of the first tensor in a call."""
        shapes = (shape for shape in self.tree.key(op)[1] if shape)
        below = (self._shape(called) for called in self.trace.calls.get(op, ()))
        return next(shapes, None) or next(filter(None, below), None)


def calls_outside(
    listed: Sequence[StepCall], ops: Sequence[Op], wanted: Sequence[keys.Key]
) -> tuple[dict[int, int], dict[int, int]]:
    """The op of each call outside of compiled graphs, by its number in the list; and the op of each
    call that is a part of an op.

    In order by name and shapes, and by name alone between two pairs: lists of tensors differ.
    Calls that are left between two pairs belong to the composite op there, which a device may
    decompose (the backward of a recurrent network on a CPU).
    """
    outside = [number for number, call in enumerate(listed) if not call.inside]
    have = [listed[number].key for number in outside]
    pairs, _ = keys.paired(have, wanted)
    more = keys.between(pairs, [key[0] for key in have], [key[0] for key in wanted])
    op_of = {outside[a]: ops[b].id for a, b in (*pairs, *more)}
    parts: dict[int, int] = {}
    for calls, others in keys.gaps(sorted((*pairs, *more)), len(have), len(wanted)):
        composite = [ops[j].id for j in others if ops[j].target.startswith("rooftrace.")]
        if len(composite) == 1:
            left = [outside[i] for i in calls]
            longest = max(left, key=lambda number: listed[number].seconds)
            op_of[longest] = composite[0]
            parts.update((number, composite[0]) for number in left if number != longest)
    return op_of, parts


def stored_gradients(
    listed: Sequence[StepCall], outside: Collection[int], graph: OpGraph
) -> dict[int, int]:
    """The op that made a gradient, by the number of the call in which autograd stores it.

    It copies a gradient that a compiler has laid out otherwise than the weight.  Gradients of one
    shape are matched in order.
    """
    makers: dict[records.Shape, deque[int]] = defaultdict(deque)
    for op in graph.ops:
        for value in map(graph.values.__getitem__, op.outputs):
            if op.part == "backward" and value.role == "gradients" and is_launched(op):
                makers[value.shape].append(op.id)
    return {
        number: makers[call.gradient].popleft()
        for number, call in enumerate(listed)
        if call.gradient is not None and number not in outside and makers[call.gradient]
    }


def merged(
    graph: OpGraph, home: Mapping[int, object], outside: Collection[int]
) -> Iterator[tuple[int, int]]:
    """(op, its reader): ops that the compiler merged with their reader, or with an equal op.

    It has no node of them, and one of the reader.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        for value in op.inputs:
            readers[graph.values[value].storage].append(op.id)
    parts = {graph.ops[op].part for op in home}
    for op in reversed(graph.ops):
        if op.id in home or op.id in outside or not is_launched(op) or op.part not in parts:
            continue
        later = (
            reader
            for value in op.outputs
            for reader in readers[graph.values[value].storage]
            if reader > op.id and reader in home
        )
        reader = min(later, default=None)
        if reader is not None:
            yield op.id, reader


# -- times of kernels ------------------------------------------------------------------------------

_KernelId = tuple[int, int]
"""A kernel that the compiler noted: the number of its graph, and its index there."""


def kernel_times(
    trace: Trace, compiled: Sequence[CompiledGraph], graph: OpGraph
) -> tuple[KernelTime, ...]:
    """The calls of the first step of `trace` in order, with seconds and their ops in `graph`.

    compiled: the graphs of the compiler, in order.  graph: expanded, as the execution model
    `compiled` runs it.  Raises ProfileError for a trace without steps.
    """
    if not trace.steps:
        raise ProfileError(f"{trace.source}: no step in the trace")
    step = trace.steps[0]
    expected = {
        (number, index): kernel
        for number, made in enumerate(compiled)
        for index, kernel in enumerate(made.kernels)
    }
    partners = matched(compiled, graph)
    in_graphs = {op for each in partners for op in each.values()}
    left = [op for op in graph.ops if is_launched(op) and op.id not in in_graphs]
    wanted = [keys.key_of_op(graph, op) for op in left]
    walk = StepWalk(
        trace, frozenset(kernel.name for kernel in expected.values()), frozenset(wanted)
    )
    listed = walk.of(step)
    called = _in_order(listed, expected)
    outside, part_of = calls_outside(listed, left, wanted)
    part_of |= stored_gradients(listed, outside, graph)
    seconds: dict[_KernelId, float] = defaultdict(float)
    for call, at in zip(listed, called, strict=True):
        if at is not None:
            seconds[at] += call.seconds
    owned = _owned(compiled, partners, seconds, graph, frozenset(outside.values()))
    times: list[KernelTime] = []
    begun: set[_KernelId] = set()
    for number, (call, at) in enumerate(zip(listed, called, strict=True)):
        ops, parts = owned[at] if at is not None else ((), ())
        if at in begun:  # one call of a library is several kernels
            ops, parts = (), tuple(sorted((*ops, *parts)))
        elif at is not None:
            begun.add(at)
        if number in outside:
            ops = (outside[number],)
        elif number in part_of:
            parts = (part_of[number],)
        times.append(
            KernelTime(
                name=call.name,
                seconds=call.seconds,
                ops=ops,
                targets=tuple(graph.ops[op].target for op in ops),
                parts=parts,
                compiled=call.inside,
            )
        )
    return tuple(times)


def _in_order(
    listed: Sequence[StepCall], expected: Mapping[_KernelId, CompiledKernel]
) -> list[_KernelId | None]:
    """The expected kernel of each call inside of compiled graphs, matched in order by name.

    A replay of a CUDA graph does not name library calls, only their kernels.  Between two matches
    these are paired if there are as many; if one library call is expected there, it has them all.
    """
    inside = [number for number, call in enumerate(listed) if call.inside]
    have, kernels = [(listed[number].name, ()) for number in inside], list(expected)
    pairs = keys.common(have, [(kernel.name, ()) for kernel in expected.values()])
    result: list[_KernelId | None] = [None] * len(listed)
    for a, b in pairs:
        result[inside[a]] = kernels[b]
    for calls, others in keys.gaps(pairs, len(inside), len(kernels)):
        bare = [inside[i] for i in calls if listed[inside[i]].bare]
        wanted = [kernels[j] for j in others if expected[kernels[j]].is_library]
        if len(wanted) == 1:
            wanted *= len(bare)
        if len(wanted) == len(bare):
            for number, at in zip(bare, wanted, strict=True):
                result[number] = at
    return result


def _owned(
    compiled: Sequence[CompiledGraph],
    partners: Sequence[Mapping[int, int]],
    seconds: Mapping[_KernelId, float],
    graph: OpGraph,
    outside: Collection[int],
) -> dict[_KernelId, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By kernel: the ops that it computes, and the ops of which it computes a part.

    An op in several kernels belongs to the one that took most time.  outside: ops that ran outside
    of compiled graphs.
    """
    shares: dict[int, list[_KernelId]] = defaultdict(list)
    touched: dict[_KernelId, set[int]] = {}
    for number, (made, partner) in enumerate(zip(compiled, partners, strict=True)):
        homes = made.homes()
        for index, kernel in enumerate(made.kernels):
            touched[number, index] = {partner[op] for op in kernel.parts if op in partner}
        for op, index in homes.items():
            if op in partner:
                shares[partner[op]].append((number, index))
    home = {op: max(ids, key=lambda at: seconds.get(at, 0.0)) for op, ids in shares.items()}
    owned: dict[_KernelId, list[int]] = defaultdict(list)
    for op, at in sorted(home.items()):
        owned[at].append(op)
    for op, reader in merged(graph, home, outside):
        home[op] = home[reader]
        owned[home[reader]].append(op)
    return {
        at: (tuple(sorted(owned[at])), tuple(sorted(ops - set(owned[at]))))
        for at, ops in touched.items()
    }
