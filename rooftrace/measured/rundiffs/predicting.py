"""What was predicted for two measured steps, beside what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rooftrace.costmodels.diffs import diff_estimates
from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.hardware.chipfile import chips_called
from rooftrace.measured.rundiffs.rundiff import (
    METRICS,
    NO_MODULE,
    GroupChange,
    MeasuredChange,
    Prediction,
    StepDiff,
    ratio_of,
)
from rooftrace.tracer.graph import pattern_of
from rooftrace.tracer.inventory.changes import union

NEAR = (0.5, 2.0)
"""Measured over predicted difference: within these the two agree."""
_SMALL = 0.02
"""A difference below this share of the step before is none to agree on."""


def with_prediction(step: StepDiff, before: Estimate, after: Estimate, by_path: bool) -> StepDiff:
    """A comparison with the predicted differences beside the measured ones.

    by_path: whether its modules are those of the graphs.
    """
    both = (before, after)
    busy = "device" if "device" in step.totals else "work"
    predicted = [{**each.totals, busy: each.times.t_serial} for each in both]
    totals = {
        name: MeasuredChange(*(values[name] for values in predicted))
        for name in ("time", busy, "kernels", "memory")
        if name in step.totals
    }
    diff = diff_estimates({after.phase: before}, {after.phase: after})
    prediction = Prediction(diff=diff, totals=totals)
    step = replace(
        step,
        modules=_beside(step.modules, both, _patterns, "(root)") if by_path else step.modules,
        families=_beside(step.families, both, lambda row: [row.family], "other"),
        prediction=prediction,
    )
    notes = (*_other_devices(step, both), *_disagreements(step))
    return replace(step, prediction=replace(prediction, notes=notes))


def _other_devices(step: StepDiff, estimates: Sequence[Estimate]) -> Iterable[str]:
    """Sentences on sides that ran on another device than they are predicted for."""
    for which, device, priced in zip(("before", "after"), step.devices, estimates, strict=True):
        chip = priced.chip
        known = chips_called(device)
        if (known and chip.name not in known) or (step.timed_inside and not step.on_device) > (
            chip.kind == "cpu"
        ):
            ran = device or ("a GPU" if step.on_device else "a CPU")
            yield f"{which}: measured on {ran}, predicted for {chip.title}: two devices"


def _patterns(row: Row) -> list[str]:
    return [pattern_of(path) for path in row.modules]


def _beside(
    groups: Sequence[GroupChange],
    estimates: tuple[Estimate, Estimate],
    names_of: Callable[[Row], Sequence[str]],
    root: str,
) -> tuple[GroupChange, ...]:
    """Groups with the predicted seconds of their kernels; those only predicted come last."""
    first, second = (_seconds(estimate.rows, names_of, root) for estimate in estimates)
    predicted = {
        name: MeasuredChange(before, after) for name, before, after in union(first, second, 0.0)
    }
    nothing = MeasuredChange(before=0.0, after=0.0)
    beside = [replace(g, predicted=predicted.pop(g.name, nothing)) for g in groups]
    beside += [
        GroupChange(name=name, time=nothing, count=nothing, predicted=change)
        for name, change in predicted.items()
    ]
    return tuple(beside)


def _seconds(
    rows: Iterable[Row], names_of: Callable[[Row], Sequence[str]], root: str
) -> Mapping[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        names = names_of(row)
        for name in names:
            seconds[name or root] += row.timing.t_device / len(names)
    return seconds


def _disagreements(step: StepDiff) -> Iterable[str]:
    """Sentences on where prediction and measurement disagree, the totals first."""
    assert step.prediction is not None
    if not any(change.delta for change in step.prediction.totals.values()):
        if not step.unchanged:
            yield "no difference is predicted: what differs is how it ran, not what is computed"
        return
    for name in METRICS:
        predicted = step.prediction.totals.get(name)
        if predicted is not None:
            said = _disagreement(step.totals[name], predicted, step.totals[name].before)
            if said:
                amounts = [_signed(name, c.delta) for c in (predicted, step.totals[name])]
                yield f"{name}: predicted {amounts[0]}, measured {amounts[1]}: {said}"
    whole = step.totals["work"].before if "work" in step.totals else step.totals["time"].before
    for group in step.modules:
        if group.predicted is not None and group.name != NO_MODULE:
            said = _disagreement(group.time, group.predicted, whole)
            if said:
                amounts = [_signed("time", c.delta) for c in (group.predicted, group.time)]
                yield f"in {group.name}: predicted {amounts[0]}, measured {amounts[1]}: {said}"


def _disagreement(measured: MeasuredChange, predicted: MeasuredChange, whole: float) -> str:
    """How the two differences disagree; "" where they agree, or are too small to tell."""
    if max(abs(measured.delta), abs(predicted.delta)) <= _SMALL * whole:
        return ""
    if measured.within_noise:
        # Then nothing says that it is not what was predicted, unless that is outside of the noise.
        assert measured.noise is not None
        if abs(measured.delta - predicted.delta) <= measured.noise:
            return ""
        return "a difference was predicted, and none is beyond the noise"
    ratio = ratio_of(measured, predicted)
    if ratio is None:
        return "no difference was predicted"
    if ratio < 0:
        return "the other way"
    if NEAR[0] <= ratio <= NEAR[1]:
        return ""
    return f"{ratio:,.0f} times as much" if ratio >= 10 else f"{ratio:.2g} times as much"


def _signed(metric: str, value: float) -> str:
    if not value:
        return "0"
    return f"{'+' if value > 0 else '-'}{METRICS[metric].write(abs(value))}"


def chip_for(device: str) -> tuple[str | None, str]:
    """The chip of a device by its name, or None and what to do about it."""
    names = chips_called(device) if device else ()
    if len(names) == 1:
        return names[0], ""
    if not device:
        return None, "not predicted: no device is named in it; name the chip with --chip"
    choice = f"one of {', '.join(names)}" if names else "a file of `rooftrace measure --chip-only`"
    return None, f"not predicted: it ran on {device}; name the chip with --chip ({choice})"
