"""Commands that gate a repository: lock, check."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooftrace._escapes import visible
from rooftrace._formats import names
from rooftrace._outputs import check_output
from rooftrace.errors import UnusedError
from rooftrace.reporting.cli.options import OutputPath, form_option, load_rules, out_option, say
from rooftrace.reporting.cli.shared import CommandOutput, command, progress
from rooftrace.reporting.commands.pricing import PricingOptions

if TYPE_CHECKING:
    from rooftrace.reporting.gates.lockfile import Settings

FORMS = tuple(form for form in names("page", "data", "gate") if form != "html")


@command("lock", run_rules=False, defaults={"execution": "efficient; of a script: mixed"})
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option(
    "-o",
    "--out",
    type=OutputPath(usual=True),
    metavar="FILE",
    help="The lock; - is stdout.  Default: costs.lock.",
)
def lock(targets: tuple[str, ...], out: str | None, arguments: dict[str, Any]) -> None:
    """Write the costs of each TARGET to a file, for review.

    Without TARGET: the targets of [tool.rooftrace] in pyproject.toml, at their sizes there.
    """
    from rooftrace.reporting.gates import locked, lockfile, size_words
    from rooftrace.reporting.gates.lockfile import load_settings

    settings = _changed(load_settings(Path.cwd()), arguments)
    settings = _named(settings, targets, arguments)
    if out is None:
        settings.check_place()
    elif out != "-":
        settings = _at(settings, str(out))
    code = settings.code()
    if "dry_run" in arguments:
        return _list(settings, code)
    if out != "-":
        check_output(settings.path)
    load_rules([str(settings.folder / path) for path in settings.rules])
    with progress():
        made = locked(settings)
    if out == "-":
        click.echo(lockfile.lock_text(made), nl=False)
        return
    lockfile.write_lock(settings.path, made)
    say(f"{_shown(settings)}: {size_words(made)}")


def _list(settings: Settings, code: Sequence[tuple[str, str]]) -> None:
    """Print the lines of --dry-run."""
    rows = [("project", str(settings.root), ""), ("lock", _shown(settings), "")]
    rows += [("runs", name, f"  ({by})") for name, by in code] or [("runs", "no code", "")]
    for kind, name, by in rows:
        say(visible(f"{kind:<8} {name}{by}"))


def _shown(settings: Settings) -> str:
    """The path of the lock, relative to the working folder."""
    return os.path.relpath(settings.path)


def _changed(settings: Settings, arguments: Mapping[str, Any]) -> Settings:
    """Settings with the chips, executions, depth and pricing of the command line."""
    from rooftrace.reporting.commands.calls import PRICED, stored

    pricing, _ = PricingOptions.parted(arguments)
    fields_of = {"chip": "chips", "execution": "executions", "depth": "depth"}
    direct = {fields_of[name]: value for name, value in arguments.items() if name in fields_of}
    for name in ("chip", "execution"):
        if arguments.get(name) == ():
            raise click.UsageError(f"--{name}: expected at least one")
    typed = {**arguments, **({"factors": pricing.factors} if pricing.factors else {})}
    changed = {name: typed[name] for name in PRICED if name in typed}
    return replace(settings, **direct, pricing=stored({**settings.pricing, **changed}))


def _named(settings: Settings, targets: tuple[str, ...], arguments: Mapping[str, Any]) -> Settings:
    """Settings whose targets are those of the command line, at its sizes."""
    from rooftrace.reporting.commands.calls import ASKED, stored

    if (targets or "rules" in arguments) and settings.folder != Path.cwd().resolve():
        word = f"TARGET {targets[0]!r}" if targets else f"--rules {arguments['rules'][0]!r}"
        raise click.UsageError(
            f"{word}: the lock of this project has paths from {settings.folder}; name it from there"
        )
    _, others = PricingOptions.parted(arguments)
    request = {name: others[name] for name in ASKED if name in others}
    if not targets:
        for name in sorted(request):
            reason = "without a TARGET, each target of [tool.rooftrace] has its own"
            raise UnusedError(name, str(request[name]), reason)
        return settings
    return replace(
        settings, targets={target: stored({"target": target, **request}) for target in targets}
    )


def _at(settings: Settings, path: str) -> Settings:
    """Settings with the lock at a path of the command line."""
    if not path:
        raise click.UsageError("--lock '': expected the path of a lock")
    return replace(settings, lock=os.path.relpath(path, settings.folder))


@command(
    "check",
    epilog=None,
    results=[
        form_option(
            FORMS,
            "github: a comment (GitLab shows it too); gitlab: code quality JSON; junit: XML.",
            default="terminal",
            show_default=True,
        ),
        out_option(OutputPath()),
    ],
)
@click.option(
    "--lock",
    "path",
    type=OutputPath(early=False, usual=True),
    metavar="FILE",
    help="Another lock than that of [tool.rooftrace]; its own targets are checked.",
)
def check(path: str | None, output: CommandOutput, arguments: dict[str, Any]) -> None:
    """Compare costs.lock with the costs now; exit 1 over a budget.

    Budgets, targets and chips stand in [tool.rooftrace] of the project's pyproject.toml; without
    targets there, those of the lock are checked, and no total may grow.
    """
    from rooftrace.reporting.gates import (
        causes_since,
        checking,
        chips_of,
        former,
        locked,
        lockfile,
        size_words,
    )
    from rooftrace.reporting.gates.lockfile import load_settings

    settings, update = load_settings(Path.cwd()), "update" in arguments
    if path is not None:
        settings = replace(_at(settings, path), targets={})
    settings.check_place()
    before = former(settings, update=update)
    if update or before is None:
        check_output(settings.path)
    if before is not None:
        settings = settings.as_locked(before)
    code = settings.code(before)
    if "dry_run" in arguments:
        return _list(settings, code)
    load_rules([str(settings.folder / rules) for rules in settings.rules])
    with progress():
        after = locked(settings)
    if before is None:
        lockfile.write_lock(settings.path, after)
        say(f"{_shown(settings)}: {size_words(after)}")
        return
    with progress():
        cause = None if update else causes_since(settings, before)
        result = checking.compare_locks(
            before,
            after,
            settings,
            strict="strict" in arguments,
            cause=cause,
            rooms={chip.name: chip.room() for chip in chips_of(settings)},
        )
    output.write(result)
    if update:
        if before != after:
            lockfile.write_lock(settings.path, after)
        say(f"{_shown(settings)}: {'written' if before != after else 'nothing to update'}")
    elif result.failed:
        sys.exit(1)
