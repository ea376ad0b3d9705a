"""The last of layers that are alike, under gradients: its backward is recorded for all of them.

Hooks note when the first gradient of its results comes and when the last one of its arguments is
complete.  What is recorded between them is the block that the layers before repeat.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx

from rooftrace.tracer.recording import META_KEY, Recorded, Tape, taperecords
from rooftrace.tracer.repeats import blocks
from rooftrace.tracer.repeats.arguments import Arguments
from rooftrace.tracer.repeats.blocks import RecordedCall, Recording, RepeatedCall, UnlikeLayersError
from rooftrace.tracer.torch_private import disable_current_modes
from rooftrace.tracer.values import META, trees


class Noted(partial[None]):
    """A hook of ours: it notes a gradient and changes nothing."""


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient that the last layer's backward has made: where in the graph, where in memory."""

    node: fx.Node
    index: int | None
    spec: taperecords.Spec
    offset: int
    size: int  # of its storage, in bytes


class LastLayer:
    """The call of the last layer, and its backward while that is recorded.

    path: of the first layer.  forward: the record of the call.  arrived: the nodes of the
    gradients of its results that came from outside, by place.
    """

    def __init__(
        self, tape: Tape, call: Arguments, last: Recording, likeness: Likeness, path: str
    ) -> None:
        self._tape, self.likeness, self.path = tape, likeness, path
        self.forward, self._nodes = last.block, last.nodes
        self.arrived: dict[int, fx.Node] = {}
        self.looks: dict[int, Any] = {}  # of these gradients
        self._module_tensors = dict(enumerate(call.module_tensors, len(call.tensors)))
        self._awaited: set[int] = set()  # places of arguments that get a gradient
        self._got: dict[int, _Gradient | None] = {}
        self._made: dict[int, _Gradient] = {}  # results of the block, by place
        self._before: Any = None  # the state of the recording as the first gradient came
        self._after: Any = None  # and as the last one was complete
        self._start: fx.Node | None = None
        self._end: fx.Node | None = None
        self._storages = self._last_storage = 0

    def watch(self, call: Arguments, returned: Sequence[Any]) -> None:
        """Note the gradients of the call's arguments and results when they come."""
        seen: set[int] = set()
        for noted, tensors in ((self._left, call.tensors), (self._came, returned)):
            for position, tensor in enumerate(tensors):
                new = isinstance(tensor, Tensor) and id(tensor) not in seen
                if new and tensor.requires_grad:
                    seen.add(id(tensor))
                    tensor.register_hook(Noted(noted, position))
                    if noted == self._left:
                        self._awaited.add(position)

    # -- while backward runs -----------------------------------------------------------------------

    def _came(self, place: int, gradient: Tensor) -> None:
        """The gradient of a result has come."""
        tape = self._tape
        node = tape.node_of(gradient)
        if self._before is None:
            self._start, self._storages = _last(tape), tape.tags.storages
            self._before = self._now()
        made = tape.tags.made_by(gradient)
        if made is not None and made[2].storage <= self._storages:  # else of the layer itself
            self.arrived[place] = node
            self.looks[place] = trees.look_of(gradient)

    def _left(self, place: int, gradient: Tensor) -> None:
        """The gradient of an argument is complete."""
        self._got[place] = self._gradient(gradient)
        self._end, self._last_storage = _last(self._tape), self._tape.tags.storages
        self._after = self._now()

    def _gradient(self, tensor: Tensor) -> _Gradient | None:
        """None for one that could not be made again."""
        made = self._tape.tags.made_by(tensor)
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if made is None or not plain or self._tape.values.known(tensor) is not None:
            return None
        offset = int(tensor.storage_offset())
        return _Gradient(*made, offset, tensor.untyped_storage().nbytes())

    def _now(self) -> Any:
        values, calls = self._tape.values, self._tape.paths.counts.values()
        mine = [a for a in values.assumptions if is_below(a.where, self.forward.path)]
        return values.decisions, values.computed, len(mine), sum(calls)

    # -- afterwards --------------------------------------------------------------------------------

    def block(self) -> RecordedCall:
        """The block of ops that the backward of the layer has recorded."""
        tape, forward = self._tape, self.forward
        if self._end is None or self._awaited != set(self._got) or self._before != self._after:
            raise UnlikeLayersError(self.path, "the end of its backward is not known")
        nodes = tuple(blocks.nodes_since(tape.graph, self._start, self._end))
        self._made = self._gradients()
        results = tuple(
            (item.node, item.index, replace(item.spec, storage=item.spec.storage - self._storages))
            for item in self._made.values()
        )
        inside, read = set(nodes), blocks.read_from_outside(nodes)
        if (
            any(taperecords.picked(node)[0] not in inside for node, *_ in results)
            or any(node.op != "call_function" for node in nodes)
            or blocks.writes_outside(nodes, self._storages)
            or self._left_behind()
        ):
            raise UnlikeLayersError(self.path, "its backward leaves traces")
        return RecordedCall(
            path=forward.path,
            call=forward.call,
            source=forward.source,
            nodes=nodes,
            inputs=(*read, *self._only_held(inside, read)),
            passed=(),
            results=results,
            first_storage=self._storages,
            storages=self._last_storage - self._storages,
            calls={},
            assumptions=tuple(sorted(blocks.taint_of(nodes))),
            origin=None,
            part="backward",
        )

    def _only_held(self, inside: Collection[fx.Node], read: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Results of forward that autograd keeps until some op of backward, without need."""
        tape, forward = self._tape, self.forward
        end = forward.first_storage + forward.storages
        storages = set(map(_storage_of, read))
        held = {
            number
            for number, node in tape.tags.last_held.items()
            if forward.first_storage < number <= end and node in inside and number not in storages
        }
        for node in ops_of(forward.nodes):
            for index, spec in enumerate(node.meta[META_KEY].specs):
                if spec.storage in held:
                    held.remove(spec.storage)
                    several = len(node.meta[META_KEY].specs) > 1
                    pick = operator.getitem
                    yield tape.graph.call_function(pick, (node, index)) if several else node

    def _gradients(self) -> dict[int, _Gradient]:
        """The gradients of the arguments and of the weights, by place."""
        got = dict(self._got)
        for position, tensor in self._module_tensors.items():
            if tensor.grad is not None:
                got[position] = self._gradient(tensor.grad)
        made = {
            position: gradient
            for position, gradient in got.items()
            if gradient is not None and gradient.spec.storage > self._storages
        }
        if not made or made.keys() != got.keys():
            raise UnlikeLayersError(self.path, "a gradient comes from elsewhere")
        return made

    def _left_behind(self) -> bool:
        """Whether something still holds results of the layer, forward or backward."""
        forward = self.forward
        kept = {forward.first_storage + spec.storage for *_, spec in forward.results}
        kept.update(item.spec.storage for item in self._made.values())
        end = forward.first_storage + forward.storages
        return any(
            number not in kept
            and (
                forward.first_storage < number <= end
                or self._storages < number <= self._last_storage
            )
            for number in list(self._tape.tags.alive)
        )

    def sources(self, block: RecordedCall, first: Recording) -> list[tuple[str, Any]]:
        """The source of each input of the backward block, in a layer that repeats `first`."""
        arguments = {
            node: position for position, node in enumerate(self._nodes) if node is not None
        }
        arrived = {node: position for position, node in self.arrived.items()}
        positions = {node: position for position, node in enumerate(self.forward.nodes)}
        sources: list[tuple[str, Any]] = []
        for node in block.inputs:
            base, index = taperecords.picked(node)
            if node in arguments:
                sources.append(("argument", arguments[node]))
            elif node in arrived:
                sources.append(("gradient", arrived[node]))
            elif base in positions:
                sources.append(("saved", first.saved(positions[base], index)))
            elif node.op == "get_attr" and node not in self.forward.constants:
                sources.append(("same", node))
            else:
                raise UnlikeLayersError(self.path, "its backward reads a tensor from elsewhere")
        return sources

    def again(self, node: fx.Node, call: RepeatedCall) -> dict[int, Tensor]:
        """New tensors for the gradients of a repeated backward, by place."""
        tags = self._tape.tags
        tensors: dict[int, Tensor] = {}
        memory: dict[int, Any] = {}
        for index, (position, gradient) in enumerate(self._made.items()):
            spec = gradient.spec
            storage = call.storage(call.block.results[index][2])
            with disable_current_modes():
                if storage not in memory:
                    bare = torch.empty(gradient.size, dtype=torch.uint8, device=META)
                    memory[storage] = bare.untyped_storage()
                tensor = torch.empty(0, dtype=spec.dtype, device=META)
                tensor.set_(memory[storage], gradient.offset, spec.shape, spec.stride)
            tag = taperecords.Tag(node, index, storage, spec.host)
            tags.mark(tensor, tag)
            tags.watch(tensor, storage)
            tags.remember(tensor, tag)
            tensors[position] = tensor
        return tensors

    def verify(self) -> None:
        """Raise UnlikeLayersError if a weight has another gradient than it had."""
        for position, tensor in self._module_tensors.items():
            before = self._made.get(position)
            now = None if tensor.grad is None else self._gradient(tensor.grad)
            if now != before:
                raise UnlikeLayersError(self.path, "a weight has got another gradient")


def _storage_of(node: fx.Node) -> int | None:
    """The storage of a value; None for results of a repeated call."""
    base, index = taperecords.picked(node)
    recorded = base.meta[META_KEY]
    if isinstance(recorded, taperecords.Entry):
        return recorded.spec.storage
    return recorded.specs[index or 0].storage if isinstance(recorded, Recorded) else None


def _last(tape: Tape) -> fx.Node | None:
    """The node that was recorded last, also one that picks a result."""
    return next(iter(reversed(tape.graph.nodes)), None)


# -- whether two recorded blocks are the same, op by op --------------------------------------------


class Likeness:
    """Two calls that may have recorded the same ops on their arguments.

    nodes: for each argument of the second, that of the first.  assumptions: ids of those that ops
    of the second rest on, and their counterparts in the first.  Both grow while ops are compared.
    """

    def __init__(
        self,
        first: RecordedCall,
        second: RecordedCall,
        nodes: Mapping[fx.Node | None, fx.Node | None],
    ) -> None:
        self.nodes: dict[fx.Node | None, fx.Node | None] = dict(nodes)
        self.assumptions: dict[int, int] = {}
        self._calls = first, second
        self._storages: dict[int, int] = {}

    def alike(
        self,
        ours: Sequence[fx.Node],
        theirs: Sequence[fx.Node],
        arguments: Collection[fx.Node] = (),
    ) -> bool:
        """Whether these nodes of the first are the same ops as those of the second.

        arguments: nodes read by the second that may be any of the first, but one each.
        """
        ours, theirs = ops_of(ours), ops_of(theirs)
        if len(ours) != len(theirs):
            return False
        self.nodes.update(zip(theirs, ours, strict=True))
        return all(
            self._equal(mine, other, arguments) for mine, other in zip(ours, theirs, strict=True)
        )

    def _equal(self, ours: fx.Node, theirs: fx.Node, arguments: Collection[fx.Node]) -> bool:
        if ours.target is not theirs.target:
            return False
        if not self._same((ours.args, ours.kwargs), (theirs.args, theirs.kwargs), arguments):
            return False
        mine, other = ours.meta.get(META_KEY), theirs.meta.get(META_KEY)
        return (
            isinstance(mine, Recorded)
            and isinstance(other, Recorded)
            and len(mine.specs) == len(other.specs)
            and all(map(self._same_spec, mine.specs, other.specs))
            and mine.origin == self._origin(other.origin)
            and (mine.view, mine.sync) == (other.view, other.sync)
            and _facts(mine.facts) == _facts(other.facts)
            and self._same_taint(sorted(mine.taint), sorted(other.taint))
        )

    def _same(self, ours: Any, theirs: Any, arguments: Collection[fx.Node]) -> bool:
        if isinstance(theirs, fx.Node):
            return isinstance(ours, fx.Node) and self._same_node(ours, theirs, arguments)
        if isinstance(theirs, (list, tuple)):
            return (
                isinstance(ours, (list, tuple))
                and len(ours) == len(theirs)
                and all(self._same(a, b, arguments) for a, b in zip(ours, theirs, strict=True))
            )
        if isinstance(theirs, Mapping):
            return ours.keys() == theirs.keys() and all(
                self._same(ours[name], item, arguments) for name, item in theirs.items()
            )
        return ours is theirs or (type(ours) is type(theirs) and bool(ours == theirs))

    def _same_node(self, ours: fx.Node, theirs: fx.Node, arguments: Collection[fx.Node]) -> bool:
        if theirs in arguments:
            return self.nodes.setdefault(theirs, ours) is ours
        if theirs in self.nodes:
            return self.nodes[theirs] is ours
        (mine, place), (other, number) = taperecords.picked(ours), taperecords.picked(theirs)
        return place == number and self.nodes.get(other, other) is mine

    def _same_spec(self, ours: taperecords.Spec, theirs: taperecords.Spec) -> bool:
        if self._storages.setdefault(theirs.storage, ours.storage) != ours.storage:
            return False
        return replace(theirs, storage=ours.storage) == ours

    def _origin(self, origin: taperecords.Origin) -> taperecords.Origin:
        """The origin of an op of the second call, as it would be in the first one."""
        first, second = self._calls
        path, source = origin.module, origin.source
        if is_below(path, second.path):
            path = first.path + path[len(second.path) :]
        if source == second.source:
            source = first.source
        return replace(origin, module=path, source=source)

    def _same_taint(self, ours: Sequence[int], theirs: Sequence[int]) -> bool:
        return len(ours) == len(theirs) and all(
            self.assumptions.setdefault(other, mine) == mine
            for mine, other in zip(ours, theirs, strict=True)
        )


def is_below(path: str, module: str) -> bool:
    """Whether a path is that of a module or of something inside of it."""
    return path == module or path.startswith(f"{module}.")


def ops_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Without picks, which are recorded where something first reads them."""
    return [node for node in nodes if node.target is not operator.getitem]


def _facts(facts: Mapping[str, Any]) -> str:
    """Facts can hold tensors, which have no plain equality."""
    return repr(sorted(facts.items()))
