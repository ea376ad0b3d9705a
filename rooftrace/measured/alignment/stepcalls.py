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
# The words in the name of a kernel, and those under which an op of our graph stands in one.
#
# Inductor names a kernel after the ops that its nodes were decomposed from: their names without
# namespace and overload, sorted, each once, joined by underscores, with a number behind them.

_GRAPH = re.compile(r"^graph_\d+_")
"""What Inductor writes before the name of a kernel in the profiler's range on a CPU."""
_WRITTEN = re.compile(
    r"^(?:\w+?_)?(?:cpp|mps|(?:triton|pallas|halide|cutedsl)_[a-z]{2,4})_fused(?:_(\w*?))??(?:_(\d+))?$"
)
_LONGEST = 9
"""As many pieces between underscores does the name of an op have at most."""
_ELSEWHERE, _NO_OP, _UNSORTED = 2.2, 4.0, 3.0
"""What it costs to read an op that is not in the graph, a piece that is in no op's name, and an op
that is not in order; an op of the graph costs 1."""
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
"""Other names under which a compiler has an op of ours, and what it takes it apart into."""


@dataclass(frozen=True, slots=True)
class KernelWords:
    """The ops that the name of a kernel lists."""

    words: frozenset[str]  # without underscores around them: "softmax" of "_softmax"
    start: str = ""  # of one more op, where the name is cut
    number: int | None = None  # of the kernel among those of its graph

    def names(self, words: frozenset[str]) -> bool:
        """Whether the name has one of these."""
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

    "index_select" may be one op or two: those of the graph are preferred.
    """

    def __init__(self, ops: Iterable[Op]) -> None:
        self._own = frozenset(op.name.partition(".")[2].strip("_") for op in ops)
        self._read: dict[str, KernelWords] = {}

    def words(self, name: str) -> KernelWords:
        """What the name of a kernel lists: of one that Inductor wrote, or of a library's call."""
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
            whole = len(read)
            while whole and self._price(read[whole - 1]) > _ELSEWHERE:
                whole -= 1
            if whole == len(read) and self._price(read[-1]) > 1:  # "tan" may be cut "tanh"
                whole -= 1
            start = "_".join(read[whole:]).lstrip("_")
            read = read[:whole]
        words = frozenset(_common(word) for word in read if word.strip("_"))
        return KernelWords(words, start, None if number is None else int(number))

    def _split(self, pieces: Sequence[str]) -> list[str]:
        """The words of a name that is cut at underscores: as few, and as well sorted, as can be."""
        best: list[dict[str, tuple[float, tuple[str, ...]]]] = [{} for _ in range(len(pieces) + 1)]
        best[0][""] = (0.0, ())
        for begin in range(len(pieces)):
            for last, (cost, before) in best[begin].items():
                for end in range(begin + 1, min(begin + _LONGEST, len(pieces)) + 1):
                    word = "_".join(pieces[begin:end])
                    known = _is_op(word)
                    if not known and end > begin + 1:
                        continue
                    price = cost + self._price(word) + _UNSORTED * (known and word <= last)
                    key = word if known else last
                    if key not in best[end] or price < best[end][key][0]:
                        best[end][key] = (price, (*before, word))
        return list(min(best[-1].values())[1])

    def _price(self, word: str) -> float:
        """What it costs to read this word."""
        if word.strip("_") in self._own:
            return 1.0
        return _ELSEWHERE if _is_op(word) else _NO_OP if word else 0.5


def _common(word: str) -> str:
    """One word for all names of an op: "attention" of "_scaled_dot_product_flash_attention"."""
    return keys.common_name(f"aten::{word}").rpartition("::")[2].strip("_")


@cache
def op_words(op_name: str) -> frozenset[str]:
    """The words under which an op stands in the name of a kernel: "gelu" for "aten.gelu"."""
    word = op_name.partition(".")[2].strip("_")
    also = _ALSO.get(_common(word), frozenset()) | _ALSO.get(word, frozenset())
    return frozenset(map(_common, {word, *also}))


def words_of(op: Op) -> frozenset[str]:
    """The words under which this op of a graph stands in the name of a kernel."""
    return op_words(op.name)


@cache
def _is_op(word: str) -> bool:
    """Whether there is an op of this name."""
    if not word.strip("_"):
        return False
    if word.strip("_") in _OTHERS:
        return True
    return any(find_rule(f"{space}.{word}.default") is not None for space in ("aten", "prims"))


_OTHERS = frozenset(word for also in _ALSO.values() for word in also) | _ALSO.keys()


# -- stepcalls -------------------------------------------------------------------------------------
# The calls of a compiled step in a trace: kernels of compiled graphs, and ops beside them.

_REGION = re.compile(r"CompiledFunction(Backward)?$|Torch-Compiled Region")
"""Calls of the profiler around what was compiled."""
_STORES = "AccumulateGrad"
"""In the name of the call by which autograd stores the gradient of a weight."""


@dataclass(frozen=True, slots=True)
class StepCall:
    """A call in the trace: of a kernel in a compiled graph, or of an op beside it."""

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
    """Walks the calls of a trace down to kernels of compiled graphs, and to ops beside them."""

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
            yield from self._own(op, region, backward)
            return
        for call in self.tree.below(op):
            if not call.host or call.key in self.tree.keys:
                yield self._call(call, False)

    def _inside(self, op: int, backward: bool) -> Iterator[StepCall]:
        name, called = plain_name(self.tree.name(op)), self.trace.calls.get(op, ())
        if not self._has_region(op) and (name in self.names or "::" in name):
            if name in self.names or not keys.on_host(name):
                call = replace(self.tree.whole(op, (name, ())), name=name)
                yield self._call(call, True, backward)
            return
        for inner in called:
            yield from (
                self._below(inner) if self._is_region(inner) else self._inside(inner, backward)
            )
        yield from self._own(op, True, backward)

    def _own(self, op: int, inside: bool, backward: bool) -> Iterator[StepCall]:
        """Kernels that a call around others launched itself."""
        for kernel in self.trace.launches.get(op, ()):
            yield self._bare(kernel, inside, backward)

    def _bare(self, kernel: int, inside: bool, backward: bool = False) -> StepCall:
        return replace(self._call(self.tree.bare(kernel), inside, backward), bare=True)

    def _call(self, call: keys.OpCall, inside: bool, backward: bool = False) -> StepCall:
        """Begun with the first of its kernels, or else on the host: one clock orders both."""
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


def calls_beside(
    listed: Sequence[StepCall], ops: Sequence[Op], wanted: Sequence[keys.Key]
) -> tuple[dict[int, int], dict[int, int]]:
    """The op of each call outside of compiled graphs, by its number in the list; and the same of
    calls that are a part of an op.

    In order by name and shapes, and by name alone between two pairs: lists of tensors differ.
    What is left between two pairs is of the op that stands there, if it is one that we keep whole
    and a device may take apart (the backward of a recurrent network on a CPU).
    """
    alone = [number for number, call in enumerate(listed) if not call.inside]
    have = [listed[number].key for number in alone]
    pairs, _ = keys.paired(have, wanted)
    more = keys.between(pairs, [key[0] for key in have], [key[0] for key in wanted])
    op_of = {alone[a]: ops[b].id for a, b in (*pairs, *more)}
    pieces: dict[int, int] = {}
    for mine, other in keys.gaps(sorted((*pairs, *more)), len(have), len(wanted)):
        whole = [ops[j].id for j in other if ops[j].target.startswith("rooftrace.")]
        if len(whole) == 1:
            left = [alone[i] for i in mine]
            longest = max(left, key=lambda number: listed[number].seconds)
            op_of[longest] = whole[0]
            pieces.update((number, whole[0]) for number in left if number != longest)
    return op_of, pieces


def stored_gradients(
    listed: Sequence[StepCall], beside: Collection[int], graph: OpGraph
) -> dict[int, int]:
    """The op that made a gradient, by the number of the call in which autograd stores it.

    It copies what a compiler has laid out otherwise than the weight.  Of gradients of one shape
    each stands for one.
    """
    makers: dict[records.Shape, deque[int]] = defaultdict(deque)
    for op in graph.ops:
        for value in map(graph.values.__getitem__, op.outputs):
            if op.part == "backward" and value.role == "gradients" and is_launched(op):
                makers[value.shape].append(op.id)
    return {
        number: makers[call.gradient].popleft()
        for number, call in enumerate(listed)
        if call.gradient is not None and number not in beside and makers[call.gradient]
    }


def merged(
    graph: OpGraph, home: Mapping[int, object], beside: Collection[int]
) -> Iterator[tuple[int, int]]:
    """(op, the op that reads it): ops that the compiler has no node of, and has for their reader.

    It merged them with what reads them, by a pattern, or with an equal op.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        for value in op.inputs:
            readers[graph.values[value].storage].append(op.id)
    parts = {graph.ops[op].part for op in home}
    for op in reversed(graph.ops):
        if op.id in home or op.id in beside or not is_launched(op) or op.part not in parts:
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


# -- timing ----------------------------------------------------------------------------------------
# How long each kernel of a compiled step ran, and the ops behind it, by a trace of the step.

_Place = tuple[int, int]
"""A kernel that the compiler wrote down: the number of its graph, and its place there."""


def kernel_times(
    trace: Trace, compiled: Sequence[CompiledGraph], graph: OpGraph
) -> tuple[KernelTime, ...]:
    """The calls of the first step of `trace`, in order: what they took, and their ops in `graph`.

    compiled: what the compiler made, in the order of its graphs.  graph: written out, as the
    execution model `compiled` runs it.  A call without ops belongs to nothing in the graph.
    Raises ProfileError for a trace without steps.
    """
    if not trace.steps:
        raise ProfileError(f"{trace.source}: no step in the trace")
    step = trace.steps[0]
    expected = {
        (number, place): kernel
        for number, made in enumerate(compiled)
        for place, kernel in enumerate(made.kernels)
    }
    partners = matched(compiled, graph)
    known = {op for each in partners for op in each.values()}
    outside = [op for op in graph.ops if is_launched(op) and op.id not in known]
    wanted = [keys.key_of_op(graph, op) for op in outside]
    walk = StepWalk(
        trace, frozenset(kernel.name for kernel in expected.values()), frozenset(wanted)
    )
    listed = walk.of(step)
    called = _in_order(listed, expected)
    beside, pieces = calls_beside(listed, outside, wanted)
    pieces |= stored_gradients(listed, beside, graph)
    seconds: dict[_Place, float] = defaultdict(float)
    for call, at in zip(listed, called, strict=True):
        if at is not None:
            seconds[at] += call.seconds
    owned = _owned(compiled, partners, seconds, graph, frozenset(beside.values()))
    times: list[KernelTime] = []
    begun: set[_Place] = set()
    for number, (call, at) in enumerate(zip(listed, called, strict=True)):
        ops, parts = owned[at] if at is not None else ((), ())
        if at in begun:  # one call of a library is several kernels
            ops, parts = (), tuple(sorted((*ops, *parts)))
        elif at is not None:
            begun.add(at)
        if number in beside:
            ops = (beside[number],)
        elif number in pieces:
            parts = (pieces[number],)
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
    listed: Sequence[StepCall], expected: Mapping[_Place, CompiledKernel]
) -> list[_Place | None]:
    """The expected kernel of each call inside of compiled graphs, matched in order by name.

    In a replay of a CUDA graph nobody names the call of a library: its kernels have names of their
    own.  Between two that match they are paired if there are as many, and if only one call of a
    library is expected there, all are of it.
    """
    inside = [number for number, call in enumerate(listed) if call.inside]
    have, places = [(listed[number].name, ()) for number in inside], list(expected)
    pairs = keys.common(have, [(kernel.name, ()) for kernel in expected.values()])
    result: list[_Place | None] = [None] * len(listed)
    for a, b in pairs:
        result[inside[a]] = places[b]
    for mine, other in keys.gaps(pairs, len(inside), len(places)):
        bare = [inside[i] for i in mine if listed[inside[i]].bare]
        wanted = [places[j] for j in other if expected[places[j]].is_library]
        if len(wanted) == 1:
            wanted *= len(bare)
        if len(wanted) == len(bare):
            for number, at in zip(bare, wanted, strict=True):
                result[number] = at
    return result


def _owned(
    compiled: Sequence[CompiledGraph],
    partners: Sequence[Mapping[int, int]],
    seconds: Mapping[_Place, float],
    graph: OpGraph,
    beside: Collection[int],
) -> dict[_Place, tuple[tuple[int, ...], tuple[int, ...]]]:
    """By kernel (graph, place): the ops that it computes, and those of which it computes a part.

    An op that was taken apart into several kernels belongs to the one that took most time.
    beside: ops that ran outside of compiled graphs.
    """
    shares: dict[int, list[_Place]] = defaultdict(list)
    touched: dict[_Place, set[int]] = {}
    for number, (made, partner) in enumerate(zip(compiled, partners, strict=True)):
        homes = made.homes()
        for place, kernel in enumerate(made.kernels):
            touched[number, place] = {partner[op] for op in kernel.parts if op in partner}
        for op, place in homes.items():
            if op in partner:
                shares[partner[op]].append((number, place))
    home = {op: max(places, key=lambda at: seconds.get(at, 0.0)) for op, places in shares.items()}
    owned: dict[_Place, list[int]] = defaultdict(list)
    for op, at in sorted(home.items()):
        owned[at].append(op)
    for op, reader in merged(graph, home, beside):
        home[op] = home[reader]
        owned[home[reader]].append(op)
    return {
        at: (tuple(sorted(owned[at])), tuple(sorted(ops - set(owned[at]))))
        for at, ops in touched.items()
    }
