"""What a figure of a report is of, in a line: precision, sizes, execution and chips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftrace.reporting.view import words

if TYPE_CHECKING:
    from rooftrace.reporting.sections import Results


def of_report(report: Results) -> str:
    """All phases: "fp8; prefill 8 x 255 tokens; decode 8 x 1 token, KV 255; h200-sxm"."""
    parts = [_precision(report, report.phases[0])]
    sized = {
        graph.phase: words.workload_words(graph.phase, graph.workload)
        for graph in map(report.graphs.__getitem__, report.phases)
    }
    parts += [f"{phase} {sizes}" for phase, sizes in sized.items() if sizes]
    parts.append(", ".join(chip.name for chip in report.chips))
    return "; ".join(filter(None, parts))


def of_phase(report: Results, phase: str, execution: str | None = None) -> str:
    """One phase on the first chip: "fp8; 8 x 1 token, KV 255; efficient; h200-sxm"."""
    graph = report.graphs[phase]
    sizes = words.workload_words(graph.phase, graph.workload)
    run = execution or ""
    return "; ".join(filter(None, [_precision(report, phase), sizes, run, report.chips[0].name]))


def _precision(report: Results, phase: str) -> str:
    workload = report.graphs[phase].workload
    dtype = str(workload.get("dtype") or report.model.get("dtype") or "")
    cached = workload.get("kv_dtype")
    return f"{dtype}, KV cache {cached}" if cached and cached != dtype else dtype
