"""Modules that are alike run once: the Python of a later call is not run, its block is repeated.

A stack of layers calls modules of one build again and again.  The first call of each kind is
recorded; a later one becomes a single node that refers to that block, with the weights and inputs
that stand in its place.  Done only where the later call could not have recorded anything else:

1. Both modules are built alike: classes, names, sizes of parameters and buffers, training flags, no
   hooks.  All their attributes are alike, but for those that the recorded call did not read
   (`Watch` sees reads of attributes in which the modules differ, as a layer's number).
2. The arguments look alike: trees of plain values and tensors; tensors in sizes, strides,
   precision, in what shares memory, and in their known values.  A call with any other object (a
   cache) is run.
3. The recorded call wrote to nothing that it did not make, changed no attribute of the modules,
   decided no unknown condition, drew no random number in Python, and returned plain values, inputs,
   or new tensors.
4. Gradients are off: autograd has to see every op.

What is left out is code that reads a global variable which changes between the calls.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from rooftrace.tracer.alike import (
    PLAIN,
    Watch,
    build_of,
    differences,
    same_state,
    state_of,
)
from rooftrace.tracer.onmeta import own_tensors
from rooftrace.tracer.origin import source_line
from rooftrace.tracer.trees import bytes_of

if TYPE_CHECKING:
    from rooftrace.tracer.capture import Recorder, Spec


@dataclass(frozen=True, slots=True)
class Block:
    """What one call recorded: its nodes, the nodes that it reads from outside, and what it returns.

    source: the line that called, which is also that of ops in modules of torch inside.  passed:
    which argument each returned leaf is, None for others.  results: of the other tensors the node,
    the index there, and what they are, with storages counted from `first_storage`.  storages: how
    many it made.  calls: how often it called each module inside, by the path below its own.
    assumptions: ids of those that something inside rests on.
    """

    path: str
    call: int
    source: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    passed: tuple[int | None, ...]
    results: tuple[tuple[fx.Node, int | None, Spec], ...]
    first_storage: int
    storages: int
    calls: Mapping[str, int]
    assumptions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A later call that repeats a block: where it stands, and what its assumptions became."""

    block: Block
    path: str
    source: str
    first_storage: int
    assumptions: Mapping[int, int]


def repeated(*inputs: Any) -> Any:
    """The target of a node that stands for a whole block; `lower` writes the block in its place."""
    raise NotImplementedError("a repeated block has to be lowered before it can be run")


@dataclass(slots=True)
class _Recording:
    """A recorded call that later ones can repeat.

    read: attributes it read of those in which modules differ.  nodes, taints: of its arguments.
    """

    module: nn.Module
    block: Block
    read: frozenset[tuple[str, str]]
    nodes: list[fx.Node | None]
    taints: list[list[int]]
    returned: list[Any]
    structure: Any
    alike: dict[int, bool] = field(default_factory=dict)


class Calls:
    """Decides for every module call of a recorder whether to run it."""

    def __init__(self, recorder: Recorder, enabled: bool) -> None:
        self._recorder, self._enabled = recorder, enabled
        self._groups: dict[int, list[nn.Module]] = {}
        self._known: dict[Any, _Recording | None] = {}

    def watch(self, root: nn.Module) -> None:
        """Find the modules of `root` that are built alike."""
        if not self._enabled or any("@" in key for key in self._recorder.values.given):
            return
        builds: dict[int, Any] = {}
        found: dict[Any, list[nn.Module]] = {}
        for module in reversed(list(root.modules())):
            build = builds[id(module)] = build_of(module, builds)
            if not type(module).__module__.startswith("torch.") and build is not None:
                found.setdefault(build, []).append(module)
        for alike in found.values():
            if len(alike) > 1:
                for module in alike:
                    self._groups[id(module)] = alike[::-1]

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """Calls of modules come to us while this is entered."""
        if not self._groups:
            yield
            return
        kind: Any = nn.Module
        original = kind.__call__

        def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return self._answer(original, module, args, kwargs)

        kind.__call__ = called
        try:
            yield
        finally:
            kind.__call__ = original

    def _answer(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        recorder = self._recorder
        group = self._groups.get(id(module))
        if group is None or torch.is_grad_enabled() or recorder.part != "forward":
            return original(module, *args, **kwargs)
        look, tensors = self._look(args, kwargs)
        if look is None:
            return original(module, *args, **kwargs)
        key = (id(group[0]), look, recorder.recording, torch.get_default_dtype())
        if key not in self._known:
            return self._recorded(original, module, args, kwargs, key, tensors)
        known = self._known[key]
        if known is None or not self._may_stand_for(known, module):
            return original(module, *args, **kwargs)
        done, output = self._repeated(known, module, tensors)
        return output if done else original(module, *args, **kwargs)

    # -- what a call looks like --------------------------------------------------------------------

    def _look(self, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """What the arguments look like (None where that cannot be said), and their tensors."""
        leaves, structure = tree_flatten((args, kwargs))
        looks: list[Any] = []
        tensors: list[Tensor] = []
        memory: dict[int, int] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided:
                    return None, []
                tensors.append(leaf)
                looks.append(
                    (
                        tuple(leaf.shape),
                        leaf.stride(),
                        leaf.storage_offset(),
                        leaf.dtype,
                        leaf.device,
                        memory.setdefault(bytes_of(leaf), len(memory)),
                        self._value(leaf),
                    )
                )
            elif type(leaf) in PLAIN:
                looks.append((type(leaf), leaf))
            else:
                return None, []
        return (tuple(looks), structure), tensors

    def _value(self, tensor: Tensor) -> Any:
        entry = self._recorder.values.known(tensor)
        if entry is not None:
            return self._recorder.values.once(entry.value, "content", _content)
        return _content(tensor) if tensor.device.type == "cpu" else None

    # -- recording ---------------------------------------------------------------------------------

    def _recorded(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        key: Any,
        tensors: list[Tensor],
    ) -> Any:
        """Run the call, and keep what it recorded if later calls can repeat it."""
        recorder, values = self._recorder, self._recorder.values
        self._known[key] = None
        nodes = [recorder.tagged_node(tensor) for tensor in tensors]
        state, start = state_of(module), _Start(recorder)
        with Watch(module, self._differing(module)) as watch:
            output = original(module, *args, **kwargs)
        returned, structure = tree_flatten(output)
        if start.unchanged(recorder) and same_state(state, state_of(module)):
            block = start.block(recorder, module, returned, tensors)
            if block is not None and (None not in nodes or not recorder.recording):
                taints = [_taint(values.known(tensor)) for tensor in tensors]
                self._known[key] = _Recording(
                    module, block, frozenset(watch.read), nodes, taints, returned, structure
                )
        return output

    def _differing(self, module: nn.Module) -> set[tuple[str, str]]:
        """Attributes in which the modules of a group differ."""
        return {
            place
            for other in self._groups[id(module)]
            for place in differences(module, other) or ()
        }

    # -- repeating ---------------------------------------------------------------------------------

    def _may_stand_for(self, known: _Recording, module: nn.Module) -> bool:
        """Whether nothing that the recorded call read is different in this module."""
        found = known.alike.get(id(module))
        if found is None:
            places = differences(known.module, module)
            found = known.alike[id(module)] = places is not None and not (places & known.read)
        return found and self._recorder.calls_of(module) == known.block.call

    def _repeated(
        self, known: _Recording, module: nn.Module, tensors: list[Tensor]
    ) -> tuple[bool, Any]:
        """What the call returns, with its block in the graph; (False, None) where it has to run."""
        recorder, values, block = self._recorder, self._recorder.values, known.block
        assumptions: dict[int, int] = {}
        for before, tensor in zip(known.taints, tensors, strict=True):
            taint = _taint(values.known(tensor))
            if len(taint) != len(before):
                return False, None
            assumptions |= zip(before, taint, strict=True)
        path = recorder.path_of(module)
        for number in block.assumptions:
            if number not in assumptions:
                assumptions[number] = values.assume_again(number, block.path, path)
        call = RepeatedCall(block, path, source_line(4), recorder.storages, assumptions)
        node = None
        if recorder.recording:
            given = [recorder.tagged_node(tensor) for tensor in tensors]
            if None in given:
                return False, None
            places: dict[Any, Any] = dict(_counterparts(recorder, known.module, module))
            places |= zip(known.nodes, given, strict=True)
            inputs = tuple(places.get(item, item) for item in block.inputs)
            node = recorder.repeat_node(inputs, call)
        recorder.called_again(block, path)
        return True, self._returned(known, tensors, node, call)

    def _returned(
        self, known: _Recording, tensors: list[Tensor], node: fx.Node | None, call: RepeatedCall
    ) -> Any:
        recorder, values = self._recorder, self._recorder.values
        leaves: list[Any] = []
        index = 0
        for leaf, argument in zip(known.returned, known.block.passed, strict=True):
            if argument is not None:
                leaf = tensors[argument]
            elif isinstance(leaf, Tensor):
                made = _like(leaf)
                if node is not None:
                    storage = known.block.results[index][2].storage + call.first_storage
                    recorder.tag(made, node, index, storage)
                entry = values.known(leaf)
                if entry is not None:
                    taint = frozenset(call.assumptions.get(a, a) for a in entry.taint)
                    values.learn(made, entry.value, taint)
                leaf, index = made, index + 1
            leaves.append(leaf)
        return tree_unflatten(leaves, known.structure)


# -- a call that is being recorded -----------------------------------------------------------------


class _Start:
    """Where the recorder stood when a call began."""

    def __init__(self, recorder: Recorder) -> None:
        self.node = next(reversed(recorder.graph.nodes), None)
        self.storages = recorder.storages
        self.assumptions = len(recorder.values.assumptions)
        self.decisions, self.random = recorder.values.decisions, random.getstate()
        self.calls = recorder.calls()
        self.source = source_line(4)

    def unchanged(self, recorder: Recorder) -> bool:
        """Whether nothing outside of the graph was drawn or decided since."""
        decided = recorder.values.decisions != self.decisions
        return not decided and random.getstate() == self.random

    def block(
        self,
        recorder: Recorder,
        module: nn.Module,
        returned: Sequence[Any],
        tensors: Sequence[Tensor],
    ) -> Block | None:
        """What was recorded since; None where a later call could not repeat it."""
        nodes = list(self._nodes(recorder))
        positions = {id(tensor): place for place, tensor in enumerate(tensors)}
        passed: list[int | None] = []
        results: list[tuple[fx.Node, int | None, Spec]] = []
        for leaf in returned:
            passed.append(positions.get(id(leaf)) if isinstance(leaf, Tensor) else None)
            if isinstance(leaf, Tensor) and passed[-1] is None:
                if type(leaf) is not Tensor or leaf.layout is not torch.strided:
                    return None
                if recorder.recording:
                    found = recorder.made_by(leaf)
                    if found is None or found[2].storage <= self.storages:
                        return None
                    storage = found[2].storage - self.storages
                    results.append((*found[:2], replace(found[2], storage=storage)))
            elif not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
                return None
        if recorder.writes_outside(nodes, self.storages):
            return None
        path = recorder.path_of(module)
        new = range(self.assumptions, len(recorder.values.assumptions))
        return Block(
            path,
            recorder.calls_of(module) - 1,
            self.source,
            tuple(nodes),
            tuple(_read_from_outside(nodes)),
            tuple(passed),
            tuple(results),
            self.storages,
            recorder.storages - self.storages,
            Counter(
                {
                    inner[len(path) :]: count - self.calls.get(inner, 0)
                    for inner, count in recorder.calls().items()
                    if count != self.calls.get(inner, 0)
                }
            ),
            tuple(sorted(recorder.taint_of(nodes).union(new))),
        )

    def _nodes(self, recorder: Recorder) -> Iterator[fx.Node]:
        """What was recorded since, without pieces taken out of earlier results."""
        inside: set[fx.Node] = set()
        last = self.node
        node = next(iter(recorder.graph.nodes), None) if last is None else last.next
        while node is not None and node.op != "root":
            if node.target is not operator.getitem or node.args[0] in inside:
                inside.add(node)
                yield node
            node = node.next


def _read_from_outside(nodes: Sequence[fx.Node]) -> dict[fx.Node, None]:
    inside = set(nodes)
    return {
        argument: None
        for node in nodes
        for argument in node.all_input_nodes
        if argument not in inside
    }


def _counterparts(
    recorder: Recorder, module: nn.Module, other: nn.Module
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes of the weights of one module, with those of the other."""
    for part, twin in zip(module.modules(), other.modules(), strict=True):
        for mine, theirs in zip(own_tensors(part), own_tensors(twin), strict=True):
            pair = recorder.tagged_node(mine), recorder.tagged_node(theirs)
            if pair[0] is not None and pair[1] is not None:
                yield pair[0], pair[1]


def _taint(entry: Any) -> list[int]:
    return [] if entry is None else sorted(entry.taint)


def _like(tensor: Tensor) -> Tensor:
    """A new tensor of the same look."""
    with _disable_current_modes():
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )


def _content(tensor: Tensor) -> Any:
    with _disable_current_modes():
        plain = tensor.detach().contiguous()
        return hash(bytes(plain.reshape(-1).view(torch.uint8).numpy()))
