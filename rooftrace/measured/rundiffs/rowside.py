"""A row of a run as one side of a comparison: its wall times, and its ops where they were timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rooftrace.measured.rundiffs.kernelnames import family_of_kernel, family_of_op
from rooftrace.measured.rundiffs.sides import MeasuredCall, MeasuredKernel, MeasuredSide
from rooftrace.measured.runs import ModelRow, OpTime, Run
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.paths import pattern_of


def side_of_row(run: Run, row: ModelRow, graph: OpGraph | None = None) -> MeasuredSide:
    """The measured step of a row of a run.

    Its ops were measured apart from the step: by the profiler, or one by one.  So they have no
    spread, and do not add up to the step.  graph: of the step, with families, where it is known.
    """
    on_device = run.device.get("type") == "cuda"
    calls = _kernel_calls(row) if row.kernels else _op_calls(row, graph)
    rest = 0.0 if row.kernels else row.unattributed or 0.0
    if rest:
        what = "outside of its ops" if row.source == "replay" else "kernels of no op"
        calls = (*calls, _single(what, "op", 1, rest, ""))
    figures: dict[str, tuple[float, ...]] = {"time": row.seconds}
    if calls:
        kernels = [kernel for call in calls for kernel in call.kernels if kernel.name != _REST]
        figures["work"] = (sum(sum(k.seconds) for call in calls for k in call.kernels),)
        figures["kernels"] = (sum(kernel.count for kernel in kernels),)
    if row.peak_bytes is not None:
        figures["memory"] = (float(row.peak_bytes),)
    return MeasuredSide(
        device=str(run.device.get("name") or ""),
        on_device=on_device,
        figures=figures,
        middle="median",
        calls=calls,
        in_order=bool(row.kernels) or row.source == "replay",
        notes=tuple(_notes(row)),
    )


_REST = "outside of its ops"


def _notes(row: ModelRow) -> Iterable[str]:
    if row.kernels:
        yield "kernels of the compiled step were timed by the profiler, apart from its wall time"
    elif row.source == "replay":
        yield "its ops were timed one by one, apart from the step: they do not add up to it"
    elif row.source == "profiler":
        yield "its ops are of one step under the profiler, apart from its wall times"
    else:
        yield "its ops were not timed: nothing is known but its wall time"
    if row.note:
        yield row.note


def _op_calls(row: ModelRow, graph: OpGraph | None) -> tuple[MeasuredCall, ...]:
    return tuple(_op_call(op, graph) for op in row.ops if op.seconds > 0)


def _op_call(op: OpTime, graph: OpGraph | None) -> MeasuredCall:
    name = ".".join(op.target.split(".")[:2]).replace(".", "::", 1)
    family = family_of_op(op.target) or "other"
    sizes = " ".join(str(list(shape)) for shape in op.shapes if shape)
    if graph is not None and op.id is not None and op.id < len(graph.ops):
        traced = graph.ops[op.id]
        if traced.target == op.target:
            family = traced.family if traced.family != "other" else family
            tensors = [graph.values[value] for value in traced.inputs]
            sizes = " ".join(f"{t.dtype}{list(t.shape)}" for t in tensors[:4] if t.shape)
    call = _single(" + ".join(op.kernels) or name, "op", op.count, op.seconds, family)
    return replace(call, name=name, sizes=sizes, module=op.module, pattern=pattern_of(op.module))


def _kernel_calls(row: ModelRow) -> tuple[MeasuredCall, ...]:
    calls = []
    for kernel in row.kernels:
        known = [family_of_op(target) for target in kernel.targets]
        family = next((f for f in known if f and f != "elementwise"), "")
        family = family or ("elementwise" if known else family_of_kernel(kernel.name, "kernel"))
        calls.append(_single(kernel.name, "kernel", 1, kernel.seconds, family))
    return tuple(calls)


def _single(name: str, kind: str, count: float, seconds: float, family: str) -> MeasuredCall:
    kernel = MeasuredKernel(name=name, kind=kind, count=count, seconds=(seconds,))
    return MeasuredCall(name="", family=family or "other", kernels=(kernel,))
