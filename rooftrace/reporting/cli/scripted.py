"""What commands price the steps of a script as, where nobody says: as `rooftrace run` does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from rooftrace.costmodels.planning import usual_execution

_USUAL = usual_execution()


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
                options[name] = _as_run(options[name], usual_execution(*targets))
        return command(*args, **options)

    return called


def _as_run(default: Any, usual: str) -> Any:
    if isinstance(default, str):
        return usual if default == _USUAL else default
    return tuple(_as_run(each, usual) for each in default)
