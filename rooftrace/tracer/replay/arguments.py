"""The arguments of a module's call, and where the recording stood when it began."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from rooftrace.tracer.replay import blocks
from rooftrace.tracer.replay.blocks import RecordedCall
from rooftrace.tracer.replay.sameness import PLAIN, has_hooks, held_state, modules_below, same_state
from rooftrace.tracer.source import source_line
from rooftrace.tracer.tape import Tape, records
from rooftrace.tracer.tensors import own_tensors, trees


class Arguments:
    """The arguments of a module's call and the module's own tensors."""

    def __init__(self, tape: Tape, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._tape, self._module = tape, module
        self._leaves, self._structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.look = self._look()  # equal calls have equal looks; None: unknown

    @cached_property
    def own(self) -> list[Tensor]:
        """The module's own tensors."""
        parts = modules_below(self._module)
        return [tensor for _, part, _ in parts for tensor in own_tensors(part)]

    def _look(self) -> Any:
        plain = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        if not all(type(leaf) in PLAIN for leaf in plain):
            return None
        everything = self.all
        for tensor in everything:
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return None
        kinds = [type(leaf) for leaf in self._leaves]
        objects: dict[int, int] = {}
        memory: dict[int, int] = {}
        nodes: dict[Any, int] = {}
        looks = []
        for tensor in everything:
            made = self._tape.tags.made_by(tensor)
            looks.append(
                (
                    tuple(tensor.shape),
                    tensor.stride(),
                    tensor.storage_offset(),
                    tensor.dtype,
                    tensor.device,
                    tensor.requires_grad,
                    objects.setdefault(id(tensor), len(objects)),
                    memory.setdefault(trees.bytes_of(tensor), len(memory)),
                    made and nodes.setdefault(made[:2], len(nodes)),
                    self._value(tensor),
                    self._cast_before(made and made[0]),
                )
            )
        return tuple(plain), tuple(kinds), tuple(looks), self._structure

    def _value(self, tensor: Tensor) -> Any:
        entry = self._tape.values.held(tensor)
        if entry is None:
            return None
        value = tensor if tensor.device.type == "cpu" else entry.value
        if not isinstance(value, Tensor):
            return value.signature
        return self._tape.values.results.once(value, "content", _content)

    @staticmethod
    def _cast_before(node: fx.Node | None) -> bool:
        """Whether autocast may have cast this weight already: it casts each weight once."""
        return node is not None and torch.is_autocast_enabled("cuda") and bool(node.users)

    @property
    def all(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, and the module's own."""
        return (*self.tensors, *self.own)

    def nodes(self) -> list[fx.Node | None]:
        """The nodes of the arguments and of the module's own tensors."""
        if not self._tape.recording:
            return []
        tape = self._tape
        return [tape.node_of(tensor) if tape.tags.has(tensor) else None for tensor in self.all]

    def storages(self) -> list[int | None]:
        """The storage numbers of the arguments and of the module's own tensors."""
        tags = (self._tape.tags.of(tensor) for tensor in self.all)
        return [None if tag is None else tag.storage for tag in tags]

    def taints(self) -> list[list[int]]:
        """The assumptions that the arguments rest on."""
        entries = map(self._tape.values.held, self.tensors)
        return [[] if entry is None else sorted(entry.taint) for entry in entries]

    def versions(self) -> list[int]:
        """The number of writes to each tensor."""
        return [0 if t.is_inference() else t._version for t in self.all]

    def same_arguments(self, args: Any, kwargs: Any) -> bool:
        """Whether the containers among the arguments hold what they held."""
        leaves, structure = tree_flatten((args, kwargs))
        return structure == self._structure and same_state(self._leaves, leaves)


class Beginning:
    """The state of the recording when a module's call began."""

    def __init__(self, tape: Tape, module: nn.Module, call: Arguments) -> None:
        self._tape, self.module, self.call = tape, module, call
        self.nodes, self.state = call.nodes(), held_state(module)
        self.storages = call.storages()
        self.calls = dict(tape.paths.counts)
        self._node = next(iter(reversed(tape.graph.nodes)), None)
        self._storages = tape.tags.storages
        self._assumptions = len(tape.values.assumptions)
        self._source = source_line(4)
        self.number = torch._C._autograd._get_sequence_nr()  # of the next autograd node
        self._outside = self._now()

    def _now(self) -> Any:
        tape = self._tape
        seen = tape.values.decisions, tape.values.computed, tape.threads.entered
        return seen, self.call.versions(), _random_states(tape)

    def unchanged(self) -> bool:
        """Whether nothing outside of the graph was drawn, decided or written since."""
        same = same_state(self.state, held_state(self.module)) and not has_hooks(self.module)
        return same and bool(self._now() == self._outside)

    def block(self, returned: Sequence[Any], trained: bool) -> RecordedCall | None:
        """The block of ops recorded since; None where a later call could not repeat it.

        returned: the leaves of the call's result.  trained: autograd holds what backward reads.
        """
        tape = self._tape
        nodes = list(blocks.nodes_since(tape.graph, self._node))
        leaves = self._leaves(returned)
        calls = self._calls_inside()
        if leaves is None or calls is None:
            return None
        passed, results = leaves
        made = [spec.storage for *_, spec in results]
        if not trained and blocks.holds_others(tape, self._storages, nodes, made):
            return None
        inputs = blocks.read_from_outside(nodes)
        if blocks.writes_outside(nodes, self._storages) or any(
            node.op == "call_function" and node not in self.nodes for node in inputs
        ):
            return None
        if any(node.op != "call_function" for node in nodes):
            return None
        path = tape.paths.of(self.module)
        new = range(self._assumptions, len(tape.values.assumptions))
        return RecordedCall(
            path=path,
            call=tape.paths.times(path) - 1,
            source=self._source,
            nodes=tuple(nodes),
            inputs=tuple(inputs),
            passed=tuple(passed),
            results=tuple(results),
            first_storage=self._storages,
            storages=tape.tags.storages - self._storages,
            calls=calls,
            assumptions=tuple(sorted(blocks.taint_of(nodes).union(new))),
            origin=blocks.first_origin(nodes),
        )

    def _leaves(
        self, returned: Sequence[Any]
    ) -> tuple[list[int | None], list[tuple[fx.Node, int | None, records.Spec]]] | None:
        """`passed` and `results` of a RecordedCall; None for leaves that cannot be made again."""
        tape = self._tape
        positions = {id(tensor): place for place, tensor in enumerate(self.call.tensors)}
        passed: list[int | None] = []
        results: list[tuple[fx.Node, int | None, records.Spec]] = []
        seen: set[int] = set()
        for leaf in returned:
            passed.append(positions.get(id(leaf)) if isinstance(leaf, Tensor) else None)
            if isinstance(leaf, Tensor) and passed[-1] is None:
                if type(leaf) is not Tensor or leaf.layout is not torch.strided:
                    return None
                if tape.recording and id(leaf) not in seen:
                    seen.add(id(leaf))
                    made = tape.tags.made_by(leaf)
                    if made is None or made[2].storage <= self._storages:
                        return None
                    node, index, spec = made
                    results.append(
                        (node, index, replace(spec, storage=spec.storage - self._storages))
                    )
            elif not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
                return None
        return passed, results

    def _calls_inside(self) -> dict[str, int] | None:
        """Calls since of each module inside, by path below; None if another module was called."""
        path = self._tape.paths.of(self.module)
        calls = {
            inner: count - self.calls.get(inner, 0)
            for inner, count in self._tape.paths.counts.items()
            if count != self.calls.get(inner, 0)
        }
        if any(inner != path and not inner.startswith(f"{path}.") for inner in calls):
            return None
        return {inner[len(path) :]: count for inner, count in calls.items()}


def _content(tensor: Tensor) -> Any:
    with _disable_current_modes():
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = plain.clone(memory_format=torch.contiguous_format)  # one element may have stride 0
        return hash(bytes(plain.reshape(-1).view(torch.uint8).numpy()))


def _random_states(tape: Tape) -> Any:
    """The states of the random number generators that Python code draws from."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if tape.generators is not None:
            return tape.generators.states()
        drawn = torch.default_generator.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy else None
    return random.getstate(), drawn, state and (state[1].tobytes(), *state[2:])
