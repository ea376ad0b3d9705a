"""report.json: what its keys mean and where they are read; report.schema.json is made from this.

Plain values in SI units; null stands for what is not modelled.  Nothing in it depends on when or
where it was made.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.execution import SUMMARIES
from rooftrace.costmodels.findings import islands
from rooftrace.reporting.sections.builders import added_sections
from rooftrace.reporting.sections.network import exchanged, is_whole, meshed, reached
from rooftrace.reporting.sections.pipelines import rows_of
from rooftrace.reporting.sections.report_keys import (
    ASSUMPTION,
    CHIP,
    COVERAGE,
    EXCHANGED,
    EXECUTION,
    GUIDANCE,
    HEADROOM,
    ISLAND,
    MEMORY,
    MODEL,
    NOTE,
    OF_A_MODEL,
    OF_A_WORKLOAD,
    PHASE,
    PIPELINE,
    ROUTING,
    SECTION,
    STEP,
    TOGETHER,
    UNSUPPORTED,
    WORKLOAD,
)
from rooftrace.reporting.sections.routing import routed
from rooftrace.reporting.sections.shapes import (
    Anything,
    Choice,
    Key,
    Many,
    Named,
    Object,
    schema_of,
)
from rooftrace.reporting.view import model as view, units

if TYPE_CHECKING:
    from rooftrace.reporting.sections.results import Results

SCHEMA = "rooftrace.report/1"
ABOUT = {
    "$id": "https://rooftrace.dev/report.schema.json",
    "title": "rooftrace report",
    "description": "What the steps of a model cost. FLOP, byte, second and FLOP/byte, as numbers; "
    "null is: not modelled or not known.",
}


def _memory(results: Results, phase: str) -> dict[str, Any]:
    need = results.memory[phase]
    batches = results.largest.get(phase, {})
    on_chips = {
        chip.name: {
            "fits": need.fits(chip),
            "chips_needed": need.chips_needed(chip),
            "max_batch": batch.to_dict() if (batch := batches.get(chip.name)) else None,
            "reserved": held.to_dict() if (held := results.reserved(phase, chip)) else None,
        }
        for chip in results.chips
    }
    return {**need.to_dict(), "fits": need.fits(results.chips[0]), "chips": on_chips}


def _coverage(results: Results) -> dict[str, Any]:
    """Sums of the main execution over the phases; ops without a rule from every execution."""
    main = [estimate.coverage for estimate in results.broken_down()]
    size, with_rule = sum(c.bytes for c in main), sum(c.bytes_with_rule for c in main)
    return {
        "ops": sum(c.ops for c in main),
        "ops_with_rule": sum(c.ops_with_rule for c in main),
        "bytes_with_rule_share": with_rule / size if size else 1.0,
        "lower_bound": bool(results.unrecorded),
        "unsupported": [
            {
                **{key.key: getattr(entry, key.key, None) for key in UNSUPPORTED.keys},
                "phase": phase,
                "bytes_most": entry.most,
            }
            for phase, entry in results.unsupported_ops()
        ],
        "phases": {
            phase: {name: results.estimate(phase, name).coverage for name in results.executions}
            for phase in results.phases
        },
    }


def _section(section: view.Section) -> dict[str, Any]:
    """A section that was added: its tables by their keys, the raw values of their rows."""
    tables = [part for part in section.parts if isinstance(part, view.Table)]
    return {
        "title": section.title,
        "tables": {
            table.key or str(number): {
                "units": {column.key: column.unit.symbol for column in table.columns},
                "rows": [{c.key: c.value(row) for c in table.columns} for row in table.rows],
            }
            for number, table in enumerate(tables)
        },
        "notes": [part.text for part in section.parts if isinstance(part, view.Note)],
    }


REPORT = Object(
    "",
    (
        Key("schema", Choice((SCHEMA,)), of=lambda r: SCHEMA),
        Key("model", MODEL, of=lambda r: {**dict.fromkeys(OF_A_MODEL), **r.model}),
        Key(
            "workload",
            WORKLOAD,
            "what all phases share; null where they differ",
            of=lambda r: {
                **dict.fromkeys(OF_A_WORKLOAD),
                **r.workload,
                "phases": {phase: graph.workload for phase, graph in r.graphs.items()},
            },
        ),
        Key(
            "chips",
            Named(CHIP, 1),
            "by name; the first is the one that the phases show",
            of=lambda r: {chip.name: chip.to_dict() for chip in r.chips},
        ),
        Key(
            "executions",
            Named(EXECUTION, 1),
            "the knobs of each execution model",
            of=lambda r: {
                name: {
                    **r.estimate(r.phases[0], name).execution.to_dict(),
                    "summary": SUMMARIES.get(name),
                }
                for name in r.executions
            },
        ),
        Key("main_execution", units.TEXT, of=lambda r: r.main),
        Key(
            "coverage",
            COVERAGE,
            "sums over the phases of the main execution; unsupported ops of every execution",
            of=_coverage,
        ),
        Key(
            "assumptions",
            Many(ASSUMPTION),
            of=lambda r: [
                {"phase": phase, **structs.asdict(a), "time_share": r.resting_share(phase, a.id)}
                for phase, a in r.assumptions
            ],
        ),
        Key(
            "routing",
            Many(ROUTING),
            "layers with experts, by phase; absent where there are none",
            of=lambda r: routed(r) or None,
            optional=True,
        ),
        Key(
            "together",
            Many(TOGETHER),
            "steps of several processes: what all of them reach; absent for one process",
            of=lambda r: [reached(e) for e in meshed(r) if is_whole(e)] or None,
            optional=True,
        ),
        Key(
            "pipelines",
            Many(PIPELINE),
            "steps of pipelines, of which the phases are stages; absent without one",
            of=lambda r: list(rows_of(r)) or None,
            optional=True,
        ),
        Key(
            "communication",
            Many(EXCHANGED),
            "what a process exchanges, by axis and kind; absent where that is nothing",
            of=lambda r: list(exchanged(r)) or None,
            optional=True,
        ),
        Key(
            "islands",
            Many(ISLAND),
            "tensors that stay in another floating precision than the priced one",
            of=lambda r: [
                {"phase": phase, **asdict(island)}
                for phase, graph in r.graphs.items()
                for island in islands(graph)
            ],
        ),
        Key(
            "phases",
            Named(Named(PHASE, 1), 1),
            "by phase, then execution",
            of=lambda r: r.estimates,
        ),
        Key(
            "guidance",
            Named(GUIDANCE),
            "by phase: what would help, of the main execution on the first chip; each change alone",
        ),
        Key(
            "headroom",
            Named(HEADROOM),
            "by phase: what fusing saves, of the main execution on the first chip",
        ),
        Key(
            "memory",
            Named(MEMORY),
            "byte, by phase: the most that is alive of each role, and of all together",
            of=lambda r: {phase: _memory(r, phase) for phase in r.memory},
        ),
        Key(
            "notes",
            Many(NOTE),
            of=lambda r: [
                {"phase": phase, "execution": execution, "text": note}
                for phase, execution, estimate in r.of_first_chip()
                for note in estimate.notes
            ],
        ),
        Key(
            "sections",
            Named(SECTION, 1),
            "what was added to the report by the user or by another package",
            of=lambda r: {k: _section(s) for k, s in added_sections(r).items()} or None,
            optional=True,
        ),
        Key(
            "provenance",
            Named(Named(Anything())),
            of=lambda r: {phase: graph.provenance for phase, graph in r.graphs.items()},
        ),
    ),
)


def document(result: Results | Estimate) -> dict[str, Any]:
    """A report as report.json has it; a step as its phases, and their memory, have it."""
    if isinstance(result, Estimate):
        return {**Object("", STEP).plain(result), "memory": result.memory.to_dict()}
    return REPORT.plain(result)


def report_schema() -> str:
    """The text of report.schema.json."""
    return json.dumps(schema_of(REPORT, ABOUT), indent=1, ensure_ascii=False) + "\n"
