"""What every step costs, side by side, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.costmodels.execution import SUMMARIES
from rooftrace.hardware.units import (
    format_capacity,
    format_count,
    format_flops,
    format_intensity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.sections.pipes import image, table
from rooftrace.reporting.text import words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.reporting.pages import Report


def fit_section(report: Report, figures: Sequence[str]) -> list[str]:
    if not report.memory:
        return []
    names = list(words.alive(next(iter(report.memory.values()))))
    head = ["Phase", *(name[0].upper() + name[1:] for name in names), "Peak"]
    head += [
        f"{chip.name} ({format_capacity(chip.memory_capacity.value)})" for chip in report.chips
    ]
    rows = []
    for phase, need in report.memory.items():
        row = [phase, *(format_capacity(size) for size in words.alive(need).values())]
        row.append(f"**{format_capacity(need.peak)}**")
        row += [
            "fits" if need.fits(chip) else f"**no: {need.chips_needed(chip):,} chips**"
            for chip in report.chips
        ]
        rows.append(row)
    return [
        *table(head, rows),
        "",
        "Alive at the peak of the step; activations are all but the other four. The number of "
        "chips is capacity alone: the peak over what one holds, without what parallelism adds.",
        *_largest(report),
        *image("memory.png", figures),
    ]


def _largest(report: Report) -> list[str]:
    """The largest batch that fits each chip, where it was looked for."""
    if not report.largest:
        return []
    names = [chip.name for chip in report.chips]
    rows = [
        [phase, *(words.batch_words(found[name]) for name in names)]
        for phase, found in report.largest.items()
    ]
    head = ["Largest batch", *(f"on one {name}" for name in names)]
    note = "Found by tracing: this batch fits, and one more does not."
    return ["", *table(head, rows), "", note]


def steps_section(report: Report, figures: Sequence[str]) -> list[str]:
    lines = []
    for chip in report.chips:
        head = [
            "Phase",
            "Execution",
            "FLOP",
            "HBM",
            "FLOP/byte",
            "Kernels",
            "t_comp",
            "t_hbm",
            "t_bound",
            "t_serial",
            "t_est",
            "Limited by",
            "MFU",
            "HFU",
            "Items/s",
        ]
        rows = []
        for phase in report.phases:
            for execution in report.executions:
                rows.append(
                    [phase, execution, *_step_cells(report.estimate(phase, execution, chip.name))]
                )
        lines += ["", f"On {chip.title}:", "", *table(head, rows, left=2)]
    other = sorted({one.item for _, _, one in report.of_first_chip()})
    lines += [
        "",
        f"Items are {words.listed([f'{item}s' for item in other])}. "
        + " ".join(
            f"{name}: {SUMMARIES[name]}." for name in report.executions if name in SUMMARIES
        ),
    ]
    notes = dict.fromkeys(note for _, _, one in report.of_first_chip() for note in one.notes)
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    return lines[1:] + [
        line for name in ("roofline.png", "time.png", "bytes.png") for line in image(name, figures)
    ]


def _step_cells(one: Estimate) -> list[str]:
    times = one.times
    return [
        format_flops(one.flops),
        format_traffic(one.bytes_hbm) + (" (below the floor)" if one.below_floor else ""),
        words.bare(format_intensity(one.ai_hbm), "FLOP/byte"),
        f"{one.kernels:,}",
        format_time(times.t_comp),
        format_time(times.t_hbm),
        format_time(times.t_bound),
        format_time(times.t_serial),
        f"**{format_time(times.t_est)}**",
        words.regime_words(times),
        format_share(one.mfu),
        format_share(one.hfu),
        format_count(one.items_per_s),
    ]
