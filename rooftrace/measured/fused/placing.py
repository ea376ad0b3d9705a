"""Which kernel of a step each op runs in, by the words in kernels' names and the flow of tensors.

Known first are calls into libraries.  An op whose name only one kernel between its makers and its
readers lists is in that kernel; each that is placed narrows the windows of its neighbours.  Where
several kernels list it, the one that it fits best takes it, surest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from rooftrace.measured.fused.dataflow import Dataflow, Windows
from rooftrace.measured.fused.words import KernelWords

_MOST = 32
"""As many kernels are weighed for one op, from the first on."""
_MARGINS = (2.0, 1.0, 0.5, 0.0)
"""By how much a kernel has to fit an op better than any other, one after another."""


class Placing:
    """The kernels of ops, as they become known."""

    def __init__(
        self,
        flow: Dataflow,
        kernels: Sequence[KernelWords],
        library: Sequence[bool],
        words: Mapping[int, frozenset[str]],
        mates: Mapping[int, frozenset[int]],
        limits: Mapping[int, tuple[int, int]],
        reducing: Collection[int] = (),
    ) -> None:
        """kernels: what the names of the step's kernels list, in launch order.  words: under which
        names an op may stand there.  mates: ops that we would put into one kernel with it.  limits:
        the first and the last kernel that an op can be in by itself."""
        self.flow, self.kernels, self.library = flow, kernels, library
        self.words, self.mates, self.limits, self.reducing = words, mates, limits, reducing
        self.home: dict[int, int] = {}
        self.told: dict[int, set[str]] = defaultdict(set)  # words of a kernel with an op
        self.listing: dict[str, list[int]] = defaultdict(list)
        self.cut = [place for place, kernel in enumerate(kernels) if kernel.start]
        for place, kernel in enumerate(kernels):
            if not library[place]:
                for word in kernel.words:
                    self.listing[word].append(place)

    def put(self, op: int, place: int) -> None:
        """Say that a kernel computes an op."""
        self.home[op] = place
        self.told[place].update(self.words[op] & self.kernels[place].words)

    def run(self) -> None:
        """Place all ops that names can place."""
        for margin in _MARGINS:
            while self._forced() or self._weighed(margin):
                pass
        self._begun_early()

    def windows(self) -> Windows:
        """The windows of all ops by what is known."""
        return Windows.of(self.flow, self.home, self.library, self.limits)

    def candidates(self, op: int, begin: int, end: int) -> list[int]:
        """The kernels in a window whose names list an op."""
        places: set[int] = set()
        for word in self.words[op]:
            listed = self.listing.get(word, ())
            at = bisect_left(listed, begin)
            while at < len(listed) and listed[at] <= end and len(places) <= _MOST:
                places.add(listed[at])
                at += 1
        for place in self.cut:
            if begin <= place <= end and self.kernels[place].names(self.words[op]):
                places.add(place)
        return sorted(places)

    def _open(self) -> Iterator[tuple[int, list[int]]]:
        """Ops without a kernel, and the kernels that each can be in."""
        windows = self.windows()
        for op in self.flow.ops:
            if op not in self.home:
                begin, end = windows.around(op)
                for near in (*self.flow.makers[op], *self.flow.readers[op]):
                    if near in self.home:  # placed since the windows were made
                        place = self.home[near]
                        if near in self.flow.makers[op]:
                            begin = max(begin, place)
                        else:
                            end = min(end, place)
                places = self.candidates(op, begin, end)
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
        """Place what fits one kernel better than any other by this margin."""
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
                places = self.candidates(op, begin, windows.last[op])
                new = self.words[op]
                places = [at for at in places if new & self.kernels[at].words - self.told[at]]
                if places:
                    self.put(op, places[-1])

    def _fit(self, op: int, place: int) -> float:
        """How well an op fits into a kernel: whether its name is there without an op so far, and
        whether what it reads, what reads it and what we would fuse with it is in that kernel."""
        here = self.words[op] & self.kernels[place].words
        home = self.home.get
        readers = frozenset() if op in self.reducing else self.flow.readers[op]
        return (
            2.0 * bool(here - self.told[place])
            + any(home(near) == place for near in (*self.flow.makers[op], *readers))
            + (bool(readers) and all(home(reader) == place for reader in readers))
            + 0.5 * any(home(near) == place for near in self.flow.kin[op])
            + 0.5 * any(home(mate) == place for mate in self.mates[op])
        )
