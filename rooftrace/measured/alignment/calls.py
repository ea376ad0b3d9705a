"""The calls of a trace at the level of a graph: of nested calls, the one that the graph has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rooftrace.costmodels.registry import find_rule
from rooftrace.measured.alignment.keys import WAYS, Key, key_of_call, looser
from rooftrace.measured.traces import Trace, TraceStep, records

_HOST_ONLY = frozenset(
    f"aten::{name}" for name in ("flatten", "reshape", "resize", "resolve_conj", "resolve_neg")
)
"""Calls on the host without a rule: a graph shows the views that they make instead."""


def on_host(name: str) -> bool:
    """Whether an op only makes a view or allocates, so that it launches nothing."""
    rule = find_rule(f"{name.replace('::', '.', 1)}.default")
    return name in _HOST_ONLY or (rule is not None and rule.fusion == "free")


@dataclass(slots=True)
class OpCall:
    """A call in a trace at the level of a graph."""

    op: int  # index in the trace; records.NONE for a kernel that no op launched
    key: Key
    name: str
    seconds: float  # s, of its kernels; without any in the trace, of the host
    kernels: tuple[int, ...]  # indices of all that it launched
    host: bool = False  # whether it is no work of the device


class CallTree:
    """Cuts the call trees of a trace where they meet the ops of the graph."""

    def __init__(self, trace: Trace, keys: frozenset[Key]) -> None:
        self.trace, self.keys = trace, keys
        self.loose = frozenset(looser(key, way) for key in keys for way in range(1, WAYS + 1))
        self.names = frozenset(name for name, _ in keys)
        self.calls, self.launches = trace.calls, trace.launches
        self._keys: dict[tuple[int, int], Key] = {}
        self._nearly: dict[Key, bool] = {}

    def nearly(self, key: Key) -> bool:
        """Whether the graph has this key by looser shapes."""
        if key not in self._nearly:
            ways = range(1, WAYS + 1)
            self._nearly[key] = any(looser(key, way) in self.loose for way in ways)
        return self._nearly[key]

    def of(self, step: TraceStep) -> list[OpCall]:
        """The calls of a step, and the kernels that it launched outside of any op."""
        calls = [call for op in self.roots(step) for call in self.below(op)]
        return calls + [self.bare(kernel) for kernel in self.unnamed(step)]

    def roots(self, step: TraceStep) -> Iterator[int]:
        """The calls of a step that no other of its calls is around."""
        parents = self.trace.ops.parent
        inside = set(step.ops)
        for op in step.ops:
            if parents[op] == records.NONE or parents[op] not in inside:
                yield op

    def unnamed(self, step: TraceStep) -> Iterator[int]:
        """The kernels of a step that were launched outside of any op."""
        for kernel in step.kernels:
            if self.trace.kernels.op[kernel] == records.NONE:
                yield kernel

    def bare(self, kernel: int) -> OpCall:
        """A kernel as a call of its own."""
        kernels = self.trace.kernels
        name = kernels.names.items[kernels.name[kernel]]
        return OpCall(records.NONE, (name, ()), name, kernels.duration[kernel], (kernel,))

    def key(self, op: int) -> Key:
        """The key of a call."""
        ops = self.trace.ops
        number = (ops.name[op], ops.inputs[op])
        if number not in self._keys:
            inputs = ops.inputs_known.items[number[1]] if number[1] != records.NONE else None
            shapes = inputs.shapes if inputs else ()
            self._keys[number] = key_of_call(ops.names.items[number[0]], shapes)
        return self._keys[number]

    def below(self, op: int) -> list[OpCall]:
        """The calls at the level of the graph in one call tree."""
        key = self.key(op)
        if key in self.keys:
            return [self.whole(op, key)]
        below = [call for called in self.calls.get(op, ()) for call in self.below(called)]
        known = any(call.key in self.keys for call in below)
        if not known and self.nearly(key):
            return [self.whole(op, key)]
        known = known or any(self.nearly(call.key) for call in below)
        # Nothing matches, but an op of the graph in other sizes is the better name for it.
        same = key[0] not in self.names and any(call.key[0] in self.names for call in below)
        return [*below, *self._own(op, key)] if known or same else [self.whole(op, key)]

    def _own(self, op: int, key: Key) -> list[OpCall]:
        """The kernels that a call launched itself, beside those of the calls inside of it."""
        kernels = self.launches.get(op, ())
        if not kernels:
            return []
        seconds = sum(self.trace.kernels.duration[k] for k in kernels)
        return [OpCall(op, key, self.name(op), seconds, kernels)]

    def whole(self, op: int, key: Key) -> OpCall:
        """A call with all calls below it."""
        name = self.name(op)
        if not self.trace.on_device:
            return OpCall(op, key, name, self.trace.ops.duration[op], (), self._on_host(op))
        kernels = tuple(k for inner in self._below(op) for k in self.launches.get(inner, ()))
        seconds = sum(self.trace.kernels.duration[k] for k in kernels)
        return OpCall(op, key, name, seconds, kernels, not kernels)

    def _below(self, op: int) -> Iterator[int]:
        yield op
        for called in self.calls.get(op, ()):
            yield from self._below(called)

    def _on_host(self, op: int) -> bool:
        """Whether nothing in this call is work: views, allocations, wrappers of them."""
        name = self.name(op)
        if name.startswith("aten::"):
            return on_host(name)
        return all(self._on_host(called) for called in self.calls.get(op, ()))

    def name(self, op: int) -> str:
        """The name of a call."""
        return str(self.trace.ops.names.items[self.trace.ops.name[op]])
