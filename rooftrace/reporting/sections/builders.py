"""The sections of a report, in the order of its page; a new one is a function in these lists.

Users add a section without a change here:

    @rt.extend.section("energy")
    def energy(results):
        rows = [{"phase": e.phase, "joule": 700 * e.t_est} for e in results.broken_down()]
        table = rt.extend.Table(columns=(PHASE, JOULE), rows=rows)
        return rt.extend.Section(title="Energy", parts=[table])

It then stands on the screen, in report.md and, under `sections`, in report.json.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from rooftrace._extensions import failures, load, owner, refuse_second, track
from rooftrace.errors import RequestError, one_of, worded
from rooftrace.hardware.units import format_traffic
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.sections.architecture import architecture, elsewhere
from rooftrace.reporting.sections.heads import head, pipelines, title, verdict
from rooftrace.reporting.sections.memory import fit, network
from rooftrace.reporting.sections.phase import phase
from rooftrace.reporting.sections.steps import (
    chips_beside,
    helping,
    helping_on_screen,
    kernels_on_screen,
    steps,
)
from rooftrace.reporting.sections.trust import (
    assumptions,
    chips,
    coverage,
    islands_of,
    routing,
    trust,
)
from rooftrace.reporting.views import factor_columns, factor_rows, factor_sentence

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.reporting.sections.results import Results

# -- glossary --------------------------------------------------------------------------------------

RULES = (
    "One multiply-add is 2 FLOP. Traffic and bandwidth are decimal (1 GB = 10^9 byte), capacity is "
    "binary (1 GiB = 2^30 byte). Every rate is dense; rates that count on 2:4 sparsity are never "
    "used."
)
WORDS = {
    "FLOP": "what the step computes, attention counted dense, recomputation left out",
    "attention's backward": words.ATTENTION_BACKWARD,
    "HBM": "bytes through HBM: whose bytes they are is the role",
    "FLOP/byte": "computed FLOP (masked blocks that a kernel skips left out) over HBM bytes",
    "compulsory floor": "unique bytes that any execution moves: inputs and weights in, results out",
    "expected": "t_est: seconds at the rates that real kernels reach (knobs), with the host",
    "90 % within": "where nine of ten measured steps should lie; wide without a fit to the chip",
    "bound": "no step is faster: datasheet rates, as if everything overlapped perfectly (t_bound)",
    "t_comp, t_hbm": "seconds of all work, and of all bytes, at the rates of the step's time",
    "t_serial": "sum over kernels of what each takes, and a gap after each",
    "t_est": "end of the step when host and device go in order; a bound with `--knobs none`",
    "launch": "kernel gaps, and time in which the device waits for the host",
    "limited by": "share of the step in kernels of that regime; the largest and the next",
    "MFU, HFU": "matrix FLOP over t_est and the dense peak, without and with recomputation",
    "naive": "attention scores through HBM, nothing fused, one host dispatch per op",
    "efficient": "flash attention and other kernels of libraries, groups fused as found in the "
    "graph, launched as one graph",
    "ridge": "FLOP/byte at which a chip's peak and bandwidth take equally long",
    "family": "what kind of work an op is: attention, dense, moe, norm, ...",
    "role": "whose bytes: weights, activations, kv, gradients, optimizer, temporary, constants",
    "kind of a fact": "datasheet, measured, derived or guess",
}
ORDER = (
    "t_bound <= t_est, and t_serial <= t_est. Memory is what is alive at the peak of the step, not "
    "what moves: the tensors of a run under the execution that is broken down. Saved for backward: "
    "activations that forward makes and backward reads."
)


def glossary(results: Results) -> view.Section:
    """The fixed part of report.md: definitions that hold for every report."""
    columns = [
        view.Column("word", units.TEXT, "Word", of=lambda item: item[0]),
        view.Column("meaning", units.TEXT, "Meaning", of=lambda item: item[1]),
    ]
    table = view.Table(columns=columns, rows=list(WORDS.items()), padded=False)
    parts: list[view.Part] = [view.Note(RULES), table, view.Note(ORDER)]
    return view.Section(title="How to read this report", parts=parts)


# -- calibrated bytes ------------------------------------------------------------------------------


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
        view.Table(columns=factor_columns, rows=factor_rows(traffic.factors), on="page"),
    ]
    parts += [view.Note(_floor(e), on="page", bullet=1) for e in estimates]
    return view.Section(title="Calibrated bytes", parts=parts)


def _where(measured: str) -> str:
    return f"on {measured}" if measured else "in a run"


def _floor(estimate: Estimate) -> str:
    """Bytes of a step as calibrated, by rule, and the compulsory ones."""
    by_rule = estimate.plan.by_rules.bytes.total
    return (
        f"{estimate.phase}, {estimate.execution.name}: {format_traffic(estimate.bytes_hbm)} as "
        f"calibrated, {format_traffic(by_rule)} by rule; "
        f"{format_traffic(estimate.bytes_compulsory)} is the least that any execution moves"
    )


# -- builders --------------------------------------------------------------------------------------


Builder: TypeAlias = "Callable[[Results], view.Section]"


@dataclass(frozen=True, slots=True)
class Listed:
    """A builder, and the output of its section."""

    build: Builder
    on: view.Output = "both"
    function: Builder | None = None  # the user's, which `build` calls and checks


def contents(results: Results) -> view.Section:
    """Links to the sections after it."""
    return view.Section(title="Contents", contents=True)


BEFORE_PHASES = (
    Listed(head),
    Listed(verdict, "page"),
    Listed(helping, "page"),
    Listed(contents, "page"),
    Listed(helping_on_screen, "screen"),
    Listed(fit),
    Listed(steps),
    Listed(pipelines),
    Listed(network),
    Listed(chips_beside, "screen"),
    Listed(kernels_on_screen, "screen"),
)
AFTER_PHASES = (
    Listed(trust, "screen"),
    Listed(calibrated),
    Listed(architecture, "page"),
    Listed(routing, "page"),
    Listed(assumptions, "page"),
    Listed(islands_of, "page"),
    Listed(coverage, "page"),
    Listed(chips, "page"),
    Listed(elsewhere, "page"),
)
LAST = (Listed(glossary, "page"),)
_ADDED: dict[str, Listed] = track({})


def section(
    key: str, on: view.Output = "both", *, override: bool = False
) -> Callable[[Builder], Builder]:
    """Add a section to every report: a decorator of a function from Results to Section.

    key: its name in report.json, under `sections`.  on: the output that it stands on: "page"
    (report.md), "screen" or "both"; anything else raises ValueError.  A second section of one key
    raises ValueError, unless override=True or it is the same function defined again.  A report
    raises RequestError where the function fails or returns something that cannot be shown.
    """
    if not isinstance(key, str) or not key.strip():
        raise ValueError(f'section({key!r}): expected a name, for example "energy"')
    try:
        check_output(on)
    except ValueError as error:
        raise ValueError(f"section({key!r}): {error}") from None

    def add(build: Builder) -> Builder:
        old = _ADDED.get(key)
        there = f"section {key!r} already is there"
        refuse_second(there, getattr(old, "function", None), build, override=override)
        _ADDED[key] = Listed(partial(built, key, build), on, build)
        return build

    return add


def added_sections(results: Results) -> dict[str, view.Section]:
    """The sections that users and other packages added, by key."""
    load("rooftrace.sections")
    return {key: replace(added.build(results), key=key) for key, added in _ADDED.items()}


def not_loaded(results: Results) -> view.Section:
    """Packages whose sections cannot be loaded; empty where there are none."""
    load("rooftrace.sections")
    return view.Section(parts=[view.Note(text) for text in failures("rooftrace.sections")])


def report_view(results: Results, output: view.Output) -> view.View:
    """All sections of an output, in the order of the page."""
    sections = []
    for listed in _listed(results):
        if listed.on not in ("both", output):
            continue
        section = listed.build(results)
        if output == "screen" and section.title and listed in _ADDED.values():
            head = view.Note(section.title, "strong")  # a screen shows no titles of sections
            section = replace(section, parts=(head, *section.parts))
        sections.append(section)
    return view.View(tuple(sections), title(results), level=1)


def _listed(results: Results) -> Iterator[Listed]:
    yield from BEFORE_PHASES
    for name in results.phases:
        yield Listed(partial(phase, name=name), "page")
    yield from AFTER_PHASES
    yield Listed(not_loaded)
    yield from _ADDED.values()
    yield from LAST


# -- checks of added sections ----------------------------------------------------------------------


OUTPUTS = get_args(view.Output)
NUMBERS = ("integer", "number")
"""Types of units whose columns hold numbers.  A count may be an average, so not whole."""


def built(key: str, build: Callable[..., object], results: object) -> view.Section:
    """The section that a user's function returns.  Raises RequestError."""
    try:
        section = build(results)
        if not isinstance(section, view.Section):
            raise ValueError(f"it returned {section!r:.60}; expected a rooftrace.extend.Section")
        _check(section)
    except Exception as error:  # whatever the code of a user may raise
        raise RequestError(f"section {key!r} ({owner(build)}): {worded(error)}") from error
    return section


def check_output(on: object) -> None:
    """Raise ValueError for an output that does not exist."""
    if on not in OUTPUTS:
        raise ValueError(f"on={on!r}: {one_of(on, OUTPUTS)}")


def _check(section: view.Section) -> None:
    for number, part in enumerate(section.parts):
        if isinstance(part, view.Section):
            _check(part)
        elif isinstance(part, view.Table):
            check_output(part.on)
            _check_table(part, f"table {part.key or number}")
        elif isinstance(part, (view.Note, view.Image)):
            check_output(part.on)
        else:
            raise ValueError(
                f"part {number} is {part!r:.60}; expected a Table, a Note, an Image or a Section"
            )


def _check_table(table: view.Table, name: str) -> None:
    if not isinstance(table.rows, Sequence):
        raise ValueError(f"{name}: rows={table.rows!r:.60}: expected a list of rows")
    for column in table.columns:
        if not isinstance(column, view.Column):
            raise ValueError(f"{name}: column {column!r:.60}: expected a rooftrace.extend.Column")
        check_output(column.on)
        for number, row in enumerate(table.rows):
            try:
                _check_cell(column, row)
            except Exception as error:  # a record without the field, a unit that cannot print it
                where = f"{name}, column {column.key!r}, row {number}"
                raise ValueError(f"{where}: {worded(error)}") from error


def _check_cell(column: view.Column, row: Any) -> None:
    if column.of is None and isinstance(row, Mapping) and column.key not in row:
        raise ValueError(
            f"the row has no such key, only {', '.join(map(repr, row))}; "
            "expected a value, None (shown as a dash), or '' (blank)"
        )
    cell = column.read(row)
    if not isinstance(cell, view.Cell):
        cell = view.Cell(cell)
    unit, value = cell.unit or column.unit, cell.value
    if value is None or value == "" or cell.mark == "plain":
        return
    if unit.type in NUMBERS and not isinstance(value, numbers.Number):
        of = f" in {unit.symbol}" if unit.symbol else ""
        raise ValueError(f"{value!r:.60}: expected a number{of}")
    for page in (True, False):
        unit.written(value, page=page)
