"""A calibration in words, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_time
from rooftrace.measured.fit import Errors
from rooftrace.reporting.text.words import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rooftrace.measured.fit import Calibration

_NUMBERS = ("mean", "median", "p90", "bias")


def render_calibration(found: Calibration) -> RenderableType:
    """The terminal view."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    fitted = found.fit
    used = found.measured - len(found.failures)
    parts: list[Any] = [
        Text.assemble(
            ("calibration  ", "bold"),
            f"{found.chip}, {found.execution}: {used} of {found.measured} measured {found.what}",
            f", and {plural(found.kernels, 'single kernel')}" if found.kernels else "",
        )
    ]
    for place, why in list(found.failures.items())[:5]:
        parts.append(Text(f"  left out, {place}: {why}", style="yellow"))
    knobs = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("knob", "start", "fitted", "std. error", ""):
        knobs.add_column(name, justify="left" if name in ("knob", "") else "right")
    for p in fitted.parameters:
        note = "" if p.identified else "not identified by these measurements; left at its start"
        knobs.add_row(p.name, _number(p.name, p.start), _number(p.name, p.value),
                      f"{p.error:.0%}", note)  # fmt: skip
    parts.append(knobs)
    for pair, value in fitted.correlations.items():
        parts.append(
            Text(f"  {pair[0]} and {pair[1]} stand for each other ({value:+.2f})", style="yellow")
        )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("error on", *_NUMBERS, "worst"):
        table.add_column(name, justify="left" if name in ("error on", "worst") else "right")
    table.add_row("all, without knobs", *_errors(found.before))
    what = "models" if found.what == "steps" else found.what
    table.add_row(f"{what} that were fitted", *_errors(fitted.errors))
    if fitted.left_out is not None:
        table.add_row(f"{what} that were left out", *_errors(fitted.left_out))
    for kind, one in fitted.by_class.items():
        table.add_row(f"  mostly {kind} ({one.count})", *_errors(one))
    parts.append(table)
    if fitted.left_out is None:
        parts.append(
            Text(f"  too few different {what} to leave some out: the error is of the fit itself")
        )
    if len(found.tried) > 1:
        parts.append(Text("  the fewest numbers that do; mean error on what was left out:"))
        for free, one in found.tried.items():
            chosen = one == fitted.left_out
            parts.append(Text(f"    {'*' if chosen else ' '} {one.mean:6.1%}  {free}"))
    return Group(*parts)


def _number(name: str, value: float) -> str:
    return format_time(value) if name in ("launch", "dispatch") else f"{value:.3g}"


def _errors(one: Errors) -> list[str]:
    numbers = [f"{getattr(one, name):{'+' if name == 'bias' else ''}.1%}" for name in _NUMBERS]
    return [*numbers, f"{one.worst:+.0%} {one.worst_case}"]
