"""The terminal: what a step costs, what limits it, whether it fits, on one screen."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rooftrace.hardware.units import (
    format_capacity,
    format_count,
    format_flops,
    format_intensity,
    format_time,
    format_traffic,
)
from rooftrace.reporting.sections import Tally, tally
from rooftrace.reporting.text import Column, Grid, grid, words
from rooftrace.tracer.graph import LOWER_BOUND, pattern_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.costmodels.memory import Memory
    from rooftrace.hardware import Chip
    from rooftrace.reporting.pages.report import Report
    from rooftrace.tracer.graph import Assumption

WIDTH = 100
KERNEL_LINES = 9  # over all phases; what keeps a report of three phases on one screen
REGIME_STYLES: Mapping[str, str] = {
    "compute": "green",
    "hbm": "blue",
    "network": "magenta",
    "launch": "yellow",
}


def render_report(report: Report) -> RenderableType:
    """A report: fit, a line per phase and execution, top kernels, coverage, on its first chip; and
    of several chips a line for each phase on each of them."""
    shown = [one for _, _, one in report.of_first_chip()]
    largest = {
        phase: words.batch_words(found[report.chips[0].name])
        for phase, found in report.largest.items()
    }
    chips = _chips(report) if len(report.chips) > 1 else None
    return _render(shown, report.main, report.memory, report.assumptions, largest, chips)


def render_estimates(estimates: Sequence[Estimate]) -> str:
    """The same for estimates of any phase and execution, as plain text: print(estimate)."""
    assumptions = {one.phase: one.plan.source.assumptions for one in estimates}
    flat = tuple((phase, item) for phase, items in assumptions.items() for item in items)
    return as_text(_render(estimates, estimates[-1].execution.name, {}, flat))


def render_text(report: Report, width: int = WIDTH) -> str:
    """`render_report` as plain text."""
    return as_text(render_report(report), width)


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """What a terminal of this width shows, without colours."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(renderable)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def _render(
    estimates: Sequence[Estimate],
    main: str,
    memory: Mapping[str, Memory],
    assumptions: Sequence[tuple[str, Assumption]],
    largest: Mapping[str, str] | None = None,
    chips: Grid | None = None,
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    first = estimates[0]
    parts: list[RenderableType] = [_head(estimates)]
    if memory:
        fits, sentence = words.fit_words(memory, first.chip)
        # What does not fit is said before anything else.
        parts.insert(1 if fits else 0, Text(sentence, style="" if fits else "bold red"))
    parts += [Text(), _steps(estimates), Text()]
    parts += [chips, Text()] if chips is not None else []
    broken_down = [one for one in estimates if one.execution.name == main] or list(estimates)
    parts.append(_kernels(broken_down))
    parts.append(Text())
    if memory:
        parts.append(_memory(memory, first.chip, largest or {}))
    parts += _trust(broken_down, estimates, assumptions)
    return Group(*parts)


def _head(estimates: Sequence[Estimate]) -> Text:
    """Who runs on what.  Phases that compute in another precision have a chip line of their own."""
    from rich.text import Text

    first = estimates[0]
    text = Text(words.model_words(first.graph.model, first.graph.workload), style="bold")
    for line in dict.fromkeys(words.chip_words(one) for one in estimates):
        text.append(f"\n{line}", style="not bold")
    runs = {one.phase: words.workload_words(one.phase, one.graph.workload) for one in estimates}
    line = "; ".join(f"{phase} {run}".rstrip() for phase, run in runs.items())
    return text.append(f"\n{line}", style="not bold")


# -- one line per phase and execution ------------------------------------------------------------

STEP_COLUMNS = (
    Column("FLOP"),
    Column("HBM"),
    Column("FLOP/B", drop=3),
    Column("t_bound", drop=2),
    Column("t_serial", drop=4),
    Column("t_est"),
    Column("limited by", right=False),
    Column("MFU", drop=1),
)


def _steps(estimates: Sequence[Estimate]) -> Grid:
    items = {one.item for one in estimates}
    item = items.pop() if len(items) == 1 else "item"
    columns = (Column("", right=False), *STEP_COLUMNS, Column(f"{item}s/s", drop=1))
    rows: list[Sequence[str | Text]] = []
    phase = None
    for one in estimates:
        if one.phase != phase:
            phase = one.phase
            rows.append([_styled(phase, "bold"), *[""] * (len(columns) - 1)])
        rows.append([f"  {one.execution.name}", *_step_cells(one)])
    return grid(columns, rows)


def _step_cells(one: Estimate) -> list[str | Text]:
    times = one.times
    least = "≥ " if one.lower_bound else ""
    return [
        least + words.bare(format_flops(one.flops), "FLOP"),
        least + format_traffic(one.bytes_hbm),
        words.bare(format_intensity(one.ai_hbm), "FLOP/byte"),
        format_time(times.t_bound),
        format_time(times.t_serial),
        _styled(least + format_time(times.t_est), "bold"),
        _styled(words.regime_words(times), REGIME_STYLES[times.regime]),
        words.percent(one.mfu),
        format_count(one.items_per_s),
    ]


# -- one line per chip and phase -----------------------------------------------------------------

CHIP_COLUMNS = (
    Column("t_bound", drop=2),
    Column("t_est"),
    Column("times", drop=3),
    Column("limited by", right=False, clipped=9),
    Column("MFU", drop=1),
)


def _chips(report: Report) -> Grid:
    """Each phase on each chip, under the execution that is broken down, and whether it fits there.

    times: how often the time on the first chip.
    """
    items = {one.item for _, _, one in report.of_first_chip()}
    item = items.pop() if len(items) == 1 else "item"
    largest = [Column("largest batch", drop=1)] if report.largest else []
    columns = (
        Column(f"chips, {report.main}", right=False),
        *CHIP_COLUMNS,
        Column(f"{item}s/s", drop=1),
        Column("memory"),
        Column("fits", right=False),
        *largest,
    )
    rows: list[Sequence[str | Text]] = []
    for phase in report.phases:
        rows.append([_styled(phase, "bold"), *[""] * (len(columns) - 1)])
        first = report.estimate(phase).t_est
        for chip in report.chips:
            one, need = report.estimate(phase, chip=chip.name), report.memory[phase]
            fits = "yes" if need.fits(chip) else f"no: {need.chips_needed(chip):,} chips"
            times = one.times
            found = report.largest.get(phase, {}).get(chip.name) if largest else None
            rows.append(
                [
                    f"  {chip.name}",
                    format_time(times.t_bound),
                    _styled(format_time(times.t_est), "bold"),
                    f"{times.t_est / first:.2f}" if first else "–",
                    _styled(words.regime_words(times), REGIME_STYLES[times.regime]),
                    words.percent(one.mfu),
                    format_count(one.items_per_s),
                    words.percent(need.peak / chip.memory_capacity.value),
                    _styled(fits, "" if need.fits(chip) else "red"),
                    *([words.batch_words(found) if found is not None else ""] if largest else []),
                ]
            )
    return grid(columns, rows)


# -- the kernels that take the time --------------------------------------------------------------

KERNEL_COLUMNS = (
    Column("bound", right=False),
    Column("time"),
    Column("share"),
    Column("calls", drop=1),
    Column("FLOP", drop=2),
    Column("HBM"),
    Column("FLOP/B", drop=3),
    Column("module", right=False, flexible=True),
)


def _kernels(estimates: Sequence[Estimate]) -> Grid:
    """Kernels by name, module pattern and regime; one operator that is compute-bound here and
    memory-bound there has two rows."""
    lines = max(3, KERNEL_LINES // len({one.phase for one in estimates}))
    executions = words.listed(list(dict.fromkeys(one.execution.name for one in estimates)))
    columns = (Column(f"kernels, {executions}", right=False), *KERNEL_COLUMNS)
    rows: list[Sequence[str | Text]] = []
    for one in estimates:
        rows.append([_styled(one.phase, "bold"), *[""] * (len(columns) - 1)])
        entries = tally(one.rows, lambda row: (row.name, row.timing.regime, pattern_of(row.module)))
        top = entries[:lines] if len(entries) > lines + 1 else entries
        rows += [_kernel_cells(entry, one.t_est) for entry in top]
        rest = entries[len(top) :]
        if rest:
            seconds = sum(entry.seconds for entry in rest)
            rows.append(
                [
                    f"  {len(rest)} more",
                    "",
                    format_time(seconds),
                    words.percent(seconds / one.t_est),
                    f"{sum(e.calls for e in rest):,}",
                    *[""] * 4,
                ]
            )
        if one.times.t_launch > 0.005 * one.t_est:
            rows.append(
                [
                    "  waiting for the host",
                    _styled("launch", REGIME_STYLES["launch"]),
                    format_time(one.times.t_launch),
                    words.percent(one.times.t_launch / one.t_est),
                    *[""] * 5,
                ]
            )
    return grid(columns, rows)


def _kernel_cells(entry: Tally[tuple[str, str, str]], total: float) -> list[str | Text]:
    name, regime, module = entry.key
    return [
        f"  {_cut(words.kernel_name(name), 26)}",
        _styled(words.LIMITS[regime], REGIME_STYLES[regime]),
        format_time(entry.seconds),
        words.percent(entry.seconds / total if total else 0.0),
        f"{entry.calls:,}",
        words.bare(format_flops(entry.flops), "FLOP"),
        format_traffic(entry.bytes),
        words.bare(format_intensity(entry.intensity), "FLOP/byte"),
        module or "(root)",
    ]


# -- memory, and how far the totals can be trusted -----------------------------------------------


def _memory(memory: Mapping[str, Memory], chip: Chip, largest: Mapping[str, str]) -> Grid:
    """What is alive at the peak of each phase; kinds of which no phase holds any have no column.

    largest: the largest batch that fits, where it was looked for.
    """
    sizes = {phase: words.alive(need) for phase, need in memory.items()}
    parts = [name for name in next(iter(sizes.values())) if any(s[name] for s in sizes.values())]
    columns = [
        Column("memory", right=False),
        *(Column(name, drop=2) for name in parts),
        Column("= peak"),
        Column(f"of {format_capacity(chip.memory_capacity.value)}"),
        Column("chips", drop=1),
        *([Column("largest batch")] if largest else []),
    ]
    rows: list[Sequence[str | Text]] = []
    for phase, need in memory.items():
        style = "" if need.fits(chip) else "red"
        cells = [
            f"  {phase}",
            *(format_capacity(sizes[phase][name]) for name in parts),
            format_capacity(need.peak),
            words.percent(need.peak / chip.memory_capacity.value),
            f"{need.chips_needed(chip):,}",
            *([largest.get(phase, "")] if largest else []),
        ]
        rows.append([_styled(cell, style) for cell in cells])
    return grid(columns, rows)


def _trust(
    shown: Sequence[Estimate],
    everything: Sequence[Estimate],
    assumptions: Sequence[tuple[str, Assumption]],
) -> list[RenderableType]:
    complete, sentence = words.coverage_words(
        (one.coverage for one in shown), [a for _, a in assumptions if a.kind in LOWER_BOUND]
    )
    lines: list[RenderableType] = [_styled(f"coverage: {sentence}", "" if complete else "red")]
    missing = {entry.target: entry for one in everything for entry in one.unsupported_ops()}
    for entry in sorted(missing.values(), key=lambda entry: (-entry.bytes, entry.target))[:3]:
        lines.append(
            _styled(
                f"  no rule: {entry.target} x{entry.count:,}, {format_traffic(entry.bytes)}, in "
                f"{entry.modules[0] or '(root)'}; no FLOP counts, and its bytes are between "
                f"{format_traffic(entry.bytes_least)} and {format_traffic(entry.most)}",
                "red",
            )
        )
    if missing:
        stub = next(iter(missing.values())).stub.splitlines()[0]
        more = f" ({len(missing) - 3} more ops)" if len(missing) > 3 else ""
        lines.append(_styled(f"  add one with {stub}, see report.md{more}", "red"))
    assumed = words.assumption_words(assumption for _, assumption in assumptions)
    guesses = words.guess_words(everything[0].chip)
    lines.append(_styled(f"assumptions: {assumed}; guessed chip facts: {guesses}", ""))
    below = [one for one in everything if one.below_floor]
    lines += [
        _styled(
            f"below the floor: {one.phase}, {one.execution.name} moves "
            f"{format_traffic(one.bytes_hbm)}; {format_traffic(one.bytes_compulsory)} is the least",
            "yellow",
        )
        for one in below
    ]
    return lines + [_styled(text, "") for text in _knob_lines(everything)]


def _knob_lines(everything: Sequence[Estimate]) -> list[str]:
    """Which knobs the times are by, and what a measured step would be between."""
    titles = dict.fromkeys(k.title for one in everything if (k := one.execution.knobs) is not None)
    ranges = [
        f"{one.phase} {one.execution.name} {format_time(low)} to {format_time(high)}"
        for one in everything
        if one.t_interval is not None
        for low, high in [one.t_interval]
    ]
    found = [f"times by knobs: {title}" for title in titles]
    return [*found, *([f"90 % of measured steps: {', '.join(ranges)}"] if ranges else [])]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _styled(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style)
