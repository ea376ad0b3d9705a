"""What changed between two revisions: totals, modules matched by path, ops behind a change."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.findings.diffs import changes
from rooftrace.costmodels.findings.diffs.communication import network_totals
from rooftrace.costmodels.findings.diffs.edits import edits_of
from rooftrace.costmodels.findings.diffs.held import held_changes
from rooftrace.costmodels.findings.diffs.modules import Whereabouts, module_changes
from rooftrace.costmodels.findings.diffs.rows import diff_rows
from rooftrace.costmodels.findings.diffs.sides import Sides
from rooftrace.tracer.changes import Change
from rooftrace.tracer.changes.aligning import union
from rooftrace.tracer.changes.metrics import TOTALS
from rooftrace.tracer.graph import OpGraph


def compare_sources(before: Mapping[str, str], after: Mapping[str, str]) -> changes.Sources | None:
    """Compare the digests of two sides' source files by path; None unless both have files.

    Files are matched by their path below the folder that all of their side are in.
    """
    if not before or not after:
        return None
    files = union(_below(before), _below(after), None)
    return changes.Sources(
        (len(before), len(after)),
        tuple(name for name, old, new in files if old != new),
        list(before) == list(after),
    )


def _below(files: Mapping[str, str]) -> dict[str, str]:
    folder = os.path.commonpath([os.path.dirname(path) for path in files])
    return {os.path.relpath(path, folder): content for path, content in files.items()}


def diff_estimates(
    before: Mapping[str, Estimate],
    after: Mapping[str, Estimate],
    names: tuple[str, str] = ("before", "after"),
    eager: tuple[Mapping[str, Estimate], Mapping[str, Estimate]] | None = None,
) -> changes.Diff:
    """Compare estimates by phase.  Phases that only one side has are listed, not compared.

    eager: the same steps in eager mode, whose times stand beside each cause.  Raises ValueError
    without estimates, and where those of one side are on several chips or execution models.
    """
    shared = [phase for phase in before if phase in after]
    sides = [tuple(side.values()) for side in (before, after)]
    priced = tuple(_priced(side or sides[1 - number]) for number, side in enumerate(sides))
    return changes.Diff(
        names=names,
        chips=(priced[0][0], priced[1][0]),
        executions=(priced[0][1], priced[1][1]),
        expected=all(each.expected for side in sides for each in side),
        phases=tuple(
            _phase(
                before[phase],
                after[phase],
                (eager[0][phase], eager[1][phase]) if eager is not None else None,
            )
            for phase in shared
        ),
        only_before=tuple(p for p in before if p not in after),
        only_after=tuple(p for p in after if p not in before),
    )


def _priced(estimates: tuple[Estimate, ...]) -> tuple[str, str]:
    """The chip and the execution model of all estimates of a side."""
    priced = {(each.chip.name, each.execution): None for each in estimates}
    if len(priced) != 1:
        listed = ", ".join(f"{model.name} on {chip}" for chip, model in priced) or "no estimates"
        raise ValueError(f"expected estimates on one chip under one execution model, got {listed}")
    ((chip, model),) = priced
    return chip, model.name


def _phase(
    before: Estimate, after: Estimate, eager: tuple[Estimate, Estimate] | None
) -> changes.PhaseDiff:
    first, second = _totals(before), _totals(after)
    shown: tuple[str, ...] = tuple(TOTALS)
    if before.exchanges or after.exchanges:
        shown = (*shown, *changes.NETWORK)
    sides = Sides(before, after)
    places, edits = Whereabouts(sides), edits_of(sides)
    rows = diff_rows(sides, places, edits, Sides(*eager) if eager else None)
    held = held_changes(before.memory, after.memory, places.renamed)
    return changes.PhaseDiff(
        phase=before.phase,
        totals={name: Change(first[name], second[name]) for name in shown},
        # Without rows, whatever differs module by module is the same work in another place, and
        # with equal peaks whatever is held is the same under other names.
        modules=module_changes(sides, places, edits) if rows else (),
        rows=rows,
        held=held if rows or first["memory"] != second["memory"] else (),
        assumed=_assumed(before.graph, after.graph),
        meshes=(before.graph.mesh, after.graph.mesh),
    )


def _totals(estimate: Estimate) -> dict[str, float]:
    return {
        "time": estimate.t_est,
        "flops": estimate.flops,
        "bytes": estimate.bytes_hbm,
        "memory": estimate.memory.peak,
        "params": int(estimate.graph.model.get("params", 0)),
        "kernels": estimate.kernels,
        **network_totals(estimate),
    }


def _assumed(before: OpGraph, after: OpGraph) -> tuple[str, ...]:
    """Assumptions that only one side makes."""
    first, second = (dict.fromkeys(a.text for a in graph.assumptions) for graph in (before, after))
    new = [f"+ {text}" for text in second if text not in first]
    return (*new, *(f"- {text}" for text in first if text not in second))
