"""Compares two measured steps: pairs calls and kernels, and tells changes from noise."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.diffs.changes import Pairing, union
from rooftrace.diffs.costs import diff_estimates
from rooftrace.diffs.runs.rundiff import (
    METRICS,
    NO_MODULE,
    GroupChange,
    KernelChange,
    MeasuredCall,
    MeasuredChange,
    MeasuredKernel,
    MeasuredSide,
    Prediction,
    StepDiff,
    kernel_key,
    middle_of,
    ratio_of,
)
from rooftrace.graph import pattern_of
from rooftrace.hardware.chipfile import chips_called
from rooftrace.hardware.units import format_time
from rooftrace.measured.alignment import keys as alignment_keys

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantile 97.5 % of Student's t for 1 to 10 degrees of freedom."""
_MEDIAN = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean, for normal values."""


def change_of(
    before: Sequence[float], after: Sequence[float], how: tuple[str, str] = ("mean", "mean")
) -> MeasuredChange:
    """A metric of the measured steps before and after; how: mean or median of each."""
    return MeasuredChange(
        before=middle_of(before, how[0]),
        after=middle_of(after, how[1]),
        noise=noise_of(before, after, how),
    )


def standard_error(values: Sequence[float], how: str = "mean") -> float | None:
    """The standard error of the mean or the median; None for a single value."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return error * _MEDIAN if how == "median" else error


def noise_of(
    before: Sequence[float], after: Sequence[float], how: tuple[str, str] = ("mean", "mean")
) -> float | None:
    """Half the width of the 95 % interval of the difference; None where a side has one value.

    Degrees of freedom by Welch and Satterthwaite.
    """
    errors = [standard_error(v, h) for v, h in zip((before, after), how, strict=True)]
    if errors[0] is None or errors[1] is None:
        return None
    a, b = errors[0] ** 2, errors[1] ** 2
    if a + b == 0:
        return 0.0
    free = (a + b) ** 2 / (a**2 / (len(before) - 1) + b**2 / (len(after) - 1))
    return _quantile(free) * math.sqrt(a + b)


def _quantile(free: float) -> float:
    """Quantile 97.5 % of Student's t; for few degrees of freedom the next smaller whole number."""
    if free < len(_T):
        return _T[max(1, int(free)) - 1]
    return 1.96 + 2.7 / free


# -- comparing -------------------------------------------------------------------------------------


def compare_sides(before: MeasuredSide, after: MeasuredSide, label: str = "step") -> StepDiff:
    """The changes from one measured step to another.

    Every kernel of both is in one row, so that rows add up to the total `work`.
    """
    folded: dict[Hashable, list[KernelPair]] = defaultdict(list)
    steps = (before.timed, after.timed)
    for pair in paired(before, after):
        folded[_fold(pair)].append(pair)
    rows = [(_row(pairs, steps), pairs) for pairs in folded.values()]
    has_modules = any(row.module for row, _ in rows)
    return StepDiff(
        label=label,
        steps=(before.steps, after.steps),
        devices=(before.device, after.device),
        on_device=before.on_device and after.on_device,
        timed_inside=before.middle == after.middle == "mean",
        totals=_totals(before, after),
        rows=tuple(sorted((row for row, _ in rows), key=_importance)),
        modules=_groups(rows, steps, lambda row: row.module or NO_MODULE) if has_modules else (),
        families=_families(rows, steps),
        notes=tuple(_notes(before, after)),
    )


def _totals(before: MeasuredSide, after: MeasuredSide) -> dict[str, MeasuredChange]:
    """The metrics that both sides have."""
    how = before.middle, after.middle
    return {
        name: change_of(before.figures[name], after.figures[name], how)
        for name in METRICS
        if name in before.figures and name in after.figures
    }


# -- rows ------------------------------------------------------------------------------------------


def _kernels(pairs: Iterable[KernelPair], side: int) -> list[MeasuredKernel]:
    """All kernels of a side."""
    return [kernel for pair in pairs for kernel in (pair.was, pair.now)[side]]


def _time(pairs: Sequence[KernelPair], steps: tuple[int, int]) -> MeasuredChange:
    """Seconds of all kernels in a step; steps: measured before and after."""
    before, after = (
        [sum(values) for values in zip(*(k.seconds for k in _kernels(pairs, side)), strict=True)]
        or [0.0] * steps[side]
        for side in (0, 1)
    )
    return change_of(before, after)


def _count(pairs: Sequence[KernelPair]) -> MeasuredChange:
    """Launches of all kernels in a step."""
    return MeasuredChange(*(sum(k.count for k in _kernels(pairs, side)) for side in (0, 1)))


def _fold(pair: KernelPair) -> Hashable:
    """The key that rows of several layers share; kernels by their names without sizes."""
    was, now = pair.before, pair.after
    return (
        was and (was.pattern, was.part, was.name, was.sizes),
        now and (now.pattern, now.part, now.name, now.sizes),
        tuple((kernel_key(kernel.name), kernel.kind) for kernel in pair.was),
        tuple((kernel_key(kernel.name), kernel.kind) for kernel in pair.now),
    )


def _row(pairs: Sequence[KernelPair], steps: tuple[int, int]) -> KernelChange:
    pair = pairs[0]
    was, now = pair.before, pair.after
    first = now or was
    assert first is not None
    time, count = _time(pairs, steps), _count(pairs)
    names = (tuple(kernel.name for kernel in pair.was), tuple(kernel.name for kernel in pair.now))
    sizes = (was.sizes if was else "", now.sizes if now else "")
    return KernelChange(
        status=_status(names, sizes, time, count),
        call=(was.name if was else "", now.name if now else ""),
        module=first.pattern,
        part=first.part,
        family=(*pair.now, *pair.was)[0].family,
        kind=(*pair.now, *pair.was)[0].kind,
        sizes=sizes,
        kernels=names,
        count=count,
        time=time,
        places=len(pairs),
    )


def _status(
    names: tuple[tuple[str, ...], tuple[str, ...]],
    sizes: tuple[str, str],
    time: MeasuredChange,
    count: MeasuredChange,
) -> str:
    if not names[0]:
        return "new"
    if not names[1]:
        return "gone"
    if [*map(kernel_key, names[0])] != [*map(kernel_key, names[1])]:
        return "replaced"
    growth = time.delta or count.delta
    if not growth:
        return "same" if sizes[0] == sizes[1] else "resized"
    if time.within_noise and not count.delta:
        return "unclear"
    return "slower" if growth > 0 else "faster"


def _importance(row: KernelChange) -> tuple[bool, float, float, str, str]:
    """The largest difference first, then differences within noise."""
    return (
        row.status == "unclear",
        -abs(row.time.delta),
        -row.time.after,
        row.module,
        repr(row.kernels),
    )


# -- modules and families --------------------------------------------------------------------------


def _groups(
    rows: Iterable[tuple[KernelChange, Sequence[KernelPair]]],
    steps: tuple[int, int],
    name_of: Callable[[KernelChange], str],
) -> tuple[GroupChange, ...]:
    grouped: dict[str, list[KernelPair]] = defaultdict(list)
    for row, pairs in rows:
        grouped[name_of(row)] += pairs
    return _changes(grouped, steps)


def _families(
    rows: Iterable[tuple[KernelChange, Sequence[KernelPair]]], steps: tuple[int, int]
) -> tuple[GroupChange, ...]:
    """Kernels by family; one in place of another may be of a different family than that."""
    grouped: dict[str, list[KernelPair]] = defaultdict(list)
    for pair in (pair for _, pairs in rows for pair in pairs):
        for family in dict.fromkeys(kernel.family for kernel in (*pair.was, *pair.now)):
            was, now = (
                tuple(kernel for kernel in side if kernel.family == family)
                for side in (pair.was, pair.now)
            )
            grouped[family].append(replace(pair, was=was, now=now))
    return _changes(grouped, steps)


def _changes(
    grouped: Mapping[str, Sequence[KernelPair]], steps: tuple[int, int]
) -> tuple[GroupChange, ...]:
    """A change for each group, the largest first."""
    groups = [
        GroupChange(name=name, time=_time(pairs, steps), count=_count(pairs))
        for name, pairs in grouped.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-abs(group.time.delta), group.name)))


# -- notes -----------------------------------------------------------------------------------------


def _notes(before: MeasuredSide, after: MeasuredSide) -> Iterable[str]:
    """Remarks on the two sides."""
    if before is after:
        yield from before.notes
        return
    if before.device != after.device:
        names = [side.device or "an unknown device" for side in (before, after)]
        yield f"two devices: {names[0]} before, {names[1]} after"
    if min(before.steps, after.steps) == 1:
        sides = (("before", before), ("after", after))
        which = " and ".join(name for name, side in sides if side.steps == 1)
        yield f"{which}: one step was measured, so that noise is not known"
    shared = [note for note in before.notes if note in after.notes]
    yield from (f"before and after: {note}" for note in shared)
    for which, side in (("before", before), ("after", after)):
        yield from (f"{which}: {note}" for note in side.notes if note not in shared)
    for which, side in (("before", before), ("after", after)):
        times = side.figures["time"]
        if len(times) > 2 and max(times) > 1.5 * middle_of(times, "median"):
            yield (
                f"{which}: a step of {format_time(max(times))} among those of "
                f"{format_time(middle_of(times, 'median'))} (median)"
            )


# -- pairs -----------------------------------------------------------------------------------------
# Calls pair in order, by ever looser keys: each pass pairs calls between two pairs of the one
# before.  Calls that moved pair by their key alone.  Inside of two calls kernels pair by their
# names; the rest of both stand for each other: one kernel in place of another.


_Key = Callable[[MeasuredCall], Hashable]


@dataclass(frozen=True, slots=True)
class KernelPair:
    """Kernels of a call before and after, one of the two maybe empty."""

    before: MeasuredCall | None
    after: MeasuredCall | None
    was: tuple[MeasuredKernel, ...]
    now: tuple[MeasuredKernel, ...]


def _names(call: MeasuredCall) -> tuple[str, ...]:
    return tuple(kernel_key(name) for name in call.names)


def _purpose(call: MeasuredCall) -> Hashable:
    """The family of a call if its calls do the same (addmm for mm), else its name and kernels."""
    return call.family if call.family not in _MIXED else (call.name, _names(call))


_MIXED = frozenset({"elementwise", "other", "copies"})
"""Families of calls with different purposes."""

_PASSES: tuple[_Key, ...] = (
    lambda call: (call.name or _names(call), call.module, call.part, call.sizes),
    lambda call: (call.name or _names(call), call.module, call.part),
    lambda call: (call.name, call.part, call.sizes, _names(call)),
    lambda call: (call.name, call.part, call.sizes) if call.name else _names(call),
    lambda call: (call.part, _names(call)),
    lambda call: (call.name, call.part) if call.name else _names(call),
    lambda call: (call.module, call.part, _purpose(call)),
    lambda call: (call.part, _purpose(call)),
)
"""Keys of the passes, each looser than the one before."""
_MOVED = _PASSES[:3]
"""Keys that may also pair calls out of order."""


def paired(before: MeasuredSide, after: MeasuredSide) -> list[KernelPair]:
    """Every kernel of both sides, each in one pair; the other way round it gives the same pairs."""
    if _order(after.calls) < _order(before.calls):
        return [KernelPair(p.after, p.before, p.now, p.was) for p in paired(after, before)]
    calls = before.calls, after.calls
    pairing = Pairing(*(range(len(side)) for side in calls))
    in_order = before.in_order and after.in_order
    for number, key in enumerate(_PASSES):
        keys = tuple([key(call) for call in side] for side in calls)
        if in_order:
            _between(pairing, keys)
        if key in _MOVED or not in_order:
            _anywhere(pairing, keys)
        if number == 0 and len(pairing.pairs) == min(map(len, calls)):
            break
    partner = {pair.before: pair.after for pair in pairing.pairs}
    pairs: list[KernelPair] = []
    for number, call in enumerate(before.calls):
        if number in partner:
            pairs += _inside(call, after.calls[partner[number]])
        else:
            pairs += [KernelPair(call, None, (kernel,), ()) for kernel in call.kernels]
    for number in pairing.left[1]:
        call = after.calls[number]
        pairs += [KernelPair(None, call, (), (kernel,)) for kernel in call.kernels]
    return pairs


def _order(calls: Sequence[MeasuredCall]) -> list[tuple[object, ...]]:
    """Calls as values that compare, so that the order of the two sides does not matter."""
    return [
        (c.name, c.sizes, c.module, c.part, *((k.name, k.count, k.seconds) for k in c.kernels))
        for c in calls
    ]


_Keys = tuple[Sequence[Hashable], ...]
"""The keys of the items of either side."""


def _between(pairing: Pairing[int], keys: _Keys) -> None:
    """Pair items without a partner, in order, between items with one."""
    left = pairing.left
    for ranges in list(alignment_keys.gaps(_rising(pairing), *map(len, keys))):
        free = [[i for i in part if i in side] for part, side in zip(ranges, left, strict=True)]
        wanted = [[side[i] for i in each] for side, each in zip(keys, free, strict=True)]
        # The search only compares items for equality.
        for x, y in alignment_keys.common(*wanted):  # type: ignore[arg-type]
            pairing.pair(free[0][x], free[1][y])


def _anywhere(pairing: Pairing[int], keys: _Keys) -> None:
    """Pair items without a partner by their key alone, the first with the first."""
    pairing.by(keys[0].__getitem__, keys[1].__getitem__)


def _rising(pairing: Pairing[int]) -> list[tuple[int, int]]:
    """A longest subsequence of the pairs in which both numbers rise."""
    pairs = sorted((pair.before, pair.after) for pair in pairing.pairs)
    ends: list[int] = []
    at: list[int] = []
    above: list[int] = []
    for number, (_, other) in enumerate(pairs):
        length = bisect_left(ends, other)
        above.append(at[length - 1] if length else -1)
        if length == len(ends):
            ends.append(other)
            at.append(number)
        else:
            ends[length], at[length] = other, number
    chain: list[tuple[int, int]] = []
    number = at[-1] if at else -1
    while number >= 0:
        chain.append(pairs[number])
        number = above[number]
    return chain[::-1]


def _inside(before: MeasuredCall, after: MeasuredCall) -> list[KernelPair]:
    """The pairs of kernels of two paired calls.

    They pair by name, then by name without sizes; kernels that are left between two pairs on both
    sides replace each other.
    """
    was, now = before.kernels, after.kernels
    pairing = Pairing(range(len(was)), range(len(now)))
    for name_of in (str, kernel_key):
        keys = tuple([(name_of(k.name), k.kind) for k in side] for side in (was, now))
        _between(pairing, keys)
        _anywhere(pairing, keys)
    pairs = [KernelPair(before, after, (was[i],), (now[j],)) for i, j, _ in pairing.pairs]
    i = j = 0
    for end, other in [*_rising(pairing), (len(was), len(now))]:
        gone = tuple(was[k] for k in range(i, end) if k in pairing.left[0])
        new = tuple(now[k] for k in range(j, other) if k in pairing.left[1])
        if gone and new:
            pairs.append(KernelPair(before, after, gone, new))
        else:
            pairs += [KernelPair(before, after, (kernel,), ()) for kernel in gone]
            pairs += [KernelPair(before, after, (), (kernel,)) for kernel in new]
        i, j = end + 1, other + 1
    return pairs


# -- predicted differences -------------------------------------------------------------------------

NEAR = (0.5, 2.0)
"""Measured over predicted difference: within these the two agree."""
_SMALL = 0.02
"""A difference below this share of the step before is none to agree on."""


def with_prediction(step: StepDiff, before: Estimate, after: Estimate, by_path: bool) -> StepDiff:
    """A comparison with the predicted differences beside the measured ones.

    by_path: whether it has the module paths of the graphs.
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
        modules=_predicted(step.modules, both, _patterns, "(root)") if by_path else step.modules,
        families=_predicted(step.families, both, lambda row: [row.family], "other"),
        prediction=prediction,
    )
    notes = (*_other_devices(step, both), *_disagreements(step))
    return replace(step, prediction=replace(prediction, notes=notes))


def _other_devices(step: StepDiff, estimates: Sequence[Estimate]) -> Iterable[str]:
    """Sentences on sides that ran on another device than they are predicted for."""
    for which, device, priced in zip(("before", "after"), step.devices, estimates, strict=True):
        chip = priced.chip
        names = chips_called(device)
        on_host = step.timed_inside and not step.on_device
        if (names and chip.name not in names) or (on_host and chip.kind != "cpu"):
            ran = device or ("a GPU" if step.on_device else "a CPU")
            yield f"{which}: measured on {ran}, predicted for {chip.title}: two devices"


def _patterns(row: Row) -> list[str]:
    return [pattern_of(path) for path in row.modules]


def _predicted(
    groups: Sequence[GroupChange],
    estimates: tuple[Estimate, Estimate],
    names_of: Callable[[Row], Sequence[str]],
    root: str,
) -> tuple[GroupChange, ...]:
    """Groups with the predicted seconds of their kernels; groups without measurements come last."""
    first, second = (_seconds(estimate.rows, names_of, root) for estimate in estimates)
    predicted = {
        name: MeasuredChange(before, after) for name, before, after in union(first, second, 0.0)
    }
    nothing = MeasuredChange(before=0.0, after=0.0)
    changes = [replace(g, predicted=predicted.pop(g.name, nothing)) for g in groups]
    changes += [
        GroupChange(name=name, time=nothing, count=nothing, predicted=change)
        for name, change in predicted.items()
    ]
    return tuple(changes)


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
            total = step.totals[name]
            yield from _disagreement(name, name, total, predicted, total.before)
    work = step.totals["work" if "work" in step.totals else "time"].before
    for group in step.modules:
        if group.predicted is not None and group.name != NO_MODULE:
            yield from _disagreement(f"in {group.name}", "time", group.time, group.predicted, work)


def _disagreement(
    name: str, metric: str, measured: MeasuredChange, predicted: MeasuredChange, total: float
) -> Iterable[str]:
    """A sentence where the differences of a metric disagree; total: its value before."""
    disagreement = _words(measured, predicted, total)
    if disagreement:
        amounts = [_signed(metric, change.delta) for change in (predicted, measured)]
        yield f"{name}: predicted {amounts[0]}, measured {amounts[1]}: {disagreement}"


def _words(measured: MeasuredChange, predicted: MeasuredChange, total: float) -> str:
    """The disagreement of two differences; "" where they agree, or are too small to tell."""
    if max(abs(measured.delta), abs(predicted.delta)) <= _SMALL * total:
        return ""
    if measured.within_noise:
        # The noise may hide the predicted difference, unless that is larger.
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
    """The chip of a device by its name, or None and a remedy."""
    names = chips_called(device) if device else ()
    if len(names) == 1:
        return names[0], ""
    if not device:
        return None, "not predicted: no device is named in it; name the chip with --chip"
    choice = f"one of {', '.join(names)}" if names else "a file of `rooftrace measure --chip-only`"
    return None, f"not predicted: it ran on {device}; name the chip with --chip ({choice})"
