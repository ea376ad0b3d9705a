"""Memory that a step reserves on a chip, and the largest batch whose peak memory fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from rooftrace._plain import Plain
from rooftrace._shown import short
from rooftrace.costmodels.memory.allocator import CachingAllocator, program
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_capacity

# -- largest batch ---------------------------------------------------------------------------------
# Peak memory is nearly linear in the batch: another op may be at the peak, another algorithm may
# run.  So the line only says which batch to try, and the answer is tried: it fits, and one more
# does not.

MOST = 65536
"""Batches beyond this are not looked for."""


@dataclass(frozen=True, slots=True)
class LargestBatch(Plain):
    """The largest batch that fits into `capacity` bytes."""

    batch: int  # 0 where not even one sample fits
    peak: int  # bytes at that batch, of one sample where none fits
    weights: int  # bytes of weights, which come with any batch
    capacity: float
    open_ended: bool = False  # whether a larger one may fit, which was not looked for

    KEYS = "batch peak weights_fit open_ended"

    @property
    def weights_fit(self) -> bool:
        """Whether the weights alone are within the capacity."""
        return self.weights <= self.capacity


def largest(peak_of: Callable[[int], int], capacity: float, most: int = MOST) -> tuple[int, bool]:
    """The largest batch up to `most` with ``peak_of(batch) <= capacity``, and whether it is `most`.

    The peak must not fall as the batch grows.  Four peaks are evaluated where it is linear, else
    some more: between a batch that fits and one that does not, in turns along the line between
    them and in the middle.
    """
    if peak_of(1) > capacity:
        return 0, False
    low, before, high = min(2, most), 1, None
    if peak_of(low) > capacity:
        return 1, False
    by_line = True
    while low < most and (high is None or high - low > 1):
        other = before if high is None else high
        slope = (peak_of(other) - peak_of(low)) / (other - low) if other != low else 0.0
        if high is not None and not by_line:
            guess = (low + high) // 2
        elif slope > 0:
            guess = low + int((capacity - peak_of(low)) / slope)
        else:
            guess = 4 * low
        guess = max(low + 1, min(guess, most if high is None else high - 1))
        if peak_of(guess) <= capacity:
            before, low = low, guess
        else:
            by_line, high = not by_line if high is not None else True, guess
    return low, high is None


# -- reserving -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Plain):
    """GPU memory of a process, as PyTorch's caching allocator would hand it out.

    allocated, reserved: as `torch.cuda.max_memory_allocated` and `max_memory_reserved` after some
    steps.  `allocated_least` is smaller than `allocated` where a library may take less.
    """

    tensors: int  # the peak of the tensors alone, as `Memory.peak`
    allocated: int  # in blocks, with workspaces at their most
    allocated_least: int  # without those that a library may do without
    reserved: int  # in segments
    reserved_expandable: int  # with expandable_segments:True
    workspaces: Mapping[str, int] = field(default_factory=dict)  # the most at once, by kind
    context: int = 0  # outside of the allocator: the CUDA context and its kernels

    KEYS = "allocated allocated_least reserved reserved_expandable workspaces tensors context"

    def __repr__(self) -> str:
        return short(
            self,
            f"{format_capacity(self.allocated)} allocated, "
            f"{format_capacity(self.reserved)} reserved, {format_capacity(self.context)} outside",
        )

    @property
    def fragmentation(self) -> float:
        """Share of reserved bytes that is not allocated at the peak."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0

    @property
    def process(self) -> int:
        """All bytes of the process: reserved ones, and the context."""
        return self.reserved + self.context


def reserve(graph: OpGraph, chip: Chip, tensors: int, unmade: Collection[int] = ()) -> Reserved:
    """Memory of a step of `graph` on a GPU.

    tensors: the peak of its tensors.  unmade: storages that never are in memory.
    """
    written = program(graph, unmade)
    blas = int(chip.blas_workspace.value)
    native, growing = CachingAllocator(), CachingAllocator(expandable=True)
    written.run(native, blas)
    written.run(growing, blas)
    least = native.most_allocated
    if written.scratch["convolutions"]:
        sure = CachingAllocator()
        written.run(sure, blas, taken=("scratch",))
        least = sure.most_allocated
    sizes = {"BLAS": blas * written.threads, **written.scratch}
    return Reserved(
        tensors=tensors,
        allocated=native.most_allocated,
        allocated_least=least,
        reserved=native.reserved,
        reserved_expandable=growing.reserved,
        workspaces={kind: size for kind, size in sizes.items() if size},
        context=int(chip.context.value),
    )
