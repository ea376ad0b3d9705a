"""Modules that are alike run once: the Python of a later call is not run, its block is repeated.

A stack of layers calls modules of one build again and again.  The first call of each kind is
recorded; a later one becomes a single node that refers to that block, with the weights and inputs
that stand in its place.  Done only where the later call could not have recorded anything else:

1. Both modules are built alike: classes, names, sizes of parameters and buffers, training flags, no
   hooks.  All their attributes are alike, but for those that the recorded call did not read
   (`Watch` sees reads of attributes in which the modules differ, as a layer's number), and those of
   the recorded one are still what they were.
2. The arguments, and the module's own tensors, look alike: trees of plain values and tensors;
   tensors in sizes, strides, precision, in what is the same or shares memory, and in their known
   values.  A call with any other object (a cache) is run.
3. The recorded call wrote to nothing that it did not make, changed no attribute of the modules and
   no container that it was given, called no module but those inside, decided no unknown condition,
   drew no random number in Python, made no constant, read no tensor that was computed elsewhere,
   computed no value from real data, left no tensor behind that something holds, and returned
   plain values, inputs, or new tensors.
4. Both stand under the same modes: precision, autocast, kernels of attention.
5. Gradients are off: autograd has to see every op.
6. What its functions can see outside of modules (globals, closures, attributes of classes, context
   variables: see `outside`) was not changed by the recorded call, and is now what it was then.

What is left out is code that asks a module for its `__dict__` or its identity, and state that
compiled code keeps to itself.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from rooftrace.tracer.recording import source_line
from rooftrace.tracer.replay.alike import (
    PLAIN,
    Watch,
    build_of,
    differences,
    has_hooks,
    note,
    parts_of,
    same_state,
    state_of,
)
from rooftrace.tracer.replay.outside import Outside, include
from rooftrace.tracer.tensors import bytes_of, own_tensors

if TYPE_CHECKING:
    from rooftrace.tracer.recording import Origin, Recorder, Spec


@dataclass(frozen=True, slots=True)
class Block:
    """What one call recorded: its nodes, the nodes that it reads from outside, and what it returns.

    source: the line that called, which is also that of ops in modules of torch inside.  passed:
    which argument each returned leaf is, None for others.  results: of the other tensors the node,
    the index there, and what they are, with storages counted from `first_storage`.  storages: how
    many it made.  calls: how often it called each module inside, by the path below its own.
    assumptions: ids of those that something inside rests on.  origin: where the first op comes
    from, None where there is none.
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
    origin: Origin | None


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


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded call that later ones can repeat.

    state: of the module, before the call.  watched: attributes in which modules differ; read: those
    of them that it read.  earlier: how often each module that it called was called before, by the
    path below its own.  nodes: of its arguments and the module's own tensors, in order; taints: of
    the arguments.  outside: what its functions saw outside of modules.  returned: copies of what it
    returned, and what is known of them.
    """

    module: nn.Module
    block: Block
    state: list[Any]
    watched: frozenset[tuple[str, str]]
    read: frozenset[tuple[str, str]]
    earlier: Mapping[str, int]
    nodes: list[fx.Node | None]
    taints: list[list[int]]
    outside: Outside
    returned: list[Any]
    values: list[tuple[Tensor, frozenset[int]] | None]
    structure: Any


_ATTEMPTS = 3
"""How many calls that look alike are recorded before we give up: the first may fill a cache."""


class Calls:
    """Decides for every module call of a recorder whether to run it."""

    def __init__(self, recorder: Recorder, enabled: bool) -> None:
        self._recorder, self._enabled = recorder, enabled
        self._groups: dict[int, list[nn.Module]] = {}
        self._known: dict[Any, _Recording] = {}
        self._failures: Counter[Any] = Counter()
        self._watchers = (0, 0)

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
        self._watchers = _global_hooks()

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
        if (
            group is None
            or torch.is_grad_enabled()
            or recorder.part != "forward"
            or torch._C._current_autograd_node() is not None
            or _global_hooks() != self._watchers
            or not recorder.threads.own()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return original(module, *args, **kwargs)
        with torch._C.DisableTorchFunction():  # to look at a tensor is no call of its own
            call = _Call(recorder, module, args, kwargs)
            key = (id(group[0]), call.look, recorder.recording, *_modes())
            known = None if call.look is None else self._known.get(key)
            if known is not None and self._may_stand_for(known, module):
                done, output = self._repeated(known, module, call)
                if done:
                    return output
        if known is not None or call.look is None:
            return original(module, *args, **kwargs)
        if self._failures[key] == _ATTEMPTS:
            return original(module, *args, **kwargs)
        output, found = self._recorded(original, module, args, kwargs, call)
        if found is None:
            self._failures[key] += 1
        else:
            self._known[key] = found
        return output

    # -- recording ---------------------------------------------------------------------------------

    def _recorded(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, call: _Call
    ) -> tuple[Any, _Recording | None]:
        """Run the call, and what it recorded if later calls can repeat it."""
        with torch._C.DisableTorchFunction():
            start, watched = _Start(self._recorder, module, call), self._differing(module)
        outside = Outside()
        with Watch(module, watched) as watch:
            with outside:
                output = original(module, *args, **kwargs)
            unchanged = outside.unchanged()
        with torch._C.DisableTorchFunction():
            unchanged &= call.same_arguments(args, kwargs) and start.unchanged()
            if not unchanged:
                return output, None
            return output, self._kept(start, watched, watch.read, outside, output)

    def _kept(
        self,
        start: _Start,
        watched: set[tuple[str, str]],
        read: set[tuple[str, str]],
        outside: Outside,
        output: Any,
    ) -> _Recording | None:
        """What a call recorded; None where later ones could not repeat it."""
        recorder, call = self._recorder, start.call
        returned, structure = tree_flatten(output)
        block = start.block(returned)
        if block is None or (recorder.recording and None in start.nodes[: len(call.tensors)]):
            return None
        copies, values = _copies(returned, recorder.values.known)
        return _Recording(
            start.module,
            block,
            start.state,
            frozenset(watched),
            frozenset(read),
            {inner: start.calls.get(block.path + inner, 0) for inner in block.calls},
            start.nodes,
            call.taints(),
            outside,
            copies,
            values,
            structure,
        )

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
        recorder = self._recorder
        path = recorder.path_of(module)
        if any(recorder.calls_at(path + inner) != count for inner, count in known.earlier.items()):
            return False
        if _paths(recorder, known.module) != _paths(recorder, module):
            return False
        places = differences(known.module, module)
        return (
            places is not None
            and places <= known.watched
            and not places & known.read
            and same_state(known.state, state_of(known.module))
            and known.outside.unchanged()
        )

    def _repeated(self, known: _Recording, module: nn.Module, call: _Call) -> tuple[bool, Any]:
        """What the call returns, with its block in the graph; (False, None) where it has to run."""
        recorder, values, block = self._recorder, self._recorder.values, known.block
        assumptions: dict[int, int] = {}
        for before, taint in zip(known.taints, call.taints(), strict=True):
            if len(taint) != len(before):
                return False, None
            for old, new in zip(before, taint, strict=True):
                if assumptions.setdefault(old, new) != new:
                    return False, None
        given = call.nodes()
        if [node is None for node in given] != [node is None for node in known.nodes]:
            return False, None
        path = recorder.path_of(module)
        for number in block.assumptions:
            if number not in assumptions:
                assumptions[number] = values.assume_again(number, block.path, path)
        again = RepeatedCall(block, path, source_line(4), recorder.storages, assumptions)
        node = None
        if recorder.recording and block.nodes:
            places = dict(zip(known.nodes, given, strict=True))
            inputs = [places.get(item) or item for item in block.inputs]
            node = recorder.repeat_node(inputs, again)
        include(known.outside)
        for place, name in known.read:
            note(module.get_submodule(place), name)
        recorder.called_again(block, path)
        recorder.after_backward = False
        return True, self._returned(known, call.tensors, node, again)

    def _returned(
        self, known: _Recording, tensors: list[Tensor], node: fx.Node | None, call: RepeatedCall
    ) -> Any:
        recorder, values = self._recorder, self._recorder.values
        leaves, contents = _copies(known.returned, None, known.values)
        made: set[int] = set()
        for place, (leaf, content) in enumerate(zip(leaves, contents, strict=True)):
            argument = known.block.passed[place]
            if argument is not None:
                leaves[place] = tensors[argument]
            elif isinstance(leaf, Tensor) and id(leaf) not in made:
                if node is not None:
                    index = len(made)
                    storage = known.block.results[index][2].storage + call.first_storage
                    recorder.tag(leaf, node, index, storage)
                made.add(id(leaf))
                if content is not None:
                    taint = frozenset(call.assumptions.get(a, a) for a in content[1])
                    values.learn(leaf, content[0], taint)
        return tree_unflatten(leaves, known.structure)


class _Call:
    """The arguments of a call and the module's own tensors.

    look: None where it cannot be said how they look.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._recorder = recorder
        self._leaves, self._structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.own = [tensor for _, part, _ in parts_of(module) for tensor in own_tensors(part)]
        self.look = self._look()

    def _look(self) -> Any:
        plain = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        if not all(type(leaf) in PLAIN for leaf in plain):
            return None
        everything = (*self.tensors, *self.own)
        for tensor in everything:
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return None
        kinds = [type(leaf) for leaf in self._leaves]
        objects: dict[int, int] = {}
        memory: dict[int, int] = {}
        nodes: dict[Any, int] = {}
        looks = []
        for tensor in everything:
            made = self._recorder.made_by(tensor)
            looks.append(
                (
                    tuple(tensor.shape),
                    tensor.stride(),
                    tensor.storage_offset(),
                    tensor.dtype,
                    tensor.device,
                    tensor.requires_grad,
                    objects.setdefault(id(tensor), len(objects)),
                    memory.setdefault(bytes_of(tensor), len(memory)),
                    made and nodes.setdefault(made[:2], len(nodes)),
                    self._value(tensor),
                    self._cast_before(made and made[0]),
                )
            )
        return tuple(plain), tuple(kinds), tuple(looks), self._structure

    def _value(self, tensor: Tensor) -> Any:
        entry = self._recorder.values.known(tensor)
        if entry is None:
            return None
        value = tensor if tensor.device.type == "cpu" else entry.value
        return self._recorder.values.once(value, "content", _content)

    @staticmethod
    def _cast_before(node: fx.Node | None) -> bool:
        """Whether autocast may have cast this weight: it does so once."""
        return node is not None and torch.is_autocast_enabled("cuda") and bool(node.users)

    def nodes(self) -> list[fx.Node | None]:
        """The nodes of the arguments and of the module's own tensors."""
        if not self._recorder.recording:
            return []
        return [self._recorder.tagged_node(tensor) for tensor in (*self.tensors, *self.own)]

    def taints(self) -> list[list[int]]:
        """The assumptions that the arguments rest on."""
        entries = map(self._recorder.values.known, self.tensors)
        return [[] if entry is None else sorted(entry.taint) for entry in entries]

    def versions(self) -> list[int]:
        """How often each tensor was written to."""
        return [0 if t.is_inference() else t._version for t in (*self.tensors, *self.own)]

    def same_arguments(self, args: Any, kwargs: Any) -> bool:
        """Whether the containers among the arguments hold what they held."""
        leaves, structure = tree_flatten((args, kwargs))
        return structure == self._structure and same_state(self._leaves, leaves)


# -- a call that is being recorded -----------------------------------------------------------------


class _Start:
    """Where the recorder stood when a call began."""

    def __init__(self, recorder: Recorder, module: nn.Module, call: _Call) -> None:
        self._recorder, self.module, self.call = recorder, module, call
        self.nodes, self.state = call.nodes(), state_of(module)
        self.node = next(iter(reversed(recorder.graph.nodes)), None)
        self.storages = recorder.storages
        self.assumptions = len(recorder.values.assumptions)
        self.calls = recorder.calls()
        self.source = source_line(4)
        self._outside = self._now()

    def _now(self) -> Any:
        recorder = self._recorder
        versions = self.call.versions()
        seen = recorder.values.decisions, recorder.values.computed, recorder.threads.entered
        return seen, versions, _random_states()

    def unchanged(self) -> bool:
        """Whether nothing outside of the graph was drawn, decided or written since."""
        same = same_state(self.state, state_of(self.module)) and not has_hooks(self.module)
        return same and bool(self._now() == self._outside)

    def block(self, returned: Sequence[Any]) -> Block | None:
        """What was recorded since; None where a later call could not repeat it."""
        recorder, module, tensors = self._recorder, self.module, self.call.tensors
        nodes = list(self._nodes(recorder))
        positions = {id(tensor): place for place, tensor in enumerate(tensors)}
        passed: list[int | None] = []
        results: list[tuple[fx.Node, int | None, Spec]] = []
        seen: set[int] = set()
        for leaf in returned:
            passed.append(positions.get(id(leaf)) if isinstance(leaf, Tensor) else None)
            if isinstance(leaf, Tensor) and passed[-1] is None:
                if type(leaf) is not Tensor or leaf.layout is not torch.strided:
                    return None
                if recorder.recording and id(leaf) not in seen:
                    seen.add(id(leaf))
                    found = recorder.made_by(leaf)
                    if found is None or found[2].storage <= self.storages:
                        return None
                    storage = found[2].storage - self.storages
                    results.append((*found[:2], replace(found[2], storage=storage)))
            elif not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
                return None
        if recorder.holds_others(self.storages, nodes, [found[2].storage for found in results]):
            return None
        inputs = _read_from_outside(nodes)
        if recorder.writes_outside(nodes, self.storages) or any(
            node.op == "call_function" and node not in self.nodes for node in inputs
        ):
            return None
        if any(node.op != "call_function" for node in nodes):
            return None
        path = recorder.path_of(module)
        calls = {
            inner: count - self.calls.get(inner, 0)
            for inner, count in recorder.calls().items()
            if count != self.calls.get(inner, 0)
        }
        if any(inner != path and not inner.startswith(f"{path}.") for inner in calls):
            return None
        new = range(self.assumptions, len(recorder.values.assumptions))
        return Block(
            path,
            recorder.calls_of(module) - 1,
            self.source,
            tuple(nodes),
            tuple(inputs),
            tuple(passed),
            tuple(results),
            self.storages,
            recorder.storages - self.storages,
            {inner[len(path) :]: count for inner, count in calls.items()},
            tuple(sorted(recorder.taint_of(nodes).union(new))),
            recorder.first_origin(nodes),
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


def _paths(recorder: Recorder, module: nn.Module) -> list[str]:
    """The paths of the modules inside, as seen from the module; whole where they are elsewhere."""
    path = recorder.path_of(module)
    found = [recorder.path_of(part) for part in module.modules()]
    return [inner[len(path) :] if inner.startswith(f"{path}.") else inner for inner in found[1:]]


def _modes() -> tuple[Any, ...]:
    """What torch is set to that changes which ops a module runs."""
    backends: Any = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


def _global_hooks() -> tuple[int, int]:
    """How many hooks watch the calls of all modules."""
    hooks: Any = nn_module
    return len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)


def _random_states() -> tuple[Any, ...]:
    """Where the generators of random numbers stand that Python code draws from."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        drawn = torch.default_generator.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy else None
    return random.getstate(), drawn, state and (state[1].tobytes(), *state[2:])


def _copies(
    leaves: Sequence[Any],
    known: Callable[[Tensor], Any] | None,
    contents: Sequence[tuple[Tensor, frozenset[int]] | None] = (),
) -> tuple[list[Any], list[tuple[Tensor, frozenset[int]] | None]]:
    """New tensors for those among the leaves, and for what is known of them (or of `contents`).

    They share memory, and are the same, where the old ones do and are.
    """
    made: dict[int, Tensor] = {}
    memory: dict[int, Any] = {}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if known is not None:
        entries = [known(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        contents = [None if entry is None else entry[:2] for entry in entries]
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for tensor in tensors:
            if id(tensor) not in made:
                key, device = bytes_of(tensor), tensor.device
                if key not in memory:
                    size = tensor.untyped_storage().nbytes()
                    bare = torch.empty(size, dtype=torch.uint8, device=device)
                    memory[key] = bare.untyped_storage()
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                empty = torch.empty(0, dtype=tensor.dtype, device=device)
                made[id(tensor)] = empty.set_(memory[key], *place)
        copied = copy.deepcopy(list(contents), {})
    return [made.get(id(leaf), leaf) for leaf in leaves], copied


def _content(tensor: Tensor) -> Any:
    with _disable_current_modes():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return hash(bytes(plain.reshape(-1).view(torch.uint8).numpy()))
