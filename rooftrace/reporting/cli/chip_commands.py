"""Commands on chips: list, show, lint."""

from __future__ import annotations

import sys

import click

import rooftrace as rt
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.written import Written, results


@click.group()
def chips() -> None:
    """The chips that come with rooftrace: list, show, lint."""


@chips.command("list")
@results()
def chips_list(written: Written) -> None:
    """Every chip with its dense peaks, memory and ridge point."""
    from rooftrace.reporting.text import list_of

    written.write(list_of("chips"))


@chips.command("show")
@click.argument("name")
@results()
def chips_show(name: str, written: Written) -> None:
    """Every fact of one chip (a name or a TOML path) with its source and kind."""
    written.write(rt.load_chip(name))


@chips.command("lint")
@click.argument("paths", nargs=-1)
def chips_lint(paths: tuple[str, ...]) -> None:
    """Check chip files (default: those that come with rooftrace); exit 1 on errors or warnings."""
    from rooftrace.hardware.chipfile import lint_chip
    from rooftrace.hardware.units import plural

    bad = 0
    for path in paths or rt.available_chips():
        findings = lint_chip(path)
        serious = [f for f in findings if f.severity != "note"]
        bad += len(serious)
        say(f"{path}: {plural(len(serious), 'problem') if serious else 'ok'}")
        for finding in findings if paths else serious:
            say(f"  {finding.severity}: {finding.field}: {finding.message}")
    if bad:
        sys.exit(1)
