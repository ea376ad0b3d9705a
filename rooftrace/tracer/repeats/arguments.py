"""Comparison of modules and of the arguments of their calls, to tell which calls repeat."""

from __future__ import annotations

import hashlib
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from rooftrace.tracer import source_line, torch_private
from rooftrace.tracer.recording import Tape, taperecords
from rooftrace.tracer.repeats import blocks
from rooftrace.tracer.repeats.blocks import RecordedCall
from rooftrace.tracer.repeats.outside import CachedLayer
from rooftrace.tracer.values import masks, own_tensors, trees

# -- alike modules ---------------------------------------------------------------------------------
# Whether two modules are the same to their code: it could not tell their calls apart.

PLAIN: tuple[type, ...] = (*trees.PLAIN, torch.Size)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 8
"""How deep plain objects among the attributes are compared."""
_REACH = 12
"""How deep in attributes a change is seen."""
_CONTAINERS = (dict, OrderedDict, list, tuple)
"""Containers that hold nothing but their items."""
_PLAIN = frozenset(PLAIN)
_BARE = frozenset((*_CONTAINERS, set))
"""Containers that, empty, are all equal: most attributes of modules are such or plain."""
_WHOLE = (*PLAIN, Tensor, nn.Module, type)
"""Types of values that are not looked into."""
_ABSENT = object()


def build_of(module: nn.Module, builds: Mapping[int, Any]) -> Any:
    """How a module is built, equal for equal builds; None where a hook watches its calls."""
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return None
    children = []
    for name, child in module._modules.items():
        build = None if child is None else builds.get(id(child), _ABSENT)
        if build is _ABSENT or (child is not None and build is None):
            return None
        children.append((name, build))
    tensors = tuple(
        (name, None if t is None else _look(t))
        for group in (module._parameters, module._buffers)
        for name, t in group.items()
    )
    stored = tuple(masks.stored_in(module).items())
    return hash((type(module), module.training, tensors, stored, tuple(children)))


def of_one_build(root: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules inside that have one build, where there are several, in order.

    Of torch's own only those of transformers: the others call an op or two.
    """
    builds: dict[int, Any] = {}
    by_build: dict[Any, list[nn.Module]] = {}
    for module in reversed(trees.modules_in(root)):
        build = builds[id(module)] = build_of(module, builds)
        home = type(module).__module__
        small = home.startswith("torch.") and home != nn.TransformerEncoderLayer.__module__
        if not small and build is not None:
            by_build.setdefault(build, []).append(module)
    yield from (equal[::-1] for equal in by_build.values() if len(equal) > 1)


def differences(module: nn.Module, other: nn.Module) -> frozenset[tuple[str, str]] | None:
    """Attributes in which two modules of one build differ, by path below; None if more differs."""
    parts, twins = modules_below(module), modules_below(other)
    if [(path, first) for path, _, first in parts] != [(path, first) for path, _, first in twins]:
        return None
    paths = set()
    places = {id(mine): theirs for (_, mine, _), (_, theirs, _) in zip(parts, twins, strict=True)}
    for (path, mine, _), (_, theirs, _) in zip(parts, twins, strict=True):
        fields, others = vars(mine), vars(theirs)
        if type(mine) is not type(theirs) or fields.keys() != others.keys():
            return None
        for name, value in fields.items():
            twin = others[name]
            if value is twin or name in _STRUCTURE or _both_bare(value, twin):
                continue
            both = isinstance(value, Tensor) and isinstance(twin, Tensor)
            if not (_look(value) == _look(twin) if both else _same(value, twin, places)):
                paths.add((path, name))
    return frozenset(paths)


def modules_below(module: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """Modules inside by every path below, with a number for each module; its paths share it."""
    numbers: dict[int, int] = {}
    return [
        (path, part, numbers.setdefault(id(part), len(numbers)))
        for path, part in trees.paths_in(module)
    ]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the calls of this module or of one inside."""
    return any(getattr(part, hooks, None) for part in module.modules() for hooks in _HOOKS)


def _look(tensor: Tensor) -> Any:
    spec = tensor._spec if _is_shard(tensor) else None  # type: ignore[attr-defined]
    return type(tensor), *trees.look_of(tensor), tensor.device, spec


def _is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a part of one that a mesh holds (a DTensor)."""
    return type(tensor).__name__ == "DTensor"


def _same(value: Any, other: Any, places: Mapping[int, nn.Module], depth: int = _DEPTH) -> bool:
    """Whether no code could tell two attributes apart, but by identity.

    places: for each module by its id the one in whose place it stands.
    """
    if value is other or _both_bare(value, other):
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, PLAIN):
        return bool(value == other)
    if isinstance(value, nn.Module):
        return places.get(id(value)) is other
    if depth == 0 or isinstance(value, Tensor):
        return False
    same = partial(_same, places=places, depth=depth - 1)
    held, others = _held_by(value), _held_by(other)
    if any(held):  # under gradients, what it calls may hold more than a layer's own
        alike = not torch.is_grad_enabled() and len(held[1]) == len(others[1])
        return alike and all(map(same, held[0] + held[1], others[0] + others[1]))
    if type(value) in (set, frozenset, range, slice, bytes):
        return bool(value == other)
    if isinstance(value, (list, tuple)):
        equal = len(value) == len(other) and all(map(same, value, other))
    elif isinstance(value, dict):
        equal = list(value) == list(other) and all(same(a, other[key]) for key, a in value.items())
    else:
        equal = _is_simple(value)
    return equal and same(getattr(value, "__dict__", 0), getattr(other, "__dict__", 0))


def _both_bare(value: Any, other: Any) -> bool:
    """Whether both are empty containers of one type."""
    return type(value) in _BARE and type(value) is type(other) and not value and not other


def _held_by(function: Any) -> tuple[list[Any], list[Any]]:
    """The parts of a function, bound method or partial: those that never change, and others."""
    if type(function) is partial:
        return [], [function.func, function.args, function.keywords]
    if isinstance(function, MethodType):
        return [function.__func__], [function.__self__]
    if not isinstance(function, FunctionType):
        return [], []
    cells = map(trees.cell_content, function.__closure__ or ())
    fixed = [function.__code__, function.__globals__, function.__defaults__]
    return [*fixed, function.__kwdefaults__], [function.__dict__, *cells]


class _Simple:
    """A plain object: all its state is in its `__dict__`."""


def _is_simple(value: Any) -> bool:
    return type(value).__basicsize__ == _Simple.__basicsize__ and hasattr(value, "__dict__")


def held_state(module: nn.Module) -> list[Any]:
    """The state that a call could change: attributes of the modules inside, and their contents."""
    state: list[Any] = []
    seen: set[int] = set()
    for part in module.modules():
        _collect(vars(part), _REACH, seen, state)
    return state


def _collect(value: Any, depth: int, seen: set[int], state: list[Any]) -> None:
    kind = type(value)
    if kind in _PLAIN or (kind in _BARE and not value):
        state.append(value)
        return
    # Tensors by reference: their lifetime is part of the recording.
    state.append(weakref.ref(value) if isinstance(value, Tensor) else value)
    if depth == 0 or id(value) in seen or isinstance(value, _WHOLE):
        return
    seen.add(id(value))
    if callable(value) and not _is_simple(value):
        for item in _held_by(value)[1]:
            _collect(item, depth - 1, seen, state)
        return
    if isinstance(value, dict):
        for key, item in value.items():
            state.append(key)
            _collect(item, depth - 1, seen, state)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            _collect(item, depth - 1, seen, state)
    if type(value) not in _CONTAINERS and hasattr(value, "__dict__"):
        _collect(vars(value), depth - 1, seen, state)


def same_state(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


# -- arguments -------------------------------------------------------------------------------------


_GONE = torch.empty(0)  # stands for a tensor that was let go


class Arguments:
    """The arguments of a module's call and the tensors of the module.

    cached: the layer of a cache among the arguments that the call may read and change.  Its tensors
    count as arguments; the cache alone holds them.
    """

    def __init__(self, tape: Tape, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._tape, self._module = tape, module
        self._leaves, self._structure = torch_private.tree_flatten((args, kwargs))
        self._given = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        others = [x for x in self._leaves if not isinstance(x, Tensor) and type(x) not in PLAIN]
        self.cached = CachedLayer.of(module, others[0]) if len(others) == 1 else None
        state = self.cached.state.values() if self.cached else ()
        self._state = [weakref.ref(item) for item in state if isinstance(item, Tensor)]
        self.look = self._look()  # equal calls have equal looks; None: unknown

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, and those that their cache held."""
        held = (reference() for reference in self._state)
        return [*self._given, *(_GONE if tensor is None else tensor for tensor in held)]

    @cached_property
    def module_tensors(self) -> list[Tensor]:
        """The tensors of the module."""
        parts = modules_below(self._module)
        tensors = (tensor for _, part, _ in parts for tensor in own_tensors(part))
        return [trees.parts_of(t)[0][0] if _is_shard(t) else t for t in tensors]

    def _look(self) -> Any:
        leaves, cached = self._leaves, self.cached
        if cached is not None:
            leaves = [cached.kind if leaf is cached.cache else leaf for leaf in leaves]
            leaves += [item for name in cached.state.items() for item in name]
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if not all(type(x) in PLAIN or (cached and x is cached.kind) for x in plain):
            return None
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in self.tensors[len(self._given) :]
        ):
            return None
        everything = self.all
        for tensor in everything:
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                return None
        kinds = [type(leaf) for leaf in leaves]
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
        """The tensors of the arguments, and those of the module."""
        return (*self.tensors, *self.module_tensors)

    def nodes(self) -> list[fx.Node | None]:
        """The nodes of the arguments and of the module's tensors."""
        if not self._tape.recording:
            return []
        tape = self._tape
        return [tape.node_of(tensor) if tape.tags.has(tensor) else None for tensor in self.all]

    def storages(self) -> list[int | None]:
        """The storage numbers of the arguments and of the module's tensors."""
        tags = (self._tape.tags.of(tensor) for tensor in self.all)
        return [None if tag is None else tag.storage for tag in tags]

    def taints(self) -> list[list[int]]:
        """The assumptions that the arguments rest on."""
        entries = map(self._tape.values.held, self.tensors)
        return [[] if entry is None else sorted(entry.taint) for entry in entries]

    def versions(self) -> list[int]:
        """The number of writes to each tensor; a cache is seen to write to none that it held."""
        tensors = (*self._given, *self.module_tensors)
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def same_arguments(self, args: Any, kwargs: Any) -> bool:
        """Whether the containers among the arguments are unchanged."""
        leaves, structure = torch_private.tree_flatten((args, kwargs))
        return structure == self._structure and same_state(self._leaves, leaves)


class Beginning:
    """The state of the recording when a module's call began."""

    def __init__(self, tape: Tape, module: nn.Module, call: Arguments) -> None:
        self._tape, self.module, self.call = tape, module, call
        self.nodes, self.state = call.nodes(), held_state(module)
        self.storages, self.taints = call.storages(), call.taints()
        self.calls = dict(tape.paths.counts)
        self._node = next(iter(reversed(tape.graph.nodes)), None)
        self._storages = tape.tags.storages
        self._assumptions = len(tape.values.assumptions)
        self._source = source_line(4)
        self.number = torch_private.get_sequence_nr()  # of the next autograd node
        self._outside = self._now()

    def _now(self) -> Any:
        tape = self._tape
        seen = tape.values.decisions, tape.values.computed, tape.threads.entered
        return seen, self.call.versions(), _random_states(tape)

    def unchanged(self) -> bool:
        """Whether nothing outside of the graph was drawn, decided or written since."""
        same = same_state(self.state, held_state(self.module)) and not has_hooks(self.module)
        return same and bool(self._now() == self._outside)

    def wrote(self) -> bool:
        """Whether a tensor of the arguments or of the module was written in place since."""
        return bool(self.call.versions() != self._outside[1])

    def block(self, returned: Sequence[Any], trained: bool) -> RecordedCall | None:
        """The block of ops recorded since; None where a later call could not repeat it.

        returned: the leaves of the call's result.  trained: autograd holds tensors for backward.
        """
        tape = self._tape
        recorded = list(blocks.nodes_since(tape.graph, self._node))
        constants = [node for node in recorded if blocks.constant_of(tape, node) is not None]
        nodes = [node for node in recorded if node not in constants]
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
            constants=tuple(constants),
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
    ) -> tuple[list[int | None], list[tuple[fx.Node, int | None, taperecords.Spec]]] | None:
        """`passed` and `results` of a RecordedCall; None for leaves that cannot be made again."""
        tape = self._tape
        positions = {id(tensor): position for position, tensor in enumerate(self.call.tensors)}
        passed: list[int | None] = []
        results: list[tuple[fx.Node, int | None, taperecords.Spec]] = []
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


def _content(tensor: Tensor) -> bytes:
    with torch_private.disable_current_modes():
        plain = tensor.detach().resolve_conj().resolve_neg()
        plain = plain.contiguous()
        flat = plain.as_strided((plain.numel(),), (1,))  # one element may have another stride
        content: Any = flat.view(torch.uint8).numpy()
        return hashlib.sha1(content, usedforsecurity=False).digest()


def _random_states(tape: Tape) -> Any:
    """The states of the random number generators that Python code draws from."""
    with torch_private.disable_current_modes(), torch_private.DisableTorchFunction():
        if tape.generators is not None:
            return tape.generators.states()
        drawn = torch.default_generator.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy.random")
    state = numpy.get_state() if numpy else None
    return random.getstate(), drawn, state and (state[1].tobytes(), *state[2:])
