"""From a script's stretches and graphs to what each costs on a chip."""

from __future__ import annotations

from dataclasses import replace

from rooftrace.costmodels.estimating import estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.scripting.records import ScriptCost, TurnCost
from rooftrace.hardware import Chip
from rooftrace.tracer.scripts import Script
from rooftrace.tracer.sources import collector_paused


def price_script(script: Script, chip: Chip, model: ExecutionModel) -> ScriptCost:
    """What the turns of a script cost on a chip, run as the model says."""
    with collector_paused():
        steps = [estimate(graph, chip, model) for graph in script.graphs]
    rows: dict[object, TurnCost] = {}
    for stretch in script.stretches:
        before = rows.get(stretch.key)
        if before is not None:
            rows[stretch.key] = replace(before, stretch=before.stretch.and_also(stretch))
            continue
        parts = tuple((steps[piece.graph], piece.times) for piece in stretch.pieces)
        rows[stretch.key] = TurnCost(stretch=stretch, parts=parts)
    return ScriptCost(
        script=script, chip=chip, execution=model, rows=tuple(rows.values()), steps=tuple(steps)
    )
