"""How many bytes are alive at once, from the graph: who allocates when, and who reads last.

Storages of weights, caches, gradients and optimizer states live as long as training needs them;
everything else lives from the op that makes it to its last reader.  The peak is a lower bound of what an
allocator reserves: fragmentation, workspaces and the framework's own context come on top.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.hardware.chip import Chip
from rooftrace.tracer.graph import ROLES, OpGraph

_LISTED = ("weights", "kv", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes alive over a step.

    weights, kv, gradients, optimizer: the most that is alive of each.  activations_peak: the most of
    everything else (activations, inputs, temporaries, constants).  peak: the most of all together,
    which is not their sum where they do not peak at the same time.  at_peak: by role at that moment.
    where: index of the op at which the peak is (-1: before the first).
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
        return {"weights": self.weights, "kv": self.kv, "gradients": self.gradients,
                "optimizer": self.optimizer, "activations_peak": self.activations_peak,
                "peak": self.peak, "at_peak": dict(self.at_peak), "where": self.where}


def memory(graph: OpGraph) -> Memory:
    """Liveness of `graph` in its captured order (eager, attention as one kernel)."""
    values = graph.values
    size = [0] * len(values)
    for tensor in values:
        # A storage is as large as its largest view.
        size[tensor.storage] = max(size[tensor.storage], tensor.nbytes)
    outside = {values[i].storage for i in graph.external}
    forever = {values[i].storage for i in graph.outputs} | outside
    born: dict[int, int] = dict.fromkeys(outside, -1)
    last: dict[int, int] = {}
    for op in graph.ops:
        for index in op.inputs:
            last[values[index].storage] = op.id
        for index in op.outputs:
            storage = values[index].storage
            born.setdefault(storage, op.id)
            last[storage] = op.id
    end = len(graph.ops)
    for storage in forever:
        last[storage] = end
    replaced = _replaced_caches(graph)
    alive: Counter[str] = Counter()
    deaths: dict[int, list[int]] = {}
    births: dict[int, list[int]] = {}
    for storage, when in born.items():
        births.setdefault(when, []).append(storage)
        final = replaced.get(storage, last.get(storage, when))
        if final < end:
            deaths.setdefault(final, []).append(storage)
    for storage in births.get(-1, ()):
        alive[values[storage].role] += size[storage]
    unread = int(graph.model.get("bytes_parameters", 0)) + int(graph.model.get("bytes_buffers", 0))
    unread = max(0, unread - alive["weights"])
    alive["weights"] += unread
    most = Counter(alive)
    others = most_others = sum(n for role, n in alive.items() if role not in _LISTED)
    total = best = sum(alive.values())
    where, snapshot = -1, Counter(alive)
    for op in graph.ops:
        for storage in births.get(op.id, ()):
            role = values[storage].role
            alive[role] += size[storage]
            total += size[storage]
            if role in _LISTED:
                most[role] = max(most[role], alive[role])
            else:
                others += size[storage]
        if total > best:
            best, where, snapshot = total, op.id, Counter(alive)
        most_others = max(most_others, others)
        for storage in deaths.get(op.id, ()):
            role = values[storage].role
            alive[role] -= size[storage]
            total -= size[storage]
            if role not in _LISTED:
                others -= size[storage]
    return Memory(most["weights"], most["kv"], most["gradients"], most["optimizer"], most_others, best,
                  {role: snapshot[role] for role in ROLES}, where)


def _replaced_caches(graph: OpGraph) -> dict[int, int]:
    """Caches that a `cat` replaces: the old one dies there, though it came from outside."""
    values = graph.values
    return {values[i].storage: op.id for op in graph.ops if op.name == "aten.cat" and op.outputs
            and values[op.outputs[0]].role == "kv" for i in op.inputs if values[i].role == "kv"}
