"""Calls of modules that would record the same run once: a later call repeats the first one's block.

A stack of layers calls modules of one build again and again.  The first call of each kind is
recorded; a later one becomes a single node that refers to that block, with the weights and inputs
that stand in its place.  Done only where the later call could not have recorded anything else:

1. Both modules have one build: classes, names, sizes of parameters and buffers, training flags, no
   hooks.  All their attributes are equal, functions in all that they hold (with gradients, only
   the same function is), but for those that the recorded call did not read
   (`Watch` sees reads of attributes in which the modules differ, as a layer's number), and those of
   the recorded one are still what they were.
2. The arguments, and the module's tensors, look the same: trees of plain values and tensors;
   tensors in sizes, strides, precision, in identity and shared memory, and in their known
   values.  So do what a layer's place in a `DynamicCache` of transformers holds; the layer has done
   nothing with the cache but to pass its number to `update` (see `outside`).  A call with any other
   object is run.
3. The recorded call wrote to nothing that it did not make, changed no attribute of the modules and
   no container that it was given, called no module but those inside, decided no unknown condition,
   drew no random number in Python, made no constant but empty ones, read no tensor that was
   computed elsewhere,
   computed no value from real data, left no tensor behind that something holds, and returned
   plain values, inputs, or new tensors.
4. Both stand under the same modes: precision, autocast, kernels of attention.
5. Gradients are off, or one backward follows, as in the training phase (see `gradients`).
6. What its functions can see outside of modules (globals, closures, attributes of classes, context
   variables: see `outside`) was not changed by the recorded call, nor since.

What is left out is code that asks a module for its `__dict__` or its identity, and state that
compiled code keeps to itself.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from rooftrace.tracer import source_line, torch_private
from rooftrace.tracer.recording import Tape, original_of, replaced, taperecords
from rooftrace.tracer.repeats.arguments import (
    Arguments,
    Beginning,
    differences,
    held_state,
    of_one_build,
    same_state,
)
from rooftrace.tracer.repeats.blocks import (
    Recording,
    RepeatedCall,
    constant_again,
    count_again,
    in_loops,
    repeat_node,
)
from rooftrace.tracer.repeats.gradients import (
    Layers,
    Stacks,
    differentiable_plainly,
    has_hooks_on,
    made_by,
)
from rooftrace.tracer.repeats.outside import Outside, Unwatched, Watch, include, note
from rooftrace.tracer.values import trees

_ATTEMPTS = 3
"""The most calls of equal look that are recorded in vain: the first may fill a cache."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A step of a module's path that is a number, as of a layer in a list."""
_WORTH = 12
"""As many ops at least has a layer that is repeated under gradients.  The input of a smaller one,
as a norm, often has further readers, and autograd adds up the gradients."""


class CallReplay:
    """Decides for every module call of one recording whether to run it."""

    def __init__(self, tape: Tape, enabled: bool, run_apart: Collection[str]) -> None:
        self._tape, self._enabled = tape, enabled
        self.stacks = Stacks(tape, run_apart)
        self._groups: dict[int, list[nn.Module]] = {}
        self._recordings: dict[Any, list[Recording]] = {}
        self._failures: Counter[Any] = Counter()
        self._watchers = (0, 0)
        self._inside: Counter[int] = Counter()  # modules of each group in the recorded call

    def watch(self, root: nn.Module) -> None:
        """Note which modules of `root` have one build."""
        if not self._enabled or any("@" in key for key in self._tape.values.choices):
            return
        for equal in of_one_build(root):
            self._groups.update((id(module), equal) for module in equal)

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        """Inside, calls of modules come to `answer` first."""
        if not self._groups:
            yield
            return
        self._watchers = _global_hooks()
        ours = {} if self._tape.hands_on_calls else {"__call__": self.answer}
        with replaced(nn.Module, ours):
            yield

    def answer(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, or give the result of an equal call."""
        original = original_of(nn.Module, "__call__")
        tape, group, trained = self._tape, self._groups.get(id(module)), torch.is_grad_enabled()
        if group is None or self._inside[id(group[0])] == 1 or not self._looks(trained):
            return original(module, *args, **kwargs)
        layers: Layers | None = None
        with Unwatched(), torch_private.DisableTorchFunction():  # reading facts is no call
            call = Arguments(tape, module, args, kwargs)
            compiled = tape.origins.compiled_here()
            key = (id(group[0]), call.look, tape.recording, compiled, *_modes())
            usual = call.look is not None and not (trained and has_hooks_on(call.all))
            recordings = self._recordings.setdefault(key, []) if usual else []
            twin = next((k for k in recordings if self._may_stand_for(k, module)), None)
            if twin is not None and trained:
                layers = self.stacks.of(twin, call, partial(self._alike, twin, group))
            if twin is not None and (not trained or (layers and layers.admits(module, call))):
                done, output = self._repeated(twin, module, call, layers)
                if done:
                    return output
        if layers is not None and module is layers.last:
            output, recording = self._recorded(original, module, args, kwargs, call)
            layers.close(call, recording, torch_private.tree_flatten(output)[0])
            return output
        if not usual or twin is not None or len(recordings) + self._failures[key] >= _ATTEMPTS:
            with self.stacks.within_layer(trained and bool(recordings)):
                return original(module, *args, **kwargs)
        with self._first_of_all(module, bool(recordings) or key in self._failures):
            output, recording = self._recorded(original, module, args, kwargs, call)
        self._failures[key] += recording is None
        if recording is not None:
            firsts = [first for first in recordings if _is_alike(first, module)]
            self.stacks.close(firsts, call, recording, torch_private.tree_flatten(output)[0])
            recordings.append(recording)
        return output

    @contextlib.contextmanager
    def _first_of_all(self, module: nn.Module, again: bool) -> Iterator[None]:
        """Inside, a call is recorded.  again: after others, of which none can stand for it.

        A module inside that has no equal there is recorded as a part of the first call only: its
        block serves none unless other calls have to run.
        """
        before, groups = self._inside, (self._groups.get(id(part)) for part in module.modules())
        self._inside = Counter(() if again else (id(group[0]) for group in groups if group))
        try:
            yield
        finally:
            self._inside = before

    def _looks(self, trained: bool) -> bool:
        """Whether a call that begins here may be recorded or repeated."""
        return (
            (self.stacks.open or not trained)
            and self._tape.here.part == "forward"
            and (torch_private.current_autograd_node() or torch_private.get_tracing_state()) is None
            and _global_hooks() == self._watchers
            and self._tape.threads.own()
            and torch_private.peek_interpreter_stack() is None
        )

    # -- recording ---------------------------------------------------------------------------------

    def _recorded(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: Any,
        kwargs: Any,
        call: Arguments,
    ) -> tuple[Any, Recording | None]:
        """Run the call; returns its result, and its record if later calls can repeat it."""
        with Unwatched(), torch_private.DisableTorchFunction():
            start, watched = Beginning(self._tape, module, call), self._differing(module)
        outside = Outside(watches_draws=self._tape.generators is not None)
        trained = torch.is_grad_enabled()
        with Watch(module, watched, call.cached) as watch, self.stacks.within_layer(trained):
            with outside:
                output = original(module, *args, **kwargs)
            with Unwatched():
                unchanged = outside.unchanged()
        with Unwatched(), torch_private.DisableTorchFunction():
            unchanged &= call.same_arguments(args, kwargs) and start.unchanged()
            if start.wrote():  # so will the others, as norms do that count batches
                for other in self._groups.get(id(module), ()):
                    self._groups.pop(id(other), None)
            if not unchanged or watch.used:
                return output, None
            return output, self._kept(start, watched, watch.read, outside, output)

    def _kept(
        self,
        start: Beginning,
        watched: set[tuple[str, str]],
        read: set[tuple[str, str]],
        outside: Outside,
        output: Any,
    ) -> Recording | None:
        """The record of a call; None if later calls could not repeat it."""
        tape, call = self._tape, start.call
        state = call.cached and dict(call.cached.state)
        returned, structure = torch_private.tree_flatten((output, state))
        trained = torch.is_grad_enabled()
        block = start.block(returned, trained)
        if block is None or (tape.recording and None in start.nodes[: len(call.tensors)]):
            return None
        if trained and (
            not tape.recording
            or len(block.nodes) < _WORTH
            or in_loops(block.nodes)
            or not differentiable_plainly(returned, call.tensors)
        ):
            return None
        copies, values = _copies(returned, tape.values.held)
        return Recording(
            module=start.module,
            block=block,
            state=start.state,
            watched=frozenset(watched),
            read=frozenset(read),
            earlier={inner: start.calls.get(block.path + inner, 0) for inner in block.calls},
            nodes=start.nodes,
            storages=start.storages,
            taints=start.taints,
            outside=outside,
            returned=copies,
            differentiable=[isinstance(t, Tensor) and t.requires_grad for t in returned],
            values=values,
            structure=structure,
            numbers=range(start.number, torch_private.get_sequence_nr()),
            roots=frozenset(node._sequence_nr() for node in made_by(call.tensors)),
        )

    def _differing(self, module: nn.Module) -> set[tuple[str, str]]:
        """Attributes in which the modules of a group differ."""
        return {
            place
            for other in self._groups[id(module)]
            for place in differences(module, other) or ()
        }

    # -- repeating ---------------------------------------------------------------------------------

    def _may_stand_for(self, recording: Recording, module: nn.Module) -> bool:
        """Whether this module equals the recorded one in all that the recorded call read."""
        tape = self._tape
        path = tape.paths.of(module)
        if any(tape.paths.times(path + at) != count for at, count in recording.earlier.items()):
            return False
        if _paths(tape, recording.module) != _paths(tape, module):
            return False
        return (
            _is_alike(recording, module)
            and same_state(recording.state, held_state(recording.module))
            and recording.outside.unchanged()
        )

    def _alike(self, recording: Recording, group: Sequence[nn.Module]) -> list[nn.Module]:
        """The other modules of a group that may repeat a call, whose paths differ in numbers."""
        stack = _NUMBER.sub("#", recording.block.path)
        return [
            module
            for module in group
            if module is not recording.module
            and _NUMBER.sub("#", self._tape.paths.of(module)) == stack
            and _is_alike(recording, module)
        ]

    def _repeated(
        self, recording: Recording, module: nn.Module, call: Arguments, layers: Layers | None
    ) -> tuple[bool, Any]:
        """(True, result), with the call's block in the graph; (False, None) if it has to run."""
        tape, values, block = self._tape, self._tape.values, recording.block
        assumptions: dict[int, int] = {}
        for before, taint in zip(recording.taints, call.taints(), strict=True):
            if len(taint) != len(before):
                return False, None
            for old, new in zip(before, taint, strict=True):
                if assumptions.setdefault(old, new) != new:
                    return False, None
        nodes = call.nodes()
        if [node is None for node in nodes] != [node is None for node in recording.nodes]:
            return False, None
        path = tape.paths.of(module)
        for number in block.assumptions:
            if number not in assumptions:
                assumptions[number] = values.assume_again(number, block.path, path)
        places = dict(zip(recording.nodes, nodes, strict=True))
        places.update({node: constant_again(tape, node) for node in block.constants})
        storages = call.storages() if layers else ()
        again = RepeatedCall(block, path, source_line(4), tape.tags.storages, assumptions, storages)
        node = None
        if tape.recording and block.nodes:
            inputs = [places.get(item) or item for item in block.inputs]
            node = repeat_node(tape, inputs, again)
        include(recording.outside)
        for place, name in recording.read:
            note(module.get_submodule(place), name)
        count_again(tape, block, path)
        tape.here.after_backward = False
        (output, state), leaves = _returned(tape, recording, call.tensors, node, again)
        if call.cached is not None:
            call.cached.become(state)
        if layers is not None:
            assert node is not None
            results = {
                place: leaf
                for place, (leaf, wanted) in enumerate(
                    zip(leaves, recording.differentiable, strict=True)
                )
                if wanted and recording.block.passed[place] is None
            }
            if results:
                layers.attached(again, node, call, results)
        return True, output


def _returned(
    tape: Tape,
    recording: Recording,
    tensors: list[Tensor],
    node: fx.Node | None,
    call: RepeatedCall,
) -> tuple[Any, list[Any]]:
    """The result of the call, and its leaves."""
    leaves, contents = _copies(recording.returned, None, recording.values)
    made: set[int] = set()
    for position, (leaf, content) in enumerate(zip(leaves, contents, strict=True)):
        argument = recording.block.passed[position]
        if argument is not None:
            leaves[position] = tensors[argument]
        elif isinstance(leaf, Tensor) and id(leaf) not in made:
            if node is not None:
                index = len(made)
                spec = recording.block.results[index][2]
                storage = spec.storage + call.first_storage
                tape.tags.mark(leaf, taperecords.Tag(node, index, storage, spec.host))
                tape.tags.watch(leaf, storage)
            made.add(id(leaf))
            if content is not None:
                taint = frozenset(call.assumptions.get(a, a) for a in content[1])
                tape.values.learn_shared(leaf, recording.values, content[0], position, taint)
    return torch_private.tree_unflatten(leaves, recording.structure), leaves


def _is_alike(recording: Recording, module: nn.Module) -> bool:
    """Whether a module equals the recorded one in all that the recorded call read of it."""
    places = differences(recording.module, module)
    return places is not None and places <= recording.watched and not places & recording.read


def _paths(tape: Tape, module: nn.Module) -> list[str]:
    """The paths of the modules inside, as seen from the module; full where they are elsewhere."""
    path = tape.paths.of(module)
    paths = [tape.paths.of(part) for part in module.modules()]
    return [inner[len(path) :] if inner.startswith(f"{path}.") else inner for inner in paths[1:]]


def _modes() -> tuple[Any, ...]:
    """Torch's settings that change which ops a module runs."""
    backends: Any = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def _global_hooks() -> tuple[int, int]:
    """How many hooks watch the calls of all modules."""
    return len(torch_private.forward_pre_hooks), len(torch_private.forward_hooks)


def _copies(
    leaves: Sequence[Any],
    value_of: Callable[[Tensor], Any] | None,
    contents: Sequence[tuple[Any, frozenset[int]] | None] = (),
) -> tuple[list[Any], list[tuple[Any, frozenset[int]] | None]]:
    """Copies of the tensors among the leaves, and of their values (or of `contents`).

    Copies share memory, or are one object, where the originals are.
    """
    made: dict[int, Tensor] = {}
    memory: dict[int, Any] = {}
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if value_of is not None:
        entries = [value_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        contents = [None if entry is None else entry[:2] for entry in entries]
    with torch_private.disable_current_modes(), torch_private.DisableTorchFunction():
        for tensor in tensors:
            if id(tensor) not in made:
                key, device = trees.bytes_of(tensor), tensor.device
                if key not in memory:
                    size = tensor.untyped_storage().nbytes()
                    bare = torch.empty(size, dtype=torch.uint8, device=device)
                    memory[key] = bare.untyped_storage()
                layout = tensor.storage_offset(), tensor.shape, tensor.stride()
                empty = torch.empty(0, dtype=tensor.dtype, device=device)
                made[id(tensor)] = empty.set_(memory[key], *layout)
        copied = copy.deepcopy(list(contents), {})
    return [made.get(id(leaf), leaf) for leaf in leaves], copied
