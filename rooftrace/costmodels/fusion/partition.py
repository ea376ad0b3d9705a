"""The kernels of a graph while they grow: who is in which, what each rests on, which join made it.

Kernels have ranks in launch order.  An op joins only a kernel whose rank is at least that of every
kernel it depends on, so every edge between kernels goes to a higher rank and no cycle can arise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rooftrace.costmodels.fusion.groups import Merge
from rooftrace.costmodels.fusion.joins import Join, fitting
from rooftrace.costmodels.fusion.kernels import MAX_GROUP, Facts, KernelView
from rooftrace.costmodels.fusion.runs import Neighbourhood


@dataclass(slots=True, kw_only=True)
class Open(KernelView):
    """A kernel with its place in the launch order."""

    rank: int
    floor: int = -1  # the highest rank of a kernel that it needs
    epoch: int = 0  # how many kernels stood before the last wait
    repeats: tuple[int, ...] = ()  # in whose iterations it is launched
    merges: list[Merge] = field(default_factory=list)


class Partition:
    """Kernels by rank, and by the ops in them."""

    def __init__(self, facts: Facts, around: Neighbourhood) -> None:
        self.facts, self.around = facts, around
        self.kernels: list[Open] = []
        self.kernel_of: dict[int, Open] = {}

    def start(self, part: KernelView, epoch: int, repeats: tuple[int, ...], late: bool) -> Open:
        """A new kernel of one op, launched after all others."""
        opened = Open(
            facts=self.facts,
            members=[],
            size=part.size,
            reduced=part.reduced,
            fusable=part.fusable,
            rank=len(self.kernels),
            epoch=epoch,
            repeats=repeats,
        )
        self.kernels.append(opened)
        self.add(part, opened, late)
        return opened

    def add(self, part: KernelView, kernel: Open, late: bool, join: Join | None = None) -> None:
        """Put an op into a kernel.  late: its result is there only when the kernel has ended."""
        (number,) = part.members
        kernel.members.append(number)
        kernel.reads |= part.reads
        kernel.made |= part.made
        kernel.stored |= part.stored
        kernel.long |= part.long
        for other in self.kernels_of(self.facts.needs[number]):
            if other is not kernel:
                kernel.floor = max(kernel.floor, other.rank)
        if late:
            kernel.late.add(number)
        if join is not None:
            kernel.merges.append(Merge(join.name, (number,)))
        self.kernel_of[number] = kernel

    def merge(self, kernel: Open, target: Open, join: Join) -> None:
        """Put all of a kernel into another one."""
        target.merges += [*kernel.merges, Merge(join.name, tuple(kernel.members))]
        target.members.extend(kernel.members)
        target.reads |= kernel.reads
        target.made |= kernel.made
        target.late |= kernel.late
        target.stored |= kernel.stored
        target.split |= kernel.split
        target.down |= kernel.down
        target.long |= kernel.long
        target.size = max(target.size, kernel.size)
        target.reduced = target.reduced if kernel.reduced is None else kernel.reduced
        self.kernel_of.update(dict.fromkeys(kernel.members, target))
        kernel.members = []
        target.floor = self.floor(target)

    def withdraw(self, numbers: Collection[int], kernel: Open) -> None:
        """Take ops out of a kernel, which keeps others."""
        kernel.members = [number for number in kernel.members if number not in numbers]
        kernel.merges = left_over(kernel.members, kernel.merges)

    def kernels_of(self, numbers: Iterable[int]) -> Iterable[Open]:
        """The kernels of these ops, as far as they are in one."""
        return (kernel for n in numbers if (kernel := self.kernel_of.get(n)) is not None)

    def floor(self, kernel: Open) -> int:
        """The highest rank among the other kernels that this one needs."""
        others = self.kernels_of(n for op in kernel.members for n in self.facts.needs[op])
        return max((other.rank for other in others if other is not kernel), default=-1)

    def joining(self, joins: Sequence[Join], kernel: Open, target: Open) -> Join | None:
        """The join by which a kernel can move into another one, None where nothing allows it."""
        late = kernel.late and target.size != kernel.reduced
        if target.split or late or not self.has_room(kernel, target):
            return None
        join = fitting(joins, kernel, target)
        if (
            join is None
            or self.reads_part(target.members, kernel)
            or self.reads_part(kernel.members, target)
            or not self.may_share(kernel.members, target)
        ):
            return None
        return join

    def placing(self, joins: Sequence[Join], kernel: Open, target: Open) -> Join | None:
        """The join by which all that a kernel makes is computed into its place in another one."""
        join = fitting(joins, kernel, target) if self.has_room(kernel, target) else None
        return join if join is not None and self.may_share(kernel.members, target) else None

    def has_room(self, kernel: Open, target: Open) -> bool:
        """Whether a compiler writes both, and they are no more than MAX_GROUP ops together."""
        count = len(target.members) + len(kernel.members)
        return kernel.fusable and target.fusable and count <= MAX_GROUP

    def reads_part(self, numbers: Iterable[int], kernel: KernelView) -> bool:
        """Whether one of these ops reads a part of something long in the kernel."""
        if kernel.reduced is not None:
            return False
        graph = self.facts.graph
        values = graph.values
        parts = {
            values[i].storage
            for number in numbers
            for i in graph.ops[number].inputs
            if values[i].storage in kernel.made
            and values[i].elements < values[values[i].storage].elements
        }
        long = self.facts.long.intersection(kernel.members) if parts else ()
        return any(not parts.isdisjoint(graph.ops[number].outputs) for number in long)

    def may_share(self, numbers: Sequence[int], kernel: Open) -> bool:
        """Whether these ops may be in it: of one compiled graph, and without joining iterations of
        a repeat unevenly."""
        together = [*numbers, *kernel.members]
        segments = self.facts.segments
        if segments and len({segments[number] for number in together}) > 1:
            return False
        return not self.around.sites or self.around.may_share(together)


def left_over(members: Collection[int], merges: Sequence[Merge]) -> list[Merge]:
    """The merges of a kernel from which ops were taken: exactly one member came by none of them."""
    kept = [
        Merge(merge.join, ops)
        for merge in merges
        if (ops := tuple(n for n in merge.ops if n in members))
    ]
    for i in range(len(kept)):
        if not members or set().union(*(m.ops for m in kept)) < set(members):
            break
        rest = kept[:i] + kept[i + 1 :]
        if set().union(*(m.ops for m in rest)) < set(members):
            kept = rest
            break
    return kept
