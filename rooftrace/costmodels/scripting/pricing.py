"""From a script's stretches and graphs to what each costs on a chip."""

from __future__ import annotations

from dataclasses import replace

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.scripting.records import ScriptCost, TurnCost
from rooftrace.hardware import Chip
from rooftrace.tracer.scripts import Script, Turns


def execution_of(compiled: bool, asked: str | ExecutionModel | None = None) -> ExecutionModel:
    """How a script is run: as asked for, else compiled if it calls torch.compile, else eager."""
    return execution_model(asked or ("compiled" if compiled else "eager"))


def price_script(
    script: Script, chip: Chip, execution: str | ExecutionModel | None = None
) -> ScriptCost:
    """What the turns of a script cost on a chip.

    execution: None takes compiled for a script that calls torch.compile, else eager.
    """
    model = execution_of(script.compiled, execution)
    steps = [estimate(graph, chip, model) for graph in script.graphs]
    rows: dict[object, TurnCost] = {}
    for stretch in script.stretches:
        key = stretch.kind, stretch.pieces, stretch.label
        rows[key] = _more(rows.get(key), stretch, steps)
    return ScriptCost(
        script=script, chip=chip, execution=model, rows=tuple(rows.values()), steps=tuple(steps)
    )


def _more(before: TurnCost | None, stretch: Turns, steps: list[Estimate]) -> TurnCost:
    """The row of equal turns with one more stretch of them."""
    if before is None:
        parts = tuple((steps[piece.graph], piece.times) for piece in stretch.pieces)
        return TurnCost(stretch=stretch, parts=parts)
    kept = before.stretch
    added = {
        name: getattr(kept, name) + getattr(stretch, name)
        for name in ("turns", "run", "loading", "batches", "brought", "taken")
    }
    fields = {name: getattr(kept, name) for name in kept.__struct_fields__}
    return replace(before, stretch=Turns(**{**fields, **added}))
