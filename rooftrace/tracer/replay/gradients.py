"""Layers under gradients: the first and the last of a build are run, those between repeat them.

Autograd has to see what is run, so that it can be run backward.  A repeated call is one autograd
node instead.  Backward begins with the last layer: what is recorded then, from the first gradient
of its results to the last one of its arguments, is a block too, and the nodes of the layers before
repeat it.  It reads what the forward of its layer has saved; the same ops of the first layer say
what that is in a layer that was not run.

This is right only if the layers do the same also in backward.  Where something shows that they may
not, UnlikeLayersError is raised and everything is run:

1. The last layer has recorded other ops than the first.
2. Its backward reads a tensor from elsewhere, writes to one, calls a module, or leaves one behind.
3. A gradient that came to its results did not come to a layer before, or the other way round.
4. A layer's gradient is added to another one, or is asked for with a graph of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.tracer.replay import blocks
from rooftrace.tracer.replay.arguments import Arguments
from rooftrace.tracer.replay.blocks import (
    RecordedCall,
    Recording,
    RepeatedCall,
    Twin,
    UnlikeLayersError,
    picked,
    repeat_node,
)
from rooftrace.tracer.replay.likeness import Likeness, is_below, ops_of
from rooftrace.tracer.tape import META_KEY, Recorded, Tape, records
from rooftrace.tracer.values import META


def has_hooks_on(tensors: Iterable[Tensor]) -> bool:
    """Whether somebody watches what autograd does with these tensors, or what it saves now."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [
        hook
        for tensor in tensors
        if tensor.requires_grad
        for kind in kinds
        for hook in (getattr(tensor, kind, None) or {}).values()
    ]
    return not all(isinstance(hook, _Noted) for hook in hooks)


class _Noted(partial[None]):
    """A hook of ours: it notes a gradient and changes nothing."""


def differentiable_plainly(returned: Sequence[Any], given: Sequence[Tensor]) -> bool:
    """Whether one autograd node can stand for what made these results from these tensors.

    No result is a view or was made by code of the user's for backward.
    """
    leaves = [leaf for leaf in returned if isinstance(leaf, Tensor) and leaf.requires_grad]
    made = {id(leaf): leaf for leaf in leaves if all(leaf is not tensor for tensor in given)}
    memory = {leaf.untyped_storage()._cdata for leaf in made.values()}
    if len(memory) != len(made) or any(leaf._is_view() for leaf in made.values()):
        return False
    ends = {tensor.grad_fn for tensor in given if tensor.grad_fn is not None}
    waiting: list[Any] = [leaf.grad_fn for leaf in made.values()]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        written = isinstance(node, torch.autograd.function.BackwardCFunction)
        if written and not type(node).__module__.startswith(("rooftrace.", "torch.")):
            return False
        waiting += [before for before, _ in node.next_functions]
    return True


class Layers:
    """Layers of one build under gradients: the calls that repeat the first one's.

    first: the record of its call.  last: the layer that is run again.
    """

    def __init__(self, tape: Tape, first: Recording, last: nn.Module) -> None:
        self._tape, self._first, self.last = tape, first, last
        self._closing: _Closing | None = None
        self._seen = {node for node in first.nodes if node is not None and node.op != "get_attr"}
        self._backward: RecordedCall | None = None
        self._sources: list[tuple[str, Any]] = []
        self._done: set[fx.Node] = set()
        self.path = first.block.path
        self.repeats = 0
        self._paths: list[str] = []  # of the modules whose calls were repeated
        self._latest: fx.Node | None = None  # the backward that was repeated last
        self._unlike: UnlikeLayersError | None = None

    def admits(self, call: Arguments) -> bool:
        """Whether a call can repeat the first one: the last one has not run, and no earlier call
        has had one of its arguments, whose gradients autograd would add up."""
        nodes = call.nodes()[: len(call.tensors)]
        new = [
            node
            for node, tensor in zip(nodes, call.tensors, strict=True)
            if tensor.requires_grad and node is not None
        ]
        if self._closing is not None or not self._seen.isdisjoint(new):
            return False
        self._seen.update(new)
        return True

    # -- the last layer ----------------------------------------------------------------------------

    def close(self, call: Arguments, last: Recording | None, returned: Sequence[Any]) -> None:
        """The last layer has run.  last: the record of its call.  returned: its results."""
        if not self.repeats:
            return
        try:
            first = self._first
            if last is None:
                raise UnlikeLayersError(self.path, "the last layer cannot be repeated")
            nodes = dict(zip(last.nodes, first.nodes, strict=True))
            likeness = Likeness(first.block, last.block, nodes)
            if not likeness.alike(first.block.nodes, last.block.nodes):
                raise UnlikeLayersError(self.path, "the last layer has run other ops")
            self._closing = _Closing(self._tape, call, last, likeness, self.path)
            self._closing.watch(call, returned)
        except UnlikeLayersError as error:  # not here, where code of the user's may catch it
            self._unlike = error

    def verify(self) -> None:
        """Raise UnlikeLayersError if the layers differ, also if something has changed since."""
        if self._unlike is not None:
            raise self._unlike
        if self._added():
            raise UnlikeLayersError(self.path, "a gradient of a layer is added to another one")
        if self._backward is not None and self._closing is not None:
            self._closing.verify()

    def _added(self) -> bool:
        """Whether autograd has added a gradient of a repeated layer to one that was there."""
        origins = (
            recorded.origin
            for node in self._tape.graph.nodes
            if isinstance(recorded := node.meta.get(META_KEY), Recorded)
        )
        return any(
            origin.function == _NODE and any(is_below(origin.module, path) for path in self._paths)
            for origin in origins
        )

    def twins(self) -> Iterator[Twin]:
        """What the last layer has recorded forward, and the first one backward, as the blocks."""
        closing, first = self._closing, self._first
        if closing is None:
            return
        there = {mine: other for other, mine in closing.likeness.nodes.items()}
        assumed = {mine: other for other, mine in closing.likeness.assumptions.items()}
        yield _twin(first.block, closing.forward, closing.forward.nodes, there, assumed)
        backward, latest = self._backward, self._latest
        if backward is None or latest is None:
            return
        after = ops_of(blocks.nodes_since(self._tape.graph, latest))
        theirs = ops_of(backward.nodes)
        for place in range(len(after) - len(theirs) + 1):
            recorded = after[place].meta[META_KEY]
            if not isinstance(recorded, Recorded) or not is_below(
                recorded.origin.module, self.path
            ):
                continue
            nodes = after[place : place + len(theirs)]
            likeness = Likeness(first.block, backward, closing.likeness.nodes)
            if likeness.alike(nodes, theirs, set(closing.given.values())):
                assumed = closing.likeness.assumptions | likeness.assumptions
                yield _twin(backward, first.block, nodes, likeness.nodes, assumed)
            return

    # -- a layer between ---------------------------------------------------------------------------

    def attached(
        self,
        call: RepeatedCall,
        node: fx.Node,
        arguments: Arguments,
        results: Mapping[int, Tensor],
    ) -> None:
        """Make `results`, by their places among the leaves, depend on the arguments."""
        self.repeats += 1
        self._paths.append(call.path)
        tensors = (*arguments.tensors, *arguments.own)
        nodes, places = arguments.nodes(), tuple(results)
        taken: dict[int, tuple[int, Tensor]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                taken.setdefault(id(tensor), (place, tensor))
        wanted = [place for place, _ in taken.values()]

        def backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            given = {
                place: gradient
                for place, gradient in zip(places, gradients, strict=True)
                if gradient is not None
            }
            made = self._repeated_backward(call, node, nodes, given)
            return [made.get(place) for place in wanted]

        made = tuple(results.values())
        inputs = [tensor for _, tensor in taken.values()]
        _Layer.apply(backward, made, *inputs)  # type: ignore[no-untyped-call]

    def _repeated_backward(
        self,
        call: RepeatedCall,
        node: fx.Node,
        nodes: Sequence[fx.Node | None],
        given: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """The gradients of a layer's arguments, by place; its backward is in the graph."""
        tape, closing = self._tape, self._closing
        if closing is None or self._unlike is not None or node in self._done:
            raise UnlikeLayersError(self.path, "backward does not begin with the last layer")
        if given.keys() != closing.given.keys():
            raise UnlikeLayersError(self.path, "other gradients come to it than to the last layer")
        self._done.add(node)
        if self._backward is None:
            self._backward = closing.block()
            self._sources = closing.sources(self._backward, self._first)
        block = self._backward
        inputs: list[fx.Node] = []
        for kind, item in self._sources:
            if kind == "argument":
                argument = nodes[item]
                assert argument is not None
                inputs.append(argument)
            elif kind == "gradient":
                inputs.append(tape.node_of(given[item]))
            elif kind == "saved":
                inputs.append(tape.graph.call_function(operator.getitem, (node, item)))
            else:
                inputs.append(item)
        numbers = closing.likeness.assumptions
        again = RepeatedCall(
            block,
            call.path,
            call.source,
            tape.tags.storages,
            {a: call.assumptions.get(numbers.get(a, a), a) for a in block.assumptions},
        )
        made = self._latest = repeat_node(tape, inputs, again)
        tape.tags.storages += block.storages
        return closing.again(made, again)


class _Layer(torch.autograd.Function):
    """One autograd node for a whole layer."""

    @staticmethod
    def forward(ctx: Any, backward: Any, made: tuple[Tensor, ...], *inputs: Tensor) -> Any:
        ctx.gradients_of = backward
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UnlikeLayersError("", "gradients of gradients")
        with torch._C.DisableTorchFunction():
            return (None, None, *ctx.gradients_of(gradients))


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient that the last layer's backward has made: where in the graph, where in memory."""

    node: fx.Node
    index: int | None
    spec: records.Spec
    offset: int
    size: int  # of its storage, in bytes


_NODE = "_LayerBackward"
"""What autograd calls the node of a repeated call."""


class _Closing:
    """The call of the last layer, and its backward while that is recorded.

    path: of the first layer.  forward: the record of the call.  given: the nodes of the gradients
    of its results that came, by place.
    """

    def __init__(
        self, tape: Tape, call: Arguments, last: Recording, likeness: Likeness, path: str
    ) -> None:
        self._tape, self.likeness, self.path = tape, likeness, path
        self.forward, self._nodes = last.block, last.nodes
        self.given: dict[int, fx.Node] = {}
        self._own = dict(enumerate(call.own, len(call.tensors)))
        self._awaited: set[int] = set()  # places of arguments that get a gradient
        self._got: dict[int, _Gradient | None] = {}
        self._made: dict[int, _Gradient] = {}  # what the block makes, by place
        self._before: Any = None  # the state of the recording as the first gradient came
        self._after: Any = None  # and as the last one was complete
        self._start: fx.Node | None = None
        self._end: fx.Node | None = None
        self._storages = self._last_storage = 0

    def watch(self, call: Arguments, returned: Sequence[Any]) -> None:
        """Note the gradients of the call's arguments and results when they come."""
        seen: set[int] = set()
        for noted, tensors in ((self._left, call.tensors), (self._came, returned)):
            for place, tensor in enumerate(tensors):
                new = isinstance(tensor, Tensor) and id(tensor) not in seen
                if new and tensor.requires_grad:
                    seen.add(id(tensor))
                    tensor.register_hook(_Noted(noted, place))
                    if noted == self._left:
                        self._awaited.add(place)

    # -- while backward runs -----------------------------------------------------------------------

    def _came(self, place: int, gradient: Tensor) -> None:
        """The gradient of a result has come."""
        tape = self._tape
        self.given[place] = tape.node_of(gradient)
        if self._before is None:
            self._start, self._storages = _last(tape), tape.tags.storages
            self._before = self._now()

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
        return values.decisions, values.computed, len(values.assumptions), sum(calls)

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
        inside = set(nodes)
        if (
            any(picked(node)[0] not in inside for node, *_ in results)
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
            inputs=tuple(blocks.read_from_outside(nodes)),
            passed=(),
            results=results,
            first_storage=self._storages,
            storages=self._last_storage - self._storages,
            calls={},
            assumptions=tuple(sorted(blocks.taint_of(nodes))),
            origin=None,
            part="backward",
        )

    def _gradients(self) -> dict[int, _Gradient]:
        """The gradients of the arguments and of the weights, by place."""
        got = dict(self._got)
        for place, tensor in self._own.items():
            if tensor.grad is not None:
                got[place] = self._gradient(tensor.grad)
        made = {
            place: gradient
            for place, gradient in got.items()
            if gradient is not None and gradient.spec.storage > self._storages
        }
        if not made or made.keys() != got.keys():
            raise UnlikeLayersError(self.path, "a gradient comes from elsewhere")
        return made

    def _left_behind(self) -> bool:
        """Whether something still holds what the layer made, forward or backward."""
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
        """What each input of the backward block is in a layer that repeats `first`."""
        arguments = {node: place for place, node in enumerate(self._nodes) if node is not None}
        given = {node: place for place, node in self.given.items()}
        positions = {node: place for place, node in enumerate(self.forward.nodes)}
        sources: list[tuple[str, Any]] = []
        for node in block.inputs:
            base, index = picked(node)
            if node in arguments:
                sources.append(("argument", arguments[node]))
            elif node in given:
                sources.append(("gradient", given[node]))
            elif base in positions:
                sources.append(("saved", first.saved(positions[base], index)))
            elif node.op == "get_attr":
                sources.append(("same", node))
            else:
                raise UnlikeLayersError(self.path, "its backward reads a tensor from elsewhere")
        return sources

    def again(self, node: fx.Node, call: RepeatedCall) -> dict[int, Tensor]:
        """New tensors for the gradients of a repeated backward, by place."""
        tags = self._tape.tags
        tensors: dict[int, Tensor] = {}
        memory: dict[int, Any] = {}
        for index, (place, gradient) in enumerate(self._made.items()):
            spec = gradient.spec
            storage = call.storage(call.block.results[index][2])
            with _disable_current_modes():
                if storage not in memory:
                    bare = torch.empty(gradient.size, dtype=torch.uint8, device=META)
                    memory[storage] = bare.untyped_storage()
                tensor = torch.empty(0, dtype=spec.dtype, device=META)
                tensor.set_(memory[storage], gradient.offset, spec.shape, spec.stride)
            tag = records.Tag(node, index, storage)
            tags.mark(tensor, tag)
            tags.watch(tensor, storage)
            tags.remember(tensor, tag)
            tensors[place] = tensor
        return tensors

    def verify(self) -> None:
        """Raise UnlikeLayersError if a weight has another gradient than it had."""
        for place, tensor in self._own.items():
            before = self._made.get(place)
            now = None if tensor.grad is None else self._gradient(tensor.grad)
            if now != before:
                raise UnlikeLayersError(self.path, "a weight has got another gradient")


def _twin(
    block: RecordedCall,
    call: RecordedCall,
    nodes: Sequence[fx.Node],
    there: Mapping[fx.Node | None, fx.Node | None],
    assumed: Mapping[int, int],
) -> Twin:
    """The twin of a block.  call: whose path and source it has.  there, assumed: what stands there
    for nodes and assumptions of the block."""

    def result(node: fx.Node, index: int | None = None) -> tuple[fx.Node, int | None]:
        if node not in there:
            node, index = picked(node, index)
        return there.get(node) or node, index

    return Twin(
        block,
        call.path,
        call.call,
        call.source,
        nodes,
        [result(node) for node in block.inputs],
        [result(node, index) for node, index, _ in block.made],
        [assumed.get(number, number) for number in block.assumptions],
    )


def _last(tape: Tape) -> fx.Node | None:
    """The node that was recorded last, also one that picks a result."""
    return next(iter(reversed(tape.graph.nodes)), None)
