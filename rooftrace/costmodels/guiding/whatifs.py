"""From a step to what would help it: every change is planned and timed as the step itself was.

In: the estimate of a step.  Out: the changes that save at least a hundredth of it, most first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.findings import Headroom
from rooftrace.costmodels.fusion import beyond
from rooftrace.costmodels.guiding.changes import (
    StepChange,
    all_of,
    changes_of,
    merged,
)
from rooftrace.costmodels.guiding.records import Guidance, WhatIf
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.studies import Study, Variant
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.units import listed
from rooftrace.tracer.graph import OpGraph

LEAST = 0.01
"""Share of a step that a change has to save to be listed."""


def guidance(
    graph: OpGraph | Plan | Estimate,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
) -> Guidance:
    """What would make a step on `chip` faster, in order (an Estimate has its own chip and way).

    Each change stands alone and is priced by an estimate of its own: one attention kernel,
    compiling, launching as one graph, each named rewrite, precisions one step narrower, and larger
    kernels than those of the plan.  What saves less than 1 % of the step is left out.
    """
    if isinstance(graph, Estimate):
        return _guidance(graph)
    return _guidance(estimate(graph, chip, execution))


def _guidance(step: Estimate) -> Guidance:
    if not step.t_est:
        return Guidance(step, ())
    priced = [(change, what_if) for change in changes_of(step) for what_if in _priced(step, change)]
    helping = [(change, what_if) for change, what_if in priced if what_if.share >= LEAST]
    helping.sort(key=lambda pair: -pair[1].gain)
    options = [what_if for _, what_if in helping]
    options += [what_if for what_if in _larger_kernels(step) if what_if.share >= LEAST]
    options.sort(key=lambda what_if: -what_if.gain)
    chosen = merged([change for change, _ in helping])
    places = [options.index(what_if) + 1 for change, what_if in helping if change in chosen]
    return Guidance(step, tuple(options), _together(step, chosen, places))


def _together(
    step: Estimate, changes: Sequence[StepChange], places: Sequence[int]
) -> WhatIf | None:
    """All of these as one change; None where they are fewer than two.  places: in the list."""
    if len(changes) < 2:
        return None
    return next(_priced(step, all_of(changes, f"{listed([*map(str, places)])} together")), None)


def _priced(step: Estimate, change: StepChange) -> Iterator[WhatIf]:
    """The what-if of a change; none where the chip has no rate for what it computes in."""
    before = by_rules(step) if change.regroups else step
    model = change.applied(before.execution)
    variant = Variant(precisions=change.precisions, execution=model)
    try:
        after = Study(step).estimate(variant)
    except MissingPeakError:
        return
    yield WhatIf(
        lever=change.lever,
        action=change.action,
        option=change.option(before.execution),
        needs=change.needs,
        before=before,
        after=after,
        at_most=change.at_most,
    )


def by_rules(step: Estimate) -> Estimate:
    """The step with bytes as rules count them: measured factors are those of its own kernels."""
    planned = step.plan.by_rules
    return step if planned is step.plan else estimate(planned, step.chip)


def _larger_kernels(step: Estimate) -> Iterable[WhatIf]:
    """The kernels that joins beyond those of a compiler would make, all at once."""
    if step.execution.fusion != "detected":
        return ()
    before = by_rules(step)
    planned = before.plan
    groups = beyond(planned.graph, planned.groups, planned.op_costs, planned.costs)
    after = estimate(planned.regrouped(groups), step.chip)
    left = Headroom(before, before, after).left
    if not left:
        return ()
    first = left[0]
    where = f"{first.name}{f' in {first.module}' if first.module else ''}"
    what_if = WhatIf(
        lever="kernels",
        action="Write larger kernels",
        option="rt.headroom(estimate).beyond",
        needs="kernels that a compiler does not make (epilogues of products, whole attention, "
        f"chains), first of all {where}",
        before=before,
        after=after,
        at_most=True,
    )
    return (what_if,)
