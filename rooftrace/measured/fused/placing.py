"""Which kernel of a step each op runs in, by the words in kernels' names and the flow of tensors.

Known first are calls into libraries.  An op whose name only one kernel between its makers and its
readers lists is in that kernel; each that is placed narrows the windows of its neighbours.  Where
several kernels list it, the one that it fits best takes it, surest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.measured.fused.dataflow import Dataflow, Windows
from rooftrace.measured.fused.words import KernelWords

_MOST = 128
"""As many kernels are weighed for one op, from the first on."""
_MARGINS = (2.0, 1.0, 0.5, 0.0)
"""By how much a kernel has to fit an op better than any other, one after another."""
_NEW, _NEIGHBOUR, _INLINED, _KIN, _MATE, _SIZE, _APPLIES = 2.0, 1.0, 1.0, 0.5, 0.5, 0.75, 1.0
"""What speaks for a kernel: no op so far stands for a word of its name; it has an op that this one
reads or that reads it; it has all that read it; one that reads the same; one that we would fuse
with it; a tensor of the size of its result; it applies what another kernel has reduced."""


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """A kernel of a step, as its name and its trace describe it."""

    words: KernelWords
    library: bool = False  # a call into a library, which computes one op
    applies: bool = False  # of one element at a time, on a device: it may end a reduction
    sizes: frozenset[int] = frozenset()  # elements of its arguments, where the trace has them


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """What decides where an op can be."""

    words: frozenset[str]  # under which it may stand in the name of a kernel
    limits: tuple[int, int]  # the first and the last kernel that it can be in by itself
    mates: frozenset[int] = frozenset()  # ops that we would put into one kernel with it
    sizes: frozenset[int] = frozenset()  # elements of what it writes
    reduces: bool = False  # whether no kernel that reads it computes it again


class Placing:
    """The kernels of ops, as they become known."""

    def __init__(
        self, flow: Dataflow, kernels: Sequence[NamedKernel], ops: Mapping[int, PlacedOp]
    ) -> None:
        """kernels: in launch order.  ops: those of the flow by id."""
        self.flow, self.kernels, self.ops = flow, kernels, ops
        self.home: dict[int, int] = {}
        self.library = [kernel.library for kernel in kernels]
        self.told: dict[int, set[str]] = defaultdict(set)  # words of a kernel with an op
        self.listing: dict[str, list[int]] = defaultdict(list)
        self.cut = [place for place, kernel in enumerate(kernels) if kernel.words.start]
        for place, kernel in enumerate(kernels):
            if not kernel.library:
                for word in kernel.words.words:
                    self.listing[word].append(place)

    def put(self, op: int, place: int) -> None:
        """Say that a kernel computes an op."""
        self.home[op] = place
        self.told[place].update(self.ops[op].words & self.kernels[place].words.words)

    def run(self) -> None:
        """Place all ops that names can place."""
        for margin in _MARGINS:
            while self._forced() or self._weighed(margin):
                pass
        self._begun_early()

    def windows(self) -> Windows:
        """The windows of all ops by what is known."""
        limits = {number: op.limits for number, op in self.ops.items()}
        return Windows.of(self.flow, self.home, self.library, limits)

    def candidates(self, op: int, begin: int, end: int) -> list[int]:
        """The kernels in a window whose names list an op."""
        places: set[int] = set()
        for word in self.ops[op].words:
            listed = self.listing.get(word, ())
            at = bisect_left(listed, begin)
            while at < len(listed) and listed[at] <= end and len(places) <= _MOST:
                places.add(listed[at])
                at += 1
        for place in self.cut:
            if begin <= place <= end and self.kernels[place].words.names(self.ops[op].words):
                places.add(place)
        return sorted(places)

    def _open(self) -> Iterator[tuple[int, list[int]]]:
        """Ops without a kernel, and the kernels that each can be in."""
        windows = self.windows()
        for op in self.flow.ops:
            if op in self.home:
                continue
            begin, end = windows.around(op)
            # Some may have been placed since the windows were made.
            made = [self.home[maker] for maker in self.flow.makers[op] if maker in self.home]
            read = [self.home[reader] for reader in self.flow.readers[op] if reader in self.home]
            places = self.candidates(op, max([begin, *made]), min([end, *read]))
            if places:
                yield op, places

    def _forced(self) -> bool:
        """Place what has one kernel only."""
        before = len(self.home)
        for op, places in self._open():
            if len(places) == 1:
                self.put(op, places[0])
        return len(self.home) > before

    def _weighed(self, margin: float) -> bool:
        """Place what fits one kernel better than any other by this margin, or the first of equal
        ones."""
        before = len(self.home)
        for op, places in self._open():
            fits = sorted((-self._fit(op, place), place) for place in places)
            if len(fits) == 1 or fits[1][0] - fits[0][0] >= margin:
                self.put(op, fits[0][1])
        return len(self.home) > before

    def _begun_early(self) -> None:
        """Place what a kernel lists that runs before all of its operands are there: each kernel of
        an operand writes its own part of a `cat`."""
        windows = self.windows()
        for op in self.flow.ops:
            if op not in self.home and self.flow.makers[op]:
                begin = min(windows.first[maker] for maker in self.flow.makers[op])
                places = [
                    place
                    for place in self.candidates(op, begin, windows.last[op])
                    if self._is_new(op, place)
                ]
                if places:
                    self.put(op, places[-1])

    def _is_new(self, op: int, place: int) -> bool:
        """Whether a kernel lists an op, and no op so far stands for that."""
        return bool(self.ops[op].words & self.kernels[place].words.words - self.told[place])

    def _is_listed(self, op: int) -> bool:
        """Whether the compiler wrote a kernel whose name lists an op, anywhere in the step."""
        return not self.listing.keys().isdisjoint(self.ops[op].words)

    def _fit(self, op: int, place: int) -> float:
        """How well an op fits into a kernel."""
        home, own = self.home.get, self.ops[op]
        readers, makers = self.flow.readers[op], self.flow.makers[op]
        kin, mates = self.flow.kin[op], own.mates
        applies = own.reduces and bool(readers) and self.kernels[place].applies
        if applies:
            makers = frozenset()
        elif own.reduces:
            if all(reader not in self.home and not self._is_listed(reader) for reader in readers):
                makers = mates = kin = frozenset()  # gradients of weights are in order
            readers = frozenset()
        elif self.kernels[place].applies and any(self.ops[reader].reduces for reader in readers):
            readers, mates = frozenset(), frozenset()  # it is there before the reduction is applied
        return (
            _NEW * self._is_new(op, place)
            + _NEIGHBOUR * any(home(near) == place for near in (*makers, *readers))
            + _INLINED * (bool(readers) and all(home(reader) == place for reader in readers))
            + _KIN * any(home(near) == place for near in kin)
            + _MATE * any(home(mate) == place for mate in mates)
            + _APPLIES * applies
            + _SIZE * bool(self.kernels[place].sizes & own.sizes)
        )
