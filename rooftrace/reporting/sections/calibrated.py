"""What a run measured of bytes, beside what rules count: factors, causes, and the floor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftrace.hardware.units import format_traffic
from rooftrace.reporting.factors import factor_columns, factor_rows, factor_sentence
from rooftrace.reporting.view import model as view

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.reporting.sections.results import Results


def calibrated(results: Results) -> view.Section:
    """The measured factors of the executions that take them; empty without any."""
    estimates = [e for _, _, e in results.of_first_chip() if e.execution.traffic is not None]
    if not estimates:
        return view.Section()
    names = dict.fromkeys(estimate.execution.name for estimate in estimates)
    traffic = estimates[0].execution.traffic
    assert traffic is not None
    parts: list[view.Part] = [
        view.Note(factor_sentence(traffic), on="screen"),
        view.Note(
            f"Bytes of {', '.join(names)} are as measured {_where(traffic.measured)}: those of "
            "each kind by rule, times its factor and times what the kernels that ran move over "
            "those we detect. Rates hold for these bytes.",
            on="page",
        ),
        view.Table(
            columns=factor_columns,
            rows=factor_rows(traffic.factors),
            on="page",
        ),
    ]
    parts += [view.Note(_floor(e), on="page", bullet=1) for e in estimates]
    return view.Section(title="Calibrated bytes", parts=parts)


def _where(measured: str) -> str:
    return f"on {measured}" if measured else "in a run"


def _floor(estimate: Estimate) -> str:
    """Bytes of a step as calibrated, beside those by rule and the compulsory ones."""
    by_rule = estimate.plan.by_rules.bytes.total
    return (
        f"{estimate.phase}, {estimate.execution.name}: {format_traffic(estimate.bytes_hbm)} as "
        f"calibrated, {format_traffic(by_rule)} by rule; "
        f"{format_traffic(estimate.bytes_compulsory)} is the least that any execution moves"
    )
