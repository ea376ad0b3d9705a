"""Replays a graph to time each op, and notes the ops that Inductor puts into each kernel."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx
from torch.profiler import record_function

from rooftrace.graph import OpGraph
from rooftrace.measured.alignment import compiled, keys
from rooftrace.measured.bench.clock import Bench, MeasureError
from rooftrace.measured.bench.runfile import OpTime
from rooftrace.measured.bench.steps import RANGE, on_device, profiled
from rooftrace.tracer import torch_private
from rooftrace.tracer.lowering import to_fx, written
from rooftrace.tracer.values import torch_dtype

# -- replay ----------------------------------------------------------------------------------------
# Every op runs inside a range named after its id, so that all kernels inside belong to it.  The
# host is slower than in a run of the module; the kernels are the same.

_NUMBER = "_op"
"""The fact of an expanded op that has the id of its op in the short graph."""


@dataclass(frozen=True)
class Attribution:
    """Seconds by op id: medians over several replays."""

    ops: tuple[OpTime, ...]
    seconds: float  # s, one replay in all: of the device; of a CPU on the wall, Python included
    unattributed: float  # s of these that are in no op


def attributed(
    bench: Bench,
    graph: OpGraph,
    tensors: Mapping[str, Tensor] | None = None,
    repetitions: int = 5,
) -> Attribution:
    """The time of every op of `graph`, by id; an op in a repeat has the sum of all iterations.

    tensors: inputs, parameters and buffers by their names in the graph; missing ones are random
    (integers: zero).  They are not changed.  An op that launched nothing has no entry.  Raises
    MeasureError for an op that fails on real tensors.
    """
    numbered = tuple(replace(op, facts={**op.facts, _NUMBER: op.id}) for op in graph.ops)
    flat = graph.replace(ops=numbered).expand()
    values = _values(bench, flat, tensors or {})
    inputs = [values[_name(flat, index)] for index in flat.inputs]
    module = to_fx(flat, values).to(bench.device)
    for node in module.graph.nodes:  # factories make their tensor on this device
        if node.op == "call_function" and _takes_device(node.target):
            node.update_kwarg("device", bench.device)
    runs = []
    replay = _Replay(module)
    for number in range(repetitions + 1):
        with torch.no_grad():
            events, wall = profiled(bench, lambda: replay.run(*inputs), shapes=False)
        if number:  # the first one warms up
            runs.append(_ReplayTimes.of(events, flat, bench.on_cuda, wall))
    return _middle(graph, runs)


class _Replay(fx.Interpreter):
    """Runs a rebuilt graph with each op in a separate range."""

    _now = ""

    def run_node(self, n: fx.Node) -> Any:
        op = n.meta.get("op")
        self._now = "" if op is None else f"{RANGE}{op}"
        try:
            return super().run_node(n)
        except Exception as error:  # whatever an op raises
            first = next(iter(str(error).strip().splitlines()), "")
            where = f"op {op} ({n.target}) of module {n.meta.get('module', '')!r}"
            raise MeasureError(
                f"{where} fails on real tensors: {type(error).__name__}: {first}; what the graph "
                "assumed (see its assumptions) may not be so, or its extension is not loaded"
            ) from error

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not self._now:
            return super().call_function(target, args, kwargs)
        with record_function(self._now):
            return target(*args, **kwargs)


def _takes_device(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return any(argument.name == "device" and argument.kwarg_only for argument in arguments)


def _name(graph: OpGraph, index: int) -> str:
    return graph.values[index].name or f"value_{index}"


def _values(bench: Bench, graph: OpGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """External tensors by name: from `tensors`, or random; copied if the graph writes them."""
    changed = {
        graph.values[value].storage
        for op in graph.ops
        for value in written(op.target, op.arguments)
    }
    values: dict[str, Tensor] = {}
    for index in dict.fromkeys((*graph.inputs, *graph.external)):
        name = _name(graph, index)
        if name in values or (name in graph.constants and name not in tensors):
            continue
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != graph.values[index].shape:
            values[name] = _drawn(bench, graph, index)
        else:
            copied = graph.values[index].storage in changed
            values[name] = tensor.detach().clone() if copied else tensor.detach()
    for index in graph.inputs:  # an input whose value the graph knows
        values.setdefault(_name(graph, index), _drawn(bench, graph, index))
    return values


def _drawn(bench: Bench, graph: OpGraph, index: int) -> Tensor:
    tensor = graph.values[index]
    dtype = torch_dtype(tensor.dtype)
    empty = torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=bench.device)
    if not dtype.is_floating_point or 0 in tensor.stride:
        return empty.zero_() if 0 not in tensor.stride else empty
    drawn = bench.random(*tensor.shape)
    if tensor.role == "optimizer":  # second moments and step counts are above zero
        drawn = drawn.abs() + 1
    return empty.copy_(drawn)


@dataclass(frozen=True)
class _ReplayTimes:
    """One replay: seconds and kernels by id in the short graph, and seconds in all."""

    seconds: Mapping[int, float]
    kernels: Mapping[int, tuple[str, ...]]
    total: float

    @staticmethod
    def of(events: Any, flat: OpGraph, on_cuda: bool, wall: float) -> _ReplayTimes:

        seconds: dict[int, float] = {}
        kernels: dict[int, tuple[str, ...]] = {}
        for event in events:
            # A GPU has a range of the same name, gaps between kernels included.
            if (
                not event.name.startswith(RANGE)
                or event.device_type != torch_private.DeviceType.CPU
            ):
                continue
            op = flat.ops[int(event.name.removeprefix(RANGE))].facts[_NUMBER]
            launched = list(_launched(event)) if on_cuda else []
            took = sum(kernel.duration for kernel in launched)
            took = (took if on_cuda else event.cpu_time_total) * 1e-6
            if took > 0:
                seconds[op] = seconds.get(op, 0.0) + took
                names = sorted({str(kernel.name)[:120] for kernel in launched})
                kernels[op] = tuple(names)
        total = on_device(events) if on_cuda else wall
        return _ReplayTimes(seconds, kernels, total)


def _launched(event: Any) -> Iterator[Any]:
    """The kernels launched inside of an event."""
    yield from event.kernels
    for inner in event.cpu_children:
        yield from _launched(inner)


def _middle(graph: OpGraph, runs: list[_ReplayTimes]) -> Attribution:
    ops = []
    for op in graph.ops:
        times = [run.seconds[op.id] for run in runs if op.id in run.seconds]
        if times:
            ops.append(
                OpTime(
                    target=op.target,
                    seconds=statistics.median(times),
                    count=graph.times(op),
                    id=op.id,
                    module=op.module,
                    kernels=runs[-1].kernels.get(op.id, ()),
                )
            )
    total = statistics.median(run.total for run in runs)
    rest = statistics.median(run.total - sum(run.seconds.values()) for run in runs)
    return Attribution(tuple(ops), total, max(0.0, rest))


# -- inductor --------------------------------------------------------------------------------------
# Inductor calls a pass of the user after it has fused the nodes of a graph, and notes the nodes of
# each kernel that it writes.  Both are settings of one `torch.compile`, so other compilations in
# the process stay as they are.  Every node has the op that it was decomposed from, the module that
# called it, and the number of its autograd node.

_STEP = re.compile(r"[A-Za-z_]\w*|\d+")
_WRITTEN = "_inductor_triton_kernel_to_post_grad_node_info"
"""The attribute in which Inductor notes the nodes of each kernel, of any backend."""
_TOO_OLD = "this release of torch does not say what went into a kernel"
_NO_STEP = ("getattr", "_modules")


class Compilations:
    """Notes every graph that Inductor compiles under `options`.

    `torch.compile(module, options=compilations.options)` compiles as without them, but for a range
    of the profiler around each kernel on a CPU, and without caches of earlier compilations.
    """

    trouble: str
    """Why the kernels are unknown; "" where they are known."""

    def __init__(self) -> None:
        self.trouble = "" if hasattr(_debug(), _WRITTEN) else _TOO_OLD
        self._noted: list[_NotedGraph] = []
        self._order: dict[str, int] = {}  # of the nodes of the last graph that Dynamo has made

    @property
    def options(self) -> dict[str, Any]:
        """Settings for `torch.compile(options=...)` that this release of torch has.

        None in a release that does not note the nodes of a kernel.
        """
        if self.trouble:
            return {}

        wanted = {
            "pre_grad_custom_pass": self._first_pass(),
            "_post_fusion_custom_pass": self._note,
            "trace.provenance_tracking_level": 1,
            "cpp.enable_kernel_profile": True,
            "fx_graph_cache": False,
        }
        existing = torch_private.inductor_settings()
        return {name: value for name, value in wanted.items() if name in existing}

    def _first_pass(self) -> Any:
        """A pass that Inductor calls with the graph of Dynamo, in the order of the program.

        Later passes move nodes without gradients.
        """

        compilations = self

        class First(torch_private.CustomGraphPass):
            def __call__(self, graph: Any) -> None:
                compilations._order = {node.name: at for at, node in enumerate(graph.nodes)}

            def uuid(self) -> str:
                return f"rooftrace {id(compilations)}"

        return First()

    def _note(self, scheduled: Any) -> Any:
        """Called by Inductor with the nodes of a graph in launch order, before it writes kernels.

        A release of torch may differ here: the step still runs, and `trouble` has the error.
        """
        try:
            self._keep(scheduled)
        except Exception as error:  # whatever another release raises
            self.trouble = f"{type(error).__name__}: {error}"
        return scheduled

    def _keep(self, scheduled: Any) -> None:
        """Keep the part of this graph in the mapping that Inductor writes for all graphs."""
        written = getattr(_debug(), _WRITTEN)
        if self._noted and self._noted[-1].written is written:
            self._noted[-1].until = len(written)
        origins = (
            origin
            for fused in scheduled
            for node in fused.get_nodes()
            if node.node is not None
            for origin in node.node.get_origins()
        )
        first = next(origins, None)
        nodes = [] if first is None else [_CompiledNode.of(node) for node in first.graph.nodes]
        self._noted.append(_NotedGraph(nodes, written, len(written), self._order))

    def graphs(self) -> tuple[compiled.CompiledGraph, ...]:
        """The graphs compiled so far, in that order."""
        return tuple(noted.graph() for noted in self._noted)


def _debug() -> Any:

    return torch_private.inductor_debug


@dataclass(frozen=True, slots=True)
class _CompiledNode:
    """A node of a graph after decomposition."""

    name: str
    target: str
    original: str  # the op that it was decomposed from; "" of a node that Inductor has added
    module: str
    backward: bool
    source: str  # the name of the call in Dynamo's graph; "": unknown
    call: tuple[Any, ...]  # equal for all nodes of one op

    @staticmethod
    def of(node: Any) -> _CompiledNode:
        meta = node.meta
        original, backward = meta.get("original_aten"), meta.get("partitioner_tag") == "is_backward"
        stack = meta.get("fwd_nn_module_stack" if backward else "nn_module_stack") or {}
        path = [entry[0] for entry in stack.values()][-1:]
        called: Sequence[Any] = () if backward else meta.get("from_node") or ()
        source = str(getattr(called[0], "name", "")) if called else ""
        plain = str(node.target) == str(original)  # not decomposed: an op by itself
        return _CompiledNode(
            name=node.name,
            target=str(node.target),
            original="" if original is None or node.op != "call_function" else str(original),
            module=_module(path[0]) if path else "",
            backward=backward,
            source=source,
            call=(backward, meta.get("seq_nr"), str(original), source, node.name if plain else ""),
        )


def _module(path: str) -> str:
    """ "layers.0.norm" of "L['self'].layers[0].norm" and its variants in releases of Dynamo."""
    plain = re.sub(r"L\[['\"]\w+['\"]\]", "", path)
    return ".".join(step for step in _STEP.findall(plain) if step not in _NO_STEP)


@dataclass(slots=True)
class _NotedGraph:
    """A graph that was compiled; its kernels are the entries of `written` from `begin` on."""

    nodes: Sequence[_CompiledNode]
    written: Mapping[str, Sequence[str]]
    begin: int
    order: Mapping[str, int]
    until: int | None = None

    def graph(self) -> compiled.CompiledGraph:
        """The ops in the order of the program, and the kernels."""
        calls: dict[tuple[Any, ...], int] = {}
        ops: list[compiled.ProgramOp] = []
        op_of: dict[str, int] = {}  # by the name of the node
        place = {node.name: number for number, node in enumerate(self.nodes)}
        for node in self._in_order():
            if node.call not in calls:
                calls[node.call] = len(ops)
                ops.append(
                    compiled.ProgramOp(
                        compiled.call_name(node.original), node.module, node.backward
                    )
                )
            op_of[node.name] = calls[node.call]
        # What Inductor writes is in launch order.
        listed = list(self.written.items())[self.begin : self.until]
        kernels: list[compiled.CompiledKernel] = []
        for name, parts in listed:
            shown = compiled.call_name(name)
            if "::" in shown:  # a library's: nodes before it only fed it
                name = keys.common_name(shown)
                parts = sorted(
                    parts,
                    key=lambda part: (
                        part in op_of and keys.common_name(ops[op_of[part]].name) == name,
                        place.get(part, -1),
                    ),
                )[-1:]
            counts = Counter(op_of[part] for part in parts if part in op_of)
            kernels.append(compiled.CompiledKernel(shown, dict(counts)))
        return compiled.CompiledGraph(tuple(ops), tuple(kernels))

    def _in_order(self) -> list[_CompiledNode]:
        """The nodes of ops in the order of the program; nodes without a source follow the last one.

        Graphs with a backward are in order.
        """
        keyed: list[tuple[int, int]] = []
        nodes = [node for node in self.nodes if node.original and "getitem" not in node.target]
        if any(node.backward for node in nodes):
            return nodes
        last = -1
        for number, node in enumerate(nodes):
            last = self.order.get(node.source, last)
            keyed.append((last, number))
        return [nodes[number] for _, number in sorted(keyed)]
