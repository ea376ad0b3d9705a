"""One phase in detail: bytes by role; families, parts, modules and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import file_part
from rooftrace.costmodels.estimates.rows import lead_op
from rooftrace.costmodels.fusion import execution_model
from rooftrace.costmodels.ops import COMPUTED, MATRIX, Work
from rooftrace.graph import ROLES, pattern_of
from rooftrace.hardware.units import (
    format_bandwidth,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.sections.memory import memory_at_peak
from rooftrace.reporting.sections.results import ratio, tally
from rooftrace.reporting.sections.steps import kernels_of

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate, Row
    from rooftrace.hardware import Chip
    from rooftrace.reporting.sections.results import Results
    from rooftrace.studies.advice import Headroom, Saving

MODULES_SHOWN = 25
_SEED_ROWS = execution_model("seed-efficient").utilization.b_sat
SUMS = (
    view.Column("flops", units.FLOP, "FLOP"),
    view.Column("bytes", units.BYTE, "HBM"),
)


def _sum_columns(estimate: Estimate) -> tuple[view.Column, ...]:
    return (
        *SUMS,
        view.Column("t_device", units.SECOND, words.time_word([estimate]).capitalize()),
        view.Column("share_of_t_est", units.SHARE, "Share of step"),
        view.Column("limit", units.LIMITS, "Limited by"),
    )


def phase(results: Results, name: str) -> view.Section:
    """The phase under the main execution; bytes and families of every execution side by side."""
    main = results.estimate(name)
    every = [results.estimate(name, execution) for execution in results.executions]
    parts: list[view.Part] = [_roles(every), _families(every), indicators(every)]
    if len(main.by_part()) > 1:
        parts.append(_parts(main))
    parts += [
        _modules(main, results.parameters(name)),
        kernels_of(main),
        worked_example(main),
        fusing(results.headroom[name]),
    ]
    if name in results.memory:
        parts.append(memory_at_peak(results.memory[name]))
    file = file_part(name)
    parts += [view.Image(f"memory-{file}.png"), view.Image(f"roofline-{file}.png")]
    return view.Section(title=name.capitalize(), parts=parts)


def _roles(estimates: Sequence[Estimate]) -> view.Section:
    """Bytes by role, executions side by side; roles that move nothing are left out."""
    columns = [view.Column("role", units.TEXT, "Role")]
    rows: dict[str, dict[str, Any]] = {role: {"role": role} for role in ROLES}
    rows["all"] = {"role": view.Cell("all", "strong")}
    rows["floor"] = {"role": "compulsory floor"}
    for i, estimate in enumerate(estimates):
        size, share = f"bytes {i}", f"share {i}"
        columns += [
            view.Column(size, units.BYTE, estimate.execution.name),
            view.Column(share, units.SHARE, "share"),
        ]
        for role, moved in {
            **estimate.bytes.to_dict(),
            "floor": estimate.bytes_compulsory,
        }.items():
            rows[role] |= {size: moved, share: ratio(moved, estimate.bytes_hbm)}
        rows["all"][size] = view.Cell(estimate.bytes_hbm, "strong")
    for role in ROLES:
        if not any(estimate.bytes.to_dict()[role] for estimate in estimates):
            del rows[role]
    table = view.Table(columns=columns, rows=list(rows.values()), sets=2)
    return view.Section(title="HBM bytes by role", parts=[table])


def _families(estimates: Sequence[Estimate]) -> view.Section:
    """Time, then FLOP, bytes and intensity by family, executions side by side."""
    times = [view.Column("family", units.TEXT, "Family")]
    work = [view.Column("family", units.TEXT, "Family")]
    by_execution = []
    for i, estimate in enumerate(estimates):
        name, head = estimate.execution.name, words.time_word([estimate]).capitalize()
        times += [
            view.Column(f"seconds {i}", units.SECOND, f"{head}, {name}"),
            view.Column(f"share {i}", units.SHARE, "share of step"),
        ]
        work += [
            view.Column(f"flops {i}", units.FLOP, f"FLOP, {name}"),
            view.Column(f"bytes {i}", units.BYTE, "HBM"),
            view.Column(f"intensity {i}", units.INTENSITY, "FLOP/byte"),
        ]
        entries = tally(estimate.rows, lambda row: row.family)
        by_execution.append({entry.key: entry for entry in entries})
    names = [*by_execution[-1], *(name for entries in by_execution for name in entries)]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        row: dict[str, Any] = {"family": name}
        for i, (estimate, families) in enumerate(zip(estimates, by_execution, strict=True)):
            entry = families.get(name)
            for key in ("flops", "bytes", "intensity", "seconds"):
                row[f"{key} {i}"] = getattr(entry, key, None)
            row[f"share {i}"] = ratio(entry.seconds, estimate.t_est) if entry else None
        rows.append(row)
    tables = [view.Table(columns=work, rows=list(rows), sets=3)]
    waits = [estimate.times.t_launch for estimate in estimates]
    if any(wait > 0 for wait in waits):
        row = {"family": "waiting for the host"}
        for i, (estimate, wait) in enumerate(zip(estimates, waits, strict=True)):
            row |= {f"seconds {i}": wait, f"share {i}": ratio(wait, estimate.t_est)}
        rows.append(row)
    tables.insert(0, view.Table(columns=times, rows=rows, sets=2))
    return view.Section(title="Families", parts=tables)


def _sums(entry: Mapping[str, Any], estimate: Estimate) -> dict[str, Any]:
    """An entry of `by_part` or `by_pattern`, with its share of the step and its limit."""
    share = ratio(entry["t_device"], estimate.t_est)
    return {**entry, "share_of_t_est": share, "limit": words.LIMITS[entry["regime"]]}


def _parts(estimate: Estimate) -> view.Section:
    columns = (
        view.Column("part", units.TEXT, "Part"),
        view.Column("calls", units.COUNT, "Kernels"),
        *_sum_columns(estimate),
    )
    rows = [{"part": name, **_sums(e, estimate)} for name, e in estimate.by_part().items()]
    notes = [view.Note(text) for text in words.attention_again([(estimate, 1)])]
    return view.Section(title="Parts", parts=[view.Table(columns=columns, rows=rows), *notes])


def _modules(estimate: Estimate, params: Mapping[str, int]) -> view.Section:
    """Module paths with starred indices, most time first."""
    entries = estimate.by_pattern().rows
    classes = {pattern_of(path): name for path, name in estimate.graph.modules.items()}
    columns = (
        view.Column("key", units.MODULE, "Module"),
        view.Column("class", units.TEXT, "Class"),
        view.Column("instances", units.COUNT, "Instances"),
        view.Column("params", units.NUMBER, "Parameters"),
        *_sum_columns(estimate),
    )
    rows = [
        {
            **_sums(entry, estimate),
            "class": classes.get(entry["key"], ""),
            "params": params.get(entry["key"]),
        }
        for entry in entries[:MODULES_SHOWN]
    ]
    parts: list[view.Part] = [view.Table(columns=columns, rows=rows)]
    rest = entries[MODULES_SHOWN:]
    if rest:
        seconds = sum(entry["t_device"] for entry in rest)
        share = format_share(ratio(seconds, estimate.t_est))
        head = words.time_word([estimate])
        text = f"{len(rest):,} more patterns: {head} {format_time(seconds)}, {share}."
        parts.append(view.Note(text))
    return view.Section(title=f"Modules, {estimate.execution.name}", parts=parts)


# -- fusing ----------------------------------------------------------------------------------------


FUSED_SHOWN, LEFT_SHOWN, NAMES_SHOWN = 10, 5, 6
COLUMNS = (
    view.Column("name", units.KERNEL, "Kernel"),
    view.Column("ops", units.TEXT, "Ops"),
    view.Column("module", units.MODULE, "Module"),
    view.Column("count", units.COUNT, "Kernels"),
    view.Column("launches", units.COUNT, "Launches less"),
    view.Column("bytes", units.BYTE, "HBM less"),
)
SHARE = view.Column("share", units.SHARE, "Share of step")
SUMMED = ("count", "launches", "bytes", "seconds")


def fusing(headroom: Headroom) -> view.Section:
    """Savings by fusing, most time first: of the groups, then of larger kernels beyond them.

    Empty where there are none.
    """
    before, after, beyond = headroom.before, headroom.after, headroom.beyond
    parts: list[view.Part] = []
    if headroom.fused:
        size, seconds = before.bytes_hbm - after.bytes_hbm, before.times.t_serial
        parts += [
            view.Note(
                f"Every op a kernel of its own would move {format_traffic(size)} more and keep the "
                f"device busy {format_time(seconds - after.times.t_serial)} longer ("
                f"{words.time_word([after])} {format_time(seconds)} instead of "
                f"{format_time(after.times.t_serial)}). "
                "By group:"
            ),
            _table(headroom.fused, FUSED_SHOWN, before),
        ]
    if headroom.left:
        size = after.bytes_hbm - beyond.bytes_hbm
        seconds = after.times.t_serial - beyond.times.t_serial
        parts += [
            view.Note(
                f"Left: at most {format_traffic(size)} and {format_time(seconds)} of the device, "
                "with larger kernels than the groups found (epilogues of matrix products, "
                "attention written by hand, groups that only one other reads):"
            ),
            _table(headroom.left, LEFT_SHOWN, after),
        ]
    return view.Section(title=f"What fusing saves, {after.execution.name}", parts=parts)


def _table(savings: Sequence[Saving], shown: int, estimate: Estimate) -> view.Table:
    t_est = estimate.t_est
    rows: list[dict[str, Any]] = [
        {
            "name": saving.name,
            "ops": _ops(saving.ops),
            "module": saving.module,
            "share": ratio(saving.seconds, t_est),
            **{key: getattr(saving, key) for key in SUMMED},
        }
        for saving in savings[:shown]
    ]
    rest = savings[shown:]
    if rest:
        sums: dict[str, Any] = {key: sum(getattr(s, key) for s in rest) for key in SUMMED}
        name = view.Cell(f"{len(rest):,} more", "plain")
        rows.append({"name": name, "share": ratio(sums["seconds"], t_est), **sums})
    less = "Expected time less" if estimate.expected else "Bound less"
    columns = (*COLUMNS, view.Column("seconds", units.SECOND, less), SHARE)
    return view.Table(columns=columns, rows=rows)


def _ops(ops: Sequence[str]) -> str:
    """Names of ops in order of appearance, how often, the first few."""
    counts = Counter(words.kernel_name(name) for name in ops)
    names = [f"{name} x{count}" if count > 1 else name for name, count in counts.items()]
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f", {more} more" if more > 0 else "")


# -- indicators ------------------------------------------------------------------------------------


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
    (
        "eta",
        "F_theory / F_realizable. Of a product: the share of whole tiles in whole waves that it "
        f"fills, times that of the knobs; in seed-efficient min(1, rows / {_SEED_ROWS:g})",
        lambda e: ratio(e.flops, e.flops_realizable),
        format_share,
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
    lines = [_kernel(estimate, row), _work(estimate, row), _bytes(row)]
    lines += _bound(estimate, row)
    lines.append(_expected(estimate, row))
    notes = [view.Note(text, number=place) for place, text in enumerate(lines, 1)]
    return view.Section(title="Worked example", parts=notes)


def _kernel(estimate: Estimate, row: Row) -> str:
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
    """The bounds of one kernel by the datasheet: time of its bytes, and of its FLOP."""
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
    """The time of one kernel by its rates, and its share of the step."""
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
