"""Layers under gradients: the first and the last of a build are run, those between repeat them.

Autograd has to see the ops, so that it can be run backward.  A repeated call is one autograd
node instead.  Backward begins with the last layer: the ops recorded then, from the first gradient
of its results to the last one of its arguments, is a block too, and the nodes of the layers before
repeat it.  It reads tensors saved by the forward of its layer; the same ops of the first layer say
which they are in a layer that was not run.

This is right only if the layers do the same also in backward.  Where something shows that they may
not, UnlikeLayersError is raised and everything is run:

1. The last layer has recorded other ops than the first.
2. Its backward reads a tensor from elsewhere, writes to one, calls a module, or leaves one behind.
3. A gradient that came to its results did not come to a layer before, or the other way round.
4. The first layer has run backward otherwise than the last.
5. A layer's gradient is added to another one, or is computed with a further graph.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rooftrace.tracer.recording import META_KEY, Recorded, Tape, taperecords
from rooftrace.tracer.repeats import blocks
from rooftrace.tracer.repeats.arguments import Arguments
from rooftrace.tracer.repeats.blocks import (
    RecordedCall,
    Recording,
    RepeatedCall,
    Twin,
    UnlikeLayersError,
    repeat_node,
)
from rooftrace.tracer.repeats.last_layer import LastLayer, Likeness, Noted, is_below, ops_of
from rooftrace.tracer.torch_private import DisableTorchFunction, saved_tensors_hooks
from rooftrace.tracer.values import trees


def has_hooks_on(tensors: Iterable[Tensor]) -> bool:
    """Whether somebody watches autograd's work on these tensors, or its saved tensors."""
    if saved_tensors_hooks(True) is not None:
        return True
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [
        hook
        for tensor in tensors
        if tensor.requires_grad
        for kind in kinds
        for hook in (getattr(tensor, kind, None) or {}).values()
    ]
    return not all(isinstance(hook, Noted) for hook in hooks)


def differentiable_plainly(returned: Sequence[Any], arrived: Sequence[Tensor]) -> bool:
    """Whether one autograd node can stand for the ops between these tensors and results.

    No result is a view or was made by code of the user's for backward.
    """
    leaves = [leaf for leaf in returned if isinstance(leaf, Tensor) and leaf.requires_grad]
    made = {id(leaf): leaf for leaf in leaves if all(leaf is not tensor for tensor in arrived)}
    memory = {leaf.untyped_storage()._cdata for leaf in made.values()}
    if len(memory) != len(made) or any(leaf._is_view() for leaf in made.values()):
        return False
    ends = {tensor.grad_fn for tensor in arrived if tensor.grad_fn is not None}
    waiting: list[Any] = [leaf.grad_fn for leaf in made.values()]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            kind: Any = type(node)
            function = kind._forward_cls  # of the user's, of torch's checkpoints, or ours
            if not function.__module__.startswith("rooftrace."):
                return False
        waiting += [before for before, _ in node.next_functions]
    return True


def made_by(tensors: Iterable[Tensor]) -> list[Any]:
    """The autograd nodes that made some tensors; leaves have none."""
    return [t.grad_fn for t in tensors if t.requires_grad and t.grad_fn is not None]


def _read_beside(first: Recording, second: Arguments) -> bool:
    """Whether another op has read the arguments of the first layer, as a residual does,
    on the way to those of the second: autograd would add up the gradients."""
    waiting, seen = made_by(second.tensors), set[Any]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        inside = node._sequence_nr() in first.numbers
        for before, _ in node.next_functions:
            number = -1 if before is None else before._sequence_nr()
            if number in first.roots and not inside:
                return True
            if first.numbers and number >= first.numbers[0]:
                waiting.append(before)
    return False


class Stacks:
    """All layers of one recording that are repeated under gradients.

    apart: paths of first layers; these are run, one by one, "" for all of them.
    """

    def __init__(self, tape: Tape, apart: Collection[str]) -> None:
        self._tape, self._apart = tape, apart
        self._layers: dict[int, Layers | None] = {}  # by the identity of the first one's record
        self._one_backward = False
        self._inside = False  # of a layer that may be repeated

    @property
    def open(self) -> bool:
        """Whether a call that begins now may be repeated.  Autocast keeps copies of weights, longer
        than a layer would."""
        autocast = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        return self._one_backward and not self._inside and not autocast

    @contextlib.contextmanager
    def within_layer(self, inside: bool) -> Iterator[None]:
        """Inside, calls begin no layer, if `inside`."""
        before, self._inside = self._inside, self._inside or inside
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def trained(self) -> Iterator[None]:
        """Inside, one backward runs over the recording, and no other."""
        self._one_backward = True
        try:
            yield
        finally:
            self._one_backward = False
        for layers in filter(None, self._layers.values()):
            layers.verify()

    def of(
        self, first: Recording, second: Arguments, alike: Callable[[], list[nn.Module]]
    ) -> Layers | None:
        """The layers that repeat a recorded call; None where each is run.

        second: the arguments of the next call.  alike: finds the other modules that may repeat it.
        """
        if id(first) not in self._layers:
            apart = first.block.path in self._apart or "" in self._apart
            others = [] if apart or _read_beside(first, second) else alike()
            layers = Layers(self._tape, first, others) if len(others) > 1 else None
            self._layers[id(first)] = layers
        return self._layers[id(first)]

    def close(
        self, firsts: Iterable[Recording], call: Arguments, last: Recording, returned: Sequence[Any]
    ) -> None:
        """A layer has run in which one of `firsts` could not be repeated any more: it is the last
        of those that could."""
        for layers in filter(None, (self._layers.get(id(first)) for first in firsts)):
            layers.close(call, last, returned)

    def twins(self) -> Iterator[Twin]:
        """Second recordings of layers that others repeat."""
        for layers in filter(None, self._layers.values()):
            yield from layers.twins()


class Layers:
    """Layers of one build under gradients: the calls that repeat the first one's.

    first: the record of its call.  others: the other layers, in order; the last is run again.
    """

    def __init__(self, tape: Tape, first: Recording, others: Sequence[nn.Module]) -> None:
        self._tape, self._first, self.last = tape, first, others[-1]
        self._others = others[:-1]
        self._closing: LastLayer | None = None
        self._seen = {node for node in first.nodes if node is not None and node.op != "get_attr"}
        self._backward: RecordedCall | None = None
        self._sources: list[tuple[str, Any]] = []
        self._done: set[fx.Node] = set()
        self.path = first.block.path
        self.repeats = 0
        self._paths: list[str] = []  # of the modules whose calls were repeated
        self._latest: fx.Node | None = None  # the backward that was repeated last
        self._first_backward: Twin | None = None
        self._unlike: UnlikeLayersError | None = None

    def admits(self, module: nn.Module, call: Arguments) -> bool:
        """Whether a call of `module` can repeat the first one: neither is it the last one, nor has
        that run; no earlier call has had an argument of its, whose gradients would be added up."""
        if all(module is not other for other in self._others):
            return False
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
        if not self.repeats or self._closing is not None:
            return
        try:
            first = self._first
            if last is None:
                raise UnlikeLayersError(self.path, "the last layer cannot be repeated")
            nodes = dict(zip(last.nodes, first.nodes, strict=True))
            nodes.update(zip(last.block.constants, first.block.constants, strict=False))
            likeness = Likeness(first.block, last.block, nodes)
            if not likeness.alike(first.block.nodes, last.block.nodes):
                raise UnlikeLayersError(self.path, "the last layer has run other ops")
            self._closing = LastLayer(self._tape, call, last, likeness, self.path)
            with DisableTorchFunction():  # reading a tensor's facts is no call
                self._closing.watch(call, returned)
        except UnlikeLayersError as error:  # not here, where code of the user's may catch it
            self._unlike = error

    def verify(self) -> None:
        """Raise UnlikeLayersError if the layers differ, also if something has changed since."""
        if self._unlike is not None:
            raise self._unlike
        if len(self._done) != self.repeats:
            raise UnlikeLayersError(self.path, "backward does not come to every layer")
        if self._added():
            raise UnlikeLayersError(self.path, "a gradient of a layer is added to another one")
        if self._backward is not None and self._closing is not None:
            self._closing.verify()
            self._first_backward = self._found_again(self._backward, self._closing)
            if self._first_backward is None:
                raise UnlikeLayersError(self.path, "the first layer has run backward otherwise")

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
        """Forward of the last layer and backward of the first, recorded as the blocks are."""
        closing, first = self._closing, self._first
        if closing is None:
            return
        there = {mine: other for other, mine in closing.likeness.nodes.items()}
        assumed = {mine: other for other, mine in closing.likeness.assumptions.items()}
        yield _twin(first.block, closing.forward, closing.forward.nodes, there, assumed)
        if self._first_backward is not None:
            yield self._first_backward

    def _found_again(self, backward: RecordedCall, closing: LastLayer) -> Twin | None:
        """The backward of the first layer, which has to be that of the last one op by op."""
        first, theirs = self._first.block, ops_of(backward.nodes)
        after = ops_of(blocks.nodes_since(self._tape.graph, self._latest))
        for start in range(len(after) - len(theirs) + 1):
            recorded = after[start].meta[META_KEY]
            if isinstance(recorded, Recorded) and is_below(recorded.origin.module, self.path):
                nodes = after[start : start + len(theirs)]
                likeness = Likeness(first, backward, closing.likeness.nodes)
                if not likeness.alike(nodes, theirs, set(closing.arrived.values())):
                    return None
                assumed = closing.likeness.assumptions | likeness.assumptions
                return _twin(backward, first, nodes, likeness.nodes, assumed)
        return None

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
        nodes, places = arguments.nodes(), tuple(results)
        taken: dict[int, tuple[int, Tensor]] = {}
        for place, tensor in enumerate(arguments.all):
            if tensor.requires_grad:
                taken.setdefault(id(tensor), (place, tensor))
        wanted = [place for place, _ in taken.values()]

        def backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
            arrived = {
                place: gradient
                for place, gradient in zip(places, gradients, strict=True)
                if gradient is not None
            }
            made = self._repeated_backward(call, node, nodes, arrived)
            return [made.get(place) for place in wanted]

        made = tuple(results.values())
        inputs = [tensor for _, tensor in taken.values()]
        _Layer.apply(backward, made, *inputs)  # type: ignore[no-untyped-call]
        node_of_all: Any = made[0].grad_fn
        self._tape.origins.name(node_of_all._sequence_nr(), call.path)

    def _repeated_backward(
        self,
        call: RepeatedCall,
        node: fx.Node,
        nodes: Sequence[fx.Node | None],
        arrived: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """The gradients of a layer's arguments, by place; its backward is in the graph."""
        tape, closing = self._tape, self._closing
        if closing is None or self._unlike is not None or node in self._done:
            raise UnlikeLayersError(self.path, "backward does not begin with the last layer")
        looks = {position: trees.look_of(gradient) for position, gradient in arrived.items()}
        if looks != closing.looks:
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
                inputs.append(tape.node_of(arrived[item]))
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


_NODE = "_LayerBackward"
"""Autograd's name of the node of a repeated call."""


class _Layer(torch.autograd.Function):
    """One autograd node for a layer."""

    @staticmethod
    def forward(ctx: Any, backward: Any, made: tuple[Tensor, ...], *inputs: Tensor) -> Any:
        ctx.gradients_of = backward
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UnlikeLayersError("", "gradients of gradients")
        with DisableTorchFunction():
            return (None, None, *ctx.gradients_of(gradients))


def _twin(
    block: RecordedCall,
    call: RecordedCall,
    nodes: Sequence[fx.Node],
    there: Mapping[fx.Node | None, fx.Node | None],
    assumed: Mapping[int, int],
) -> Twin:
    """The twin of a block.  call: whose path and source it has.  there, assumed: counterparts
    for nodes and assumptions of the block."""

    def result(node: fx.Node, index: int | None = None) -> tuple[fx.Node, int | None]:
        if node not in there:
            node, index = taperecords.picked(node, index)
        return there.get(node) or node, index

    return Twin(
        block=block,
        path=call.path,
        call=call.call,
        source=call.source,
        nodes=nodes,
        inputs=[result(node) for node in block.inputs],
        results=[result(node, index) for node, index, _ in block.made],
        assumptions=[assumed.get(number, number) for number in block.assumptions],
    )
