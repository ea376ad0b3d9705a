"""Commands on chips, and on systems of many chips: list, show, lint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import click

from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.written import Written, results

Shelf = tuple[Callable[..., Any], Callable[[], Any], Callable[..., Any]]
"""What loads one of a kind, what names all that come along, and what checks a file."""


def _chips() -> Shelf:
    from rooftrace.hardware import available_chips, load_chip
    from rooftrace.hardware.chipfile import lint_chip

    return load_chip, available_chips, lint_chip


def _systems() -> Shelf:
    from rooftrace.hardware.systems import available_systems, lint_system, load_system

    return load_system, available_systems, lint_system


def _group(
    kind: Literal["chips", "systems"],
    shelf: Callable[[], Shelf],
    helps: tuple[str, str, str, str],
) -> click.Group:
    """The commands of a kind.  helps: of the group, and of list, show and lint."""
    about, listing, showing, linting = helps
    group = click.Group(kind, help=about)

    @group.command("list", help=listing)
    @results()
    def list_all(written: Written) -> None:
        from rooftrace.reporting.text import list_of

        written.write(list_of(kind))

    @group.command("show", help=showing)
    @click.argument("name")
    @results()
    def show(name: str, written: Written) -> None:
        load, _, _ = shelf()
        written.write(load(name))

    @group.command("lint", help=linting)
    @click.argument("paths", nargs=-1)
    def lint(paths: tuple[str, ...]) -> None:
        from rooftrace.hardware.units import plural

        _, available, check = shelf()
        bad = 0
        for path in paths or available():
            findings = check(path)
            serious = [f for f in findings if f.severity != "note"]
            bad += len(serious)
            say(f"{path}: {plural(len(serious), 'problem') if serious else 'ok'}")
            for finding in findings if paths else serious:
                say(f"  {finding.severity}: {finding.field}: {finding.message}")
        if bad:
            sys.exit(1)

    return group


chips = _group("chips", _chips, (
    "The chips that come with rooftrace: list, show, lint.",
    "Every chip with its dense peaks, memory and ridge point.",
    "Every fact of one chip (a name or a TOML path) with its source and kind.",
    "Check chip files (default: those that come with rooftrace); exit 1 on errors or warnings.",
))  # fmt: skip
systems = _group("systems", _systems, (
    "The systems of many chips that come with rooftrace: list, show, lint.",
    "Every system with its chip and what joins them.",
    "Every fact and fitted constant of one system (a name or a TOML path) with its source.",
    "Check system files (default: those of rooftrace); exit 1 on errors or warnings.",
))  # fmt: skip
