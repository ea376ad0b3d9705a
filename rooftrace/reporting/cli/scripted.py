"""What commands price the steps of a script as, where nobody says: as `rooftrace run` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.core import ParameterSource

from rooftrace._reading import beginning
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graphfiles import looks_saved

_USUAL, _SCRIPTED = "efficient", "mixed"
_HEAD = 20_000
"""Bytes at the beginning of a saved graph in which it says what it is of."""


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
                if usual_execution(targets) == _SCRIPTED:
                    options[name] = _as_run(options[name])
        return command(*args, **options)

    return called


def usual_execution(targets: Iterable[str | None]) -> str:
    """What is priced where no execution is asked for: mixed for a script, or for saved steps."""
    return _SCRIPTED if any(map(_is_of_script, targets)) else _USUAL


def _is_of_script(target: str | None) -> bool:
    if target is None or not looks_saved(target):
        return target is not None and Job(source=target).is_script
    return b'"script":true' in beginning(target, _HEAD)


def _as_run(usual: Any) -> Any:
    if isinstance(usual, str):
        return _SCRIPTED if usual == _USUAL else usual
    return tuple(map(_as_run, usual))
