"""Two sides into one comparison: totals, rows that fold over layers, modules and families."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from rooftrace.hardware.units import format_time
from rooftrace.measured.rundiffs.kernelnames import kernel_key
from rooftrace.measured.rundiffs.metrics import METRICS
from rooftrace.measured.rundiffs.noise import noise_of
from rooftrace.measured.rundiffs.pairs import KernelPair, paired
from rooftrace.measured.rundiffs.rundiff import (
    NO_MODULE,
    GroupChange,
    KernelChange,
    MeasuredChange,
    StepDiff,
)
from rooftrace.measured.rundiffs.sides import MeasuredKernel, MeasuredSide, middle_of


def compare_sides(before: MeasuredSide, after: MeasuredSide, label: str = "step") -> StepDiff:
    """What changed from one measured step to another.

    Every kernel of both is in one row, so that rows add up to the total `work`.
    """
    folded: dict[Hashable, list[KernelPair]] = defaultdict(list)
    steps = (before.timed, after.timed)
    for pair in paired(before, after):
        folded[_fold(pair)].append(pair)
    rows = [(_row(pairs, steps), pairs) for pairs in folded.values()]
    known = any(row.module for row, _ in rows)
    return StepDiff(
        label=label,
        steps=(before.steps, after.steps),
        devices=(before.device, after.device),
        on_device=before.on_device and after.on_device,
        timed_inside=before.middle == after.middle == "mean",
        totals=_totals(before, after),
        rows=tuple(sorted((row for row, _ in rows), key=_importance)),
        modules=_groups(rows, steps, lambda row: row.module or NO_MODULE) if known else (),
        families=_groups(rows, steps, lambda row: row.family),
        notes=tuple(_notes(before, after)),
    )


def _totals(before: MeasuredSide, after: MeasuredSide) -> dict[str, MeasuredChange]:
    """The figures that both sides have."""
    return {
        name: MeasuredChange(
            before=middle_of(before.figures[name], before.middle),
            after=middle_of(after.figures[name], after.middle),
            noise=noise_of(
                before.figures[name], after.figures[name], (before.middle, after.middle)
            ),
        )
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
    return MeasuredChange(
        before=middle_of(before, "mean"),
        after=middle_of(after, "mean"),
        noise=noise_of(before, after),
    )


def _count(pairs: Sequence[KernelPair]) -> MeasuredChange:
    """Launches of all kernels in a step."""
    return MeasuredChange(*(sum(k.count for k in _kernels(pairs, side)) for side in (0, 1)))


def _fold(pair: KernelPair) -> Hashable:
    """What rows of several layers share; kernels by their names without sizes."""
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
        family=first.family,
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
    """The largest difference first, those within noise after all others."""
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
    groups = [
        GroupChange(name=name, time=_time(pairs, steps), count=_count(pairs))
        for name, pairs in grouped.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-abs(group.time.delta), group.name)))


# -- notes -----------------------------------------------------------------------------------------


def _notes(before: MeasuredSide, after: MeasuredSide) -> Iterable[str]:
    """What a reader should know of the two sides."""
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
