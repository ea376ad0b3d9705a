"""What a step of any nn.Module costs on a chip, in FLOPs, bytes and time.

    import rooftrace as rt

    graph = rt.trace(model, x)                     # any module, any arguments; no weights, no GPU
    print(rt.estimate(graph, chip="h200-sxm"))     # the table
    rt.report(model, x, chip="h200-sxm", out="report/")

Importing this package imports neither torch nor anything else that is slow to load: names are
looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rooftrace.costmodels.cost import Access, Cost, OpView, Work
    from rooftrace.costmodels.estimate import Estimate, Plan, plan
    from rooftrace.costmodels.execution import ExecutionModel, execution_model
    from rooftrace.costmodels.headroom import Headroom, Saving, headroom
    from rooftrace.costmodels.memory import memory
    from rooftrace.costmodels.registry import rule
    from rooftrace.costmodels.rewrite import reprice
    from rooftrace.hardware.chip import Chip
    from rooftrace.hardware.chipfile import available_chips, load_chip
    from rooftrace.reporting.api import (
        calibrate,
        compare,
        diff,
        estimate,
        largest_batch,
        profile,
        report,
        summary,
        validate,
    )
    from rooftrace.reporting.validating import Validation
    from rooftrace.tracer.api import capture, load, save, trace, trace_target
    from rooftrace.tracer.graph import OpGraph
    from rooftrace.tracer.measure_step import measure, measuring
    from rooftrace.tracer.origin import TraceError
    from rooftrace.tracer.request import Request, RequestError, TargetError
    from rooftrace.tracer.runfile import Run, RunFileError, load_run

_WHERE = {
    "Access": "costmodels.cost",
    "Cost": "costmodels.cost",
    "OpView": "costmodels.cost",
    "Work": "costmodels.cost",
    "Estimate": "costmodels.estimate",
    "Plan": "costmodels.estimate",
    "estimate": "reporting.api",
    "plan": "costmodels.estimate",
    "ExecutionModel": "costmodels.execution",
    "execution_model": "costmodels.execution",
    "Headroom": "costmodels.headroom",
    "Saving": "costmodels.headroom",
    "headroom": "costmodels.headroom",
    "memory": "costmodels.memory",
    "rule": "costmodels.registry",
    "reprice": "costmodels.rewrite",
    "Chip": "hardware.chip",
    "available_chips": "hardware.chipfile",
    "load_chip": "hardware.chipfile",
    "OpGraph": "tracer.graph",
    "compare": "reporting.api",
    "diff": "reporting.api",
    "largest_batch": "reporting.api",
    "profile": "reporting.api",
    "report": "reporting.api",
    "summary": "reporting.api",
    "calibrate": "reporting.api",
    "validate": "reporting.api",
    "Validation": "reporting.validating",
    "load": "tracer.api",
    "save": "tracer.api",
    "capture": "tracer.api",
    "trace": "tracer.api",
    "trace_target": "tracer.api",
    "measure": "tracer.measure_step",
    "measuring": "tracer.measure_step",
    "Run": "tracer.runfile",
    "RunFileError": "tracer.runfile",
    "load_run": "tracer.runfile",
    "Request": "tracer.request",
    "RequestError": "tracer.request",
    "TargetError": "tracer.request",
    "TraceError": "tracer.origin",
}

__all__ = [
    "Access",
    "Chip",
    "Cost",
    "Estimate",
    "ExecutionModel",
    "Headroom",
    "OpGraph",
    "OpView",
    "Plan",
    "Request",
    "RequestError",
    "Run",
    "RunFileError",
    "Saving",
    "TargetError",
    "TraceError",
    "Validation",
    "Work",
    "available_chips",
    "calibrate",
    "capture",
    "compare",
    "diff",
    "estimate",
    "execution_model",
    "headroom",
    "largest_batch",
    "load",
    "load_chip",
    "load_run",
    "measure",
    "measuring",
    "memory",
    "plan",
    "profile",
    "report",
    "reprice",
    "rule",
    "save",
    "summary",
    "trace",
    "trace_target",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rooftrace")
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module 'rooftrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rooftrace.{where}"), name)
    globals()[name] = value
    return value


def _render(estimates: list[Estimate]) -> str:
    """The table that print(estimate) shows; costmodels may not import reporting itself."""
    from rooftrace.reporting.table import render_estimates

    return render_estimates(estimates)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
