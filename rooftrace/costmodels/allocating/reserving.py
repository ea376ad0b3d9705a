"""What a step's tensors take on a chip: blocks, workspaces, cached segments, the context."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rooftrace._plain import Plain
from rooftrace._shown import short
from rooftrace.costmodels.allocating.caching import CachingAllocator
from rooftrace.costmodels.allocating.replaying import program
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_capacity
from rooftrace.tracer.graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(Plain):
    """Bytes that a process takes of a GPU, as PyTorch's caching allocator would hand them out.

    allocated and reserved are what `torch.cuda.max_memory_allocated` and `max_memory_reserved`
    say after some steps.  Where a library may take less than it was given here, `allocated_least`
    is smaller than `allocated`; where nothing is in doubt they are equal.
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
        """Share of what is reserved that is not allocated at the fullest moment."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0

    @property
    def process(self) -> int:
        """All bytes of the process: what is reserved, and the context."""
        return self.reserved + self.context


def reserve(graph: OpGraph, chip: Chip, tensors: int, unmade: Collection[int] = ()) -> Reserved:
    """What a step of `graph` takes on a GPU.

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
    known = {"BLAS": blas * written.threads, **written.scratch}
    return Reserved(
        tensors=tensors,
        allocated=native.most_allocated,
        allocated_least=least,
        reserved=native.reserved,
        reserved_expandable=growing.reserved,
        workspaces={kind: size for kind, size in known.items() if size},
        context=int(chip.context.value),
    )
