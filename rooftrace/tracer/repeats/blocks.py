"""Blocks: the record of one call of a module, and later calls that repeat it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from rooftrace.graph import pattern_of
from rooftrace.tracer.recording import META_KEY, Recorded, Tape, taperecords, written_nodes
from rooftrace.tracer.repeats.outside import Outside
from rooftrace.tracer.torch_private import disable_current_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """The record of one call of a module."""

    path: str  # of the module
    call: int  # how often the module had been called before
    source: str  # the line that called, which is also that of ops in modules of torch inside
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]  # nodes outside that these read
    constants: tuple[fx.Node, ...] = ()  # those of them that the call made
    passed: tuple[int | None, ...]  # which argument each returned leaf is; None for others
    results: tuple[tuple[fx.Node, int | None, taperecords.Spec], ...]
    """Of the other returned tensors the node, the index there, and how they look, with storages
    counted from `first_storage`."""
    first_storage: int  # how many storages there were before
    storages: int  # how many it made
    calls: Mapping[str, int]  # how often it called each module inside, by the path below it
    assumptions: tuple[int, ...]  # ids of those that something inside rests on
    origin: taperecords.Origin | None  # where the first op comes from; None where there is none
    part: str = "forward"  # of the step; a call of a module by code, or its backward
    saved: list[tuple[fx.Node, int | None, taperecords.Spec]] = field(default_factory=list)
    """Other values read outside, as `results`; complete once a backward has read them.  A storage
    below 0 is that of an argument: -1 of the first."""

    @property
    def made(self) -> tuple[tuple[fx.Node, int | None, taperecords.Spec], ...]:
        """All that is read outside."""
        return (*self.results, *self.saved)


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A later call that repeats a recorded one."""

    block: RecordedCall
    path: str  # of the module that is called
    source: str  # the line that calls
    first_storage: int  # how many storages there were before
    assumptions: Mapping[int, int]  # ids of the block's -> ids here
    arguments: Sequence[int | None] = ()  # their storages, where `saved` can name them

    def storage(self, spec: taperecords.Spec) -> int:
        """The storage, in this call, of a tensor of `block.made`."""
        if spec.storage > 0:
            return self.first_storage + spec.storage
        number = self.arguments[-1 - spec.storage]
        assert number is not None
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Ops that were recorded again, one by one as in a block."""

    block: RecordedCall
    path: str  # of the module that was called
    call: int  # how often it had been called before
    source: str  # the line that called
    nodes: Sequence[fx.Node]
    inputs: Sequence[tuple[fx.Node, int | None]]  # in the order of the block's
    results: Sequence[tuple[fx.Node, int | None]]  # in the order of the block's `made`
    assumptions: Sequence[int]  # in the order of the block's


class UnlikeLayersError(Exception):
    """Calls that were taken to repeat a recorded one may differ from it after all.

    path: of the module whose call was recorded; "" if unknown.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded call that later calls can repeat."""

    module: nn.Module
    block: RecordedCall
    state: list[Any]  # of the module, before the call
    watched: frozenset[tuple[str, str]]  # attributes in which modules of its build differ
    read: frozenset[tuple[str, str]]  # those of them that it read
    earlier: Mapping[str, int]  # how often each module inside was called before, by path below
    nodes: list[fx.Node | None]  # of its arguments and the module's tensors, in order
    storages: list[int | None]  # of these
    taints: list[list[int]]  # the assumptions that each argument rests on
    outside: Outside  # state outside of modules that its functions saw
    returned: list[Any]  # copies of the leaves that it returned
    differentiable: list[bool]  # which of these require gradients
    values: list[tuple[Any, frozenset[int]] | None]  # values of these
    structure: Any  # the tree of these
    numbers: range  # of the autograd nodes that it made
    roots: frozenset[int]  # the numbers of those that made its arguments

    def saved(self, position: int, index: int | None) -> int:
        """Which of `block.made` is this result of the op at this position; a new one, if none is.

        Raises UnlikeLayersError for one whose bytes belong to neither the call nor its arguments.
        """
        block = self.block
        node = block.nodes[position]
        for place, (made, number, _) in enumerate(block.made):
            if taperecords.picked(made, number) == (node, index):
                return place
        spec = node.meta[META_KEY].specs[index or 0]
        storage = spec.storage - block.first_storage
        if storage <= 0:
            if spec.storage not in self.storages:
                raise UnlikeLayersError(block.path, "its backward reads what the layer got")
            storage = -1 - self.storages.index(spec.storage)
        block.saved.append((node, index, replace(spec, storage=storage)))
        return len(block.made) - 1


def repeated(*inputs: Any) -> Any:
    """The target of a node that stands for a block; `lower` writes the block in its place."""
    raise NotImplementedError("a repeated block has to be lowered before it can be run")


def repeat_node(tape: Tape, inputs: Sequence[fx.Node], call: RepeatedCall) -> fx.Node:
    """A node for a call that repeats a block."""
    node = tape.graph.create_node("call_function", repeated, name="repeated")
    node.args = tuple(inputs)
    node.meta[META_KEY] = call
    tape.tags.last = node
    return node


def count_again(tape: Tape, block: RecordedCall, path: str) -> None:
    """Count the storages and the calls of modules of a block that the module at `path` repeats."""
    tape.tags.storages += block.storages
    if block.origin is not None:  # a sum of gradients names the op that was recorded last
        module = path + block.origin.module[len(block.path) :]
        tape.origins.note(replace(block.origin, module=module))
    tape.origins.compiled_repeated()
    paths = tape.paths
    paths.called_from(path, 2)
    for inner, count in block.calls.items():
        paths.counts[path + inner] = paths.times(path + inner) + count
        paths.kinds.setdefault(path + inner, paths.kinds[block.path + inner])
        if line := paths.lines.get(pattern_of(block.path + inner)):
            paths.lines.setdefault(pattern_of(path + inner), line)


def constant_of(tape: Tape, node: fx.Node) -> Tensor | None:
    """The value of a constant without elements; None for other nodes.

    An empty cache begins with one.  Of others it is not known whether all calls read the same.
    """
    entry = node.meta.get(META_KEY)
    if not isinstance(entry, taperecords.Entry) or entry.kind != "constant":
        return None
    value = tape.entries.constants.get(entry.name)
    return value if value is not None and value.numel() == 0 else None


def constant_again(tape: Tape, node: fx.Node) -> fx.Node:
    """The node of a further constant, which has the value of this one."""
    value = constant_of(tape, node)
    assert value is not None
    with disable_current_modes():
        return tape.entries.constant(value.clone()).node


# -- effects of nodes ------------------------------------------------------------------------------


def nodes_since(
    graph: fx.Graph, last: fx.Node | None, end: fx.Node | None = None
) -> Iterator[fx.Node]:
    """The nodes recorded after `last`, except picks (getitem) from results of earlier ops.

    end: the node after which nothing counts.
    """
    inside: set[fx.Node] = set()
    node = next(iter(graph.nodes), None) if last is None else last.next
    after = None if end is None else end.next
    while node is not None and node is not after and node.op != "root":
        if node.target is not operator.getitem or node.args[0] in inside:
            inside.add(node)
            yield node
        node = node.next


def read_from_outside(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes that these read from outside, in order."""
    inside = set(nodes)
    return {
        argument: None
        for node in nodes
        for argument in node.all_input_nodes
        if argument not in inside
    }


def writes_outside(nodes: Sequence[fx.Node], first_storage: int) -> bool:
    """Whether some node writes a constant, or a storage older than `first_storage`."""
    for node in nodes:
        for written in written_nodes(node):
            base, _ = taperecords.picked(written)
            recorded = base.meta[META_KEY]
            if not isinstance(recorded, Recorded):
                return True
            if any(spec.storage <= first_storage for spec in recorded.specs):
                return True
    return False


def in_loops(nodes: Sequence[fx.Node]) -> bool:
    """Whether some node is part of a loop that may be cut short, which has a number."""
    recorded = (node.meta.get(META_KEY) for node in nodes)
    return any(isinstance(r, Recorded) and r.origin.loop is not None for r in recorded)


_CAST = torch.ops.aten._to_copy.default
"""The op whose results autocast keeps; like every op it is named by its object."""


def holds_others(
    tape: Tape, first_storage: int, nodes: Sequence[fx.Node], made: Sequence[int]
) -> bool:
    """Whether a list or an attribute outside holds a storage that these nodes have made.

    made: storages that may be held, counted from `first_storage`.  Autocast keeps its casts.
    """
    allowed = {first_storage + storage for storage in made}
    for node in nodes:
        recorded = node.meta.get(META_KEY)
        if node.target is _CAST and isinstance(recorded, Recorded):
            allowed.update(spec.storage for spec in recorded.specs)
    return any(n > first_storage and n not in allowed for n in list(tape.tags.alive))


def taint_of(nodes: Sequence[fx.Node]) -> frozenset[int]:
    """The assumptions that these nodes rest on."""
    taint: set[int] = set()
    for node in nodes:
        recorded = node.meta.get(META_KEY)
        if isinstance(recorded, Recorded):
            taint |= recorded.taint
        elif isinstance(recorded, RepeatedCall):
            taint.update(recorded.assumptions.get(a, a) for a in recorded.block.assumptions)
    return frozenset(taint)


def first_origin(nodes: Sequence[fx.Node]) -> taperecords.Origin | None:
    """Where the first op among these nodes comes from; None where there is no op."""
    for node in nodes:
        recorded = node.meta.get(META_KEY)
        if isinstance(recorded, Recorded):
            return recorded.origin
        if isinstance(recorded, RepeatedCall) and recorded.block.origin is not None:
            origin, old = recorded.block.origin, recorded.block.path
            return replace(origin, module=recorded.path + origin.module[len(old) :])
    return None
