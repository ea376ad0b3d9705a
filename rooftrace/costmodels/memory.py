"""How many bytes are alive at once, from the graph: who allocates when, and who reads last.

Weights, inputs, caches, gradients, optimizer states and results stay to the end of the step;
everything else lives from the op that makes it to the last one that touches it.  The peak is a
lower bound of what an allocator reserves: fragmentation, workspaces, Python variables that outlive
their use, and the framework's own context come on top.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.costmodels.traffic import storage_sizes
from rooftrace.hardware.chip import Chip
from rooftrace.tracer.graph import ROLES, OpGraph

_LISTED = ("weights", "kv", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive over a step.

    weights, kv, gradients, optimizer: the most that is alive of each.  activations_peak: the most
    of everything else (activations, inputs, temporaries, constants).  peak: the most of all
    together, which is not their sum where they do not peak at the same time.  at_peak: by role at
    that moment.  where: index of the op at which the peak is (-1: before the first).
    """

    weights: int
    kv: int
    gradients: int
    optimizer: int
    activations_peak: int
    peak: int
    at_peak: Mapping[str, int]
    where: int

    def fits(self, chip: Chip) -> bool:
        """Whether the peak is within the chip's memory."""
        return self.peak <= chip.memory_capacity.value

    def chips_needed(self, chip: Chip) -> int:
        """How many of these chips hold the peak if it could be split evenly."""
        return max(1, math.ceil(self.peak / chip.memory_capacity.value))

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for the report."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations_peak": self.activations_peak,
            "peak": self.peak,
            "at_peak": dict(self.at_peak),
            "where": self.where,
        }


def memory(graph: OpGraph) -> Memory:
    """Liveness of `graph` in its captured order (eager, attention as one kernel)."""
    sizes = storage_sizes(graph)
    births, deaths = _lifetimes(graph)
    alive: Counter[str] = Counter()
    for storage in births.get(-1, ()):
        alive[graph.values[storage].role] += sizes[storage]
    # Weights that this step does not read (experts without tokens) are there all the same.
    stored = int(graph.model.get("bytes_parameters", 0)) + int(graph.model.get("bytes_buffers", 0))
    alive["weights"] = max(alive["weights"], stored)
    tally = _Tally(alive)
    for op in graph.ops:
        for storage in births.get(op.id, ()):
            tally.change(graph.values[storage].role, sizes[storage])
        tally.look(op.id)
        for storage in deaths.get(op.id, ()):
            tally.change(graph.values[storage].role, -sizes[storage])
    return tally.result()


class _Tally:
    """Bytes alive now, and the most that was alive at once."""

    def __init__(self, alive: Counter[str]) -> None:
        self.alive = alive
        self.total = sum(alive.values())
        self.others = sum(size for role, size in alive.items() if role not in _LISTED)
        self.most, self.most_others = Counter(alive), self.others
        self.peak, self.where, self.at_peak = self.total, -1, Counter(alive)

    def change(self, role: str, size: int) -> None:
        """`size` bytes of this role come, or go if it is negative."""
        self.alive[role] += size
        self.total += size
        if role in _LISTED:
            self.most[role] = max(self.most[role], self.alive[role])
        else:
            self.others += size

    def look(self, op: int) -> None:
        """Remember this moment if it is the fullest so far."""
        self.most_others = max(self.most_others, self.others)
        if self.total > self.peak:
            self.peak, self.where, self.at_peak = self.total, op, Counter(self.alive)

    def result(self) -> Memory:
        """The record for the report."""
        most = self.most
        return Memory(
            most["weights"],
            most["kv"],
            most["gradients"],
            most["optimizer"],
            self.most_others,
            self.peak,
            {role: self.at_peak[role] for role in ROLES},
            self.where,
        )


def _lifetimes(graph: OpGraph) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Storages by the op that makes them (-1: from outside), and by the op that ends their life.

    What an autograd node receives (saved tensors, gradients) lives until the node has ended.
    """
    values = graph.values
    touched = {values[i].storage for op in graph.ops for i in (*op.inputs, *op.outputs)}
    used = touched | {values[i].storage for i in (*graph.inputs, *graph.outputs)}
    outside = {values[i].storage for i in graph.external} & used
    born = dict.fromkeys(sorted(outside), -1)
    last: dict[int, int] = {}
    for first, end in _nodes(graph):
        for op in graph.ops[first:end]:
            for index in op.outputs:
                born.setdefault(values[index].storage, op.id)
            for index in (*op.inputs, *op.outputs):
                storage = values[index].storage
                last[storage] = end - 1 if born.get(storage, -1) < first else op.id
    stays = (outside - _replaced_caches(graph)) | {values[i].storage for i in graph.outputs}
    births: dict[int, list[int]] = defaultdict(list)
    deaths: dict[int, list[int]] = defaultdict(list)
    for storage, when in born.items():
        births[when].append(storage)
        if storage not in stays and values[storage].role != "gradients":
            deaths[last.get(storage, when)].append(storage)
    return births, deaths


def _nodes(graph: OpGraph) -> Iterator[tuple[int, int]]:
    """Ranges of ops that run as one autograd node; outside backward every op is one of its own."""
    first = 0
    previous: tuple[str, str, int] | None = None
    for op in graph.ops:
        node = (op.function, op.module, op.call) if op.part == "backward" else None
        if op.id > first and (node is None or node != previous):
            yield first, op.id
            first = op.id
        previous = node
    if graph.ops:
        yield first, len(graph.ops)


def _replaced_caches(graph: OpGraph) -> set[int]:
    """Caches that a `cat` replaces: the old one goes, though it came from outside."""
    values = graph.values
    return {
        values[i].storage
        for op in graph.ops
        if op.name == "aten.cat" and op.outputs and values[op.outputs[0]].role == "kv"
        for i in op.inputs
        if values[i].role == "kv"
    }
