"""What the numbers rest on: assumptions, coverage, and the facts of the chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rooftrace.costmodels.findings import Island, islands
from rooftrace.hardware.units import (
    format_bandwidth,
    format_flop_rate,
    format_intensity,
    format_share,
    format_traffic,
)
from rooftrace.reporting.sections.pipes import table
from rooftrace.reporting.sections.report_document import unsupported_ops
from rooftrace.tracer.graph import pattern_of

if TYPE_CHECKING:
    from rooftrace.reporting.pages import Report


ASSUMPTIONS_SHOWN = 40
ISLANDS_SHOWN = 20


def assumptions_section(report: Report) -> list[str]:
    """Each assumption once, with the phases that make it and every place in starred form."""
    merged: dict[tuple[str, str, str], tuple[dict[str, float], dict[str, None]]] = {}
    for phase, item in report.assumptions:
        key = (item.kind, item.text, "" if item.value is None else str(item.value))
        phases, places = merged.setdefault(key, ({}, {}))
        phases[phase] = phases.get(phase, 0.0) + report.resting_share(phase, item.id)
        places[f"`{pattern_of(item.where) or '(root)'}`"] = None
    if not merged:
        return ["None: nothing had to be assumed."]
    rows = [
        [str(number), kind, ", ".join(phases), _few(list(places)), text, value, _shares(phases)]
        for number, ((kind, text, value), (phases, places)) in enumerate(merged.items(), 1)
    ]
    lines = table(
        ["#", "Kind", "Phases", "Where", "What was assumed", "Value", "Time resting on it"],
        rows[:ASSUMPTIONS_SHOWN],
        left=6,
    )
    lines += [
        "",
        "Time resting on it: share of t_est in kernels whose sizes or values came from it.",
    ]
    if len(rows) > ASSUMPTIONS_SHOWN:
        lines += ["", f"{len(rows) - ASSUMPTIONS_SHOWN:,} more are in report.json."]
    return lines


def _shares(phases: Mapping[str, float]) -> str:
    """ "71 %" of the phase, or by phase where they differ; a dash where no kernel rests on it."""
    shown = {phase: format_share(share) if share else "–" for phase, share in phases.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{phase} {share}" for phase, share in shown.items())


def _few(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def islands_section(report: Report) -> list[str]:
    """What stays in another floating precision than the one that the step is priced in."""
    merged: dict[tuple[str, str], dict[str, Island]] = {}
    for phase, graph in report.graphs.items():
        for island in islands(graph):
            merged.setdefault((island.where, island.precision), {})[phase] = island
    if not merged:
        return []
    phases = list(report.graphs)
    rows = [
        [f"`{where or '(root)'}`", name]
        + [
            f"{format_traffic(by_phase[p].bytes)} in {by_phase[p].tensors:,}"
            if p in by_phase
            else "–"
            for p in phases
        ]
        for (where, name), by_phase in merged.items()
    ]
    own = report.model.get("priced_dtype") or report.model.get("dtype")
    lines = [f"Priced in {own}; these tensors are explicitly in another precision and stay so.", ""]
    lines += table(["Where", "Precision", *phases], rows[:ISLANDS_SHOWN], left=2)
    if len(rows) > ISLANDS_SHOWN:
        lines += ["", f"{len(rows) - ISLANDS_SHOWN:,} more are in report.json."]
    return lines


def coverage_section(report: Report) -> list[str]:
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
    gaps = [item for graph in report.graphs.values() for item in graph.unrecorded]
    if gaps:
        texts = dict.fromkeys(f"- `{item.where or '(root)'}`: {item.text}." for item in gaps)
        lines += ["", "**Not everything was recorded: all totals are a lower bound.**", "", *texts]
    missing = unsupported_ops(report)
    if not missing:
        return lines
    lines += [
        "",
        "Of these ops no FLOP is counted. Their bytes: operands are read and results written; of "
        "a cache or buffer that an op writes in place, as much as its other operands bring. The "
        "truth is between the bounds if no byte is touched twice.",
        "",
    ]
    lines += table(
        ["Op", "Phase", "Where", "Operands", "Calls", "Bytes", "At least", "At most"],
        [
            [
                f"`{entry.target}`",
                phase,
                _few([f"`{module or '(root)'}`" for module in entry.modules]),
                f"`{entry.shapes}`",
                f"{entry.count:,}",
                format_traffic(entry.bytes),
                format_traffic(entry.bytes_least),
                format_traffic(entry.most),
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


def chips_section(report: Report) -> list[str]:
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
            (one.peak_precision, one.peak, one.ridge)
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
