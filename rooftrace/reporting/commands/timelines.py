"""The steps of a result as estimates, for a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import plan
from rooftrace.diffs.costs import Diff
from rooftrace.errors import RequestError
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import estimate as estimate_source, priced_graphs
from rooftrace.reporting.commands.pricing import PricingOptions
from rooftrace.reporting.commands.rooflinesteps import SIZES, Reports, Rooflines
from rooftrace.reporting.commands.sweeps import known_form
from rooftrace.reporting.sections import Results

if TYPE_CHECKING:
    from rooftrace.studies.solving.serving import ServingAnswer
    from rooftrace.studies.sweeps import Sweep


def save_timeline(result: Any, path: str | Path, *, source: Any = None, **asked: Any) -> Path:
    """Write the predicted timeline of the steps of a result, for ui.perfetto.dev; its path.

    result: an Estimate, a report, a Diff (both sides), Rooflines, an Explanation, a Sweep (its best
    line), a ServingAnswer (its answer), a ScriptCost (the run), or estimates by title; or
    Elasticities of a `source`, with the chip, the execution and the other arguments of that call.
    The file is gzip if its name ends in .gz.  Raises RequestError for a result without a step.
    """
    from rooftrace.reporting.figures import timeline

    if type(result).__name__ == "ScriptCost":
        return timeline.write_run(path, result)
    if source is not None:
        steps = steps_at(source, result.phase, result.sizes, **asked)
    else:
        steps = steps_of(result)
    return timeline.write_steps(path, steps)


def steps_of(result: Any) -> dict[str, Estimate]:
    """The steps of a result by a title of each.  Raises RequestError where it has none."""
    steps = dict(_steps(result))
    if not steps:
        raise RequestError(
            f"{type(result).__name__}: no step is in it that a timeline could show; name the step "
            "itself, as `rooftrace report` takes it"
        )
    return steps


def _steps(result: Any) -> Iterator[tuple[str, Estimate]]:
    kind = type(result).__name__
    if isinstance(result, Mapping):
        yield from result.items()
    elif isinstance(result, Estimate):
        yield result.phase, result
    elif isinstance(result, Results):
        for phase in result.estimates:
            for execution, on_chips in result.estimates[phase].items():
                for chip, made in on_chips.items():
                    yield f"{phase}, {execution}, {chip}", made
    elif isinstance(result, Reports):
        for target, report in result.reports.items():
            for title, each in _steps(report):
                yield f"{target}: {title}", each
    elif isinstance(result, Diff):
        yield from result.steps.items()
    elif isinstance(result, Rooflines):
        for row in result.rows:
            yield row.label, row.estimate
    elif kind == "Sweep":
        yield from _best_line(result)
    elif kind == "ServingAnswer":
        yield from _answer(result)
    elif isinstance(only := getattr(result, "estimate", None), Estimate):
        yield only.phase, only


def _best_line(sweep: Sweep) -> Iterator[tuple[str, Estimate]]:
    """The line with most items per second, of those that fit if some do."""
    derived, columns = sweep.derived(), sweep.columns
    rates = np.where(derived["fits"], derived["items_per_s"], -1.0)
    if not len(rates):
        return
    best = int(rates.argmax() if rates.max() > 0 else derived["items_per_s"].argmax())
    case, chip = sweep.cases[int(columns["case"][best])], sweep.chips[int(columns["chip"][best])]
    sizes = {name: int(columns[name][best]) for name in sweep.names}
    step = estimate(case.conditions.plan(case.form.graph(**sizes)), chip)
    yield _title(case.labels, sizes, chip.name), step


def _answer(answer: ServingAnswer) -> Iterator[tuple[str, Estimate]]:
    """The step of the answer, or of the nearest candidate."""
    best = answer.best or answer.nearest
    if best is not None:
        yield _title(best.labels, best.sizes, best.chip), best.estimate


def _title(labels: Mapping[str, Any], sizes: Mapping[str, int], chip: str) -> str:
    shown = [f"{name} {size:,}" for name, size in sizes.items()]
    return ", ".join([str(labels.get("phase", "step")), *shown, chip])


def steps_at(
    source: Any, phase: str, sizes: Mapping[str, int], **asked: Any
) -> dict[str, Estimate]:
    """The step of a source at sizes by name, as a sensitivity or a choice of meshes has them.

    A pipeline has a step for each stage.  asked: arguments of `estimate`.
    """
    pricing, asked = PricingOptions.parted(asked)
    (model,), (chip,) = conditions_of(estimate_source, pricing, source)
    form = known_form(source)
    if form is not None:
        (conditions,) = pricing.conditions([model])
        return {phase: estimate(conditions.plan(form.graph(**sizes)), chip)}
    named = {name: size for name, size in sizes.items() if name in SIZES}
    settings = {name: size for name, size in sizes.items() if name not in SIZES}
    if settings:
        asked = {**asked, "settings": {**asked.get("settings", {}), **settings}}
    graphs = priced_graphs(source, **{**asked, **named, "phases": [phase]})
    return {name: estimate(plan(graph, model), chip) for name, graph in graphs.items()}
