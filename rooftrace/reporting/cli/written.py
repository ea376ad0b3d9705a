"""Where the result of a command goes: --format, --out, --plot, --style and --timeline."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from rooftrace._formats import Holds, names
from rooftrace.reporting.cli.options import plot_option, style_option, timeline_option
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import form_of, write_result, write_timeline

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was asked of a result.  form: None is by the ending of `out`, else the terminal."""

    form: str | None = None
    out: str | None = None
    plot: str | None = None
    style: str = "screen"
    timeline: str | None = None

    @property
    def format(self) -> str:
        """The format of the result."""
        return form_of(self.form, self.out)

    def write(
        self,
        result: Any,
        *,
        document: Callable[[], dict[str, Any]] | None = None,
        drawn: str = "drawn",
        of: Any = None,
        **how: Any,
    ) -> bool:
        """Write a result, say what was drawn, and write its timeline; whether it is on a terminal.

        document: what JSON has, where that is not `to_dict`.  of: what the timeline is of; default
        the result.  how: of `rt.save_timeline`.
        """
        shown = write_result(result, self.form, self.out, style=self.style, document=document)
        if shown and self.plot is not None:
            say(f"\n{drawn} to {self.plot}")
        write_timeline(self.timeline, result if of is None else of, quiet=not shown, **how)
        return shown


def results(
    *holds: Holds, plot: str = "", style: bool = False, timeline: str | bool = False
) -> Decorator:
    """A command that writes a result; it is called with `written`.

    holds: what its formats may hold beside a page.  plot, timeline: their help; True: the usual.
    """
    forms = ("terminal", *names("page", *holds))
    options = [
        *([plot_option(plot)] if plot else []),
        *([style_option] if style else []),
        *([timeline_option(timeline)] if timeline else []),
        click.option(
            "--format",
            "form",
            type=click.Choice(forms),
            help="Default: terminal, or by the ending of --out.",
        ),
        click.option(
            "-o",
            "--out",
            type=Output(forms=forms),
            metavar="FILE",
            help="Write there instead of the terminal; - is stdout.",
        ),
    ]

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            taken = {name: values.pop(name) for name in _NAMES if name in values}
            return command(*args, written=Written(**taken), **values)

        made: Callable[..., Any] = called
        for option in reversed(options):
            made = option(made)
        return made

    return decorated


_NAMES = ("form", "out", "plot", "style", "timeline")
