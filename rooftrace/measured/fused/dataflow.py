"""Which op waits for which, and between which kernels of a step it can run therefore."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooftrace.measured.fused.matching import is_launched
from rooftrace.tracer.graph import OpGraph

_FEW = 16
"""Ops that read one tensor with more readers than this are no neighbours by that."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The ops of a graph that launch something, in order, and what each reads from others."""

    ops: tuple[int, ...]  # ids
    makers: Mapping[int, frozenset[int]]  # of what an op reads
    readers: Mapping[int, frozenset[int]]  # of what it writes
    kin: Mapping[int, frozenset[int]]  # that read a tensor which it reads too

    @staticmethod
    def of(graph: OpGraph) -> Dataflow:
        """The flow of tensors, by who wrote their storage last."""
        writer: dict[int, int] = {}
        version: dict[int, int] = {}  # of a storage: by the op that wrote it last
        makers: dict[int, set[int]] = {}
        readers: dict[int, set[int]] = defaultdict(set)
        shared: dict[tuple[int, int], list[int]] = defaultdict(list)
        launched = tuple(op.id for op in graph.ops if is_launched(op))
        for number in launched:
            op = graph.ops[number]
            makers[number] = set()
            for storage in {graph.values[value].storage for value in op.inputs}:
                shared[storage, version.get(storage, -1)].append(number)
                if storage in writer:
                    makers[number].add(writer[storage])
                    readers[writer[storage]].add(number)
            for value in op.outputs:
                writer[graph.values[value].storage] = number
                version[graph.values[value].storage] = number
        kin: dict[int, set[int]] = defaultdict(set)
        for together in shared.values():
            if len(together) <= _FEW:
                for number in together:
                    kin[number].update(together)
        return Dataflow(
            launched,
            {op: frozenset(makers[op]) for op in launched},
            {op: frozenset(readers[op]) for op in launched},
            {op: frozenset(kin[op] - {op}) for op in launched},
        )


@dataclass(slots=True)
class Windows:
    """The first and the last kernel of a step in which each op can run: it waits for what it reads,
    and what reads it waits for it."""

    first: dict[int, int]
    last: dict[int, int]

    @staticmethod
    def of(
        flow: Dataflow,
        home: Mapping[int, int],
        library: Sequence[bool],
        limits: Mapping[int, tuple[int, int]],
    ) -> Windows:
        """Windows by the kernels of ops that are known.

        home: known kernels by op.  library: whether each kernel of the step is a call into a
        library, which shares its kernel with no other op.  limits: windows of ops by themselves.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for op in flow.ops:
            if op in home:
                first[op] = home[op] + library[home[op]]
                continue
            first[op] = max((limits[op][0], *(first[maker] for maker in flow.makers[op])))
        for op in reversed(flow.ops):
            if op in home:
                last[op] = home[op] - library[home[op]]
                continue
            last[op] = min((limits[op][1], *(last[reader] for reader in flow.readers[op])))
        return Windows(first, last)

    def around(self, op: int) -> tuple[int, int]:
        """The window of an op; where what is known contradicts itself, all between."""
        ends = self.first[op], self.last[op]
        return min(ends), max(ends)
