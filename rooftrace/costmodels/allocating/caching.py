"""PyTorch's CUDA caching allocator, as its rules say (c10/cuda/CUDACachingAllocator.cpp).

It asks the driver for segments, hands out blocks of them, and keeps what is freed.  Sizes are
rounded to 512 bytes.  Requests of at most 1 MiB share segments of 2 MiB; those below 10 MiB share
segments of 20 MiB; larger ones get a segment of their own, rounded to 2 MiB.  The smallest free
block that is large enough is taken, and what is left of it stays free where that is worth it.
Neighbours that are both free become one block.  Each stream has blocks of its own.

Not modelled: rounding to fractions of powers of two, garbage collection, pools of CUDA graphs, and
events of blocks that other streams use.
"""

from __future__ import annotations

from bisect import bisect_left, insort

SMALLEST = 512
SMALL = 2**20
"""The largest request that is "small"."""
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
OWN_SEGMENT = 10 * 2**20
"""The least request that has a segment of its own size."""
GRANULARITY = 2 * 2**20


def rounded(size: int) -> int:
    """Bytes of the block that a request is looked for with: a multiple of 512, at least 512."""
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes that are asked of the driver for a block of `size` bytes where none is free."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // GRANULARITY) * GRANULARITY


class Piece:
    """A piece of a segment: its bytes, where it lies, and the pieces beside it."""

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
