"""report.md: the report as one GitHub-flavoured page.  Every sentence is made from its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.reporting.sections import (
    HOW_TO_READ,
    assumptions_section,
    chips_section,
    coverage_section,
    fit_section,
    islands_section,
    phase_section,
    steps_section,
    summary,
)
from rooftrace.reporting.text import words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.reporting.pages.report import Report


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
        ("Does it fit", fit_section(report, figures)),
        ("What a step costs", steps_section(report, figures)),
        *((phase.capitalize(), phase_section(report, phase, figures)) for phase in report.phases),
        ("Assumptions", assumptions_section(report)),
        ("Islands of another precision", islands_section(report)),
        ("Coverage", coverage_section(report)),
        ("Chips", chips_section(report)),
        ("How to read this report", [HOW_TO_READ.strip()]),
    ]
    for title, body in sections:
        if body:
            lines += ["", f"## {title}", "", *body]
    return "\n".join(line.rstrip() if not line.endswith(".  ") else line for line in lines) + "\n"


def _one_per_headline(report: Report) -> list[Estimate]:
    """One estimate for each chip, and one more where a phase computes in another precision."""
    found: dict[str, Estimate] = {}
    for chip in report.chips:
        for phase in report.phases:
            one = report.estimate(phase, chip=chip.name)
            found.setdefault(words.chip_words(one), one)
    return list(found.values())
