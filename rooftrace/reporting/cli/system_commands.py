"""Commands on systems of many chips: list, show, lint."""

from __future__ import annotations

import sys

import click

from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.written import Written, results


@click.group()
def systems() -> None:
    """The systems of many chips that come with rooftrace: list, show, lint."""


@systems.command("list")
@results()
def systems_list(written: Written) -> None:
    """Every system with its chip and what joins them."""
    from rooftrace.reporting.text import list_of

    written.write(list_of("systems"))


@systems.command("show")
@click.argument("name")
@results()
def systems_show(name: str, written: Written) -> None:
    """Every fact and fitted constant of one system (a name or a TOML path) with its source."""
    from rooftrace.hardware.systems import load_system

    written.write(load_system(name))


@systems.command("lint")
@click.argument("paths", nargs=-1)
def systems_lint(paths: tuple[str, ...]) -> None:
    """Check system files (default: those of rooftrace); exit 1 on errors or warnings."""
    from rooftrace.hardware.systems import available_systems, lint_system
    from rooftrace.hardware.units import plural

    bad = 0
    for path in paths or available_systems():
        findings = lint_system(path)
        serious = [f for f in findings if f.severity != "note"]
        bad += len(serious)
        say(f"{path}: {plural(len(serious), 'problem') if serious else 'ok'}")
        for finding in findings if paths else serious:
            say(f"  {finding.severity}: {finding.field}: {finding.message}")
    if bad:
        sys.exit(1)
