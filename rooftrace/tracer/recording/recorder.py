"""Capture: run any code on meta tensors and record every aten op as a `torch.fx.Graph`.

A dispatch mode sees what really runs (in-place ops, views, autograd's backward, the optimizer), a
function mode the torch-level names, module hooks the paths.  Ops that a meta run alone cannot do
are in `dynamic`.  Nothing is priced here; `lower` turns the fx graph into plain records.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils.flop_counter import flop_registry

from rooftrace.tracer.graph import UNRECORDED, contiguous
from rooftrace.tracer.recording import dynamic, groups
from rooftrace.tracer.recording.autocast import followed
from rooftrace.tracer.recording.flex import flex_whole
from rooftrace.tracer.recording.functions import Functions, backward_kept, draws_repeated
from rooftrace.tracer.recording.fused_ops import kept_whole, whole_entry
from rooftrace.tracer.recording.origin import source_line
from rooftrace.tracer.recording.realdata import MAX_BYTES, RealData
from rooftrace.tracer.recording.recompute import Recomputation, running_node
from rooftrace.tracer.recording.shown import behind
from rooftrace.tracer.recording.sizes import SizeCache, writes_lists
from rooftrace.tracer.recording.standins import (
    device_calls_quiet,
    jagged_attention_fused,
    plain_imports,
)
from rooftrace.tracer.recording.threads import Here, Threads
from rooftrace.tracer.recording.values import (
    DECIDING,
    KNOWN,
    META,
    REAL,
    Real,
    Values,
    index_output,
    small,
)
from rooftrace.tracer.replay import Block, Calls, Loop, RepeatedCall, Rolling, repeated
from rooftrace.tracer.tensors import (
    LAZY,
    ORDINARY,
    arguments_in,
    attributes_of,
    beside_in,
    bytes_of,
    is_wrapper,
    listed,
    look_of,
    own_tensors,
    parts_of,
    tensors_in,
)

META_KEY = "rooftrace"
"""The one key of fx `node.meta` that capture writes and lower reads: a Recorded or an Entry."""

_IDENTITY = frozenset({"aten.detach", "aten.alias", "aten.lift_fresh", "aten.lift"})
_UNRECORDED = frozenset({"prim.device", "aten.is_same_size", "aten._version", "aten.sym_size"})
_HIDDEN_VIEWS = frozenset(
    {
        "aten._reshape_alias",
        "aten._unsafe_view",
        "aten.unsafe_split",
        "aten.unsafe_split_with_sizes",
    }
)
"""Ops that share memory though their schema does not say so."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
_INDICES = frozenset({torch.int64, torch.int32, torch.bool})
"""Types of tensors that torch makes unseen of Python's numbers, and that no product has."""
_CAST = torch.ops.aten._to_copy.default
_LIFT = torch.ops.aten.lift_fresh.default
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NOT_OURS = ("Using .torch.compile.module.. when there are", "Sparse (invariant|CSR)")
"""Warnings about the user's code that torch would give with a line of ours."""
_SPARSE = (
    "a sparse tensor is recorded as a dense one of its shape; products count what it stores, or "
    "everything where that is not known"
)
_NO_TAINT: frozenset[int] = frozenset()
_SERIAL = itertools.count()


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, precision, stride and storage of one recorded tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    storage: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that no op made: a parameter, buffer, input, optimizer state or constant."""

    kind: str
    name: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Origin:
    """Which code an op came from: module path and call, part of the step, function, source line.

    loop: the serial number of a loop, and which of its turns; of note if `Recorder.loops` has it.
    """

    module: str = ""
    call: int = 0
    part: str = "forward"
    function: str = ""
    source: str = ""
    loop: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is remembered of one op besides its fx node."""

    specs: tuple[Spec, ...]
    origin: Origin
    view: bool = False
    sync: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    taint: frozenset[int] = _NO_TAINT


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What the schema of an op says, looked up once.

    mutated: positions and names it writes.  answers: it returns Python values, not tensors.
    composite: it is made of other ops on any device, and has no kernel of its own.
    """

    name: str
    mutated: tuple[tuple[int, str], ...]
    may_alias: bool
    view: bool
    answers: bool
    composite: bool

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The arguments that a call writes in place."""
        found: list[Tensor] = []
        for position, name in self.mutated:
            given = args[position] if position < len(args) else kwargs.get(name)
            arguments_in((given,), found)
        return found


@dataclass(frozen=True, slots=True)
class _Tag:
    """Where a tensor came from: its fx node, the output index (None: the only one), its storage."""

    node: fx.Node
    index: int | None
    storage: int

    def __deepcopy__(self, memo: Any) -> _Tag:
        return self  # a tensor that the code copies deeply stands for the same value


_INFO: dict[Any, OpInfo] = {}


def _info(func: Any) -> OpInfo:
    info = _INFO.get(func)
    if info is None:
        schema = func._schema
        name = f"{func.namespace}.{func._opname}"
        mutated = tuple(
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        )
        mutated = mutated or groups.written(func)
        aliasing = name in _HIDDEN_VIEWS or any(r.alias_info is not None for r in schema.returns)
        answers = bool(schema.returns) and not any("Tensor" in str(r.type) for r in schema.returns)
        answers = answers and not groups.is_collective(func)  # a handle to wait for
        info = _INFO[func] = OpInfo(
            name,
            mutated,
            aliasing or bool(mutated),
            aliasing and not mutated,
            answers,
            func.has_kernel_for_dispatch_key(_COMPOSITE)
            and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU),
        )
    return info


class Recorder(TorchDispatchMode):
    """Records the ops of whatever runs inside `with recorder:` on meta tensors.

    record=False keeps only the value propagation (to build modules).  own_step: the code is a whole
    step of the user's, so the parts that ops belong to are found out while it runs, and tensors
    that nothing made are its inputs.  roll_loops: of scans (see `loops`) a few turns are run, and
    `loops` has them by serial number.  repeat_calls: of calls of modules that are alike (see
    `calls`) the first is run.  After use, `close` takes our tags off tensors that outlive the
    capture.
    """

    supports_higher_order_operators = True
    runs_whole = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No guard around every op: nothing is compiled while we record (see `__enter__`).

        torch.utils._python_dispatch asks this when the class is made.
        """
        return False

    def __init__(
        self,
        values: Values | None = None,
        record: bool = True,
        own_step: bool = False,
        roll_loops: bool = True,
        repeat_calls: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values or Values()
        self.real = RealData(self)
        self.values.compute = self._from_data
        self.values.finite = self._finite
        self.values.where = lambda: self.stack[-1][0] if self.stack else ""
        self.graph = fx.Graph()
        self._records = record
        self.own_step = own_step
        self.repeat_calls = repeat_calls
        self.recomputation = Recomputation()
        self.live = False
        self.lock = threading.RLock()
        self.here = Here()
        self.threads = Threads(self)
        self.modules: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self.failed_in: tuple[str, str] | None = None
        self.failed_op: tuple[Exception, str] | None = None
        self.loops: dict[int, Loop] = {}
        self.rolling = Rolling(self, enabled=record and roll_loops)
        self._module_calls = Calls(self, enabled=record and repeat_calls)
        self._key = f"_rooftrace_tag_{next(_SERIAL)}"
        self._paths: dict[int, str] = {}
        self._transparent: set[int] = set()
        self._calls: dict[str, int] = {}
        self._sizes = SizeCache()
        self._by_sequence: dict[int, Origin] = {}
        self._by_source: dict[tuple[str, str], tuple[str, int]] = {}
        self._alive: dict[int, Any] = {}
        self._left: dict[int, Any] = {}  # those that were alive when the recording ended
        self.last_held: dict[int, fx.Node] = {}
        self._last: fx.Node | None = None
        self.survivors: frozenset[int] = frozenset()  # storages that something holds at the end
        self.storages = 0
        self.inputs: list[Tensor] = []
        self.packed: dict[int, tuple[Any, list[Tensor]]] = {}
        self._entered: list[Tensor] = []
        self._known_bytes: dict[int, tuple[int, Any]] = {}  # bytes that entered, while they live
        self._beside: dict[int, tuple[str, str]] = {}
        self._places: dict[Any, tuple[_Tag, Tensor | None]] = {}
        self._constants = itertools.count()
        self._named: dict[str, tuple[_Tag, tuple[int, ...], torch.dtype]] = {}
        self._brought = 0  # bytes of the host that weights were filled with
        self._numpy_read = False  # floats of the step were handed to numpy
        self._parameters: dict[int, str] = {}
        self._exit = contextlib.ExitStack()

    # -- where the running thread stands --------------------------------------------------------

    @property
    def stack(self) -> list[tuple[str, int]]:
        """The modules that run now, outermost first: path and number of the call."""
        return self.here.stack

    @property
    def part(self) -> str:
        """The part of the step that runs now."""
        return self.here.part

    @part.setter
    def part(self, part: str) -> None:
        self.here.part = part

    @property
    def function(self) -> str:
        """The torch-level function that runs now; "" outside of any."""
        return self.here.function

    @function.setter
    def function(self, function: str) -> None:
        self.here.function = function

    @property
    def after_backward(self) -> bool:
        """Whether a backward of the user's has run and no module since."""
        return self.here.after_backward

    @after_backward.setter
    def after_backward(self, after: bool) -> None:
        self.here.after_backward = after

    # -- naming ----------------------------------------------------------------------------------

    def name_modules(self, root: nn.Module) -> None:
        """Use the dotted paths of `root` for its modules and the tensors that they hold.

        A wrapper made by torch.compile is not shown: its module stands in its place.
        """
        self.rolling.watch(root)
        self._module_calls.watch(root)
        for path, module in root.named_modules(remove_duplicate=False):
            shown = shown_path(path)
            if "_orig_mod" in module._modules:
                self._transparent.add(id(module))
            else:
                self._paths.setdefault(id(module), shown)
                kind = getattr(module, "original_name", type(module).__name__)
                self.modules.setdefault(shown, kind)
        for path, module in root.named_modules(remove_duplicate=False):
            self._name_tensors(module, f"{path}." if path else "")

    def _name_tensors(self, module: nn.Module, prefix: str) -> None:
        names = {
            id(t): name
            for group in (vars(module), module._buffers, module._parameters)
            for name, t in group.items()
            if isinstance(t, Tensor)
        }
        transient = getattr(module, "_non_persistent_buffers_set", ())
        if any(type(tensor) not in ORDINARY for tensor in own_tensors(module)):
            for of, part in beside_in(module):  # the state of a quantised layer
                self._beside.setdefault(id(part), ("parameter", f"{prefix}{of}"))
        for tensor in own_tensors(module):
            name = names[id(tensor)]
            if name in module._parameters:
                kind = "parameter"
                self._parameters.setdefault(id(tensor), prefix + name)
            elif name in module._buffers:
                kind = "table" if name in transient else "buffer"
            else:
                kind = "constant"
            self.enter(tensor, kind, prefix + name)
            if kind != "constant" and type(tensor) in ORDINARY:  # scales beside a packed weight
                for of, item in attributes_of(tensor).items():
                    for part in tensors_in(item):
                        self._beside.setdefault(id(part), (kind, f"{prefix}{name}.{of}"))

    def name_of(self, parameter: Tensor) -> str:
        """The dotted name of a parameter ("" for a tensor that is none)."""
        return self._parameters.get(id(parameter), "")

    def enter(self, tensor: Tensor, kind: str, name: str) -> None:
        """Make `tensor`, or what it wraps, a value of the graph that no op made (once)."""
        if not self.recording:
            return
        storages: dict[int, int] = {}
        for part, suffix in parts_of(tensor):
            if self._key not in part.__dict__ and part.device.type != "cpu":
                self._enter(part, kind, name + suffix, storages.get(bytes_of(part)))
            if self._key in part.__dict__:
                storages.setdefault(bytes_of(part), part.__dict__[self._key].storage)

    def _enter(self, tensor: Tensor, kind: str, name: str, storage: int | None) -> None:
        if kind == "input":
            node = self.graph.placeholder(_identifier(name))
        else:
            node = self.graph.create_node("get_attr", name, name=_identifier(name))
        self._entry(tensor, node, kind, name, storage)

    def _entry(
        self, tensor: Tensor, node: fx.Node, kind: str, name: str, storage: int | None = None
    ) -> _Tag:
        if kind == "constant":
            kind, name = self._beside.get(id(tensor), (kind, name))
            storage = self._entered_bytes(tensor)
        if storage is None:
            self.storages += 1
            storage = self.storages
        if kind != "constant" and self._entered_bytes(tensor) is None:
            self._known_bytes[bytes_of(tensor)] = storage, _reference(tensor)
        if tensor.layout is not torch.strided:
            self.values.assume("sparse", _SPARSE)
        node.meta[META_KEY] = Entry(kind, name, _spec(tensor, storage))
        tag = tensor.__dict__[self._key] = _Tag(node, None, storage)
        self._entered.append(tensor)
        if tensor.layout is torch.strided and not isinstance(tensor, LAZY):
            self._places[_bytes_read(tensor)] = tag, tensor
        if kind in ("parameter", "buffer", "table"):
            self._named[name] = tag, tuple(tensor.shape), tensor.dtype
        entry = self.values.known(tensor)
        real = tensor.__dict__.get(REAL)
        if real is not None:
            self.real.enter(node, real.tensor)
        elif entry is not None and not entry.taint and tensor.layout is torch.strided:
            self.real.enter(node, entry.value)
        if tensor.device.type == "cpu":
            self.constants[name] = tensor.detach()
        elif kind == "constant" and entry is not None:
            self.constants[name] = entry.value
        return tag

    def reset_calls(self) -> None:
        """Count module calls from zero again (after a run that was not recorded)."""
        self._calls.clear()

    def storage_of(self, tensor: Tensor) -> int | None:
        """The storage number of a tensor that the graph knows."""
        tag: _Tag | None = parts_of(tensor)[0][0].__dict__.get(self._key)
        return tag.storage if tag else None

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, as the graph knows it."""
        tag: _Tag | None = tensor.__dict__.get(self._key)
        entry = None if tag is None else tag.node.meta.get(META_KEY)
        return isinstance(entry, Entry) and entry.kind in ("parameter", "buffer")

    def same_as(self, tensor: Tensor, other: Tensor) -> None:
        """From here on `tensor` stands for the same value as `other`."""
        tag = other.__dict__.get(self._key)
        if tag is not None:
            tensor.__dict__[self._key] = tag

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The fx node of `tensor`; an unknown tensor becomes a constant of the graph."""
        self._recognise([tensor])
        tag: _Tag = tensor.__dict__.get(self._key) or self._stranger(tensor)
        if tag.index is None:
            return tag.node
        item = self.graph.call_function(operator.getitem, (tag.node, tag.index))
        tensor.__dict__[self._key] = _Tag(item, None, tag.storage)
        return item

    def _stranger(self, tensor: Tensor) -> _Tag:
        """Enter a tensor that the graph does not know: that is said where nobody knows its value.

        A weight that the code has put into a module while it runs is that module's weight.
        """
        kind, name = self._place_of(tensor)
        if name:
            return self._put_in_place(tensor, kind, name)
        same = self._same_bytes(tensor)
        if same is not None:
            tensor.__dict__[self._key] = same
            self._entered.append(tensor)
            return same
        if id(tensor) in self._beside or self._entered_bytes(tensor) is not None:
            return self._constant(tensor)
        known = self.values.known(tensor) is not None
        if self.own_step and not known and tensor.grad_fn is None:
            self.inputs.append(tensor)
            name = f"input_{len(self.inputs)}"
            return self._entry(tensor, self.graph.placeholder(_identifier(name)), "input", name)
        size = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if not known and tensor.device.type != "cpu" and tensor.dtype not in _INDICES:
            self.unrecorded(f"{_reader(self.values.op)} a {size} that no recorded op made")
        elif self._numpy_read and _made_by_numpy(tensor):
            self.unrecorded(f"{_reader(self.values.op)} a {size} that was computed with numpy")
        return self._constant(tensor)

    def _entered_bytes(self, tensor: Tensor) -> int | None:
        """The storage number of the weight or input that a tensor is another view of."""
        key = bytes_of(tensor)
        storage, reference = self._known_bytes.get(key, (None, _no_storage))
        bytes_there = reference()  # another storage may lie where one was that was given up
        return storage if bytes_there is not None and bytes_there._cdata == key else None

    def _constant(self, tensor: Tensor) -> _Tag:
        name = f"constant_{next(self._constants)}"
        node = self.graph.create_node("get_attr", name, name=name)
        return self._entry(tensor, node, "constant", name)

    def unrecorded(self, text: str) -> int:
        """Say that something ran out of sight, so that totals are a lower bound."""
        return self.values.assume(UNRECORDED, f"{text}: what that costs is not counted")

    def _same_bytes(self, tensor: Tensor) -> _Tag | None:
        """The tag of a tensor that is this one under another Python object (nn.Parameter(x))."""
        if tensor.layout is not torch.strided:
            return None
        key, look = bytes_of(tensor), look_of(tensor)
        for other in self._entered:
            if bytes_of(other) == key:
                tag: _Tag | None = other.__dict__.get(self._key)
                same = look_of(other) == look
                return tag if same else None
        for other in self.values.tensors():
            if bytes_of(other) == key and tuple(other.shape) == look[0]:
                entry = self.values.known(other)
                if entry is not None and other is not tensor:
                    self.values.learn(tensor, entry.value, entry.taint)
        alive = {ref()._cdata: n for n, ref in list(self._alive.items()) if ref() is not None}
        storage = alive.get(key)
        for node in reversed(self.graph.nodes) if storage is not None else ():
            recorded = node.meta.get(META_KEY)
            if isinstance(recorded, Recorded):
                for index, spec in enumerate(recorded.specs):
                    if spec.storage == storage:
                        same = (spec.shape, spec.stride, spec.dtype) == look
                        return (
                            _Tag(node, _place(node.target, index), spec.storage) if same else None
                        )
        return None

    def look_for_gaps(self, outputs: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
        """The outputs that the graph can have; says what shows that something ran out of sight."""
        kept = []
        for tensor in outputs:
            if tensor.device.type != "cpu" or self._key in tensor.__dict__:
                kept.append(tensor)
            elif tensor.is_floating_point():
                size = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                self.unrecorded(f"the step returns a {size} that was computed on the host")
        weights = [n for n in self.graph.nodes if _kind_of(n) == "parameter"]
        products = (getattr(n.target, "overloadpacket", None) for n in self.graph.nodes)
        idle = weights and not any(node.users for node in weights)
        empty = not (outputs and all(map(self._was_there, outputs)))
        if idle and empty and not any(packet in flop_registry for packet in products):
            self.unrecorded(f"no recorded op reads any parameter of {type(module).__name__}")
        return kept

    def _was_there(self, tensor: Tensor) -> bool:
        """Whether a tensor is an input, a weight or a known value, which no op had to make."""
        tag: _Tag | None = tensor.__dict__.get(self._key)
        entry = tag is not None and isinstance(tag.node.meta.get(META_KEY), Entry)
        return entry or self.values.known(tensor) is not None

    def _place_of(self, tensor: Tensor) -> tuple[str, str]:
        """Kind and name of a parameter or buffer of the modules that run now; ("", "") if none."""
        here = self.here
        for (path, _), module in zip(reversed(here.stack), reversed(here.modules), strict=True):
            inside = module.named_modules() if isinstance(tensor, nn.Parameter) else [("", module)]
            for place, part in inside:
                for kind, group in (("parameter", part._parameters), ("buffer", part._buffers)):
                    for name, own in group.items():
                        if own is tensor:
                            return kind, shown_path(".".join(s for s in (path, place, name) if s))
        name = self.name_of(tensor)
        return ("parameter", name) if name else ("", "")

    def _put_in_place(self, tensor: Tensor, kind: str, name: str) -> _Tag:
        """The tag of a weight that stands where the one of this name stood."""
        before = self._named.get(name)
        if before is not None:
            self.values.assume(
                "host-copy",
                "weights that are put in place while the step runs are taken to be on the device: "
                "moving them there is not counted",
            )
        if before is not None and before[1:] == (tuple(tensor.shape), tensor.dtype):
            tag: _Tag = before[0]
            real = tensor.__dict__.get(REAL)
            self.real.replace(tag.node, tensor if real is None else real.tensor)
            tensor.__dict__[self._key] = tag
            self._entered.append(tensor)
            return tag
        return self._entry(
            tensor, self.graph.create_node("get_attr", name, name=_identifier(name)), kind, name
        )

    @property
    def recording(self) -> bool:
        """Whether ops that this thread runs now enter the graph."""
        return self._records and not self.here.paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside are run and their values followed, but they do not enter the graph.

        Those of this thread, and of threads that it starts inside; others go on.
        """
        here = self.here
        before, here.paused = here.paused, True
        try:
            yield
        finally:
            here.paused = before

    # -- calls that repeat others (see `calls`) ---------------------------------------------------

    def path_of(self, module: nn.Module) -> str:
        """The dotted path of a module."""
        return self._paths.get(id(module), "")

    def calls_of(self, module: nn.Module) -> int:
        """How often a module was called."""
        return self.calls_at(self.path_of(module))

    def calls_at(self, path: str) -> int:
        """How often the module at this path was called."""
        return self._calls.get(path, 0)

    def calls(self) -> dict[str, int]:
        """How often each module was called, by path."""
        return dict(self._calls)

    def tagged_node(self, tensor: Tensor) -> fx.Node | None:
        """The fx node of a tensor that the graph knows."""
        return self.node_of(tensor) if self._key in tensor.__dict__ else None

    def _finite(self, tensor: Tensor) -> bool | None:
        made = self.made_by(tensor)
        return None if made is None else dynamic.of_finite_numbers(made[0])

    def made_by(self, tensor: Tensor) -> tuple[fx.Node, int | None, Spec] | None:
        """The node that made a tensor, which of its outputs it is, and how it looks."""
        tag: _Tag | None = tensor.__dict__.get(self._key)
        return None if tag is None else (tag.node, tag.index, _spec(tensor, tag.storage))

    def writes_outside(self, nodes: Sequence[fx.Node], first_storage: int) -> bool:
        """Whether some node writes what was there before storage `first_storage`, or a constant."""
        for node in nodes:
            info = _info(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
            for written in _written(info, node) if info and info.mutated else ():
                base: Any = written.args[0] if written.target is operator.getitem else written
                found = base.meta[META_KEY]
                if not isinstance(found, Recorded):
                    return True
                if any(spec.storage <= first_storage for spec in found.specs):
                    return True
        return False

    def holds_others(
        self, first_storage: int, nodes: Sequence[fx.Node], made: Sequence[int]
    ) -> bool:
        """Whether a list or an attribute outside holds a storage that these nodes have made.

        made: storages that may be held, counted from `first_storage`.  Autocast keeps its casts.
        """
        known = {first_storage + storage for storage in made}
        for node in nodes:
            recorded = node.meta.get(META_KEY)
            if node.target is _CAST and isinstance(recorded, Recorded):
                known.update(spec.storage for spec in recorded.specs)
        return any(n > first_storage and n not in known for n in list(self._alive))

    def taint_of(self, nodes: Sequence[fx.Node]) -> frozenset[int]:
        """The assumptions that these nodes rest on."""
        found: set[int] = set()
        for node in nodes:
            recorded = node.meta.get(META_KEY)
            if isinstance(recorded, Recorded):
                found |= recorded.taint
            elif isinstance(recorded, RepeatedCall):
                found.update(recorded.assumptions.get(a, a) for a in recorded.block.assumptions)
        return frozenset(found)

    def first_origin(self, nodes: Sequence[fx.Node]) -> Origin | None:
        """Where the first op among these nodes comes from."""
        for node in nodes:
            recorded = node.meta.get(META_KEY)
            if isinstance(recorded, Recorded):
                return recorded.origin
            if isinstance(recorded, RepeatedCall) and recorded.block.origin is not None:
                origin, old = recorded.block.origin, recorded.block.path
                return replace(origin, module=recorded.path + origin.module[len(old) :])
        return None

    def repeat_node(self, inputs: Sequence[fx.Node], call: RepeatedCall) -> fx.Node:
        """A node for a call that repeats a block."""
        node = self.graph.create_node("call_function", repeated, name="repeated")
        node.args = tuple(inputs)
        node.meta[META_KEY] = call
        self._last = node
        return node

    def tag(self, tensor: Tensor, node: fx.Node, index: int, storage: int) -> None:
        """`tensor` is an output of `node`."""
        tensor.__dict__[self._key] = _Tag(node, index, storage)
        self._watch(tensor, storage)

    def called_again(self, block: Block, path: str) -> None:
        """Count what the calls inside of a block would have."""
        self.storages += block.storages
        if block.origin is not None:  # a sum of gradients names the op that was recorded last
            origin = replace(block.origin, module=path + block.origin.module[len(block.path) :])
            self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, origin)
        for inner, count in block.calls.items():
            self._calls[path + inner] = self._calls.get(path + inner, 0) + count
            self.modules.setdefault(path + inner, self.modules[block.path + inner])

    # -- recording ---------------------------------------------------------------------------------

    def record(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Tensor],
        *,
        single: bool = False,
        sync: bool = False,
        facts: Mapping[str, Any] | None = None,
        taint: frozenset[int] = _NO_TAINT,
    ) -> None:
        """Add one call to the graph, if recording.  single: it returns a tensor, not a list."""
        info = _info(func)
        if sync:
            self.rolling.depends()
        if not self.rolling.saw(func, info, args, kwargs, outputs) or not self.recording:
            return
        arguments = tuple([self._argument(item) for item in args])
        # fx looks through the arguments of a new node for symbolic sizes, which none of ours is.
        node = self.graph.create_node("call_function", func, name=info.name)
        node.args = arguments
        if kwargs:
            node.kwargs = {name: self._argument(item) for name, item in kwargs.items()}
        owners: dict[int, int] = {}
        if info.may_alias:
            tensors: list[Tensor] = []
            arguments_in((*args, *kwargs.values()), tensors)
            owners = {bytes_of(t): t.__dict__[self._key].storage for t in tensors}
        written = info.written(args, kwargs) if info.mutated else []
        returned = bool(outputs)
        if not returned:
            outputs = written  # void in-place ops (_foreach_add_): what they write is their output
        specs = []
        for index, output in enumerate(outputs):
            if output.layout is not torch.strided:
                taint = taint | {self.values.assume("sparse", _SPARSE)}
            storage = owners.get(bytes_of(output)) if owners else None
            if storage is None:
                self.storages += 1
                storage = self.storages
                self._watch(output, storage)
            specs.append(_spec(output, storage))
            if returned:
                tag = output.__dict__[self._key] = _Tag(node, None if single else index, storage)
                if output.layout is torch.strided:
                    self._places[_bytes_read(output)] = tag, None
        if single:
            for tensor in written:
                tensor.__dict__[self._key] = _Tag(node, None, tensor.__dict__[self._key].storage)
        node.meta[META_KEY] = Recorded(
            tuple(specs), self._origin(info.name), info.view, sync, facts or {}, taint
        )
        self._last = node

    # -- how long bytes are there ------------------------------------------------------------------

    def _watch(self, tensor: Tensor, storage: int) -> None:
        """Remember at which node the bytes of a new storage go, as those of a real run do."""
        if tensor.layout is torch.strided:
            gone = functools.partial(self._gone, storage)
            self._alive[storage] = weakref.ref(tensor.untyped_storage(), gone)

    def _gone(self, storage: int, _: Any = None) -> None:
        if self._last is not None and self._alive.pop(storage, None) is not None:
            self.last_held[storage] = self._last

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.node_of(item)
        if isinstance(item, (list, tuple)):
            return [self._argument(x) for x in item]
        return item

    def _origin(self, name: str) -> Origin:
        """Where the op that is being run comes from."""
        part = self._part_of_own_step() if self.own_step else self.part
        if part == "optimizer":
            return Origin("", 0, part, self.function)
        if part == "backward":
            if not self._runs_again():
                return self._origin_in_backward()
            part = "recompute"
        source = source_line(5) or self.here.source
        if self.stack:
            path, call = self.stack[-1]
        elif part == "recompute":
            path, call = self._by_source.get((source, name), ("", 0))
        else:
            path, call = "", 0
        origin = Origin(path, call, part, self.function, source, self.rolling.label)
        if part == "forward":
            self._by_source[source, name] = (path, call)
        # The autograd node of an op exists before the op runs and has the last number given out.
        # Later ops without a node (integers, a kernel's inner ops) see the same number.
        self._by_sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, origin)
        return origin

    def _runs_again(self) -> bool:
        """Whether the running autograd node has called forward code: a module, or what wants
        gradients of its own.  False before the engine starts, where it gets its first gradients."""
        node = running_node()
        if node is None:
            return False
        called = bool(self.here.called_for) and self.here.called_for[-1] == node
        return called or self.recomputation.active(node)

    def _part_of_own_step(self) -> str:
        """The part that the op being run belongs to, where nobody announces the parts."""
        if self.part != "forward":
            return self.part
        if torch._C._current_autograd_node() is not None:
            return "backward"
        # Clipping, scaling and averaging stand between backward and step, outside of modules.
        updates = self.after_backward and not self.stack and not torch.is_grad_enabled()
        return "optimizer" if updates else "forward"

    def _origin_in_backward(self) -> Origin:
        """The origin of the forward op that the running autograd node differentiates."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return Origin("", 0, "backward", self.function)
        name = node.name()
        number = node._sequence_nr()
        if name.endswith("CopySlices"):
            number -= 1  # wraps the node of the op that wrote into a view, made just before it
        origin = self._by_sequence.get(number)
        if origin is not None:
            return replace(origin, part="backward", function=name)
        variable = getattr(node, "variable", None)
        owner = "" if variable is None else self.name_of(variable).rpartition(".")[0]
        return Origin(shown_path(owner), 0, "backward", name)

    # -- running one op ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(is_wrapper(kind) for kind in types):
            return NotImplemented  # what the wrapper does with the tensors inside is recorded
        instead = behind(func)
        if instead is not None:  # an op of ours, shown to modes of the user's under another name
            with self.again():
                return instead(*args, **kwargs)
        with self.lock:
            return self._dispatched(func, args, kwargs)

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        whole = isinstance(func, HigherOrderOperator)
        outer, self.values.op = self.values.op, func.name() if whole else _info(func).name
        try:
            if whole:
                return dynamic.higher_order(self, func, args, kwargs)
            with torch._C.DisableTorchFunction():  # what is called from here on is nobody's call
                return self._run(func, args, kwargs)
        except Exception as error:
            if self.failed_op is None or self.failed_op[0] is not error:
                self.failed_op = error, self.values.op
            raise
        finally:
            self.values.op = outer

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op, follow its values, record it."""
        info = _info(func)
        name = info.name
        if info.composite or (self.here.inside and func.has_kernel_for_dispatch_key(_COMPOSITE)):
            # PyTorch has taken such ops apart before a mode sees them, but those that run inside of
            # an op: of ours, or of a tensor subclass.
            with self.again():
                whole = whole_entry(func)
                return (whole or func.decompose)(*args, **kwargs)
        if name in _UNRECORDED or name.startswith("profiler."):
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        arguments_in(args, tensors)
        if kwargs:
            arguments_in(kwargs.values(), tensors)
        self._recognise(tensors)
        if _on_host(tensors, kwargs.get("device")):
            self.rolling.depends()
            if not self._of_the_step(func, tensors):
                return func(*args, **kwargs)
        if name in _IDENTITY and tensors:
            return self._identity(func, args, kwargs, tensors[0])
        special = dynamic.by_value(self, func, info, args, kwargs)
        if special is not NotImplemented:
            return special
        facts: dict[str, Any] = {}
        try:
            out = self._computed(func, info, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            out = dynamic.without_meta_kernel(self, func, info, args, kwargs, tensors, error)
            facts["fallback"] = type(error).__name__
        else:
            out = dynamic.off_host(self, func, info, args, kwargs, tensors, out)
        single = isinstance(out, Tensor)
        outputs = [out] if single else listed(out)
        taint = self._propagate(func, info, args, kwargs, tensors, outputs)
        taint |= dynamic.learn_facts(self.values, name, args, tensors, facts)
        if groups.is_collective(func) and (size := groups.group_size(func, args, kwargs)):
            facts["group_size"] = size
        if outputs and info.mutated and func.namespace != "aten":
            facts["writes"] = tuple(name for _, name in info.mutated)  # beside what it returns
        self.record(func, args, kwargs, outputs, single=single, facts=facts, taint=taint)
        return out

    def _of_the_step(self, func: Any, tensors: Sequence[Tensor]) -> bool:
        """Whether an op on CPU tensors is the step's own work, and not what the host keeps for it.

        Weights and what was made of floats of the step are; so is every product.
        """
        plain = (Tensor, nn.Parameter)
        if not self.recording or any(type(tensor) not in plain for tensor in tensors):
            return False  # of fake tensors only the sizes are asked
        if func._overloadpacket in flop_registry:
            return True
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                return True
            tag: _Tag | None = tensor.__dict__.get(self._key)
            if tag is not None and tensor.is_floating_point():
                entry = tag.node.meta.get(META_KEY)
                if not isinstance(entry, Entry) or entry.kind != "constant":
                    return True
        return False

    def _computed(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """What an op returns on meta."""
        if not info.may_alias:
            return self._sizes.run(func, args, kwargs)
        return None if writes_lists(info.name, args) else func(*args, **kwargs)

    def _identity(self, func: Any, args: Any, kwargs: Any, tensor: Tensor) -> Tensor:
        """detach and its like: a new Python object for the same value."""
        out: Tensor = func(*args, **kwargs)
        self.same_as(out, tensor)
        if func is _LIFT and self.recording and self._key not in out.__dict__:
            self._constant(out)  # numbers of Python, or of numpy, become a tensor
        entry = self.values.known(tensor)
        if entry is not None:
            self.values.learn(out, entry.value, entry.taint)
        return out

    def _recognise(self, tensors: list[Tensor]) -> None:
        """Tag objects that know nothing of us, of bytes that we know.

        `as_subclass` makes such objects where no mode sees it, also for every result of a function
        that a subclass handles.
        """
        for tensor in tensors:
            if self._key in tensor.__dict__ or tensor.layout is not torch.strided:
                continue
            if isinstance(tensor, LAZY):
                continue
            tag, entered = self._places.get(_bytes_read(tensor), (None, None))
            if tag is None:
                continue
            if entered is None:
                storage = (self._alive or self._left).get(tag.storage, _no_storage)()
                if storage is None or storage._cdata != bytes_of(tensor):
                    continue  # of bytes that were freed
            else:
                if bytes_of(entered) != bytes_of(tensor):
                    continue  # it was given other bytes
                entry = self.values.known(entered)
                if entry is not None and KNOWN not in tensor.__dict__:
                    self.values.learn(tensor, entry.value, entry.taint)
            tensor.__dict__[self._key] = tag

    def _propagate(
        self,
        func: Any,
        info: OpInfo,
        args: Any,
        kwargs: Mapping[str, Any],
        tensors: list[Tensor],
        outputs: list[Tensor],
    ) -> frozenset[int]:
        """Follow known values through one op; returns the assumptions that its outputs rest on."""
        values = self.values
        known = True
        for tensor in tensors:
            if KNOWN not in tensor.__dict__ and tensor.device.type != "cpu":
                known = False
                break
        if (
            known
            and (outputs or info.mutated)
            and (not outputs or outputs[0].device.type == "meta")
        ):
            written = info.written(args, kwargs)
            taint = values.propagate(info.name, func, args, kwargs, tensors, outputs, written)
            if taint is not None:
                return taint
        elif info.mutated:
            for tensor in info.written(args, kwargs):
                values.forget(tensor)
        if info.name in DECIDING and not info.mutated and len(outputs) == 1:
            decided = values.decide(info.name, tensors, outputs[0])
            if decided is not None:
                return decided
        position = index_output(func, tensors[0], outputs) if tensors else None
        if position is not None and outputs[0].is_meta:
            return dynamic.route(
                values, func, info.name, args, kwargs, tensors[0], outputs[position], position
            )
        return _NO_TAINT

    def _from_data(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor from the real ones that were given; see `realdata`."""
        if not self.recording or type(tensor) is not Tensor:
            return None
        value = self.real.value(tensor)
        if value is not None:
            self.rolling.depends()
        return value

    def written_by(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose tensors the op of a node writes in place."""
        info = _info(node.target)
        return _written(info, node) if info.mutated else []

    def brought(self, data: Tensor) -> Tensor:
        """A tensor of the host, as what it is on meta where a weight is filled with it.

        Its values are known, or computed where code asks for them, as those of any weight.
        """
        plain = type(data) in ORDINARY and data.layout is torch.strided
        if data.device.type != "cpu" or not plain:
            return data
        with _disable_current_modes():
            made = torch.empty_like(data, device=META, requires_grad=False)
        self.same_as(made, data)
        self._brought += data.numel() * data.element_size()
        if small(data):
            self.values.learn(made, data.detach().clone())
        elif self._brought <= MAX_BYTES:  # it is held as long as the recording
            made.__dict__[REAL] = Real(data.detach())
        return made

    def stands_for(self, tensor: Tensor, other: Tensor) -> None:
        """`tensor.data = other`: from here on it is another value, and known if that is."""
        if isinstance(tensor, LAZY):
            return  # it becomes a parameter, and has no bytes until then
        self._recognise([other])
        if self._key not in other.__dict__ and (self.name_of(tensor) or self._place_of(tensor)[1]):
            tensor.__dict__.pop(self._key, None)  # entered by its name where something reads it
        elif self.recording and self._key in tensor.__dict__:
            self.node_of(other)
        self.same_as(tensor, other)
        tensor.__dict__.pop(REAL, None)
        if REAL in other.__dict__:
            tensor.__dict__[REAL] = other.__dict__[REAL]
        entry = self.values.known(other)
        tensor.__dict__.pop(KNOWN, None)
        if entry is not None and tensor.device.type == "meta":
            self.values.learn(tensor, entry.value, entry.taint)

    def shown(self, tensor: Tensor) -> None:
        """A meta tensor is printed: the host waits for its value."""
        self.record(_SCALAR, (tensor,), {}, [], sync=True, facts={"elements": tensor.numel()})

    def to_python(self, tensor: Tensor, method: str) -> Any:
        """`tensor.tolist()` or `.numpy()` of a meta tensor: the host waits for its value."""
        self.values.op = method
        value, taint = self.values.value_of(tensor, f"{method}()")
        if method == "numpy" and tensor.is_floating_point() and self.recording:
            self._numpy_read = True
        self.values.op = ""
        self.record(
            _SCALAR,
            (tensor,),
            {},
            [],
            sync=True,
            facts={"elements": tensor.numel()},
            taint=taint,
        )
        return getattr(value.clone(), method)()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The dispatch mode is off while it handles an op; this turns it on again."""
        mode: Any = TorchDispatchMode
        mode.__enter__(self)
        self.here.inside += 1
        try:
            yield
        finally:
            self.here.inside -= 1
            mode.__exit__(self, None, None, None)

    # -- modules -----------------------------------------------------------------------------------

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if id(module) in self._transparent:
            return
        path = self._paths.get(id(module))
        here = self.here
        if not self.threads.here():
            if path is None or _get_current_dispatch_mode() is not None:
                return  # a thread of somebody else
            leave = self.threads.enter_here(META)
            if leave is None:
                return
            here.leave = leave
        with self.lock:
            self._called(module, path)

    def _called(self, module: nn.Module, path: str | None) -> None:
        if path is None:
            parent = self.stack[-1][0] if self.stack else ""
            kind = type(module).__name__
            path = f"{parent}.<{kind}>" if parent else f"<{kind}>"
            self.modules.setdefault(path, kind)
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self.after_backward = False
        self.stack.append((path, call))
        self.here.called_for.append(running_node())
        self.here.modules.append(module)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        here = self.here
        if id(module) in self._transparent or module not in here.modules:
            return
        if sys.exc_info()[0] is not None and self.failed_in is None:
            self.failed_in = (self.stack[-1][0], type(module).__name__)
        here.stack.pop()
        here.modules.pop()
        here.called_for.pop()
        if not here.stack and here.leave is not None:
            here.leave()

    def __enter__(self) -> Recorder:
        enter = self._exit.enter_context
        enter(warnings.catch_warnings())
        for message in _NOT_OURS:
            warnings.filterwarnings("ignore", message=message)
        enter(kept_whole())
        enter(flex_whole(self))
        enter(device_calls_quiet())
        enter(plain_imports())
        enter(jagged_attention_fused())
        enter(draws_repeated())
        enter(backward_kept(self))
        enter(followed())
        enter(torch.compiler.set_stance("force_eager"))
        script: Any = torch.jit
        enter(script.optimized_execution(False))  # op by op, as it is written
        enter(torch.autograd.set_multithreading_enabled(False))
        for handle in (
            nn_module.register_module_forward_pre_hook(self._before),
            nn_module.register_module_forward_hook(self._after, always_call=True),
        ):
            self._exit.callback(handle.remove)
        enter(self.rolling.injected())
        enter(self._module_calls.injected())
        enter(Functions(self))
        self.live = True
        enter(self.threads.followed())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> Any:
        self.threads.settle()
        with self.lock:
            self.live = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._exit.close()
        self._left = dict(self._alive)
        self.survivors = frozenset(self._alive)
        for storage in self._left:
            self._gone(storage)

    def close(self) -> None:
        """Take our marks off tensors that outlive the capture."""
        for tensor in self._entered:
            tensor.__dict__.pop(self._key, None)
        self._entered.clear()
        self._places.clear()
        self._left.clear()
        self.values.close()

    def forget(self) -> None:
        """Give the memory of the graph back, once it is lowered.

        Its nodes refer to each other, and the collector of cycles is off while a model is traced.
        """
        self.last_held.clear()
        self.real.forget()
        self._last = None
        graph, self.graph = self.graph, fx.Graph()
        for node in (*graph.nodes, graph._root):
            node.meta.clear()
            node.users.clear()
            node._input_nodes.clear()
            for name, nothing in (("_args", ()), ("_kwargs", {}), ("_prev", None), ("_next", None)):
                object.__setattr__(node, name, nothing)
        graph._graph_namespace._obj_to_name.clear()
        graph._find_nodes_lookup_table.table.clear()


def _kind_of(node: fx.Node) -> str:
    """The kind of an entry of the graph; "" for a node that is none."""
    entry = node.meta.get(META_KEY)
    return entry.kind if isinstance(entry, Entry) else ""


def _place(func: Any, index: int) -> int | None:
    """Where an output of an op stands among what it returns; None where it returns one tensor."""
    returns = func._schema.returns
    single = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    return None if single else index


def _reader(op: str) -> str:
    """What reads a tensor, to begin a sentence."""
    return f"{op} reads" if op else "the step returns"


def _made_by_numpy(tensor: Tensor) -> bool:
    """Whether a CPU tensor of floats lies in memory that torch did not allocate."""
    return tensor.is_floating_point() and not tensor.untyped_storage().resizable()


def _written(info: OpInfo, node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors an op writes in place."""
    found: list[fx.Node] = []
    for position, name in info.mutated:
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        items = given if isinstance(given, (list, tuple)) else [given]
        found += [item for item in items if isinstance(item, fx.Node)]
    return found


def _no_storage() -> None:
    return None


def _reference(tensor: Tensor) -> Any:
    """Gives the storage of a tensor while it lives; of a sparse one the tensor."""
    if tensor.layout is not torch.strided:
        return lambda: None
    return weakref.ref(tensor.untyped_storage())


def _bytes_read(tensor: Tensor) -> Any:
    """Which bytes a tensor reads, in which order and as what."""
    where = bytes_of(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return *where, tensor.dtype


def _on_host(tensors: list[Tensor], device: Any) -> bool:
    """Whether an op reads and makes CPU tensors only."""
    if device is not None and torch.device(device).type != "cpu":
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return False
    return bool(tensors) or device is not None


def _spec(tensor: Tensor, storage: int) -> Spec:
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return Spec(shape, tensor.dtype, contiguous(shape), storage)
    return Spec(shape, tensor.dtype, tensor.stride(), storage)


def _identifier(name: str) -> str:
    return name.replace(".", "_") or "value"


def shown_path(path: str) -> str:
    """A module path without the steps that torch.compile puts in."""
    if "_orig_mod" not in path:
        return path
    return ".".join(step for step in path.split(".") if step != "_orig_mod")
