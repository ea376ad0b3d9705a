"""Keys that match calls of a trace with ops of a graph, and calls at the level of the graph."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import Op, OpGraph
from rooftrace.measured.profiles import Trace, TraceStep, records

Key = tuple[str, tuple[records.Shape, ...]]
"""The key of a call or an op: its name, and the shapes of its tensors with dimensions."""

_WINDOW = 40_000
"""The most calls and ops that are matched at once: a table has a bit for each pair (200 MB)."""

_ONE_OP: Mapping[str, frozenset[str]] = {
    "attention": frozenset({"rooftrace.attention"}),
    "attention_backward": frozenset(
        {"rooftrace.attention_backward", "aten._flash_attention_backward"}
    ),
    "rnn": frozenset({"rooftrace.rnn"}),
    "rnn_backward": frozenset({"rooftrace.rnn_backward"}),
    "batch_norm": frozenset(
        {
            "aten.native_batch_norm",
            "aten._batch_norm_with_update",
            "aten._native_batch_norm_legit_no_training",
        }
    ),
    "batch_norm_backward": frozenset({"aten.native_batch_norm_backward"}),
    "rms_norm": frozenset({"rooftrace.rms_norm"}),
    "rms_norm_backward": frozenset({"rooftrace.rms_norm_backward"}),
}
"""Ops that backends have under other names: every op that the same rule prices is that op."""
_SEVERAL_NAMES = frozenset({"attention", "rnn", "batch norm", "layer norm"})
"""The kinds of these ops, to skip the search for other ops."""
_ONLY_IN_TRACES: Mapping[str, str] = {
    "aten::dropout": "aten::native_dropout",  # the call around it
    "aten::_cudnn_attention_backward": "attention_backward",  # inside of the op, never in a graph
    "aten::_scaled_dot_product_attention_math": "attention",  # a backend that is many kernels
    "aten::_scaled_dot_product_attention_math_for_mps": "attention",
}
"""Names that no graph has, and so no rule."""
_BY_FIRST_SHAPE = frozenset(
    {"attention", "batch_norm", "batch_norm_backward", "rms_norm", "rms_norm_backward"}
)
"""Backends take other arguments after the first."""
_BY_NAME = frozenset({"attention_backward", "rnn", "rnn_backward"})
"""Backends take all arguments in another order."""


def key_of_op(graph: OpGraph, op: Op) -> Key:
    """The key of an op of a graph."""
    shapes = [graph.values[value].shape for value in op.inputs]
    return _key(op.name.replace(".", "::", 1), shapes)


def key_of_call(name: str, shapes: Sequence[records.Shape]) -> Key:
    """The key of a call in a trace."""
    return _key(name, list(_flat(shapes)))


def _key(name: str, shapes: Sequence[records.Shape]) -> Key:
    name = common_name(name)
    with_dimensions = tuple(shape for shape in shapes if shape)
    if name in _BY_FIRST_SHAPE:
        with_dimensions = with_dimensions[:1]
    elif name in _BY_NAME:
        with_dimensions = ()
    return name, with_dimensions


def common_name(name: str) -> str:
    """The common name of an op: "attention" for "aten::_scaled_dot_product_flash_attention".

    Other names only lose the underscore of an in-place op: add_ becomes add.
    """
    dotted = name.replace("::", ".", 1)
    rule = find_rule(f"{dotted}.default")
    if rule is not None and rule.kind in _SEVERAL_NAMES:
        for common_to_all, ops in _ONE_OP.items():
            if dotted in ops or any(_priced_by(op) is rule.price for op in ops):
                return common_to_all
    return _ONLY_IN_TRACES.get(name) or name.removesuffix("_")


def _priced_by(op: str) -> Callable[..., object] | None:
    rule = find_rule(f"{op}.default")
    return None if rule is None else rule.price


# A batch of one is a product of two matrices, and a weight may lie either way.
_UNBATCHED = {"aten::bmm": "aten::mm", "aten::baddbmm": "aten::addmm"}
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"})
WAYS = 3
"""Ways to write the same sizes, each looser than the one before."""


def looser(key: Key, way: int) -> Key:
    """A key without some harmless differences of shapes.

    way 1: no leading dimensions of 1.  way 2: no dimensions of 1 at all.  way 3: all dimensions but
    the last as one, and of a matrix product the weight as if it lay either way.
    """
    name, shapes = key
    if way == 1:
        if name in _UNBATCHED and all(s[0] == 1 for s in shapes if len(s) == 3):
            name = _UNBATCHED[name]
        return name, tuple(filter(None, map(_without_leading, shapes)))
    name, shapes = looser(key, 1)
    plain = [tuple(size for size in shape if size != 1) for shape in shapes]
    if way == 3:
        plain = [(math.prod(s[:-1]), s[-1]) if len(s) > 1 else s for s in plain]
        if name in _PRODUCTS:
            weights = [i for i, s in enumerate(plain) if len(s) == 2][1:]
            for i in weights[-1:]:
                plain[i] = tuple(sorted(plain[i]))
    return name, tuple(filter(None, plain))


def _without_leading(shape: records.Shape) -> records.Shape:
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[first:]


def _flat(shapes: Sequence[records.Shape]) -> Iterator[records.Shape]:
    """Shapes, those in lists of tensors one by one."""
    for shape in shapes:
        if shape and isinstance(shape[0], tuple):
            yield from _flat(shape)
        else:
            yield shape


def written_out(graph: OpGraph) -> list[tuple[int, int]]:
    """(op id, iteration) in the order of `graph.expand()`, iterations numbered as they run.

    Raises GraphError where that is too long.
    """
    graph.check_length()
    repeats = [op.repeats for op in graph.ops]

    def walk(part: range, depth: int, outer: int) -> Iterator[tuple[int, int]]:
        for repeat, inside in runs.segments(repeats, part, depth):
            if repeat is None:
                yield from ((index, outer) for index in inside)
                continue
            count = graph.repeats[repeat].count
            for iteration in range(count):
                yield from walk(inside, depth + 1, outer * count + iteration)

    return list(walk(range(len(repeats)), 0, 0))


def paired(have: Sequence[Key], wanted: Sequence[Key]) -> tuple[list[tuple[int, int]], int]:
    """Pairs of positions, both rising, and how many of them only pair by `looser` keys.

    Between two pairs by one way to write shapes, the next looser way is tried.
    """
    pairs = common(have, wanted)
    exact = len(pairs)
    for way in range(1, WAYS + 1):
        if len(pairs) == min(len(have), len(wanted)):
            break
        closer: list[tuple[int, int]] = []
        for calls, ops in gaps(pairs, len(have), len(wanted)):
            left = [looser(have[i], way) for i in calls]
            right = [looser(wanted[j], way) for j in ops]
            closer += [(calls[x], ops[y]) for x, y in common(left, right)]
        pairs = sorted((*pairs, *closer))
    return pairs, len(pairs) - exact


def in_any_order(
    pairs: Sequence[tuple[int, int]],
    have: Sequence[Hashable],
    wanted: Sequence[Hashable],
) -> list[tuple[int, int]]:
    """More pairs of positions with equal keys, out of order: each takes the first that is left."""
    done, taken = {a for a, _ in pairs}, {b for _, b in pairs}
    left: dict[Hashable, deque[int]] = defaultdict(deque)
    for number, key in enumerate(wanted):
        if number not in taken:
            left[key].append(number)
    return [
        (position, left[key].popleft())
        for position, key in enumerate(have)
        if position not in done and left[key]
    ]


def between(
    pairs: Sequence[tuple[int, int]], have: Sequence[str], wanted: Sequence[str]
) -> list[tuple[int, int]]:
    """More pairs of positions, by name alone, between the given pairs; all rise."""
    more: list[tuple[int, int]] = []
    for calls, ops in gaps(pairs, len(have), len(wanted)):
        inside = common([(have[i], ()) for i in calls], [(wanted[j], ()) for j in ops])
        more += [(calls[x], ops[y]) for x, y in inside]
    return more


def gaps(pairs: Sequence[tuple[int, int]], have: int, wanted: int) -> Iterator[tuple[range, range]]:
    """Positions between each two pairs of two sequences of these lengths, where both have some."""
    i = j = 0
    for a, b in [*pairs, (have, wanted)]:
        if i < a and j < b:
            yield range(i, a), range(j, b)
        i, j = a + 1, b + 1


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
        block_pairs = [
            (i + block.src_start + k, j + block.dest_start + k)
            for block in LCSseq.opcodes(a[i : i + _WINDOW], b[j : j + _WINDOW])
            if block.tag == "equal"
            for k in range(block.src_end - block.src_start)
        ]
        if not last:  # near the end of a window a partner may be behind it
            block_pairs = block_pairs[: max(1, len(block_pairs) * 3 // 4)]
        pairs += block_pairs
        if last or not block_pairs:
            break
        i, j = block_pairs[-1][0] + 1, block_pairs[-1][1] + 1
    return pairs


def key_words(key: Key) -> str:
    """ "aten::mm [[8, 64], [64, 64]]"."""
    shapes = ", ".join(str(list(shape)) for shape in key[1][:4])
    return f"{key[0]} [{shapes}{', ...' if len(key[1]) > 4 else ''}]"


def base_name(name: str) -> str:
    """ "gemm" of "void cutlass::gemm<float, 3>(Params)", for the spelling of any profiler."""
    name = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    plain, before = name, ""
    while plain != before:  # templates nest
        before, plain = plain, re.sub(r"<[^<>]*>", "", plain)
    plain = plain.partition("(")[0].strip()
    words = plain.replace("::", " ").split()
    return words[-1] if words else name


# -- calls -----------------------------------------------------------------------------------------

_HOST_ONLY = frozenset(
    f"aten::{name}" for name in ("flatten", "reshape", "resize", "resolve_conj", "resolve_neg")
)
"""Calls on the host without a rule: a graph shows the views that they make instead."""


def on_host(name: str) -> bool:
    """Whether an op only makes a view or allocates, so that it launches nothing."""
    rule = find_rule(f"{name.replace('::', '.', 1)}.default")
    return name in _HOST_ONLY or (rule is not None and rule.fusion == "free")


@dataclass(slots=True)
class OpCall:
    """A call in a trace at the level of a graph."""

    op: int  # index in the trace; records.NONE for a kernel that no op launched
    key: Key
    name: str
    seconds: float  # s, of its kernels; without any in the trace, of the host
    kernels: tuple[int, ...]  # indices of all that it launched
    host: bool = False  # whether it is no work of the device


class CallTree:
    """Cuts call trees of a trace at the level of a graph: of nested calls, the one in the graph."""

    def __init__(self, trace: Trace, keys: frozenset[Key]) -> None:
        self.trace, self.keys = trace, keys
        self.loose = frozenset(looser(key, way) for key in keys for way in range(1, WAYS + 1))
        self.names = frozenset(name for name, _ in keys)
        self.calls, self.launches = trace.calls, trace.launches
        self._keys: dict[tuple[int, int], Key] = {}
        self._nearly: dict[Key, bool] = {}

    def nearly(self, key: Key) -> bool:
        """Whether the graph has this key by looser shapes."""
        if key not in self._nearly:
            ways = range(1, WAYS + 1)
            self._nearly[key] = any(looser(key, way) in self.loose for way in ways)
        return self._nearly[key]

    def of(self, step: TraceStep) -> list[OpCall]:
        """The calls of a step, and the kernels that it launched outside of any op."""
        calls = [call for op in self.roots(step) for call in self.below(op)]
        return calls + [self.bare(kernel) for kernel in self.unnamed(step)]

    def roots(self, step: TraceStep) -> Iterator[int]:
        """The outermost calls of a step."""
        parents = self.trace.ops.parent
        inside = set(step.ops)
        for op in step.ops:
            if parents[op] == records.NONE or parents[op] not in inside:
                yield op

    def unnamed(self, step: TraceStep) -> Iterator[int]:
        """The kernels of a step that were launched outside of any op."""
        for kernel in step.kernels:
            if self.trace.kernels.op[kernel] == records.NONE:
                yield kernel

    def bare(self, kernel: int) -> OpCall:
        """A kernel as a call."""
        kernels = self.trace.kernels
        name = kernels.names.items[kernels.name[kernel]]
        return OpCall(records.NONE, (name, ()), name, kernels.duration[kernel], (kernel,))

    def key(self, op: int) -> Key:
        """The key of a call."""
        ops = self.trace.ops
        number = (ops.name[op], ops.inputs[op])
        if number not in self._keys:
            inputs = ops.call_inputs.items[number[1]] if number[1] != records.NONE else None
            shapes = inputs.shapes if inputs else ()
            self._keys[number] = key_of_call(ops.names.items[number[0]], shapes)
        return self._keys[number]

    def below(self, op: int) -> list[OpCall]:
        """The calls at the level of the graph in one call tree."""
        key = self.key(op)
        if key in self.keys:
            return [self.with_inner(op, key)]
        below = [call for called in self.calls.get(op, ()) for call in self.below(called)]
        matches = any(call.key in self.keys for call in below)
        if not matches and self.nearly(key):
            return [self.with_inner(op, key)]
        matches = matches or any(self.nearly(call.key) for call in below)
        # Nothing matches, but an op of the graph in other sizes is the better name for it.
        same = key[0] not in self.names and any(call.key[0] in self.names for call in below)
        if matches or same:
            return [*below, *self._direct(op, key)]
        return [self.with_inner(op, key)]

    def _direct(self, op: int, key: Key) -> list[OpCall]:
        """The kernels that a call launched directly, not through a call inside of it."""
        kernels = self.launches.get(op, ())
        if not kernels:
            return []
        seconds = sum(self.trace.kernels.duration[k] for k in kernels)
        return [OpCall(op, key, self.name(op), seconds, kernels)]

    def with_inner(self, op: int, key: Key) -> OpCall:
        """A call with all calls below it."""
        name = self.name(op)
        if not self.trace.on_device:
            return OpCall(op, key, name, self.trace.ops.duration[op], (), self._on_host(op))
        kernels = tuple(k for inner in self._below(op) for k in self.launches.get(inner, ()))
        seconds = sum(self.trace.kernels.duration[k] for k in kernels)
        return OpCall(op, key, name, seconds, kernels, not kernels)

    def _below(self, op: int) -> Iterator[int]:
        yield op
        for called in self.calls.get(op, ()):
            yield from self._below(called)

    def _on_host(self, op: int) -> bool:
        """Whether a call does no work: only views, allocations, or wrappers of them."""
        name = self.name(op)
        if name.startswith("aten::"):
            return on_host(name)
        return all(self._on_host(called) for called in self.calls.get(op, ()))

    def name(self, op: int) -> str:
        """The name of a call."""
        return str(self.trace.ops.names.items[self.trace.ops.name[op]])
