"""`rooftrace report A B C`: a folder for each target, and all of them beside each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.output import complain, say
from rooftrace.reporting.cli.shared import console, progress, told, write_timeline


def check_many(targets: Sequence[str], out: str | None, single: str) -> None:
    """Raise the error of an --out that holds one report only."""
    if out == "-" or single:
        raise RequestError(
            f"--out {out}: it is for one TARGET, and {len(targets)} are named; name a folder"
        )


def report_many(
    targets: Sequence[str],
    out: str | None,
    formats: Sequence[str] | None,
    style: str,
    timeline: str | None,
    asked: dict[str, Any],
) -> None:
    """Reports on several targets; exits with 1 where one of them failed."""
    from rooftrace.reporting.text import shown

    with progress():
        result = rt.reports(targets, out=out, formats=formats, style=style, **asked)
    if result.reports:
        console().print(told(lambda: shown(result, "rich")))
    if out is not None and result.reports:
        there = [path for path in sorted(Path(out).iterdir()) if path.name[0] not in "._"]
        said = ", ".join(path.name + os.sep * path.is_dir() for path in there)
        say(f"\nin {Path(out)}{os.sep}: {said}")
    if result.reports:
        write_timeline(timeline, result)
    for target, why in result.failures.items():
        complain(f"{target} failed: {why}")
    if result.failures:
        sys.exit(1)


def several(targets: Sequence[str]) -> bool:
    """Whether there are several; a UsageError for none."""
    if not targets:
        raise click.UsageError("Missing argument 'TARGET...'.")
    return len(targets) > 1
