"""Code that commands share: writing of results and timelines, their options, and progress."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

import rooftrace as rt
from rooftrace._escapes import visible
from rooftrace._formats import FORMATS, Holds, names
from rooftrace._progress import WARNING, tell
from rooftrace.reporting.cli.options import plot_option, style_option, timeline_option
from rooftrace.reporting.cli.output import Output, complain, form_by_ending, say

Made = TypeVar("Made")


def write_document(out: str, form: str, text: str) -> None:
    """A text to a file, with the mark by which a later command knows that it may replace it."""
    from rooftrace._writing import write_bytes

    marked = f"{text}{FORMATS[form].mark}"
    write_bytes(Path(out), marked.encode("utf-8", "backslashreplace"))


def write_result(
    result: Any,
    form: str | None,
    out: str | None,
    *,
    table: Callable[[], str] | None = None,
    style: str = "screen",
    document: Callable[[], dict[str, Any]] | None = None,
) -> bool:
    """A result to the terminal, to stdout or to a file; whether it was the terminal.

    form: "terminal" or one of FORMATS; None: as `form_of` says.  table: the text of csv;
    default that of its rows.  style: what tables of tex are as wide as.  document: what json has;
    default that of `to_dict`.
    """
    from rooftrace.reporting.views import shown

    form = form_of(form, out)
    if form == "terminal" and out in (None, "-"):
        console().print(told(lambda: shown(result, "rich")))
        return True
    form = "md" if form == "terminal" else form
    make = table if form == "csv" else None
    text = told(make or (lambda: shown(result, form, style=style, document=document)))
    if out in (None, "-"):
        click.echo(text, nl=False)
    else:
        write_document(str(out), form, text)
    return False


def write_timeline(path: str | None, result: Any, quiet: bool = False, **how: Any) -> None:
    """The timeline of a result, where --timeline names a file.

    quiet: stdout holds a document, in which nothing else may stand.  how: of
    `rt.tools.save_timeline`.
    """
    if path is None:
        return
    with progress():
        rt.tools.save_timeline(result, path, **how)
    if not quiet:
        say(f"\ntimeline written to {path}; open it in ui.perfetto.dev")


def form_of(form: str | None, out: str | None) -> str:
    """The format of a result: what was asked for, else by the ending of its file."""
    if form is not None or out in (None, "-"):
        return form or "terminal"
    return form_by_ending(str(out))


def console() -> Any:
    """Where the terminal view goes: as wide as the terminal, 100 columns in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=100, highlight=False)


@contextlib.contextmanager
def progress(kept: re.Pattern[str] | None = None) -> Iterator[None]:
    """A spinner on stderr that says what the calls inside do, where stderr is a terminal.

    kept: what is said like this stays there as a line of its own, also in a file.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)

    def is_kept(text: str) -> bool:
        return text.startswith(WARNING) or (kept is not None and kept.fullmatch(text) is not None)

    if not console.is_terminal:
        with rt.tools.telling(lambda text: complain(text, who="") if is_kept(text) else None):
            yield
        return

    begin = time.monotonic()

    class Doing:
        """What is being done, with seconds and memory as they are when it is drawn."""

        def __init__(self, text: str) -> None:
            self.text = text

        def __rich__(self) -> Text:
            taken = time.monotonic() - begin
            so_far = f" ({taken:.0f} s{_memory()})" if taken > _SOON else ""
            return Text(visible(self.text) + so_far)  # a plain str would be markup

    def show(text: str) -> None:
        if is_kept(text):
            console.print(Text(visible(text)))
        else:
            status.update(Doing(text))

    with console.status(Doing("starting")) as status, rt.tools.telling(show):
        yield


_SOON = 2.0
"""Seconds that nobody asks about."""


def _memory() -> str:
    """The memory that this process and its children take, where Linux tells it."""
    try:
        tasks = Path("/proc/self/task").iterdir()
        children = " ".join((task / "children").read_text() for task in tasks)
        sizes = (Path("/proc", p, "statm").read_text() for p in ("self", *children.split()))
        pages = sum(int(size.split()[1]) for size in sizes)
    except (OSError, ValueError, IndexError):  # another system, or a child that has just ended
        return ""
    return f", {pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"


def told(make: Callable[[], Made]) -> Made:
    """What is shown of a result.  Numbers that only tables have are made here: it may take long."""
    with progress():
        tell("making the tables")
        return make()


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Progress of a command that ends with what it makes inside: until then, nothing is collected.

    Each collection would go through all that was made, for seconds where that is much.
    """
    from rooftrace.tracer.phases import collector_paused

    atexit.register(gc.unfreeze)  # objects that `keep` set aside are freed at the end too
    click.get_current_context().with_resource(collector_paused(keep=True))
    with progress():
        yield


# -- written ---------------------------------------------------------------------------------------
# Where the result of a command goes: --format, --out, --plot, --style and --timeline.

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
        the result.  how: of `rt.tools.save_timeline`.
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
