"""Turns of a loop while they run: the look of their names, their ops, and whether two match."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from rooftrace.tracer.recording import META_KEY, Call, Tape
from rooftrace.tracer.repeats.loop_bodies import (
    PLAIN,
    Body,
    FrameNames,
    Refused,
    is_tensor,
    is_value,
)
from rooftrace.tracer.torch_private import dispatch_keys
from rooftrace.tracer.values import trees

RUN = 3
"""Turns that are run before the last ones."""
SELECT = torch.ops.aten.select.int
SLICE = torch.ops.aten.slice.Tensor


@dataclass(frozen=True, slots=True)
class LoopState:
    """The look of a body's names after a turn, and the lists that it appends to."""

    looks: Mapping[str, Any]
    lists: Mapping[str, tuple[int, int, Any]]


class _Eye:
    """Computes the look of values; storages are numbered in the order in which they are met."""

    def __init__(self, tape: Tape) -> None:
        self._value = tape.values.known
        self._memory: dict[int, int] = {}

    def look(self, item: Any) -> Any:
        if is_tensor(item):
            return self._tensor(item)
        if isinstance(item, tuple):
            return type(item), tuple([self.look(x) for x in item])
        if isinstance(item, PLAIN):
            return type(item), item
        raise Refused

    def _tensor(self, tensor: Tensor) -> Any:
        memory = self._memory.setdefault(trees.bytes_of(tensor), len(self._memory))
        keys = dispatch_keys(tensor).raw_repr()
        has_value = self._value(tensor) is not None
        return _sizes(tensor), tensor.requires_grad, tensor.is_leaf, keys, has_value, memory


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tuple(tensor.shape), tensor.dtype, stride, tensor.device.type


def loop_state(body: Body, names: FrameNames, tape: Tape) -> LoopState:
    eye = _Eye(tape)
    roots = {chain[0] for chain, _ in body.chains}
    looks = {name: eye.look(names.local(name)) for name in sorted(body.assigned)}
    for name in sorted((body.read | body.indexed | roots) - body.assigned):
        item = names.get(name)
        if name in body.read or is_value(item):
            looks[name] = eye.look(item)
    lists = {}
    for name in sorted(body.lists):
        items = names.get(name)
        if not items or not is_tensor(items[-1]):
            raise Refused
        lists[name] = (id(items), len(items), _Eye(tape).look(items[-1]))
    return LoopState(looks, lists)


def unchanged(before: LoopState, after: LoopState) -> bool:
    """Whether two states are the same, but for lists that are one longer."""
    longer = {name: (i, length + 1, look) for name, (i, length, look) in before.lists.items()}
    return before.looks == after.looks and longer == after.lists


# -- the ops of a turn -----------------------------------------------------------------------------


class _OpLook(NamedTuple):
    """One op: its arguments with tensors as their sizes, and the sizes of its results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...]
    made: tuple[Any, ...]


@dataclass(slots=True)
class Turn:
    """A turn while it runs."""

    label: tuple[int, int]  # the serial number of the loop, and which of its turns this is
    node: fx.Node  # the last one before it
    storage: int  # how many storages there were before it
    ops: list[_OpLook] = field(default_factory=list)
    plain: bool = True  # nothing in it depends on a value
    views: dict[int, Tensor] = field(default_factory=dict)  # of known tensors

    def saw(self, call: Call, outputs: Sequence[Tensor], with_values: list[Tensor]) -> None:
        """Record an op; with_values: those of its outputs with a value."""
        args, kwargs = call.args, call.kwargs
        if call.info.view:
            self.views.update({id(tensor): tensor for tensor in with_values})
        else:
            written = {id(tensor) for tensor in call.written()}
            read = {id(tensor) for tensor in trees.listed([*args, *kwargs.values()])} - written
            self.plain &= not with_values and read.isdisjoint(self.views)
        self.ops.append(
            _OpLook(
                call.func,
                tuple([_shown(item) for item in args]),
                tuple([(name, _shown(item)) for name, item in kwargs.items()]),
                tuple([_sizes(output) for output in outputs]),
            )
        )


def _shown(item: Any) -> Any:
    """An argument in a form to compare: equal for equal values, and for tensors of equal look."""
    if isinstance(item, Tensor):
        return Tensor, _sizes(item)
    if isinstance(item, (list, tuple)):
        return tuple([_shown(x) for x in item])
    return type(item), item


def same_op(first: _OpLook, second: _OpLook, turns: int) -> bool:
    """Whether an op of turns 1 and 2 makes the same sizes in all turns up to the last but one."""
    if first == second:
        return True
    if first._replace(args=()) != second._replace(args=()) or len(first.args) != len(second.args):
        return False
    pairs = enumerate(zip(first.args, second.args, strict=True))
    moved = [position for position, (a, b) in pairs if a != b]
    if first.func is SELECT:
        return moved == [2]
    return first.func is SLICE and moved == [2, 3] and _inside(first.args, second.args, turns)


def _inside(first: Sequence[Any], second: Sequence[Any], turns: int) -> bool:
    """Whether both ends of a slice move together, inside of the tensor, up to the last but one."""
    if {kind for args in (first, second) for kind, _ in args[2:4]} != {int}:
        return False
    (_, sizes), (_, dimension), (_, start), (_, end) = first[:4]
    step = second[2][1] - start
    far = (turns - RUN) * step  # from turn 1 to the last but one
    together = second[3][1] - end == step
    low, high = min(start, start + far), max(end, end + far)
    return together and low >= 0 and bool(high <= sizes[0][dimension])


def ops_of(node: fx.Node, turn: Turn) -> list[fx.Node]:
    """The nodes of ops from `node` back to where the turn began."""
    ops = []
    while node is not turn.node:
        if node.op != "call_function":
            if turn.label[1]:
                raise Refused  # a different constant in every turn
        elif node.target is not operator.getitem:
            ops.append(node)
        node = node.prev
    return ops[::-1]


def wiring(number: int, ops: Sequence[Sequence[fx.Node]], turns: Sequence[Turn]) -> list[Any]:
    """All that is recorded of the ops of a turn; nodes and storages as seen from its beginning.

    A node from before the previous turn stands for itself.
    """
    near = [*ops[number - 1], *ops[number]]
    places = {node: place for place, node in enumerate(near, -len(ops[number - 1]))}
    before, turn = turns[number - 1 : number + 1]

    def place(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if item.op == "call_function" and item.target is operator.getitem:
                return [place(x) for x in item.args]
            return places.get(item, item)
        return [place(x) for x in item] if isinstance(item, (list, tuple)) else None

    def storage(spec: Any) -> tuple[bool, int]:
        close = spec.storage > before.storage
        return close, spec.storage - turn.storage if close else spec.storage

    wired = []
    for node in ops[number]:
        recorded = node.meta[META_KEY]
        reads = [place(item) for item in (*node.args, *node.kwargs.values())]
        origin = replace(recorded.origin, loop=None)
        rest = replace(recorded, specs=(), origin=origin)
        wired.append((reads, [storage(spec) for spec in recorded.specs], rest))
    return wired


def carried(reads: Sequence[Any]) -> int:
    """How many values go from turn to turn.  Raises where one does not depend on itself.

    reads: of each op of a turn the places that it reads, those below 0 in the turn before.
    """
    depends: list[set[int]] = []
    for items in reads:
        places = _places(items)
        before = {place + len(reads) for place in places if place < 0}
        depends.append(before.union(*(depends[place] for place in places if place >= 0)))
    carried: set[int] = set().union(*depends)
    if any(place not in depends[place] for place in carried):
        raise Refused
    return len(carried)


def written(wired: Sequence[Any]) -> int:
    """How many tensors from before the loop a turn writes into."""
    made = [storage for _, storages, rest in wired if not rest.view for storage in storages]
    return len({storage for storage in made if not storage[0]})


def _places(item: Any) -> list[int]:
    if isinstance(item, list):
        return [place for x in item for place in _places(x)]
    return [item] if isinstance(item, int) else []
