"""Which function makes the view of a result, by its type."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.estimating.breakdowns import Breakdown
from rooftrace.costmodels.findings import moduletree
from rooftrace.costmodels.findings.diffs import Diff
from rooftrace.costmodels.itemising import Census, NodeTable
from rooftrace.hardware import Chip
from rooftrace.hardware.systems import System
from rooftrace.reporting.gates import gate_view
from rooftrace.reporting.locks import checking
from rooftrace.reporting.sections import Results, report_view
from rooftrace.reporting.text.checkpoints import checkpoints_view
from rooftrace.reporting.text.chips import chip_view
from rooftrace.reporting.text.differences import diff_view
from rooftrace.reporting.text.inventories import inventory_view, parameters_view
from rooftrace.reporting.text.itemised import census_view, nodes_view
from rooftrace.reporting.text.moduletrees import breakdown_view, graph_view, summary_view
from rooftrace.reporting.text.systems import system_view
from rooftrace.reporting.view import model as view
from rooftrace.tracer.checkpoints import CheckpointDiff
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.inventory import ParameterDiff
from rooftrace.tracer.inventory.records import ModelInfo


@singledispatch
def view_of(result: Any, output: view.Output) -> view.View:
    """The view of a result on an output.  Register a function for another type of result:

        @view_of.register
        def _(result: Sweep, output: Output) -> View: ...

    Raises TypeError for a type without one.
    """
    raise TypeError(f"{type(result).__name__}: no view of this type is registered with view_of")


@view_of.register
def _(result: Results, output: view.Output) -> view.View:
    return report_view(result, output)


@view_of.register
def _(result: Estimate, output: view.Output) -> view.View:
    estimates = {result.phase: {result.execution.name: {result.chip.name: result}}}
    return report_view(Results(estimates, {}, {result.phase: result.plan.source}), output)


@view_of.register
def _(result: view.View, output: view.Output) -> view.View:
    return result


@view_of.register
def _(result: Chip, output: view.Output) -> view.View:
    return chip_view(result)


@view_of.register
def _(result: System, output: view.Output) -> view.View:
    return system_view(result)


@view_of.register
def _(result: Diff, output: view.Output) -> view.View:
    return diff_view(result)


@view_of.register
def _(result: checking.GateOutcome, output: view.Output) -> view.View:
    return gate_view(result, output)


@view_of.register
def _(result: moduletree.Summary, output: view.Output) -> view.View:
    return summary_view(result, output)


@view_of.register
def _(result: Breakdown, output: view.Output) -> view.View:
    return breakdown_view(result)


@view_of.register
def _(result: Census, output: view.Output) -> view.View:
    return census_view(result, output)


@view_of.register
def _(result: NodeTable, output: view.Output) -> view.View:
    return nodes_view(result, output)


@view_of.register
def _(result: OpGraph, output: view.Output) -> view.View:
    return graph_view(result)


@view_of.register
def _(result: ModelInfo, output: view.Output) -> view.View:
    return inventory_view(result, output)


@view_of.register
def _(result: ParameterDiff, output: view.Output) -> view.View:
    return parameters_view(result)


@view_of.register
def _(result: CheckpointDiff, output: view.Output) -> view.View:
    return checkpoints_view(result)
