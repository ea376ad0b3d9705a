"""The contents of report.json: plain dicts in SI units; null stands for what is not modelled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.execution import SUMMARIES
from rooftrace.costmodels.findings import islands
from rooftrace.costmodels.planning import Coverage, Unsupported

if TYPE_CHECKING:
    from rooftrace.costmodels.findings import Headroom
    from rooftrace.reporting.pages import Report

SCHEMA = "rooftrace.report/1"
MODEL_KEYS = ("name", "params", "params_trainable")
SAVINGS = 10
"""How many savings of each kind stand there, those of most time."""
WORKLOAD_KEYS = ("batch", "seq", "kv", "dtype", "optimizer")


def document(report: Report) -> dict[str, Any]:
    """A report as report.json has it.  Nothing in it depends on when or where it was made."""
    return {
        "schema": SCHEMA,
        "model": {**dict.fromkeys(MODEL_KEYS), **_plain(report.model)},
        "workload": {
            **dict.fromkeys(WORKLOAD_KEYS),
            **_plain(report.workload),
            "phases": {phase: _plain(graph.workload) for phase, graph in report.graphs.items()},
        },
        "chips": {chip.name: chip.to_dict() for chip in report.chips},
        "executions": {
            name: {
                **report.estimate(report.phases[0], name).execution.to_dict(),
                "summary": SUMMARIES.get(name),
            }
            for name in report.executions
        },
        "main_execution": report.main,
        "coverage": _coverage(report),
        "assumptions": [
            {
                "phase": phase,
                **_plain(asdict(assumption)),
                "time_share": report.resting_share(phase, assumption.id),
            }
            for phase, assumption in report.assumptions
        ],
        "islands": [
            {"phase": phase, **asdict(island)}
            for phase, graph in report.graphs.items()
            for island in islands(graph)
        ],
        "phases": {
            phase: {execution: _phase(by_chip) for execution, by_chip in executions.items()}
            for phase, executions in report.estimates.items()
        },
        "headroom": {phase: _headroom(found) for phase, found in report.headroom.items()},
        "memory": _memory(report),
        "notes": [
            {"phase": phase, "execution": execution, "text": note}
            for phase, execution, one in report.of_first_chip()
            for note in one.notes
        ],
        "provenance": {phase: _plain(graph.provenance) for phase, graph in report.graphs.items()},
    }


def _phase(by_chip: Mapping[str, Estimate]) -> dict[str, Any]:
    first = next(iter(by_chip.values()))
    return {
        "flops": first.flops,
        "flops_causal": first.flops_causal,
        "flops_recompute": first.flops_recompute,
        "flops_matrix": first.flops_matrix,
        "macs": first.macs,
        "precision": first.plan.precision,
        "bytes": first.bytes.to_dict(),
        "bytes_hbm": first.bytes_hbm,
        "bytes_net": first.bytes_net,
        "bytes_compulsory": first.bytes_compulsory,
        "below_floor": first.below_floor,
        "ai_hbm": first.ai_hbm,
        "ai_total": first.ai_total,
        "kernels": first.kernels,
        "item": first.item,
        "items": first.items,
        "by_family": {name: _plain(entry) for name, entry in first.by_family().items()},
        "by_part": {name: _plain(entry) for name, entry in first.by_part().items()},
        "by_module": [_named(entry, "module") for entry in first.by_pattern()],
        "by_operator": [_named(entry, "operator") for entry in first.by_operator()],
        **_times(first),
        "chips": {name: _times(one) for name, one in by_chip.items()},
    }


def _times(one: Estimate) -> dict[str, Any]:
    times = one.times
    return {
        "peak": one.peak,
        "ridge": one.ridge,
        "flops_realizable": one.flops_realizable,
        "t_comp": times.t_comp,
        "t_hbm": times.t_hbm,
        "t_net": times.t_net,
        "t_launch": times.t_launch,
        "t_bound": times.t_bound,
        "t_serial": times.t_serial,
        "t_est": times.t_est,
        "t_interval": list(one.t_interval) if one.t_interval else None,
        "regime": times.regime,
        "regime_shares": times.regime_shares,
        "regime_next": times.next_regime,
        "regime_margin": finite(times.margin),
        "mfu": one.mfu,
        "hfu": one.hfu,
        "items_per_s": one.items_per_s,
    }


def _headroom(found: Headroom) -> dict[str, Any]:
    steps = (("before", found.before), ("after", found.after), ("beyond", found.beyond))
    return {
        "execution": found.after.execution.name,
        **{
            name: {
                "bytes_hbm": one.bytes_hbm,
                "kernels": one.kernels,
                "t_serial": one.times.t_serial,
                "t_est": one.t_est,
            }
            for name, one in steps
        },
        "fused": [_plain(asdict(saving)) for saving in found.fused[:SAVINGS]],
        "left": [_plain(asdict(saving)) for saving in found.left[:SAVINGS]],
    }


def _memory(report: Report) -> dict[str, Any]:
    first = report.chips[0]
    return {
        phase: {
            **_plain(need.to_dict()),
            "fits": need.fits(first),
            "chips": {
                chip.name: {
                    "fits": need.fits(chip),
                    "chips_needed": need.chips_needed(chip),
                    "max_batch": _max_batch(report, phase, chip.name),
                }
                for chip in report.chips
            },
        }
        for phase, need in report.memory.items()
    }


def _max_batch(report: Report, phase: str, chip: str) -> dict[str, Any] | None:
    found = report.largest.get(phase, {}).get(chip)
    return found.to_dict() if found else None


def _coverage(report: Report) -> dict[str, Any]:
    """Sums of the main execution over the phases; ops without a rule from every execution."""
    main = [report.estimate(phase).coverage for phase in report.phases]
    size, with_rule = sum(c.bytes for c in main), sum(c.bytes_with_rule for c in main)
    return {
        "ops": sum(c.ops for c in main),
        "ops_with_rule": sum(c.ops_with_rule for c in main),
        "bytes_with_rule_share": with_rule / size if size else 1.0,
        "lower_bound": any(graph.unrecorded for graph in report.graphs.values()),
        "unsupported": [
            {"phase": phase, **_unsupported(entry)} for phase, entry in unsupported_ops(report)
        ],
        "phases": {
            phase: {
                execution: _one_coverage(report.estimate(phase, execution).coverage)
                for execution in report.executions
            }
            for phase in report.phases
        },
    }


def unsupported_ops(report: Report) -> list[tuple[str, Unsupported]]:
    """(phase, op without a rule) over every execution, each op once a phase, most bytes first."""
    found: dict[tuple[str, str], Unsupported] = {}
    for phase, _, one in report.of_first_chip():
        for entry in one.unsupported_ops():
            found.setdefault((phase, entry.target), entry)
    return [
        (phase, entry)
        for (phase, _), entry in sorted(found.items(), key=lambda pair: (-pair[1].bytes, pair[0]))
    ]


def _one_coverage(coverage: Coverage) -> dict[str, Any]:
    return {
        "ops": coverage.ops,
        "ops_with_rule": coverage.ops_with_rule,
        "bytes_with_rule_share": coverage.bytes_with_rule_share,
    }


def _unsupported(entry: Unsupported) -> dict[str, Any]:
    return {
        "target": entry.target,
        "count": entry.count,
        "bytes": entry.bytes,
        "bytes_least": entry.bytes_least,
        "bytes_most": entry.most,
        "shapes": entry.shapes,
        "modules": list(entry.modules),
        "stub": entry.stub,
    }


def _named(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    others = {key: item for key, item in entry.items() if key != "key"}
    return {name: entry["key"], **_plain(others)}


def finite(value: float | None) -> float | None:
    """JSON has no infinity: null where a quantity has no finite value."""
    return value if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """The same with tuples as lists, keys as text and no infinities, as JSON holds it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
