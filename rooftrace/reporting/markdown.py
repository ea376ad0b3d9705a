"""report.md: the report as one GitHub-flavoured page.  Every sentence is made from its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rooftrace.costmodels.execution import SUMMARIES
from rooftrace.hardware.units import (
    MISSING,
    format_bandwidth,
    format_capacity,
    format_count,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting import words
from rooftrace.reporting.document import unsupported_ops
from rooftrace.reporting.glossary import HOW_TO_READ
from rooftrace.reporting.tally import Tally, tally
from rooftrace.tracer.graph import ROLES, pattern_of

if TYPE_CHECKING:
    from rooftrace.costmodels.estimate import Estimate
    from rooftrace.reporting.report import Report

PATTERNS_SHOWN, KERNELS_SHOWN, ASSUMPTIONS_SHOWN = 25, 15, 40


def markdown(report: Report, figures: Sequence[str] = ()) -> str:
    """The page; `figures` are the file names that it may link."""
    first = report.estimate(report.phases[0])
    lines = [f"# {words.model_words(report.model, first.graph.workload)}", ""]
    lines += [f"On {words.chip_words(one)}.  " for one in _one_per_headline(report)]
    lines += [
        f"{phase.capitalize()}: {words.workload_words(phase, graph.workload)}.  "
        for phase, graph in report.graphs.items()
    ]
    sections = [
        ("Summary", summary(report)),
        ("Does it fit", _fit(report, figures)),
        ("What a step costs", _steps(report, figures)),
        *((phase.capitalize(), _phase(report, phase, figures)) for phase in report.phases),
        ("Assumptions", _assumptions(report)),
        ("Coverage", _coverage(report)),
        ("Chips", _chips(report)),
        ("How to read this report", [HOW_TO_READ.strip()]),
    ]
    for title, body in sections:
        if body:
            lines += ["", f"## {title}", "", *body]
    return "\n".join(line.rstrip() if not line.endswith(".  ") else line for line in lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A pipe table, padded so that it can be read as text; all but the first `left` columns are
    flush right."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    text = [
        [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (text[0], rule, *text[1:])]


def _one_per_headline(report: Report) -> list[Estimate]:
    """One estimate for each chip, and one more where a phase computes in another precision."""
    found: dict[str, Estimate] = {}
    for chip in report.chips:
        for phase in report.phases:
            one = report.estimate(phase, chip=chip.name)
            found.setdefault(words.chip_words(one), one)
    return list(found.values())


# -- summary -------------------------------------------------------------------------------------


def summary(report: Report) -> list[str]:
    """Fit, each phase, what executions change, and how far to trust it; one line each."""
    lines = []
    if report.memory:
        fits, sentence = words.fit_words(report.memory, report.chips[0])
        lines.append(sentence if fits else f"**{sentence}**")
    for phase in report.phases:
        lines.append(_phase_sentence(report.estimate(phase)))
    if len(report.executions) > 1:
        lines.append(_speed_sentence(report))
    main = [report.estimate(phase).coverage for phase in report.phases]
    assumed = words.assumption_words(assumption for _, assumption in report.assumptions)
    lines.append(
        f"Coverage: {words.coverage_words(main)[1]}. Assumptions: {assumed}. "
        f"Chip facts that are guesses: {words.guess_words(report.chips[0])}."
    )
    below = [
        f"{phase}, {execution}"
        for phase, execution, one in report.of_first_chip()
        if one.below_floor
    ]
    if below:
        lines.append(
            f"**Below the compulsory floor: {words.listed(below)}**: the knobs promise "
            "fewer bytes than the step has to move at least."
        )
    return [f"- {line}" for line in lines]


def _phase_sentence(one: Estimate) -> str:
    rate = f", {format_count(one.items_per_s)} {one.item}s/s" if one.items_per_s else ""
    top = tally(one.rows, lambda row: row.family)[:1]
    most = (
        f" Most time goes to {top[0].key}, {format_share(top[0].seconds / one.t_est)}."
        if (top and one.t_est)
        else ""
    )
    roles = Counter(one.bytes.to_dict()).most_common(1)
    largest = ""
    if one.bytes_hbm:
        role, size = roles[0]
        largest = f", {format_share(size / one.bytes_hbm)} of it {role}"
    return (
        f"**{one.phase.capitalize()}** ({one.execution.name}): {format_time(one.t_est)} on one "
        f"{one.chip.title}{rate}; limited by {words.regime_words(one.times)}; "
        f"{format_flops(one.flops)} and {format_traffic(one.bytes_hbm)} of HBM traffic"
        f"{largest}.{most}"
    )


def _speed_sentence(report: Report) -> str:
    other = next(name for name in report.executions if name != report.main)
    ratios = []
    for phase in report.phases:
        slow, fast = report.estimate(phase, other).t_est, report.estimate(phase).t_est
        if fast:
            ratios.append(f"{phase} {slow / fast:.2f}x")
    return f"Time of {other} over {report.main}: {', '.join(ratios)}."


# -- memory --------------------------------------------------------------------------------------


def _fit(report: Report, figures: Sequence[str]) -> list[str]:
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
        "Alive at the peak of the step; activations are all but the other four. The number of chips is capacity alone: the peak over what "
        "one holds, without what parallelism adds.",
        *_image("memory.png", figures),
    ]


# -- one row per phase and execution -------------------------------------------------------------


def _steps(report: Report, figures: Sequence[str]) -> list[str]:
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
        line for name in ("roofline.png", "time.png", "bytes.png") for line in _image(name, figures)
    ]


def _step_cells(one: Estimate) -> list[str]:
    times = one.times
    return [
        format_flops(one.flops),
        format_traffic(one.bytes_hbm),
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


# -- one phase -----------------------------------------------------------------------------------


def _phase(report: Report, phase: str, figures: Sequence[str]) -> list[str]:
    main = report.estimate(phase)
    every = [report.estimate(phase, execution) for execution in report.executions]
    titles = [("HBM bytes by role", _roles(every)), ("Families", _families(every))]
    parts = main.by_part()
    if len(parts) > 1:
        titles.append(("Parts", _parts(main)))
    titles += [
        (f"Modules, {main.execution.name}", _modules(main)),
        (f"Kernels, {main.execution.name}", _kernels(main)),
    ]
    lines = []
    for title, body in titles:
        lines += ["", f"### {title}", "", *body]
    return lines[1:] + _image(f"roofline-{phase}.png", figures)


def _roles(estimates: Sequence[Estimate]) -> list[str]:
    """Bytes by role, executions side by side; roles that move nothing are left out."""
    head = ["Role"]
    for one in estimates:
        head += [one.execution.name, "share"]
    rows = []
    for role in ROLES:
        sizes = [one.bytes.to_dict()[role] for one in estimates]
        if any(sizes):
            rows.append(
                [
                    role,
                    *(
                        cell
                        for size, one in zip(sizes, estimates, strict=True)
                        for cell in (format_traffic(size), _share(size, one.bytes_hbm))
                    ),
                ]
            )
    rows.append(
        [
            "**all**",
            *(cell for one in estimates for cell in (f"**{format_traffic(one.bytes_hbm)}**", "")),
        ]
    )
    rows.append(
        [
            "compulsory floor",
            *(
                cell
                for one in estimates
                for cell in (
                    format_traffic(one.bytes_compulsory),
                    _share(one.bytes_compulsory, one.bytes_hbm),
                )
            ),
        ]
    )
    return table(head, rows)


def _families(estimates: Sequence[Estimate]) -> list[str]:
    """FLOP, bytes, intensity and time by family, executions side by side."""
    head = ["Family"]
    by_execution = []
    for one in estimates:
        name = one.execution.name
        head += [f"FLOP, {name}", "HBM", "FLOP/byte", "time", "share of t_est"]
        by_execution.append({entry.key: entry for entry in tally(one.rows, lambda row: row.family)})
    names = list(by_execution[-1])
    names += [name for found in by_execution for name in found if name not in names]
    rows = []
    for name in dict.fromkeys(names):
        row = [name]
        for one, found in zip(estimates, by_execution, strict=True):
            entry = found.get(name)
            row += (
                [MISSING] * 5
                if entry is None
                else [
                    format_flops(entry.flops),
                    format_traffic(entry.bytes),
                    words.bare(format_intensity(entry.intensity), "FLOP/byte"),
                    format_time(entry.seconds),
                    _share(entry.seconds, one.t_est),
                ]
            )
        rows.append(row)
    if any(one.times.t_launch > 0 for one in estimates):
        rows.append(
            [
                "waiting for the host",
                *(
                    cell
                    for one in estimates
                    for cell in (
                        "",
                        "",
                        "",
                        format_time(one.times.t_launch),
                        _share(one.times.t_launch, one.t_est),
                    )
                ),
            ]
        )
    return table(head, rows)


def _parts(one: Estimate) -> list[str]:
    rows = [
        [
            name,
            f"{entry['calls']:,}",
            format_flops(entry["flops"]),
            format_traffic(entry["bytes"]),
            format_time(entry["t_device"]),
            _share(entry["t_device"], one.t_est),
            words.LIMITS[entry["regime"]],
        ]
        for name, entry in one.by_part().items()
    ]
    return table(["Part", "Kernels", "FLOP", "HBM", "Time", "Share of t_est", "Limited by"], rows)


def _modules(one: Estimate) -> list[str]:
    """Module paths with starred indices, most time first."""
    entries = one.by_pattern()
    classes = {pattern_of(path): name for path, name in one.graph.modules.items()}
    params = _parameters(one)
    rows = [
        [
            f"`{entry['key'] or '(root)'}`",
            classes.get(entry["key"], ""),
            f"{entry['instances']:,}",
            format_count(params[entry["key"]]) if entry["key"] in params else MISSING,
            format_flops(entry["flops"]),
            format_traffic(entry["bytes"]),
            format_time(entry["t_device"]),
            _share(entry["t_device"], one.t_est),
            words.LIMITS[entry["regime"]],
        ]
        for entry in entries[:PATTERNS_SHOWN]
    ]
    lines = table(
        [
            "Module",
            "Class",
            "Instances",
            "Parameters",
            "FLOP",
            "HBM",
            "Time",
            "Share of t_est",
            "Limited by",
        ],
        rows,
        left=2,
    )
    rest = entries[PATTERNS_SHOWN:]
    if rest:
        seconds = sum(entry["t_device"] for entry in rest)
        lines += [
            "",
            f"{len(rest):,} more patterns: {format_time(seconds)}, {_share(seconds, one.t_est)}.",
        ]
    return lines


def _parameters(one: Estimate) -> dict[str, int]:
    """Parameters by module pattern, from the names of the weights that the step touches."""
    found: dict[str, int] = {}
    for index in one.graph.external:
        tensor = one.graph.values[index]
        if tensor.role == "weights" and tensor.storage == index and tensor.name:
            key = pattern_of(tensor.name.rpartition(".")[0])
            found[key] = found.get(key, 0) + tensor.elements
    return found


def _kernels(one: Estimate) -> list[str]:
    """Kernels by name, module pattern and regime, most time first."""
    entries = tally(one.rows, lambda row: (row.name, row.timing.regime, pattern_of(row.module)))
    rows = [_kernel_cells(entry, one) for entry in entries[:KERNELS_SHOWN]]
    rest = entries[KERNELS_SHOWN:]
    if rest:
        seconds = sum(entry.seconds for entry in rest)
        rows.append(
            [
                f"{len(rest):,} more",
                "",
                "",
                f"{sum(entry.calls for entry in rest):,}",
                format_flops(sum(entry.flops for entry in rest)),
                format_traffic(sum(entry.bytes for entry in rest)),
                "",
                format_time(seconds),
                _share(seconds, one.t_est),
            ]
        )
    return table(
        [
            "Kernel",
            "Bound",
            "Module",
            "Calls",
            "FLOP",
            "HBM",
            "FLOP/byte",
            "Time",
            "Share of t_est",
        ],
        rows,
        left=3,
    )


def _kernel_cells(entry: Tally[tuple[str, str, str]], one: Estimate) -> list[str]:
    name, regime, module = entry.key
    return [
        f"`{words.kernel_name(name)}`",
        words.LIMITS[regime],
        f"`{module or '(root)'}`",
        f"{entry.calls:,}",
        format_flops(entry.flops),
        format_traffic(entry.bytes),
        words.bare(format_intensity(entry.intensity), "FLOP/byte"),
        format_time(entry.seconds),
        _share(entry.seconds, one.t_est),
    ]


# -- what it rests on ----------------------------------------------------------------------------


def _assumptions(report: Report) -> list[str]:
    """Each assumption once, with the phases that make it and every place in starred form."""
    merged: dict[tuple[str, str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for phase, item in report.assumptions:
        key = (item.kind, item.text, "" if item.value is None else str(item.value))
        phases, places = merged.setdefault(key, ({}, {}))
        phases[phase] = None
        places[f"`{pattern_of(item.where) or '(root)'}`"] = None
    if not merged:
        return ["None: nothing had to be assumed."]
    rows = [
        [str(number), kind, ", ".join(phases), _few(list(places)), text, value]
        for number, ((kind, text, value), (phases, places)) in enumerate(merged.items(), 1)
    ]
    lines = table(
        ["#", "Kind", "Phases", "Where", "What was assumed", "Value"],
        rows[:ASSUMPTIONS_SHOWN],
        left=6,
    )
    if len(rows) > ASSUMPTIONS_SHOWN:
        lines += ["", f"{len(rows) - ASSUMPTIONS_SHOWN:,} more are in report.json."]
    return lines


def _few(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def _coverage(report: Report) -> list[str]:
    rows = []
    for phase, execution, one in report.of_first_chip():
        coverage = one.coverage
        rows.append(
            [
                phase,
                execution,
                f"{coverage.ops:,}",
                f"{coverage.ops_with_rule:,}",
                "100 %"
                if coverage.bytes == coverage.bytes_with_rule
                else format_share(coverage.bytes_with_rule_share),
            ]
        )
    lines = table(["Phase", "Execution", "Ops", "With a rule", "Bytes with a rule"], rows, left=2)
    missing = unsupported_ops(report)
    if not missing:
        return lines
    lines += ["", "Of these ops only the bytes of inputs and outputs are counted, no FLOP:", ""]
    lines += table(
        ["Op", "Phase", "Where", "Operands", "Calls", "Bytes"],
        [
            [
                f"`{entry.target}`",
                phase,
                _few([f"`{module or '(root)'}`" for module in entry.modules]),
                f"`{entry.shapes}`",
                f"{entry.count:,}",
                format_traffic(entry.bytes),
            ]
            for phase, entry in missing
        ],
        left=4,
    )
    stubs = dict.fromkeys(entry.stub for _, entry in missing)
    return [
        *lines,
        "",
        "To fill in, and to pass with `--rules FILE.py`:",
        "",
        "```python",
        "import rooftrace",
        *(f"\n\n{stub}" for stub in stubs),
        "```",
    ]


def _chips(report: Report) -> list[str]:
    lines = []
    for chip in report.chips:
        rows = [[name, fact.text, fact.kind, fact.source, fact.note] for name, fact in chip.facts()]
        lines += [
            "",
            f"### {chip.title} (`{chip.name}`)",
            "",
            *table(["Fact", "Value", "Kind", "Source", "Note"], rows, left=5),
        ]
        used = {
            (words.peak_name(one), one.peak, one.ridge)
            for one in (report.estimate(phase, chip=chip.name) for phase in report.phases)
        }
        lines += [
            "",
            *(
                f"Bandwidth {format_bandwidth(chip.memory_bandwidth.value)} and "
                f"{format_flop_rate(peak)} {precision} meet at {format_intensity(ridge)}."
                for precision, peak, ridge in sorted(used)
            ),
        ]
    return lines[1:]


def _share(part: float, whole: float) -> str:
    return format_share(part / whole) if whole else MISSING


def _image(name: str, figures: Sequence[str]) -> list[str]:
    return ["", f"![{name.removesuffix('.png')}]({name})"] if name in figures else []
