"""Chains of states that decay and grow by outer products, step by step.

A chain is followed backwards from the last state: through sums with an outer product, products with
a decay, casts and views, to the first state.  Its operands are streams: results of ops that are no
part of such a recurrence (a projection, a convolution, a sigmoid).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rooftrace.costmodels.rewrites.dataflow import COPIES, VIEWS, ValueFlow
from rooftrace.costmodels.rewrites.smallruns import KNOWN
from rooftrace.graph import Op, OpGraph, Ref

LAYOUT = VIEWS | COPIES
PARTS = frozenset({"aten.slice", "aten.select"})
SPLITS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"})
CREATED = frozenset(
    f"aten.{name}"
    for number in ("zeros", "empty", "ones", "full")
    for name in (number, f"new_{number}", f"{number}_like")
)
SUMS = frozenset({"aten.add", "aten.sub", "aten.add_", "aten.sub_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChain:
    """A state over its steps.

    last, first: the values at its ends; first is None where it begins with zeros.  steps: how many
    outer products are added to it.  decays: the factors on it.  columns, rows: the operands of the
    outer products along its last dimension but one, and its last.
    """

    last: int
    first: int | None
    steps: int
    decays: frozenset[int]
    columns: frozenset[int]
    rows: frozenset[int]


class StateWiring(ValueFlow):
    """The dataflow by which chains are followed, without unused views."""

    @cached_property
    def used_by(self) -> dict[int, list[Op]]:
        """Value -> the ops that read its numbers in this step or the next, but for unused views."""
        readers = {
            value: [op for op in ops if op.name not in CREATED and op.id not in self.unused]
            for value, ops in self.users.items()
        }
        return defaultdict(list, readers)

    @cached_property
    def unused(self) -> frozenset[int]:
        """Views and copies whose result nothing reads, by id of the op."""
        read = set(self.graph.outputs)
        unused = set()
        for op in reversed(self.graph.ops):
            if op.name in LAYOUT | PARTS and read.isdisjoint(op.outputs):
                unused.add(op.id)
            else:
                read.update(inputs_of(op))
        return frozenset(unused)

    def peeled(self, value: int) -> Op | None:
        """The op that made a value, through views and casts."""
        op = self.producer(value)
        while op is not None and op.name in LAYOUT and len(op.inputs) == 1:
            op = self.producer(op.inputs[0])
        return op

    def size(self, value: int) -> int:
        """The elements of a value, broadcast ones counted once."""
        return self.graph.values[value].unique_elements


def inputs_of(op: Op) -> Iterator[int]:
    """The values whose numbers an op reads, of its own step and of the one before."""
    for ref in () if op.name in CREATED else op.reads:
        yield ref.id
        if ref.then is not None:
            yield ref.then.value


def chains(wiring: StateWiring) -> Iterator[StateChain]:
    """The chains of a graph, from the last to the first."""
    seen: set[int] = set()
    for op in reversed(wiring.graph.ops):
        if op.name in SUMS and op.id not in seen and _outer_side(wiring, op) is not None:
            chain = _followed(wiring, op, seen)
            if chain is not None:
                yield chain


def _outer_side(wiring: StateWiring, op: Op) -> str | None:
    """The operand of a sum that is an outer product as large as the sum; None if none or both."""
    if len(op.outputs) != 1 or len(wiring.graph.values[op.outputs[0]].shape) < 3:
        return None
    sides = [
        name
        for name in ("self", "other")
        if isinstance(ref := op.arguments.get(name), Ref)
        and wiring.size(ref.id) == wiring.size(op.outputs[0])
        and _outer(wiring, ref.id) is not None
    ]
    if len(sides) == 2:  # a read of the state is a product too, but its operand is the state
        sides = [n for n in sides if not _is_scaled(wiring, op.arguments[n].id)]
    return sides[0] if len(sides) == 1 else None


def _is_scaled(wiring: StateWiring, value: int) -> bool:
    op = wiring.peeled(value)
    return op is not None and op.name == "aten.mul" and wiring.size(value) in [
        wiring.size(i) for i in op.inputs
    ]  # fmt: skip


def _outer(wiring: StateWiring, value: int) -> tuple[int, int] | None:
    """The operands of an outer product, or of a sum of outer products."""
    op = wiring.peeled(value)
    if op is None or len(op.inputs) != 2:
        return None
    if op.name == "aten.bmm":
        return op.inputs[0], op.inputs[1]
    if op.name != "aten.mul":
        return None
    shapes = [wiring.graph.values[i].shape for i in op.inputs]
    out = wiring.graph.values[op.outputs[0]].shape
    for a, b in ((0, 1), (1, 0)):
        x, y = ((1,) * (len(out) - len(shapes[i])) + shapes[i] for i in (a, b))
        if x[-1] == 1 and y[-2] == 1 and x[-2] * y[-1] > max(x[-2], y[-1]):
            return op.inputs[a], op.inputs[b]
    return None


def _followed(wiring: StateWiring, start: Op, seen: set[int]) -> StateChain | None:
    """The chain that ends with this sum; None where it does not begin with a state."""
    graph, size = wiring.graph, wiring.size(start.outputs[0])
    steps, decays, columns, rows = 0, set(), set(), set()
    last = value = start.outputs[0]
    done: set[int] = set()
    while True:
        op = wiring.producer(value)
        if op is None:
            break
        if op.id in done:
            return None
        done.add(op.id)
        state: Ref | None = None
        side = _outer_side(wiring, op) if op.name in SUMS else None
        if side is not None:
            seen.add(op.id)
            steps += graph.times(op)
            a, b = _outer(wiring, op.arguments[side].id) or (0, 0)
            columns.add(a)
            rows.add(b)
            state = op.arguments["other" if side == "self" else "self"]
        elif op.name in ("aten.mul", "aten.mul_"):
            full = [r for r in op.reads if wiring.size(r.id) == size]
            if len(op.reads) != 2 or len(full) != 1:
                break
            state = full[0]
            decays.add(next(r for r in op.reads if r is not state).id)
        elif op.name in LAYOUT and wiring.size(op.inputs[0]) == size:
            state = op.reads[0]
        if not isinstance(state, Ref):
            break
        neighbour = state.then
        if (
            neighbour is not None
            and (made := wiring.producer(neighbour.value))
            and made.id not in done
        ):
            value = neighbour.value
        else:
            value = state.id
    if not steps:
        return None
    op = wiring.peeled(value)
    zeros = op is not None and op.name in ("aten.zeros", "aten.zeros_like", "aten.new_zeros")
    if not zeros and op is not None and op.name in KNOWN:
        return None
    outer = len(shared([start.repeats, *(graph.ops[i].repeats for i in done)]))
    each = math.prod(graph.repeats[r].count for r in start.repeats[:outer])
    return StateChain(
        last=last, first=None if zeros else value, steps=steps // each,
        decays=frozenset(decays), columns=frozenset(columns), rows=frozenset(rows),
    )  # fmt: skip


def shared(paths: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The repeats that all of these paths begin with."""
    result: tuple[int, ...] | None = None
    for path in paths:
        if result is None:
            result = tuple(path)
        while result != tuple(path[: len(result)]):
            result = result[:-1]
    return result or ()


# -- regions ---------------------------------------------------------------------------------------


class StateRegion:
    """The ops around a chain that a kernel would replace.

    It begins with the ops that make the last state; `grown` adds readers of values in between,
    until others read one value only.
    """

    def __init__(self, wiring: StateWiring, chain: StateChain) -> None:
        self.wiring, self.chain = wiring, chain
        self.leaves: set[int] = set() if chain.first is None else {chain.first}
        self.ops: dict[int, Op] = {}
        self._take(chain.last)

    @property
    def graph(self) -> OpGraph:
        return self.wiring.graph

    def _take(self, *values: int) -> list[Op]:
        """Add the ops that make values, as far as they can be part of a recurrence."""
        stack, new = list(values), []
        while stack:
            value = stack.pop()
            if value in self.leaves:
                continue
            op = self.wiring.producer(value)
            if op is not None and op.id in self.ops:
                continue
            if op is None or not self._fits(op, value):
                self.leaves.add(value)
                continue
            self.ops[op.id] = op
            new.append(op)
            stack += inputs_of(op)
            for out in op.outputs:
                if self.graph.values[out].storage == out or op.name in LAYOUT:
                    for writer in self.wiring.writers.get(self.graph.values[out].storage, ()):
                        if writer.id not in self.ops and self._is_inside(out):
                            stack += writer.outputs
        return new

    def _is_inside(self, value: int) -> bool:
        """Whether an op of the region makes the storage of a value."""
        owner = self.graph.values[value].storage
        op = self.wiring.producer(owner)
        return op is not None and op.id in self.ops

    def _fits(self, op: Op, value: int) -> bool:
        """Whether an op can be part of a recurrence."""
        if op.name not in KNOWN or op.collective is not None:
            return False
        if op.name in (*SPLITS, *PARTS):
            return self._cuts_table(op) or self._cuts_time(op, value)
        return True

    def _cuts_table(self, op: Op | None) -> bool:
        """Whether an op slices a weight or a constant."""
        source = -1
        while op is not None and op.name in PARTS | LAYOUT:
            source = op.inputs[0]
            op = self.wiring.producer(source)
        return op is None and self._is_fixed(source)

    def _cuts_time(self, op: Op, value: int) -> bool:
        """Whether a slice is that of a step of the chain, or of no raw stream."""
        dim, steps = op.arguments.get("dim", 0), self.chain.steps
        long = self.graph.values[op.inputs[0]].shape[dim]
        width = 1
        if op.name in ("aten.slice", *(SPLITS - {"aten.unbind"})):
            width = self.graph.values[value].shape[dim]
        if width == long:
            return True
        start = op.arguments.get("start") or 0
        if op.name == "aten.slice" and steps > 1 and start + width == long > width * steps:
            width = start // (steps - 1)  # the last one is short
        count = -(-long // max(width, 1))
        products = (count, 2 * count)  # some steps add two products
        if op.name in (*PARTS, "aten.unbind") and steps in products:
            return True
        source = self.wiring.peeled(op.inputs[0])
        while source is not None and source.name in PARTS:
            source = self.wiring.peeled(source.inputs[0])
        return source is not None and source.name in KNOWN - SPLITS

    @cached_property
    def moving(self) -> dict[int, frozenset[int]]:
        """Value -> the leaves that it depends on and that vary by token."""
        fixed = self.fixed
        return {value: leaves - fixed for value, leaves in self.streams.items()}

    @property
    def fixed(self) -> frozenset[int]:
        """The leaves that are weights or constants, equal for every token."""
        return frozenset(
            leaf
            for leaf in self.leaves
            if self.wiring.producer(leaf) is None and self._is_fixed(leaf)
        )

    def _is_fixed(self, value: int) -> bool:
        return self.graph.values[value].role in ("weights", "constants")

    @cached_property
    def streams(self) -> dict[int, frozenset[int]]:
        """Value -> the leaves that it depends on."""
        leaves_of = {leaf: frozenset({leaf}) for leaf in self.leaves}
        ordered = sorted(self.ops.values(), key=lambda op: op.id)
        written: dict[int, frozenset[int]] = defaultdict(frozenset)
        storage = [tensor.storage for tensor in self.graph.values]
        changed = True
        while changed:
            changed = False
            for op in ordered:
                read = [leaves_of.get(i, frozenset()) for i in inputs_of(op)]
                read += [written[storage[i]] for i in inputs_of(op)]
                union = frozenset().union(*read)
                for out in op.outputs:
                    if op.name.endswith("_"):
                        written[storage[out]] |= union
                    if out not in leaves_of or not union <= leaves_of[out]:
                        leaves_of[out] = union | leaves_of.get(out, frozenset())
                        changed = True
        return {value: leaves | written[storage[value]] for value, leaves in leaves_of.items()}

    def grown(self) -> Iterator[int]:
        """Each value that is the only one that others read, besides the last state.

        For the next one the region grows by its first reader, as long as that can be a part of it.
        """
        last = self.graph.values[self.chain.last].storage
        waiting: list[int] = []
        reading: Counter[int] = Counter()
        read_by: dict[int, set[int]] = defaultdict(set)
        new = list(self.ops.values())
        while True:
            for op in new:
                for storage in read_by.pop(op.id, ()):
                    reading[storage] -= 1
                    if not reading[storage]:
                        del reading[storage]
                for out in op.outputs:
                    storage = self.graph.values[out].storage
                    if out in self.leaves:
                        continue
                    for reader in self.wiring.used_by[out]:
                        if storage == last and self._keeps(reader, out):
                            continue
                        if reader.id not in self.ops and storage not in read_by[reader.id]:
                            read_by[reader.id].add(storage)
                            reading[storage] += 1
                            heapq.heappush(waiting, reader.id)
            if len(reading) == 1:
                yield from self._values_read(next(iter(reading)))
            while waiting and waiting[0] in self.ops:
                heapq.heappop(waiting)
            if not waiting:
                return
            op = self.graph.ops[heapq.heappop(waiting)]
            self.leaves -= set(op.outputs)
            new = self._take(*op.outputs)
            if op.id not in self.ops:
                return
            for name in ("streams", "moving"):
                self.__dict__.pop(name, None)

    def _keeps(self, reader: Op, value: int) -> bool:
        """Whether an op only copies the last state, or allocates a tensor like it."""
        if reader.name == "aten.copy_":
            return reader.inputs[0] != value
        if reader.name not in LAYOUT:
            return False
        out = reader.outputs[0]
        return all(self._keeps(other, out) for other in self.wiring.used_by[out])

    def _values_read(self, storage: int) -> Iterator[int]:
        """The only value of a storage that ops outside read, if it is one."""
        members = {
            out
            for op in self.ops.values()
            for out in op.outputs
            if self.graph.values[out].storage == storage
            and any(r.id not in self.ops for r in self.wiring.used_by[out])
        }
        if len(members) == 1:
            yield members.pop()

    def ops_between(self, starts: Collection[int], ends: Collection[int]) -> list[Op] | None:
        """The ops of the region that make `ends` of `starts` alone, in order; None without them."""
        needed: dict[int, Op] = {}
        stack = [value for value in ends if value not in starts]
        while stack:
            value = stack.pop()
            if value in starts:
                continue
            op = self.wiring.producer(value)
            if op is None or op.id not in self.ops:
                return None
            if op.id in needed:
                continue
            needed[op.id] = op
            stack += inputs_of(op)
            for out in op.outputs:
                for writer in self.wiring.writers.get(self.graph.values[out].storage, ()):
                    if writer.id in self.ops:
                        stack += writer.outputs
        return [needed[i] for i in sorted(needed)]

    def is_closed(self, ops: Sequence[Op], ends: Collection[int]) -> bool:
        """Whether ops outside read no results of these ops but `ends`."""
        inside = {op.id for op in ops}
        wiring, values = self.wiring, self.graph.values
        for out in (out for op in ops for out in op.outputs if out not in ends):
            if out in self.graph.outputs or any(r.id not in inside for r in wiring.used_by[out]):
                return False
            writers = wiring.writers.get(out, ()) if values[out].storage == out else ()
            if any(writer.id not in inside for writer in writers):
                return False
        return True
