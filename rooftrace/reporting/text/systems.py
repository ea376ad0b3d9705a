"""Systems of many chips as tables: the list, and facts and fitted constants with their sources."""

from __future__ import annotations

from typing import Any

from rooftrace.hardware.systems import System, available_systems, load_system
from rooftrace.hardware.systems.records import CollectiveFit, ExchangeFit
from rooftrace.hardware.units import format_capacity, format_time
from rooftrace.reporting.view import model as view, units

_MARKS = {"measured": "good", "derived": "name", "guess": "warn"}
_LIST = (
    view.Column("system", units.TEXT, "system"),
    view.Column("chip", units.TEXT, "chip"),
    view.Column("levels", units.WORDS, "joined by", folded=True),
    view.Column("measured", units.WORDS, "measured"),
)
_FACTS = (
    view.Column("fact", units.TEXT, "fact"),
    view.Column("value", units.WORDS, "value", folded=True),
    view.Column("kind", units.TEXT, "kind"),
    view.Column("source", units.TEXT, "source", folded=True),
)


def system_list() -> view.View:
    """A line for each system that comes with rooftrace."""
    rows = []
    for name in available_systems():
        system = load_system(name)
        fits: tuple[CollectiveFit | ExchangeFit, ...]
        fits = (*system.collectives, *system.exchanges)
        measured = sum(fit.kind == "measured" for fit in fits)
        row = {"system": name, "chip": system.chip.name, "levels": system.headline()}
        rows.append({**row, "measured": f"{measured} of {len(fits)} fits"})
    table = view.Table(columns=_LIST, rows=rows)
    return view.View((view.Section(parts=[table]),), "Systems")


def system_view(system: System, output: view.Output) -> view.View:
    """Every fact and every fitted constant with its kind, source and note."""
    rows: list[dict[str, Any]] = [
        {
            "fact": label,
            "value": fact.text,
            "kind": view.Cell(fact.kind, _MARKS.get(fact.kind, "")),
            "source": fact.source + (f" ({fact.note})" if fact.note else ""),
        }
        for label, fact in system.facts()
    ]
    fits: tuple[CollectiveFit | ExchangeFit, ...] = (*system.collectives, *system.exchanges)
    for fit in fits:
        source = " ".join(part for part in (fit.source, fit.version) if part)
        rows.append(
            {
                "fact": _label(fit),
                "value": _constants(fit),
                "kind": view.Cell(fit.kind, _MARKS.get(fit.kind, "")),
                "source": source + (f" ({fit.note})" if fit.note else ""),
            }
        )
    title = f"{system.title}  [{system.name}]"
    parts: list[view.Part] = [
        view.Note(title, "strong", on="screen"),
        view.Note(system.headline()),
        view.Table(columns=_FACTS, rows=rows),
    ]
    return view.View((view.Section(parts=parts),), title)


def _label(fit: CollectiveFit | ExchangeFit) -> str:
    if isinstance(fit, CollectiveFit):
        return f"{fit.library} {fit.op} {fit.level}"
    return f"experts {fit.mode} {fit.way}"


def _constants(fit: CollectiveFit | ExchangeFit) -> str:
    if isinstance(fit, CollectiveFit):
        most = format_capacity(fit.nbytes)
    else:
        most = f"{fit.tokens:,} tokens"
    return (
        f"{format_time(fit.alpha)} + {format_time(fit.step)} a step, {fit.efficiency:.3g} of the "
        f"bandwidth, p {fit.p:.3g}; up to {fit.ranks} ranks, {most}"
    )
