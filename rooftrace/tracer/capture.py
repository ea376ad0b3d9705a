"""Capture: run any code on meta tensors and record every aten op as a `torch.fx.Graph`.

A dispatch mode sees what really runs (in-place ops, views, autograd's backward, the optimizer), a
function mode the torch-level names and the few calls that need values.  Module hooks give the path.
Nothing is priced here; `lower` turns the fx graph into plain records.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rooftrace.tracer import values as known_values
from rooftrace.tracer.fused_ops import kept_whole
from rooftrace.tracer.values import ROUTING, UnknownValueError, Values, to_device

aten = torch.ops.aten
META = torch.device("meta")
META_KEY = "rooftrace"
"""The one key of fx `node.meta` that capture writes and lower reads: a Recorded or an Entry."""

_IDENTITY = frozenset({"aten.detach", "aten.alias", "aten.lift_fresh", "aten.lift"})
_UNRECORDED = frozenset({"prim.device", "aten.is_same_size", "aten._version", "aten.sym_size"})
_MASKED_INDEX = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})
_COUNTED_OUTPUT = frozenset({
    "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_dim",
    "aten.unique_consecutive", "aten.bincount", "aten.repeat_interleave",
    "aten.unique_dim_consecutive", "aten.nonzero_static"})
_HIDDEN_VIEWS = frozenset({"aten._unsafe_view", "aten._reshape_alias"})


class TraceError(RuntimeError):
    """The module could not be traced: names the module, the op and what to try."""


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
class Recorded:
    """What is remembered of one op besides its fx node."""

    specs: tuple[Spec, ...]
    module: str
    call: int
    part: str
    function: str
    source: str
    view: bool = False
    sync: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    taint: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _OpInfo:
    """What the schema of an op says, looked up once."""

    name: str
    mutated: tuple[tuple[int, str], ...]
    may_alias: bool
    view: bool


@dataclass(frozen=True, slots=True)
class _Tag:
    """Where a tensor came from: its fx node, the output index (None: the only one), its storage."""

    node: fx.Node
    index: int | None
    storage: int


@dataclass
class Frame:
    """One entry of the module stack."""

    path: str
    call: int


_INFO: dict[Any, _OpInfo] = {}


def _info(func: Any) -> _OpInfo:
    info = _INFO.get(func)
    if info is None:
        schema = func._schema
        name = f"{func.namespace}.{func._opname}"
        mutated = tuple((i, a.name) for i, a in enumerate(schema.arguments)
                        if a.alias_info is not None and a.alias_info.is_write)
        aliasing = any(r.alias_info is not None for r in schema.returns)
        hidden = name in _HIDDEN_VIEWS
        info = _INFO[func] = _OpInfo(name, mutated, aliasing or hidden or bool(mutated),
                                     (aliasing or hidden) and not mutated)
    return info


class Recorder(TorchDispatchMode):
    """Records the ops of whatever runs inside `with recorder:` on meta tensors.

    record=False keeps only the value propagation (to build modules, or to run a prefill whose ops are
    not wanted).
    """

    supports_higher_order_operators = True

    def __init__(self, values: Values | None = None, record: bool = True) -> None:
        super().__init__()
        self.values = values or Values()
        self.values.where = lambda: self.stack[-1].path if self.stack else ""
        self.graph = fx.Graph()
        self.recording = record
        self.part = "forward"
        self.function = ""
        self.stack: list[Frame] = []
        self.modules: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self._key = f"_rooftrace_tag_{id(self)}"
        self._paths: dict[int, str] = {}
        self._calls: dict[str, int] = {}
        self._by_sequence: dict[int, tuple[str, int, str, str]] = {}
        self._storages = 0
        self._tagged: list[Tensor] = []
        self._parameters: dict[int, str] = {}
        self._exit = contextlib.ExitStack()
        self._last_op = ""
        self.failed_in: tuple[str, str] | None = None

    # -- naming ------------------------------------------------------------------------------------

    def name_modules(self, root: nn.Module) -> None:
        """Use the dotted paths of `root` for its modules, parameters and buffers."""
        for path, module in root.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), path)
            self.modules.setdefault(path, type(module).__name__)
        persistent = {id(m): getattr(m, "_non_persistent_buffers_set", set()) for m in root.modules()}
        for path, module in root.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.enter(parameter, "parameter", prefix + name)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    transient = name in persistent[id(module)]
                    self.enter(buffer, "table" if transient else "buffer", prefix + name)

    def enter(self, tensor: Tensor, kind: str, name: str) -> None:
        """Make `tensor` a value of the graph that no op made (once)."""
        if not self.recording or self._key in tensor.__dict__ or tensor.device.type == "cpu":
            return
        self._storages += 1
        spec = _spec(tensor, self._storages)
        if kind == "input":
            node = self.graph.placeholder(_identifier(name))
        else:
            node = self.graph.create_node("get_attr", name, name=_identifier(name))
        node.meta[META_KEY] = Entry(kind, name, spec)
        self._tag(tensor, _Tag(node, None, self._storages))
        if kind == "parameter":
            self._parameters[id(tensor)] = name.rpartition(".")[0]

    def keep_values(self) -> None:
        """Leave what is known on the tensors as plain attributes, for a later capture to learn."""
        self.values.publish()

    def reset_calls(self) -> None:
        """Count module calls from zero again (after a run that was not recorded)."""
        self._calls.clear()

    def storage_of(self, tensor: Tensor) -> int | None:
        """The storage number of a tensor that the graph knows."""
        tag: _Tag | None = tensor.__dict__.get(self._key)
        return tag.storage if tag else None

    def _tag(self, tensor: Tensor, tag: _Tag) -> None:
        tensor.__dict__[self._key] = tag
        self._tagged.append(tensor) if tensor.is_leaf else None

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The fx node that stands for `tensor`; an unknown tensor becomes a constant of the graph."""
        tag: _Tag | None = tensor.__dict__.get(self._key)
        if tag is None:
            name = f"constant_{len(self.constants)}"
            if tensor.device.type == "cpu":
                self.constants[name] = tensor.detach()
            else:
                self.constants[name] = tensor
            self._storages += 1
            node = self.graph.create_node("get_attr", name, name=name)
            node.meta[META_KEY] = Entry("constant", name, _spec(tensor, self._storages))
            tag = _Tag(node, None, self._storages)
            self._tag(tensor, tag)
        if tag.index is None:
            return tag.node
        item = self.graph.call_function(operator.getitem, (tag.node, tag.index))
        tensor.__dict__[self._key] = _Tag(item, None, tag.storage)
        return item

    # -- recording ---------------------------------------------------------------------------------

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.node_of(item)
        if isinstance(item, (list, tuple)):
            return [self._argument(x) for x in item]
        return item

    def _context(self) -> tuple[str, int, str, str, str]:
        """(module path, call, part, function, source) of the op being run."""
        part = self.part
        if part == "backward":
            node = torch._C._current_autograd_node()
            if self.stack:
                frame = self.stack[-1]
                return frame.path, frame.call, "recompute", self.function, _source()
            if node is not None:
                origin = self._by_sequence.get(node._sequence_nr())
                name = node.name()
                if origin is not None:
                    return origin[0], origin[1], part, name, origin[3]
                variable = getattr(node, "variable", None)
                if variable is not None:
                    return self._parameters.get(id(variable), ""), 0, part, name, ""
                return "", 0, part, name, ""
            return "", 0, part, self.function, ""
        path, call = (self.stack[-1].path, self.stack[-1].call) if self.stack else ("", 0)
        source = _source() if part == "forward" else ""
        if part == "forward":
            number = torch.autograd._get_sequence_nr() - 1
            if torch.is_grad_enabled():
                self._by_sequence[number] = (path, call, self.function, source)
            else:  # the body of a custom autograd function: its node exists already
                self._by_sequence.setdefault(number, (path, call, self.function, source))
        return path, call, part, self.function, source

    def _record(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                tensors: list[Tensor], outputs: list[Tensor], single: bool, *, sync: bool = False,
                facts: Mapping[str, Any] | None = None, taint: frozenset[int] = frozenset()) -> None:
        node = self.graph.create_node(
            "call_function", func, tuple([self._argument(a) for a in args]),
            {k: self._argument(v) for k, v in kwargs.items()}, info.name)
        owners = None
        if info.may_alias:
            owners = {t.untyped_storage()._cdata: t.__dict__[self._key].storage for t in tensors}
        specs = []
        for index, output in enumerate(outputs):
            storage = owners.get(output.untyped_storage()._cdata) if owners else None
            if storage is None:
                self._storages += 1
                storage = self._storages
            specs.append(_spec(output, storage))
            self._tag(output, _Tag(node, None if single else index, storage))
        for position, name in info.mutated:
            changed = kwargs.get(name) if name in kwargs else (args[position] if position < len(args) else None)
            if isinstance(changed, Tensor) and all(changed is not o for o in outputs) and outputs and single:
                self._tag(changed, _Tag(node, None, changed.__dict__[self._key].storage))
        path, call, part, function, source = self._context()
        node.meta[META_KEY] = Recorded(tuple(specs), path, call, part, function, source, info.view, sync,
                                       facts or {}, taint)

    # -- running one op ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        info = _info(func)
        name = info.name
        if name in _UNRECORDED or name.startswith("profiler."):
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        device = kwargs.get("device")
        if tensors:
            host_only = all(t.device.type == "cpu" for t in tensors) and (
                device is None or torch.device(device).type == "cpu")
        else:
            host_only = torch.device(device).type == "cpu" if device is not None else False
        if host_only:
            return func(*args, **kwargs)
        if name in _IDENTITY and tensors:
            out = func(*args, **kwargs)
            tag = tensors[0].__dict__.get(self._key)
            if tag is not None:
                out.__dict__[self._key] = tag
            entry = self.values.known(tensors[0])
            if entry is not None:
                self.values.learn(out, entry.value, entry.taint)
            return out
        self._last_op = name
        special = self._needs_values(func, info, args, kwargs, tensors)
        if special is not NotImplemented:
            return special
        facts: dict[str, Any] = {}
        try:
            out = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            out = self._fallback(func, info, args, kwargs, tensors, error)
            facts["fallback"] = type(error).__name__
        single = isinstance(out, Tensor)
        outputs: list[Tensor] = [out] if single else []
        if not single and isinstance(out, (list, tuple)):
            _collect(out, outputs)
        taint = self._propagate(func, info, args, kwargs, tensors, outputs)
        taint |= self._learn_facts(name, args, tensors, facts)
        if self.recording:
            if not outputs and info.mutated:
                # Void in-place ops (_foreach_add_): the lists that they write are their outputs.
                outputs = [t for position, key in info.mutated
                           for t in _listed(kwargs.get(key, args[position] if position < len(args) else ()))]
                facts["void"] = True
                self._record_void(func, info, args, kwargs, outputs, facts, taint)
            else:
                self._record(func, info, args, kwargs, tensors, outputs, single, facts=facts, taint=taint)
        return out

    def _record_void(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                     changed: list[Tensor], facts: Mapping[str, Any], taint: frozenset[int]) -> None:
        node = self.graph.create_node(
            "call_function", func, tuple([self._argument(a) for a in args]),
            {k: self._argument(v) for k, v in kwargs.items()}, info.name)
        specs = tuple(_spec(t, t.__dict__[self._key].storage) for t in changed)
        path, call, part, function, source = self._context()
        node.meta[META_KEY] = Recorded(specs, path, call, part, function, source, False, False, facts, taint)

    def _propagate(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                   tensors: list[Tensor], outputs: list[Tensor]) -> frozenset[int]:
        values = self.values
        name = info.name
        known = True
        for tensor in tensors:
            if "_rooftrace_known" not in tensor.__dict__ and tensor.device.type != "cpu":
                known = False
                break
        if known and (outputs or info.mutated) and (not outputs or outputs[0].device.type == "meta"):
            mutated = [t for position, key in info.mutated
                       for t in _listed(kwargs.get(key, args[position] if position < len(args) else ()))]
            taint = values.propagate(name, func, args, kwargs, tensors, outputs, mutated)
            if taint is not None:
                return taint
        elif info.mutated:
            for position, key in info.mutated:
                for tensor in _listed(kwargs.get(key, args[position] if position < len(args) else ())):
                    values.forget(tensor)
        if name in ROUTING and tensors and outputs:
            position = ROUTING[name]
            if len(outputs) > position and not outputs[position].dtype.is_floating_point:
                dimension = _dimension(name, func, args, kwargs)
                if dimension is not None:
                    routed = values.route(name, tensors[0], outputs[position], dimension)
                    if routed is not None:
                        return frozenset([routed])
        return frozenset()

    def _learn_facts(self, name: str, args: Any, tensors: list[Tensor],
                     facts: dict[str, Any]) -> frozenset[int]:
        """Counts that a cost rule needs and only known values give."""
        if name == "aten._grouped_mm" or name == "aten._scaled_grouped_mm":
            offsets = next((t for t in tensors if t.dtype == torch.int32 and t.dim() == 1), None)
            entry = self.values.known(offsets) if offsets is not None else None
            if entry is not None:
                sizes = torch.diff(entry.value, prepend=entry.value.new_zeros(1))
                facts["groups_touched"] = int((sizes > 0).sum())
                facts["rows_largest"] = int(sizes.max()) if sizes.numel() else 0
                return entry.taint
        elif name == "aten.embedding":
            entry = self.values.known(args[1])
            if entry is not None:
                facts["rows_touched"] = int(torch.unique(entry.value).numel())
                return entry.taint
        elif name == "rooftrace.attention" and args[3] is not None:
            entry = self.values.known(args[3])
            if entry is not None:
                visible = entry.value if entry.value.dtype == torch.bool else entry.value > -1e4
                if visible.dim() >= 2:
                    rows, columns = args[0].shape[-2], args[1].shape[-2]
                    shape = (*visible.shape[:-2], rows, columns)
                    pairs = int(visible.expand(shape).sum())
                    facts["visible_pairs"] = pairs // max(1, visible.shape[:-2].numel())
                    facts["mask"] = _classify(visible)
                    return entry.taint
        return frozenset()

    # -- ops that need values --------------------------------------------------------------------

    def _needs_values(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                      tensors: list[Tensor]) -> Any:
        """Run an op whose result depends on values; NotImplemented for all others."""
        name, values = info.name, self.values
        if name == "aten._local_scalar_dense":
            value, taint = values.value_of(args[0], "item()")
            if self.recording:
                self._record(func, info, args, kwargs, tensors, [], False, sync=True, taint=taint)
            return value.reshape(-1)[0].item()
        if name == "aten.equal":
            first, second = values.known(args[0]), values.known(args[1])
            if first is not None and second is not None:
                return bool(torch.equal(first.value, second.value))
            values.assume("branch", "equal() of unknown tensors is taken as: shapes are equal")
            return tuple(args[0].shape) == tuple(args[1].shape)
        if name in _MASKED_INDEX and any(
                isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            return self._masked_index(func, info, args, kwargs)
        if name in _COUNTED_OUTPUT and not (name == "aten.repeat_interleave" and len(args) > 1
                                            and not isinstance(args[1], Tensor)):
            return self._counted(func, info, args, kwargs, tensors)
        if name == "aten._to_copy" and kwargs.get("device") is not None \
                and torch.device(kwargs["device"]).type == "cpu":
            return self._to_host(func, info, args, kwargs, tensors)
        if name == "aten.copy_" and args[0].device.type == "cpu":
            entry = values.known(args[1])
            if entry is not None:
                args[0].copy_(entry.value)
            return args[0]
        if name == "torchvision.nms":
            count = max(1, args[0].shape[0] // 2)
            taint = values.assume("nms", "non-maximum suppression keeps half of the boxes", count)
            out = torch.empty((count,), dtype=torch.int64, device=META)
            values.learn(out, torch.arange(count), frozenset([taint]))
            if self.recording:
                self._record(func, info, args, kwargs, tensors, [out], True, taint=frozenset([taint]))
            return out
        return NotImplemented

    def _masked_index(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A boolean index becomes the integer indices of its true elements."""
        indices: list[Tensor | None] = []
        taint: frozenset[int] = frozenset()
        for item in args[1]:
            if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
                value, why = self.values.value_of(item, "a boolean index")
                taint |= why
                for column in value.nonzero().unbind(1):
                    index = torch.empty(column.shape, dtype=column.dtype, device=META)
                    self.values.learn(index, column.contiguous(), why)
                    indices.append(index)
            else:
                indices.append(item)
        count = next((i.numel() for i in indices if i is not None), 0)
        rest = list(args[2:])
        if info.name != "aten.index" and rest and isinstance(rest[0], Tensor):
            given = rest[0]
            if given.dim() and given.shape[0] not in (1, count) and count:
                rest[0] = given[:1].expand(count, *given.shape[1:])
                taint |= {self.values.assume(
                    "shape", f"index_put of {given.shape[0]} values where {count} positions are assumed")}
        new_args = (args[0], indices, *rest)
        out = func(*new_args, **kwargs)
        tensors: list[Tensor] = []
        _collect(new_args, tensors)
        if info.mutated:
            self.values.forget(args[0])
        else:
            self.values.propagate(info.name, func, new_args, kwargs, tensors, [out], [])
        if self.recording:
            self._record(func, info, new_args, kwargs, tensors, [out], True, sync=False, taint=taint)
        return out

    def _counted(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                 tensors: list[Tensor]) -> Any:
        """nonzero, unique, bincount ...: the output's size is a value."""
        taint: frozenset[int] = frozenset()
        plain = []
        for position, item in enumerate(args):
            if isinstance(item, Tensor):
                if info.name == "aten.masked_select" and position == 0 and self.values.known(item) is None:
                    plain.append(torch.zeros(tuple(item.shape), dtype=item.dtype))
                    continue
                value, why = self.values.value_of(item, info.name.removeprefix("aten."))
                taint |= why
                plain.append(value)
            else:
                plain.append(item)
        result = func(*plain, **kwargs)

        def lift(value: Tensor) -> Tensor:
            out = torch.empty(value.shape, dtype=value.dtype, device=META)
            if info.name != "aten.masked_select":
                self.values.learn(out, value, taint)
            return out
        out = tree_map_only(Tensor, lift, result)
        outputs: list[Tensor] = []
        _collect((out,), outputs)
        if self.recording:
            self._record(func, info, args, kwargs, tensors, outputs, isinstance(out, Tensor),
                         sync=False, taint=taint)
        return out

    def _to_host(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                 tensors: list[Tensor]) -> Any:
        """`.cpu()`: the real value where known, else the tensor stays on meta, and that is said."""
        entry = self.values.known(args[0])
        if self.recording:
            self._record(func, info, args, kwargs, tensors, [], False, sync=True,
                         taint=entry.taint if entry else frozenset())
        if entry is not None:
            return entry.value.to(kwargs.get("dtype") or entry.value.dtype).clone()
        self.values.assume("host-copy", "a copy to the host of an unknown value is not followed")
        moved = dict(kwargs, device=META)
        out = func(*args, **moved)
        tag = args[0].__dict__.get(self._key)
        if tag is not None:
            self._tag(out, tag)
        return out

    # -- ops that meta cannot run ------------------------------------------------------------------

    def _fallback(self, func: Any, info: _OpInfo, args: Any, kwargs: Mapping[str, Any],
                  tensors: list[Tensor], error: Exception) -> Any:
        """Try, in order: stray CPU tensors to meta, a decomposition, the shape of a run on CPU zeros."""
        devices = {t.device.type for t in tensors}
        if {"cpu", "meta"} <= devices:
            def move(t: Tensor) -> Tensor:
                if t.device.type != "cpu":
                    return t
                moved = torch.empty_like(t, device=META)
                self.node_of(t) if self.recording else None
                if known_values.small(t):
                    self.values.learn(moved, t.detach())
                tag = t.__dict__.get(self._key)
                if tag is not None:
                    moved.__dict__[self._key] = tag
                return moved
            new_args, new_kwargs = tree_map_only(Tensor, move, (args, dict(kwargs)))
            with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
                return func(*new_args, **new_kwargs)
        if not isinstance(error, NotImplementedError):
            raise error
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not info.mutated and sum(t.numel() for t in tensors) <= 1 << 24:
            zeros = tree_map_only(
                Tensor, lambda t: torch.zeros(tuple(t.shape), dtype=t.dtype), (args, dict(kwargs)))
            with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
                result = func(*zeros[0], **zeros[1])
                self.values.assume("shape", f"{info.name} has no meta kernel: its output shape is that of a "
                                            "run on zeros")
                return to_device(result, META)
        if info.mutated:
            written = [t for position, key in info.mutated
                       for t in _listed(kwargs.get(key, args[position] if position < len(args) else ()))]
            self.values.assume("shape", f"{info.name} has no meta kernel: taken as writing in place")
            return written[0] if func._schema.returns and written else None
        if tensors:
            self.values.assume("shape", f"{info.name} has no meta kernel: its outputs are taken to be like its "
                                        "first input")
            count = len(func._schema.returns)
            results = tuple(torch.empty_like(tensors[0], device=META) for _ in range(count))
            return results[0] if count == 1 else results
        raise error

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """cond and while_loop take one path; others run as they are."""
        name = func.name() if callable(getattr(func, "name", None)) else str(func)
        if name == "cond":
            condition, when_true, when_false, operands = args[:4]
            if isinstance(condition, Tensor):
                value, _ = self.values.value_of(condition, "cond")
                condition = bool(value.reshape(-1)[0])
            with self._again():
                return (when_true if condition else when_false)(*operands)
        if name == "while_loop":
            self.values.assume("branch", "while_loop runs its body once", 1)
            _, body, carried = args[:3]
            with self._again():
                return body(*carried, *(args[3] if len(args) > 3 else ()))
        with self._again():
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """The dispatch mode is off while it handles an op; this turns it on again."""
        TorchDispatchMode.__enter__(self)
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    # -- modules -----------------------------------------------------------------------------------

    def _before(self, module: nn.Module, inputs: Any) -> None:
        path = self._paths.get(id(module))
        if path is None:
            parent = self.stack[-1].path if self.stack else ""
            path = f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
            self.modules.setdefault(path, type(module).__name__)
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self.stack.append(Frame(path, call))

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if sys.exc_info()[0] is not None and self.failed_in is None and self.stack:
            self.failed_in = (self.stack[-1].path, type(module).__name__)
        if self.stack:
            self.stack.pop()

    def __enter__(self) -> Recorder:
        enter = self._exit.enter_context
        enter(kept_whole())
        enter(torch.compiler.set_stance("force_eager"))
        enter(torch.autograd.set_multithreading_enabled(False))
        for handle in (nn_module.register_module_forward_pre_hook(self._before),
                       nn_module.register_module_forward_hook(self._after, always_call=True)):
            self._exit.callback(handle.remove)
        enter(_Functions(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        super().__exit__(*exception)
        self._exit.close()

    def close(self) -> None:
        """Take our tags off tensors that outlive the capture."""
        for tensor in self._tagged:
            tensor.__dict__.pop(self._key, None)


class _Functions(TorchFunctionMode):
    """Torch-level names, and the calls that leave the dispatcher for Python values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if func in _TO_PYTHON:
            tensor = args[0]
            if tensor.device.type == "meta":
                value, taint = recorder.values.value_of(tensor, f"{func.__name__}()")
                if recorder.recording:
                    item = aten._local_scalar_dense.default
                    recorder._record(item, _info(item), (tensor,), {}, [tensor], [], False,
                                     sync=True, facts={"elements": tensor.numel()}, taint=taint)
                return getattr(value, func.__name__)()
        elif func is Tensor.__format__:
            if args[0].device.type == "meta" and args[0].dim() == 0:
                return format(args[0].item(), args[1])
        elif func in _CONSTRUCTORS:
            made = self._construct(func, args, kwargs)
            if made is not None:
                return made
        outer = recorder.function
        if not outer:
            name = getattr(func, "__name__", "")
            recorder.function = "" if name in ("__get__", "__set__") else name
        try:
            return func(*args, **kwargs)
        finally:
            recorder.function = outer

    def _construct(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """torch.tensor([...]) for meta: a meta tensor whose value is known."""
        data = args[0] if args else kwargs.get("data")
        device = kwargs.get("device")
        target = torch.device(device) if device is not None else torch.get_default_device()
        if target.type != "meta" or isinstance(data, Tensor):
            return None
        value = func(*args, **dict(kwargs, device="cpu", requires_grad=False)
                     if func is torch.tensor else dict(kwargs, device="cpu"))
        made = torch.empty(value.shape, dtype=value.dtype, device=META)
        if kwargs.get("requires_grad"):
            made.requires_grad_()
        if known_values.small(value):
            self.recorder.values.learn(made, value)
        return made


_TO_PYTHON = frozenset({Tensor.tolist, Tensor.numpy})
_CONSTRUCTORS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRAMES: dict[CodeType, int] = {}
_LINES: dict[tuple[CodeType, int], str] = {}


def _source() -> str:
    """ "file.py:12" of the innermost frame that is neither torch's nor ours; "" where there is none."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        kind = _FRAMES.get(code)
        if kind is None:
            name = code.co_filename
            inner = name.startswith(_TORCH) or name.startswith("<") or name.endswith("contextlib.py")
            kind = _FRAMES[code] = 0 if inner else (1 if name.startswith(_HERE) else 2)
        if kind == 2:
            key = (code, frame.f_lasti)
            line = _LINES.get(key)
            if line is None:
                line = _LINES[key] = f"{_relative(code.co_filename)}:{frame.f_lineno}"
            return line
        if kind == 1 and code.co_name in _BOUNDARIES:
            return ""
        frame = frame.f_back
    return ""


_BOUNDARIES = frozenset({"run_forward", "run_backward", "run_optimizer"})


def _relative(path: str) -> str:
    """A source path relative to the longest import path (or the working folder) that holds it."""
    best = ""
    for root in (*sys.path, os.getcwd()):
        if not root:
            continue
        prefix = os.path.abspath(root) + os.sep
        if path.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return path[len(best):] if best else os.path.basename(path)


def _spec(tensor: Tensor, storage: int) -> Spec:
    if tensor.layout is not torch.strided:
        return Spec(tuple(tensor.shape), tensor.dtype, _contiguous(tuple(tensor.shape)), storage)
    return Spec(tuple(tensor.shape), tensor.dtype, tensor.stride(), storage)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _collect(items: Iterable[Any], found: list[Tensor]) -> None:
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            _collect(item, found)


def _listed(item: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _collect((item,), found)
    return found


def _identifier(name: str) -> str:
    return name.replace(".", "_") or "value"


def _dimension(name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> int | None:
    """The dimension that a routing op chooses along; None for the whole-tensor forms of max and min."""
    schema = [a.name for a in func._schema.arguments]
    if name in ("aten.max", "aten.min", "aten.cummax", "aten.cummin") and "dim" not in schema:
        return None
    if "dim" in schema:
        position = schema.index("dim")
        value = kwargs.get("dim", args[position] if position < len(args) else -1)
        return -1 if value is None else int(value)
    return -1


def _classify(visible: Tensor) -> str:
    """none, causal, sliding-window, padding or full: what a boolean mask [..., S, L] lets through."""
    if bool(visible.all()):
        return "none"
    plane = visible.reshape(-1, *visible.shape[-2:])[0]
    rows, columns = plane.shape
    shift = columns - rows
    causal = torch.ones(rows, columns, dtype=torch.bool).tril(shift)
    if torch.equal(plane, causal):
        return "causal"
    if bool((plane & ~causal).any()):
        same = bool((plane == plane[:1]).all())
        return "padding" if same else "full"
    widths = plane.sum(1)
    window = int(widths.max())
    band = causal & ~torch.ones(rows, columns, dtype=torch.bool).tril(shift - window)
    return "sliding-window" if torch.equal(plane, band) else "full"


@contextlib.contextmanager
def no_recording(recorder: Recorder) -> Iterator[None]:
    """Ops inside are run and their values followed, but they do not enter the graph."""
    before, recorder.recording = recorder.recording, False
    try:
        yield
    finally:
        recorder.recording = before


__all__ = ["META", "META_KEY", "Entry", "Recorded", "Recorder", "Spec", "TraceError",
           "UnknownValueError", "no_recording"]


def tensors_in(tree: Any, depth: int = 6, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors reachable in a nested output: containers, mappings, dataclasses, cache objects."""
    seen = set() if seen is None else seen
    if isinstance(tree, Tensor):
        if id(tree) in seen:
            return []
        seen.add(id(tree))
        return [tree]
    if depth == 0 or tree is None or isinstance(tree, (str, bytes, int, float, nn.Module, type)):
        return []
    if id(tree) in seen:
        return []
    seen.add(id(tree))
    if isinstance(tree, Mapping):
        items: Iterable[Any] = tree.values()
    elif isinstance(tree, (list, tuple, set, frozenset)):
        items = tree
    elif hasattr(tree, "__dict__") and not callable(tree):
        items = vars(tree).values()
    else:
        return []
    return [t for item in items for t in tensors_in(item, depth - 1, seen)]


Callback = Callable[[str], None]
