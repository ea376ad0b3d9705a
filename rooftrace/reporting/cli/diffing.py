"""What the options of `rooftrace diff` mean for graphs, and for measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


def check_priced(conditions: Sequence[str], targets: Sequence[str] | None) -> None:
    """Raise the error of an option that does not fit two graphs."""
    from rooftrace.costmodels.findings.diffs import Diff

    Diff.limits(conditions)
    if targets is not None:
        raise click.UsageError(
            f"--target {','.join(targets)}: it says what measured runs ran, and neither BEFORE nor "
            "AFTER is one"
        )


def check_measured(
    conditions: Sequence[str],
    targets: Sequence[str] | None,
    execution: str | None,
    tf32: bool,
    knobs: str | None,
    rewrites: Sequence[str],
    job: dict[str, Any],
) -> None:
    """Raise the error of an option that does not fit two measured runs.

    job: what the targets are run with; options at their defaults are taken out of it.
    """
    from rooftrace.measured.rundiffs import RunDiff

    RunDiff.limits(conditions)
    if targets is not None and not 1 <= len(targets) <= 2:
        raise click.UsageError("--target: expected one target, or two with a comma between them")
    changed = {"--tf32": tf32, "--knobs": knobs not in (None, "typical"), "--rewrite": rewrites}
    for name, value in changed.items():
        if value and execution is None:
            raise click.UsageError(
                f"{name}: it changes an execution model; say with --execution how the runs ran"
            )
    _without_defaults(job, _DEFAULTS)


_DEFAULTS: Mapping[str, Any] = {
    "inputs": {},
    "assume": {},
    "repeats": True,
    "trust_remote_code": False,
    "optimizer": "adamw",
}


def _without_defaults(job: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        if job.get(name) == value:
            del job[name]
