"""What commands price the steps of a script as, where nobody says: as `rooftrace run` does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from rooftrace._reading import beginning
from rooftrace.tracer.asking.commands import is_script
from rooftrace.tracer.graphfiles import looks_saved

USUAL, SCRIPTED = "efficient", "mixed"


def priced_as_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose --execution is that of `rooftrace run`, for scripts and saved steps of one,
    unless it is asked for."""

    @functools.wraps(command)
    def called(*args: Any, **options: Any) -> Any:
        source = click.get_current_context().get_parameter_source
        for name in ("execution", "executions"):
            if name in options and source(name) is ParameterSource.DEFAULT:
                named = options.get("targets", options.get("target", ()))
                targets = [named] if isinstance(named, str) else named
                if any(map(is_of_script, targets)):
                    options[name] = _as_run(options[name])
        return command(*args, **options)

    return called


def is_of_script(target: str) -> bool:
    """Whether a target is a script, or a file with the steps of one (by its first bytes)."""
    if not looks_saved(target):
        return is_script(target)
    return b'"script":true' in beginning(target, 20_000)  # what it says of itself stands in front


def _as_run(usual: Any) -> Any:
    if isinstance(usual, str):
        return SCRIPTED if usual == USUAL else usual
    return tuple(map(_as_run, usual))
