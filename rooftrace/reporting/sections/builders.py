"""Which sections a report has, in the order of its page; a new one is one function, added here.

Anybody can add a section without a change here:

    @rt.section("energy")
    def energy(results):
        rows = [{"phase": e.phase, "joule": 700 * e.t_est} for e in results.broken_down()]
        return rt.Section(title="Energy", parts=[rt.Table(columns=(PHASE, JOULE), rows=rows)])

It then stands on the screen, in report.md and, under `sections`, in report.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from rooftrace._extensions import failures, load, refuse_second, track
from rooftrace.reporting.sections.architecture import architecture
from rooftrace.reporting.sections.calibrated import calibrated
from rooftrace.reporting.sections.checking import built, check_output
from rooftrace.reporting.sections.glossary import glossary
from rooftrace.reporting.sections.heads import head, title, verdict
from rooftrace.reporting.sections.helping import helping, helping_on_screen
from rooftrace.reporting.sections.kernels import kernels_on_screen
from rooftrace.reporting.sections.memory import fit
from rooftrace.reporting.sections.network import network
from rooftrace.reporting.sections.phase import phase
from rooftrace.reporting.sections.pipelines import pipelines
from rooftrace.reporting.sections.routing import routing
from rooftrace.reporting.sections.steps import chips_beside, steps
from rooftrace.reporting.sections.trust import assumptions, chips, coverage, islands_of, trust
from rooftrace.reporting.view import model as view

if TYPE_CHECKING:
    from rooftrace.reporting.sections.results import Results

Builder: TypeAlias = "Callable[[Results], view.Section]"


@dataclass(frozen=True, slots=True)
class Listed:
    """A builder, and the output that its section stands on."""

    build: Builder
    on: view.Output = "both"
    function: Builder | None = None  # the user's, which `build` calls and checks


def contents(results: Results) -> view.Section:
    """Links to what comes after."""
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
    raises SectionError where the function fails or returns what cannot be shown.
    """
    if not isinstance(key, str) or not key.strip():
        raise ValueError(f'section({key!r}): expected a name, for example "energy"')
    try:
        check_output(on)
    except ValueError as error:
        raise ValueError(f"section({key!r}): {error}") from None

    def add(build: Builder) -> Builder:
        old = _ADDED.get(key)
        refuse_second(
            f"section {key!r} already is there",
            old.function if old is not None else None,
            build,
            override=override,
        )
        _ADDED[key] = Listed(partial(built, key, build), on, build)
        return build

    return add


def added_sections(results: Results) -> dict[str, view.Section]:
    """The sections that users and third-party packages added, by key."""
    load("rooftrace.sections")
    return {key: replace(added.build(results), key=key) for key, added in _ADDED.items()}


def not_loaded(results: Results) -> view.Section:
    """Packages whose sections cannot be loaded; empty where there are none."""
    load("rooftrace.sections")
    return view.Section(parts=[view.Note(text) for text in failures("rooftrace.sections")])


def report_view(results: Results, output: view.Output) -> view.View:
    """Everything that stands on an output, in the order of the page."""
    sections = []
    for listed in _listed(results):
        if listed.on not in ("both", output):
            continue
        section = listed.build(results)
        if output == "screen" and section.title and listed in _ADDED.values():
            head = view.Note(section.title, "strong")  # a screen has no titles of its own
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
