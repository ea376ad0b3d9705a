"""The measured time of each op of a graph that runs on real tensors, op by op, under a profiler.

Every op runs inside a range named after its id, so that all kernels inside belong to it.  The
host is slower than in the module's own run; the kernels are the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx
from torch.profiler import record_function

from rooftrace.measured.bench import Bench, MeasureError
from rooftrace.measured.realsteps.profiler import RANGE, on_device, profiled
from rooftrace.measured.runs import OpTime
from rooftrace.tracer.dtypes import torch_dtype
from rooftrace.tracer.graph import Op, OpGraph
from rooftrace.tracer.rebuilding import to_fx, written

_NUMBER = "_op"
"""The fact of an expanded op that says which op of the short graph it comes from."""


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

    tensors: inputs, parameters and buffers by their names in the graph; what is missing is random
    (whole numbers: zero).  They are not changed.  An op that launched nothing has no entry.  Raises
    MeasureError for an op that fails on real tensors.
    """
    numbered = tuple(replace(op, facts={**op.facts, _NUMBER: op.id}) for op in graph.ops)
    flat = graph.replace(ops=numbered).expand()
    values = _values(bench, flat, tensors or {})
    inputs = [values[_name(flat, index)] for index in flat.inputs]
    module = to_fx(flat, values).to(bench.device)
    for node in module.graph.nodes:  # what makes a tensor makes it here
        if node.op == "call_function" and _takes_device(node.target):
            node.update_kwarg("device", bench.device)
    runs = []
    replay = _Replay(module)
    for number in range(repetitions + 1):
        with torch.no_grad():
            events, wall = profiled(bench, lambda: replay.run(*inputs), shapes=False)
        if number:  # the first one warms up
            runs.append(_Times.of(events, flat, bench.on_cuda, wall))
    return _middle(graph, runs)


# -- running ---------------------------------------------------------------------------------------


class _Replay(fx.Interpreter):
    """Runs a rebuilt graph with each op in a range of its own."""

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
    """Tensors that no op makes, by name: those in `tensors`, or random ones.

    A tensor that the graph writes is copied.
    """
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


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    """One replay: seconds and kernels by id in the short graph, and seconds in all."""

    seconds: Mapping[int, float]
    kernels: Mapping[int, tuple[str, ...]]
    total: float

    @staticmethod
    def of(events: Any, flat: OpGraph, on_cuda: bool, wall: float) -> _Times:
        from torch._C._autograd import DeviceType

        seconds: dict[int, float] = {}
        kernels: dict[int, tuple[str, ...]] = {}
        for event in events:
            # A GPU has a range of the same name: what ran between its ends, gaps included.
            if not event.name.startswith(RANGE) or event.device_type != DeviceType.CPU:
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
        return _Times(seconds, kernels, total)


def _launched(event: Any) -> Iterator[Any]:
    """The kernels launched inside of an event."""
    yield from event.kernels
    for inner in event.cpu_children:
        yield from _launched(inner)


def _middle(graph: OpGraph, runs: list[_Times]) -> Attribution:
    ops = []
    for op in graph.ops:
        times = [run.seconds[op.id] for run in runs if op.id in run.seconds]
        if times:
            ops.append(_op_time(graph, op, statistics.median(times), runs[-1]))
    total = statistics.median(run.total for run in runs)
    rest = statistics.median(run.total - sum(run.seconds.values()) for run in runs)
    return Attribution(tuple(ops), total, max(0.0, rest))


def _op_time(graph: OpGraph, op: Op, seconds: float, run: _Times) -> OpTime:
    kernels = run.kernels.get(op.id, ())
    return OpTime(
        target=op.target,
        seconds=seconds,
        count=graph.times(op),
        id=op.id,
        module=op.module,
        kernels=kernels,
    )
