"""PyTorch's CUDA caching allocator: its rules, the replay of steps, and library workspaces."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rooftrace.costmodels.fusion import storage_sizes, traffic
from rooftrace.costmodels.memory.lives import EDGE, Lives, Visits, bytes_of_weights, lifetimes
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import PARTS, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import storage_bytes

# -- allocator -------------------------------------------------------------------------------------
# The rules of c10/cuda/CUDACachingAllocator.cpp: segments from the driver are cut into blocks, and
# freed blocks are cached.  Sizes are rounded to 512 bytes.  Requests of at most 1 MiB share 2 MiB
# segments; those below 10 MiB share 20 MiB segments; a larger one gets its segment, rounded to
# 2 MiB.  Best fit; the rest of a block is split off where it is large enough.  Free neighbours
# merge.  Each stream has its blocks.
#
# Not modelled: rounding to fractions of powers of two, garbage collection, pools of CUDA graphs,
# and events of blocks that other streams use.

SMALLEST = 512
SMALL = 2**20
"""The largest request that is "small"."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
"""The least request that gets a segment of its size."""
GRANULARITY = 2 * 2**20


def rounded(size: int) -> int:
    """Bytes of the block that a request is looked for with: a multiple of 512, at least 512."""
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes of a new segment for a block of `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // GRANULARITY) * GRANULARITY


class Piece:
    """A piece of a segment: its bytes, its address, and its neighbours."""

    __slots__ = ("address", "following", "free", "pool", "preceding", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.free = False
        self.preceding: Piece | None = None
        self.following: Piece | None = None


class _Pool:
    """The free blocks of one stream, small or large, least first.

    last: with expandable segments, the block at the end of the one segment there is.
    """

    __slots__ = ("at", "last", "sizes", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.sizes: list[tuple[int, int]] = []  # (bytes, address)
        self.at: dict[int, Piece] = {}  # free blocks by address
        self.last: Piece | None = None

    def put(self, block: Piece) -> None:
        block.free = True
        insort(self.sizes, (block.size, block.address))
        self.at[block.address] = block

    def take(self, block: Piece) -> None:
        block.free = False
        del self.sizes[bisect_left(self.sizes, (block.size, block.address))]
        del self.at[block.address]


class CachingAllocator:
    """Hands out blocks and takes them back; counts as `torch.cuda.memory_stats` does.

    expandable: one segment for each stream and pool that grows by pages, as with
    ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.most_allocated = self.reserved = 0
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._end = 0  # addresses from here on were never given out

    def allocate(self, size: int, stream: str = "") -> Piece:
        """A block for `size` > 0 bytes, which is used on `stream`."""
        wanted = rounded(size)
        small = wanted <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = self._found(pool, wanted)
        if block is None:
            block = self._grown(pool, wanted) if self.expandable else self._segment(pool, wanted)
        left = block.size - wanted
        if left >= SMALLEST if small or self.expandable else left > SMALL:
            self._split(block, wanted)
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def release(self, block: Piece) -> None:
        """Take a block back; it becomes one with free neighbours."""
        self.allocated -= block.size
        pool = block.pool
        before, after = block.preceding, block.following
        if before is not None and before.free:
            pool.take(before)
            block = self._joined(before, block)
        if after is not None and after.free:
            pool.take(after)
            block = self._joined(block, after)
        pool.put(block)

    # -- blocks ------------------------------------------------------------------------------------

    def _found(self, pool: _Pool, wanted: int) -> Piece | None:
        """The smallest free block with room; of equal ones the first by address."""
        place = bisect_left(pool.sizes, (wanted, -1))
        tail = pool.last if self.expandable else None
        while place < len(pool.sizes):
            block = pool.at[pool.sizes[place][1]]
            if block is not tail or place + 1 == len(pool.sizes):
                break
            place += 1  # the end of the segment counts as larger than any other block
        else:
            return None
        pool.take(block)
        return block

    def _segment(self, pool: _Pool, wanted: int) -> Piece:
        size = segment_size(wanted)
        block = Piece(pool, self._end, size)
        self._end += size
        self.reserved += size
        return block

    def _grown(self, pool: _Pool, wanted: int) -> Piece:
        """The free end of the expandable segment, with as many pages more as it takes."""
        last = pool.last
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        there = last.size if last is not None and last.free else 0
        more = -(-(wanted - there) // page) * page
        self.reserved += more
        if last is None:
            # Far from each other, so that each can grow: addresses of the pools never meet.
            last = pool.last = Piece(pool, len(self._pools) << 56, more)
        elif last.free:
            pool.take(last)
            last.size += more
        else:
            block = Piece(pool, last.address + last.size, more)
            block.preceding, last.following, pool.last = last, block, block
            last = block
        return last

    def _split(self, block: Piece, size: int) -> None:
        """Cut a block down to `size`; the rest becomes a free block behind it."""
        rest = Piece(block.pool, block.address + size, block.size - size)
        rest.preceding, rest.following = block, block.following
        if rest.following is not None:
            rest.following.preceding = rest
        block.following, block.size = rest, size
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.put(rest)

    def _joined(self, first: Piece, second: Piece) -> Piece:
        """Two neighbours that are in no list as the first of them."""
        first.size += second.size
        first.following = second.following
        if first.following is not None:
            first.following.preceding = first
        if first.pool.last is second:
            first.pool.last = first
        return first


# -- replaying -------------------------------------------------------------------------------------
# The allocations of a few steps in program order: weights, inputs and caches, then the steps.  The
# states of an optimizer are made as it first runs; gradients and results of a step are dropped
# before the next one, so that later steps reuse cached segments.
#
# Of equal iterations a few are visited, as in `lives`: blocks that skipped iterations keep or free
# are allocated or freed as the representative ends; blocks that they make and drop reuse the same
# memory, and are not repeated.

VISITED = 6000
"""The most ops visited, beyond the least that a graph with repeats takes."""
BLOCKS = 4096
"""The most equal blocks that are allocated one by one; the rest of them is one block."""
STEPS = 4
"""The most steps that are replayed until reserved memory is steady."""
_BACKWARD = ("backward", "recompute")


@dataclass(frozen=True, slots=True)
class Allocation:
    """`times` blocks of a storage are allocated or freed, or a library takes bytes.

    action: "make", "drop", "scratch" (allocated and freed at once), "unsure" (scratch at its upper
    bound), "BLAS" (a workspace that stays; number: of its thread and stream).
    """

    action: str
    number: int
    size: int = 0
    stream: str = ""
    times: int = 1


@dataclass(slots=True)
class Program:
    """All allocations of one step, and those before it."""

    before: list[Allocation] = field(default_factory=list)  # weights, inputs, caches
    states: list[Allocation] = field(default_factory=list)  # made as an optimizer first runs
    step: list[Allocation] = field(default_factory=list)
    updating: int = 0  # the place in `step` at which the optimizer begins; its end if there is none
    threads: int = 0  # pairs of thread and stream with products
    scratch: Counter[str] = field(default_factory=Counter)  # the most at once, by kind

    def run(
        self, allocator: CachingAllocator, blas: int, taken: Collection[str] = ("scratch", "unsure")
    ) -> None:
        """Replay steps until no more is reserved.

        blas: bytes of one workspace.  taken: the kinds of workspaces of ops that are counted.
        """
        held: dict[int, list[Piece]] = defaultdict(list)
        outside = {change.number for change in (*self.before, *self.states)}
        workspaces: set[int] = set()
        _apply(self.before, allocator, held, workspaces, blas, taken)
        for turn in range(STEPS):
            reserved = allocator.reserved
            _apply(self.step[: self.updating], allocator, held, workspaces, blas, taken)
            if not turn:
                _apply(self.states, allocator, held, workspaces, blas, taken)
            _apply(self.step[self.updating :], allocator, held, workspaces, blas, taken)
            if turn and allocator.reserved == reserved:
                return
            for number in [number for number in held if number not in outside]:
                for block in held.pop(number):
                    allocator.release(block)
            gone = [change for change in self.before if change.number not in held]
            _apply(gone, allocator, held, workspaces, blas, taken)


def _apply(
    changes: Iterable[Allocation],
    allocator: CachingAllocator,
    held: dict[int, list[Piece]],
    workspaces: set[int],
    blas: int,
    taken: Collection[str],
) -> None:
    allocate, release = allocator.allocate, allocator.release
    for change in changes:
        action = change.action
        if action == "make":
            blocks = held[change.number]
            rest = change.times - BLOCKS
            if rest > 0:  # first, so that it goes last
                blocks.insert(0, allocate(rest * rounded(change.size), change.stream))
            for _ in range(min(change.times, BLOCKS)):
                blocks.append(allocate(change.size, change.stream))
        elif action == "drop":
            blocks = held.get(change.number, [])
            for _ in range(min(change.times, len(blocks))):
                release(blocks.pop())
            if not blocks:
                held.pop(change.number, None)
        elif action == "BLAS":
            if blas and change.number not in workspaces:
                workspaces.add(change.number)
                allocate(blas, change.stream)
        elif action in taken:
            release(allocate(change.size, change.stream))


def program(graph: OpGraph, unmade: Collection[int] = ()) -> Program:
    """The allocations of a step of `graph`; unmade: storages that never are in memory."""
    visits = Visits(graph, _edge(graph))
    lives = lifetimes(visits)
    return _ProgramWriter(graph, visits, lives, unmade).program


def _edge(graph: OpGraph) -> int:
    """Iterations to visit at either end of repeats, for at most `VISITED` ops."""
    counts = [repeat.count for repeat in graph.repeats]
    # A repeat that no op is in adds no visit, however often it runs.
    most = max((counts[r] for op in graph.ops for r in op.repeats), default=0)

    def visited(edge: int) -> int:
        return sum(math.prod(min(counts[r], 2 * edge + 1) for r in op.repeats) for op in graph.ops)

    edge = EDGE
    while 2 * edge + 1 < most and visited(edge + 1) <= VISITED:
        edge += 1
    return edge


class _ProgramWriter:
    """Writes the program of a graph, visit by visit."""

    def __init__(
        self, graph: OpGraph, visits: Visits, lives: Lives, unmade: Collection[int]
    ) -> None:
        self.graph, self.visits = graph, visits
        self.sizes = storage_sizes(graph, unmade)
        self.program = Program()
        self.streams: dict[int, str] = {}
        self.threads: dict[tuple[bool, str], int] = {}
        self.taken: dict[int, Scratch | None] = {}
        self.inside: list[Counter[int]] = []  # changes of iterations that stand for others
        self._outside(lives)
        updating = None
        for moment, visit in enumerate(visits.order):
            steps = self.program.step
            if updating is None and visit.op.part == PARTS[3]:
                updating = len(steps)
            self.inside += [Counter() for _ in range(visit.begins)]
            self._change(lives.replaced.get(moment, ()), -1)
            self._change(lives.births.get(moment, ()), 1, visit.op.stream)
            self._library(visit.op)
            self._change(lives.deaths.get(moment, ()), -1)
            for left_out in visit.ends:
                self._left_out(left_out)
        self.program.updating = len(self.program.step) if updating is None else updating
        self.program.threads = len(self.threads)

    def _outside(self, lives: Lives) -> None:
        values, program = self.graph.values, self.program
        weights = 0
        for number, times in lives.births.get(-1, ()):
            storage = self.visits.storage(number)
            size, role = self.sizes[storage], values[storage].role
            weights += times * size if role == "weights" else 0
            if size:
                change = Allocation("make", number, size, "", times)
                (program.states if role == "optimizer" else program.before).append(change)
        unread = bytes_of_weights(self.graph) - weights  # their sizes are unknown
        if unread > 0:
            program.before.append(Allocation("make", -1, unread))

    def _change(self, lived: Iterable[tuple[int, int]], sign: int, stream: str = "") -> None:
        for number, times in lived:
            size = self.sizes[self.visits.storage(number)]
            if not size:
                continue
            if sign > 0:
                self.streams[number] = stream
            self._put(number, sign * times)
            for changed in self.inside:
                changed[number] += sign * times

    def _put(self, number: int, times: int) -> None:
        size = self.sizes[self.visits.storage(number)]
        action = "make" if times > 0 else "drop"
        change = Allocation(action, number, size, self.streams.get(number, ""), abs(times))
        self.program.step.append(change)

    def _left_out(self, times: int) -> None:
        """Allocate blocks that skipped iterations keep, and free those that they free.

        An iteration may free blocks of the one before it, and leave as many to the one after it.
        """
        changed = self.inside.pop()
        grown: Counter[int] = Counter()
        for number, count in changed.items():
            grown[self.visits.storage(number)] += count
        for number, count in changed.items():
            net = grown[self.visits.storage(number)]
            if net * count <= 0:
                continue  # nothing of this kind is left, or it is the other of two
            grown[self.visits.storage(number)] = 0
            self._put(number, times * net)
            for outer in self.inside:
                outer[number] += times * net

    def _library(self, op: Op) -> None:
        if is_product(op):
            thread = (op.part in _BACKWARD, op.stream)
            number = self.threads.setdefault(thread, len(self.threads))
            self.program.step.append(Allocation("BLAS", number, stream=op.stream))
            return
        if op.id not in self.taken:
            self.taken[op.id] = scratch(op, self.graph)
        taken = self.taken[op.id]
        if taken is not None and taken.bytes:
            action = "scratch" if taken.sure else "unsure"
            self.program.step.append(Allocation(action, -1, taken.bytes, op.stream))
            most = self.program.scratch
            most[taken.kind] = max(most[taken.kind], taken.bytes)


# -- workspaces ------------------------------------------------------------------------------------
# Bytes that libraries allocate inside of ops.  They are no tensors of the graph, but
# `torch.cuda.max_memory_allocated` counts them.  Copies that eager ops make by separate kernels are
# tensors of the priced graph (costmodels/rewrites/eager_kernels).
#
# BLAS: cuBLAS gets one workspace for each pair of a thread's handle and a stream, at the first
# product, and keeps it (aten/src/ATen/cuda/CublasHandlePool.cpp).  Backward runs in autograd's
# thread, so a training step has two.
#
# Attention: the backward of FlashAttention 2 sums the gradient of the queries in fp32, and keeps a
# number for each row (`mha_bwd`, flash_attn/flash_api.cpp: `dq_accum`, `softmax_d`).
#
# Norms: the backward of a group norm keeps three numbers for each sample and channel and two for
# each group, in fp32 (group_norm_kernel.cu, `ds`, `db`, `c1` to `c3`).
#
# Sorting rows of more than 4,096: by segments, with indices made first and a second buffer for keys
# and indices; few rows are sorted as one, with pairs of row and place (SortStable.cu).
#
# Convolutions: kernels for tensor cores want channels last.  Where channels come first, cuDNN
# copies inputs and outputs into its workspace (cuDNN developer guide, "Tensor Transformations").
# cuDNN picks the engine, so this is an upper bound; the least is 0.  An engine may also take about
# a mebibyte for any size: measured, 0.97 MiB on an RTX 3090, 0.7 to 1.1 for the smallest
# (Liger-Kernel's peaks of `multi_token_attention`).  Other algorithms (FFT, Winograd with
# transformed tiles) may take more, and are not counted.


Kind = Literal["BLAS", "attention", "norms", "sorting", "convolutions"]

HALF = ("fp16", "bf16")
_ROWS = 128
"""FlashAttention's backward rounds sequences up to this, and heads' widths to 32."""
_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Scratch:
    """Workspace bytes of an op while it runs."""

    kind: Kind
    bytes: int
    sure: bool  # else the most: the library may take less


_ENGINE = 994 * 2**10
"""Workspace bytes of a cuDNN engine without copies, at any size; measured."""


def is_product(op: Op) -> bool:
    """Whether BLAS runs the op: a matrix product that is no grouped one."""
    rule = find_rule(op.target) if op.kind == "kernel" else None
    return rule is not None and rule.kind in ("mm", "bmm") and "grouped" not in op.name


def scratch(op: Op, graph: OpGraph) -> Scratch | None:
    """The workspace of an op; None where none is known."""
    rule = find_rule(op.target) if op.kind == "kernel" else None
    if rule is None:
        return None
    if rule.kind == "attention" and "backward" in op.name:
        query = _named(op, graph, "query")
        return _attention(query) if query is not None else None
    if rule.kind == "conv":
        return _convolution(op, graph)
    if rule.kind == "sort":
        return _sort(op, graph)
    return _group_norm(op) if op.name == "aten.native_group_norm_backward" else None


_SMALL_SORT = 4096
"""Rows of so many elements are sorted in place (Sort.cpp, `should_use_small_sort`)."""


def _sort(op: Op, graph: OpGraph) -> Scratch | None:
    """n rows of keys of e bytes: indices of 8 bytes, and a second buffer of e + 8."""
    data = _named(op, graph, "self")
    if data is None or not data.shape or op.name not in ("aten.sort", "aten.argsort"):
        return None
    dimension = op.arguments.get("dim", -1)
    if data.shape[dimension] <= _SMALL_SORT:
        return None
    size = 16 * data.elements + storage_bytes(data.dtype, data.elements)
    return Scratch("sorting", size, sure=True)


def _group_norm(op: Op) -> Scratch | None:
    """Sums of its backward by sample and channel, but for those that are a tensor of the graph."""
    samples, channels, groups = (op.arguments.get(name) for name in ("N", "C", "group"))
    if not (samples and channels and groups):
        return None
    sums = (1 if "sums" in op.arguments else 3) * channels
    return Scratch("norms", 4 * samples * (sums + 2 * groups), sure=True)


def _named(op: Op, graph: OpGraph, name: str) -> Tensor | None:
    reference = op.arguments.get(name)
    return graph.values[reference.id] if isinstance(reference, Ref) else None


def _attention(query: Tensor) -> Scratch | None:
    """query[B, H, S, E]: fp32 [B, H, S', E'] and fp32 [B, H, S'], sizes rounded up.

    Kernels for fp32 sum in the gradient itself.
    """
    if query.dtype not in HALF or len(query.shape) != 4:
        return None
    batch, heads, rows, width = query.shape
    rows, width = _up(rows, _ROWS), _up(width, _WIDTH)
    return Scratch("attention", 4 * batch * heads * rows * (width + 1), sure=True)


def _convolution(op: Op, graph: OpGraph) -> Scratch | None:
    """An engine's workspace, and copies with channels last for the largest product: forward, or
    one of the two of backward."""
    weight = _named(op, graph, "weight")
    data = _named(op, graph, "input")
    if weight is None or data is None or data.dtype not in (*HALF, "fp32", "tf32"):
        return None
    groups = op.arguments.get("groups", 1)
    if groups == data.shape[1] > 1:
        return None  # PyTorch has its kernels for depthwise convolutions
    if len(data.shape) < 4 or traffic.has_channels_last(data):
        return Scratch("convolutions", _ENGINE, sure=False)
    copied = _copied((data, weight))
    gradient = _named(op, graph, "grad_output")
    if gradient is None:
        copied += _copied(graph.values[value] for value in op.outputs)
    else:
        copied += _copied((gradient,))  # either product reads two of three, and makes the third
    return Scratch("convolutions", _ENGINE + copied, sure=False)


def _copied(tensors: Iterable[Tensor]) -> int:
    """Bytes of copies with channels last: whole vectors of 16 bytes of channels."""
    total = 0
    for tensor in tensors:
        vector = max(1, 16 // storage_bytes(tensor.dtype, 1))
        pixels = math.prod((tensor.shape[0], *tensor.shape[2:]))
        total += storage_bytes(tensor.dtype, pixels * _up(tensor.shape[1], vector))
    return total


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
