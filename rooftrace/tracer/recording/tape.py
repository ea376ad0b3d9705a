"""The tape of a recording: ops as an fx graph, with their origins and the paths of modules."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from rooftrace.graph import UNRECORDED, Collective, Group, marks, pattern_of
from rooftrace.tracer import source_line, torch_private
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.recording.entries import Entries
from rooftrace.tracer.recording.library import FROM_HOST, TO_HOST
from rooftrace.tracer.recording.ops import Call
from rooftrace.tracer.recording.taperecords import (
    LEFT_OUT,
    META_KEY,
    NO_TAINT,
    CompiledCall,
    LoopWatch,
    Origin,
    Recomputation,
    Recorded,
    RecordedThreads,
    Shards,
    Spec,
    Tag,
    Tags,
    ThreadPosition,
    compiling,
    running_node,
)
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.values import META, Values, masks, trees

# -- origins ---------------------------------------------------------------------------------------
# Where an op comes from: its module, the part of the step, the function and the source line.
#
# In backward the origin is that of the forward op which the running autograd node differentiates;
# both carry the number of the node.


class Origins:
    """Finds the origins of the ops of one recording."""

    def __init__(self, here: ThreadPosition, entries: Entries) -> None:
        self._here, self._entries = here, entries
        self.recomputation = Recomputation()
        self._last: CompiledCall | None = None  # in which the last kernel ran
        self._said: Origin | None = None  # of every op
        self._by_number: dict[int, Origin] = {}  # of the op of an autograd node
        # By line and op: the modules that ran it, each with the number of the call.
        self._by_source: dict[tuple[str, str], dict[str, int]] = {}

    def origin(self, name: str, loop: tuple[int, int] | None) -> Origin:
        """The origin of the op of this name, which is running.

        loop: the turn of a loop that is running (see `Origin`).
        """
        if self._said is not None:
            return self._said
        here = self._here
        part = self._part_of_own_step(name) if self._entries.own_step else here.part
        compiled = compiling.call
        if part == "optimizer":
            line = source_line(4) if self._entries.own_step else ""
            return Origin("", 0, part, here.function, line, compiled=compiled)
        if part == "backward":
            if not self._runs_again():
                return self._of_backward(compiled)
            compiled = compiled or self._of_backward(None).compiled
            part = "recompute"
        source = source_line(4) or here.source
        if here.stack:
            path, call = here.stack[-1]
        elif part == "recompute":
            path, call = self._of_recomputed(source, name)
        else:
            path, call = "", 0
        origin = Origin(path, call, part, here.function, source, loop, compiled)
        if part == "forward":
            self._by_source.setdefault((source, name), {})[path] = call
        self.note(origin)
        return origin

    @contextlib.contextmanager
    def all_from(self, origin: Origin) -> Iterator[None]:
        """Inside, this is where ops come from: they run again, apart from their code."""
        before, self._said = self._said, origin
        try:
            yield
        finally:
            self._said = before

    def _of_recomputed(self, source: str, name: str) -> tuple[str, int]:
        """The module, and the call, of an op that a checkpoint's function runs outside of modules.

        Of the modules that ran this op at this line in forward it is the nearest to the op that the
        running node differentiates, which is in the same checkpoint.
        """
        ran = self._by_source.get((source, name), {})
        steps = self._of_backward(None).module.split(".")
        best, shared = "", -1
        for path in ran:  # the last one of equals
            parts = path.split(".") if path else []
            pairs = zip(parts, steps, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if same >= shared:
                best, shared = path, same
        return best, ran.get(best, 0)

    def note(self, origin: Origin) -> None:
        """Remember the origin of the last op by autograd number; the first op of a number counts.

        The autograd node of an op exists before the op runs and has the newest number.
        Later ops without a node (integers, a kernel's inner ops) see the same number.
        """
        self._by_number.setdefault(torch_private.get_sequence_nr() - 1, origin)

    def name(self, number: int, path: str) -> None:
        """Ops of the autograd node of this number belong to the module at `path`."""
        self._by_number[number] = Origin(path)

    def _runs_again(self) -> bool:
        """Whether the running autograd node has called forward code: a module, or code that turned
        gradients on.  False before the engine starts, when it gets its first gradients."""
        node = running_node()
        if node is None:
            return False
        calls = self._here.called_for
        return (bool(calls) and calls[-1] == node) or self.recomputation.active(node)

    def _part_of_own_step(self, name: str) -> str:
        """The part of the running op in a step that does not name its parts."""
        here = self._here
        if here.part != "forward":
            return here.part
        if torch_private.current_autograd_node() is not None:
            return "backward"
        # Clipping, scaling and averaging stand between backward and step, outside of modules.
        # So do exchanges of weights that each process has stepped a part of.
        outside = not torch.is_grad_enabled() or name.startswith("c10d.")
        updates = here.after_backward and not here.stack and outside
        return "optimizer" if updates else "forward"

    def _of_backward(self, compiled: CompiledCall | None) -> Origin:
        """The origin of the forward op that the running autograd node differentiates.

        compiled: the call of a compiled callable that runs now, which a hook may have begun.
        """
        node: Any = torch_private.current_autograd_node()
        if node is None:
            return Origin("", 0, "backward", self._here.function, compiled=compiled)
        name = node.name()
        number = node._sequence_nr()
        if name.endswith("CopySlices"):
            number -= 1  # wraps the node of the op that wrote into a view, made just before it
        origin = self._by_number.get(number)
        if origin is not None:
            compiled = compiled if compiled is LEFT_OUT else origin.compiled or compiled
            return replace(origin, part="backward", function=name, compiled=compiled)
        variable = getattr(node, "variable", None)
        owner = "" if variable is None else self._entries.name_of(variable).rpartition(".")[0]
        compiled = compiled or self._last  # gradients leave compiled code when all of it has run
        return Origin(trees.shown_path(owner), 0, "backward", name, compiled=compiled)

    def noted(
        self, facts: Mapping[str, Any] | None, origin: Origin, aside: bool | str
    ) -> Mapping[str, Any]:
        """The facts of an op that is recorded now, with the compiled callable in which it runs, and
        whether it is the first of a call.

        aside: the op is a view, or on another stream than the main one, whose name this is.
        """
        before, call = self._last, origin.compiled
        if call is None or call is LEFT_OUT:
            self._last = before if aside else None
            return facts or {}
        self._last = call
        compiled = {marks.COMPILED: call.name} | ({} if call is before else {marks.ENTERS: True})
        return {**(facts or {}), **compiled}

    def compiled_here(self) -> tuple[str, bool] | None:
        """The compiled callable that an op would be in now, and whether it would begin a call."""
        call = compiling.call
        return None if call is None else (call.name, call is not self._last)

    def compiled_repeated(self) -> None:
        """Ops that ran here are recorded by reference to equal ones."""
        self._last = compiling.call


# -- tape ------------------------------------------------------------------------------------------
# The tape: ops become an fx graph, with a record of each.
#
# A tape does not know how ops come to it (recording/recorder is the mode that sees them) and
# prices nothing; `lower` turns its graph into plain records.


_ON_HOST = (
    "ops on tensors in the memory of the host run there: the time of their work is not counted"
)


class Tape:
    """The ops and tensors that one recording has recorded so far.

    record=False keeps only known values (to build modules).
    """

    hands_on_calls = False  # True: calls of modules come to another part of rooftrace first

    def __init__(self, values: Values, record: bool) -> None:
        self.values = values
        self.here = ThreadPosition()
        self.lock = threading.RLock()  # ops are recorded one at a time
        self.live = False  # the recording is under way
        self.threads = RecordedThreads()
        self.rolling = LoopWatch()
        self.generators: Generators | None = None  # None: the code draws from the process's
        self.begin(record)

    def begin(self, record: bool) -> None:
        """Begin another, empty graph; `record`: whether ops enter it."""
        self._records = record
        self.graph = fx.Graph()
        self.here.restart()
        self.paths = Paths()
        self.tags = Tags(self.values)
        self.entries = Entries(self.graph, self.values, self.tags, self.here)
        self.origins = Origins(self.here, self.entries)
        self.shards = Shards()
        self.packed: dict[int, tuple[Any, list[Tensor]]] = {}  # weights of TorchScript, unpacked

    # -- where the running thread stands -----------------------------------------------------------

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Switch the dispatch mode on inside; torch switches it off while it handles an op."""
        overrides.push(self)
        self.here.inside += 1
        try:
            yield
        finally:
            self.here.inside -= 1
            overrides.pop(self)

    def backward_ran(self) -> None:
        """A backward of the user's has run in this thread, and no module since."""
        self.here.after_backward = True

    @property
    def recording(self) -> bool:
        """Whether ops that this thread runs now enter the graph."""
        return self._records and not self.here.paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside are run and their values followed, but they do not enter the graph.

        That holds for this thread and for threads that it starts inside; others are recorded.
        """
        here = self.here
        before, here.paused = here.paused, True
        try:
            yield
        finally:
            here.paused = before

    # -- tensors -----------------------------------------------------------------------------------

    def name_modules(self, root: nn.Module) -> None:
        """Use the dotted paths of `root` for its modules and the tensors that they hold."""
        named = trees.paths_in(root)
        self.paths.name(named)
        for path, module in named:
            self.entries.name_tensors(module, f"{path}." if path else "", self.recording)

    def name_of(self, parameter: Tensor) -> str:
        """The dotted name of a parameter ("" for a tensor that is none)."""
        return self.entries.name_of(parameter)

    def enter(self, tensor: Tensor, kind: str, name: str) -> None:
        """Make `tensor`, or the tensors inside it, a value of the graph that no op made (once)."""
        if self.recording:
            self.entries.enter(tensor, kind, name)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The fx node of `tensor`; an unknown tensor enters the graph."""
        return self.entries.node_of(tensor)

    def storage_of(self, tensor: Tensor) -> int | None:
        """The storage number of a tensor that the graph knows; of a sparse one's values."""
        self.tags.recognise([part := trees.parts_of(tensor)[0][0]])
        return tag.storage if (tag := self.tags.of(part)) else None

    def brought(self, data: Tensor) -> Tensor:
        """The meta stand-in for a host tensor that fills a weight."""
        plain = type(data) in trees.ORDINARY and data.layout is torch.strided
        if data.device.type != "cpu" or not plain:
            return data
        with torch_private.disable_current_modes():
            empty = torch.empty_like(data, device=META, requires_grad=False)
        return self.entries.brought(data, empty)

    def stands_for(self, tensor: Tensor, other: Tensor) -> None:
        """Follow `tensor.data = other`: `tensor` now stands for the value of `other`."""
        if isinstance(tensor, trees.LAZY):
            return  # it becomes a parameter, and has no bytes until then
        tags, entries = self.tags, self.entries
        tags.recognise([other])
        if not tags.has(other) and (entries.name_of(tensor) or entries.place_of(tensor)[1]):
            tags.mark(tensor, None)  # entered by its name where something reads it
        elif self.recording and tags.has(tensor):
            self.node_of(other)
        tags.same_as(tensor, other)
        tensor.__dict__.pop(masks.REAL, None)
        if masks.REAL in other.__dict__:
            tensor.__dict__[masks.REAL] = other.__dict__[masks.REAL]
        entry = self.values.held(other)
        tensor.__dict__.pop(self.values.key, None)
        if entry is not None and tensor.device.type == "meta":
            self.values.learn(tensor, entry.value, entry.taint)

    # -- ops ---------------------------------------------------------------------------------------

    def record(
        self,
        call: Call,
        outputs: Sequence[Tensor],
        *,
        single: bool = False,
        sync: bool = False,
        facts: Mapping[str, Any] | None = None,
        taint: frozenset[int] = NO_TAINT,
        together: tuple[Collective, Group] | None = None,
    ) -> None:
        """Add one call to the graph, if recording.

        single: it returns a tensor, not a list.  sync: the host waits for it.  facts: counts that
        its cost rule needs.  taint: the assumptions that its outputs rest on.  together: its
        exchange with other processes, and their group.
        """
        if sync:
            self.rolling.depends()
        if not self.rolling.saw(call, outputs) or not self.recording:
            return
        there = call.func is not FROM_HOST and self.tags.all_on_host(call.tensors)
        if there and sync:
            return  # the host reads its own memory
        if there and not call.info.view:  # by the code's will, else what follows is of any device
            there = bool(self.tags.hosts)
            if there:
                self.values.assume(UNRECORDED, _ON_HOST)
        host = there or call.func is TO_HOST
        node = self._node(call)
        written = call.written()
        specs, sparse = self._outputs(call, node, outputs or written, bool(outputs), single, host)
        if single:
            for tensor in written:
                tag = self.tags.of(tensor)
                self.tags.mark(tensor, Tag(node, None, tag.storage if tag else 0, host))
        origin = self.origins.origin(call.info.name, self.rolling.label)
        where = fsdp.current_stream(), self.shards.exchanged(together)
        view = call.info.view or there
        noted = self.origins.noted(facts, origin, view or where[0]), taint | sparse
        node.meta[META_KEY] = Recorded(specs, origin, view, sync, *noted, *where)
        self.tags.last = node

    def _node(self, call: Call) -> fx.Node:
        """A node for a call.

        fx looks through the arguments of a new node for symbolic sizes, which none of ours is: they
        are set afterwards.
        """
        arguments = tuple([self._argument(item) for item in call.args])
        named = {name: self._argument(item) for name, item in call.kwargs.items()}
        node = self.graph.create_node("call_function", call.func, name=call.info.name)
        node.args = arguments
        if named:
            node.kwargs = named
        return node

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.entries.node_of(item)
        if isinstance(item, (list, tuple)):
            return [self._argument(x) for x in item]
        return item

    def _outputs(
        self,
        call: Call,
        node: fx.Node,
        outputs: Sequence[Tensor],
        returned: bool,
        single: bool,
        host: bool,
    ) -> tuple[tuple[Spec, ...], frozenset[int]]:
        """The Specs of a node's outputs, and the assumption about sparse ones.

        returned: the op returns the outputs; else it writes them in place (_foreach_add_).  host:
        their bytes lie in the memory of the host.
        """
        tags, sparse = self.tags, NO_TAINT
        owned = self._storages_read(call) if call.info.may_alias else {}
        specs = []
        for index, output in enumerate(outputs):
            storage = owned.get(trees.bytes_of(output)) if owned else None
            if unlike := output.layout is not torch.strided:
                storage = self.storage_of(output)
                sparse |= NO_TAINT if storage is not None else {self.entries.say_sparse()}
            joined = unlike and storage is not None
            if storage is None:
                storage = tags.new_storage()
                tags.watch(output, storage)
            specs.append(Spec.of(output, storage, joined, host))
            if returned:
                tag = Tag(node, None if single else index, storage, host)
                tags.mark(output, tag)
                tags.remember(output, tag)
        return tuple(specs), sparse

    def _storages_read(self, call: Call) -> dict[int, int]:
        """The storage numbers of the arguments, by their bytes."""
        tensors = trees.listed([*call.args, *call.kwargs.values()])
        tags = ((tensor, self.tags.of(tensor)) for tensor in tensors)
        return {trees.bytes_of(tensor): tag.storage for tensor, tag in tags if tag is not None}

    # -- afterwards --------------------------------------------------------------------------------

    def close(self) -> None:
        """Take our marks off tensors that outlive the recording."""
        self.entries.close()
        self.tags.forget_places()
        self.values.close()

    def forget(self) -> None:
        """Free the memory of the graph after it is lowered.

        Its nodes refer to each other, and the collector of cycles is off while a model is traced.
        """
        self.tags.last_held.clear()
        self.entries.leaves.forget()
        self.tags.last = None
        graph, self.graph = self.graph, fx.Graph()
        for node in (*graph.nodes, graph._root):
            node.meta.clear()
            node.users.clear()
            node._input_nodes.clear()
            for name, nothing in (("_args", ()), ("_kwargs", {}), ("_prev", None), ("_next", None)):
                object.__setattr__(node, name, nothing)
        graph._graph_namespace._obj_to_name.clear()
        graph._find_nodes_lookup_table.table.clear()


# -- generators ------------------------------------------------------------------------------------
# The interface of random generators that belong to one recording.


class Generators(Protocol):
    """Generators in place of the process's, in the threads of a recording."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on the host that draws random numbers."""

    def states(self) -> Any:
        """The states of the generators: equal only where nothing was drawn between."""


# -- paths -----------------------------------------------------------------------------------------
# Modules: their dotted paths, and how often each was called.


class Paths:
    """The modules of one recording."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}  # the name of the class of each module, by path
        self._paths: dict[int, str] = {}  # by identity
        self._transparent: set[int] = set()  # wrappers that are not shown
        self.counts: dict[str, int] = {}  # how often each module was called, by path
        self.lines: dict[str, str] = {}  # of the first call, by path with indices starred

    def name(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Use the dotted paths of modules.

        A wrapper made by torch.compile is not shown: its module stands in its place.
        """
        for path, module in named:
            shown = trees.shown_path(path)
            if "_orig_mod" in module._modules:
                self._transparent.add(id(module))
            else:
                self._paths.setdefault(id(module), shown)
                self.kinds.setdefault(shown, trees.class_name(module))

    def is_transparent(self, module: nn.Module) -> bool:
        """Whether a module is a wrapper that is not shown."""
        return id(module) in self._transparent

    def is_named(self, module: nn.Module) -> bool:
        """Whether a module has a path."""
        return id(module) in self._paths

    def of(self, module: nn.Module) -> str:
        """The dotted path of a module; "" where it has none."""
        return self._paths.get(id(module), "")

    def times(self, path: str) -> int:
        """Number of calls so far of the module at this path."""
        return self.counts.get(path, 0)

    def called(self, module: nn.Module, parent: str) -> tuple[str, int]:
        """Count a call: the path of the module, and how often it was called before.

        parent: the path of the module that calls it.  A module without a path gets the name of its
        class below that.
        """
        path = self._paths.get(id(module))
        if path is None:
            kind = type(module).__name__
            path = f"{parent}.<{kind}>" if parent else f"<{kind}>"
            self.kinds.setdefault(path, kind)
        before = self.times(path)
        self.counts[path] = before + 1
        self.called_from(path, 3)
        return path, before

    def called_from(self, path: str, depth: int) -> None:
        """Note the line of the user's that calls the module at this path, `depth` frames up."""
        place = pattern_of(path)
        if place not in self.lines and (line := source_line(depth)):
            self.lines[place] = line
