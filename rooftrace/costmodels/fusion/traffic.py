"""HBM traffic of kernel groups, slices of values, and the memory layout of convolutions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from msgspec.structs import replace

from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.fusion.executions import ExecutionModel
from rooftrace.costmodels.fusion.index_space import computed_again, release_of, stored_wide, widths
from rooftrace.costmodels.ops import Access, Cost, Work, find_rule, kinds_of
from rooftrace.graph import ROLES, Op, OpGraph, Ref, Tensor, marks, references

# -- channels last ---------------------------------------------------------------------------------
# Channels last, where a compiler chooses this layout of convolutions.
#
# Inductor chooses for an entire graph (`torch/_inductor/graph.py`, `decide_layout_opt`) by measured
# times of each kind of convolution with channels last over those with channels first.

LAST_OVER_FIRST = {"grouped": 1.358, "in_out": 0.725, "small": 0.783, "default": 0.823}
"""Time with channels last over that with channels first, by kind of convolution."""
FEW = 300
"""A graph with at least this many nodes for each convolution is left as it is."""
SMALL = 64
"""Up to this many channels are few."""


def keeps_channels_last(graph: OpGraph) -> bool:
    """Whether a compiler lays out the entire step with channels last; Inductor before 2.1 does not.

    Steps without a backward choose by FLOPs.  Training steps keep channels first where one
    convolution has groups of several channels, or makes half its channels or fewer, or where all
    have few channels.
    """
    convolutions = [
        (op, shape, graph.times(op))
        for op in graph.ops
        if _is_forward(op) and (shape := weight_shape(op, graph)) is not None
    ]
    count = sum(times for _, _, times in convolutions)
    if not count or sum(map(graph.times, graph.ops)) >= FEW * count:
        return False
    release = release_of(graph)
    if release is not None and not release.lays_out_images:
        return False
    kinds = [_kind(op, shape) for op, shape, _ in convolutions]
    if any(op.part == "backward" for op in graph.ops):
        return not {"grouped", "in_out"} & set(kinds) and set(kinds) != {"small"}
    flop: Counter[str] = Counter()
    for kind, (op, shape, times) in zip(kinds, convolutions, strict=True):
        out = graph.values[op.outputs[0]].shape
        flop[kind] += times * math.prod(shape) * out[0] * math.prod(out[2:])
    return sum(LAST_OVER_FIRST[kind] * n for kind, n in flop.items()) <= flop.total()


def reduces_images_apart(graph: OpGraph) -> bool:
    """Whether a compiler sums positions of images in kernels that compute no image for others.

    With channels last positions are rows, and Inductor's loops over an image do not fit those of a
    sum down its columns, unless it may reorder them (`Release.reorders_loops`).
    """
    release = release_of(graph)
    if release is None or release.reorders_loops:
        return False
    return keeps_channels_last(graph)


def _is_forward(op: Op) -> bool:
    """Whether the op is a convolution, and no gradient of one."""
    rule = find_rule(op.target) if op.kind == "kernel" else None
    return rule is not None and rule.kind == "conv" and "grad_output" not in op.arguments


def _kind(op: Op, shape: Sequence[int]) -> str:
    if op.arguments.get("groups", 1) > 1 and shape[1] > 1:
        return "grouped"
    if max(shape[:2]) <= SMALL:
        return "small"
    return "in_out" if 2 * shape[0] <= shape[1] and shape[2] > 1 else "default"


def weight_shape(op: Op, graph: OpGraph) -> tuple[int, ...] | None:
    """The shape of a convolution's weight; None where the op has none."""
    weight = op.arguments.get("weight")
    return graph.values[weight.id].shape if isinstance(weight, Ref) else None


def has_channels_last(value: Tensor) -> bool:
    """Whether an image's channels are contiguous in memory."""
    return len(value.shape) > 3 and value.stride[1] == 1 and value.shape[1] > 1


def is_depthwise_native(op: Op, graph: OpGraph) -> bool:
    """Whether PyTorch's own kernels run a convolution on a GPU of NVIDIA (DepthwiseConv2d.cu).

    That is a group for each channel, channels first, no transposed one.  cuDNN has those in fp16
    with windows of one dimension at stride 1, and square ones by their sizes
    (`use_cudnn_depthwise` and `check_cudnn_depthwise_workload_with_filter` in Convolution.cpp).
    """
    source, shape = op.arguments.get("input", op.arguments.get("self")), weight_shape(op, graph)
    if not isinstance(source, Ref) or shape is None or len(shape) > 4 or shape[1] > 1:
        return False
    image = graph.values[source.id]
    if len(image.shape) != len(shape):
        return False
    batch, channels, *_, width = image.shape
    groups, transposed = op.arguments.get("groups", 1), op.arguments.get("transposed", False)
    if has_channels_last(image) or groups != channels or transposed:
        return False
    strides, dilations = (op.arguments.get(name, (1,)) for name in ("stride", "dilation"))
    if image.dtype != "fp16" or channels < 32 or max(dilations) > 1 or len({*strides}) > 1:
        return True
    stride, window = strides[-1], shape[-1]
    flat = math.prod(image.shape[2:-1]) == 1
    if stride == 1 and flat:
        return False
    if flat or shape[2] != window or window not in (1, 3, 5) or width < 7 or stride > 2:
        return True
    if window == 1 < stride:
        return not (width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width == 7)
    return stride == 2 and batch > 1 and channels < (256 if width >= 28 else 512)


# -- moved -----------------------------------------------------------------------------------------
# Bytes through HBM of a kernel group.
#
# A storage that only the group writes and reads never reaches HBM; one that several of its ops read
# is read once.  The compulsory floor are the bytes that any execution moves.


class _Group(Protocol):
    """Ops that share a kernel."""

    @property
    def ops(self) -> tuple[int, ...]: ...


def group_costs(
    graph: OpGraph,
    groups: Sequence[_Group],
    op_costs: Sequence[Cost],
    execution: ExecutionModel,
) -> tuple[Cost, ...]:
    """One cost per group, run once: work added up, traffic without internal values, factors."""
    merger = _Merger(graph, groups, op_costs)
    scale = _Factors(graph, execution)
    results = []
    generated, wide = execution.fusion == "detected", dict[int, int]()
    if generated:
        with_others = {op for group in groups if len(group.ops) > 1 for op in group.ops}
        wide = stored_wide(graph)
        again = computed_again(graph, wide).items()
        merger.kept_out.update(storage for storage, op in again if op in with_others)
        wide = widths(graph, [group.ops for group in groups], wide)
    eager = marks.eager_ops(graph.ops)
    for index, group in enumerate(groups):
        first = group.ops[0]
        written = generated and first not in eager and _is_generated(graph, first)
        alone = len(group.ops) == 1 and not written
        cost = op_costs[first] if alone else merger.merged(index)
        results.append(scale(_widened(cost, wide) if wide else cost, group, op_costs))
    return tuple(results)


def access_scales(
    graph: OpGraph,
    groups: Sequence[_Group],
    op_costs: Sequence[Cost],
    execution: ExecutionModel,
) -> list[Mapping[Access, tuple[int, float]]]:
    """For each group its accesses with a factor of the execution: copies, and the factor.

    copies: how many equal storages an access stands for; each is rounded alone.
    """
    scale = _Factors(graph, execution)
    if not scale.active:
        return [{}] * len(groups)
    return [scale.by_access(group, op_costs) for group in groups]


def _widened(cost: Cost, wide: Mapping[int, int]) -> Cost:
    """The cost where some storages have the wider inputs of their values."""
    if wide.keys().isdisjoint(access.storage for access in cost.traffic):
        return cost
    return Cost(cost.work, {a: size * wide.get(a.storage, 1) for a, size in cost.traffic.items()})


def _is_generated(graph: OpGraph, op: int) -> bool:
    """Whether a compiler writes this op's kernel, without results that nothing reads."""
    rule = find_rule(graph.ops[op].target)
    return rule is not None and rule.fusion != "opaque"


class _Merger:
    """Adds up the ops of a group, but for results that neither later groups nor the caller read."""

    def __init__(self, graph: OpGraph, groups: Sequence[_Group], op_costs: Sequence[Cost]) -> None:
        self.graph, self.groups, self.op_costs = graph, groups, op_costs
        self.sizes, self.listed = storage_sizes(graph), runs.listed(graph)
        self.last_reader: dict[int, int] = {}
        for index, group in enumerate(groups):
            for op in group.ops:
                for access in op_costs[op].traffic:
                    if not access.write:
                        self.last_reader[access.storage] = index
        self.kept_out: set[int] = set()  # results that are computed again wherever they are read
        values = graph.values
        self.kept = {values[i].storage for i in (*graph.outputs, *graph.external)}
        # The host reads from memory, too.
        self.kept.update(
            values[i].storage for op in graph.ops if op.kind == "sync" for i in op.inputs
        )

    def merged(self, index: int) -> Cost:
        """The cost of one group of several ops."""
        work: dict[Work, int] = defaultdict(int)
        parts = _Parts(self.graph, self.sizes, self.listed)
        for number in self.groups[index].ops:
            cost = self.op_costs[number]
            for key, flop in cost.work.items():
                work[_in_parallel(key)] += flop
            parts.add(self.graph.ops[number], cost)
        traffic = {}
        for access, size in parts.totals():
            later = self.last_reader.get(access.storage, -1) > index
            leaves = access.storage in self.kept or (later and access.storage not in self.kept_out)
            if leaves or not access.write:
                traffic[access] = size
        return Cost(dict(work), traffic)


def _in_parallel(work: Work) -> Work:
    """The work in a generated kernel, which has a thread for each value."""
    return replace(work, rows=None, inner=None) if work.operation == "vector" else work


class _Parts:
    """Bytes by storage that a group reads from outside, and that it writes.

    Ops that touch the same value touch the same bytes, which move once; other views of a storage
    are taken as other bytes of it, together at most all of it.
    """

    def __init__(
        self, graph: OpGraph, sizes: Sequence[int], copies: Mapping[int, Mapping[int, int]]
    ) -> None:
        self.graph, self.sizes, self.listed = graph, sizes, copies
        self.moved: dict[Access, dict[frozenset[int], int]] = {}
        self.same: dict[int, int] = {}
        self.copies: dict[int, int] = {}  # of a storage, where an op takes all of them

    def add(self, op: Op, cost: Cost) -> None:
        """One more op of the group, in execution order."""
        read, written = self._touched(op)
        self.copies.update(self.listed.get(op.id, {}))
        # Reads first: an op reads before it writes.
        for access, size in sorted(cost.traffic.items(), key=lambda item: item[0].write):
            touched = frozenset((written if access.write else read).get(access.storage, ()))
            if not access.write:
                size = self._from_outside(access, touched, size)
            if size:
                parts = self.moved.setdefault(access, {})
                parts[touched] = max(parts.get(touched, 0), size)

    def _touched(self, op: Op) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """The values through which an op reads and writes each storage.

        An in-place result counts as the operand that it overwrites.
        """
        values = self.graph.values
        read: dict[int, set[int]] = defaultdict(set)
        written: dict[int, set[int]] = defaultdict(set)
        overwritten: dict[tuple[Any, ...], int] = {}
        for i in op.inputs:
            first = self.same.get(i, i)
            value = values[i]
            read[value.storage].add(first)
            overwritten.setdefault((value.storage, value.shape, value.stride), first)
        for i in op.outputs:
            value = values[i]
            first = overwritten.get((value.storage, value.shape, value.stride), i)
            self.same[i] = first
            written[value.storage].add(first)
        return read, written

    def _from_outside(self, read: Access, touched: frozenset[int], size: int) -> int:
        """Bytes of a read that no earlier op of the group wrote, and left on the chip."""
        write = Access(read.storage, True, read.wire)
        written = self.moved.get(write)
        if written is None:
            return size
        if touched in written:
            return max(0, size - written[touched])
        return min(size, max(0, self._size(read.storage) - self._total(write)))

    def _size(self, storage: int) -> int:
        return self.sizes[storage] * self.copies.get(storage, 1)

    def _total(self, access: Access) -> int:
        sizes = self.moved[access].values()
        if access.wire != "hbm":
            return sum(sizes)
        return max(max(sizes), min(sum(sizes), self._size(access.storage)))

    def totals(self) -> list[tuple[Access, int]]:
        """Bytes by access."""
        return [(access, self._total(access)) for access in self.moved]


class _Factors:
    """Factors on bytes: those of the seed (weight residency by family, activation fusion,
    elementwise), or measured ones by kind of bytes."""

    def __init__(self, graph: OpGraph, execution: ExecutionModel) -> None:
        residency = execution.weight_residency
        self.graph, self.execution, self.listed = graph, execution, runs.listed(graph)
        self.measured = execution.traffic
        self.active = (
            self.measured is not None
            or execution.fusion == "factor"
            or any(getattr(residency, family) != 1 for family in ("attention", "dense", "moe"))
        )

    def __call__(self, cost: Cost, group: _Group, op_costs: Sequence[Cost]) -> Cost:
        if not self.active:
            return cost
        scales = self.by_access(group, op_costs, cost.traffic)
        traffic = {}
        for access, size in cost.traffic.items():
            count, factor = scales.get(access, (1, 1.0))
            traffic[access] = count * round(size / count * factor) if factor != 1 else size
        return Cost(cost.work, traffic)

    def by_access(
        self, group: _Group, op_costs: Sequence[Cost], accesses: Iterable[Access] | None = None
    ) -> dict[Access, tuple[int, float]]:
        """Copies and factor of the accesses (by default of all ops) whose factor is not 1."""
        scale = self._scale(group, op_costs)
        copies: dict[int, int] = {}
        for op in group.ops:
            copies.update(self.listed.get(op, {}))
        if accesses is None:
            accesses = {access for op in group.ops for access in op_costs[op].traffic}
        factors = {access: scale(access) for access in accesses}
        return {
            access: (copies.get(access.storage, 1), factor)
            for access, factor in factors.items()
            if factor != 1
        }

    def _scale(self, group: _Group, op_costs: Sequence[Cost]) -> Callable[[Access], float]:
        """The factor of each access of a kernel."""
        measured, execution, graph = self.measured, self.execution, self.graph
        if measured is not None:
            kind = kinds_of(graph, group.ops, op_costs)
            return lambda access: measured.scale(kind(access)) if access.wire == "hbm" else 1.0
        lead = max(group.ops, key=lambda op: op_costs[op].bytes())
        by_role = {
            "weights": 1 / execution.weight_residency.of(graph.ops[lead].family),
            "activations": execution.activation_fusion,
            "temporary": execution.elementwise,
        }

        def scale(access: Access) -> float:
            role = graph.values[access.storage].role
            return 1.0 if access.write and role == "weights" else by_role.get(role, 1.0)

        return scale


def storage_sizes(graph: OpGraph, unmade: Iterable[int] = ()) -> list[int]:
    """Bytes of the device by value id of an owner: a storage is as large as its largest view.

    unmade: storages that never are in memory.
    """
    sizes = [0] * len(graph.values)
    memo: dict[tuple[Any, ...], int] = {}  # few sizes, many values
    for tensor in (tensor for tensor in graph.values if not tensor.host):
        form = (tensor.shape, tensor.stride, tensor.dtype)
        size = memo.get(form)
        if size is None:
            size = memo[form] = tensor.nbytes
        if size > sizes[tensor.storage]:
            sizes[tensor.storage] = size
    for storage in unmade:
        sizes[storage] = 0
    return sizes


def bytes_by_role(graph: OpGraph, cost: Cost) -> dict[str, int]:
    """HBM bytes of a bound cost by the role of the storage; every role is there."""
    sums = dict.fromkeys(ROLES, 0)
    for access, size in cost.traffic.items():
        if access.wire == "hbm":
            sums[graph.values[access.storage].role] += size
    return sums


def compulsory_bytes(graph: OpGraph, op_costs: Sequence[Cost]) -> int:
    """Bytes that any execution moves, each counted once.

    These are reads of external values (weights, states, inputs) before the step overwrites them,
    and writes of values that it leaves behind (outputs, states).
    """
    outside = {graph.values[i].storage for i in graph.external}
    results = outside | {graph.values[i].storage for i in graph.outputs}
    floor = _Floor(graph, outside)
    for op, cost in zip(graph.ops, op_costs, strict=True):
        floor.enter(op)
        for access, size in cost.traffic.items():
            if access.wire == "hbm" and not access.write and access.storage in outside:
                floor.read(op, access.storage, size)
        for access, size in cost.traffic.items():
            if access.wire == "hbm" and access.write and access.storage in results:
                floor.write(op, access.storage, size)
    return floor.total()


class _Floor:
    """The most bytes that one op reads and writes of each storage, per copy, and overwritten bytes.

    Iterations overwrite a shared storage one after the other: the first of them reads the most of
    it.  Of a storage that nothing writes, disjoint slices add up.
    """

    def __init__(self, graph: OpGraph, outside: Collection[int]) -> None:
        self.graph, self.listed = graph, runs.listed(graph)
        self.slices, self.sizes = slices(graph, outside), storage_sizes(graph)
        kernels = (op for op in graph.ops if op.kind == "kernel")
        self.written = {graph.values[i].storage for op in kernels for i in op.outputs}
        self.parts: dict[int, dict[Any, dict[tuple[int, int], int]]] = defaultdict(dict)
        self.reads: dict[int, int] = defaultdict(int)
        self.writes: dict[int, int] = defaultdict(int)
        self.overwritten: dict[int, int] = defaultdict(int)
        self.inside: tuple[int, ...] = ()
        self.later: list[dict[int, int]] = []

    def enter(self, op: Op) -> None:
        """Go on to this op, after the rest of the iterations before it."""
        shared = 0
        while op.repeats[shared : shared + 1] == self.inside[shared : shared + 1] != ():
            shared += 1
        while len(self.later) > shared:
            count = self.graph.repeats[self.inside[len(self.later) - 1]].count
            for storage, size in self.later.pop().items():
                per_iteration = self.inside[len(self.later)] in self.graph.values[storage].repeats
                more = 0 if per_iteration else (count - 1) * size
                self.overwritten[storage] += more
                if self.later:
                    self.later[-1][storage] = self.later[-1].get(storage, 0) + size + more
        self.later += [{} for _ in op.repeats[len(self.later) :]]
        self.inside = op.repeats

    def read(self, op: Op, storage: int, size: int) -> None:
        """An op reads `size` bytes of a storage, or of all its copies together."""
        fresh = self._each(op, storage, size) - self.overwritten[storage]
        self.reads[storage] = max(self.reads[storage], fresh)
        if storage not in self.written and op.id not in self.listed:
            self._read_slices(op, storage, size)

    def _read_slices(self, op: Op, storage: int, size: int) -> None:
        """Remember the slices of a storage that an op reads through a single view of it."""
        values = {i for i in op.inputs if self.graph.values[i].storage == storage}
        sliced = self.slices.get(min(values)) if len(values) == 1 else None
        if sliced is None or any(ref.then for ref in op.reads if ref.id in values):
            return
        parts = self.parts[storage].setdefault((sliced.base, sliced.dimension), {})
        for place in sliced.ranges:
            parts[place] = max(parts.get(place, 0), size)

    def write(self, op: Op, storage: int, size: int) -> None:
        """An op writes `size` bytes of a storage, or of all its copies together."""
        size = self._each(op, storage, size)
        self.writes[storage] = max(self.writes[storage], size)
        self.overwritten[storage] += size
        if self.later:
            self.later[-1][storage] = self.later[-1].get(storage, 0) + size

    def _each(self, op: Op, storage: int, size: int) -> int:
        copies = self.listed.get(op.id)
        size = size // copies.get(storage, 1) if copies else size
        return min(size, self.sizes[storage])  # a kernel may pass over it more than once

    def total(self) -> int:
        """All reads and writes, of all copies."""
        for storage, bases in self.parts.items():
            most = min(max(map(union, bases.values())), self.sizes[storage])
            self.reads[storage] = max(self.reads[storage], most)
        return sum(
            self.graph.times(self.graph.values[storage]) * size
            for moved in (self.reads, self.writes)
            for storage, size in moved.items()
        )


# -- slices ----------------------------------------------------------------------------------------
# Views as slices of a value, by select, slice and split.


@dataclass(frozen=True, slots=True)
class Slices:
    """base: the sliced value.  ranges: [start, stop) along `dimension`, of every iteration."""

    base: Hashable
    dimension: int
    ranges: tuple[tuple[int, int], ...]


_MOST = 1_000_000
"""Iterations, or positions along a dimension, up to which slices are listed.  Beyond, a view is no
slice, and the compulsory bytes are a lower bound still, and a lower one.
"""


def slices(graph: OpGraph, storages: Collection[int]) -> dict[int, Slices]:
    """By value of one of these storages: its slices, or those of its base.

    Equal views of every iteration have the same base.
    """
    cuts: dict[int, Slices] = {}
    bases: dict[int, Hashable] = {}
    for op in graph.ops:
        if op.kind != "view" or not op.inputs:
            continue
        x = op.inputs[0]
        if graph.values[x].storage not in storages:
            continue
        if x in cuts:  # a slice of a slice is inside it
            cuts.update(dict.fromkeys(op.outputs, cuts[x]))
            continue
        (ref, *_) = op.reads
        base = bases.get(x, x)
        if base is None or ref.then is not None or ref.every:
            bases.update(dict.fromkeys(op.outputs))
            continue
        cut = dict(_cut(graph, op, base))
        cuts.update(cut)
        others = {k: v for k, v in op.arguments.items() if not any(references(v))}
        same = None if op.steps else (base, op.target, tuple(sorted(others.items(), key=str)))
        bases.update({i: same for i in op.outputs if i not in cut})
    return cuts


def union(sizes: Mapping[tuple[int, int], int]) -> int:
    """A sum over disjoint ranges, those that end first taken first."""
    total = end = 0
    for start, stop in sorted(sizes, key=lambda r: (r[1], r[0])):
        if start >= end:
            total, end = total + sizes[start, stop], stop
    return total


def _cut(graph: OpGraph, op: Op, base: Hashable) -> Iterator[tuple[int, Slices]]:
    """The results of a view op that slices its input along a dimension."""
    x = graph.values[op.inputs[0]]
    dimension = op.arguments.get("dim", 0)
    if not x.shape or not isinstance(dimension, int):
        return
    dimension %= len(x.shape)
    length = x.shape[dimension]
    if not all(isinstance(op.arguments.get(name), int | None) for name in ("start", "end")):
        return
    copied = any(runs.missing(graph, op, i) for i in op.outputs)
    ranges: Iterable[Iterable[tuple[int, int]]] = ()
    turns = graph.repeats[op.repeats[-1]].count if op.steps else 1
    if not x.stride[dimension] or not 0 < length <= _MOST or turns > _MOST:
        return
    selects = op.name == "aten.select" and isinstance(op.arguments.get("index"), int)
    if (selects or op.name == "aten.slice") and not copied:
        ranges = [_turns(op, length, turns)]
    elif op.name == "aten.unbind" and (not copied or len(op.outputs) == 1):
        each = [(k, k + 1) for k in range(length)]
        ranges = [each] if copied else [[place] for place in each]
    elif op.name in ("aten.split", "aten.split_with_sizes", "aten.chunk") and not copied:
        ends = list(accumulate(graph.values[i].shape[dimension] for i in op.outputs))
        ranges = [[place] for place in zip([0, *ends], ends, strict=False)]
    for output, listed in zip(op.outputs, ranges, strict=False):
        yield output, Slices(base, dimension, tuple(listed))


def _turns(op: Op, length: int, turns: int) -> Iterator[tuple[int, int]]:
    """The range that a select or slice takes in each iteration of its innermost repeat."""
    for turn in range(turns):
        place = {name: step * turn for name, step in op.steps.items()}
        if op.name == "aten.select":
            index = op.arguments["index"] + place.get("index", 0)
            yield index % length, index % length + 1
            continue
        ends = []
        for name, default in (("start", 0), ("end", length)):
            end_of = op.arguments.get(name)
            end = default if end_of is None else end_of + place.get(name, 0)
            ends.append(min(max(end + length if end < 0 else end, 0), length))
        yield ends[0], ends[1]
