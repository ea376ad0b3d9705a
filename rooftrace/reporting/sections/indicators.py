"""The indicators of a step with their formulas, and one kernel's numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, MATRIX, Work
from rooftrace.costmodels.estimating.rows import lead_op
from rooftrace.hardware.units import (
    format_bandwidth,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.sections.tallies import ratio
from rooftrace.reporting.view import model as view, units, words
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate, Row
    from rooftrace.hardware import Chip

_Formula = tuple[str, str, Callable[["Estimate"], Any], Callable[[Any], str]]
INDICATORS: tuple[_Formula, ...] = (
    ("F_theory", "FLOP of all ops, attention dense", lambda e: e.flops, format_flops),
    ("F_useful", "F_theory of what masks let through", lambda e: e.flops_causal, format_flops),
    (
        "F_matrix",
        "FLOP of products and convolutions, which matrix engines (tensor cores) can run",
        lambda e: e.flops_matrix,
        format_flops,
    ),
    (
        "F_realizable",
        "T_comp x peak: what the peak would compute in the time that computing takes",
        lambda e: e.flops_realizable,
        format_flops,
    ),
    (
        "P_effective",
        "F_theory / T_comp",
        lambda e: ratio(e.flops, e.times.t_comp),
        format_flop_rate,
    ),
    ("AI_hbm", "F_useful / HBM bytes", lambda e: e.ai_hbm, format_intensity),
    (
        "AI_total",
        "F_useful / (HBM bytes + bytes over links)",
        lambda e: e.ai_total,
        format_intensity,
    ),
    (
        "AI_weights_only",
        "F_useful / HBM bytes of weights",
        lambda e: ratio(e.flops_causal, e.bytes.weights),
        format_intensity,
    ),
    ("OI_knee", "peak / HBM bandwidth, of the chip", lambda e: e.ridge, format_intensity),
    (
        "T_comp",
        "of all kernels, by the rates of engines",
        lambda e: e.times.t_comp,
        format_time,
    ),
    ("T_hbm", "of all kernels, by the rate of HBM", lambda e: e.times.t_hbm, format_time),
    (
        "T_net",
        "of all collectives, by the rates of links",
        lambda e: e.times.t_net,
        format_time,
    ),
    (
        "T_est",
        "of the step: for each kernel the largest of the three and its gap, and what waits",
        lambda e: e.t_est,
        format_time,
    ),
    ("TF_est", "F_theory / T_est", lambda e: ratio(e.flops, e.t_est), format_flop_rate),
    ("MFU", "useful FLOP of products / (T_est x peak)", lambda e: e.mfu, format_share),
)


def indicators(estimates: Sequence[Estimate]) -> view.Section:
    """The indicators of one phase: name, formula, and the value under each execution."""
    columns = [
        view.Column("name", units.CODE, "Indicator"),
        view.Column("formula", units.TEXT, "Is"),
        *(
            view.Column(f"value {i}", units.TEXT, estimate.execution.name)
            for i, estimate in enumerate(estimates)
        ),
    ]
    rows = [
        {
            "name": name,
            "formula": formula,
            **{f"value {i}": written(value(e)) for i, e in enumerate(estimates)},
        }
        for name, formula, value, written in INDICATORS
    ]
    return view.Section(
        title="Indicators", parts=[view.Table(columns=columns, rows=rows, leading=2)]
    )


def worked_example(estimate: Estimate) -> view.Section:
    """The kernel with most time, from its shapes to its share of the step; nothing without any."""
    rows = [row for row in estimate.rows if row.timing.t_device > 0]
    if not rows:
        return view.Section()
    row = max(rows, key=lambda row: row.timing.t_device)
    lines = [_what(estimate, row), _work(estimate, row), _bytes(row)]
    lines += _bound(estimate, row)
    lines.append(_expected(estimate, row))
    notes = [view.Note(text, number=place) for place, text in enumerate(lines, 1)]
    return view.Section(title="Worked example", parts=notes)


def _what(estimate: Estimate, row: Row) -> str:
    op = lead_op(estimate.plan, estimate.plan.groups[row.index])
    values = estimate.graph.values
    made = ", ".join(str(values[index]) for index in op.outputs[:2]) or "nothing"
    read = ", ".join(str(values[index]) for index in op.inputs[:3]) or "nothing"
    more = ", ..." if len(op.inputs) > 3 else ""
    where = f" of {units.MODULE.page(pattern_of(row.module))}" if row.module else ""
    runs = f"It runs {row.count:,} times" if row.count > 1 else "It runs once"
    return (
        f"The kernel with most time is {units.KERNEL.page(row.name)}{where}: "
        f"{units.CODE.page(f'{read}{more} -> {made}')}. {runs} in a step."
    )


def _work(estimate: Estimate, row: Row) -> str:
    """FLOP of one kernel, by its products where their sizes are known."""
    cost = estimate.plan.costs[row.index]
    products = {
        work: flop
        for work, flop in sorted(cost.work.items(), key=lambda entry: -entry[1])
        if work.operation in MATRIX and work.count in COMPUTED and 0 not in (work.shape or (0,))
    }
    total = cost.flops()
    if not total:
        return "It computes nothing: it moves bytes."
    parts = [_product(work, flop) for work, flop in products.items()]
    if sum(products.values()) == total and len(parts) == 1:
        return f"It computes {parts[0]}."
    rest = f", of which {'; '.join(parts[:2])}" if parts else ""
    return f"It computes {format_flops(total)}{rest}."


def _product(work: Work, flop: int) -> str:
    assert work.shape is not None
    rows, columns, inner = work.shape
    count = flop / (2 * rows * columns * inner)
    sizes = " x ".join(_size(size) for size in (rows, columns, inner))
    times = f" x {_size(count)}" if round(count, 6) != 1 else ""
    return f"2 x {sizes}{times} = {format_flops(flop)}"


def _size(number: float) -> str:
    return f"{number:,.0f}" if abs(number - round(number)) < 1e-6 else f"{number:,.4g}"


def _bytes(row: Row) -> str:
    sizes = sorted(row.bytes_by_role.items(), key=lambda entry: -entry[1])
    parts = " + ".join(f"{role} {format_traffic(size / row.count)}" for role, size in sizes if size)
    moved = f"It moves {format_traffic(row.bytes / row.count)} through HBM"
    return f"{moved}: {parts}." if parts else f"{moved}."


def _bound(estimate: Estimate, row: Row) -> list[str]:
    """What the datasheet says of one kernel: two quotients, and which is the larger."""
    chip: Chip = estimate.chip
    bandwidth = chip.memory_bandwidth.value
    seconds = row.bytes / row.count / bandwidth
    intensity = ratio(row.flops, row.bytes)
    lines = [
        f"At the bandwidth of the datasheet that takes {format_traffic(row.bytes / row.count)} / "
        f"{format_bandwidth(bandwidth)} = {format_time(seconds)}."
    ]
    if row.flops:
        compute = row.flops / row.count / estimate.peak
        side = "left" if intensity is not None and intensity < estimate.ridge else "right"
        lines.append(
            f"At the peak of the step, {format_flop_rate(estimate.peak)}, computing takes "
            f"{format_time(compute)}. {format_intensity(intensity)} is {side} of the knee at "
            f"{format_intensity(estimate.ridge)}."
        )
    return lines


def _expected(estimate: Estimate, row: Row) -> str:
    """What the model of kernels makes of it, and its share of the step."""
    timing = row.timing
    each = format_time(timing.t_device / row.count)
    terms = ", ".join(
        f"{words.LIMITS[name]} {format_time(seconds / row.count)}"
        for name, seconds in timing.terms.items()
        if seconds
    )
    says = "is expected to take" if estimate.expected else "takes at least"
    share = format_share(ratio(timing.t_device, estimate.t_est))
    rates = "the rates that such kernels reach" if estimate.expected else "the datasheet"
    every = f"{row.count:,} x {each} = {format_time(timing.t_device)}, " if row.count > 1 else ""
    return f"By {rates} ({terms}) it {says} {each}; {every}{share} of the step."
